"""The jobs with a KV cache on a worker, and what a round changes; bookkeeping is O(1) per round.

A resident is a job that decodes in the worker's rounds. Each resident gains one token per decode
step, so its length is its length when it joined plus the steps since then. `Residents` keeps sums
as integers, and updates a job's own counters only when the job leaves. `ParkedCaches` has the jobs
with caches that do not decode. `WorkerRounds` starts and ends rounds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from toolkit.sched.types import Batch, Job, Moves, RoundResult, Worker

# The columns of `Residents.table`.
LENGTH: Final = 0
GENERATED: Final = 1
LIMIT: Final = 2
JOINED: Final = 3
COLUMNS: Final = 4
UNKNOWN: Final = -(1 << 60)  # a sum or maximum that is computed when it is asked for
NO_PREFILLS: dict[Job, None] = {}  # of every worker that splits no prefill; never changed


class Residents:
    """Jobs in order of admission, and the tokens that they hold.

    `steps` counts the worker's decode steps so far. `base` is the sum of length - joined over the
    residents, and `committed` the sum of prompt + max_new_tokens. `prefilling` has the residents
    that may take more than one round to prefill: until then they do not grow, and the token that
    prefill gives counts as owed to them. The longest is computed when asked for, if it left.
    """

    __slots__ = (
        "_cells", "_emits", "_longest", "_longest_promise", "_matrix", "_slots", "base",
        "committed", "jobs", "prefilling", "steps",
    )  # fmt: skip

    def __init__(self) -> None:
        self.jobs: dict[Job, None] = {}
        self.steps = 0
        self.committed = 0
        self.prefilling = NO_PREFILLS
        self._emits = False  # whether prefills give a token
        self.base = 0
        self._longest = UNKNOWN  # the largest length - joined
        self._longest_promise = UNKNOWN
        self._slots: list[Job] = []
        # The table's cells row by row; `_matrix` is a view of them. None: nothing asked for it yet.
        # A cell of an `array` is written much faster than one of numpy's.
        self._cells: array[int] | None = None
        self._matrix: NDArray[np.int64] = np.zeros((0, COLUMNS), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def used(self) -> int:
        """Tokens of KV cache that the residents hold or are owed by an unfinished prefill."""
        return self.base + len(self.jobs) * self.steps + len(self.prefilling) * int(self._emits)

    @property
    def prefill_tokens(self) -> int:
        """Input tokens of the residents that are being prefilled."""
        return sum([job.length for job in self.prefilling]) if self.prefilling else 0

    @property
    def longest(self) -> int:
        """Tokens that the longest resident holds; 0 if there is none."""
        if not self.jobs:
            return 0
        if self._longest == UNKNOWN:
            self._longest = max([job.length - job.joined for job in self.jobs])
        return self._longest + self.steps

    @property
    def longest_promise(self) -> int:
        """The largest prompt + max_new_tokens of a resident; 0 if there is none."""
        if not self.jobs:
            return 0
        if self._longest_promise == UNKNOWN:
            self._longest_promise = max([job.limit_tokens for job in self.jobs])
        return self._longest_promise

    def join(self, job: Job) -> None:
        """The job decodes from now on, once its input is prefilled or its cache is back."""
        steps = self.steps
        job.joined = steps
        self.jobs[job] = None
        self.base += job.length - steps
        self.committed += job.limit_tokens
        if self._longest != UNKNOWN and job.length - steps > self._longest:
            self._longest = job.length - steps
        if self._longest_promise != UNKNOWN and job.limit_tokens > self._longest_promise:
            self._longest_promise = job.limit_tokens
        if self._cells is not None:
            self._write(job)

    def emitted(self, jobs: Iterable[Job]) -> None:
        """Prefill gave each of these residents its next token."""
        for job in jobs:
            job.length += 1
            job.generated += 1
            self.base += 1
            if self._longest != UNKNOWN and job.length - job.joined > self._longest:
                self._longest = job.length - job.joined
            if self._cells is not None:
                self._add(job, 1)

    def prefill_on(self, jobs: Iterable[Job], *, emits: bool) -> None:
        """Exactly these jobs are being prefilled. `emits`: whether prefill gives a token."""
        self.prefilling = dict.fromkeys(jobs)
        self._emits = emits

    def holds(self, job: Job) -> int:
        """Tokens of KV cache that a resident holds or is owed."""
        return job.length + self.steps - job.joined + int(self._emits and job in self.prefilling)

    def leave(self, job: Job) -> None:
        """The job ended or its cache is dropped. Updates the job's own counters."""
        del self.jobs[job]
        if self.prefilling:
            self.prefilling.pop(job, None)
        decoded = self.steps - job.joined
        self.base -= job.length - job.joined
        self.committed -= job.limit_tokens
        if self._longest == job.length - job.joined:
            self._longest = UNKNOWN
        if self._longest_promise == job.limit_tokens:
            self._longest_promise = UNKNOWN
        job.length += decoded
        job.generated += decoded
        cells = self._cells
        if cells is not None:  # the last slot moves into the job's
            last = self._slots.pop()
            if last is not job:
                at = COLUMNS * job.slot
                end = COLUMNS * last.slot
                for k in range(COLUMNS):
                    cells[at + k] = cells[end + k]
                self._slots[job.slot] = last
                last.slot = job.slot

    def miss(self, job: Job, steps: int) -> None:
        """The job had no part in `steps` decode steps of this round, counted already or not yet."""
        if steps and self._longest == job.length - job.joined:
            self._longest = UNKNOWN
        job.joined += steps
        self.base -= steps
        if self._cells is not None:
            self._add(job, -steps)
            self._cells[COLUMNS * job.slot + JOINED] += steps

    def table(self) -> NDArray[np.int64]:
        """An array [at least n, 4] with columns LENGTH, GENERATED, LIMIT, JOINED; row `Job.slot`
        is the job's, and only the first n rows, one per resident, mean anything.

        Add `steps` to the first two columns. The array is valid until a job joins or leaves. It is
        built at the first call, so policies that do not need it pay nothing.
        """
        if self._cells is None:
            self._lengthen(64)
            for job in self.jobs:
                self._write(job)
        return self._matrix

    def _lengthen(self, rows: int) -> None:
        """Make a new table of so many rows, with what the old one has."""
        cells = array("q", bytes(8 * COLUMNS * rows))
        matrix = np.frombuffer(cells, dtype=np.int64).reshape(rows, COLUMNS)
        matrix[: len(self._matrix)] = self._matrix
        self._cells = cells
        self._matrix = matrix

    def _write(self, job: Job) -> None:
        slot = len(self._slots)
        job.slot = slot
        self._slots.append(job)
        if slot == len(self._matrix):
            self._lengthen(2 * slot)
        cells = self._cells
        at = COLUMNS * slot
        joined = job.joined
        assert cells is not None
        cells[at] = job.length - joined
        cells[at + GENERATED] = job.generated - joined
        cells[at + LIMIT] = job.max_new_tokens
        cells[at + JOINED] = joined

    def _add(self, job: Job, tokens: int) -> None:
        """Add to the job's length and to its generated tokens."""
        cells = self._cells
        at = COLUMNS * job.slot
        assert cells is not None
        cells[at] += tokens
        cells[at + GENERATED] += tokens


class ParkedCaches:
    """Jobs with caches that are paused on the device, or swapped out to host memory.

    They are in order of arrival there; `tokens` are those that they hold.
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
    held = worker.held
    swapped = worker.swapped
    for job in moves.swap_out:
        if job in held.jobs:
            held.take(job)
            swapped.put(job)
    for job in moves.swap_in:
        if job in swapped.jobs:
            swapped.take(job)
            held.put(job)


class WorkerRounds:
    """The rounds of all workers. Jobs that its methods return have ended for the scheduler.

    It decides nothing: a `Batch` says which jobs enter, are evicted or moved, and its methods
    update the worker. If a job is gone but the engine still holds its cache, the worker's next
    round names it, so that the engine can drop the cache.
    """

    def __init__(self) -> None:
        # By worker: jobs that are gone, with caches that the engine still holds.
        self._cancelled: dict[int, list[Job]] = {}
        self._released: dict[int, list[Job]] = {}

    def begin(self, worker: Worker, batch: Batch, now_s: float) -> None:
        """Start a round. Adds to `batch` the jobs cancelled or released since the last round."""
        residents = worker.residents
        jobs = batch.jobs
        for job in batch.evict:
            self.evict(worker, job, now_s)
        if batch.moves is not None:
            moves = batch.moves
            held = worker.held
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
        for job in jobs:
            residents.join(job)
            job.slices += 1
        if batch.chunk_tokens and jobs:
            residents.prefill_on((*residents.prefilling, *batch.jobs), emits=worker.emits > 0)
        if self._cancelled and worker.index in self._cancelled:
            batch.evict += tuple(self._cancelled.pop(worker.index))
        if self._released and worker.index in self._released:
            batch.release = tuple(self._released.pop(worker.index))

    def finish(
        self, worker: Worker, batch: Batch, result: RoundResult, jobs: dict[str, Job], now_s: float
    ) -> list[Job]:
        """End a round, failed or not. Returns the jobs that ended in it or were cancelled."""
        residents = worker.residents
        if batch.jobs or residents.prefilling:
            if result.joined is not None or residents.prefilling:
                self._finish_prefills(worker, batch, result)
            elif worker.emits:
                residents.emitted(batch.jobs)
        if result.steps:
            residents.steps += result.steps
            worker.stepped_s = now_s
        for request_id, steps in result.missed:
            residents.miss(jobs[request_id], steps)
        ended = [jobs[request_id] for request_id in result.ended]
        for job in ended:
            residents.leave(job)
        if self._cancelled and worker.index in self._cancelled:
            gone = self._cancelled[worker.index]
            left = [job for job in gone if job.request_id not in result.ended]
            self._cancelled[worker.index] = left
            for job in left:
                if job in residents.jobs:
                    residents.leave(job)
                    ended.append(job)
        if result.failure == "crashed":
            return ended
        if batch.moves is not None and batch.moves.overlap:
            _transfer(worker, batch.moves)  # beside the round: they are complete
        if worker.row_limit < worker.slots:
            worker.row_limit = min(2 * worker.row_limit, worker.slots)
        for request_id in result.dropped:
            dropped = jobs.get(request_id)  # it may have been cancelled meanwhile
            if dropped is not None and holds(worker, dropped):
                self.evict(worker, dropped, now_s)
        return ended

    def run_out_of_memory(
        self, worker: Worker, result: RoundResult, jobs: dict[str, Job]
    ) -> Job | None:
        """A round ran out of memory: half of the dropped jobs may enter with the next round.

        Returns a job that was dropped although it was alone on the device.
        """
        if not result.dropped:
            return None
        dropped = [
            job for request_id in result.dropped if (job := jobs.get(request_id)) is not None
        ]
        stay = len(worker.residents)
        worker.row_limit = max(stay + len(dropped) // 2, 1)
        return dropped[0] if len(dropped) == 1 and not (stay or worker.held) else None

    def _finish_prefills(self, worker: Worker, batch: Batch, result: RoundResult) -> None:
        """Jobs that joined get the prefill's token and the steps since; the others get neither."""
        residents = worker.residents
        emits = worker.emits > 0
        waited = dict.fromkeys((*residents.prefilling, *batch.jobs))
        joined = result.joined
        after = dict(joined) if joined is not None else {job.request_id: 0 for job in waited}
        for job in waited:
            residents.miss(job, after.get(job.request_id, result.steps))
        residents.prefill_on([job for job in waited if job.request_id not in after], emits=emits)
        if emits:
            residents.emitted([job for job in waited if job.request_id in after])

    def crash(self, worker: Worker, now_s: float) -> Job | None:
        """Evict all jobs of a dead worker, halve its limit on rows; returns a job that ran alone.

        The jobs keep their order. `lose`, which is called next, drops caches in host memory.
        """
        rows = len(worker.residents)
        jobs = [*worker.residents.jobs, *worker.held.jobs]
        for job in reversed(jobs):
            self.evict(worker, job, now_s)
        worker.row_limit = max(rows // 2, 1)
        return jobs[0] if len(jobs) == 1 else None

    def lose(self, worker: Worker, now_s: float) -> None:
        """The worker's process is gone, together with the caches in host memory."""
        for job in reversed([*worker.residents.jobs, *worker.held.jobs, *worker.swapped.jobs]):
            self.evict(worker, job, now_s)
        self._released.pop(worker.index, None)
        self._cancelled.pop(worker.index, None)

    def evict(self, worker: Worker, job: Job, now_s: float) -> None:
        """Drop the job's cache and put it first in its worker's inbox; its tokens are kept.

        To keep the order, call it for the last admitted job first.
        """
        if job in worker.residents.jobs:
            job.waiting_since_s = now_s
        forget(worker, job)
        job.evictions += 1
        job.home = worker.index
        worker.inbox.appendleft(job)

    def release(self, worker: Worker, job: Job, now_s: float) -> None:
        """Take a job off its worker between two rounds, to be routed again."""
        worker.residents.leave(job)
        job.reroutes += 1
        job.waiting_since_s = now_s
        self._released.setdefault(worker.index, []).append(job)

    def cancel(self, worker: Worker, job: Job) -> bool:
        """Cancel a job with a cache here. Returns whether it ended at once; else with the round."""
        self._cancelled.setdefault(worker.index, []).append(job)
        if job in worker.residents.jobs and worker.running is not None:
            return False
        forget(worker, job)
        return True
