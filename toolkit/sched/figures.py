"""Integers that policies keep per worker and recompute only for workers that changed.

A router that looks at every worker at every arrival costs more with each worker and each waiting
job. But what it reads only changes when a round ends or a job comes or goes. So `WorkerFigure`
caches the numbers, the scheduler marks stale ones, and the least is found by one array operation.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any, final

import numpy as np
from mypy_extensions import mypyc_attr
from numpy.typing import NDArray

from toolkit.sched.types import Worker

Numbers = NDArray[np.int64]
# Maps a worker and an expected output length to its figure and the figure's rows.
Amount = Callable[[Worker, int], tuple[int, int]]
FEW_WORKERS = 32  # up to so many, scanning all of them is faster than keeping a heap


class WorkerFigure:
    """One number per worker, which may depend on `expected`, the expected length of an output.

    `amount` computes the number and its rows. If `expected` grows by one token, the number grows by
    0 to `rows`. So the number for one length bounds the number for another from below, and a new
    length requires recomputing only the workers that might be the least.
    """

    def __init__(self, workers: Sequence[Worker], amount: Amount) -> None:
        self._workers = workers
        self._amount = amount
        count = len(workers)
        self._is_few = count <= FEW_WORKERS
        # Cells of arrays, which are read and written faster than those of numpy, and views of them.
        self._cells = [array("q", bytes(8 * count)) for _ in range(3)]
        views = [np.frombuffer(cells, dtype=np.int64) for cells in self._cells]
        self._values, self._rows, self._expected = views  # the length that each was computed for
        self._changed = set(range(count))  # workers with a stale number
        # What `bounds` returned last and the length that it was for: kept up to date by `write`.
        self._bound_cells = array("q", bytes(8 * count))
        self._bounds: Numbers = np.frombuffer(self._bound_cells, dtype=np.int64)
        self._bounds_for = -1

    def bounds(self, expected: int = 0) -> Numbers:
        """The numbers of all workers [n], exact for `expected` or lower bounds: read only."""
        for index in self._changed:
            self._work_out(index, expected)
        self._changed.clear()
        if self._bounds_for != expected:
            drop = self._expected - expected
            np.maximum(drop, 0, out=drop)
            drop *= self._rows
            np.subtract(self._values, drop, out=self._bounds)
            self._bounds_for = expected
        return self._bounds

    def least(self, able: Numbers, expected: int) -> int:
        """The first of the workers `able` (ascending) with the least number."""
        if self._is_few:
            return self._least_of_few(able.tolist(), expected)
        figures = self.bounds(expected)
        every = len(able) == len(figures)
        computed = self._cells[2]
        while True:
            index = int((figures if every else figures[able]).argmin())
            if not every:
                index = int(able[index])
            if computed[index] == expected:
                return index
            self._work_out(index, expected)

    def _least_of_few(self, able: list[int], expected: int) -> int:
        """`least` in a loop, which takes less time than numpy's calls for few workers."""
        for index in self._changed:
            self._work_out(index, expected)
        self._changed.clear()
        values, rows, computed = self._cells
        while True:
            least = 0
            found = -1
            for index in able:
                value: int = values[index]
                drop: int = computed[index] - expected
                if drop > 0:
                    value -= drop * rows[index]
                if found < 0 or value < least:
                    least = value
                    found = index
            if computed[found] == expected:
                return found
            self._work_out(found, expected)

    def least_by(
        self,
        able: Numbers,
        expected: int,
        bound: Callable[[Numbers, Numbers], Any],
        exact: Callable[[int], float],
    ) -> int:
        """The worker in `able` with the least `exact` score, which `bound` bounds from below.

        `bound` gets the figures and the rows of `able`, in order. `exact` gets a worker's index and
        is called only for workers that might be the least.
        """
        scores = bound(self.bounds(expected)[able], self._rows[able]).astype(np.float64)
        known: set[int] = set()
        while True:
            k = int(scores.argmin())
            if k in known:
                return int(able[k])
            known.add(k)
            scores[k] = exact(int(able[k]))

    def write(self, index: int, expected: int, value: int, rows: int) -> None:
        """Set the worker's number to what it will be once the scheduler has applied a decision."""
        values, numbers, computed = self._cells
        values[index] = value
        numbers[index] = rows
        computed[index] = expected
        self._set_bound(index)

    def add(self, index: int, tokens: int) -> None:
        """Count a job that the current decision gives to this worker."""
        values, rows, _ = self._cells
        values[index] += tokens
        rows[index] += 1
        self._set_bound(index)

    def _set_bound(self, index: int) -> None:
        """Bring the worker's bound up to date."""
        if self._bounds_for >= 0:  # `bounds` was asked for
            values, rows, computed = self._cells
            bound: int = values[index]
            drop: int = computed[index] - self._bounds_for
            if drop > 0:
                bound -= drop * rows[index]
            self._bound_cells[index] = bound

    def forget(self, index: int) -> None:
        """Mark the worker's number as stale."""
        self._changed.add(index)

    def _work_out(self, index: int, expected: int) -> None:
        value, rows = self._amount(self._workers[index], expected)
        self.write(index, expected, value, rows)


@final
@mypyc_attr(acyclic=True)
class LoadKey:
    """A worker in the heap of `Loads`, and its `place` there; -1 if it has none.

    A comparison touches little memory, because it does not read the worker.
    """

    __slots__ = ("assigned", "index", "load_s", "place")

    def __init__(self, worker: Worker) -> None:
        self.load_s = worker.load_s
        self.assigned = worker.assigned
        self.index = worker.index
        self.place = -1

    def is_before(self, other: LoadKey) -> bool:
        if self.load_s != other.load_s:
            return self.load_s < other.load_s
        if self.assigned != other.assigned:
            return self.assigned < other.assigned
        return self.index < other.index


class Loads:
    """Workers in order of `Worker.load_s`, then of batches assigned, then of index.

    It is a heap of the alive workers, each once, made at the first query after `forget`.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self.kept: list[LoadKey] = []  # the heap; empty until the first query
        self._keys: list[LoadKey] = []  # by worker

    def note(self, worker: Worker) -> None:
        """Record that the worker's load changed."""
        heap = self.kept
        if not heap:
            return
        key = self._keys[worker.index]
        place = key.place
        if place < 0:
            return
        key.load_s = worker.load_s
        key.assigned = worker.assigned
        while place > 0:
            other = heap[(place - 1) // 2]
            if not key.is_before(other):
                break
            heap[place] = other
            other.place, place = place, other.place
        count = len(heap)
        while (below := 2 * place + 1) < count:
            other = heap[below]
            if below + 1 < count and heap[below + 1].is_before(other):
                other = heap[below + 1]
            if not other.is_before(key):
                break
            heap[place] = other
            other.place, place = place, other.place
        heap[place] = key
        key.place = place

    def forget(self) -> None:
        """Drop everything: any load may have changed, and workers may have gone or come back."""
        self.kept.clear()

    def least(self, count: int) -> list[tuple[float, int, int]]:
        """The least loaded alive workers, as (load in s, batches assigned, index).

        At least `count` of them, or all if there are fewer; in ascending order if a heap is kept.
        """
        heap = self.kept
        workers = self._workers
        if len(workers) <= FEW_WORKERS:
            return [
                (worker.load_s, worker.assigned, worker.index) for worker in workers if worker.alive
            ]
        if not heap:  # a sorted list is a heap
            keys = self._keys = [LoadKey(worker) for worker in workers]
            heap[:] = [keys[worker.index] for worker in workers if worker.alive]
            heap.sort(key=attrgetter("load_s", "assigned", "index"))
            for place, key in enumerate(heap):
                key.place = place
        loads: list[tuple[float, int, int]] = []
        # The keys below those found, with their places in the heap: the next is one of them.
        open_keys: list[tuple[float, int, int, int]] = []
        _open(open_keys, heap, 0)
        while open_keys:
            load_s, assigned, index, place = heappop(open_keys)
            loads.append((load_s, assigned, index))
            if len(loads) == count:
                break
            _open(open_keys, heap, 2 * place + 1)
            _open(open_keys, heap, 2 * place + 2)
        return loads


def _open(keys: list[tuple[float, int, int, int]], heap: list[LoadKey], place: int) -> None:
    """Add the key at this place of the heap, if there is one."""
    if place < len(heap):
        key = heap[place]
        heappush(keys, (key.load_s, key.assigned, key.index, place))
