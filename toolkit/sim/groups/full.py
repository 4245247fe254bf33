"""A group of full attention: a row keeps all of its blocks. Other kinds differ in single rules."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.catalogue.resolved import CacheGroup
from toolkit.sim.groups.pool import Block, GroupPool
from toolkit.sim.groups.row import BlockTable, GroupRow


def ceil_div(tokens: int, size: int) -> int:
    """How many blocks of `size` hold so many tokens."""
    return -(-tokens // size)


class Hit:
    """Cached blocks of a group that a waiting row can use: `blocks`, the first at place `first`.
    The places before need no block.
    """

    __slots__ = ("blocks", "first")

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.blocks: list[Block] = []

    @property
    def stop(self) -> int:
        """The place behind the last block."""
        return self.first + len(self.blocks)


class SharedRules:
    """What the groups of a model have in common.

    Attributes:
        pool: of blocks.
        unit: tokens of a hash: blocks are found by whole hashes.
        whole: the least common multiple of the groups' blocks.
        retention: tokens between the kept ends of windows and states; 0: only those that a known
            return can use; None: all are kept.
        rehashes: a state at the end of a prompt that is registered again counts as new in the pass
            (vLLM before 0.33).
    """

    __slots__ = ("pool", "rehashes", "retention", "unit", "whole")

    def __init__(
        self, pool: GroupPool, unit: int, whole: int, retention: int | None, *, rehashes: bool
    ) -> None:
        self.pool = pool
        self.unit = unit
        self.whole = whole
        self.retention = retention
        self.rehashes = rehashes


class FullGroup:
    """Full attention, and the rules that other kinds share.

    Attributes:
        number: its place among the model's groups.
        is_full: it is of full attention, so that what it finds can be cut to any length.
        block: tokens of a block.
        window: tokens of a window or of a chunk; 0: neither.
        most: a request is admitted with room for at most so many blocks, since later ones take the
            place of those that are given back meanwhile; 0: no such limit.
    """

    __slots__ = ("block", "is_full", "most", "number", "rules", "window")

    def __init__(self, number: int, group: CacheGroup, rules: SharedRules) -> None:
        self.number = number
        self.is_full = True
        self.block = group.block
        self.window = group.window
        self.rules = rules
        self.most = 0

    def table(self) -> BlockTable:
        """The table of a row without blocks."""
        return BlockTable()

    def begin_pass(self) -> None:
        """The next pass is planned."""

    def skipped(self, tokens: int) -> int:
        """How many of a row's first tokens no later token looks at, once `tokens` are computed."""
        return 0

    def needed(
        self, row: GroupRow, tokens: int, hit: Hit | None, computed: int, *, whole: bool
    ) -> int:
        """Blocks that the row needs beyond those that it has, to hold `tokens` tokens.

        Found blocks that no running row holds count: they are free until the row takes them.

        Args:
            hit: what a waiting row has found here.
            computed: tokens that are cached already.
            whole: whether this asks for the whole input, and not for a pass.
        """
        required = ceil_div(tokens, self.block)
        if whole and self.most:
            required = min(required, self.most)
        length = row.tables[self.number].length
        if hit is None:
            return max(required - length, 0)
        skipped = self.skipped(computed) // self.block
        new = max(required - max(skipped, hit.stop), 0)
        for place, block in enumerate(hit.blocks, hit.first):
            if place >= skipped and not block.rows:
                new += 1
        return new

    def adopt(self, row: GroupRow, hit: Hit, found: int) -> None:
        """The row takes the blocks that it has found; `found` tokens were found in all groups."""
        table = row.tables[self.number]
        skipped = self.skipped(found) // self.block
        first = max(skipped, hit.first)
        pool = self.rules.pool
        for block in hit.blocks[first - hit.first :]:
            pool.hold(block)
        table.length = table.looked = max(skipped, hit.stop)
        table.gone = min(first, table.length)
        table.keyed = dict(enumerate(hit.blocks[first - hit.first :], first))

    def allocate(self, row: GroupRow, tokens: int) -> None:
        """The row takes the blocks that hold `tokens` tokens."""
        table = row.tables[self.number]
        new = ceil_div(tokens, self.block) - table.length
        if new > 0:
            self.rules.pool.take(new)
            table.length += new

    def skip(self, row: GroupRow, processed: int) -> None:
        """The row gives back what it no longer looks at: the outputs of `processed` tokens are
        known.
        """
        table = row.tables[self.number]
        stop = min(self.skipped(processed) // self.block, table.length)
        if stop <= table.gone:
            return
        pool = self.rules.pool
        keyed = table.keyed
        given = [place for place in keyed if place < stop]
        given.sort(reverse=True)
        pool.give_plain(stop - table.gone - len(given))
        pool.give([keyed.pop(place) for place in given])
        table.gone = stop

    def register(self, row: GroupRow, tokens: int, returns: Sequence[int]) -> None:
        """The first `tokens` tokens of the row are, or will be with the planned pass, in its
        blocks: give keys to the full ones. `returns`: where a known later request may go on.
        """
        table = row.tables[self.number]
        unit = self.rules.unit
        stop = min(tokens, row.known // unit * unit) // self.block
        start = table.looked
        if start < stop:
            for place in self.kept(start, stop, returns):
                if place >= table.gone:
                    self.give_key(row, table, place, (place + 1) * self.block)
            table.looked = stop

    def register_end(self, row: GroupRow, tokens: int) -> None:
        """The last whole hash of the prompt inside a block gets a key, too. Nothing looks for it,
        but the block is given out later than one without.
        """
        unit = self.rules.unit
        if self.block == unit:
            return
        table = row.tables[self.number]
        end = min((row.prompt - 1) // unit, row.known // unit) * unit
        place = end // self.block
        if (
            0 < end <= tokens
            and end % self.block
            and place < table.length
            and place not in table.keyed
        ):
            self.give_key(row, table, place, end)

    def kept(self, start: int, stop: int, returns: Sequence[int]) -> Sequence[int]:
        """Of the places `start` to `stop` - 1, those with blocks that are kept for others."""
        return range(start, stop)

    def give_key(self, row: GroupRow, table: BlockTable, place: int, end: int) -> None:
        """The block at a place gets the key of the tokens up to `end`."""
        key = self.number, row.node(end), end
        block = table.keyed.get(place)
        if block is None:
            table.keyed[place] = self.rules.pool.keyed(key)
        else:
            self.rules.pool.rekey(block, key)

    def release(self, row: GroupRow) -> None:
        """The row gives all of its blocks back, the last one first."""
        table = row.tables[self.number]
        pool = self.rules.pool
        keyed = table.keyed
        pool.give_plain(table.length - table.gone - len(keyed))
        pool.give([keyed[place] for place in sorted(keyed, reverse=True)])
        row.tables[self.number] = self.table()

    def find(self, row: GroupRow, most: int, groups: Sequence[int]) -> tuple[list[Hit], int]:
        """What a row finds in all `groups` like this one, at most `most` tokens: the blocks of
        each, and the tokens up to their end.
        """
        hits = [Hit() for _ in groups]
        size = self.block
        end = size
        pool = self.rules.pool
        while end <= most:
            found = pool.find(groups, row.node(end), end)
            if found is None:
                break
            for hit, block in zip(hits, found, strict=True):
                hit.blocks.append(block)
            end += size
        tokens = (end - size) // self.rules.whole * self.rules.whole
        for hit in hits:
            del hit.blocks[ceil_div(tokens, size) :]
        return hits, tokens

    def held(self, row: GroupRow) -> int:
        """Blocks that the row holds."""
        table = row.tables[self.number]
        return table.length - table.gone
