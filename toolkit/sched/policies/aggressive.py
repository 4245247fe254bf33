"""Aggressive admission: a request enters where there is room for its prompt now, and eviction settles the rest.

What vLLM does (Past-Future, section 2.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from toolkit.sched.footprint import Footprint
from toolkit.sched.policies.continuous import ContinuousPolicy
from toolkit.sched.policies.parameters import knob
from toolkit.sched.types import Job, Worker


@dataclass(frozen=True, slots=True)
class AggressivePolicy(ContinuousPolicy):
    """Admit while the tokens in use and the newcomers' stay within `watermark` of the capacity.

    Past-Future's Table 1 has 0.90, 0.95 and 0.99.
    """

    name: ClassVar[str] = "aggressive"

    watermark: float = knob(0.95, low=0.01, high=1, search=(0.5, 1.0), doc="share of the capacity that may be filled")

    def hopeful(self, worker: Worker, job: Job, there: Footprint) -> bool:
        return there.taken_with(self._asks(job)) <= self.watermark * worker.capacity_tokens

    def _asks(self, job: Job) -> int:
        """Tokens that a newcomer is counted with; the artifact leaves out what one that was evicted had generated."""
        return job.request.prompt_tokens if self.overfill else job.length
