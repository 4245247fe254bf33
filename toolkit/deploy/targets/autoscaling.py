"""When KEDA adds a replica and when it takes one away: the ScaledObject, and its explanation.

The queue at which first tokens come too late is no threshold: admission refuses requests there, so
the queue stays below it, and a new replica serves only after its load. So the threshold is half of
that queue, and the query adds what the queue grows by until another replica has loaded, at the
speed of the last minutes. Where loading was not measured, the query has the queue alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.deploy import reckon
from toolkit.deploy.order import SECONDS, ExplainedValue, Order, Sourced, explain_value
from toolkit.deploy.targets import objects as common
from toolkit.deploy.targets.objects import Object

POLL_S = 15  # how often KEDA asks Prometheus
SCRAPE_S = 15  # how often Prometheus asks the pods
SPEED = "[2m]"  # of the queue's growth: eight scrapes
STEADY_S = 30  # for which a queue must call for more replicas: one burst does not
IDLE_S = 300  # for which it must call for fewer: Kubernetes' default
# The longest that HPAScalingRules of autoscaling/v2 allow.
MAX_PERIOD_S = 1800
MAX_WINDOW_S = 3600
FAILURES = 3  # of KEDA's question in a row
FALLBACK = "currentReplicasIfHigher"  # of KEDA 2.17


@dataclass(frozen=True)
class Autoscaling:
    """The autoscaler of pods that are alike.

    Args:
        order: has the options and the deployment's name.
        load: seconds that one of these pods loads (`reckon.load_s`).
        breaking: requests that may wait for one pod; more break the TTFT target. None with the
            reason: no queue tells.
        fewest: pods, at least 1.
        grace_s: seconds that a pod has for its end.
    """

    order: Order
    load: Sourced[int | None]
    breaking: Sourced[int | None]
    fewest: int
    grace_s: int

    @property
    def threshold(self) -> Sourced[int | None]:
        """Requests that wait for one pod at which KEDA adds another; at least 1."""
        if self.breaking.value is None:
            return Sourced(None, self.breaking.source)
        if self.breaking.value == 1:
            why = "the second that waits is too late: no queue is early enough"
            return Sourced(None, f"{self.breaking.source}; {why}")
        why = f"half of {self.breaking.value}, at which admission already refuses requests"
        return Sourced(self.breaking.value // 2, f"{why}: {self.breaking.source}")

    @property
    def most(self) -> Sourced[int]:
        """The greatest number of pods."""
        if self.threshold.value is None:
            return Sourced(self.fewest, "nothing scales")
        if given := self.order.options.max_replicas:
            return Sourced(max(given, self.fewest), "--max-replicas")
        return Sourced(2 * self.fewest, "twice the replicas; change it with --max-replicas")

    @property
    def ready(self) -> Sourced[int | None]:
        """Seconds from a queue's growth until another pod serves; None: loading is not measured."""
        if self.load.value is None:
            return self.load
        seen_s = POLL_S + SCRAPE_S
        source = f"{self.load.source}, and {seen_s} s until Prometheus and KEDA see the queue"
        return Sourced(self.load.value + seen_s, f"{source}; without a download")

    def query(self, waiting: str) -> str:
        """The PromQL expression that KEDA divides by the number of pods; `waiting` is a series."""
        now = f"sum({waiting})"
        if self.ready.value is None:
            return now
        # A queue without two scrapes has no speed.
        speed = f"(clamp_min(sum(deriv({waiting}{SPEED})), 0) or vector(0))"
        return f"{now} + {self.ready.value} * {speed}"

    @property
    def _step_s(self) -> int:
        """Seconds in which the number of pods at most doubles."""
        return min(self.ready.value or reckon.MIN_MEASURED_STARTUP_S, MAX_PERIOD_S)

    @property
    def _idle_s(self) -> int:
        return min(max(IDLE_S, 2 * (self.ready.value or 0)), MAX_WINDOW_S)

    @property
    def _down_s(self) -> int:
        return min(max(self.grace_s, 60), MAX_PERIOD_S)

    def scaled_object(self, target: Mapping[str, str], waiting: str, name: str = "") -> Object:
        """The ScaledObject of `target`, which has a threshold. By default it has the deployment's
        name. KEDA takes all values of a trigger's metadata as text.
        """
        trigger = {
            "serverAddress": self.order.options.prometheus,
            "query": self.query(waiting),
            "threshold": str(self.threshold.value),
        }
        behavior: dict[str, Any] = {
            "scaleUp": {
                "stabilizationWindowSeconds": STEADY_S,
                "policies": [{"type": "Percent", "value": 100, "periodSeconds": self._step_s}],
            },
            "scaleDown": {
                "stabilizationWindowSeconds": self._idle_s,
                "policies": [{"type": "Pods", "value": 1, "periodSeconds": self._down_s}],
            },
        }
        fallback = {
            "failureThreshold": FAILURES,
            "replicas": self.fewest,
            "behavior": FALLBACK,
        }
        spec = {
            "scaleTargetRef": dict(target),
            "pollingInterval": POLL_S,
            "minReplicaCount": self.fewest,
            "maxReplicaCount": self.most.value,
            "fallback": fallback,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
            "triggers": [{"type": "prometheus", "metricType": "AverageValue", "metadata": trigger}],
        }
        about = common.metadata(self.order, name)
        return common.api_object("keda.sh/v1alpha1", "ScaledObject", about, spec)

    def explained(self, metric: str) -> list[ExplainedValue]:
        """The lines of EXPLAIN.md; `metric` is the name of the queue's."""
        if self.threshold.value is None:
            return [explain_value("ScaledObject", self.threshold)]
        grown = "what the queue grows by until another replica serves is added to it"
        ready = self.ready
        if ready.value is None:
            grown = "the queue alone"
        doubled = f"in {self._step_s} s the replicas at most double, so that new ones can load"
        calm = f"{self._idle_s} s without need, then one replica in {self._down_s} s: its drain"
        lost = (
            f"after {FAILURES} failures of Prometheus: as many as run, at least {self.fewest}; "
            "needs KEDA 2.17 or newer"
        )
        cooldown = (
            "KEDA waits so long only before it goes to zero replicas; with a minimum of "
            f"{self.fewest}, scaleDown decides"
        )
        return [
            explain_value(f"ScaledObject threshold of {metric}", self.threshold),
            ExplainedValue(
                "ScaledObject query: growth",
                "none" if ready.value is None else SECONDS.format(ready.value),
                f"{grown}: {ready.source}",
            ),
            explain_value("ScaledObject maxReplicaCount", self.most),
            ExplainedValue("ScaledObject scaleUp", f"after {STEADY_S} s", doubled),
            ExplainedValue("ScaledObject scaleDown", f"after {self._idle_s} s", calm),
            ExplainedValue("ScaledObject fallback", FALLBACK, lost),
            ExplainedValue("ScaledObject cooldownPeriod", "not set", cooldown),
        ]
