"""An inbox that is kept in the order of a policy's ranks, so that nobody has to sort a backlog to see its head.

What a job's rank hangs on does not change while it waits: only how long it has waited does, and that is a matter of one
more order. So three sorted lists say all that a scheduling point asks; keeping them costs O(log n) comparisons per job
that comes or goes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from toolkit.sched.inbox import Inbox

if TYPE_CHECKING:
    from toolkit.sched.types import Job


class RankedInbox(Inbox):
    """An `Inbox` that also knows its jobs by standing, by how long they have waited, and by length.

    The deque itself is in the order in which they came: how urgent they are is a matter of their standing.

    Args:
        standing: of a job and what it has generated, less is served first; equals go by their tickets. It is kept.
    """

    __slots__ = ("_by_age", "_by_length", "_by_standing", "standing")

    def __init__(self, standing: Callable[[Job, int], float]) -> None:
        super().__init__()
        self.standing = standing
        self._by_standing: list[tuple[float, int, Job]] = []
        self._by_age: list[tuple[float, int, float, Job]] = []  # waiting since, ticket, standing
        self._by_length: list[int] = []

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
        """Who has not, and his standing, the least first."""
        for standing, _, job in self._by_standing:
            if now_s - job.waiting_since_s < patience_s:
                yield standing, job

    def next_wait_s(self, now_s: float, patience_s: float, besides: Collection[Job]) -> float:
        """How long that one has waited who will be the next to starve, of those not in `besides`; -1: there is none."""
        by_age = self._by_age
        for k in range(self._starving(now_s, patience_s), len(by_age)):
            if by_age[k][3] not in besides:
                return now_s - by_age[k][0]
        return -1.0

    def starving_before(self, now_s: float, waited_s: float, ticket: int) -> int:
        """How many have waited for longer than `waited_s`, or as long with an earlier ticket."""
        return bisect_left(self._by_age, (now_s - waited_s, ticket))

    def standings_before(
        self, now_s: float, patience_s: float, standing: float, ticket: int
    ) -> tuple[int, list[tuple[float, int]]]:
        """How many starve, and of the others that are served before a job, how many of which standing."""
        starving = self._starving(now_s, patience_s)
        by_standing = self._by_standing
        end = bisect_left(by_standing, (standing, ticket))
        counts: list[tuple[float, int]] = []
        start = 0
        while start < end:
            value = by_standing[start][0]
            stop = min(bisect_left(by_standing, (value, 1 << 62)), end)
            counts.append((value, stop - start))
            start = stop
        if starving:
            fewer: dict[float, int] = {}
            for _, other, value, _ in self._by_age[:starving]:
                if (value, other) < (standing, ticket):
                    fewer[value] = fewer.get(value, 0) + 1
            counts = [(value, count - fewer.get(value, 0)) for value, count in counts]
        return starving, counts

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
        insort(self._by_age, (job.waiting_since_s, job.ticket, standing, job))
        insort(self._by_length, job.length)

    def _left(self, job: Job) -> None:
        super()._left(job)
        standing, ticket = self.standing(job, job.generated), job.ticket
        del self._by_standing[bisect_left(self._by_standing, (standing, ticket))]
        del self._by_age[bisect_left(self._by_age, (job.waiting_since_s, ticket))]
        del self._by_length[bisect_left(self._by_length, job.length)]
