"""Plans the rounds of `BatonPolicy`: which rows leave, come back and enter."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.sched.footprint import Footprint
from toolkit.sched.policies.continuous_rounds import eviction_order
from toolkit.sched.types import Batch, Job, Moves, Worker
from toolkit.sched.view import RoundPlanner, View


class BatonRounds(RoundPlanner):
    """The planner of `BatonPolicy`; the arguments are its parameters."""

    def __init__(
        self,
        view: View,
        *,
        max_batch_size: int,
        memory_threshold: float,
        headroom_steps: int,
        max_prefill_tokens: int,
        chunk_tokens: int,
    ) -> None:
        super().__init__(view)
        self._most_rows = max_batch_size
        self._threshold = memory_threshold
        self._headroom = headroom_steps
        self._most_prefill = max_prefill_tokens
        self._chunk_tokens = chunk_tokens

    def has_work(self, worker: Worker) -> bool:
        """Whether a job waits or has a cache."""
        return bool(
            worker.inbox.jobs or worker.residents.jobs or worker.held.jobs or worker.swapped.jobs
        )

    def should_interrupt(self, worker: Worker, newcomers: int) -> bool:
        """Whether the first waiting job may enter before a row ends."""
        if worker.swapped.jobs:
            return False
        return self._has_room(worker, worker.footprint, worker.inbox.jobs[0])

    def plan_round(self, worker: Worker, now_s: float) -> Batch:
        """The worker's next round."""
        footprint, leave = self._leaving(worker)
        back: list[Job] = []
        enter: list[Job] = []
        if not leave:
            back = self._coming_back(worker, footprint)
            if len(back) == len(worker.swapped):
                enter = self._entering(worker, footprint)
        footprint.prefilled()
        waits_for_step = bool(leave) or self._more_may_enter(
            worker, footprint, len(back), len(enter)
        )
        evict, moves = leave, None
        if back or leave:
            swap_out, evict = _swapped_or_evicted(worker, leave)
            if back or swap_out:
                moves = Moves(resume=tuple(back), swap_in=tuple(back), swap_out=tuple(swap_out))
        longest = 0
        for job in enter:
            if job.length > longest:
                longest = job.length
        return Batch(
            worker.index,
            tuple(enter),
            1 if waits_for_step else max(self._room(footprint), 1),
            longest,
            0.0,
            "any",
            True,
            evict=tuple(evict),
            moves=moves,
            chunk_tokens=worker.chunk_of(self._chunk_tokens) if self._chunk_tokens else 0,
        )

    def _room(self, footprint: Footprint) -> int:
        """Decode steps until memory reaches the threshold; a lone row may use all of it."""
        return footprint.room(
            int(self._threshold * footprint.capacity) if footprint.rows > 1 else footprint.capacity
        )

    def _has_room(
        self, worker: Worker, footprint: Footprint, job: Job, *, enters: bool = True
    ) -> bool:
        """Whether there is room for one more row and for `headroom_steps`. An empty worker always
        has room.
        """
        rows = footprint.rows
        if rows >= self._most_rows or rows >= worker.row_limit:
            return False
        limit = int(self._threshold * footprint.capacity)
        return not rows or footprint.fits(job.length, limit, enters, self._headroom)

    def _more_may_enter(
        self, worker: Worker, footprint: Footprint, back: int, entering: int
    ) -> bool:
        """Whether the next waiting job might enter with the next round, after one step of this
        one.
        """
        if back < len(worker.swapped) or entering == len(worker.inbox.jobs):
            return False
        return self._has_room(worker, footprint, worker.inbox.jobs[entering])

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

    def _coming_back(self, worker: Worker, footprint: Footprint) -> list[Job]:
        """The swapped jobs that come back, the most urgent first, then by ticket; none overtakes
        another.
        """
        back: list[Job] = []
        if not worker.swapped.jobs:
            return back
        for job in sorted(worker.swapped.jobs, key=_turn):
            if not self._has_room(worker, footprint, job, enters=False):
                break
            footprint.join(job.length)
            back.append(job)
        return back

    def _entering(self, worker: Worker, footprint: Footprint) -> list[Job]:
        enter: list[Job] = []
        prefill = 0
        if worker.residents.prefilling:
            prefill = sum([job.length for job in worker.residents.prefilling])
        for job in worker.inbox.jobs:
            if prefill >= self._most_prefill or not self._has_room(worker, footprint, job):
                break
            footprint.enter(job)
            prefill += job.length
            enter.append(job)
        return enter


def _swapped_or_evicted(worker: Worker, leave: Sequence[Job]) -> tuple[list[Job], list[Job]]:
    """Divide the leaving rows: those that go to host memory, and those it has no room for."""
    room = worker.host_tokens - worker.swapped.tokens
    swap_out: list[Job] = []
    evict: list[Job] = []
    for job in leave:
        tokens = worker.residents.holds(job)
        if tokens <= room and job not in worker.residents.prefilling:
            room -= tokens
            swap_out.append(job)
        else:
            evict.append(job)
    return swap_out, evict


def _turn(job: Job) -> tuple[int, int]:
    return job.priority, job.ticket
