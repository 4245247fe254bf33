"""When pods are added, and when they are taken away, as Kubernetes' autoscaler reads it.

An `Autoscaling` has bounds, what decides, and how fast the number may change. Two things decide:
KEDA's triggers, each a Prometheus query that gives the pods by its value over its threshold, or a
metric of each pod, which a HorizontalPodAutoscaler brings to a target. `of_rule` makes it from the
rule of a plan, with the source of each value as the plan explains it. A plan without a rule is
scaled by its queue (`of_queue`).

The queue at which first tokens come too late is no threshold: admission refuses requests there, so
the queue stays below it. So the threshold is half of that queue. Rule `by-law` also knows what
comes while a replica loads; `llmctl autoscale` compares both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from toolkit.deploy.order import Sourced
from toolkit.deploy.plan import BEHAVIOUR
from toolkit.deploy.reckon import MIN_MEASURED_STARTUP_S
from toolkit.errors import InputError
from toolkit.files.plan import Plan
from toolkit.scaling.base import Rule
from toolkit.scaling.behaviour import MAX_PERIOD_S, MAX_WINDOW_S, Behaviour
from toolkit.scaling.by_law import DAY_S, MEANS_S, LawRule
from toolkit.scaling.hpa import TOLERANCE, HpaRule
from toolkit.scaling.keda import KedaRule
from toolkit.scaling.planner import PlannerRule
from toolkit.scaling.rules import make_behaviour, make_rule
from toolkit.scaling.saturation import SaturationRule
from toolkit.scaling.static import StaticRule
from toolkit.scaling.tokens import TokensRule
from toolkit.sched.policies.parameters import parameters

POLL_S = 15  # how often KEDA asks Prometheus
BURST_S = 30  # one burst of requests does not scale
IDLE_S = 300  # for which the queue must call for fewer replicas: Kubernetes' default
# Rules that a cluster runs in an autoscaler of its own: which one, and what is set there.
ELSEWHERE: dict[str, tuple[str, tuple[str, ...]]] = {
    SaturationRule.name: (
        "llm-d's workload variant autoscaler, version 1",
        ("kv_most", "queue_most", "kv_spare", "queue_spare"),
    ),
    TokensRule.name: ("llm-d's workload variant autoscaler, version 2", ("up", "down")),
    PlannerRule.name: ("Dynamo's planner", ("interval_s", "predictor", "correction")),
}
# Series of vLLM, by the names that the rules have for them.
SERIES = {
    "waiting": "vllm:num_requests_waiting",
    "running": "vllm:num_requests_running",
    "kv_usage": "vllm:kv_cache_usage_perc",
}
ENDED = "vllm:request_success_total"
PROMPTS = "vllm:request_prompt_tokens"
OUTPUTS = "vllm:request_generation_tokens"
ARRIVED = "llmctl_requests_arrived_total"


class PodLimit(NamedTuple):
    """At most so many pods, or percent of the pods, in a period."""

    type: str
    value: int
    period_s: int


@dataclass(frozen=True, slots=True)
class Direction:
    """How fast pods are added, or taken away: a direction of Kubernetes' `behavior`."""

    window_s: Sourced[int]
    policies: Sourced[list[PodLimit]]


@dataclass(frozen=True, slots=True)
class Trigger:
    """What decides the number of pods.

    Attributes:
        query: of Prometheus; for a metric of pods, the PromQL that makes it, for one pod.
        about: what its value is.
        threshold: the value for each pod.
        elsewhere: the query of a cluster without llmctl's front; '': the same.
    """

    query: str
    about: str
    threshold: Sourced[str]
    elsewhere: str = ""


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """The autoscaler of pods that are alike.

    Attributes:
        least, most: bounds of their number.
        poll_s: seconds between two looks at the triggers.
        up, down: how fast the number changes.
        triggers: the greatest of their numbers is wanted.
        pod_metric: in the place of triggers; its name, and how it is made.
        tolerance: '': Kubernetes' own.
    """

    least: Sourced[int]
    most: Sourced[int]
    poll_s: Sourced[int]
    up: Direction
    down: Direction
    triggers: tuple[Trigger, ...] = ()
    pod_metric: tuple[str, Trigger] | None = None
    tolerance: str = ""

    @property
    def needs(self) -> str:
        """What must run in the cluster; '': nothing scales."""
        if self.pod_metric is not None:
            return "prometheus-adapter"
        return "KEDA" if self.triggers else ""


@dataclass(frozen=True, slots=True)
class Pods:
    """The pods that an autoscaler adds and takes away, and the labels of their series.

    Attributes:
        count: pods at the beginning.
        selector: label matchers of the pods' own series.
        front_selector: of the series of the front before them; '': there is none.
    """

    count: Sourced[int]
    selector: str
    front_selector: str

    def series(self, name: str) -> str:
        """Return a series of the pods."""
        return f"{name}{{{self.selector}}}"


def of_queue(
    pods: Pods,
    load_s: float | None,
    breaking: Sourced[int | None],
    waiting: str,
    grace_s: int,
) -> Autoscaling:
    """Return the autoscaler by the requests that wait.

    Args:
        load_s: seconds that one of the pods loads; None: it was not measured.
        breaking: requests that may wait for one pod; more break the TTFT target. None with the
            reason: no queue tells, and nothing scales.
        waiting: the metric of requests that wait.
        grace_s: seconds that a pod has for its end.
    """
    fewest = pods.count.value
    up_s = min(math.ceil(load_s or MIN_MEASURED_STARTUP_S), MAX_PERIOD_S)
    behaviour = Behaviour(
        up_window_s=BURST_S,
        up_pods=0,
        up_percent=100,
        up_period_s=up_s,
        down_window_s=min(max(IDLE_S, 2 * math.ceil(load_s or 0)), MAX_WINDOW_S),
        down_pods=1,
        down_percent=0,
        down_period_s=min(max(grace_s, 60), MAX_PERIOD_S),
    )
    why = {
        "up_window_s": "one burst does not scale",
        "up_percent": "in this time the replicas at most double, so that new ones can load",
        "down_window_s": "so long the queue must call for fewer",
        "down_pods": "one replica in the time of its drain",
    }
    triggers: tuple[Trigger, ...] = ()
    threshold = _half(breaking)
    most = Sourced(fewest, "nothing scales")
    if threshold.value is not None:
        most = Sourced(2 * fewest, "twice the replicas; change it here")
        query = f"sum({pods.series(waiting)})"
        limit = Sourced(str(threshold.value), threshold.source)
        triggers = (Trigger(query, "the queue", limit),)
    poll_s = Sourced(POLL_S, "Kubernetes' own interval")
    up, down = _directions(behaviour, why, most.value)
    return Autoscaling(pods.count, most, poll_s, up, down, triggers)


def _half(breaking: Sourced[int | None]) -> Sourced[int | None]:
    """Return how many requests wait for one pod when another is added; at least 1."""
    if breaking.value is None:
        return breaking
    if breaking.value == 1:
        why = "the second that waits is too late: no queue is early enough"
        return Sourced(None, f"{breaking.source}; {why}")
    why = f"half of {breaking.value}, at which admission already refuses requests"
    return Sourced(breaking.value // 2, f"{why}: {breaking.source}")


def of_rule(plan: Plan, pods: Pods) -> Autoscaling:
    """Return the autoscaler that does what the rule of a plan does.

    Raises `InputError` for a rule that runs in another project's autoscaler, for one that lets the
    last replica go, and without the front that the rule's replicas stand behind.
    """
    spec, scale = plan.settings.scaling, plan.recipe.scale
    assert spec is not None
    assert scale is not None
    rule = make_rule(spec.rule, spec.parameters)
    if rule.name in ELSEWHERE:
        other, names = ELSEWHERE[rule.name]
        constants = ", ".join(f"{name} {spec.parameters[name]}" for name in names)
        raise InputError(
            f"rule '{rule.name}' runs in {other}, which is not rendered: set {constants} there",
            "or render --rule by-law of the same scaling.json",
        )
    if not pods.front_selector:
        raise InputError(
            f"rule '{rule.name}' scales replicas of a server, and engine "
            f"'{plan.recipe.engine.name}' has none",
            "name a recipe with engine vllm",
        )
    if scale.min == 0 and rule.name != StaticRule.name:
        raise InputError(
            "scale.min is 0, and llmctl's front refuses requests while no replica runs",
            "make the rule for --least 1",
        )
    why = {key: one.source for key, one in plan.explained.items()}
    most = Sourced(max(scale.max, pods.count.value), why.get("scale.max", "recipe: scale.max"))
    if isinstance(rule, StaticRule):
        most = pods.count
    limits = {
        key.removeprefix(BEHAVIOUR): source
        for key, source in why.items()
        if key.startswith(BEHAVIOUR)
    }
    up, down = _directions(make_behaviour(spec.behaviour), limits, most.value)
    triggers: tuple[Trigger, ...] = ()
    pod_metric = None
    if isinstance(rule, HpaRule):
        pod_metric = _metric_of_pods(rule, why)
    elif isinstance(rule, KedaRule):
        triggers = _totals(rule, pods, why)
    elif isinstance(rule, LawRule):
        triggers = (_demand(rule, pods, why),)
    return Autoscaling(
        least=Sourced(scale.min, why.get("scale.min", "recipe: scale.min")),
        most=most,
        poll_s=Sourced(max(round(scale.poll_s), 1), "scale.poll_s, as simulated"),
        up=up,
        down=down,
        triggers=triggers,
        pod_metric=pod_metric,
        tolerance=_tolerance(rule),
    )


def _tolerance(rule: Rule) -> str:
    """Return the tolerance of a rule that does not have Kubernetes' own."""
    own = rule.tolerance if isinstance(rule, HpaRule) else TOLERANCE
    return "" if own == TOLERANCE else f"{own:.6g}"


def _metric_of_pods(rule: HpaRule, why: Mapping[str, str]) -> tuple[str, Trigger]:
    """Return the metric that prometheus-adapter makes, with its target."""
    names = (
        [SERIES[rule.metric]] if rule.metric in SERIES else [SERIES["waiting"], SERIES["running"]]
    )
    name = names[0].replace(":", "_") if len(names) == 1 else "vllm_num_requests"
    query = " + ".join([f"sum({one}{{<<.LabelMatchers>>}}) by (<<.GroupBy>>)" for one in names])
    about = f"{rule.metric} of each pod: {why['hpa.metric']}"
    target = Sourced(f"{round(1000 * rule.target)}m", f"{rule.target:.6g}: {why['hpa.target']}")
    return name, Trigger(query, about, target)


def _totals(rule: KedaRule, pods: Pods, why: Mapping[str, str]) -> tuple[Trigger, ...]:
    """Return a trigger for each threshold that is not 0."""
    thresholds = {"waiting": rule.waiting, "running": rule.running, "kv_usage": rule.kv_usage}
    over = "avg" if rule.pool_mean else "sum"
    return tuple(
        Trigger(
            f"{over}({pods.series(SERIES[name])})",
            f"{name}, {'the mean' if rule.pool_mean else 'the sum'} of the replicas",
            Sourced(f"{threshold:.6g}", why[f"keda.{name}"]),
        )
        for name, threshold in thresholds.items()
        if threshold
    )


def _demand(rule: LawRule, pods: Pods, why: Mapping[str, str]) -> Trigger:
    """Return the trigger of `by-law`: replicas for the tokens/s to come."""
    values = parameters(rule)
    parts = [f"{name} {value}: {why[f'by-law.{name}']}" for name, value in values.items()]
    about = (
        f"q + spare x sqrt(q) replicas, q the tokens/s to come over capacity; {'; '.join(parts)}"
    )
    front = (f"{ARRIVED}{{{pods.front_selector}}}",)
    series = [pods.series(name) for name in (ENDED, SERIES["running"], SERIES["waiting"])]
    return Trigger(
        law_query(rule, front, pods),
        about,
        Sourced("1", "the query counts replicas"),
        law_query(rule, series, pods),
    )


def law_query(rule: LawRule, came: Sequence[str], pods: Pods) -> str:
    """Return the PromQL of what `LawRule` wants, in replicas.

    Args:
        came: series that add up to the requests that have come: a counter, and then gauges, such
            as the requests that have ended, that run and that wait.
        pods: the replicas: their own series say what waits and how many tokens requests have.
    """
    window_s = round(rule.window_s)
    now = _rate(came, window_s, 0)
    ahead_s = rule.horizon_s + window_s / 2
    rises = rule.growth * ahead_s / window_s
    # Without two windows of history there is no growth.
    growth = f"(clamp_min({now} - {_rate(came, window_s, window_s)}, 0) or vector(0))"
    demand = f"{now} + {rises:.6g} * {growth}" if rises else now
    if rule.season:
        before = _rate(came, window_s, round(DAY_S - ahead_s))
        # The label keeps both, so that `max` has the larger.
        demand = f'max({demand} or label_replace({before}, "day", "before", "", ""))'
    waiting = f"(sum({pods.series(SERIES['waiting'])}) or vector(0)) / {rule.backlog_s:.6g}"
    needed = f"({demand} + {waiting}) * {_tokens(rule, pods)} / {rule.capacity:.6g}"
    if not rule.spare:
        return needed
    # The square of this sum is q + spare * sqrt(q) and a constant, with q once.
    return f"(sqrt({needed}) + {rule.spare / 2:.6g}) ^ 2 - {rule.spare**2 / 4:.6g}"


def _tokens(rule: LawRule, pods: Pods) -> str:
    """Return the PromQL of a request's mean tokens, of those that ended in the last minutes."""
    over = f"[{round(MEANS_S)}s]"
    prompts, outputs, count = (
        f"sum(rate({pods.series(name)}{over}))"
        for name in (f"{PROMPTS}_sum", f"{OUTPUTS}_sum", f"{OUTPUTS}_count")
    )
    both = f"({outputs} + {rule.prompt_share:.6g} * {prompts})" if rule.prompt_share else outputs
    return f"({both} / ({count} > 0) or vector({rule.output_tokens:.6g}))"


def _rate(came: Sequence[str], window_s: int, ago_s: int) -> str:
    """Return the PromQL of requests/s in a window that ended `ago_s` seconds ago.

    `delta` of a gauge extrapolates to the window's ends as `rate` of a counter does, so their sum
    is that of one counter.
    """
    over = f"[{window_s}s]" + (f" offset {ago_s}s" if ago_s else "")
    counter, *gauges = came
    rate = f"sum(rate({counter}{over}))"
    if not gauges:
        return rate
    changes = " + ".join([f"sum(delta({gauge}{over}))" for gauge in gauges])
    return f"({rate} + ({changes}) / {window_s})"


def _directions(
    behaviour: Behaviour, why: Mapping[str, str], most: int
) -> tuple[Direction, Direction]:
    """Return both directions of a behaviour; a policy of 0 is left out.

    Kubernetes takes its defaults where there is no policy, so one that allows all pods stands for
    none.
    """
    found = []
    of = parameters(behaviour)
    for way in ("up", "down"):
        period_s = round(float(of[f"{way}_period_s"]))
        names = {"Pods": f"{way}_pods", "Percent": f"{way}_percent"}
        limits = [
            PodLimit(word, int(of[name]), period_s) for word, name in names.items() if of[name]
        ]
        reason = "; ".join([why[name] for name in names.values() if of[name] and name in why])
        if not limits:
            limits = [PodLimit("Pods", most, POLL_S)]
            reason = "no limit: as many at once as there may be"
        window = f"{way}_window_s"
        window_s = Sourced(round(float(of[window])), why.get(window, ""))
        found.append(Direction(window_s, Sourced(limits, reason)))
    return found[0], found[1]
