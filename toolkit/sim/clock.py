"""The clock of a simulation: one loop, which takes arrivals and events in the order of their times.

Two clocks are made of it: `toolkit.sim.loop` drives this project's scheduler and its workers, and
`toolkit.sim.replicas` engines with schedulers of their own.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import Final

from toolkit.interrupts import check
from toolkit.sim.arrivals import DueRequests

CHECK_EVERY: Final = 64  # events between two looks for Ctrl-C
# At the same time: first what has ended, then arrivals, then what begins.
ENDS, ARRIVES, BEGINS = range(3)


class Clock:
    """Virtual time. A subclass says what an arrival and an event do.

    An event has a time, a rank, an order and an index. Of events at the same time the lower rank
    comes first, then the lower order. An event cannot be taken back: one that is out of date does
    nothing.

    Attributes:
        now_s: the time of what happens.
        ticks_s: when `tick` is due, after all else that happens at that time; infinity: never.
    """

    def __init__(self, arrivals: DueRequests) -> None:
        self.arrivals = arrivals
        self.now_s = -math.inf
        self.ticks_s = math.inf
        self.events: list[tuple[float, int, int, int]] = []  # a heap

    def add(self, at_s: float, rank: int, order: int, index: int) -> None:
        """Let an event happen at a time."""
        heappush(self.events, (at_s, rank, order, index))

    def run(self) -> None:
        """Go from event to event until nothing more happens."""
        events = self.events
        arrivals = self.arrivals
        count = 0
        while events or arrivals.next_s < math.inf or self.ticks_s < math.inf:
            count += 1
            if count % CHECK_EVERY == 0:
                check()
            came_s = arrivals.next_s
            next_s = max(came_s, self.now_s)  # an end may be told late, and what follows it too
            is_event = False
            if events:
                at_s, rank, order, index = events[0]
                is_event = at_s < next_s or (at_s == next_s and rank < ARRIVES)
                if is_event:
                    next_s = at_s
            if self.ticks_s < next_s:
                self.now_s = self.ticks_s
                self.tick()
                continue
            self.now_s = next_s
            if is_event:
                heappop(events)
                self.happen(rank, order, index)
            else:
                self.arrive(arrivals.take(), came_s)

    def happen(self, rank: int, order: int, index: int) -> None:
        """Do what is due now."""
        raise NotImplementedError

    def tick(self) -> None:
        """Do what follows from all that has happened now."""

    def arrive(self, number: int, came_s: float) -> None:
        """Take a request that comes now, or that came at `came_s`."""
        raise NotImplementedError
