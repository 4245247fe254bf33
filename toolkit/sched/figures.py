"""Whole numbers that policies keep by worker: worked out anew only where something happened.

A router that asks every worker at every arrival costs more with each worker and each job that
waits. What it asks for changes only where a round ended, a job came or went. So a `WorkerFigure`
keeps the answers, the scheduler says which are out of date, and to find the least is one operation
on an array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.sched.types import Worker

Numbers = NDArray[np.int64]
Amount = Callable[
    [Worker, int], tuple[int, int]
]  # of a worker and `expected`: the figure, and its rows
Score = Callable[[Numbers], NDArray[np.float64]]  # of figures
FEW = 32  # workers of which all are looked at sooner than a heap of them is kept


class WorkerFigure:
    """One number per worker, which may depend on `expected`, the length that an output is expected
    to have.

    With each token that is expected more, the number rises by at least nothing and at most its
    `rows`. That bounds from below what was worked out for another length, so that a new length
    costs only the workers that might be least.

    Args:
        workers: all of them, numbered from 0.
        amount: works the number out, and its rows.
    """

    def __init__(self, workers: Sequence[Worker], amount: Amount) -> None:
        self._workers = workers
        self._amount = amount
        count = len(workers)
        self._values = np.zeros(count, dtype=np.int64)
        self._rows = np.zeros(count, dtype=np.int64)
        self._expected = np.zeros(count, dtype=np.int64)  # what each was worked out for
        self._changed = set(range(count))  # workers whose number is out of date

    def bounds(self, expected: int = 0) -> Numbers:
        """The numbers of all workers [n], a copy: worked out for `expected`, or no more than that
        would be.
        """
        for index in self._changed:
            self._work_out(index, expected)
        self._changed.clear()
        drop = self._expected - expected
        np.maximum(drop, 0, out=drop)
        drop *= self._rows
        return np.subtract(self._values, drop, out=drop)

    def least(self, able: Numbers, expected: int, score: Score | None = None) -> int:
        """Which of the workers `able`, ascending, has the least number; of equals the first.

        With `score` the least score: it is given figures of `able` in their order, and rises with
        each.
        """
        figures = self.bounds(expected)
        while True:
            found = figures[able]
            index = int(able[(found if score is None else score(found)).argmin()])
            if self._expected[index] == expected:
                return index
            self._work_out(index, expected)
            figures[index] = self._values[index]

    def least_by(
        self,
        able: Numbers,
        expected: int,
        bound: Callable[[Numbers, Numbers], Any],
        exact: Callable[[int], float],
    ) -> int:
        """The same by a score that no figure says: `bound` gives each at most its `exact` score.

        `bound` is given the figures and the rows of `able`, in their order.
        """
        scores, known = (
            bound(self.bounds(expected)[able], self._rows[able]).astype(np.float64),
            set(),
        )
        while True:
            k = int(scores.argmin())
            if k in known:
                return int(able[k])
            known.add(k)
            scores[k] = exact(int(able[k]))

    def write(self, index: int, expected: int, value: int, rows: int) -> None:
        """What the worker's number will be when the scheduler has heard what was decided."""
        self._values[index], self._rows[index], self._expected[index] = value, rows, expected

    def add(self, index: int, tokens: int) -> None:
        """A job was given to this worker, and will be there when the scheduler has heard of it."""
        self._values[index] += tokens
        self._rows[index] += 1

    def forget(self, index: int) -> None:
        """The worker's number is out of date."""
        self._changed.add(index)

    def _work_out(self, index: int, expected: int) -> None:
        value, rows = self._amount(self._workers[index], expected)
        self.write(index, expected, value, rows)


class Loads:
    """Workers by `Worker.load_s`, then by how few batches they were given, then by index.

    A heap, in which entries that are not true any more stay until they come first.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self.kept: list[tuple[float, int, int]] = []  # the heap; empty until it is asked for

    def note(self, worker: Worker) -> None:
        """The worker's load is another one now."""
        if self.kept:
            heappush(self.kept, (worker.load_s, worker.assigned, worker.index))

    def forget(self) -> None:
        """Any load may be another one now, and any worker lost or back."""
        self.kept.clear()

    def least(self, count: int) -> list[tuple[float, int, int]]:
        """Load, batches and index of the first workers that are alive: at least so many of them,
        where there are as many.
        """
        heap, workers = self.kept, self._workers
        if len(workers) <= FEW:
            return [
                (worker.load_s, worker.assigned, worker.index) for worker in workers if worker.alive
            ]
        if not heap or len(heap) > 4 * len(workers):
            heap[:] = [
                (worker.load_s, worker.assigned, worker.index) for worker in workers if worker.alive
            ]
            heapify(heap)
        found: list[tuple[float, int, int]] = []
        while heap and len(found) < count:
            entry = heappop(heap)
            worker = workers[entry[2]]
            true = entry[:2] == (worker.load_s, worker.assigned) and worker.alive
            if true and not (found and found[-1] == entry):
                found.append(entry)
        for entry in found:
            heappush(heap, entry)
        return found
