"""Shortest remaining time first: the bound for queues that do not know lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace

from toolkit.errors import InputError
from toolkit.sched.policies.parameters import policy
from toolkit.sched.policies.preemptive import PreemptivePolicy
from toolkit.sched.protocols import LatencyLaw
from toolkit.sched.ranked import Ranking
from toolkit.sched.types import Job


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

    def with_lengths(self, output_tokens: Mapping[str, int]) -> SrptOracle:
        return replace(self, output_tokens=output_tokens)

    def ranking(self, law: LatencyLaw) -> Ranking:
        if not self.output_tokens:
            raise InputError(
                f"policy '{self.name}' needs the true output lengths", "it runs in simulations only"
            )
        return RemainingTime(law, self.output_tokens)
