"""First come, first served, each run to its end: FastServe's baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from toolkit.sched.footprint import Footprint
from toolkit.sched.policies.continuous import ContinuousPolicy
from toolkit.sched.policies.parameters import knob
from toolkit.sched.types import Job, Worker


@dataclass(frozen=True, slots=True)
class FcfsPolicy(ContinuousPolicy):
    """Admit up to a number of rows, where memory suffices for all that they may generate: nobody is evicted."""

    name: ClassVar[str] = "fcfs"

    max_batch_size: int = knob(32, low=1, search=(1, 256), log=True, doc="the most rows that run at once on a worker")

    @property
    def most_rows(self) -> int:
        return self.max_batch_size

    def hopeful(self, worker: Worker, job: Job, there: Footprint) -> bool:
        return there.promised_with(job.limit_tokens) <= worker.capacity_tokens
