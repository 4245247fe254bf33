"""The autoscaler: a state machine without a clock and without I/O, like the scheduler.

The simulator and the front make the same calls: `step` at `next_s`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toolkit.scaling.base import Rule
from toolkit.scaling.behaviour import Behaviour, Limiter
from toolkit.scaling.types import FleetSample, FleetView, History


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """A rule with everything that its decisions follow from.

    Attributes:
        rule: says how many replicas are needed.
        behaviour: limits how fast that may change.
        least, most: bounds of the number.
        scrape_s: seconds between two samples.
        poll_s: seconds between two decisions.
    """

    rule: Rule
    behaviour: Behaviour
    least: int
    most: int
    scrape_s: float = 15.0
    poll_s: float = 15.0


class Autoscaler:
    """Decides how many replicas are wanted.

    Samples are taken half of `scrape_s` after the beginning and then regularly, as a monitoring
    system does that knows nothing of the decisions.

    Args:
        scaling: the rule.
        wanted: replicas at the beginning.
        begin_s: the time of the beginning.

    Attributes:
        wanted: replicas that are wanted now.
        next_s: when `step` is to be called next.
    """

    def __init__(self, scaling: ScalingRule, wanted: int, begin_s: float) -> None:
        self.scaling = scaling
        self.wanted = wanted
        self.history = History(scaling.rule.memory_s + scaling.scrape_s)
        self._limiter = Limiter(scaling.behaviour, wanted, begin_s)
        self._scrape_s = begin_s + scaling.scrape_s / 2
        self._poll_s = begin_s + scaling.poll_s
        self.next_s = min(self._scrape_s, self._poll_s)

    def step(self, now_s: float, ready: int, sample: Callable[[], FleetSample]) -> bool:
        """Take a sample if one is due, and decide if that is due. Returns whether it decided.

        Args:
            ready: replicas that take requests now.
            sample: takes a sample.
        """
        if self._scrape_s <= now_s:
            self.history.add(sample())
            while self._scrape_s <= now_s:
                self._scrape_s += self.scaling.scrape_s
        decides = self._poll_s <= now_s
        if decides:
            self._decide(now_s, ready)
            while self._poll_s <= now_s:
                self._poll_s += self.scaling.poll_s
        self.next_s = min(self._scrape_s, self._poll_s)
        return decides

    def _decide(self, now_s: float, ready: int) -> None:
        own = self.scaling
        if not self.history:
            return
        view = FleetView(now_s, self.wanted, ready, own.least, own.most, self.history)
        asked = min(max(own.rule.decide(view), own.least), own.most)
        self.wanted = self._limiter.limited(self.wanted, asked, now_s)
