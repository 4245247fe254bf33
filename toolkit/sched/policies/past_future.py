"""Past-Future: admission by the predicted peak of memory, from the lengths of past outputs.

Gong et al., *Past-Future Scheduler for LLM Serving under SLA Guarantees*, section 3. Nothing is
kept between attempts to admit: each samples all lengths again. `toolkit.sched.policies.admission`
has the criteria.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import repeat
from typing import ClassVar

from toolkit.errors import InputError
from toolkit.sched.policies.admission import Peak, SampledPeak, WithinLimits
from toolkit.sched.policies.continuous import ContinuousPolicy
from toolkit.sched.policies.continuous_rounds import Bounds, ContinuousRounds
from toolkit.sched.policies.parameters import knob
from toolkit.sched.types import Job, Worker
from toolkit.sched.view import LengthHistory, View


@dataclass(frozen=True, slots=True)
class PastFuturePolicy(ContinuousPolicy):
    """Admit while the predicted peak (Eq. 2-4) stays below (1 - reserve) of the capacity.

    The length of a resident is sampled from the longer lengths of the history, that of a waiting
    job from all. Table 1 has a reserve of 0.03, 0.05 and 0.10, a window of 1000, and a history that
    starts with 500 outputs of 512 tokens. By default the history starts empty, and until requests
    have ended each counts with its limit: the safe start.
    """

    name: ClassVar[str] = "past-future"

    reserve: float = knob(
        0.05,
        high=0.99,
        search=(0.0, 0.3),
        doc="share of the capacity that the peak must leave free",
    )
    window: int = knob(
        1000, low=1, high=1_000_000, doc="w: how many finished lengths the history keeps"
    )
    samples: int = knob(
        5, low=1, high=100, doc="the most sets of sampled lengths; the highest peak counts"
    )
    sample_rows: int = knob(
        200, low=1, doc="rows that are sampled at least once each: sets = sample_rows / rows + 1"
    )
    initial_length: int = knob(
        512, low=1, doc="output length that fills the history at the start, in tokens"
    )
    initial_count: int = knob(
        0, high=1_000_000, doc="how many entries of initial_length the history starts with"
    )

    def first_history(self) -> LengthHistory:
        return LengthHistory(
            self.window, repeat(self.initial_length, min(self.initial_count, self.window))
        )

    def make_planner(self, view: View) -> ContinuousRounds:
        planner = ContinuousPolicy.make_planner(self, view)
        planner.admit = self._rules(view).admit
        return planner

    def _rules(self, view: View) -> SampledPeak:
        rules: SampledPeak = view.rules or SampledPeak(self)
        view.rules = rules
        return rules

    def bounds(self, worker: Worker) -> Bounds:
        # The most whole tokens below the share.
        return Bounds(taken=math.ceil((1.0 - self.reserve) * worker.capacity_tokens) - 1)


@dataclass(frozen=True, slots=True)
class PastFutureOracle(ContinuousPolicy):
    """The "theoretical optimum": admit while the true peak (Eq. 2-4) is below the capacity."""

    name: ClassVar[str] = "past-future-oracle"

    def with_lengths(self, output_tokens: Mapping[str, int]) -> PastFutureOracle:
        """The same policy, with the true output length of each request id."""
        return _OracleWithLengths(self, output_tokens)

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        raise InputError(
            f"policy '{self.name}' needs the true output lengths", "it runs in simulations only"
        )

    def bounds(self, worker: Worker) -> Bounds:
        return Bounds(taken=worker.capacity_tokens - 1)


class _OracleWithLengths(PastFutureOracle):
    """The oracle that knows."""

    __slots__ = ("_output_tokens",)
    _output_tokens: Mapping[str, int]

    def __init__(self, policy: PastFutureOracle, output_tokens: Mapping[str, int]) -> None:
        super().__init__(**{f.name: getattr(policy, f.name) for f in fields(PastFutureOracle)})
        object.__setattr__(self, "_output_tokens", output_tokens)

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        peak = Peak(worker.padded)
        for job in worker.residents.jobs:
            ran = worker.residents.steps - job.joined
            peak.add(job.length + ran, self._remaining(job) - ran)
        peak.sort()
        for k, job in enumerate(candidates):
            peak.insert(job.length, self._remaining(job))
            if peak.tokens() >= worker.capacity_tokens:
                return k
        return len(candidates)

    def _remaining(self, job: Job) -> int:
        return self._output_tokens[job.request_id] - job.generated


@dataclass(frozen=True, slots=True)
class PastFutureSlaPolicy(PastFuturePolicy):
    """Past-Future within limits of TTFT and MTPOT; the defaults are the paper's for 7B and 13B.

    A job is late if it has no token yet and could not get one in time even alone, or if its prefill
    alone breaks MTPOT. In a `late_share` of a worker's attempts to admit, the oldest late job comes
    first, keeps that place, and may break MTPOT, so that none starves.
    """

    name: ClassVar[str] = "past-future-sla"
    any_may_come: ClassVar[bool] = True

    ttft_s: float = knob(10.0, low=1e-6, doc="time to first token that counts as good, in seconds")
    mtpot_s: float = knob(
        1.5, low=1e-6, doc="largest gap between a request's tokens that counts as good, in seconds"
    )
    late_share: float = knob(
        0.1,
        low=0.01,
        high=0.5,
        search=(0.01, 0.3),
        log=True,
        doc="share of attempts in which late ones come first",
    )

    def reorder(self, view: View, now_s: float) -> tuple[Sequence[Job], Sequence[Job]]:
        """At attempts to admit: the late jobs to defer, and the deferred jobs to advance."""
        return self._rules(view).reorder(view, now_s)

    def _rules(self, view: View) -> WithinLimits:
        rules: WithinLimits = view.rules or WithinLimits(view, self)
        view.rules = rules
        return rules
