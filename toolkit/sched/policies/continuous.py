"""Continuous batching in order of arrival: the passes, and three policies that admit by memory.

A worker runs one pass after the other. Every `interval_steps` decode steps, and whenever it is
empty, waiting jobs may enter in order of arrival; the policy decides how many. Before a pass, the
last admitted jobs are evicted until one more step fits. They keep their tokens and wait before all
others. A pass ends before memory is exceeded, so the capacity holds at every step.

If requests have priorities, urgent ones come first. The least urgent rows are evicted first. If the
most urgent waiting job may not enter, the fewest less urgent rows that make room are evicted, or
none if that is not enough.
"""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.sched.memory import Footprint, footprint_of
from toolkit.sched.policies.base import (
    Policy,
    chunk_parameter,
    prefill_parameter,
    router_choice,
    rows_parameter,
)
from toolkit.sched.policies.parameters import parameter, policy
from toolkit.sched.types import NO_LIMIT, Job, Pass, Worker
from toolkit.sched.view import View
from toolkit.sched.waiting import priority_of


@policy()
class ContinuousPolicy(Policy):
    """Base of the continuous policies: subclasses decide which jobs may enter.

    They do so with `admissible`, one job after the other, and with `admit` if they decide about
    several at once. The default of `interval_steps` is the 10 of Past-Future's Table 1, that of
    `max_prefill_tokens` its 32,768.
    """

    interval_steps: int = parameter(
        10,
        low=1,
        high=10_000,
        search=(1, 64),
        log=True,
        doc="decode steps from one attempt to admit to the next",
    )
    max_prefill_tokens: int = prefill_parameter(
        "an attempt admits until it has so many prompt tokens"
    )
    overfill: bool = parameter(
        False,
        doc="true: a job enters without room for it now, and may be evicted after a step "
        "(as in Table 1's artifact)",
    )
    router: str = router_choice()
    chunk_tokens: int = chunk_parameter()

    def admissible(self, worker: Worker, job: Job, footprint: Footprint) -> bool:
        """Whether `job` may join the rows in `footprint`.

        `False` must hold until one of these rows ends, because it is not asked again before. This
        lets a pass be long.
        """
        return True

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        """How many of `candidates`, in order, may enter together; at least one candidate.

        They fit the memory as it is now, and each is `admissible` if those before it enter. If the
        worker runs no job, the first candidate need not be: it is admitted whatever this
        returns, because a job that fits alone must not wait for ever.
        """
        return len(candidates)

    def longest_pass(self, worker: Worker, entering: int) -> int:
        """The most decode steps until the policy has to decide something even if no row ends.

        `entering`: how many jobs enter with the pass.
        """
        return NO_LIMIT

    def may_enter(self, worker: Worker, job: Job, footprint: Footprint) -> bool:
        """Whether an attempt to admit `job` can succeed before a row ends.

        Until then the memory and the rows that are free only shrink.
        """
        rows = footprint.rows
        if not rows:
            return True
        if rows >= self.max_batch_size or rows >= worker.row_limit:
            return False
        if not (self.overfill or footprint.fits(job.length, worker.capacity_tokens)):
            return False
        return self.admissible(worker, job, footprint)

    def should_interrupt(self, view: View, worker: Worker, newcomers: int) -> bool:
        """Whether the first waiting job may enter before a row ends."""
        first = worker.waiting.jobs[0]
        if self.may_enter(worker, first, footprint_of(worker)):
            return True
        return view.prioritised and bool(self._make_way(worker, first)[0])

    def plan_worker(self, view: View, worker: Worker, now_s: float) -> Pass:
        """Evict rows until a step fits; else, at an attempt to admit, let waiting jobs enter."""
        running = worker.running
        waiting = worker.waiting
        capacity = worker.capacity_tokens
        interval = self.interval_steps
        footprint = footprint_of(worker)
        entering: list[Job] = []
        evicted: list[Job] = []
        if footprint.needs > capacity:
            order = eviction_order(worker) if view.prioritised else reversed(running.jobs)
            for job in order:
                evicted.append(job)
                footprint = footprint_of(worker, evicted)
                if footprint.needs <= capacity:
                    break
        elif waiting.jobs and (not footprint.rows or running.steps % interval == 0):
            entering = self._entering(view, worker, footprint)
            if not entering and view.prioritised:
                evicted, footprint = self._make_way(worker, waiting.jobs[0])
                if evicted:
                    entering = [waiting.jobs[0]]
            if entering:
                for job in entering:
                    footprint = footprint.entered(job)
                footprint = footprint.prefilled()
        steps = min(footprint.room(capacity), self.longest_pass(worker, len(entering)))
        steps = max(steps, 1)
        if evicted or waiting.count > len(entering):
            others = waiting.count > len(entering) and (entering or not evicted)
            first = waiting.after(len(entering)) if others else evicted[-1]
            if self.may_enter(worker, first, footprint):
                steps = min(steps, interval - running.steps % interval)
        return self.make_pass(worker, entering, steps, evicted, stop_every=interval)

    def _entering(self, view: View, worker: Worker, footprint: Footprint) -> list[Job]:
        """The waiting jobs that enter, in order."""
        alone = not footprint.rows
        first = worker.waiting.jobs[0]
        if not self.may_enter(worker, first, footprint):
            return []
        free_rows = min(self.max_batch_size, worker.row_limit) - footprint.rows
        prefill = worker.running.prefill_tokens
        candidates: list[Job] = []
        for job in worker.waiting.jobs:
            if prefill >= self.max_prefill_tokens or len(candidates) >= free_rows:
                break
            if not (self.overfill or footprint.fits(job.length, worker.capacity_tokens)):
                break
            if candidates and not self.admissible(worker, job, footprint):
                break
            candidates.append(job)
            prefill += job.length
            footprint = footprint.entered(job)
        admitted = self.admit(view, worker, candidates) if candidates else 0
        if alone and not admitted:
            return [first]  # a lone row may fill the memory to its last token
        return candidates[:admitted]

    def _make_way(self, worker: Worker, job: Job) -> tuple[list[Job], Footprint]:
        """The fewest less urgent rows to evict to admit `job`, and the others' footprint.

        The list is empty if even evicting all of them is not enough.
        """
        leaving: list[Job] = []
        for other in eviction_order(worker):
            if other.priority <= job.priority:
                break
            leaving.append(other)
            footprint = footprint_of(worker, leaving)
            if footprint.fits(job.length, footprint.capacity) and self.may_enter(
                worker, job, footprint
            ):
                return leaving, footprint
        return [], footprint_of(worker)


def eviction_order(worker: Worker) -> list[Job]:
    """Running jobs in order of eviction: the least urgent first, and of these the last admitted."""
    return sorted(worker.running.jobs, key=priority_of)[::-1]


@policy("aggressive")
class AggressivePolicy(ContinuousPolicy):
    """Admit while the tokens in use, newcomers' included, are within `watermark` of capacity.

    Eviction makes room later, as in vLLM (Past-Future, section 2.3; Table 1 has 0.90, 0.95, 0.99).
    """

    watermark: float = parameter(
        0.95, low=0.01, high=1, search=(0.5, 1.0), doc="share of the capacity that may be filled"
    )

    def admissible(self, worker: Worker, job: Job, footprint: Footprint) -> bool:
        # The artifact leaves out the generated tokens of evicted jobs.
        length = job.prompt_tokens if self.overfill else job.length
        return footprint.taken_with(length) <= self.watermark * worker.capacity_tokens


@policy("conservative")
class ConservativePolicy(ContinuousPolicy):
    """Admit while the sum of prompt + max_new_tokens is within `overcommit` times the capacity.

    TGI and DeepSpeed-MII do so (Past-Future, section 2.3), and the baseline of continuous batching
    (ILS) in the SCLS paper. On a padded worker, the number of rows x the largest prompt +
    max_new_tokens counts instead. With an `overcommit` of 1 nothing is ever evicted. Past-Future's
    Table 1 has 1, 1.25 and 1.5.
    """

    overcommit: float = parameter(
        1.0, low=0.01, high=100, search=(1.0, 3.0), doc="capacity that is promised over capacity"
    )

    def admissible(self, worker: Worker, job: Job, footprint: Footprint) -> bool:
        promised = footprint.promised_with(job.limit_tokens)
        return promised <= self.overcommit * worker.capacity_tokens


@policy("fcfs")
class FcfsPolicy(ContinuousPolicy):
    """FastServe's baseline: in order of arrival, each job to its end, and nothing is evicted.

    Jobs are admitted up to a number of rows, while memory holds all that they may generate.
    """

    max_batch_size: int = rows_parameter(32)

    def admissible(self, worker: Worker, job: Job, footprint: Footprint) -> bool:
        return footprint.promised_with(job.limit_tokens) <= worker.capacity_tokens
