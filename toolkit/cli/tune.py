"""`llmctl tune`: search the scheduler's policy and parameters on a trace, with the simulator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli import completion
from toolkit.cli.arguments import (
    FIT_HELP,
    JsonOption,
    RecipeArgument,
    limit_workers,
    open_recipe,
    resolve_fit,
)
from toolkit.cli.output import WIDTH, number, table
from toolkit.cli.plots import PlotPoint, scatter
from toolkit.files.tuning import Outcome, ParameterValue, PolicyResult, Sizing, Tuning, share_used
from toolkit.report.verdict import verdict

if TYPE_CHECKING:
    from toolkit.cli.basis import Fleet
    from toolkit.errors import LimitsBrokenError
    from toolkit.files.fit import Fit
    from toolkit.files.profile import Profile
    from toolkit.files.recipe import Recipe
    from toolkit.files.tuning import Tuning
    from toolkit.tuning.executor import EvaluationStore, Runner
    from toolkit.tuning.search import SearchSettings

AUTO = "auto"
LONGEST_COUNT = 18  # digits; Python refuses to read thousands of them
ESTIMATE_AFTER = 10  # evaluations that are timed for the estimate
WORTH_SAYING_S = 10.0
MAX_JOBS = 1024


def _limit_jobs(jobs: int | None) -> int | None:
    """What --jobs was given. `InputError` for more processes than any machine has cores."""
    from toolkit.errors import InputError

    if jobs is not None and jobs > MAX_JOBS:
        hint = "leave it out for as many as there are cores"
        raise InputError(f"--jobs {jobs}: the limit is {MAX_JOBS:,}, since each is a process", hint)
    return jobs


def _limit_trials(trials: int | None) -> int | None:
    """What --trials was given. `InputError` above what a recipe may ask for."""
    from toolkit.errors import InputError
    from toolkit.files.recipe import MAX_TRIALS

    if trials is not None and trials > MAX_TRIALS:
        raise InputError(
            f"--trials {trials}: the limit is {MAX_TRIALS:,}", "the default is the recipe's"
        )
    return trials


def _limit_draws(draws: int | None) -> int | None:
    """What --draws was given. `InputError` above what a recipe may ask for."""
    from toolkit.errors import InputError
    from toolkit.files.recipe import MAX_DRAWS

    if draws is not None and draws > MAX_DRAWS:
        raise InputError(
            f"--draws {draws}: the limit is {MAX_DRAWS:,}", "the default is the recipe's"
        )
    return draws


PoliciesOption = Annotated[
    str | None,
    typer.Option(
        "--policies",
        metavar="NAME,...",
        autocompletion=completion.policies,
        help="Search these besides the recipe's own; 'all' (default): every one but the oracles; 'own': no other.",
    ),
]
JobsOption = Annotated[
    int | None,
    typer.Option(
        "--jobs", min=1, callback=_limit_jobs, help="Processes that simulate; default: all cores."
    ),
]
WorkersOption = Annotated[
    str | None,
    typer.Option(
        "--workers", metavar="N|auto", help="Workers; 'auto': the fewest that keep all limits."
    ),
]
ExecutorOption = Annotated[
    str,
    typer.Option(
        "--executor", metavar="local|ray", help="Where to simulate: here, or on a Ray cluster."
    ),
]
RayOption = Annotated[
    str,
    typer.Option(
        "--ray",
        metavar="local|auto|HOST:PORT",
        help="With --executor ray: a new cluster, this machine's, or a head.",
    ),
]
StorageOption = Annotated[
    str,
    typer.Option(
        "--storage",
        metavar="URL",
        envvar="LLMCTL_STORAGE",
        show_default=False,
        help="Keep the trials in a database, sqlite:///FILE or postgresql://...; default: a file beside the result.",
    ),
]
DrawsOption = Annotated[
    int | None,
    typer.Option(
        "--draws",
        min=0,
        callback=_limit_draws,
        help="Draws of the fitted laws for the verdict's interval; 0: none.",
    ),
]
WindowOption = Annotated[
    float | None,
    typer.Option("--window", min=0.1, help="Seconds of each window, where the trace allows it."),
]

ForceOption = Annotated[
    bool, typer.Option("--force", help="Tune with a fit that is of another or a changed recipe.")
]


def command(
    recipe: RecipeArgument,
    fit: Annotated[
        Path, typer.Option(callback=resolve_fit, autocompletion=completion.fits, help=FIT_HELP)
    ] = Path("fit.json"),
    trace: Annotated[
        str,
        typer.Option(
            autocompletion=completion.traces,
            help="A trace file, or the name of a shipped trace; default: the recipe's.",
            show_default=False,
        ),
    ] = "",
    out: Annotated[Path, typer.Option(help="Where to write the result.")] = Path("tuning.json"),
    policies: PoliciesOption = None,
    trials: Annotated[
        int | None,
        typer.Option(min=1, callback=_limit_trials, help="Trials; default: the recipe's."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed; default: the recipe's. Same seed, same bytes.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Scale arrivals to this many requests per second.")
    ] = None,
    window: WindowOption = None,
    workers: WorkersOption = None,
    draws: DrawsOption = None,
    jobs: JobsOption = None,
    force: ForceOption = False,
    executor: ExecutorOption = "local",
    ray: RayOption = "auto",
    storage: StorageOption = "",
    as_json: JsonOption = False,
) -> None:
    """Search the scheduler's policy and parameters on windows of a trace, and judge the best on
    other windows.

    What is recommended is the best that the recipe's engine can run; beside it stand the best of
    all policies and what the recipes for other engines would give. Trial 0 is the recipe's own
    policy. What is found is a gain over it on windows that the search never saw, how sure it is, or
    the advice to keep it. An interrupted search goes on where it was; neither --jobs nor --executor
    changes anything but the time. Exit code 5 where what is recommended breaks a limit: the result
    is written and printed all the same.
    """
    from toolkit.cli.basis import note_basis, note_trace, read_fit
    from toolkit.cli.output import emit, note, progress
    from toolkit.files.io import check_writable, head, shipped_siblings, write_file
    from toolkit.traces.read import read_trace
    from toolkit.traces.types import trace_path
    from toolkit.tuning.evaluate import make_workload
    from toolkit.tuning.executor import Remembering
    from toolkit.tuning.tune import Inputs, evaluations, settings_of, tune, tune_to_size

    given = {
        "policies": _names(policies),
        "trials": trials,
        "seed": seed,
        "request_rate_rps": rate,
        "draws": draws,
    }
    given["window_s"] = window
    fleet = _fleet_of(recipe, workers, force)
    if fleet:
        first = fleet.kinds[0]
        spec, fitted, others = (
            first.recipe.model_copy(update={"workers": first.workers}),
            first.fit,
            fleet.others,
        )
    else:
        spec, fitted, others = open_recipe(recipe), read_fit(fit, recipe, force=force), []
    spec = _with_options(spec, given)
    settings = settings_of(spec, fitted, others)
    siblings = [] if others else shipped_siblings(spec)
    count = _count(workers)
    profile = None if others else _profile_of(fitted, fleet.inputs["fit"] if fleet else fit)
    traffic = trace_path(trace or spec.tune.trace)
    workload = make_workload(spec, fitted, read_trace(traffic)[0], others)
    if count:
        _refuse_several_servers(spec, count)
        spec = spec.model_copy(update={"workers": count})
    note_trace(workload.trace)
    check_writable(out)
    made_from = head(
        (fleet.inputs if fleet else {"recipe": recipe, "fit": fit}) | {"trace": traffic}
    )
    digests = "".join(source.sha256 for source in made_from["inputs"].values())
    fingerprint = (
        f"{digests} {profile is not None} {made_from['tool_version']} {spec.model_dump_json()}"
    )
    besides = "".join(sibling.model_dump_json() for sibling in siblings)
    fingerprint += f" {sha256(besides.encode()).hexdigest()}"
    search = tune_to_size if workers == AUTO else tune
    total = evaluations(settings, spec.tune.draws, siblings)
    _note_search(settings, total)
    memory = _memory(storage, Path(f"{out}.partial"), spec.name, fingerprint)
    with _runner(executor, ray, jobs) as (runner, at_once), progress("tuning", total) as advance:
        memo = Remembering(runner, memory)
        watch = TuneProgress(advance, total, memo.remembered, at_once)
        result = search(
            Inputs(spec, fitted, workload, profile, tuple(others), tuple(siblings)),
            memo,
            made_from,
            watch,
        )
    write_file(result, out)
    memory.forget()
    emit(as_json, result, lambda: show(result))
    if fleet:
        fleet.note_bases()
    else:
        note_basis(fitted, fit)
    note(f"wrote {out}")
    if not result.keeps_limits:
        raise _broken(result)


def _broken(result: Tuning) -> LimitsBrokenError:
    """What ends the command where the recommended settings break limits."""
    from toolkit.errors import LimitsBrokenError
    from toolkit.files.tuning import breaks

    which = (
        "the recipe's settings, which nothing beat,"
        if result.keep_defaults
        else "the best settings"
    )
    return LimitsBrokenError(
        f"held out, {which} {breaks(result.limits)}",
        "`render` and `serve` refuse this tuning without --allow-broken-limits",
    )


def _note_search(settings: SearchSettings, total: int) -> None:
    """What is searched, and what it costs; seconds follow when the first simulations are timed."""
    from toolkit.cli.output import note

    count, served = len(settings.spaces), len(settings.served)
    policies = (
        f"{count} policies, {served} of which this engine can run"
        if count > 1
        else "the recipe's own policy"
    )
    hint = "; --policies own searches the recipe's alone" if count > 1 else ""
    note(f"{settings.trials} trials of {policies}; about {total} simulations in all{hint}")
    if settings.trials < count:
        left = ", ".join(space.policy for space in settings.spaces[settings.trials :])
        note(f"warning: with {settings.trials} trials these are not tried: {left}")


def _fleet_of(source: Path, workers: str | None, force: bool) -> Fleet | None:
    """The fleet, where one was given; None for a recipe."""
    from toolkit.cli.basis import open_fleet, refuse_workers
    from toolkit.files.fleet import is_fleet

    if not is_fleet(source):
        return None
    refuse_workers(workers)
    return open_fleet(source, force=force)


@contextmanager
def _runner(executor: str, ray: str, jobs: int | None) -> Iterator[tuple[Runner, int]]:
    """Who simulates until the block ends, and how much at once."""
    from toolkit.errors import InputError, nearest
    from toolkit.tuning.executor import ClusterRunner, InProcessRunner, ProcessPool, cores

    if executor == "local":
        jobs = jobs or cores()
        with ProcessPool(jobs) as crew:
            yield (crew if jobs > 1 else InProcessRunner()), jobs
    elif executor == "ray":
        from toolkit.cli.output import note
        from toolkit.cluster.connect import joined, processors

        with joined(ray, jobs or cores()) as cluster:
            jobs = jobs or processors()
            note(
                f"on the Ray cluster at {cluster.address}: {jobs} processors of {cluster.nodes} machines"
            )
            yield ClusterRunner(jobs), jobs
    else:
        raise InputError(
            f"--executor {executor}: there is none of that name",
            nearest(executor, ("local", "ray")),
        )


def _memory(storage: str, beside: Path, name: str, fingerprint: str) -> EvaluationStore:
    """Where evaluations are kept."""
    import os

    from toolkit.tuning.executor import JournalFile

    if not storage:
        return JournalFile(beside, fingerprint)
    from toolkit.tuning.executor import Studies

    os.environ.pop("LLMCTL_STORAGE", None)  # processes that simulate need no password
    return Studies(storage, name, fingerprint)


class TuneProgress:
    """Moves the progress bar, and says after a few evaluations how long all of them will take."""

    def __init__(
        self, advance: Callable[..., None], total: int, remembered: int, jobs: int
    ) -> None:
        self._advance, self._total, self._remembered, self._jobs = advance, total, remembered, jobs
        self._done = 0
        self._began_s = 0.0

    def __call__(self, best: float) -> None:
        from toolkit.cli.output import note, number, seconds

        self._done += 1
        self._advance(text=f"best {number(best)} good requests/s" if best else "")
        timed = (
            self._done - self._remembered - self._jobs
        )  # the first of each process pays for its start
        if timed == 0:
            self._began_s = time.monotonic()
        elif timed == ESTIMATE_AFTER:
            left_s = (time.monotonic() - self._began_s) / timed * (self._total - self._done)
            if left_s > WORTH_SAYING_S:
                note(
                    f"about {seconds(left_s)} for {self._total - self._done} more simulations, {self._jobs} at a time"
                )


def _with_options(recipe: Recipe, given: Mapping[str, object]) -> Recipe:
    changed = {key: value for key, value in given.items() if value is not None}
    return recipe.model_copy(update={"tune": recipe.tune.model_copy(update=changed)})


def _names(policies: str | None) -> list[str] | None:
    return (
        None if policies is None else [name.strip() for name in policies.split(",") if name.strip()]
    )


def _count(workers: str | None) -> int | None:
    """The number of workers that was asked for; None for the recipe's, and for 'auto'."""
    from toolkit.errors import InputError

    if workers is None or workers == AUTO:
        return None
    if not workers.isdecimal() or len(workers) > LONGEST_COUNT or not int(workers):
        raise InputError(f"--workers {workers}: it is a whole number from 1, or '{AUTO}'")
    return limit_workers(int(workers))


def _refuse_several_servers(recipe: Recipe, count: int) -> None:
    from toolkit.engine_traits import traits_of
    from toolkit.errors import InputError

    if traits_of(recipe.engine.name).server and count > 1:
        raise InputError(
            f"--workers {count}: engine '{recipe.engine.name}' is a server, which is one worker",
            "tune one server for its share of the traffic with --rate; --workers auto says how much one can bear",
        )


def _profile_of(fitted: Fit, path: Path) -> Profile | None:
    """The profile beside the fit, where it is still the one that the fit was made from."""
    from toolkit.errors import InputError
    from toolkit.files.io import digest, read_file
    from toolkit.files.profile import Profile

    made_from = fitted.inputs.get("profile")
    beside = path.parent / made_from.name if made_from else path
    if made_from is None or not beside.exists():
        return None
    try:
        return read_file(Profile, beside) if digest(beside).sha256 == made_from.sha256 else None
    except InputError:
        return None


# A tuning for people: what is best, by how much, how surely, what limits it, and what else was
# tried.

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
)


def show(result: Tuning) -> None:
    """Print a tuning, within 80 columns."""
    before, after = result.defaults_held_out, result.best_held_out
    same = before.policy == after.policy
    if result.sizing:
        _show_sizing(result.sizing)
    if len(result.policies) > 1:
        _show_policies(result)
    at = f"{len(result.trials)} trials at {number(result.request_rate_rps)} requests/s on {result.workers} workers"
    rows = [
        (name, *([_word(before.parameters[name])] if same else []), _word(value))
        for name, value in after.parameters.items()
    ]
    table(
        ["parameter", *(["default"] if same else []), "best"],
        rows,
        title=f"policy '{after.policy}', {at}",
    )
    changes = [
        (
            name,
            before.metrics[name],
            after.metrics[name],
            _change(before.metrics[name], after.metrics[name]),
        )
        for name in METRICS
        if name in before.metrics and name in after.metrics
    ]
    names = ("default", "best") if same else (f"{before.policy}, default", f"{after.policy}, best")
    title = f"predicted on {len(result.held_out_windows)} held-out windows"
    table(["metric", *(f">{name}" for name in names), ">change"], changes, title=title)
    _show_limits(result)
    _show_sensitivity(result)
    _show_chart(result)
    for line in verdict(result):
        print(fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False))


def _show_policies(result: Tuning) -> None:
    from toolkit.sched.policies.servable import footnote, marked

    latency = result.latency_metric
    rows = [
        (
            marked(one.policy, result.engines),
            one.trials,
            one.held_out.metrics.get("goodput_rps", 0.0),
            one.held_out.metrics.get(latency, 0.0),
            one.feasible,
        )
        for one in sorted(result.policies, key=_order)
    ]
    table(
        ["policy", ">trials", ">goodput_rps", f">{latency}", "in limits"],
        rows,
        title=f"each policy's best trial, on {len(result.held_out_windows)} held-out windows",
    )
    said = footnote([one.policy for one in result.policies], result.engines)
    if said:
        print(fill(said, WIDTH, subsequent_indent="  ", break_on_hyphens=False) + "\n")


def _show_limits(result: Tuning) -> None:
    """What is recommended beside every limit. A target counts the requests of all windows together."""
    rows = [(one.name, one.allowed(), one.told(), one.kept) for one in result.limits]
    what = "the recipe's settings" if result.keep_defaults else "the best settings"
    title = f"{what} beside the limits, all held-out requests together"
    table(["limit", ">allowed", ">predicted", "kept"], rows, title=title)


def _show_sizing(sizing: Sizing) -> None:
    rows = [
        (
            one.settings,
            one.workers,
            one.feasible,
            one.goodput_rps,
            f"{one.attainment_percent:.1f} %",
            f"{one.binding} {share_used(one.binding_ratio).removesuffix(' of its limit')}",
        )
        for one in sizing.rows
    ]
    columns = ["settings", ">workers", "fits", ">goodput_rps", ">attained", "what binds"]
    table(columns, rows, title="workers that were tried, on all windows")


def _order(one: PolicyResult) -> tuple[bool, float]:
    return (not one.feasible, -one.held_out.metrics.get("goodput_rps", 0.0))


def _show_sensitivity(result: Tuning) -> None:
    shares = next(
        (one.importance for one in result.policies if one.policy == result.best_held_out.policy), {}
    )
    rows = [
        (
            one.parameter,
            f"{one.swing_percent:.1f} %",
            f"{100 * shares[one.parameter]:.0f} %" if one.parameter in shares else "-",
            f"{_word(one.values[0])} .. {_word(one.values[-1])}",
        )
        for one in result.sensitivity
    ]
    title = "how far goodput moves with one parameter, and its weight among all trials"
    table(["parameter", ">goodput swing", ">importance", "over"], rows, title=title)


def _show_chart(result: Tuning) -> None:
    latency = result.latency_metric
    marks = _marks([one.policy for one in result.policies])
    known = [trial for trial in result.trials if latency in trial.outcome.metrics]
    if len(known) < 2:
        return
    number_of_best = next((t.number for t in known if _same(t.outcome, result.best_held_out)), None)
    points = [_point(trial.outcome, latency, marks) for trial in known]
    on_front = [_point(t.outcome, latency, {}, "o") for t in known if t.number in result.front]
    ends = [
        _point(t.outcome, latency, {}, m)
        for t in known
        for n, m in ((0, "D"), (number_of_best, "B"))
        if t.number == n
    ]
    print("\ngoodput_rps of the trials")
    print("\n".join(scatter([*points, *on_front, *ends], x_name=latency)))
    legend = ", ".join(f"{mark} {policy}" for policy, mark in marks.items())
    print(
        fill(f"{legend}; o on the front of goodput and latency, D defaults, B best", WIDTH) + "\n"
    )


def _marks(policies: list[str]) -> dict[str, str]:
    """A character for each policy: of its name, the first that is free."""
    marks: dict[str, str] = {}
    for policy in policies:
        letters = [c for c in policy if c.isalpha() and c != "o" and c not in marks.values()]
        marks[policy] = letters[0] if letters else "."
    return marks


def _point(outcome: Outcome, latency: str, marks: dict[str, str], mark: str = ".") -> PlotPoint:
    return PlotPoint(
        outcome.metrics[latency], outcome.metrics["goodput_rps"], marks.get(outcome.policy, mark)
    )


def _same(one: Outcome, other: Outcome) -> bool:
    return (one.policy, one.parameters) == (other.policy, other.parameters)


def _word(value: ParameterValue) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else number(value)


def _change(before: float, after: float) -> str:
    return f"{100 * (after / before - 1):+.1f} %" if before else "-"
