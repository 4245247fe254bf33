"""`llmctl tune`: search the scheduler's policy and parameters on a trace, with the simulator.

`TuneOptions` declares the command line. `command` reads the files, searches, and writes and prints
the result. The helpers below it prepare the search (the fleet, the number of workers, the profile,
the processes that simulate, the store of evaluations), show its progress, and print its result.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import typer

from toolkit.cli import arguments
from toolkit.cli.arguments import (
    FIT_HELP,
    JsonOption,
    RecipeArgument,
    command_of,
    limit_workers,
    open_recipe,
    option,
    resolve_fit,
)
from toolkit.cli.basis import Fleet, note_basis, note_trace, open_fleet, read_fit, refuse_workers
from toolkit.cli.output import WIDTH, PlotPoint, emit, note, progress, scatter, table
from toolkit.cli.simulate import sharing_notes
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError, LimitsBrokenError, nearest
from toolkit.units import number, seconds, word

if TYPE_CHECKING:
    from toolkit.files.fit import Fit
    from toolkit.files.io import EnvelopeFields
    from toolkit.files.plan import Kind
    from toolkit.files.profile import Profile
    from toolkit.files.recipe import Recipe
    from toolkit.files.tuning import Outcome, ParameterValue, Sizing, SizingRow, Tuning
    from toolkit.traces.types import Trace
    from toolkit.tuning.executor import EvaluationStore, Runner
    from toolkit.tuning.search import SearchSettings

AUTO = "auto"
MAX_DIGITS = 18  # of --workers; Python refuses to parse thousands of digits
ESTIMATE_AFTER = 16  # evaluations that are timed before the first estimate: two batches
RECENT = 24  # evaluations by which the rest is estimated: three batches
DRIFT = 1.5  # ratio of the remaining time to what was printed last
MIN_ESTIMATE_S = 10.0  # a shorter estimate, or a smaller change of it, is not printed
NOTED_MORE = 20  # simulations of a fleet's counts that are announced
MAX_JOBS = 1024
BROKEN_SHOWN = 4  # counts of a fleet that break a limit, of each settings
METRICS = (
    "goodput_rps",
    "throughput_rps",
    "sla_attainment_percent",
    "sla_attainment_lower_percent",
    "ttft_mean_s",
    "ttft_p99_s",
    "tpot_mean_s",
    "e2e_mean_s",
    "e2e_p95_s",
    "batch_size_mean",
    "oom_percent",
    "evicted_percent",
    "hit_percent",
)


def _limited(param: typer.CallbackParam, value: int | None) -> int | None:
    """The value of --trials, --draws or --jobs. `InputError` above its limit."""
    from toolkit.files.recipe import MAX_DRAWS, MAX_TRIALS

    limit = {"trials": MAX_TRIALS, "draws": MAX_DRAWS, "jobs": MAX_JOBS}[param.name or ""]
    if value is None or value <= limit:
        return value
    why, hint = "", "the default is the recipe's"
    if param.name == "jobs":
        why, hint = ", since each is a process", "leave it out for as many as there are cores"
    raise InputError(f"--{param.name} {value}: the limit is {limit:,}{why}", hint)


_search = partial(option, rich_help_panel="What is searched")
_traffic = partial(option, rich_help_panel="Traffic and workers")
_computing = partial(option, rich_help_panel="Where it is computed")


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The command line of `llmctl tune`."""

    recipe: RecipeArgument
    fit: Path = option(
        Path("fit.json"), callback=resolve_fit, autocompletion=arguments.fits, help=FIT_HELP
    )
    out: Path = option(Path("tuning.json"), help="Write the result to this file.")
    force: bool = option(
        False, "--force", help="Accept a fit of another recipe, or of a recipe that has changed."
    )
    policies: str | None = _search(
        None,
        metavar="NAME,...",
        autocompletion=arguments.policies,
        help="Search these policies and the recipe's. 'all' (default) means all policies "
        "except the oracles, 'own' only the recipe's.",
    )
    routers: str | None = _search(
        None,
        metavar="NAME,...",
        help="Before several replicas of a server, search these routers and the recipe's. "
        "'all' (default) means all, 'own' only the recipe's.",
    )
    trials: int | None = _search(
        None, min=1, callback=_limited, help="Try this number of settings; default: the recipe's."
    )
    seed: int | None = _search(
        None,
        min=0,
        help="Draw from this seed; default: the recipe's. The same seed gives the same bytes.",
    )
    draws: int | None = _search(
        None,
        min=0,
        callback=_limited,
        help="Draw the fitted laws this many times for the interval of the gain; 0: no interval.",
    )
    trace: str = _traffic(
        "",
        autocompletion=arguments.traces,
        help="A trace file, or the name of a shipped trace; default: the recipe's.",
        show_default=False,
    )
    rate: float | None = _traffic(None, help="Scale arrivals to this many requests per second.")
    window: float | None = _traffic(
        None, min=0.1, help="Seconds of each window, if the trace is long enough."
    )
    workers: str | None = _traffic(
        None,
        metavar="N|auto",
        help="The number of workers; 'auto' finds the fewest that keep all limits, in a fleet "
        "of servers the cheapest of each kind.",
    )
    jobs: int | None = _computing(
        None,
        min=1,
        callback=_limited,
        help="Simulate in this many processes; default: as many as there are cores.",
    )
    executor: str = _computing(
        "local",
        metavar="local|ray",
        help="Simulate on this machine (local), or on a Ray cluster (ray).",
    )
    ray: str = _computing(
        "auto",
        metavar="local|auto|HOST:PORT",
        help="The cluster of --executor ray: a new one on this machine (local), the one that "
        "runs on it (auto), or the one of a head node.",
    )
    storage: str = _computing(
        "",
        metavar="URL",
        envvar="LLMCTL_STORAGE",
        show_default=False,
        help="Keep the trials in a database, sqlite:///FILE or postgresql://...; default: a "
        "file beside the result.",
    )
    as_json: JsonOption = False


@command_of(TuneOptions)
def command(given: TuneOptions) -> None:
    """Search the scheduler's policy and parameters on windows of a trace, and judge the best on
    other windows.

    The recommendation is the best that the recipe's engine can run; beside it stand the best of all
    policies, and what the recipes for other engines would give. Trial 0 is the recipe's own policy.
    The verdict is the gain over it on windows that the search did not use, with its certainty, or
    the advice to keep it. The same command resumes an interrupted search; --jobs and --executor
    change only the time. Exit code 5 means that the recommendation breaks a limit; the result is
    written and printed nevertheless.
    """
    from toolkit.files.io import check_writable, head, shipped_siblings, write_file
    from toolkit.files.tuning import breaks
    from toolkit.traces.read import read_trace
    from toolkit.traces.types import trace_path
    from toolkit.tuning.evaluate import make_workload
    from toolkit.tuning.executor import Remembering
    from toolkit.tuning.fleet_size import tune_fleet_to_size
    from toolkit.tuning.tune import Inputs, evaluations, settings_of, tune, tune_to_size

    fleet, spec, fit, others = _open(given)
    traffic = trace_path(given.trace or spec.tune.trace)
    # a load is a share of what the recipe's own number of workers serves
    workload = make_workload(spec, fit, read_trace(traffic)[0], others)
    spec = spec.model_copy(update={"workers": _worker_count(given.workers) or spec.workers})
    settings = settings_of(spec, fit, others)
    siblings = [] if others else shipped_siblings(spec)
    profile = None if others else _profile_of(fit, fleet.inputs["fit"] if fleet else given.fit)
    note_trace(workload.windows.trace)
    check_writable(given.out)
    files = fleet.inputs if fleet else {"recipe": given.recipe, "fit": given.fit}
    made_from = head(files | {"trace": traffic})
    total = evaluations(settings, spec.tune.draws, siblings)
    _note_search(settings, total, workload.windows.trace, spec.name, others)
    store = _store(given, made_from, spec, siblings, with_profile=profile is not None)
    with _runner(given) as (runner, jobs), progress("tuning", total) as advance:
        remembering = Remembering(runner, store)
        if remembering.remembered:
            note(f"{remembering.remembered:,} of them are kept from an earlier run")
        watch = TuneProgress(advance, total, remembering.remembered, jobs)
        search: Callable[..., Tuning] = tune_to_size if given.workers == AUTO else tune
        if given.workers == AUTO and fleet:
            search = partial(tune_fleet_to_size, ranges=fleet.ranges, expect=watch.expect)
        inputs = Inputs(spec, fit, workload, profile, tuple(others), tuple(siblings))
        result = search(inputs, remembering, made_from, watch)
    write_file(result, given.out)
    store.forget()
    emit(given.as_json, result, lambda: show(result))
    if fleet:
        fleet.note_bases(result)
    else:
        note_basis(fit, given.fit)
    note(f"wrote {given.out}")
    if not result.keeps_limits:
        unbeaten = "the recipe's settings, which nothing beat,"
        which = unbeaten if result.keep_defaults else "the best settings"
        hint = "`render` and `serve` refuse this tuning without --allow-broken-limits"
        raise LimitsBrokenError(f"held out, {which} {breaks(result.limits)}", hint)


def _open(given: TuneOptions) -> tuple[Fleet | None, Recipe, Fit, list[Kind]]:
    """The recipe that is tuned, with the settings of the command line, and its fit; of a fleet,
    also itself and its kinds after the first. The settings of a fleet's search are the first's.
    """
    from toolkit.files.fleet import is_fleet

    fleet: Fleet | None = None
    others: list[Kind] = []
    if is_fleet(given.recipe):
        if given.workers != AUTO:
            refuse_workers(given.workers)
        fleet = open_fleet(given.recipe, force=given.force)
        first, others = fleet.kinds[0], fleet.others
        if not traits_of(first.recipe.engine.name).server:
            refuse_workers(given.workers)
        recipe, fit = first.recipe.model_copy(update={"workers": first.workers}), first.fit
    else:
        recipe = open_recipe(given.recipe)
        fit = read_fit(given.fit, given.recipe, force=given.force)
    settings = {
        "policies": _names(given.policies),
        "routers": _names(given.routers),
        "trials": given.trials,
        "seed": given.seed,
        "request_rate_rps": given.rate,
        "draws": given.draws,
        "window_s": given.window,
    }
    changed = {key: value for key, value in settings.items() if value is not None}
    tune = recipe.tune.model_copy(update=changed)
    return fleet, recipe.model_copy(update={"tune": tune}), fit, others


def _names(listed: str | None) -> list[str] | None:
    """The names of a list with commas."""
    return None if listed is None else [n.strip() for n in listed.split(",") if n.strip()]


def _worker_count(workers: str | None) -> int | None:
    """The number of --workers; None for the recipe's, and for 'auto'."""
    if workers is None or workers == AUTO:
        return None
    if not workers.isdecimal() or len(workers) > MAX_DIGITS or not int(workers):
        raise InputError(f"--workers {workers}: it is a whole number from 1, or '{AUTO}'")
    return limit_workers(int(workers))


def _profile_of(fit: Fit, path: Path) -> Profile | None:
    """The profile beside the fit, if it is still the one that the fit was made from."""
    from toolkit.files.io import digest, read_file
    from toolkit.files.profile import Profile

    made_from = fit.inputs.get("profile")
    beside = path.parent / made_from.name if made_from else path
    if made_from is None or not beside.exists():
        return None
    try:
        return read_file(Profile, beside) if digest(beside).sha256 == made_from.sha256 else None
    except InputError:
        return None


def _note_search(
    settings: SearchSettings, total: int, trace: Trace, recipe: str, others: Sequence[Kind]
) -> None:
    """Print what is searched and how many simulations it takes; `TuneProgress` adds the seconds."""
    count, served = len(settings.spaces), len(settings.served)
    kind, routed = "policies", settings.spaces[0].router is not None
    policies = "the recipe's own policy"
    if routed:
        kind = "routers"
        policies += f" behind {count} router{'s' * (count > 1)}"
    elif count > 1:
        policies = f"{count} policies, {served} of which this engine can run"
    hint = f"; --{kind} own searches the recipe's alone" if count > 1 else ""
    note(f"{settings.trials} trials of {policies}; about {total} simulations in all{hint}")
    if settings.trials < count:
        left = ", ".join(space.key for space in settings.spaces[settings.trials :])
        note(f"warning: with {settings.trials} trials these are not tried: {left}")
    for line in sharing_notes(trace, [space.policy for space in settings.spaces]):
        note(line)
    if others and routed:
        kinds = ", ".join(kind.recipe.name for kind in others)
        note(f"flags are searched for {recipe} and, each its own, for {kinds}")


@contextmanager
def _runner(given: TuneOptions) -> Iterator[tuple[Runner, int]]:
    """The runner of simulations until the block ends, and how many it runs at once."""
    from toolkit.files.io import usable_cpus
    from toolkit.tuning.executor import ClusterRunner, InProcessRunner, ProcessPool

    if given.executor == "local":
        jobs = given.jobs or usable_cpus()
        with ProcessPool(jobs) as pool:
            yield (pool if jobs > 1 else InProcessRunner()), jobs
    elif given.executor == "ray":
        from toolkit.cluster.connect import joined, processors

        with joined(given.ray, given.jobs or usable_cpus()) as cluster:
            jobs = given.jobs or processors()
            machines = f"{jobs} processors of {cluster.nodes} machines"
            note(f"on the Ray cluster at {cluster.address}: {machines}")
            yield ClusterRunner(jobs), jobs
    else:
        raise InputError(
            f"--executor {given.executor}: no executor has that name",
            nearest(given.executor, ("local", "ray")),
        )


def _store(
    given: TuneOptions,
    made_from: EnvelopeFields,
    spec: Recipe,
    siblings: Sequence[Kind],
    *,
    with_profile: bool,
) -> EvaluationStore:
    """The store of evaluations: a database, or a file beside the result. It forgets those that
    depended on other files, recipes, or another version.
    """
    from toolkit.tuning.executor import JournalFile

    digests = "".join(source.sha256 for source in made_from["inputs"].values())
    others = sha256("".join(one.model_dump_json() for one in siblings).encode()).hexdigest()
    version = made_from["tool_version"]
    fingerprint = f"{digests} {with_profile} {version} {spec.model_dump_json()} {others}"
    if not given.storage:
        return JournalFile(Path(f"{given.out}.partial"), fingerprint)
    from toolkit.tuning.studies import Studies

    os.environ.pop("LLMCTL_STORAGE", None)  # processes that simulate need no password
    return Studies(given.storage, spec.name, fingerprint)


class TuneProgress:
    """Moves the progress bar, and prints the remaining time at the rate of the last evaluations.

    Evaluations differ in cost: overloaded settings take longer, and each part of a tuning simulates
    others. So the time is printed again when it differs by `DRIFT` from what was printed.

    Args:
        total: about how many evaluations there are.
        remembered: how many of them are kept from an earlier run, and come at once.
        jobs: processes; the first evaluation of each includes its start, and is not timed.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        advance: Callable[..., None],
        total: int,
        remembered: int,
        jobs: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._advance, self._total, self._jobs, self._clock = advance, total, jobs, clock
        self._untimed = remembered + jobs - 1
        self._done = 0
        self._recent_s: deque[float] = deque(maxlen=RECENT + 1)  # when the last ones were done
        self._end_s: float | None = None  # as it was printed last

    def __call__(self, best: float) -> None:
        self._done += 1
        self._advance(text=f"best {number(best)} good requests/s" if best else "")
        if self._done <= self._untimed:
            return
        now_s, recent_s = self._clock(), self._recent_s
        recent_s.append(now_s)
        timed, left = len(recent_s) - 1, self._total - self._done
        if timed < ESTIMATE_AFTER:
            return
        left_s = (now_s - recent_s[0]) / timed * left
        what = f"for {left} more simulations, {self._jobs} at a time"
        if self._end_s is None and left_s > MIN_ESTIMATE_S:
            note(f"about {seconds(left_s)} {what}")
            self._end_s = now_s + left_s
        elif self._end_s is not None and timed == RECENT:
            said_s = max(self._end_s - now_s, 0.0)
            less_s, more_s = sorted((said_s, left_s))
            if more_s >= DRIFT * less_s and more_s - less_s > MIN_ESTIMATE_S:
                taken = "longer" if left_s > said_s else "less"
                note(f"now about {seconds(left_s)} {what}: the last {timed} took {taken}")
                self._end_s = now_s + left_s

    def expect(self, more: int) -> None:
        """There are at most so many more simulations than was said; fewer where it is negative.
        Many are announced, with a new estimate.
        """
        self._total += more
        self._advance(0, total=self._total)
        if more >= NOTED_MORE:
            note(f"at most {more:,} more simulations of cheaper counts")
            self._end_s = None


def show(result: Tuning) -> None:
    """Print a tuning, within 80 columns: its recommendation, its gain and certainty, the limits,
    and the trials.
    """
    from toolkit.report.verdict import verdict

    before, after = result.defaults_held_out, result.best_held_out
    same = before.key == after.key
    if result.sizing:
        _show_sizing(result.sizing)
    if len(result.policies) > 1:
        _show_policies(result)
    rate = f"{number(result.request_rate_rps)} requests/s on {result.workers} workers"
    first, best = _settings(before), _settings(after)
    rows = [
        (name, *([word(first[name])] if same else []), word(value)) for name, value in best.items()
    ]
    title = f"policy '{after.policy}', {len(result.trials)} trials at {rate}"
    table(["parameter", *(["default"] if same else []), "best"], rows, title=title)
    changes = []
    for name in METRICS:
        if name in before.metrics and name in after.metrics:
            old, new = before.metrics[name], after.metrics[name]
            changes.append((name, old, new, f"{100 * (new / old - 1):+.1f} %" if old else "-"))
    short = [outcome.policy for outcome in (before, after)]
    if before.replica_router and after.replica_router:
        short = [before.replica_router.name, after.replica_router.name]
    names = ("default", "best") if same else (f"{short[0]}, default", f"{short[1]}, best")
    title = f"predicted on {len(result.held_out_windows)} held-out windows"
    table(["metric", *(f">{name}" for name in names), ">change"], changes, title=title)
    # a target covers all windows' requests together
    limits = [(one.name, one.allowed(), one.prediction(), one.kept) for one in result.limits]
    what = "the recipe's settings" if result.keep_defaults else "the best settings"
    title = f"{what} beside the limits, all held-out requests together"
    table(["limit", ">allowed", ">predicted", "kept"], limits, title=title)
    of_best = [one.importance for one in result.policies if one.held_out.key == after.key]
    shares = of_best[0] if of_best else {}
    swings: list[tuple[object, ...]] = []
    for swept in result.sensitivity:
        share = f"{100 * shares[swept.parameter]:.0f} %" if swept.parameter in shares else "-"
        over = f"{word(swept.values[0])} .. {word(swept.values[-1])}"
        swings.append((swept.parameter, f"{swept.swing_percent:.1f} %", share, over))
    title = "how far goodput moves with one parameter, and its weight among all trials"
    table(["parameter", ">goodput swing", ">importance", "over"], swings, title=title)
    _show_chart(result)
    for line in verdict(result):
        print(fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False))


def _settings(outcome: Outcome) -> dict[str, ParameterValue]:
    """The policy's parameters, those of further kinds, then the router and its parameters."""
    router, found = outcome.replica_router, outcome.every_parameter
    if router is None:
        return found
    knobs = {f"{router.name}.{name}": value for name, value in router.parameters.items()}
    return {**found, "replica_router": router.name, **knobs}


def _show_policies(result: Tuning) -> None:
    from toolkit.sched.policies import footnote, marked

    latency = result.latency_metric
    what = "router" if result.best_held_out.replica_router else "policy"
    rows: list[tuple[str, int, float, float, bool]] = []
    for one in result.policies:
        router, metrics = one.held_out.replica_router, one.held_out.metrics
        name = router.name if router else marked(one.policy, result.engines)
        goodput_rps, latency_s = metrics.get("goodput_rps", 0.0), metrics.get(latency, 0.0)
        rows.append((name, one.trials, goodput_rps, latency_s, one.feasible))
    rows.sort(key=lambda row: (not row[4], -row[2]))
    title = f"each {what}'s best trial, on {len(result.held_out_windows)} held-out windows"
    table([what, ">trials", ">goodput_rps", f">{latency}", "in limits"], rows, title=title)
    remark = footnote([one.policy for one in result.policies], result.engines)
    if remark:
        print(fill(remark, WIDTH, subsequent_indent="  ", break_on_hyphens=False) + "\n")


def _show_sizing(sizing: Sizing) -> None:
    """The counts of workers that were tried; of a fleet's, all that keep the limits, and of each
    settings the last ones that break them.
    """
    from toolkit.files.tuning import share_used

    shown: list[SizingRow] = []
    broken: Counter[str] = Counter()
    for one in reversed(sizing.rows):
        broken[one.settings] += not one.feasible
        if not sizing.kinds or one.feasible or broken[one.settings] <= BROKEN_SHOWN:
            shown.insert(0, one)
    rows: list[list[object]] = []
    for one in shown:
        counts = " + ".join(map(str, one.counts)) or one.workers
        rows.append([one.settings, counts, one.feasible])
        rows[-1] += [] if sizing.kinds else [one.goodput_rps]
        used = share_used(one.binding_ratio).removesuffix(" of its limit")
        rows[-1] += [f"{one.attainment_percent:.1f} %", f"{one.binding} {used}"]
    columns = ["settings", ">workers", "fits", ">goodput_rps", ">attained", "what binds"]
    title = "numbers of workers that were tried, on all windows"
    if sizing.kinds:
        columns[1:4] = [">servers", "fits"]
        title = f"{' + '.join(kind.recipe for kind in sizing.kinds)}, on all windows"
    table(columns, rows, title=title)
    if len(shown) < len(sizing.rows):
        print(f"{len(shown)} of {len(sizing.rows)} tried counts; the file has all\n")


def _show_chart(result: Tuning) -> None:
    latency = result.latency_metric
    known = [t for t in result.trials if latency in t.outcome.metrics and t.whole]
    if len(known) < 2:
        return
    marks: dict[str, str] = {}  # of each policy, the first letter that no other has
    for name in [_short(one.held_out) for one in result.policies]:
        letters = [c for c in name if c.isalpha() and c != "o" and c not in marks.values()]
        marks[name] = letters[0] if letters else "."
    best = next((t for t in known if t.outcome.same_settings(result.best_held_out)), None)
    points = [_point(trial.outcome, latency, marks) for trial in known]
    points += [_point(t.outcome, latency, {}, "o") for t in known if t.number in result.front]
    for t in known:
        points += [_point(t.outcome, latency, {}, "D")] if t.number == 0 else []
        points += [_point(t.outcome, latency, {}, "B")] if t is best else []
    print("\ngoodput_rps of the trials")
    print("\n".join(scatter(points, x_name=latency)))
    legend = ", ".join(f"{mark} {policy}" for policy, mark in marks.items())
    text = f"{legend}; o on the front of goodput and latency, D defaults, B best"
    print(fill(text, WIDTH) + "\n")


def _point(outcome: Outcome, latency: str, marks: dict[str, str], mark: str = ".") -> PlotPoint:
    return PlotPoint(
        outcome.metrics[latency], outcome.metrics["goodput_rps"], marks.get(_short(outcome), mark)
    )


def _short(outcome: Outcome) -> str:
    """What differs between the searched spaces: the router, or else the policy."""
    return outcome.replica_router.name if outcome.replica_router else outcome.policy
