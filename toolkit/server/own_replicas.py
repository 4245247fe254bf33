"""The servers that a front before replicas starts itself, and restarts when they end; and, with a
scaling rule, how many of them: a fleet on the real clock.

The simulator's fleet (`toolkit.sim.fleet`) makes the same calls to the same `Autoscaler`, and the
same functions choose the places. Unlike there, a replica that drains for too long loses no request:
its requests go on elsewhere. Its place is free when nothing of its process is left.

With a log, each call of the autoscaler is a line with all that it was told, so the decisions can be
made again. Times are in seconds since all first replicas were up.
"""

from __future__ import annotations

import asyncio
import logging
import math
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from toolkit.errors import LlmctlError
from toolkit.files.plan import Plan
from toolkit.processes.supervisor import Supervisor
from toolkit.scaling.autoscaler import Autoscaler
from toolkit.scaling.log import FleetHeader, FleetLine, FleetStep, ReplicaChange, State
from toolkit.scaling.places import to_end, to_start
from toolkit.scaling.rules import scaling_of
from toolkit.scaling.types import FleetSample, ReplicaLoad
from toolkit.server.log import EventLog
from toolkit.server.options import ServerOptions
from toolkit.server.replicas import LiveReplica, ReplicaPool
from toolkit.server.stats import Stats

_logger = logging.getLogger(__name__)

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

    def ended_by(self) -> str:
        """Why it has ended, in one line."""

    def wait_until_ready(self) -> None:
        """Wait until it answers. Raises `EngineError` if it ends before."""

    def stop(self) -> None:
        """End it, with every process of its own."""


# Starts the server of a number (`toolkit.backends.StartsReplicas.replica`).
StartServer = Callable[[Plan, ServerOptions, int, Path], HostedServer]


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
    """The servers that the front starts, each with its own port and devices. Where the plan has a
    scaling rule, `follow` starts and drains servers until there are as many as an autoscaler wants.

    Args:
        pool: sends them requests, and asks them for their figures.
        stats: the counters of the front.
        log: gets the decisions of the autoscaler.

    Attributes:
        scaling: the rule and its bounds; None: the number of the servers is fixed.
        most: servers that there may be, between which the devices are divided.
        servers: those that have started and run, by their number.
        states: what each server did when `follow` looked last, by its number.
    """

    called = "replica"

    def __init__(
        self,
        start: StartServer,
        plan: Plan,
        options: ServerOptions,
        pool: ReplicaPool,
        stats: Stats,
        log: EventLog | None = None,
    ) -> None:
        super().__init__(plan.workers)
        self.scaling = scaling_of(plan)
        self.most = most_replicas(plan)
        self._start = start
        self._plan = plan.model_copy(update={"workers": self.most})
        self._options = options
        self._pool = pool
        self._stats = stats
        self._decisions = log
        scale = plan.recipe.scale
        self._drain_s = (scale and scale.drain_s) or math.inf
        self.servers: dict[int, LiveReplica] = {}
        self.states: list[State] = []
        self._begin_s = 0.0
        self._scaler = None if self.scaling is None else Autoscaler(self.scaling, self.size, 0.0)
        # One thread of a server may wait until it is ready, and another one stop it meanwhile.
        self._threads = ThreadPoolExecutor(2 * self.most, "replica")

    async def start(self) -> None:
        """Start all, and wait until they are up. Raises what the first one raised that could not be
        loaded.
        """
        await self.start_children()
        while len(self._pool.up) < self.size:
            await asyncio.sleep(POLL_EVERY_S / 4)
        self._begin_s = time.monotonic()
        if self.scaling is not None:
            self._write(FleetHeader.of(self.scaling, self.size))

    async def stop(self) -> None:
        """End all servers."""
        await self.end_children()
        self._threads.shutdown(wait=False)

    def _in_thread(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def live(self, number: int) -> str:
        """See `Supervisor.live`: a server, from its start until it is over."""
        folder = tempfile.TemporaryDirectory(prefix="llmctl-replica-", ignore_cleanup_errors=True)
        with folder as name:
            starting = self._in_thread(
                partial(self._start, self._plan, self._options, number, Path(name))
            )
            try:
                server = await asyncio.shield(starting)
                await self._in_thread(server.wait_until_ready)
                self.ready(number)
                replica = self._pool.add(server.url)
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

    # How many there are

    def counts(self) -> dict[str, int]:
        """Return how many replicas are wanted, ready and starting; nothing without a rule."""
        if self._scaler is None:
            return {}
        return {
            "wanted": self._scaler.wanted,
            "ready": self.states.count("ready"),
            "starting": self.states.count("starting"),
        }

    async def follow(self) -> None:
        """Follow the autoscaler until the servers are ended. They have started."""
        scaler = self._scaler
        assert scaler is not None
        while not self.ending.is_set():
            self._note_states()
            if self._now_s() >= scaler.next_s:
                await self._step(scaler)
            left_s = scaler.next_s - self._now_s()
            await asyncio.sleep(min(max(left_s, 0.0), POLL_EVERY_S / 2))

    def _now_s(self) -> float:
        return time.monotonic() - self._begin_s

    async def _step(self, scaler: Autoscaler) -> None:
        """Let the autoscaler work with what the replicas say now. When it decides, start and drain
        replicas until there are as many as it wants, or no device is free.
        """
        places = [(place, one) for place, one in self.servers.items() if one.up]
        loads = await asyncio.gather(*[self._load(place, one) for place, one in places])
        self._note_states()
        now_s = self._now_s()
        sample = self._sample(now_s, tuple(sorted(loads, key=lambda load: load.place)))
        ready = self.states.count("ready")
        decides = scaler.step(now_s, ready, lambda: sample)
        taken = sample if scaler.history.latest is sample else None
        self._write(FleetStep(now_s, ready, scaler.wanted, taken))
        if decides:
            for place in to_start(self.states, scaler.wanted, self.most):
                self.start_child(place)
            for place in to_end(self.states, scaler.wanted):
                self._drain(place)
            self._note_states()

    def _drain(self, number: int) -> None:
        """Send a server no more requests, and end it when it has none; at once where it starts."""
        self.retire(number)
        if number in self.servers:
            self._pool.remove(self.servers[number])

    async def _load(self, place: int, replica: LiveReplica) -> ReplicaLoad:
        """Return a replica's figures; of one without metrics, what the front has sent there."""
        figures = await self._pool.figures(replica)
        waiting, running, kv_usage = figures or (0, len(replica.attempts), 0.0)
        return ReplicaLoad(place, waiting, running, kv_usage)

    def _sample(self, now_s: float, loads: tuple[ReplicaLoad, ...]) -> FleetSample:
        """Return what a scrape shows."""
        stats = self._stats
        at_replicas = sum(len(replica.attempts) for replica in self._pool.by_index.values())
        return FleetSample(
            now_s,
            loads,
            self.states.count("starting"),
            max(stats.arrived - stats.departed - at_replicas, 0),
            stats.arrived,
            stats.arrived_tokens,
            stats.departed,
            stats.ended_tokens,
        )

    def _note_states(self) -> None:
        """Note what the replicas do now, and log what has changed."""
        before = self.states
        self.states = [self._state(number) for number in range(len(self.children))]
        for place, state in enumerate(self.states):
            if state == (before[place] if place < len(before) else None):
                continue
            _logger.info("replica %d is %s", place, state)
            self._write(ReplicaChange(self._now_s(), place, state))
            child = self.children[place]
            if state == "gone" and not child.is_retired:
                error = child.first.exception()
                _logger.warning("replica %d could not be started: %s", place, error)

    def _state(self, number: int) -> State:
        """Return what a server does. One that is down is starting again."""
        if self.is_over(number):
            return "gone"
        if self.children[number].is_retired:
            return "draining"
        return "ready" if number in self.servers and self.servers[number].up else "starting"

    def _write(self, line: FleetLine) -> None:
        if self._decisions is not None:
            self._decisions.add(line)
            self._decisions.flush()
