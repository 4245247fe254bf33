"""The blocks of a paged cache, counted: who holds how many is the caller's to know, what is free is known here.

With prefix caching a freed block that is full keeps its tokens until it is given out again: blocks that were never full
first, then those freed longest ago, of one request the last ones first (vLLM 0.32, `v1/core/block_pool.py`). Who comes
back finds what is left of his own. Requests share nothing here: traces do not say which of their tokens are the same.
"""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """`blocks` of `block_tokens` tokens each, all free."""

    __slots__ = ("_kept", "_plain", "block_tokens", "blocks", "free", "keeps")

    def __init__(self, blocks: int, block_tokens: int, *, keeps: bool) -> None:
        self.blocks, self.block_tokens, self.keeps = blocks, block_tokens, keeps
        self.free = blocks
        self._plain = blocks  # free blocks that hold nothing of use
        self._kept: OrderedDict[int, int] = OrderedDict()  # owner to his free blocks that do, freed longest ago first

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
        """The owner's blocks, which hold so many tokens, are free again. What they hold is known of so many."""
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
