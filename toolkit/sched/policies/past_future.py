"""Past-Future: admission by the predicted peak of memory, from the lengths of past outputs.

Gong et al., *Past-Future Scheduler for LLM Serving under SLA Guarantees*, section 3. Nothing is
kept between attempts to admit: each samples all lengths again. In order: the policy of the paper,
its oracle with the true lengths, and a variant that also keeps limits of TTFT and MTPOT.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice, repeat, takewhile
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError
from toolkit.sched.inbox import RECALL_COUNT
from toolkit.sched.kernels import admit_knowing, admit_past_future, future_peak
from toolkit.sched.policies.continuous import ContinuousPolicy
from toolkit.sched.policies.continuous_rounds import Bounds, most_below
from toolkit.sched.policies.parameters import knob
from toolkit.sched.policies.routers import expected_output
from toolkit.sched.residents import GENERATED, LENGTH, LIMIT
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

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        residents = worker.residents
        table = residents.table()
        sets = min(self.samples, self.sample_rows // max(table.shape[1], 1) + 1)
        waiting = np.array(
            [(job.length, job.generated, job.max_new_tokens) for job in candidates]
        ).T
        seed = view.rng.bit_generator.random_raw() >> 1  # 63 bits: one type for the kernel
        limit = (1.0 - self.reserve) * worker.capacity_tokens
        past = view.finished.ascending()
        return int(
            admit_past_future(
                table, residents.steps, waiting, past, limit, sets, seed, worker.padded
            )
        )

    def bounds(self, worker: Worker) -> Bounds:
        return Bounds(taken=most_below((1.0 - self.reserve) * worker.capacity_tokens))


# Past-Future's "theoretical optimum": admission by the true peak of memory, in simulations only.


@dataclass(frozen=True, slots=True)
class PastFutureOracle(ContinuousPolicy):
    """Admit while the peak of Eq. 2-4 with the true lengths stays below the capacity (Past-Future,
    Table 1).
    """

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
        steps = worker.residents.steps
        jobs = list(worker.residents.jobs)
        used = np.array([job.length + steps - job.joined for job in jobs], dtype=np.int64)
        remaining = np.array(
            [self._remaining(job) - steps + job.joined for job in jobs], dtype=np.int64
        )
        waiting = np.array([(job.length, self._remaining(job)) for job in candidates]).T
        return int(
            admit_knowing(used, remaining, waiting, float(worker.capacity_tokens), worker.padded)
        )

    def _remaining(self, job: Job) -> int:
        return self._output_tokens[job.request.request_id] - job.generated


# Past-Future with limits on time as well as memory: a job does not enter if the fitted laws predict
# that this breaks a limit.
#
# An admission costs the residents a stall (the newcomers' prefill between two of their tokens) and
# a slower step from then on; both must stay within MTPOT. A newcomer with a first token that is
# already late waits behind those that are on time. Eviction, and what it does to MTPOT, is that of
# plain Past-Future.

Tokens = NDArray[np.int64]
CYCLE_ATTEMPTS = 100  # attempts to admit, a share of which puts late jobs first


@dataclass(slots=True)
class RowLengths:
    """The number and lengths of rows, as a latency law needs them."""

    rows: int = 0
    tokens: int = 0
    longest: int = 0

    def add(self, length: int) -> None:
        """Add a row of `length` tokens."""
        self.rows += 1
        self.tokens += length
        if length > self.longest:
            self.longest = length

    def length(self, worker: Worker) -> float:
        """L: the longest row's length on a padded engine, else the mean."""
        return float(self.longest) if worker.latency.padded else self.tokens / self.rows


@dataclass(frozen=True, slots=True)
class PastFutureSlaPolicy(PastFuturePolicy):
    """Past-Future within limits of TTFT and MTPOT; the defaults are the paper's for 7B and 13B
    models.

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
        behind: list[Job] = []
        first: list[Job] = []
        for worker in view.due:
            inbox, residents = worker.inbox, worker.residents
            if not inbox or (residents.jobs and residents.steps % self.interval_steps):
                continue
            if self._in_turn(worker):
                first += [job for job in islice(inbox.behind, 1) if job.ticket < inbox[0].ticket]
                continue
            evicted = sum(1 for _ in takewhile(_has_generated, inbox))
            late = list(
                takewhile(partial(self._is_late, worker, now_s=now_s), islice(inbox, evicted, None))
            )
            in_order = not inbox.behind or inbox.behind[0].ticket > inbox[-1].ticket
            if len(late) < len(inbox) or len(late) > RECALL_COUNT or not in_order:
                behind += late
        return behind, first

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        fitting = PastFuturePolicy.admit(self, view, worker, candidates)
        if not fitting:
            return 0
        used, remaining = self._outlook(view, worker, candidates[:fitting])
        rows = len(used) - fitting
        excused = self._in_turn(worker) and self._is_late(worker, candidates[0], view.now_s)
        deadline_s = math.inf
        all_rows, entering = RowLengths(), RowLengths()
        for length in used[:rows].tolist():
            all_rows.add(length)
        for count, job in enumerate(candidates[:fitting], start=1):
            n = rows + count
            all_rows.add(job.length)
            entering.add(job.length)
            step_s = worker.latency.decode_s(n, all_rows.length(worker), 1)
            prefilled_s = view.now_s + _prefill_s(worker, entering)
            stepped_s = view.now_s + self._stall_s(worker, entering) + step_s
            stalls = rows > 0 and stepped_s - worker.stepped_s > self.mtpot_s
            if rows and self.chunk_tokens:
                # The steps between the passes.
                # The decode steps between the passes.
                prefilled_s += entering.tokens // self.chunk_tokens * step_s
            slows = n > 1 and _slowest_step_s(worker, used[:n], remaining[:n]) > self.mtpot_s
            if (stalls or slows) and not (excused and count == 1):
                return count - 1
            if not job.generated and not self._is_late(worker, job, view.now_s):
                deadline_s = min(deadline_s, job.request.arrival_s + self.ttft_s)
            first_s = prefilled_s + (0.0 if worker.latency.prefill_emits_token else step_s)
            if count > 1 and first_s > deadline_s:
                return count - 1
        return fitting

    def _outlook(
        self, view: View, worker: Worker, newcomers: Sequence[Job]
    ) -> tuple[Tokens, Tokens]:
        """The tokens that residents and then `newcomers` hold, and those they are expected to add:
        [n] each.
        """
        table, steps = worker.residents.table(), worker.residents.steps
        waiting = np.array([(job.length, job.generated, job.max_new_tokens) for job in newcomers]).T
        used = np.concatenate([table[LENGTH] + steps, waiting[0]])
        generated = np.concatenate([table[GENERATED] + steps, waiting[1]])
        outputs = np.minimum(np.concatenate([table[LIMIT], waiting[2]]), expected_output(view))
        return used, np.maximum(outputs - generated, 1)

    def _in_turn(self, worker: Worker) -> bool:
        """Whether this attempt is one of those that put the oldest late job first."""
        return (
            worker.residents.steps // self.interval_steps % CYCLE_ATTEMPTS
            < self.late_share * CYCLE_ATTEMPTS
        )

    def _is_late(self, worker: Worker, job: Job, now_s: float) -> bool:
        """Whether the job's first token can only be late, or its prefill alone breaks the others'
        MTPOT.
        """
        if _has_generated(job):
            return False
        law = worker.latency
        step_s, stall_s = (
            law.decode_s(1, job.length, 1),
            self._stall_s(worker, RowLengths(1, job.length, job.length)),
        )
        first_s = (
            now_s + law.prefill_s(1, job.length) + (0.0 if law.prefill_emits_token else step_s)
        )
        return first_s > job.request.arrival_s + self.ttft_s or stall_s + step_s > self.mtpot_s

    def _stall_s(self, worker: Worker, inputs: RowLengths) -> float:
        """Seconds that running rows wait between two steps for the prefill of `inputs`, or one pass
        of it.
        """
        if not 0 < self.chunk_tokens < inputs.tokens:
            return _prefill_s(worker, inputs)
        longest = inputs.longest
        return worker.latency.pass_s(1, max(longest - self.chunk_tokens, 0), longest)


def _has_generated(job: Job) -> bool:
    return job.generated > 0


def _prefill_s(worker: Worker, inputs: RowLengths) -> float:
    """Seconds of the prefill of the rows `inputs`."""
    return worker.latency.prefill_s(inputs.rows, inputs.length(worker))


def _slowest_step_s(worker: Worker, used: Tokens, remaining: Tokens) -> float:
    """Seconds of a step of all rows at the predicted peak of memory.

    On a padded engine the longest row at its end determines it, on a paged one the peak's tokens.
    """
    rows = len(used)
    length = (
        (used + remaining).max() if worker.latency.padded else future_peak(used, remaining) / rows
    )
    return worker.latency.decode_s(rows, float(length), 1)
