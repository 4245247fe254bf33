"""Groups of states: Mamba layers and other linear attention. A row has one state, whatever its
length. With prefix caching (vLLM's mode `align`) states at ends of blocks are kept: a block holds
the state behind its last token, and a row's table is empty but for its last blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.catalogue.resolved import CacheGroup
from toolkit.sim.groups.full import FullGroup, Hit, SharedRules, ceil_div
from toolkit.sim.groups.pool import Block, Key
from toolkit.sim.groups.row import BlockTable, GroupRow


class OneStateGroup(FullGroup):
    """States without prefix caching (mode `none`): one block for the longest request."""

    __slots__ = ()

    def __init__(self, number: int, group: CacheGroup, rules: SharedRules) -> None:
        super().__init__(number, group, rules)
        self.is_full = False


class StateTable(BlockTable):
    """A row's states. All blocks are in `keyed`, some of them without a key.

    Attributes:
        last: the place of the state before the current one; -1: none is left to give back.
        given: the blocks at the first so many places were given back.
        checkpoint: of the planned pass, the tokens at which it keeps a state inside its chunk; 0.
        place: of the block for that state.
    """

    __slots__ = ("checkpoint", "given", "last", "place")

    def __init__(self) -> None:
        super().__init__()
        self.last = -1
        self.given = 0
        self.checkpoint = 0
        self.place = 0


class StateGroup(FullGroup):
    """States with prefix caching (mode `align`): chunks end at ends of blocks.

    Attributes:
        checkpoints: whether a layer can keep a state inside a chunk, so that the last chunk of a
            prompt need not end where others may go on.
    """

    __slots__ = ("_new", "checkpoints")

    def __init__(self, number: int, group: CacheGroup, rules: SharedRules) -> None:
        super().__init__(number, group, rules)
        self.is_full = False
        self.checkpoints = group.checkpoints > 0
        self._new: set[Key] = set()  # keys given in the pass that is planned

    def table(self) -> BlockTable:
        return StateTable()

    def begin_pass(self) -> None:
        self._new.clear()

    def skipped(self, tokens: int) -> int:
        return tokens - 1

    def needed(
        self, row: GroupRow, tokens: int, hit: Hit | None, computed: int, *, whole: bool
    ) -> int:
        table = self._table(row)
        known = hit.blocks if hit is not None else []
        if known and known[-1].key in self._new:
            return self.rules.pool.blocks + 2  # a state of this pass exists only after it
        checkpoint = self._checkpoint(row, table, computed, tokens)
        if not whole:
            table.checkpoint = checkpoint
            table.place = ceil_div(tokens, self.block) - 2
        new = ceil_div(tokens, self.block) - table.length
        if hit is not None:
            new -= hit.stop
        new = max(min(new, 1 + (checkpoint > 0)), 0)
        for block in known:
            if not block.rows:
                new += 1
        return new

    def adopt(self, row: GroupRow, hit: Hit, found: int) -> None:
        super().adopt(row, hit, found)
        row.tables[self.number].gone = 0

    def allocate(self, row: GroupRow, tokens: int) -> None:
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
        new = required - table.length
        if new > 0:
            self.rules.pool.take(new)
            for place in range(table.length, required):
                table.keyed[place] = Block(None)
            table.length = required

    def skip(self, row: GroupRow, processed: int) -> None:
        table = self._table(row)
        pool = self.rules.pool
        keyed = table.keyed
        stop = min(max(self.skipped(processed), 0) // self.block, table.length)
        if table.given < stop:
            given = [place for place in keyed if table.given <= place < stop]
            given.sort(reverse=True)
            pool.give([keyed.pop(place) for place in given])
            table.given = stop
        if 0 <= table.last < ceil_div(processed, self.block) - 1 and table.last in keyed:
            pool.give([keyed.pop(table.last)])

    def register(self, row: GroupRow, tokens: int, returns: Sequence[int]) -> None:
        table = self._table(row)
        before = table.looked
        super().register(row, tokens, returns)
        self._register_inner(row, table, tokens)
        for place in range(before, table.looked):
            block = table.keyed.get(place)
            if block is not None and block.key is not None:
                self._new.add(block.key)

    def kept(self, start: int, stop: int, returns: Sequence[int]) -> Sequence[int]:
        retention = self.rules.retention
        whole = self.rules.whole
        if retention is None:
            return range(start, stop)
        found: set[int] = set()
        if retention:
            per = retention // self.block
            if per <= 1:
                return range(start, stop)
            found.update([place for place in range(start, stop) if (place + 1) % per == 0])
        for tokens in returns:
            place = tokens // whole * whole // self.block - 1
            if start <= place < stop:
                found.add(place)
        return sorted(found)

    def give_key(self, row: GroupRow, table: BlockTable, place: int, end: int) -> None:
        block = table.keyed.get(place)
        if block is not None:
            self.rules.pool.rekey(block, (self.number, row.node(end), end))

    def release(self, row: GroupRow) -> None:
        keyed = row.tables[self.number].keyed
        self.rules.pool.give([keyed[place] for place in sorted(keyed, reverse=True)])
        row.tables[self.number] = self.table()

    def find(self, row: GroupRow, most: int, groups: Sequence[int]) -> tuple[list[Hit], int]:
        """The last state that is cached where all groups' blocks end."""
        size = self.block
        whole = self.rules.whole
        pool = self.rules.pool
        hits = [Hit() for _ in groups]
        for place in range(most // size - 1, -1, -1):
            end = (place + 1) * size
            if end % whole:
                continue
            found = pool.find(groups, row.node(end), end)
            if found is not None:
                for hit, block in zip(hits, found, strict=True):
                    hit.first = place
                    hit.blocks.append(block)
                return hits, end
        return hits, 0

    def held(self, row: GroupRow) -> int:
        return len(row.tables[self.number].keyed)

    def last_state(self, tokens: int, size: int) -> int:
        """Where the last state is that a request of so many tokens can go on from: it computes at
        least one token.
        """
        return (tokens - 1) // size * size

    def can_keep_inside(self, start: int, end: int, tokens: int) -> bool:
        """Whether a chunk from `start` to `end` can keep its state at `tokens`."""
        unit = self.rules.unit
        place = ceil_div(end, self.block) - 2
        return (
            self.checkpoints
            and start % unit == 0
            and place > (start - 1) // self.block
            and start + unit <= tokens
            and start < tokens < end
        )

    def _table(self, row: GroupRow) -> StateTable:
        table = row.tables[self.number]
        assert isinstance(table, StateTable)
        return table

    def _checkpoint(self, row: GroupRow, table: StateTable, start: int, end: int) -> int:
        """Where a pass that computes the tokens from `start` to `end` keeps a state inside its
        chunk; 0: nowhere.
        """
        if not self.checkpoints:
            return 0
        if self.rules.retention == 0 and end < max(row.prompt, row.known - 1):
            return 0  # only the last chunk of an input
        tokens = self.last_state(end, self.rules.whole)
        place = ceil_div(end, self.block) - 2
        if place < 0 or not self.can_keep_inside(start, end, tokens):
            return 0
        is_free = place >= table.length or place not in table.keyed
        return tokens if is_free else 0

    def _register_inner(self, row: GroupRow, table: StateTable, tokens: int) -> None:
        """Give a key to the state inside the chunk, if a later request can use it."""
        keyed = table.keyed
        rules = self.rules
        if not table.checkpoint:
            if rules.rehashes and tokens > 0 and tokens == self.last_state(row.prompt, rules.unit):
                block = keyed.get(ceil_div(tokens, self.block) - 1)
                if block is not None:
                    key = self.number, row.node(tokens), tokens
                    if block.key is None:
                        rules.pool.rekey(block, key)
                    self._new.add(key)
            return
        tokens = table.checkpoint
        block = keyed.get(table.place)
        if block is None:
            return
        is_kept = False
        if tokens % self.block == 0:
            place = tokens // self.block - 1
            is_kept = place in self.kept(place, place + 1, ())
        is_return = tokens in (self.last_state(row.prompt, rules.whole), row.junction)
        if not is_kept and not is_return:
            rules.pool.forget(block)
            return
        key = self.number, row.node(tokens), tokens
        if block.key == key:
            return
        rules.pool.rekey(block, key)
        self._new.add(key)
