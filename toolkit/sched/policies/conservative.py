"""Conservative admission: a request enters where there is room for all that it and the residents may generate.

What TGI and DeepSpeed-MII do (Past-Future, section 2.3), and continuous batching's baseline (ILS) in the SCLS paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from toolkit.sched.policies.continuous import ContinuousPolicy, limit_tokens
from toolkit.sched.policies.parameters import knob
from toolkit.sched.types import Job, View, Worker


@dataclass(frozen=True, slots=True)
class ConservativePolicy(ContinuousPolicy):
    """Admit while the sum of prompt + max_new_tokens stays within `overcommit` times the capacity.

    With 1 nobody is ever evicted. Past-Future's Table 1 has 1, 1.25 and 1.5.
    """

    name: ClassVar[str] = "conservative"

    overcommit: float = knob(1.0, low=0.01, high=100, search=(1.0, 3.0), doc="capacity that is promised over capacity")

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        committed, limit = worker.residents.committed, self.overcommit * worker.capacity_tokens
        for count, job in enumerate(candidates):
            committed += limit_tokens(job)
            if committed > limit:
                return count
        return len(candidates)

    def hopeful(self, worker: Worker, job: Job, used: int, committed: int) -> bool:
        return committed + limit_tokens(job) <= self.overcommit * worker.capacity_tokens
