"""Shortest remaining output first, by the true lengths: what FastServe's queues approximate. In simulations only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from toolkit.errors import InputError
from toolkit.sched.policies.preemptive import PreemptivePolicy
from toolkit.sched.protocols import LatencyLaw, Standing
from toolkit.sched.types import Job


@dataclass(frozen=True, slots=True)
class SrptOracle(PreemptivePolicy):
    """Shortest remaining processing time: whose remaining prefill and decode would be shortest alone, by the law."""

    name: ClassVar[str] = "srpt-oracle"

    def told(self, output_tokens: Mapping[str, int]) -> SrptOracle:
        """The same policy, with the true output length of each request id."""
        return _Told(self, output_tokens)

    def standings(self, law: LatencyLaw) -> Standing:
        raise InputError(f"policy '{self.name}' needs the true output lengths", "it runs in simulations only")


class _Told(SrptOracle):
    """The oracle that knows."""

    __slots__ = ("_output_tokens",)
    _output_tokens: Mapping[str, int]

    def __init__(self, policy: SrptOracle, output_tokens: Mapping[str, int]) -> None:
        super().__init__(*[getattr(policy, field.name) for field in fields(policy)])
        object.__setattr__(self, "_output_tokens", output_tokens)

    def standings(self, law: LatencyLaw) -> Standing:
        output_tokens = self._output_tokens

        def remaining_s(job: Job, generated: int) -> float:
            request = job.request
            remaining = output_tokens[request.request_id] - generated
            seconds = law.decode_s(1, request.prompt_tokens + generated, remaining)
            if not generated:
                seconds += law.prefill_s(1, request.prompt_tokens)
            return seconds

        return remaining_s
