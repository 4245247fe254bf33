"""The jobs that wait and are in no batch: in the pool, in the inbox of a worker, or stranded.

A new job, and one that goes on after its batch, draws a ticket and is in the pool. A policy that
routes has it moved to a worker's inbox, and any policy has it taken from either into a batch.
Rounds put who was evicted back into its worker's inbox themselves (`toolkit.sched.rounds`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from toolkit.sched.types import NO_LIMIT, Batch, Job, Worker

# Who waits for a worker that is lost, in a fleet of several kinds: its memory held them, and
# nobody else's does.
#
# A lost worker is started again, and so a request that only it can hold waits, as all do where
# the only worker is lost. But not for ever: a kind that does not come back must not keep clients
# waiting for it.

RETURN_S = 300.0  # that a lost worker is waited for: a large model's weights are read in less


class Unplaceable:
    """Jobs that no worker alive holds, in the order of their tickets; of one scheduler, whose pool
    has the others.

    Those of a batch that was lost with its worker are in that worker's queue instead: they run
    there alone.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.jobs: list[Job] = []
        self.limit = NO_LIMIT  # the longest prompt + output that some worker alive holds, in tokens
        self._workers = workers
        self._lost_s = -math.inf

    @property
    def wake_at_s(self) -> float:
        """When those who wait are given up; infinity: nobody waits."""
        if self.jobs or any(worker.queue and not worker.alive for worker in self._workers):
            return self._lost_s + RETURN_S
        return math.inf

    def lost(self, now_s: float) -> None:
        """A worker is lost, so the wait begins anew."""
        self._lost_s = now_s

    def divide(self, pool: list[Job]) -> None:
        """Workers were lost or came back: whom somebody alive holds is in the pool, nobody else;
        with nobody, all.
        """
        self.limit = max(
            (worker.longest for worker in self._workers if worker.alive), default=NO_LIMIT
        )
        everybody = sorted([*pool, *self.jobs], key=lambda job: job.ticket)
        pool[:] = [job for job in everybody if job.limit_tokens <= self.limit]
        self.jobs = [job for job in everybody if job.limit_tokens > self.limit]

    def given_up(self, now_s: float) -> list[Job]:
        """Takes out those who waited too long."""
        if now_s < self.wake_at_s:
            return []
        found, self.jobs = self.jobs, []
        for worker in self._workers:
            if not worker.alive:
                found += [job for batch in worker.queue for job in batch.jobs]
                worker.queue.clear()
                worker.load_s = 0.0
        return found


class WaitingPool:
    """Who waits at a scheduler with these workers. `Job.ticket` and `home`, and `Worker.inbox`, are
    written here.

    `jobs` are those in the pool, oldest ticket first: one list for good, which policies see in
    `View.pool`.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.jobs: list[Job] = []
        self._workers = workers
        self._stranded = Unplaceable(workers)
        self._tickets = 0

    @property
    def waiting(self) -> int:
        """How many wait, here, at workers, and for lost ones."""
        return (
            len(self.jobs)
            + len(self._stranded.jobs)
            + sum(worker.inbox.waiting for worker in self._workers)
        )

    @property
    def wake_at_s(self) -> float:
        """When those who wait for a lost worker are given up; infinity: nobody does."""
        return self._stranded.wake_at_s

    def add(self, jobs: Iterable[Job]) -> None:
        """Behind all others, with new tickets; who fits no worker alive is stranded."""
        stranded = self._stranded
        for job in jobs:
            job.ticket = self._tickets
            job.home = -1
            self._tickets += 1
            (self.jobs if job.limit_tokens <= stranded.limit else stranded.jobs).append(job)

    def route(self, homes: Sequence[int]) -> list[Worker]:
        """The whole pool goes to workers' inboxes, each job to the worker at its place in `homes`;
        these.
        """
        workers = self._workers
        found: list[Worker] = []
        for job, home in zip(self.jobs, homes, strict=True):
            job.home = home
            worker = workers[home]
            worker.inbox.append(job)
            found.append(worker)
        self.jobs.clear()
        return found

    def reorder(self, behind: Iterable[Job], first: Iterable[Job]) -> None:
        """In their inboxes: put these `behind` all others, those before who are as urgent."""
        for job in behind:
            self._workers[job.home].inbox.defer(job)
        for job in first:
            self._workers[job.home].inbox.advance(job)

    def take(self, batches: Sequence[Batch]) -> None:
        """The batches' jobs leave the pool and the inboxes."""
        pooled = 0
        for batch in batches:
            for job in batch.jobs:
                if job.home >= 0:
                    inbox = self._workers[job.home].inbox
                    if inbox[0] is job:
                        inbox.popleft()
                    else:
                        inbox.remove(job)
                else:
                    pooled += 1
        if not pooled:
            return
        if pooled == len(self.jobs):
            self.jobs.clear()
        else:
            taken = {job.ticket for batch in batches for job in batch.jobs}
            self.jobs[:] = [job for job in self.jobs if job.ticket not in taken]

    def remove(self, job: Job) -> bool:
        """The job does not wait any more; False where it did not."""
        waiting = self._workers[job.home].inbox if job.home >= 0 else self.jobs
        if job in self._stranded.jobs:
            waiting = self._stranded.jobs
        if job not in waiting:
            return False
        waiting.remove(job)
        return True

    def take_back(self, lost: Worker) -> None:
        """Who waits in the inbox of a worker that is lost."""
        inbox, lost.inbox = lost.inbox, lost.inbox.emptied()
        self.add(inbox.everybody())

    def worker_lost(self, now_s: float) -> None:
        """Of workers of several kinds: who fitted that one only is stranded from now on."""
        self._stranded.lost(now_s)
        self._stranded.divide(self.jobs)

    def worker_ready(self) -> None:
        """Of workers of several kinds: who was stranded for that one is in the pool again."""
        self._stranded.divide(self.jobs)

    def given_up(self, now_s: float) -> list[Job]:
        """Takes out those who were stranded too long."""
        return self._stranded.given_up(now_s)
