"""A group of sliding windows: a row gives back the blocks that its window has passed."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.catalogue.resolved import CacheGroup
from toolkit.sim.groups.full import FullGroup, Hit, SharedRules, ceil_div
from toolkit.sim.groups.pool import Block
from toolkit.sim.groups.row import GroupRow


class WindowGroup(FullGroup):
    """A token looks at itself and the `window` - 1 tokens before it.

    A beginning can be used if the blocks with the last `window` - 1 tokens before its end are
    cached, so only such tails of a few blocks are kept.

    Args:
        in_flight: tokens of all passes that may be under way.
        longest: tokens of the longest request.
    """

    __slots__ = ("tail",)

    def __init__(
        self, number: int, group: CacheGroup, rules: SharedRules, in_flight: int, longest: int
    ) -> None:
        super().__init__(number, group, rules)
        self.is_full = False
        self.tail = ceil_div(self.window - 1, self.block)  # blocks that make a beginning usable
        self.most = ceil_div(min(self.window - 1 + in_flight, longest), self.block) + 1

    def skipped(self, tokens: int) -> int:
        return max(0, tokens - self.window + 1)

    def kept(self, start: int, stop: int, returns: Sequence[int]) -> Sequence[int]:
        size = self.block
        whole = self.rules.whole
        retention = self.rules.retention
        need = self.tail
        found: set[int] = set()
        segment = whole if retention is None else retention
        if segment:
            per = segment // size
            if need >= per:
                return range(start, stop)
            found.update([place for place in range(start, stop) if place % per >= per - need])
        if retention is not None:
            for tokens in returns:
                end = tokens // whole * whole // size
                found.update(range(max(start, end - need), min(stop, end)))
        return sorted(found)

    def find(self, row: GroupRow, most: int, groups: Sequence[int]) -> tuple[list[Hit], int]:
        """From the right, the first whole tail; else the blocks from the beginning on, before which
        no window reaches.
        """
        size = self.block
        whole = self.rules.whole
        need = self.tail
        pool = self.rules.pool
        run: list[list[Block]] = []  # the blocks of each place, from the right
        place = most // size - 1
        while place >= 0 and len(run) < max(need, 1):
            end = (place + 1) * size
            found = pool.find(groups, row.node(end), end)
            if found is None:
                run = []
            elif run or not end % whole:
                run.append(found)
            place -= 1
        run.reverse()
        hits = [Hit(place + 1 if run else 0) for _ in groups]
        for blocks in run:
            for hit, block in zip(hits, blocks, strict=True):
                hit.blocks.append(block)
        return hits, hits[0].stop * size
