"""The routers: each gives a request the index of a replica.

`RouterView` is what a router may look at. A router is a frozen set of parameters and a pure
function of the view; those that compare replicas give each one a cost, and the least cost wins.

- `round-robin`, `least-requests`, `future-memory`, `session`: one number or one hash.
- `llm-d`, `dynamo`, `sglang`: presets of one score, the weighted sum of a prefix match, a queue and
  the use of the KV cache (`ScoredRouter`).
- `by-law`: the time that the request adds, by the fitted law of a pass (`LawRouter`).
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mypy_extensions import mypyc_attr

from toolkit.engine_traits import traits_of
from toolkit.errors import InputError, nearest
from toolkit.files.recipe import Recipe, RouterSpec
from toolkit.routing.replicas import Replica, RequestOutlook, RouterView
from toolkit.routing.types import RoutedRequest, RouterLaw, strictest
from toolkit.sched.policies.parameters import (
    Value,
    declared,
    parameter,
    parameters,
    policy,
    validate,
)

TARGETS = {"ttft": "ttft_s", "mtpot": "gap_s"}  # a kind of target to a router's parameter
RING_POINTS = 160  # of each replica on the ring of `session`
MOST_WEIGHED = 12  # replicas that `by-law` computes the costs of
SHARPNESS = 16  # how fast the chance to miss a target rises near it


@mypyc_attr(native_class=False)  # so that subclasses may be data classes with slots
class Router:
    """A way to choose a replica. The fields are its parameters.

    `reads_reports`: whether it reads what replicas report of themselves. For each replica,
    `index_blocks` bounds the blocks that are remembered (0: as many as its cache holds; -1: no
    bound), and `index_ttl_s` the seconds (0: no bound).
    """

    __slots__ = ()
    name: ClassVar[str] = ""
    reads_reports: ClassVar[bool] = False
    index_blocks: ClassVar[int] = 0
    index_ttl_s: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        validate(self, f"router '{self.name}'")

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        """The index of the replica that gets the request."""
        raise NotImplementedError


@policy("round-robin")
class RoundRobinRouter(Router):
    """To each replica in turn."""

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        return view.replicas[view.routed % len(view.replicas)].index


@policy("least-requests")
class LeastRequestsRouter(Router):
    """To the replica with the fewest requests that have not ended."""

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        return _fewest_requests(view)


@policy("future-memory")
class LeastMemoryRouter(Router):
    """To the replica with the smallest share of its cache in use once outputs have mean length."""

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        size = view.block_tokens
        expected = view.expected_tokens
        matched = view.matched
        prompt = request.prompt_tokens
        costs: list[float] = []
        for replica in view.replicas:
            new = prompt - min(matched[replica.index] * size, prompt - 1)
            tokens = replica.blocks * size + new + (len(replica.sent) + 1) * expected
            costs.append(tokens / replica.capacity_tokens)
        return view.least(costs)


@policy("session")
class SessionRouter(Router):
    """Consistent hashing of the session, or of the prompt's first block where there is none; to the
    replica with the fewest requests where there is neither.

    With `load_factor` a replica takes at most that many times the mean number of requests, and the
    next one on the ring takes the rest (consistent hashing with bounded loads, arXiv:1608.01350).
    """

    load_factor: float = parameter(
        0.0, high=100, search=(1.05, 3.0), doc="a replica's share of the mean load; 0: no bound"
    )

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        key = request.session or (str(request.blocks[0]) if request.blocks else "")
        if not key:
            return _fewest_requests(view)
        points, owners = _ring(view)
        at = bisect_left(points, _point(key))
        if not self.load_factor:
            return owners[at % len(owners)]
        requests = 0
        for replica in view.replicas:
            requests += len(replica.sent)
        most = self.load_factor * (requests + 1) / len(view.replicas)
        for step in range(len(owners)):
            owner = owners[(at + step) % len(owners)]
            if len(view.every[owner].sent) + 1 <= most:
                return owner
        return _fewest_requests(view)


def _fewest_requests(view: RouterView) -> int:
    return view.least([float(len(replica.sent)) for replica in view.replicas])


def _ring(view: RouterView) -> tuple[list[int], list[int]]:
    """Points of the replicas that are up on a ring, ascending, and the replica of each."""
    up = tuple([replica.index for replica in view.replicas])
    if up not in view.rings:
        pairs = sorted(
            [(_point(f"{index}:{k}"), index) for index in up for k in range(RING_POINTS)]
        )
        view.rings[up] = [point for point, _ in pairs], [index for _, index in pairs]
    return view.rings[up]


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


# One score, and the weights, measures and rules of three projects. docs/decisions.md says where
# a preset differs from its project.


def _weight(default: float, doc: str) -> Any:
    return parameter(default, high=100, search=(0.0, 5.0), doc=doc)


@policy()
class ScoredRouter(Router):
    """To the replica with the highest score:

        prefix x matched share of the prompt - queue x length of the queue - kv x use of the cache

    A preset sets the weights and says how `queues` and `uses` are measured.
    """

    prefix: float = _weight(1.0, "weight of the matched share of the prompt")
    queue: float = _weight(1.0, "weight of the queue's length")
    kv: float = _weight(1.0, "weight of the use of the KV cache")

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        queues = self.queues(view)
        uses = self.uses(view)
        return _highest_score(view, self.prefix, self.queue, self.kv, queues, uses)

    def queues(self, view: RouterView) -> list[float]:
        """The length of each replica's queue, in a unit of the preset."""
        raise NotImplementedError

    def uses(self, view: RouterView) -> list[float]:
        """How much of each replica's cache is in use, in a unit of the preset."""
        return [replica.kv_usage for replica in view.replicas]


@policy("llm-d")
class LlmdRouter(ScoredRouter):
    """llm-d's scheduler: the scorers of prefix, queue and KV cache, with its default weights.

    A queue is what a replica reports as waiting, from 0 for the shortest to 1 for the longest; the
    use of a cache is the share that it reports.
    """

    prefix: float = _weight(3.0, "weight of the matched share of the prompt")
    queue: float = _weight(2.0, "weight of the queue's length")
    kv: float = _weight(2.0, "weight of the use of the KV cache")

    def queues(self, view: RouterView) -> list[float]:
        return _from_shortest([replica.waiting for replica in view.replicas])


@policy("dynamo")
class DynamoRouter(ScoredRouter):
    """Dynamo's KV router without cache events: blocks to prefill, and blocks to keep for decoding.

    Both are counted in multiples of the request's own blocks. A matched block saves one to prefill
    and one to keep, hence the weight 2: weight P of the prefill is prefix P + 1 and queue P here.
    """

    prefix: float = _weight(2.0, "weight of the matched share of the prompt")
    queue: float = _weight(1.0, "weight of the tokens to prefill, over those of the request")
    kv: float = _weight(1.0, "weight of the blocks in use, over those of the request")

    def queues(self, view: RouterView) -> list[float]:
        tokens = float(max(view.blocks, 1) * view.block_tokens)
        return [replica.prefill_tokens / tokens for replica in view.replicas]

    def uses(self, view: RouterView) -> list[float]:
        blocks = float(max(view.blocks, 1))
        return [replica.blocks / blocks for replica in view.replicas]


@policy("sglang")
class SglangRouter(ScoredRouter):
    """SGLang's `cache_aware`: the longest match, by a rule of its own or else the shortest queue.

    The rule: a match counts only if it is long enough and the load is balanced. A queue is all
    requests of a replica, from 0 for the fewest to 1 for the most.
    """

    prefix: float = _weight(1.0, "weight of the matched share of the prompt")
    queue: float = _weight(0.0, "weight of the queue's length beside a match that counts")
    kv: float = _weight(0.0, "weight of the use of the KV cache beside a match that counts")
    threshold: float = parameter(
        0.3, high=1, search=(0.0, 1.0), doc="share of a prompt above which a match counts"
    )
    abs_load: int = parameter(
        64, low=0, search=(1, 256), log=True, doc="requests between the most and the least loaded"
    )
    rel_load: float = parameter(
        1.5, low=1, search=(1.0, 4.0), doc="times the load of the least loaded replica"
    )

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        queues = self.queues(view)
        if not self.match_counts(view):
            return view.least(queues)
        return _highest_score(view, self.prefix, self.queue, self.kv, queues, self.uses(view))

    def queues(self, view: RouterView) -> list[float]:
        return _from_shortest([len(replica.sent) for replica in view.replicas])

    def match_counts(self, view: RouterView) -> bool:
        """Whether the load is balanced and some replica has enough of the prompt."""
        loads = [len(replica.sent) for replica in view.replicas]
        low = min(loads)
        high = max(loads)
        if high - low > self.abs_load and high > self.rel_load * low:
            return False
        return max(_shares(view)) > self.threshold


# Set here, because a compiled class would take them for parameters.
LlmdRouter.reads_reports = True
LlmdRouter.index_blocks = 31_250
DynamoRouter.index_blocks = -1
DynamoRouter.index_ttl_s = 120.0
SglangRouter.index_blocks = -1


def _highest_score(
    view: RouterView,
    prefix: float,
    queue: float,
    kv: float,
    queues: Sequence[float],
    uses: Sequence[float],
) -> int:
    """The index of the replica with the highest weighted sum; ties are broken at random."""
    costs = [
        queue * queues[place] + kv * uses[place] - prefix * share
        for place, share in enumerate(_shares(view))
    ]
    return view.least(costs)


def _shares(view: RouterView) -> list[float]:
    """The share of the request's full blocks that each replica has cached."""
    matched = view.matched
    blocks = float(max(view.blocks, 1))
    return [matched[replica.index] / blocks for replica in view.replicas]


def _from_shortest(queues: Sequence[int]) -> list[float]:
    """Queue lengths from 0 for the shortest to 1 for the longest; all 0 where they are equal."""
    low = min(queues)
    span = float(max(max(queues) - low, 1))
    return [(length - low) / span for length in queues]


@policy("by-law")
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
        """The replica of the least cost; what is expected there is left in `view.outlook`."""
        view.replicas = _likely(view)
        outlooks = [self.outlook(request, replica, view) for replica in view.replicas]
        index = view.least([outlook.cost_s for outlook in outlooks])
        for place, replica in enumerate(view.replicas):
            if replica.index == index:
                view.outlook = outlooks[place]
        return index

    def outlook(self, request: RoutedRequest, replica: Replica, view: RouterView) -> RequestOutlook:
        """What to expect of a request on a replica. `InputError` if it has no law of a pass."""
        law = _law(replica)
        behind_s: float = law.behind_s
        expected = view.expected_tokens if view.expected_tokens > 1.0 else 1.0
        prompt = request.prompt_tokens
        cached = min(view.matched[replica.index] * view.block_tokens, prompt - 1)
        new = prompt - cached
        rows = replica.decodes
        decodes = min(rows, replica.max_rows)
        # rows that decode have generated half of their output on average
        context: float = replica.decode_tokens + rows * expected / 2
        room = max(replica.pass_tokens - decodes, 1)
        ahead = replica.prefill_tokens
        passes = -(-(ahead + new) // room)
        attended_ahead = ahead * (ahead / max(replica.prefills, 1)) / 2
        plain_s: float = law.pass_s(decodes, context, 0, 0, 0.0)
        chunks = (replica.prefills + 1) / passes
        chunks = chunks if chunks > 1.0 else 1.0
        keys = (new * (cached + new / 2) + attended_ahead) / passes
        chunk_s: float = law.pass_s(decodes, context, chunks, (ahead + new) / passes, keys)
        # what its own prompt adds to the passes of the rows that decode
        longer_s = chunk_s - plain_s
        own_s = (longer_s if longer_s > 0.0 else 0.0) * passes * new / (ahead + new)
        whole_s = passes * chunk_s - own_s - plain_s
        own_s += behind_s * _tokens_behind(1, cached, new, room)
        left = rest = 0.0  # seconds and tokens of the prompts ahead: part of them is computed
        if ahead:
            cached_ahead = replica.prefill_cached
            whole_s += behind_s * _tokens_behind(replica.prefills, cached_ahead, ahead, room)
            left = min(whole_s, max(replica.prefilled_s - view.now_s, 0.0))
            rest = ahead * left / (whole_s if whole_s > 1e-9 else 1e-9)
        longer = context + prompt + expected / 2
        slower_s: float = law.pass_s(decodes + 1, longer, 0, 0, 0.0) - plain_s
        first_s = left + own_s + plain_s
        first_s += _memory_wait_s(replica, new, context, plain_s, expected)
        lost_s = own_s * decodes + expected * slower_s * decodes
        late = 0.0
        stalls = False
        ttft_s = self.ttft_s
        gap_s = self.gap_s
        if ttft_s:
            late = _chance(first_s, ttft_s)
        if gap_s:
            tokens = rest + new if rest + new < room else float(room)
            own = new if new < tokens else tokens
            attended = own * (prompt - own / 2) + (tokens - own) * attended_ahead / max(ahead, 1)
            longest_s: float = law.pass_s(decodes, context, 1, tokens, attended)
            longest_s += behind_s * (prompt - own)
            stalls = longest_s > gap_s
            late += replica.in_time * _chance(longest_s, gap_s)
        cost_s = self.first * first_s + expected * (plain_s + slower_s) + self.others * lost_s
        cost_s += self.late * late + self.work * own_s
        is_late = ttft_s > 0.0 and first_s > ttft_s
        return RequestOutlook(view.now_s + first_s, is_late, stalls, cost_s)


def _law(replica: Replica) -> RouterLaw:
    """The law of a replica's passes, or `InputError`."""
    law = replica.traits.law
    if law is None:
        raise InputError(
            "router 'by-law' needs the law of a pass of every replica",
            "tune from a fit of the engine, or choose another router",
        )
    return law


def _likely(view: RouterView) -> list[Replica]:
    """The replicas that may be best: where more than `MOST_WEIGHED` are up, those with the longest
    matches, with the fewest tokens to compute, the fewest requests, and the fewest in time.
    """
    replicas = view.replicas
    if len(replicas) <= MOST_WEIGHED:
        return replicas
    matched = view.matched
    part = MOST_WEIGHED // 3
    places: set[int] = set()
    for count, keys in (
        (part, [-matched[replica.index] for replica in replicas]),
        (part, [replica.prefill_tokens for replica in replicas]),
        (part, [len(replica.sent) for replica in replicas]),
        (2, [replica.in_time for replica in replicas]),
    ):
        places.update(sorted(range(len(keys)), key=keys.__getitem__)[:count])
    return [replicas[place] for place in sorted(places)]


def _chance(expected_s: float, target_s: float) -> float:
    """The chance to miss a target, from 0 to 1: a half where it is expected to be just met."""
    if expected_s <= 0.0:
        return 0.0
    ratio = target_s / expected_s
    return 1.0 / (1.0 + (ratio if ratio < 100.0 else 100.0) ** SHARPNESS)


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
    excess = held + new - replica.capacity_tokens
    rows = len(replica.sent)
    slots = rows + 1 - replica.max_rows
    if not rows or (excess <= 0.0 and slots <= 0):
        return 0.0
    row_tokens = held / rows
    ends = excess / (row_tokens if row_tokens > 1.0 else 1.0)
    ends = slots if slots > ends else ends
    ends = ends if ends > 0.0 else 0.0
    return ends * expected * pass_s / min(rows, replica.max_rows)


_CLASSES: Sequence[type[Router]] = (
    RoundRobinRouter,
    LeastRequestsRouter,
    LeastMemoryRouter,
    SessionRouter,
    LlmdRouter,
    DynamoRouter,
    SglangRouter,
    LawRouter,
)
ROUTERS: dict[str, type[Router]] = {router.name: router for router in _CLASSES}


def refuse_unknown_router(name: str, where: str = "") -> None:
    """`InputError` with the nearest valid name for a router that does not exist."""
    if name not in ROUTERS:
        raise InputError(f"{where}there is no router '{name}'", nearest(name, ROUTERS))


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
