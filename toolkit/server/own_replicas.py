"""The servers that a front before replicas starts itself, and restarts when they end. Further ones
may start, and drain, while it serves (`toolkit.server.fleet`).
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from toolkit.errors import LlmctlError
from toolkit.files.plan import Plan
from toolkit.processes.supervisor import Supervisor
from toolkit.scaling.log import State
from toolkit.server.options import ServerOptions
from toolkit.server.replicas import LiveReplica, ReplicaPool

POLL_EVERY_S = 0.2
SETTLED_S = 60.0  # a replica that ran for so long and ends is started again at once
Result = TypeVar("Result")


class HostedServer(Protocol):
    """One of several servers that llmctl starts.

    Attributes:
        url: its address.
    """

    url: str

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        ...

    def ended_by(self) -> str:
        """Why it has ended, in one line."""
        ...

    def wait_until_ready(self) -> None:
        """Wait until it answers. Raises `EngineError` if it ends before."""
        ...

    def stop(self) -> None:
        """End it, with every process of its own."""
        ...


class StartsServers(Protocol):
    """What starts servers of a plan."""

    def replica(
        self, plan: Plan, options: ServerOptions, number: int, folder: Path
    ) -> HostedServer:
        """Start server `number` of the plan's `workers`, on a free port of the options' host, with
        its share of the machine's devices. `folder` is empty, and lasts as long as the server.
        """
        ...


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """For the files of a server."""
    return tempfile.TemporaryDirectory(prefix="llmctl-replica-", ignore_cleanup_errors=True)


def most_replicas(plan: Plan) -> int:
    """Return how many servers of a plan there may be at once: its workers, or more by a rule."""
    scale = plan.recipe.scale
    if plan.settings.scaling is None or scale is None:
        return plan.workers
    most = scale.max
    if scale.gpus_free is not None:
        most = min(most, scale.gpus_free // plan.recipe.engine.tensor_parallel_size)
    return max(most, plan.workers)


class OwnReplicas(Supervisor):
    """The servers that the front starts, each with its own port and devices.

    Attributes:
        most: servers that there may be, between which the devices are divided.
        servers: those that have started and run, by their number.
    """

    called = "replica"

    def __init__(
        self, starts: StartsServers, plan: Plan, options: ServerOptions, pool: ReplicaPool
    ) -> None:
        super().__init__(plan.workers)
        self.most = most_replicas(plan)
        self._starts = starts
        self._plan = plan.model_copy(update={"workers": self.most})
        self._options = options
        self._pool = pool
        scale = plan.recipe.scale
        self._drain_s = (scale and scale.drain_s) or math.inf
        self.servers: dict[int, LiveReplica] = {}
        # One thread of a server may wait until it is ready, and another one stop it meanwhile.
        self._threads = ThreadPoolExecutor(2 * self.most, "replica")

    async def start(self) -> None:
        """Start all, and wait until they are up. Raises what the first one raised that could not be
        loaded.
        """
        await self.start_children()
        while len(self._pool.up) < self.size:
            await asyncio.sleep(POLL_EVERY_S / 4)

    def drain(self, number: int) -> None:
        """Send a server no more requests, and end it when it has none; at once where it starts."""
        self.retire(number)
        if number in self.servers:
            self._pool.remove(self.servers[number])

    def states(self) -> list[State]:
        """Return what each server does, by its number. One that is down is starting again."""
        return [self._state(number) for number in range(len(self.children))]

    def _state(self, number: int) -> State:
        if self.is_over(number):
            return "gone"
        if self.children[number].is_retired:
            return "draining"
        return "ready" if number in self.servers and self.servers[number].up else "starting"

    async def stop(self) -> None:
        """End all servers."""
        await self.end_children()
        self._threads.shutdown(wait=False)

    def _in_thread(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def live(self, number: int) -> str:
        """See `Supervisor.live`: a server, from its start until it is over."""
        with new_folder() as name:
            starting = self._in_thread(
                partial(self._starts.replica, self._plan, self._options, number, Path(name))
            )
            try:
                server = await asyncio.shield(starting)
                await self._in_thread(server.wait_until_ready)
                self.ready(number)
                replica = self._pool.add(server.url)
                replica.name = f"{number} at {server.url}"
                self.servers[number] = replica
                why = "its task failed"
                try:
                    why = await self._until_over(number, server, replica)
                finally:
                    del self.servers[number]
                    self._pool.losses += replica.state == "up"
                    if replica.state != "gone":
                        self._pool.remove(replica)
                    replica.cut_all(why)
                return why
            finally:
                # Also one that was still starting when this was cancelled.
                with suppress(LlmctlError, OSError):
                    await asyncio.shield(self._in_thread((await starting).stop))

    async def _until_over(self, number: int, server: HostedServer, replica: LiveReplica) -> str:
        """Wait until the server has ended, has drained or hangs, or its probes have failed for
        `hang_s` seconds. Returns why.
        """
        child = self.children[number]
        now_s = asyncio.get_running_loop().time
        limit_s = self._plan.recipe.serve.hang_s
        begin_s = answered_s = drains_s = now_s()
        while True:
            if not server.running:
                return f"its process ended: {server.ended_by()}"
            if replica.state == "hung":
                return replica.problem
            if child.is_retired and (not replica.attempts or now_s() - drains_s > self._drain_s):
                return "it was drained"
            if not child.is_retired:
                drains_s = now_s()
            if replica.state != "down":
                answered_s = now_s()
            elif now_s() - answered_s > limit_s:
                return f"{replica.problem}, for {limit_s:g} s"
            if now_s() - begin_s > SETTLED_S:
                self.succeeded(number)
            await asyncio.sleep(POLL_EVERY_S)
