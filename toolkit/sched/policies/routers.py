"""Which worker a request goes to, for policies whose requests wait at a worker: a name each, for a parameter.

A router is a function of the view that gives each pooled job a worker, in the pool's order. It counts
work in tokens, and knows of output lengths only what has ended before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from toolkit.sched.footprint import peak_to_come
from toolkit.sched.residents import GENERATED, LENGTH
from toolkit.sched.types import Job, View, Worker

Router = Callable[[View, Sequence[Worker]], Sequence[int]]


def round_robin(view: View, alive: Sequence[Worker]) -> Sequence[int]:
    """In turn, by the order of arrival."""
    return [alive[job.ticket % len(alive)].index for job in view.pool]


def least_loaded(view: View, alive: Sequence[Worker]) -> Sequence[int]:
    """To the worker with the fewest tokens outstanding: what its jobs hold, and what they are expected to add."""
    return _to_least(view, alive, view.pool)


def max_min(view: View, alive: Sequence[Worker]) -> Sequence[int]:
    """As least-loaded, the longest of those who came together first (SCLS 4.5, Eq. 11)."""
    order = sorted(range(len(view.pool)), key=lambda k: -view.pool[k].length)
    homes = dict(zip(order, _to_least(view, alive, [view.pool[k] for k in order]), strict=True))
    return [homes[k] for k in range(len(order))]


def future_memory(view: View, alive: Sequence[Worker]) -> Sequence[int]:
    """To the worker whose memory will peak lowest with the request (Past-Future, Eq. 2-4, by expected lengths)."""
    expected = expected_output(view)
    added: dict[int, list[Job]] = {worker.index: [] for worker in alive}
    homes = []
    for job in view.pool:
        best = min(alive, key=lambda worker: (_peak(worker, [*added[worker.index], job], expected), worker.index))
        added[best.index].append(job)
        homes.append(best.index)
    return homes


def expected_output(view: View) -> int:
    """The mean length of the outputs that ended last; 1 before the first."""
    lengths = view.finished.ascending()
    return int(lengths.mean()) if len(lengths) else 1


def _to_least(view: View, alive: Sequence[Worker], jobs: Sequence[Job]) -> list[int]:
    expected = expected_output(view)
    loads = {worker.index: _outstanding(worker, expected) for worker in alive}
    homes = []
    for job in jobs:
        index = min(loads, key=lambda k: (loads[k], k))
        loads[index] += job.length + max(expected - job.generated, 1)
        homes.append(index)
    return homes


def _outstanding(worker: Worker, expected: int) -> int:
    table, steps = worker.residents.table(), worker.residents.steps
    to_come = int(np.maximum(expected - steps - table[GENERATED], 1).sum()) if table.shape[1] else 0
    waiting = sum([job.length + max(expected - job.generated, 1) for job in _waiting(worker)])
    return worker.residents.used + to_come + waiting


def _peak(worker: Worker, newcomers: Sequence[Job], expected: int) -> int:
    """M* of the residents, of those who wait at the worker, and of `newcomers`, as if all ran at once."""
    table, steps = worker.residents.table(), worker.residents.steps
    jobs = [*_waiting(worker), *newcomers]
    used = np.concatenate([table[LENGTH] + steps, np.array([job.length for job in jobs], dtype=np.int64)])
    generated = np.concatenate([table[GENERATED] + steps, np.array([job.generated for job in jobs], dtype=np.int64)])
    return peak_to_come(used, np.maximum(expected - generated, 1), padded=worker.padded)


def _waiting(worker: Worker) -> list[Job]:
    return [*worker.inbox.everybody(), *worker.held.jobs, *worker.swapped.jobs]


ROUTERS: dict[str, Router] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "max-min": max_min,
    "future-memory": future_memory,
}
