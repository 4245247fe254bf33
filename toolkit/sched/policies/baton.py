"""BATON: re-batching on an unmodified padded engine; when a row ends, a waiting job takes its
place.

*BATON: Enhancing Batch-wise Inference Efficiency for LLMs via Dynamic Re-batching*. The running
batch is one slab of KV cache: rows x the longest resident, after the columns that are padding in
every row were released. A longer newcomer makes the slab wider for all rows. The worker decides how
newcomers join: prefilled apart and embedded (BATON-PD in the paper), or shaped into the batch at a
cost to every row (vector shaping: the paper's baseline, which it says has the throughput of Orca).

If memory would pass a threshold, the last rows that joined leave. They go to host memory and come
back without a prefill, before any other job enters. Without room in host memory they are evicted
and prefilled again. Not implemented: the paper prefills queries ahead of their turn and keeps their
caches aside until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from toolkit.sched.footprint import Footprint
from toolkit.sched.policies.continuous_rounds import eviction_order
from toolkit.sched.policies.parameters import choice, chunk_knob, knob, validate
from toolkit.sched.policies.routers import ROUTERS
from toolkit.sched.types import Batch, Job, Moves, Worker
from toolkit.sched.view import Decision, View


@dataclass(frozen=True, slots=True)
class BatonPolicy:
    """First come, first served, up to a number of rows and a share of memory.

    The paper uses batches of 2 to 10 rows and states no value for the threshold.
    """

    name: ClassVar[str] = "baton"
    continuous: ClassVar[bool] = True

    max_batch_size: int = knob(
        16, low=1, search=(1, 256), log=True, doc="the most rows that run at once on a worker"
    )
    memory_threshold: float = knob(
        0.9,
        low=0.01,
        high=1,
        search=(0.5, 1.0),
        doc="share of the capacity above which rows leave, padding counted",
    )
    headroom_steps: int = knob(
        16,
        low=1,
        high=10_000,
        search=(1, 256),
        log=True,
        doc="decode steps that must have room before a row joins",
    )
    max_prefill_tokens: int = knob(
        32_768,
        low=1,
        search=(512, 65_536),
        log=True,
        doc="a round prefills until it has so many prompt tokens",
    )
    router: str = choice(
        "round-robin", ROUTERS, doc="how requests are assigned to workers: " + ", ".join(ROUTERS)
    )
    chunk_tokens: int = chunk_knob()

    def __post_init__(self) -> None:
        validate(self)

    def route(self, view: View, now_s: float) -> Sequence[int] | None:
        return ROUTERS[self.router](view, self.max_batch_size) if view.alive() else None

    def plan(self, view: View, now_s: float) -> Decision:
        batches = [
            self._round(worker)
            for worker in view.due
            if worker.inbox or worker.residents.jobs or worker.held.jobs or worker.swapped.jobs
        ]
        interrupts = [
            index
            for index in dict.fromkeys(view.arrived)
            if self._should_interrupt(view.workers[index])
        ]
        return Decision(batches, interrupt=interrupts)

    def _should_interrupt(self, worker: Worker) -> bool:
        """Whether the running round should stop, because the first waiting job may enter before a
        row ends.
        """
        running, inbox = worker.running, worker.inbox
        if running is None or running.interrupted or not inbox or worker.swapped.jobs:
            return False
        return self._has_room(worker, worker.footprint.reset(), inbox[0])

    def _round(self, worker: Worker) -> Batch:
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
        swap_out, evict = _swapped_or_evicted(worker, leave)
        moves = (
            Moves(resume=tuple(back), swap_in=tuple(back), swap_out=tuple(swap_out))
            if back or swap_out
            else None
        )
        return Batch(
            worker.index,
            tuple(enter),
            1 if waits_for_step else max(self._room(footprint), 1),
            max([job.length for job in enter], default=0),
            0.0,
            "any",
            keep_cache=True,
            evict=tuple(evict),
            moves=moves,
            chunk_tokens=worker.chunk_of(self.chunk_tokens),
        )

    def _room(self, footprint: Footprint) -> int:
        """Decode steps until memory reaches the threshold; a lone row may use all of it."""
        return footprint.room(
            int(self.memory_threshold * footprint.capacity)
            if footprint.rows > 1
            else footprint.capacity
        )

    def _has_room(
        self, worker: Worker, footprint: Footprint, job: Job, *, enters: bool = True
    ) -> bool:
        """Whether there is room for one more row and for `headroom_steps`. An empty worker always
        has room.
        """
        if footprint.rows >= min(self.max_batch_size, worker.row_limit):
            return False
        limit = int(self.memory_threshold * footprint.capacity)
        return not footprint.rows or footprint.fits(
            job.length, limit, enters=enters, steps=self.headroom_steps
        )

    def _more_may_enter(
        self, worker: Worker, footprint: Footprint, back: int, entering: int
    ) -> bool:
        """Whether the next waiting job might enter with the next round, after one step of this
        one.
        """
        if back < len(worker.swapped) or entering == len(worker.inbox):
            return False
        return self._has_room(worker, footprint, worker.inbox[entering])

    def _leaving(self, worker: Worker) -> tuple[Footprint, list[Job]]:
        """The footprint of the rows that stay, and the rows that leave so that one more step fits.

        Rows leave in the order of `eviction_order`.
        """
        footprint, leave = worker.footprint.reset(), []
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
        for job in sorted(worker.swapped.jobs, key=lambda job: (job.request.priority, job.ticket)):
            if not self._has_room(worker, footprint, job, enters=False):
                break
            footprint.join(job.length)
            back.append(job)
        return back

    def _entering(self, worker: Worker, footprint: Footprint) -> list[Job]:
        enter: list[Job] = []
        prefill = sum([job.length for job in worker.residents.prefilling])
        for job in worker.inbox:
            if prefill >= self.max_prefill_tokens or not self._has_room(worker, footprint, job):
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
