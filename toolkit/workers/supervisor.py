"""Time limits for every state of a worker, and the end of a worker that exceeds one.

A worker counts as alive if it makes progress, not if its process exists. It is in one state at a
time; a state limits how long the worker may be silent, and how long the state may take.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

CHECK_EVERY_S = 1.0
START_S = 20.0  # until a process's first sign of life: its interpreter starts on a busy machine
State = Literal["away", "starting", "loading", "idle", "running"]
WHILE: dict[State, str] = {
    "away": "",
    "starting": "while it started",
    "loading": "while it loaded",
    "idle": "while it was idle",
    "running": "in a batch",
}


@dataclass(slots=True, frozen=True)
class Patience:
    """How long a worker may be silent, and how long its first load may take, in seconds.

    - In a batch: `times` its estimate plus `grace_s`.
    - While it loads or is idle, where it gives a sign of life every half second: `waits` times
      `grace_s`. No client waits for its tokens then, and disks may stall.
    - The first load may take `load_s` in all. A later one may take three times the longest load so
      far plus five minutes.
    """

    times: float = 10.0
    grace_s: float = 30.0
    waits: float = 4.0
    load_s: float = 3600.0

    @property
    def waiting_s(self) -> float:
        """Silence allowed while a worker loads or is idle."""
        return self.waits * self.grace_s

    def batch_s(self, estimated_s: float) -> float:
        """Silence allowed in a batch."""
        return self.times * estimated_s + self.grace_s


class SilentWorker(NamedTuple):
    """A worker that has taken too long: it was silent for `seconds`, or, with `loading`, gave signs
    of life but did not finish loading in `seconds`.
    """

    worker: int
    state: State
    seconds: float
    loading: bool = False

    def __str__(self) -> str:
        if self.loading:
            return f"worker {self.worker} has not loaded after {self.seconds:.0f} s"
        return f"worker {self.worker} has been silent for {self.seconds:.0f} s {WHILE[self.state]}"

    @property
    def reason(self) -> str:
        """Why it was killed."""
        if self.loading:
            return f"killed: it had not loaded after {self.seconds:.0f} s"
        return f"killed: it was silent for {self.seconds:.0f} s {WHILE[self.state]}"


@dataclass(slots=True)
class SupervisedWorker:
    """One worker's state, its start, its last sign of life (on the monotonic clock), and the
    limits of silence and total time, in seconds.
    """

    state: State = "away"
    since_s: float = 0.0
    sign_s: float = 0.0
    silence_s: float = math.inf
    total_s: float = math.inf


class Supervisor:
    """Checks all workers once a second, and kills those that take too long.

    Args:
        size: number of workers.
        kill: ends a worker at once.
    """

    def __init__(self, size: int, kill: Callable[[SilentWorker], None]) -> None:
        self.watched = [SupervisedWorker() for _ in range(size)]
        self._kill = kill
        self._checked_s = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    def enter(
        self, worker: int, state: State, silence_s: float = math.inf, total_s: float = math.inf
    ) -> None:
        """The worker enters a state, which is also a sign of life."""
        now_s = time.monotonic()
        self.watched[worker] = SupervisedWorker(state, now_s, now_s, silence_s, total_s)

    def sign(self, worker: int) -> None:
        """The worker gave a sign of life."""
        self.watched[worker].sign_s = time.monotonic()

    def start(self) -> None:
        """Check now, and every `CHECK_EVERY_S` until `stop`."""
        self._checked_s = time.monotonic()
        self.check()

    def stop(self) -> None:
        """End the checks."""
        if self._timer:
            self._timer.cancel()

    def check(self) -> None:
        """Kill the workers that take too long, and schedule the next check.

        Time in which this process itself stood still does not count: on a suspended machine no
        worker hangs.
        """
        now_s = time.monotonic()
        late_s, self._checked_s = now_s - self._checked_s - CHECK_EVERY_S, now_s
        if late_s > CHECK_EVERY_S:
            for watched in self.watched:
                watched.sign_s += late_s
                watched.since_s += late_s
        for silent in self.silent():
            self._kill(silent)
        self._timer = asyncio.get_running_loop().call_later(CHECK_EVERY_S, self.check)

    def silent(self) -> list[SilentWorker]:
        """The workers that take too long now."""
        now_s, found = time.monotonic(), []
        for worker, watched in enumerate(self.watched):
            silence_s, total_s = now_s - watched.sign_s, now_s - watched.since_s
            if watched.state == "away":
                continue
            if silence_s > watched.silence_s:
                found.append(SilentWorker(worker, watched.state, silence_s))
            elif total_s > watched.total_s:
                found.append(SilentWorker(worker, watched.state, total_s, loading=True))
        return found
