"""The front before replicas that run already, or that it starts itself, for a plan."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from toolkit.backends import ServerOrder, StartsReplicas
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.files.plan import Plan
from toolkit.files.profile import OnForeign
from toolkit.gateway.front import Gateway
from toolkit.gateway.own_replicas import OwnReplicas
from toolkit.gateway.replicas import ReplicaNeeds, ReplicaPool
from toolkit.gateway.sources import ReplicaSource
from toolkit.routing.admission import UNLIMITED, LatencyLimits
from toolkit.routing.balancer import Balancer
from toolkit.routing.routers import LawRouter, Router
from toolkit.routing.types import BLOCK_TOKENS, ReplicaTraits
from toolkit.sched.policies.vllm import ROWS, TOKENS
from toolkit.serve.assemble import model_name
from toolkit.serve.launch import OpenedFront
from toolkit.serve.limits import possible_connections
from toolkit.serve.server import Ending
from toolkit.serve.stats import Stats
from toolkit.serve.status import StatusPage, facts_of

DEFAULT_ENDING = Ending()
INDEX_LIMIT = 1 << 18  # blocks remembered for a replica: 16 M tokens


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
def replica_front(
    plan: Plan,
    opened: OpenedFront,
    *,
    router: Router,
    needs: ReplicaNeeds,
    limits: LatencyLimits = UNLIMITED,
    source: ReplicaSource | None = None,
    own: StartsReplicas | None = None,
    key: str = "",
    on_foreign: OnForeign | None = None,
    ending: Ending = DEFAULT_ENDING,
) -> Iterator[Gateway]:
    """Make the front before the replicas of a plan, not started.

    It can serve when all own replicas are loaded, or a given one is up, or none was in time. When
    it starts, it raises `InputError` for a list that cannot be used, and `EngineError` if an own
    replica never loads.

    Args:
        limits: by which new requests are refused.
        source: the replicas; None: `own` starts the plan's number of servers.
        key: sent to the replicas of `source`; those of `own` are given another.
        on_foreign: called if an own replica's engine is not the fitted one; None: it is refused.
        ending: of the own replicas.
    """
    recipe = plan.recipe
    if router.name == LawRouter.name and plan.fit.steps is None:
        raise InputError(
            "router 'by-law' needs the law of a pass of every replica",
            "serve a plan with a fitted law of passes (engine vllm), or choose another --router",
        )
    balancer = Balancer(
        router,
        [],
        block_tokens=BLOCK_TOKENS,
        limits=limits,
        index_limit=INDEX_LIMIT,
    )
    pool = ReplicaPool(
        balancer,
        traits_of_replicas(plan),
        needs,
        hang_s=recipe.serve.hang_s,
        key=key if own is None else secrets.token_urlsafe(24),
        say=opened.say,
    )
    servers = None
    if own is not None:
        order = ServerOrder(
            plan,
            needs.model,
            "127.0.0.1",
            0,
            ending,
            pool.key,
            on_foreign=on_foreign,
        )
        servers = OwnReplicas(own, order, plan.workers, pool)
    front = Gateway(
        pool,
        opened.settings,
        opened.keyring,
        stats=Stats(sla=recipe.sla),
        log=opened.requests,
        replicas=servers or source,
        say=opened.say,
    )
    pool.http.most_kept = possible_connections(front.limits) // 2
    if opened.settings.status_page:
        facts = facts_of(plan, needs.model or model_name(plan))
        front.show(StatusPage(facts, front.stats, lambda: front.uptime_s, front.status))
    yield front
