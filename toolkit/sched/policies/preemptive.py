"""Preemptive policies: the jobs that rank highest run, the others keep their caches.

At every scheduling point all jobs of a worker are ranked, and as many of the highest run as rows
and memory allow. A job that makes way is paused and keeps its cache on the device if there is room,
else in host memory; without room in either, its cache is dropped and computed again later. Caches
move in one of two ways:

- reactive: caches that memory has no room for are swapped out, and the round waits for its
  transfers;
- proactive (FastServe's key-value cache management): a share of the device is kept free for
  newcomers, caches that are needed last leave first, caches that are needed soonest come back
  before they are needed, and transfers run beside a round's compute. A round waits for its
  transfers only if it has nothing to compute, or if a starving job would wait longer.

A round ends when a row ends, when ranks change (the policy's `horizon`), when memory is full, when
the caches arrive that higher-ranked jobs wait for, every `interval_steps` while any job waits, and
when a job arrives that would run. If no waiting job could enter whatever its rank, and none is
paused or swapped out, the round continues until a row ends.

`toolkit.sched.policies.preemptive_rounds` plans the rounds, `toolkit.sched.policies.placement` has
the ranked jobs, the newcomers and where caches go. The policies are those of Wu et al., *Fast
Distributed Inference Serving for Large Language Models* (FastServe).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from toolkit.errors import InputError
from toolkit.sched.policies.continuous import RoundPolicy, router_choice
from toolkit.sched.policies.feedback_queues import FeedbackQueues, FeedbackRounds, queues_of
from toolkit.sched.policies.parameters import choice, chunk_knob, knob, prefill_knob, rows_knob
from toolkit.sched.policies.preemptive_rounds import PreemptiveRounds
from toolkit.sched.protocols import SliceLaw, Standing
from toolkit.sched.types import Job
from toolkit.sched.view import RoundPlanner, View


@dataclass(frozen=True, slots=True)
class PreemptivePolicy(RoundPolicy):
    """Base of the preemptive policies: subclasses rank jobs, their planners say for how long."""

    max_batch_size: int = rows_knob(32)
    interval_steps: int = knob(
        64,
        low=1,
        high=10_000,
        search=(8, 256),
        log=True,
        doc="decode steps between scheduling points, at the most",
    )
    max_prefill_tokens: int = prefill_knob()
    swap: str = choice(
        "proactive", ("proactive", "reactive"), doc="when caches are swapped: proactive, reactive"
    )
    free_share: float = knob(
        0.1,
        low=0,
        high=0.9,
        search=(0.0, 0.5),
        doc="proactive: share of the device's memory kept free for newcomers",
    )
    router: str = router_choice()
    chunk_tokens: int = chunk_knob()

    @property
    def patience_s(self) -> float:
        """A job that has waited for so many seconds goes first, and is promoted when it runs."""
        return math.inf

    @abstractmethod
    def standings(self, law: SliceLaw) -> Standing:
        """See `Ranks`. Of jobs that do not starve, the one with the least standing goes first."""

    @property
    def most_rows(self) -> int:
        return self.max_batch_size

    def make_planner(self, view: View) -> RoundPlanner:
        return PreemptiveRounds(view, self)


@dataclass(frozen=True, slots=True)
class MlfqPolicy(PreemptivePolicy):
    """FastServe's skip-join multi-level feedback queues; the naive ones if `skip_join` is false.

    So short jobs go first, although no length is known. Queues are served in order, and each queue
    in order of arrival; `FeedbackQueues` says how jobs move through them. A job that has waited for
    `starvation_s` starves: it runs before all that do not, and is promoted to the first queue with
    a new quantum. Caches are swapped in the order ENST. Each priority has its own queues: all
    queues of a more urgent one come first.
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

    def standings(self, law: SliceLaw) -> Standing:
        return self._queues(law).standing

    def make_planner(self, view: View) -> RoundPlanner:
        queues = [self._queues(worker.latency) for worker in view.workers]
        return FeedbackRounds(view, self, queues)

    def _queues(self, law: SliceLaw) -> FeedbackQueues:
        return queues_of(law, self.quantum_s, self.growth, self.queues, self.skip_join)


@dataclass(frozen=True, slots=True)
class SrptOracle(PreemptivePolicy):
    """Shortest remaining time first by the true lengths, of a job alone under the law."""

    name: ClassVar[str] = "srpt-oracle"

    def with_lengths(self, output_tokens: Mapping[str, int]) -> SrptOracle:
        """The same policy, with the true output length of each request id."""
        return _SrptWithLengths(self, output_tokens)

    def standings(self, law: SliceLaw) -> Standing:
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

    def standings(self, law: SliceLaw) -> Standing:
        output_tokens = self._output_tokens

        def remaining_s(job: Job, generated: int) -> float:
            remaining = output_tokens[job.request_id] - generated
            seconds = law.decode_s(1, job.prompt_tokens + generated, remaining)
            if not generated:
                seconds += law.prefill_s(1, job.prompt_tokens)
            return seconds

        return remaining_s
