"""Aggressive admission: a request enters where there is room for its prompt now, and eviction settles the rest.

What vLLM does (Past-Future, section 2.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from toolkit.sched.policies.continuous import ContinuousPolicy
from toolkit.sched.policies.parameters import knob
from toolkit.sched.types import Job, View, Worker


@dataclass(frozen=True, slots=True)
class AggressivePolicy(ContinuousPolicy):
    """Admit while the tokens in use and the newcomers' stay within `watermark` of the capacity.

    Past-Future's Table 1 has 0.90, 0.95 and 0.99.
    """

    name: ClassVar[str] = "aggressive"

    watermark: float = knob(0.95, low=0.01, high=1, search=(0.5, 1.0), doc="share of the capacity that may be filled")

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        used, limit = worker.residents.used, self.watermark * worker.capacity_tokens
        for count, job in enumerate(candidates):
            if used + self._asks(job) > limit:
                return count
            used += job.length
        return len(candidates)

    def hopeful(self, worker: Worker, job: Job, used: int, committed: int) -> bool:
        return used + self._asks(job) <= self.watermark * worker.capacity_tokens

    def _asks(self, job: Job) -> int:
        """Tokens that a newcomer is counted with; the artifact leaves out what one that was evicted had generated."""
        return job.request.prompt_tokens if self.overfill else job.length
