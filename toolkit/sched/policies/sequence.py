"""Sequence-level scheduling (SLS): what SCLS is measured against.

Requests go to the workers in turn; a worker takes a fixed number of them, first come first served, and runs the batch
until its longest output ends (SCLS paper, section 5.1). In a fleet of several kinds the turns come by how fast they
are, and a batch has no more rows than its worker's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import numpy as np

from toolkit.sched.policies.parameters import knob, validate
from toolkit.sched.policies.routers import round_robin
from toolkit.sched.serving_time import serving_s
from toolkit.sched.types import Batch, Job, Worker
from toolkit.sched.view import Decision, View


@dataclass(frozen=True, slots=True)
class SequencePolicy:
    """Fixed batches, round robin, to the longest output. Paper: 16 rows on transformers, 12 on DeepSpeed.

    With `slice_tokens` it is Slice-Only (SO), the first step of the paper's ablation.
    """

    name: ClassVar[str] = "sequence"
    continuous: ClassVar[bool] = False

    batch_size: int = knob(16, low=1, search=(1, 64), log=True, doc="rows of a batch")
    slice_tokens: int = knob(0, doc="tokens per turn, after which a request is dealt again; 0: to its end")

    def __post_init__(self) -> None:
        validate(self)

    def route(self, view: View, now_s: float) -> Sequence[int] | None:
        alive = view.alive()
        if view.mixed and alive:
            return round_robin(view, self.batch_size)
        return [alive[job.ticket % len(alive)].index for job in view.pool] if alive else None

    def plan(self, view: View, now_s: float) -> Decision:
        return Decision([self._batch(view, worker) for worker in view.due if worker.inbox and not worker.queue])

    def _batch(self, view: View, worker: Worker) -> Batch:
        jobs = tuple(islice(worker.inbox, self.batch_size))
        length, steps = self._sizes(jobs)
        while view.mixed and len(jobs) > int(worker.memory.max_batch(np.array([length]), steps, 0.0)[0]) > 0:
            jobs = jobs[:-1]  # one number of rows cannot suit unequal memories
            length, steps = self._sizes(jobs)
        return Batch(worker.index, jobs, steps, length, serving_s(worker.latency, len(jobs), length, steps))

    def _sizes(self, jobs: Sequence[Job]) -> tuple[int, int]:
        """The longest input, and the steps of a batch."""
        longest = max(job.remaining_limit for job in jobs)
        return max(job.length for job in jobs), min(self.slice_tokens or longest, longest)
