"""What every worker may take for what it does, and the end of one that takes longer, whatever it
does.

Alive means progress, not that a process exists. A worker is in one state at a time; a state allows
so much silence, and so much time in all.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

CHECK_EVERY_S = 1.0
START_S = 20.0  # from a process to its first sign: an interpreter, on a machine that is busy
State = Literal["away", "starting", "loading", "idle", "running"]
DOING: dict[State, str] = {
    "away": "",
    "starting": "while it started",
    "loading": "while it loaded",
    "idle": "while it had nothing to do",
    "running": "in a batch",
}


@dataclass(slots=True, frozen=True)
class Patience:
    """How long a worker may say nothing, in seconds.

    In a batch `times` its estimate and `grace_s`. While it loads, and while it is idle, where it
    says so every half second, `waits` times `grace_s`: nobody waits for its tokens then, and disks
    stall. The first load takes at most `load_s`; a later one at most three times the longest so
    far, and five minutes.
    """

    times: float = 10.0
    grace_s: float = 30.0
    waits: float = 4.0
    load_s: float = 3600.0

    @property
    def waiting_s(self) -> float:
        return self.waits * self.grace_s

    def batch_s(self, estimated_s: float) -> float:
        return self.times * estimated_s + self.grace_s


class SilentWorkerError(NamedTuple):
    """A worker that has taken too long: it said nothing for `seconds`, or has not loaded in them."""

    worker: int
    state: State
    seconds: float
    loading: bool = False  # it spoke, and did not come to an end

    def __str__(self) -> str:
        if self.loading:
            return f"worker {self.worker} has not loaded after {self.seconds:.0f} s"
        return f"worker {self.worker} has been silent for {self.seconds:.0f} s {DOING[self.state]}"

    @property
    def reason(self) -> str:
        """Why it was killed."""
        if self.loading:
            return f"killed: it had not loaded after {self.seconds:.0f} s"
        return f"killed: it was silent for {self.seconds:.0f} s {DOING[self.state]}"


@dataclass(slots=True)
class SupervisedWorker:
    """One worker: what it does, since when, its last sign of life, and what it may take."""

    state: State = "away"
    since_s: float = 0.0
    sign_s: float = 0.0
    silence_s: float = math.inf
    total_s: float = math.inf


class Supervisor:
    """Looks at all workers once a second, and ends those that take too long.

    Args:
        size: how many workers.
        kill: ends one, at once.
        clock: seconds.
    """

    def __init__(
        self,
        size: int,
        kill: Callable[[SilentWorkerError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.watched = [SupervisedWorker() for _ in range(size)]
        self._kill = kill
        self._clock = clock
        self._checked_s = clock()
        self._timer: asyncio.TimerHandle | None = None

    def enter(
        self, worker: int, state: State, silence_s: float = math.inf, total_s: float = math.inf
    ) -> None:
        """The worker begins something; that is a sign of life, too."""
        now_s = self._clock()
        self.watched[worker] = SupervisedWorker(state, now_s, now_s, silence_s, total_s)

    def sign(self, worker: int) -> None:
        """The worker said something."""
        self.watched[worker].sign_s = self._clock()

    def start(self) -> None:
        """Look now, and every so often until `stop`."""
        self._checked_s = self._clock()
        self.check()

    def stop(self) -> None:
        if self._timer:
            self._timer.cancel()

    def check(self) -> None:
        """Time in which this process stood still itself is not the workers': on a suspended machine
        nothing hangs.
        """
        now_s = self._clock()
        late_s, self._checked_s = now_s - self._checked_s - CHECK_EVERY_S, now_s
        if late_s > CHECK_EVERY_S:
            for one in self.watched:
                one.sign_s += late_s
                one.since_s += late_s
        for hung in self.silent():
            self._kill(hung)
        self._timer = asyncio.get_running_loop().call_later(CHECK_EVERY_S, self.check)

    def silent(self) -> list[SilentWorkerError]:
        """Those that take too long now."""
        now_s, found = self._clock(), []
        for worker, one in enumerate(self.watched):
            if one.state == "away":
                continue
            if now_s - one.sign_s > one.silence_s:
                found.append(SilentWorkerError(worker, one.state, now_s - one.sign_s))
            elif now_s - one.since_s > one.total_s:
                found.append(
                    SilentWorkerError(worker, one.state, now_s - one.since_s, loading=True)
                )
        return found
