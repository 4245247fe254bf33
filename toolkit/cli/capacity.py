"""`llmctl capacity`: the highest rate and concurrency at which all targets hold, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, TypeVar

from toolkit.cli import arguments
from toolkit.cli.arguments import (
    FIT_HELP,
    ScenarioOptions,
    argument,
    command_of,
    names_in,
    option,
)
from toolkit.cli.basis import note_basis, note_other_count, note_trace, plain
from toolkit.cli.output import emit, note, progress, show
from toolkit.cli.scenario import Scenario, computed_fit
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError, LimitsBrokenError
from toolkit.files.capacity import Capacities, CapacityOf, CapacityPoint, Needed
from toolkit.files.io import read_file, usable_cpus, write_text
from toolkit.files.recipe import Recipe
from toolkit.files.shipped import recipe_path
from toolkit.files.tuning import Tuning, changes_in_words
from toolkit.report.rows import share_used
from toolkit.units import number

if TYPE_CHECKING:
    from toolkit.traces.types import Trace
    from toolkit.tuning.capacity import Capacity
    from toolkit.tuning.deployments import FoundCapacity, Variant

Given = TypeVar("Given")

SIMULATIONS = 16  # of each capacity, about
MOST_PROCESSES = 4  # a search tries at most five loads at once


_beside = partial(option, rich_help_panel="What stands beside the recipe's settings")
_answers = partial(option, rich_help_panel="What is found besides")


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityOptions(ScenarioOptions):
    recipes: list[str] = argument(
        "Recipes: files, or names of shipped ones. Several are shown side by side.",
        metavar="RECIPE...",
        autocompletion=arguments.recipes,
    )
    fits: list[str] | None = option(
        None,
        f"{FIT_HELP} For several recipes one each, in their order.",
        "--fit",
        autocompletion=arguments.fits,
    )
    bench: list[Path] | None = option(
        None,
        "By the speed that this bench.json found on a server of the recipe; repeatable: by their "
        "mean. Default: the fit's.",
    )
    rate: float | None = _answers(
        None, "Also find how many workers, and so GPUs, this many requests per second take."
    )
    at_once: bool = _answers(False, "Also find the most requests at once that keep the limits.")
    price: list[float] | None = _answers(
        None,
        "USD an hour of one GPU: one price, or one for each recipe in their order; default: "
        "recipes'.",
        min=0.001,
        metavar="USD",
    )
    tuning: Path | None = _beside(
        None, "Also the settings that this tuning.json recommends, for its recipe."
    )
    policies: str | None = _beside(
        None,
        "Also these policies at their defaults; 'all' means all that the engine can run.",
        metavar="NAME,...",
        autocompletion=arguments.policies,
    )
    routers: str | None = _beside(
        None, "Also these routers before several replicas; 'all' means all.", metavar="NAME,..."
    )
    also: list[str] | None = _beside(
        None,
        "Also the recipe with these keys changed, by their paths or as parameters of its policy; "
        "repeatable.",
        metavar="KEY=VALUE,...",
    )
    html: Path | None = option(None, "Write a page with the curves to this file.")


@command_of(CapacityOptions, "trace", "sla", "workers", "seed", "force")
def command(args: CapacityOptions) -> None:
    """Find the highest rate at which a recipe keeps all targets on a whole trace; for several
    recipes, policies and routers side by side.

    The arrivals of the trace are compressed until a target breaks, found to 1 %, to 2 % for a very
    long trace; all rates have the same requests and draws. The law's error gives a range: the rates
    that keep the targets if all times are as long, or as short, as that error leaves open. A trace
    that would be over before a queue could grow is repeated. Rates are the mean over the whole
    trace, of sessions as they were served. With --bench, workers are as fast as they were in that
    bench, which may be slower than they were in the profile. With --also, a recipe stands beside
    itself with some keys changed; computed laws are computed for it, and measured ones refuse what
    would change them. With a price, it says what requests and tokens cost at that rate. With
    --rate, it says how many GPUs that rate takes. Exit code 5 means that no rate keeps the limits.
    """
    from toolkit.report.capacity import capacity_page, capacity_sheet
    from toolkit.tuning.deployments import capacity_of, check_sharing, variants_of
    from toolkit.tuning.executor import ProcessPool, QuickestRunner, collect

    scenarios = _scenarios(args)
    prices = _for_each(args, "--price", args.price)
    tuning = read_file(Tuning, args.tuning) if args.tuning else None
    seen = _seen(args, scenarios)
    variants: list[Variant] = []
    traces: list[Trace] = []
    for one, usd in zip(scenarios, prices, strict=True):
        changed = _priced(one.deployment.recipe, usd)
        own = variants_of(
            changed,
            one.deployment.fit,
            tuning=tuning if tuning and tuning.recipe_name == changed.name else None,
            policies=names_in("--policies", args.policies) or (),
            routers=names_in("--routers", args.routers) or (),
            slowdown=seen,
        )
        own += _also(args, one, changed, seen)
        variants += own
        traces += [one.fitted_trace()] * len(own)
    for variant, trace in zip(variants, traces, strict=True):
        check_sharing(variant, trace)
    note_trace(traces[0])
    found: list[FoundCapacity] = []
    total = SIMULATIONS * (1 + args.at_once) * len(variants)
    jobs = min(MOST_PROCESSES, usable_cpus())
    with ProcessPool(jobs) as pool, progress("capacity", total) as advance:
        runner = QuickestRunner(pool)
        for variant, trace in zip(variants, traces, strict=True):
            told = f"{variant.deployment.recipe.name}, {variant.label}"
            evaluate = partial(collect, runner, tick=partial(advance, text=told))
            found.append(
                capacity_of(variant, trace, evaluate, rate_rps=args.rate, concurrency=args.at_once)
            )
    result = Capacities(
        trace=plain(traces[0]),
        sla=dict(variants[0].deployment.recipe.sla),
        wanted_rps=args.rate,
        capacities=[_plain(one, trace) for one, trace in zip(found, traces, strict=True)],
    )
    emit(args.as_json, result, lambda: show(capacity_sheet(result)))
    fits = [(one.deployment.fit, one.fit_file) for one in scenarios]
    note_basis(*fits, *((one.deployment.fit, None) for one in variants if one.changed))
    _note_counts(found)
    if args.html:
        write_text(args.html, capacity_page(result))
        note(f"wrote {args.html}")
    if all(one.capacity_rps is None for one in result.capacities):
        raise _none_keeps(found[0])
    scenarios[0].note_tuning()


def _note_counts(found: Sequence[FoundCapacity]) -> None:
    """Print where workers of one machine were measured in another number: they slow each other."""
    told = set()
    for one in found:
        deployment = one.variant.deployment
        name = deployment.recipe.name
        if traits_of(deployment.recipe.engine.name).server:
            continue
        for count in [each.workers for each in (deployment, one.needed) if each]:
            if count != deployment.fit.workers and (name, count) not in told:
                told.add((name, count))
                note_other_count(f"{name} was measured", deployment.fit, count)


def _also(args: CapacityOptions, scenario: Scenario, recipe: Recipe, seen: float) -> list[Variant]:
    """Return the recipe with each change of --also. `RecipeChange.parsed` and `changed_variant` say
    what is refused.
    """
    from toolkit.tuning.changes import RecipeChange
    from toolkit.tuning.deployments import changed_variant

    fit = scenario.deployment.fit
    assert scenario.recipe_file is not None
    compute = partial(computed_fit, scenario.recipe_file) if fit.engine.analytic else None
    changes = [RecipeChange.parsed(words, recipe) for words in args.also or []]
    return [changed_variant(recipe, fit, change, compute, seen) for change in changes]


def _seen(args: CapacityOptions, recipes: Sequence[object]) -> float:
    """Return the slowdown that --bench found, the geometric mean of several; without it, 1."""
    if not args.bench:
        return 1.0
    from toolkit.bench.predict import slowdown_of
    from toolkit.files.bench import BenchReport, took_text

    if len(recipes) > 1:
        raise InputError(
            f"--bench: it is of one server, and {len(recipes)} recipes are given",
            "give one recipe with --bench",
        )
    slowdown = geometric_mean(slowdown_of(read_file(BenchReport, path)) for path in args.bench)
    files = ", ".join(str(path) for path in args.bench)
    note(f"by {files}: {took_text(slowdown, 'take')}")
    return slowdown


def _scenarios(args: CapacityOptions) -> list[Scenario]:
    """Return what each recipe is about.

    Without --fit, `find_fit` finds it. Raises InputError for a recipe without targets;
    `Scenario.open` says what else is refused.
    """
    files = [recipe_path(name) for name in args.recipes]
    found = []
    for file, fit in zip(files, _for_each(args, "--fit", args.fits), strict=True):
        # the tuning is one of its variants
        scenario = Scenario.open(replace(args, recipe=file, fit=fit, tuning=None))
        if not scenario.targets:
            raise InputError(
                f"recipe '{file.stem}' has no targets, so no rate breaks one",
                "give some with --sla ttft_p99_s=2, or in the recipe's sla",
            )
        found.append(scenario)
    return found


def _for_each(
    args: CapacityOptions, name: str, given: Sequence[Given] | None
) -> Sequence[Given | None]:
    """Return what an option gives for each recipe; None: nothing. Raises InputError for a number of
    values that is neither 1 nor the number of the recipes.
    """
    count = len(args.recipes)
    if not given:
        return [None] * count
    if len(given) not in (1, count):
        raise InputError(
            f"{name}: {len(given)} values for {count} recipes",
            "give one for all, or one for each recipe in their order",
        )
    return given if len(given) == count else [*given] * count


def _priced(recipe: Recipe, usd: float | None) -> Recipe:
    """Return the recipe with this price of a GPU, if there is one."""
    if usd is None:
        return recipe
    of_worker = {"usd_per_hour": usd * recipe.engine.tensor_parallel_size}
    hardware = recipe.hardware.model_copy(update=of_worker)
    return recipe.model_copy(update={"hardware": hardware})


def _plain(found: FoundCapacity, trace: Trace) -> CapacityOf:
    """Return what `--json` prints of a deployment."""
    from toolkit.tuning.deployments import cost_of
    from toolkit.tuning.workload import most_requests

    variant = found.variant
    deployment = variant.deployment
    rate = found.rate
    at_once = found.concurrency
    metrics = rate.at_capacity.evaluation.metrics if rate else {}
    needed = found.needed
    repeats = rate.repeats if rate else 1
    return CapacityOf(
        recipe=deployment.recipe.name,
        settings=variant.label,
        changed=dict(variant.changed),
        engine=deployment.recipe.engine.name,
        policy=deployment.settings.policy,
        parameters=dict(deployment.settings.parameters),
        router=deployment.settings.replica_router,
        workers=deployment.workers,
        gpus=deployment.gpus,
        judged_requests=min(len(trace), most_requests(deployment.settings.policy)),
        of_requests=len(trace),
        repeats=repeats,
        scaling=trace.scaling,
        changes=changes_in_words(trace.scaling, repeats),
        capacity_rps=rate and rate.served_rps,
        at_least=bool(rate and rate.broken is None),
        error_percent=rate.error_percent if rate else 0.0,
        interval=found.interval,
        binding=rate.binding if rate else _binding(found),
        concurrency=int(at_once.load) if at_once else None,
        concurrency_binding=at_once and at_once.binding,
        metrics=metrics,
        cost=rate and cost_of(deployment, rate, trace),
        needed=needed
        and Needed(workers=needed.workers, gpus=needed.gpus, usd_per_hour=needed.usd_per_hour),
        analytic=deployment.fit.engine.analytic,
        curve=_curve(rate),
        concurrency_curve=_curve(at_once),
    )


def _binding(found: FoundCapacity) -> str | None:
    usage = found.lowest.usage if found.lowest else {}
    return max(usage, key=lambda name: usage[name], default=None)


def _curve(capacity: Capacity | None) -> list[CapacityPoint]:
    if capacity is None:
        return []
    return [
        CapacityPoint(
            load=point.load,
            kept=point.kept,
            attainment_percent=point.evaluation.metrics.get("sla_attainment_percent", 0.0),
            goodput_rps=point.evaluation.metrics.get("goodput_rps", 0.0),
            usage=point.usage,
        )
        for point in capacity.points
    ]


def _none_keeps(found: FoundCapacity) -> LimitsBrokenError:
    """The error where no rate keeps the limits: what binds at the lowest rate that was tried."""
    name = found.variant.deployment.recipe.name
    hint = "give looser targets: --sla KEY=SECONDS, or in the recipe's sla"
    lowest = found.lowest
    if lowest is None:
        return LimitsBrokenError(f"recipe '{name}' serves none of the requests", hint)
    binding = _binding(found)
    used = share_used(lowest.usage[str(binding)])
    return LimitsBrokenError(
        f"no rate keeps all limits: even at {number(lowest.load)} requests/s {binding} is {used}",
        hint,
    )
