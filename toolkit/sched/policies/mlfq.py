"""FastServe: skip-join multi-level feedback queues.

Wu et al., *Fast Distributed Inference Serving for Large Language Models*. Short jobs go first,
although no length is known: a job waits in queues with growing quanta of service, joins the first
queue with a quantum that covers its prefill, and moves down one queue when it has used its quantum.
Queues are served in order, and each queue in order of arrival. A job that has waited for
`starvation_s` starves: it runs before all jobs that do not, and is promoted to the first queue with
a new quantum. Which jobs run, and how caches are swapped, is the base class's
(`toolkit.sched.policies.preemptive`); the caches that leave first are those that will run last, by
ENST.

The queue of a job follows from its own counters and the worker's latency law alone, so nothing has
to be kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

from toolkit.sched.policies.parameters import parameter, policy
from toolkit.sched.policies.preemptive import (
    STARVES,
    PreemptivePolicy,
    Rank,
    RankedRow,
    ranked,
)
from toolkit.sched.types import Job, LatencyLaw, Worker
from toolkit.sched.waiting import NEVER, Ranking

LONGEST_QUANTUM_TOKENS = 1 << 24  # a quantum that lasts longer counts as never used up
JOBS_KEPT = 1 << 16  # entries of a cache of jobs
LAWS_KEPT = 8  # entries of the cache of laws
# The queue that a job joins, and the generated tokens at which it leaves that and later queues.
Path = tuple[int, list[int]]


class FeedbackQueues(Ranking):
    """The `count` queues under a worker's latency law, numbered from 0.

    A job joins the first queue with a quantum that covers its prefill, or queue 0 without
    `skip_join` or after a promotion. It leaves a queue when it has used up the quantum. Queue 0 has
    a quantum of `first_s`, each further queue one `growth` times as long, and the last has none.

    Service is measured in seconds of the law as if the job ran alone: T_prefill(1, L), plus the
    time of each decode step.
    """

    def __init__(
        self, law: LatencyLaw, first_s: float, growth: float, count: int, skip_join: bool
    ) -> None:
        self.quanta_s = [first_s * growth**k for k in range(count)]
        self._law = law
        self._skip_join = skip_join
        self._emits = int(law.prefill_emits_token)
        # The path of a job with this prompt, from where it was last promoted.
        self._path = lru_cache(maxsize=JOBS_KEPT)(self._find_path)

    def rank(self, job: Job, generated: int) -> float:
        """The rank of a job: its queue. Each priority has its own queues."""
        queue = self.find(job.prompt_tokens, generated, job.promoted_at)[0]
        return float(job.priority * len(self.quanta_s) + queue)

    def changes_at(self, job: Job, generated: int, promoted_at: int) -> int:
        """The generated tokens at which a job leaves the queue that it is in."""
        return self.find(job.prompt_tokens, generated, promoted_at)[1]

    def quantum_s(self, rank: float) -> float:
        """The quantum, in seconds, of the queue of a rank; a starving job will be promoted."""
        return (
            self.quanta_s[0] if rank == STARVES else self.quanta_s[int(rank) % len(self.quanta_s)]
        )

    def find(self, prompt_tokens: int, generated: int, promoted_at: int = -1) -> tuple[int, int]:
        """The queue of a job with so many generated tokens, and the number at which it leaves.

        `promoted_at` is what it had generated when it was last promoted, -1 if it never was.
        """
        queue, leaves = self._path(prompt_tokens, promoted_at)
        for tokens in leaves:
            if generated < tokens:
                return queue, tokens
            queue += 1
        return queue, NEVER

    def _find_path(self, prompt_tokens: int, promoted_at: int) -> Path:
        queue = 0
        used_s = 0.0
        if promoted_at >= 0:
            used_s = self.service_s(prompt_tokens, promoted_at)
        elif self._skip_join:
            prefill_s = self._law.prefill_s(1, prompt_tokens)
            while queue < len(self.quanta_s) - 1 and self.quanta_s[queue] < prefill_s:
                queue += 1
        leaves: list[int] = []
        tokens = max(promoted_at, 0)
        for quantum_s in self.quanta_s[queue:-1]:
            used_s += quantum_s
            tokens = self._tokens(prompt_tokens, used_s, tokens)
            leaves.append(tokens)
            if tokens == NEVER:
                break
        return queue, leaves

    def service_s(self, prompt_tokens: int, generated: int) -> float:
        """Seconds of prefill and decode after which a job that runs alone has so many tokens."""
        if not generated:
            return 0.0
        decoded = generated - self._emits
        prefill_s = self._law.prefill_s(1, prompt_tokens)
        return prefill_s + (self._law.decode_s(1, prompt_tokens, decoded) if decoded else 0.0)

    def _tokens(self, prompt_tokens: int, service_s: float, least: int) -> int:
        """The fewest generated tokens, at least `least`, that take `service_s` of service."""
        high = max(least, 1)
        while self.service_s(prompt_tokens, high) < service_s:
            high *= 2
            if high > LONGEST_QUANTUM_TOKENS:
                return NEVER
        counts = range(max(least, high // 2), high)
        return counts.start + bisect_left(
            counts, service_s, key=lambda tokens: self.service_s(prompt_tokens, tokens)
        )


# The `FeedbackQueues` of these arguments, cached with what they have computed.
queues_of = lru_cache(maxsize=LAWS_KEPT)(FeedbackQueues)


@policy("mlfq")
class MlfqPolicy(PreemptivePolicy):
    """FastServe's skip-join multi-level feedback queues; the naive ones if `skip_join` is false."""

    quantum_s: float = parameter(
        0.1, low=1e-9, high=1e9, search=(0.01, 2.0), log=True, doc="service in the first queue, s"
    )
    growth: float = parameter(
        2.0,
        low=1.0,
        high=1e3,
        search=(1.5, 4.0),
        doc="a queue's quantum over that of the one before",
    )
    queues: int = parameter(8, low=1, high=64, search=(2, 12), doc="how many queues there are")
    starvation_s: float = parameter(
        30.0, low=1e-9, high=1e9, search=(1, 120), log=True, doc="longest wait before promotion"
    )
    skip_join: bool = parameter(True, doc="false: every job joins the first queue (naive MLFQ)")

    @property
    def patience_s(self) -> float:
        return self.starvation_s

    def ranking(self, law: LatencyLaw) -> Ranking:
        return queues_of(law, self.quantum_s, self.growth, self.queues, self.skip_join)

    def next_runs(
        self, worker: Worker, cached: Sequence[RankedRow], rows: Sequence[RankedRow], now_s: float
    ) -> list[tuple[float, Rank]]:
        """ENST (estimated next scheduled time) of each row in seconds, after FastServe.

        It is the lesser of the time until the row's promotion and the sum of the quanta of all jobs
        that run before it.
        """
        waiting = ranked(worker)
        queues = waiting.ranking
        assert isinstance(queues, FeedbackQueues)
        starving, ranks, counts = waiting.ranks(now_s, self.starvation_s)
        # By index in `ranks`: how many waiting jobs have a lesser rank, and their quanta.
        ahead = [0]
        ahead_s = [0.0]
        for rank, count in zip(ranks, counts, strict=True):
            ahead.append(ahead[-1] + count)
            ahead_s.append(ahead_s[-1] + count * queues.quantum_s(rank))
        next_runs: list[tuple[float, Rank]] = []
        wanted = {row.job for row in rows}
        before_s = 0.0
        for row in cached:
            rank, _, ticket = row.rank
            quantum_s = queues.quantum_s(rank)
            if row.job in wanted:
                if rank == STARVES:
                    older = waiting.starving_before(now_s, row.waits_s, ticket)
                    waiting_s = older * queues.quanta_s[0]
                else:
                    place = bisect_left(ranks, rank)
                    waiting_s = ahead_s[place]
                    if place < len(ranks) and ranks[place] == rank:
                        equals = waiting.others_before(rank, ticket) - ahead[place]
                        waiting_s += equals * quantum_s
                    waiting_s = starving * queues.quanta_s[0] + waiting_s
                promotion_s = self.starvation_s - max(row.waits_s, 0.0)
                next_runs.append((min(before_s + waiting_s, promotion_s), row.rank))
            before_s += quantum_s
        return next_runs
