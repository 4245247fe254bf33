"""The caches of a worker, and what passes do with them: they come, go, and move.

`RunningJobs` has the jobs that decode in the worker's passes: each gains one token per step, so its
length is its length when it joined plus the steps since then. Sums are kept as integers, and a
job's own counters change only when it leaves. `ParkedCaches` has the jobs with caches that do not
decode. `WorkerPasses` starts and ends the passes of all workers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from toolkit.sched.types import Job, Moves, Pass, PassResult, Worker


NO_PREFILLS: dict[Job, None] = {}  # of every worker that splits no prefill; never changed


class RunningJobs:
    """Jobs in order of admission, and the tokens that they hold.

    `steps` counts the worker's decode steps so far. `base` is the sum of length - joined over the
    jobs, and `committed` the sum of prompt + max_new_tokens. `prefilling` has the jobs that may
    take more than one pass to prefill: until then they do not grow, and the tokens that a prefill
    gives (`emits`: 1 or 0) count as owed to them.
    """

    __slots__ = ("_emits", "_slots", "base", "committed", "jobs", "prefilling", "steps")

    def __init__(self, emits: int) -> None:
        self.jobs: dict[Job, None] = {}
        self.steps = 0
        self.committed = 0
        self.prefilling = NO_PREFILLS
        self._emits = emits
        self.base = 0
        self._slots: list[Job] = []  # a job that leaves gives its place to the last

    @property
    def used(self) -> int:
        """Tokens of KV cache that the jobs hold or are owed by an unfinished prefill."""
        return self.base + len(self.jobs) * self.steps + len(self.prefilling) * self._emits

    @property
    def prefill_tokens(self) -> int:
        """Input tokens of the jobs that are being prefilled."""
        return sum([job.length for job in self.prefilling]) if self.prefilling else 0

    @property
    def longest(self) -> int:
        """Tokens that the longest job holds; 0 if there is none."""
        return max([job.length + self.steps - job.joined for job in self.jobs], default=0)

    def join(self, job: Job) -> None:
        """The job decodes from now on, once its input is prefilled or its cache is back."""
        steps = self.steps
        job.joined = steps
        job.slot = len(self._slots)
        self._slots.append(job)
        self.jobs[job] = None
        self.base += job.length - steps
        self.committed += job.limit_tokens

    def emitted(self, jobs: Iterable[Job]) -> None:
        """Prefill gave each of these jobs its next token."""
        for job in jobs:
            job.length += 1
            job.generated += 1
            self.base += 1

    def prefill_on(self, jobs: Iterable[Job]) -> None:
        """Exactly these jobs are being prefilled."""
        self.prefilling = dict.fromkeys(jobs)

    def holds(self, job: Job) -> int:
        """Tokens of KV cache that a job holds or is owed."""
        return job.length + self.steps - job.joined + (self._emits if job in self.prefilling else 0)

    def leave(self, job: Job) -> None:
        """The job ended or its cache is dropped. Updates the job's own counters."""
        del self.jobs[job]
        if self.prefilling:
            self.prefilling.pop(job, None)
        decoded = self.steps - job.joined
        self.base -= job.length - job.joined
        self.committed -= job.limit_tokens
        job.length += decoded
        job.generated += decoded
        last = self._slots.pop()
        if last is not job:
            self._slots[job.slot] = last
            last.slot = job.slot

    def miss(self, job: Job, steps: int) -> None:
        """The job had no part in `steps` decode steps of this pass, counted already or not yet."""
        job.joined += steps
        self.base -= steps

    def table(self) -> NDArray[np.int64]:
        """A row [length, generated, max_new_tokens] for each job, as of now: [n, 3].

        The order is by `Job.slot`, so that what is sampled for one job does not depend on the order
        in which others left.
        """
        cells: list[int] = []
        steps = self.steps
        for job in self._slots:
            decoded = steps - job.joined
            cells += (job.length + decoded, job.generated + decoded, job.max_new_tokens)
        return np.array(array("q", cells)).reshape(-1, 3)


class ParkedCaches:
    """Jobs with caches that are paused on the device, or swapped out to host memory.

    They are in order of arrival there; `tokens` are those that they hold.
    """

    __slots__ = ("jobs", "tokens")

    def __init__(self) -> None:
        self.jobs: dict[Job, None] = {}
        self.tokens = 0

    def put(self, job: Job) -> None:
        """The job's cache is here from now on; its length stays the same."""
        self.jobs[job] = None
        self.tokens += job.length

    def take(self, job: Job) -> None:
        """The job's cache is no longer here."""
        del self.jobs[job]
        self.tokens -= job.length


def holds(worker: Worker, job: Job) -> bool:
    """Whether the worker keeps the job's cache, on the device or in host memory."""
    return job in worker.running.jobs or job in worker.paused.jobs or job in worker.swapped.jobs


def forget(worker: Worker, job: Job) -> None:
    """Drop the job's cache wherever the worker keeps it. Updates the job's own counters."""
    if job in worker.running.jobs:
        worker.running.leave(job)
    elif job in worker.paused.jobs:
        worker.paused.take(job)
    else:
        worker.swapped.take(job)


def _transfer(worker: Worker, moves: Moves) -> None:
    """Move the caches, except of jobs that were cancelled meanwhile."""
    paused = worker.paused
    swapped = worker.swapped
    for job in moves.swap_out:
        if job in paused.jobs:
            paused.take(job)
            swapped.put(job)
    for job in moves.swap_in:
        if job in swapped.jobs:
            swapped.take(job)
            paused.put(job)


class WorkerPasses:
    """The passes of all workers. Jobs that its methods return have ended for the scheduler.

    It decides nothing: a `Pass` says which jobs enter, are evicted or moved, and its methods
    update the worker. If a job is gone but the engine still holds its cache, the worker's next
    pass names it, so that the engine can drop the cache.
    """

    def __init__(self) -> None:
        # By worker: jobs that are gone, with caches that the engine still holds.
        self._cancelled: dict[int, list[Job]] = {}
        self._released: dict[int, list[Job]] = {}

    def begin(self, worker: Worker, batch: Pass, now_s: float) -> None:
        """Start a pass. Adds to `batch` the jobs cancelled or released since the last pass."""
        running = worker.running
        jobs = batch.jobs
        for job in batch.evict:
            self.evict(worker, job, now_s)
        if batch.moves is not None:
            moves = batch.moves
            paused = worker.paused
            for job in (*moves.pause, *moves.swap_out):
                if job in running.jobs:
                    running.leave(job)
                    paused.put(job)
                    job.waiting_since_s = now_s
            if not moves.overlap:
                _transfer(worker, moves)
            for job in moves.promote:
                job.promoted_at = job.generated
            for job in moves.resume:
                paused.take(job)
                running.join(job)
        for job in jobs:
            running.join(job)
        if batch.chunk_tokens and jobs:
            running.prefill_on((*running.prefilling, *batch.jobs))
        if self._cancelled and worker.index in self._cancelled:
            batch.evict += tuple(self._cancelled.pop(worker.index))
        if self._released and worker.index in self._released:
            batch.release = tuple(self._released.pop(worker.index))

    def finish(
        self, worker: Worker, batch: Pass, result: PassResult, jobs: dict[str, Job], now_s: float
    ) -> list[Job]:
        """End a pass, failed or not. Returns the jobs that ended in it or were cancelled."""
        running = worker.running
        if batch.keep_cache and (batch.jobs or running.prefilling):
            if result.joined is not None or running.prefilling:
                self._finish_prefills(worker, batch, result)
            elif worker.emits:
                running.emitted(batch.jobs)
        if result.steps:
            running.steps += result.steps
            worker.stepped_s = now_s
        for request_id, steps in result.missed:
            running.miss(jobs[request_id], steps)
        ended = [jobs[request_id] for request_id in result.ended]
        for job in ended:
            running.leave(job)
        if self._cancelled and worker.index in self._cancelled:
            gone = self._cancelled[worker.index]
            left = [job for job in gone if job.request_id not in result.ended]
            self._cancelled[worker.index] = left
            for job in left:
                if job in running.jobs:
                    running.leave(job)
                    ended.append(job)
        if not batch.keep_cache:
            self._cancelled.pop(worker.index, None)
            return ended
        if result.failure == "crashed":
            return ended
        if batch.moves is not None and batch.moves.overlap:
            _transfer(worker, batch.moves)  # beside the pass: they are complete
        if worker.row_limit < worker.slots:
            worker.row_limit = min(2 * worker.row_limit, worker.slots)
        for request_id in result.dropped:
            dropped = jobs.get(request_id)  # it may have been cancelled meanwhile
            if dropped is not None and holds(worker, dropped):
                self.evict(worker, dropped, now_s)
        return ended

    def drop_all(self, worker: Worker, now_s: float) -> list[Job]:
        """Drop all running caches, as a pass that keeps none does at its end. Returns the jobs."""
        running = worker.running
        jobs = list(running.jobs)
        for job in jobs:
            running.leave(job)
            job.waiting_since_s = now_s
        return jobs

    def run_out_of_memory(
        self, worker: Worker, result: PassResult, jobs: dict[str, Job]
    ) -> Job | None:
        """A pass ran out of memory: half of the dropped jobs may enter with the next pass.

        Returns a job that was dropped although it was alone on the device.
        """
        if not result.dropped:
            return None
        dropped = [
            job for request_id in result.dropped if (job := jobs.get(request_id)) is not None
        ]
        stay = len(worker.running.jobs)
        worker.row_limit = max(stay + len(dropped) // 2, 1)
        return dropped[0] if len(dropped) == 1 and not (stay or worker.paused.jobs) else None

    def _finish_prefills(self, worker: Worker, batch: Pass, result: PassResult) -> None:
        """Jobs that joined get the prefill's token and the steps since; the others get neither."""
        running = worker.running
        waited = dict.fromkeys((*running.prefilling, *batch.jobs))
        joined = result.joined
        after = dict(joined) if joined is not None else {job.request_id: 0 for job in waited}
        for job in waited:
            running.miss(job, after.get(job.request_id, result.steps))
        running.prefill_on([job for job in waited if job.request_id not in after])
        if worker.emits:
            running.emitted([job for job in waited if job.request_id in after])

    def crash(self, worker: Worker, now_s: float) -> Job | None:
        """Evict all jobs of a dead worker, halve its limit on rows; returns a job that ran alone.

        The jobs keep their order. `lose`, which is called next, drops caches in host memory.
        """
        rows = len(worker.running.jobs)
        jobs = [*worker.running.jobs, *worker.paused.jobs]
        for job in reversed(jobs):
            self.evict(worker, job, now_s)
        worker.row_limit = max(rows // 2, 1)
        return jobs[0] if len(jobs) == 1 else None

    def lose(self, worker: Worker, now_s: float) -> None:
        """The worker's process is gone, together with the caches in host memory."""
        for job in reversed([*worker.running.jobs, *worker.paused.jobs, *worker.swapped.jobs]):
            self.evict(worker, job, now_s)
        self._released.pop(worker.index, None)
        self._cancelled.pop(worker.index, None)

    def evict(self, worker: Worker, job: Job, now_s: float) -> None:
        """Drop the job's cache and put it first among the waiting jobs; its tokens are kept.

        To keep the order, call it for the last admitted job first.
        """
        if job in worker.running.jobs:
            job.waiting_since_s = now_s
        forget(worker, job)
        job.home = worker.index
        worker.waiting.appendleft(job)

    def release(self, worker: Worker, job: Job, now_s: float) -> None:
        """Take a job off its worker between two passes, to be routed again."""
        worker.running.leave(job)
        job.waiting_since_s = now_s
        self._released.setdefault(worker.index, []).append(job)

    def cancel(self, worker: Worker, job: Job) -> bool:
        """Cancel a job with a cache here. Returns whether it ended at once; else with the pass."""
        self._cancelled.setdefault(worker.index, []).append(job)
        if job in worker.running.jobs and worker.batch is not None:
            return False
        forget(worker, job)
        return True
