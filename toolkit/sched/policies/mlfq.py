"""FastServe's multi-level feedback queues: short jobs first, without knowing which they are."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from toolkit.sched.policies.parameters import knob
from toolkit.sched.policies.placement import STARVES, Rank, Row
from toolkit.sched.policies.preemptive import PreemptivePolicy
from toolkit.sched.policies.queues import Queues, queues_of
from toolkit.sched.protocols import LatencyLaw, Standing
from toolkit.sched.ranked import RankedInbox
from toolkit.sched.types import Job, Worker


@dataclass(frozen=True, slots=True)
class MlfqPolicy(PreemptivePolicy):
    """Skip-join multi-level feedback queues; with `skip_join` false the naive ones.

    A job joins the first queue whose quantum covers its prefill, leaves a queue for the next when it has used up the
    quantum, and goes to the first when it has waited for `starvation_s`: it then runs before all who have not, and has
    that queue's quantum anew. Of the queues, the first comes first; within one, who arrived first. See `Queues`.

    Each priority has queues of its own: all of a more urgent one come before those of the next.
    """

    name: ClassVar[str] = "mlfq"

    quantum_s: float = knob(0.1, low=1e-9, high=1e9, search=(0.01, 2.0), log=True, doc="service in the first queue, s")
    growth: float = knob(2.0, low=1.0, high=1e3, search=(1.5, 4.0), doc="a queue's quantum over that of the one before")
    queues: int = knob(8, low=1, high=64, search=(2, 12), doc="how many queues there are")
    starvation_s: float = knob(30.0, low=1e-9, high=1e9, search=(1, 120), log=True, doc="longest wait before promotion")
    skip_join: bool = knob(True, doc="false: every job joins the first queue (naive MLFQ)")

    @property
    def patience_s(self) -> float:
        return self.starvation_s

    def standings(self, law: LatencyLaw) -> Standing:
        find, queues = self._queues(law).find, self.queues

        def standing(job: Job, generated: int) -> float:
            return job.priority * queues + find(job.prompt_tokens, generated, job.promoted_at)[0]

        return standing

    def next_runs(
        self, worker: Worker, cached: Sequence[Row], rows: Sequence[Row], now_s: float
    ) -> dict[Job, tuple[float, Rank]]:
        """ENST, in seconds: until the row's promotion, or the quanta of all who run before it, whichever is less."""
        quanta_s, starvation_s, inbox = self._queues(worker.latency).quanta_s, self.starvation_s, worker.inbox
        assert isinstance(inbox, RankedInbox)
        starving, standings, counts = inbox.standings(now_s, starvation_s)
        ahead_s = [0.0]  # of all of lesser standing, by the place of a standing
        for standing, count in zip(standings, counts, strict=True):
            ahead_s.append(ahead_s[-1] + count * self._quantum_s(quanta_s, standing))
        found: dict[Job, tuple[float, Rank]] = {}
        asked = {row.job for row in rows}
        before_s = 0.0
        for row in cached:
            standing, _, ticket = row.rank
            own_s = self._quantum_s(quanta_s, standing)
            if row.job in asked:
                if standing == STARVES:
                    waiting_s = inbox.starving_before(now_s, row.waits_s, ticket) * quanta_s[0]
                else:
                    place = bisect_left(standings, standing)
                    others_s = ahead_s[place]
                    if place < len(standings) and standings[place] == standing:
                        others_s += inbox.equals_before(standing, ticket) * own_s
                    waiting_s = starving * quanta_s[0] + others_s
                promotion_s = starvation_s - row.waits_s if row.waits_s > 0.0 else starvation_s
                found[row.job] = min(before_s + waiting_s, promotion_s), row.rank
            before_s += own_s
        return found

    def _quantum_s(self, quanta_s: Sequence[float], standing: float) -> float:
        """Of the queue that a standing is in."""
        return quanta_s[0] if standing == STARVES else quanta_s[int(standing) % self.queues]

    def horizon(self, worker: Worker, running: Sequence[Row], steps: int) -> int:
        """Until the first of `running` has used up its quantum."""
        find = self._queues(worker.latency).find
        for row in running:
            generated = row.generated + row.needs - 1 - row.tokens
            promoted_at = row.generated if row.waits_s >= self.starvation_s else row.job.promoted_at
            _, leaves = find(row.job.prompt_tokens, generated, promoted_at)
            if leaves - generated < steps:
                steps = leaves - generated
        return steps

    def horizon_of_residents(self, worker: Worker, steps: int, now_s: float) -> int:
        find, since = self._queues(worker.latency).find, worker.residents.steps
        for job in worker.residents.jobs:
            generated = job.generated + since - job.joined
            left = find(job.prompt_tokens, generated, job.promoted_at)[1] - generated
            if left < steps:
                steps = left
        return steps

    def _queues(self, law: LatencyLaw) -> Queues:
        return queues_of(law, self.quantum_s, self.growth, self.queues, self.skip_join)
