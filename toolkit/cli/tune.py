"""`llmctl tune`: search the scheduler's policy and parameters on a trace, with the simulator."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from toolkit.cli import arguments
from toolkit.cli.arguments import (
    RecipeArgument,
    ScenarioOptions,
    command_of,
    keep_inputs,
    names_in,
    option,
    refuse_useless,
)
from toolkit.cli.basis import note_trace, sharing_notes
from toolkit.cli.output import emit, note, progress, show
from toolkit.cli.scenario import Scenario
from toolkit.errors import LimitsBrokenError
from toolkit.files.io import (
    EnvelopeFields,
    head,
    usable_cpus,
    write_file,
)
from toolkit.files.recipe import MAX_TRIALS, Recipe
from toolkit.files.tuning import Tuning, breaks
from toolkit.report.steps import fit_option, typed
from toolkit.units import number

if TYPE_CHECKING:
    from toolkit.tuning.executor import Runner
    from toolkit.tuning.journal import EvaluationJournal
    from toolkit.tuning.workload import TuneInputs

MAX_JOBS = 1024  # each is a process
METRICS = (  # that are printed, of those in the result
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


_search = partial(option, rich_help_panel="What is searched")
_computing = partial(option, rich_help_panel="Where it is computed")
_running = partial(option, rich_help_panel="On a running server")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions(ScenarioOptions):
    recipe: RecipeArgument
    out: Path = option(Path("tuning.json"), "Write the result to this file.")
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
        None, "Try this number of settings; default: the recipe's.", min=1, max=MAX_TRIALS
    )
    jobs: int | None = _computing(
        None,
        "Simulate in this many processes; default: as many as there are cores.",
        min=1,
        max=MAX_JOBS,
    )
    executor: Literal["local", "ray"] = _computing(
        "local",
        "Simulate on this machine (local), or on the Ray cluster of RAY_ADDRESS, else the one that "
        "this machine belongs to (ray).",
    )
    live: str | None = _running(
        None,
        "Instead of a simulation alone: try settings on this running server, which `llmctl serve "
        "--live` started with the plan that is named in the place of the recipe. 'here' is the "
        "one at port 8000 of this machine.",
        metavar="URL",
    )
    minutes: float = _running(10.0, "Measure for so long.", min=0.1)


@command_of(
    TuneOptions, "recipe", "trace", "fit", "sla", "force", "rate", "load", "concurrency",
    "workers", "seed",
)  # fmt: skip
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
    restart. It ends with the best settings if their gain is sure, else, and after Ctrl-C, with the
    settings of before. live-plan.json beside the result starts with the best ones. The same command
    goes on from its journal.
    """
    if args.live is not None:
        from toolkit.cli.tune_live import tune_live

        tune_live(args)
        return
    from toolkit.report.sections import tuning_sheet
    from toolkit.tuning.search import search_settings
    from toolkit.tuning.workload import TuneInputs, cut_trace

    scenario = Scenario.open(args)
    deployment = scenario.deployment
    recipe = _with_search(deployment.recipe, args)
    fit = deployment.fit
    keep_inputs({**scenario.inputs, "out": args.out})  # also a fit that was found here
    # a load is a share of what the recipe's own number of workers serves
    assert scenario.recipe is not None
    own = recipe.model_copy(update={"workers": scenario.recipe.workers})
    traced = cut_trace(own, fit, scenario.read_trace())
    inputs = TuneInputs(recipe, fit, traced)
    search_settings(inputs.recipe, fit)  # refuses what cannot be searched
    note_trace(traced.windows.trace)
    made_from = head(scenario.inputs | {"trace": scenario.trace_file})
    journal = _journal(args.out, inputs, made_from)
    result = _searched(args, inputs, made_from, journal)
    write_file(result, args.out)
    journal.forget()
    emit(args.as_json, result, lambda: show(tuning_sheet(result, METRICS)))
    scenario.note_basis()
    note(f"wrote {args.out}")
    if result.keeps_limits:
        basis = fit_option(args.recipe, scenario.fit_file)
        note(f"next: {typed('render', args.recipe, *basis, '--tuning', args.out)}")
    else:
        unbeaten = "the recipe's settings, which nothing beat,"
        which = unbeaten if result.keep_defaults else "the best settings"
        hint = "`llmctl render` makes a plan of it only with --force"
        raise LimitsBrokenError(f"{which} {breaks(result.limits)}", hint)


def _with_search(recipe: Recipe, args: TuneOptions) -> Recipe:
    """Return the recipe with the search of the command line. Raises InputError for --load beside
    --rate.
    """
    settings: dict[str, object] = {
        "policies": names_in("--policies", args.policies),
        "routers": names_in("--routers", args.routers),
        "trials": args.trials,
        "request_rate_rps": args.rate,
        "load": args.load,
        "concurrency": args.concurrency,
    }
    changed = {key: value for key, value in settings.items() if value is not None}
    if args.load is not None:
        refuse_useless({"--rate": args.rate}, "--load gives the rate")
        changed["request_rate_rps"] = None
    if args.concurrency is not None:
        changed |= {"request_rate_rps": None, "load": None}
    return recipe.model_copy(update={"tune": recipe.tune.model_copy(update=changed)})


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
    """Print what is searched, and what so few trials do not reach."""
    from toolkit.tuning.search import search_settings

    settings = search_settings(inputs.recipe, inputs.fit)
    keys = [space.key for space in settings.spaces]
    compared = "routers" if settings.spaces[0].start.replica_router else "policies"
    searched = f"{settings.trials} trials of these {compared}: {', '.join(keys)}"
    note(f"{searched}; about {simulations} simulations in all")
    if left := ", ".join(keys[settings.trials :]):
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
    else:
        from toolkit.cluster.connect import joined, processors

        with joined("auto", args.jobs or usable_cpus()) as cluster:
            jobs = args.jobs or processors()
            machines = f"{jobs} processors of {cluster.nodes} machines"
            note(f"on the Ray cluster at {cluster.address}: {machines}")
            yield ClusterRunner(jobs)
