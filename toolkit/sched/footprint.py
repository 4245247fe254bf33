"""The memory that rows take on a worker: the one place that knows whether it is paged or one slab.

In paged memory (vLLM), every row takes its own tokens, and they add up. A slab (BATON, and the
engine `rebatch`) takes the number of rows x the longest row. A policy gets the footprint of a
worker's residents, adds the jobs that might join, and compares the result with the capacity. It
never learns which layout it has. A paused cache takes its own tokens beside the rows in both.

A job that enters a slab is prefilled first, which also needs room. If it is prefilled apart
(`joining` is "embed"), its cache lies beside the slab until it is embedded. Only one such cache
counts, because the engine prefills fewer together when memory is short. If it is shaped into the
batch ("shape"), all rows are that much longer for one pass. The working memory of passes is not
counted here: the memory law says how much of the device is left for caches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from toolkit.sched.protocols import MemoryLaw
    from toolkit.sched.types import Job, Worker

LONGEST = 1 << 40  # tokens of a request at most, whatever the memory law says


class Footprint:
    """The memory of rows on a paged worker, in tokens; initially of its residents.

    A job that enters gets its first token from its prefill. `rows` is the number of rows,
    `capacity` the tokens that they may take, and `promised` the tokens of residents and entering
    jobs if each generates all that it may.
    """

    __slots__ = ("_worker", "capacity", "fresh", "promised", "rows", "used")

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.rows = 0
        self.capacity = worker.capacity_tokens
        self.promised = 0
        self.used = 0  # tokens of rows with a cache, and of those that will be prefilled
        self.fresh = 0  # tokens that the prefills to come will give
        self.reset()

    def of(self, worker: Worker) -> Footprint:
        """Make this the footprint of the residents of `worker`, which has the same layout."""
        self._worker = worker
        return self.reset()

    def reset(self) -> Footprint:
        """Reset to the worker's residents as they are now."""
        worker = self._worker
        residents = worker.residents
        self.rows = rows = len(residents.jobs)
        self.capacity = worker.capacity_tokens
        self.promised = residents.committed
        self.used = (
            residents.used if residents.prefilling else residents.base + rows * residents.steps
        )
        self.fresh = 0
        return self

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

    def enter(self, job: Job) -> None:
        """Add a job that will be prefilled."""
        self.rows += 1
        self.used += job.length
        self.fresh += self._worker.emits
        self.promised += job.limit_tokens

    def join(self, length: int) -> None:
        """Add a row of `length` tokens that has its cache. `promised` does not count it."""
        self.rows += 1
        self.used += length

    def prefilled(self) -> None:
        """The prefills are done: jobs that entered are ordinary rows with their first tokens."""
        self.used += self.fresh
        self.fresh = 0

    def leave(self, job: Job) -> None:
        """Remove a resident. Call it before any job joins."""
        residents = self._worker.residents
        self.rows -= 1
        self.used -= residents.holds(job)
        self.promised -= job.limit_tokens

    def emptied(self) -> Footprint:
        """This footprint without any rows."""
        self.rows = self.used = self.fresh = self.promised = 0
        return self


class SlabFootprint(Footprint):
    """The memory of rows on a padded worker: the number of rows x the longest.

    `promised` is the largest prompt + max_new_tokens of a row. The worker's `joining` says how
    entering jobs join.
    """

    __slots__ = ("_entering", "_left", "_lengths", "_longest", "_newcomers", "_promises")

    def __init__(self, worker: Worker) -> None:
        self._longest = 0  # over the rows that have a cache
        self._newcomers = 0
        self._entering = 0  # the longest input that is or will be prefilled
        self._left: set[Job] = set()
        # residents' lengths, ascending; filled when the first one leaves
        self._lengths: list[int] = []
        self._promises: list[int] = []
        super().__init__(worker)

    def reset(self) -> Footprint:
        residents = self._worker.residents
        self.rows = len(residents.jobs)
        self.capacity = self._worker.capacity_tokens
        self._longest = residents.longest
        self.promised = residents.longest_promise
        self._newcomers = len(residents.prefilling)
        self._entering = _longest_input(residents.prefilling) if self._newcomers else 0
        if self._lengths or self._left:
            self._left = set()
            self._lengths = []
            self._promises = []
        return self

    @property
    def taken(self) -> int:
        return self.rows * max(self._longest, self._entering)

    @property
    def needs(self) -> int:
        return max(self._sizes(self.rows, self._newcomers, self._longest, self._entering, 1))

    def taken_with(self, length: int) -> int:
        return (self.rows + 1) * max(self._longest, self._entering, length)

    def promised_with(self, tokens: int) -> int:
        return (self.rows + 1) * max(self.promised, tokens)

    def fits(self, length: int, limit: int, enters: bool = True, steps: int = 1) -> bool:
        longest = self._longest if enters else max(self._longest, length)
        entering = max(self._entering, length) if enters else self._entering
        stepped, passing = self._sizes(
            self.rows + 1, self._newcomers + enters, longest, entering, steps
        )
        return stepped <= limit and passing <= self.capacity

    def room(self, limit: int) -> int:
        return limit // self.rows - self._width(
            self.rows, self._newcomers, self._longest, self._entering
        )

    def widest(self, limit: int) -> int:
        lengths = range(1, limit + 1)
        fitting = bisect_left(lengths, True, key=lambda length: not self.fits(length, limit))
        return fitting + 1 + self._worker.emits

    def enter(self, job: Job) -> None:
        self.rows += 1
        self._newcomers += 1
        self._entering = max(self._entering, job.length)
        self.promised = max(self.promised, job.limit_tokens)

    def join(self, length: int) -> None:
        self.rows += 1
        self._longest = max(self._longest, length)

    def prefilled(self) -> None:
        self._longest = self._width(self.rows, self._newcomers, self._longest, self._entering)
        self._newcomers = self._entering = 0

    def leave(self, job: Job) -> None:
        residents = self._worker.residents
        if not self._lengths:
            self._lengths = sorted(
                [one.length + residents.steps - one.joined for one in residents.jobs]
            )
            self._promises = sorted([one.limit_tokens for one in residents.jobs])
        self.rows -= 1
        if job in residents.prefilling:
            self._left.add(job)
            self._newcomers -= 1
            self._entering = _longest_input(
                [one for one in residents.prefilling if one not in self._left]
            )
        self._longest = _without(self._lengths, job.length + residents.steps - job.joined)
        self.promised = _without(self._promises, job.limit_tokens)

    def emptied(self) -> Footprint:
        self.rows = self.promised = self._longest = self._newcomers = self._entering = 0
        return self

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


def _longest_input(jobs: Iterable[Job]) -> int:
    return max([job.length for job in jobs], default=0)


def _without(ascending: list[int], value: int) -> int:
    """Remove one `value` from the list. Returns the largest that is left, or 0."""
    del ascending[bisect_left(ascending, value)]
    return ascending[-1] if ascending else 0


def footprint_of(worker: Worker) -> Footprint:
    """A new footprint of the worker's residents."""
    return Footprint(worker) if worker.joining is None else SlabFootprint(worker)


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
