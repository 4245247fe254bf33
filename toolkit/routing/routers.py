"""The routers: each gives a request the index of a replica.

`RouterView` is what a router may look at. A router is a frozen set of parameters and a pure
function of the view. Routers of other projects have these projects' formulas and defaults, which
know no kinds of replicas. Ours count loads by weights (`weighed`), `by-law` by each one's law.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar, Protocol

import numpy as np

from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.files.recipe import Recipe, RouterSpec
from toolkit.routing.replicas import Replica, RequestOutlook, RoutedRequest
from toolkit.sched.policies.parameters import Knob, Value, check, defaults, knob, knobs, parameters

MOST_WEIGHED = 12  # replicas that `by-law` computes the costs of
SHARPNESS = 16  # how fast the chance to miss a target rises near it
TARGETS = {"ttft": "ttft_s", "mtpot": "gap_s"}  # a kind of target to a router's parameter
RING_POINTS = 160  # of each replica of weight 1 on the ring of `session-hash`
GOLDEN = (5**0.5 - 1) / 2  # its multiples spread turns evenly


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
        now_s: the time.
        outlook: where a router says what it expects of the request, if it does.
    """

    replicas: Sequence[Replica]
    matched: Sequence[int]
    block_tokens: int
    expected_tokens: float
    routed: int
    rng: np.random.Generator
    rings: dict[tuple[int, ...], tuple[list[int], list[int]]] = field(default_factory=dict)
    now_s: float = 0.0
    outlook: RequestOutlook | None = None
    even: bool = False  # known to be of one weight, so that no request looks at all weights

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
    """To each replica in turn; of several kinds, to each as often as its weight says."""

    name: ClassVar[str] = "round-robin"

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        replicas = view.replicas
        if view.even or len({replica.traits.weight for replica in replicas}) == 1:
            return replicas[view.routed % len(replicas)].index
        ends = list(accumulate(replica.traits.weight for replica in replicas))
        turn = view.routed * GOLDEN % 1.0 * ends[-1]
        return replicas[min(bisect_right(ends, turn), len(ends) - 1)].index


@dataclass(frozen=True)
class LeastRequestsRouter(_Checked):
    """To the replica with the fewest requests that have not ended, for its weight."""

    name: ClassVar[str] = "least-requests"

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        return view.least(_requests(view))


@dataclass(frozen=True)
class LeastTokensRouter(_Checked):
    """To the replica with the fewest tokens to compute, for its weight: prompts without a token
    yet, and outputs of the mean length.
    """

    name: ClassVar[str] = "least-tokens"

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        expected = view.expected_tokens
        tokens = [r.prefill_tokens + r.requests * expected for r in view.replicas]
        return view.least(_for_weights(view, tokens, request.prompt_tokens + expected))


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
    Kinds of replicas have points and bounds by their weights.
    """

    name: ClassVar[str] = "session-hash"

    load_factor: float = knob(
        0.0, high=100, search=(1.05, 3.0), doc="a replica's share of the mean load; 0: no bound"
    )

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        key = request.session or (str(request.blocks[0]) if request.blocks else "")
        if not key:
            return view.least(_requests(view))
        up = tuple(replica.index for replica in view.replicas)
        if up not in view.rings:
            view.rings[up] = _ring(view.replicas)
        points, owners = view.rings[up]
        at = bisect_left(points, _point(key))
        if not self.load_factor:
            return owners[at % len(owners)]
        loads = {replica.index: replica.requests for replica in view.replicas}
        weights = {replica.index: replica.traits.weight for replica in view.replicas}
        most = self.load_factor * (sum(loads.values()) + 1) / sum(weights.values())
        for step in range(len(owners)):
            owner = owners[(at + step) % len(owners)]
            if loads[owner] + 1 <= most * weights[owner]:
                return owner
        return view.least(_requests(view))


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

    others: float = knob(
        1.0, high=100, search=(0.0, 3.0), doc="weight of the time that other requests lose"
    )
    first: float = knob(
        1.0, high=100, search=(0.5, 5.0), doc="weight of the time to the request's first token"
    )
    late: float = knob(
        5.0, high=1e4, search=(0.0, 50.0), doc="seconds that a newly missed target counts"
    )
    work: float = knob(
        20.0,
        high=1e4,
        search=(0.0, 100.0),
        doc="seconds that a second of computing its prompt counts, for what comes later",
    )
    ttft_s: float = knob(0.0, doc="target of the time to the first token; 0: none")
    gap_s: float = knob(0.0, doc="target of the largest gap between two tokens; 0: none")

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        view.replicas = _likely(view)
        if any(replica.traits.law is None for replica in view.replicas):
            raise InputError(
                "router 'by-law' needs the law of a pass of every replica",
                "tune from a fit of the engine, or choose another router",
            )
        found = [self._weighed(request, replica, view) for replica in view.replicas]
        index = view.least([cost for cost, _ in found])
        view.outlook = next(
            outlook
            for replica, (_, outlook) in zip(view.replicas, found, strict=True)
            if replica.index == index
        )
        return index

    def outlook(self, request: RoutedRequest, replica: Replica, view: RouterView) -> RequestOutlook:
        """What to expect of a request on a replica."""
        return self._weighed(request, replica, view)[1]

    def _weighed(
        self, request: RoutedRequest, replica: Replica, view: RouterView
    ) -> tuple[float, RequestOutlook]:
        """The cost of a replica in seconds, and what to expect there."""
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
        attended_ahead = ahead * (ahead / max(replica.prefills, 1)) / 2
        plain_s = law.pass_s(decodes, context, 0, 0, 0.0)
        chunk_s = law.pass_s(
            decodes,
            context,
            max((replica.prefills + 1) / passes, 1),
            (ahead + new) / passes,
            (new * (cached + new / 2) + attended_ahead) / passes,
        )
        # what its own prompt adds to the passes of the rows that decode
        own_s = max(chunk_s - plain_s, 0.0) * passes * new / (ahead + new)
        whole_s = passes * chunk_s - own_s - plain_s
        own_s += law.behind_s * _tokens_behind(1, cached, new, room)
        left = rest = 0.0  # seconds and tokens of the prompts ahead: part of them is computed
        if ahead:
            behind = _tokens_behind(replica.prefills, replica.prefill_cached, ahead, room)
            whole_s += law.behind_s * behind
            left = min(whole_s, max(replica.prefilled_s - view.now_s, 0.0))
            rest = ahead * left / max(whole_s, 1e-9)
        slower_s = law.pass_s(decodes + 1, context + prompt + expected / 2, 0, 0, 0.0) - plain_s
        first_s = left + own_s + plain_s
        first_s += _memory_wait_s(replica, new, context, plain_s, expected)
        lost_s = own_s * decodes + expected * slower_s * decodes
        late, stalls = 0.0, False
        if self.ttft_s:
            late = _chance(first_s, self.ttft_s)
        if self.gap_s:
            tokens = min(rest + new, room)
            own = min(new, tokens)
            attended = own * (prompt - own / 2) + (tokens - own) * attended_ahead / max(ahead, 1)
            longest_s = law.pass_s(decodes, context, 1, tokens, attended)
            longest_s += law.behind_s * (prompt - own)
            stalls = longest_s > self.gap_s
            late += replica.in_time * _chance(longest_s, self.gap_s)
        cost = self.first * first_s + expected * (plain_s + slower_s) + self.others * lost_s
        cost += self.late * late + self.work * own_s * traits.weight
        is_late = bool(self.ttft_s) and first_s > self.ttft_s
        return cost, RequestOutlook(view.now_s + first_s, is_late, stalls)


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


def router_defaults(router: type[Router]) -> dict[str, Value]:
    """The defaults of a router's parameters by name."""
    return defaults(router)  # type: ignore[arg-type]


def router_parameters(router: Router) -> dict[str, Value]:
    """The parameters of one router object."""
    return parameters(router)  # type: ignore[arg-type]


def refuse_unknown_router(name: str, where: str = "") -> None:
    """`InputError` with the valid names for a router that does not exist."""
    if name not in ROUTERS:
        raise InputError(
            f"{where}there is no router '{name}'", f"valid: {', '.join(sorted(ROUTERS))}"
        )


def make_router(name: str, parameters: Mapping[str, Value]) -> Router:
    """The router `name` with `parameters` over its defaults; `InputError` for what it lacks."""
    refuse_unknown_router(name)
    known = router_knobs(ROUTERS[name])
    for parameter in parameters:
        if parameter not in known:
            hint = f"valid: {', '.join(known)}" if known else "it has no parameters"
            raise InputError(f"router '{name}' has no parameter '{parameter}'", hint)
    return ROUTERS[name](**parameters)


def targets_of(name: str, sla: Mapping[str, float]) -> dict[str, Value]:
    """The parameters of router `name` that are targets, as these targets say: the strictest of each
    kind.
    """
    known = router_knobs(ROUTERS[name])
    found: dict[str, Value] = {}
    for target, parameter in TARGETS.items():
        limits = [seconds for key, seconds in sla.items() if key.startswith(f"{target}_")]
        if limits and parameter in known:
            found[parameter] = min(limits)
    return found


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
    return RouterSpec(name=name, parameters=router_parameters(router))


def _for_weights(view: RouterView, loads: Sequence[float], one: float) -> Sequence[float]:
    """The loads of replicas of several kinds with `one` more each, for a replica of weight 1."""
    if view.even:
        return loads
    weights = [replica.traits.weight for replica in view.replicas]
    return [(load + one) / weight for load, weight in zip(loads, weights, strict=True)]


def _requests(view: RouterView) -> Sequence[float]:
    """The requests that the replicas have, for their weights."""
    return _for_weights(view, [replica.requests for replica in view.replicas], 1)


def _ring(up: Sequence[Replica]) -> tuple[list[int], list[int]]:
    """Points of the replicas on a ring, ascending, and the replica of each."""
    points = {each.index: max(round(RING_POINTS * each.traits.weight), 1) for each in up}
    pairs = sorted((_point(f"{index}:{k}"), index) for index, n in points.items() for k in range(n))
    return [point for point, _ in pairs], [index for _, index in pairs]


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _likely(view: RouterView) -> Sequence[Replica]:
    """The replicas that may be best: where more than `MOST_WEIGHED` are up, those with the longest
    matches, with the fewest tokens to compute, the fewest requests, and the fewest in time; of
    several kinds, of each.
    """
    replicas, matched = view.replicas, view.matched
    if len(replicas) <= MOST_WEIGHED:
        return replicas
    kinds: dict[str, list[Replica]] = {}
    for replica in replicas:
        kinds.setdefault(replica.traits.kind, []).append(replica)
    part, few = max(MOST_WEIGHED // 3 // len(kinds), 1), max(2 // len(kinds), 1)
    found: set[int] = set()
    for kind in kinds.values():
        for count, keys in (  # `heapq.nsmallest` with a key takes twice as long for 64
            (part, [-matched[replica.index] for replica in kind]),
            (part, [replica.prefill_tokens for replica in kind]),
            (part, [len(replica.sent) for replica in kind]),
            (few, [replica.in_time for replica in kind]),
        ):
            places = sorted(range(len(kind)), key=keys.__getitem__)[:count]
            found.update(kind[place].index for place in places)
    return [replica for replica in replicas if replica.index in found]


def _chance(expected_s: float, target_s: float) -> float:
    """The chance to miss a target, from 0 to 1: a half where it is expected to be just met."""
    if expected_s <= 0.0:
        return 0.0
    return 1.0 / (1.0 + min(target_s / expected_s, 100.0) ** SHARPNESS)


def _tokens_behind(prompts: int, cached: int, new: int, room: int) -> float:
    """Tokens that parts of prompts find cached before them, those of earlier parts included, where
    a pass computes at most `room` new tokens; `cached` and `new` are of all `prompts` together.
    """
    parts = -(-new // (prompts * room))  # of each prompt
    return parts * cached + prompts * room * parts * (parts - 1) / 2


def _memory_wait_s(
    replica: Replica, new: int, context: float, pass_s: float, expected: float
) -> float:
    """Seconds until enough rows have ended to hold what waits and `new` tokens more."""
    held = context + replica.prefill_tokens
    excess = held + new - replica.traits.capacity_tokens
    rows = replica.requests
    slots = rows + 1 - replica.traits.max_rows
    if not rows or (excess <= 0 and slots <= 0):
        return 0.0
    ends = max(excess / max(held / rows, 1.0), slots, 0.0)
    return ends * expected * pass_s / min(rows, replica.traits.max_rows)
