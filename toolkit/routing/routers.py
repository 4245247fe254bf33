"""The routers: each gives a request the index of a replica.

`RouterView` is what a router may look at. A router is a frozen set of parameters and a pure
function of the view, which is one of `formulas`. Routers of other projects have these projects'
formulas and defaults, which know no kinds of replicas. Ours count loads by weights (`weighed`),
`by-law` by each one's law.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.files.recipe import Recipe, RouterSpec
from toolkit.routing import formulas
from toolkit.routing.replicas import Replica, RequestOutlook, RouterView
from toolkit.routing.types import RoutedRequest, strictest
from toolkit.sched.policies.parameters import Value, declared, parameter, parameters, validate

TARGETS = {"ttft": "ttft_s", "mtpot": "gap_s"}  # a kind of target to a router's parameter
RING_POINTS = 160  # of each replica of weight 1 on the ring of `session-hash`


@dataclass(frozen=True)
class Router(ABC):
    """A way to choose a replica. The fields are its parameters.

    `reads_reports`: whether it reads what replicas report of themselves. For each replica,
    `index_blocks` bounds the blocks that are remembered (0: as many as its cache holds; -1: no
    bound), and `index_ttl_s` the seconds (0: no bound).
    """

    name: ClassVar[str]
    reads_reports: ClassVar[bool] = False
    index_blocks: ClassVar[int] = 0
    index_ttl_s: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        validate(self, f"router '{self.name}'")

    @abstractmethod
    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        """The index of the replica that gets the request."""


@dataclass(frozen=True)
class RoundRobinRouter(Router):
    """To each replica in turn; of several kinds, to each as often as its weight says."""

    name: ClassVar[str] = "round-robin"

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        return formulas.in_turn(view)


@dataclass(frozen=True)
class LeastRequestsRouter(Router):
    """To the replica with the fewest requests that have not ended, for its weight."""

    name: ClassVar[str] = "least-requests"

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        return formulas.fewest_requests(view)


@dataclass(frozen=True)
class LeastTokensRouter(Router):
    """To the replica with the fewest tokens to compute, for its weight: prompts without a token
    yet, and outputs of the mean length.
    """

    name: ClassVar[str] = "least-tokens"

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        return formulas.fewest_tokens(view, request)


@dataclass(frozen=True)
class LeastMemoryRouter(Router):
    """To the replica with the smallest share of its cache in use once outputs have mean length."""

    name: ClassVar[str] = "future-memory"

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        return formulas.least_memory(view, request)


@dataclass(frozen=True)
class SessionHashRouter(Router):
    """Consistent hashing of the session, or of the prompt's first block where there is none; to the
    replica with the fewest requests where there is neither.

    With `load_factor` a replica takes at most that many times the mean number of requests, and the
    next one on the ring takes the rest (consistent hashing with bounded loads, arXiv:1608.01350).
    Kinds of replicas have points and bounds by their weights.
    """

    name: ClassVar[str] = "session-hash"

    load_factor: float = parameter(
        0.0, high=100, search=(1.05, 3.0), doc="a replica's share of the mean load; 0: no bound"
    )

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        key = request.session or (str(request.blocks[0]) if request.blocks else "")
        if not key:
            return formulas.fewest_requests(view)
        points, owners = _ring(view)
        at = bisect_left(points, _point(key))
        if not self.load_factor:
            return owners[at % len(owners)]
        return formulas.on_ring(view, owners, at, self.load_factor)


@dataclass(frozen=True)
class PrefixRouter(Router):
    """To the longest match, whatever the load there (vLLM production-stack, `prefixaware`)."""

    name: ClassVar[str] = "prefix"
    index_blocks: ClassVar[int] = -1

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        return formulas.longest_match(view)


@dataclass(frozen=True)
class LlmdRouter(Router):
    """The largest weighted sum of scores for match, queue and free cache (llm-d's scheduler)."""

    name: ClassVar[str] = "llm-d"
    reads_reports: ClassVar[bool] = True
    index_blocks: ClassVar[int] = 31_250

    prefix: float = parameter(3.0, high=100, search=(0.0, 5.0), doc="weight of the matched share")
    queue: float = parameter(2.0, high=100, search=(0.0, 5.0), doc="weight of the shorter queue")
    kv: float = parameter(
        2.0, high=100, search=(0.0, 5.0), doc="weight of the free share of the cache"
    )

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        return formulas.llm_d(view, self.prefix, self.queue, self.kv)


@dataclass(frozen=True)
class DynamoRouter(Router):
    """The fewest blocks to prefill and to keep for decoding (Dynamo's KV router, no events)."""

    name: ClassVar[str] = "dynamo"
    index_blocks: ClassVar[int] = -1
    index_ttl_s: ClassVar[float] = 120.0

    credit: float = parameter(
        1.0, high=100, search=(0.0, 2.0), doc="how much of a matched block is taken off"
    )
    prefill: float = parameter(
        1.0, high=100, search=(0.1, 5.0), doc="weight of the blocks to prefill"
    )

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        return formulas.dynamo(view, request, self.credit, self.prefill)


@dataclass(frozen=True)
class SglangRouter(Router):
    """The longest match if it is long enough, but the fewest requests if the load is unbalanced
    (SGLang's `cache_aware`).
    """

    name: ClassVar[str] = "sglang"
    index_blocks: ClassVar[int] = -1

    threshold: float = parameter(0.3, high=1, search=(0.0, 1.0), doc="share of a prompt to match")
    abs_load: int = parameter(
        64, low=0, search=(1, 256), log=True, doc="requests between the most and the least loaded"
    )
    rel_load: float = parameter(
        1.5, low=1, search=(1.0, 4.0), doc="times the load of the least loaded replica"
    )

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        return formulas.sglang(view, self.threshold, self.abs_load, self.rel_load)


@dataclass(frozen=True)
class LoadAwareRouter(Router):
    """The largest matched share less the load above the mean (production-stack, `loadaware`)."""

    name: ClassVar[str] = "load-aware"
    index_blocks: ClassVar[int] = -1

    beta: float = parameter(
        1.0, high=100, search=(0.0, 4.0), doc="weight of the load above the mean"
    )

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        return formulas.load_aware(view, self.beta)


@dataclass(frozen=True)
class VllmRouter(Router):
    """vLLM's own balancer of data-parallel engines: the shortest queue, where waiting requests
    count more as the cache fills.
    """

    name: ClassVar[str] = "vllm-dp"
    reads_reports: ClassVar[bool] = True

    waiting: float = parameter(6.0, high=100, search=(0.0, 12.0), doc="weight of waiting requests")

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        return formulas.vllm_dp(view, self.waiting)


@dataclass(frozen=True)
class LawRouter(Router):
    """The least time that the request adds to all requests, by the fitted law of a pass, and the
    fewest requests that miss a target because of it.

    For each replica: the seconds until the request's first token, behind the prompts that wait
    there and beside the rows that decode; the seconds of its own output; and what its passes add
    to the rows that run. Requests beyond the replica's cache wait until enough rows have ended.
    With targets, each request that would newly miss one counts `late` seconds more: this one by
    its first token, and those there that were in time so far, if a pass with this prompt makes
    their gap too long. So requests that are late in any case go where they make few others late.
    """

    name: ClassVar[str] = "by-law"

    others: float = parameter(
        1.0, high=100, search=(0.0, 3.0), doc="weight of the time that other requests lose"
    )
    first: float = parameter(
        1.0, high=100, search=(0.5, 5.0), doc="weight of the time to the request's first token"
    )
    late: float = parameter(
        5.0, high=1e4, search=(0.0, 50.0), doc="seconds that a newly missed target counts"
    )
    work: float = parameter(
        20.0,
        high=1e4,
        search=(0.0, 100.0),
        doc="seconds that a second of computing its prompt counts, for what comes later",
    )
    ttft_s: float = parameter(0.0, doc="target of the time to the first token; 0: none")
    gap_s: float = parameter(0.0, doc="target of the largest gap between two tokens; 0: none")

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        return formulas.by_law(view, request, self._weights())

    def outlook(self, request: RoutedRequest, replica: Replica, view: RouterView) -> RequestOutlook:
        """What to expect of a request on a replica."""
        return formulas.weigh(view, request, replica, self._weights())

    def _weights(self) -> formulas.LawWeights:
        return formulas.LawWeights(
            self.others, self.first, self.late, self.work, self.ttft_s, self.gap_s
        )


ROUTERS: dict[str, type[Router]] = {
    router.name: router
    for router in (
        RoundRobinRouter,
        LeastRequestsRouter,
        LeastTokensRouter,
        LeastMemoryRouter,
        SessionHashRouter,
        PrefixRouter,
        LlmdRouter,
        DynamoRouter,
        SglangRouter,
        LoadAwareRouter,
        VllmRouter,
        LawRouter,
    )
}


def refuse_unknown_router(name: str, where: str = "") -> None:
    """`InputError` with the valid names for a router that does not exist."""
    if name not in ROUTERS:
        raise InputError(
            f"{where}there is no router '{name}'", f"valid: {', '.join(sorted(ROUTERS))}"
        )


def make_router(name: str, parameters: Mapping[str, Value]) -> Router:
    """The router `name` with `parameters` over its defaults; `InputError` for what it lacks."""
    refuse_unknown_router(name)
    known = declared(ROUTERS[name])
    for key in parameters:
        if key not in known:
            hint = f"valid: {', '.join(known)}" if known else "it has no parameters"
            raise InputError(f"router '{name}' has no parameter '{key}'", hint)
    return ROUTERS[name](**parameters)


def targets_of(name: str, sla: Mapping[str, float]) -> dict[str, Value]:
    """The parameters of router `name` that are targets: the strictest of each kind in `sla`."""
    known = declared(ROUTERS[name])
    limits = {TARGETS[metric]: strictest(sla, metric) for metric in TARGETS}
    return {key: limit for key, limit in limits.items() if key in known and limit < math.inf}


def router_of(recipe: Recipe, name: str | None = None, workers: int = 0) -> RouterSpec | None:
    """The recipe's router before its replicas of a server (of all kinds, `workers`), or the router
    `name` at its defaults, with all parameters; None where there are no replicas. The recipe's
    targets are those of a router that is not given any.
    """
    if (workers or recipe.workers) == 1 or not traits_of(recipe.engine.name).server:
        return None
    own = recipe.replica_router
    given = own.parameters if name in (None, own.name) else {}
    name = name or own.name
    refuse_unknown_router(name, "replica_router: ")
    router = make_router(name, targets_of(name, recipe.sla) | given)
    return RouterSpec(name=name, parameters=parameters(router))


def _ring(view: RouterView) -> tuple[list[int], list[int]]:
    """Points of the replicas that are up on a ring, ascending, and the replica of each."""
    up = tuple(replica.index for replica in view.replicas)
    if up not in view.rings:
        sizes = [max(round(RING_POINTS * replica.weight), 1) for replica in view.replicas]
        pairs = sorted(
            (_point(f"{index}:{k}"), index)
            for index, size in zip(up, sizes, strict=True)
            for k in range(size)
        )
        view.rings[up] = [point for point, _ in pairs], [index for _, index in pairs]
    return view.rings[up]


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
