"""From a recipe, a fit and perhaps a tuning to the plan that `llmctl serve` starts.

The same files give the same plan, to the byte. Nothing is measured or searched here. The parts, in
order: making a plan (`make_plan`), changing its number of workers (`with_workers`), the choice of a
policy with the sources of its values, the explanation of each value (its measurement, trial or
file), and the comparison of two plans (`differs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.io import head
from toolkit.files.modelled import refuse_fit, refuse_recipe
from toolkit.files.plan import PREDICTED, Explanation, Plan, PlannedWorkload
from toolkit.files.recipe import Recipe, RouterSpec, ScalingSpec
from toolkit.files.scaling import FleetResult, ScalingResult
from toolkit.files.tuning import (
    NO_OUTCOME,
    Limit,
    Outcome,
    ParameterValue,
    Settings,
    Tuning,
    breaks,
    broken,
    judged_limits,
)
from toolkit.routing.routers import ROUTERS, TARGETS, router_of
from toolkit.scaling.behaviour import Behaviour
from toolkit.scaling.rules import RULES, make_behaviour, make_rule
from toolkit.scaling.static import StaticRule
from toolkit.sched.policies import KNOWN, make_any, refuse_unservable
from toolkit.sched.policies.parameters import defaults, parameters
from toolkit.sched.policies.vllm import VllmPolicy, refuse_later
from toolkit.units import bracketed, counted, number

Explained = dict[str, Explanation]
Parameters = Mapping[str, ParameterValue]
NOT_COMPARED = {"environment", "tool_version", "explained"}  # keys that `differs` ignores
BEHAVIOUR = "behaviour."  # how the keys of limits of a change of the number begin
LIMITS = "limits"  # the key that says whether a plan keeps its limits

CAPACITIES = ("capacity", "capacity_rps")  # of a replica, by rule
# Parameters of rules that are no choice, and what they are.
MEASURED = {
    "capacity_rps": "requests/s that a replica among others serves within the targets",
    "capacity": "tokens/s that a replica among others serves within the targets",
    "prompt_share": "a prompt's token beside one of output, by the law of a pass",
    "output_tokens": "the mean of the trace",
    "horizon_s": "the mean start, a reading and a decision later",
    "cache_tokens": "the fit's capacity",
    "pass_tokens": "the engine's setting",
    "rows": "the engine's setting",
    "season": "whether the trace has more than two days",
}
NO_POLICY = "default of recipes that name no policy"
NO_ROUTER = "default of recipes that name no router"
RECIPE = "recipe"
BY_POLICY = "set by --policy"
BY_SET = "set by --set"
UNTUNED = "the plan was made without a tuning"
OVERRIDDEN = "the number of workers is not the tuning's, so its predictions do not hold"


@dataclass(frozen=True, slots=True)
class Choice:
    """Chosen settings with their predicted outcome, and the sources of their values.

    `sources` has the source (recipe, tuning or user) of each parameter that was set; the others
    have the policy's defaults. `predicted_on` says what the predictions rest on, or why there are
    none.
    """

    settings: Settings
    source: str
    sources: Mapping[str, str]
    predicted_on: str = UNTUNED
    outcome: Outcome = NO_OUTCOME
    workers_source: str = RECIPE


@dataclass(frozen=True, slots=True)
class PlannedFleet:
    """A rule of scaling.json, or its static fleet, that a plan is made for."""

    result: ScalingResult
    fleet: FleetResult

    def of(self, recipe: Recipe) -> Recipe:
        """Return the recipe with this fleet: its bounds and times, and its targets."""
        found = self.result
        update = {"workers": self.fleet.begin, "scale": found.scale, "sla": dict(found.sla)}
        return recipe.model_copy(update=update)

    @property
    def gain(self) -> str:
        """The predicted cost, beside that of the static fleet, and whether the targets are kept."""
        own = self.fleet
        text = f"{number(own.gpu_hours_per_day)} GPU-hours a day predicted"
        beside = self.result.static
        saved = self.result.saved_percent(own)
        if beside is not None and saved is not None and own.rule != beside.rule:
            static = f"{counted(beside.replicas_max, 'replica')} all the time"
            text += f", {number(saved)} % fewer than {static}"
        return f"{text}; {'every target is kept' if own.kept else 'it BREAKS targets'}"

    @property
    def traffic(self) -> str:
        """What the prediction is of."""
        trace = self.result.trace
        about = f"{trace.requests:,} requests of {trace.source}{bracketed(trace.changes)}"
        return f"simulated with the fit on the whole trace, {about}, under rule '{self.fleet.rule}'"

    @property
    def count_source(self) -> str:
        """What its number of replicas is."""
        fixed = self.fleet.rule == StaticRule.name
        return "the fewest that keep the targets" if fixed else "replicas at the beginning"

    @property
    def workload(self) -> PlannedWorkload:
        """The trace, at its mean rate."""
        rate = self.result.trace.requests / (3600.0 * self.result.hours)
        return PlannedWorkload(trace=self.result.inputs["trace"].name, request_rate_rps=rate)


def make_plan(
    recipe: Recipe,
    fit: Fit,
    tuning: Tuning | None,
    inputs: Mapping[str, Path],
    given: Settings | None = None,
    scaled: PlannedFleet | None = None,
) -> Plan:
    """The plan for serving `recipe`.

    The settings are `given`, or the tuning's recommendation, or the recipe's own. Predictions are
    the tuning's. With `scaled` the fleet is that one, and so are the predictions. `inputs` maps a
    role to the file that an argument was read from; the files belong together: `read_file` checks
    their digests.

    Raises `InputError` where a policy or parameter is unknown, the engine cannot run the policy, or
    the tuning is for another number of workers.
    """
    server = traits_of(recipe.engine.name).server
    refuse_recipe(recipe)
    refuse_fit(fit)
    if tuning is not None:  # its targets may be those of `tune --sla`
        recipe = recipe.model_copy(update={"sla": dict(tuning.sla)})
        if server:  # as many replicas as it was tuned for
            recipe = recipe.model_copy(update={"workers": tuning.workers})
        elif tuning.workers != recipe.workers:
            numbers = f"{tuning.workers} workers, and the recipe has {recipe.workers}"
            raise InputError(f"the tuning is for {numbers}", "tune it again")
    choice = _choice(given, recipe, tuning)
    if scaled is not None:
        recipe = scaled.of(recipe)
        choice = replace(
            choice,
            predicted_on=scaled.traffic,
            outcome=scaled.fleet.outcome,
            workers_source=f"scaling.json: {scaled.count_source}",
        )
    scaling = _scaling_of(recipe, scaled)
    several = recipe
    if scaling is not None:  # a router stands before one replica, too: others may come
        several = recipe.model_copy(update={"workers": max(recipe.workers, 2)})
    chosen = choice.settings
    policy = make_any(chosen.policy, chosen.parameters)
    refuse_unservable(policy, recipe.engine.name)
    if chosen.policy == VllmPolicy.name:
        refuse_later(chosen.parameters, fit.engine.engine_version)
    router = chosen.replica_router or router_of(several)
    whole = {"parameters": parameters(policy), "replica_router": router, "scaling": scaling}
    settings = chosen.model_copy(update=whole)
    explained, workload = _traffic(tuning) if tuning and choice.outcome.metrics else ({}, None)
    if scaled is not None:
        explained, workload = {}, scaled.workload
    if scaling is not None:
        explained |= _explain_scaling(scaling, recipe, scaled)
    return Plan(
        **head(inputs, fit.engine.device, fit.environment.device_memory_bytes),
        recipe=recipe,
        fit=fit,
        workers=recipe.workers,
        settings=settings,
        outcome=choice.outcome,
        explained=explained | _explain(recipe, settings, choice),
        workload=workload,
    )


def _choice(given: Settings | None, recipe: Recipe, tuning: Tuning | None) -> Choice:
    """See `make_plan`."""
    if given is not None:
        return Choice(given, BY_POLICY, dict.fromkeys(given.parameters, BY_SET))
    if tuning is not None:
        return _from_tuning(tuning, recipe)
    written = "policy" in recipe.model_fields_set and "name" in recipe.policy.model_fields_set
    source = f"{RECIPE if written else NO_POLICY}, not tuned"
    given_by = dict.fromkeys(recipe.policy.parameters, RECIPE)
    settings = Settings(policy=recipe.policy.name, parameters=recipe.policy.parameters)
    return Choice(settings, source, given_by)


def _scaling_of(recipe: Recipe, scaled: PlannedFleet | None) -> ScalingSpec | None:
    """Return the rule with all its parameters: the one of `scaled`, or the one that the recipe
    names; None: the number of replicas is fixed.

    Raises `InputError` for a rule or a parameter that does not exist, and for one of the recipe
    that lacks the capacity of a replica, of which no default is right.
    """
    own = recipe.scale
    named = own is not None and "scaling" in own.model_fields_set
    spec = scaled.fleet.scaling if scaled else own.scaling if own and named else None
    if spec is None:
        return None
    values = parameters(make_rule(spec.rule, spec.parameters))
    lacking = [one for one in CAPACITIES if one in values and one not in spec.parameters]
    if lacking:
        raise InputError(
            f"scale.scaling: rule '{spec.rule}' needs {lacking[0]}, what one replica serves",
            "llmctl autoscale finds it: give its scaling.json with --scaling",
        )
    return ScalingSpec(
        rule=spec.rule,
        parameters=values,
        behaviour=parameters(make_behaviour(spec.behaviour)),
    )


def _traffic(tuning: Tuning) -> tuple[Explained, PlannedWorkload | None]:
    """The requests that the predictions of `tuning` are about: how they differ from the trace's
    own, if they do, and the trace and its rate, if it is recorded.
    """
    explained: Explained = {}
    if tuning.scaling is not None and tuning.changes:
        why = tuning.scaling.warnings() or ["tuning: so they fit the recipe's limits"]
        explained["requests"] = _explanation(tuning.changes, "; ".join(why))
    trace = tuning.inputs.get("trace")
    if trace is None or tuning.concurrency is not None:
        return explained, None
    rate = tuning.request_rate_rps
    return explained, PlannedWorkload(trace=trace.name, request_rate_rps=rate)


def with_workers(plan: Plan, workers: int) -> Plan:
    """Return the plan with another number of workers, and without predictions: these hold only for
    the planned number.
    """
    why = OVERRIDDEN if plan.outcome.metrics else UNTUNED
    explained = {key: each for key, each in plan.explained.items() if not key.startswith(PREDICTED)}
    explained["workers"] = _explanation(workers, "set by --workers")
    explained[LIMITS] = _explain_limits(judged_limits(plan.recipe, NO_OUTCOME), why)
    update = {"workers": workers, "outcome": NO_OUTCOME, "workload": None, "explained": explained}
    return plan.model_copy(update=update)


def _from_tuning(tuning: Tuning, recipe: Recipe) -> Choice:
    recommended = tuning.recommended
    trials = len(tuning.trials)
    if tuning.keep_defaults:
        source = f"kept: no trial of {trials} did better than the recipe's settings"
    elif not tuning.keeps_limits:
        source = f"{_trial(tuning)} of {trials}; it breaks limits"
    else:
        gain = "goodput from none"
        if tuning.gain_percent is not None:
            gain = f"{tuning.gain_percent:+.1f} % goodput"
        if gain in ("+0.0 % goodput", "-0.0 % goodput"):
            gain = "the same goodput, other latencies"
        source = f"{_trial(tuning)} of {trials}: {gain}"
    part = "whole" if tuning.judged.whole else "busiest part of the"
    windows = f"simulated with the fit on the {part} trace{bracketed(tuning.changes)}"
    return Choice(
        recommended.settings,
        source,
        _sources_of(recommended.settings, recipe, source),
        windows,
        recommended.outcome,
        workers_source="tuning: simulated with this number",
    )


def _sources_of(chosen: Settings, recipe: Recipe, source: str) -> dict[str, str]:
    """Return the sources of the recommended parameters that differ from the policy's defaults: the
    search, where they differ from what it began with, or the recipe.
    """
    known = defaults(KNOWN[chosen.policy])
    own = recipe.policy.parameters if recipe.policy.name == chosen.policy else {}
    start = known | own
    sources = {}
    for name, value in chosen.parameters.items():
        if value != start.get(name):
            sources[name] = source
        elif name in own:
            sources[name] = RECIPE
    return sources


def _trial(tuning: Tuning) -> str:
    """The first trial with the recommended settings."""
    tried = [one.settings for one in tuning.trials]
    settings = tuning.recommended.settings
    return f"trial {tried.index(settings)}" if settings in tried else "the best"


def _explain(recipe: Recipe, settings: Settings, choice: Choice) -> Explained:
    """Explain each value of the plan: policy, parameters, predictions, the model's revision, the
    router before replicas.
    """
    source = "recipe; the fit was measured with the same number"
    explained = _explain_policy(settings, choice.source, choice.sources)
    limits = judged_limits(recipe, choice.outcome)
    explained[LIMITS] = _explain_limits(limits, choice.predicted_on)
    explained["workers"] = _explanation(recipe.workers, source)
    explained |= _explain_revision(recipe)
    for name, metric in choice.outcome.metrics.items():
        explained[PREDICTED + name] = _explanation(metric, choice.predicted_on)
    router = settings.replica_router
    return explained | ({} if router is None else _explain_router(router, recipe, choice))


def _explain_policy(settings: Settings, source: str, sources: Mapping[str, str]) -> Explained:
    """Explain a policy and its parameters. Parameters without a source have defaults."""
    default = f"default of policy '{settings.policy}'"
    explained = {"policy": _explanation(settings.policy, source)}
    return explained | _explain_each("", settings.parameters, sources, default)


def _explain_router(router: RouterSpec, recipe: Recipe, choice: Choice) -> Explained:
    """Explain the router of a server's replicas, and their number."""
    source = RECIPE if router.name != RouterSpec().name else NO_ROUTER
    if choice.settings.replica_router is not None:
        source = choice.source
    why = f"{choice.workers_source}; the fit is of one replica"
    explained = {
        "workers": _explanation(recipe.workers, why),
        "replica_router": _explanation(router.name, source),
    }
    values = router.parameters
    usual = _where_equal(
        values, defaults(ROUTERS[router.name]), f"default of router '{router.name}'"
    )
    sources = dict.fromkeys(TARGETS.values(), "recipe: sla") | usual
    return explained | _explain_each(f"{router.name}.", values, sources, source)


def _explain_scaling(spec: ScalingSpec, recipe: Recipe, scaled: PlannedFleet | None) -> Explained:
    """Explain the rule that changes the number of replicas, its parameters and its bounds."""
    scale = recipe.scale
    assert scale is not None
    rule = RULES[spec.rule]
    explained = {"scaling rule": _explanation(spec.rule, scaled.gain if scaled else RECIPE)}
    origin = bounds = RECIPE
    sources = _where_equal(spec.parameters, defaults(rule), f"default of rule '{spec.rule}'")
    if scaled is not None:
        origin = f"scaling.json: the best of {scaled.fleet.trials} settings"
        bounds = "scaling.json: as simulated"
        sources |= {name: f"scaling.json: {what}" for name, what in MEASURED.items()}
    explained |= _explain_each(f"{spec.rule}.", spec.parameters, sources, origin)
    own = f"rule '{spec.rule}' is run so by its project"
    limits = _where_equal(spec.behaviour, defaults(Behaviour), "Kubernetes' default")
    limits |= _where_equal(spec.behaviour, rule.usual_behaviour, own)
    explained |= _explain_each(BEHAVIOUR, spec.behaviour, limits, origin)
    return explained | _explain_each("scale.", {"min": scale.min, "max": scale.max}, {}, bounds)


def _where_equal(values: Parameters, usual: Parameters, source: str) -> dict[str, str]:
    """Return `source` for each value that is the usual one."""
    return {name: source for name, value in values.items() if value == usual.get(name)}


def _explain_each(
    prefix: str, values: Parameters, sources: Mapping[str, str], source: str
) -> Explained:
    """Explain each value by its own one of `sources`, else by `source`."""
    return {
        f"{prefix}{name}": _explanation(value, sources.get(name, source))
        for name, value in values.items()
    }


def _explain_limits(limits: Sequence[Limit], source: str) -> Explanation:
    """Explain whether the limits are predicted to be kept; `source` says what that rests on."""
    if any(limit.kept is None for limit in limits):
        return _explanation("not predicted", source)
    kept = len(limits) - len(broken(limits))
    if kept < len(limits):
        source = f"predicted to {breaks(limits)}; {source}"
    return _explanation(f"{kept} of {len(limits)} kept", source)


def _explain_revision(recipe: Recipe) -> Explained:
    """Explain which revision of the model the hub gives; empty for a model that is no hub's."""
    model = recipe.model
    if not model.from_hub:
        return {}
    source = "recipe: model.revision"
    if not model.pinned:
        which = f"{source} is not a commit: it" if model.revision else "the recipe names none: that"
        remedy = "name the commit's 40 digits as model.revision"
        source = f"NOT PINNED: {which} may be another one at each load; {remedy}"
    return {"model revision": _explanation(model.revision or "the hub's newest", source)}


def _explanation(value: ParameterValue, source: str) -> Explanation:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return Explanation(value=text.lower() if isinstance(value, bool) else text, source=source)


def differs(one: Plan, other: Plan) -> bool:
    """Whether two plans serve differently. The versions and machines that wrote them, and their
    explanations, are not compared.
    """
    before, after = (plan.model_dump_json(exclude=NOT_COMPARED) for plan in (one, other))
    return before != after
