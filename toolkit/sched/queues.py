"""Batches that wait at workers: queues, the loads that SCLS balances, retries of failed batches.

A batch that ran out of memory is retried in two halves on its worker; a batch that lost its worker
is retried on another. The policy decides what a batch holds. Where a retry goes is decided here, by
the workers' own laws.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from toolkit.sched.protocols import SliceLaw
from toolkit.sched.types import Batch, Job, Worker
from toolkit.sched.view import View


def serving_s(law: SliceLaw, batch_size: int, input_length: int, steps: int) -> float:
    """T_serve(N, L, S) of a static batch in seconds, SCLS Eq. 1: the unit of loads."""
    decode_s = law.decode_s(batch_size, input_length, steps - law.prefill_emits_token)
    return law.prefill_s(batch_size, input_length) + decode_s


class BatchQueues:
    """The queues of a scheduler's workers. It writes `Worker.queue`, `load_s` and `assigned`.

    A worker becomes due when a batch is queued at it. If workers are of several kinds, a batch only
    goes where its jobs fit.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._workers = view.workers
        self.batches = 0  # the next batch number

    def put(self, batch: Batch, *, first: bool = False) -> None:
        """Append the batch to its worker's queue, or with `first` put it at the front."""
        worker = self._workers[batch.worker]
        if batch.batch_id < 0:
            batch.batch_id = self.batches
            self.batches += 1
        worker.load_s += batch.estimated_s  # Eq. 11
        worker.assigned += 1
        if self._view.loads.kept:
            self._view.loads.note(worker)
        if not worker.is_due:
            self._view.make_due(worker)
        if first:
            worker.queue.appendleft(batch)
        else:
            worker.queue.append(batch)

    def unload(self, worker: Worker, batch: Batch) -> None:
        """Subtract a completed batch from the load (SCLS 4.5).

        The load is set to exactly zero when nothing is left, so that rounding errors do not add up.
        """
        worker.load_s = (
            max(worker.load_s - batch.estimated_s, 0.0) if worker.queue or worker.batch else 0.0
        )
        self._view.loads.note(worker)

    def take_out(self, job: Job) -> bool:
        """Remove a cancelled job from its queued batch, and the batch if it becomes empty.

        False if no queued batch has the job.
        """
        for worker in self._workers:
            for batch in worker.queue:
                if job in batch.jobs:
                    batch.jobs = tuple([other for other in batch.jobs if other is not job])
                    if not batch.jobs:
                        worker.queue.remove(batch)
                        self.unload(worker, batch)
                    return True
        return False

    def halve(self, worker: Worker, batch: Batch, jobs: Sequence[Job], *, crashed: bool) -> None:
        """Queue the jobs of a batch that failed on `worker` in two halves, before all others.

        They go to the same worker, or to another if it `crashed`. So a half fits the memory, or the
        request that kills its worker ends up alone and is found.
        """
        where = self._least_loaded(worker) if crashed else worker
        half = (len(jobs) + 1) // 2
        for part in (jobs[half:], jobs[:half]):  # the first half ends up at the front
            if part and crashed and self._view.mixed:
                self._place(batch, part, worker, first=True)
            elif part:
                self.put(_retry(batch, part, where), first=True)

    def leave(self, lost: Worker) -> None:
        """Move the queue of a lost worker to other workers."""
        queue = lost.queue
        lost.queue = deque()
        lost.load_s = 0.0
        for batch in queue:
            if self._view.mixed:
                self._place(batch, batch.jobs, lost)
            else:
                batch.worker = self._least_loaded(lost).index
                self.put(batch)

    def _place(
        self, batch: Batch, jobs: Sequence[Job], lost: Worker, *, first: bool = False
    ) -> None:
        """Queue jobs of a batch of `lost` where they fit by that worker's laws, or parts of it.

        A job that no other alive worker holds waits alone in the queue of `lost`.
        """
        able = [
            other
            for other in self._workers
            if other.alive and other is not lost and _fits(other, jobs, batch.steps)
        ]
        if able or len(jobs) == 1:
            where = min(able, key=lambda other: (other.load_s, other.index), default=lost)
            self.put(_retry(batch, jobs, where), first=first)
            return
        half = (len(jobs) + 1) // 2
        parts = (jobs[half:], jobs[:half]) if first else (jobs[:half], jobs[half:])
        for part in parts:
            self._place(batch, part, lost, first=first)

    def _least_loaded(self, lost: Worker) -> Worker:
        """The least loaded worker: alive workers first, and other workers before `lost`."""
        return min(
            self._workers,
            key=lambda other: (not other.alive, other is lost, other.load_s, other.index),
        )


def _fits(worker: Worker, jobs: Sequence[Job], steps: int) -> bool:
    """Whether the worker's memory has room for a static batch of these jobs."""
    if not all(worker.holds(job) for job in jobs):
        return False
    longest = np.array([max(job.length for job in jobs)])
    return len(jobs) == 1 or int(worker.memory.max_batch(longest, steps, 0.0)[0]) >= len(jobs)


def _retry(batch: Batch, jobs: Sequence[Job], worker: Worker) -> Batch:
    """A part of a failed batch as a new batch, with an estimate by the worker's law."""
    length = max(job.length for job in jobs)
    steps = min(batch.steps, max(job.remaining_limit for job in jobs))
    estimate = serving_s(worker.latency, len(jobs), length, steps)
    return Batch(worker.index, tuple(jobs), steps, length, estimate, batch.until, batch.keep_cache)


# Work is shared out among unequal workers by their speed, by their own laws, with as many rows as
# fit: each row stays for its decode steps and for the prefills of the rows that join meanwhile.
LEAST_STAY_S = 1e-9  # lower bound of a row's stay in seconds: a law may give zero
ROWS_MAX = 256  # rows considered at most: the default limit of engines, and the range of the laws
# The fractional part of the golden ratio: its multiples modulo 1 stay evenly spread.
GOLDEN_FRACTION = 0.6180339887498949


def requests_per_s(
    worker: Worker, prompt: float, output: float, most_rows: int = ROWS_MAX
) -> float:
    """Requests with these lengths in tokens that a worker with full memory serves per second."""
    law = worker.latency
    fitting = int(worker.capacity_tokens // (prompt + output))
    rows = max(min(fitting, worker.slots, most_rows, ROWS_MAX), 1)
    stays_s = output * law.decode_s(rows, int(prompt + output / 2), 1)
    stays_s += rows * law.prefill_s(1, prompt)
    return rows / max(stays_s, LEAST_STAY_S)


def tokens_per_s(worker: Worker, job: Job, expected: int, most_rows: int) -> float:
    """Tokens per second, prompt and output, of requests like `job` with `expected` output."""
    output = _output(job, expected)
    return (job.length + output) * requests_per_s(worker, job.length, output, most_rows)


def by_pace(
    job: Job, kinds: Sequence[Worker], kind_of: NDArray[np.int64], expected: int, most_rows: int
) -> int:
    """Choose a worker for the job so that each gets consecutive jobs in proportion to its speed.

    The choice depends on the job's ticket only: no state and no randomness.

    Args:
        kinds: one worker of each kind.
        kind_of: [n], the kind of each worker that may get the job. The result is an index of it.
    """
    output = _output(job, expected)
    paces = np.array([requests_per_s(worker, job.length, output, most_rows) for worker in kinds])
    bounds = np.cumsum(paces[kind_of])  # summed in order, as a loop would
    at = job.ticket * GOLDEN_FRACTION % 1.0 * bounds[-1]
    return min(int(bounds.searchsorted(at, side="right")), len(bounds) - 1)


def _output(job: Job, expected: int) -> int:
    """Tokens that the job will still generate; all that it may, before any request has ended."""
    output = min(expected, job.max_new_tokens) if expected > 1 else job.max_new_tokens
    return max(output - job.generated, 1)
