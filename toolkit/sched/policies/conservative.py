"""Conservative admission: a request enters where there is room for all that it and the residents may generate.

What TGI and DeepSpeed-MII do (Past-Future, section 2.3), and continuous batching's baseline (ILS) in the SCLS paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from toolkit.sched.footprint import Footprint
from toolkit.sched.policies.continuous import ContinuousPolicy
from toolkit.sched.policies.parameters import knob
from toolkit.sched.types import Job, Worker


@dataclass(frozen=True, slots=True)
class ConservativePolicy(ContinuousPolicy):
    """Admit while the sum of prompt + max_new_tokens stays within `overcommit` times the capacity.

    On a padded worker it is the number of rows x the largest prompt + max_new_tokens.
    With 1 nobody is ever evicted. Past-Future's Table 1 has 1, 1.25 and 1.5.
    """

    name: ClassVar[str] = "conservative"

    overcommit: float = knob(1.0, low=0.01, high=100, search=(1.0, 3.0), doc="capacity that is promised over capacity")

    def hopeful(self, worker: Worker, job: Job, there: Footprint) -> bool:
        return there.promised_with(job.limit_tokens) <= self.overcommit * worker.capacity_tokens
