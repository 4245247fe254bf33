"""The rule `clairvoyant`: knows when requests will come; a bound for the others, in simulations.

A greedy plan: in each interval as many replicas as its demand takes, each started so early that it
is ready in time. It is not the least possible, since demand within an interval is taken as even.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field, replace

from toolkit.scaling.base import Rule
from toolkit.scaling.types import FleetView
from toolkit.sched.policies.parameters import parameter, policy


@policy("clairvoyant", knows_lengths=True)
class ClairvoyantRule(Rule):
    """Wants what the demand takes from now until a replica that is started now is ready."""

    capacity: float = parameter(
        1.0, low=1e-9, doc="tokens/s that a replica serves within the targets"
    )
    prompt_share: float = parameter(
        0.0, high=10, doc="tokens of output that take as long as one of a prompt"
    )
    spare: float = parameter(
        0.0, low=-2, high=10, doc="replicas besides, times the square root of those needed"
    )
    horizon_s: float = parameter(
        120.0, high=7200, doc="seconds until a replica that is started now is ready"
    )
    interval_s: float = parameter(240.0, low=10, doc="seconds of an interval of the plan")
    begin_s: float = 0.0
    needed: tuple[int, ...] = field(default=(), repr=False)  # in each interval

    def with_requests(
        self, arrival_s: Sequence[float], prompts: Sequence[int], outputs: Sequence[int]
    ) -> ClairvoyantRule:
        """Return the rule with its plan for requests that come at these times, ascending."""
        begin_s = arrival_s[0]
        tokens = [0.0] * (int((arrival_s[-1] - begin_s) // self.interval_s) + 1)
        for at_s, prompt, output in zip(arrival_s, prompts, outputs, strict=True):
            place = int((at_s - begin_s) // self.interval_s)
            tokens[place] += output + self.prompt_share * prompt
        shares = [total / self.interval_s / self.capacity for total in tokens]
        needed = [math.ceil(share + self.spare * math.sqrt(share)) for share in shares]
        return replace(self, begin_s=begin_s, needed=tuple(needed))

    def decide(self, view: FleetView) -> int:
        first = int((view.now_s - self.begin_s) // self.interval_s)
        last = int((view.now_s + self.horizon_s - self.begin_s) // self.interval_s)
        return max(self.needed[first : last + 1], default=view.least)
