"""The jobs that wait and are in no batch: in the pool, in the inbox of a worker, or stranded.

A new job, and one that goes on after its batch, draws a ticket and is in the pool. A policy that routes has it moved to
a worker's inbox, and any policy has it taken from either into a batch. Rounds put who was evicted back into its
worker's inbox themselves (`toolkit.sched.rounds`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from toolkit.sched.stranded import Stranded
from toolkit.sched.types import Batch, Job, Worker


class Pool:
    """Who waits at a scheduler with these workers. `Job.ticket` and `home`, and `Worker.inbox`, are written here.

    `jobs` are those in the pool, oldest ticket first: one list for good, which policies see in `View.pool`.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.jobs: list[Job] = []
        self._workers = workers
        self._stranded = Stranded(workers)
        self._tickets = 0

    @property
    def waiting(self) -> int:
        """How many wait, here, at workers, and for lost ones."""
        return len(self.jobs) + len(self._stranded.jobs) + sum(worker.inbox.waiting for worker in self._workers)

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
        """The whole pool goes to workers' inboxes, each job to the worker at its place in `homes`; these."""
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
