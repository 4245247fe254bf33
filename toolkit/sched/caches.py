"""What rounds do with caches: which jobs join, leave, are evicted, paused, swapped or lost.

`WorkerRounds` starts and ends the rounds of all workers as the policy's batches say, and keeps
`toolkit.sched.memory` up to date.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.sched.types import Batch, Job, Moves, RoundResult, Worker


def holds(worker: Worker, job: Job) -> bool:
    """Whether the worker keeps the job's cache, on the device or in host memory."""
    return job in worker.residents.jobs or job in worker.held.jobs or job in worker.swapped.jobs


def forget(worker: Worker, job: Job) -> None:
    """Drop the job's cache wherever the worker keeps it. Updates the job's own counters."""
    if job in worker.residents.jobs:
        worker.residents.leave(job)
    elif job in worker.held.jobs:
        worker.held.take(job)
    else:
        worker.swapped.take(job)


def _transfer(worker: Worker, moves: Moves) -> None:
    """Move the caches, except those of jobs that were cancelled meanwhile."""
    held = worker.held
    swapped = worker.swapped
    for job in moves.swap_out:
        if job in held.jobs:
            held.take(job)
            swapped.put(job)
    for job in moves.swap_in:
        if job in swapped.jobs:
            swapped.take(job)
            held.put(job)


class WorkerRounds:
    """The rounds of all workers. Jobs that its methods return have ended for the scheduler.

    It decides nothing: a `Batch` says which jobs enter, are evicted or moved, and its methods
    update the worker. If a job is gone but the engine still holds its cache, the worker's next
    round names it, so that the engine can drop the cache.
    """

    def __init__(self) -> None:
        # By worker: jobs that are gone, with caches that the engine still holds.
        self._cancelled: dict[int, list[Job]] = {}
        self._released: dict[int, list[Job]] = {}

    def begin(self, worker: Worker, batch: Batch, now_s: float) -> None:
        """Start a round. Adds to `batch` the jobs cancelled or released since the last round."""
        residents = worker.residents
        jobs = batch.jobs
        for job in batch.evict:
            self.evict(worker, job, now_s)
        if batch.moves is not None:
            moves = batch.moves
            held = worker.held
            for job in (*moves.pause, *moves.swap_out):
                if job in residents.jobs:
                    residents.leave(job)
                    held.put(job)
                    job.waiting_since_s = now_s
            if not moves.overlap:
                _transfer(worker, moves)
            for job in moves.promote:
                job.promoted_at = job.generated
            for job in moves.resume:
                held.take(job)
                residents.join(job)
        for job in jobs:
            residents.join(job)
            job.slices += 1
        if batch.chunk_tokens and jobs:
            residents.prefill_on((*residents.prefilling, *batch.jobs), emits=worker.emits > 0)
        if self._cancelled and worker.index in self._cancelled:
            batch.evict += tuple(self._cancelled.pop(worker.index))
        if self._released and worker.index in self._released:
            batch.release = tuple(self._released.pop(worker.index))

    def finish(
        self, worker: Worker, batch: Batch, result: RoundResult, jobs: dict[str, Job], now_s: float
    ) -> list[Job]:
        """End a round, failed or not. Returns the jobs that ended in it or were cancelled."""
        residents = worker.residents
        if batch.jobs or residents.prefilling:
            if result.joined is not None or residents.prefilling:
                self._finish_prefills(worker, batch, result)
            elif worker.emits:
                residents.emitted(batch.jobs)
        if result.steps:
            residents.steps += result.steps
            worker.stepped_s = now_s
        for request_id, steps in result.missed:
            residents.miss(jobs[request_id], steps)
        ended = [jobs[request_id] for request_id in result.ended]
        for job in ended:
            residents.leave(job)
        if self._cancelled and worker.index in self._cancelled:
            gone = self._cancelled[worker.index]
            left = [job for job in gone if job.request_id not in result.ended]
            self._cancelled[worker.index] = left
            for job in left:
                if job in residents.jobs:
                    residents.leave(job)
                    ended.append(job)
        if result.failure == "crashed":
            return ended
        if batch.moves is not None and batch.moves.overlap:
            _transfer(worker, batch.moves)  # beside the round: they are complete
        if worker.row_limit < worker.slots:
            worker.row_limit = min(2 * worker.row_limit, worker.slots)
        for request_id in result.dropped:
            dropped = jobs.get(request_id)  # it may have been cancelled meanwhile
            if dropped is not None and holds(worker, dropped):
                self.evict(worker, dropped, now_s)
        return ended

    def run_out_of_memory(
        self, worker: Worker, result: RoundResult, jobs: dict[str, Job]
    ) -> Job | None:
        """A round ran out of memory: half of the dropped jobs may enter with the next round.

        Returns a job that was dropped although it was alone on the device.
        """
        if not result.dropped:
            return None
        dropped = [
            job for request_id in result.dropped if (job := jobs.get(request_id)) is not None
        ]
        stay = len(worker.residents)
        worker.row_limit = max(stay + len(dropped) // 2, 1)
        return dropped[0] if len(dropped) == 1 and not (stay or worker.held) else None

    def _finish_prefills(self, worker: Worker, batch: Batch, result: RoundResult) -> None:
        """Jobs that joined get the prefill's token and the steps since; the others get neither."""
        residents = worker.residents
        emits = worker.emits > 0
        waited = dict.fromkeys((*residents.prefilling, *batch.jobs))
        joined = result.joined
        after = dict(joined) if joined is not None else {job.request_id: 0 for job in waited}
        for job in waited:
            residents.miss(job, after.get(job.request_id, result.steps))
        residents.prefill_on([job for job in waited if job.request_id not in after], emits=emits)
        if emits:
            residents.emitted([job for job in waited if job.request_id in after])

    def crash(self, worker: Worker, now_s: float) -> Job | None:
        """Evict all jobs of a dead worker, halve its limit on rows; returns a job that ran alone.

        The jobs keep their order. `lose`, which is called next, drops caches in host memory.
        """
        rows = len(worker.residents)
        jobs = [*worker.residents.jobs, *worker.held.jobs]
        for job in reversed(jobs):
            self.evict(worker, job, now_s)
        worker.row_limit = max(rows // 2, 1)
        return jobs[0] if len(jobs) == 1 else None

    def lose(self, worker: Worker, now_s: float) -> None:
        """The worker's process is gone, together with the caches in host memory."""
        for job in reversed([*worker.residents.jobs, *worker.held.jobs, *worker.swapped.jobs]):
            self.evict(worker, job, now_s)
        self._released.pop(worker.index, None)
        self._cancelled.pop(worker.index, None)

    def evict(self, worker: Worker, job: Job, now_s: float) -> None:
        """Drop the job's cache and put it first in its worker's inbox; its tokens are kept.

        To keep the order, call it for the last admitted job first.
        """
        if job in worker.residents.jobs:
            job.waiting_since_s = now_s
        forget(worker, job)
        job.evictions += 1
        job.home = worker.index
        worker.inbox.appendleft(job)

    def release(self, worker: Worker, job: Job, now_s: float) -> None:
        """Take a job off its worker between two rounds, to be routed again."""
        worker.residents.leave(job)
        job.reroutes += 1
        job.waiting_since_s = now_s
        self._released.setdefault(worker.index, []).append(job)

    def cancel(self, worker: Worker, job: Job) -> bool:
        """Cancel a job with a cache here. Returns whether it ended at once; else with the round."""
        self._cancelled.setdefault(worker.index, []).append(job)
        if job in worker.residents.jobs and worker.running is not None:
            return False
        forget(worker, job)
        return True
