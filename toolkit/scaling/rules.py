"""All rules by name: each says how many replicas a fleet needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from toolkit.errors import InputError
from toolkit.files.plan import Plan
from toolkit.files.recipe import ScaleSpec, ScalingSpec
from toolkit.scaling.autoscaler import ScalingRule
from toolkit.scaling.base import Rule
from toolkit.scaling.behaviour import Behaviour
from toolkit.scaling.by_law import LawRule
from toolkit.scaling.clairvoyant import ClairvoyantRule
from toolkit.scaling.hpa import HpaRule
from toolkit.scaling.keda import KedaRule
from toolkit.scaling.planner import PlannerRule
from toolkit.scaling.saturation import SaturationRule
from toolkit.scaling.static import StaticRule
from toolkit.scaling.tokens import TokensRule
from toolkit.sched.policies.parameters import Value, make_one, refuse_unknown

_CLASSES: Sequence[type[Rule]] = (
    StaticRule,
    HpaRule,
    KedaRule,
    SaturationRule,
    TokensRule,
    PlannerRule,
    LawRule,
    ClairvoyantRule,
)
# A behaviour that lets a rule have its number at once, in both directions.
SETTLED: Mapping[str, Value] = MappingProxyType(
    {"up_pods": 0, "up_percent": 0, "down_window_s": 0.0, "down_percent": 0}
)
RULES: dict[str, type[Rule]] = {rule.name: rule for rule in _CLASSES}


def make_rule(name: str, parameters: Mapping[str, Value]) -> Rule:
    """Return the rule `name` with `parameters` over its defaults. Raises InputError for a rule or
    a parameter that does not exist.
    """
    return make_one("scaling rule", RULES, name, parameters)


def make_behaviour(parameters: Mapping[str, Value]) -> Behaviour:
    """Return a behaviour with `parameters` over its defaults. Raises InputError as `make_rule`."""
    refuse_unknown("behaviour", Behaviour, parameters)
    return Behaviour(**parameters)  # type: ignore[arg-type]


def scaling_rule(chosen: ScalingSpec, spec: ScaleSpec) -> ScalingRule:
    """Return a rule with its behaviour, and the bounds and intervals of a recipe. Raises InputError
    as `make_rule`.
    """
    return ScalingRule(
        make_rule(chosen.rule, chosen.parameters),
        make_behaviour(chosen.behaviour),
        spec.min,
        spec.max,
        spec.scrape_s,
        spec.poll_s,
    )


def scaling_of(plan: Plan) -> ScalingRule | None:
    """Return the rule by which a plan's replicas come and go behind a front; None: their number is
    fixed. Raises InputError for what only a simulation can do.
    """
    chosen = plan.settings.scaling
    spec = plan.recipe.scale
    if chosen is None:
        return None
    why = ""
    if spec is None:
        why = "the recipe has no bounds for its replicas (scale)"
    elif not spec.min:
        why = "scale.min 0: a front keeps at least one of its replicas"
    elif spec.replica_requests:
        why = f"scale.replica_requests {spec.replica_requests}: no replica has a bound in a front"
    elif chosen.rule == ClairvoyantRule.name:
        why = f"rule '{chosen.rule}' knows the requests that will come, as only a simulation does"
    if spec is None or why:
        raise InputError(why, "change the recipe or the rule, and render the plan again")
    return scaling_rule(chosen, spec)
