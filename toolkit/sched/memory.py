"""What rows take of a worker's memory: the one place that knows whether it is paged or one slab.

In paged memory (vLLM) every row takes its own tokens, and they add up. A slab (BATON, and the
engine `rebatch`) takes the number of rows x the longest row. A footprint is a value: a policy takes
the one of a worker's running jobs, adds the jobs that might join, and compares what they need with
the capacity. It never learns which layout it has. A paused cache takes its own tokens beside the
rows in both. What rows will take when they end is `toolkit.sched.kernels.future_peak`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection

import numpy as np

from toolkit.sched.protocols import MemoryLaw
from toolkit.sched.types import NO_LIMIT, Job, Worker


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
    """

    __slots__ = ("entering", "longest", "newcomers")

    def __init__(
        self,
        worker: Worker,
        capacity: int,
        rows: int,
        promised: int,
        longest: int = 0,
        newcomers: int = 0,
        entering: int = 0,
    ) -> None:
        super().__init__(worker, capacity, rows, 0, 0, promised)
        self.longest = longest
        self.newcomers = newcomers
        self.entering = entering

    def _with(
        self, rows: int, promised: int, longest: int, newcomers: int, entering: int
    ) -> SlabFootprint:
        return SlabFootprint(
            self._worker, self.capacity, rows, promised, longest, newcomers, entering
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


def footprint_of(worker: Worker, gone: Collection[Job] = ()) -> Footprint:
    """The footprint of the jobs that run on the worker, without those that are `gone`."""
    running = worker.running
    capacity = worker.capacity_tokens
    if worker.joining is None:
        used = running.used
        promised = running.committed
        for job in gone:
            used -= running.holds(job)
            promised -= job.limit_tokens
        return Footprint(worker, capacity, len(running.jobs) - len(gone), used, 0, promised)
    slab = SlabFootprint(worker, capacity, len(running.jobs) - len(gone), 0)
    # by hand: compiled, it is several times as fast
    for job in running.jobs:
        if gone and job in gone:
            continue
        slab.promised = max(slab.promised, job.limit_tokens)
        slab.longest = max(slab.longest, job.length + running.steps - job.joined)
        if running.prefilling and job in running.prefilling:
            slab.newcomers += 1
            slab.entering = max(slab.entering, job.length)
    return slab


def no_rows(worker: Worker) -> Footprint:
    """The footprint of no job on the worker."""
    capacity = worker.capacity_tokens
    if worker.joining is None:
        return Footprint(worker, capacity, 0, 0, 0, 0)
    return SlabFootprint(worker, capacity, 0, 0)


def free_cache_tokens(worker: Worker) -> int:
    """Tokens free for caches on the device and in host memory together, as last reported."""
    device = worker.capacity_tokens - footprint_of(worker).taken - worker.paused.tokens
    return device + worker.host_tokens - worker.swapped.tokens


def longest(memory: MemoryLaw, continuous: bool) -> int:
    """Prompt + output, in tokens, of the longest request that fits alone on the worker.

    Where passes keep their caches (`continuous`) that is the whole capacity. In a slice the memory
    law decides, by bisection, because the law is monotone.
    """
    if continuous:
        return memory.usable_tokens
    lengths = range(1, NO_LIMIT + 1)
    return bisect_left(
        lengths, True, key=lambda n: bool(memory.max_batch(np.array([n]), 0, 0.0)[0] < 1)
    )
