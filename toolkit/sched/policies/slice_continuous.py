"""Slice-level scheduling on continuous batching: the SCLS paper's section 7, which its authors left to be built.

A request generates at most one slice per schedule, so the memory that residents will need is known up to the slice's
end; that is what newcomers are admitted against. Where its slice is over and requests queue up behind it, a request
goes to a worker with clearly more free memory, or gives way to those who wait; else it stays, and its cache with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from toolkit.sched.figures import Figure
from toolkit.sched.footprint import Footprint, peak_to_come
from toolkit.sched.kernels import admit_knowing, all_left, ends_now, nearest_end, slices_left
from toolkit.sched.policies.continuous import ContinuousPolicy
from toolkit.sched.policies.parameters import choice, knob
from toolkit.sched.policies.routers import ROUTERS, expected_output, soonest
from toolkit.sched.residents import GENERATED, JOINED, LENGTH, LIMIT
from toolkit.sched.types import NO_LIMIT, Job, Worker
from toolkit.sched.view import View

SLICES = "slices"
GONE = -(1 << 62)  # free tokens of a worker that is lost: less than any has


@dataclass(frozen=True, slots=True)
class SliceContinuousPolicy(ContinuousPolicy):
    """SCLS with caches that stay. Slices end at attempts to admit, so they are rounded up to `interval_steps`.

    What a worker has promised is the sum of L + S over residents and those who wait (Eq. 5, in tokens); requests are
    routed to the least promised, the longest first (Eq. 11 with memory as the load); where workers are of several
    kinds, to the one that what it promised takes the least time.
    """

    name: ClassVar[str] = "slice-continuous"

    slice_tokens: int = knob(128, low=1, search=(16, 1024), log=True, doc="S: tokens per slice")
    reserve: float = knob(0.0, high=0.99, search=(0.0, 0.3), doc="share of the capacity that slices must leave free")
    margin: float = knob(
        0.1, high=1, search=(0.02, 0.5), log=True, doc="share of the capacity that is clearly more free memory"
    )
    router: str = choice(SLICES, (SLICES, *ROUTERS), doc="how requests are dealt to workers: least promised, or others")

    def release(self, view: View, now_s: float) -> Sequence[Job]:
        """Residents whose slice is over and that are better off, or better for others, elsewhere."""
        leaving: list[Job] = []
        free: NDArray[np.int64] | None = None
        for worker in view.due:
            residents = worker.residents
            if residents.jobs and residents.steps % self.interval_steps == 0 and self._ends_now(worker):
                over = self._over(worker)
                if over:
                    if free is None:
                        free = self._free(view)
                    leaving += self._leaving(view, worker, over, free)
        return leaving

    def route(self, view: View, now_s: float) -> Sequence[int] | None:
        if self.router != SLICES or not view.alive():
            return ContinuousPolicy.route(self, view, now_s)
        promised = self._promised(view)
        homes, expected = [-1] * len(view.pool), expected_output(view)
        for k in sorted(range(len(homes)), key=lambda k: -view.pool[k].length):
            job = view.pool[k]
            own = job.length + self._period()
            if view.mixed:
                homes[k] = soonest(view, promised, own, job, expected, self.most_rows, depends=False)
            else:
                homes[k] = promised.least(view.able, 0)
            promised.add(homes[k], own)
        return homes

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        used, left = self._outlook(worker)
        emits = worker.latency.prefill_emits_token
        first = self._first_end(worker, worker.residents.steps) - worker.residents.steps
        waiting = np.array([(job.length + emits, min(first, job.remaining_limit - emits)) for job in candidates]).T
        return int(admit_knowing(used, left, waiting, self._limit(worker) + 1.0, worker.padded))

    def hopeful(self, worker: Worker, job: Job, there: Footprint) -> bool:
        return there.taken_with(job.length) < self._limit(worker)

    def longest_round(self, worker: Worker, entering: int) -> int:
        residents = worker.residents
        nearest = int(nearest_end(residents.table()[JOINED], *self._times(worker))) if residents.jobs else NO_LIMIT
        if not entering and residents.jobs:
            return nearest
        return min(nearest, self._first_end(worker, residents.steps) - residents.steps)

    def _leaving(self, view: View, worker: Worker, over: Sequence[Job], free: NDArray[np.int64]) -> list[Job]:
        """Which of those whose slice is over leave, in the order of admission. Takes what moves off `free`."""
        used, left = self._outlook(worker)
        staying = np.ones(len(used), dtype=np.bool_)
        staying[[job.slot for job in over]] = False
        here, crowded, limit = worker.index, bool(worker.inbox), self._limit(worker)
        own, free[here] = int(free[here]), GONE
        target = int(free.argmax()) if len(view.able) > 1 else here
        free[here] = own
        margin = self.margin * worker.capacity_tokens
        leaving = []
        for job in over:
            staying[job.slot] = True
            room = peak_to_come(used[staying], left[staying], padded=worker.padded) <= limit
            if not crowded and (room or staying.sum() == 1):
                continue
            needs = int(used[job.slot]) + self._period()
            moves = target != here and free[target] - needs - margin >= free[here] and view.workers[target].holds(job)
            if not moves and (room or not crowded):
                continue
            leaving.append(job)
            staying[job.slot] = False
            free[here] += needs
            if moves:
                free[target] -= needs
        return leaving

    def _limit(self, worker: Worker) -> int:
        return int((1.0 - self.reserve) * worker.capacity_tokens)

    def _period(self) -> int:
        """Steps of a slice that begins with an attempt to admit."""
        return -(-self.slice_tokens // self.interval_steps) * self.interval_steps

    def _first_steps(self, worker: Worker) -> int:
        """Steps until one who enters has `slice_tokens`."""
        return max(self.slice_tokens - worker.latency.prefill_emits_token, 1)

    def _first_end(self, worker: Worker, joined: int) -> int:
        """The worker's step where the first slice of one who joined at the step `joined` is over."""
        return -(-(joined + self._first_steps(worker)) // self.interval_steps) * self.interval_steps

    def _over(self, worker: Worker) -> list[Job]:
        """Residents whose slice is over just now, in the order of admission."""
        steps, first, period, interval = self._times(worker)
        return [
            job
            for job in worker.residents.jobs
            if steps >= (end := -(-(job.joined + first) // interval) * interval) and (steps - end) % period == 0
        ]

    def _left(self, worker: Worker) -> NDArray[np.int64]:
        """Steps that each resident has until its slice is over; a whole slice where it just was. In slots' order."""
        return slices_left(worker.residents.table()[JOINED], *self._times(worker))

    def _ends_now(self, worker: Worker) -> bool:
        return bool(ends_now(worker.residents.table()[JOINED], *self._times(worker)))

    def _times(self, worker: Worker) -> tuple[int, int, int, int]:
        """In steps: the worker's so far, those of a first slice and of all others, and the interval."""
        return worker.residents.steps, self._first_steps(worker), self._period(), self.interval_steps

    def _outlook(self, worker: Worker) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens that each resident holds, and will add at most until its slice is over. In slots' order."""
        table, steps = worker.residents.table(), worker.residents.steps
        return table[LENGTH] + steps, np.minimum(self._left(worker), table[LIMIT] - table[GENERATED] - steps)

    def _promised(self, view: View) -> Figure:
        return view.figure((self.name, self), self._promise)

    def _free(self, view: View) -> NDArray[np.int64]:
        """Each worker's capacity less what it promised [n]; `GONE` for those that are lost."""
        free = np.full(len(view.workers), GONE)
        capacities = [view.workers[index].capacity_tokens for index in view.able] if view.mixed else None
        capacity = view.workers[0].capacity_tokens if capacities is None else np.array(capacities)
        free[view.able] = capacity - self._promised(view).bounds()[view.able]
        return free

    def _promise(self, worker: Worker, _expected: int) -> tuple[int, int]:
        """Tokens that were promised; they do not depend on how far the running round has come."""
        promised = worker.inbox.tokens + len(worker.inbox) * self._period()
        if worker.residents.jobs:
            promised += worker.residents.used + int(all_left(worker.residents.table()[JOINED], *self._times(worker)))
            if worker.running:  # prefill's tokens, which are not in the books before the round is over
                promised += len(worker.running.jobs) * worker.latency.prefill_emits_token
        return promised, 0
