"""All routers by name: each gives a request the index of a replica.

- `round-robin`, `least-requests`, `future-memory` (`simple`): one number of each replica, or none.
- `session`: one hash.
- `llm-d`, `dynamo`, `sglang` (`scored`): presets of one score, the weighted sum of a prefix match,
  a queue and the use of the KV cache.
- `by-law`: the time that the request adds, by the fitted law of a pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from toolkit.engine_traits import traits_of
from toolkit.errors import InputError, nearest
from toolkit.files.recipe import Recipe, RouterSpec
from toolkit.routing.base import Router
from toolkit.routing.by_law import LawRouter
from toolkit.routing.scored import DynamoRouter, LlmdRouter, SglangRouter
from toolkit.routing.session import SessionRouter
from toolkit.routing.simple import LeastMemoryRouter, LeastRequestsRouter, RoundRobinRouter
from toolkit.routing.types import strictest
from toolkit.sched.policies.parameters import Value, make_one, parameters

TARGETS = {"ttft": "ttft_s", "mtpot": "gap_s"}  # a kind of target to a router's parameter
ROUTERS: dict[str, type[Router]] = {
    router.name: router
    for router in (
        RoundRobinRouter,
        LeastRequestsRouter,
        LeastMemoryRouter,
        SessionRouter,
        LlmdRouter,
        DynamoRouter,
        SglangRouter,
        LawRouter,
    )
}


def refuse_unknown_router(name: str, where: str = "") -> None:
    """`InputError` with the nearest valid name for a router that does not exist."""
    if name not in ROUTERS:
        raise InputError(f"{where}there is no router '{name}'", nearest(name, ROUTERS))


def make_router(name: str, parameters: Mapping[str, Value]) -> Router:
    """The router `name` with `parameters` over its defaults; `InputError` for what it lacks."""
    return make_one("router", ROUTERS, name, parameters)


def targets_of(name: str, sla: Mapping[str, float]) -> dict[str, Value]:
    """Return the parameters of router `name` that are targets: the strictest of each kind in
    `sla`.
    """
    if name != LawRouter.name:
        return {}
    limits = {key: strictest(sla, metric) for metric, key in TARGETS.items()}
    return {key: limit for key, limit in limits.items() if limit < math.inf}


def router_of(recipe: Recipe, name: str | None = None) -> RouterSpec | None:
    """The recipe's router before its replicas of a server, or the router `name` at its defaults,
    with all parameters; None where there are no replicas. The recipe's targets are those of a
    router that is not given any.
    """
    if recipe.workers == 1 or not traits_of(recipe.engine.name).server:
        return None
    own = recipe.replica_router
    given = own.parameters if name in (None, own.name) else {}
    name = name or own.name
    refuse_unknown_router(name, "replica_router: ")
    router = make_router(name, targets_of(name, recipe.sla) | given)
    return RouterSpec(name=name, parameters=parameters(router))
