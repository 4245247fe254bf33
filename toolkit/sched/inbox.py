"""The jobs that wait at one worker, in the order in which they are served.

`Inbox` orders jobs by urgency (a smaller `Request.priority` first), evicted jobs before others of
the same urgency, and then by arrival. `RankedInbox` also keeps them in the order of a policy.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Final, cast

from toolkit.sched.sorted_blocks import LengthCounts, SortedBlocks

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

    __slots__ = ("_new", "behind", "jobs", "returned", "tokens")

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()
        self.tokens = 0
        self.behind = NO_JOBS
        self.returned: dict[Job, None] = {}  # jobs that have generated tokens before
        self._new: LengthCounts | None = None  # of the others, negative; None until it is asked for

    @property
    def longest_new(self) -> int:
        """The longest input of the jobs that have generated nothing yet; 0 if there are none."""
        if self._new is None:
            self._new = LengthCounts()
            for job in self.all_jobs():
                if not job.generated:
                    self._new.add(-job.length)
        return -self._new.least if self._new.jobs else 0

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
        elif self._new is not None:
            self._new.add(-job.length)

    def _removed(self, job: Job) -> None:
        self.tokens -= job.length
        if job.generated:
            del self.returned[job]
        elif self._new is not None:
            self._new.remove(-job.length)

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


# The ranked inbox keeps its order as jobs come and go, so that no scheduling point sorts or walks a
# backlog.
#
# While a job waits, only its waiting time changes; its standing does not. Those that starve are
# served by age, the others by standing, and each job passes from the others to the starving once.

Aged = tuple[float, int, float, "Job"]  # waiting since, ticket, standing
Ranked = tuple[float, int, "Job"]  # standing, ticket


class RankedInbox(Inbox):
    """An `Inbox` that also keeps its jobs in the order in which a policy serves them.

    `jobs` are in order of arrival; priorities are a part of the standing. `_starved` has the jobs
    that starved at the last query, by age; `_by_age` and `_by_standing` have the others.

    Args:
        standing: maps a job and its generated tokens to its standing, which must not change while
            the job waits. Less is served first; equal standings are served by ticket.
    """

    __slots__ = (
        "_by_age",
        "_by_standing",
        "_counts",
        "_left",
        "_lengths",
        "_now_s",
        "_patience_s",
        "_starved",
        "standing",
    )

    def __init__(self, standing: Callable[[Job, int], float]) -> None:
        super().__init__()
        self.standing = standing
        self._starved: SortedBlocks[Aged] = SortedBlocks()
        self._by_age: SortedBlocks[Aged] = SortedBlocks()
        self._by_standing: SortedBlocks[Ranked] = SortedBlocks()
        self._counts: dict[float, int] = {}  # how many of `_by_standing` have each standing
        self._now_s, self._patience_s = -math.inf, math.inf  # of the last query
        self._lengths = LengthCounts()
        self._left = 0  # jobs that came in at the left; the others are in order of tickets, mostly

    @property
    def shortest(self) -> int:
        """The length in tokens of the shortest job; the inbox must not be empty."""
        return self._lengths.least

    def emptied(self) -> RankedInbox:
        return RankedInbox(self.standing)

    def __contains__(self, job: object) -> bool:
        return self._place_of(cast("Job", job)) >= 0

    def append(self, job: Job) -> None:
        self.jobs.append(job)
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
        """Take a job; `ValueError` if it does not wait here."""
        place = self._place_of(job)
        if place < 0:
            raise ValueError(f"request {job.request_id!r} does not wait here")
        if place < self._left:
            self._left -= 1
        del self.jobs[place]
        self._removed(job)

    def _place_of(self, job: Job) -> int:
        """The place of a job in `jobs`, -1 if it does not wait here.

        It follows from the ticket, unless the job came in at the left, or came back from being
        stranded. The search goes in from both ends: most jobs leave near one.
        """
        jobs, left, ticket = self.jobs, self._left, job.ticket
        low, high, reach = left, len(jobs), 1
        while high - low > reach:
            if jobs[low + reach].ticket > ticket:
                high = low + reach
            elif jobs[high - reach].ticket <= ticket:
                low = high - reach
            else:
                low, high, reach = low + reach, high - reach, 2 * reach
        place = bisect_left(jobs, ticket, low, high, key=_ticket)
        if place < len(jobs) and jobs[place] is job:
            return place
        return next((k for k, other in enumerate(jobs) if other is job), -1)

    def starving(self, now_s: float, patience_s: float) -> Iterator[Aged]:
        """Jobs that have waited for at least `patience_s`, the longest first."""
        self._ask(now_s, patience_s)
        return iter(self._starved)

    def others(self, now_s: float, patience_s: float) -> Iterator[Ranked]:
        """Jobs that have waited for less, the least standing first."""
        self._ask(now_s, patience_s)
        return iter(self._by_standing)

    def next_wait_s(self, now_s: float, patience_s: float, besides: Collection[Job]) -> float:
        """The waiting time of the job not in `besides` that will starve next; -1 if there is
        none.
        """
        self._ask(now_s, patience_s)
        if self._by_age.size:
            for since_s, _, _, job in self._by_age:
                if job not in besides:
                    return now_s - since_s
        return -1.0

    def starving_before(self, now_s: float, waited_s: float, ticket: int) -> int:
        """How many jobs have waited longer than `waited_s`, or as long with an earlier ticket."""
        key = now_s - waited_s, ticket
        return self._starved.before(key) + self._by_age.before(key)

    def standings(self, now_s: float, patience_s: float) -> tuple[int, list[float], list[int]]:
        """The number of starving jobs, the distinct standings of the others in ascending order, and
        how many have each.
        """
        self._ask(now_s, patience_s)
        values = sorted(self._counts)
        return self._starved.size, values, [self._counts[value] for value in values]

    def others_before(self, standing: float, ticket: int) -> int:
        """How many jobs that did not starve at the last query are served before one of this
        standing and ticket.
        """
        return self._by_standing.before((standing, ticket))

    def _ask(self, now_s: float, patience_s: float) -> None:
        """Bring `_starved` up to the time of a query."""
        starved, others = self._starved, self._by_age
        self._now_s, self._patience_s = now_s, patience_s
        while others.size and now_s - others.first[0] >= patience_s:
            aged = others.remove(others.first)
            self._pass_over(aged[2], aged[1])
            starved.add(aged)
        while starved.size and now_s - starved.last[0] < patience_s:  # an earlier time
            aged = starved.remove(starved.last)
            others.add(aged)
            self._line_up(aged[2], aged[3])

    def _line_up(self, standing: float, job: Job) -> None:
        """Add a job to `_by_standing`."""
        self._by_standing.add((standing, job.ticket, job))
        self._counts[standing] = self._counts.get(standing, 0) + 1

    def _pass_over(self, standing: float, ticket: int) -> None:
        """Take a job from `_by_standing`."""
        self._by_standing.remove((standing, ticket))
        count = self._counts[standing]
        if count > 1:
            self._counts[standing] = count - 1
        else:
            del self._counts[standing]

    def _added(self, job: Job) -> None:
        super()._added(job)
        self._lengths.add(job.length)
        standing = self.standing(job, job.generated)
        aged = (job.waiting_since_s, job.ticket, standing, job)
        if self._now_s - job.waiting_since_s >= self._patience_s:
            self._starved.add(aged)
        else:
            self._by_age.add(aged)
            self._line_up(standing, job)

    def _removed(self, job: Job) -> None:
        super()._removed(job)
        self._lengths.remove(job.length)
        key = job.waiting_since_s, job.ticket
        if self._now_s - job.waiting_since_s >= self._patience_s:
            self._starved.remove(key)
        else:
            self._pass_over(self._by_age.remove(key)[2], job.ticket)
