"""The jobs that wait and are in no batch: in the pool, or at a worker.

A new job, and a job that continues after its batch, gets a ticket and enters the pool. A policy
that routes moves it to a worker (`Worker.waiting`); every policy takes jobs from either into a
batch. Evicted jobs go back to their worker.

At a worker, jobs wait in order of urgency (a smaller `Request.priority` first), evicted jobs before
others of the same urgency, and then by arrival: `WaitingJobs`. `RankedJobs` also keeps them in the
order of a policy, starving ones first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

if TYPE_CHECKING:
    from toolkit.sched.types import Job, Pass, Worker

# Deferred jobs that come forward together: few enough to defer again cheaply, and enough for one
# attempt to admit.
RECALL_COUNT = 64

# Of jobs, to sort by. Those that wait are in the order `turn_of`: of urgency, then of arrival.
priority_of = attrgetter("priority")
turn_of = attrgetter("priority", "ticket")

Aged = tuple[float, int, float, "Job"]  # waiting since, ticket, rank
Ranked = tuple[float, int, "Job"]  # rank, ticket
NEVER = 1 << 40  # more tokens than a job generates


class WaitingJobs:
    """The jobs that wait at a worker, and `tokens`, the sum of their input lengths.

    A policy may defer jobs: they wait in `behind`, ordered by urgency and ticket, and come forward
    when no other job waits. `jobs` has the jobs that are not deferred, `returned` the jobs that
    have generated tokens before.
    """

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()
        self.behind: deque[Job] = deque()
        self.returned: dict[Job, None] = {}
        self.tokens = 0

    @property
    def count(self) -> int:
        """The number of jobs, deferred ones included."""
        return len(self.jobs) + len(self.behind)

    def after(self, count: int) -> Job:
        """The job that is first once `count` of `jobs` were taken; one must be left."""
        return self.jobs[count] if count < len(self.jobs) else self.behind[0]

    def all_jobs(self) -> Iterator[Job]:
        """All jobs, deferred ones last."""
        return chain(self.jobs, self.behind)

    def append(self, job: Job) -> None:
        """Add a job behind all that are as urgent."""
        self._place(job, last=True)
        self._added(job)

    def appendleft(self, job: Job) -> None:
        """Add a job before all that are as urgent."""
        self._place(job, last=False)
        self._added(job)

    def popleft(self) -> Job:
        """Take the first job."""
        job = self.jobs.popleft()
        self._removed(job)
        self._recall()
        return job

    def remove(self, job: Job) -> None:
        """Take a job, the first at least cost; `ValueError` if it does not wait here."""
        if job in self.behind:
            self.behind.remove(job)
        else:
            self.jobs.remove(job)
        self._removed(job)
        self._recall()

    def defer(self, job: Job) -> None:
        """Move a job behind all others."""
        self.jobs.remove(job)
        insort(self.behind, job, key=turn_of)
        self._recall()

    def advance(self, job: Job) -> None:
        """Move a deferred job before those that are as urgent."""
        self.behind.remove(job)
        self._place(job, last=False)

    def _added(self, job: Job) -> None:
        self.tokens += job.length
        if job.generated:
            self.returned[job] = None

    def _removed(self, job: Job) -> None:
        self.tokens -= job.length
        if job.generated:
            del self.returned[job]

    def _place(self, job: Job, *, last: bool) -> None:
        """Insert among the jobs that are not deferred, as the last or the first of its urgency."""
        jobs = self.jobs
        priority = job.priority
        if last and (not jobs or jobs[-1].priority <= priority):
            jobs.append(job)
        elif not last and (not jobs or priority <= jobs[0].priority):
            jobs.appendleft(job)
        else:
            side = bisect_right if last else bisect_left
            jobs.insert(side(jobs, priority, key=priority_of), job)

    def _recall(self) -> None:
        while not self.jobs and self.behind:
            first = [self.behind.popleft() for _ in range(min(RECALL_COUNT, len(self.behind)))]
            self.jobs.extend(first)


@mypyc_attr(allow_interpreted_subclasses=True)
class Ranking:
    """How a policy ranks jobs under one worker's law: a job of a lower rank is served first."""

    def rank(self, job: Job, generated: int) -> float:
        """The rank of a job with so many generated tokens; it must not change while it waits."""
        raise NotImplementedError

    def changes_at(self, job: Job, generated: int, promoted_at: int) -> int:
        """The generated tokens at which a running job gets another rank; it has `generated` now.

        A pass ends there; `NEVER`: no pass ends for that. `promoted_at` is what the job had
        generated when it was last promoted, -1 if it never was.
        """
        return NEVER


class RankedJobs(WaitingJobs):
    """Waiting jobs that are also kept in the order in which a policy serves them.

    `jobs` are in order of arrival; priorities are a part of the rank. While a job waits, only its
    waiting time changes. Jobs that have waited for `patience_s` starve and are served by age, the
    others by rank; equal ranks are served by ticket.
    """

    def __init__(self, ranking: Ranking) -> None:
        super().__init__()
        self.ranking = ranking
        # Sorted: the jobs that starved at the last query, and the others twice.
        self._starved: list[Aged] = []
        self._by_age: list[Aged] = []
        self._by_rank: list[Ranked] = []
        self._counts: dict[float, int] = {}  # how many of `_by_rank` have each rank
        self._lengths: list[int] = []

    @property
    def shortest(self) -> int:
        """The length in tokens of the shortest job; there must be one."""
        return self._lengths[0]

    def starving(self, now_s: float, patience_s: float) -> Iterator[Aged]:
        """Jobs that have waited for at least `patience_s`, the longest first."""
        self._age(now_s, patience_s)
        return iter(self._starved)

    def others(self, now_s: float, patience_s: float) -> Iterator[Ranked]:
        """Jobs that have waited for less, the least rank first."""
        self._age(now_s, patience_s)
        return iter(self._by_rank)

    def next_wait_s(self, now_s: float, patience_s: float, besides: Collection[Job]) -> float:
        """The waiting time of the next job to starve that is not in `besides`; -1: none will."""
        self._age(now_s, patience_s)
        for since_s, _, _, job in self._by_age:
            if job not in besides:
                return now_s - since_s
        return -1.0

    def starving_before(self, now_s: float, waited_s: float, ticket: int) -> int:
        """How many jobs have waited longer than `waited_s`, or as long with an earlier ticket."""
        key = now_s - waited_s, ticket
        return bisect_left(self._starved, key) + bisect_left(self._by_age, key)

    def ranks(self, now_s: float, patience_s: float) -> tuple[int, list[float], list[int]]:
        """How many jobs starve, the others' ranks, ascending, and how many have each."""
        self._age(now_s, patience_s)
        values = sorted(self._counts)
        return len(self._starved), values, [self._counts[value] for value in values]

    def others_before(self, rank: float, ticket: int) -> int:
        """How many jobs that did not starve at the last query are served before such a one."""
        return bisect_left(self._by_rank, (rank, ticket))

    def _age(self, now_s: float, patience_s: float) -> None:
        """Move the jobs that starve by now to `_starved`."""
        while self._by_age and now_s - self._by_age[0][0] >= patience_s:
            aged = self._by_age.pop(0)
            self._leave_rank(aged[2], aged[1])
            insort(self._starved, aged)

    def _leave_rank(self, rank: float, ticket: int) -> None:
        del self._by_rank[bisect_left(self._by_rank, (rank, ticket))]
        self._counts[rank] -= 1
        if not self._counts[rank]:
            del self._counts[rank]

    def _place(self, job: Job, *, last: bool) -> None:
        if last:
            self.jobs.append(job)
        else:
            self.jobs.appendleft(job)

    def _added(self, job: Job) -> None:
        super()._added(job)
        rank = self.ranking.rank(job, job.generated)
        insort(self._lengths, job.length)
        insort(self._by_age, (job.waiting_since_s, job.ticket, rank, job))
        insort(self._by_rank, (rank, job.ticket, job))
        self._counts[rank] = self._counts.get(rank, 0) + 1

    def _removed(self, job: Job) -> None:
        super()._removed(job)
        del self._lengths[bisect_left(self._lengths, job.length)]
        key = job.waiting_since_s, job.ticket
        at = bisect_left(self._by_age, key)
        if at < len(self._by_age) and self._by_age[at][3] is job:
            aged = self._by_age.pop(at)
            self._leave_rank(aged[2], job.ticket)
        else:
            del self._starved[bisect_left(self._starved, key)]


class WaitingPool:
    """The jobs that wait at a scheduler. It writes `Job.ticket`, `Job.home` and `Worker.waiting`.

    Attributes:
        jobs: those in the pool, oldest ticket first. The list object is never replaced: policies
            see it as `View.pool`.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.jobs: list[Job] = []
        self._workers = workers
        self._tickets = 0

    @property
    def count(self) -> int:
        """The number of waiting jobs: pooled, and at workers."""
        return len(self.jobs) + sum([worker.waiting.count for worker in self._workers])

    def add(self, jobs: Iterable[Job]) -> None:
        """Append jobs to the pool with new tickets."""
        for job in jobs:
            job.ticket = self._tickets
            job.home = -1
            self._tickets += 1
            self.jobs.append(job)

    def route(self, homes: Sequence[int]) -> None:
        """Move each pooled job to the worker of this index."""
        if len(homes) != len(self.jobs):
            raise ValueError(f"{len(homes)} workers for {len(self.jobs)} jobs")
        for place, job in enumerate(self.jobs):
            job.home = homes[place]
            self._workers[job.home].waiting.append(job)
        self.jobs.clear()

    def reorder(self, behind: Iterable[Job], first: Iterable[Job]) -> None:
        """At their workers, defer `behind`, and move `first` before equally urgent jobs."""
        for job in behind:
            self._workers[job.home].waiting.defer(job)
        for job in first:
            self._workers[job.home].waiting.advance(job)

    def take(self, batches: Sequence[Pass]) -> None:
        """Remove the batches' jobs."""
        pooled: set[int] = set()
        for batch in batches:
            for job in batch.jobs:
                if job.home < 0:
                    pooled.add(job.ticket)
                    continue
                waiting = self._workers[job.home].waiting
                if waiting.jobs[0] is job:
                    waiting.popleft()
                else:
                    waiting.remove(job)
        if len(pooled) == len(self.jobs):
            self.jobs.clear()
        elif pooled:
            self.jobs[:] = [job for job in self.jobs if job.ticket not in pooled]

    def remove(self, job: Job) -> bool:
        """Remove a waiting job; False if it does not wait."""
        try:
            if job.home >= 0:
                self._workers[job.home].waiting.remove(job)
            else:
                self.jobs.remove(job)
        except ValueError:
            return False
        return True

    def take_back(self, lost: Worker) -> None:
        """Return the jobs at a lost worker to the pool."""
        jobs: list[Job] = []
        while lost.waiting.count:
            jobs.append(lost.waiting.popleft())
        self.add(jobs)
