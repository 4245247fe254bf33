"""The rule `saturation`: llm-d's workload variant autoscaler, version 1: spare KV cache and queue.

The rule and its constants are those of the project's saturation analyzer
(llm-d/llm-d-workload-variant-autoscaler).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from toolkit.scaling.base import Rule
from toolkit.scaling.types import FleetView
from toolkit.sched.policies.parameters import Value, parameter, policy

# Of the benchmarks that the project publishes.
BEHAVIOUR: Mapping[str, Value] = MappingProxyType(
    {
        "up_pods": 10, "up_percent": 0, "up_period_s": 150.0,
        "down_window_s": 240.0, "down_pods": 10, "down_percent": 0, "down_period_s": 150.0,
    }
)  # fmt: skip


@policy("saturation")
class SaturationRule(Rule):
    """Adds one replica when those that are not saturated have little to spare, and takes one when
    the others would still have enough.

    A replica is saturated at `kv_most` or `queue_most`. While a replica starts, nothing changes.
    """

    usual_behaviour: ClassVar[Mapping[str, Value]] = BEHAVIOUR

    kv_most: float = parameter(
        0.80, low=0.01, high=1, doc="use of the cache of a saturated replica"
    )
    queue_most: float = parameter(5.0, low=0.1, doc="waiting requests of a saturated replica")
    kv_spare: float = parameter(
        0.10, high=1, search=(0.02, 0.5), doc="one more below this spare share of the cache"
    )
    queue_spare: float = parameter(
        3.0, search=(0.5, 4.5), doc="one more below this spare length of the queue"
    )
    window_s: float = parameter(60.0, low=1, doc="seconds of which the largest values count")

    def decide(self, view: FleetView) -> int:
        sample = view.history.latest
        if sample is None or view.ready != view.wanted or len(sample.ready) != view.wanted:
            return view.wanted
        usage: dict[int, float] = {}
        queue: dict[int, float] = {}
        for each in view.history.last(self.window_s):
            for load in each.ready:
                usage[load.place] = max(usage.get(load.place, 0.0), load.kv_usage)
                queue[load.place] = max(queue.get(load.place, 0.0), load.waiting)
        places = [load.place for load in sample.ready]
        free = [
            place
            for place in places
            if usage[place] < self.kv_most and queue[place] < self.queue_most
        ]
        if not free:
            return view.wanted + 1
        count = len(free)
        used_kv = sum([usage[place] for place in free]) / count
        used_queue = sum([queue[place] for place in free]) / count
        if self._lacks(used_kv, used_queue):
            return view.wanted + 1
        if count < 2:
            return view.wanted
        more = count / (count - 1)
        return view.wanted - (not self._lacks(used_kv * more, used_queue * more))

    def _lacks(self, used_kv: float, used_queue: float) -> bool:
        """Whether the mean replica has too little to spare."""
        spare_kv = self.kv_most - used_kv
        return spare_kv < self.kv_spare or self.queue_most - used_queue < self.queue_spare
