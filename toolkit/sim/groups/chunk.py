"""A group of chunked local attention: a token looks at those of its own chunk alone."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.catalogue.resolved import CacheGroup
from toolkit.sim.groups.full import FullGroup, Hit, SharedRules, ceil_div
from toolkit.sim.groups.row import GroupRow


class ChunkGroup(FullGroup):
    """Chunks of `window` tokens; args as of `WindowGroup`. vLLM has such groups only if its
    hybrid cache manager is forced on, and then keeps all blocks.
    """

    __slots__ = ()

    def __init__(
        self, number: int, group: CacheGroup, rules: SharedRules, in_flight: int, longest: int
    ) -> None:
        super().__init__(number, group, rules)
        self.is_full = False
        self.most = ceil_div(min(self.window + in_flight, longest), self.block)

    def skipped(self, tokens: int) -> int:
        return tokens // self.window * self.window

    def find(self, row: GroupRow, most: int, groups: Sequence[int]) -> tuple[list[Hit], int]:
        """The blocks from the current chunk's first one on; those before need not be cached."""
        size = self.block
        pool = self.rules.pool
        hits = [Hit(self.skipped(most) // size) for _ in groups]
        end = (hits[0].first + 1) * size
        while end <= most:
            found = pool.find(groups, row.node(end), end)
            if found is None:
                break
            for hit, block in zip(hits, found, strict=True):
                hit.blocks.append(block)
            end += size
        return hits, hits[0].stop * size
