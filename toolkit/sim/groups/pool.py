"""One pool of blocks for all groups (vLLM's `v1/core/block_pool.py`).

A block is in one group at a time. A block with a key can be found by requests with the same tokens;
it is an object. All other blocks are only counted: no two of them differ.

Free blocks without a key are given out first, then those with a key, freed longest ago first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from toolkit.sim.blocks import Node, Pool

# a group's number, the node of the block's last token, and the tokens up to its end
Key: TypeAlias = tuple[int, Node, int]


class Block:
    """A block that has, or had, a key, and `rows` running rows that hold it."""

    __slots__ = ("key", "rows")

    def __init__(self, key: Key | None) -> None:
        self.key = key
        self.rows = 1


class GroupPool(Pool):
    """The blocks of all groups of one engine.

    Attributes:
        plain: free blocks without a key.
        changes: how often what can be found has changed.
    """

    __slots__ = ("_index", "_kept", "changes", "plain")

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.plain = blocks
        self.changes = 0
        self._kept: OrderedDict[Block, None] = OrderedDict()  # free blocks with keys
        self._index: dict[Key, list[Block]] = {}  # in the order of registration

    def take(self, count: int) -> None:
        """Give out `count` blocks; as many must be free."""
        self.free -= count
        self.plain -= count
        while self.plain < 0:
            block, _ = self._kept.popitem(last=False)
            self.forget(block)
            self.plain += 1

    def keyed(self, key: Key) -> Block:
        """A block that a row holds gets a key, and so becomes an object."""
        block = Block(key)
        self._list(block, key)
        return block

    def rekey(self, block: Block, key: Key) -> None:
        """A block that a row holds gets another key."""
        self.forget(block)
        block.key = key
        self._list(block, key)

    def forget(self, block: Block) -> None:
        """The block can no longer be found."""
        key = block.key
        if key is None:
            return
        copies = self._index[key]
        copies.remove(block)
        if not copies:
            del self._index[key]
        block.key = None
        self.changes += 1

    def find(self, groups: Sequence[int], node: Node, end: int) -> list[Block] | None:
        """In each of `groups`, the first block that was registered for the tokens up to `end`;
        None: some group has none.
        """
        found = []
        for group in groups:
            copies = self._index.get((group, node, end))
            if copies is None:
                return None
            found.append(copies[0])
        return found

    def hold(self, block: Block) -> None:
        """One more row holds the block."""
        if not block.rows:
            del self._kept[block]
            self.free -= 1
        block.rows += 1

    def give_plain(self, count: int) -> None:
        """A row gives back so many blocks that never had a key."""
        self.free += count
        self.plain += count

    def give(self, blocks: Iterable[Block]) -> None:
        """A row gives blocks back; the first of them is given out first."""
        for block in blocks:
            block.rows -= 1
            if block.rows:
                continue
            self.free += 1
            if block.key is None:
                self.plain += 1
            else:
                self._kept[block] = None

    def _list(self, block: Block, key: Key) -> None:
        copies = self._index.get(key)
        if copies is None:
            self._index[key] = [block]
        else:
            copies.append(block)
        self.changes += 1
