"""Caches that are kept while their jobs do not decode: paused on the device, or swapped out to host memory.

A round says in `Moves` whose cache goes where; these functions make it so in a worker's books, when the round starts
and when it ends. What no `Moves` names stays where it is, so policies that do not preempt pay nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.sched.types import Job, Moves, Worker


class Shelf:
    """Jobs whose caches are kept in one place, in the order in which they came there, and the tokens that they hold."""

    __slots__ = ("jobs", "tokens")

    def __init__(self) -> None:
        self.jobs: dict[Job, None] = {}
        self.tokens = 0

    def __len__(self) -> int:
        return len(self.jobs)

    def put(self, job: Job) -> None:
        """The job's cache is here from now on; its length stays as it is."""
        self.jobs[job] = None
        self.tokens += job.length

    def take(self, job: Job) -> None:
        """The job's cache is here no more."""
        del self.jobs[job]
        self.tokens -= job.length


def begin(worker: Worker, moves: Moves, now_s: float) -> None:
    """A round starts: what is paused or swapped out stops decoding, what is resumed is resident again."""
    residents, held = worker.residents, worker.held
    for job in (*moves.pause, *moves.swap_out):
        if job in residents.jobs:
            residents.leave(job)
            held.put(job)
            job.waiting_since_s = now_s
    if not moves.overlap:
        _transfer(worker, moves)
    for job in moves.promote:
        job.promoted_at = job.generated
    for job in moves.resume:
        held.take(job)
        residents.join(job)


def finish(worker: Worker, moves: Moves) -> None:
    """The round has ended: transfers that went on beside it are done."""
    if moves.overlap:
        _transfer(worker, moves)


def holds(worker: Worker, job: Job) -> bool:
    """Whether the job's cache is on the worker."""
    return job in worker.residents.jobs or job in worker.held.jobs or job in worker.swapped.jobs


def forget(worker: Worker, job: Job) -> None:
    """The job's cache is dropped, wherever on the worker it is; its counters are right from here on."""
    if job in worker.residents.jobs:
        worker.residents.leave(job)
    elif job in worker.held.jobs:
        worker.held.take(job)
    else:
        worker.swapped.take(job)


def _transfer(worker: Worker, moves: Moves) -> None:
    """Those who were cancelled meanwhile have gone."""
    held, swapped = worker.held, worker.swapped
    for job in moves.swap_out:
        if job in held.jobs:
            held.take(job)
            swapped.put(job)
    for job in moves.swap_in:
        if job in swapped.jobs:
            swapped.take(job)
            held.put(job)
