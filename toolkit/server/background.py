"""Tasks that run beside the requests for as long as the server does (probes, lists, logs), and
work that ends with its client.

No code waits for them, so an exception in one would go unseen, and its work would never be done
again. `Background` is the one place that starts them: a task that raises is logged, counted and
started again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from starlette.types import Receive

from toolkit.openai.foreign import plain

PAUSE_S = 1.0  # before a task that failed is started again
Work = Callable[[], Coroutine[Any, Any, object]]
_logger = logging.getLogger(__name__)


class Background:
    """The tasks of one server, by what they do.

    Attributes:
        failures: how often tasks raised, by name; 0 for those that never did.
    """

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, name: str, work: Work) -> asyncio.Task[Any]:
        """Run `work` until it returns, or the task is cancelled; again after an exception."""
        self.failures[name] += 0
        task = asyncio.create_task(self._keep(name, work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        """Cancel all tasks, and wait for their end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, name: str, work: Work) -> None:
        while True:
            try:
                await work()
                return
            except Exception as error:  # whatever it is, no other code sees it
                self.failures[name] += 1
                text = "%s failed and starts again: %s: %s"
                _logger.warning(text, name, type(error).__name__, plain(str(error)))
                _logger.debug("background task %s", name, exc_info=error)
            await asyncio.sleep(PAUSE_S)


async def first_of(*waits: Awaitable[object]) -> None:
    """Return when one of `waits` is done. It cancels coroutines; tasks and futures continue."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, wait in zip(tasks, waits, strict=True):
            if task is not wait:
                task.cancel()


async def disconnected(receive: Receive) -> None:
    """Return when a request's client is gone; its body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends; cancel it if the client is gone before. Raises what it raises."""
    task = asyncio.create_task(work)
    try:
        await first_of(task, disconnected(receive))
        if task.done():
            task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        del task  # its exception knows this frame: a cycle, which only a collection would free
