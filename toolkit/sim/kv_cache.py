"""The KV cache of one simulated engine: a pool of blocks, shared by the groups of a model's layers
(vLLM's `v1/core/block_pool.py`, `kv_cache_coordinator.py` and `single_type_kv_cache_manager.py`).

A group says which of a row's blocks it keeps: full attention all of them, a sliding window the ones
that it still sees, a state one or two. `KVCache` has all groups and their pool.

A block that is full of known tokens gets a key: a request with the same tokens finds it. vLLM's key
is a hash of all tokens up to the block's end; here it is a place in a tree of contents (`Node`).
The pool gives out free blocks without a key first, then blocks with a key, freed longest ago first,
and of one request the last blocks first.

Neighbouring blocks with keys that the same rows hold are one `Run`. A prompt therefore costs as
much as it has forks, not blocks. Blocks without a key are only counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, lcm

from toolkit.catalogue.caches import FULL_KINDS
from toolkit.catalogue.resolved import CacheGroup
from toolkit.errors import InputError

STATE_WINDOW = 2  # vLLM gives a state back when a window of this many tokens would have passed it
NEVER = 1 << 60
NO_PASS = -1  # a row got no token since it was admitted


def ceil_div(tokens: int, size: int) -> int:
    """Return how many blocks of `size` tokens hold `tokens` tokens."""
    return -(-tokens // size)


class Node:
    """A stretch of content: the tokens `start` to `end` - 1 of some requests, after the tokens of
    `parent`. Requests that share a beginning share the nodes of that beginning.

    Attributes:
        runs: blocks with keys that end within this stretch, in the order of registration.
    """

    __slots__ = ("end", "parent", "runs", "start")

    def __init__(self, parent: Node | None, start: int, end: int) -> None:
        self.parent = parent
        self.start = start
        self.end = end
        self.runs: list[Run] = []

    def until(self, tokens: int) -> Node:
        """Return the node that ends after the first `tokens` tokens of this content,
        0 < `tokens` <= `end`. Cuts a node in two where `tokens` is inside it.
        """
        node = self
        while node.start >= tokens:
            assert node.parent is not None
            node = node.parent
        if tokens < node.end:
            lower = Node(node.parent, node.start, tokens)
            node.parent = lower
            node.start = tokens
            return lower
        return node


class Run:
    """The blocks `first` to `stop` - 1 of a group, with keys; they end within the tokens of `node`.
    A run without a node is one block without a key.

    Attributes:
        tables: of the rows that hold the blocks. A run without tables is free, and in the pool's
            queue between `before` and `after`.
    """

    __slots__ = ("after", "before", "first", "group", "node", "stop", "tables")

    def __init__(self, group: int, node: Node | None, first: int, stop: int) -> None:
        self.group = group
        self.node = node
        self.first = first
        self.stop = stop
        self.tables: list[BlockTable] = []
        self.before: Run | None = None
        self.after: Run | None = None


class BlockTable:
    """A row's blocks in one group.

    Attributes:
        gone, length: the row holds the blocks at the places `gone` to `length` - 1.
        runs: the blocks among them that have keys, in order.
        looked: the blocks before this place got their keys, or will never get one.
    """

    __slots__ = ("gone", "length", "looked", "runs")

    def __init__(self) -> None:
        self.length = self.gone = self.looked = 0
        self.runs: list[Run] = []


class StateTable(BlockTable):
    """A row's states with prefix caching. Places before `gone` were given back.

    Attributes:
        states: the state at each place that has one: a run of one block.
        last: the place of the state before the current one; -1: there is none to give back.
        checkpoint: the planned pass keeps a state of this many tokens inside its chunk; 0: it keeps
            none.
        place: of the block for that state.
    """

    __slots__ = ("checkpoint", "last", "place", "states")

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[int, Run] = {}
        self.last = -1
        self.checkpoint = self.place = 0


class PagedRow:
    """A request in an engine: its tokens, its blocks in each group, and its place in the passes.

    Args:
        output: the true number of tokens that it will generate, which the scheduler does not see.
        limit: the most tokens that it may generate; less than `output` counts as `output`.
        watched: another request may look for its output while it runs.

    Attributes:
        number: the request's index.
        prompt, known: tokens of the prompt, and tokens with known values, outputs included.
        content: the last node of its prompt and output; None: it shares nothing.
        path: the nodes from its first token on; empty without prefix caching.
        tables: one for each group.
        junction: some groups had this many of its first tokens when it was looked up, but not all;
            0: there is no such place.
        preempted: whether it ever lost its blocks to another row.
        left: tokens of `output` that it did not get yet; while it is in step, as of its join.
        end: its tokens at its true end.
        mark: for the engine, which keeps times by row.
        computed: tokens in its cache with all planned passes, if all drafts are accepted.
        expected: tokens that the passes under way will give, if all drafts are accepted.
        in_flight: tokens of the passes under way; `stale` of them were planned before it was
            preempted.
        drafts: proposed, to be verified in its next pass.
        turn, asked: its passes with drafts so far, and how often drafts were asked for.
        order: its place in the order of admissions, from 1.
        is_chunk: it does not catch up with the pass that was planned last.
        entered: its input is complete since it was last admitted.
        runs, ended: it is among the running rows; it has ended.
        gave, planned: the number of the last pass that gave it a token, and that it was part of.
        in_step: it is counted; the attributes from `computed` to `in_flight` are not kept up.
        base: in step, its computed tokens before pass n + 1 are `base` + n.
        last: the number of the pass that gives its last token.
        joined: how many passes were made when it came in step.
        grows: it has fewer tokens than its window.
    """

    __slots__ = (
        "asked", "base", "computed", "content", "drafts", "end", "ended", "entered", "expected",
        "gave", "grows", "in_flight", "in_step", "is_chunk", "joined", "junction", "known", "last",
        "left", "limit", "mark", "number", "order", "path", "planned", "preempted", "prompt",
        "runs", "stale", "tables", "turn", "watched",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        prompt: int,
        output: int,
        *,
        limit: int = 0,
        content: Node | None = None,
        watched: bool = False,
    ) -> None:
        self.number = number
        self.prompt = self.known = prompt
        self.content = content
        self.path: list[Node] = []
        self.tables: list[BlockTable] = []
        self.left = output
        self.end = prompt + output
        self.limit = max(limit, output)
        self.watched = watched
        self.mark = self.computed = self.expected = self.in_flight = self.stale = 0
        self.junction = self.drafts = self.turn = self.asked = self.order = 0
        self.gave = self.planned = NO_PASS
        self.base = self.last = self.joined = 0
        self.preempted = self.is_chunk = self.entered = self.runs = self.ended = False
        self.in_step = self.grows = False

    def node(self, end: int) -> Node:
        """Return the node of the token before `end`."""
        for node in self.path:
            if end <= node.end:
                return node
        raise IndexError(end)


class BlockPool:
    """The blocks of one engine; at first all `blocks` are `free`.

    Attributes:
        plain: free blocks without a key.
        queries, hits: tokens of the requests that were admitted for the first time, and how many of
            these tokens were found in the cache.
        preempted_queries, preempted_hits: the same of requests that were admitted again.
    """

    __slots__ = (
        "_queue", "blocks", "free", "hits", "plain", "preempted_hits", "preempted_queries",
        "queries",
    )  # fmt: skip

    def __init__(self, blocks: int) -> None:
        self.blocks = self.free = self.plain = blocks
        self.queries = self.hits = self.preempted_queries = self.preempted_hits = 0
        self._queue = Run(0, None, 0, 0)  # the head of a ring of free runs; `after` goes out first
        self._queue.before = self._queue.after = self._queue

    def take(self, count: int) -> None:
        """Give out `count` blocks; at least as many are free."""
        self.free -= count
        self.plain -= count
        while self.plain < 0:
            run = self._queue.after
            assert run is not None
            size = run.stop - run.first
            if size > -self.plain:
                run.stop += self.plain
                self.plain = 0
                return
            self.plain += size
            _unlink(run)
            self.forget(run)

    def give_plain(self, count: int) -> None:
        """Take back `count` blocks without keys."""
        self.free += count
        self.plain += count

    def keep(self, run: Run) -> None:
        """Take back the blocks of a run that is new: its keys are given out last."""
        self.free += run.stop - run.first
        _link(run, self._queue.before)

    def give(self, run: Run, table: BlockTable) -> None:
        """Take back the blocks of a run from the row of `table`."""
        run.tables.remove(table)
        if run.tables:
            return
        self.free += run.stop - run.first
        if run.node is None:
            self.plain += 1
        else:
            _link(run, self._queue.before)

    def hold(self, run: Run, table: BlockTable) -> None:
        """Let one more row hold the blocks of a run."""
        if not run.tables:
            _unlink(run)
            self.free -= run.stop - run.first
        run.tables.append(table)

    def forget(self, run: Run) -> None:
        """Take the keys from the blocks of a run: no request finds them any more."""
        if run.node is not None:
            run.node.runs.remove(run)
            run.node = None

    def cut(self, run: Run, first: int, stop: int) -> Run:
        """Make the blocks `first` to `stop` - 1 of a run a run of their own, and return it."""
        if run.first < first:
            self._split(run, first)
        return self._split(run, stop) if stop < run.stop else run

    def part(self, run: Run, stop: int) -> Run:
        """Make the blocks of a run before `stop` a run without tables, and return it."""
        assert run.node is not None
        part = Run(run.group, run.node, run.first, stop)
        run.first = stop
        runs = run.node.runs
        runs.insert(runs.index(run), part)
        return part

    def _split(self, run: Run, stop: int) -> Run:
        part = self.part(run, stop)
        if not run.tables:
            _link(part, run)  # the last blocks go out first
        for table in run.tables:
            part.tables.append(table)
            table.runs.insert(table.runs.index(run), part)
        return part


class Hit:
    """Cached blocks of one group that a waiting row can use, from place `first` on. The places
    before need no block.

    Attributes:
        stop: the place behind the last block.
        pieces: of runs, as (run, first place, place behind the last).
    """

    __slots__ = ("first", "pieces", "stop")

    def __init__(self, first: int = 0) -> None:
        self.first = self.stop = first
        self.pieces: list[tuple[Run, int, int]] = []

    def add(self, run: Run, stop: int) -> None:
        """Add the next blocks, up to the place before `stop`."""
        first = self.stop
        if self.pieces and self.pieces[-1][0] is run:
            first = self.pieces.pop()[1]
        self.pieces.append((run, first, stop))
        self.stop = stop

    def cut(self, stop: int) -> None:
        """Leave out the blocks from place `stop` on."""
        pieces = self.pieces
        while pieces and pieces[-1][2] > stop:
            run, first, _ = pieces.pop()
            if first < stop:
                pieces.append((run, first, stop))
        self.stop = pieces[-1][2] if pieces else self.first

    def free(self, first: int) -> int:
        """Return how many of the blocks from place `first` on no row holds."""
        count = 0
        for run, begin, stop in self.pieces:
            if not run.tables and stop > first:
                count += stop - max(begin, first)
        return count


class FullGroup:
    """Full attention: a row keeps all of its blocks. The other groups differ in single rules.

    Attributes:
        most: a request is admitted with room for at most this many blocks, because later ones take
            the place of blocks that are given back meanwhile; 0: there is no such limit.
        later: how many tokens after it took a block, modulo a block, a row that decodes gives one
            back, if it gives any.
    """

    __slots__ = ("block", "cache", "is_full", "later", "most", "number", "pool", "window")

    def __init__(self, number: int, group: CacheGroup, cache: KVCache) -> None:
        self.number = number
        self.block = group.block
        self.window = group.window
        self.cache = cache
        self.pool = cache.pool
        self.is_full = True
        self.most = self.later = 0

    def table(self) -> BlockTable:
        """Return the table of a row without blocks."""
        return BlockTable()

    def skipped(self, tokens: int) -> int:
        """Return how many first tokens a row of `tokens` computed ones no longer looks at."""
        return 0

    def needed(
        self, row: PagedRow, tokens: int, hit: Hit | None, computed: int, whole: bool
    ) -> int:
        """Return how many free blocks a row takes to hold `tokens` tokens, those of `hit` included.

        Args:
            hit: what a waiting row has found; None: the row runs.
            computed: tokens that are in the cache.
            whole: the question is whether its whole input would fit, not what a pass takes.
        """
        required = ceil_div(tokens, self.block)
        if whole and 0 < self.most < required:
            required = self.most
        if hit is None:
            return max(required - row.tables[self.number].length, 0)
        skipped = self.skipped(computed) // self.block
        return max(required - max(skipped, hit.stop), 0) + hit.free(skipped)

    def adopt(self, row: PagedRow, hit: Hit, found: int) -> None:
        """Give a row the blocks of its hit; all groups have its first `found` tokens."""
        table = row.tables[self.number]
        skipped = self.skipped(found) // self.block
        for run, first, stop in hit.pieces:
            if stop > skipped:
                part = self.pool.cut(run, max(first, skipped), stop)
                self.pool.hold(part, table)
                table.runs.append(part)
        table.length = table.looked = max(skipped, hit.stop)
        table.gone = min(max(skipped, hit.first), table.length)

    def allocate(self, row: PagedRow, tokens: int) -> None:
        """Give a row the blocks that hold `tokens` tokens."""
        table = row.tables[self.number]
        new = ceil_div(tokens, self.block) - table.length
        if new > 0:
            self.pool.take(new)
            table.length += new

    def skip(self, row: PagedRow, processed: int) -> None:
        """Take back what a row no longer looks at. The outputs of `processed` tokens are known."""
        table = row.tables[self.number]
        stop = min(self.skipped(processed) // self.block, table.length)
        if stop <= table.gone:
            return
        pool = self.pool
        plain = stop - table.gone
        table.gone = stop
        given: list[Run] = []
        while table.runs and table.runs[0].first < stop:
            run = table.runs[0]
            plain -= min(run.stop, stop) - run.first
            if stop < run.stop and not given and len(run.tables) == 1:  # the usual case
                pool.keep(pool.part(run, stop))
                break
            given.append(pool.cut(run, run.first, min(run.stop, stop)))
            del table.runs[0]
        pool.give_plain(plain)
        for run in reversed(given):
            pool.give(run, table)

    def register(self, row: PagedRow, tokens: int) -> None:
        """Give keys to the full blocks of the first `tokens` tokens, which are in the row's blocks
        or will be there with the planned pass.
        """
        table = row.tables[self.number]
        unit = self.cache.unit
        stop = min(tokens, row.known // unit * unit) // self.block
        if stop > table.looked:
            for first, last in self.kept(row, table.looked, stop):
                if last > table.gone:
                    self._give_keys(row, table, max(first, table.gone), last)
            table.looked = stop

    def register_end(self, row: PagedRow, tokens: int) -> None:
        """Give a key to the block with the prompt's last whole hash inside. No request looks for
        that key, but the block is given out later than a block without one.
        """
        unit = self.cache.unit
        table = row.tables[self.number]
        end = min((row.prompt - 1) // unit, row.known // unit) * unit
        place = end // self.block
        has_key = bool(table.runs) and table.runs[-1].stop > place
        if 0 < end <= tokens and end % self.block and place < table.length and not has_key:
            self.add(row.node(end), table, place, place + 1, -1 - self.number)

    def kept(self, row: PagedRow, start: int, stop: int) -> list[tuple[int, int]]:
        """Return which of the places `start` to `stop` - 1 have blocks that are kept for others."""
        return [(start, stop)]

    def release(self, row: PagedRow) -> None:
        """Take all blocks of a row back, the last one first."""
        table = row.tables[self.number]
        plain = table.length - table.gone
        for run in table.runs:
            plain -= run.stop - run.first
        self.pool.give_plain(plain)
        for run in reversed(table.runs):
            self.pool.give(run, table)
        table.runs.clear()
        table.length = table.gone = table.looked = 0

    def find(self, row: PagedRow, most: int, groups: Sequence[FullGroup]) -> tuple[list[Hit], int]:
        """Return what a row finds in each of `groups`, all of this kind, and the tokens up to its
        end, at most `most`.
        """
        hits = [group.leading(row, most // self.block) for group in groups]
        whole = self.cache.whole
        tokens = min([hit.stop for hit in hits]) * self.block // whole * whole
        for hit in hits:
            hit.cut(ceil_div(tokens, self.block))
        return hits, tokens

    def leading(self, row: PagedRow, limit: int) -> Hit:
        """Return the first cached blocks, at most `limit`, up to the first that is missing."""
        hit = Hit()
        size = self.block
        for node in row.path:
            stop = min(node.end // size, limit)
            while hit.stop < stop:
                run, until = _first_copy(node, self.number, hit.stop, stop)
                if run is None:
                    return hit
                hit.add(run, until)
        return hit

    def at(self, row: PagedRow, place: int) -> Run | None:
        """Return the block that was registered first for a place of the row's content."""
        node = row.node((place + 1) * self.block)
        return _first_copy(node, self.number, place, place + 1)[0]

    def held(self, row: PagedRow) -> int:
        """Return how many blocks a row holds."""
        table = row.tables[self.number]
        return table.length - table.gone

    def last_alike(self, row: PagedRow) -> int:
        """Return from how many tokens on the order of rows makes a difference for its blocks."""
        return NEVER

    def net(self, row: PagedRow, tokens: int, processed: int) -> int:
        """Return how many blocks more a row holds when it has decoded on to `tokens` tokens."""
        return ceil_div(tokens, self.block) - row.tables[self.number].length

    def _give_keys(self, row: PagedRow, table: BlockTable, at: int, stop: int) -> None:
        runs = table.runs
        if runs and runs[-1].group < 0:  # the block of `register_end`, which is full now
            self.pool.forget(runs.pop())
        for node in row.path:
            end = min(node.end // self.block, stop)
            if at < end:
                self.add(node, table, at, end, self.number)
                at = end

    def add(self, node: Node, table: BlockTable, at: int, stop: int, group: int) -> None:
        """Give keys to blocks that only this row holds, in a longer run or a new one."""
        runs = table.runs
        if runs:
            last = runs[-1]
            if last.node is node and last.stop == at and last.group == group:
                alone = len(last.tables) == 1
                for run in node.runs:
                    if run.group == group and run.first < stop and at < run.stop:
                        alone = False
                if alone:
                    last.stop = stop
                    return
        run = Run(group, node, at, stop)
        run.tables.append(table)
        node.runs.append(run)
        runs.append(run)


class WindowGroup(FullGroup):
    """A sliding window: a token looks at itself and at the `window` - 1 tokens before it. A prefix
    is usable if the `tail` of blocks with the last `window` - 1 tokens before its end is cached.
    """

    __slots__ = ("tail",)

    def __init__(self, number: int, group: CacheGroup, cache: KVCache) -> None:
        super().__init__(number, group, cache)
        self.is_full = False
        self.tail = ceil_div(self.window - 1, self.block)
        self.most = ceil_div(min(self.window - 1 + cache.in_flight, cache.longest), self.block) + 1
        self.later = (self.window - 1 + cache.late) % self.block

    def skipped(self, tokens: int) -> int:
        return max(0, tokens - self.window + 1)

    def kept(self, row: PagedRow, start: int, stop: int) -> list[tuple[int, int]]:
        size = self.block
        whole = self.cache.whole
        retention = self.cache.retention
        spans: list[tuple[int, int]] = []
        segment = whole if retention is None else retention
        if segment:
            per = segment // size
            if self.tail >= per:
                return [(start, stop)]
            ends = range(start // per * per + per, stop + per, per)
            spans += [(end - self.tail, end) for end in ends]
        if retention is not None:
            for tokens in (row.junction, row.prompt - 1):  # where a later request may go on
                end = tokens // whole * whole // size
                spans.append((end - self.tail, end))
        ranges: list[tuple[int, int]] = []
        for first, last in sorted(spans):
            first = max(first, start)
            last = min(last, stop)
            if ranges and first <= ranges[-1][1]:
                first = ranges.pop()[0]
            if first < last:
                ranges.append((first, last))
        return ranges

    def find(self, row: PagedRow, most: int, groups: Sequence[FullGroup]) -> tuple[list[Hit], int]:
        """Return the last whole tail; without one, the blocks from the first on, before which no
        window reaches.
        """
        size = self.block
        tail: list[list[Run]] = []  # the blocks of each place, from the right
        place = most // size - 1
        while place >= 0 and len(tail) < max(self.tail, 1):
            if tail or (place + 1) * size % self.cache.whole == 0:
                there = [group.at(row, place) for group in groups]
                tail.append([run for run in there if run is not None])
                if len(tail[-1]) < len(groups):
                    tail = []
            place -= 1
        hits = [Hit(place + 1 if tail else 0) for _ in groups]
        for blocks in reversed(tail):
            for hit, block in zip(hits, blocks, strict=True):
                hit.add(block, hit.stop + 1)
        return hits, hits[0].stop * size

    def last_alike(self, row: PagedRow) -> int:
        runs = row.tables[self.number].runs  # blocks with keys are queued in the order of rows
        return self._gives_at(runs[0].first) if runs else NEVER

    def _gives_at(self, place: int) -> int:
        """Return with how many tokens computed a row that decodes gives the block at a place."""
        return (place + 1) * self.block + self.window - 1 + self.cache.late

    def net(self, row: PagedRow, tokens: int, processed: int) -> int:
        gone = max(self.skipped(processed) // self.block - row.tables[self.number].gone, 0)
        return super().net(row, tokens, processed) - (gone if self.cache.is_aligned else 0)


class OneStateGroup(FullGroup):
    """States without prefix caching (mode `none`): a row holds a block, and one for each draft."""

    __slots__ = ("drafts",)

    def __init__(self, number: int, group: CacheGroup, cache: KVCache) -> None:
        super().__init__(number, group, cache)
        self.is_full = False
        self.drafts = cache.drafts * self.block  # in tokens

    def needed(
        self, row: PagedRow, tokens: int, hit: Hit | None, computed: int, whole: bool
    ) -> int:
        return super().needed(row, tokens + self.drafts, hit, computed, whole)

    def allocate(self, row: PagedRow, tokens: int) -> None:
        super().allocate(row, tokens + self.drafts)


class StateGroup(WindowGroup):
    """States with prefix caching (mode `align`): Mamba layers, linear attention. A block holds the
    state behind its last token, and chunks end where blocks end. A state is given back, kept and
    found like a window's tail of one block.

    Attributes:
        checkpoints: whether a layer can also keep a state inside a chunk.
        new: the keys of states that exist only after the planned pass.
    """

    __slots__ = ("checkpoints", "new")

    def __init__(self, number: int, group: CacheGroup, cache: KVCache) -> None:
        super().__init__(number, group, cache)
        self.window = STATE_WINDOW
        self.later = (self.window - 1 + cache.late) % self.block
        self.tail = 1
        self.checkpoints = group.checkpoints > 0
        self.new: set[tuple[Node | None, int]] = set()

    def table(self) -> BlockTable:
        return StateTable()

    def needed(
        self, row: PagedRow, tokens: int, hit: Hit | None, computed: int, whole: bool
    ) -> int:
        table = self._table(row)
        if hit is not None and hit.pieces:
            last = hit.pieces[-1][0]
            if (last.node, last.first) in self.new:
                return self.pool.blocks + 2  # more than there are: the row waits for a pass
        checkpoint = self._checkpoint(row, table, computed, tokens)
        if not whole:
            table.checkpoint = checkpoint
            table.place = ceil_div(tokens, self.block) - 2
        new = ceil_div(tokens, self.block) - table.length
        if hit is not None:
            new -= hit.stop
        new = max(min(new, 1 + (checkpoint > 0)), 0)
        return new + (hit.free(0) if hit is not None else 0)

    def adopt(self, row: PagedRow, hit: Hit, found: int) -> None:
        table = self._table(row)
        for run, first, _ in hit.pieces:
            self.pool.hold(run, table)
            table.states[first] = run
        table.length = table.looked = max(self.skipped(found) // self.block, hit.stop)

    def allocate(self, row: PagedRow, tokens: int) -> None:
        table = self._table(row)
        required = ceil_div(tokens, self.block)
        inner = table.checkpoint > 0
        before = table.length
        if required <= before and not inner:
            return
        if before:
            table.last = before - 1
        if before < required - 1:
            table.length = max(before, required - 1 - inner)
        if required > table.length:
            self.pool.take(required - table.length)
            for place in range(table.length, required):
                run = table.states[place] = Run(self.number, None, 0, 1)
                run.tables.append(table)
            table.length = required

    def skip(self, row: PagedRow, processed: int) -> None:
        table = self._table(row)
        states = table.states
        stop = min(self.skipped(processed) // self.block, table.length)
        if table.gone < stop:
            given = [place for place in states if table.gone <= place < stop]
            for place in sorted(given, reverse=True):
                self.pool.give(states.pop(place), table)
            table.gone = stop
        if 0 <= table.last < ceil_div(processed, self.block) - 1 and table.last in states:
            self.pool.give(states.pop(table.last), table)

    def register(self, row: PagedRow, tokens: int) -> None:
        table = self._table(row)
        before = table.looked
        super().register(row, tokens)
        self._register_inner(row, table, tokens)
        for place in range(before, table.looked):
            if place in table.states and table.states[place].node is not None:
                self.new.add((table.states[place].node, table.states[place].first))

    def kept(self, row: PagedRow, start: int, stop: int) -> list[tuple[int, int]]:
        return [(start, stop)] if self.cache.retention is None else super().kept(row, start, stop)

    def _is_kept(self, place: int) -> bool:
        """Return whether a state is kept though no known request returns to it."""
        retention = self.cache.retention
        if not retention:
            return retention is None
        return (place + 1) % max(retention // self.block, 1) == 0

    def release(self, row: PagedRow) -> None:
        table = self._table(row)
        for place in sorted(table.states, reverse=True):
            self.pool.give(table.states[place], table)
        row.tables[self.number] = self.table()

    def held(self, row: PagedRow) -> int:
        return len(self._table(row).states)

    def last_alike(self, row: PagedRow) -> int:
        table = row.tables[self.number]  # until the next block is taken or given
        return min(table.length * self.block, self._gives_at(table.gone))

    def last_state(self, tokens: int, size: int) -> int:
        """Return where the last state is that a request of `tokens` tokens can go on from."""
        return (tokens - 1) // size * size

    def can_keep_inside(self, start: int, end: int, tokens: int) -> bool:
        """Return whether a chunk from `start` to `end` can keep its state at `tokens`."""
        unit = self.cache.unit
        place = ceil_div(end, self.block) - 2
        return (
            self.checkpoints
            and start % unit == 0
            and place > (start - 1) // self.block
            and start + unit <= tokens
            and start < tokens < end
        )

    def _table(self, row: PagedRow) -> StateTable:
        table = row.tables[self.number]
        assert isinstance(table, StateTable)
        return table

    def _checkpoint(self, row: PagedRow, table: StateTable, start: int, end: int) -> int:
        """Return at how many tokens a pass over `start` to `end` keeps a state inside its chunk; 0:
        it keeps none.
        """
        if not self.checkpoints:
            return 0
        if self.cache.retention == 0 and end < max(row.prompt, row.known - 1):
            return 0  # only the last chunk of an input does
        tokens = self.last_state(end, self.cache.whole)
        place = ceil_div(end, self.block) - 2
        if place < 0 or not self.can_keep_inside(start, end, tokens):
            return 0
        return tokens if place >= table.length or place not in table.states else 0

    def _register_inner(self, row: PagedRow, table: StateTable, tokens: int) -> None:
        """Give a key to the state inside the chunk, if a later request can use it."""
        cache = self.cache
        if not table.checkpoint:
            if cache.rehashes and tokens > 0 and tokens == self.last_state(row.prompt, cache.unit):
                run = table.states.get(ceil_div(tokens, self.block) - 1)
                if run is not None:
                    if run.node is None:
                        self._give_key(row, run, tokens)
                    self.new.add((row.node(tokens), tokens // self.block - 1))
            return
        tokens = table.checkpoint
        run = table.states.get(table.place)
        if run is None:
            return
        is_kept = tokens % self.block == 0 and self._is_kept(tokens // self.block - 1)
        if not is_kept and tokens not in (self.last_state(row.prompt, cache.whole), row.junction):
            self.pool.forget(run)
            return
        node = row.node(tokens)
        if run.node is node and run.first == tokens // self.block - 1:
            return
        self._give_key(row, run, tokens)
        self.new.add((node, run.first))

    def _give_keys(self, row: PagedRow, table: BlockTable, at: int, stop: int) -> None:
        states = self._table(row).states
        for place in range(at, stop):
            if place in states:
                self._give_key(row, states[place], (place + 1) * self.block)

    def _give_key(self, row: PagedRow, run: Run, end: int) -> None:
        """Give the state's block the key of the tokens up to `end`."""
        self.pool.forget(run)
        run.node = row.node(end)
        run.first = end // self.block - 1
        run.stop = run.first + 1
        run.group = self.number if end % self.block == 0 else -1 - self.number
        run.node.runs.append(run)


class KVCache:
    """All groups of one engine on one pool.

    Args:
        groups: in vLLM's order.
        blocks: without the one that vLLM never gives out.
        longest: tokens of the longest request, vLLM's `max_model_len`.
        caches: prefix caching is on.
        in_flight: the most tokens of all passes under way.
        late: passes with outputs that are not known when a pass is planned.
        retention: tokens between the kept ends of windows and states; 0: only ends that a known
            request can return to are kept; None: all ends are.
        rehashes: a state at the end of a prompt that is registered again counts as new (vLLM before
            0.33).
        drafts: of a row in a pass.
        drops_last: the last block that a prompt finds is computed anew.

    Raises InputError for a kind of cache that is not modelled.

    Attributes:
        whole, unit: tokens of a stretch that is whole in every group, and of a block's hash.
        can_step: whether rows that decode can be counted instead of planned one by one: they give
            back no keys but those of their prompts.
        only_takes: rows that decode never give a block back.
        is_aligned: in each pass a row takes at least as many blocks as it gives back.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        blocks: int,
        *,
        longest: int,
        caches: bool,
        in_flight: int = 0,
        late: int = 0,
        retention: int | None = 0,
        rehashes: bool = False,
        drafts: int = 0,
        drops_last: bool = False,
    ) -> None:
        sizes = [group.block for group in groups]
        self.pool = BlockPool(blocks)
        self.longest = longest
        self.caches = caches
        self.in_flight = in_flight
        self.late = late
        self.retention = retention
        self.rehashes = rehashes
        self.drafts = drafts
        self.drops_last = drops_last and caches
        self.whole = lcm(*sizes)
        self.unit = gcd(*sizes) if caches else self.whole
        self.smallest = min(sizes)
        self.groups: list[FullGroup] = []
        alike: dict[tuple[str, int, int], list[FullGroup]] = {}
        for number, spec in enumerate(groups):
            group = self._made(number, spec)
            self.groups.append(group)
            name = "full" if group.is_full else spec.kind
            alike.setdefault((name, spec.block, spec.window), []).append(group)
        # groups with equal rules are looked up together, full attention first
        self._alike = [one for one in alike.values() if one[0].is_full]
        self._alike += [one for one in alike.values() if not one[0].is_full]
        windows = [group for group in self.groups if isinstance(group, WindowGroup)]
        # with prefix caching
        self.states = [group for group in windows if isinstance(group, StateGroup)]
        self.is_aligned = not self.states and (
            not windows or (late == 1 and all(one.window % one.block == 0 for one in windows))
        )
        self.only_takes = not windows
        self.can_step = self.only_takes or not caches or retention == 0
        self._nothing = [Hit() for _ in groups]

    def _made(self, number: int, spec: CacheGroup) -> FullGroup:
        if spec.kind in FULL_KINDS:
            return FullGroup(number, spec, self)
        if spec.kind == "window":
            return WindowGroup(number, spec, self)
        if spec.kind == "state":
            aligned = spec.mode == "align"
            return (StateGroup if aligned else OneStateGroup)(number, spec, self)
        raise InputError(
            f"a cache of kind '{spec.kind or spec.spec}' is not modelled",
            "full, mla, window and state are",
        )

    def look_up(self, row: PagedRow) -> tuple[list[Hit], int]:
        """Return what a waiting row finds: the blocks of each group, and how many tokens all groups
        have of its beginning, without its last token. Sets the row's `junction`.
        """
        row.junction = 0
        if not self.caches:
            return self._nothing, 0
        if row.content is None and not row.preempted:
            row.path = [Node(None, 0, self.longest)]
            return self._nothing, 0
        if not row.path:
            node = row.content
            while node is not None:
                row.path.append(node)
                node = node.parent
            row.path.reverse()
        most = row.known - 1
        if len(self.groups) == 1:
            hits, found = self.groups[0].find(row, most, self.groups)
            if found and self.drops_last:
                found -= self.whole
                hits[0].cut(found // self.whole)
            return hits, found
        by_group = [Hit() for _ in self.groups]
        found = most
        longest = 0
        full: dict[int, int] = {}  # what full attention has, by the first group of each kind
        while True:
            now = found
            for alike in self._alike:
                first = alike[0]
                if first.number in full:
                    now = min(now, full[first.number])
                    continue
                hits, now = first.find(row, now, alike)
                for group, hit in zip(alike, hits, strict=True):
                    by_group[group.number] = hit
                if first.is_full:
                    full[first.number] = now
                longest = max(longest, now)
            if now >= found:
                break
            found = now
            if full and len(self._alike) == 2:
                break  # full attention has what the other kind has found
        for group in self.groups:
            if group.is_full:
                by_group[group.number].cut(ceil_div(found, group.block))
        if longest > found:
            row.junction = longest
        return by_group, found

    def admit(
        self,
        row: PagedRow,
        hits: list[Hit],
        found: int,
        tokens: int,
        reserve: int,
        *,
        whole: bool,
    ) -> bool:
        """Give a waiting row what it has found and the blocks for `tokens` tokens. Returns False,
        and gives nothing, if there is no room.

        Args:
            hits, found: see `look_up`.
            reserve: blocks that stay free.
            whole: its whole input must fit.
        """
        free = self.pool.free - reserve
        if whole and self._needed(row, min(row.known, self.longest), hits, found, True) > free:
            return False
        if self._needed(row, tokens, hits, found, False) > free:
            return False
        if found:
            for group in self.groups:
                group.adopt(row, hits[group.number], found)
        for group in self.groups:
            group.allocate(row, tokens)
        return True

    def extend(self, row: PagedRow, computed: int, tokens: int, processed: int) -> bool:
        """Give a running row of `computed` tokens the blocks for `tokens`. Returns False if too few
        are free. Takes back what its windows have passed in any case; the outputs of `processed`
        tokens are known.
        """
        for group in self.groups:
            if not group.is_full:
                group.skip(row, processed)
        needed = self._needed(row, tokens, None, computed, False)
        if needed > self.pool.free:
            return False
        if needed or self.states:
            for group in self.groups:
                group.allocate(row, tokens)
        return True

    def catch_up(self, row: PagedRow, tokens: int) -> None:
        """Note that a row has the blocks of `tokens` tokens, which were only counted so far."""
        for group in self.groups:
            table = row.tables[group.number]
            table.length = max(table.length, ceil_div(tokens, group.block))

    def register(self, row: PagedRow, tokens: int) -> None:
        """Give keys to the blocks with the first `tokens` tokens of a row, as far as these are
        known: other requests find them.
        """
        if not self.caches:
            return
        tokens = min(tokens, row.known)
        if len(self.groups) > 1:
            tokens = tokens // self.whole * self.whole
        for group in self.groups:
            group.register(row, tokens)
            if group.is_full and group.block != self.unit:
                group.register_end(row, tokens)

    def release(self, row: PagedRow) -> None:
        """Take all blocks of a row back, group by group."""
        for group in self.groups:
            group.release(row)

    def count(self, row: PagedRow, found: int) -> None:
        """Count what an admitted row has looked for and found, before its own blocks get keys."""
        pool = self.pool
        if self.caches and row.preempted:
            pool.preempted_queries += row.known
            pool.preempted_hits += found
        elif self.caches:
            pool.queries += row.known
            pool.hits += found

    def can_join(self, row: PagedRow, computed: int) -> bool:
        """Return whether a row that decodes can be counted: the blocks of its prompt have their
        keys (blocks of a size that is not `whole` get them late), and it holds in each group what
        counted rows hold.
        """
        for group in self.groups:
            table = row.tables[group.number]
            if isinstance(table, StateTable):
                gone = max(computed - self.late - STATE_WINDOW, 0) // group.block
                if table.length != ceil_div(computed, group.block):
                    return False
                if len(table.states) != table.length - gone or table.gone != gone:
                    return False
                end = (row.prompt - 1) // self.unit * self.unit
                if self.rehashes and ceil_div(end, group.block) - 1 in table.states:
                    return False  # it counts as new in each pass
            elif (
                self.caches
                and group.block != self.whole
                and table.looked < row.prompt // group.block
            ):
                return False
        return True

    def _needed(
        self, row: PagedRow, tokens: int, hits: list[Hit] | None, computed: int, whole: bool
    ) -> int:
        total = 0
        for group in self.groups:
            hit = hits[group.number] if hits is not None else None
            total += group.needed(row, tokens, hit, computed, whole)
        return total


def _first_copy(node: Node, group: int, at: int, stop: int) -> tuple[Run | None, int]:
    """Return the run of a group that was registered first with the block `at`, and up to where, at
    most `stop`, it is the first; None: no run has the block.
    """
    for run in node.runs:
        if run.group != group:
            continue
        if run.first <= at < run.stop:
            return run, min(run.stop, stop)
        if at < run.first < stop:
            stop = run.first
    return None, at


def _link(run: Run, before: Run | None) -> None:
    """Put a run into the queue, after `before`."""
    assert before is not None
    after = before.after
    assert after is not None
    run.before = before
    run.after = after
    after.before = before.after = run


def _unlink(run: Run) -> None:
    """Take a run out of the queue."""
    before = run.before
    after = run.after
    assert before is not None
    assert after is not None
    before.after = after
    after.before = before
    run.before = run.after = None
