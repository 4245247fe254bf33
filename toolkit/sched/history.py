"""Output lengths of the requests that ended last: what Past-Future takes the future from (its section 3.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from toolkit.sched.kernels import replace_sorted


class History:
    """The last `window` lengths, in order of completion; and sorted, which costs nothing until it is asked for.

    Args:
        window: how many are remembered.
        start: lengths to begin with, until real ones push them out.
    """

    def __init__(self, window: int, start: Iterable[int] = ()) -> None:
        self.recent: deque[int] = deque(start, maxlen=window)
        self._sorted: NDArray[np.int64] | None = None
        self._count = 0  # how many are in _sorted
        self._sum = sum(self.recent)
        self._pending: list[tuple[int, int]] = []  # (length that left or -1, length that came), not yet in _sorted

    def add(self, length: int) -> None:
        """A request ended after `length` tokens."""
        recent, pending = self.recent, self._pending
        if self._sorted is not None:
            pending.append((recent[0] if len(recent) == recent.maxlen else -1, length))
            if len(pending) == recent.maxlen:  # all that was sorted is gone
                self._sorted = None
                pending.clear()
        if len(recent) == recent.maxlen:
            self._sum -= recent[0]
        self._sum += length
        recent.append(length)

    def mean(self) -> int:
        """The mean length, rounded down; 1 where nothing is remembered."""
        return int(self._sum / len(self.recent)) if self.recent else 1

    def ascending(self) -> NDArray[np.int64]:
        """All remembered lengths, sorted: a view that is valid until the next `add`."""
        if self._sorted is None:
            self._sorted = np.zeros(self.recent.maxlen or 0, dtype=np.int64)
            self._count = len(self.recent)
            self._sorted[: self._count] = sorted(self.recent)
        elif self._pending:
            self._count = replace_sorted(self._sorted, self._count, np.array(self._pending))
            self._pending.clear()
        return self._sorted[: self._count]
