"""Routers: which worker a request goes to, for policies that queue requests at workers.

A router is a function of the view that gives each pooled job a worker, in the pool's order; a
parameter of the policy names it. It counts work in tokens, and knows of output lengths only those
of requests that ended.

If workers are of several kinds, each is rated by its own laws for its speed with a full memory
(`toolkit.sched.queues`). A worker that is twice as fast gets twice as much, counted in requests or
in tokens, and memory counts as a share of the worker's capacity. A job only goes where it fits even
at its longest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from toolkit.sched.figures import Numbers, WorkerFigure
from toolkit.sched.queues import by_pace, tokens_per_s
from toolkit.sched.types import Job, Worker
from toolkit.sched.view import View

# Maps the view and the most rows that the policy runs on a worker to a worker for each pooled job.
Router = Callable[[View, int], Sequence[int]]


def round_robin(view: View, rows: int) -> Sequence[int]:
    """In turn by order of arrival; among several kinds, in proportion to speed."""
    if view.mixed:
        expected = view.finished.mean()
        kinds = [kind[0] for kind in view.kinds]
        homes = []
        for job in view.pool:
            able = view.holders(job)
            homes.append(int(able[by_pace(job, kinds, view.kind_of[able], expected, rows)]))
        return homes
    alive = view.alive()
    return [alive[job.ticket % len(alive)].index for job in view.pool]


def least_loaded(view: View, rows: int) -> Sequence[int]:
    """To the worker with the fewest outstanding tokens: held by its jobs and expected of them.

    Among several kinds, to the worker that needs the least time for these and the request's own.
    """
    return _to_least(view, view.pool, rows)


def max_min(view: View, rows: int) -> Sequence[int]:
    """Like least-loaded, the longest request that came at once first (SCLS 4.5, Eq. 11)."""
    order = sorted(range(len(view.pool)), key=lambda k: -view.pool[k].length)
    homes = dict(zip(order, _to_least(view, [view.pool[k] for k in order], rows), strict=True))
    return [homes[k] for k in range(len(order))]


def future_memory(view: View, _rows: int) -> Sequence[int]:
    """To the worker that will have the lowest peak of memory with the request.

    The peak is that of Past-Future, Eq. 2-4, with expected lengths.
    """
    expected = view.finished.mean()
    figure = view.figure("future memory", _future_memory)
    added: dict[int, list[Job]] = {}
    homes: list[int] = []
    for job in view.pool:
        index = _lowest_peak(view, figure, added, job, expected)
        homes.append(index)
        if len(homes) < len(view.pool):
            new_jobs = added.setdefault(index, [])
            new_jobs.append(job)
            figure.write(index, expected, *_future_memory(view.workers[index], expected, new_jobs))
    return homes


def soonest(
    view: View,
    figure: WorkerFigure,
    job_tokens: int,
    job: Job,
    expected: int,
    rows: int,
    *,
    depends: bool = True,
) -> int:
    """The worker that would be first to finish its tokens of `figure` and `job_tokens` more.

    `depends`: whether the figure depends on `expected`.
    """
    able = view.holders(job)
    paces = np.array([tokens_per_s(kind[0], job, expected, rows) for kind in view.kinds])[
        view.kind_of[able]
    ]
    return figure.least(
        able, expected if depends else 0, lambda tokens: (tokens + job_tokens) / paces
    )


def _to_least(view: View, jobs: Sequence[Job], rows: int) -> list[int]:
    expected = view.finished.mean()
    figure = view.figure("outstanding", _outstanding)
    homes = []
    for job in jobs:
        job_tokens = job.length + max(expected - job.generated, 1)
        if view.mixed:
            index = soonest(view, figure, job_tokens, job, expected, rows)
        else:
            index = figure.least(view.able, expected)
        figure.add(index, job_tokens)
        homes.append(index)
    return homes


def _outstanding(worker: Worker, expected: int) -> tuple[int, int]:
    """Tokens that a worker's jobs hold and are expected to add, and the number of jobs."""
    running = worker.running
    waiting = worker.waiting
    tokens = 0
    rows = waiting.count
    rows += len(running.jobs)
    tokens += running.used
    for job in running.jobs:
        tokens += max(expected - job.generated - (running.steps - job.joined), 1)
    returned = waiting.returned
    tokens += waiting.tokens + (waiting.count - len(returned)) * max(expected, 1)
    for job in returned:
        tokens += max(expected - job.generated, 1)
    for parked in (worker.paused, worker.swapped):
        rows += len(parked.jobs)
        tokens += parked.tokens
        for job in parked.jobs:
            tokens += max(expected - job.generated, 1)
    return tokens, rows


def _lowest_peak(
    view: View, figure: WorkerFigure, added: Mapping[int, Sequence[Job]], job: Job, expected: int
) -> int:
    """The worker with the lowest peak of memory, with the job and those `added` to it before."""
    able = view.holders(job)
    fresh = max(expected, 1)
    paged = not any(kind[0].padded for kind in view.kinds or (view.workers,))
    capacities = (
        np.array([kind[0].capacity_tokens for kind in view.kinds])[view.kind_of[able]]
        if view.mixed
        else 1
    )
    if not job.generated and paged:
        # A new job has the most remaining tokens, so it comes first in the order of Eq. 2-4: it
        # raises the peak by its input.
        if not view.mixed:
            return figure.least(able, expected)
        return figure.least(able, expected, lambda tokens: (tokens + job.length) / capacities)

    def bound(peaks: Numbers, rows: Numbers) -> NDArray[np.float64]:
        if job.generated:
            return np.zeros(len(peaks))
        alone = np.where(rows == 1, job.length + fresh, 0)
        return np.asarray(np.maximum(peaks, alone) / capacities)

    def exact(index: int) -> float:
        worker = view.workers[index]
        peak = _peak(worker, [*added.get(index, ()), job], expected)
        return peak / worker.capacity_tokens if view.mixed else peak

    return figure.least_by(able, expected, bound, exact)


def _future_memory(worker: Worker, expected: int, newcomers: Sequence[Job] = ()) -> tuple[int, int]:
    """The peak of a worker with `newcomers` and a new job of no input, and the number of jobs."""
    aside = len(worker.paused.jobs) + len(worker.swapped.jobs)
    rows = len(worker.running.jobs) + worker.waiting.count + aside + len(newcomers) + 1
    return _peak(worker, newcomers, expected, empty=1), rows


def _peak(worker: Worker, newcomers: Sequence[Job], expected: int, *, empty: int = 0) -> int:
    """M* of all jobs of a worker, of `newcomers`, and of `empty` new jobs of no input, if all ran
    at once.

    Jobs that have generated nothing have the most remaining tokens, all equally many. Together they
    come first in the order of Eq. 2-4, so a sum and a count represent them.
    """
    waiting = worker.waiting
    running = worker.running
    fresh = max(expected, 1)
    returned = waiting.returned
    new = [job.length for job in newcomers if not job.generated]
    jobs = [
        *returned,
        *worker.paused.jobs,
        *worker.swapped.jobs,
        *[job for job in newcomers if job.generated],
    ]
    count = waiting.count - len(returned) + len(new) + empty
    held = waiting.tokens - sum([job.length for job in returned]) + sum(new)
    table = running.table()
    used = np.append(table[:, 0], [job.length for job in jobs])
    generated = np.append(table[:, 1], [job.generated for job in jobs])
    if not len(used) and not worker.padded:
        return held + count * fresh
    remaining = np.maximum(expected - generated, 1)
    order = np.argsort(-remaining, kind="stable")
    used = used[order]
    remaining = remaining[order]
    rows = np.arange(count + 1, count + 1 + len(used))
    if worker.padded:
        longest = max([waiting.longest_new if waiting.count else 0, *new])
        first = count * (longest + fresh) if count else 0
        peaks = rows * (np.maximum(np.maximum.accumulate(used), longest) + remaining)
    else:
        first = held + count * fresh
        peaks = held + np.cumsum(used) + rows * remaining
    return max(first, int(peaks.max())) if len(peaks) else first


ROUTERS: dict[str, Router] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "max-min": max_min,
    "future-memory": future_memory,
}
