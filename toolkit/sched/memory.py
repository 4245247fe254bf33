"""What a worker's memory holds: the running jobs, the caches beside them, and what rows take.

`Residents` has the jobs that decode in the worker's rounds: each gains one token per step, so its
length is its length when it joined plus the steps since then. Sums are kept as integers, and a
job's own counters change only when it leaves. `ParkedCaches` has the jobs with caches that do not
decode.

`Footprint` is what rows take, and the one place that knows whether memory is paged or one slab. In
paged memory (vLLM) every row takes its own tokens, and they add up. A slab (BATON, and the engine
`rebatch`) takes the number of rows x the longest row. A footprint is a value: a policy takes that
of a worker's running jobs, adds the jobs that might join, and compares what they need with the
capacity. It never learns which layout it has. A paused cache takes its own tokens beside the rows
in both. What rows will take when they end is `toolkit.sched.kernels.future_peak`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from toolkit.sched.protocols import MemoryLaw
    from toolkit.sched.types import Job, Worker

LONGEST = 1 << 40  # tokens of a request at most, whatever the memory law says
UNKNOWN = -(1 << 60)  # a maximum that is computed when it is asked for
NO_PREFILLS: dict[Job, None] = {}  # of every worker that splits no prefill; never changed


class Residents:
    """Jobs in order of admission, and the tokens that they hold.

    `steps` counts the worker's decode steps so far. `base` is the sum of length - joined over the
    residents, and `committed` the sum of prompt + max_new_tokens. `prefilling` has the residents
    that may take more than one round to prefill: until then they do not grow, and the token that
    prefill gives counts as owed to them. The longest is computed when asked for, if it left.
    """

    __slots__ = (
        "_emits", "_longest", "_longest_promise", "_slots", "base", "committed", "jobs",
        "prefilling", "steps",
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
        self._slots: list[Job] = []  # a job that leaves gives its place to the last

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
        job.slot = len(self._slots)
        self._slots.append(job)
        self.jobs[job] = None
        self.base += job.length - steps
        self.committed += job.limit_tokens
        if self._longest != UNKNOWN and job.length - steps > self._longest:
            self._longest = job.length - steps
        if self._longest_promise != UNKNOWN and job.limit_tokens > self._longest_promise:
            self._longest_promise = job.limit_tokens

    def emitted(self, jobs: Iterable[Job]) -> None:
        """Prefill gave each of these residents its next token."""
        for job in jobs:
            job.length += 1
            job.generated += 1
            self.base += 1
            if self._longest != UNKNOWN and job.length - job.joined > self._longest:
                self._longest = job.length - job.joined

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
        last = self._slots.pop()
        if last is not job:
            self._slots[job.slot] = last
            last.slot = job.slot

    def miss(self, job: Job, steps: int) -> None:
        """The job had no part in `steps` decode steps of this round, counted already or not yet."""
        if steps and self._longest == job.length - job.joined:
            self._longest = UNKNOWN
        job.joined += steps
        self.base -= steps

    def table(self) -> NDArray[np.int64]:
        """A row [length, generated, max_new_tokens] for each resident, as of now: [n, 3].

        The order is that of `Job.slot`, so that what is sampled for one job does not depend on the
        order in which others left.
        """
        cells = array("q")
        steps = self.steps
        for job in self._slots:
            decoded = steps - job.joined
            cells.append(job.length + decoded)
            cells.append(job.generated + decoded)
            cells.append(job.max_new_tokens)
        return np.array(cells, dtype=np.int64).reshape(-1, 3)


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


class Footprint:
    """The memory that rows take of a paged worker, in tokens. A value: methods return others.

    A job that enters gets its first token from its prefill, if the worker's prefills give one.

    Attributes:
        rows: how many rows there are.
        capacity: the tokens that they may take.
        promised: the tokens of running and entering rows if each generates all that it may.
        used: tokens of rows with a cache, and of the rows that will be prefilled.
        fresh: tokens that the prefills to come will give.
    """

    __slots__ = ("_worker", "capacity", "fresh", "promised", "rows", "used")

    def __init__(
        self, worker: Worker, capacity: int, rows: int, used: int, fresh: int, promised: int
    ) -> None:
        self._worker = worker
        self.capacity = capacity
        self.rows = rows
        self.used = used
        self.fresh = fresh
        self.promised = promised

    @property
    def taken(self) -> int:
        """Tokens that the rows hold now."""
        return self.used

    @property
    def needs(self) -> int:
        """The most tokens taken until one step is done, including the prefill of entering jobs."""
        return self.used + self.fresh + self.rows

    def taken_with(self, length: int) -> int:
        """Tokens of the rows with another of `length` tokens, before its first token."""
        return self.used + length

    def promised_with(self, tokens: int) -> int:
        """The most tokens that the rows could reach with another that ends with `tokens`."""
        return self.promised + tokens

    def fits(self, length: int, limit: int, enters: bool = True, steps: int = 1) -> bool:
        """Whether one more row fits: after `steps` steps, all rows together take at most `limit`.

        With `enters` the row is prefilled, otherwise it joins with its cache.
        """
        needs = self.used + self.fresh + length + (self.rows + 1) * steps
        if enters:
            needs += self._worker.emits
        return needs <= limit

    def room(self, limit: int) -> int:
        """Decode steps until the rows take more than `limit`."""
        return (limit - self.used - self.fresh) // self.rows

    def widest(self, limit: int) -> int:
        """The length after one step of the longest job that `fits`; may be below any job's."""
        return limit - self.needs

    def beside(self, tokens: int) -> Footprint:
        """The rows on a device with so many tokens more of other caches, or less if negative."""
        capacity = self.capacity - tokens
        return Footprint(self._worker, capacity, self.rows, self.used, self.fresh, self.promised)

    def entered(self, job: Job) -> Footprint:
        """The rows and a job that will be prefilled."""
        worker = self._worker
        used = self.used + job.length
        fresh = self.fresh + worker.emits
        promised = self.promised + job.limit_tokens
        return Footprint(worker, self.capacity, self.rows + 1, used, fresh, promised)

    def joined(self, length: int) -> Footprint:
        """The rows and one of `length` tokens that has its cache; `promised` does not count it."""
        used = self.used + length
        return Footprint(
            self._worker, self.capacity, self.rows + 1, used, self.fresh, self.promised
        )

    def prefilled(self) -> Footprint:
        """After the prefills: jobs that entered are ordinary rows with their first tokens."""
        used = self.used + self.fresh
        return Footprint(self._worker, self.capacity, self.rows, used, 0, self.promised)

    def without(self, job: Job) -> Footprint:
        """The rows without a resident. Ask for it before any job joins."""
        used = self.used - self._worker.residents.holds(job)
        promised = self.promised - job.limit_tokens
        return Footprint(self._worker, self.capacity, self.rows - 1, used, self.fresh, promised)


class SlabFootprint(Footprint):
    """The memory of rows on a padded worker: the number of rows x the longest.

    A job that enters a slab is prefilled first, which also needs room. If it is prefilled apart
    (`joining` is "embed"), its cache lies beside the slab until it is embedded. Only one such cache
    counts, because the engine prefills fewer together when memory is short. If it is shaped into
    the batch ("shape"), all rows are that much longer for one pass. The working memory of passes is
    not counted here: the memory law says how much of the device is left for caches.

    Attributes:
        promised: the largest prompt + max_new_tokens of a row.
        longest: tokens of the longest row that has a cache.
        newcomers: how many rows will be prefilled.
        entering: the longest of their inputs.
        gone: the residents that `without` took out.
    """

    __slots__ = ("entering", "gone", "longest", "newcomers")

    def __init__(
        self,
        worker: Worker,
        capacity: int,
        rows: int,
        promised: int,
        longest: int = 0,
        newcomers: int = 0,
        entering: int = 0,
        gone: tuple[Job, ...] = (),
    ) -> None:
        super().__init__(worker, capacity, rows, 0, 0, promised)
        self.longest = longest
        self.newcomers = newcomers
        self.entering = entering
        self.gone = gone

    def _with(
        self, rows: int, promised: int, longest: int, newcomers: int, entering: int
    ) -> SlabFootprint:
        return SlabFootprint(
            self._worker, self.capacity, rows, promised, longest, newcomers, entering, self.gone
        )

    @property
    def taken(self) -> int:
        return self.rows * max(self.longest, self.entering)

    @property
    def needs(self) -> int:
        return max(self._sizes(self.rows, self.newcomers, self.longest, self.entering, 1))

    def taken_with(self, length: int) -> int:
        return (self.rows + 1) * max(self.longest, self.entering, length)

    def promised_with(self, tokens: int) -> int:
        return (self.rows + 1) * max(self.promised, tokens)

    def fits(self, length: int, limit: int, enters: bool = True, steps: int = 1) -> bool:
        longest = self.longest if enters else max(self.longest, length)
        entering = max(self.entering, length) if enters else self.entering
        stepped, passing = self._sizes(
            self.rows + 1, self.newcomers + enters, longest, entering, steps
        )
        return stepped <= limit and passing <= self.capacity

    def room(self, limit: int) -> int:
        width = self._width(self.rows, self.newcomers, self.longest, self.entering)
        return limit // self.rows - width

    def widest(self, limit: int) -> int:
        lengths = range(1, limit + 1)
        fitting = bisect_left(lengths, True, key=lambda length: not self.fits(length, limit))
        return fitting + 1 + self._worker.emits

    def beside(self, tokens: int) -> SlabFootprint:
        changed = self._with(self.rows, self.promised, self.longest, self.newcomers, self.entering)
        changed.capacity = self.capacity - tokens
        return changed

    def entered(self, job: Job) -> SlabFootprint:
        promised = max(self.promised, job.limit_tokens)
        entering = max(self.entering, job.length)
        return self._with(self.rows + 1, promised, self.longest, self.newcomers + 1, entering)

    def joined(self, length: int) -> SlabFootprint:
        longest = max(self.longest, length)
        return self._with(self.rows + 1, self.promised, longest, self.newcomers, self.entering)

    def prefilled(self) -> SlabFootprint:
        longest = self._width(self.rows, self.newcomers, self.longest, self.entering)
        return self._with(self.rows, self.promised, longest, 0, 0)

    def without(self, job: Job) -> SlabFootprint:
        residents = self._worker.residents
        gone = (*self.gone, job)
        stay = [other for other in residents.jobs if other not in gone]
        prefilling = [other.length for other in residents.prefilling if other not in gone]
        return SlabFootprint(
            self._worker,
            self.capacity,
            self.rows - 1,
            max([other.limit_tokens for other in stay], default=0),
            max([other.length + residents.steps - other.joined for other in stay], default=0),
            len(prefilling),
            max(prefilling, default=0),
            gone,
        )

    def _shapes(self, rows: int, newcomers: int) -> bool:
        """Whether newcomers are prefilled within a step of other rows, if there are others."""
        return self._worker.joining == "shape" and rows > newcomers

    def _width(self, rows: int, newcomers: int, longest: int, entering: int) -> int:
        """The slab's width before its first step, with tokens that prefills give before it."""
        if not newcomers:
            return longest
        return max(longest, entering + (0 if self._shapes(rows, newcomers) else self._worker.emits))

    def _sizes(
        self, rows: int, newcomers: int, longest: int, entering: int, steps: int
    ) -> tuple[int, int]:
        """Tokens of the slab after `steps` steps, and at most while entering jobs are prefilled."""
        width = self._width(rows, newcomers, longest, entering)
        if not newcomers:
            return rows * (width + steps), 0
        shaped = rows * entering if self._shapes(rows, newcomers) else entering
        return rows * (width + steps), rows * width + shaped


def footprint_of(worker: Worker) -> Footprint:
    """The footprint of the jobs that run on the worker."""
    residents = worker.residents
    rows = len(residents.jobs)
    capacity = worker.capacity_tokens
    if worker.joining is None:
        return Footprint(worker, capacity, rows, residents.used, 0, residents.committed)
    prefilling = residents.prefilling
    return SlabFootprint(
        worker,
        capacity,
        rows,
        residents.longest_promise,
        residents.longest,
        len(prefilling),
        max([job.length for job in prefilling]) if prefilling else 0,
    )


def no_rows(worker: Worker) -> Footprint:
    """The footprint of no job on the worker."""
    capacity = worker.capacity_tokens
    if worker.joining is None:
        return Footprint(worker, capacity, 0, 0, 0, 0)
    return SlabFootprint(worker, capacity, 0, 0)


def free_cache_tokens(worker: Worker) -> int:
    """Tokens free for caches on the device and in host memory together, as last reported."""
    device = worker.capacity_tokens - footprint_of(worker).taken - worker.held.tokens
    return device + worker.host_tokens - worker.swapped.tokens


def longest(memory: MemoryLaw, continuous: bool) -> int:
    """Prompt + output, in tokens, of the longest request that fits alone on the worker.

    In rounds (`continuous`) that is the whole capacity. In a static batch the memory law decides,
    by bisection, because the law is monotone.
    """
    if continuous:
        return memory.usable_tokens
    lengths = range(1, LONGEST + 1)
    return bisect_left(
        lengths, True, key=lambda n: bool(memory.max_batch(np.array([n]), 0, 0.0)[0] < 1)
    )
