"""vLLM's balancer of the engines of one data-parallel server (0.28 to 0.33).

Each API server has a balancer (`RankBalancer`, `DPLBAsyncMPClient.get_core_engine_for_request`). It
knows exactly which of its own requests have not ended, and everything else from figures that the
coordinator publishes (`Coordinator`, `DPCoordinatorProc.process_input_socket`): every 100 ms while
they change, else every 5 s. Between two publications it counts its own requests as waiting.

Messages take no time here. `vllm-check` compares `RankBalancer` with vLLM's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

PUBLISH_S = 0.1  # between two publications while figures change
IDLE_PUBLISH_S = 5.0  # while they do not
SETTLE_S = 0.05  # in lock step: after a message, in which the other engines' come
WAITING_WEIGHT = 6.0  # of a waiting request where the cache is full, over half of it
HALF_USED = 0.5

RankFigures: TypeAlias = tuple[int, int, float]  # waiting and running requests, used share of cache


class RankBalancer:
    """The balancer of one API server.

    Args:
        ranks: engines.
        servers: API servers.
        server: which of them this is, from 0.
    """

    def __init__(self, ranks: int, servers: int = 1, server: int = 0) -> None:
        self._servers = servers
        self._first = ranks * server // servers  # where the next look around begins
        self._own = [0] * ranks  # requests of this server that have not ended
        self._waiting = [0] * ranks
        self._running = [0] * ranks
        self._used = [0.0] * ranks

    def choose(self) -> int:
        """The engine of the next request, which counts there from now on."""
        ranks = len(self._own)
        chosen = 0
        least = math.inf
        for place in range(ranks):
            rank = (self._first + place) % ranks
            waiting = self._waiting[rank]
            load = float(max(self._servers * self._own[rank], waiting + self._running[rank]))
            if waiting:
                load += waiting * WAITING_WEIGHT * max(0.0, self._used[rank] - HALF_USED)
            if load < least:
                least = load
                chosen = rank
        self._waiting[chosen] += self._servers
        self._own[chosen] += 1
        self._first = (self._first + 1) % ranks
        return chosen

    def ended(self, rank: int) -> None:
        """A request of this server has ended at an engine."""
        self._own[rank] -= 1

    def hear(self, published: Sequence[RankFigures]) -> None:
        """The coordinator has published the figures of all engines."""
        for rank, (waiting, running, used) in enumerate(published):
            self._waiting[rank] = waiting
            self._running[rank] = running
            self._used[rank] = used


class Coordinator:
    """When the figures of all engines are published, and which ones.

    Engines tell their figures when they change. In lock step they are published as they were
    between two passes, so that no figure is of a later pass than another.

    Attributes:
        due_s: when to call `publish`, if no engine tells anything before that.
    """

    def __init__(self, ranks: int, *, lock_step: bool) -> None:
        self._lock_step = lock_step
        self._figures: list[RankFigures] = [(0, 0, 0.0)] * ranks
        self._between: list[RankFigures] = []  # as they were between two passes; empty: as they are
        self._changed = False
        self._stamp = (-1, -1)
        self._published_s = -math.inf
        self.due_s = 0.0

    def tell(self, rank: int, figures: RankFigures, stamp: tuple[int, int], now_s: float) -> None:
        """The figures of an engine have changed. `stamp`: in lock step, its wave and pass."""
        if self._lock_step and stamp > self._stamp:
            if self._changed:
                self._between = list(self._figures)
            self._stamp = stamp
        self._figures[rank] = figures
        self._changed = True
        self._wait(now_s)

    def publish(self) -> list[RankFigures]:
        """What all API servers hear at `due_s`."""
        found = self._between
        if found:
            self._between = []
        else:
            found = list(self._figures)
            self._changed = False
        self._published_s = self.due_s
        self._wait(self.due_s)
        return found

    def _wait(self, now_s: float) -> None:
        least_s = SETTLE_S if self._lock_step and not self._between else 0.0
        every_s = PUBLISH_S if self._changed else IDLE_PUBLISH_S
        self.due_s = max(now_s + least_s, self._published_s + every_s)
