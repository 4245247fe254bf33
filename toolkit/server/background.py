"""Tasks that run beside the requests for as long as the server does: probes, lists, logs.

No code waits for them, so an exception in one would go unseen, and its work would never be done
again. `Background` is the one place that starts them: a task that raises is logged, counted and
started again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

PAUSE_S = 0.5
PAUSE_MAX_S = 30.0  # before a task that failed is started again
Work = Callable[[], Coroutine[Any, Any, object]]
_logger = logging.getLogger(__name__)


class Background:
    """The tasks of one server, by what they do.

    Attributes:
        failures: how often tasks raised, by name; 0 for those that never did.
    """

    def __init__(self, say: Callable[[str], None] = lambda _: None) -> None:
        self.failures: Counter[str] = Counter()
        self._say = say
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, name: str, work: Work) -> asyncio.Task[Any]:
        """Run `work` until it returns, or the task is cancelled; again after an exception."""
        return self._start(name, self._keep(name, work))

    def once(self, name: str, work: Work) -> asyncio.Task[Any]:
        """Run `work` once; an exception is logged and counted."""
        return self._start(name, self._run(name, work))

    async def stop(self) -> None:
        """Cancel all tasks, and wait for their end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, name: str, running: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        self.failures[name] += 0
        task = asyncio.create_task(running, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _keep(self, name: str, work: Work) -> None:
        now_s = asyncio.get_running_loop().time
        pause_s = PAUSE_S
        while True:
            began_s = now_s()
            if await self._run(name, work):
                return
            pause_s = PAUSE_S if now_s() - began_s > PAUSE_MAX_S else pause_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def _run(self, name: str, work: Work) -> bool:
        """Whether it returned, and did not raise."""
        try:
            await work()
        except Exception as error:  # whatever it is, no other code sees it
            self.failures[name] += 1
            _logger.debug("background task %s", name, exc_info=error)
            with suppress(OSError):  # stderr is closed at the other end
                self._say(f"warning: {name} failed and starts again: {_words(error)}")
            return False
        return True


def _words(error: Exception) -> str:
    """What failed, and where in the program."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" ({trace.tb_frame.f_code.co_qualname}, line {trace.tb_lineno})" if trace else ""
    return f"{type(error).__name__}: {str(error)[:200]}{where}"
