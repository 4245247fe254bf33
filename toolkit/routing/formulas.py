"""The formulas of the routers: what each replica would cost, over numbers that lie ready.

Every router has a function here that returns the index of the replica of the least cost. They are
apart from the routers' parameters so that they can be compiled: some look at every replica for
every request.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from toolkit.errors import InputError
from toolkit.routing.replicas import Replica, RequestOutlook, RouterView
from toolkit.routing.types import PassLaw, RoutedRequest

MOST_WEIGHED = 12  # replicas that `by-law` computes the costs of
SHARPNESS = 16  # how fast the chance to miss a target rises near it
GOLDEN = (5**0.5 - 1) / 2  # its multiples spread turns evenly


def in_turn(view: RouterView) -> int:
    """`round-robin`."""
    replicas = view.replicas
    if not view.even and any(replica.weight != replicas[0].weight for replica in replicas):
        ends = list(accumulate([replica.weight for replica in replicas]))
        turn = view.routed * GOLDEN % 1.0 * ends[-1]
        return replicas[min(bisect_right(ends, turn), len(ends) - 1)].index
    return replicas[view.routed % len(replicas)].index


def fewest_requests(view: RouterView) -> int:
    """`least-requests`."""
    loads = [float(len(replica.sent)) for replica in view.replicas]
    return view.least(_for_weights(view, loads, 1.0))


def fewest_tokens(view: RouterView, request: RoutedRequest) -> int:
    """`least-tokens`."""
    expected = view.expected_tokens
    tokens = [replica.prefill_tokens + len(replica.sent) * expected for replica in view.replicas]
    return view.least(_for_weights(view, tokens, request.prompt_tokens + expected))


def least_memory(view: RouterView, request: RoutedRequest) -> int:
    """`future-memory`."""
    size = view.block_tokens
    expected = view.expected_tokens
    matched = view.matched
    prompt = request.prompt_tokens
    costs = []
    for replica in view.replicas:
        new = prompt - min(matched[replica.index] * size, prompt - 1)
        tokens = replica.blocks * size + new + (len(replica.sent) + 1) * expected
        costs.append(tokens / replica.capacity_tokens)
    return view.least(costs)


def on_ring(view: RouterView, owners: list[int], at: int, load_factor: float) -> int:
    """`session-hash` with a bound: the ring's first owner, from `at` on, that may take one more."""
    every = view.every
    requests = 0
    weights = 0.0
    for replica in view.replicas:
        requests += len(replica.sent)
        weights += replica.weight
    most = load_factor * (requests + 1) / weights
    for step in range(len(owners)):
        owner = owners[(at + step) % len(owners)]
        replica = every[owner]
        if len(replica.sent) + 1 <= most * replica.weight:
            return owner
    return fewest_requests(view)


def longest_match(view: RouterView) -> int:
    """`prefix`."""
    matched = view.matched
    return view.least([-float(matched[replica.index]) for replica in view.replicas])


def llm_d(view: RouterView, prefix: float, queue: float, kv: float) -> int:
    """`llm-d`: its weights are those of the match, the shorter queue and the free cache."""
    queues = [replica.waiting for replica in view.replicas]
    shares = _shares(view)
    low = min(queues)
    high = max(queues)
    costs = []
    for place, replica in enumerate(view.replicas):
        shorter = (high - queues[place]) / (high - low) if high > low else 1.0
        score = prefix * shares[place] + queue * shorter
        costs.append(-(score + kv * (1.0 - replica.kv_usage)))
    return view.least(costs)


def dynamo(view: RouterView, request: RoutedRequest, credit: float, prefill: float) -> int:
    """`dynamo`: `credit` of each matched block is taken off the blocks to prefill."""
    size = view.block_tokens
    blocks = view.blocks
    prompt = request.prompt_tokens
    matched = view.matched
    costs = []
    for replica in view.replicas:
        cached = matched[replica.index]
        active = (replica.prefill_tokens + prompt) / size - credit * cached
        kept = replica.blocks + max(blocks - cached, 0)
        costs.append(prefill * (active if active > 0.0 else 0.0) + kept)
    return view.least(costs)


def sglang(view: RouterView, threshold: float, abs_load: int, rel_load: float) -> int:
    """`sglang`: the bounds are between the most and the least requests of a replica."""
    loads = [float(len(replica.sent)) for replica in view.replicas]
    low = min(loads)
    high = max(loads)
    if high - low > abs_load and high > rel_load * low:
        return view.least(loads)
    shares = _shares(view)
    if max(shares) > threshold:
        return view.least([-share for share in shares])
    return view.least(loads)


def load_aware(view: RouterView, beta: float) -> int:
    """`load-aware`: `beta` weighs the load above the mean."""
    loads = [len(replica.sent) for replica in view.replicas]
    shares = _shares(view)
    mean = sum(loads) / len(loads)
    scale = mean if mean > 1.0 else 1.0
    return view.least(
        [beta * (load - mean) / scale - shares[place] for place, load in enumerate(loads)]
    )


def vllm_dp(view: RouterView, weight: float) -> int:
    """`vllm-dp`: the weight is that of a waiting request in a full cache."""
    costs = []
    for replica in view.replicas:
        beyond = replica.kv_usage - 0.5
        load = max(len(replica.sent), replica.reported)
        costs.append(load + weight * replica.waiting * (beyond if beyond > 0.0 else 0.0))
    return view.least(costs)


def _for_weights(view: RouterView, loads: list[float], one: float) -> list[float]:
    """The loads of the replicas with `one` more each, by their weights where these differ."""
    if view.even:
        return loads
    return [(loads[place] + one) / replica.weight for place, replica in enumerate(view.replicas)]


def _shares(view: RouterView) -> list[float]:
    """The share of the request's full blocks that each replica has cached."""
    matched = view.matched
    blocks = view.blocks
    if not blocks:
        return [0.0] * len(view.replicas)
    return [matched[replica.index] / blocks for replica in view.replicas]


class LawWeights:
    """The parameters of `by-law`."""

    __slots__ = ("first", "gap_s", "late", "others", "ttft_s", "work")

    def __init__(
        self, others: float, first: float, late: float, work: float, ttft_s: float, gap_s: float
    ) -> None:
        self.others = others
        self.first = first
        self.late = late
        self.work = work
        self.ttft_s = ttft_s
        self.gap_s = gap_s


def by_law(view: RouterView, request: RoutedRequest, weights: LawWeights) -> int:
    """`by-law`; it leaves what it expects in `view.outlook`."""
    view.replicas = _likely(view)
    outlooks = [weigh(view, request, replica, weights) for replica in view.replicas]
    index = view.least([outlook.cost_s for outlook in outlooks])
    for place, replica in enumerate(view.replicas):
        if replica.index == index:
            view.outlook = outlooks[place]
    return index


def weigh(
    view: RouterView, request: RoutedRequest, replica: Replica, weights: LawWeights
) -> RequestOutlook:
    """What `by-law` finds for a request on a replica. `InputError` if it has no law of a pass."""
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
        whole_s += behind_s * _tokens_behind(replica.prefills, replica.prefill_cached, ahead, room)
        left = min(whole_s, max(replica.prefilled_s - view.now_s, 0.0))
        rest = ahead * left / (whole_s if whole_s > 1e-9 else 1e-9)
    longer = context + prompt + expected / 2
    slower_s: float = law.pass_s(decodes + 1, longer, 0, 0, 0.0) - plain_s
    first_s = left + own_s + plain_s
    first_s += _memory_wait_s(replica, new, context, plain_s, expected)
    lost_s = own_s * decodes + expected * slower_s * decodes
    late = 0.0
    stalls = False
    if weights.ttft_s:
        late = _chance(first_s, weights.ttft_s)
    if weights.gap_s:
        tokens = rest + new if rest + new < room else float(room)
        own = new if new < tokens else tokens
        attended = own * (prompt - own / 2) + (tokens - own) * attended_ahead / max(ahead, 1)
        longest_s: float = law.pass_s(decodes, context, 1, tokens, attended)
        longest_s += behind_s * (prompt - own)
        stalls = longest_s > weights.gap_s
        late += replica.in_time * _chance(longest_s, weights.gap_s)
    cost_s = weights.first * first_s + expected * (plain_s + slower_s) + weights.others * lost_s
    cost_s += weights.late * late + weights.work * own_s * replica.weight
    is_late = weights.ttft_s > 0.0 and first_s > weights.ttft_s
    return RequestOutlook(view.now_s + first_s, is_late, stalls, cost_s)


def _law(replica: Replica) -> PassLaw:
    """The law of its passes, or `InputError`."""
    law = replica.traits.law
    if law is None:
        raise InputError(
            "router 'by-law' needs the law of a pass of every replica",
            "tune from a fit of the engine, or choose another router",
        )
    return law


class _Few:
    """The replicas of the smallest keys, of equal ones the first."""

    __slots__ = ("_count", "_keys", "_worst", "replicas")

    def __init__(self, count: int) -> None:
        self._count = count
        self._worst = 0
        self._keys: list[int] = []
        self.replicas: list[Replica] = []

    def offer(self, key: int, replica: Replica) -> None:
        keys = self._keys
        replicas = self.replicas
        if len(keys) == self._count:
            if key >= self._worst:
                return
            keys.pop()
            replicas.pop()
        at = len(keys)
        while at > 0 and keys[at - 1] > key:
            at -= 1
        keys.insert(at, key)
        replicas.insert(at, replica)
        self._worst = keys[-1]


def _likely(view: RouterView) -> list[Replica]:
    """The replicas that may be best: where more than `MOST_WEIGHED` are up, those with the longest
    matches, with the fewest tokens to compute, the fewest requests, and the fewest in time; of
    several kinds, of each.
    """
    replicas = view.replicas
    if len(replicas) <= MOST_WEIGHED:
        return replicas
    last = replicas[0].kind
    kinds = {last}
    for replica in replicas:
        if replica.kind != last:
            last = replica.kind
            kinds.add(last)
    part = max(MOST_WEIGHED // 3 // len(kinds), 1)
    few = max(2 // len(kinds), 1)
    likely = {kind: [_Few(part), _Few(part), _Few(part), _Few(few)] for kind in kinds}
    matched = view.matched
    by_match, by_tokens, by_requests, by_in_time = likely[last]
    for replica in replicas:
        if replica.kind != last:
            last = replica.kind
            by_match, by_tokens, by_requests, by_in_time = likely[last]
        by_match.offer(-matched[replica.index], replica)
        by_tokens.offer(replica.prefill_tokens, replica)
        by_requests.offer(len(replica.sent), replica)
        by_in_time.offer(replica.in_time, replica)
    chosen: dict[int, Replica] = {}
    for best in likely.values():
        for few_of in best:
            for replica in few_of.replicas:
                chosen[replica.index] = replica
    return [chosen[index] for index in sorted(chosen)]


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
