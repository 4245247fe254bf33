"""What a router knows: requests, replicas, and which blocks each replica probably has cached.

A router sits outside the replicas. It knows exactly what it sent and what came back, and the rest
only from reports that are some time old.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import msgspec

DEFAULT_EXPECTED_TOKENS = 128  # of an output, before the first has ended
# Of our front, live and simulated: the tokens of a block that it matches prompts by, and the
# seconds between two readings of a replica's own figures, where the router reads them.
BLOCK_TOKENS = 64
REPORT_EVERY_S = 0.25
# Requests by which kinds of replicas are weighed, in tokens.
TYPICAL_PROMPT, TYPICAL_OUTPUT = 768, 256


class RoutedRequest(msgspec.Struct, frozen=True):
    """A request as a router sees it.

    `blocks` are chain hashes of the prompt's full blocks: equal values stand for equal tokens in
    that block and in all before it. `session` names the conversation; empty if there is none.
    """

    request_id: str
    prompt_tokens: int
    max_new_tokens: int
    blocks: tuple[int, ...] = ()
    session: str = ""


class ReplicaReport(msgspec.Struct, frozen=True):
    """A replica's own figures, as its metrics had them at `at_s`. `kv_usage` is a share of its
    cache, from 0 to 1.
    """

    waiting: int
    running: int
    kv_usage: float
    at_s: float


class PassLaw(Protocol):
    """Seconds of an engine's forward pass, its host's part included.

    `behind_s` is what each cached token before a part of a prompt adds; `pass_s` leaves it out.
    """

    @property
    def behind_s(self) -> float: ...

    def pass_s(
        self, decodes: int, decode_cached: float, chunks: float, new_tokens: float, attended: float
    ) -> float:
        """Seconds of a pass.

        `decodes` rows decode, with `decode_cached` tokens in their caches together. `chunks` parts
        of prompts have `new_tokens` tokens together, which attend to `attended` keys.
        """
        ...


class ReplicaTraits(msgspec.Struct, frozen=True):
    """What is known of a replica before it serves.

    Attributes:
        capacity_tokens: that its cache holds.
        pass_tokens: the most new tokens of a forward pass.
        max_rows: the most requests that run at once.
        law: of its forward passes; None if it was never fitted.
        kind: of a fleet's replica, the name of its kind.
        weight: the requests that it serves for one of the fleet's first kind (`weighed`).
    """

    capacity_tokens: int
    pass_tokens: int = 2048
    max_rows: int = 256
    law: PassLaw | None = None
    kind: str = ""
    weight: float = 1.0

    @property
    def pace(self) -> float:
        """Typical requests per second while its cache or its rows are full; needs a law."""
        assert self.law is not None
        rows = max(min(self.max_rows, self.capacity_tokens // (TYPICAL_PROMPT + TYPICAL_OUTPUT)), 1)
        new = min(rows * TYPICAL_PROMPT / TYPICAL_OUTPUT, max(self.pass_tokens - rows, 1))
        prompts = new / TYPICAL_PROMPT
        context = rows * (TYPICAL_PROMPT + TYPICAL_OUTPUT / 2)
        attended = new * TYPICAL_PROMPT / 2
        return prompts / self.law.pass_s(rows, context, max(prompts, 1.0), new, attended)


def weighed(kinds: Sequence[ReplicaTraits]) -> list[ReplicaTraits]:
    """The kinds of a fleet with their weights: by their laws, or by the sizes of their caches where
    one has no law.
    """
    if len(kinds) == 1:
        return list(kinds)
    lawful = all(each.law is not None for each in kinds)
    sizes = [each.pace if lawful else float(each.capacity_tokens) for each in kinds]
    return [
        msgspec.structs.replace(each, weight=size / sizes[0])
        for each, size in zip(kinds, sizes, strict=True)
    ]


class RequestOutlook(msgspec.Struct, frozen=True):
    """What a router expects of a request on the replica that it chose.

    Attributes:
        prefilled_s: when the prompts there, this one the last, have been computed.
        is_late: whether it is expected to miss a target in any case.
        stalls: whether its prompt delays a token of the others there beyond their target.
    """

    prefilled_s: float
    is_late: bool
    stalls: bool


class Sent(msgspec.Struct):
    """A request that a replica has. `cached_tokens` is what the router expected to be cached;
    `stalls` counts the stalls of the replica before it (-1: it is late in any case); `first_s` is
    when its first token is expected (0: that was not computed).
    """

    request: RoutedRequest
    sent_s: float
    cached_tokens: int
    has_token: bool = False
    stalls: int = -1
    first_s: float = 0.0

    @property
    def new_tokens(self) -> int:
        """Prompt tokens that the replica has to compute."""
        return self.request.prompt_tokens - self.cached_tokens


class Replica:
    """One replica, as the router knows it.

    Attributes:
        sent: the requests that it has, by id, in the order in which they were sent.
        prefills: how many of these have no token yet.
        prefill_tokens: what these have to compute.
        prefill_cached: what is expected to be cached before that.
        decode_tokens: prompt tokens of the others.
        prompt_tokens: of all.
        blocks: of all prompts that it has, each counted once.
        report: its own latest figures; None before the first.
        in_time: of those with an `RequestOutlook`, how many are expected to keep their targets.
        prefilled_s: when the prompts that it has are expected to have been computed.
    """

    __slots__ = (
        "_stalls",
        "_uses",
        "blocks",
        "decode_tokens",
        "in_time",
        "index",
        "is_up",
        "prefill_cached",
        "prefill_tokens",
        "prefilled_s",
        "prefills",
        "prompt_tokens",
        "report",
        "sent",
        "traits",
    )

    def __init__(self, index: int, traits: ReplicaTraits) -> None:
        self.index, self.traits = index, traits
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
        """Requests that were sent to it and have not ended."""
        return len(self.sent)

    @property
    def decodes(self) -> int:
        """Requests that have had their first token."""
        return len(self.sent) - self.prefills

    @property
    def waiting(self) -> int:
        """Requests in its queue: as reported, or else those beyond the rows that it runs."""
        if self.report is not None:
            return self.report.waiting
        return max(len(self.sent) - self.traits.max_rows, 0)

    @property
    def kv_usage(self) -> float:
        """The used share of its cache: as reported, or else by the prompts that it has."""
        if self.report is not None:
            return self.report.kv_usage
        return min(self.prompt_tokens / self.traits.capacity_tokens, 1.0)

    def add(self, sent: Sent) -> None:
        """A request was sent to it."""
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
        """What is expected of a request that was just added, and of the others with it."""
        self.prefilled_s = sent.first_s = outlook.prefilled_s
        if outlook.stalls:
            self._stalls += 1
            self.in_time = 0
        if not outlook.is_late:
            sent.stalls = self._stalls
            self.in_time += 1

    def first_token(self, request_id: str) -> Sent | None:
        """The first token of a request came back; returns it if it had none before."""
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
        """A request ended, or went elsewhere."""
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
    """Which blocks each replica probably has cached: those of the prompts that were sent to it.

    Each replica forgets the blocks that were used longest ago, of one prompt the last ones first,
    when it has more than its capacity (blocks; 0: no limit), and those not used for `ttl_s` seconds
    (0: no limit). One walk over a prompt's blocks finds the matches of all replicas.
    """

    def __init__(self, replicas: int, *, capacity: int = 0, ttl_s: float = 0.0) -> None:
        self._capacities, self._ttl_s = [capacity] * replicas, ttl_s
        self._holders: dict[int, int] = {}  # block to the set of replicas, as bits
        self._used: list[OrderedDict[int, float]] = [OrderedDict() for _ in range(replicas)]

    def add_replica(self, capacity: int) -> None:
        """A further replica."""
        self._used.append(OrderedDict())
        self._capacities.append(capacity)

    def matched(self, blocks: Sequence[int], now_s: float) -> list[int]:
        """For each replica, how many leading blocks of a prompt it has."""
        used = self._used
        if self._ttl_s:
            for index in range(len(used)):
                self._expire(index, now_s)
        found, holders = [0] * len(used), self._holders
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
        """A prompt was sent to a replica."""
        used, holders, bit = self._used[index], self._holders, 1 << index
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
        """A replica was restarted: its cache is empty."""
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
