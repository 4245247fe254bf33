"""Alive means progress, not that a process exists: which workers have been silent for longer than a batch explains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from toolkit.serve.live import Flight

CHECK_EVERY_S = 1.0


@dataclass(slots=True, frozen=True)
class Patience:
    """How long a worker may say nothing: so many times its batch's estimate, and `grace_s` on top."""

    times: float = 10.0
    grace_s: float = 30.0


class Silent(NamedTuple):
    """A worker that has said nothing for too long."""

    worker: int
    silent_s: float
    estimated_s: float

    def __str__(self) -> str:
        said = f"worker {self.worker} has been silent for {self.silent_s:.0f} s"
        return f"{said} in a batch of {self.estimated_s:.2f} s"


class Watch:
    """Kills workers that hang, so that what they ran goes on elsewhere.

    Args:
        flights: what each worker runs now, live.
        patience: when a worker hangs.
        kill: ends one, at once.
        clock: seconds; signs of life are on it.
    """

    def __init__(
        self,
        flights: Mapping[int, Flight],
        patience: Patience,
        kill: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        self._flights, self._patience, self._kill, self._clock = flights, patience, kill, clock
        self._checked_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look now, and every so often until `stop`."""
        self._checked_s = self._clock()
        self.check()

    def stop(self) -> None:
        if self._timer:
            self._timer.cancel()

    def check(self) -> None:
        """Time in which this process stood still itself is not the workers': of a suspended machine nobody hangs."""
        now_s = self._clock()
        late_s, self._checked_s = now_s - self._checked_s - CHECK_EVERY_S, now_s
        if late_s > CHECK_EVERY_S:
            for flight in self._flights.values():
                flight.sign_s += late_s
        for hung in self.silent():
            self._kill(hung.worker)
        self._timer = asyncio.get_running_loop().call_later(CHECK_EVERY_S, self.check)

    def silent(self) -> list[Silent]:
        """Those among the workers that run something."""
        found = []
        for worker, flight in self._flights.items():
            silent_s, estimated_s = self._clock() - flight.sign_s, flight.batch.estimated_s
            if silent_s > self._patience.times * estimated_s + self._patience.grace_s:
                found.append(Silent(worker, silent_s, estimated_s))
        return found
