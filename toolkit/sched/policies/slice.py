"""Slice-level scheduling (SCLS): batches by dynamic programming, run for one slice, offloaded max-min.

Every T seconds all pooled requests are batched so that the total serving time is least (Algorithm 1); the batches go to
the least loaded workers, longest first (Eq. 11); T adapts to the load (Eq. 12). Requests that have not ended return to
the pool with what they generated as part of their input. Sections 4.4 to 4.6 of the SCLS paper. Workers of several
kinds are beyond it: `toolkit.sched.policies.shares` says who gets what, and each kind then goes on as in the paper.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

import numpy as np

from toolkit.sched.kernels import split_by_serving_time
from toolkit.sched.policies.parameters import knob, validate
from toolkit.sched.policies.shares import share_out
from toolkit.sched.types import Batch, Job, Worker
from toolkit.sched.view import Decision, View


@dataclass(frozen=True, slots=True)
class SlicePolicy:
    """SCLS. Paper: S 128, lambda 0.5, Gamma 6 s on transformers and 3 s on DeepSpeed, zeta 0.9.

    `eager` mends the paper's wait for Gamma under light load: while a worker is idle, nobody waits. Of the paper's
    ablation, LB is interval_factor 0, AB also max_min false, and PM also a max_batch_size.
    """

    name: ClassVar[str] = "slice"
    continuous: ClassVar[bool] = False

    slice_tokens: int = knob(128, low=1, search=(4, 512), log=True, doc="S: tokens per slice")
    interval_factor: float = knob(
        0.5, high=1, search=(0.05, 1.0), doc="lambda of Eq. 12: share of the least load to wait"
    )
    min_interval_s: float = knob(
        3.0,
        search=(0.05, 6.0),
        log=True,
        doc="Gamma of Eq. 12: shortest wait between batchings, in seconds",
    )
    memory_reserve: float = knob(0.1, high=0.99, search=(0.0, 0.5), doc="share of the fitted memory that is kept free")
    max_batch_size: int = knob(0, doc="largest batch; 0: what memory allows")
    max_min: bool = knob(True, doc="longest batch to the least loaded worker; false: batches in turn")
    eager: bool = knob(True, doc="batch at once while a worker is idle")

    def __post_init__(self) -> None:
        validate(self)

    def route(self, view: View, now_s: float) -> Sequence[int] | None:
        return None

    def plan(self, view: View, now_s: float) -> Decision:
        if not view.pool:
            return Decision()
        if view.mixed:
            return self._plan_mixed(view, now_s)
        alive = view.alive()
        waiting = now_s < view.due_s and not (self.eager and any(not view.workers[index].queue for index in view.idle))
        if waiting or not alive:
            return Decision()
        batches = self.batch(view.pool, alive[0])
        if self.max_min:
            least_load_s = _offload(batches, view.loads.least(len(batches) + 1))  # no other can be given any
        else:
            least_load_s = offload_in_turn(batches, alive)
        interval_s = max(self.interval_factor * least_load_s, self.min_interval_s)  # Eq. 12
        return Decision(batches, wake_at_s=now_s + interval_s)

    def _plan_mixed(self, view: View, now_s: float) -> Decision:
        """As `plan`, each kind of workers batching its share of the pool by its own laws.

        Where the policy is `eager`, only who is idle is given anything, one batch, and Gamma is of no account: what is
        best run by those who are busy waits in the pool, where those who come meanwhile may join it. Of a worker's
        batches it is the one with the job that waits longest, so that nobody is passed over for ever.
        """
        idle = [index for index in view.idle if not view.workers[index].queue]
        if not view.kinds or (not self.eager and now_s < view.due_s):
            return Decision()
        if self.eager and not idle:
            return Decision(wake_at_s=math.inf)  # the next batch's end will do
        jobs = sorted(view.pool, key=attrgetter("length"))
        batches = share_out(jobs, view.kinds, self.batch, offload_max_min if self.max_min else offload_in_turn, now_s)
        if self.eager:
            return Decision(_oldest(batches, idle), wake_at_s=math.inf)
        loads_s = {worker.index: worker.load_s for worker in view.alive()}
        for batch in batches:
            loads_s[batch.worker] += batch.estimated_s
        interval_s = max(self.interval_factor * min(loads_s.values()), self.min_interval_s)
        return Decision(batches, wake_at_s=now_s + interval_s)

    def batch(self, pool: Sequence[Job], worker: Worker) -> list[Batch]:
        """Algorithm 1 over `pool`, by the laws of `worker`. The batches are not assigned yet."""
        lengths = np.fromiter((job.length for job in pool), np.int64, len(pool))
        order = np.argsort(lengths, kind="stable")
        lengths = lengths[order]
        max_batch = worker.memory.max_batch(lengths, self.slice_tokens, self.memory_reserve)
        largest = min(int(max_batch.max()), len(pool), self.max_batch_size or len(pool))
        max_batch = np.clip(max_batch, 1, max(largest, 1))
        # A power of two, so that the law's cache of tables stays small.
        table = worker.latency.serve_table(1 << max(largest, 1).bit_length(), self.slice_tokens)
        starts, total_s = split_by_serving_time(lengths, max_batch, table)
        jobs = [pool[k] for k in order.tolist()]
        return _walk_back(jobs, starts.tolist(), total_s.tolist(), self.slice_tokens)


def _walk_back(jobs: list[Job], starts: list[int], total_s: list[float], slice_tokens: int) -> list[Batch]:
    """The batches that the split positions of Algorithm 1 stand for."""
    batches = []
    end = len(jobs)
    while end > 0:
        start = starts[end]
        batches.append(
            Batch(
                worker=-1,
                jobs=tuple(jobs[start:end]),
                steps=slice_tokens,
                input_length=jobs[end - 1].length,
                estimated_s=total_s[end] - total_s[start],
            )
        )
        end = start
    return batches


def _oldest(batches: Sequence[Batch], workers: Sequence[int]) -> list[Batch]:
    """Of each worker's batches the one whose oldest job came first."""
    found: dict[int, Batch] = {}
    for batch in sorted(batches, key=lambda batch: min(job.ticket for job in batch.jobs)):
        found.setdefault(batch.worker, batch)
    return [found[index] for index in workers if index in found]


def offload_max_min(batches: list[Batch], workers: Sequence[Worker]) -> float:
    """Longest batch to the least loaded worker (SCLS 4.5, Eq. 11); returns the least load after it, in seconds.

    Sorts and assigns `batches`. Equal loads go to the worker that was given the fewest batches, so that none starves.
    """
    return _offload(batches, [(worker.load_s, worker.assigned, worker.index) for worker in workers])


def _offload(batches: list[Batch], heap: list[tuple[float, int, int]]) -> float:
    """The same with workers' loads, batches that they were given so far, and indices."""
    heapq.heapify(heap)
    batches.sort(key=lambda batch: -batch.estimated_s)
    for batch in batches:
        load_s, assigned, index = heap[0]
        batch.worker = index
        heapq.heapreplace(heap, (load_s + batch.estimated_s, assigned + 1, index))
    return heap[0][0]


def offload_in_turn(batches: list[Batch], workers: Sequence[Worker]) -> float:
    """Batches to workers round robin, going on where the last call ended; returns the least load after it."""
    loads = {worker.index: worker.load_s for worker in workers}
    turn = sum(worker.assigned for worker in workers)
    for k, batch in enumerate(batches, start=turn):
        batch.worker = workers[k % len(workers)].index
        loads[batch.worker] += batch.estimated_s
    return min(loads.values())
