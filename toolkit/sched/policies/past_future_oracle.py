"""Past-Future's "theoretical optimum": admission by the true peak memory to come. It exists in simulations only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np

from toolkit.errors import InputError
from toolkit.sched.footprint import Footprint
from toolkit.sched.kernels import admit_knowing
from toolkit.sched.policies.continuous import ContinuousPolicy
from toolkit.sched.types import Job, Worker
from toolkit.sched.view import View


@dataclass(frozen=True, slots=True)
class PastFutureOracle(ContinuousPolicy):
    """Admit while the peak of Eq. 2-4 with the true lengths stays below the capacity (Past-Future, Table 1)."""

    name: ClassVar[str] = "past-future-oracle"

    def told(self, output_tokens: Mapping[str, int]) -> PastFutureOracle:
        """The same policy, with the true output length of each request id."""
        return _Told(self, output_tokens)

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        raise InputError(f"policy '{self.name}' needs the true output lengths", "it runs in simulations only")

    def hopeful(self, worker: Worker, job: Job, there: Footprint) -> bool:
        return there.taken_with(job.length) < worker.capacity_tokens


class _Told(PastFutureOracle):
    """The oracle that knows."""

    __slots__ = ("_output_tokens",)
    _output_tokens: Mapping[str, int]

    def __init__(self, policy: PastFutureOracle, output_tokens: Mapping[str, int]) -> None:
        super().__init__(**{f.name: getattr(policy, f.name) for f in fields(PastFutureOracle)})
        object.__setattr__(self, "_output_tokens", output_tokens)

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        steps = worker.residents.steps
        jobs = list(worker.residents.jobs)
        used = np.array([job.length + steps - job.joined for job in jobs], dtype=np.int64)
        remaining = np.array([self._remaining(job) - steps + job.joined for job in jobs], dtype=np.int64)
        waiting = np.array([(job.length, self._remaining(job)) for job in candidates]).T
        return int(admit_knowing(used, remaining, waiting, float(worker.capacity_tokens), worker.padded))

    def _remaining(self, job: Job) -> int:
        return self._output_tokens[job.request.request_id] - job.generated
