"""The jobs with a KV cache on a worker, and bookkeeping that costs O(1) per round.

A resident is a job that decodes in the worker's rounds. Each resident gains one token per decode
step, so its length is its length when it joined plus the steps since then. `Residents` keeps sums
as integers, and updates a job's own counters only when the job leaves. `ParkedCaches` and the
functions after it keep the caches of jobs that do not decode: paused on the device, or swapped to
host memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from toolkit.sched.types import Job, Moves, Worker

LENGTH, GENERATED, LIMIT, JOINED = range(4)  # the rows of `Residents.table`


class Residents:
    """Jobs in order of admission, and the tokens that they hold.

    `steps` counts the worker's decode steps so far. `base` is the sum of length - joined over the
    residents, and `committed` the sum of prompt + max_new_tokens. `prefilling` has the residents
    that may take more than one round to prefill: until then they do not grow, and the token that
    prefill gives counts as owed to them. The longest is computed at the first query, and again
    after it left.
    """

    __slots__ = (
        "_emits",
        "_longest",
        "_longest_promise",
        "_slots",
        "_table",
        "base",
        "committed",
        "jobs",
        "prefilling",
        "steps",
    )

    def __init__(self) -> None:
        self.jobs: dict[Job, None] = {}
        self.steps = 0
        self.committed = 0
        self.prefilling: dict[Job, None] = {}
        self._emits = False  # whether prefills give a token
        self.base = 0
        self._longest: int | None = None  # the largest length - joined; None: to be computed
        self._longest_promise: int | None = None
        self._slots: list[Job] = []
        self._table: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def used(self) -> int:
        """Tokens of KV cache that the residents hold or are owed by a prefill that has not
        ended.
        """
        return self.base + len(self.jobs) * self.steps + len(self.prefilling) * self._emits

    @property
    def longest(self) -> int:
        """Tokens that the longest resident holds; 0 if there is none."""
        if not self.jobs:
            return 0
        if self._longest is None:
            self._longest = max([job.length - job.joined for job in self.jobs])
        return self._longest + self.steps

    @property
    def longest_promise(self) -> int:
        """The largest prompt + max_new_tokens of a resident; 0 if there is none."""
        if not self.jobs:
            return 0
        if self._longest_promise is None:
            self._longest_promise = max([job.limit_tokens for job in self.jobs])
        return self._longest_promise

    def join(self, job: Job) -> None:
        """The job decodes from now on, once its input is prefilled or its cache is back."""
        steps = self.steps
        job.joined = steps
        self.jobs[job] = None
        self.base += job.length - steps
        self.committed += job.limit_tokens
        if self._longest is not None:
            self._longest = max(self._longest, job.length - steps)
        if self._longest_promise is not None:
            self._longest_promise = max(self._longest_promise, job.limit_tokens)
        if self._table is not None:
            self._write(job)

    def emitted(self, jobs: Iterable[Job]) -> None:
        """Prefill gave each of these residents its next token."""
        for job in jobs:
            job.length += 1
            job.generated += 1
            self.base += 1
            if self._longest is not None:
                self._longest = max(self._longest, job.length - job.joined)
            if self._table is not None:
                self._table[:LIMIT, job.slot] += 1

    def prefill_on(self, jobs: Iterable[Job], *, emits: bool) -> None:
        """Exactly these jobs are being prefilled. `emits`: whether prefill gives a token."""
        self.prefilling = dict.fromkeys(jobs)
        self._emits = emits

    def holds(self, job: Job) -> int:
        """Tokens of KV cache that a resident holds or is owed."""
        return job.length + self.steps - job.joined + (self._emits and job in self.prefilling)

    def leave(self, job: Job) -> None:
        """The job ended or its cache is dropped. Updates the job's own counters."""
        del self.jobs[job]
        self.prefilling.pop(job, None)
        decoded = self.steps - job.joined
        self.base -= job.length - job.joined
        self.committed -= job.limit_tokens
        if self._longest == job.length - job.joined:
            self._longest = None
        if self._longest_promise is not None and self._longest_promise == job.limit_tokens:
            self._longest_promise = None
        job.length += decoded
        job.generated += decoded
        if self._table is not None:
            self._erase(job)

    def miss(self, job: Job, steps: int) -> None:
        """The job had no part in `steps` decode steps, already counted or to be counted with this
        round.
        """
        if steps and self._longest == job.length - job.joined:
            self._longest = None
        job.joined += steps
        self.base -= steps
        if self._table is not None:
            self._table[:LIMIT, job.slot] -= steps
            self._table[JOINED, job.slot] += steps

    def table(self) -> NDArray[np.int64]:
        """An array [4, n] with rows LENGTH, GENERATED, LIMIT, JOINED; column `Job.slot` is the
        job's.

        Add `steps` to the first two rows. The array is a view that is valid until a job joins or
        leaves. It is built at the first call, so policies that do not need it pay nothing.
        """
        if self._table is None:
            self._table = np.zeros((4, 64), dtype=np.int64)
            for job in self.jobs:
                self._write(job)
        return self._table[:, : len(self._slots)]

    def _write(self, job: Job) -> None:
        assert self._table is not None
        job.slot = slot = len(self._slots)
        self._slots.append(job)
        if slot == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
        joined = job.joined
        self._table[:, slot] = (
            job.length - joined,
            job.generated - joined,
            job.max_new_tokens,
            joined,
        )

    def _erase(self, job: Job) -> None:
        """Free the job's slot and move the last slot into it."""
        assert self._table is not None
        last = self._slots.pop()
        if last is not job:
            self._table[:, job.slot] = self._table[:, last.slot]
            self._slots[job.slot] = last
            last.slot = job.slot


# Caches of jobs that do not decode: paused on the device, or swapped out to host memory.
#
# A round's `Moves` say which cache goes where. These functions update the worker's state, when the
# round starts and when it ends. A cache that no `Moves` names stays where it is, so policies that
# do not preempt pay nothing.


class ParkedCaches:
    """Jobs with caches in one place, in order of arrival there, and the tokens that they
    hold.
    """

    __slots__ = ("jobs", "tokens")

    def __init__(self) -> None:
        self.jobs: dict[Job, None] = {}
        self.tokens = 0

    def __len__(self) -> int:
        return len(self.jobs)

    def put(self, job: Job) -> None:
        """The job's cache is here from now on; its length stays the same."""
        self.jobs[job] = None
        self.tokens += job.length

    def take(self, job: Job) -> None:
        """The job's cache is no longer here."""
        del self.jobs[job]
        self.tokens -= job.length


def begin(worker: Worker, moves: Moves, now_s: float) -> None:
    """Apply the moves at the start of a round: pause, swap, and make resumed jobs residents
    again.
    """
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
    """The round has ended, so the transfers that overlapped with it are complete."""
    if moves.overlap:
        _transfer(worker, moves)


def holds(worker: Worker, job: Job) -> bool:
    """Whether the worker keeps the job's cache, on the device or in host memory."""
    return job in worker.residents.jobs or job in worker.held.jobs or job in worker.swapped.jobs


def forget(worker: Worker, job: Job) -> None:
    """Drop the job's cache wherever the worker keeps it. Updates the job's own counters."""
    if job in worker.residents.jobs:
        worker.residents.leave(job)
    elif job in worker.held.jobs:
        worker.held.take(job)
    else:
        worker.swapped.take(job)


def _transfer(worker: Worker, moves: Moves) -> None:
    """Move the caches, except those of jobs that were cancelled meanwhile."""
    held, swapped = worker.held, worker.swapped
    for job in moves.swap_out:
        if job in held.jobs:
            held.take(job)
            swapped.put(job)
    for job in moves.swap_in:
        if job in swapped.jobs:
            swapped.take(job)
            held.put(job)
