"""The base of continuous policies, and the three that decide by memory alone.

A worker runs one round after the other. Every `interval_steps` decode steps, and whenever it is
empty, waiting jobs may enter in order of arrival; the policy decides how many. Before a round, the
last admitted jobs are evicted until one more step fits. They keep their tokens and wait before all
others. A round ends before memory is exceeded, so the capacity holds at every step. The worker's
footprint knows what rows take of it, paged or padded.

If requests have priorities, urgent ones come first. The least urgent rows are evicted first. If the
most urgent waiting job may not enter, the fewest less urgent rows that make room are evicted, or
none if that is not enough.

In order: `ContinuousPolicy`, then `AggressivePolicy`, `ConservativePolicy` and `FcfsPolicy`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from toolkit.sched.footprint import Footprint, footprint_of, shared_footprint
from toolkit.sched.policies.parameters import choice, chunk_knob, knob, validate
from toolkit.sched.policies.routers import ROUTERS
from toolkit.sched.protocols import NOTHING, Decision, View
from toolkit.sched.types import NO_LIMIT, Batch, Job, Worker


@dataclass(frozen=True, slots=True)
class ContinuousPolicy(ABC):
    """Base of the continuous policies: subclasses decide which jobs may enter.

    They do so with `admissible`, and with `admit` if that is not enough. The default of
    `interval_steps` is the 10 of Past-Future's Table 1, that of `max_prefill_tokens` its 32,768.
    """

    name: ClassVar[str]
    continuous: ClassVar[bool] = True

    interval_steps: int = knob(
        10,
        low=1,
        high=10_000,
        search=(1, 64),
        log=True,
        doc="decode steps from one attempt to admit to the next",
    )
    max_prefill_tokens: int = knob(
        32_768,
        low=1,
        search=(512, 65_536),
        log=True,
        doc="an attempt admits until it has so many prompt tokens",
    )
    overfill: bool = knob(
        False,
        doc="true: a job enters without room for it now, and may be evicted after a step "
        "(as in Table 1's artifact)",
    )
    router: str = choice(
        "round-robin", ROUTERS, doc="how requests are assigned to workers: " + ", ".join(ROUTERS)
    )
    chunk_tokens: int = chunk_knob()

    def __post_init__(self) -> None:
        validate(self)

    @abstractmethod
    def admissible(self, worker: Worker, job: Job, footprint: Footprint) -> bool:
        """Whether `job` may be admitted beside the rows in `footprint` before one of them ends.

        `False` must be certain: the question is asked again only after a row ended, which is what
        lets a round be long.
        """

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        """How many of `candidates`, in order, may enter by the policy's own criterion.

        They fit the memory as it is now, and each is `admissible` if those before it enter. If the
        worker has no residents, the first candidate need not be: it is admitted whatever this
        returns, because a job that fits alone must not wait for ever.
        """
        return len(candidates)

    def longest_round(self, worker: Worker, entering: int) -> int:
        """The most decode steps until the policy has to decide something even if no row ends.

        `entering`: how many jobs enter with the round.
        """
        return NO_LIMIT

    @property
    def most_rows(self) -> int:
        """The most residents that the policy allows on any worker."""
        return NO_LIMIT

    def rows(self, worker: Worker) -> int:
        """The most residents that this worker may have."""
        most, limit = self.most_rows, worker.row_limit
        return most if most < limit else limit

    def route(self, view: View, now_s: float) -> Sequence[int] | None:
        return ROUTERS[self.router](view, self.most_rows) if view.alive() else None

    def plan(self, view: View, now_s: float) -> Decision:
        due, arrived = view.due, view.arrived
        batches = (
            [self._round(view, worker) for worker in due if worker.inbox or worker.residents.jobs]
            if due
            else []
        )
        if arrived:
            interrupts = [
                index for index in arrived if self._should_interrupt(view, view.workers[index])
            ]
            if interrupts:
                return Decision(batches, interrupt=interrupts)
        return Decision(batches) if batches else NOTHING

    def _should_interrupt(self, view: View, worker: Worker) -> bool:
        """Whether the running round should stop, because the first waiting job may enter before a
        row ends.
        """
        running, inbox = worker.running, worker.inbox
        if running is None or running.interrupted or not inbox:
            return False
        first = inbox[0]
        if running.refused is first:
            return False
        footprint = (
            shared_footprint(worker) if worker.footprint is None else worker.footprint.reset()
        )
        if self._may_enter(worker, first, footprint):
            return True
        if view.prioritised and self._make_way(worker, first)[0]:
            return True
        running.refused = first  # nothing that this depends on changes before the round ends
        return False

    def _round(self, view: View, worker: Worker) -> Batch:
        residents, inbox, interval = worker.residents, worker.inbox, self.interval_steps
        footprint = (
            shared_footprint(worker) if worker.footprint is None else worker.footprint.reset()
        )
        capacity = worker.capacity_tokens
        entering: list[Job] = []
        evicted: list[Job] = []
        longest = 0
        if footprint.needs > capacity:
            for job in eviction_order(worker) if view.prioritised else reversed(residents.jobs):
                evicted.append(job)
                footprint.leave(job)
                if footprint.needs <= capacity:
                    break
        elif inbox and (not footprint.rows or residents.steps % interval == 0):
            entering, footprint = self._entering(view, worker, footprint)
            if not entering and view.prioritised:
                evicted, footprint = self._make_way(worker, inbox[0])
                if evicted:
                    entering = [inbox[0]]
                    footprint.enter(inbox[0])
            if entering:
                for job in entering:
                    if job.length > longest:
                        longest = job.length
                footprint.prefilled()
        count = len(entering)
        steps = footprint.room(capacity)
        most = self.longest_round(worker, count)
        if most < steps:
            steps = most
        if steps < 1:
            steps = 1
        if evicted or len(inbox) > count or inbox.behind:
            others = inbox.waiting > count and (count or not evicted)
            first = inbox.after(count) if others else evicted[-1]
            if self._may_enter(worker, first, footprint):
                until = interval - residents.steps % interval
                if until < steps:
                    steps = until
        return Batch(
            worker.index,
            tuple(entering),
            steps,
            longest,
            0.0,
            "any",
            True,
            -1,
            -1.0,
            tuple(evicted),
            (),
            interval,
            False,
            None,
            worker.chunk_of(self.chunk_tokens) if self.chunk_tokens else 0,
        )

    def _entering(
        self, view: View, worker: Worker, footprint: Footprint
    ) -> tuple[list[Job], Footprint]:
        """The jobs that enter, and the footprint with them. Changes the given `footprint`."""
        inbox, rows = worker.inbox, footprint.rows
        if not self._may_enter(worker, inbox[0], footprint):
            return [], footprint
        most, most_prefill, prefill = self.rows(worker) - rows, self.max_prefill_tokens, 0
        if worker.residents.prefilling:
            prefill = sum([job.length for job in worker.residents.prefilling])
        overfill, capacity = self.overfill, worker.capacity_tokens
        candidates: list[Job] = []
        for job in inbox:
            if prefill >= most_prefill or len(candidates) >= most:
                break
            if not (overfill or footprint.fits(job.length, capacity)):
                break
            if candidates and not self.admissible(worker, job, footprint):
                break
            candidates.append(job)
            prefill += job.length
            footprint.enter(job)
        admitted = self.admit(view, worker, candidates) if candidates else 0
        if not (admitted or rows):
            candidates, admitted = [inbox[0]], 1  # a lone row may fill the memory to its last token
        elif admitted == len(candidates):
            return candidates, footprint
        footprint = footprint.reset()
        for job in candidates[:admitted]:
            footprint.enter(job)
        return candidates[:admitted], footprint

    def _make_way(self, worker: Worker, job: Job) -> tuple[list[Job], Footprint]:
        """The fewest less urgent residents to evict so that `job` may enter, and the footprint of
        the others.

        The list is empty if even evicting all of them is not enough.
        """
        footprint = footprint_of(worker)
        leaving: list[Job] = []
        for other in eviction_order(worker):
            if other.priority <= job.priority:
                break
            leaving.append(other)
            footprint.leave(other)
            if footprint.fits(job.length, footprint.capacity) and self._may_enter(
                worker, job, footprint
            ):
                return leaving, footprint
        return [], footprint_of(worker)

    def _may_enter(self, worker: Worker, job: Job, footprint: Footprint) -> bool:
        """Whether an attempt to admit `job` can succeed before a row ends.

        Until then the memory and the rows that are free only shrink.
        """
        if not footprint.rows:
            return True
        if footprint.rows >= self.rows(worker):
            return False
        if not (self.overfill or footprint.fits(job.length, worker.capacity_tokens)):
            return False
        return self.admissible(worker, job, footprint)


def eviction_order(worker: Worker) -> list[Job]:
    """Residents in order of eviction: the least urgent first, and of these the last admitted."""
    return sorted(worker.residents.jobs, key=lambda job: job.priority)[::-1]


# Aggressive admission: a request enters if there is room for its prompt now, and eviction makes
# room later. This is what vLLM does (Past-Future, section 2.3).


@dataclass(frozen=True, slots=True)
class AggressivePolicy(ContinuousPolicy):
    """Admit while the tokens in use, with those of the newcomers, are within `watermark` of the
    capacity.

    Past-Future's Table 1 has 0.90, 0.95 and 0.99.
    """

    name: ClassVar[str] = "aggressive"

    watermark: float = knob(
        0.95, low=0.01, high=1, search=(0.5, 1.0), doc="share of the capacity that may be filled"
    )

    def admissible(self, worker: Worker, job: Job, footprint: Footprint) -> bool:
        return (
            footprint.taken_with(self._counted_tokens(job))
            <= self.watermark * worker.capacity_tokens
        )

    def _counted_tokens(self, job: Job) -> int:
        """Tokens that a newcomer counts; the artifact leaves out the generated tokens of evicted
        jobs.
        """
        return job.request.prompt_tokens if self.overfill else job.length


# Conservative admission: a request enters if there is room for all that it and the residents may
# generate.
#
# TGI and DeepSpeed-MII do so (Past-Future, section 2.3), and so does the baseline of continuous
# batching (ILS) in the SCLS paper.


@dataclass(frozen=True, slots=True)
class ConservativePolicy(ContinuousPolicy):
    """Admit while the sum of prompt + max_new_tokens is within `overcommit` times the capacity.

    On a padded worker, the number of rows x the largest prompt + max_new_tokens counts instead.
    With an `overcommit` of 1 nothing is ever evicted. Past-Future's Table 1 has 1, 1.25 and 1.5.
    """

    name: ClassVar[str] = "conservative"

    overcommit: float = knob(
        1.0, low=0.01, high=100, search=(1.0, 3.0), doc="capacity that is promised over capacity"
    )

    def admissible(self, worker: Worker, job: Job, footprint: Footprint) -> bool:
        return footprint.promised_with(job.limit_tokens) <= self.overcommit * worker.capacity_tokens


# First come, first served, with each job run to its end: FastServe's baseline.


@dataclass(frozen=True, slots=True)
class FcfsPolicy(ContinuousPolicy):
    """Admit up to a number of rows, while memory holds all that they may generate: no evictions."""

    name: ClassVar[str] = "fcfs"

    max_batch_size: int = knob(
        32, low=1, search=(1, 256), log=True, doc="the most rows that run at once on a worker"
    )

    @property
    def most_rows(self) -> int:
        return self.max_batch_size

    def admissible(self, worker: Worker, job: Job, footprint: Footprint) -> bool:
        return footprint.promised_with(job.limit_tokens) <= worker.capacity_tokens
