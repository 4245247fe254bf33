"""Past-Future within limits of time: ours.

Of the jobs that Past-Future would admit by memory, this policy admits as many as the worker's laws
allow. An admission costs the running rows a stall (the newcomers' prefill between two of their
tokens) and a slower step from then on; both must stay within MTPOT. Eviction is plain
Past-Future's.

A job is late if it has no token yet and could not get one in time even alone, or if its prefill
alone breaks MTPOT. Late jobs wait behind the others. In a `late_share` of a worker's attempts to
admit, the oldest late job comes first, keeps that place, and may break MTPOT, so that none starves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import add

from toolkit.sched.memory import Footprint
from toolkit.sched.policies.parameters import parameter, policy
from toolkit.sched.policies.past_future import PastFuturePolicy
from toolkit.sched.types import Job, Worker
from toolkit.sched.view import View
from toolkit.sched.waiting import RECALL_COUNT

CYCLE_ATTEMPTS = 100  # attempts to admit, a share of which puts late jobs first


@policy("past-future-sla")
class PastFutureSlaPolicy(PastFuturePolicy):
    """Past-Future within limits of TTFT and MTPOT; the defaults are the paper's for 7B and 13B."""

    ttft_s: float = parameter(
        10.0, low=1e-6, doc="time to first token that counts as good, in seconds"
    )
    mtpot_s: float = parameter(
        1.5, low=1e-6, doc="largest gap between a request's tokens that counts as good, in seconds"
    )
    late_share: float = parameter(
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
            waiting = worker.waiting
            running = worker.running
            jobs = waiting.jobs
            if not jobs or (running.jobs and running.steps % self.interval_steps):
                continue
            if self._in_turn(worker):
                if waiting.behind and waiting.behind[0].ticket < jobs[0].ticket:
                    first.append(waiting.behind[0])
                continue
            late: list[Job] = []
            for job in jobs:
                if job.generated and not late:
                    continue  # evicted jobs wait first, and have their first token
                if not self._is_late(worker, job, now_s):
                    break
                late.append(job)
            in_order = not waiting.behind or waiting.behind[0].ticket > jobs[-1].ticket
            if len(late) < len(jobs) or len(late) > RECALL_COUNT or not in_order:
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
        return taken < self.limit(worker) and footprint.fits(1, worker.capacity_tokens)

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        fitting = PastFuturePolicy.admit(self, view, worker, candidates)
        if not fitting:
            return 0
        law = worker.latency
        padded = law.padded
        now_s = view.now_s
        expected = view.finished.mean()
        from toolkit.sched.kernels import peaks_to_come

        running = worker.running
        used: list[int] = []  # of running rows, then also of those that enter
        ahead: list[int] = []  # tokens used and remaining, in turn, of running rows and candidates
        for job in running.jobs:
            decoded = running.steps - job.joined
            remaining = _remaining(job, job.generated + decoded, expected)
            used.append(job.length + decoded)
            ahead += (job.length + decoded, remaining)
        for job in candidates:
            ahead += (job.length, _remaining(job, job.generated, expected))
        rows = len(used)
        # What a lone row needs is never asked for.
        peaks = peaks_to_come(ahead, rows, False) if rows + fitting > 1 else []
        excused = self._in_turn(worker) and self._is_late(worker, candidates[0], now_s)
        deadline_s = math.inf
        for count in range(1, fitting + 1):
            job = candidates[count - 1]
            n = rows + count
            used.append(job.length)
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
                    ends = map(add, used, ahead[1::2])  # asked for where rows are padded
                    length = float(max(ends)) if padded else peaks[count - 1] / n
                    if law.decode_s(n, length, 1) > self.mtpot_s:
                        return count - 1
            due_s = job.arrival_s + self.ttft_s
            if due_s < deadline_s and not job.generated and not self._is_late(worker, job, now_s):
                deadline_s = due_s
            first_s = prefilled_s + (0.0 if worker.emits else step_s)
            if count > 1 and first_s > deadline_s:
                return count - 1
        return fitting

    def _in_turn(self, worker: Worker) -> bool:
        """Whether this attempt is one of those that put the oldest late job first."""
        attempt = worker.running.steps // self.interval_steps % CYCLE_ATTEMPTS
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
