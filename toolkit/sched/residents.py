"""The jobs whose KV cache is on a worker, with lazy accounting: a round costs O(1) here, however
many jobs go on.

Every resident gains one token per decode step, so a job's length is what it was when it joined plus
the steps since. Sums are kept as integers; a job's own counters are brought up to date when it
leaves.
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
    """Jobs in the order of their admission, and the tokens that they hold.

    `steps` counts the worker's decode steps so far; `base` is the sum of length - joined,
    `committed` that of prompt + max_new_tokens. `prefilling` are those whose prefill may take more
    than a round: until it ends they do not grow, and the token that it gives is owed to them. The
    longest is looked for only once somebody has asked, and again where it has left.
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
        self._longest: int | None = None  # the largest length - joined; None: to be looked for
        self._longest_promise: int | None = None
        self._slots: list[Job] = []
        self._table: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def used(self) -> int:
        """Tokens of KV cache that the residents hold, prompt and generated, and those owed to who
        is prefilled.
        """
        return self.base + len(self.jobs) * self.steps + len(self.prefilling) * self._emits

    @property
    def longest(self) -> int:
        """Tokens that the longest of them holds; 0 where there is none."""
        if not self.jobs:
            return 0
        if self._longest is None:
            self._longest = max([job.length - job.joined for job in self.jobs])
        return self._longest + self.steps

    @property
    def longest_promise(self) -> int:
        """The largest prompt + max_new_tokens; 0 where nobody is there."""
        if not self.jobs:
            return 0
        if self._longest_promise is None:
            self._longest_promise = max([job.limit_tokens for job in self.jobs])
        return self._longest_promise

    def join(self, job: Job) -> None:
        """The job decodes from here on, once its input is prefilled or its cache is back."""
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
        """Prefill gave each of `jobs`, which are resident, its next token."""
        for job in jobs:
            job.length += 1
            job.generated += 1
            self.base += 1
            if self._longest is not None:
                self._longest = max(self._longest, job.length - job.joined)
            if self._table is not None:
                self._table[:LIMIT, job.slot] += 1

    def prefill_on(self, jobs: Iterable[Job], *, emits: bool) -> None:
        """These are still being prefilled, and nobody else is."""
        self.prefilling = dict.fromkeys(jobs)
        self._emits = emits

    def holds(self, job: Job) -> int:
        """Tokens of KV cache that a resident holds, and the one owed to it."""
        return job.length + self.steps - job.joined + (self._emits and job in self.prefilling)

    def leave(self, job: Job) -> None:
        """The job ended or its cache is dropped; its counters are right from here on."""
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
        """The job had no part in so many of the steps that are counted already, or will be when
        this round's are.
        """
        if steps and self._longest == job.length - job.joined:
            self._longest = None
        job.joined += steps
        self.base -= steps
        if self._table is not None:
            self._table[:LIMIT, job.slot] -= steps
            self._table[JOINED, job.slot] += steps

    def table(self) -> NDArray[np.int64]:
        """Rows LENGTH, GENERATED, LIMIT, JOINED [4, n] in the order of `Job.slot`; add `steps` to
        the first two.

        A view that is valid until a job joins or leaves. Costs nothing until it is asked for the
        first time.
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
        """The last slot moves to the place of the one that is free."""
        assert self._table is not None
        last = self._slots.pop()
        if last is not job:
            self._table[:, job.slot] = self._table[:, last.slot]
            self._slots[job.slot] = last
            last.slot = job.slot


# Caches that are kept while their jobs do not decode: paused on the device, or swapped out to
# host memory.
#
# A round says in `Moves` whose cache goes where; these functions make it so in a worker's books,
# when the round starts and when it ends. What no `Moves` names stays where it is, so policies
# that do not preempt pay nothing.


class ParkedCaches:
    """Jobs whose caches are kept in one place, in the order in which they came there, and the
    tokens that they hold.
    """

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
    """A round starts: what is paused or swapped out stops decoding, what is resumed is resident
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
    """The round has ended: transfers that went on beside it are done."""
    if moves.overlap:
        _transfer(worker, moves)


def holds(worker: Worker, job: Job) -> bool:
    """Whether the job's cache is on the worker."""
    return job in worker.residents.jobs or job in worker.held.jobs or job in worker.swapped.jobs


def forget(worker: Worker, job: Job) -> None:
    """The job's cache is dropped, wherever on the worker it is; its counters are right from here
    on.
    """
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
