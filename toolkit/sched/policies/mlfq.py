"""FastServe's multi-level feedback queues: short jobs first, without knowing which they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from toolkit.sched.policies.parameters import knob
from toolkit.sched.policies.placement import Place, Rank, Row
from toolkit.sched.policies.preemptive import PreemptivePolicy
from toolkit.sched.protocols import LatencyLaw
from toolkit.sched.types import Job, Worker


@dataclass(frozen=True, slots=True)
class MlfqPolicy(PreemptivePolicy):
    """Skip-join multi-level feedback queues; with `skip_join` false the naive ones.

    A job joins the first queue whose quantum covers its prefill, leaves a queue for the next when it has used up the
    quantum, and goes to the first when it has waited longer than `starvation_s`. Of the queues, the first comes first;
    within one, who arrived first. The last queue has no quantum.

    Service is counted in seconds of the fitted law as if the job ran alone: T_prefill(1, L), and its decode steps'. So
    a queue is a function of the job's own counters, and no job is demoted for the company that it was batched with.
    """

    name: ClassVar[str] = "mlfq"

    quantum_s: float = knob(0.1, low=1e-9, high=1e9, search=(0.01, 2.0), log=True, doc="service in the first queue, s")
    growth: float = knob(2.0, low=1.0, high=1e3, search=(1.5, 4.0), doc="a queue's quantum over that of the one before")
    queues: int = knob(8, low=1, high=64, search=(2, 12), doc="how many queues there are")
    starvation_s: float = knob(30.0, low=1e-9, high=1e9, search=(1, 120), log=True, doc="longest wait before promotion")
    skip_join: bool = knob(True, doc="false: every job joins the first queue (naive MLFQ)")

    def rank(self, worker: Worker, job: Job, generated: int, waits_s: float) -> Rank:
        if waits_s >= self.starvation_s:
            return -1.0, -waits_s, job.ticket
        return float(self._queue(worker.latency, job, generated)[0]), 0.0, job.ticket

    def next_runs(self, rows: Sequence[Row]) -> Sequence[float]:
        """ENST, in seconds: until the row's promotion, or the quanta of all who run before it, whichever is less."""
        quanta = _quanta(self.quantum_s, self.growth, self.queues)
        found, before_s = [], 0.0
        for row in rows:
            found.append(min(before_s, self.starvation_s - max(row.waits_s, 0.0)))
            before_s += quanta[max(int(row.rank[0]), 0)]
        return found

    def horizon(self, worker: Worker, running: Sequence[Row], steps: int) -> int:
        """Until the first of `running` has used up its quantum."""
        law = worker.latency
        for row in running:
            promoted = self.starves(row)
            _, limit_s = self._queue(law, row.job, row.generated, promoted=promoted)
            done = row.generated + (law.prefill_emits_token if row.place is Place.INBOX else 0)
            if _service_s(law, row.job.request.prompt_tokens, done + steps) >= limit_s:
                low = 1
                while low < steps:
                    middle = (low + steps) // 2
                    if _service_s(law, row.job.request.prompt_tokens, done + middle) >= limit_s:
                        steps = middle
                    else:
                        low = middle + 1
        return steps

    def starves(self, row: Row) -> bool:
        return row.waits_s >= self.starvation_s

    def starving_in_s(self, rows: Sequence[Row]) -> float:
        waits = [max(row.waits_s, 0.0) for row in rows if row.waits_s < self.starvation_s]
        return self.starvation_s - max(waits) if waits else float("inf")

    def _queue(self, law: LatencyLaw, job: Job, generated: int, *, promoted: bool = False) -> tuple[int, float]:
        """The queue, from 0, of a job that generated so much, and the service at which it leaves it for the next."""
        prompt = job.request.prompt_tokens
        quanta = _quanta(self.quantum_s, self.growth, self.queues)
        last = len(quanta) - 1
        promoted_at = generated if promoted else job.promoted_at
        queue, limit_s = 0, 0.0
        if promoted_at >= 0:
            limit_s = _service_s(law, prompt, promoted_at)
        elif self.skip_join:
            prefill_s = law.prefill_s(1, prompt)
            while queue < last and quanta[queue] < prefill_s:
                queue += 1
        limit_s += quanta[queue]
        service_s = _service_s(law, prompt, generated)
        while queue < last and service_s >= limit_s:
            queue += 1
            limit_s += quanta[queue]
        return queue, limit_s if queue < last else float("inf")


def _service_s(law: LatencyLaw, prompt_tokens: int, generated: int) -> float:
    """Seconds of prefill and decode that gave a job so many tokens, had it run alone."""
    if not generated:
        return 0.0
    decoded = generated - law.prefill_emits_token
    return law.prefill_s(1, prompt_tokens) + (law.decode_s(1, prompt_tokens, decoded) if decoded else 0.0)


@lru_cache(maxsize=64)
def _quanta(first_s: float, growth: float, queues: int) -> tuple[float, ...]:
    """The queues' quanta in seconds."""
    return tuple([first_s * growth**k for k in range(queues)])
