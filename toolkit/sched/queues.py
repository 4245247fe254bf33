"""Batches that wait at workers: queues, the loads that SCLS balances, retries of failed batches.

A batch that ran out of memory is retried in two halves on its worker; a batch that lost its worker
is retried on another. The policy decides what a batch holds. Where a retry goes is decided here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from toolkit.sched.protocols import SwapLaw
from toolkit.sched.types import Job, LatencyLaw, Pass, Worker
from toolkit.sched.view import View


def serving_s(law: LatencyLaw, batch_size: int, input_length: int, steps: int) -> float:
    """T_serve(N, L, S) of a static batch in seconds, SCLS Eq. 1: the unit of loads."""
    decode_s = law.decode_s(batch_size, input_length, steps - law.prefill_emits_token)
    return law.prefill_s(batch_size, input_length) + decode_s


def transfers_s(law: SwapLaw, out: Iterable[int], back: Iterable[int]) -> float:
    """Seconds to move caches of `out` tokens each to host memory, and of `back` tokens from there,
    one after the other.
    """
    # by hand: compiled code takes the sum of a list of floats for an integer
    out_s = back_s = 0.0
    for tokens in out:
        out_s += law.out_s(tokens)
    for tokens in back:
        back_s += law.in_s(tokens)
    return out_s + back_s


class PassQueues:
    """The queues of a scheduler's workers. It writes `Worker.queue`, `load_s` and `assigned`.

    A worker becomes due when a batch is queued at it.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._workers = view.workers
        self.batches = 0  # the next batch number

    def put(self, batch: Pass, *, first: bool = False) -> None:
        """Append the batch to its worker's queue, or with `first` put it at the front."""
        worker = self._workers[batch.worker]
        if batch.pass_id < 0:
            batch.pass_id = self.batches
            self.batches += 1
        worker.load_s += batch.estimated_s  # Eq. 11
        worker.assigned += 1
        if not worker.is_due:
            self._view.make_due(worker)
        if first:
            worker.queue.appendleft(batch)
        else:
            worker.queue.append(batch)

    def unload(self, worker: Worker, batch: Pass) -> None:
        """Subtract a completed batch from the load (SCLS 4.5).

        The load is set to exactly zero when nothing is left, so that rounding errors do not add up.
        """
        worker.load_s = (
            max(worker.load_s - batch.estimated_s, 0.0) if worker.queue or worker.batch else 0.0
        )

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

    def halve(self, worker: Worker, batch: Pass, jobs: Sequence[Job], *, crashed: bool) -> None:
        """Queue the jobs of a batch that failed on `worker` in two halves, before all others.

        They go to the same worker, or to another if it `crashed`. So a half fits the memory, or the
        request that kills its worker ends up alone and is found.
        """
        where = self._least_loaded(worker) if crashed else worker
        half = (len(jobs) + 1) // 2
        for part in (jobs[half:], jobs[:half]):  # the first half ends up at the front
            if part:
                self.put(static_pass(where, part, batch.steps), first=True)

    def leave(self, lost: Worker) -> None:
        """Move the queue of a lost worker to other workers."""
        queue = lost.queue
        lost.queue = deque()
        lost.load_s = 0.0
        for batch in queue:
            batch.worker = self._least_loaded(lost).index
            self.put(batch)

    def _least_loaded(self, lost: Worker) -> Worker:
        """The least loaded worker: alive workers first, and other workers before `lost`."""
        return min(
            self._workers,
            key=lambda other: (not other.alive, other is lost, other.load_s, other.index),
        )


def static_pass(worker: Worker, jobs: Sequence[Job], steps: int) -> Pass:
    """Return a pass of these jobs that keeps no caches, with an estimate by the worker's law.

    It has at most `steps` steps, and none after the longest job.
    """
    length = max(job.length for job in jobs)
    steps = min(steps, max(job.max_new_tokens - job.generated for job in jobs))
    estimate = serving_s(worker.latency, len(jobs), length, steps)
    return Pass(worker.index, tuple(jobs), steps, length, estimate)
