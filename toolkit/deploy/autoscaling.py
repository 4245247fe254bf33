"""When pods are added, and when they are taken away, as Kubernetes' autoscaler reads it.

An `Autoscaling` has a rule with its parameters, bounds, and how fast the number may change, each
with its reason. `of_rule` makes it of the rule of a plan; a plan without a rule is scaled by its
queue (`of_queue`). The templates in `kubernetes/autoscaling/` write what the rule reads, in PromQL.
KEDA gets a query: its value over a threshold is the number of pods. A HorizontalPodAutoscaler gets
a metric of each pod, and brings it to a target.

The queue at which first tokens come too late is no threshold: admission refuses requests there, so
the queue stays below it. So the threshold is half of that queue. Rule `by-law` also knows what
comes while a replica loads; `llmctl autoscale` compares both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from toolkit.deploy.order import Sourced
from toolkit.deploy.plan import BEHAVIOUR
from toolkit.deploy.reckon import MIN_MEASURED_STARTUP_S
from toolkit.errors import InputError
from toolkit.files.plan import Plan
from toolkit.scaling.behaviour import MAX_PERIOD_S, MAX_WINDOW_S
from toolkit.scaling.by_law import DAY_S, MEANS_S, LawRule
from toolkit.scaling.hpa import TOLERANCE, HpaRule
from toolkit.scaling.keda import KedaRule
from toolkit.scaling.planner import PlannerRule
from toolkit.scaling.rules import make_rule, scaling_of
from toolkit.scaling.saturation import SaturationRule
from toolkit.scaling.static import StaticRule
from toolkit.scaling.tokens import TokensRule
from toolkit.sched.policies.parameters import Value, parameters

V = TypeVar("V", bound=Value)
POLL_S = 15  # how often KEDA asks Prometheus
BURST_S = 30  # one burst of requests does not scale
IDLE_S = 300  # for which the queue must call for fewer replicas: Kubernetes' default
QUEUE = "queue"  # the rule of a plan that names none
THRESHOLDS = ("waiting", "running", "kv_usage")  # of rule keda
# What runs a rule in a cluster.
RUN_BY = {
    QUEUE: "KEDA",
    KedaRule.name: "KEDA",
    LawRule.name: "KEDA",
    HpaRule.name: "prometheus-adapter",
}
# Rules that a cluster runs in an autoscaler of its own: which one, and what is set there.
ELSEWHERE: dict[str, tuple[str, tuple[str, ...]]] = {
    SaturationRule.name: (
        "llm-d's workload variant autoscaler, version 1",
        ("kv_most", "queue_most", "kv_spare", "queue_spare"),
    ),
    TokensRule.name: ("llm-d's workload variant autoscaler, version 2", ("up", "down")),
    PlannerRule.name: ("Dynamo's planner", ("interval_s", "predictor", "correction")),
}


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """The autoscaler of pods that are alike.

    Attributes:
        rule: what decides; `QUEUE`: the requests that wait.
        parameters: of the rule, by name.
        behaviour: how fast the number changes: the fields of `Behaviour`, by name.
        least, most: bounds of the number of pods.
        poll_s: seconds between two looks.
        needs: what must run in the cluster; '': nothing scales.
    """

    rule: str
    parameters: Mapping[str, Sourced[Value]]
    behaviour: Mapping[str, Sourced[Value]]
    least: Sourced[int]
    most: Sourced[int]
    poll_s: Sourced[int]
    needs: str
    day_s = round(DAY_S)
    means_s = round(MEANS_S)  # that a request's mean tokens are over
    usual_tolerance = TOLERANCE  # Kubernetes' own


def of_queue(
    count: Sourced[int], load_s: float | None, breaking: Sourced[int | None], grace_s: int
) -> Autoscaling:
    """Return the autoscaler by the requests that wait.

    Args:
        count: pods at the beginning.
        load_s: seconds that one of the pods loads; None: it was not measured.
        breaking: requests that may wait for one pod; more break the TTFT target. None with the
            reason: no queue tells, and nothing scales.
        grace_s: seconds that a pod has for its end.
    """
    up_s = min(math.ceil(load_s or MIN_MEASURED_STARTUP_S), MAX_PERIOD_S)
    idle_s = min(max(IDLE_S, 2 * math.ceil(load_s or 0)), MAX_WINDOW_S)
    down_s = min(max(grace_s, 60), MAX_PERIOD_S)
    doubling = "in this time the replicas at most double, so that new ones can load"
    behaviour: dict[str, Sourced[Value]] = {
        "up_window_s": Sourced(BURST_S, "one burst does not scale"),
        "up_pods": Sourced(0, "no limit"),
        "up_percent": Sourced(100, doubling),
        "up_period_s": Sourced(up_s, doubling),
        "down_window_s": Sourced(idle_s, "so long the queue must call for fewer"),
        "down_pods": Sourced(1, "one replica in the time of its drain"),
        "down_percent": Sourced(0, "no limit"),
        "down_period_s": Sourced(down_s, "the time of a drain"),
    }
    threshold: dict[str, Sourced[Value]] = {}
    most = Sourced(count.value, "nothing scales")
    if breaking.value is not None and breaking.value > 1:
        why = f"half of {breaking}, at which admission already refuses requests"
        threshold["waiting"] = Sourced(breaking.value // 2, f"{why}: {breaking.source}")
        most = Sourced(2 * count.value, "twice the replicas; change it here")
    poll_s = Sourced(POLL_S, "Kubernetes' own interval")
    needs = RUN_BY[QUEUE] if threshold else ""
    return Autoscaling(QUEUE, threshold, behaviour, count, most, poll_s, needs)


def of_rule(plan: Plan, count: Sourced[int], *, front: bool) -> Autoscaling:
    """Return the autoscaler that does what the rule of a plan does.

    Args:
        count: pods at the beginning.
        front: the pods are replicas of a server, with llmctl's front before them.

    Raises `InputError` for a rule that runs in another project's autoscaler, without a front, and
    for what only a simulation can do (`scaling_of`).
    """
    spec = plan.settings.scaling
    assert spec is not None
    values = parameters(make_rule(spec.rule, spec.parameters))
    if spec.rule in ELSEWHERE:
        other, names = ELSEWHERE[spec.rule]
        constants = ", ".join(f"{name} {values[name]}" for name in names)
        raise InputError(
            f"rule '{spec.rule}' runs in {other}, which is not rendered: set {constants} there",
            "or render --rule by-law of the same scaling.json",
        )
    if not front:
        raise InputError(
            f"rule '{spec.rule}' scales replicas of a server, and engine "
            f"'{plan.recipe.engine.name}' has none",
            "name a recipe with engine vllm",
        )
    if spec.rule == KedaRule.name and not any(values[name] for name in THRESHOLDS):
        raise InputError(
            "rule 'keda' has no threshold, so nothing scales",
            f"set one of {', '.join(THRESHOLDS)}; or take the rule static",
        )
    if spec.rule == StaticRule.name:
        poll_s = Sourced(POLL_S, "nothing scales")
        return Autoscaling(spec.rule, {}, {}, count, count, poll_s, "")
    scaling = scaling_of(plan)
    assert scaling is not None
    most = max(scaling.most, count.value)
    bounds = _explained(plan, "scale.", {"min": scaling.least, "max": most})
    return Autoscaling(
        rule=spec.rule,
        parameters=_explained(plan, f"{spec.rule}.", values),
        behaviour=_explained(plan, BEHAVIOUR, parameters(scaling.behaviour)),
        least=bounds["min"],
        most=bounds["max"],
        poll_s=Sourced(max(round(scaling.poll_s), 1), "scale.poll_s, as simulated"),
        needs=RUN_BY[spec.rule],
    )


def _explained(plan: Plan, prefix: str, values: Mapping[str, V]) -> dict[str, Sourced[V]]:
    """Return each value with the reason that the plan gives for it, by the name after `prefix`."""
    found = {}
    for name, value in values.items():
        told = plan.explained.get(f"{prefix}{name}")
        found[name] = Sourced(value, told.source if told else "the plan gives no reason")
    return found
