"""Past-Future: admission by the peak memory that is to come, predicted from the output lengths that have been.

Gong et al., *Past-Future Scheduler for LLM Serving under SLA Guarantees*, section 3. Nothing is kept between attempts:
each samples all lengths anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import ClassVar

import numpy as np

from toolkit.sched.footprint import Footprint
from toolkit.sched.history import History
from toolkit.sched.kernels import admit_past_future
from toolkit.sched.policies.continuous import ContinuousPolicy
from toolkit.sched.policies.parameters import knob
from toolkit.sched.types import Job, Worker
from toolkit.sched.view import View


@dataclass(frozen=True, slots=True)
class PastFuturePolicy(ContinuousPolicy):
    """Admit while the predicted peak (Eq. 2-4) stays below (1 - reserve) of the capacity.

    A resident's length is sampled from the history's longer ones, one who waits draws from all. Table 1 has a reserve
    of 0.03, 0.05 and 0.10, a window of 1000, and a history that starts with 500 outputs of 512 tokens. By default the
    history starts empty, and requests count as long as they may become until others have ended: the safe start.
    """

    name: ClassVar[str] = "past-future"

    reserve: float = knob(0.05, high=0.99, search=(0.0, 0.3), doc="share of the capacity that the peak must leave free")
    window: int = knob(1000, low=1, high=1_000_000, doc="w: how many finished lengths are looked back on")
    samples: int = knob(5, low=1, high=100, doc="the most sets of sampled lengths; the highest peak counts")
    sample_rows: int = knob(200, low=1, doc="rows that are sampled at least once each: sets = sample_rows / rows + 1")
    initial_length: int = knob(512, low=1, doc="output length that fills the history at the start, in tokens")
    initial_count: int = knob(0, high=1_000_000, doc="how many entries of initial_length the history starts with")

    def first_history(self) -> History:
        return History(self.window, repeat(self.initial_length, min(self.initial_count, self.window)))

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        residents = worker.residents
        table = residents.table()
        sets = min(self.samples, self.sample_rows // max(table.shape[1], 1) + 1)
        waiting = np.array([(job.length, job.generated, job.max_new_tokens) for job in candidates]).T
        seed = view.rng.bit_generator.random_raw() >> 1  # 63 bits: one type for the kernel
        limit = (1.0 - self.reserve) * worker.capacity_tokens
        past = view.finished.ascending()
        return int(admit_past_future(table, residents.steps, waiting, past, limit, sets, seed, worker.padded))

    def hopeful(self, worker: Worker, job: Job, there: Footprint) -> bool:
        return there.taken_with(job.length) < (1.0 - self.reserve) * worker.capacity_tokens
