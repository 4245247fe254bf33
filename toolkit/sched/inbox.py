"""The jobs that wait at a worker, in their order, and how many tokens they bring.

The more urgent come first: a smaller `Request.priority`. Of equals who came first, and before them who was evicted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.sched.types import Job

_append, _popleft = deque.append, deque.popleft
RECALLED = 64  # jobs that come forward together: few enough to be put back at no cost, enough for an attempt to admit


class Inbox(deque["Job"]):
    """A queue of jobs that keeps `tokens`, the sum of their inputs' lengths: nobody has to walk a long backlog for it.

    Jobs are taken from near the front, where taking one costs its position. A policy may put some `behind` all others,
    in the order of urgency and tickets; they come forward when nobody else waits. The deque itself is who waits before
    them.
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
            self._longest = max([job.length for job in self.everybody() if not job.generated], default=0)
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
