"""The life of rounds: who is resident on a worker, who leaves it and how, and what a failed round leaves behind.

Nothing is decided here: a `Batch` says who enters, is evicted or moved, and these methods keep the worker's books. Jobs
whose cache an engine still holds though they have gone are remembered until the worker's next round, which names them.
"""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.sched import moves
from toolkit.sched.types import Batch, Job, RoundResult, Worker


class Rounds:
    """The rounds of all workers. Jobs that it returns have ended: the scheduler forgets them."""

    def __init__(self) -> None:
        self._cancelled: dict[int, list[Job]] = {}  # by worker: ended, and its cache still there
        self._released: dict[int, list[Job]] = {}  # by worker: left it, and its cache still there

    def begin(self, worker: Worker, batch: Batch, now_s: float) -> None:
        """A round starts; the engine hears from `batch` who was cancelled or released since the last."""
        for job in batch.evict:
            self.evict(worker, job, now_s)
        if batch.moves is not None:
            moves.begin(worker, batch.moves, now_s)
        residents, jobs = worker.residents, batch.jobs
        if jobs:
            for job in jobs:
                residents.join(job)
                job.slices += 1
        if batch.chunk_tokens and jobs:
            residents.prefill_on((*residents.prefilling, *batch.jobs), emits=worker.latency.prefill_emits_token)
        if self._cancelled and worker.index in self._cancelled:
            batch.evict += tuple(self._cancelled.pop(worker.index))
        if self._released and worker.index in self._released:
            batch.release = tuple(self._released.pop(worker.index))

    def finish(
        self, worker: Worker, batch: Batch, result: RoundResult, jobs: Mapping[str, Job], now_s: float
    ) -> list[Job]:
        """A round has ended, well or not: the jobs that ended in it, also those that were cancelled meanwhile."""
        residents = worker.residents
        if batch.jobs or residents.prefilling:
            self._finish_prefills(worker, batch, result)
        residents.steps += result.steps
        if result.missed:
            for request_id, steps in result.missed:
                residents.miss(jobs[request_id], steps)
        if result.steps:
            worker.stepped_s = now_s
        ended: list[Job] = []
        for request_id in result.ended:
            job = jobs[request_id]
            residents.leave(job)
            ended.append(job)
        if self._cancelled and worker.index in self._cancelled:
            ended += self._finish_cancelled(worker, result)
        if result.failure == "crashed":
            return ended
        if batch.moves is not None:
            moves.finish(worker, batch.moves)
        if worker.row_limit < worker.slots:
            worker.row_limit = min(2 * worker.row_limit, worker.slots)
        for request_id in result.dropped:
            dropped = jobs.get(request_id)  # it may have been cancelled meanwhile
            if dropped is not None and moves.holds(worker, dropped):
                self.evict(worker, dropped, now_s)
        return ended

    def run_short(self, worker: Worker, result: RoundResult, jobs: Mapping[str, Job]) -> Job | None:
        """Memory ran out in the round that has finished: of those who were dropped, half may enter with the next.

        Who was alone on the device, and had to go even so. Where nobody had to go, nobody is kept out either.
        """
        if not result.dropped:
            return None
        dropped = [job for request_id in result.dropped if (job := jobs.get(request_id)) is not None]
        stay = len(worker.residents)
        worker.row_limit = max(stay + len(dropped) // 2, 1)
        return dropped[0] if len(dropped) == 1 and not (stay or worker.held) else None

    def _finish_prefills(self, worker: Worker, batch: Batch, result: RoundResult) -> None:
        """Who joined has the prefill's token and the steps since; who did not, has neither."""
        residents, emits = worker.residents, worker.latency.prefill_emits_token
        if result.joined is None and not residents.prefilling:
            if emits:
                residents.emitted(batch.jobs)
            return
        waited = dict.fromkeys((*residents.prefilling, *batch.jobs))
        after = dict.fromkeys([job.request_id for job in waited], 0) if result.joined is None else dict(result.joined)
        for job in waited:
            residents.miss(job, after.get(job.request_id, result.steps))
        residents.prefill_on([job for job in waited if job.request_id not in after], emits=emits)
        if emits:
            residents.emitted([job for job in waited if job.request_id in after])

    def _finish_cancelled(self, worker: Worker, result: RoundResult) -> list[Job]:
        left = [job for job in self._cancelled[worker.index] if job.request_id not in result.ended]
        self._cancelled[worker.index] = left
        leaving = [job for job in left if job in worker.residents.jobs]
        for job in leaving:
            worker.residents.leave(job)
        return leaving

    def crash(self, worker: Worker, now_s: float) -> Job | None:
        """No cache is left on the device: all wait again, in order, and half as many may enter; who was alone.

        Copies in host memory go with `lose`, which comes next.
        """
        rows = len(worker.residents)
        jobs = [*worker.residents.jobs, *worker.held.jobs]
        for job in reversed(jobs):
            self.evict(worker, job, now_s)
        worker.row_limit = max(rows // 2, 1)
        return jobs[0] if len(jobs) == 1 else None

    def lose(self, worker: Worker, now_s: float) -> None:
        """The worker's process is gone, and what it kept in host memory with it."""
        for job in reversed([*worker.residents.jobs, *worker.held.jobs, *worker.swapped.jobs]):
            self.evict(worker, job, now_s)
        self._released.pop(worker.index, None)
        self._cancelled.pop(worker.index, None)

    def evict(self, worker: Worker, job: Job, now_s: float) -> None:
        """Its cache is dropped, its tokens are kept: it waits before all others. Called for the last admitted first."""
        if job in worker.residents.jobs:
            job.waiting_since_s = now_s
        moves.forget(worker, job)
        job.evictions += 1
        job.home = worker.index
        worker.inbox.appendleft(job)

    def release(self, worker: Worker, job: Job, now_s: float) -> None:
        """It leaves its worker between two rounds, to be routed anew."""
        worker.residents.leave(job)
        job.reroutes += 1
        job.waiting_since_s = now_s
        self._released.setdefault(worker.index, []).append(job)

    def cancel(self, worker: Worker, job: Job) -> bool:
        """Nobody wants a job whose cache `worker` holds. Whether it has ended at once; else it does with the round."""
        self._cancelled.setdefault(worker.index, []).append(job)
        if job in worker.residents.jobs and worker.running is not None:
            return False
        moves.forget(worker, job)
        return True
