"""What a router knows: the replicas with their requests, and which blocks each probably has cached.

A router sits outside the replicas. It knows exactly what it sent and what came back, and the rest
only from reports that are some time old.

A router may look at every replica for every request. So what it reads of one are plain numbers
beside each other, which calls keep up to date, and what no router asks for is not computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from toolkit.routing.types import (
    DEFAULT_EXPECTED_TOKENS,
    ReplicaTraits,
)
from toolkit.sched.types import Request


class Sent:
    """A request on a replica: as it was sent there, or as `by-law` expects it to go there.

    Attributes:
        cached_tokens: what the router expected to be cached.
        first_s: when its first token is expected: the prompts there, this one the last, have been
            computed. Below 0: that is not known.
        is_late: whether it is expected to miss a target in any case.
        stalls: whether its prompt delays a token of the others there beyond their target.
        cost_s: what it costs there, in seconds.
        after_stalls: the stalls of the replica when it came; -1: it is late in any case.
    """

    __slots__ = (
        "after_stalls", "cached_tokens", "cost_s", "first_s", "has_token", "is_late", "new_tokens",
        "prompt_tokens", "request", "sent_s", "stalls",
    )  # fmt: skip

    def __init__(self, request: Request, sent_s: float, cached_tokens: int) -> None:
        self.request = request
        self.sent_s = sent_s
        self.cached_tokens = cached_tokens
        self.prompt_tokens = request.prompt_tokens
        self.new_tokens = self.prompt_tokens - cached_tokens
        self.has_token = self.is_late = self.stalls = False
        self.first_s = -1.0
        self.cost_s = 0.0
        self.after_stalls = -1


class Replica:
    """One replica, as the router knows it.

    Attributes:
        capacity_tokens, pass_tokens, max_rows: of its traits.
        sent: the requests that it has, by id, in the order in which they were sent.
        prefills: how many of these have no token yet.
        prefill_tokens: what these have to compute.
        prefill_cached: what is expected to be cached before that.
        decode_tokens: prompt tokens of the others.
        prompt_tokens: of all.
        in_time: of the requests with an expected first token, how many are expected to keep their
            targets.
        prefilled_s: when the prompts that it has are expected to have been computed.
        reported_waiting: requests in its queue, by its own latest figures; -1: there are none.
        reported_usage: the used share of its cache, by the same.
    """

    __slots__ = (
        "_stalls", "_uses", "capacity_tokens", "decode_tokens", "in_time", "index",
        "is_up", "max_rows", "pass_tokens", "prefill_cached", "prefill_tokens", "prefilled_s",
        "prefills", "prompt_tokens", "reported_usage", "reported_waiting", "sent", "traits",
    )  # fmt: skip

    def __init__(self, index: int, traits: ReplicaTraits) -> None:
        self.index = index
        self.traits = traits
        self.capacity_tokens = traits.capacity_tokens
        self.pass_tokens = traits.pass_tokens
        self.max_rows = traits.max_rows
        self.is_up = True
        self.sent: dict[str, Sent] = {}
        self.prefills = self.prefill_tokens = self.prefill_cached = self.decode_tokens = 0
        self.prompt_tokens = 0
        self.reported_waiting = -1
        self.reported_usage = 0.0
        self.in_time = self._stalls = 0
        self.prefilled_s = 0.0
        self._uses: dict[object, int] = {}

    @property
    def requests(self) -> int:
        """Requests that were sent to it and have not ended."""
        return len(self.sent)

    @property
    def blocks(self) -> int:
        """Blocks of all prompts that it has, each counted once."""
        return len(self._uses)

    @property
    def waiting(self) -> int:
        """Requests in its queue: as reported, or else those beyond the rows that it runs."""
        if self.reported_waiting >= 0:
            return self.reported_waiting
        return max(len(self.sent) - self.max_rows, 0)

    @property
    def kv_usage(self) -> float:
        """The used share of its cache: as reported, or else by the prompts that it has."""
        if self.reported_waiting >= 0:
            return self.reported_usage
        usage = self.prompt_tokens / self.capacity_tokens
        return usage if usage < 1.0 else 1.0

    def add(self, sent: Sent) -> None:
        """A request was sent to it."""
        self.sent[sent.request.request_id] = sent
        self.prefills += 1
        self.prefill_tokens += sent.new_tokens
        self.prefill_cached += sent.cached_tokens
        self.prompt_tokens += sent.prompt_tokens
        known = self._uses
        for block in sent.request.blocks:
            known[block] = known.get(block, 0) + 1
        if sent.first_s >= 0.0:
            self.prefilled_s = sent.first_s
            if sent.stalls:
                self._stalls += 1
                self.in_time = 0
            if not sent.is_late:
                sent.after_stalls = self._stalls
                self.in_time += 1

    def first_token(self, request_id: str) -> Sent | None:
        """The first token of a request came back; returns it if it had none before."""
        sent = self.sent.get(request_id)
        if sent is None or sent.has_token:
            return None
        sent.has_token = True
        self._end_prefill(sent)
        self.decode_tokens += sent.prompt_tokens
        return sent

    def remove(self, request_id: str) -> None:
        """A request ended, or went elsewhere."""
        sent = self.sent.pop(request_id, None)
        if sent is None:
            return
        self.prompt_tokens -= sent.prompt_tokens
        if sent.after_stalls == self._stalls:
            self.in_time -= 1
        if sent.has_token:
            self.decode_tokens -= sent.prompt_tokens
        else:
            self._end_prefill(sent)
        known = self._uses
        for block in sent.request.blocks:
            uses = known[block] - 1
            if uses:
                known[block] = uses
            else:
                del known[block]

    def _end_prefill(self, sent: Sent) -> None:
        self.prefills -= 1
        self.prefill_tokens -= sent.new_tokens
        self.prefill_cached -= sent.cached_tokens


class PrefixIndex:
    """Which blocks each replica probably has cached: those of the prompts that were sent to it.

    Blocks beyond a replica's capacity are forgotten, those that were used longest ago first, and of
    one prompt the last ones first. So are blocks that were not used for `ttl_s` seconds (0: no
    limit). Times never decrease from call to call.
    """

    def __init__(self, ttl_s: float = 0.0) -> None:
        self._ttl_s = ttl_s
        self._capacities: list[int] = []
        # by replica: when each block was used last, the least recent first
        self._used_s: list[OrderedDict[object, float]] = []

    def add_replica(self, capacity: int) -> None:
        """A further replica. `capacity` bounds its blocks; 0: no bound."""
        self._used_s.append(OrderedDict())
        self._capacities.append(capacity)

    def matched(self, index: int, blocks: Sequence[object], now_s: float) -> int:
        """Return how many leading blocks of a prompt a replica has."""
        used_s = self._used_s[index]
        if self._ttl_s:
            while used_s and now_s - next(iter(used_s.values())) > self._ttl_s:
                used_s.popitem(last=False)
        for number, block in enumerate(blocks):
            if block not in used_s:
                return number
        return len(blocks)

    def add(self, index: int, blocks: Sequence[object], now_s: float) -> None:
        """A prompt was sent to a replica."""
        used_s = self._used_s[index]
        for block in reversed(blocks):
            used_s[block] = now_s
            used_s.move_to_end(block)
        capacity = self._capacities[index]
        while capacity and len(used_s) > capacity:
            used_s.popitem(last=False)

    def clear(self, index: int) -> None:
        """A replica was restarted: its cache is empty."""
        self._used_s[index] = OrderedDict()


class RouterView:
    """What is known when a request is to be routed.

    Attributes:
        every: all replicas, by index.
        replicas: those that are up, in order of index; at least one. The list is not changed.
        blocks: the request's full blocks, of `block_tokens` each.
        expected_tokens: mean output of the requests that ended last.
        routed: how many requests were routed before.
        rings: what `session` keeps between requests.
        expected: the request on the replica that a router chose, if it says what it expects there.
    """

    __slots__ = (
        "_index", "block_tokens", "blocks", "every",
        "expected", "expected_tokens", "now_s", "replicas", "rings", "rng", "routed",
    )  # fmt: skip

    def __init__(
        self, every: list[Replica], index: PrefixIndex, block_tokens: int, rng: np.random.Generator
    ) -> None:
        self.every = every
        self.replicas = every
        self._index = index
        self.block_tokens = block_tokens
        self.expected_tokens = float(DEFAULT_EXPECTED_TOKENS)
        self.rng = rng  # for ties
        self.routed = 0
        self.rings: dict[object, tuple[list[int], list[int]]] = {}
        self.now_s = 0.0
        self.expected: Sent | None = None
        self.blocks: Sequence[object] = ()

    def begin(self, request: Request, replicas: list[Replica], now_s: float) -> None:
        """A request is to be routed to one of these."""
        self.replicas = replicas
        self.now_s = now_s
        self.expected = None
        self.blocks = request.blocks

    def matched(self, replica: Replica) -> int:
        """Return how many of the request's leading blocks a replica probably has cached."""
        return self._index.matched(replica.index, self.blocks, self.now_s)

    def cached_tokens(self, request: Request, replica: Replica) -> int:
        """Return the prompt tokens that a replica need not compute; the last one it always
        computes.
        """
        return min(self.matched(replica) * self.block_tokens, request.prompt_tokens - 1)

    def least(self, costs: list[float]) -> int:
        """The index of the replica of the least cost; ties are broken at random."""
        replicas = self.replicas
        lowest = costs[0]
        at = 0
        ties = 0
        if len(costs) != len(replicas):
            raise ValueError(f"{len(costs)} costs of {len(replicas)} replicas")
        for place, cost in enumerate(costs):
            if cost < lowest:
                lowest = cost
                at = place
                ties = 1
            elif cost == lowest:
                ties += 1
        if ties == 1:
            return replicas[at].index
        best = [replicas[k].index for k in range(at, len(costs)) if costs[k] == lowest]
        return best[int(self.rng.integers(len(best)))]
