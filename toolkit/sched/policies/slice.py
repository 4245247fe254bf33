"""Slice-level scheduling (SCLS) in static batches, and its baseline.

Cheng et al., *Slice-Level Scheduling for High Throughput and Load Balanced LLM Serving*, sections
4.4 to 4.6. `SlicePolicy`: every T seconds all pooled requests are batched so that the total serving
time is least (Algorithm 1), and the batches go to the least loaded workers, longest first (Eq. 11).
T adapts to the load (Eq. 12). A batch runs for one slice; requests that have not ended return to
the pool with their generated tokens as part of the input.
`toolkit.sched.kernels.split_by_serving_time` is Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import ClassVar

import numpy as np

from toolkit.sched.policies.base import Policy
from toolkit.sched.policies.parameters import parameter, policy
from toolkit.sched.queues import static_pass
from toolkit.sched.types import NO_LIMIT, Job, Pass, Worker
from toolkit.sched.view import Decision, View


@policy("slice")
class SlicePolicy(Policy):
    """SCLS. The paper: S 128, lambda 0.5, Gamma 6 s (transformers) or 3 s (DeepSpeed), zeta 0.9.

    `eager` avoids the paper's wait for Gamma under light load: while a worker is idle, no request
    waits. The paper's ablations: LB is interval_factor 0, AB also max_min false, and PM also a
    max_batch_size.
    """

    continuous: ClassVar[bool] = False

    slice_tokens: int = parameter(128, low=1, search=(4, 512), log=True, doc="S: tokens per slice")
    interval_factor: float = parameter(
        0.5, high=1, search=(0.05, 1.0), doc="lambda of Eq. 12: share of the least load to wait"
    )
    min_interval_s: float = parameter(
        3.0,
        search=(0.05, 6.0),
        log=True,
        doc="Gamma of Eq. 12: shortest wait between batchings, in seconds",
    )
    memory_reserve: float = parameter(
        0.1, high=0.99, search=(0.0, 0.5), doc="share of the fitted memory that is kept free"
    )
    max_batch_size: int = parameter(0, doc="largest batch; 0: what memory allows")
    max_min: bool = parameter(
        True, doc="longest batch to the least loaded worker; false: batches in turn"
    )
    eager: bool = parameter(True, doc="batch at once while a worker is idle")

    def route(self, view: View, now_s: float) -> Sequence[int] | None:
        return None

    def plan(self, view: View, now_s: float) -> Decision:
        if not view.pool:
            return Decision()
        alive = view.alive
        waiting = now_s < view.due_s and not (
            self.eager and any(not worker.queue for worker in view.free)
        )
        if waiting or not alive:
            return Decision()
        batches = self.batch(view.pool, alive[0])
        if self.max_min:
            least_load_s = offload_max_min(batches, alive)
        else:
            least_load_s = offload_in_turn(batches, alive)
        interval_s = max(self.interval_factor * least_load_s, self.min_interval_s)  # Eq. 12
        return Decision(batches, wake_at_s=now_s + interval_s)

    def batch(self, pool: Sequence[Job], worker: Worker) -> list[Pass]:
        """Algorithm 1 over `pool`, by the laws of `worker`. The batches are not assigned yet."""
        if len(pool) == 1:
            return [self._alone(pool[0], worker)]
        from toolkit.sched.kernels import split_by_serving_time

        lengths = np.fromiter((job.length for job in pool), np.int64, len(pool))
        order = np.argsort(lengths, kind="stable")
        lengths = lengths[order]
        max_batch = worker.memory.max_batch(lengths, self.slice_tokens, self.memory_reserve)
        largest = min(int(max_batch.max()), len(pool), self.max_batch_size or len(pool))
        # `np.clip` takes several times as long, and most pools are small.
        max_batch = np.minimum(np.maximum(max_batch, 1), max(largest, 1))
        # A power of two, so that the law caches few tables.
        table = worker.latency.serve_table(1 << max(largest, 1).bit_length(), self.slice_tokens)
        firsts, least_s = split_by_serving_time(lengths, max_batch, table)
        # The walk back touches each job once: those of a long backlog come from memory each time.
        places = order.tolist()
        starts = firsts.tolist()
        total_s = least_s.tolist()
        batches = []
        end = len(pool)
        while end > 0:
            start = starts[end]
            jobs = tuple([pool[k] for k in places[start:end]])
            longest = int(lengths[end - 1])
            seconds = total_s[end] - total_s[start]
            batches.append(Pass(-1, jobs, self.slice_tokens, longest, seconds))
            end = start
        return batches

    def _alone(self, job: Job, worker: Worker) -> Pass:
        """Algorithm 1 over one job, which is most of what it is asked under little load."""
        length = job.length
        steps = self.slice_tokens
        parts = worker.latency.serve_table(2, steps)[:, 1].tolist()
        fixed, slope, square = parts[:3]
        seconds = fixed + length * (slope + length * square)
        if len(parts) > 3:
            seconds = max(seconds, parts[3] + length * (parts[4] + length * square))
        return Pass(-1, (job,), steps, length, seconds)


def offload_max_min(batches: list[Pass], workers: Sequence[Worker]) -> float:
    """Assign the longest batch first, to the least loaded worker (SCLS 4.5, Eq. 11).

    Sorts `batches` in place. Equal loads go to the worker with the fewest batches so far, so that
    none starves. Returns the least load afterwards, in seconds.
    """
    loads = [(worker.load_s, worker.assigned, worker.index) for worker in workers]
    batches.sort(key=lambda batch: -batch.estimated_s)
    for batch in batches:
        least = min(loads)
        load_s, assigned, batch.worker = least
        loads[loads.index(least)] = (load_s + batch.estimated_s, assigned + 1, batch.worker)
    return min(loads)[0]


def offload_in_turn(batches: list[Pass], workers: Sequence[Worker]) -> float:
    """Assign batches in turn, after the last call's. Returns the least load, in seconds."""
    loads = {worker.index: worker.load_s for worker in workers}
    turn = sum(worker.assigned for worker in workers)
    for k, batch in enumerate(batches, start=turn):
        batch.worker = workers[k % len(workers)].index
        loads[batch.worker] += batch.estimated_s
    return min(loads.values())


@policy("sequence")
class SequencePolicy(Policy):
    """Sequence-level scheduling (SLS), the baseline of SCLS: fixed batches in turn (section 5.1).

    A worker takes a number of requests, first come first served, and runs the batch until its
    longest output ends. Paper: 16 rows on transformers, 12 on DeepSpeed. With `slice_tokens` it is
    Slice-Only (SO), the first step of the paper's ablation.
    """

    continuous: ClassVar[bool] = False

    batch_size: int = parameter(16, low=1, search=(1, 64), log=True, doc="rows of a batch")
    slice_tokens: int = parameter(
        0, doc="tokens per slice, after which a request is routed again; 0: to its end"
    )

    def plan_worker(self, view: View, worker: Worker, now_s: float) -> Pass:
        jobs = tuple(islice(worker.waiting.jobs, self.batch_size))
        return static_pass(worker, jobs, self.slice_tokens or NO_LIMIT)
