"""The batches that wait at workers: queues in order, the loads that SCLS balances, what becomes of
batches that failed.

A batch that ran out of memory is tried again in two halves on its worker, one that lost its worker
on another. What a batch holds was decided by its policy; where it has to go instead is decided
here, by the workers' own laws.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from toolkit.sched.protocols import LatencyLaw, View
from toolkit.sched.types import Batch, Job, Worker

# T_serve, how long a static batch takes: what queues are estimated by and loads are counted in.


def serving_s(law: LatencyLaw, batch_size: int, input_length: int, steps: int) -> float:
    """T_serve(N, L, S), SCLS Eq. 1: a prefill, and the decode steps for the tokens that it does not
    give.
    """
    decode_steps = steps - law.prefill_emits_token
    return law.prefill_s(batch_size, input_length) + law.decode_s(
        batch_size, input_length, decode_steps
    )


class BatchQueues:
    """The queues of a scheduler's workers. `Worker.queue`, `load_s` and `assigned` are written
    here.

    Args:
        view: of the scheduler: workers that a batch waits at become due. Where they are of several
            kinds, a batch goes only where its jobs fit.
    """

    def __init__(self, view: View) -> None:
        self._workers = view.workers
        self._mixed = view.mixed
        self._make_due = view.make_due
        self._loads = view.loads
        self._batches = 0  # that have a number

    def put(self, batch: Batch, *, first: bool = False) -> None:
        """At the end of its worker's queue, or `first`."""
        worker = self._workers[batch.worker]
        if batch.batch_id < 0:
            batch.batch_id = self._batches
            self._batches += 1
        worker.load_s += batch.estimated_s  # Eq. 11
        worker.assigned += 1
        if self._loads.kept:
            self._loads.note(worker)
        if not worker.is_due:
            self._make_due(worker)
        if first:
            worker.queue.appendleft(batch)
        else:
            worker.queue.append(batch)

    def unload(self, worker: Worker, batch: Batch) -> None:
        """The correction on completion of SCLS 4.5; exactly zero when nothing is left, so that no
        error adds up.
        """
        worker.load_s = (
            max(worker.load_s - batch.estimated_s, 0.0) if worker.queue or worker.running else 0.0
        )
        self._loads.note(worker)

    def take_out(self, job: Job) -> bool:
        """Its batch goes without it, or not at all: a policy must not take a worker to have work
        that nobody wants.

        False where no batch that waits has it.
        """
        for worker in self._workers:
            for batch in worker.queue:
                if job in batch.jobs:
                    self._leave_out(job, worker, batch)
                    return True
        return False

    def _leave_out(self, job: Job, worker: Worker, batch: Batch) -> None:
        batch.jobs = tuple(other for other in batch.jobs if other is not job)
        if not batch.jobs:
            worker.queue.remove(batch)
            self.unload(worker, batch)

    def halve(self, worker: Worker, batch: Batch, jobs: Sequence[Job], *, crashed: bool) -> None:
        """Jobs of a batch that failed on `worker`, in two before all others: there, or where it
        `crashed` elsewhere.

        So memory suffices, or a request that kills its worker is found and fails alone.
        """
        where = self._least_loaded(worker) if crashed else worker
        half = (len(jobs) + 1) // 2
        for part in (jobs[half:], jobs[:half]):  # the first half ends up at the front
            if part and crashed and self._mixed:
                self._place(batch, part, worker, first=True)
            elif part:
                self.put(_retry(batch, part, where), first=True)

    def leave(self, lost: Worker) -> None:
        """What waits at a worker that is lost goes elsewhere."""
        queue, lost.queue = lost.queue, deque()
        lost.load_s = 0.0
        for batch in queue:
            if self._mixed:
                self._place(batch, batch.jobs, lost)
            else:
                batch.worker = self._least_loaded(lost).index
                self.put(batch)

    def _place(
        self, batch: Batch, jobs: Sequence[Job], lost: Worker, *, first: bool = False
    ) -> None:
        """Jobs of a batch of `lost` go where they fit by that worker's laws, in smaller batches if
        they must.

        One that nobody else alive holds waits in the queue of `lost`, alone.
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
        """Of the workers that are alive, others than `lost` first."""
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
    """A part of a failed batch as a batch of its own, estimated by the worker's law."""
    length = max(job.length for job in jobs)
    steps = min(batch.steps, max(job.remaining_limit for job in jobs))
    estimate = serving_s(worker.latency, len(jobs), length, steps)
    return Batch(worker.index, tuple(jobs), steps, length, estimate, batch.until, batch.keep_cache)


# How fast a worker is when its memory is full, by its own laws: what work is shared out by among
# unequal ones.
#
# A worker's speed hangs on how many rows decode at once. What tells unequal ones apart under load
# is what they do with as many as they have room for: each row stays for its decode steps, and for
# the prefills of those who come meanwhile.

LEAST_S = 1e-9  # that a row stays: a law may say that something takes no time
ROWS_MAX = 256  # that count: what engines run at most by default, and laws are asked for
# the golden ratio's: multiples of it fill a circle evenly, however far one counts
TURN = 0.6180339887498949


def requests_per_s(
    worker: Worker, prompt: float, output: float, most_rows: int = ROWS_MAX
) -> float:
    """Requests of such lengths, in tokens, that the worker serves in a second when it is full."""
    law = worker.latency
    rows = max(
        min(int(worker.capacity_tokens // (prompt + output)), worker.slots, most_rows, ROWS_MAX), 1
    )
    stays_s = output * law.decode_s(rows, int(prompt + output / 2), 1) + rows * law.prefill_s(
        1, prompt
    )
    return rows / max(stays_s, LEAST_S)


def tokens_per_s(worker: Worker, job: Job, expected: int, most_rows: int) -> float:
    """Tokens, read and generated, of requests like `job`; `expected` is the length of an output."""
    output = _output(job, expected)
    return (job.length + output) * requests_per_s(worker, job.length, output, most_rows)


def by_pace(
    job: Job, kinds: Sequence[Worker], kind_of: NDArray[np.int64], expected: int, most_rows: int
) -> int:
    """Which of the workers, so that each gets as many of the jobs that come one after the other as
    it is fast.

    By the job's ticket alone: no state, and no randomness.

    Args:
        kinds: a worker of each kind.
        kind_of: [n], the kind of each that the job may go to. The answer is a place in it.
    """
    output = _output(job, expected)
    paces = np.array([requests_per_s(worker, job.length, output, most_rows) for worker in kinds])
    bounds = np.cumsum(paces[kind_of])  # one after the other, as a loop would add them
    at = job.ticket * TURN % 1.0 * bounds[-1]
    return min(int(bounds.searchsorted(at, side="right")), len(bounds) - 1)


def _output(job: Job, expected: int) -> int:
    """Tokens that it will still generate; before anything has ended, all that it may."""
    output = min(expected, job.max_new_tokens) if expected > 1 else job.max_new_tokens
    return max(output - job.generated, 1)
