"""The jobs that wait at a worker in the order of a policy that ranks them: starving ones first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from toolkit.sched.waiting import WaitingJobs

if TYPE_CHECKING:
    from toolkit.sched.types import Job

Aged = tuple[float, int, float, "Job"]  # waiting since, ticket, rank
Ranked = tuple[float, int, "Job"]  # rank, ticket
NEVER = 1 << 40  # more tokens than a job generates


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
