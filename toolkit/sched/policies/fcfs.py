"""First come, first served, each run to its end: FastServe's baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from toolkit.sched.policies.continuous import ContinuousPolicy, limit_tokens
from toolkit.sched.policies.parameters import knob
from toolkit.sched.types import Job, View, Worker


@dataclass(frozen=True, slots=True)
class FcfsPolicy(ContinuousPolicy):
    """Admit up to a number of rows, where memory suffices for all that they may generate: nobody is evicted."""

    name: ClassVar[str] = "fcfs"

    max_batch_size: int = knob(32, low=1, search=(1, 256), log=True, doc="the most rows that run at once on a worker")

    def rows(self, worker: Worker) -> int:
        return min(self.max_batch_size, worker.row_limit)

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        committed, capacity = worker.residents.committed, worker.capacity_tokens
        for count, job in enumerate(candidates):
            committed += limit_tokens(job)
            if committed > capacity:
                return count
        return len(candidates)

    def hopeful(self, worker: Worker, job: Job, used: int, committed: int) -> bool:
        return committed + limit_tokens(job) <= worker.capacity_tokens
