"""`llmctl autoscale`: scaling rules beside each other on a trace of a day or more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cli.arguments import (
    RecipeArgument,
    ScenarioOptions,
    command_of,
    keep_inputs,
    names_in,
    numbers_in,
    option,
)
from toolkit.cli.basis import note_trace, plain
from toolkit.cli.output import emit, note, progress, show
from toolkit.cli.scenario import Scenario
from toolkit.cli.tune import MAX_JOBS
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError, LimitsBrokenError, nearest
from toolkit.files.io import head, usable_cpus, write_file, write_text
from toolkit.files.recipe import MAX_TRIALS, Recipe, ScaleSpec
from toolkit.files.scaling import ScalingResult
from toolkit.report.steps import fit_option, typed

if TYPE_CHECKING:
    from toolkit.traces.types import Trace
    from toolkit.tuning.autoscale import FoundFleets

USUAL_RULES = ("by-law", "hpa", "keda", "saturation", "tokens", "planner")
POINTS = 288  # of a curve: each five minutes of a day
DAY_S = 86_400.0

_fleet = partial(option, rich_help_panel="The fleet")


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleOptions(ScenarioOptions):
    recipe: RecipeArgument
    out: Path = option(Path("scaling.json"), "Write the result to this file.")
    rules: str | None = option(
        None,
        f"Compare these rules; default: {', '.join(USUAL_RULES)}.",
        metavar="NAME,...",
    )
    trials: int = option(
        8, "Try this number of settings of each rule; 1: its defaults.", min=1, max=MAX_TRIALS
    )
    start_s: str | None = _fleet(
        None,
        "Seconds from the start of a replica until it takes requests, as measured; several are "
        "drawn from. Default: the recipe's scale.start_s.",
        metavar="S,...",
    )
    least: int | None = _fleet(None, "The fewest replicas; default: the recipe's, or 1.", min=0)
    most: int | None = _fleet(None, "The most replicas; default: the recipe's, or 10.", min=1)
    jobs: int | None = option(
        None,
        "Simulate in this many processes; default: as many as there are cores.",
        min=1,
        max=MAX_JOBS,
    )
    html: Path | None = option(None, "Write a page with the curves to this file.")


@command_of(AutoscaleOptions, "recipe", "trace", "fit", "tuning", "sla", "rate", "seed", "force")
def command(args: AutoscaleOptions) -> None:
    """Find the rule that keeps the targets on a trace with the fewest GPU-hours: simulate each on
    the whole trace, and search its parameters.

    Replicas start, serve, drain and go; a rule sees metrics as a cluster scrapes them. Beside the
    rules stand the fewest replicas that keep the targets all the time, and a schedule that knows
    what will come. Requests keep their times; --rate makes each interval between them shorter by
    one factor, so a day is over sooner. Exit code 5 means that nothing keeps the targets; the
    result is written and printed nevertheless.
    """
    from toolkit.deploy.autoscaling import ELSEWHERE
    from toolkit.report.scaling import scaling_page, scaling_sheet
    from toolkit.tuning.autoscale import ScaledFleet, find_fleets, fleet_deployment, replica_rate
    from toolkit.tuning.executor import InProcessRunner, ProcessPool, Runner, collect

    scenario = Scenario.open(args)
    deployment = scenario.deployment
    recipe = deployment.recipe
    _refuse(recipe)
    rules = _rules(args)
    spec = _spec(args, recipe)
    trace = _trace(scenario, spec)
    keep_inputs({**scenario.inputs, "out": args.out})
    note_trace(trace)
    settings = scenario.own_settings or deployment.settings
    deployment = fleet_deployment(
        replace(
            deployment,
            recipe=recipe.model_copy(update={"scale": spec}),
            settings=settings,
        )
    )
    jobs = args.jobs or usable_cpus()
    with ProcessPool(jobs) as pool, progress("autoscale", args.trials * len(rules)) as advance:
        runner: Runner = pool if jobs > 1 else InProcessRunner()
        evaluate = partial(collect, runner)
        rate_rps = replica_rate(deployment, trace, evaluate)
        if rate_rps is None:
            raise LimitsBrokenError(
                "one replica keeps the targets at no rate that was tried",
                "give longer targets with --sla, or a recipe with more GPUs",
            )
        fleet = ScaledFleet(deployment, trace, rate_rps)
        found = find_fleets(fleet, rules, args.trials, evaluate, advance)
    result = _result(scenario, found)
    write_file(result, args.out)
    emit(args.as_json, result, lambda: show(scaling_sheet(result)))
    scenario.note_basis()
    note(f"wrote {args.out}")
    if args.html:
        write_text(args.html, scaling_page(result))
        note(f"wrote {args.html}")
    if result.best is None:
        raise LimitsBrokenError(
            "no rule keeps the targets, and neither does a fixed number of replicas",
            f"allow more than {spec.max} replicas with --most, or longer targets with --sla",
        )
    basis = fit_option(args.recipe, scenario.fit_file)
    if args.tuning is not None:
        basis += ["--tuning", args.tuning]
    able = [one for one in (*result.rules, result.static) if one is not None and one.kept]
    rendered = [one for one in able if one.rule not in ELSEWHERE]
    if result.best.rule in ELSEWHERE and rendered:
        basis += ["--rule", min(rendered, key=lambda one: one.gpu_hours_per_day).rule]
    note(f"next: {typed('render', args.recipe, *basis, '--scaling', args.out)}")


def _refuse(recipe: Recipe) -> None:
    """Raise InputError for a recipe without replicas of a server, or without targets."""
    if not traits_of(recipe.engine.name).server:
        raise InputError(
            f"engine '{recipe.engine.name}' has no replicas: its workers take requests from one "
            "scheduler",
            "name a recipe with engine vllm",
        )
    if not recipe.sla:
        raise InputError(
            f"recipe '{recipe.name}' has no targets, so one replica is always enough",
            "give some with --sla ttft_p99_s=2, or in the recipe's sla",
        )


def _rules(args: AutoscaleOptions) -> list[str]:
    """Return the rules to compare. Raises InputError for one that does not exist."""
    from toolkit.scaling.rules import RULES

    names = names_in("--rules", args.rules) or list(USUAL_RULES)
    for name in names:
        if name not in RULES or name in ("static", "clairvoyant"):
            known = [one for one in RULES if one not in ("static", "clairvoyant")]
            raise InputError(f"--rules {name}: there is no such rule", nearest(name, known))
    return names


def _spec(args: AutoscaleOptions, recipe: Recipe) -> ScaleSpec:
    """Return the recipe's fleet under the options. Raises InputError without start times, and for a
    least above the most.
    """
    changed: dict[str, object] = {"min": args.least, "max": args.most}
    if args.start_s is not None:
        times_s = numbers_in("--start-s", args.start_s, DAY_S, "95,110,130")
        changed |= {"start_s": times_s, "warm_start_s": []}
    given = {name: value for name, value in changed.items() if value is not None}
    spec = (recipe.scale or ScaleSpec()).model_copy(update=given)
    if spec.min > spec.max:
        raise InputError(
            f"the fewest replicas ({spec.min}) are more than the most ({spec.max})",
            "give --least and --most in their order",
        )
    if not spec.start_s:
        raise InputError(
            f"recipe '{recipe.name}' does not say how long a replica takes to start",
            "measure it, and give --start-s 95,110,130 or scale.start_s; 60 to 480 s are common",
        )
    return spec


def _trace(scenario: Scenario, spec: ScaleSpec) -> Trace:
    """Return the requests. Raises InputError where all come before a replica could have started."""
    from toolkit.traces.windows import mean_rate, scale_rate

    trace = scenario.fitted_trace()
    rate = scenario.options.rate
    if rate is not None:
        trace = scale_rate(trace, rate)
    span_s = float(trace.arrival_s[-1] - trace.arrival_s[0])
    longest_s = max(spec.start_s)
    if mean_rate(trace) == 0.0 or span_s < longest_s:
        raise InputError(
            f"{trace.source} lasts {span_s:,.3g} s, and a replica takes {longest_s:,.3g} s to "
            "start: no rule could change anything",
            "give a trace of a day or more",
        )
    return trace


def _result(scenario: Scenario, found: FoundFleets) -> ScalingResult:
    """Return the file's content; each of the fleets in it is simulated once more for its curves."""
    from toolkit.tuning.autoscale import demand_rps, fleet_result

    fleet = found.fleet
    trace = fleet.trace
    recipe = fleet.deployment.recipe
    span_s = float(trace.arrival_s[-1] - trace.arrival_s[0])
    rules = [fleet_result(fleet, one, POINTS) for one in found.rules]
    rules.sort(key=lambda one: (not one.kept, one.gpu_hours_per_day))
    inputs = scenario.sources | {"trace": scenario.trace_file}
    return ScalingResult(
        **head(inputs),
        recipe_name=recipe.name,
        trace=plain(trace),
        sla=dict(recipe.sla),
        scale=fleet.spec,
        gpus_per_replica=recipe.engine.tensor_parallel_size,
        replica_rps=fleet.rate_rps,
        hours=span_s / 3600.0,
        step_s=span_s / POINTS,
        demand_rps=demand_rps(trace, POINTS),
        static=found.static and fleet_result(fleet, found.static, POINTS),
        clairvoyant=found.clairvoyant and fleet_result(fleet, found.clairvoyant, POINTS),
        rules=rules,
        analytic=fleet.deployment.fit.engine.analytic or None,
    )
