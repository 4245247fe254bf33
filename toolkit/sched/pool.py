"""Waiting jobs that are in no batch: in the pool, in a worker's inbox, or stranded.

A new job, and a job that continues after its batch, gets a ticket and enters the pool. A policy
that routes moves it to a worker's inbox; every policy takes jobs from either into a batch. Evicted
jobs go back into their worker's inbox (`toolkit.sched.residents`).

In a fleet of several kinds, a stranded job fits only workers that are lost. It waits, because these
are started again, but for at most `RETURN_S`: a kind of worker may not come back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from toolkit.sched.inbox import Inbox
from toolkit.sched.types import NO_LIMIT, Batch, Job, Worker

# Seconds that jobs wait for a lost worker; loading the weights of a large model takes less.
RETURN_S = 300.0


def take_waiting(worker: Worker, job: Job) -> None:
    """Remove a job from the worker's inbox; the first costs least."""
    inbox = worker.inbox
    if inbox.jobs[0] is job:
        inbox.popleft()
    else:
        inbox.remove(job)


class WaitingPool:
    """The jobs that wait at a scheduler. It writes `Job.ticket`, `Job.home` and `Worker.inbox`.

    Jobs of a batch that was lost with its worker wait in that worker's queue, each to run alone.

    Attributes:
        jobs: those in the pool, oldest ticket first. The list object is never replaced: policies
            see it as `View.pool`.
        stranded: those that no alive worker holds, likewise.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.jobs: list[Job] = []
        self.stranded: list[Job] = []
        self._workers = workers
        self._longest = NO_LIMIT  # prompt + output in tokens that an alive worker holds
        self._lost_s = -math.inf
        self._tickets = 0

    @property
    def waiting(self) -> int:
        """The number of waiting jobs: pooled, in inboxes, and stranded."""
        inboxes = sum(worker.inbox.waiting for worker in self._workers)
        return len(self.jobs) + len(self.stranded) + inboxes

    @property
    def wake_at_s(self) -> float:
        """When the stranded jobs are given up; infinity if there are none."""
        if self.stranded or any(worker.queue and not worker.alive for worker in self._workers):
            return self._lost_s + RETURN_S
        return math.inf

    def all_jobs(self) -> list[Job]:
        """All waiting jobs."""
        inboxes = [job for worker in self._workers for job in worker.inbox.all_jobs()]
        return [*self.jobs, *self.stranded, *inboxes]

    def add(self, jobs: Iterable[Job]) -> None:
        """Append jobs to the pool with new tickets. Jobs that fit no alive worker are stranded."""
        for job in jobs:
            self.add_one(job)

    def add_one(self, job: Job) -> None:
        """As `add`, for one job."""
        job.ticket = self._tickets
        job.home = -1
        self._tickets += 1
        if job.limit_tokens <= self._longest:
            self.jobs.append(job)
        else:
            self.stranded.append(job)

    def reorder(self, behind: Iterable[Job], first: Iterable[Job]) -> None:
        """In their inboxes, defer `behind`, and move `first` before equally urgent jobs."""
        for job in behind:
            self._workers[job.home].inbox.defer(job)
        for job in first:
            self._workers[job.home].inbox.advance(job)

    def take(self, batches: Sequence[Batch], *, has_routed: bool) -> None:
        """Remove the batches' jobs from the pool and, if any job `has_routed`, from the inboxes."""
        pooled = 0
        for batch in batches:
            if not has_routed:
                pooled += len(batch.jobs)
                continue
            for job in batch.jobs:
                if job.home < 0:
                    pooled += 1
                else:
                    take_waiting(self._workers[job.home], job)
        if not pooled:
            return
        if pooled == len(self.jobs):
            self.jobs.clear()
        else:
            taken = {job.ticket for batch in batches for job in batch.jobs}
            self.jobs[:] = [job for job in self.jobs if job.ticket not in taken]

    def remove(self, job: Job) -> bool:
        """Remove a waiting job; False if it does not wait."""
        waiting: Inbox | list[Job]
        if job.home >= 0:
            waiting = self._workers[job.home].inbox
        else:
            waiting = self.stranded if job in self.stranded else self.jobs
        if job not in waiting:
            return False
        waiting.remove(job)
        return True

    def take_back(self, lost: Worker) -> None:
        """Return the jobs in a lost worker's inbox to the pool."""
        inbox = lost.inbox
        lost.inbox = lost.inbox.emptied()
        self.add(inbox.all_jobs())

    def worker_lost(self, now_s: float) -> None:
        """`divide` after a worker was lost. The wait of stranded jobs starts again."""
        self._lost_s = now_s
        self.divide()

    def divide(self) -> None:
        """In a fleet of several kinds, strand the jobs that no alive worker holds.

        If no worker is alive, none is stranded.
        """
        alive = [worker.longest for worker in self._workers if worker.alive]
        self._longest = max(alive, default=NO_LIMIT)
        all_jobs = sorted([*self.jobs, *self.stranded], key=lambda job: job.ticket)
        self.jobs[:] = [job for job in all_jobs if job.limit_tokens <= self._longest]
        self.stranded = [job for job in all_jobs if job.limit_tokens > self._longest]

    def given_up(self, now_s: float) -> list[Job]:
        """Remove and return the jobs that were stranded too long."""
        if now_s < self.wake_at_s:
            return []
        jobs = self.stranded
        self.stranded = []
        for worker in self._workers:
            if not worker.alive:
                jobs += [job for batch in worker.queue for job in batch.jobs]
                worker.queue.clear()
                worker.load_s = 0.0
        return jobs


class AcceptedJobs:
    """The jobs that have not ended.

    Rounds name their jobs by id. While batches are static and the driver numbers its requests,
    there is no index of ids until the first question, since in a long backlog each look-up waits
    for memory several times.
    """

    def __init__(self, pool: WaitingPool, workers: Sequence[Worker], *, named: bool) -> None:
        self.count = 0  # read only: how many jobs there are
        self._pool = pool
        self._workers = workers
        self._is_indexed = named
        self._index: dict[str, Job] = {}

    def add(self, job: Job) -> bool:
        """Add a job that is nowhere yet; False if one with its id has not ended."""
        if (self._is_indexed or job.number < 0) and (
            self.by_id().setdefault(job.request_id, job) is not job
        ):
            return False
        self.count += 1
        return True

    def remove(self, ended: list[Job]) -> None:
        """Remove jobs, which must be among them."""
        self.count -= len(ended)
        if self._is_indexed:
            for job in ended:
                del self._index[job.request_id]

    def by_id(self) -> dict[str, Job]:
        """All of them. The dictionary is kept up to date."""
        if not self._is_indexed:
            self._is_indexed = True
            jobs = self._pool.all_jobs()
            for worker in self._workers:
                for batch in worker.queue:
                    jobs += batch.jobs
                if worker.running is not None:
                    jobs += worker.running.jobs
            self._index = {job.request_id: job for job in jobs}
        return self._index
