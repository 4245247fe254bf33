"""Past-Future: admission by the predicted peak of memory, from the lengths of past outputs.

Gong et al., *Past-Future Scheduler for LLM Serving under SLA Guarantees*, section 3. At every
attempt to admit, waiting requests enter in order of arrival while the future peak of memory stays
below the capacity less a reserve:

- each running request's final length is sampled from the lengths of finished requests that are
  longer than what it has generated, a waiting one's from all (the kernel `_sampled_length`);
- M*, the peak, follows from what each holds and has remaining (Eq. 2-4, the kernel `future_peak`).

`PastFuturePolicy` is the paper's, `PastFutureOracle` its "theoretical optimum" with true lengths.
Nothing is kept between attempts: each samples all lengths again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import repeat
from typing import ClassVar

import numpy as np

from toolkit.sched.memory import Footprint
from toolkit.sched.policies.continuous import ContinuousPolicy
from toolkit.sched.policies.parameters import parameter, policy
from toolkit.sched.types import Job, Worker
from toolkit.sched.view import LengthHistory, View


@policy("past-future")
class PastFuturePolicy(ContinuousPolicy):
    """Admit while the predicted peak (Eq. 2-4) stays below (1 - reserve) of the capacity.

    Table 1 has a reserve of 0.03, 0.05 and 0.10, a window of 1000, and a history that starts with
    500 outputs of 512 tokens. By default the history starts empty, and until requests have ended
    each counts with its limit: the safe start.
    """

    at_start: ClassVar[tuple[str, ...]] = ("window", "initial_length", "initial_count")

    reserve: float = parameter(
        0.05,
        high=0.99,
        search=(0.0, 0.3),
        doc="share of the capacity that the peak must leave free",
    )
    window: int = parameter(
        1000, low=1, high=1_000_000, doc="w: how many finished lengths the history keeps"
    )
    samples: int = parameter(
        5, low=1, high=100, doc="the most sets of sampled lengths; the highest peak counts"
    )
    sample_rows: int = parameter(
        200, low=1, doc="rows that are sampled at least once each: sets = sample_rows / rows + 1"
    )
    initial_length: int = parameter(
        512, low=1, doc="output length that fills the history at the start, in tokens"
    )
    initial_count: int = parameter(
        0, high=1_000_000, doc="how many entries of initial_length the history starts with"
    )

    def first_history(self) -> LengthHistory:
        return LengthHistory(
            self.window, repeat(self.initial_length, min(self.initial_count, self.window))
        )

    def admissible(self, worker: Worker, job: Job, footprint: Footprint) -> bool:
        """A necessary condition that is cheap: the peak is never below what rows take now."""
        return footprint.taken_with(job.length) < self.limit(worker)

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        """Algorithm 1: candidates enter while M* stays below the limit."""
        from toolkit.sched.kernels import admit_past_future

        running = worker.running.table()
        waiting: list[int] = []
        for job in candidates:
            waiting += (job.length, job.generated, job.max_new_tokens)
        return int(
            admit_past_future(
                running,
                np.array(array("q", waiting)).reshape(-1, 3),
                view.finished.ascending(),
                self.limit(worker),
                min(self.sample_rows // max(len(running), 1) + 1, self.samples),
                view.rng.bit_generator.random_raw() >> 1,  # 63 bits: one type for the kernel
                worker.padded,
            )
        )

    def limit(self, worker: Worker) -> float:
        """The tokens that the peak must stay below."""
        return (1.0 - self.reserve) * worker.capacity_tokens


@policy("past-future-oracle", knows_lengths=True)
class PastFutureOracle(ContinuousPolicy):
    """The "theoretical optimum": admit while the true peak (Eq. 2-4) is below the capacity."""

    output_tokens: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)

    def admissible(self, worker: Worker, job: Job, footprint: Footprint) -> bool:
        return footprint.taken_with(job.length) < worker.capacity_tokens

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        from toolkit.sched.kernels import peaks_to_come

        running = worker.running
        rows: list[int] = []
        for job in running.jobs:
            decoded = running.steps - job.joined
            rows += (job.length + decoded, self._remaining(job) - decoded)
        for job in candidates:
            rows += (job.length, self._remaining(job))
        peaks = peaks_to_come(rows, len(running.jobs), worker.padded)
        return bisect_left(peaks, worker.capacity_tokens)

    def _remaining(self, job: Job) -> int:
        return self.output_tokens[job.request_id] - job.generated
