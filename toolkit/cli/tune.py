"""`llmctl tune`: search the scheduler's policy and parameters on a trace, with the simulator."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    find_fit,
    note_found,
    note_trace,
)
from toolkit.cli.output import emit, note, progress
from toolkit.cli.stage import sharing_notes
from toolkit.cli.tune_output import show
from toolkit.errors import InputError, LimitsBrokenError, nearest
from toolkit.files.io import (
    EnvelopeFields,
    check_writable,
    head,
    usable_cpus,
    write_file,
)
from toolkit.files.recipe import MAX_TRIALS, Recipe
from toolkit.files.tuning import Tuning, breaks
from toolkit.units import counted, number

if TYPE_CHECKING:
    from toolkit.tuning.executor import Runner
    from toolkit.tuning.journal import EvaluationJournal
    from toolkit.tuning.workload import TuneInputs

MAX_JOBS = 1024


def _limited(param: typer.CallbackParam, value: int | None) -> int | None:
    """Return the value of --trials or --jobs. Raises `InputError` above its limit."""
    limit = {"trials": MAX_TRIALS, "jobs": MAX_JOBS}[param.name or ""]
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
    sla: SlaOption = None
    workers: int | None = _traffic(
        None, "The number of workers; default: the recipe's.", min=1, callback=limit_workers
    )
    jobs: int | None = _computing(
        None,
        "Simulate in this many processes; default: as many as there are cores.",
        min=1,
        callback=_limited,
    )
    executor: str = _computing(
        "local",
        "Simulate on this machine (local), or on the Ray cluster of RAY_ADDRESS, else the one that "
        "this machine belongs to (ray).",
        metavar="local|ray",
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
    from toolkit.tuning.search import search_settings
    from toolkit.tuning.workload import TuneInputs, cut_trace

    recipe = _with_settings(open_recipe(args.recipe), args)
    found = find_fit(args.recipe, recipe, args.fit, force=args.force)
    fit = found.fit
    files = found.inputs(args.recipe)
    keep_inputs({**files, "out": args.out})  # also a fit that was found here
    file = trace_path(args.trace or recipe.tune.trace)
    trace, _ = read_trace(file)
    # a load is a share of what the recipe's own number of workers serves
    traced = cut_trace(recipe, fit, trace)
    workers = args.workers or recipe.workers
    inputs = TuneInputs(recipe.model_copy(update={"workers": workers}), fit, traced)
    search_settings(inputs.recipe, fit)  # refuses what cannot be searched
    note_trace(traced.windows.trace)
    check_writable(args.out)
    made_from = head(files | {"trace": file})
    journal = _journal(args.out, inputs, made_from)
    result = _searched(args, inputs, made_from, journal)
    write_file(result, args.out)
    journal.forget()
    emit(args.as_json, result, lambda: show(result))
    note_found([found])
    note(f"wrote {args.out}")
    if result.keeps_limits:
        given = f" --fit {as_typed(found.file)}" if found.file else ""
        note(f"next: llmctl render {as_typed(args.recipe)}{given} --tuning {args.out}")
    else:
        unbeaten = "the recipe's settings, which nothing beat,"
        which = unbeaten if result.keep_defaults else "the best settings"
        hint = "`llmctl render` makes a plan of it only with --force"
        raise LimitsBrokenError(f"{which} {breaks(result.limits)}", hint)


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


def _searched(
    args: TuneOptions, inputs: TuneInputs, made_from: EnvelopeFields, journal: EvaluationJournal
) -> Tuning:
    """Search and judge; evaluations are kept in the journal, and taken from it."""
    from toolkit.tuning.executor import Remembering
    from toolkit.tuning.tune import planned, tune

    plan = planned(inputs)
    left = deque(plan)
    _note_search(inputs, len(plan))
    with _runner(args) as runner, progress("tuning, requests", sum(plan)) as advance:
        remembering = Remembering(runner, journal)
        if remembering.remembered:
            note(f"{remembering.remembered:,} of them are kept from an earlier run")

        def evaluated(best: float) -> None:
            """An evaluation on the whole trace counts for more than one on windows."""
            text = f"best {number(best)} good requests/s" if best else ""
            advance(left.popleft() if left else 0, text)

        return tune(inputs, remembering, made_from, evaluated)


def _note_search(inputs: TuneInputs, simulations: int) -> None:
    """Print what is searched."""
    from toolkit.tuning.search import search_settings

    settings = search_settings(inputs.recipe, inputs.fit)
    count = len(settings.spaces)
    kind = "policies"
    policies = "the recipe's own policy"
    if settings.spaces[0].start.replica_router is not None:
        kind = "routers"
        policies += f" behind {counted(count, 'router')}"
    elif count > 1:
        policies = f"{count} policies, {len(settings.served)} of which this engine can run"
    hint = f"; --{kind} own searches the recipe's alone" if count > 1 else ""
    note(f"{settings.trials} trials of {policies}; about {simulations} simulations in all{hint}")
    if settings.trials < count:
        left = ", ".join(space.key for space in settings.spaces[settings.trials :])
        note(f"warning: with {settings.trials} trials these are not tried: {left}")
    tried = [space.start.policy for space in settings.spaces]
    note(*sharing_notes(inputs.cut.windows.trace, tried))


def _journal(out: Path, inputs: TuneInputs, made_from: EnvelopeFields) -> EvaluationJournal:
    """Open the journal beside the result. It forgets evaluations that depended on other files,
    recipes, or another version.
    """
    from toolkit.tuning.journal import EvaluationJournal

    digests = "".join(source.sha256 for source in made_from["inputs"].values())
    version = made_from["tool_version"]
    fingerprint = f"{digests} {version} {inputs.recipe.model_dump_json()}"
    return EvaluationJournal(Path(f"{out}.partial"), fingerprint)


@contextmanager
def _runner(args: TuneOptions) -> Iterator[Runner]:
    """The runner of simulations until the block ends."""
    from toolkit.tuning.executor import ClusterRunner, InProcessRunner, ProcessPool

    if args.executor == "local":
        jobs = args.jobs or usable_cpus()
        with ProcessPool(jobs) as pool:
            yield pool if jobs > 1 else InProcessRunner()
    elif args.executor == "ray":
        from toolkit.cluster.connect import joined, processors

        with joined("auto", args.jobs or usable_cpus()) as cluster:
            jobs = args.jobs or processors()
            machines = f"{jobs} processors of {cluster.nodes} machines"
            note(f"on the Ray cluster at {cluster.address}: {machines}")
            yield ClusterRunner(jobs)
    else:
        raise InputError(
            f"--executor {args.executor}: no executor has that name",
            nearest(args.executor, ("local", "ray")),
        )
