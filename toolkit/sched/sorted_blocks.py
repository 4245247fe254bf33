"""What inboxes keep beside their jobs, so that no question walks a long backlog.

`SortedBlocks` is a sorted sequence, `LengthCounts` the lengths that wait, the least first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import chain
from typing import Any, Final, Generic, TypeVar

MOST: Final = 512  # entries of a block: few enough to move at once when one comes or goes

Key = tuple[Any, ...]
Entry = TypeVar("Entry", bound=Key)


class SortedBlocks(Generic[Entry]):
    """Distinct tuples in ascending order, cut into blocks.

    The blocks end to end are the sequence. No block has more than `MOST` entries, and none is empty
    but an only one.

    An entry is found by its first values, here called its key, if no other entry has them. Of n
    entries a search compares O(log n); to come or go, an entry moves those of its block. The ends
    of the sequence cost one comparison.
    """

    __slots__ = ("_blocks", "size")

    def __init__(self) -> None:
        self._blocks: list[list[Entry]] = [[]]
        self.size = 0  # read only: how many entries there are

    def __iter__(self) -> Iterator[Entry]:
        return chain.from_iterable(self._blocks)

    @property
    def first(self) -> Entry:
        """The least entry; there must be one."""
        return self._blocks[0][0]

    @property
    def last(self) -> Entry:
        """The greatest entry; there must be one."""
        return self._blocks[-1][-1]

    def add(self, entry: Entry) -> None:
        """Put an entry in its place."""
        self.size += 1
        blocks = self._blocks
        block = blocks[-1]
        if not block or block[-1] < entry:
            if len(block) < MOST:
                block.append(entry)
            else:
                blocks.append([entry])
            return
        at = self._block_of(entry)
        block = blocks[at]
        insort(block, entry)
        if len(block) > MOST:
            blocks.insert(at + 1, block[MOST // 2 :])
            del block[MOST // 2 :]

    def remove(self, key: Key) -> Entry:
        """Take the entry with this key; it must be there."""
        self.size -= 1
        at = self._block_of(key)
        block = self._blocks[at]
        entry = block.pop(bisect_left(block, key) if block[0] < key else 0)
        if not block and len(self._blocks) > 1:
            del self._blocks[at]
        return entry

    def before(self, key: Key) -> int:
        """How many entries are less than this key."""
        at = self._block_of(key)
        count = bisect_left(self._blocks[at], key)
        for k in range(at):
            count += len(self._blocks[k])
        return count

    def _block_of(self, key: Key) -> int:
        """The index of the first block that does not end before this key, or that of the last
        block.
        """
        blocks = self._blocks
        low, high = 0, len(blocks) - 1
        if high and blocks[0][-1] >= key:
            return 0
        while low < high:
            middle = (low + high) // 2
            if blocks[middle][-1] < key:
                low = middle + 1
            else:
                high = middle
        return low


class LengthCounts:
    """How many jobs have each length.

    `_heap` has every length of `_counts` once. Lengths that no job has any more stay in both until
    they are the least, or no job is left.
    """

    __slots__ = ("_counts", "_heap", "jobs")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._heap: list[int] = []
        self.jobs = 0  # read only: how many jobs there are

    @property
    def least(self) -> int:
        """The least length of a job; there must be one."""
        heap, counts = self._heap, self._counts
        while not counts[heap[0]]:
            del counts[heappop(heap)]
        return heap[0]

    def add(self, length: int) -> None:
        """A job of this length came."""
        self.jobs += 1
        count = self._counts.get(length)
        if count is None:
            self._counts[length] = 1
            heappush(self._heap, length)
        else:
            self._counts[length] = count + 1

    def remove(self, length: int) -> None:
        """A job of this length left."""
        self.jobs -= 1
        if self.jobs:
            self._counts[length] -= 1
        else:
            self._counts.clear()
            self._heap.clear()
