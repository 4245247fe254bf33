"""Plans the rounds of `ContinuousPolicy` and `BatonPolicy`: rows that leave or enter, and steps.

`toolkit.sched.policies.continuous` says what the rounds are. The policy's parameters and criteria
are read once, so that a round costs few calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.sched.footprint import Footprint, footprint_of
from toolkit.sched.inbox import priority_of, turn_of
from toolkit.sched.types import NO_LIMIT, Batch, Job, Moves, Worker
from toolkit.sched.view import RoundPlanner, View

if TYPE_CHECKING:
    from toolkit.sched.policies.continuous import BatonPolicy, ContinuousPolicy


@dataclass(frozen=True)
class Bounds:
    """The most tokens that rows may take, and that they may be promised, when a job enters.

    Args:
        taken: of the tokens that the rows hold now, with the job's.
        promised: of prompt + max_new_tokens over the rows, with the job's.
        prompts_only: whether an evicted job counts its prompt alone in `taken`.
    """

    taken: int = NO_LIMIT
    promised: int = NO_LIMIT
    prompts_only: bool = False


class ContinuousRounds(RoundPlanner):
    """The planner of a `ContinuousPolicy`.

    Attributes:
        admissible, admit, longest_round: the policy's own criteria; None: it has none.
    """

    def __init__(self, view: View, policy: ContinuousPolicy) -> None:
        super().__init__(view, policy.chunk_tokens)
        self._interval: int = policy.interval_steps
        self._most_prefill: int = policy.max_prefill_tokens
        self._most_rows: int = policy.most_rows
        self._overfill: bool = policy.overfill
        self._any_may_come: bool = policy.any_may_come
        self._bounds: list[Bounds] = []  # by worker; those in a row that are equal are one object
        for worker in view.workers:
            own = policy.bounds(worker)
            same = self._bounds and self._bounds[-1] == own
            self._bounds.append(self._bounds[-1] if same else own)
        self.admissible: Callable[[Worker, Job, Footprint], bool] | None = None
        self.admit: Callable[[View, Worker, Sequence[Job]], int] | None = None
        self.longest_round: Callable[[Worker, int], int] | None = None

    def should_interrupt(self, worker: Worker, newcomers: int) -> bool:
        """Whether the first waiting job may enter before a row ends."""
        running = worker.running
        first = worker.inbox.jobs[0]
        assert running is not None
        if running.refused is first:
            return False
        if self._may_enter(worker, first, worker.footprint):
            return True
        if self.view.prioritised and self._make_way(worker, first)[0]:
            return True
        running.refused = first  # nothing that this depends on changes before the round ends
        return False

    def plan_round(self, worker: Worker, now_s: float) -> Batch:
        """The worker's next round."""
        residents = worker.residents
        inbox = worker.inbox
        interval = self._interval
        footprint = worker.footprint
        capacity = worker.capacity_tokens
        waiting = len(inbox.jobs)
        entering: list[Job] = []
        evicted: list[Job] = []
        if footprint.needs > capacity:
            order = eviction_order(worker) if self.view.prioritised else reversed(residents.jobs)
            for job in order:
                evicted.append(job)
                footprint.leave(job)
                if footprint.needs <= capacity:
                    break
        elif waiting and (not footprint.rows or residents.steps % interval == 0):
            entering = self._entering(worker, footprint)
            if not entering and self.view.prioritised:
                evicted, footprint = self._make_way(worker, inbox.jobs[0])
                if evicted:
                    entering = [inbox.jobs[0]]
                    footprint.enter(inbox.jobs[0])
            if entering:
                footprint.prefilled()
        count = len(entering)
        steps = footprint.room(capacity)
        if self.longest_round is not None:
            most = self.longest_round(worker, count)
            if most < steps:
                steps = most
        if steps < 1:
            steps = 1
        if evicted or waiting > count or inbox.behind:
            others = inbox.waiting > count and (count or not evicted)
            first = inbox.after(count) if others else evicted[-1]
            if self._may_enter(worker, first, footprint):
                until = interval - residents.steps % interval
                if until < steps:
                    steps = until
        return self.make_round(worker, entering, steps, evicted, stop_every=interval)

    def _entering(self, worker: Worker, footprint: Footprint) -> list[Job]:
        """The jobs that enter; `footprint` is afterwards that with them."""
        inbox = worker.inbox
        rows = footprint.rows
        first = inbox.jobs[0]
        if not self._may_enter(worker, first, footprint):
            return []
        most = min(self._most_rows, worker.row_limit) - rows
        prefill = worker.residents.prefill_tokens
        capacity = worker.capacity_tokens
        candidates: list[Job] = []
        for job in inbox.jobs:
            if prefill >= self._most_prefill or len(candidates) >= most:
                break
            if not (self._overfill or footprint.fits(job.length, capacity)):
                break
            if candidates and not self._is_admissible(worker, job, footprint):
                break
            candidates.append(job)
            prefill += job.length
            footprint.enter(job)
        admitted = len(candidates)
        if admitted and self.admit is not None:
            admitted = self.admit(self.view, worker, candidates)
        if admitted and admitted == len(candidates):
            return candidates
        # a lone row may fill the memory to its last token
        candidates = candidates[:admitted] if admitted or rows else [first]
        footprint.reset()
        for job in candidates:
            footprint.enter(job)
        return candidates

    def _make_way(self, worker: Worker, job: Job) -> tuple[list[Job], Footprint]:
        """The fewest less urgent residents to evict to admit `job`, and the others' footprint.

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

        Until then the memory and the rows that are free only shrink. If any waiting job may come
        next, which may have one token, that is asked instead.
        """
        rows = footprint.rows
        if not rows:
            return True
        if rows >= self._most_rows or rows >= worker.row_limit:
            return False
        if self._any_may_come:
            bounds = self._bounds[worker.index]
            taken = footprint.taken_with(1)
            return taken <= bounds.taken and footprint.fits(1, worker.capacity_tokens)
        if not (self._overfill or footprint.fits(job.length, worker.capacity_tokens)):
            return False
        return self._is_admissible(worker, job, footprint)

    def _is_admissible(self, worker: Worker, job: Job, footprint: Footprint) -> bool:
        bounds = self._bounds[worker.index]
        promised = bounds.promised
        if promised != NO_LIMIT and footprint.promised_with(job.limit_tokens) > promised:
            return False
        if bounds.taken != NO_LIMIT:
            length = job.prompt_tokens if bounds.prompts_only else job.length
            if footprint.taken_with(length) > bounds.taken:
                return False
        return self.admissible is None or self.admissible(worker, job, footprint)


def eviction_order(worker: Worker) -> list[Job]:
    """Residents in order of eviction: the least urgent first, and of these the last admitted."""
    return sorted(worker.residents.jobs, key=priority_of)[::-1]


class BatonRounds(RoundPlanner):
    """The planner of `BatonPolicy`."""

    def __init__(self, view: View, policy: BatonPolicy) -> None:
        super().__init__(view, policy.chunk_tokens)
        self._most_rows: int = policy.max_batch_size
        self._threshold: float = policy.memory_threshold
        self._headroom: int = policy.headroom_steps
        self._most_prefill: int = policy.max_prefill_tokens

    def should_interrupt(self, worker: Worker, newcomers: int) -> bool:
        """Whether the first waiting job may enter before a row ends."""
        if worker.swapped.jobs:
            return False
        return self._has_room(worker, worker.footprint, worker.inbox.jobs[0])

    def plan_round(self, worker: Worker, now_s: float) -> Batch:
        """The worker's next round."""
        residents = worker.residents
        inbox = worker.inbox
        swapped = worker.swapped
        footprint, leave = self._leaving(worker)
        back: list[Job] = []
        enter: list[Job] = []
        if not leave:
            if swapped.jobs:  # they come back, the most urgent first, then by ticket
                for job in sorted(swapped.jobs, key=turn_of):
                    if not self._has_room(worker, footprint, job, enters=False):
                        break  # none overtakes another
                    footprint.join(job.length)
                    back.append(job)
            if len(back) == len(swapped.jobs):
                prefill = residents.prefill_tokens
                for job in inbox.jobs:
                    if prefill >= self._most_prefill or not self._has_room(worker, footprint, job):
                        break
                    footprint.enter(job)
                    prefill += job.length
                    enter.append(job)
        footprint.prefilled()
        # one step, if the next waiting job might enter after it
        more = len(back) == len(swapped.jobs) and len(enter) < len(inbox.jobs)
        steps = 1
        if not leave and not (more and self._has_room(worker, footprint, inbox.jobs[len(enter)])):
            steps = max(self._room(footprint), 1)
        moves = None
        evict = leave
        if leave or back:
            room = worker.host_tokens - swapped.tokens
            evict = []
            swap_out: list[Job] = []
            for job in leave:
                tokens = residents.holds(job)
                if tokens <= room and job not in residents.prefilling:
                    room -= tokens
                    swap_out.append(job)
                else:
                    evict.append(job)
            if back or swap_out:
                moves = Moves(resume=tuple(back), swap_in=tuple(back), swap_out=tuple(swap_out))
        return self.make_round(worker, enter, steps, evict, moves)

    def _room(self, footprint: Footprint) -> int:
        """Decode steps until memory reaches the threshold; a lone row may use all of it."""
        return footprint.room(
            int(self._threshold * footprint.capacity) if footprint.rows > 1 else footprint.capacity
        )

    def _has_room(
        self, worker: Worker, footprint: Footprint, job: Job, *, enters: bool = True
    ) -> bool:
        """Whether one more row and `headroom_steps` have room; on an empty worker always."""
        rows = footprint.rows
        if rows >= self._most_rows or rows >= worker.row_limit:
            return False
        limit = int(self._threshold * footprint.capacity)
        return not rows or footprint.fits(job.length, limit, enters, self._headroom)

    def _leaving(self, worker: Worker) -> tuple[Footprint, list[Job]]:
        """The footprint of the rows that stay, and the rows that leave so that one more step fits.

        Rows leave in the order of `eviction_order`.
        """
        footprint = worker.footprint
        leave: list[Job] = []
        if footprint.rows > 1 and self._room(footprint) < 1:
            for job in eviction_order(worker):
                footprint.leave(job)
                leave.append(job)
                if footprint.rows == 1 or self._room(footprint) >= 1:
                    break
        return footprint, leave
