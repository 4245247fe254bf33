"""Between the scheduler and a policy: the policy reads a `View` and returns a `Decision`."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from toolkit.sched.types import Job, Pass, Worker

_index = attrgetter("index")


class LengthHistory:
    """The output lengths of the last `window` finished requests, in order of completion.

    Real lengths replace the lengths of `start`.
    """

    def __init__(self, window: int, start: Iterable[int] = ()) -> None:
        self.recent: deque[int] = deque(start, maxlen=window)
        self._window = window
        self._sum = sum(self.recent)
        self._ascending: array[int] | None = None  # kept up to date once it was asked for

    def add(self, length: int) -> None:
        """Record the output length of a request that ended."""
        recent = self.recent
        ascending = self._ascending
        if len(recent) == self._window:
            oldest = recent[0]
            self._sum -= oldest
            if ascending is not None:
                del ascending[bisect_left(ascending, oldest)]
        self._sum += length
        recent.append(length)
        if ascending is not None:
            insort(ascending, length)

    def mean(self) -> int:
        """The mean length, rounded down; 1 if the history is empty."""
        return int(self._sum / len(self.recent)) if self.recent else 1

    def ascending(self) -> NDArray[np.int64]:
        """All lengths, sorted."""
        if self._ascending is None:
            self._ascending = array("q", sorted(self.recent))
        return np.array(self._ascending)


# Maps a worker and an expected output length to a number.
Amount = Callable[[Worker, int], int]
STALE = -1


class WorkerFigure:
    """One number for each worker, which may depend on `expected`, the expected length of an output.

    It only changes when a pass ends or a job comes or goes. So `amount` computes it anew only for
    workers that the scheduler has marked, and for another `expected`.
    """

    def __init__(self, workers: Sequence[Worker], amount: Amount) -> None:
        self._amount = amount
        self._values = [0] * len(workers)
        self._expected = [STALE] * len(workers)  # the length that each number was computed for

    def of(self, worker: Worker, expected: int) -> int:
        """The number of a worker."""
        index = worker.index
        if self._expected[index] != expected:
            self.write(index, expected, self._amount(worker, expected))
        return self._values[index]

    def least(self, workers: Sequence[Worker], expected: int) -> int:
        """The index of the first of the workers with the least number."""
        found = -1
        least = 0
        for worker in workers:
            value = self.of(worker, expected)
            if found < 0 or value < least:
                found = worker.index
                least = value
        return found

    def least_by(
        self, workers: Sequence[Worker], expected: int, exact: Callable[[Worker], int]
    ) -> int:
        """The index of the first of the workers with the least `exact` number, which is never below
        this one: it is only computed for workers that might be the least.
        """
        found = -1
        least = 0
        for bound, place in sorted(
            [(self.of(worker, expected), place) for place, worker in enumerate(workers)]
        ):
            if found >= 0 and bound > least:
                break
            value = exact(workers[place])
            if found < 0 or value < least or (value == least and place < found):
                found = place
                least = value
        return workers[found].index

    def write(self, index: int, expected: int, value: int) -> None:
        """Set a worker's number, such as what it will be once a decision has been applied."""
        self._values[index] = value
        self._expected[index] = expected

    def add(self, index: int, tokens: int) -> None:
        """Count a job that the current decision gives to this worker."""
        self._values[index] += tokens

    def forget(self, index: int) -> None:
        """Mark the worker's number as stale."""
        self._expected[index] = STALE


class View:
    """What a policy may read. The lists are the scheduler's own and change: never write to them.

    A worker is `due` if it is free and something happened to it since the last plan: its
    pass ended, jobs were routed to it while it was idle, or it came back. A policy that never
    leaves an idle worker with work needs only these, so workers without events cost nothing. A
    policy that may let work wait at an idle worker has to look at `free`.
    """

    def __init__(
        self,
        pool: list[Job],
        workers: list[Worker],
        due_s: float,
        finished: LengthHistory,
        rng: np.random.Generator,
    ) -> None:
        self.pool = pool
        self.workers = workers
        self.due_s = due_s
        self.finished = finished
        self.rng = rng
        self.now_s = 0.0
        self.prioritised = False
        self.arrived: dict[int, int] = {}  # workers that jobs were routed to since, and how many
        self.due: list[Worker] = []
        self.figures: dict[Hashable, WorkerFigure] = {}
        self.alive: list[Worker] = []  # the workers that are, by index
        self.workers_changed()
        for worker in self.free:
            self.make_due(worker)

    @property
    def free(self) -> list[Worker]:
        """Workers that are alive and run nothing, by index: a plan may start batches on these."""
        return [worker for worker in self.alive if worker.batch is None]

    def make_due(self, worker: Worker) -> None:
        """For the scheduler: something happened to `worker`. Has no effect while it cannot run."""
        if not worker.is_due and worker.alive and worker.batch is None:
            worker.is_due = True
            self.due.append(worker)

    def sort_due(self) -> None:
        """For the scheduler: order the due workers by index."""
        if len(self.due) > 1:
            self.due.sort(key=_index)

    def workers_changed(self) -> None:
        """For the scheduler: a worker was lost or came back."""
        self.alive = [worker for worker in self.workers if worker.alive]
        for worker in self.due:
            worker.is_due = worker.alive
        self.due = [worker for worker in self.due if worker.alive]

    def figure(self, key: Hashable, amount: Amount) -> WorkerFigure:
        """The numbers that `amount` computes per worker, cached under `key` for the next call."""
        if key not in self.figures:
            self.figures[key] = WorkerFigure(self.workers, amount)
        return self.figures[key]

    def changed(self, index: int) -> None:
        """For the scheduler: a worker's waiting or running jobs changed; its figures are stale."""
        for figure in self.figures.values():
            figure.forget(index)


class Decision:
    """What a policy wants done: batches for workers' queues, in order, and when to ask again.

    `interrupt` names workers that should stop their pass early, so that the policy can act on what
    arrived. If `wake_at_s` is None, `View.due_s` stays as it is.
    """

    def __init__(
        self,
        batches: Sequence[Pass] = (),
        wake_at_s: float | None = None,
        interrupt: Sequence[int] = (),
    ) -> None:
        self.batches = batches
        self.wake_at_s = wake_at_s
        self.interrupt = interrupt


NOTHING = Decision()  # the decision of most ticks
