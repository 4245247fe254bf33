"""The backend of replicas: requests in, attempts at replicas, one answer out.

`PoolBackend` passes a request for tokens to the replica that the balancer names, and to another one
when that fails, until the client has the whole answer (`toolkit.server.relay`). No accepted request
is lost as long as a replica is up, or comes back within `ServerOptions.wait_up_s`.

`PromptGauge` estimates a prompt's tokens and makes the block hashes, for routers that look at
prefixes and for the log of requests.

Metrics of replicas are called `llmctl_replica_*`, with the replica's URL as a label. The status
page shows no address: it numbers replicas in the order of /replicas.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.files.plan import Plan
from toolkit.openai.errors import ApiError, overloaded
from toolkit.openai.requests import RESPONSES, GenerationCall
from toolkit.routing.admission import UNLIMITED, LatencyLimits
from toolkit.routing.balancer import Balancer
from toolkit.routing.base import Router
from toolkit.routing.by_law import LawRouter
from toolkit.routing.routers import make_router, targets_of
from toolkit.routing.simple import RoundRobinRouter
from toolkit.routing.types import BLOCK_TOKENS, ReplicaTraits
from toolkit.sched.policies.parameters import parameters
from toolkit.sched.policies.vllm import ROWS, TOKENS
from toolkit.server.backend import Answer, ServerBackend
from toolkit.server.http import possible_connections
from toolkit.server.live import SHUTTING_DOWN
from toolkit.server.log import EventLog
from toolkit.server.metrics import family_of
from toolkit.server.options import ServerOptions, model_name, one_key
from toolkit.server.own_replicas import OwnReplicas, StartServer
from toolkit.server.prompt_blocks import PromptGauge
from toolkit.server.relay import NO_REPLICA, RelayedRequest
from toolkit.server.replicas import ReplicaNeeds, ReplicaPool
from toolkit.server.stats import Stats
from toolkit.server.status import facts_of
from toolkit.server.watched import follow
from toolkit.units import counted

if TYPE_CHECKING:
    from toolkit.server.application import Application

FIRST_PROBES_S = 5.0  # it can serve after this long even if no replica is up
SILENCE_S = 600.0  # of a server that is recorded, after which a request is given up


class PoolBackend(ServerBackend):
    """The replicas, and what the requests to them share.

    Args:
        own: the replicas that it starts; None: they are those of `ServerOptions.replicas`, or the
            pool is filled by other code.

    Attributes:
        continued: answers that went on at another replica.
        stopped: what still runs ends with an error.
    """

    descriptors_each = 2

    def __init__(
        self,
        pool: ReplicaPool,
        options: ServerOptions,
        *,
        stats: Stats | None = None,
        own: OwnReplicas | None = None,
    ) -> None:
        super().__init__(options, stats or Stats())
        self.background = pool.background
        self.pool = pool
        self.balancer = pool.balancer
        self.gauge = PromptGauge(options.block_tokens or BLOCK_TOKENS)
        self.continued = 0
        self.stopped = False
        self.numbers = count(1)  # of the requests
        self._own = own
        pool.http.most_kept = possible_connections(self.descriptors_each) // 2
        self.tasks["silent replicas"] = pool.sweep
        if self.balancer.router.reads_reports:
            self.tasks["reports of replicas"] = pool.read_reports

    @property
    def state(self) -> str:
        return "ready" if self.pool.up else NO_REPLICA

    @property
    def model(self) -> str:
        return self.options.model or self.pool.model

    @property
    def labels(self) -> dict[str, str]:
        return {"model_name": self.model, "router": self.balancer.router.name}

    @property
    def waiting(self) -> int:
        """Requests beyond the rows that the replicas run at once."""
        replicas = self.balancer.replicas
        return sum(max(each.requests - each.traits.max_rows, 0) for each in replicas)

    def about_model(self) -> dict[str, object]:
        lengths = [each.max_model_len for each in self.pool.up if each.max_model_len]
        return {"replicas": len(self.pool.up), "max_model_len": min(lengths, default=None)}

    def add_routes(self, application: Application) -> None:
        super().add_routes(application)
        application.generates(RESPONSES)
        application.add("/replicas", self._show_replicas)
        application.add("/replicas/{number}/metrics", self._replica_metrics)

    async def start(self) -> None:
        """Start the replicas, and wait for all; or follow the list of those that run already, and
        wait until one is up.
        """
        pool = self.pool
        say = self.options.say
        if self._own is not None:
            await self._own.start()
            if self._own.scaling is not None:
                self.background.start("autoscaler", self._own.follow)
        listed = self.options.replicas
        if listed is not None:
            if listed.value:
                say(pool.renew(listed.value))
            self.background.start("list of replicas", partial(follow, listed, pool.renew, say))
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_PROBES_S):
                    await pool.changed.wait()
        if not pool.up:
            say("no replica is up yet: requests get 503 until one is")

    async def stop(self) -> None:
        self.stopped = True
        for replica in self.pool.by_index.values():
            replica.cut_all(SHUTTING_DOWN)
        if self._own is not None:
            await self._own.stop()
        await self.pool.stop()

    async def take(self, request: Request, body: bytes, arrival_s: float) -> Answer:
        session = request.headers.get("x-session-id", "")
        call = GenerationCall(request.scope["path"], body, session)
        self.admit(call.model or None)
        relayed = RelayedRequest(self, call, arrival_s)
        self.stats.arrived += 1
        self.stats.arrived_tokens += relayed.prompt_tokens
        relayed.admit()
        return relayed.answer

    def check_open(self) -> None:
        super().check_open()
        if not self.pool.up:
            self.stats.refusals[NO_REPLICA] += 1
            raise overloaded(NO_REPLICA)

    async def _replica_metrics(self, number: str) -> Response:
        """Pass the page /metrics of a replica, by its place in /replicas."""
        listed = self.pool.replicas
        page = None
        if number.isdecimal() and int(number[:9]) < len(listed):
            page = await self.pool.metrics_page(listed[int(number)])
        if page is None:
            raise ApiError(f"replica {number[:9]} has no page of metrics", status=404)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    async def _show_replicas(self) -> Response:
        """The router and the replicas: their states, problems and counts."""
        router = self.balancer.router
        replicas = [
            {
                "url": each.url,
                "state": each.state,
                "problem": each.problem,
                "version": each.version,
                "running": each.running,
                "requests": each.requests,
                "failures": each.failures,
                "moved": each.moved,
            }
            for each in self.pool.replicas
        ]
        about = {"router": router.name, "parameters": parameters(router)}
        return JSONResponse(about | {"state": self.state, "replicas": replicas})

    def families(self) -> Iterator[Metric]:
        labels = self.labels
        for kind, name, text, value in (
            (Gauge, "requests_running", "Requests that have not ended.", self.left),
            (
                Gauge,
                "requests_waiting",
                "Requests beyond the rows that replicas run at once.",
                self.waiting,
            ),
            (Gauge, "replicas_up", "Replicas that may be sent requests.", len(self.pool.up)),
            (
                Counter,
                "requests_arrived",
                "Requests that have come, ended or not.",
                self.stats.arrived,
            ),
            (
                Counter,
                "replica_losses",
                "Replicas that were up and failed, each time.",
                self.pool.losses,
            ),
            (Counter, "continued", "Answers that another replica continued.", self.continued),
        ):
            yield family_of(kind, f"llmctl_{name}", text, labels, value)
        for name, number in self._counts().items():
            text = f"Replicas that the scaling rule has: {name}."
            yield family_of(Gauge, f"llmctl_replicas_{name}", text, labels, number)
        by_replica = {
            "up": "1 while a replica may be sent requests.",
            "running": "Requests that a replica has.",
            "requests": "Attempts sent to a replica.",
            "failures": "Attempts that failed there.",
            "moved": "Answers that went on elsewhere.",
        }
        for name, text in by_replica.items():
            kind = Gauge if name in ("up", "running") else Counter
            values = {one.url: float(getattr(one, name)) for one in self.pool.replicas}
            yield family_of(kind, f"llmctl_replica_{name}", text, labels, values, "replica")
        text = "Failures of tasks that run beside requests."
        failures = self.pool.background.failures
        yield family_of(Counter, "llmctl_background_task_failures", text, labels, failures, "task")

    def _counts(self) -> dict[str, int]:
        """Return how many replicas are wanted, ready and starting; nothing without a rule."""
        return {} if self._own is None else self._own.counts()

    def shown(self) -> dict[str, Any]:
        router = self.balancer.router
        known = self.balancer.replicas
        replicas = [
            {
                "state": one.state,
                "running": max(one.running - known[one.index].waiting, 0),
                "waiting": known[one.index].waiting,
                "kv_share": known[one.index].kv_usage,
                "requests": one.requests,
                "failures": one.failures,
                "moved": one.moved,
            }
            for one in self.pool.replicas
        ]
        return {
            "running": self.left - self.waiting,
            "router": router.name,
            "knobs": parameters(router),
            "replicas": replicas,
            "fleet": self._counts(),
            "totals": {"continued": self.continued},
        }


def traits_of_replicas(plan: Plan) -> ReplicaTraits:
    """What a router knows of each replica of a plan before it serves."""
    engine = plan.fit.engine
    steps = plan.fit.steps
    flags = plan.settings.parameters
    default = ReplicaTraits(1)
    return ReplicaTraits(
        engine.capacity_tokens,
        int(flags.get(TOKENS, default.pass_tokens)),
        int(flags.get(ROWS, engine.max_rows or default.max_rows)),
        None if steps is None else steps.law,
    )


def replicas_like(plan: Plan, options: ServerOptions) -> ReplicaNeeds:
    """Return what the replicas of a plan must be like. The context is at least the recipe's. Where
    the fit is of an engine's passes, the version is the fitted one, unless any is taken.
    """
    version = ""
    if traits_of(plan.recipe.engine.name).timed_by_pass and options.on_foreign is None:
        version = plan.fit.engine.engine_version or ""
    return ReplicaNeeds(options.model, plan.recipe.model.max_model_len, version)


def name_of_replicas(plan: Plan) -> str:
    """Return the name by which replicas call the model: of a server that runs already the recipe's
    `served_model`, or '' for any.
    """
    engine = plan.recipe.engine
    return engine.served_model or (model_name(plan) if traits_of(engine.name).started else "")


def planned_router(plan: Plan) -> str:
    """Return the name of a plan's router."""
    planned = plan.settings.replica_router
    return RoundRobinRouter.name if planned is None else planned.name


def router_of_replicas(plan: Plan, name: str) -> Router:
    """Return the plan's router, or the one of another name with the plan's targets. Raises
    `InputError` where there is no such router, or the plan has no law that it needs.
    """
    planned = plan.settings.replica_router
    if planned is not None and name == planned.name:
        router = make_router(name, planned.parameters)
    else:
        router = make_router(name, targets_of(name, plan.recipe.sla))
    if router.name == LawRouter.name and plan.fit.steps is None:
        raise InputError(
            "router 'by-law' needs the law of a pass of every replica",
            "serve a plan with a fitted law of passes (engine vllm), or choose another --router",
        )
    return router


def limits_of_replicas(plan: Plan, options: ServerOptions) -> LatencyLimits:
    """Return the targets by which new requests are refused. Where the recipe's choice of admission
    is not possible, that is said.

    Raises `InputError` for the option "targets" without what it needs.
    """
    if (options.admission or plan.recipe.serve.admission) != "targets":
        return UNLIMITED
    limits = LatencyLimits.of(plan.recipe.sla)
    if limits != UNLIMITED and plan.fit.steps is not None:
        return limits
    if options.admission:
        raise InputError(
            "--admission targets: the recipe needs a target for TTFT or E2E (sla), and the fit a "
            "law of forward passes (engine vllm)",
            "serve such a plan, or: --admission queue",
        )
    if limits != UNLIMITED:
        options.say("admission by the queue alone: the fit has no law of forward passes")
    return UNLIMITED


@contextmanager
def pool_backend(
    plan: Plan, options: ServerOptions, start: StartServer | None = None
) -> Iterator[PoolBackend]:
    """Make the backend of a plan's replicas, not started: those of `options.replicas`, or else as
    many as the plan's workers, which `start` starts.

    It can serve when all own replicas are loaded, or a given one is up, or none was in time. When
    it starts, it raises `InputError` for a list that cannot be used, and `EngineError` if an own
    replica never loads.
    """
    recipe = plan.recipe
    pool = ReplicaPool(
        Balancer(
            router_of_replicas(plan, options.router),
            [],
            block_tokens=options.block_tokens or BLOCK_TOKENS,
            limits=limits_of_replicas(plan, options),
        ),
        traits_of_replicas(plan),
        replicas_like(plan, options),
        hang_s=recipe.serve.hang_s,
        key=secrets.token_urlsafe(24) if options.replicas is None else options.replica_key,
    )
    stats = Stats(sla=recipe.sla)
    own: OwnReplicas | None = None
    log = EventLog(options.event_log) if options.event_log else nullcontext()
    with log as decisions:
        if options.replicas is None:
            assert start is not None
            text = f"starting {counted(plan.workers, 'server')} of {recipe.engine.name}"
            keys = one_key(pool.key)
            each = replace(options, host="127.0.0.1", port=0, keys=keys, event_log=None)
            own = OwnReplicas(start, plan, each, pool, stats, decisions)
            if own.scaling is not None:
                text += f"; {own.scaling.least} to {own.most} by the rule {own.scaling.rule.name}"
            options.say(text)
        backend = PoolBackend(pool, options, stats=stats, own=own)
        backend.facts = facts_of(plan, options.model or model_name(plan))
        yield backend


@contextmanager
def recording_backend(options: ServerOptions) -> Iterator[PoolBackend]:
    """Make the backend that records the requests of one server, `options.replicas`."""
    balancer = Balancer(RoundRobinRouter(), [])
    traits = ReplicaTraits(1)
    key = options.replica_key
    pool = ReplicaPool(balancer, traits, ReplicaNeeds(), hang_s=SILENCE_S, key=key)
    yield PoolBackend(pool, options)
