"""Past-Future: admission by the predicted peak of memory, from the lengths of past outputs.

Gong et al., *Past-Future Scheduler for LLM Serving under SLA Guarantees*, section 3. At every
attempt to admit, waiting requests enter in order of arrival while the future peak of memory stays
below the capacity less a reserve:

- each running request's final length is sampled from the lengths of finished requests that are
  longer than what it has generated, a waiting one's from all (the kernel `_sampled_length`);
- M*, the peak, follows from what each holds and has remaining (Eq. 2-4, the kernel `future_peak`).

`PastFuturePolicy` is the paper's, `PastFutureOracle` its "theoretical optimum" with true lengths,
`PastFutureSlaPolicy` is ours: it admits within limits of time as well. Nothing is kept between
attempts: each samples all lengths again.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from itertools import repeat

import numpy as np

from toolkit.errors import InputError
from toolkit.sched.kernels import admit_past_future, peak_to_come
from toolkit.sched.memory import Footprint
from toolkit.sched.policies.continuous import ContinuousPolicy
from toolkit.sched.policies.parameters import knob, policy
from toolkit.sched.types import Job, Worker
from toolkit.sched.view import LengthHistory, View
from toolkit.sched.waiting import RECALL_COUNT

CYCLE_ATTEMPTS = 100  # attempts to admit, a share of which puts late jobs first


@policy("past-future")
class PastFuturePolicy(ContinuousPolicy):
    """Admit while the predicted peak (Eq. 2-4) stays below (1 - reserve) of the capacity.

    Table 1 has a reserve of 0.03, 0.05 and 0.10, a window of 1000, and a history that starts with
    500 outputs of 512 tokens. By default the history starts empty, and until requests have ended
    each counts with its limit: the safe start.
    """

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

    def admissible(self, worker: Worker, job: Job, footprint: Footprint) -> bool:
        """A necessary condition that is cheap: the peak is never below what rows take now."""
        return footprint.taken_with(job.length) < self._limit(worker)

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        """Algorithm 1: candidates enter while M* stays below the limit."""
        running = worker.residents.table()
        waiting = array("q")
        for job in candidates:
            waiting.append(job.length)
            waiting.append(job.generated)
            waiting.append(job.max_new_tokens)
        return int(
            admit_past_future(
                running,
                np.array(waiting, dtype=np.int64).reshape(-1, 3),
                view.finished.ascending(),
                self._limit(worker),
                min(self.sample_rows // max(len(running), 1) + 1, self.samples),
                view.rng.bit_generator.random_raw() >> 1,  # 63 bits: one type for the kernel
                worker.padded,
            )
        )

    def _limit(self, worker: Worker) -> float:
        """The tokens that the peak must stay below."""
        return (1.0 - self.reserve) * worker.capacity_tokens


@policy("past-future-oracle", knows_lengths=True)
class PastFutureOracle(ContinuousPolicy):
    """The "theoretical optimum": admit while the true peak (Eq. 2-4) is below the capacity."""

    output_tokens: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)

    def with_lengths(self, output_tokens: Mapping[str, int]) -> PastFutureOracle:
        return replace(self, output_tokens=output_tokens)

    def admissible(self, worker: Worker, job: Job, footprint: Footprint) -> bool:
        return footprint.taken_with(job.length) < worker.capacity_tokens

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        if not self.output_tokens:
            raise InputError(
                f"policy '{self.name}' needs the true output lengths", "it runs in simulations only"
            )
        used: list[int] = []
        remaining: list[int] = []
        for job in worker.residents.jobs:
            decoded = worker.residents.steps - job.joined
            used.append(job.length + decoded)
            remaining.append(self._remaining(job) - decoded)
        for k, job in enumerate(candidates):
            used.append(job.length)
            remaining.append(self._remaining(job))
            if peak_to_come(used, remaining, worker.padded) >= worker.capacity_tokens:
                return k
        return len(candidates)

    def _remaining(self, job: Job) -> int:
        return self.output_tokens[job.request_id] - job.generated


@policy("past-future-sla")
class PastFutureSlaPolicy(PastFuturePolicy):
    """Past-Future within limits of TTFT and MTPOT; the defaults are the paper's for 7B and 13B.

    Of the jobs that Past-Future would admit by memory, this policy admits as many as the worker's
    laws allow. An admission costs the running rows a stall (the newcomers' prefill between two of
    their tokens) and a slower step from then on; both must stay within MTPOT. Eviction is that of
    plain Past-Future.

    A job is late if it has no token yet and could not get one in time even alone, or if its prefill
    alone breaks MTPOT. Late jobs wait behind those that are on time. In a `late_share` of a
    worker's attempts to admit, the oldest late job comes first, keeps that place, and may break
    MTPOT, so that none starves.
    """

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
            inbox = worker.inbox
            residents = worker.residents
            waiting = inbox.jobs
            if not waiting or (residents.jobs and residents.steps % self.interval_steps):
                continue
            if self._in_turn(worker):
                if inbox.behind and inbox.behind[0].ticket < waiting[0].ticket:
                    first.append(inbox.behind[0])
                continue
            late: list[Job] = []
            evicted = True  # evicted jobs wait first, and have their first token
            for job in waiting:
                if evicted and job.generated > 0:
                    continue
                evicted = False
                if not self._is_late(worker, job, now_s):
                    break
                late.append(job)
            if not late:
                continue
            in_order = not inbox.behind or inbox.behind[0].ticket > waiting[-1].ticket
            if len(late) < len(waiting) or len(late) > RECALL_COUNT or not in_order:
                behind += late
        return behind, first

    def may_enter(self, worker: Worker, job: Job, footprint: Footprint) -> bool:
        """Whether any job may enter, since `reorder` may bring another one, of a single token."""
        rows = footprint.rows
        if not rows:
            return True
        if rows >= worker.row_limit:
            return False
        taken = footprint.taken_with(1)
        return taken < self._limit(worker) and footprint.fits(1, worker.capacity_tokens)

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        fitting = PastFuturePolicy.admit(self, view, worker, candidates)
        if not fitting:
            return 0
        law = worker.latency
        padded = law.padded
        now_s = view.now_s
        expected = view.finished.mean()
        used: list[int] = []  # of running rows, then also of those that enter
        remaining: list[int] = []
        for job in worker.residents.jobs:
            decoded = worker.residents.steps - job.joined
            used.append(job.length + decoded)
            remaining.append(_remaining(job, job.generated + decoded, expected))
        rows = len(used)
        excused = self._in_turn(worker) and self._is_late(worker, candidates[0], now_s)
        deadline_s = math.inf
        for count in range(1, fitting + 1):
            job = candidates[count - 1]
            n = rows + count
            used.append(job.length)
            remaining.append(_remaining(job, job.generated, expected))
            entering = used[rows:]
            step_s = law.decode_s(n, _law_length(used, padded), 1)
            prefill_s = law.prefill_s(count, _law_length(entering, padded))
            prefilled_s = now_s + prefill_s
            stall_s = prefill_s
            if 0 < self.chunk_tokens < sum(entering):
                longest = max(entering)
                stall_s = law.pass_s(1, max(longest - self.chunk_tokens, 0), longest)
            if rows and self.chunk_tokens:
                # the decode steps between the passes
                prefilled_s += sum(entering) // self.chunk_tokens * step_s
            if not (excused and count == 1):
                stepped_s = now_s + stall_s + step_s
                if rows and stepped_s - worker.stepped_s > self.mtpot_s:
                    return count - 1
                if n > 1:
                    # A step of all rows at the predicted peak of memory.
                    if padded:
                        ends = [held + more for held, more in zip(used, remaining, strict=True)]
                        length = float(max(ends))
                    else:
                        length = peak_to_come(used, remaining, False) / n
                    if law.decode_s(n, length, 1) > self.mtpot_s:
                        return count - 1
            if not job.generated and not self._is_late(worker, job, now_s):
                deadline_s = min(deadline_s, job.arrival_s + self.ttft_s)
            first_s = prefilled_s + (0.0 if worker.emits else step_s)
            if count > 1 and first_s > deadline_s:
                return count - 1
        return fitting

    def _in_turn(self, worker: Worker) -> bool:
        """Whether this attempt is one of those that put the oldest late job first."""
        attempt = worker.residents.steps // self.interval_steps % CYCLE_ATTEMPTS
        return attempt < self.late_share * CYCLE_ATTEMPTS

    def _is_late(self, worker: Worker, job: Job, now_s: float) -> bool:
        """Whether its first token can only be late, or its prefill alone breaks others' MTPOT."""
        if job.generated > 0:
            return False
        law = worker.latency
        length = job.length
        step_s = law.decode_s(1, length, 1)
        prefill_s = law.prefill_s(1, length)
        stall_s = prefill_s
        if 0 < self.chunk_tokens < length:
            stall_s = law.pass_s(1, max(length - self.chunk_tokens, 0), length)
        first_s = now_s + prefill_s + (0.0 if law.prefill_emits_token else step_s)
        return first_s > job.arrival_s + self.ttft_s or stall_s + step_s > self.mtpot_s


def _remaining(job: Job, generated: int, expected: int) -> int:
    """The tokens that a job is expected to add, at least one."""
    return max(min(expected, job.max_new_tokens) - generated, 1)


def _law_length(lengths: Sequence[int], padded: bool) -> float:
    """L of rows with these lengths: the longest on a padded engine, else the mean."""
    return float(max(lengths)) if padded else sum(lengths) / len(lengths)
