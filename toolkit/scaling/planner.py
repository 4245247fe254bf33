"""The rule `planner`: the one of NVIDIA Dynamo's planner that goes by throughput.

It wants the next interval's demand over what one engine serves within the targets
(ai-dynamo/dynamo, the design page of its planner).

Its predictors ARIMA, Kalman and Prophet are not modelled; `constant` is, and a straight line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from toolkit.scaling.base import Rule
from toolkit.scaling.types import FleetView, arrived
from toolkit.sched.policies.parameters import Value, choice, parameter, policy


@policy("planner")
class PlannerRule(Rule):
    """Decides once an interval, by the rate of the last one."""

    # the planner sets the number itself
    usual_behaviour: ClassVar[Mapping[str, Value]] = MappingProxyType(
        {"up_pods": 0, "up_percent": 0, "down_window_s": 0.0, "down_percent": 0}
    )

    capacity_rps: float = parameter(
        1.0, low=1e-9, doc="requests/s that a replica among others serves within the targets"
    )
    interval_s: float = parameter(
        180.0, low=30, high=3600, search=(60, 900), log=True, doc="seconds of an interval"
    )
    predictor: str = choice(
        "constant", ("constant", "line"), doc="the next interval is as the last, or goes on so"
    )
    correction: float = parameter(
        1.0, low=0.1, high=4, search=(0.6, 2.0), doc="factor of the demand"
    )

    @property
    def memory_s(self) -> float:
        return 3.0 * self.interval_s + 60.0

    def decide(self, view: FleetView) -> int:
        interval_s = self.interval_s
        history = view.history
        latest = history.latest
        if latest is None:
            return view.wanted
        ago_s = max(latest.at_s - view.now_s // interval_s * interval_s, 0.0)
        rate = history.rate(arrived, interval_s, ago_s)
        if rate is None:
            return view.wanted
        if self.predictor == "line":
            before = history.rate(arrived, interval_s, ago_s + interval_s)
            rate = max(2.0 * rate - before, 0.0) if before is not None else rate
        return math.ceil(self.correction * rate / self.capacity_rps)
