"""The feedback queues of FastServe: which queue a job is in, and the rounds that follow from it.

`FeedbackQueues` computes the queue of a job from its own counters and a latency law alone,
`FeedbackRounds` is the planner of `MlfqPolicy`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from toolkit.sched.inbox import RankedInbox
from toolkit.sched.policies.placement import STARVES, Path, Rank, RankedJob
from toolkit.sched.policies.preemptive_rounds import PreemptiveRounds
from toolkit.sched.protocols import SliceLaw
from toolkit.sched.types import Job, Worker
from toolkit.sched.view import View

if TYPE_CHECKING:
    from toolkit.sched.policies.preemptive import MlfqPolicy

NEVER: Final = 1 << 40  # returned if a job never leaves its queue, in tokens
LONGEST_QUANTUM_TOKENS: Final = 1 << 24  # a quantum that lasts longer counts as never used up
MOST_TOKENS: Final = 1 << 32  # more than a job generates
JOBS_KEPT: Final = 1 << 16  # entries of a cache of jobs
LAWS_KEPT = 8  # entries of the cache of laws


class FeedbackQueues:
    """The `count` queues under a worker's latency law, numbered from 0.

    A job joins the first queue with a quantum that covers its prefill, or queue 0 without
    `skip_join` or after a promotion. It leaves a queue when it has used up the quantum. Queue 0 has
    a quantum of `first_s`, each further queue one `growth` times as long, and the last has none.

    Service is measured in seconds of the law as if the job ran alone: T_prefill(1, L), plus the
    time of each decode step.
    """

    def __init__(
        self, law: SliceLaw, first_s: float, growth: float, count: int, skip_join: bool
    ) -> None:
        self.quanta_s = [first_s * growth**k for k in range(count)]
        self._law = law
        self._skip_join = skip_join
        self._emits = int(law.prefill_emits_token)
        self._known: dict[int, Path] = {}  # by prompt and promotion, as one number

    def find(self, prompt_tokens: int, generated: int, promoted_at: int = -1) -> tuple[int, int]:
        """The queue of a job with so many generated tokens, and the number at which it leaves.

        `promoted_at` is what it had generated when it was last promoted, -1 if it never was.
        """
        return place_on(self.path(prompt_tokens, promoted_at), generated)

    def path(self, prompt_tokens: int, promoted_at: int) -> Path:
        """The path of a job through the queues, from where it was last promoted."""
        key = prompt_tokens * MOST_TOKENS + promoted_at + 1
        path = self._known.get(key)
        if path is None:
            if len(self._known) >= JOBS_KEPT:
                self._known.clear()
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
            path = self._known[key] = queue, leaves
        return path

    def standing(self, job: Job, generated: int) -> float:
        """The standing of a job: each priority has its own queues."""
        queue = self.find(job.prompt_tokens, generated, job.promoted_at)[0]
        return float(job.priority * len(self.quanta_s) + queue)

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


def place_on(path: Path, generated: int) -> tuple[int, int]:
    """The queue of a job on this path, and the generated tokens at which it leaves it."""
    queue, leaves = path
    for tokens in leaves:
        if generated < tokens:
            return queue, tokens
        queue += 1
    return queue, NEVER


# The `FeedbackQueues` of these arguments, cached with what they have computed.
queues_of = lru_cache(maxsize=LAWS_KEPT)(FeedbackQueues)


class FeedbackRounds(PreemptiveRounds):
    """The planner of `MlfqPolicy`, with the `queues` of each worker."""

    def __init__(self, view: View, policy: MlfqPolicy, queues: list[FeedbackQueues]) -> None:
        super().__init__(view, policy)
        self._queues = queues

    def rank(self, worker: Worker, row: RankedJob, generated: int) -> float:
        job = row.job
        queues = self._queues[worker.index]
        if row.path is None or row.promoted_at != job.promoted_at:
            row.path = queues.path(job.prompt_tokens, job.promoted_at)
            row.promoted_at = job.promoted_at
        queue, row.leaves = place_on(row.path, generated)
        row.since = generated
        return float(job.priority * len(queues.quanta_s) + queue)

    def next_runs(
        self, worker: Worker, cached: Sequence[RankedJob], rows: Sequence[RankedJob], now_s: float
    ) -> dict[Job, tuple[float, Rank]]:
        """ENST (estimated next scheduled time) of each row in seconds, after FastServe.

        It is the lesser of the time until the row's promotion and the sum of the quanta of all jobs
        that run before it.
        """
        quanta_s = self._queues[worker.index].quanta_s
        starvation_s = self.patience_s
        inbox = worker.inbox
        assert isinstance(inbox, RankedInbox)
        starving, standings, counts = inbox.standings(now_s, starvation_s)
        # By index in `standings`: how many jobs have a lesser standing, and their quanta.
        ahead = [0]
        ahead_s = [0.0]
        for standing, count in zip(standings, counts, strict=True):
            ahead.append(ahead[-1] + count)
            ahead_s.append(ahead_s[-1] + count * self._quantum_s(quanta_s, standing))
        next_runs: dict[Job, tuple[float, Rank]] = {}
        wanted = {row.job for row in rows}
        before_s = 0.0
        for row in cached:
            standing = row.standing
            ticket = row.ticket
            own_s = self._quantum_s(quanta_s, standing)
            if row.job in wanted:
                if standing == STARVES:
                    waiting_s = inbox.starving_before(now_s, row.waits_s, ticket) * quanta_s[0]
                else:
                    place = bisect_left(standings, standing)
                    others_s = ahead_s[place]
                    if place < len(standings) and standings[place] == standing:
                        equals = inbox.others_before(standing, ticket) - ahead[place]
                        others_s += equals * own_s
                    waiting_s = starving * quanta_s[0] + others_s
                promotion_s = starvation_s - row.waits_s if row.waits_s > 0.0 else starvation_s
                next_runs[row.job] = min(before_s + waiting_s, promotion_s), row.rank
            before_s += own_s
        return next_runs

    def _quantum_s(self, quanta_s: Sequence[float], standing: float) -> float:
        """The quantum, in seconds, of the queue of a standing."""
        return quanta_s[0] if standing == STARVES else quanta_s[int(standing) % len(quanta_s)]

    def horizon(self, worker: Worker, running: Sequence[RankedJob], steps: int) -> int:
        """Steps until the first of `running` has used up its quantum."""
        queues = self._queues[worker.index]
        for row in running:
            generated = row.generated + row.needs - 1 - row.tokens
            promoted_at = row.generated if row.waits_s >= self.patience_s else row.job.promoted_at
            if row.keeps(generated, promoted_at):
                leaves = row.leaves
            else:
                leaves = queues.find(row.job.prompt_tokens, generated, promoted_at)[1]
            if leaves - generated < steps:
                steps = leaves - generated
        return steps
