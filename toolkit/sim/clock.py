"""The clock of engines with their own scheduler: one loop, which takes events in the order of their
times.

    arrival      a request comes, and `Chooser.choose` says which engine gets it
    EngineWork         an engine finishes passes and plans the next ones (`PagedRun.work`)
    FirstToken   a client sees its first token, and the chooser learns of it
    Ended        a client sees the end

The time that a simulation takes follows the requests, not the engines: each engine leaps over
passes of decodes alone, and has one event for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from heapq import heappop, heappush

from toolkit.interrupts import check
from toolkit.sched.types import Refusal
from toolkit.sim.arrivals import DueRequests
from toolkit.sim.loop import CHECK_EVERY
from toolkit.sim.paged_engine import PagedEngine, PagedRun
from toolkit.sim.vllm import PagedRow
from toolkit.sim.worker import FrontDelay

# At the same time: what clients have seen first, then arrivals, then what engines do.
SEEN, ARRIVES, WORKS = range(3)


class Event:
    """Something that happens at a time.

    Attributes:
        rank, number: of events at the same time, the lower rank comes first, then the lower number.
    """

    __slots__ = ("number", "rank")

    def __init__(self, rank: int, number: int) -> None:
        self.rank = rank
        self.number = number

    def happen(self, now_s: float) -> None:
        """Do what is due."""
        raise NotImplementedError


class Chooser:
    """Says which engine gets a request. This one knows a single engine."""

    def choose(self, number: int, now_s: float) -> int | Refusal:
        """Return the index of the engine that gets request `number`, or why it is refused."""
        return 0

    def row(self, number: int, index: int) -> PagedRow:
        """Return request `number` as the engine with this index gets it."""
        raise NotImplementedError

    def hear(self, now_s: float) -> None:
        """Take the reports of engines that have come by now."""

    def learn(self, engine: PagedRun, clock: Clock) -> None:
        """Plan what is learned of the tokens that an engine gave just now."""


class Clock:
    """Engines that serve the requests of `arrivals`.

    Args:
        refused: requests that come and are not served, since others may follow their ends.
        front: what clients wait beyond the passes; None: as `engine` says.
    """

    def __init__(
        self,
        engines: Sequence[PagedRun],
        arrivals: DueRequests,
        chooser: Chooser,
        engine: PagedEngine,
        *,
        refused: Container[int],
        front: FrontDelay | None = None,
    ) -> None:
        self._works = [EngineWork(self, one, index) for index, one in enumerate(engines)]
        self._arrivals = arrivals
        self._chooser = chooser
        self._engine = engine
        self._refused = refused
        self._front = front
        self._drain = True
        self._events: list[tuple[float, int, int, int, Event]] = []  # a heap
        self._added = 0  # events
        self.refusals: list[Refusal] = []  # by the chooser

    def add(self, at_s: float, event: Event) -> None:
        """Let an event happen at a time."""
        self._added += 1
        heappush(self._events, (at_s, event.rank, event.number, self._added, event))

    def run(self, *, drain: bool = True) -> None:
        """Serve until nothing more happens. Without `drain` engines stop when the last request has
        come and none waits.
        """
        self._drain = drain
        events = self._events
        arrivals = self._arrivals
        chooser = self._chooser
        count = 0
        while events or arrivals.next_s < math.inf:
            count += 1
            if count % CHECK_EVERY == 0:
                check()
            came_s = arrivals.next_s
            if events:
                now_s, rank, _, _, event = events[0]
                if now_s < came_s or (now_s == came_s and rank < ARRIVES):
                    heappop(events)
                    chooser.hear(now_s)
                    event.happen(now_s)
                    continue
            chooser.hear(came_s)
            self._arrive(arrivals.take(), came_s)
        for work in self._works:
            work.engine.count()

    def seen_after(self, rows: int) -> FrontDelay:
        """Return what clients wait beyond passes of `rows` rows."""
        return self._front or self._engine.front(rows)

    def work(self, work: EngineWork, now_s: float) -> None:
        """Let an engine do what is due, and plan what follows from it."""
        engine = work.engine
        arrivals = self._arrivals
        engine.work(
            drain=self._drain or arrivals.left > 0,
            follow=arrivals.follow,
            until_s=arrivals.next_s if len(self._works) == 1 else math.inf,
        )
        if engine.next_s < math.inf:
            self.add(engine.next_s, work)
        if engine.first_tokens or engine.ends:
            self._chooser.learn(engine, self)
            if engine.ends:
                end_s, _, rows = engine.ends[0]  # they ended with one pass
                numbers = [number for _, number, _ in engine.ends]
                arrivals.ended(numbers, end_s, self.seen_after(rows).last_s)
                engine.ends.clear()
            engine.first_tokens.clear()

    def _arrive(self, number: int, now_s: float) -> None:
        """Send a request that comes to an engine."""
        if number not in self._refused:
            index = self._chooser.choose(number, now_s)
            if isinstance(index, int):
                work = self._works[index]
                before_s = work.engine.next_s
                work.engine.arrive(self._chooser.row(number, index), now_s)
                if work.engine.next_s != before_s:
                    self.add(work.engine.next_s, work)
                return
            self.refusals.append(index)
        self._arrivals.ended([number], now_s, self.seen_after(0).last_s)


class EngineWork(Event):
    """An engine finishes passes, and plans the next ones. It is stale, and does nothing, if the
    engine is to work at another time.
    """

    __slots__ = ("_clock", "engine")

    def __init__(self, clock: Clock, engine: PagedRun, index: int) -> None:
        super().__init__(WORKS, index)
        self._clock = clock
        self.engine = engine

    def happen(self, now_s: float) -> None:
        if self.engine.next_s == now_s:
            self._clock.work(self, now_s)
