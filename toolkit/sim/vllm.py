"""vLLM's v1 scheduler (`v1/core/sched/scheduler.py`) as a machine without time: which row computes
what in each forward pass. It goes as vLLM does: first the running rows in order, then the waiting
ones, while the pass has tokens left, the server rows, and the cache blocks.

A row catches up: in a pass it computes the tokens that are known and not computed, the drafts
behind them, and the tokens that passes under way will give it (`expected`). A chunk of a prompt, a
decode, and a decode with drafts are therefore one rule. If too few blocks are free for a running
row, the row that was admitted last loses its blocks and waits before all others; its tokens are
computed anew. A pass that preempts admits no row.

With a queue of two passes (`ahead`: `async_scheduling`) a pass is planned before the tokens of the
pass before it are known, as if all drafts were accepted. What the model rejected is taken back when
the tokens are known. A row that may go on is in one more pass.

Rows that just decode are *in step* (`InStep`): each computes one token in every pass, so they are
counted, and a pass costs nothing for them but for the blocks that some of them take or give back.
While all rows are in step and nothing else can change, many passes are one addition
(`VllmScheduler.ahead`).

Not modelled: priorities (traces for vLLM have none), LoRA, connectors.

Source: vLLM 0.28 to 0.33; compared with its own classes pass by pass (`llmctl vllm-check`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from operator import attrgetter

from mypy_extensions import mypyc_attr

from toolkit.catalogue.releases import Release
from toolkit.catalogue.resolved import CacheGroup
from toolkit.errors import InputError
from toolkit.laws.features import StepShape, chunk_attended, chunk_inside
from toolkit.sched.policies.parameters import Value
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.cache_settings import CacheSettings
from toolkit.sim.drafts import DrawnDrafts
from toolkit.sim.kv_cache import NEVER, NO_PASS, KVCache, PagedRow
from toolkit.sim.loop import SimulationStalledError

# This many passes in a row that only preempt, without a token for any row, are a live-lock.
FRUITLESS_MAX = 64
NOTHING = StepShape(0, 0)
SPARES_ALONE: Release = (0, 31)  # the threshold for long prefills is not of a request that is alone
KEEPS_KNOWN: Release = (0, 33)  # blocks of outputs get keys as soon as their tokens are known
_order = attrgetter("order")  # of a row


@mypyc_attr(acyclic=True)
class Part:
    """A row's part in a pass: `new` tokens behind its `computed` ones.

    Attributes:
        drafts: the last tokens of `new` that are drafts.
        padded: they are placeholders, which are never accepted.
        samples: the pass gives the row a token.
        accepted: drafts; drawn when the pass is made.
    """

    __slots__ = ("accepted", "computed", "drafts", "new", "padded", "row", "samples")

    def __init__(
        self, row: PagedRow, computed: int, new: int, drafts: int = 0, padded: bool = False
    ) -> None:
        self.row = row
        self.computed = computed
        self.new = new
        self.drafts = drafts
        self.padded = padded
        self.samples = False
        self.accepted = 0


@mypyc_attr(acyclic=True)
class PlannedPass:
    """What the next forward pass computes; once it is made, also which tokens it gave, together
    with the passes of the same rows that were made with it.

    Attributes:
        rows: how many take part; 0: there is nothing to compute, and the pass is not made.
        parts: of rows that are not in step.
        preempted: rows that lost their blocks.
        paused: rows that got a token from the last pass and miss this one.
        shape: what it costs.
        decoding: rows that got a token from each pass, and had one from the pass before.
        joined: rows that got a token and had none from the pass before.
        ended: rows that got their last token.
        running: rows in the engine.
        drafted, accepted: drafts that were verified, and that became tokens.
    """

    __slots__ = (
        "accepted", "decoding", "drafted", "ended", "joined", "parts", "paused", "preempted",
        "rows", "running", "shape",
    )  # fmt: skip

    def __init__(self) -> None:
        self.rows = self.decoding = self.running = self.drafted = self.accepted = 0
        self.parts: list[Part] = []
        self.preempted: list[PagedRow] = []
        self.paused: list[PagedRow] = []
        self.joined: list[PagedRow] = []
        self.ended: list[PagedRow] = []
        self.shape = NOTHING


class Takes:
    """The rows in step by the pass in which they take a block of `size` tokens, modulo `size`.

    Attributes:
        later: how many passes after that, modulo `size`, they may give a block back.
    """

    __slots__ = ("count", "later", "rows", "size")

    def __init__(self, size: int, later: int) -> None:
        self.size = size
        self.later = later
        self.count = 0
        self.rows: list[dict[PagedRow, None]] = [{} for _ in range(size)]

    def add(self, row: PagedRow) -> None:
        self.rows[-row.base % self.size][row] = None
        self.count += 1

    def remove(self, row: PagedRow) -> None:
        del self.rows[-row.base % self.size][row]
        self.count -= 1

    def blocks(self, first: int, passes: int) -> int:
        """Return the blocks that all rows take in `passes` passes, when `first` passes are made."""
        size = self.size
        total = passes // size * self.count
        for k in range(passes % size):
            total += len(self.rows[(first + k) % size])
        return total


class InStep:
    """The running rows that just decode, and when their blocks change.

    Attributes:
        count, bases: rows, and the sum of their `base`.
        last_order: no row was admitted after this one.
        only_takes: rows only take blocks while they decode, and so these are counted, too.
        takes: of each group of caches where rows only take blocks, else of each kind of them.
        window: tokens of the model's windows; 0: none.
        growing, growing_bases: rows with fewer tokens than a window, and the sum of their `base`.
    """

    __slots__ = (
        "_cache", "_ends", "_fresh", "bases", "count", "growing", "growing_bases", "last_order",
        "only_takes", "takes", "window",
    )  # fmt: skip

    def __init__(self, cache: KVCache, window: int) -> None:
        self._cache = cache
        self.window = window
        self.count = self.bases = self.last_order = self.growing = self.growing_bases = 0
        self.only_takes = cache.only_takes
        kinds = [(group.block, group.later) for group in cache.groups]
        if not self.only_takes:
            kinds = list(dict.fromkeys(kinds))
        self.takes = [Takes(size, later) for size, later in kinds]
        # a heap of (last pass, order, row); an entry is stale if the row left, or has another one
        self._ends: list[tuple[int, int, PagedRow]] = []
        self._fresh: list[PagedRow] = []  # joined since the last pass was planned

    def join(self, row: PagedRow, passes: int) -> None:
        """Count a row that has made `passes` passes, with its `computed` and `left` tokens."""
        row.in_step = True
        row.joined = passes
        row.base = row.computed - passes
        row.last = passes + row.left
        self.count += 1
        self.bases += row.base
        if row.order > self.last_order:
            self.last_order = row.order
        for takes in self.takes:
            takes.add(row)
        if row.computed < self.window - 1:
            row.grows = True
            self.growing += 1
            self.growing_bases += row.base
        self._fresh.append(row)
        heappush(self._ends, (row.last, row.order, row))

    def leave(self, row: PagedRow, passes: int) -> None:
        """Count a row no more; its `computed` and `left` tokens are kept up again."""
        for takes in self.takes:
            takes.remove(row)
        row.in_step = False
        row.computed = row.base + passes
        row.left = row.last - passes
        row.gave = passes
        self.count -= 1
        self.bases -= row.base
        if row.grows:
            self._is_grown(row)
        if not self.count:
            self.last_order = 0
        if self.only_takes:
            self._cache.catch_up(row, row.computed)

    def next_end(self) -> int:
        """Return the number of the pass that gives the next row its last token."""
        last, _, row = self._ends[0]
        while not row.in_step or row.last != last:
            heappop(self._ends)
            last, _, row = self._ends[0]
        return last

    def ended(self, passes: int) -> list[PagedRow]:
        """Return the rows that have their last token with pass number `passes`, in order."""
        found: list[PagedRow] = []
        ends = self._ends
        while ends and ends[0][0] <= passes:
            last, _, row = heappop(ends)
            is_twice = len(found) > 0 and found[-1] is row  # it left, and joined again
            if row.in_step and row.last == last and not is_twice:
                found.append(row)
        return found

    def due(self, first: int, passes: int) -> int:
        """Return the blocks that all rows take in `passes` passes, when `first` passes are made; of
        a model with rows that give none back.
        """
        total = 0
        for takes in self.takes:
            total += takes.blocks(first, passes)
        return total

    def is_awake(self, row: PagedRow, passes: int) -> bool:
        """Return whether a row may take or give a block in the pass after `passes`."""
        for takes in self.takes:
            over = (row.base + passes) % takes.size
            if over == 0 or over == takes.later:
                return True
        return row.joined == passes

    def awake(self, passes: int) -> list[PagedRow]:
        """Return the rows that may take or give a block in the pass after `passes`. A row that has
        just joined may still have blocks that it could have given back before.
        """
        found: dict[PagedRow, None] = {}
        for takes in self.takes:
            found.update(takes.rows[passes % takes.size])
            if takes.later:
                found.update(takes.rows[(passes - takes.later) % takes.size])
        for row in self._fresh:
            if row.in_step and row.joined == passes:
                found[row] = None
        self._fresh.clear()
        return list(found)

    def alike(self, row: PagedRow) -> int:
        """Return up to which pass a row's blocks do not depend on the order of rows, and the part
        of its window that it reads grows as before.
        """
        until = self.window - 1 if row.grows else NEVER
        for group in self._cache.groups:
            until = min(until, group.last_alike(row))
        return until - row.base

    def inside(self, passes: int) -> int:
        """Return how many tokens of their windows all rows read in the pass after `passes`. Rows
        that read whole windows from this pass on grow no more.
        """
        if self.growing:
            takes = self.takes[0]
            for row in takes.rows[(passes - self.window + 1) % takes.size]:
                if row.grows and row.base + passes == self.window - 1:
                    self._is_grown(row)
        grown = (self.count - self.growing) * (self.window - 1)
        return grown + self.growing_bases + self.growing * passes

    def _is_grown(self, row: PagedRow) -> None:
        row.grows = False
        self.growing -= 1
        self.growing_bases -= row.base


class VllmScheduler:
    """The passes of one engine: `schedule` plans a pass, `commit` makes it, `settle` tells the
    scheduler the tokens of the passes that are done.

    Args:
        flags: vLLM's.
        blocks: of the cache, without the one that vLLM never gives out.
        block_tokens: of a block, where the model has one group of full attention.
        caches: the cache groups of any other model.
        ahead: a pass is planned while the one before it runs (`async_scheduling`).
        reserves: a request is admitted only if its whole input would fit, not only its next pass
            (`scheduler_reserve_full_isl`).
        drafts: of speculative decoding.
        longest: tokens that a request may have, vLLM's `max_model_len`; 0: as the cache holds.
        hash_lookahead: tokens behind a block that its key covers, too (EAGLE and MTP, vLLM 0.33).
        release: of vLLM; None: not known, and taken for 0.31 or 0.32.

    Raises InputError where vLLM would not start, or what it does then is not modelled.

    Attributes:
        pool: the blocks of the cache.
        waiting: rows that are not admitted; the first one is next.
        running: rows in the order of their admission.
        least_free: the fewest blocks that were free in a pass of a leap in which rows also give
            blocks back.
    """

    def __init__(
        self,
        flags: VllmPolicy,
        blocks: int,
        block_tokens: int,
        *,
        caches: CacheSettings | None = None,
        ahead: bool = False,
        reserves: bool = True,
        drafts: DrawnDrafts | None = None,
        longest: int = 0,
        hash_lookahead: int = 0,
        release: Release | None = None,
    ) -> None:
        groups: Sequence[CacheGroup] = [CacheGroup("full", "", block_tokens, 1, block_tokens)]
        window = 0
        if caches is not None:
            caches.refuse(blocks, flags, ahead=ahead)
            groups = caches.groups
            window = caches.window
            longest = caches.max_model_len
        if drafts is not None:
            _refuse_drafts(drafts, flags, groups)
        self._keeps_known = release is not None and release >= KEEPS_KNOWN
        self._caps_alone = release is not None and release < SPARES_ALONE
        self._late = int(ahead)  # passes with outputs that are not known when one is planned
        self._longest: int = longest or blocks * block_tokens
        uses_states = drafts is not None and drafts.uses_states
        self._cache = KVCache(
            groups,
            blocks,
            longest=self._longest,
            caches=flags.prefix_caching,
            in_flight=flags.max_num_batched_tokens * (1 + self._late),
            late=self._late,
            retention=caches.retention if caches is not None else 0,
            rehashes=not self._keeps_known,
            drafts=drafts.tokens if drafts is not None else 0,
            drops_last=uses_states and not hash_lookahead,
        )
        self.pool = self._cache.pool
        self.waiting: deque[PagedRow] = deque()
        self.running: dict[PagedRow, None] = {}
        self._most_rows: int = flags.max_num_seqs
        self._most_tokens: int = flags.max_num_batched_tokens
        self._threshold: int = flags.long_prefill_token_threshold
        self._interval: int = flags.prefill_schedule_interval
        self._chunked: bool = flags.chunked_prefill
        self._reserve = int(flags.watermark * (blocks + 1))
        self._reserves_input = reserves
        self._drafts = drafts
        self._count: int = drafts.tokens if drafts is not None else 0
        self._lookahead = self._count if uses_states else 0
        self._hash_lookahead = hash_lookahead
        self._in_step = InStep(self._cache, window)
        self._can_step: bool = self._cache.can_step and drafts is None
        self._single: list[PagedRow] = []  # the running rows that are not in step, in order
        # passes and admissions so far, and passes that only preempted since the last token
        self._passes = self._admissions = self._fruitless = 0
        self.least_free: int = blocks
        self._plan: PlannedPass | None = None  # the pass that is planned, but not made
        self._under_way: deque[list[Part]] = deque()  # made passes with tokens that are not known
        self._last_prefill = -self._interval  # the last pass with a prefill
        self._bound = False  # the last pass that let prefills in left requests waiting
        self._defers = False  # the planned pass has no prefill
        self._check_threshold()

    def _check_threshold(self) -> None:
        if self._count and 0 < self._threshold < 1 + self._count:
            raise InputError(
                f"long_prefill_token_threshold is {self._threshold}, and a row with "
                f"{self._count} drafts computes {1 + self._count} tokens in a pass",
                "raise it, or leave it at 0",
            )

    def add(self, row: PagedRow) -> None:
        """Let a request arrive."""
        row.tables = [group.table() for group in self._cache.groups]
        self.waiting.append(row)

    def change(self, settings: Mapping[str, Value]) -> None:
        """Set flags anew, from the next pass on. `policy` changes nothing: no request has a
        priority. Raises ValueError for a flag that a running vLLM cannot change.
        """
        for name, value in settings.items():
            if name == "max_num_seqs":
                self._most_rows = int(value)
            elif name == "max_num_batched_tokens":
                self._most_tokens = int(value)
            elif name == "long_prefill_token_threshold":
                self._threshold = int(value)
                self._check_threshold()
            elif name == "watermark":
                self._reserve = int(float(value) * (self.pool.blocks + 1))
            elif name == "scheduler_reserve_full_isl":
                self._reserves_input = bool(value)
            elif name != "policy":
                raise ValueError(f"{name} is no setting of a running vLLM")

    def schedule(self) -> PlannedPass:
        """Plan the next pass, and take its blocks. Raises SimulationStalledError where requests
        wait and none will ever run.
        """
        plan = PlannedPass()
        for group in self._cache.states:
            group.new.clear()
        self._defers = self._interval > 1 and self._defers_prefills()
        most = self._most_tokens  # of one row
        if self._threshold and (self._caps_alone or len(self.running) + len(self.waiting) > 1):
            most = self._threshold
        budget = self._plan_running(plan, most)
        admitted = self._admissions
        if self.waiting and not plan.preempted:
            self._admit(plan, budget, most)
        if self._interval > 1:
            self._count_prefills(plan, admitted)
        self._complete(plan)
        self._plan = plan
        if not plan.rows:
            self._refuse_stuck(plan)
        return plan

    def _plan_running(self, plan: PlannedPass, most: int) -> int:
        """Plan the running rows in order. Returns the tokens that are left of the pass."""
        budget = self._most_tokens
        passes = self._passes
        in_step = self._in_step
        rows = self._single
        counted = False  # the tokens of the rows in step are subtracted from `budget`
        if in_step.count:
            if self._may_lack_tokens():
                rows = list(self.running)
            else:
                counted = True
                budget -= in_step.count
                rows = self._with_awake()
        done = 0  # the order of the last row that was looked at
        for row in rows:
            if budget <= 0 and not (counted and row.in_step):
                break
            if not row.runs:
                continue  # it was preempted for a row before it
            done = row.order
            if row.in_step:
                if in_step.is_awake(row, passes) and not self._take(
                    row, row.base + passes, 1, plan
                ):
                    break
                if not counted:
                    budget -= 1
                continue
            if row.expected and row.computed + 2 - row.expected >= row.prompt + row.limit:
                continue  # it ends with the pass that is under way
            if self._defers and row.is_chunk:
                continue
            new = row.known + row.drafts + row.expected - row.computed
            new = min(min(new, most), min(budget, self._longest - row.computed - 1))
            if self._cache.states:
                new = self._cut(row, row.computed, new)
            if new <= 0:
                continue
            if not self._take(row, row.computed, new, plan):
                break
            drafts = 0
            if row.drafts:
                drafts = max(0, min(row.drafts, new + row.computed - row.known - row.expected))
                row.drafts = 0
            plan.parts.append(Part(row, row.computed, new, drafts))
            budget -= new
        if in_step.count and not counted and done < in_step.last_order:
            for row in rows:  # the pass has no tokens left for these
                if row.in_step and row.order > done:
                    self._leave(row)
        if plan.preempted:
            self._single = [row for row in self._single if row.runs]
        return budget

    def _may_lack_tokens(self) -> bool:
        """Return whether the pass may have too few tokens for a row in step: more rows run than it
        has tokens, or a chunk is before a row in step.
        """
        if len(self.running) > self._most_tokens:
            return True
        last = self._in_step.last_order
        for row in self._single:
            if row.order > last:
                return False
            if row.is_chunk:
                return True
        return False

    def _with_awake(self) -> list[PagedRow]:
        """Return the rows to look at, in order: all that are not in step, and of the rows in step
        those that take or give a block. Where all blocks are free that rows in step just take, they
        take them at once.
        """
        in_step = self._in_step
        if in_step.only_takes:
            due = in_step.due(self._passes, 1)
            most = len(in_step.takes) * (
                self._most_tokens // self._cache.smallest + len(self._single)
            )  # that all others may take
            if due + most <= self.pool.free:
                self.pool.take(due)
                return self._single
        awake = in_step.awake(self._passes)
        if not awake:
            return self._single
        awake += self._single
        awake.sort(key=_order)
        return awake

    def _take(self, row: PagedRow, computed: int, new: int, plan: PlannedPass) -> bool:
        """Give a running row blocks for `new` tokens more. Preempts rows for that, the last one
        first; returns False if the row itself was.
        """
        cache = self._cache
        running = self.running
        if row.in_step and self._in_step.only_takes:
            cache.catch_up(row, computed)
        in_flight = self._late if row.in_step else row.in_flight
        tokens = min(computed + new + self._lookahead, self._longest)
        while not cache.extend(row, computed, tokens, computed - in_flight):
            last = next(reversed(running))
            self._preempt(last)
            plan.preempted.append(last)
            if last is row:
                return False
        if not row.in_step:
            cache.register(row, min(computed + new, row.known - self._hash_lookahead))
        return True

    def _preempt(self, row: PagedRow) -> None:
        """Take a row's blocks. It waits before all others, to be computed anew."""
        if row.in_step:
            self._leave(row)
        self._cache.release(row)
        row.stale = row.in_flight
        row.computed = row.expected = row.drafts = 0
        row.gave = NO_PASS
        row.runs = row.entered = False
        row.preempted = True
        del self.running[row]
        self.waiting.appendleft(row)

    def _admit(self, plan: PlannedPass, budget: int, most: int) -> None:
        """Admit waiting requests while there are rows, tokens and blocks."""
        cache = self._cache
        running = self.running
        waiting = self.waiting
        # A row with one token to compute is padded with drafts, so that all rows of the pass are
        # alike for a CUDA graph; where a chunk runs, they are not.
        pads = self._count > 0 and not any(part.row.is_chunk for part in plan.parts)
        runs = len(plan.parts) > 0
        while waiting and budget > 0 and len(running) < self._most_rows:
            row = waiting[0]
            hits, found = cache.look_up(row)
            new = row.known - found
            if self._defers and new > 1:
                return
            padded = pads and new == 1 and (runs or found > 0)
            padded = padded and found + 1 + self._count + 1 <= self._longest
            if padded:
                new = 1 + self._count
                if new > budget:
                    return
            new = min(new, most)
            if new > budget:
                if not self._chunked:
                    return
                new = budget
            if cache.states:
                new = self._cut(row, found, new)
                if new <= 0:
                    return
                if padded and new < 1 + self._count:
                    new = 1
                    padded = False
            tokens = min(found + new + self._lookahead, self._longest)
            reserve = self._reserve if running else 0
            if not cache.admit(row, hits, found, tokens, reserve, whole=self._reserves_input):
                return
            cache.count(row, found)
            cache.register(row, min(found + new, row.known - self._hash_lookahead))
            waiting.popleft()
            running[row] = None
            self._single.append(row)
            self._admissions += 1
            row.order = self._admissions
            row.runs = True
            row.computed = found
            plan.parts.append(Part(row, found, new, self._count if padded else 0, padded))
            budget -= new

    def _cut(self, row: PagedRow, start: int, new: int) -> int:
        """Return how many of `new` tokens behind `start` a chunk has that ends where states are
        kept.
        """
        last_start = max(row.prompt, row.known - 1)
        if start >= last_start:
            return new
        cache = self._cache
        size = cache.smallest
        first = cache.states[0]
        end = start + new
        keeps = end >= last_start
        for group in cache.states:
            keeps = keeps and group.checkpoints
        last_state = first.last_state(last_start, cache.whole)
        keeps = keeps and first.can_keep_inside(start, end, last_state)
        if end < last_start:
            aligned = end // size * size
            if aligned > start or size <= min(self._most_tokens, self._threshold or size):
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

    def _complete(self, plan: PlannedPass) -> None:
        """Note what the planned pass changes in its rows, and what it computes in all."""
        in_step = self._in_step
        window = in_step.window
        number = self._passes + 1
        decodes = in_step.count
        cached = in_step.bases + decodes * self._passes
        inside = in_step.inside(self._passes) if window else 0
        growing = in_step.growing
        chunks = drafted = new = before = 0
        attended = new_inside = 0.0
        for part in plan.parts:
            row = part.row
            row.planned = number
            row.computed += part.new
            row.in_flight += part.new
            row.is_chunk = row.computed < row.known + row.expected
            part.samples = not row.is_chunk
            if self._late and part.samples:
                row.expected += 1 + part.drafts
                row.drafts = self._count
            if row.entered:
                decodes += 1
                cached += part.computed
                drafted += part.drafts
                if window:
                    inside += min(part.computed, window - 1)
                    growing += int(part.computed < window - 1)
                continue
            chunks += 1
            new += part.new
            before += part.computed
            attended += chunk_attended(part.computed, part.new)
            if window:
                new_inside += chunk_inside(part.computed, part.new, window)
        plan.rows = decodes + chunks
        plan.shape = StepShape(
            decodes, cached, chunks, new, attended, before, inside, new_inside, growing, drafted
        )
        if plan.rows < len(self.running):
            plan.paused = [
                row
                for row in self._single
                if row.planned != number and row.gave == self._passes and row.left
            ]

    def commit(self, steps: int = 1) -> PlannedPass:
        """Make the planned pass and `steps` - 1 more of its rows; return it with the tokens that
        they give. The scheduler itself knows them with `settle`.
        """
        plan = self._plan
        assert plan is not None
        self._plan = None
        before = self._passes
        if steps > 1:
            self._leap(steps)
        self._passes = before + steps
        in_step = self._in_step
        self._under_way.append(plan.parts)
        plan.decoding = in_step.count
        ended = plan.ended
        for part in plan.parts:
            row = part.row
            if not part.samples:
                continue
            row.entered = True
            if part.drafts and not part.padded:
                self._verify(part, plan)
            if not row.left:
                continue  # it has ended, which the scheduler does not know
            gets = min(1 + part.accepted, row.left)
            row.left -= gets
            plan.accepted += gets - 1
            if row.gave == before:
                plan.decoding += 1
            else:
                plan.joined.append(row)
            row.gave = self._passes
            if not row.left:
                ended.append(row)
        singles = len(ended)
        for row in in_step.ended(self._passes):
            self._leave(row)
            ended.append(row)
        if 0 < singles < len(ended):
            ended.sort(key=_order)
        if plan.decoding or plan.joined:
            self._fruitless = 0
        plan.running = len(self.running)
        return plan

    def _verify(self, part: Part, plan: PlannedPass) -> None:
        """Draw how many drafts of a row's part are accepted."""
        assert self._drafts is not None
        row = part.row
        part.accepted = min(self._drafts.accepted(row.number, row.turn), part.drafts)
        row.turn += 1
        if row.left:
            plan.drafted += part.drafts

    def settle(self, *, idle: bool = False) -> bool:
        """Learn the tokens of the passes that are done, and free the blocks of rows that ended with
        them: of all passes, and with a queue of two of all but the last one, unless the engine is
        `idle` because nothing was planned. Returns whether there were such passes.
        """
        keep = 0 if idle else self._late
        learned = len(self._under_way) > keep
        while len(self._under_way) > keep:
            for part in self._under_way.popleft():
                self._learn(part)
        if self._can_step and not idle:
            self._join()
        return learned

    def _learn(self, part: Part) -> None:
        """Learn the tokens of a row's part."""
        row = part.row
        if row.ended:
            return
        row.in_flight -= part.new
        is_stale = row.stale > 0
        if is_stale:
            row.stale -= part.new
        if not part.samples:
            return
        gives = 1 + part.accepted
        kept = min(gives, row.end - row.known)
        row.known += kept
        has_ended = row.known == row.end
        if not is_stale:
            rejected = part.drafts - part.accepted
            row.computed -= rejected
            keeps = self._keeps_known or row.expected > 0
            if row.expected > 0:
                row.expected -= rejected + gives
            if has_ended:
                row.computed -= gives - kept
            if keeps and row.runs:
                tokens = row.computed - row.in_flight
                self._cache.register(row, min(tokens, row.known - self._hash_lookahead))
        if has_ended:
            self._cache.release(row)
            row.ended = True
            if row.runs:
                del self.running[row]
                self._single.remove(row)
            else:
                self.waiting.remove(row)  # it was preempted while its last token was under way
        elif self._drafts is not None and not self._late:
            row.drafts = self._drafts.offered(row.number, row.asked)
            row.asked += 1

    def _join(self) -> None:
        """Count the rows that just decode from now on."""
        late = self._late
        in_step = self._in_step
        takes = in_step.only_takes  # then tokens in flight make no difference for blocks
        joined = False
        for row in self._single:
            if (
                row.entered
                and row.gave == self._passes
                and row.left
                and (row.in_flight == late or (takes and row.expected == late))
                and row.known == row.computed + 1 - late
                and not row.watched
                and self._cache.can_join(row, row.computed)
            ):
                in_step.join(row, self._passes)
                joined = True
        if joined:
            self._single = [row for row in self._single if not row.in_step]
            for place, parts in enumerate(self._under_way):
                self._under_way[place] = [part for part in parts if not part.row.in_step]

    def _leave(self, row: PagedRow) -> None:
        """Plan a row in step on its own again. Of the passes under way the last one counts: the
        tokens of the one before it are known with the `settle` that follows.
        """
        flight = min(len(self._under_way), 1)
        self._in_step.leave(row, self._passes)
        row.known = row.computed + 1 - flight
        row.in_flight = flight
        row.expected = flight if self._late else 0
        self._cache.register(row, row.computed - self._late)
        single = self._single
        place = len(single)
        while place and single[place - 1].order > row.order:
            place -= 1
        single.insert(place, row)
        if flight:
            parts = self._under_way[-1]
            place = len(parts)
            while place and parts[place - 1].row.order > row.order:
                place -= 1
            part = Part(row, row.computed - 1, 1)
            part.samples = True
            parts.insert(place, part)

    def ahead(self) -> int:
        """Return how many passes, the planned one included, decode the same rows whatever arrives,
        at least 1. Only the last of them may give a row its last token, and all find the blocks
        that they need free.
        """
        plan = self._plan
        assert plan is not None
        in_step = self._in_step
        if not in_step.count or in_step.count < len(self.running) or plan.preempted:
            return 1
        cache = self._cache
        if self.waiting and (self._interval > 1 or not cache.is_aligned):
            return 1  # a prefill may be let in, or blocks that are given back may let one in
        most = in_step.next_end() - self._passes
        if not in_step.only_takes:
            for row in self.running:
                most = min(most, in_step.alike(row) - self._passes)
        if most < 2:
            return 1
        room = self.pool.free if cache.is_aligned else self.pool.plain
        at_most = 0
        for group in cache.groups:
            at_most += ((most - 1) // group.block + 1) * in_step.count
        if at_most <= room:
            return most
        # rows that decode take more than they give
        return 1 + bisect_left(range(2, most + 1), True, key=lambda steps: self._net(steps) > room)

    def _net(self, steps: int) -> int:
        """Return the blocks that the rows take in `steps` passes, without the planned one."""
        if self._in_step.only_takes:
            return self._in_step.due(self._passes + 1, steps - 1)
        total = 0
        for row in self.running:
            tokens = row.base + self._passes + steps
            for group in self._cache.groups:
                total += group.net(row, tokens, tokens - 1 - self._late)
        return total

    def _leap(self, steps: int) -> None:
        """Take and give the blocks of `steps` passes of rows that are all in step; the planned pass
        has its own already.
        """
        in_step = self._in_step
        if in_step.only_takes:
            self.pool.take(in_step.due(self._passes + 1, steps - 1))
            return
        for passes in range(self._passes + 1, self._passes + steps):
            for row in in_step.awake(passes):
                computed = row.base + passes
                self._cache.extend(row, computed, computed + 1, computed - self._late)
            self.least_free = min(self.least_free, self.pool.free)

    def rows(self) -> list[tuple[int, ...]]:
        """Return the planned pass as vLLM logs it: of each row its number, computed tokens, new
        tokens, and with speculative decoding the drafts among these.
        """
        assert self._plan is not None
        parts = {part.row: part for part in self._plan.parts}
        found: list[tuple[int, ...]] = []
        for row in self.running:
            if row.in_step:
                found.append((row.number, row.base + self._passes, 1))
            elif row in parts:
                part = parts[row]
                drafts = (part.drafts,) if self._drafts is not None else ()
                found.append((row.number, part.computed, part.new, *drafts))
        return found

    def held(self, number: int) -> list[int]:
        """Return how many blocks of each group a running request holds, by its number."""
        for row in self.running:
            if row.number == number:
                if row.in_step and self._in_step.only_takes:
                    self._cache.catch_up(row, row.base + self._passes + 1)
                return [group.held(row) for group in self._cache.groups]
        return []

    def _defers_prefills(self) -> bool:
        """Return whether the next pass has no prefill: a recent one had one, and rows decode."""
        if self._bound or self._passes + 1 - self._last_prefill >= self._interval:
            return False
        return any(not row.is_chunk for row in self.running)

    def _count_prefills(self, plan: PlannedPass, admitted: int) -> None:
        """Note whether the planned pass has a prefill, and whether it leaves requests waiting. Rows
        after number `admitted` were admitted into it.
        """
        if not plan.preempted and not self._defers:
            self._bound = len(self.waiting) > 0
        for part in plan.parts:
            row = part.row
            prefills = not row.entered
            if row.order > admitted:
                prefills = part.computed < row.known - 1
            if prefills:
                self._last_prefill = self._passes + 1

    def _refuse_stuck(self, plan: PlannedPass) -> None:
        """Raise SimulationStalledError if nothing will ever run."""
        blocks = self.pool.blocks
        if plan.preempted:
            self._fruitless += 1
            if self._fruitless > FRUITLESS_MAX:
                raise SimulationStalledError(
                    f"the cache of {blocks:,} blocks is too small: a request of "
                    f"{plan.preempted[-1].known:,} tokens is admitted and preempted again and "
                    "again, and nothing else runs",
                    "give more memory, or lower max_model_len: vLLM would do the same for ever",
                )
        elif self.waiting and not self.running:
            raise SimulationStalledError(
                f"the cache of {blocks:,} blocks is too small: a request of "
                f"{self.waiting[0].known:,} tokens is never admitted, though nothing else runs",
                "give more memory, or lower max_model_len: vLLM would wait for ever",
            )


def _refuse_drafts(drafts: DrawnDrafts, flags: VllmPolicy, groups: Sequence[CacheGroup]) -> None:
    """Raise InputError for what is not modelled beside speculative decoding."""
    if flags.prefill_schedule_interval > 1:
        raise InputError(
            f"prefill_schedule_interval is {flags.prefill_schedule_interval}, which is not "
            "modelled with speculative decoding: no passes of vLLM with both were compared",
            "leave it at 1",
        )
    if drafts.uses_states and len(groups) > 1:
        raise InputError(
            f"drafts by '{drafts.method}' are not modelled with {len(groups)} groups of caches: "
            "vLLM drops the last block of the groups that draft, and looks the others up again",
            "leave engine.vllm.drafts out of the recipe, or draft by ngram",
        )
    if any(group.kind == "state" and group.mode == "align" for group in groups):
        raise InputError(
            "speculative decoding is not modelled with states and prefix caching: vLLM moves the "
            "blocks of drafts in place",
            "leave engine.vllm.drafts out of the recipe, or set prefix_caching to false",
        )
