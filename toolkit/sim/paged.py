"""vLLM's v1 scheduler (0.32, `v1/core/sched/scheduler.py`) as a machine without time: which row
computes what in each pass. `PagedScheduler` plans the passes; the pools of `toolkit.sim.blocks`
count its blocks and find what requests share.

Each forward pass decodes one token for every running row, or computes a chunk of its input if that
is not complete. A row takes a new block when its last one is full. If no block is free, the row
that was admitted last loses its blocks and waits again, before all others; its prompt and its
output so far are then computed anew. A pass that preempts admits no row. Otherwise waiting requests
are admitted in FIFO order while the pass has rows and tokens left and the free blocks would hold
their whole input, beside the blocks of it that running rows hold; they take only the blocks that
this pass needs. A request that does not fit blocks those behind it. With prefix caching a request
that is admitted computes only what it does not find.

With `prefill_schedule_interval` I, prefills wait until I passes after the last pass that had one,
as long as a row decodes and the last time that they were let in left no request waiting.

Not modelled: priorities (traces have none, and among equal priorities vLLM's `priority` order is
this one), speculative decoding, several kinds of caches, LoRA, connectors.

Every running row takes part in every pass as long as a pass has enough tokens for that, and only
the row admitted last has an incomplete input. All others decode in lockstep, so their state is a
few sums and a histogram of the fill of their last blocks, and k passes of decodes alone cost one
addition. With a threshold for long prefills, several rows may have incomplete inputs; such a pass
is planned row by row, and decodes may miss it (`_plan_by_row`).

Settings may change between two passes (`change`), as those of a live vLLM do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from toolkit.estimators.steps import StepShape, chunk_attended
from toolkit.sched.policies.parameters import Value
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.blocks import BlockPool, PagedRequest, SharedPool
from toolkit.sim.passes import Chunk, PagedPass, PassScheduler, RowsApart


class PagedScheduler(PassScheduler):
    """The passes of one engine.

    Args:
        flags: vLLM's.
        blocks, block_tokens: of the cache, without the block that vLLM never gives out.
        ahead: a pass is planned while the one before it runs (`async_scheduling`), so that the
            tokens of that one are not known yet: `settle` comes one `schedule` later.
        shares: whether requests have contents; with prefix caching they then share blocks.
        reserves: whether a request is admitted only if its whole input would fit
            (`scheduler_reserve_full_isl`), not only what the next pass computes.
    """

    def __init__(
        self,
        flags: VllmPolicy,
        blocks: int,
        block_tokens: int,
        *,
        ahead: bool = False,
        shares: bool = False,
        reserves: bool = True,
    ) -> None:
        super().__init__(
            SharedPool(blocks, block_tokens)
            if shares and flags.prefix_caching
            else BlockPool(blocks, block_tokens, keeps=flags.prefix_caching)
        )
        self._most_rows: int = flags.max_num_seqs
        self._most_tokens: int = flags.max_num_batched_tokens
        self._threshold: int = flags.long_prefill_token_threshold
        self._chunked: bool = flags.chunked_prefill
        self._unknown = int(ahead)
        self._shares = shares and flags.prefix_caching
        self._reserves_input = reserves
        self._interval: int = flags.prefill_schedule_interval
        self._may_go_by_row = (
            self._most_rows > self._most_tokens or self._threshold > 0 or self._interval > 1
        )
        self._executed = 0  # passes that computed something
        self._last_prefill = -self._interval  # the last of them with a prefill
        self._bound = False  # requests were left waiting when prefills were let in
        self._defers = False  # the planned pass has no prefill
        self._reserve = int(flags.watermark * (blocks + 1))
        self._block_tokens = block_tokens
        self._steps = 0  # passes so far
        self._admissions = 0
        self._key_sum = 0  # of the decoding rows' `computed`
        self._fill = [0] * block_tokens  # decoding rows by `computed` modulo a block
        # heap of (end, order, row), for rows leave in the order of their admission; an entry is
        # stale if its row no longer decodes
        self._ends: list[tuple[int, int, PagedRequest]] = []
        # the rows with an incomplete input, in order of admission
        self._partials: dict[PagedRequest, None] = {}
        self._long = 0  # the most tokens of a chunk in the pass that is planned; 0: no such limit
        self._idle: dict[PagedRequest, None] = {}  # decoding rows that missed the last pass
        self._missed: list[PagedRequest] = []  # those that miss the planned one
        self._ended: list[PagedRequest] = []  # ended rows that still hold their blocks
        self._plan: PagedPass | None = None

    def change(self, settings: Mapping[str, Value]) -> None:
        """New values of flags, from the next pass on. `policy` changes nothing here: requests have
        no priorities. `ValueError` for a flag that no running vLLM changes.
        """
        for name, value in settings.items():
            if name == "max_num_seqs":
                self._most_rows = int(value)
            elif name == "max_num_batched_tokens":
                self._most_tokens = int(value)
            elif name == "long_prefill_token_threshold":
                self._threshold = int(value)
            elif name == "watermark":
                self._reserve = int(float(value) * (self._pool.blocks + 1))
            elif name == "scheduler_reserve_full_isl":
                self._reserves_input = bool(value)
            elif name != "policy":
                raise ValueError(f"{name} is no setting of a running vLLM")
        self._may_go_by_row = True

    def schedule(self) -> PagedPass:
        if self._interval > 1:
            self._defers = self._defers_prefills()
        self._long = 0
        if self._threshold and len(self.running) + len(self.waiting) > 1:
            self._long = self._threshold
        if self._may_go_by_row and self._goes_by_row():
            return self._plan_by_row()
        due = self._due()
        preempted: list[PagedRequest] = []
        if due + self._due_chunk() > self._pool.free:
            taken = self._make_room(preempted)
            due = self._due() - taken
        decodes = self.decoding
        cached = self._key_sum + self.decoding * self._steps
        for row in self._ended:
            if row.stops:  # it is in one more pass, since its end was not known
                decodes += 1
                cached += row.computed + self._steps
        budget = self._most_tokens - decodes
        if due:
            self._pool.take(due)
        pool = self._pool
        if pool.writers:
            for row in pool.writers:
                pool.register(row, self._written(row))
        chunks: list[Chunk] = []
        if self._partials and not self._defers:
            for row in self._partials:  # at most one
                budget -= self._take_chunk(row, budget, chunks)
        return self._planned(decodes, cached, budget, chunks, preempted)

    def _goes_by_row(self) -> bool:
        """Whether a pass may lack tokens for a decoding row, or rows with an incomplete input are
        not one, the last.
        """
        if len(self.running) > self._most_tokens:
            return True
        if not self._partials:
            return False
        return len(self._partials) > 1 or next(reversed(self.running)) not in self._partials

    def _plan_by_row(self) -> PagedPass:
        """As `schedule`: each row takes its tokens and blocks in turn, in order of admission."""
        pool = self._pool
        steps = self._steps
        budget = self._most_tokens
        chunks: list[Chunk] = []
        preempted: list[PagedRequest] = []
        missed: list[PagedRequest] = []
        decodes = 0
        cached = 0
        for row in list(self.running):
            if row not in self.running:  # it was preempted, and so were all behind it
                break
            partial = row in self._partials
            if not (partial or row.end or row.stops) or (partial and self._defers):
                continue  # it has ended, or its chunk is deferred
            if budget == 0:
                if not partial:
                    missed.append(row)
                continue
            if partial:
                end = row.computed + self._chunk_tokens(row, budget)
                due = pool.needed(end) - pool.needed(row.computed)
            else:
                due = int((row.computed + steps) % self._block_tokens == 0)
            while due > pool.free and row in self.running:
                self._preempt_last(preempted)
            if row not in self.running:
                break
            if partial:
                budget -= self._take_chunk(row, budget, chunks)
                continue
            pool.take(due)
            if row in pool.writers:
                pool.register(row, self._written(row))
            budget -= 1
            decodes += 1
            cached += row.computed + steps
        self._missed = missed
        return self._planned(decodes, cached, budget, chunks, preempted)

    def _planned(
        self,
        decodes: int,
        cached: int,
        budget: int,
        chunks: list[Chunk],
        preempted: list[PagedRequest],
    ) -> PagedPass:
        """The pass, once its running rows are planned: waiting requests are admitted into it."""
        if self.waiting and not preempted:
            self._admit(budget, chunks)
        if self._interval > 1:
            self._count_prefills(decodes, chunks, preempted)
        if chunks:
            new = 0
            before = 0
            attended = 0.0
            for chunk in chunks:
                new += chunk.new
                before += chunk.computed
                attended += chunk_attended(chunk.computed, chunk.new)
            shape = StepShape(decodes, cached, len(chunks), new, attended, before)
        else:
            shape = StepShape(decodes, cached)
        plan = PagedPass(shape, chunks, preempted)
        if self._idle or self._missed:
            out = [row for row in self._missed if row.end]
            there = [row for row in self._idle if row.end and row in self.running]
            paused = [row for row in out if row not in self._idle]
            resumed = [row for row in there if row not in out]
            plan.apart = RowsApart(paused, resumed, len(out) + len(resumed))
        self._plan = plan
        return plan

    def _take_chunk(self, row: PagedRequest, budget: int, chunks: list[Chunk]) -> int:
        """Plan the next chunk of a running row's input, and return its tokens. Its blocks are
        free.
        """
        pool = self._pool
        computed = row.computed
        new = self._chunk_tokens(row, budget)
        pool.take(pool.needed(computed + new) - pool.needed(computed))
        if self._shares:
            pool.register(row, computed + new)
        chunks.append(Chunk(row, computed, new))
        return new

    def _chunk_tokens(self, row: PagedRequest, budget: int) -> int:
        """How many tokens the next chunk of a running row has."""
        left = row.prompt - row.computed
        if 0 < self._long < left:
            left = self._long
        return min(left, budget)

    def _written(self, row: PagedRequest) -> int:
        """The tokens of a writer that are known with the pass that is planned."""
        if row in self._partials:
            return row.computed
        if row.end or row.stops:
            known = self._unknown == 0 or row in self._idle
            return row.computed + self._steps + (1 if known else 0)
        return self._known(row)

    def rows(self) -> list[tuple[int, int, int]]:
        """The planned pass by row, as vLLM logs it: number, tokens computed before, new tokens."""
        assert self._plan is not None
        chunks = {
            chunk.row: (chunk.row.number, chunk.computed, chunk.new) for chunk in self._plan.chunks
        }
        out = {row for row in self._ended if not row.stops}
        out.update(self._missed)
        out.update(row for row in self._partials if row not in chunks)
        return [
            chunks.get(r) or (r.number, r.computed + self._steps, 1)
            for r in self.running
            if r not in out
        ]

    def ahead(self) -> int:
        plan = self._plan
        assert plan is not None
        if plan.chunks or plan.preempted or self._ended or not self.decoding:
            return 1
        if self._partials or self._idle or self._missed:
            return 1
        if self._interval > 1 and self.waiting:
            return 1  # a prefill may be let in
        if self.waiting and self._pool.writers:
            return 1  # a block that is written may let one in
        ends = self._ends
        while ends[0][2].end != ends[0][0]:
            heappop(ends)
        most = ends[0][0] - self._steps
        free = self._pool.free
        tokens = self._block_tokens
        if self.decoding * (most // tokens + 1) <= free:
            return most
        for k in range(1, most):
            free -= self._fill[-(self._steps + k) % tokens]
            if free < 0:
                return k
        return most

    def commit(self, steps: int = 1) -> list[PagedRequest]:
        plan = self._plan
        tokens = self._block_tokens
        assert plan is not None
        if steps > 1:  # the blocks that decodes take in the passes after the planned one
            count = steps - 1
            crossings = count // tokens * self.decoding
            for k in range(1, 1 + count % tokens):
                crossings += self._fill[-(self._steps + k) % tokens]
            self._pool.take(crossings)
            self._executed += count
        self._plan = None
        if self._missed or self._idle:
            self._miss()
        for row in self._ended:
            # an ended row is in no further pass, unless its end was not known
            row.computed -= 0 if row.stops else steps
        now = self._steps = self._steps + steps
        ended: list[PagedRequest] = []
        ends = self._ends
        while ends and ends[0][0] <= now:  # rows that have generated their whole output
            end, _, row = heappop(ends)
            if row.end == end:
                self._leave(row)
                ended.append(row)
        decoded = len(ended)
        for chunk in plan.chunks:
            row = chunk.row
            row.computed = chunk.computed + chunk.new
            if not chunk.completes:
                self._partials[row] = None
                continue
            if self._partials:
                self._partials.pop(row, None)
            row.filled = row.computed
            row.prompt += 1  # it has a token, and decodes
            row.left -= 1
            row.computed -= now
            if not row.left:
                ended.append(row)
                continue
            row.end = now + row.left
            self.decoding += 1
            self._key_sum += row.computed
            self._fill[row.computed % tokens] += 1
            heappush(ends, (row.end, row.order, row))
        if decoded and len(ended) > decoded:  # a row with a chunk may be before one that decodes
            ended.sort(key=_admitted)
        self._ended += ended
        return ended

    def _miss(self) -> None:
        """Some rows had no part in the pass that is committed."""
        missed = self._missed
        self._missed = []
        self._idle = dict.fromkeys(missed)
        for row in missed:
            if self._unknown and row in self._pool.writers:  # nothing of it is under way
                self._pool.register(row, row.computed + self._steps)
            if not row.end:
                row.stops = False  # all of its tokens are known now, as those of any ended row
                continue
            size = self._block_tokens
            self._fill[row.computed % size] -= 1
            row.computed -= 1
            self._fill[row.computed % size] += 1
            self._key_sum -= 1
            row.end += 1
            heappush(self._ends, (row.end, row.order, row))

    def settle(self, ended: Sequence[PagedRequest]) -> None:
        for row in ended:
            if row in self.running:  # else it was preempted since
                del self.running[row]
                self._ended.remove(row)
                held = row.computed + self._steps
                # a row that stopped was in one more pass, which computed nothing that is known
                self._pool.give(row, held, held - (self._unknown if row.stops else 0))

    def _make_room(self, preempted: list[PagedRequest]) -> int:
        """Preempt rows, the last admitted first, until the others have the blocks that they need
        for the next pass, and append them to `preempted`. Returns how many blocks were given out.

        Rows take blocks in the order of their admission: the first ones have theirs when one finds
        none and another is preempted for it.
        """
        pool = self._pool
        taken = 0
        while True:
            due = self._due() - taken
            if due <= pool.free and due + self._due_chunk() <= pool.free:
                return taken
            count = min(due, pool.free)
            pool.take(count)
            taken += count
            self._preempt_last(preempted)

    def _preempt_last(self, preempted: list[PagedRequest]) -> None:
        """Preempt the row that was admitted last, and append it to `preempted`."""
        row, _ = self.running.popitem()
        if row in self._partials:
            del self._partials[row]
            held = known = row.computed
        else:
            held = row.computed + self._steps
            known = self._known(row)
            if row.end:
                self._leave(row)
            else:
                self._ended.remove(row)  # its last token is under way
        self._pool.give(row, held, known)
        row.computed = 0
        row.preempted = True
        preempted.append(row)
        if row.left:
            self.waiting.appendleft(row)

    def _known(self, row: PagedRequest) -> int:
        """How many of the tokens in a row's cache are known: not the one that a decode under way
        computes, whereas those of an input are.
        """
        held = row.computed + self._steps
        under_way = held > row.filled and row not in self._idle
        return held - (self._unknown if under_way else 0)

    def _due(self) -> int:
        """New blocks that the decoding rows need for the next pass."""
        tokens = self._block_tokens
        steps = self._steps
        due = self._fill[-steps % tokens]
        for row in self._ended:
            if row.stops and (row.computed + steps) % tokens == 0:
                due += 1
        return due

    def _due_chunk(self) -> int:
        """New blocks that the row with an incomplete input needs for the next pass."""
        if self._defers or not self._partials:
            return 0
        for row in self._partials:  # at most one
            # ended rows are in one more pass if their ends were not known
            late = sum([row.stops for row in self._ended])
            budget = self._most_tokens - self.decoding - late
            end = row.computed + self._chunk_tokens(row, budget)
            return self._pool.needed(end) - self._pool.needed(row.computed)
        return 0

    def _defers_prefills(self) -> bool:
        """Whether the next pass has no prefill: one was in a recent pass, and rows decode."""
        if self._bound or self._executed + 1 - self._last_prefill >= self._interval:
            return False
        return len(self.running) > len(self._partials)

    def _count_prefills(
        self, decodes: int, chunks: list[Chunk], preempted: list[PagedRequest]
    ) -> None:
        """Keep whether the planned pass has a prefill, and whether requests are left waiting."""
        if not preempted and not self._defers:
            self._bound = len(self.waiting) > 0
        if decodes or chunks:
            self._executed += 1
        for chunk in chunks:
            if chunk.row in self._partials or chunk.computed < chunk.row.prompt - 1:
                self._last_prefill = self._executed

    def _admit(self, budget: int, chunks: list[Chunk]) -> None:
        """Admit waiting requests while there are rows, tokens and blocks."""
        pool = self._pool
        waiting = self.waiting
        running = self.running
        most = self._most_rows
        while waiting and budget > 0 and len(running) < most:
            row = waiting[0]
            reserve = self._reserve if running else 0
            found = pool.find(row)
            new = row.prompt - found
            if self._defers and new > 1:
                return
            if 0 < self._long < new:
                new = self._long
            if new > budget:
                if not self._chunked:
                    return
                new = budget
            whole = row.prompt if self._reserves_input else found + new
            if pool.needed(whole) - pool.held + reserve > pool.free:
                return
            pool.admit(row, found)
            pool.take(pool.needed(found + new) - pool.needed(found))
            if self._shares:
                pool.register(row, found + new)
            self._admissions += 1
            row.order = self._admissions
            chunks.append(Chunk(waiting.popleft(), found, new))
            running[row] = None
            budget -= new

    def _leave(self, row: PagedRequest) -> None:
        """The row stops decoding; what it generated becomes part of its input."""
        generated = row.left - (row.end - self._steps)
        row.left -= generated
        row.prompt += generated
        row.end = 0
        self.decoding -= 1
        self._key_sum -= row.computed
        self._fill[row.computed % self._block_tokens] -= 1


def _admitted(row: PagedRequest) -> int:
    return row.order
