"""Routers: which worker a request goes to, for policies that queue requests at workers.

A router is a function of the view that gives each pooled job a worker, in the pool's order; a
parameter of the policy names it. It counts work in tokens, and knows of output lengths only those
of requests that ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from toolkit.sched.types import Job, Worker
from toolkit.sched.view import View, WorkerFigure

# Maps the view to a worker for each pooled job.
Router = Callable[[View], Sequence[int]]


def round_robin(view: View) -> Sequence[int]:
    """In turn by order of arrival."""
    alive = view.alive
    return [alive[job.ticket % len(alive)].index for job in view.pool]


def least_loaded(view: View) -> Sequence[int]:
    """To the worker with the fewest outstanding tokens: held by its jobs and expected of them."""
    return _by_load(view, longest_first=False)


def max_min(view: View) -> Sequence[int]:
    """Like least-loaded, the longest request that came at once first (SCLS 4.5, Eq. 11)."""
    return _by_load(view, longest_first=True)


def future_memory(view: View) -> Sequence[int]:
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
            figure.write(index, expected, _future_memory(view.workers[index], expected, new_jobs))
    return homes


def _by_load(view: View, *, longest_first: bool) -> list[int]:
    expected = view.finished.mean()
    figure = view.figure("outstanding", _outstanding)
    tokens = [job.length + max(expected - job.generated, 1) for job in view.pool]
    return to_least(view, figure, expected, tokens, longest_first=longest_first)


def to_least(
    view: View, figure: WorkerFigure, expected: int, tokens: Sequence[int], *, longest_first: bool
) -> list[int]:
    """Give each pooled job to the worker with the least figure, which grows by the job's `tokens`.

    Jobs are given in order of arrival, or with `longest_first` in order of their inputs' lengths.
    """
    pool = view.pool
    order = list(range(len(pool)))
    if longest_first:
        order.sort(key=lambda k: -pool[k].length)
    homes = [-1] * len(pool)
    for k in order:
        homes[k] = figure.least(view.alive, expected)
        figure.add(homes[k], tokens[k])
    return homes


def _outstanding(worker: Worker, expected: int) -> int:
    """Tokens that a worker's jobs hold and are expected to add."""
    running = worker.running
    waiting = worker.waiting
    paused = worker.paused
    swapped = worker.swapped
    tokens = waiting.tokens + paused.tokens + swapped.tokens + running.used
    for job in running.jobs:
        tokens += max(expected - job.generated - (running.steps - job.joined), 1)
    returned = waiting.returned
    tokens += (waiting.count - len(returned)) * max(expected, 1)
    for job in (*returned, *paused.jobs, *swapped.jobs):
        tokens += max(expected - job.generated, 1)
    return tokens


def _lowest_peak(
    view: View, figure: WorkerFigure, added: Mapping[int, Sequence[Job]], job: Job, expected: int
) -> int:
    """The worker with the lowest peak of memory, with the job and those `added` to it before."""
    if not job.generated and not view.workers[0].padded:
        # A new job has the most remaining tokens, so it comes first in the order of Eq. 2-4: it
        # raises the peak by its input.
        return figure.least(view.alive, expected)

    def exact(worker: Worker) -> int:
        return _peak(worker, [*added.get(worker.index, ()), job], expected)

    if job.generated:
        return min(view.alive, key=exact).index
    return figure.least_by(view.alive, expected, exact)


def _future_memory(worker: Worker, expected: int, newcomers: Sequence[Job] = ()) -> int:
    """The peak of a worker with `newcomers` and a new job of no input."""
    return _peak(worker, newcomers, expected, empty=1)


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
    used: list[int] = []
    remaining: list[int] = []
    for job in running.jobs:
        decoded = running.steps - job.joined
        used.append(job.length + decoded)
        remaining.append(max(expected - job.generated - decoded, 1))
    for job in jobs:
        used.append(job.length)
        remaining.append(max(expected - job.generated, 1))
    if worker.padded:
        new += [job.length for job in waiting.all_jobs() if not job.generated]
        held = max(new, default=0)
        first = count * (held + fresh)
    else:
        first = held + count * fresh
    if not used:
        return first
    from toolkit.sched.kernels import peak_to_come

    return max(first, peak_to_come(used, remaining, worker.padded, count, held))


ROUTERS: dict[str, Router] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "max-min": max_min,
    "future-memory": future_memory,
}
