"""vLLM's v1 scheduler for models with several cache groups: which row computes what in each pass.

It has the calls of `toolkit.sim.paged.PagedScheduler`, and follows vLLM's own loop more closely:
with states, more than one row may have an incomplete input, and a pass may have no tokens left for
a row that decodes.

What differs from one group of full attention, besides the blocks:

- With states that are kept for prefixes, a chunk that does not complete an input ends at the end of
  a block. A prompt also has a chunk that ends at the last such place before its end, and where it
  parts from other prompts (its junction). A cut that leaves nothing ends admission.
- A request looks up again in each pass in which it waits, since what all groups have changes.

Rows that decode in step (`steady`) are only counted: a pass costs as much as the rows on their own,
and as those in step that take or give blocks. Where blocks may be missing, all rows are on their
own: that pass goes row by row, with vLLM's preemptions.

Not modelled: drafts, and everything that `toolkit.sim.paged` does not model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from toolkit.errors import InputError
from toolkit.estimators.steps import StepShape, chunk_attended, chunk_inside
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.blocks import PagedRequest
from toolkit.sim.groups.caches import CacheSettings, GroupedCache
from toolkit.sim.groups.full import ceil_div
from toolkit.sim.groups.row import GroupRow
from toolkit.sim.groups.steady import SteadyRows
from toolkit.sim.loop import SimulationStalledError
from toolkit.sim.passes import Chunk, EngineScheduler, PagedPass, RowsApart

LEAP_MAX = 1 << 30  # passes
# So many passes in a row that only preempt their last row, without a token for any: a live-lock.
FRUITLESS_MAX = 64


class Part:
    """What a row computes in a pass: `new` tokens after its `computed` ones. `is_chunk`: of an
    input. `samples`: the row gets a token.
    """

    __slots__ = ("computed", "is_chunk", "new", "row", "samples")

    def __init__(self, row: GroupRow, computed: int, new: int, *, is_chunk: bool) -> None:
        self.row = row
        self.computed = computed
        self.new = new
        self.is_chunk = is_chunk
        self.samples = False


class GroupedScheduler(EngineScheduler[GroupRow]):
    """The passes of one engine. Args as of `PagedScheduler`, with `settings` of the cache groups.

    Raises `InputError` where vLLM would not start with these flags and blocks.
    """

    def __init__(
        self,
        settings: CacheSettings,
        flags: VllmPolicy,
        blocks: int,
        *,
        ahead: bool = False,
        reserves: bool = True,
    ) -> None:
        if flags.long_prefill_token_threshold:
            raise InputError(
                "a threshold for long prefills is not modelled for a model with several groups of "
                "caches",
                "leave long_prefill_token_threshold at 0",
            )
        self._cache = GroupedCache(settings, blocks, flags, ahead=ahead)
        super().__init__(self._cache.pool)
        self._pool = self._cache.pool  # the same, by its own type
        self._most_rows: int = flags.max_num_seqs
        self._most_tokens: int = flags.max_num_batched_tokens
        self._chunked: bool = flags.chunked_prefill
        self._window = settings.window
        self._ahead = ahead
        self._late = int(ahead)
        self._reserves_input = reserves
        self._single: list[GroupRow] = []  # the running rows that are not in step, in that order
        self._steady = SteadyRows(self._cache.groups, self._late, self._window)
        # outputs of rows in step are registered when they are on their own again, and windows and
        # states of outputs that are kept would be given back with their keys before that
        self._can_count = settings.can_count(flags)
        self._admissions = 0
        self._admitted_before = 0  # the pass that is planned
        self._plan: list[Part] | None = None
        self._made: deque[list[Part]] = deque()  # passes with outputs that are not known yet
        self._passes = 0  # with rows
        self._interval: int = flags.prefill_schedule_interval
        self._executed = 0  # passes that computed something
        self._last_prefill = -self._interval  # the last of them with a prefill
        self._bound = False  # requests were left waiting when prefills were let in
        self._defers = False  # the planned pass has no prefill
        self._has_preempted = False
        self._fruitless = 0  # passes that only preempted, since the last token

    def add(self, row: PagedRequest) -> None:
        waits = GroupRow(row)
        self._cache.add(waits)
        self.waiting.append(waits)

    def schedule(self) -> PagedPass:
        """Plan the next pass and take its blocks. If the pass has no rows, no row can run before
        `settle` is called; if it has preempted some, plan another one after that.

        Raises `SimulationStalledError` where no request could ever run again.
        """
        steady = self._steady
        events: list[GroupRow] = []  # rows in step that take or give blocks in this pass
        if steady.count:
            steady.change()
            due = steady.due()
            given = steady.given()
            needed = self._needed_by_single()
            if due + needed > self._pool.free or self._comes_between():
                self._leave_all()
            elif due + needed <= self._pool.plain and not (self._single and steady.has_keyed()):
                steady.step(self._pool, due, given)
            else:
                events = steady.events()
        if self._interval > 1:
            self._defers = self._defers_prefills()
        self._cache.begin_pass()
        parts: list[Part] = []
        preempted: list[GroupRow] = []
        budget = self._plan_running(parts, preempted, events)
        self._admitted_before = self._admissions
        if not preempted:
            self._admit(parts, budget)
        if self._interval > 1:
            self._count_prefills(parts, preempted)
        self._refuse_stuck(parts, preempted)
        self._plan = parts
        for part in parts:
            row = part.row
            row.computed += part.new
            row.in_flight += part.new
            row.is_chunk = row.computed < row.known + row.sampled
            part.samples = not row.is_chunk
            if part.samples and self._ahead:
                row.sampled += 1
        self._has_preempted = bool(preempted)
        return self._pass_of(parts, preempted)

    def rows(self) -> list[tuple[int, int, int]]:
        """The planned pass by row, as vLLM logs it: number, tokens computed before, new tokens."""
        assert self._plan is not None
        planned = {part.row: part for part in self._plan}
        found = []
        for row in self.running:
            number = row.request.number
            if row.is_steady:
                found.append((number, row.base + self._steady.steps, 1))
            elif row in planned:
                part = planned[row]
                found.append((number, part.computed, part.new))
        return found

    def held(self, number: int) -> list[int]:
        """Blocks of each group that a running request holds, by its number."""
        for row in self.running:
            if row.request.number == number:
                if row.is_steady:
                    return self._steady.held(row)
                return self._cache.held(row)
        return []

    def ahead(self) -> int:
        """As `PagedScheduler.ahead`."""
        steady = self._steady
        if self._single or self._has_preempted or not steady.count:
            return 1
        if self.waiting and not steady.is_aligned:
            return 1  # blocks that are given back may let one in
        if self.waiting and self._interval > 1:
            return 1  # a prefill may be let in
        return steady.alike(LEAP_MAX, self._pool)

    def commit(self, steps: int = 1) -> list[PagedRequest]:
        """Record the planned pass and `steps` - 1 more of its rows; return those that ended."""
        parts = self._plan
        assert parts is not None
        self._plan = None
        steady = self._steady
        if steps > 1:
            steady.leap(steps - 1, self._pool)
            self._executed += steps - 1
        self._passes += steps
        steady.steps += steps
        ended: list[GroupRow] = []
        for part in parts:
            row = part.row
            row.decodes = 0 if part.is_chunk else row.decodes + 1
            if not part.samples or not row.request.left:
                continue
            self._fruitless = 0
            row.request.left -= 1
            row.in_pass = self._passes
            if not row.request.left:
                ended.append(row)
        self._made.append(parts)
        if steady.count:
            self._fruitless = 0
            gone = steady.ended()
            for row in gone:
                self._leave(row)
                ended.append(row)
            if gone:
                self._single.sort(key=_order)
        if len(ended) > 1:
            ended.sort(key=_order)
        return [row.request for row in ended]

    def settle(self, ended: Sequence[PagedRequest]) -> None:
        """The tokens of all passes are known but of the one that is under way, and rows that ended
        with them free their blocks.
        """
        under_way = 1 if self._ahead and self._plan is None else 0
        while len(self._made) > under_way:
            self._update(self._made.popleft())
        if self._can_count and self._plan is None:
            self._join_steady()

    def close(self) -> None:
        """It is needed no more."""

    def _defers_prefills(self) -> bool:
        """Whether the next pass has no prefill: one was in a recent pass, and rows decode."""
        if self._bound or self._executed + 1 - self._last_prefill >= self._interval:
            return False
        return self._steady.count > 0 or any(not row.is_chunk for row in self._single)

    def _count_prefills(self, parts: list[Part], preempted: list[GroupRow]) -> None:
        """Keep whether the planned pass has a prefill, and whether requests are left waiting."""
        if not preempted and not self._defers:
            self._bound = len(self.waiting) > 0
        if parts or self._steady.count:
            self._executed += 1
        for part in parts:
            is_admitted = part.row.order > self._admitted_before
            if part.is_chunk and (not is_admitted or part.computed < part.row.known - 1):
                self._last_prefill = self._executed

    def _join_steady(self) -> None:
        """Rows on their own that decode come into step."""
        late = self._late
        joined = False
        for row in self._single:
            if (
                row.decodes > late
                and row.request.left
                and row.in_flight == late
                and row.in_pass == self._passes
                and not row.request.watched
                and self._cache.has_prompt(row)
                and self._steady.can_join(row)
            ):
                self._steady.join(row)
                joined = True
                for place, parts in enumerate(self._made):
                    self._made[place] = [part for part in parts if part.row is not row]
        if joined:
            self._single = [row for row in self._single if not row.is_steady]

    def _leave(self, row: GroupRow) -> None:
        """A row in step is on its own again."""
        flight = len(self._made)
        self._steady.leave(row)
        row.known = row.computed + 1 - flight
        row.in_flight = flight
        row.sampled = flight if self._ahead else 0
        row.in_pass = self._passes
        self._cache.register(row, row.computed - self._late)
        for parts in self._made:
            part = Part(row, row.computed - 1, 1, is_chunk=False)
            part.samples = True
            parts.append(part)
            parts.sort(key=_part_order)
        self._single.append(row)

    def _leave_all(self) -> None:
        """All rows are on their own."""
        if not self._steady.count:
            return
        for row in self.running:
            if row.is_steady:
                self._leave(row)
        self._single = list(self.running)

    def _needed_by_single(self) -> int:
        """At most so many blocks the rows on their own take in the next pass."""
        total = 0
        for row in self._single:
            new = min(row.known + row.sampled - row.computed, self._most_tokens)
            for group in self._cache.groups:
                end = ceil_div(row.computed + new, group.block)
                total += max(end - row.tables[group.number].length, 0)
        return total

    def _comes_between(self) -> bool:
        """Whether a row with an incomplete input is before others that are in step, so that what it
        computes depends on them.
        """
        return any(row.is_chunk and row.order < self._steady.last_order for row in self._single)

    def _plan_running(
        self, parts: list[Part], preempted: list[GroupRow], events: list[GroupRow]
    ) -> int:
        """Give the running rows, in order, what they compute; the tokens that are left. `events`:
        the rows in step that take or give blocks meanwhile.
        """
        pool = self._pool
        budget = self._most_tokens - self._steady.count
        place = 0
        for row in self._single:
            if budget <= 0 or row not in self.running:
                break
            if row.sampled and not row.request.left and not row.request.stops:
                continue  # it ends with the pass that is under way
            if self._defers and row.is_chunk:
                continue
            new = min(row.known + row.sampled - row.computed, budget)
            new = self._cut(row, row.computed, new)
            if new <= 0:
                continue
            while place < len(events) and events[place].order < row.order:
                self._steady.step_row(events[place], pool)
                place += 1
            if not self._make_room(row, new, preempted):
                break
            parts.append(Part(row, row.computed, new, is_chunk=row.is_chunk))
            budget -= new
        for row in events[place:]:
            self._steady.step_row(row, pool)
        if preempted:
            self._single = [row for row in self._single if row.runs]
        return budget

    def _make_room(self, row: GroupRow, new: int, preempted: list[GroupRow]) -> bool:
        """Give a running row blocks for `new` tokens, and preempt rows for that, the last admitted
        first; False: the row itself was.
        """
        while not self._cache.extend(row, new):
            assert not self._steady.count  # all rows are on their own where blocks are missing
            last, _ = self.running.popitem()
            self._cache.release(last)
            last.stale = last.in_flight
            last.computed = last.sampled = last.in_pass = last.decodes = 0
            last.runs = False
            last.preempted = True
            self.waiting.appendleft(last)
            preempted.append(last)
            if last is row:
                return False
        return True

    def _admit(self, parts: list[Part], budget: int) -> None:
        """Admit waiting requests while there are rows, tokens and blocks."""
        cache = self._cache
        waiting = self.waiting
        running = self.running
        while waiting and budget > 0 and len(running) < self._most_rows:
            row = waiting[0]
            assert not row.stale  # its last pass was settled since it was preempted
            seen = cache.look_up(row)
            row.junction = seen.junction
            new = row.known - seen.found
            if self._defers and new > 1:
                break
            if new > budget:
                if not self._chunked:
                    break
                new = budget
            new = self._cut(row, seen.found, new)
            if new <= 0:
                break
            others_run = bool(running)
            if not cache.admit(
                row, seen, new, reserves=self._reserves_input, others_run=others_run
            ):
                break
            self._count(row, seen.found)
            waiting.popleft()
            running[row] = None
            self._single.append(row)
            self._admissions += 1
            row.order = self._admissions
            row.runs = True
            row.computed = seen.found
            row.request.prompt = row.known
            parts.append(Part(row, seen.found, new, is_chunk=True))
            budget -= new

    def _cut(self, row: GroupRow, start: int, new: int) -> int:
        """How many of `new` tokens after `start` a chunk has that ends where states are kept."""
        states = self._cache.states
        last_start = max(row.prompt, row.known - 1)
        if not states or start >= last_start:
            return new
        size = self._cache.smallest
        whole = self._cache.rules.whole
        first = states[0]
        end = start + new
        keeps = end >= last_start
        for group in states:
            keeps = keeps and group.checkpoints
        keeps = keeps and first.can_keep_inside(start, end, first.last_state(last_start, whole))
        if end < last_start:
            aligned = end // size * size
            if aligned > start or size <= self._most_tokens:
                end = aligned
        stops = []
        if not keeps:
            if start % size:
                stops.append((start // size + 1) * size)
            stops.append(first.last_state(row.known, size))
        if start < row.junction < end:
            stops.append(start + (row.junction - start) // size * size)
        for stop in stops:
            if start < stop < end:
                end = stop
        return max(end - start, 0)

    def _count(self, row: GroupRow, found: int) -> None:
        pool = self._pool
        if not self._cache.caches:
            return
        if row.preempted:
            pool.preempted_queries += row.known
            pool.preempted_hits += found
        else:
            pool.queries += row.known
            pool.hits += found
            pool.lost += self._cache.lost(row, found)

    def _refuse_stuck(self, parts: list[Part], preempted: list[GroupRow]) -> None:
        """Raise `SimulationStalledError` where requests wait and none will ever run."""
        if parts or self._steady.count:
            return
        blocks = self._pool.blocks
        if preempted:
            self._fruitless += 1
            if self._fruitless > FRUITLESS_MAX:
                tokens = preempted[-1].known
                raise SimulationStalledError(
                    f"the cache of {blocks:,} blocks is too small: a request of {tokens:,} tokens "
                    "is admitted and preempted again and again, and nothing else runs",
                    "give more memory, or lower max_model_len: vLLM would do the same for ever",
                )
        elif self.waiting and not self.running:
            tokens = self.waiting[0].known
            raise SimulationStalledError(
                f"the cache of {blocks:,} blocks is too small: a request of {tokens:,} tokens "
                "is never admitted, though nothing else runs",
                "give more memory, or lower max_model_len: vLLM would wait for ever",
            )

    def _pass_of(self, parts: list[Part], preempted: list[GroupRow]) -> PagedPass:
        """The planned pass as the engine knows it."""
        window = self._window
        steady = self._steady
        decodes = steady.count
        cached = steady.cached()
        inside = steady.inside()
        growing = steady.growing
        new = 0
        before = 0
        attended = 0.0
        new_inside = 0.0
        chunks: list[Chunk] = []
        resumed: list[PagedRequest] = []
        self.decoding = steady.count
        for part in parts:
            row = part.row
            if part.is_chunk:
                chunks.append(Chunk(row.request, part.computed, part.new))
                new += part.new
                before += part.computed
                attended += chunk_attended(part.computed, part.new)
                if window:
                    new_inside += chunk_inside(part.computed, part.new, window)
                continue
            decodes += 1
            cached += part.computed
            if window:
                inside += min(part.computed, window - 1)
                growing += int(part.computed < window - 1)
            if not row.request.left:
                continue  # it has ended, which the engine does not know yet
            if row.in_pass == self._passes:
                self.decoding += 1
            else:
                resumed.append(row.request)
        shape = StepShape(
            decodes, cached, len(chunks), new, attended, before, inside, new_inside, growing
        )
        found = PagedPass(shape, chunks, [row.request for row in preempted])
        paused = self._paused(parts) if len(parts) < len(self._single) else []
        if paused or resumed:
            found.apart = RowsApart(paused, resumed, 0)
        return found

    def _paused(self, parts: list[Part]) -> list[PagedRequest]:
        """Running rows that got a token in the last pass, and have no part in this one."""
        takes_part = {part.row for part in parts}
        return [
            row.request
            for row in self._single
            if row.in_pass == self._passes
            and row.in_pass
            and row.request.left
            and row not in takes_part
        ]

    def _update(self, parts: list[Part]) -> None:
        """The tokens of a pass are known."""
        has_ended = False
        for part in parts:
            row = part.row
            if row.ended:
                continue
            row.in_flight -= part.new
            is_stale = row.stale > 0
            if is_stale:
                row.stale -= part.new
            if not part.samples:
                continue
            row.known += 1
            if row.sampled and not is_stale:
                row.sampled -= 1
                if row.runs:
                    self._cache.register(row, row.computed - row.in_flight)
            if row.known == row.end:
                self._cache.release(row)
                row.ended = True
                if not row.runs:
                    self.waiting.remove(row)  # it was preempted while its last token was under way
                else:
                    del self.running[row]
                    has_ended = True
        if has_ended:
            self._single = [row for row in self._single if not row.ended]


def _order(row: GroupRow) -> int:
    return row.order


def _part_order(part: Part) -> int:
    return part.row.order
