"""SCLS with caches that stay: continuous batching in slices.

Cheng et al., *Slice-Level Scheduling for High Throughput and Load Balanced LLM Serving*, section 7,
which the paper leaves as future work. A request generates at most one slice per schedule, so the
memory that running requests need is known up to their slices' ends: newcomers are admitted against
the peak until then. Slices end at attempts to admit: rounded up to `interval_steps`. After a slice,
the first rule that applies decides:

1. If no other job waits and another slice fits, the request stays and keeps its cache.
2. If another worker would have `margin` * capacity more free memory even with it, it moves there.
3. If another slice fits, it stays; else, if other jobs wait, it returns to the pool.

A worker has promised the sum of L + S over its running and waiting jobs (Eq. 5, in tokens).
Requests are routed to the worker that promised the least, the longest first (Eq. 11 with memory as
the load).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from toolkit.sched.memory import Footprint
from toolkit.sched.policies.continuous import ContinuousPolicy
from toolkit.sched.policies.parameters import choice, parameter, policy
from toolkit.sched.policies.routers import ROUTERS, to_least
from toolkit.sched.types import NO_LIMIT, Job, Worker
from toolkit.sched.view import View, WorkerFigure

SLICES = "slices"
NO_FREE_TOKENS = -(1 << 62)  # free tokens of a lost worker: less than any other has


class Slices:
    """When the slices of a worker's running jobs end: at attempts to admit, counted in its steps.

    The first slice of a job ends at the attempt that follows its last token, and each further slice
    `period` steps later.
    """

    def __init__(self, worker: Worker, slice_tokens: int, interval: int, period: int) -> None:
        self._steps = worker.running.steps
        self._first = max(slice_tokens - worker.emits, 1)
        self._interval = interval
        self._period = period

    def first_end(self, joined: int) -> int:
        """The worker's step at which the first slice of a job that joined at step `joined` ends."""
        return -(-(joined + self._first) // self._interval) * self._interval

    def ends_now(self, job: Job) -> bool:
        """Whether a slice of a running job ends just now."""
        past = self._steps - self.first_end(job.joined)
        return past >= 0 and past % self._period == 0

    def left(self, job: Job) -> int:
        """Steps until a running job's slice ends; a whole slice if it ends just now."""
        past = self._steps - self.first_end(job.joined)
        return -past if past < 0 else self._period - past % self._period

    def to_add(self, job: Job) -> int:
        """Tokens that a running job can add until its slice ends."""
        generated = job.generated + self._steps - job.joined
        return min(self.left(job), job.max_new_tokens - generated)


@policy("slice-continuous")
class SliceContinuousPolicy(ContinuousPolicy):
    """SCLS on a running batch: slices bound the memory that is needed, and caches stay."""

    slice_tokens: int = parameter(
        128, low=1, search=(16, 1024), log=True, doc="S: tokens per slice"
    )
    reserve: float = parameter(
        0.0, high=0.99, search=(0.0, 0.3), doc="share of the capacity that slices must leave free"
    )
    margin: float = parameter(
        0.1,
        high=1,
        search=(0.02, 0.5),
        log=True,
        doc="free memory that makes moving worthwhile, as a share of the capacity",
    )
    router: str = choice(
        SLICES,
        (SLICES, *ROUTERS),
        doc="how requests are assigned to workers: least promised, or others",
    )

    @property
    def period(self) -> int:
        """Steps of a slice that begins at an attempt to admit."""
        return -(-self.slice_tokens // self.interval_steps) * self.interval_steps

    def admissible(self, worker: Worker, job: Job, footprint: Footprint) -> bool:
        return footprint.taken_with(job.length) < self._limit(worker)

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        """Candidates enter while the peak until all slices' ends fits."""
        from toolkit.sched.kernels import peaks_to_come

        slices = self._slices(worker)
        steps = worker.running.steps
        rows: list[int] = []
        for job in worker.running.jobs:
            rows += (job.length + steps - job.joined, slices.to_add(job))
        first = slices.first_end(steps) - steps
        for job in candidates:
            to_add = min(first, job.max_new_tokens - job.generated - worker.emits)
            rows += (job.length + worker.emits, to_add)
        peaks = peaks_to_come(rows, len(worker.running.jobs), worker.padded)
        return bisect_right(peaks, self._limit(worker))

    def longest_pass(self, worker: Worker, entering: int) -> int:
        """Until the next slice ends."""
        slices = self._slices(worker)
        running = worker.running
        nearest = NO_LIMIT
        for job in running.jobs:
            nearest = min(nearest, slices.left(job))
        if entering or not running.jobs:
            nearest = min(nearest, slices.first_end(running.steps) - running.steps)
        return nearest

    def release(self, view: View, now_s: float) -> Sequence[Job]:
        """The running jobs that leave at their slice's end, by the rules of this module."""
        leaving: list[Job] = []
        free: list[int] = []
        for worker in view.due:
            steps = worker.running.steps
            if steps % self.interval_steps or not worker.running.jobs:
                continue
            slices = self._slices(worker)
            # with a slice that ends just now, in order of admission
            over = [job for job in worker.running.jobs if slices.ends_now(job)]
            if over:
                if not free:
                    free = self._free(view)
                leaving += self._leaving(view, worker, slices, over, free)
        return leaving

    def _leaving(
        self,
        view: View,
        worker: Worker,
        slices: Slices,
        over: Sequence[Job],
        free: list[int],
    ) -> list[Job]:
        """The jobs of `over` that leave, in order of admission; what moves is taken off `free`."""
        from toolkit.sched.kernels import peak_to_come

        steps = worker.running.steps
        source = worker.index
        target = source
        if len(view.alive) > 1:
            others = list(free)
            others[source] = NO_FREE_TOKENS
            target = others.index(max(others))
        used: list[int] = []
        to_add: list[int] = []
        for job in worker.running.jobs:
            if job not in over:
                used.append(job.length + steps - job.joined)
                to_add.append(slices.to_add(job))
        crowded = bool(worker.waiting.jobs)
        leaving: list[Job] = []
        for job in over:
            length = job.length + steps - job.joined
            used.append(length)
            to_add.append(slices.to_add(job))
            fits = peak_to_come(used, to_add, worker.padded) <= self._limit(worker)
            if not crowded and (fits or len(used) == 1):
                continue
            needs = length + self.period
            gains = free[target] - needs - self.margin * worker.capacity_tokens
            moves = target != source and gains >= free[source]
            if not moves and (fits or not crowded):
                continue
            leaving.append(job)
            used.pop()
            to_add.pop()
            free[source] += needs
            if moves:
                free[target] -= needs
        return leaving

    def route(self, view: View, now_s: float) -> Sequence[int] | None:
        if self.router != SLICES or not view.alive:
            return ContinuousPolicy.route(self, view, now_s)
        tokens = [job.length + self.period for job in view.pool]
        return to_least(view, self._promises(view), 0, tokens, longest_first=True)

    def _promises(self, view: View) -> WorkerFigure:
        """What each worker promised."""
        return view.figure(SLICES, self._promised)

    def _promised(self, worker: Worker, _expected: int) -> int:
        """The tokens that a worker promised, whatever the progress of the running pass."""
        waiting = worker.waiting
        running = worker.running
        promised = waiting.tokens + len(waiting.jobs) * self.period
        if running.jobs:
            slices = self._slices(worker)
            promised += running.used
            for job in running.jobs:
                promised += slices.left(job)
            if worker.batch is not None:  # prefills' tokens, counted when the pass ends
                promised += len(worker.batch.jobs) * worker.emits
        return promised

    def _free(self, view: View) -> list[int]:
        """Each worker's capacity less what it promised [n]; `NO_FREE_TOKENS` for lost workers."""
        promised = self._promises(view)
        free = [NO_FREE_TOKENS] * len(view.workers)
        for worker in view.alive:
            free[worker.index] = worker.capacity_tokens - promised.of(worker, 0)
        return free

    def _limit(self, worker: Worker) -> int:
        """Tokens that slices may fill."""
        return int((1.0 - self.reserve) * worker.capacity_tokens)

    def _slices(self, worker: Worker) -> Slices:
        """When the slices of the worker's running jobs end."""
        return Slices(worker, self.slice_tokens, self.interval_steps, self.period)
