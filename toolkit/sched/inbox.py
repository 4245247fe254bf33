"""The jobs that wait at one worker, in the order in which they are served.

`Inbox` orders jobs by urgency (a smaller `Request.priority` first), evicted jobs before others of
the same urgency, and then by arrival. `RankedInbox` also keeps them sorted by a policy's standing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from toolkit.sched.types import Job

# Deferred jobs that come forward together: few enough to defer again cheaply, and enough for one
# attempt to admit.
RECALL_COUNT: Final = 64
NO_JOBS: deque[Job] = deque()  # of every inbox that defers nothing; never changed


class Inbox:
    """A queue of jobs that keeps `tokens`, the sum of their input lengths.

    The sum is kept so that no caller has to walk a long backlog. Taking a job costs its position,
    so policies take jobs near the front. A policy may defer jobs: they wait in `behind`, ordered by
    urgency and ticket, and come forward when no other job waits. `jobs`, the length and the
    iteration have the jobs that are not deferred.
    """

    __slots__ = ("_longest", "_longest_is_known", "behind", "jobs", "returned", "tokens")

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()
        self.tokens = 0
        self.behind = NO_JOBS
        self.returned: dict[Job, None] = {}  # jobs that have generated tokens before
        self._longest = 0  # of the others
        self._longest_is_known = True

    @property
    def longest_new(self) -> int:
        """The longest input of the jobs that have generated nothing yet; 0 if there are none."""
        if not self._longest_is_known:
            self._longest = max(
                [job.length for job in self.all_jobs() if not job.generated], default=0
            )
            self._longest_is_known = True
        return self._longest

    @property
    def waiting(self) -> int:
        """The number of jobs, deferred ones included."""
        return len(self.jobs) + len(self.behind)

    def emptied(self) -> Inbox:
        """An empty inbox of the same kind."""
        return Inbox()

    def after(self, count: int) -> Job:
        """The job that is first once `count` of the jobs that are not deferred were taken; one must
        be left.
        """
        return self.jobs[count] if count < len(self.jobs) else self.behind[0]

    def all_jobs(self) -> Iterator[Job]:
        """All jobs, deferred ones last."""
        return chain(self.jobs, self.behind)

    def __len__(self) -> int:
        return len(self.jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self.jobs)

    def __getitem__(self, place: int) -> Job:
        return self.jobs[place]

    def __contains__(self, job: object) -> bool:
        return job in self.jobs or job in self.behind

    def append(self, job: Job) -> None:
        """Add a job behind all that are as urgent."""
        jobs = self.jobs
        if not jobs or jobs[-1].priority <= job.priority:
            jobs.append(job)
        else:
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
        if self.behind:
            self._recall()
        return job

    def remove(self, job: Job) -> None:
        """Take a job; `ValueError` if it does not wait here."""
        if job in self.jobs:
            self.jobs.remove(job)
        else:
            self.behind.remove(job)
        self._removed(job)
        self._recall()

    def defer(self, job: Job) -> None:
        """Move a job behind all others."""
        self.jobs.remove(job)
        if not self.behind:
            self.behind = deque()
        insort(self.behind, job, key=_turn)
        self._recall()

    def advance(self, job: Job) -> None:
        """Move a deferred job before those that are as urgent."""
        self.behind.remove(job)
        self._place(job, last=False)

    def _added(self, job: Job) -> None:
        self.tokens += job.length
        if job.generated:
            self.returned[job] = None
        elif self._longest_is_known and job.length > self._longest:
            self._longest = job.length

    def _removed(self, job: Job) -> None:
        self.tokens -= job.length
        if job.generated:
            del self.returned[job]
        elif job.length == self._longest:
            self._longest_is_known = False

    def _place(self, job: Job, *, last: bool) -> None:
        """Insert among the jobs that are not deferred, as the last or the first of its urgency."""
        jobs, priority = self.jobs, job.priority
        if last and (not jobs or jobs[-1].priority <= priority):
            jobs.append(job)
        elif not last and (not jobs or priority <= jobs[0].priority):
            jobs.appendleft(job)
        else:
            side = bisect_right if last else bisect_left
            jobs.insert(side(jobs, priority, key=_priority), job)

    def _recall(self) -> None:
        while not self.jobs and self.behind:
            first = [self.behind.popleft() for _ in range(min(RECALL_COUNT, len(self.behind)))]
            self.jobs.extend(first)


def _priority(job: Job) -> int:
    return job.priority


def _ticket(job: Job) -> int:
    return job.ticket


def _turn(job: Job) -> tuple[int, int]:
    return job.priority, job.ticket


# The ranked inbox keeps its order as jobs come and go, so that no scheduling point sorts a backlog.
#
# While a job waits, only its waiting time changes; its standing does not. So three sorted lists (by
# standing, by age, by length) answer every question of a scheduling point, at O(log n) comparisons
# per job that comes or goes.


class RankedInbox(Inbox):
    """An `Inbox` that also keeps its jobs sorted by standing, by waiting time and by length.

    `jobs` are in order of arrival; priorities are a part of the standing.

    Args:
        standing: maps a job and its generated tokens to its standing, which must not change while
            the job waits. Less is served first; equal standings are served by ticket.
    """

    __slots__ = (
        "_by_age",
        "_by_length",
        "_by_standing",
        "_counts",
        "_firsts",
        "_left",
        "_starved",
        "_starved_counts",
        "standing",
    )

    def __init__(self, standing: Callable[[Job, int], float]) -> None:
        super().__init__()
        self.standing = standing
        self._by_standing: list[tuple[float, int, Job]] = []
        self._by_age: list[tuple[float, int, float, Job]] = []  # waiting since, ticket, standing
        self._by_length: list[int] = []
        # (standing, ticket) of the first jobs of `_by_age`, which starve.
        self._starved: list[tuple[float, int]] = []
        # How many entries of `_by_standing` and of `_starved` have each standing.
        self._counts: dict[float, int] = {}
        self._starved_counts: dict[float, int] = {}
        # The indices of the first of them, as of the last call of `standings`.
        self._firsts: dict[float, tuple[int, int]] = {}
        self._left = 0  # jobs that came in at the left; the others are in order of their tickets

    @property
    def shortest(self) -> int:
        """The length in tokens of the shortest job; the inbox must not be empty."""
        return self._by_length[0]

    def emptied(self) -> RankedInbox:
        return RankedInbox(self.standing)

    def append(self, job: Job) -> None:
        self._place(job, last=True)
        self._added(job)

    def _place(self, job: Job, *, last: bool) -> None:
        if last:
            self.jobs.append(job)
        else:
            self.jobs.appendleft(job)
            self._left += 1

    def popleft(self) -> Job:
        job = super().popleft()
        if self._left:
            self._left -= 1
        return job

    def remove(self, job: Job) -> None:
        """Take a job; `ValueError` if it does not wait here. Its place follows from its ticket,
        since a search would look at half of the backlog.
        """
        jobs, left = self.jobs, self._left
        place = bisect_left(jobs, job.ticket, left, key=_ticket)
        if place == len(jobs) or jobs[place] is not job:
            place = next((k for k, other in enumerate(jobs) if other is job), -1)
        if place < 0:
            raise ValueError(f"request {job.request_id!r} does not wait here")
        if place < left:
            self._left -= 1
        del jobs[place]
        self._removed(job)

    def starving(self, now_s: float, patience_s: float) -> Iterator[tuple[float, Job]]:
        """Jobs that have waited for at least `patience_s`, each with its waiting time, the longest
        first.
        """
        for since_s, _, _, job in self._by_age:
            if now_s - since_s < patience_s:
                return
            yield now_s - since_s, job

    def others(self, now_s: float, patience_s: float) -> Iterator[tuple[float, Job]]:
        """Jobs that have waited for less, each with its standing, the least first."""
        left = len(self._by_age) - self._starving(now_s, patience_s)
        for standing, _, job in self._by_standing:
            if not left:
                return
            if now_s - job.waiting_since_s < patience_s:
                left -= 1
                yield standing, job

    def next_wait_s(self, now_s: float, patience_s: float, besides: Collection[Job]) -> float:
        """The waiting time of the job not in `besides` that will starve next; -1 if there is
        none.
        """
        by_age = self._by_age
        for k in range(self._starving(now_s, patience_s), len(by_age)):
            if by_age[k][3] not in besides:
                return now_s - by_age[k][0]
        return -1.0

    def starving_before(self, now_s: float, waited_s: float, ticket: int) -> int:
        """How many jobs have waited longer than `waited_s`, or as long with an earlier ticket."""
        return bisect_left(self._by_age, (now_s - waited_s, ticket))

    def standings(self, now_s: float, patience_s: float) -> tuple[int, list[float], list[int]]:
        """The number of starving jobs, the distinct standings in ascending order, and counts per
        standing.

        A count has the jobs of that standing that do not starve.
        """
        starving = self._count_starved(now_s, patience_s)
        values = sorted(self._counts)
        counts: list[int] = []
        self._firsts = {}
        start = starved_start = 0
        for value in values:
            self._firsts[value] = start, starved_start
            count, starved = self._counts[value], self._starved_counts.get(value, 0)
            counts.append(count - starved)
            start += count
            starved_start += starved
        return starving, values, counts

    def equals_before(self, standing: float, ticket: int) -> int:
        """How many jobs of this standing have an earlier ticket and do not starve, as of the last
        call of `standings`.
        """
        here, firsts = (standing, ticket), self._firsts.get(standing)
        if firsts is None:
            return 0
        first, starved_first = firsts
        starved = bisect_left(self._starved, here) if self._starved else 0
        return bisect_left(self._by_standing, here) - first - (starved - starved_first)

    def _count_starved(self, now_s: float, patience_s: float) -> int:
        """The number of starving jobs. Brings `_starved` up to date: the starving are the first of
        `_by_age`.
        """
        by_age, starved = self._by_age, self._starved
        count = self._starving(now_s, patience_s)
        if count != len(starved):
            for _, ticket, standing, _ in by_age[len(starved) : count]:
                self._starve(standing, ticket)
            for _, ticket, standing, _ in by_age[count : len(starved)]:
                self._unstarve(standing, ticket)
        return count

    def _starve(self, standing: float, ticket: int) -> None:
        insort(self._starved, (standing, ticket))
        self._starved_counts[standing] = self._starved_counts.get(standing, 0) + 1

    def _unstarve(self, standing: float, ticket: int) -> None:
        del self._starved[bisect_left(self._starved, (standing, ticket))]
        self._starved_counts[standing] -= 1

    def _starving(self, now_s: float, patience_s: float) -> int:
        by_age = self._by_age
        low, high = 0, len(by_age)
        while low < high:
            middle = (low + high) // 2
            if now_s - by_age[middle][0] >= patience_s:
                low = middle + 1
            else:
                high = middle
        return low

    def _added(self, job: Job) -> None:
        super()._added(job)
        standing = self.standing(job, job.generated)
        insort(self._by_standing, (standing, job.ticket, job))
        self._counts[standing] = self._counts.get(standing, 0) + 1
        entry = (job.waiting_since_s, job.ticket, standing, job)
        at = bisect_left(self._by_age, entry)
        if at < len(self._starved):
            self._starve(standing, job.ticket)
        self._by_age.insert(at, entry)
        insort(self._by_length, job.length)

    def _removed(self, job: Job) -> None:
        super()._removed(job)
        standing, ticket = self.standing(job, job.generated), job.ticket
        del self._by_standing[bisect_left(self._by_standing, (standing, ticket))]
        count = self._counts[standing]
        if count > 1:
            self._counts[standing] = count - 1
        else:
            del self._counts[standing]
        at = bisect_left(self._by_age, (job.waiting_since_s, ticket))
        if at < len(self._starved):
            self._unstarve(standing, ticket)
        del self._by_age[at]
        del self._by_length[bisect_left(self._by_length, job.length)]
