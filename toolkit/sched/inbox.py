"""The jobs that wait at a worker, in their order, and how many tokens they bring.

The more urgent come first: a smaller `Request.priority`. Of equals who came first, and before them
who was evicted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.sched.types import Job

_append, _popleft = deque.append, deque.popleft
# jobs that come forward together: few enough to be put back at no cost, enough for an attempt to
# admit
RECALLED = 64


class Inbox(deque["Job"]):
    """A queue of jobs that keeps `tokens`, the sum of their inputs' lengths: nobody has to walk a
    long backlog for it.

    Jobs are taken from near the front, where taking one costs its position. A policy may put some
    `behind` all others, in the order of urgency and tickets; they come forward when nobody else
    waits. The deque itself is who waits before them.
    """

    __slots__ = ("_longest", "behind", "returned", "tokens")

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0
        self.behind: deque[Job] = deque()
        self.returned: dict[Job, None] = {}  # those that have generated something before
        self._longest: int | None = None  # of the others; None: to be looked for

    @property
    def longest_new(self) -> int:
        """The longest input of those that have generated nothing yet; 0 where there is none."""
        if self._longest is None:
            self._longest = max(
                [job.length for job in self.everybody() if not job.generated], default=0
            )
        return self._longest

    @property
    def waiting(self) -> int:
        """How many wait, those behind too."""
        return len(self) + len(self.behind)

    def emptied(self) -> Inbox:
        """An empty one of the same kind."""
        return Inbox()

    def after(self, count: int) -> Job:
        """Who comes first when `count` of those before have been taken; some must be left."""
        return self[count] if count < len(self) else self.behind[0]

    def everybody(self) -> Iterator[Job]:
        """All who wait, those behind last."""
        return chain(self, self.behind)

    def __contains__(self, job: object) -> bool:
        return super().__contains__(job) or job in self.behind

    def append(self, job: Job) -> None:
        """Behind all that are as urgent."""
        if not self or self[-1].priority <= job.priority:
            _append(self, job)
        else:
            self._place(job, last=True)
        self._came(job)

    def appendleft(self, job: Job) -> None:
        """Before all that are as urgent."""
        self._place(job, last=False)
        self._came(job)

    def popleft(self) -> Job:
        job = _popleft(self)
        self._left(job)
        if self.behind:
            self._recall()
        return job

    def remove(self, job: Any) -> None:
        try:
            super().remove(job)
        except ValueError:
            self.behind.remove(job)
        self._left(job)
        self._recall()

    def defer(self, job: Job) -> None:
        """Put a job behind the others."""
        super().remove(job)
        insort(self.behind, job, key=_turn)
        self._recall()

    def advance(self, job: Job) -> None:
        """Put a job that is behind the others before those who are as urgent."""
        self.behind.remove(job)
        self._place(job, last=False)

    def _came(self, job: Job) -> None:
        self.tokens += job.length
        if job.generated:
            self.returned[job] = None
        elif self._longest is not None and job.length > self._longest:
            self._longest = job.length

    def _left(self, job: Job) -> None:
        self.tokens -= job.length
        if job.generated:
            del self.returned[job]
        elif job.length == self._longest:
            self._longest = None

    def _place(self, job: Job, *, last: bool) -> None:
        """Among those who do not wait behind, as the last or the first of its own urgency."""
        priority = job.priority
        if last and (not self or self[-1].priority <= priority):
            super().append(job)
        elif not last and (not self or priority <= self[0].priority):
            super().appendleft(job)
        else:
            self.insert((bisect_right if last else bisect_left)(self, priority, key=_priority), job)

    def _recall(self) -> None:
        while not self and self.behind:
            self.extend([self.behind.popleft() for _ in range(min(RECALLED, len(self.behind)))])


def _priority(job: Job) -> int:
    return job.priority


def _turn(job: Job) -> tuple[int, int]:
    return job.priority, job.ticket


# An inbox that is kept in the order of a policy's ranks, so that nobody has to sort a backlog to
# see its head.
#
# What a job's rank hangs on does not change while it waits: only how long it has waited does, and
# that is a matter of one more order. So three sorted lists say all that a scheduling point asks;
# keeping them costs O(log n) comparisons per job that comes or goes.

LAST = 1 << 62  # more than any ticket


class RankedInbox(Inbox):
    """An `Inbox` that also knows its jobs by standing, by how long they have waited, and by length.

    The deque itself is in the order in which they came: how urgent they are is a matter of their
    standing.

    Args:
        standing: of a job and what it has generated, less is served first; equals go by their tickets. It is kept.
    """

    __slots__ = ("_by_age", "_by_length", "_by_standing", "_starved", "standing")

    def __init__(self, standing: Callable[[Job, int], float]) -> None:
        super().__init__()
        self.standing = standing
        self._by_standing: list[tuple[float, int, Job]] = []
        self._by_age: list[tuple[float, int, float, Job]] = []  # waiting since, ticket, standing
        self._by_length: list[int] = []
        self._starved: list[
            tuple[float, int]
        ] = []  # standing, ticket: of the first so many of `_by_age`

    @property
    def shortest(self) -> int:
        """The length in tokens of the shortest job; some must wait."""
        return self._by_length[0]

    def emptied(self) -> RankedInbox:
        return RankedInbox(self.standing)

    def append(self, job: Job) -> None:
        self._place(job, last=True)
        self._came(job)

    def _place(self, job: Job, *, last: bool) -> None:
        (deque.append if last else deque.appendleft)(self, job)

    def starving(self, now_s: float, patience_s: float) -> Iterator[tuple[float, Job]]:
        """Who has waited for `patience_s` or more, and how long, the longest first."""
        for since_s, _, _, job in self._by_age:
            if now_s - since_s < patience_s:
                return
            yield now_s - since_s, job

    def others(self, now_s: float, patience_s: float) -> Iterator[tuple[float, Job]]:
        """Those that have not, and their standing, the least first."""
        left = len(self._by_age) - self._starving(now_s, patience_s)
        for standing, _, job in self._by_standing:
            if not left:
                return
            if now_s - job.waiting_since_s < patience_s:
                left -= 1
                yield standing, job

    def next_wait_s(self, now_s: float, patience_s: float, besides: Collection[Job]) -> float:
        """How long that one has waited who will be the next to starve, of those not in `besides`;
        -1: there is none.
        """
        by_age = self._by_age
        for k in range(self._starving(now_s, patience_s), len(by_age)):
            if by_age[k][3] not in besides:
                return now_s - by_age[k][0]
        return -1.0

    def starving_before(self, now_s: float, waited_s: float, ticket: int) -> int:
        """How many have waited for longer than `waited_s`, or as long with an earlier ticket."""
        return bisect_left(self._by_age, (now_s - waited_s, ticket))

    def standings(self, now_s: float, patience_s: float) -> tuple[int, list[float], list[int]]:
        """How many starve; the standings of all jobs, ascending, and of how many others each is."""
        starving = self._count_starved(now_s, patience_s)
        by_standing, starved = self._by_standing, self._starved
        values: list[float] = []
        counts: list[int] = []
        start = starved_start = 0
        while start < len(by_standing):
            value = by_standing[start][0]
            stop, starved_stop = (
                bisect_left(by_standing, (value, LAST)),
                bisect_left(starved, (value, LAST)),
            )
            values.append(value)
            counts.append(stop - start - (starved_stop - starved_start))
            start, starved_start = stop, starved_stop
        return starving, values, counts

    def equals_before(self, standing: float, ticket: int) -> int:
        """How many of this standing have an earlier ticket and did not starve when `standings` was
        asked last.
        """
        by_standing, starved = self._by_standing, self._starved
        here, first = (standing, ticket), (standing, -1)
        ahead = bisect_left(by_standing, here) - bisect_left(by_standing, first)
        return ahead - (bisect_left(starved, here) - bisect_left(starved, first))

    def _count_starved(self, now_s: float, patience_s: float) -> int:
        """How many starve, which are then in `_starved`: time goes on, and they are the first of
        `_by_age`.
        """
        by_age, starved = self._by_age, self._starved
        count = self._starving(now_s, patience_s)
        for _, ticket, standing, _ in by_age[len(starved) : count]:
            insort(starved, (standing, ticket))
        for _, ticket, standing, _ in by_age[count : len(starved)]:
            del starved[bisect_left(starved, (standing, ticket))]
        return count

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

    def _came(self, job: Job) -> None:
        super()._came(job)
        standing = self.standing(job, job.generated)
        insort(self._by_standing, (standing, job.ticket, job))
        entry = (job.waiting_since_s, job.ticket, standing, job)
        at = bisect_left(self._by_age, entry)
        if at < len(self._starved):
            insort(self._starved, (standing, job.ticket))
        self._by_age.insert(at, entry)
        insort(self._by_length, job.length)

    def _left(self, job: Job) -> None:
        super()._left(job)
        standing, ticket = self.standing(job, job.generated), job.ticket
        del self._by_standing[bisect_left(self._by_standing, (standing, ticket))]
        at = bisect_left(self._by_age, (job.waiting_since_s, ticket))
        if at < len(self._starved):
            del self._starved[bisect_left(self._starved, (standing, ticket))]
        del self._by_age[at]
        del self._by_length[bisect_left(self._by_length, job.length)]
