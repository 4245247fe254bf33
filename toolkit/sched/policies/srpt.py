"""Shortest remaining time first: the bound for queues that do not know lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from toolkit.sched.policies.parameters import policy
from toolkit.sched.policies.preemptive import PreemptivePolicy
from toolkit.sched.types import Job, LatencyLaw
from toolkit.sched.waiting import Ranking


class RemainingTime(Ranking):
    """Seconds that a job would still take alone under the law, by the true lengths."""

    def __init__(self, law: LatencyLaw, output_tokens: Mapping[str, int]) -> None:
        self._law = law
        self._output_tokens = output_tokens

    def rank(self, job: Job, generated: int) -> float:
        remaining = self._output_tokens[job.request_id] - generated
        seconds = self._law.decode_s(1, job.prompt_tokens + generated, remaining)
        if not generated:
            seconds += self._law.prefill_s(1, job.prompt_tokens)
        return seconds


@policy("srpt-oracle", knows_lengths=True)
class SrptOracle(PreemptivePolicy):
    """Shortest remaining time first by the true lengths, of a job alone under the law."""

    output_tokens: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)

    def ranking(self, law: LatencyLaw) -> Ranking:
        return RemainingTime(law, self.output_tokens)
