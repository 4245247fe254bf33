"""FastServe's multi-level feedback queues, which put short jobs first without knowing their
lengths.

Wu et al., *Fast Distributed Inference Serving for Large Language Models* (FastServe): skip-join
MLFQ, promotion of starving jobs, and ENST, the order in which caches are swapped.

`MlfqPolicy` is the skip-join MLFQ (and the naive one), `SrptOracle` the shortest-remaining baseline
with true lengths. `toolkit.sched.policies.feedback_queues` has the queues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from toolkit.errors import InputError
from toolkit.sched.planner import RoundPlanner
from toolkit.sched.policies.feedback_queues import FeedbackQueues, FeedbackRounds, queues_of
from toolkit.sched.policies.parameters import knob
from toolkit.sched.policies.preemptive import PreemptivePolicy
from toolkit.sched.protocols import LatencyLaw, Standing
from toolkit.sched.types import Job
from toolkit.sched.view import View


@dataclass(frozen=True, slots=True)
class MlfqPolicy(PreemptivePolicy):
    """FastServe's skip-join multi-level feedback queues; the naive ones if `skip_join` is false.

    A job joins the first queue with a quantum that covers its prefill, and moves to the next queue
    when it has used up the quantum. A job that has waited for `starvation_s` starves: it runs
    before all that do not, and is promoted to the first queue with a new quantum. Queues are served
    in order, and each queue in order of arrival. See `FeedbackQueues`.

    Each priority has its own queues: all queues of a more urgent one come first.
    """

    name: ClassVar[str] = "mlfq"

    quantum_s: float = knob(
        0.1, low=1e-9, high=1e9, search=(0.01, 2.0), log=True, doc="service in the first queue, s"
    )
    growth: float = knob(
        2.0,
        low=1.0,
        high=1e3,
        search=(1.5, 4.0),
        doc="a queue's quantum over that of the one before",
    )
    queues: int = knob(8, low=1, high=64, search=(2, 12), doc="how many queues there are")
    starvation_s: float = knob(
        30.0, low=1e-9, high=1e9, search=(1, 120), log=True, doc="longest wait before promotion"
    )
    skip_join: bool = knob(True, doc="false: every job joins the first queue (naive MLFQ)")

    @property
    def patience_s(self) -> float:
        return self.starvation_s

    def standings(self, law: LatencyLaw) -> Standing:
        return self._queues(law).standing

    def make_planner(self, view: View) -> RoundPlanner:
        queues = [self._queues(worker.latency) for worker in view.workers]
        return FeedbackRounds(view, **self.rounds()).use(queues)

    def _queues(self, law: LatencyLaw) -> FeedbackQueues:
        return queues_of(law, self.quantum_s, self.growth, self.queues, self.skip_join)


# Shortest remaining time first with the true lengths, which FastServe's queues approximate. In
# simulations only.


@dataclass(frozen=True, slots=True)
class SrptOracle(PreemptivePolicy):
    """Shortest remaining processing time: the least remaining prefill and decode alone, by the
    law.
    """

    name: ClassVar[str] = "srpt-oracle"

    def with_lengths(self, output_tokens: Mapping[str, int]) -> SrptOracle:
        """The same policy, with the true output length of each request id."""
        return _SrptWithLengths(self, output_tokens)

    def standings(self, law: LatencyLaw) -> Standing:
        raise InputError(
            f"policy '{self.name}' needs the true output lengths", "it runs in simulations only"
        )


class _SrptWithLengths(SrptOracle):
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
