"""Routers as plain formulas over plain state: every call looks at every request of every replica
anew.

What `toolkit.routing` keeps and compiles must choose as these do. `PlainBalancer` takes the calls
of `Balancer`; a router gives its parameters, and `PLAIN` the formula of its name.
"""

import hashlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np

from toolkit.routing.balancer import HISTORY
from toolkit.routing.replicas import RequestOutlook
from toolkit.routing.routers import MOST_WEIGHED, _chance, _tokens_behind
from toolkit.routing.types import ReplicaReport, ReplicaTraits, RoutedRequest

RING_POINTS = 160


@dataclass
class Sent:
    request: RoutedRequest
    cached_tokens: int
    has_token: bool = False
    stalls: int = -1

    @property
    def new_tokens(self) -> int:
        return self.request.prompt_tokens - self.cached_tokens


class Replica:
    def __init__(self, index: int, traits: ReplicaTraits) -> None:
        self.index = index
        self.traits = traits
        self.is_up = True
        self.sent: dict[str, Sent] = {}
        self.report: ReplicaReport | None = None
        self.stalls = 0
        self.prefilled_s = 0.0

    @property
    def requests(self) -> int:
        return len(self.sent)

    @property
    def prefilling(self) -> list[Sent]:
        return [sent for sent in self.sent.values() if not sent.has_token]

    @property
    def prefill_tokens(self) -> int:
        return sum(sent.new_tokens for sent in self.prefilling)

    @property
    def prompt_tokens(self) -> int:
        return sum(sent.request.prompt_tokens for sent in self.sent.values())

    @property
    def blocks(self) -> int:
        return len({block for sent in self.sent.values() for block in sent.request.blocks})

    @property
    def in_time(self) -> int:
        return sum(sent.stalls == self.stalls for sent in self.sent.values())

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

    def expect(self, sent: Sent, outlook: RequestOutlook) -> None:
        self.prefilled_s = outlook.prefilled_s
        self.stalls += outlook.stalls
        if not outlook.is_late:
            sent.stalls = self.stalls


class PrefixIndex:
    """Each replica's blocks with their times, the least recently used first."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._capacities: list[int] = []
        self._used_s: list[dict[int, float]] = []

    def add_replica(self, capacity: int) -> None:
        self._capacities.append(capacity)
        self._used_s.append({})

    def matched(self, blocks: Sequence[int], now_s: float) -> list[int]:
        ttl_s = self._ttl_s or math.inf
        found = []
        for used_s in self._used_s:
            known = {block for block, at_s in used_s.items() if now_s - at_s <= ttl_s}
            count = 0
            while count < len(blocks) and blocks[count] in known:
                count += 1
            found.append(count)
        return found

    def add(self, index: int, blocks: Sequence[int], now_s: float) -> None:
        used_s = self._used_s[index]
        for block in reversed(blocks):  # so that a prompt's last blocks are forgotten first
            used_s.pop(block, None)
            used_s[block] = now_s
        while 0 < self._capacities[index] < len(used_s):
            del used_s[next(iter(used_s))]

    def clear(self, index: int) -> None:
        self._used_s[index].clear()


@dataclass(slots=True)
class RouterView:
    replicas: Sequence[Replica]
    matched: Sequence[int]
    block_tokens: int
    expected_tokens: float
    routed: int
    rng: np.random.Generator
    now_s: float = 0.0
    outlook: RequestOutlook | None = None

    def share(self, request: RoutedRequest, replica: Replica) -> float:
        return self.matched[replica.index] / len(request.blocks) if request.blocks else 0.0

    def cached_tokens(self, request: RoutedRequest, replica: Replica) -> int:
        return min(self.matched[replica.index] * self.block_tokens, request.prompt_tokens - 1)

    def least(self, costs: Sequence[float]) -> int:
        lowest = min(costs)
        best = [r.index for r, cost in zip(self.replicas, costs, strict=True) if cost == lowest]
        return best[0] if len(best) == 1 else best[int(self.rng.integers(len(best)))]


def round_robin(router: Any, request: RoutedRequest, view: RouterView) -> int:
    return view.replicas[view.routed % len(view.replicas)].index


def least_requests(router: Any, request: RoutedRequest, view: RouterView) -> int:
    return view.least([replica.requests for replica in view.replicas])


def future_memory(router: Any, request: RoutedRequest, view: RouterView) -> int:
    size = view.block_tokens
    expected = view.expected_tokens
    costs = []
    for replica in view.replicas:
        new = request.prompt_tokens - view.cached_tokens(request, replica)
        tokens = replica.blocks * size + new + (replica.requests + 1) * expected
        costs.append(tokens / replica.traits.capacity_tokens)
    return view.least(costs)


def session(router: Any, request: RoutedRequest, view: RouterView) -> int:
    key = request.session or (str(request.blocks[0]) if request.blocks else "")
    if not key:
        return least_requests(router, request, view)
    ring = sorted(
        (
            (_point(f"{replica.index}:{k}"), replica)
            for replica in view.replicas
            for k in range(RING_POINTS)
        ),
        key=itemgetter(0),
    )
    behind = [replica for point, replica in ring if point >= _point(key)]
    before = [replica for point, replica in ring if point < _point(key)]
    if not router.load_factor:
        return (behind or before)[0].index
    requests = sum(replica.requests for replica in view.replicas)
    most = router.load_factor * (requests + 1) / len(view.replicas)
    for replica in (*behind, *before):
        if replica.requests + 1 <= most:
            return replica.index
    return least_requests(router, request, view)


def llm_d(router: Any, request: RoutedRequest, view: RouterView) -> int:
    queues = [replica.waiting for replica in view.replicas]
    low = min(queues)
    high = max(queues)
    costs = []
    for replica, waiting in zip(view.replicas, queues, strict=True):
        queue = (waiting - low) / (high - low) if high > low else 0.0
        cost = router.queue * queue + router.kv * replica.kv_usage
        costs.append(cost - router.prefix * view.share(request, replica))
    return view.least(costs)


def dynamo(router: Any, request: RoutedRequest, view: RouterView) -> int:
    blocks = max(len(request.blocks), 1)
    tokens = blocks * view.block_tokens
    costs = []
    for replica in view.replicas:
        cost = router.queue * (replica.prefill_tokens / tokens)
        cost += router.kv * (replica.blocks / blocks)
        costs.append(cost - router.prefix * view.share(request, replica))
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


def by_law(router: Any, request: RoutedRequest, view: RouterView) -> int:
    view.replicas = _likely(view)
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
    prefilling = replica.prefilling
    decoding = [sent for sent in replica.sent.values() if sent.has_token]
    decodes = min(len(decoding), traits.max_rows)
    # rows that decode have generated half of their output on average
    context = sum(sent.request.prompt_tokens for sent in decoding) + len(decoding) * expected / 2
    room = max(traits.pass_tokens - decodes, 1)
    ahead = replica.prefill_tokens
    passes = -(-(ahead + new) // room)
    attended_ahead = ahead * (ahead / max(len(prefilling), 1)) / 2
    plain_s = law.pass_s(decodes, context, 0, 0, 0.0)
    chunk_s = law.pass_s(
        decodes,
        context,
        max((len(prefilling) + 1) / passes, 1),
        (ahead + new) / passes,
        (new * (cached + new / 2) + attended_ahead) / passes,
    )
    # what its own prompt adds to the passes of the rows that decode
    own_s = max(chunk_s - plain_s, 0.0) * passes * new / (ahead + new)
    whole_s = passes * chunk_s - own_s - plain_s
    own_s += law.behind_s * _tokens_behind(1, cached, new, room)
    left = rest = 0.0  # seconds and tokens of the prompts ahead: part of them is computed
    if ahead:
        cached_ahead = sum(sent.cached_tokens for sent in prefilling)
        behind = _tokens_behind(len(prefilling), cached_ahead, ahead, room)
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
    cost += router.late * late + router.work * own_s
    is_late = bool(router.ttft_s) and first_s > router.ttft_s
    return cost, RequestOutlook(view.now_s + first_s, is_late, stalls)


@cache
def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _likely(view: RouterView) -> Sequence[Replica]:
    replicas = view.replicas
    if len(replicas) <= MOST_WEIGHED:
        return replicas
    part = MOST_WEIGHED // 3
    found: set[int] = set()
    for count, keys in (
        (part, [-view.matched[replica.index] for replica in replicas]),
        (part, [replica.prefill_tokens for replica in replicas]),
        (part, [len(replica.sent) for replica in replicas]),
        (2, [replica.in_time for replica in replicas]),
    ):
        places = sorted(range(len(replicas)), key=keys.__getitem__)[:count]
        found.update(replicas[place].index for place in places)
    return [replica for replica in replicas if replica.index in found]


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
    "future-memory": future_memory,
    "session": session,
    "llm-d": llm_d,
    "dynamo": dynamo,
    "sglang": sglang,
    "by-law": by_law,
}


class PlainBalancer:
    def __init__(self, router: Any, traits: Sequence[ReplicaTraits], block_tokens: int) -> None:
        self.router = router
        self.choose = PLAIN[router.name]
        self.replicas = [Replica(index, each) for index, each in enumerate(traits)]
        self.index = PrefixIndex(router.index_ttl_s)
        for each in traits:
            bound = router.index_blocks or each.capacity_tokens // block_tokens
            self.index.add_replica(max(bound, 0))
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
        sent = Sent(request, view.cached_tokens(request, replica))
        replica.sent[request.request_id] = sent
        if view.outlook is not None:
            replica.expect(sent, view.outlook)
        self.index.add(index, request.blocks, now_s)
        return index

    def first_token(self, request_id: str) -> None:
        for replica in self.replicas:
            if request_id in replica.sent:
                replica.sent[request_id].has_token = True

    def ended(self, request_id: str, generated: int) -> None:
        for replica in self.replicas:
            if replica.sent.pop(request_id, None) and generated >= 0:
                self.lengths.append(generated)
                self.view.expected_tokens = sum(self.lengths) / len(self.lengths)

    def report(self, index: int, report: ReplicaReport) -> None:
        self.replicas[index].report = report

    def change(self, index: int, *, is_up: bool, is_fresh: bool = False) -> None:
        self.replicas[index].is_up = is_up
        if is_fresh:
            self.index.clear(index)
            self.replicas[index].report = None
