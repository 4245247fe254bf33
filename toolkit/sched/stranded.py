"""Who waits for a worker that is lost, in a fleet of several kinds: its memory held them, and nobody else's does.

A lost worker is started again, and so a request that only it can hold waits, as all do where the only worker is lost.
But not for ever: a kind that does not come back must not keep clients waiting for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from toolkit.sched.types import NO_LIMIT, Job, Worker

RETURN_S = 300.0  # that a lost worker is waited for: a large model's weights are read in less


class Stranded:
    """Jobs that no worker alive holds, in the order of their tickets; of one scheduler, whose pool has the others.

    Those of a batch that was lost with its worker are in that worker's queue instead: they run there alone.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.jobs: list[Job] = []
        self.limit = NO_LIMIT  # the longest prompt + output that some worker alive holds, in tokens
        self._workers = workers
        self._lost_s = -math.inf

    @property
    def wake_at_s(self) -> float:
        """When those who wait are given up; infinity: nobody waits."""
        if self.jobs or any(worker.queue and not worker.alive for worker in self._workers):
            return self._lost_s + RETURN_S
        return math.inf

    def lost(self, now_s: float) -> None:
        """A worker is lost, so the wait begins anew."""
        self._lost_s = now_s

    def divide(self, pool: list[Job]) -> None:
        """Workers were lost or came back: whom somebody alive holds is in the pool, nobody else; with nobody, all."""
        self.limit = max((worker.longest for worker in self._workers if worker.alive), default=NO_LIMIT)
        everybody = sorted([*pool, *self.jobs], key=lambda job: job.ticket)
        pool[:] = [job for job in everybody if job.limit_tokens <= self.limit]
        self.jobs = [job for job in everybody if job.limit_tokens > self.limit]

    def given_up(self, now_s: float) -> list[Job]:
        """Takes out those who waited too long."""
        if now_s < self.wake_at_s:
            return []
        found, self.jobs = self.jobs, []
        for worker in self._workers:
            if not worker.alive:
                found += [job for batch in worker.queue for job in batch.jobs]
                worker.queue.clear()
                worker.load_s = 0.0
        return found
