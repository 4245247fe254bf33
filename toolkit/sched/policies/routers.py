"""Which worker a request goes to, for policies whose requests wait at a worker: a name each, for a
parameter.

A router is a function of the view that gives each pooled job a worker, in the pool's order. It
counts work in tokens, and knows of output lengths only what has ended before.

Where workers are of several kinds, each is asked by its own laws how fast it is with a full memory
(`toolkit.sched.queues`): who is twice as fast gets twice as much, counted in requests or in tokens,
and memory is counted in shares of what a worker has. A job goes only where its longest possible end
has room.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from toolkit.sched.footprint import peak_to_come
from toolkit.sched.protocols import View
from toolkit.sched.queues import by_pace, tokens_per_s
from toolkit.sched.residents import GENERATED, LENGTH
from toolkit.sched.types import Job, Worker

Router = Callable[
    [View, Sequence[Worker], int], Sequence[int]
]  # and the most rows that the policy runs on a worker


def round_robin(view: View, alive: Sequence[Worker], rows: int) -> Sequence[int]:
    """In turn, by the order of arrival; of several kinds the faster ones more often."""
    if view.mixed:
        expected = expected_output(view)
        return [by_pace(job, holders(alive, job), expected, rows).index for job in view.pool]
    return [alive[job.ticket % len(alive)].index for job in view.pool]


def least_loaded(view: View, alive: Sequence[Worker], rows: int) -> Sequence[int]:
    """To the worker with the fewest tokens outstanding: what its jobs hold, and what they are
    expected to add.

    Of several kinds, where these take the least time with the request's own.
    """
    return _to_least(view, alive, view.pool, rows)


def max_min(view: View, alive: Sequence[Worker], rows: int) -> Sequence[int]:
    """As least-loaded, the longest of those who came together first (SCLS 4.5, Eq. 11)."""
    order = sorted(range(len(view.pool)), key=lambda k: -view.pool[k].length)
    homes = dict(
        zip(order, _to_least(view, alive, [view.pool[k] for k in order], rows), strict=True)
    )
    return [homes[k] for k in range(len(order))]


def future_memory(view: View, alive: Sequence[Worker], _rows: int) -> Sequence[int]:
    """To the worker whose memory will peak lowest with the request (Past-Future, Eq. 2-4, by
    expected lengths).
    """
    expected = expected_output(view)
    added: dict[int, list[Job]] = {worker.index: [] for worker in alive}

    def peak(worker: Worker, job: Job) -> float:
        tokens = _peak(worker, [*added[worker.index], job], expected)
        return tokens / worker.capacity_tokens if view.mixed else tokens

    homes = []
    for job in view.pool:
        able = holders(alive, job) if view.mixed else alive
        best = min(able, key=lambda worker: (peak(worker, job), worker.index))
        added[best.index].append(job)
        homes.append(best.index)
    return homes


def expected_output(view: View) -> int:
    """The mean length of the outputs that ended last; 1 before the first."""
    lengths = view.finished.ascending()
    return int(lengths.mean()) if len(lengths) else 1


def holders(workers: Sequence[Worker], job: Job) -> list[Worker]:
    """Those of a mixed fleet who hold the job to its longest end."""
    return [worker for worker in workers if worker.holds(job)]


def _to_least(view: View, alive: Sequence[Worker], jobs: Sequence[Job], rows: int) -> list[int]:
    expected = expected_output(view)
    loads = {worker.index: _outstanding(worker, expected) for worker in alive}
    homes = []
    for job in jobs:
        own = job.length + max(expected - job.generated, 1)
        if view.mixed:
            index = soonest(holders(alive, job), loads, own, job, expected, rows)
        else:
            index = min(loads, key=lambda k: (loads[k], k))
        loads[index] += own
        homes.append(index)
    return homes


def soonest(
    able: Sequence[Worker], loads: Mapping[int, int], own: int, job: Job, expected: int, rows: int
) -> int:
    """Who of `able` would be done first with its tokens outstanding and the job's own."""

    def done_s(worker: Worker) -> float:
        return (loads[worker.index] + own) / tokens_per_s(worker, job, expected, rows)

    return min(able, key=lambda worker: (done_s(worker), worker.index)).index


def _outstanding(worker: Worker, expected: int) -> int:
    table, steps = worker.residents.table(), worker.residents.steps
    to_come = int(np.maximum(expected - steps - table[GENERATED], 1).sum()) if table.shape[1] else 0
    waiting = sum([job.length + max(expected - job.generated, 1) for job in _waiting(worker)])
    return worker.residents.used + to_come + waiting


def _peak(worker: Worker, newcomers: Sequence[Job], expected: int) -> int:
    """M* of the residents, of those who wait at the worker, and of `newcomers`, as if all ran at
    once.
    """
    table, steps = worker.residents.table(), worker.residents.steps
    jobs = [*_waiting(worker), *newcomers]
    used = np.concatenate(
        [table[LENGTH] + steps, np.array([job.length for job in jobs], dtype=np.int64)]
    )
    generated = np.concatenate(
        [table[GENERATED] + steps, np.array([job.generated for job in jobs], dtype=np.int64)]
    )
    return peak_to_come(used, np.maximum(expected - generated, 1), padded=worker.padded)


def _waiting(worker: Worker) -> list[Job]:
    return [*worker.inbox.everybody(), *worker.held.jobs, *worker.swapped.jobs]


ROUTERS: dict[str, Router] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "max-min": max_min,
    "future-memory": future_memory,
}
