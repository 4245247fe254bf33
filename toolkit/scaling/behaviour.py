"""How fast the number of replicas may change: the `behavior` of Kubernetes' autoscaler (HPA).

The algorithm is that of autoscaling/v2 (kubernetes/pkg/controller/podautoscaler/horizontal.go):
first the stabilization windows, then the policies of pods and percent.
"""

from __future__ import annotations

import math
from collections import deque

from toolkit.sched.policies.parameters import parameter, policy, validate

MAX_WINDOW_S = 3600.0  # of a stabilization, as Kubernetes allows
MAX_PERIOD_S = 1800.0  # of a policy


@policy()
class Behaviour:
    """Limits of both directions. The defaults are those of Kubernetes.

    A percent or a number of pods of 0 leaves that policy out; of both, the one that allows more
    holds, and without either the direction is not limited.
    """

    up_window_s: float = parameter(
        0.0, high=MAX_WINDOW_S, search=(0, 120), doc="up: the lowest number of this time holds, s"
    )
    up_pods: int = parameter(4, doc="up: at most this many replicas in up_period_s; 0: no limit")
    up_percent: int = parameter(100, doc="up: at most this many percent in up_period_s; 0: none")
    up_period_s: float = parameter(
        15.0, low=1, high=MAX_PERIOD_S, doc="seconds that up_pods and up_percent are for"
    )
    down_window_s: float = parameter(
        300.0, high=MAX_WINDOW_S, search=(0, 1200),
        doc="down: the highest number of this time holds, s",
    )  # fmt: skip
    down_pods: int = parameter(0, doc="down: at most this many replicas in down_period_s; 0: none")
    down_percent: int = parameter(
        100, doc="down: at most this many percent in down_period_s; 0: none"
    )
    down_period_s: float = parameter(
        15.0, low=1, high=MAX_PERIOD_S, doc="seconds that down_pods and down_percent are for"
    )

    def __post_init__(self) -> None:
        validate(self, "behaviour")


class Limiter:
    """Applies a behaviour to the numbers that a rule asks for, one after the other.

    Args:
        behaviour: the limits.
        wanted: replicas at the beginning, which count as asked for then.
        begin_s: the time of the beginning.
    """

    def __init__(self, behaviour: Behaviour, wanted: int, begin_s: float) -> None:
        self._behaviour = behaviour
        self._asked: deque[tuple[float, int]] = deque([(begin_s, wanted)])  # (when, number)
        self._changes: deque[tuple[float, int]] = deque()  # (when, by how many)

    def limited(self, wanted: int, asked: int, now_s: float) -> int:
        """Return the number that may be wanted from now on.

        Args:
            wanted: replicas that are wanted so far.
            asked: what the rule asks for.
        """
        allowed = self._within_rates(wanted, self._stabilized(wanted, asked, now_s), now_s)
        if allowed != wanted:
            self._changes.append((now_s, allowed - wanted))
        return allowed

    def _stabilized(self, wanted: int, asked: int, now_s: float) -> int:
        """Return the number after the windows: up only to the least that was asked for in the one
        window, and down only to the greatest in the other.
        """
        own = self._behaviour
        recent = self._asked
        while recent and recent[0][0] <= now_s - max(own.up_window_s, own.down_window_s):
            recent.popleft()
        up = down = asked
        for at_s, number in recent:
            if at_s > now_s - own.up_window_s:
                up = min(up, number)
            if at_s > now_s - own.down_window_s:
                down = max(down, number)
        recent.append((now_s, asked))
        return min(max(wanted, up), down)

    def _within_rates(self, wanted: int, number: int, now_s: float) -> int:
        """Return the number after the policies of pods and percent."""
        own = self._behaviour
        changes = self._changes
        while changes and changes[0][0] <= now_s - max(own.up_period_s, own.down_period_s):
            changes.popleft()
        if number > wanted:
            first = self._at_start(wanted, now_s - own.up_period_s)
            limits = []
            if own.up_pods:
                limits.append(first + own.up_pods)
            if own.up_percent:
                limits.append(math.ceil(first * (1 + own.up_percent / 100)))
            return min(number, max(*limits, wanted)) if limits else number
        if number < wanted:
            first = self._at_start(wanted, now_s - own.down_period_s)
            limits = []
            if own.down_pods:
                limits.append(first - own.down_pods)
            if own.down_percent:
                limits.append(int(first * (1 - own.down_percent / 100)))
            return max(number, min(*limits, wanted)) if limits else number
        return number

    def _at_start(self, wanted: int, since_s: float) -> int:
        """Return how many replicas were wanted at the start of a period."""
        return wanted - sum([by for at_s, by in self._changes if at_s > since_s])
