"""The rule `by-law`: the demand to come over what one replica serves by the fitted law.

Demand and capacity are tokens of output per second. A prompt token counts as the share of one that
the law of a pass gives it, so that hours of long requests take more replicas than hours of short
ones. The capacity is what the simulator gives a replica on this traffic, within the targets. The
fewer replicas there are, the more spare ones it takes, by the square root of their number
(square-root staffing: Halfin and Whitt, Operations Research 29, 1981). The demand is forecast until
a replica that is started now would be ready. In a cluster it is one Prometheus query with these
constants.
"""

from __future__ import annotations

import math

from toolkit.scaling.base import Rule
from toolkit.scaling.hpa import for_total
from toolkit.scaling.types import FleetView, arrived, ended, output_tokens, prompt_tokens
from toolkit.sched.policies.parameters import parameter, policy

DAY_S = 86400.0
MEANS_S = 900.0  # that mean lengths are over


@policy("by-law")
class LawRule(Rule):
    """Wants q + spare * sqrt(q) replicas, where q is the forecast demand over a replica's capacity.

    The demand is the rate of arrivals over `window_s` times their mean tokens, and its growth since
    the window before goes on for `horizon_s`; a fall does not. With `season` it is at least what
    came a day before at the time that the horizon reaches. What waits is to be served within
    `backlog_s` besides.
    """

    capacity: float = parameter(
        1.0, low=1e-9, doc="tokens/s that a replica serves within the targets"
    )
    prompt_share: float = parameter(
        0.0, high=10, doc="tokens of output that take as long as one of a prompt"
    )
    output_tokens: float = parameter(
        1.0, low=1e-9, doc="mean output of a request, until enough have ended"
    )
    spare: float = parameter(
        0.5, high=10, search=(0, 1.5), doc="replicas besides, times the square root of those needed"
    )
    window_s: float = parameter(
        180.0, low=30, high=3600, search=(60, 900), log=True, doc="seconds that rates are over"
    )
    growth: float = parameter(
        1.0, high=3, search=(0, 2), doc="share of the last growth that goes on; 0: none"
    )
    horizon_s: float = parameter(
        120.0, high=7200, doc="seconds until a replica that is started now is ready"
    )
    backlog_s: float = parameter(
        300.0,
        low=10,
        search=(60, 1800),
        log=True,
        doc="seconds in which waiting requests are served",
    )
    season: bool = parameter(False, doc="true: at least the demand of a day before")

    @property
    def memory_s(self) -> float:
        day_s = DAY_S if self.season else 0.0
        return max(2.0 * self.window_s, MEANS_S) + day_s + 60.0

    def decide(self, view: FleetView) -> int:
        demand = self.demand(view)
        if demand is None:
            return view.wanted
        needed = demand / self.capacity
        return for_total(needed + self.spare * math.sqrt(needed), 1.0, view.wanted)

    def demand(self, view: FleetView) -> float | None:
        """Return the forecast in tokens/s; None before there are two samples."""
        history = view.history
        sample = history.latest
        rate = history.rate(arrived, self.window_s)
        if rate is None or sample is None:
            return None
        before = history.rate(arrived, self.window_s, self.window_s)
        if before is not None and rate > before:
            ahead_s = self.horizon_s + self.window_s / 2.0
            rate += self.growth * (rate - before) / self.window_s * ahead_s
        if self.season:
            ago_s = DAY_S - self.horizon_s - self.window_s / 2.0
            yesterday = history.rate(arrived, self.window_s, ago_s)
            rate = max(rate, yesterday or 0.0)
        waiting = sample.queued + sum([load.waiting for load in sample.ready])
        return (rate + waiting / self.backlog_s) * self._tokens(view)

    def _tokens(self, view: FleetView) -> float:
        """Return the mean tokens of a request: of the prompts and outputs of the last minutes."""
        history = view.history
        came = history.rate(arrived, MEANS_S)
        prompts = history.rate(prompt_tokens, MEANS_S)
        over = history.rate(ended, MEANS_S)
        outputs = history.rate(output_tokens, MEANS_S)
        output = outputs / over if over and outputs is not None else self.output_tokens
        prompt = prompts / came if came and prompts is not None else 0.0
        return output + self.prompt_share * prompt
