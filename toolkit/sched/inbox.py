"""The jobs that wait at a worker, in their order, and how many tokens they bring."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.sched.types import Job

RECALLED = 64  # jobs that come forward together: few enough to be put back at no cost, enough for an attempt to admit


class Inbox(deque["Job"]):
    """A queue of jobs that keeps `tokens`, the sum of their inputs' lengths: nobody has to walk a long backlog for it.

    Jobs are taken from near the front, where taking one costs its position. A policy may put some `behind` all others,
    in the order of their tickets; they come forward when nobody else waits. The deque itself is who waits before them.
    """

    __slots__ = ("behind", "tokens")

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0
        self.behind: deque[Job] = deque()

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
        super().append(job)
        self.tokens += job.length

    def appendleft(self, job: Job) -> None:
        super().appendleft(job)
        self.tokens += job.length

    def popleft(self) -> Job:
        job = super().popleft()
        self.tokens -= job.length
        self._recall()
        return job

    def remove(self, job: Any) -> None:
        try:
            super().remove(job)
        except ValueError:
            self.behind.remove(job)
        self._recall()
        self.tokens -= job.length

    def defer(self, job: Job) -> None:
        """Put a job behind the others."""
        super().remove(job)
        insort(self.behind, job, key=_ticket)
        self._recall()

    def advance(self, job: Job) -> None:
        """Put a job that is behind the others before them."""
        self.behind.remove(job)
        super().appendleft(job)

    def _recall(self) -> None:
        while not self and self.behind:
            self.extend([self.behind.popleft() for _ in range(min(RECALLED, len(self.behind)))])


def _ticket(job: Job) -> int:
    return job.ticket
