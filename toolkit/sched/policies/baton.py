"""BATON: dynamic re-batching on a padded engine.

*BATON: Enhancing Batch-wise Inference Efficiency for LLMs via Dynamic Re-batching*. When a row
ends, a waiting job takes its place, in order of arrival, up to a number of rows and a share of
memory.

The engine is unmodified and padded. The running batch is one slab of KV cache: rows x the longest
row, after the columns that are padding in every row were released. A longer newcomer makes the
slab wider for all rows. The worker decides how newcomers join (`Worker.joining`): prefilled apart
and embedded (BATON-PD in the paper), or shaped into the batch at a cost to every row (vector
shaping: the paper's baseline, which it says has the throughput of Orca). `toolkit.sched.memory` has
what each way takes, `toolkit.sched.prefills` which newcomers are prefilled together.

If memory would pass a threshold, the last rows that joined leave. They go to host memory and come
back without a prefill, before any other job enters. Without room in host memory they are evicted
and prefilled again. Not implemented: the paper prefills queries ahead of their turn and keeps their
caches aside until then. It uses batches of 2 to 10 rows and states no threshold.
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
from toolkit.sched.policies.continuous import eviction_order
from toolkit.sched.policies.parameters import parameter, policy
from toolkit.sched.types import Job, Moves, Pass, Worker
from toolkit.sched.view import View
from toolkit.sched.waiting import turn_of


@policy("baton")
class BatonPolicy(Policy):
    """BATON: when a row ends, a waiting job takes its place."""

    max_batch_size: int = rows_parameter(16)
    memory_threshold: float = parameter(
        0.9,
        low=0.01,
        high=1,
        search=(0.5, 1.0),
        doc="share of the capacity above which rows leave, padding counted",
    )
    headroom_steps: int = parameter(
        16,
        low=1,
        high=10_000,
        search=(1, 256),
        log=True,
        doc="decode steps that must have room before a row joins",
    )
    max_prefill_tokens: int = prefill_parameter()
    router: str = router_choice()
    chunk_tokens: int = chunk_parameter()

    def should_interrupt(self, view: View, worker: Worker, newcomers: int) -> bool:
        """Whether the first waiting job may enter before a row ends."""
        if worker.swapped.jobs:
            return False
        return self._has_room(worker, footprint_of(worker), worker.waiting.jobs[0])

    def plan_worker(self, view: View, worker: Worker, now_s: float) -> Pass:
        """Rows leave until a step fits; else rows come back, and then waiting jobs enter."""
        swapped = worker.swapped
        waiting = worker.waiting
        footprint, leave = self._leaving(worker)
        back: list[Job] = []
        enter: list[Job] = []
        if not leave:
            for job in sorted(swapped.jobs, key=turn_of):
                if not self._has_room(worker, footprint, job, enters=False):
                    break  # none overtakes another
                footprint = footprint.joined(job.length)
                back.append(job)
            if len(back) == len(swapped.jobs):
                prefill = worker.running.prefill_tokens
                for job in waiting.jobs:
                    if prefill >= self.max_prefill_tokens:
                        break
                    if not self._has_room(worker, footprint, job):
                        break
                    footprint = footprint.entered(job)
                    prefill += job.length
                    enter.append(job)
        footprint = footprint.prefilled()
        # one step, if the next waiting job might enter after it
        more = len(back) == len(swapped.jobs) and len(enter) < len(waiting.jobs)
        steps = 1
        if not leave and not (more and self._has_room(worker, footprint, waiting.jobs[len(enter)])):
            steps = max(self._room(footprint), 1)
        swap_out, evict = self._host(worker, leave)
        moves = None
        if back or swap_out:
            moves = Moves(resume=tuple(back), swap_in=tuple(back), swap_out=tuple(swap_out))
        return self.make_pass(worker, enter, steps, evict, moves)

    def _leaving(self, worker: Worker) -> tuple[Footprint, list[Job]]:
        """The footprint of the rows that stay, and the rows that leave so that one more step fits.

        Rows leave in the order of `eviction_order`.
        """
        footprint = footprint_of(worker)
        leave: list[Job] = []
        if footprint.rows > 1 and self._room(footprint) < 1:
            for job in eviction_order(worker):
                leave.append(job)
                footprint = footprint_of(worker, leave)
                if footprint.rows == 1 or self._room(footprint) >= 1:
                    break
        return footprint, leave

    def _host(self, worker: Worker, leave: Sequence[Job]) -> tuple[list[Job], list[Job]]:
        """The jobs of `leave` that go to host memory, and those that are evicted."""
        running = worker.running
        room = worker.host_tokens - worker.swapped.tokens
        swap_out: list[Job] = []
        evict: list[Job] = []
        for job in leave:
            tokens = running.holds(job)
            if tokens <= room and job not in running.prefilling:
                room -= tokens
                swap_out.append(job)
            else:
                evict.append(job)
        return swap_out, evict

    def _room(self, footprint: Footprint) -> int:
        """Decode steps until memory reaches the threshold; a lone row may use all of it."""
        if footprint.rows == 1:
            return footprint.room(footprint.capacity)
        return footprint.room(int(self.memory_threshold * footprint.capacity))

    def _has_room(
        self, worker: Worker, footprint: Footprint, job: Job, *, enters: bool = True
    ) -> bool:
        """Whether one more row and `headroom_steps` have room; on an empty worker always."""
        rows = footprint.rows
        if rows >= self.max_batch_size or rows >= worker.row_limit:
            return False
        limit = int(self.memory_threshold * footprint.capacity)
        return not rows or footprint.fits(job.length, limit, enters, self.headroom_steps)
