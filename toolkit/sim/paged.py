"""vLLM's v1 scheduler (0.32, `v1/core/sched/scheduler.py`) as a machine without time: who computes
what in each pass.

Before each forward pass those who run get a token each, and who is not through with his prompt a
chunk of it; a block is taken where the last one is full. Where none is free the one who came in
last loses his blocks and waits again, before all others, to be computed anew with what he
generated; in such a pass nobody comes in. Else those who wait come in, first come first, while
there are rows and tokens left in the pass and blocks for all of their input, of which they take
what this pass needs. One who does not fit holds up those behind him.

What vLLM has besides is left out: priorities (traces have none, and among equal ones its `priority`
order is this one), a threshold for long prefills (off by default), speculative decoding, several
kinds of caches, LoRA, connectors.

Everybody who runs has a part in every pass: the tokens of a pass suffice for that, and only the
last who came in can be in the middle of a prompt. So all decode in lockstep, their books are sums
and a histogram of how full their last blocks are, and k passes of decodes alone are one addition.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from toolkit.estimators.steps import StepShape, chunk_attended
from toolkit.sched.policies.vllm import VllmPolicy

# The blocks of a paged cache, counted: who holds how many is the caller's to know, what is free
# is known here.
#
# With prefix caching a freed block that is full keeps its tokens until it is given out again:
# blocks that were never full first, then those freed longest ago, of one request the last ones
# first (vLLM 0.32, `v1/core/block_pool.py`). Who comes back finds what is left of his own.
# Requests share nothing here: traces do not say which of their tokens are the same.


class BlockPool:
    """`blocks` of `block_tokens` tokens each, all free."""

    __slots__ = ("_kept", "_plain", "block_tokens", "blocks", "free", "keeps")

    def __init__(self, blocks: int, block_tokens: int, *, keeps: bool) -> None:
        self.blocks, self.block_tokens, self.keeps = blocks, block_tokens, keeps
        self.free = blocks
        self._plain = blocks  # free blocks that hold nothing of use
        self._kept: OrderedDict[int, int] = (
            OrderedDict()
        )  # owner to his free blocks that do, freed longest ago first

    def needed(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_tokens)

    def take(self, count: int) -> None:
        """Give out free blocks; there must be as many."""
        assert count <= self.free
        self.free -= count
        if not self.keeps:
            return
        self._plain -= count
        while self._plain < 0:
            owner, there = self._kept.popitem(last=False)
            self._plain += there
            if self._plain > 0:
                self._kept[owner] = self._plain
                self._kept.move_to_end(owner, last=False)
                self._plain = 0

    def give(self, owner: int, tokens: int, known: int) -> None:
        """The owner's blocks, which hold so many tokens, are free again. What they hold is known of
        so many.
        """
        count = self.needed(tokens)
        self.free += count
        if self.keeps:
            full = known // self.block_tokens
            self._plain += count - full
            if full:
                self._kept[owner] = full

    def kept_tokens(self, owner: int) -> int:
        """Tokens that the owner would find if he came back now."""
        return self._kept.get(owner, 0) * self.block_tokens

    def retake(self, owner: int) -> None:
        """Give the owner what was kept for him."""
        self.free -= self._kept.pop(owner, 0)


class PagedRequest:
    """A request in the machine.

    Attributes:
        number: which.
        prompt: tokens to be computed before its next token: its prompt, and what it had generated when it came in last.
        left: tokens that it will still generate, the truth.
        computed: tokens in its cache; while it decodes, those less the machine's passes so far.
        end: at which of the machine's passes it ends; 0: it does not decode.
        mark: for whoever keeps times by row.
    """

    __slots__ = ("computed", "end", "left", "mark", "number", "prompt", "stops")

    def __init__(self, number: int, prompt: int, output: int, *, stops: bool = False) -> None:
        self.number, self.prompt, self.left = number, prompt, output
        # before the limit that was set for it: nobody knows before its last token is there
        self.stops = stops
        self.computed = self.end = self.mark = 0


@dataclass(slots=True)
class Chunk:
    """Tokens of an input that a row computes in a pass, behind those it has."""

    row: PagedRequest
    computed: int
    new: int

    @property
    def completes(self) -> bool:
        """Whether the row gets a token in this pass."""
        return self.computed + self.new == self.row.prompt


@dataclass(slots=True)
class PagedPass:
    """What the next forward pass computes, and which rows lost their blocks for it."""

    shape: StepShape
    rows: int  # in it
    chunks: Sequence[Chunk]
    preempted: Sequence[PagedRequest]


class PagedScheduler:
    """Passes of one engine: `schedule` plans one, `commit` says that it and so many like it were
    made, `settle` frees.

    Args:
        flags: vLLM's.
        blocks, block_tokens: of the cache, without the one that vLLM never gives out.
        ahead: passes are planned while the one before is under way (`async_scheduling`), so that its tokens are not
            known: `settle` comes one `schedule` later.
    """

    def __init__(
        self, flags: VllmPolicy, blocks: int, block_tokens: int, *, ahead: bool = False
    ) -> None:
        self._flags, self._unknown = flags, int(ahead)
        self.pool = BlockPool(blocks, block_tokens, keeps=flags.prefix_caching)
        self.waiting: deque[PagedRequest] = deque()
        self.running: dict[PagedRequest, None] = {}  # in the order in which they came in
        self._reserve = int(flags.watermark * (blocks + 1))
        self._block_tokens = block_tokens
        self._steps = 0  # passes so far
        self._decoding = 0
        self._key_sum = 0  # of the decoding rows' `computed`
        self._fill = [0] * block_tokens  # decoding rows by `computed` modulo a block
        self._ends: list[
            tuple[int, int, PagedRequest]
        ] = []  # heap of (end, number, row); stale if the row decodes no more
        self._partial: PagedRequest | None = None  # the row whose input is not all computed
        self._ended: list[PagedRequest] = []  # and still hold their blocks
        self._plan: PagedPass | None = None

    def add(self, row: PagedRequest) -> None:
        """A request arrives."""
        self.waiting.append(row)

    @property
    def decoding(self) -> int:
        """Rows that decode."""
        return self._decoding

    @property
    def decode_cached(self) -> int:
        """Tokens in the caches of those who decode."""
        return self._key_sum + self._decoding * self._steps

    def schedule(self) -> PagedPass:
        """Plan the next pass, and take its blocks. A pass without rows is none: everybody has ended
        or waits.
        """
        due = self._due()
        preempted: list[PagedRequest] = []
        if due + self._due_chunk() > self.pool.free:
            preempted = self._make_room()
            due = self._due()
        decodes, cached = self._decoding, self._key_sum + self._decoding * self._steps
        for row in self._ended:
            if row.stops:  # it takes part in a pass still, since its end was not known
                decodes += 1
                cached += row.computed + self._steps
        budget = self._flags.max_num_batched_tokens - decodes
        if due:
            self.pool.take(due)
        chunks: list[Chunk] = []
        if self._partial is not None:
            chunks.append(self._continue(self._partial, budget))
            budget -= chunks[0].new
        if self.waiting and not preempted:
            self._admit(budget, chunks)
        if chunks:
            new = sum([chunk.new for chunk in chunks])
            attended = sum([chunk_attended(chunk.computed, chunk.new) for chunk in chunks])
            shape = StepShape(decodes, cached, len(chunks), new, attended)
        else:
            shape = StepShape(decodes, cached)
        self._plan = PagedPass(shape, decodes + len(chunks), chunks, preempted)
        return self._plan

    def rows(self) -> list[tuple[int, int, int]]:
        """The planned pass row by row, as vLLM has it: number, tokens computed before, new tokens.
        For logs.
        """
        assert self._plan is not None
        chunks = {
            chunk.row: (chunk.row.number, chunk.computed, chunk.new) for chunk in self._plan.chunks
        }
        ended = {row for row in self._ended if not row.stops}
        return [
            chunks.get(r) or (r.number, r.computed + self._steps, 1)
            for r in self.running
            if r not in ended
        ]

    def ahead(self) -> int:
        """How many passes, with the planned one, are decodes of the same rows, whatever else
        arrives; 1 at least.

        None of them ends a row but the last, and none takes a block that is not free.
        """
        plan = self._plan
        assert plan is not None
        if plan.chunks or plan.preempted or self._ended or not self._decoding:
            return 1
        ends = self._ends
        while ends[0][2].end != ends[0][0]:
            heappop(ends)
        most = ends[0][0] - self._steps
        free, tokens = self.pool.free, self._block_tokens
        if self._decoding * (most // tokens + 1) <= free:
            return most
        for k in range(1, most):
            free -= self._fill[-(self._steps + k) % tokens]
            if free < 0:
                return k
        return most

    def commit(self, steps: int = 1) -> list[PagedRequest]:
        """The planned pass was made, and with it `steps - 1` more of the same rows; who ended with
        the last.
        """
        plan = self._plan
        assert plan is not None
        if steps > 1:
            self.pool.take(self._crossings(1, steps))
        self._plan = None
        for row in self._ended:
            row.computed -= 0 if row.stops else steps  # in no pass any more, unless nobody knew
        self._steps += steps
        ended = self._take_ends() if self._ends and self._ends[0][0] <= self._steps else []
        for chunk in plan.chunks:
            self._computed(chunk, ended)
        self._ended += ended
        return ended

    def settle(self, ended: Sequence[PagedRequest]) -> None:
        """These rows' last tokens are known: their blocks are free."""
        for row in ended:
            if row in self.running:  # else it lost its blocks since
                del self.running[row]
                self._ended.remove(row)
                held = row.computed + self._steps
                self.pool.give(row.number, held, held)

    def _make_room(self) -> list[PagedRequest]:
        """Who loses his blocks so that those who are left have theirs for the next pass."""
        preempted: list[PagedRequest] = []
        while self._due() + self._due_chunk() > self.pool.free:
            row, _ = self.running.popitem()
            if row is self._partial:
                self._partial = None
                held = known = row.computed
            else:
                held = row.computed + self._steps
                decoded = row.end - self._steps < row.left
                known = held - (
                    self._unknown if decoded else 0
                )  # what is under way is not, but of an input
                if row.end:
                    self._leave(row)
                else:
                    self._ended.remove(row)  # its last token is under way
            self.pool.give(row.number, held, known)
            row.computed = 0
            preempted.append(row)
            if row.left:
                self.waiting.appendleft(row)
        return preempted

    def _overtime(self) -> int:
        """Rows that have ended and take part in a pass still, since nobody knew."""
        return sum([row.stops for row in self._ended]) if self._ended else 0

    def _due(self) -> int:
        """Blocks that those who decode need for the next pass."""
        tokens, steps = self._block_tokens, self._steps
        if not self._ended:
            return self._fill[-steps % tokens]
        late = sum((row.computed + steps) % tokens == 0 for row in self._ended if row.stops)
        return self._fill[-steps % tokens] + late

    def _due_chunk(self) -> int:
        """Blocks that the row in the middle of its input needs besides."""
        row = self._partial
        if row is None:
            return 0
        budget = self._flags.max_num_batched_tokens - self._decoding - self._overtime()
        end = min(row.prompt, row.computed + budget)
        return self.pool.needed(end) - self.pool.needed(row.computed)

    def _continue(self, row: PagedRequest, budget: int) -> Chunk:
        chunk = Chunk(row, row.computed, min(row.prompt - row.computed, budget))
        self.pool.take(self.pool.needed(row.computed + chunk.new) - self.pool.needed(row.computed))
        return chunk

    def _admit(self, budget: int, chunks: list[Chunk]) -> None:
        """Let those in who wait, while there are rows, tokens and blocks."""
        pool, waiting, running, flags = self.pool, self.waiting, self.running, self._flags
        while waiting and budget > 0 and len(running) < flags.max_num_seqs:
            row = waiting[0]
            reserve = self._reserve if running else 0
            kept = pool.kept_tokens(row.number)
            new = row.prompt - kept
            if pool.needed(row.prompt) + reserve > pool.free or (
                new > budget and not flags.chunked_prefill
            ):
                return
            new = min(new, budget)
            pool.retake(row.number)
            pool.take(pool.needed(kept + new) - pool.needed(kept))
            chunks.append(Chunk(waiting.popleft(), kept, new))
            running[row] = None
            budget -= new

    def _computed(self, chunk: Chunk, ended: list[PagedRequest]) -> None:
        """A chunk was; if it was the last, its row has a token and decodes from now on."""
        row, steps = chunk.row, self._steps
        row.computed = chunk.computed + chunk.new
        if not chunk.completes:
            self._partial = row
            return
        if row is self._partial:
            self._partial = None
        row.prompt += 1
        row.left -= 1
        row.computed -= steps
        if not row.left:
            ended.append(row)
            return
        row.end = steps + row.left
        self._decoding += 1
        self._key_sum += row.computed
        self._fill[row.computed % self._block_tokens] += 1
        heappush(self._ends, (row.end, row.number, row))

    def _take_ends(self) -> list[PagedRequest]:
        """Who has generated all of it."""
        ends, ended = self._ends, []
        while ends and ends[0][0] <= self._steps:
            end, _, row = heappop(ends)
            if row.end == end:
                self._leave(row)
                ended.append(row)
        return ended

    def _leave(self, row: PagedRequest) -> None:
        """It decodes no more; what it generated is part of its input from now on."""
        generated = row.left - (row.end - self._steps)
        row.left -= generated
        row.prompt += generated
        row.end = 0
        self._decoding -= 1
        self._key_sum -= row.computed
        self._fill[row.computed % self._block_tokens] -= 1

    def _crossings(self, first: int, last: int) -> int:
        """Blocks that decodes take in the passes from the one `first` after the planned one to
        before `last`.
        """
        tokens, count = self._block_tokens, last - first
        whole = count // tokens
        rest = sum(
            self._fill[-(self._steps + k) % tokens] for k in range(first, first + count % tokens)
        )
        return whole * self._decoding + rest
