"""Routers as plain formulas over plain state: every call looks at every replica anew.

What `toolkit.routing` keeps and compiles must choose as these do. `PlainBalancer` takes the calls
of `Balancer`; a router gives its parameters, and `PLAIN` the formula of its name.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from toolkit.errors import InputError
from toolkit.routing.replicas import RequestOutlook
from toolkit.routing.types import ReplicaReport, ReplicaTraits, RoutedRequest

MOST_WEIGHED = 12
SHARPNESS = 16
RING_POINTS = 160
HISTORY = 1000
GOLDEN = (5**0.5 - 1) / 2


@dataclass
class Sent:
    request: RoutedRequest
    sent_s: float
    cached_tokens: int
    has_token: bool = False
    stalls: int = -1
    first_s: float = 0.0

    @property
    def new_tokens(self) -> int:
        return self.request.prompt_tokens - self.cached_tokens


class Replica:
    def __init__(self, index: int, traits: ReplicaTraits) -> None:
        self.index = index
        self.traits = traits
        self.is_up = True
        self.sent: dict[str, Sent] = {}
        self.prefills = self.prefill_tokens = self.prefill_cached = self.decode_tokens = 0
        self.prompt_tokens = self.blocks = 0
        self.report: ReplicaReport | None = None
        self.in_time = self._stalls = 0
        self.prefilled_s = 0.0
        self._uses: dict[int, int] = {}

    @property
    def requests(self) -> int:
        return len(self.sent)

    @property
    def decodes(self) -> int:
        return len(self.sent) - self.prefills

    @property
    def waiting(self) -> int:
        if self.report is not None:
            return self.report.waiting
        return max(len(self.sent) - self.traits.max_rows, 0)

    @property
    def kv_usage(self) -> float:
        if self.report is not None:
            return self.report.kv_usage
        return min(self.prompt_tokens / self.traits.capacity_tokens, 1.0)

    def add(self, sent: Sent) -> None:
        self.sent[sent.request.request_id] = sent
        self.prefills += 1
        self.prefill_tokens += sent.new_tokens
        self.prefill_cached += sent.cached_tokens
        self.prompt_tokens += sent.request.prompt_tokens
        for block in sent.request.blocks:
            uses = self._uses.get(block, 0)
            self._uses[block] = uses + 1
            self.blocks += not uses

    def expect(self, sent: Sent, outlook: RequestOutlook) -> None:
        self.prefilled_s = sent.first_s = outlook.prefilled_s
        if outlook.stalls:
            self._stalls += 1
            self.in_time = 0
        if not outlook.is_late:
            sent.stalls = self._stalls
            self.in_time += 1

    def first_token(self, request_id: str) -> Sent | None:
        sent = self.sent.get(request_id)
        if sent is None or sent.has_token:
            return None
        sent.has_token = True
        self.prefills -= 1
        self.prefill_tokens -= sent.new_tokens
        self.prefill_cached -= sent.cached_tokens
        self.decode_tokens += sent.request.prompt_tokens
        return sent

    def remove(self, request_id: str) -> None:
        sent = self.sent.pop(request_id, None)
        if sent is None:
            return
        self.prompt_tokens -= sent.request.prompt_tokens
        self.in_time -= sent.stalls == self._stalls
        if sent.has_token:
            self.decode_tokens -= sent.request.prompt_tokens
        else:
            self.prefills -= 1
            self.prefill_tokens -= sent.new_tokens
            self.prefill_cached -= sent.cached_tokens
        for block in sent.request.blocks:
            uses = self._uses[block] - 1
            if uses:
                self._uses[block] = uses
            else:
                del self._uses[block]
                self.blocks -= 1


class PrefixIndex:
    def __init__(self, replicas: int, *, capacity: int = 0, ttl_s: float = 0.0) -> None:
        self._capacities = [capacity] * replicas
        self._ttl_s = ttl_s
        self._holders: dict[int, int] = {}  # block to the set of replicas, as bits
        self._used: list[OrderedDict[int, float]] = [OrderedDict() for _ in range(replicas)]

    def add_replica(self, capacity: int) -> None:
        self._used.append(OrderedDict())
        self._capacities.append(capacity)

    def matched(self, blocks: Sequence[int], now_s: float) -> list[int]:
        used = self._used
        if self._ttl_s:
            for index in range(len(used)):
                self._expire(index, now_s)
        found = [0] * len(used)
        holders = self._holders
        if not blocks:
            return found
        left = holders.get(blocks[0], 0)  # of the others nothing is found
        for number, block in enumerate(blocks):
            going_on = left & holders.get(block, 0)
            ended = left ^ going_on
            while ended:
                lowest = ended & -ended
                found[lowest.bit_length() - 1] = number
                ended ^= lowest
            left = going_on
            if not left:
                return found
        while left:
            lowest = left & -left
            found[lowest.bit_length() - 1] = len(blocks)
            left ^= lowest
        return found

    def add(self, index: int, blocks: Sequence[int], now_s: float) -> None:
        used = self._used[index]
        holders = self._holders
        bit = 1 << index
        for block in reversed(blocks):  # so that a prompt's last blocks are forgotten first
            if block in used:
                used.move_to_end(block)
            else:
                holders[block] = holders.get(block, 0) | bit
            used[block] = now_s
        capacity = self._capacities[index]
        if capacity:
            while len(used) > capacity:
                self._forget(index, used.popitem(last=False)[0])

    def clear(self, index: int) -> None:
        used = self._used[index]
        while used:
            self._forget(index, used.popitem()[0])

    def _expire(self, index: int, now_s: float) -> None:
        used = self._used[index]
        while used:
            block, at_s = next(iter(used.items()))
            if now_s - at_s <= self._ttl_s:
                return
            del used[block]
            self._forget(index, block)

    def _forget(self, index: int, block: int) -> None:
        holders = self._holders[block] & ~(1 << index)
        if holders:
            self._holders[block] = holders
        else:
            del self._holders[block]


@dataclass(slots=True)
class RouterView:
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
        return self.matched[replica.index] / len(request.blocks) if request.blocks else 0.0

    def cached_tokens(self, request: RoutedRequest, replica: Replica) -> int:
        return min(self.matched[replica.index] * self.block_tokens, request.prompt_tokens - 1)

    def least(self, costs: Sequence[float]) -> int:
        lowest = min(costs)
        best = [r.index for r, cost in zip(self.replicas, costs, strict=True) if cost == lowest]
        return best[0] if len(best) == 1 else best[int(self.rng.integers(len(best)))]


def round_robin(router: Any, request: RoutedRequest, view: RouterView) -> int:
    replicas = view.replicas
    if view.even or len({replica.traits.weight for replica in replicas}) == 1:
        return replicas[view.routed % len(replicas)].index
    ends = list(accumulate(replica.traits.weight for replica in replicas))
    turn = view.routed * GOLDEN % 1.0 * ends[-1]
    return replicas[min(bisect_right(ends, turn), len(ends) - 1)].index


def least_requests(router: Any, request: RoutedRequest, view: RouterView) -> int:
    return view.least(_requests(view))


def least_tokens(router: Any, request: RoutedRequest, view: RouterView) -> int:
    expected = view.expected_tokens
    tokens = [r.prefill_tokens + r.requests * expected for r in view.replicas]
    return view.least(_for_weights(view, tokens, request.prompt_tokens + expected))


def future_memory(router: Any, request: RoutedRequest, view: RouterView) -> int:
    size = view.block_tokens
    expected = view.expected_tokens
    costs = []
    for replica in view.replicas:
        new = request.prompt_tokens - view.cached_tokens(request, replica)
        tokens = replica.blocks * size + new + (replica.requests + 1) * expected
        costs.append(tokens / replica.traits.capacity_tokens)
    return view.least(costs)


def session_hash(router: Any, request: RoutedRequest, view: RouterView) -> int:
    key = request.session or (str(request.blocks[0]) if request.blocks else "")
    if not key:
        return view.least(_requests(view))
    up = tuple(replica.index for replica in view.replicas)
    if up not in view.rings:
        view.rings[up] = _ring(view.replicas)
    points, owners = view.rings[up]
    at = bisect_left(points, _point(key))
    if not router.load_factor:
        return owners[at % len(owners)]
    loads = {replica.index: replica.requests for replica in view.replicas}
    weights = {replica.index: replica.traits.weight for replica in view.replicas}
    most = router.load_factor * (sum(loads.values()) + 1) / sum(weights.values())
    for step in range(len(owners)):
        owner = owners[(at + step) % len(owners)]
        if loads[owner] + 1 <= most * weights[owner]:
            return owner
    return view.least(_requests(view))


def prefix(router: Any, request: RoutedRequest, view: RouterView) -> int:
    return view.least([-view.matched[replica.index] for replica in view.replicas])


def llm_d(router: Any, request: RoutedRequest, view: RouterView) -> int:
    queues = [replica.waiting for replica in view.replicas]
    low = min(queues)
    high = max(queues)
    costs = []
    for replica, waiting in zip(view.replicas, queues, strict=True):
        queue = (high - waiting) / (high - low) if high > low else 1.0
        score = router.prefix * view.share(request, replica) + router.queue * queue
        costs.append(-(score + router.kv * (1.0 - replica.kv_usage)))
    return view.least(costs)


def dynamo(router: Any, request: RoutedRequest, view: RouterView) -> int:
    size = view.block_tokens
    costs = []
    for replica in view.replicas:
        matched = view.matched[replica.index]
        active = (replica.prefill_tokens + request.prompt_tokens) / size
        kept = replica.blocks + max(len(request.blocks) - matched, 0)
        costs.append(router.prefill * max(0.0, active - router.credit * matched) + kept)
    return view.least(costs)


def sglang(router: Any, request: RoutedRequest, view: RouterView) -> int:
    loads = [replica.requests for replica in view.replicas]
    low = min(loads)
    high = max(loads)
    if high - low > router.abs_load and high > router.rel_load * low:
        return view.least(loads)
    best = max(view.share(request, replica) for replica in view.replicas)
    if best > router.threshold:
        return view.least([-view.share(request, replica) for replica in view.replicas])
    return view.least(loads)


def load_aware(router: Any, request: RoutedRequest, view: RouterView) -> int:
    loads = [replica.requests for replica in view.replicas]
    mean = sum(loads) / len(loads)
    return view.least(
        [
            router.beta * (load - mean) / max(1.0, mean) - view.share(request, replica)
            for replica, load in zip(view.replicas, loads, strict=True)
        ]
    )


def vllm_dp(router: Any, request: RoutedRequest, view: RouterView) -> int:
    costs = []
    for replica in view.replicas:
        report = replica.report
        queued = report.waiting + report.running if report is not None else 0
        load = max(replica.requests, queued)
        costs.append(load + router.waiting * replica.waiting * max(0.0, replica.kv_usage - 0.5))
    return view.least(costs)


def by_law(router: Any, request: RoutedRequest, view: RouterView) -> int:
    view.replicas = _likely(view)
    if any(replica.traits.law is None for replica in view.replicas):
        raise InputError(
            "router 'by-law' needs the law of a pass of every replica",
            "tune from a fit of the engine, or choose another router",
        )
    found = [weighed(router, request, replica, view) for replica in view.replicas]
    index = view.least([cost for cost, _ in found])
    view.outlook = next(
        outlook
        for replica, (_, outlook) in zip(view.replicas, found, strict=True)
        if replica.index == index
    )
    return index


def weighed(
    router: Any, request: RoutedRequest, replica: Replica, view: RouterView
) -> tuple[float, RequestOutlook]:
    traits = replica.traits
    expected = max(view.expected_tokens, 1.0)
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
    late = 0.0
    stalls = False
    if router.ttft_s:
        late = _chance(first_s, router.ttft_s)
    if router.gap_s:
        tokens = min(rest + new, room)
        own = min(new, tokens)
        attended = own * (prompt - own / 2) + (tokens - own) * attended_ahead / max(ahead, 1)
        longest_s = law.pass_s(decodes, context, 1, tokens, attended)
        longest_s += law.behind_s * (prompt - own)
        stalls = longest_s > router.gap_s
        late += replica.in_time * _chance(longest_s, router.gap_s)
    cost = router.first * first_s + expected * (plain_s + slower_s) + router.others * lost_s
    cost += router.late * late + router.work * own_s * traits.weight
    is_late = bool(router.ttft_s) and first_s > router.ttft_s
    return cost, RequestOutlook(view.now_s + first_s, is_late, stalls)


def _for_weights(view: RouterView, loads: Sequence[float], one: float) -> Sequence[float]:
    if view.even:
        return loads
    weights = [replica.traits.weight for replica in view.replicas]
    return [(load + one) / weight for load, weight in zip(loads, weights, strict=True)]


def _requests(view: RouterView) -> Sequence[float]:
    return _for_weights(view, [replica.requests for replica in view.replicas], 1)


def _ring(up: Sequence[Replica]) -> tuple[list[int], list[int]]:
    points = {each.index: max(round(RING_POINTS * each.traits.weight), 1) for each in up}
    pairs = sorted((_point(f"{index}:{k}"), index) for index, n in points.items() for k in range(n))
    return [point for point, _ in pairs], [index for _, index in pairs]


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _likely(view: RouterView) -> Sequence[Replica]:
    replicas = view.replicas
    matched = view.matched
    if len(replicas) <= MOST_WEIGHED:
        return replicas
    kinds: dict[str, list[Replica]] = {}
    for replica in replicas:
        kinds.setdefault(replica.traits.kind, []).append(replica)
    part = max(MOST_WEIGHED // 3 // len(kinds), 1)
    few = max(2 // len(kinds), 1)
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
    if expected_s <= 0.0:
        return 0.0
    return 1.0 / (1.0 + min(target_s / expected_s, 100.0) ** SHARPNESS)


def _tokens_behind(prompts: int, cached: int, new: int, room: int) -> float:
    parts = -(-new // (prompts * room))  # of each prompt
    return parts * cached + prompts * room * parts * (parts - 1) / 2


def _memory_wait_s(
    replica: Replica, new: int, context: float, pass_s: float, expected: float
) -> float:
    held = context + replica.prefill_tokens
    excess = held + new - replica.traits.capacity_tokens
    rows = replica.requests
    slots = rows + 1 - replica.traits.max_rows
    if not rows or (excess <= 0 and slots <= 0):
        return 0.0
    ends = max(excess / max(held / rows, 1.0), slots, 0.0)
    return ends * expected * pass_s / min(rows, replica.traits.max_rows)


PLAIN = {
    "round-robin": round_robin,
    "least-requests": least_requests,
    "least-tokens": least_tokens,
    "future-memory": future_memory,
    "session-hash": session_hash,
    "prefix": prefix,
    "llm-d": llm_d,
    "dynamo": dynamo,
    "sglang": sglang,
    "load-aware": load_aware,
    "vllm-dp": vllm_dp,
    "by-law": by_law,
}


class PlainBalancer:
    def __init__(self, router: Any, traits: Sequence[ReplicaTraits], block_tokens: int) -> None:
        self.router = router
        self.choose = PLAIN[router.name]
        self.replicas = [Replica(index, each) for index, each in enumerate(traits)]
        self.index = PrefixIndex(0, ttl_s=router.index_ttl_s)
        for each in traits:
            bound = router.index_blocks or each.capacity_tokens // block_tokens
            self.index.add_replica(max(bound, 0))
        self.homes: dict[str, Replica] = {}
        self.lengths: deque[int] = deque(maxlen=HISTORY)
        rng = np.random.default_rng(0)
        self.view = RouterView(self.replicas, [], block_tokens, 128, 0, rng)

    def route(
        self, request: RoutedRequest, now_s: float, excluded: Sequence[int] = ()
    ) -> int | None:
        view = self.view
        up = [replica for replica in self.replicas if replica.is_up]
        if not up:
            return None
        view.replicas = [replica for replica in up if replica.index not in excluded] or up
        view.now_s = now_s
        view.outlook = None
        view.matched = self.index.matched(request.blocks, now_s)
        index = self.choose(self.router, request, view)
        view.routed += 1
        replica = self.replicas[index]
        sent = Sent(request, now_s, view.cached_tokens(request, replica))
        replica.add(sent)
        if view.outlook is not None:
            replica.expect(sent, view.outlook)
        self.homes[request.request_id] = replica
        self.index.add(index, request.blocks, now_s)
        return index

    def first_token(self, request_id: str) -> None:
        if request_id in self.homes:
            self.homes[request_id].first_token(request_id)

    def ended(self, request_id: str, generated: int) -> None:
        home = self.homes.pop(request_id, None)
        if home is None:
            return
        home.remove(request_id)
        if generated >= 0:
            self.lengths.append(generated)
            self.view.expected_tokens = sum(self.lengths) / len(self.lengths)

    def report(self, index: int, report: ReplicaReport) -> None:
        self.replicas[index].report = report

    def change(self, index: int, *, is_up: bool, is_fresh: bool = False) -> None:
        self.replicas[index].is_up = is_up
        if is_fresh:
            self.index.clear(index)
            self.replicas[index].report = None
