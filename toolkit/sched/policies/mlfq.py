"""FastServe's multi-level feedback queues: short jobs first, without knowing which they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from toolkit.sched.policies.parameters import knob
from toolkit.sched.policies.placement import Order, Place, Rank, Row
from toolkit.sched.policies.preemptive import PreemptivePolicy
from toolkit.sched.policies.queues import Queues, queues_of
from toolkit.sched.types import Job, Worker


@dataclass(frozen=True, slots=True)
class MlfqPolicy(PreemptivePolicy):
    """Skip-join multi-level feedback queues; with `skip_join` false the naive ones.

    A job joins the first queue whose quantum covers its prefill, leaves a queue for the next when it has used up the
    quantum, and goes to the first when it has waited for `starvation_s`: it then runs before all who have not, and has
    that queue's quantum anew. Of the queues, the first comes first; within one, who arrived first. See `Queues`.
    """

    name: ClassVar[str] = "mlfq"

    quantum_s: float = knob(0.1, low=1e-9, high=1e9, search=(0.01, 2.0), log=True, doc="service in the first queue, s")
    growth: float = knob(2.0, low=1.0, high=1e3, search=(1.5, 4.0), doc="a queue's quantum over that of the one before")
    queues: int = knob(8, low=1, high=64, search=(2, 12), doc="how many queues there are")
    starvation_s: float = knob(30.0, low=1e-9, high=1e9, search=(1, 120), log=True, doc="longest wait before promotion")
    skip_join: bool = knob(True, doc="false: every job joins the first queue (naive MLFQ)")

    def order(self, worker: Worker) -> Order:
        find, starvation_s = self._queues(worker).find, self.starvation_s

        def rank(job: Job, generated: int, waits_s: float) -> Rank:
            if waits_s >= starvation_s:
                return -1.0, -waits_s, job.ticket
            return find(job.request.prompt_tokens, generated, job.promoted_at)[0], 0.0, job.ticket

        return rank

    def next_runs(self, worker: Worker, rows: Sequence[Row]) -> Sequence[float]:
        """ENST, in seconds: until the row's promotion, or the quanta of all who run before it, whichever is less."""
        quanta_s, starvation_s = self._queues(worker).quanta_s, self.starvation_s
        found, before_s = [], 0.0
        for row in rows:
            promotion_s = starvation_s - row.waits_s if row.waits_s > 0.0 else starvation_s
            found.append(before_s if before_s < promotion_s else promotion_s)
            before_s += quanta_s[max(int(row.rank[0]), 0)]
        return found

    def horizon(self, worker: Worker, running: Sequence[Row], steps: int) -> int:
        """Until the first of `running` has used up its quantum."""
        find, emits = self._queues(worker).find, worker.latency.prefill_emits_token
        for row in running:
            generated = row.generated + (emits and row.place is Place.INBOX)
            promoted_at = row.generated if self.starves(row) else row.job.promoted_at
            _, leaves = find(row.job.request.prompt_tokens, generated, promoted_at)
            if leaves - generated < steps:
                steps = leaves - generated
        return steps

    def starves(self, row: Row) -> bool:
        return row.waits_s >= self.starvation_s

    def starving_in_s(self, rows: Sequence[Row]) -> float:
        waits_s = [row.waits_s for row in rows if row.waits_s < self.starvation_s]
        return self.starvation_s - max(0.0, *waits_s) if waits_s else math.inf

    def _queues(self, worker: Worker) -> Queues:
        return queues_of(worker.latency, self.quantum_s, self.growth, self.queues, self.skip_join)
