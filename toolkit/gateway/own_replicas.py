"""The servers that a front before replicas starts itself, and restarts when they end."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from toolkit.backends import HostedServer, ServerOrder, StartsReplicas
from toolkit.errors import EngineError, LlmctlError
from toolkit.gateway.replicas import LiveReplica, ReplicaPool
from toolkit.serve.server import first_of

POLL_EVERY_S = 0.2
RESTART_S = 1.0
RESTART_MAX_S = 60.0  # before a replica that ended is started again
LOADED_S = 60.0  # one that ran for so long is started again at once
Result = TypeVar("Result")
_logger = logging.getLogger(__name__)


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """For the files of a server."""
    return tempfile.TemporaryDirectory(prefix="llmctl-replica-", ignore_cleanup_errors=True)


class OwnReplicas:
    """The servers that the front starts, each with its own port and devices.

    Attributes:
        failed: a replica could not be loaded the first time; `error` says why.
    """

    def __init__(
        self, own: StartsReplicas, order: ServerOrder, count: int, pool: ReplicaPool
    ) -> None:
        self.failed = asyncio.Event()
        self.error: LlmctlError | None = None
        self._own = own
        self._pool = pool
        self._order = order
        self._count = count
        self._servers: dict[int, HostedServer] = {}
        self._lost_s: dict[int, float] = {}  # when a replica was lost, until it is up again
        self._were_ready: set[int] = set()
        # One thread of a server may wait until it is ready, and another one stop it meanwhile.
        self._threads = ThreadPoolExecutor(2 * self._count, "replica")
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        """Start all, and wait until they are up. Raises what the first one raised that could not be
        loaded.
        """
        start = self._pool.background.start
        numbers = range(self._count)
        self._tasks = [start("servers", partial(self._keep, number)) for number in numbers]
        await first_of(self._loaded(), self.failed.wait())
        if self.error:
            raise self.error

    async def _loaded(self) -> None:
        while len(self._pool.up) < self._count:
            await asyncio.sleep(POLL_EVERY_S / 4)

    async def stop(self) -> None:
        """End all servers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        stops = [self._in_thread(server.stop) for server in self._servers.values()]
        await asyncio.gather(*stops, return_exceptions=True)
        self._threads.shutdown(wait=False)

    def _in_thread(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _keep(self, number: int) -> None:
        """Keep one server running, until cancelled."""
        loop = asyncio.get_running_loop()
        wait_s = RESTART_S
        while True:
            begin_s = loop.time()
            try:
                error: LlmctlError = EngineError(await self._run_server(number))
            except LlmctlError as failure:
                error = failure
            except OSError as failure:  # no room for its files, say
                text = f"cannot be started: {failure.strerror or failure}"
                error = EngineError(text, "it needs room for temporary files (TMPDIR)")
            if number not in self._were_ready:
                self.error = error
                self.failed.set()
                return
            self._lost_s.setdefault(number, time.monotonic())
            text = "replica %d is lost: %s; it is started again"
            _logger.warning(text, number, error.message)
            wait_s = RESTART_S if loop.time() - begin_s > LOADED_S else wait_s
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RESTART_MAX_S)

    async def _run_server(self, number: int) -> str:
        """Start a server and wait until it is over. Returns why."""
        with new_folder() as name:
            starting = self._in_thread(partial(self._own.replica, self._order, number, Path(name)))
            try:
                server = self._servers[number] = await asyncio.shield(starting)
                await self._in_thread(server.wait_until_ready)
                self._were_ready.add(number)
                replica = self._pool.add(server.url)
                replica.name = f"{number} at {server.url}"
                replica.lost_s = self._lost_s.pop(number, None)
                why = "its task failed"
                try:
                    why = await self._until_over(server, replica)
                finally:
                    self._pool.losses += replica.state == "up"
                    self._pool.remove(replica)
                    replica.cut_all(why)
                return why
            finally:
                # Also one that was still starting when this was cancelled.
                with suppress(LlmctlError, OSError):
                    await asyncio.shield(self._in_thread((await starting).stop))
                self._servers.pop(number, None)

    async def _until_over(self, server: HostedServer, replica: LiveReplica) -> str:
        """Wait until the server has ended or hangs, or its probes have failed for `hang_s` seconds.
        Returns why.
        """
        now_s = asyncio.get_running_loop().time
        limit_s = self._order.plan.recipe.serve.hang_s
        answered_s = now_s()
        while True:
            if not server.running:
                return f"its process ended: {server.ended_by()}"
            if replica.state == "hung":
                return replica.problem
            if replica.state != "down":
                answered_s = now_s()
            elif now_s() - answered_s > limit_s:
                return f"{replica.problem}, for {limit_s:g} s"
            await asyncio.sleep(POLL_EVERY_S)
