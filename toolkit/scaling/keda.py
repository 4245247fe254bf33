"""The rule `keda`: Prometheus queries of the pool over thresholds, as KEDA gives them to an HPA.

Each query is an external metric with AverageValue: the total over the threshold is the number of
replicas, whatever is ready, and the greatest of several wins. From and to zero KEDA itself scales
(kedacore/keda, scale_scaledobjects.go).
"""

from __future__ import annotations

from toolkit.scaling.base import Rule
from toolkit.scaling.hpa import TOLERANCE, for_total
from toolkit.scaling.types import FleetView
from toolkit.sched.policies.parameters import parameter, policy


@policy("keda")
class KedaRule(Rule):
    """Wants the greatest of the totals over their thresholds; a threshold of 0 leaves one out.

    With `least` 0, any request wakes one replica, and the last one goes `cooldown_s` after the last
    request.
    """

    waiting: float = parameter(
        5.0, search=(0.5, 50), log=True, doc="waiting requests for each replica"
    )
    running: float = parameter(
        0.0, search=(4, 512), log=True, doc="running requests for each replica"
    )
    kv_usage: float = parameter(
        0.0, search=(0.2, 1.0), doc="used share of the KV cache, summed, for each replica"
    )
    pool_mean: bool = parameter(
        False, doc="true: the queries are means of the pool, as in some guides, not sums"
    )
    cooldown_s: float = parameter(300.0, doc="seconds without a request before the last one goes")

    @property
    def memory_s(self) -> float:
        return self.cooldown_s + 60.0

    def decide(self, view: FleetView) -> int:
        sample = view.history.latest
        if sample is None:
            return view.wanted
        if not view.least and not self._is_active(view):
            return 0
        divisor = max(len(sample.ready), 1) if self.pool_mean else 1
        waiting = sample.queued + sum([load.waiting for load in sample.ready])
        totals = (
            (waiting, self.waiting),
            (sum([load.running for load in sample.ready]), self.running),
            (sum([load.kv_usage for load in sample.ready]), self.kv_usage),
        )
        wishes = [
            for_total(total / divisor, target, view.wanted, TOLERANCE)
            for total, target in totals
            if target
        ]
        return max(*wishes, 1)

    def _is_active(self, view: FleetView) -> bool:
        """Whether there was a request in the time of the cooldown."""
        recent = view.history.last(self.cooldown_s)
        return any(sample.under_way for sample in recent) or (
            recent[-1].arrived > recent[0].arrived
        )
