"""vLLM's scheduler with speculative decoding, row by row: `DraftScheduler`.

A row that decodes computes its last token and the drafts of those that follow; the model accepts
the first so many of them, and adds one token of its own. How many it accepts is drawn
(`DrawnDrafts`): acceptance depends on texts, which a simulation does not have.

The rules of vLLM 0.32 (`v1/core/sched/scheduler.py`) beside those of `toolkit.sim.paged`:

- Drafts are tokens of a pass: the budget and the longest context cut them.
- With a queue of two passes a pass is planned as if the pass before it accepted all of its drafts;
  what it rejected is taken back when its tokens are known. The blocks for it stay with the row.
- A row is in one more pass unless it is sure to end with the pass that is under way, whatever
  becomes of its drafts.
- A request that is admitted with one token to compute is padded with drafts that are never
  accepted, unless a chunk runs; where these do not fit into the pass, admission ends.
- A method that drafts with the model's states (EAGLE, MTP) has slots for its drafts in the cache,
  and drops the last block that a prompt finds, to compute these states anew.

vLLM 0.33 keeps blocks of outputs earlier (`keeps_known`), and its hashes cover the token behind a
block where drafts come from the model's states (`hash_lookahead`).

Rows advance by different numbers of tokens, so nothing is counted for all of them at once: a pass
costs time for each row.

Source: vLLM 0.32; compared with its own classes pass by pass (`llmctl vllm-check`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Final

import numpy as np

from toolkit.catalogue.classes import DRAFTING
from toolkit.catalogue.releases import release_of
from toolkit.errors import InputError, nearest
from toolkit.estimators.steps import StepShape, chunk_attended
from toolkit.files.recipe import AcceptanceSpec
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.blocks import BlockPool, Node, PagedRequest, SharedPool
from toolkit.sim.passes import Chunk, PagedPass, PassScheduler

DRAWS: Final = 1_000_003  # a prime: requests begin at places of their own in the table of draws
APART: Final = 7_919  # places between two requests
ROUNDS: Final = 100  # of the bisection
KEEPS_KNOWN: Final = (0, 33)  # the first release of vLLM


@dataclass(slots=True, frozen=True)
class DrawnDrafts:
    """Speculative decoding.

    Attributes:
        method: one of `DRAFTING`.
        rates: of each position, the share of passes in which the draft there is accepted; none
            exceeds the one before it. As many as there are drafts.
        proposed: share of a row's passes with drafts; in the others none is proposed.
        seed: of the draws.
    """

    method: str
    rates: tuple[float, ...]
    proposed: float = 1.0
    seed: int = 0
    _proposals: bytes = field(init=False, repr=False, compare=False, default=b"")
    _table: bytes = field(init=False, repr=False, compare=False, default=b"")

    def __post_init__(self) -> None:
        if self.method not in DRAFTING:
            raise InputError(
                f"speculative decoding by '{self.method}' is not modelled",
                nearest(self.method, DRAFTING),
            )
        if not self.rates:
            raise InputError("speculative decoding needs at least one draft")
        if not 0.0 < self.proposed <= 1.0:
            raise InputError(
                f"drafts are proposed in a share of {self.proposed:g} of passes; the "
                "share is above 0 and at most 1"
            )
        if any(not after <= before for before, after in pairwise((1.0, *self.rates, 0.0))):
            raise InputError(
                f"rates of acceptance are {list(self.rates)}; they go from at most 1 to at least 0,"
                " and none exceeds the one before it"
            )
        object.__setattr__(self, "_table", _drawn(self.rates, self.seed))
        if self.proposed < 1.0:
            object.__setattr__(self, "_proposals", _drawn((self.proposed,), self.seed + 1))

    @property
    def tokens(self) -> int:
        """Drafts of a row in a pass."""
        return len(self.rates)

    @property
    def uses_states(self) -> bool:
        """Whether drafting uses the model's states, as EAGLE and MTP do."""
        return DRAFTING[self.method]

    @property
    def length(self) -> float:
        """The mean number of tokens that a row gets from a pass."""
        return 1.0 + self.proposed * math.fsum(self.rates)

    def offered(self, number: int, turn: int) -> int:
        """How many drafts are proposed for a request, when that is asked for time `turn`."""
        if self._proposals and not self._proposals[(number * APART + turn) % DRAWS]:
            return 0
        return self.tokens

    def accepted(self, number: int, turn: int) -> int:
        """How many of a request's drafts are accepted in its pass number `turn` with drafts."""
        return self._table[(number * APART + turn) % DRAWS]


def keeps_known_outputs(version: str) -> bool:
    """Whether a release of vLLM, such as '0.33.0', keeps blocks of outputs as soon as their tokens
    are known; '': not known.
    """
    release = release_of(version)
    return release is not None and release >= KEEPS_KNOWN


@lru_cache(maxsize=16)
def _drawn(rates: tuple[float, ...], seed: int) -> bytes:
    """How many drafts are accepted, drawn `DRAWS` times."""
    drawn = np.random.default_rng(seed).random(DRAWS)
    accepted = sum((drawn < rate).astype(np.uint8) for rate in rates)
    return np.asarray(accepted, dtype=np.uint8).tobytes()


def rates_of_length(length: float, tokens: int) -> tuple[float, ...]:
    """The rates of `tokens` drafts for a mean number of tokens per pass, if each draft after
    accepted ones only is accepted with the same probability p: the sum of p^i is `length` - 1.
    `InputError` for a length outside 1 to `tokens` + 1.
    """
    if not 1.0 <= length <= tokens + 1:
        raise InputError(
            f"an acceptance length of {length:g} with {tokens} drafts",
            f"it is from 1, when none is accepted, to {tokens + 1}",
        )
    low = 0.0
    high = 1.0
    for _ in range(ROUNDS):
        p = (low + high) / 2
        if math.fsum(p**k for k in range(1, tokens + 1)) < length - 1.0:
            low = p
        else:
            high = p
    return tuple(high**k for k in range(1, tokens + 1))


def drafts_of(
    method: str, tokens: int, acceptance: AcceptanceSpec | None, seed: int
) -> DrawnDrafts:
    """`tokens` drafts by a method of vLLM, accepted as the traffic's `acceptance` says.

    `InputError` without any, and for rates of fewer drafts.
    """
    if acceptance is None:
        raise InputError(
            f"{tokens} drafts of a row in a pass, and nothing says how many are accepted",
            "set serve.acceptance in the recipe, or give --set acceptance_length=TOKENS",
        )
    return DrawnDrafts(method, rates_of(acceptance, tokens), acceptance.proposed, seed)


def rates_of(acceptance: AcceptanceSpec, tokens: int) -> tuple[float, ...]:
    """The rate of each of `tokens` positions. `InputError` for rates of fewer drafts."""
    if acceptance.rates is None:
        assert acceptance.length is not None
        first = rates_of_length(acceptance.length, acceptance.tokens or tokens)[0]
        return tuple(first**k for k in range(1, tokens + 1))
    if len(acceptance.rates) < tokens:
        raise InputError(
            f"serve.acceptance has rates of {len(acceptance.rates)} drafts, and {tokens} are used",
            "give a rate for each position, or `length`",
        )
    return tuple(acceptance.rates[:tokens])


class DraftRow:
    """What the scheduler knows of a request.

    Attributes:
        prompt, limit: tokens of the prompt, and the most that it may generate.
        known: tokens that are known; `computed`: those in its cache, with those of the passes that
            are under way, all drafts accepted.
        expected: tokens that passes under way will give, all drafts accepted.
        in_flight: tokens in those passes; `stale` of them were planned before it lost its blocks.
        drafts: that wait to be verified.
        blocks: that it holds.
        turn, asked: passes with drafts of its own so far, and times that drafts were asked for.
        left: tokens that it still generates behind the known ones.
        entered: its input is complete since it was last admitted.
    """

    __slots__ = (
        "asked", "blocks", "computed", "drafts", "ended", "entered", "expected", "in_flight",
        "is_chunk", "known", "left", "limit", "prompt", "row", "running", "stale", "turn",
    )  # fmt: skip

    def __init__(self, row: PagedRequest) -> None:
        self.row = row
        self.prompt = row.prompt
        self.limit = row.limit
        self.known = row.prompt
        self.left = row.left
        self.computed = self.expected = self.in_flight = self.stale = 0
        self.drafts = self.blocks = self.turn = self.asked = 0
        self.running = self.ended = self.entered = self.is_chunk = False


class DraftPart:
    """A row's part in a pass.

    Attributes:
        computed, new, drafts: tokens before, new ones, and drafts among these.
        padded: its drafts are placeholders.
        samples: it gets a token.
        accepted: drafts; known when the pass is made.
    """

    __slots__ = ("accepted", "computed", "drafts", "new", "one", "padded", "samples")

    def __init__(self, one: DraftRow, computed: int, new: int, drafts: int, padded: bool) -> None:
        self.one = one
        self.computed = computed
        self.new = new
        self.drafts = drafts
        self.padded = padded
        self.samples = False
        self.accepted = 0


class DraftScheduler(PassScheduler):
    """The passes of one engine with speculative decoding.

    Args: as `PagedScheduler`, and
        drafts: how many, and how many are accepted.
        longest: tokens that a request may have, vLLM's `max_model_len`; 0: as the cache has.
        keeps_known: full blocks of outputs are kept for other requests as soon as their tokens are
            known, as since vLLM 0.33; before, without a queue of passes, only when the row gets
            room for its next pass, so that its last blocks are not kept.
        hash_lookahead: tokens behind a block that its hash covers, of methods that draft with the
            model's states since vLLM 0.33: such a block can be found once they are known, and the
            last block that a prompt finds is not dropped.
    """

    def __init__(
        self,
        flags: VllmPolicy,
        blocks: int,
        block_tokens: int,
        drafts: DrawnDrafts,
        *,
        ahead: bool = False,
        shares: bool = False,
        reserves: bool = True,
        longest: int = 0,
        keeps_known: bool = False,
        hash_lookahead: int = 0,
    ) -> None:
        caches = flags.prefix_caching
        super().__init__(
            SharedPool(blocks, block_tokens)
            if caches
            else BlockPool(blocks, block_tokens, keeps=False)
        )
        self._most_rows: int = flags.max_num_seqs
        self._most_tokens: int = flags.max_num_batched_tokens
        self._chunked: bool = flags.chunked_prefill
        self._caches: bool = caches
        self._shares = shares
        self._ahead = ahead
        self._keeps_known = keeps_known
        self._hash_lookahead = hash_lookahead
        self._reserves_input = reserves
        self._threshold: int = flags.long_prefill_token_threshold
        self._longest = longest or blocks * block_tokens
        self._reserve = int(flags.watermark * (blocks + 1))
        self._size = block_tokens
        self._drafts = drafts
        self._count: int = drafts.tokens
        self._lookahead = self._count if drafts.uses_states else 0
        self._drops = caches and drafts.uses_states and not hash_lookahead
        self._order: list[DraftRow] = []  # the running rows
        self._queue: deque[DraftRow] = deque()  # the waiting ones
        self._plan: list[DraftPart] | None = None
        self._under_way: deque[list[DraftPart]] = deque()
        self._idle = False  # the last plan had no rows
        self._most_new = self._most_tokens  # of a row in the planned pass
        if 0 < self._threshold < 1 + self._count:
            raise InputError(
                f"long_prefill_token_threshold is {self._threshold}, and a row with "
                f"{self._count} drafts computes {1 + self._count} tokens in a pass",
                "raise it, or leave it at 0",
            )

    def add(self, row: PagedRequest) -> None:
        if self._caches and (row.content is None or not self._shares):
            row.content = Node(None, 0, row.prompt + row.left)
        one = DraftRow(row)
        self._queue.append(one)
        self.waiting.append(row)

    def schedule(self) -> PagedPass:
        plan: list[DraftPart] = []
        preempted: list[PagedRequest] = []
        budget, ran_chunk = self._plan_running(plan, preempted)
        if not preempted:
            self._admit(plan, budget, ran_chunk)
        chunks: list[Chunk] = []
        decodes = cached = drafted = getting = 0
        for part in plan:
            one = part.one
            one.computed += part.new
            one.in_flight += part.new
            one.is_chunk = one.computed < one.known + one.expected
            part.samples = not one.is_chunk
            if self._ahead and part.samples:
                one.expected += 1 + part.drafts
                one.drafts = self._count
            if one.entered:
                decodes += 1
                cached += part.computed
                drafted += part.drafts
                getting += one.row.left > 0
            else:
                chunks.append(Chunk(one.row, part.computed, part.new))
        new = before = 0
        attended = 0.0
        for chunk in chunks:
            new += chunk.new
            before += chunk.computed
            attended += chunk_attended(chunk.computed, chunk.new)
        shape = StepShape(decodes, cached, len(chunks), new, attended, before, draft_tokens=drafted)
        self.decoding = getting
        self._plan = plan
        self._idle = not plan
        return PagedPass(shape, chunks, preempted)

    def rows(self) -> list[tuple[int, int, int, int]]:
        """The planned pass by row, as vLLM has it: number, tokens computed before, new tokens, and
        drafts among these.
        """
        assert self._plan is not None
        return [(p.one.row.number, p.computed, p.new, p.drafts) for p in self._plan]

    def commit(self, steps: int = 1) -> list[PagedRequest]:
        plan = self._plan
        assert plan is not None
        assert steps == 1
        self._plan = None
        ended: list[PagedRequest] = []
        self.accepted = self.drafted = 0
        for part in plan:
            if not part.samples:
                continue
            one = part.one
            row = one.row
            if part.drafts and not part.padded:
                drawn = self._drafts.accepted(row.number, one.turn)
                one.turn += 1
                part.accepted = drawn if drawn < part.drafts else part.drafts
                if row.left:
                    self.drafted += part.drafts
            one.entered = True
            if not row.left:
                continue  # it has ended, which the scheduler does not know
            gets = 1 + part.accepted
            if gets > row.left:
                gets = row.left
            row.left -= gets
            self.accepted += gets - 1
            if not row.left:
                ended.append(row)
        self._under_way.append(plan)
        return ended

    def settle(self, ended: Sequence[PagedRequest]) -> None:
        under_way = self._under_way
        if under_way and (not self._ahead or len(under_way) == 2 or self._idle):
            for part in under_way.popleft():
                self._learn(part)

    def _plan_running(
        self, plan: list[DraftPart], preempted: list[PagedRequest]
    ) -> tuple[int, bool]:
        """Plan the running rows; the tokens that are left of the pass, and whether a row with an
        incomplete input takes part.
        """
        budget = self._most_tokens
        order = self._order
        most = self._most_of_row()
        ran_chunk = False
        at = 0
        while at < len(order) and budget > 0:
            one = order[at]
            at += 1
            sure = one.computed + 2 - one.expected
            if one.expected > 0 and sure >= one.prompt + one.limit:
                continue  # it ends with the pass that is under way
            new = one.known + one.drafts + one.expected - one.computed
            new = min(new, most, budget, self._longest - one.computed - 1)
            if new <= 0:
                continue
            room = True
            while not self._has_room(one, new):
                last = order.pop()
                self._preempt(last)
                preempted.append(last.row)
                if last is one:
                    room = False
                    break
            if not room:
                break
            ran_chunk |= one.is_chunk
            drafts = 0
            if one.drafts:
                drafts = max(0, min(one.drafts, new + one.computed - one.known - one.expected))
                one.drafts = 0
            plan.append(DraftPart(one, one.computed, new, drafts, False))
            budget -= new
        return budget, ran_chunk

    def _most_of_row(self) -> int:
        """The most new tokens of a row in the pass that is planned."""
        others = len(self._order) + len(self._queue) > 1
        self._most_new = self._threshold if self._threshold and others else self._most_tokens
        return self._most_new

    def _has_room(self, one: DraftRow, new: int) -> bool:
        """Give a running row the blocks for `new` tokens; False if they are not free."""
        computed = one.computed
        pool = self._pool
        needed = pool.needed(min(computed + new + self._lookahead, self._longest)) - one.blocks
        if needed > pool.free:
            return False
        if needed > 0:
            pool.take(needed)
            one.blocks += needed
        self._register(one, computed + new)
        return True

    def _admit(self, plan: list[DraftPart], budget: int, ran_chunk: bool) -> None:
        """Admit waiting requests while there are rows, tokens and blocks."""
        pool = self._pool
        queue = self._queue
        order = self._order
        count = self._count
        runs = bool(plan)
        most = self._most_new
        while queue and budget > 0 and len(order) < self._most_rows:
            one = queue[0]
            row = one.row
            row.prompt = one.known
            found = pool.find(row)
            if found and self._drops:
                found = pool.drop_last(found)
            new = one.known - found
            padded = False
            alone = new == 1 and not ran_chunk and (runs or found > 0)
            if alone and found + 1 + count + 1 <= self._longest:
                if 1 + count > budget:
                    return
                new = 1 + count
                padded = True
            if new > most:
                new = most
            if new > budget:
                if not self._chunked:
                    return
                new = budget
            reserve = self._reserve if order else 0
            free = pool.free + pool.held - reserve
            if self._reserves_input and pool.needed(min(one.known, self._longest)) > free:
                return
            tokens = min(found + new + self._lookahead, self._longest)
            if pool.needed(tokens) > free:
                return
            pool.admit(row, found)
            one.blocks = pool.needed(tokens)
            pool.take(one.blocks - found // self._size)
            self._register(one, found + new)
            queue.popleft()
            self.waiting.popleft()
            order.append(one)
            self.running[row] = None
            one.running = True
            one.entered = False
            one.computed = found
            plan.append(DraftPart(one, found, new, count if padded else 0, padded))
            budget -= new

    def _preempt(self, one: DraftRow) -> None:
        row = one.row
        self._free(one)
        one.running = False
        one.stale = one.in_flight
        one.computed = one.drafts = one.expected = 0
        row.preempted = True
        del self.running[row]
        self._queue.appendleft(one)
        self.waiting.appendleft(row)

    def _learn(self, part: DraftPart) -> None:
        """The tokens of a row's part are known."""
        one = part.one
        if one.ended:
            return
        one.in_flight -= part.new
        is_stale = one.stale > 0
        if is_stale:
            one.stale -= part.new
        if not part.samples:
            return
        gives = 1 + part.accepted
        kept = min(gives, one.left)
        one.known += kept
        one.left -= kept
        if not is_stale:
            if part.drafts:
                rejected = part.drafts - part.accepted
                one.computed -= rejected
                if one.expected > 0:
                    one.expected -= rejected
            if not one.left:
                one.computed -= gives - kept
            keeps = self._keeps_known or one.expected > 0
            if one.expected > 0:
                one.expected -= gives
            if keeps and one.running:
                self._register(one, one.computed - one.in_flight)
        if not one.left:
            row = one.row
            if one.running:
                self._free(one)
                self._order.remove(one)
                del self.running[row]
            else:
                self._queue.remove(one)
                self.waiting.remove(row)
            one.running = False
            one.ended = True
        elif not self._ahead:
            one.drafts = self._drafts.offered(one.row.number, one.asked)
            one.asked += 1

    def _register(self, one: DraftRow, tokens: int) -> None:
        """The first `tokens` tokens of a running row are in its cache."""
        found = min(tokens, one.known - self._hash_lookahead)
        if self._caches and found // self._size > one.row.registered:
            self._pool.register(one.row, found)

    def _free(self, one: DraftRow) -> None:
        self._pool.give(one.row, one.blocks * self._size, 0)
        one.blocks = 0
