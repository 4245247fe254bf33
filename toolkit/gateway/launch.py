"""The front before replicas that run already, or that it starts itself.

`OwnReplicas` starts an engine's servers, and restarts those that end.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from toolkit.backends import HostedServer, ServerOrder, StartsReplicas
from toolkit.engine_traits import traits_of
from toolkit.errors import EngineError, InputError, LlmctlError
from toolkit.estimators.load import law_of_steps
from toolkit.estimators.pipeline import PassTimes
from toolkit.files.plan import Plan
from toolkit.files.profile import OnForeign
from toolkit.gateway.front import Gateway, gateway_status
from toolkit.gateway.replicas import LiveReplica, ReplicaNeeds, ReplicaPool
from toolkit.gateway.sources import ReplicaSource, follow_source
from toolkit.routing.admission import UNLIMITED, LatencyLimits
from toolkit.routing.balancer import Balancer
from toolkit.routing.routers import LawRouter, Router
from toolkit.routing.types import BLOCK_TOKENS, ReplicaTraits
from toolkit.serve.assemble import model_name
from toolkit.serve.launch import FrontServer, OpenedFront
from toolkit.serve.limits import WireLimits, possible_connections
from toolkit.serve.server import Ending, first_of
from toolkit.serve.stats import Stats
from toolkit.serve.status import StatusPage, facts_of

INDEX_LIMIT = 1 << 18  # blocks remembered for a replica: 16 M tokens
FIRST_PROBES_S = 15.0  # the first line is printed after this long even if no replica is up
POLL_EVERY_S = 0.2
RESTART_S = 1.0
RESTART_MAX_S = 60.0  # before a replica that ended is started again
Result = TypeVar("Result")
_logger = logging.getLogger(__name__)
LOADED_S = 60.0  # one that ran for so long is started again at once


@dataclass(frozen=True, slots=True)
class ServedReplicas:
    """The replicas behind a front.

    Attributes:
        limits: by which new requests are refused.
        source: the replicas; None: `own` starts them.
        own: starts the plan's number of servers.
        key: sent to the replicas of `source`; those of `own` are given another.
        on_foreign: called if an own replica's engine is not the fitted one; None: it is refused.
    """

    plan: Plan
    router: Router
    needs: ReplicaNeeds
    limits: LatencyLimits = UNLIMITED
    source: ReplicaSource | None = None
    own: StartsReplicas | None = None
    key: str = ""
    on_foreign: OnForeign | None = None
    ending: Ending = field(default_factory=Ending)


def traits_of_replicas(plan: Plan) -> ReplicaTraits:
    """What a router knows of each replica of a plan before it serves."""
    engine = plan.fit.engine
    steps = plan.fit.steps
    flags = plan.policy.parameters
    default = ReplicaTraits(1)
    return ReplicaTraits(
        engine.capacity_tokens,
        int(flags.get("max_num_batched_tokens", default.pass_tokens)),
        int(flags.get("max_num_seqs", engine.max_rows or default.max_rows)),
        None if steps is None else PassTimes(law_of_steps(steps)),
    )


def replicas_like(plan: Plan, served_model: str, *, any_version: bool = False) -> ReplicaNeeds:
    """What the replicas of a plan must be like. Of a server that runs already, the recipe's
    `served_model` is the name; without one, any. The context is at least the recipe's. Where the
    fit is of an engine's passes, the version is the fitted one, unless `any_version`.
    """
    recipe = plan.recipe
    started = traits_of(recipe.engine.name).started
    name = recipe.engine.served_model or (model_name(plan) if started else "")
    version = ""
    if traits_of(recipe.engine.name).timed_by_pass and not any_version:
        version = plan.fit.engine.engine_version or ""
    return ReplicaNeeds(served_model or name, recipe.model.max_model_len, version)


def limits_of_replicas(
    plan: Plan, admission: str | None, say: Callable[[str], None]
) -> LatencyLimits:
    """The targets by which a gateway refuses requests. `admission` is "targets" or "queue"; None
    takes the recipe's choice, and says where that is not possible.

    Raises `InputError` for "targets" without what it needs.
    """
    if (admission or plan.recipe.serve.admission) != "targets":
        return UNLIMITED
    limits = LatencyLimits.of(plan.recipe.sla)
    if limits == UNLIMITED:
        lacks = "the recipe has no target for TTFT or E2E"
        hint = "set sla in the recipe"
    elif plan.fit.steps is None:
        lacks = f"the fit of engine {plan.fit.engine.engine} has no law of forward passes"
        hint = "profile and fit engine vllm"
    else:
        return limits
    if admission is not None:
        raise InputError(f"--admission targets: {lacks}", f"{hint}, or: --admission queue")
    if limits != UNLIMITED:
        say(f"admission by the queue alone: {lacks}")
    return UNLIMITED


@contextmanager
def replica_front(serving: ServedReplicas, opened: OpenedFront) -> Iterator[ReplicaFront]:
    """The front before replicas, not started.

    It can serve when all own replicas are loaded, or a given one is up, or none was within
    `FIRST_PROBES_S`. When it starts, it raises `InputError` for a list that cannot be used, and
    `EngineError` if an own replica never loads.
    """
    if serving.router.name == LawRouter.name and serving.plan.fit.steps is None:
        raise InputError(
            "router 'by-law' needs the law of a pass of every replica",
            "serve a plan with a fitted law of passes (engine vllm), or choose another --router",
        )
    if serving.own is not None:
        serving = replace(serving, key=secrets.token_urlsafe(24))
    yield ReplicaFront(serving, _gateway(serving, opened), opened)


class ReplicaFront(FrontServer):
    """The front before replicas that run already, or that it starts itself."""

    def __init__(self, serving: ServedReplicas, gateway: Gateway, opened: OpenedFront) -> None:
        pool = gateway.pool
        limits = WireLimits(descriptors_each=2)
        super().__init__(gateway.access, gateway.stats, pool.background, limits)
        self._serving = serving
        self._gateway = gateway
        self._pool = pool
        self._say = opened.say
        self._own: OwnReplicas | None = None
        if serving.own is not None:
            self._own = OwnReplicas(serving, serving.own, pool)
        pool.http.most_kept = possible_connections(limits) // 2
        start = pool.background.start
        self.at_start = [partial(start, "silent replicas", pool.sweep)]
        if opened.settings.status_page:
            facts = facts_of(serving.plan, serving.needs.model or model_name(serving.plan))
            front = partial(gateway_status, gateway)
            status = StatusPage(facts, gateway.stats, lambda: gateway.uptime_s, front)
            gateway.show(status)
            self.at_start.append(partial(start, "status page", status.sampling))
        if serving.router.reads_reports:
            self.at_start.append(partial(start, "reports of replicas", pool.read_reports))

    @property
    def left(self) -> int:
        return len(self._gateway.running)

    def announce_end(self) -> None:
        self._gateway.leaving = True

    async def start(self) -> None:
        """Start the replicas, and wait for all; or find those that run already, and wait until one
        is up.
        """
        own = self._own
        if own is not None:
            own.start()
            await first_of(own.loaded(), own.failed.wait())
        elif self._serving.source is not None:
            await self._find(self._serving.source)
        if own is not None and own.error:
            raise own.error
        if not self._pool.up:
            self._say("no replica is up yet: requests get 503 until one is")

    async def drain(self, timeout_s: float) -> None:
        await self._gateway.drain(timeout_s)

    async def stop(self) -> None:
        if self._own is not None:
            await self._own.stop()
        await self._pool.stop()

    async def _find(self, source: ReplicaSource) -> None:
        pool = self._pool
        say = self._say
        try:
            say(pool.renew(await source.read()))
        except InputError as error:
            if not source.may_come:
                raise
            say(f"warning: {error.message}; it is asked again")
        following = partial(follow_source, source, pool.renew, say, pool.listed)
        pool.background.start("list of replicas", following)
        now_s = asyncio.get_running_loop().time
        end_s = now_s() + FIRST_PROBES_S
        while not pool.up and now_s() < end_s:
            probed = [replica.problem != "not asked yet" for replica in pool.replicas]
            if probed and all(probed):
                break
            await asyncio.sleep(POLL_EVERY_S / 10)


def _gateway(serving: ServedReplicas, opened: OpenedFront) -> Gateway:
    """The gateway, without replicas yet."""
    recipe = serving.plan.recipe
    balancer = Balancer(
        serving.router,
        [],
        block_tokens=BLOCK_TOKENS,
        limits=serving.limits,
        index_limit=INDEX_LIMIT,
    )
    hang_s = recipe.serve.hang_s
    key = serving.key
    say = opened.say
    traits = traits_of_replicas(serving.plan)
    pool = ReplicaPool(balancer, traits, serving.needs, hang_s=hang_s, key=key, say=say)
    stats = Stats(sla=recipe.sla)
    return Gateway(pool, opened.settings, opened.keyring, stats=stats, log=opened.requests)


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """For the files of a server."""
    return tempfile.TemporaryDirectory(prefix="llmctl-replica-", ignore_cleanup_errors=True)


class OwnReplicas:
    """The servers that the gateway starts, each with its own port and devices.

    Attributes:
        failed: a replica could not be loaded the first time; `error` says why.
    """

    def __init__(self, serving: ServedReplicas, own: StartsReplicas, pool: ReplicaPool) -> None:
        self.failed = asyncio.Event()
        self.error: LlmctlError | None = None
        self._own = own
        self._pool = pool
        self._order = ServerOrder(
            serving.plan,
            serving.needs.model,
            "127.0.0.1",
            0,
            serving.ending,
            serving.key,
            on_foreign=serving.on_foreign,
        )
        self._count = serving.plan.workers
        self._servers: dict[int, HostedServer] = {}
        self._lost_s: dict[int, float] = {}  # when a replica was lost, until it is up again
        self._were_ready: set[int] = set()
        # One thread of a server may wait until it is ready, and another one stop it meanwhile.
        self._threads = ThreadPoolExecutor(2 * self._count, "replica")
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self) -> None:
        start = self._pool.background.start
        numbers = range(self._count)
        self._tasks = [start("servers", partial(self._keep, number)) for number in numbers]

    async def loaded(self) -> None:
        """Wait until all are up."""
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
