"""`llmctl tune`: search the scheduler's policy and parameters on a trace, with the simulator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from toolkit.cli import arguments
from toolkit.cli.arguments import (
    FIT,
    FIT_HELP,
    ApiKeyOption,
    JsonOption,
    RecipeArgument,
    RecipeTraceOption,
    SlaOption,
    as_typed,
    command_of,
    keep_inputs,
    limit_workers,
    names_in,
    open_recipe,
    option,
    parse_sla,
    refuse_useless,
)
from toolkit.cli.basis import (
    FIT_USUAL,
    FoundFit,
    computed_fit,
    find_fit,
    note_found,
    note_trace,
    parallel_size,
)
from toolkit.cli.output import emit, note, progress
from toolkit.cli.stage import sharing_notes
from toolkit.cli.tune_output import TuneProgress, show
from toolkit.errors import InputError, LimitsBrokenError, nearest
from toolkit.files.fit import Fit
from toolkit.files.io import (
    EnvelopeFields,
    check_writable,
    digest,
    head,
    read_file,
    usable_cpus,
    write_file,
)
from toolkit.files.profile import Profile
from toolkit.files.recipe import MAX_DRAWS, MAX_TRIALS, MAX_WORKERS, Recipe
from toolkit.files.tuning import Tuning, breaks
from toolkit.tuning.parallel import ONE_SIZE, SIZES, Arrangement, compared, on_gpus
from toolkit.units import counted

if TYPE_CHECKING:
    from toolkit.tuning.executor import EvaluationStore, Runner
    from toolkit.tuning.inputs import Inputs
    from toolkit.tuning.workload import Workload

AUTO = "auto"
MAX_DIGITS = 18  # of --workers; Python refuses to parse thousands of digits
MAX_JOBS = 1024


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
class TuneOptions:
    recipe: RecipeArgument
    trace: RecipeTraceOption = None
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
    sla: SlaOption = None
    workers: str | None = _traffic(
        None,
        "The number of workers; 'auto' finds the fewest that keep all limits.",
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
    the recipe's engine can run; beside it stands the best of all searched policies. Trial 0 is the
    recipe's own policy. The verdict is the gain over it, with its certainty, or the advice to keep
    it. The same command resumes an interrupted search; --jobs and --executor change only the time.
    Exit code 5 means that the recommendation breaks a limit; the result is written and printed
    nevertheless.

    With --live the settings are tried on a running server, in short bursts of the trace, without a
    restart. It ends with the best ones if their gain is sure, else, and after Ctrl-C, with those of
    before. The same command goes on from its journal.
    """
    if args.live is not None:
        from toolkit.cli.tune_live import tune_live

        tune_live(args)
        return
    from toolkit.traces.read import read_trace
    from toolkit.traces.types import trace_path
    from toolkit.tuning.inputs import settings_of
    from toolkit.tuning.workload import make_workload

    opened = _open(args)
    keep_inputs({**opened.inputs, "out": args.out})  # also a fit that was found here
    recipe = opened.recipe
    file = trace_path(args.trace or recipe.tune.trace)
    trace, _ = read_trace(file)
    machines, refused = _machines(args, opened)
    # a load is a share of what the recipe's own number of workers serves
    workload = make_workload(recipe, opened.fit, trace)
    for machine in machines:
        settings_of(machine.recipe, machine.fit)  # refuses what cannot be searched
    note_trace(workload.windows.trace)
    check_writable(args.out)
    made_from = head(opened.inputs | {"trace": file})
    searches = Searches(args, opened, machines, workload, made_from)
    result = searches.run(refused)
    write_file(result, args.out)
    searches.forget()
    emit(args.as_json, result, lambda: show(result))
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
        recipe: with the settings of the command line.
        file: of the fit; None: it was computed.
        inputs: role to file.
    """

    recipe: Recipe
    fit: Fit
    file: Path | None
    inputs: dict[str, Path]


def _open(args: TuneOptions) -> Opened:
    """Read and check what is tuned."""
    recipe = _with_settings(open_recipe(args.recipe), args)
    found = find_fit(args.recipe, recipe, args.fit, force=args.force)
    file = found.file
    if _sizes(args, recipe) and found.fit.engine.analytic:
        file = None  # laws are computed for each size
    inputs = {"recipe": args.recipe} | ({"fit": file} if file else {})
    return Opened(recipe, found.fit, file, inputs)


def _with_settings(recipe: Recipe, args: TuneOptions) -> Recipe:
    """The recipe with the search of the command line. `InputError` for contradictions."""
    settings: dict[str, object] = {
        "policies": names_in(args.policies),
        "routers": names_in(args.routers),
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
    tune = recipe.tune.model_copy(update=changed)
    return recipe.model_copy(update={"tune": tune, "sla": parse_sla(args.sla) or recipe.sla})


def _sizes(args: TuneOptions, recipe: Recipe) -> list[int]:
    """The tensor parallelisms that are to be compared; empty: the recipe's is taken."""
    if args.tp is not None:
        return [parallel_size(word) for word in names_in(args.tp) or [""]]
    if recipe.tune.tensor_parallel_sizes:
        return recipe.tune.tensor_parallel_sizes
    return [] if args.gpus is None else [size for size in SIZES if args.gpus % size == 0]


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
        return [Arrangement(recipe, opened.fit)], {}
    if args.workers is not None:
        refuse_useless({"--gpus": args.gpus}, "--workers says how many workers there are")
    gpus = args.gpus or max((workers or recipe.workers) * own, *sizes)
    refused = {}
    if not opened.fit.engine.analytic:
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
            machines.append(Arrangement(sized, fit))
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
    """The searches of all machines, each with a store of its own."""

    args: TuneOptions
    opened: Opened
    machines: list[Arrangement]
    workload: Workload
    made_from: EnvelopeFields
    stores: list[EvaluationStore] = field(default_factory=list)

    def run(self, refused: dict[int, str]) -> Tuning:
        """The result; of several machines the best, with a row for each.

        `refused`: why sizes are not among the machines. Raises `LimitsBrokenError` where the
        fewest workers are sought, and no machine has an answer.
        """
        from toolkit.tuning.executor import Remembering
        from toolkit.tuning.tune import tune, tune_to_size

        searches = [self._inputs(machine) for machine in self.machines]
        plan = [requests for inputs in searches for requests in self._noted(inputs)]
        self.stores = [self._store(inputs) for inputs in searches]
        tunings: list[Tuning] = []
        able: list[Arrangement] = []
        failed: LimitsBrokenError | None = None
        with _runner(self.args) as (runner, jobs), progress("tuning", len(plan)) as advance:
            watch = TuneProgress(advance, plan, jobs)
            rememberings = [Remembering(runner, one, watch.simulated) for one in self.stores]
            remembered = sum(one.remembered for one in rememberings)
            if remembered:
                note(f"{remembered:,} of them are kept from an earlier run")
            search = tune_to_size if self.args.workers == AUTO else tune
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

    def forget(self) -> None:
        """Drop what the stores keep: the result is written."""
        for store in self.stores:
            store.forget()

    def _inputs(self, machine: Arrangement) -> Inputs:
        from toolkit.tuning.inputs import Inputs

        file = self.opened.file
        profile = _profile_of(machine.fit, file) if file else None
        return Inputs(machine.recipe, machine.fit, self.workload, profile)

    def _noted(self, inputs: Inputs) -> list[int]:
        """Print what is searched. Returns the requests of each simulation;
        `TuneProgress` prints the seconds.
        """
        from toolkit.tuning.tune import planned

        settings = inputs.settings
        recipe = inputs.recipe
        plan = planned(inputs)
        if len(self.machines) > 1:
            workers = counted(recipe.workers, "worker")
            if self.args.workers == AUTO:
                workers = "the fewest workers"
            note(f"{workers} with tensor parallelism {recipe.engine.tensor_parallel_size}:")
        count = len(settings.spaces)
        kind = "policies"
        routed = settings.spaces[0].router is not None
        policies = "the recipe's own policy"
        if routed:
            kind = "routers"
            policies += f" behind {counted(count, 'router')}"
        elif count > 1:
            policies = f"{count} policies, {len(settings.served)} of which this engine can run"
        hint = f"; --{kind} own searches the recipe's alone" if count > 1 else ""
        note(f"{settings.trials} trials of {policies}; about {len(plan)} simulations in all{hint}")
        if settings.trials < count:
            left = ", ".join(space.key for space in settings.spaces[settings.trials :])
            note(f"warning: with {settings.trials} trials these are not tried: {left}")
        tried = [space.policy for space in settings.spaces]
        note(*sharing_notes(self.workload.windows.trace, tried))
        return plan

    def _store(self, inputs: Inputs) -> EvaluationStore:
        """The store of evaluations: a database, or a file beside the result. It forgets those
        that depended on other files, recipes, or another version.
        """
        from toolkit.tuning.executor import JournalFile

        recipe = inputs.recipe
        digests = "".join(source.sha256 for source in self.made_from["inputs"].values())
        with_profile = inputs.profile is not None
        version = self.made_from["tool_version"]
        fingerprint = f"{digests} {with_profile} {version} {recipe.model_dump_json()}"
        storage = self.args.storage
        if storage:
            from toolkit.tuning.studies import Studies

            os.environ.pop("LLMCTL_STORAGE", None)  # processes that simulate need no password
            return Studies(storage, recipe.name, fingerprint)
        suffix = ""
        if len(self.machines) > 1:
            suffix = f".tp{recipe.engine.tensor_parallel_size}"
        return JournalFile(Path(f"{self.args.out}{suffix}.partial"), fingerprint)


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
