"""vLLM's v1 scheduler for models with several cache groups, row by row: which row computes what in
each pass. It has the calls of `toolkit.sim.paged.PagedScheduler`, and follows vLLM's own loop more
closely: with states, more than one row may have an incomplete input, and a pass may have no tokens
left for a row that decodes.

What differs from one group of full attention, besides the blocks:

- With states that are kept for prefixes, a chunk that does not complete an input ends at the end of
  a block. A prompt also has a chunk that ends at the last such place before its end, and where it
  parts from other prompts (its junction). A cut that leaves nothing ends admission.
- A request looks up again in each pass in which it waits, since what all groups have changes.

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
from toolkit.sim.groups.pool import GroupPool
from toolkit.sim.groups.row import GroupRow
from toolkit.sim.paged import Chunk, PagedPass

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


class GroupedScheduler:
    """The passes of one engine; calls, `pool`, `waiting`, `running` and `decoding` as of
    `PagedScheduler`. Args as there, with `settings` of the cache groups.

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
        self._cache = GroupedCache(settings, blocks, flags, ahead=ahead)
        self._most_rows: int = flags.max_num_seqs
        self._most_tokens: int = flags.max_num_batched_tokens
        self._chunked: bool = flags.chunked_prefill
        self._longest = settings.max_model_len
        self._window = settings.window
        self._ahead = ahead
        self._reserves_input = reserves
        self.pool: GroupPool = self._cache.pool
        self.waiting: deque[GroupRow] = deque()
        self.running: list[GroupRow] = []  # in order of admission
        self.decoding = 0  # rows of the planned pass that get one token after another
        self._plan: list[Part] | None = None
        self._made: deque[list[Part]] = deque()  # passes with outputs that are not known yet
        self._passes = 0  # with rows
        self._fruitless = 0  # passes that only preempted, since the last token

    def add(self, row: PagedRequest) -> None:
        """A request arrives."""
        waits = GroupRow(row)
        self._cache.add(waits)
        self.waiting.append(waits)

    def schedule(self) -> PagedPass:
        """Plan the next pass and take its blocks. If the pass has no rows, no row can run before
        `settle` is called; if it has preempted some, plan another one after that.

        Raises `InputError` where no request could ever run again.
        """
        self._cache.begin_pass()
        parts: list[Part] = []
        preempted: list[GroupRow] = []
        budget = self._plan_running(parts, preempted)
        if not preempted:
            self._admit(parts, budget)
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
        return self._pass_of(parts, preempted)

    def rows(self) -> list[tuple[int, int, int]]:
        """The planned pass by row, as vLLM logs it: number, tokens computed before, new tokens."""
        assert self._plan is not None
        return [(part.row.request.number, part.computed, part.new) for part in self._plan]

    def held(self, number: int) -> list[int]:
        """Blocks of each group that a running request holds, by its number."""
        for row in self.running:
            if row.request.number == number:
                return self._cache.held(row)
        return []

    def ahead(self) -> int:
        """How many passes, the planned one included, are alike: one, since each is planned."""
        return 1

    def commit(self, steps: int = 1) -> list[PagedRequest]:
        """Record the planned pass; return the requests that ended with it."""
        parts = self._plan
        assert parts is not None
        self._plan = None
        self._passes += 1
        ended: list[PagedRequest] = []
        for part in parts:
            request = part.row.request
            if not part.samples or not request.left:
                continue
            self._fruitless = 0
            request.left -= 1
            part.row.in_pass = self._passes
            if not request.left:
                ended.append(request)
        self._made.append(parts)
        return ended

    def settle(self, ended: Sequence[PagedRequest]) -> None:
        """The tokens of all passes are known but of the one that is under way, and rows that ended
        with them free their blocks.
        """
        under_way = 1 if self._ahead and self._plan is None else 0
        while len(self._made) > under_way:
            self._update(self._made.popleft())

    def abort(self) -> list[PagedRequest]:
        """The engine dies: its unfinished requests. What they generated is off their `left`."""
        rows = [row.request for row in (*self.running, *self.waiting)]
        return [request for request in rows if request.left]

    def _plan_running(self, parts: list[Part], preempted: list[GroupRow]) -> int:
        """Give the running rows, in order, what they compute; the tokens that are left."""
        running = self.running
        budget = self._most_tokens
        place = 0
        while place < len(running) and budget > 0:
            row = running[place]
            if row.sampled and not row.request.left and not row.request.stops:
                place += 1  # it ends with the pass that is under way
                continue
            new = min(row.known + row.sampled - row.computed, budget)
            new = self._cut(row, row.computed, new)
            if new <= 0:
                place += 1
                continue
            if not self._make_room(row, new, preempted):
                return budget
            parts.append(Part(row, row.computed, new, is_chunk=row.is_chunk))
            budget -= new
            place += 1
        return budget

    def _make_room(self, row: GroupRow, new: int, preempted: list[GroupRow]) -> bool:
        """Give a running row blocks for `new` tokens, and preempt rows for that, the last admitted
        first; False: the row itself was.
        """
        while not self._cache.extend(row, new):
            last = self.running.pop()
            self._cache.release(last)
            last.stale = last.in_flight
            last.computed = last.sampled = last.in_pass = 0
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
            running.append(row)
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
        pool = self.pool
        if not self._cache.caches:
            return
        if row.preempted:
            pool.preempted_queries += row.known
            pool.preempted_hits += found
        else:
            pool.queries += row.known
            pool.hits += found

    def _refuse_stuck(self, parts: list[Part], preempted: list[GroupRow]) -> None:
        """Raise `InputError` where requests wait and none will ever run."""
        if parts:
            return
        blocks = self.pool.blocks
        if preempted:
            self._fruitless += 1
            if self._fruitless > FRUITLESS_MAX:
                tokens = preempted[-1].known
                raise InputError(
                    f"the cache of {blocks:,} blocks is too small: a request of {tokens:,} tokens "
                    "is admitted and preempted again and again, and nothing else runs",
                    "give more memory, or lower max_model_len: vLLM would do the same for ever",
                )
        elif self.waiting and not self.running:
            tokens = self.waiting[0].known
            raise InputError(
                f"the cache of {blocks:,} blocks is too small: a request of {tokens:,} tokens "
                "is never admitted, though nothing else runs",
                "give more memory, or lower max_model_len: vLLM would wait for ever",
            )

    def _pass_of(self, parts: list[Part], preempted: list[GroupRow]) -> PagedPass:
        """The planned pass as the engine knows it."""
        window = self._window
        decodes = 0
        cached = 0
        inside = 0
        growing = 0
        new = 0
        before = 0
        attended = 0.0
        new_inside = 0.0
        chunks: list[Chunk] = []
        resumed: list[PagedRequest] = []
        self.decoding = 0
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
        found.resumed = resumed
        if len(parts) < len(self.running):
            found.paused = self._paused(parts)
        return found

    def _paused(self, parts: list[Part]) -> list[PagedRequest]:
        """Running rows that got a token in the last pass, and have no part in this one."""
        takes_part = {part.row for part in parts}
        return [
            row.request
            for row in self.running
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
                has_ended = has_ended or row.runs
        if has_ended:
            self.running = [row for row in self.running if not row.ended]
