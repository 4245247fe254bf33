"""When KEDA adds a replica, and when it takes one away.

The queue at which first tokens come too late is no threshold: admission refuses requests there, so
the queue stays below it, and a new replica serves only after its load. So the threshold is half of
that queue, and the query adds what the queue grows by until another replica has loaded, at the
speed of the last minutes. Where loading was not measured, the query has the queue alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.deploy.order import Sourced
from toolkit.deploy.reckon import MIN_MEASURED_STARTUP_S

POLL_S = 15  # how often KEDA asks Prometheus
SCRAPE_S = 15  # how often Prometheus asks the pods
SPEED = "[2m]"  # of the queue's growth: eight scrapes
IDLE_S = 300  # for which the queue must call for fewer replicas: Kubernetes' default
# The longest that HPAScalingRules of autoscaling/v2 allow.
MAX_PERIOD_S = 1800
MAX_WINDOW_S = 3600


@dataclass(frozen=True)
class Autoscaling:
    """The bounds and the query of an autoscaler of pods that are alike.

    Args:
        load: seconds that one of these pods loads (`reckon.load_s`).
        breaking: requests that may wait for one pod; more break the TTFT target. None with the
            reason: no queue tells.
        fewest: pods, at least 1.
        max_replicas: the greatest number of pods; 0: twice the fewest.
        grace_s: seconds that a pod has for its end.
    """

    load: Sourced[int | None]
    breaking: Sourced[int | None]
    fewest: int
    max_replicas: int
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
        if self.max_replicas:
            return Sourced(max(self.max_replicas, self.fewest), "--max-replicas")
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
        """Return the PromQL that KEDA divides by the number of pods; `waiting` is a series."""
        now = f"sum({waiting})"
        if self.ready.value is None:
            return now
        # A queue without two scrapes has no speed.
        speed = f"(clamp_min(sum(deriv({waiting}{SPEED})), 0) or vector(0))"
        return f"{now} + {self.ready.value} * {speed}"

    @property
    def up_s(self) -> int:
        """Seconds in which the number of pods at most doubles, so that new ones can load."""
        return min(self.ready.value or MIN_MEASURED_STARTUP_S, MAX_PERIOD_S)

    @property
    def idle_s(self) -> int:
        """Seconds for which the queue must call for fewer pods."""
        return min(max(IDLE_S, 2 * (self.ready.value or 0)), MAX_WINDOW_S)

    @property
    def down_s(self) -> int:
        """Seconds in which at most one pod goes: its drain."""
        return min(max(self.grace_s, 60), MAX_PERIOD_S)
