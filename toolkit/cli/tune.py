"""`llmctl tune`: search the scheduler's policy and parameters on a trace, with the simulator."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import typer

from toolkit.cli import arguments
from toolkit.cli.arguments import (
    FIT,
    FIT_HELP,
    ApiKeyOption,
    JsonOption,
    RecipeArgument,
    as_typed,
    command_of,
    keep_inputs,
    limit_workers,
    open_recipe,
    option,
    refuse_useless,
)
from toolkit.cli.basis import (
    FIT_USUAL,
    Fleet,
    FoundFit,
    computed_fit,
    find_fit,
    is_computed,
    note_found,
    note_trace,
    open_fleet,
    parallel_size,
    refuse_workers,
)
from toolkit.cli.installed import (
    INSTALLED,
    confirm,
    python_of,
    refuse_other_schedulers,
)
from toolkit.cli.output import WIDTH, PlotPoint, emit, note, progress, scatter, table
from toolkit.cli.simulate import sharing_notes
from toolkit.cli.traffic import LengthOptions, Traffic, read_lengths
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError, LimitsBrokenError, nearest
from toolkit.files.fit import Fit
from toolkit.files.fleet import is_fleet
from toolkit.files.io import (
    EnvelopeFields,
    check_writable,
    digest,
    head,
    read_file,
    shipped_siblings,
    usable_cpus,
    write_file,
)
from toolkit.files.plan import Kind
from toolkit.files.profile import Profile
from toolkit.files.recipe import MAX_DRAWS, MAX_TRIALS, MAX_WORKERS, Recipe
from toolkit.files.tuning import (
    Outcome,
    ParameterValue,
    Sizing,
    SizingRow,
    Tuning,
    breaks,
    share_used,
)
from toolkit.tuning.parallel import ONE_SIZE, SIZES, Arrangement, compared, on_gpus
from toolkit.units import number, seconds, word

if TYPE_CHECKING:
    from toolkit.traces.types import Trace
    from toolkit.tuning.executor import EvaluationStore, Runner
    from toolkit.tuning.search import SearchSettings
    from toolkit.tuning.tune import Inputs
    from toolkit.tuning.workload import Workload

AUTO = "auto"
BY_NUMBERS = 2000  # requests, where lengths are given by numbers
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
    limit = {"trials": MAX_TRIALS, "draws": MAX_DRAWS, "jobs": MAX_JOBS}[param.name or ""]
    if value is None or value <= limit:
        return value
    why = ""
    hint = "the default is the recipe's"
    if param.name == "jobs":
        why = ", since each is a process"
        hint = "leave it out for as many as there are cores"
    raise InputError(f"--{param.name} {value}: the limit is {limit:,}{why}", hint)


_search = partial(option, rich_help_panel="What is searched")
_traffic = partial(option, rich_help_panel="Traffic and workers")
_computing = partial(option, rich_help_panel="Where it is computed")
_running = partial(option, rich_help_panel="On a running server")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions(LengthOptions):
    """The command line of `llmctl tune`."""

    recipe: RecipeArgument
    fit: Path | None = option(None, f"{FIT_HELP} {FIT_USUAL}", **FIT)
    out: Path = option(Path("tuning.json"), "Write the result to this file.")
    force: bool = option(False, "Accept a fit of another recipe, or of a recipe that has changed.")
    policies: str | None = _search(
        None,
        "Search these policies and the recipe's. 'all' (default) means all policies except the "
        "oracles, 'own' only the recipe's.",
        metavar="NAME,...",
        autocompletion=arguments.policies,
    )
    routers: str | None = _search(
        None,
        "Before several replicas of a server, search these routers and the recipe's. 'all' "
        "(default) means all, 'own' only the recipe's.",
        metavar="NAME,...",
    )
    trials: int | None = _search(
        None, "Try this number of settings; default: the recipe's.", min=1, callback=_limited
    )
    seed: int | None = _search(
        None,
        "Draw from this seed; default: the recipe's. The same seed gives the same bytes.",
        min=0,
    )
    draws: int | None = _search(
        None,
        "Draw the fitted laws this many times for the interval of the gain; 0: no interval.",
        min=0,
        callback=_limited,
    )
    rate: float | None = _traffic(
        None, "Scale arrivals to this many requests per second; default: the trace's own rate."
    )
    load: float | None = _traffic(
        None,
        "Instead of a rate: this multiple of the highest rate at which the recipe's settings keep "
        "all limits.",
        min=0.01,
        max=100.0,
    )
    concurrency: int | None = _traffic(
        None,
        "Instead of a rate: so many requests at once; the next one starts when any one ends.",
        min=1,
    )
    window: float | None = _traffic(
        None, "Seconds of each window, if the trace is long enough.", min=0.1
    )
    workers: str | None = _traffic(
        None,
        "The number of workers; 'auto' finds the fewest that keep all limits, in a fleet of "
        "servers the cheapest of each kind.",
        metavar="N|auto",
    )
    gpus: int | None = _traffic(
        None,
        "Divide so many GPUs: compare workers of 1, 2, 4 and 8 GPUs each, or of --tp.",
        min=1,
        max=MAX_WORKERS,
    )
    tp: str | None = _traffic(
        None,
        "Compare workers of so many GPUs each, such as 1,2,4, on the same GPUs; laws are computed "
        "for each. Default: the recipe's tune.tensor_parallel_sizes.",
        metavar="N,...",
    )
    jobs: int | None = _computing(
        None,
        "Simulate in this many processes; default: as many as there are cores.",
        min=1,
        callback=_limited,
    )
    executor: str = _computing(
        "local", "Simulate on this machine (local), or on a Ray cluster (ray).", metavar="local|ray"
    )
    ray: str = _computing(
        "auto",
        "The cluster of --executor ray: a new one on this machine (local), the one that runs on "
        "it (auto), or the one of a head node.",
        metavar="local|auto|HOST:PORT",
    )
    confirm: str | None = _computing(
        None,
        "Simulate the best five settings once more by the installed vLLM's own scheduler "
        "(installed), and say whether it finds the same.",
        metavar="installed",
    )
    vllm_python: str | None = _computing(
        None,
        "The Python of the environment with that vLLM; default: the recipe's, or the one that "
        "vllm-check takes.",
        metavar="FILE",
    )
    storage: str = _computing(
        "",
        "Keep the trials in a database, sqlite:///FILE or postgresql://...; default: a file "
        "beside the result.",
        metavar="URL",
        envvar="LLMCTL_STORAGE",
    )
    live: str | None = _running(
        None,
        "Instead of a simulation alone: try settings on this running server, which `llmctl serve "
        "--live` started with the plan that is named in the place of the recipe. 'here' is the "
        "one on this machine.",
        metavar="URL",
    )
    minutes: float = _running(10.0, "Measure for so long.", min=0.1)
    server_passes: Path | None = _running(
        None,
        "The server's --pass-log, on this machine: the law is fitted again from its passes.",
    )
    plan_out: Path = _running(
        Path("live-plan.json"), "Write the plan that starts with the best settings to this file."
    )
    control_key: str = _running(
        "",
        "The key of its control; default: that of the server's record on this machine.",
        envvar=arguments.CONTROL_KEY_VARIABLE,
    )
    api_key: ApiKeyOption = ""
    as_json: JsonOption = False


@command_of(TuneOptions)
def command(args: TuneOptions) -> None:
    """Search the scheduler's policy and parameters on windows of a trace, and judge the best on
    the whole trace.

    The trace is taken at its own rate, or at --rate or --load. The recommendation is the best that
    the recipe's engine can run; beside it stand the best of all policies, and what the recipes for
    other engines would give. Trial 0 is the recipe's own policy. The verdict is the gain over it,
    with its certainty, or the advice to keep it. The same command resumes an interrupted search;
    --jobs and --executor change only the time. Exit code 5 means that the recommendation breaks a
    limit; the result is written and printed nevertheless.

    With --live the settings are tried on a running server, in short bursts of the trace, without a
    restart. It ends with the best ones if their gain is sure, else, and after Ctrl-C, with those of
    before. The same command goes on from its journal.
    """
    if args.live is not None:
        from toolkit.cli.tune_live import tune_live

        tune_live(args)
        return
    from toolkit.tuning.tune import settings_of
    from toolkit.tuning.workload import make_workload

    refuse_other_schedulers("--confirm", args.confirm, (INSTALLED,), args.vllm_python)
    opened = _open(args)
    keep_inputs({**opened.inputs, "out": args.out})  # also a fit that was found here
    recipe = opened.recipe
    trace, file = read_lengths(
        args, usual=recipe.tune.trace, seed=recipe.tune.seed, requests=BY_NUMBERS
    )
    machines, refused = _machines(args, opened)
    if file is None:
        Traffic(trace).refuse_longer(opened.fit.engine.max_model_len)
    # a load is a share of what the recipe's own number of workers serves
    workload = make_workload(recipe, opened.fit, trace, opened.others, is_exact=file is None)
    for machine in machines:
        settings_of(machine.recipe, machine.fit, opened.others)  # refuses what cannot be searched
    note_trace(workload.windows.trace)
    check_writable(args.out)
    made_from = head(opened.inputs | ({"trace": file} if file else {}))
    searches = Searches(args, opened, machines, workload, made_from, "" if file else trace.source)
    result = searches.run(refused)
    if args.confirm == INSTALLED:
        inputs = searches.inputs_of(result)
        result = confirm(result, inputs, python_of(args.vllm_python, inputs.recipe))
    write_file(result, args.out)
    searches.forget()
    emit(args.as_json, result, lambda: show(result))
    if opened.fleet:
        opened.fleet.note_bases(result)
    else:
        note_found([FoundFit(machine.fit, opened.file) for machine in machines])
    note(f"wrote {args.out}")
    if result.keeps_limits:
        given = f" --fit {as_typed(opened.file)}" if opened.file else ""
        note(f"next: llmctl render {as_typed(args.recipe)}{given} --tuning {args.out}")
    else:
        unbeaten = "the recipe's settings, which nothing beat,"
        which = unbeaten if result.keep_defaults else "the best settings"
        hint = "`render` and `serve` refuse this tuning without --allow-broken-limits"
        raise LimitsBrokenError(f"{which} {breaks(result.limits)}", hint)


@dataclass(frozen=True, slots=True)
class Opened:
    """What is tuned.

    Attributes:
        recipe: with the settings of the command line; of a fleet, the first kind's.
        others: a fleet's further kinds.
        file: of the fit; None: of a fleet, or computed.
        inputs: role to file.
    """

    fleet: Fleet | None
    recipe: Recipe
    fit: Fit
    others: list[Kind]
    file: Path | None
    inputs: dict[str, Path]


def _open(args: TuneOptions) -> Opened:
    """Read and check what is tuned. A fleet is searched with its first recipe's settings."""
    if is_fleet(args.recipe):
        refuse_useless({"--fit": args.fit}, "a fleet names its fits itself")
        refuse_useless({"--gpus": args.gpus, "--tp": args.tp}, "a fleet's recipes say that")
        if args.workers != AUTO:
            refuse_workers(args.workers)
        fleet = open_fleet(args.recipe, force=args.force)
        first = fleet.kinds[0]
        if not traits_of(first.recipe.engine.name).server:
            refuse_workers(args.workers)
        recipe = _with_settings(first.recipe.model_copy(update={"workers": first.workers}), args)
        return Opened(fleet, recipe, first.fit, fleet.kinds[1:], None, fleet.inputs)
    recipe = _with_settings(open_recipe(args.recipe), args)
    found = find_fit(args.recipe, recipe, args.fit, force=args.force)
    file = found.file
    if _sizes(args, recipe) and _is_computed(recipe, found.fit):
        file = None  # laws are computed for each size
    inputs = {"recipe": args.recipe} | ({"fit": file} if file else {})
    return Opened(None, recipe, found.fit, [], file, inputs)


def _with_settings(recipe: Recipe, args: TuneOptions) -> Recipe:
    """The recipe with the search of the command line. `InputError` for contradictions."""
    settings: dict[str, object] = {
        "policies": _names(args.policies),
        "routers": _names(args.routers),
        "trials": args.trials,
        "seed": args.seed,
        "request_rate_rps": args.rate,
        "load": args.load,
        "concurrency": args.concurrency,
        "draws": args.draws,
        "window_s": args.window,
    }
    changed = {key: value for key, value in settings.items() if value is not None}
    if args.load is not None:
        refuse_useless({"--rate": args.rate}, "--load gives the rate")
        changed["request_rate_rps"] = None
    if args.concurrency is not None:
        why = "--concurrency starts a request when another ends"
        refuse_useless({"--rate": args.rate, "--load": args.load}, why)
        changed |= {"request_rate_rps": None, "load": None}
    by_numbers = args.prompt is not None or args.output is not None
    loads = (args.rate, args.load, args.concurrency)
    if by_numbers and all(load is None for load in loads):
        raise InputError(
            "--prompt and --output do not say when requests come",
            "add --rate REQUESTS_PER_S, --load SHARE or --concurrency REQUESTS",
        )
    tune = recipe.tune.model_copy(update=changed)
    return recipe.model_copy(update={"tune": tune})


def _sizes(args: TuneOptions, recipe: Recipe) -> list[int]:
    """The tensor parallelisms that are to be compared; empty: the recipe's is taken."""
    if args.tp is not None:
        return [parallel_size(word) for word in _names(args.tp) or [""]]
    if recipe.tune.tensor_parallel_sizes:
        return recipe.tune.tensor_parallel_sizes
    return [] if args.gpus is None else [size for size in SIZES if args.gpus % size == 0]


def _is_computed(recipe: Recipe, fit: Fit) -> bool:
    """Whether the laws of other tensor parallelisms can be computed beside this fit."""
    return bool(fit.engine.analytic) and is_computed(recipe)


def _machines(args: TuneOptions, opened: Opened) -> tuple[list[Arrangement], dict[int, str]]:
    """The machines to compare, and why other tensor parallelisms are not among them.

    Without a wish there is one, with the recipe's. A size that is named and cannot be raises
    `InputError`; one of --gpus alone is left out.
    """
    recipe = opened.recipe
    own = recipe.engine.tensor_parallel_size
    workers = _worker_count(args.workers)
    sizes = _sizes(args, recipe)
    if not sizes:
        recipe = recipe.model_copy(update={"workers": workers or recipe.workers})
        siblings = () if opened.others else tuple(shipped_siblings(recipe))
        return [Arrangement(recipe, opened.fit, siblings)], {}
    if args.workers is not None:
        refuse_useless({"--gpus": args.gpus}, "--workers says how many workers there are")
    gpus = args.gpus or max((workers or recipe.workers) * own, *sizes)
    refused = {}
    if not _is_computed(recipe, opened.fit):
        if own not in sizes:
            raise InputError(
                f"tensor parallelism {sizes[0]}: the laws are of {own}; {ONE_SIZE}",
                f"profile a recipe with engine.tensor_parallel_size: {sizes[0]}, and tune that",
            )
        refused = dict.fromkeys((size for size in sizes if size != own), ONE_SIZE)
        sizes = [own]
    machines = []
    for size in dict.fromkeys(sizes):
        try:
            sized = on_gpus(recipe, size, size if args.workers == AUTO else gpus)
            fit = opened.fit
            if opened.file is None:
                fit = computed_fit(args.recipe, sized)
            machines.append(Arrangement(sized, fit, tuple(shipped_siblings(sized))))
        except InputError as error:
            if args.tp is not None or recipe.tune.tensor_parallel_sizes or sizes == [own]:
                raise
            refused[size] = error.message
    if not machines:
        raise InputError(f"no tensor parallelism is possible: {next(iter(refused.values()))}")
    for size, why in refused.items():
        note(f"tensor parallelism {size} is not searched: {why}")
    return machines, refused


@dataclass(slots=True)
class Searches:
    """The searches of all machines, each with a store of its own.

    `traffic`: what the requests are, where no file has them.
    """

    args: TuneOptions
    opened: Opened
    machines: list[Arrangement]
    workload: Workload
    made_from: EnvelopeFields
    traffic: str
    stores: list[EvaluationStore] = field(default_factory=list)

    def run(self, refused: dict[int, str]) -> Tuning:
        """The result; of several machines the best, with a row for each.

        `refused`: why sizes are not among the machines. Raises `LimitsBrokenError` where the
        fewest workers are sought, and no machine has an answer.
        """
        from toolkit.tuning.executor import Remembering

        searches = [self._inputs(machine) for machine in self.machines]
        totals = [self._noted(inputs) for inputs in searches]
        self.stores = [self._store(inputs) for inputs in searches]
        tunings: list[Tuning] = []
        able: list[Arrangement] = []
        failed: LimitsBrokenError | None = None
        with _runner(self.args) as (runner, jobs), progress("tuning", sum(totals)) as advance:
            rememberings = [Remembering(runner, store) for store in self.stores]
            remembered = sum(one.remembered for one in rememberings)
            if remembered:
                note(f"{remembered:,} of them are kept from an earlier run")
            watch = TuneProgress(advance, sum(totals), remembered, jobs)
            search = self._search(watch)
            for machine, inputs, remembering in zip(
                self.machines, searches, rememberings, strict=True
            ):
                try:
                    tunings.append(search(inputs, remembering, self.made_from, watch))
                    able.append(machine)
                except LimitsBrokenError as error:
                    refused = {**refused, machine.size: error.message}
                    failed = error
        if failed and not tunings:
            raise failed
        return compared(able, tunings, refused) if len(self.machines) > 1 or refused else tunings[0]

    def inputs_of(self, result: Tuning) -> Inputs:
        """What the search of the chosen machine started from, with its number of workers."""
        size = result.tensor_parallel_size
        [inputs, *_] = [self._inputs(one) for one in self.machines if size in (None, one.size)]
        if inputs.others or inputs.recipe.workers == result.workers:
            return inputs
        recipe = inputs.recipe.model_copy(update={"workers": result.workers})
        return replace(inputs, recipe=recipe)

    def forget(self) -> None:
        """Drop what the stores keep: the result is written."""
        for store in self.stores:
            store.forget()

    def _search(self, watch: TuneProgress) -> Callable[..., Tuning]:
        from toolkit.tuning.fleet_size import tune_fleet_to_size
        from toolkit.tuning.tune import tune, tune_to_size

        fleet = self.opened.fleet
        if self.args.workers != AUTO:
            return tune
        if fleet:
            return partial(tune_fleet_to_size, ranges=fleet.ranges, expect=watch.expect)
        return tune_to_size

    def _inputs(self, machine: Arrangement) -> Inputs:
        from toolkit.tuning.tune import Inputs

        others = tuple(self.opened.others)
        beside = self.opened.file or self.opened.inputs.get("fit")
        profile = _profile_of(machine.fit, beside) if beside and not others else None
        recipe = machine.recipe
        return Inputs(recipe, machine.fit, self.workload, profile, others, machine.siblings)

    def _noted(self, inputs: Inputs) -> int:
        """About how many simulations a search takes, which is printed."""
        from toolkit.tuning.tune import evaluations

        settings = inputs.settings
        total = evaluations(settings, inputs.recipe.tune.draws, inputs.siblings)
        if len(self.machines) > 1:
            size = inputs.recipe.engine.tensor_parallel_size
            count = inputs.recipe.workers
            workers = f"{count} worker{'s' * (count > 1)}"
            if self.args.workers == AUTO:
                workers = "the fewest workers"
            note(f"{workers} with tensor parallelism {size}:")
        trace = self.workload.windows.trace
        _note_search(settings, total, trace, inputs.recipe.name, inputs.others)
        return total

    def _store(self, inputs: Inputs) -> EvaluationStore:
        suffix = ""
        if len(self.machines) > 1:
            suffix = f".tp{inputs.recipe.engine.tensor_parallel_size}"
        with_profile = inputs.profile is not None
        recipe = inputs.recipe
        return _store(
            self.args,
            self.made_from,
            recipe,
            inputs.siblings,
            self.traffic,
            suffix,
            with_profile=with_profile,
        )


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
    count = len(settings.spaces)
    served = len(settings.served)
    kind = "policies"
    routed = settings.spaces[0].router is not None
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
    note(*sharing_notes(trace, [space.policy for space in settings.spaces]))
    if others and routed:
        kinds = ", ".join(kind.recipe.name for kind in others)
        note(f"flags are searched for {recipe} and, each its own, for {kinds}")


@contextmanager
def _runner(args: TuneOptions) -> Iterator[tuple[Runner, int]]:
    """The runner of simulations until the block ends, and how many it runs at once."""
    from toolkit.tuning.executor import ClusterRunner, InProcessRunner, ProcessPool

    if args.executor == "local":
        jobs = args.jobs or usable_cpus()
        with ProcessPool(jobs) as pool:
            yield (pool if jobs > 1 else InProcessRunner()), jobs
    elif args.executor == "ray":
        from toolkit.cluster.connect import joined, processors

        with joined(args.ray, args.jobs or usable_cpus()) as cluster:
            jobs = args.jobs or processors()
            machines = f"{jobs} processors of {cluster.nodes} machines"
            note(f"on the Ray cluster at {cluster.address}: {machines}")
            yield ClusterRunner(jobs), jobs
    else:
        raise InputError(
            f"--executor {args.executor}: no executor has that name",
            nearest(args.executor, ("local", "ray")),
        )


def _store(
    args: TuneOptions,
    made_from: EnvelopeFields,
    spec: Recipe,
    siblings: Sequence[Kind],
    traffic: str,
    suffix: str,
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
    fingerprint = f"{digests} {with_profile} {version} {spec.model_dump_json()} {others}{traffic}"
    if not args.storage:
        return JournalFile(Path(f"{args.out}{suffix}.partial"), fingerprint)
    from toolkit.tuning.studies import Studies

    os.environ.pop("LLMCTL_STORAGE", None)  # processes that simulate need no password
    return Studies(args.storage, spec.name, fingerprint)


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
        self._advance = advance
        self._total = total
        self._jobs = jobs
        self._clock = clock
        self._untimed = remembered + jobs - 1
        self._done = 0
        self._recent_s: deque[float] = deque(maxlen=RECENT + 1)  # when the last ones were done
        self._end_s: float | None = None  # as it was printed last

    def __call__(self, best: float) -> None:
        self._done += 1
        self._advance(text=f"best {number(best)} good requests/s" if best else "")
        if self._done <= self._untimed:
            return
        now_s = self._clock()
        recent_s = self._recent_s
        recent_s.append(now_s)
        timed = len(recent_s) - 1
        left = self._total - self._done
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
        """Expect at most `more` further simulations; negative: fewer. Many are announced, with a
        new estimate of the time.
        """
        self._total += more
        self._advance(0, total=self._total)
        if more >= NOTED_MORE:
            note(f"at most {more:,} more simulations of cheaper counts")
            self._end_s = None


def show(result: Tuning) -> None:
    """Print a tuning: the recommendation, its gain and certainty, the limits and the trials."""
    from toolkit.report.verdict import size_lines, verdict

    before = result.defaults
    after = result.best
    same = before.key == after.key
    if result.sizing:
        print("\n".join([*size_lines(result), ""]))
        _show_sizing(result.sizing)
    if result.parallel:
        _show_parallel(result)
    if len(result.policies) > 1:
        _show_policies(result)
    rate = f"{result.load} on {result.workers} workers"
    first = _settings(before)
    best = _settings(after)
    rows = [
        (name, *([word(first[name])] if same else []), word(value)) for name, value in best.items()
    ]
    title = f"policy '{after.policy}', {len(result.trials)} trials at {rate}"
    table(["parameter", *(["default"] if same else []), "best"], rows, title=title)
    changes = []
    for name in METRICS:
        if name in before.metrics and name in after.metrics:
            old = before.metrics[name]
            new = after.metrics[name]
            changes.append((name, old, new, f"{100 * (new / old - 1):+.1f} %" if old else "-"))
    names = ["default", "best"]
    if not same:
        names = [f"{_short(before)}, default", f"{_short(after)}, best"]
    title = f"predicted on {result.judged.requests:,} requests of the trace"
    table(["metric", *(f">{name}" for name in names), ">change"], changes, title=title)
    limits = [(one.name, one.allowed(), one.prediction(), one.kept) for one in result.limits]
    what = "the recipe's settings" if result.keep_defaults else "the best settings"
    title = f"{what} beside the limits"
    table(["limit", ">allowed", ">predicted", "kept"], limits, title=title)
    of_best = [one.importance for one in result.policies if one.outcome.key == after.key]
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
    router = outcome.replica_router
    found = outcome.every_parameter
    if router is None:
        return found
    own = {f"{router.name}.{name}": value for name, value in router.parameters.items()}
    return {**found, "replica_router": router.name, **own}


def _show_parallel(result: Tuning) -> None:
    """Print the tensor parallelisms that were compared on the same GPUs."""
    rows: list[list[object]] = []
    for one in result.parallel:
        rate = "not searched" if one.outcome is None else "-"
        if one.capacity_rps is not None:
            rate = number(one.capacity_rps)
        latency_s = one.outcome.metrics.get("e2e_mean_s") if one.outcome else None
        rows.append([one.tensor_parallel_size, one.workers, one.keeps_limits, rate, latency_s])
    columns = [">GPUs of a worker", ">workers", ">in limits", ">up to requests/s", ">mean E2E, s"]
    table(columns, rows, title="the same GPUs, by tensor parallelism")


def _show_policies(result: Tuning) -> None:
    from toolkit.sched.policies import footnote, marked

    latency = result.latency_metric
    what = "router" if result.best.replica_router else "policy"
    rows: list[tuple[str, int, float, float, bool]] = []
    for one in result.policies:
        router = one.outcome.replica_router
        metrics = one.outcome.metrics
        name = router.name if router else marked(one.policy, result.engines)
        goodput_rps = metrics.get("goodput_rps", 0.0)
        latency_s = metrics.get(latency, 0.0)
        rows.append((name, one.trials, goodput_rps, latency_s, one.feasible))
    rows.sort(key=lambda row: (not row[4], -row[2]))
    title = f"each {what}'s best settings, on the whole trace"
    table([what, ">trials", ">goodput_rps", f">{latency}", "in limits"], rows, title=title)
    remark = footnote([one.policy for one in result.policies], result.engines)
    if remark:
        print(fill(remark, WIDTH, subsequent_indent="  ", break_on_hyphens=False) + "\n")


def _show_sizing(sizing: Sizing) -> None:
    """Print the tried numbers of workers; of a fleet those that keep the limits, and for each
    settings the last few that break them.
    """
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
    title = "numbers of workers that were tried, on the whole trace"
    if sizing.kinds:
        columns[1:4] = [">servers", "fits"]
        title = f"{' + '.join(kind.recipe for kind in sizing.kinds)}, on the whole trace"
    table(columns, rows, title=title)
    if len(shown) < len(sizing.rows):
        print(f"{len(shown)} of {len(sizing.rows)} tried counts; the file has all\n")


def _show_chart(result: Tuning) -> None:
    latency = result.latency_metric
    known = [t for t in result.trials if latency in t.outcome.metrics and t.whole]
    if len(known) < 2:
        return
    marks: dict[str, str] = {}  # of each policy, the first letter that no other has
    for name in [_short(one.outcome) for one in result.policies]:
        letters = [c for c in name if c.isalpha() and c != "o" and c not in marks.values()]
        marks[name] = letters[0] if letters else "."
    best = [trial for trial in known if trial.outcome.same_settings(result.best)][:1]
    points = []
    for mark, trials in (
        ("", known),
        ("o", [trial for trial in known if trial.number in result.front]),
        ("D", [trial for trial in known if trial.number == 0]),
        ("B", best),
    ):
        for trial in trials:
            metrics = trial.outcome.metrics
            own = marks.get(_short(trial.outcome), ".")
            points.append(PlotPoint(metrics[latency], metrics["goodput_rps"], mark or own))
    print("\ngoodput_rps of the trials")
    print("\n".join(scatter(points, x_name=latency)))
    legend = ", ".join(f"{mark} {policy}" for policy, mark in marks.items())
    text = f"{legend}; o on the front of goodput and latency, D defaults, B best"
    print(fill(text, WIDTH) + "\n")


def _short(outcome: Outcome) -> str:
    """What the search compares: the router, or else the policy."""
    return outcome.replica_router.name if outcome.replica_router else outcome.policy
