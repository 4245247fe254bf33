"""Keeping children running, on one asyncio loop: a supervisor starts each of them again when it
ends, after a growing pause, and kills one that takes too long.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field

from toolkit.errors import EngineError, LlmctlError

# A child that ended is started again at once, and one that ended twice in a row after this pause,
# which doubles each time.
PAUSE_S = 0.5
PAUSE_MAX_S = 30.0
CHECK_EVERY_S = 1.0

_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class SupervisedChild:
    """One child of a supervisor, through all its processes. Times are monotonic, in seconds.

    Attributes:
        does: what it does now, as the reason of a kill says it: 'started', 'loaded'.
        since_s: when that began.
        sign_s: its last sign of life.
        silence_s, total_s: how long it may be silent, and how long what it does may take.
        killed: why the supervisor killed its present process; '': it did not.
        is_retired: it is not started again.
        is_ready: it has started, and can be used.
        ends: of its processes in a row, without a success between them.
        failed_starts: in a row.
        lost_s: when it was lost; None while it is ready, and before it was for the first time.
        first: done when it is ready for the first time, or with the error if it cannot be started.
    """

    does: str = ""
    since_s: float = 0.0
    sign_s: float = 0.0
    silence_s: float = math.inf
    total_s: float = math.inf
    killed: str = ""
    is_ready: bool = False
    is_retired: bool = False
    ends: int = 0
    failed_starts: int = 0
    lost_s: float | None = None
    first: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def overdue(self, now_s: float) -> str:
        """Return why it is to be killed; '' while it is in time. It may give signs of life and
        still not have started in time.
        """
        silent_s = now_s - self.sign_s
        total_s = now_s - self.since_s
        if silent_s > self.silence_s:
            return f"killed: it was silent for {silent_s:.0f} s while it {self.does}"
        if total_s > self.total_s:
            return f"killed: it had not {self.does} after {total_s:.0f} s"
        return ""


class Supervisor(ABC):
    """Keeps `size` children running, numbered from 0; others may come and go.

    A subclass runs a process of a child in `live`, and calls there `ready` when the child can be
    used, `succeeded` when it has done its work, and `enter` and `sign` if it may take too long.

    Attributes:
        called: what the log and errors call a child.
        children: what is known of each.
        ending: no child is started again.
    """

    called = "child"

    def __init__(self, size: int) -> None:
        self.size = size
        self.children: list[SupervisedChild] = []
        self.ending = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._checked_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @abstractmethod
    async def live(self, number: int) -> str:
        """Start a process of a child and wait until nothing of it is left. Returns in one line why
        it ended.

        Raises `LlmctlError` or `OSError` if it cannot be started. When cancelled it ends it.
        """

    def kill(self, number: int) -> None:
        """End a child at once, if it runs. Only children with limits (`enter`) need it."""
        raise NotImplementedError

    def ended(self, number: int, error: LlmctlError) -> bool:
        """A process of a child has ended. Returns whether to start another one; the first one that
        could not be started is not started again.
        """
        return True

    async def start_children(self) -> None:
        """Start all children at once, and return when each is ready. Raises the error of the first
        one that cannot be started; the others run on.
        """
        for number in range(self.size):
            self.start_child(number)
        self._checked_s = time.monotonic()
        self.check()
        await asyncio.gather(*[child.first for child in self.children])

    def start_child(self, number: int) -> None:
        """Start a child with the next number, or one in the place of a child that is over."""
        child = SupervisedChild()
        task = asyncio.create_task(self._keep(number), name=f"{self.called} {number}")
        self.children[number : number + 1] = [child]
        self._tasks[number : number + 1] = [task]

    def retire(self, number: int) -> None:
        """Start a child not again. One that is not ready is ended; otherwise `live` ends it."""
        child = self.children[number]
        child.is_retired = True
        if not child.is_ready:
            self._tasks[number].cancel()

    def is_over(self, number: int) -> bool:
        """Whether nothing of a child is left, and it is not started again."""
        return self._tasks[number].done()

    async def end_children(self, patience_s: float = 0.0) -> None:
        """Start no child again, wait `patience_s` for their ends, and end the rest."""
        self.ending.set()
        if self._timer:
            self._timer.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=patience_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def ready(self, number: int) -> None:
        """A child has started and can be used."""
        child = self.children[number]
        child.is_ready = True
        child.failed_starts = 0
        if not child.first.done():
            child.first.set_result(None)
        if child.lost_s is not None:
            away_s = time.monotonic() - child.lost_s
            _logger.info("%s %d is back: it was away for %.1f s", self.called, number, away_s)
            child.lost_s = None

    def succeeded(self, number: int) -> None:
        """A child has done its work: its next end counts as the first one."""
        self.children[number].ends = 0

    def enter(
        self, number: int, does: str, silence_s: float = math.inf, total_s: float = math.inf
    ) -> None:
        """A child begins to do something else, which is also a sign of life. It is killed if it is
        silent for longer than `silence_s`, or takes longer than `total_s`.
        """
        child = self.children[number]
        child.does = does
        child.since_s = child.sign_s = time.monotonic()
        child.silence_s = silence_s
        child.total_s = total_s

    def sign(self, number: int, silence_s: float | None = None) -> None:
        """A child gives a sign of life, and from now on, if given, one within `silence_s`."""
        child = self.children[number]
        child.sign_s = time.monotonic()
        if silence_s is not None:
            child.silence_s = silence_s

    def check(self) -> None:
        """Kill the children that take too long, and check again in `CHECK_EVERY_S`.

        Time in which this process itself stood still does not count: on a suspended machine no
        child hangs.
        """
        now_s = time.monotonic()
        late_s = now_s - self._checked_s - CHECK_EVERY_S
        self._checked_s = now_s
        if late_s > CHECK_EVERY_S:
            for child in self.children:
                child.sign_s += late_s
                child.since_s += late_s
        for number, child in enumerate(self.children):
            if why := child.overdue(now_s):
                child.killed = why
                self.kill(number)
        if self._timer:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(CHECK_EVERY_S, self.check)

    async def _keep(self, number: int) -> None:
        """Run one process of a child after another."""
        child = self.children[number]
        while not self.ending.is_set():
            child.killed = ""
            error = await self._end_of(number)
            if child.is_retired:
                return
            self.enter(number, "")
            child.ends += 1
            child.failed_starts += not child.is_ready
            goes_on = self.ended(number, error)
            if not child.first.done():
                child.first.set_exception(error)
                return
            if not self.ending.is_set():
                self._log(number, error)
            child.is_ready = False
            if not goes_on:
                return
            if child.ends > 1:
                pause_s = min(PAUSE_S * 2.0 ** (child.ends - 2), PAUSE_MAX_S)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.ending.wait(), pause_s)

    async def _end_of(self, number: int) -> LlmctlError:
        """Run a process of a child. Returns why it ended."""
        child = self.children[number]
        try:
            why = await self.live(number)
        except LlmctlError as error:
            return error
        except OSError as error:
            why = f"no process could be started: {error.strerror or error}"
        except Exception as error:  # a bug: it is said, and the child is started again
            _logger.exception("%s %d", self.called, number)
            why = f"{type(error).__name__}: {error}"
        why = child.killed or why
        if not child.first.done():
            why = f"{self.called} {number} ended while it was started: {why}"
        return EngineError(why)

    def _log(self, number: int, error: LlmctlError) -> None:
        """Log that a child is lost, or could not be started again."""
        child = self.children[number]
        text = "%s %d could not be started again: %s"
        if child.is_ready:
            text = "%s %d is lost: %s; it is started again"
        if child.lost_s is None:
            child.lost_s = time.monotonic()
        _logger.warning(text, self.called, number, error.message)
