"""Shortest remaining time first: the bound for queues that do not know lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from functools import partial

from toolkit.errors import InputError
from toolkit.sched.policies.base import Ranking
from toolkit.sched.policies.parameters import policy
from toolkit.sched.policies.preemptive import PreemptivePolicy
from toolkit.sched.protocols import SliceLaw
from toolkit.sched.types import Job


@policy("srpt-oracle", knows_lengths=True)
class SrptOracle(PreemptivePolicy):
    """Shortest remaining time first by the true lengths, of a job alone under the law."""

    output_tokens: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)

    def with_lengths(self, output_tokens: Mapping[str, int]) -> SrptOracle:
        return replace(self, output_tokens=output_tokens)

    def ranking(self, law: SliceLaw) -> Ranking:
        if not self.output_tokens:
            raise InputError(
                f"policy '{self.name}' needs the true output lengths", "it runs in simulations only"
            )

        return partial(self._remaining_s, law)

    def _remaining_s(self, law: SliceLaw, job: Job, generated: int) -> float:
        remaining = self.output_tokens[job.request_id] - generated
        seconds = law.decode_s(1, job.prompt_tokens + generated, remaining)
        if not generated:
            seconds += law.prefill_s(1, job.prompt_tokens)
        return seconds
