"""The jobs that wait at a worker, in their order, and how many tokens they bring."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.sched.types import Job


class Inbox(deque["Job"]):
    """A queue of jobs that keeps `tokens`, the sum of their inputs' lengths: nobody has to walk a long backlog for it.

    Jobs are taken from near the front, where taking one costs its position.
    """

    __slots__ = ("tokens",)

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def append(self, job: Job) -> None:
        super().append(job)
        self.tokens += job.length

    def appendleft(self, job: Job) -> None:
        super().appendleft(job)
        self.tokens += job.length

    def popleft(self) -> Job:
        job = super().popleft()
        self.tokens -= job.length
        return job

    def remove(self, job: Any) -> None:
        super().remove(job)
        self.tokens -= job.length
