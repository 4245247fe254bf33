"""The routers: each gives a request the index of a replica.

`RouterView` is what a router may look at. A router is a frozen set of parameters and a pure
function of the view. Routers of other projects have these projects' formulas and defaults; `by-law`
is ours.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np

from toolkit.errors import InputError, nearest
from toolkit.routing.replicas import Replica, RoutedRequest
from toolkit.sched.policies.parameters import Knob, Value, check, knob, knobs

RING_POINTS = 160  # of each replica on the ring of `session-hash`


@dataclass(slots=True)
class RouterView:
    """What is known when a request is to be routed.

    Attributes:
        replicas: those that are up, by index; at least one.
        matched: for each replica by its index, how many of the request's leading blocks it
            probably has cached.
        block_tokens: of a block.
        expected_tokens: mean output of the requests that ended last.
        routed: how many requests were routed before.
        rng: for ties.
        rings: what `session-hash` keeps between requests.
    """

    replicas: Sequence[Replica]
    matched: Sequence[int]
    block_tokens: int
    expected_tokens: float
    routed: int
    rng: np.random.Generator
    rings: dict[tuple[int, ...], tuple[list[int], list[int]]] = field(default_factory=dict)

    def share(self, request: RoutedRequest, replica: Replica) -> float:
        """The share of the request's full blocks that a replica has cached, from 0 to 1."""
        return self.matched[replica.index] / len(request.blocks) if request.blocks else 0.0

    def cached_tokens(self, request: RoutedRequest, replica: Replica) -> int:
        """Prompt tokens that a replica need not compute; the last one it always computes."""
        return min(self.matched[replica.index] * self.block_tokens, request.prompt_tokens - 1)

    def least(self, costs: Sequence[float]) -> int:
        """The index of the replica of the least cost; ties are broken at random."""
        lowest = min(costs)
        best = [r.index for r, cost in zip(self.replicas, costs, strict=True) if cost == lowest]
        return best[0] if len(best) == 1 else best[int(self.rng.integers(len(best)))]


class Router(Protocol):
    """A way to choose a replica. `reads_reports`: whether it reads what replicas report of
    themselves. `index_blocks` bounds the blocks that are remembered for each
    replica (0: those that its cache holds; -1: no bound), `index_ttl_s` the seconds (0: no bound).
    """

    name: ClassVar[str]
    reads_reports: ClassVar[bool]
    index_blocks: ClassVar[int]
    index_ttl_s: ClassVar[float]

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        """The index of the replica that gets the request."""
        ...


@dataclass(frozen=True)
class _Checked:
    """Parameters that are checked when they are given."""

    name: ClassVar[str] = ""
    reads_reports: ClassVar[bool] = False
    index_blocks: ClassVar[int] = 0
    index_ttl_s: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        for parameter, limits in router_knobs(type(self)).items():
            default = type(self).__dataclass_fields__[parameter].default
            check(
                f"router '{self.name}'", parameter, type(default), getattr(self, parameter), limits
            )


@dataclass(frozen=True)
class RoundRobinRouter(_Checked):
    """To each replica in turn."""

    name: ClassVar[str] = "round-robin"

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        return view.replicas[view.routed % len(view.replicas)].index


@dataclass(frozen=True)
class LeastRequestsRouter(_Checked):
    """To the replica with the fewest requests that have not ended."""

    name: ClassVar[str] = "least-requests"

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        return view.least([replica.requests for replica in view.replicas])


@dataclass(frozen=True)
class LeastTokensRouter(_Checked):
    """To the replica with the fewest tokens to compute: prompts without a token yet, and outputs of
    the mean length.
    """

    name: ClassVar[str] = "least-tokens"

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        expected = view.expected_tokens
        return view.least([r.prefill_tokens + r.requests * expected for r in view.replicas])


@dataclass(frozen=True)
class LeastMemoryRouter(_Checked):
    """To the replica that would have the smallest share of its cache in use if all its requests
    reached the mean output length.
    """

    name: ClassVar[str] = "future-memory"

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        size, expected = view.block_tokens, view.expected_tokens
        costs = []
        for replica in view.replicas:
            new = request.prompt_tokens - view.cached_tokens(request, replica)
            tokens = replica.blocks * size + new + (replica.requests + 1) * expected
            costs.append(tokens / replica.traits.capacity_tokens)
        return view.least(costs)


@dataclass(frozen=True)
class SessionHashRouter(_Checked):
    """Consistent hashing of the session, or of the prompt's first block where there is none; to the
    replica with the fewest requests where there is neither.

    With `load_factor` a replica takes at most that many times the mean number of requests, and the
    next one on the ring takes the rest (consistent hashing with bounded loads, arXiv:1608.01350).
    """

    name: ClassVar[str] = "session-hash"

    load_factor: float = knob(
        0.0, high=100, search=(1.05, 3.0), doc="a replica's share of the mean load; 0: no bound"
    )

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        key = request.session or (str(request.blocks[0]) if request.blocks else "")
        if not key:
            return view.least([replica.requests for replica in view.replicas])
        up = tuple(replica.index for replica in view.replicas)
        if up not in view.rings:
            view.rings[up] = _ring(up)
        points, owners = view.rings[up]
        at = bisect_left(points, _point(key))
        if not self.load_factor:
            return owners[at % len(owners)]
        loads = {replica.index: replica.requests for replica in view.replicas}
        most = self.load_factor * (sum(loads.values()) + 1) / len(up)
        for step in range(len(owners)):
            owner = owners[(at + step) % len(owners)]
            if loads[owner] + 1 <= most:
                return owner
        return view.least([replica.requests for replica in view.replicas])


@dataclass(frozen=True)
class PrefixRouter(_Checked):
    """To the replica with the longest match, whatever its load (vLLM production-stack,
    `prefixaware`).
    """

    name: ClassVar[str] = "prefix"
    index_blocks: ClassVar[int] = -1

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        return view.least([-view.matched[replica.index] for replica in view.replicas])


@dataclass(frozen=True)
class LlmdRouter(_Checked):
    """The largest weighted sum of scores for the match, the queue and the free cache (llm-d
    inference scheduler).
    """

    name: ClassVar[str] = "llm-d"
    reads_reports: ClassVar[bool] = True
    index_blocks: ClassVar[int] = 31_250

    prefix: float = knob(3.0, high=100, search=(0.0, 5.0), doc="weight of the matched share")
    queue: float = knob(2.0, high=100, search=(0.0, 5.0), doc="weight of the shorter queue")
    kv: float = knob(2.0, high=100, search=(0.0, 5.0), doc="weight of the free share of the cache")

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        queues = [replica.waiting for replica in view.replicas]
        low, high = min(queues), max(queues)
        costs = []
        for replica, waiting in zip(view.replicas, queues, strict=True):
            queue = (high - waiting) / (high - low) if high > low else 1.0
            score = self.prefix * view.share(request, replica) + self.queue * queue
            costs.append(-(score + self.kv * (1.0 - replica.kv_usage)))
        return view.least(costs)


@dataclass(frozen=True)
class DynamoRouter(_Checked):
    """The fewest blocks to prefill and to keep while decoding (Dynamo's KV router, without its
    events).
    """

    name: ClassVar[str] = "dynamo"
    index_blocks: ClassVar[int] = -1
    index_ttl_s: ClassVar[float] = 120.0

    credit: float = knob(
        1.0, high=100, search=(0.0, 2.0), doc="how much of a matched block is taken off"
    )
    prefill: float = knob(1.0, high=100, search=(0.1, 5.0), doc="weight of the blocks to prefill")

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        size, costs = view.block_tokens, []
        for replica in view.replicas:
            matched = view.matched[replica.index]
            active = (replica.prefill_tokens + request.prompt_tokens) / size
            kept = replica.blocks + max(len(request.blocks) - matched, 0)
            costs.append(self.prefill * max(0.0, active - self.credit * matched) + kept)
        return view.least(costs)


@dataclass(frozen=True)
class SglangRouter(_Checked):
    """The longest match if it is long enough, but the fewest requests if the load is unbalanced
    (SGLang's `cache_aware`).
    """

    name: ClassVar[str] = "sglang"
    index_blocks: ClassVar[int] = -1

    threshold: float = knob(0.3, high=1, search=(0.0, 1.0), doc="share of a prompt to match")
    abs_load: int = knob(
        64, low=0, search=(1, 256), log=True, doc="requests between the most and the least loaded"
    )
    rel_load: float = knob(
        1.5, low=1, search=(1.0, 4.0), doc="times the load of the least loaded replica"
    )

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        loads = [replica.requests for replica in view.replicas]
        low, high = min(loads), max(loads)
        if high - low > self.abs_load and high > self.rel_load * low:
            return view.least(loads)
        best = max(view.share(request, replica) for replica in view.replicas)
        if best > self.threshold:
            return view.least([-view.share(request, replica) for replica in view.replicas])
        return view.least(loads)


@dataclass(frozen=True)
class LoadAwareRouter(_Checked):
    """The largest matched share less the load above the mean (production-stack, `loadaware`)."""

    name: ClassVar[str] = "load-aware"
    index_blocks: ClassVar[int] = -1

    beta: float = knob(1.0, high=100, search=(0.0, 4.0), doc="weight of the load above the mean")

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        loads = [replica.requests for replica in view.replicas]
        mean = sum(loads) / len(loads)
        return view.least(
            [
                self.beta * (load - mean) / max(1.0, mean) - view.share(request, replica)
                for replica, load in zip(view.replicas, loads, strict=True)
            ]
        )


@dataclass(frozen=True)
class VllmRouter(_Checked):
    """vLLM's own balancer of data-parallel engines: the shortest queue, where waiting requests
    count more as the cache fills.
    """

    name: ClassVar[str] = "vllm-dp"
    reads_reports: ClassVar[bool] = True

    waiting: float = knob(6.0, high=100, search=(0.0, 12.0), doc="weight of waiting requests")

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        costs = []
        for replica in view.replicas:
            report = replica.report
            queued = report.waiting + report.running if report is not None else 0
            load = max(replica.requests, queued)
            costs.append(load + self.waiting * replica.waiting * max(0.0, replica.kv_usage - 0.5))
        return view.least(costs)


@dataclass(frozen=True)
class LawRouter(_Checked):
    """The least time that the request adds to all requests, by the fitted law of a pass.

    For each replica: the seconds until the request's first token, behind the prompts that wait
    there and beside the rows that decode; the seconds of its own output; and what its passes add
    to the rows that run. Requests beyond the replica's cache wait until enough rows have ended.
    """

    name: ClassVar[str] = "by-law"

    others: float = knob(
        1.0, high=100, search=(0.0, 3.0), doc="weight of the time that other requests lose"
    )
    first: float = knob(
        1.0, high=100, search=(0.5, 5.0), doc="weight of the time to the request's first token"
    )

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        if any(replica.traits.law is None for replica in view.replicas):
            raise InputError(
                "router 'by-law' needs the law of a pass of every replica",
                "tune from a fit of the engine, or choose another router",
            )
        return view.least([self._added_s(request, replica, view) for replica in view.replicas])

    def _added_s(self, request: RoutedRequest, replica: Replica, view: RouterView) -> float:
        traits, expected = replica.traits, max(view.expected_tokens, 1.0)
        law = traits.law
        assert law is not None
        prompt = request.prompt_tokens
        cached = view.cached_tokens(request, replica)
        new = prompt - cached
        decodes = min(replica.decodes, traits.max_rows)
        # rows that decode have generated half of their output on average
        context = replica.decode_tokens + replica.decodes * expected / 2
        room = max(traits.pass_tokens - decodes, 1)
        ahead = replica.prefill_tokens
        passes = -(-(ahead + new) // room)
        attended = new * (cached + new / 2) + ahead * (ahead / max(replica.prefills, 1)) / 2
        plain_s = law.pass_s(decodes, context, 0, 0, 0.0)
        chunk_s = law.pass_s(
            decodes,
            context,
            max((replica.prefills + 1) / passes, 1),
            (ahead + new) / passes,
            attended / passes,
        )
        first_s = passes * chunk_s
        # what its own prompt adds to the passes of the rows that decode
        own_s = max(chunk_s - plain_s, 0.0) * passes * new / (ahead + new)
        slower_s = law.pass_s(decodes + 1, context + prompt + expected / 2, 0, 0, 0.0) - plain_s
        decode_s = expected * (plain_s + slower_s)
        lost_s = own_s * decodes + expected * slower_s * decodes
        wait_s = _memory_wait_s(replica, new, context, plain_s, expected)
        return self.first * (first_s + wait_s) + decode_s + self.others * lost_s


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


def router_knobs(router: type[Router] | type[_Checked]) -> dict[str, Knob]:
    """The parameters of a router by name."""
    return knobs(router)  # type: ignore[arg-type]


def make_router(name: str, parameters: Mapping[str, Value]) -> Router:
    """The router `name` with `parameters` over its defaults; `InputError` for what it lacks."""
    if name not in ROUTERS:
        raise InputError(f"there is no router '{name}'", nearest(name, ROUTERS))
    known = router_knobs(ROUTERS[name])
    for parameter in parameters:
        if parameter not in known:
            hint = nearest(parameter, known) if known else "it has no parameters"
            raise InputError(f"router '{name}' has no parameter '{parameter}'", hint)
    return ROUTERS[name](**parameters)


def _ring(up: Sequence[int]) -> tuple[list[int], list[int]]:
    """Points of the replicas on a ring, ascending, and the replica of each."""
    pairs = sorted((_point(f"{index}:{k}"), index) for index in up for k in range(RING_POINTS))
    return [point for point, _ in pairs], [index for _, index in pairs]


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _memory_wait_s(
    replica: Replica, new: int, context: float, pass_s: float, expected: float
) -> float:
    """Seconds until enough rows have ended to hold `new` tokens more and those that wait before
    them.
    """
    held = context + replica.prefill_tokens
    excess = held + new - replica.traits.capacity_tokens
    rows = replica.requests
    slots = rows + 1 - replica.traits.max_rows
    if not rows or (excess <= 0 and slots <= 0):
        return 0.0
    ends = max(excess / max(held / rows, 1.0), slots, 0.0)
    return ends * expected * pass_s / min(rows, replica.traits.max_rows)
