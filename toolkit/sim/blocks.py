"""The blocks of a paged cache as vLLM 0.32 counts, shares and evicts them
(`v1/core/block_pool.py`, `kv_cache_manager.py`).

`BlockPool` is for requests that share nothing, `SharedPool` for requests with known contents.
`contents` makes a tree of these contents: its nodes are stretches of tokens that the same requests
have in common, and it forks where two requests part. A block is shared by two requests if all
tokens up to its end are the same, so it belongs to the node of its last token.

The rules of vLLM with prefix caching:

- A block is registered when a pass that fills it is planned, so that a request that is admitted
  later into the same pass finds it. Equal blocks may exist twice; the first registered is found.
- A request that is admitted finds its leading blocks up to the first that is missing, and never its
  last token.
- A block that no running request holds is free, but stays registered until it is given out.
  Blocks that are not registered are given out first, then those freed longest ago, and of one
  request the last ones first.

A block's predecessors are therefore registered as long as the block is, and `SharedPool` keeps no
blocks but runs of them: consecutive blocks of a node that the same requests hold or that were freed
together. Its cost grows with requests and forks, not with blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from toolkit.traces.types import SharedBlocks


class Node:
    """A stretch of content: the tokens `start` to `end` - 1 of some requests, after the tokens of
    `parent`, and the blocks `first` to `stop` - 1 that end within them.

    Attributes:
        runs: of its blocks that are registered, in the order of registration.
        seen: the first blocks of it that were ever registered end here.
    """

    __slots__ = ("end", "first", "parent", "runs", "seen", "start", "stop")

    def __init__(self, parent: Node | None, start: int, end: int) -> None:
        self.parent = parent
        self.start = start
        self.end = end
        self.first = self.stop = self.seen = 0
        self.runs: list[Run] = []

    def until(self, tokens: int) -> Node:
        """The node that ends after so many tokens of this content, 0 < `tokens` <= `end`; one that
        goes on is cut in two.
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


class PagedRequest:
    """A request of a paged engine.

    Attributes:
        number: its index.
        prompt: tokens to compute before its next token: its prompt, and the output that it had
            generated when it was last admitted.
        left: the true number of tokens that it will still generate.
        limit: the most that it may generate, from its arrival on; more than `left` if it stops.
        computed: tokens in its cache; while it decodes, minus the machine's passes so far.
        filled: tokens in its cache when its input was last complete.
        end: the number of the machine's pass at which it ends; 0: it does not decode.
        order: how many requests were admitted before it and with it.
        stops: whether it ends before its output limit, so that the end is known only with the last
            token.
        preempted: whether it ever was.
        mark: for the caller, which records times by row.
        content: the last node of its prompt and output; None: it shares nothing.
        watched: whether another request may look for its output while it runs.
        path: its nodes with blocks, from the first token on; `place` is where `registered` is.
        runs: of the registered blocks that it holds, from the first token on.
        registered: how many of its first blocks are registered.
    """

    __slots__ = (
        "computed", "content", "end", "filled", "left", "limit", "mark", "number", "order", "path",
        "place", "preempted", "prompt", "registered", "runs", "stops", "watched",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        prompt: int,
        output: int,
        *,
        stops: bool = False,
        limit: int = 0,
        content: Node | None = None,
        watched: bool = False,
    ) -> None:
        self.number = number
        self.prompt = prompt
        self.left = output
        self.limit = max(limit, output + stops)
        self.stops = stops
        self.content = content
        self.watched = watched
        self.computed = self.filled = self.end = self.mark = self.order = 0
        self.preempted = False
        self.path: list[Node] = []
        self.runs: list[Run] = []
        self.place = self.registered = 0


class Pool:
    """The blocks of one engine. All `blocks` of a new pool are `free`.

    Attributes:
        queries, hits: tokens of the requests when they were first admitted, and how many of them
            were found.
        preempted_queries, preempted_hits: the same for requests that are admitted again.
        lost: of `queries`, tokens that were not found, but once were there: their blocks were
            given out. With several groups of caches, of a group of full attention.
    """

    __slots__ = (
        "blocks", "free", "hits", "lost", "preempted_hits", "preempted_queries", "queries",
    )  # fmt: skip

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.free = blocks
        self.queries = self.hits = self.preempted_queries = self.preempted_hits = self.lost = 0


class BlockPool(Pool):
    """Counts the free blocks of a paged cache for requests that share nothing, of `block_tokens`
    tokens each; the caller counts the blocks that each row holds.

    With prefix caching (`keeps`) a request admitted again finds what is left of its blocks.

    Attributes:
        held: how many blocks of those that `find` last found are held by running rows.
        writers: running rows with outputs that other requests may look for.
    """

    __slots__ = ("_kept", "_plain", "block_tokens", "held", "keeps", "writers")

    def __init__(self, blocks: int, block_tokens: int, *, keeps: bool) -> None:
        super().__init__(blocks)
        self.block_tokens = block_tokens
        self.keeps = keeps
        self.held = 0
        self.writers: dict[PagedRequest, None] = {}
        self._plain = blocks  # free blocks without cached tokens
        # request number to its free blocks with cached tokens, freed longest ago first
        self._kept: OrderedDict[int, int] = OrderedDict()

    def needed(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.block_tokens)

    def take(self, count: int) -> None:
        """Give out `count` blocks; as many must be free."""
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

    def give(self, row: PagedRequest, tokens: int, known: int) -> None:
        """Free a row's blocks, which hold `tokens` tokens; the values of the first `known` of them
        are known and can be cached.
        """
        count = self.needed(tokens)
        self.free += count
        if self.keeps:
            full = known // self.block_tokens
            self._plain += count - full
            if full:
                self._kept[row.number] = full

    def find(self, row: PagedRequest) -> int:
        """Tokens that a waiting row would find cached if it were admitted now."""
        return self._kept.get(row.number, 0) * self.block_tokens

    def drop_last(self, found: int) -> int:
        """Leave out the last block of the `found` > 0 tokens that `find` found just now; how many
        tokens remain.
        """
        raise NotImplementedError("only blocks with contents are looked for one by one")

    def admit(self, row: PagedRequest, found: int) -> None:
        """Give a row the blocks that `find` found just now, and count them."""
        self.free -= self._kept.pop(row.number, 0)
        if self.keeps:
            self._count(row, found)

    def register(self, row: PagedRequest, tokens: int) -> None:
        """The first `tokens` tokens of a running row are in its blocks after the planned pass: full
        blocks can be found.
        """

    def _count(self, row: PagedRequest, found: int) -> None:
        if row.preempted:
            self.preempted_queries += row.prompt
            self.preempted_hits += found
        else:
            self.queries += row.prompt
            self.hits += found


class Run:
    """The blocks `first` to `stop` - 1 of a node, each of which `rows` running rows hold.

    Free runs (`rows` is 0) are linked as they are given out, each from its last block on.
    """

    __slots__ = ("after", "before", "first", "node", "rows", "stop")

    def __init__(self, node: Node | None, first: int, stop: int, rows: int) -> None:
        self.node = node
        self.first = first
        self.stop = stop
        self.rows = rows
        self.before = self.after = self


class SharedPool(BlockPool):
    """The blocks of requests with contents; prefix caching is on."""

    __slots__ = ("_found", "_queue", "_rows")

    def __init__(self, blocks: int, block_tokens: int) -> None:
        super().__init__(blocks, block_tokens, keeps=True)
        self._queue = Run(None, 0, 0, 0)  # its `after` is given out first
        self._found: list[tuple[Run, int, int]] = []  # a run, and which of its blocks
        self._rows: dict[PagedRequest, None] = {}  # that hold runs

    def take(self, count: int) -> None:
        assert count <= self.free
        self.free -= count
        self._plain -= count
        queue = self._queue
        while self._plain < 0:
            run = queue.after
            size = run.stop - run.first
            if size > -self._plain:
                run.stop += self._plain
                self._plain = 0
                return
            self._plain += size
            _unlink(run)
            assert run.node is not None
            run.node.runs.remove(run)

    def find(self, row: PagedRequest) -> int:
        path = row.path or self._walk(row)
        limit = (row.prompt - 1) // self.block_tokens
        found = self._found
        at = 0
        held = 0
        found.clear()
        for node in path:
            stop = node.stop if node.stop < limit else limit
            while at < stop:
                run, until = _first_copy(node.runs, at, stop)
                if run is None:
                    self.held = held
                    return at * self.block_tokens
                found.append((run, at, until))
                if run.rows:
                    held += until - at
                at = until
            if at >= limit:
                break
        self.held = held
        return at * self.block_tokens

    def drop_last(self, found: int) -> int:
        run, first, stop = self._found.pop()
        if run.rows:
            self.held -= 1
        if stop - first > 1:
            self._found.append((run, first, stop - 1))
        return found - self.block_tokens

    def admit(self, row: PagedRequest, found: int) -> None:
        self._count(row, found)
        if not row.preempted:
            self.lost += self._lost(row, found)
        runs = row.runs
        for run, first, stop in self._found:
            part = run
            if run.first < first or stop < run.stop:
                part = self._cut(run, first, stop)
            if not part.rows:
                _unlink(part)
                self.free -= stop - first
            part.rows += 1
            runs.append(part)
        self._found.clear()
        row.registered = found // self.block_tokens
        row.place = 0
        self._rows[row] = None
        if row.watched:
            self.writers[row] = None

    def register(self, row: PagedRequest, tokens: int) -> None:
        full = tokens // self.block_tokens
        at = row.registered
        path = row.path
        place = row.place
        while at < full:
            node = path[place]
            if node.stop <= at:
                place += 1
                continue
            stop = node.stop if node.stop < full else full
            last = row.runs[-1] if row.runs else None
            if (
                last is not None
                and last.node is node
                and last.rows == 1
                and all(run.stop <= at or stop <= run.first for run in node.runs)
            ):
                last.stop = stop
            else:
                run = Run(node, at, stop, 1)
                node.runs.append(run)
                row.runs.append(run)
            if node.seen < stop:
                node.seen = stop
            at = stop
        row.registered = max(at, row.registered)
        row.place = place

    def give(self, row: PagedRequest, tokens: int, known: int) -> None:
        self.register(row, known)
        plain = self.needed(tokens) - row.registered
        self._plain += plain
        self.free += plain
        queue = self._queue
        upper: Run | None = None  # the run that was freed just before
        for run in reversed(row.runs):
            run.rows -= 1
            if run.rows:
                continue
            self.free += run.stop - run.first
            node = run.node
            assert node is not None
            if (
                upper is not None
                and upper.node is node
                and upper.first == run.stop
                and len(node.runs) == 2
            ):
                run.stop = upper.stop  # one run again
                _unlink(upper)
                node.runs.remove(upper)
            _link(run, queue.before)
            upper = run
        row.runs.clear()
        row.registered = row.place = 0
        del self._rows[row]
        self.writers.pop(row, None)

    def _walk(self, row: PagedRequest) -> list[Node]:
        """The row's path, from its content."""
        size = self.block_tokens
        node = row.content
        while node is not None:
            node.first = node.start // size
            node.stop = node.end // size
            if node.first < node.stop:
                row.path.append(node)
            node = node.parent
        row.path.reverse()
        return row.path

    def _lost(self, row: PagedRequest, found: int) -> int:
        """Tokens behind those that a row found that were registered once."""
        limit = (row.prompt - 1) // self.block_tokens
        at = found // self.block_tokens
        first = at
        for node in row.path:
            if node.stop <= at:
                continue
            seen = min(node.seen, limit)
            if seen <= at:
                break
            at = seen
            if seen < node.stop:
                break
        return (at - first) * self.block_tokens

    def _cut(self, run: Run, first: int, stop: int) -> Run:
        """Make the blocks `first` to `stop` - 1 of a run a run of their own, and return it."""
        node = run.node
        assert node is not None
        part = Run(node, first, stop, run.rows)
        if stop < run.stop:
            parts = [part, run]
            if run.first < first:
                parts.insert(0, Run(node, run.first, first, run.rows))
            run.first = stop
        else:
            parts = [run, part]
            run.stop = first
        k = node.runs.index(run)
        node.runs[k : k + 1] = parts
        if run.rows:
            for row in self._rows:
                if run in row.runs:
                    k = row.runs.index(run)
                    row.runs[k : k + 1] = parts
        else:
            before = run.before
            _unlink(run)
            for one in parts:  # the last blocks are given out first
                _link(one, before)
        return part


def _first_copy(runs: Sequence[Run], at: int, stop: int) -> tuple[Run | None, int]:
    """The run that was registered first with the block `at`, and up to where, at most `stop`, it is
    the first; None: no run has the block.
    """
    for run in runs:
        if run.first <= at < run.stop:
            return run, min(run.stop, stop)
        if at < run.first < stop:
            stop = run.first
    return None, at


def _link(run: Run, before: Run) -> None:
    """Put a run into the queue, after `before`."""
    run.before = before
    run.after = before.after
    run.after.before = before.after = run


def _unlink(run: Run) -> None:
    """Take a run out of the queue."""
    run.before.after, run.after.before = run.after, run.before
    run.before = run.after = run


def copy_of(leaf: Node, copies: dict[Node, Node]) -> Node:
    """One replica's copy of a node of all requests' contents and of those before it, since each
    replica caches blocks of its own. `copies` are those that the replica has; new ones are added.
    """
    path: list[Node] = []
    node: Node | None = leaf
    while node is not None and node not in copies:
        path.append(node)
        node = node.parent
    copy: Node | None = copies[node] if node is not None else None
    for own in reversed(path):
        copy = copies[own] = Node(copy, own.start, own.end)
    assert copy is not None
    return copy


def contents(
    prompts: Sequence[int],
    outputs: Sequence[int],
    shared: SharedBlocks | None,
    previous: Sequence[int] | None,
    lookahead: int = 0,
) -> tuple[list[Node], list[bool]]:
    """The last node of each request's content (prompt, then output), and whether other prompts have
    tokens of its output.

    Prompts are equal as far as their first blocks in `shared` are, with a partial block as far as
    it goes. A prompt with a `previous` row begins with the prompt and the output of that earlier
    row. Of two such beginnings the longer counts. All else is its own. A block is the same only if
    the `lookahead` tokens behind it are.
    """
    leaves: list[Node] = []
    continued = [False] * len(prompts)
    known, owners = _known_blocks(shared, len(prompts))
    size = shared.block_tokens if shared is not None else 1
    longest: dict[int, int] = {}  # a block's id to a row that has more of it than its first owner
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        begins = 0
        owner = -1
        if shared is not None and known[row]:
            count = known[row]
            last = int(shared.ids[shared.offsets[row] + count - 1])
            owner = longest.get(last, owners[row])
            begins = min(count * size, prompt, prompts[owner])
            if prompts[owner] < min(count * size, prompt):
                longest[last] = row
        before = previous[row] if previous is not None else -1
        if before >= 0:
            common = min(prompts[before] + outputs[before], prompt)
            if common > begins:
                begins = common
                owner = before
        parent: Node | None = None
        begins = max(begins - lookahead, 0)
        if begins:
            parent = leaves[owner].until(begins)
            if begins > prompts[owner]:
                continued[owner] = True
        leaves.append(Node(parent, begins, prompt + output))
    return leaves, continued


def _known_blocks(shared: SharedBlocks | None, count: int) -> tuple[list[int], list[int]]:
    """For each prompt, how many of its first blocks earlier prompts have, and the first prompt that
    had the last of these.
    """
    if shared is None or not len(shared.ids):
        return [0] * count, [-1] * count
    rows = np.repeat(np.arange(count), shared.counts)
    _, place, which = np.unique(shared.ids, return_index=True, return_inverse=True)
    first = rows[place][which.reshape(-1)]  # the first row that has each block
    sums = np.concatenate([[0], np.cumsum(first < rows)])
    known = sums[shared.offsets[1:]] - sums[shared.offsets[:-1]]
    ends = np.maximum(shared.offsets[:-1] + known - 1, 0)
    return known.tolist(), np.where(known > 0, first[ends], -1).tolist()
