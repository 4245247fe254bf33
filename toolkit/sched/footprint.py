"""What rows take of a worker's memory: the one place that knows whether it is paged or one padded
slab.

Paged, as in vLLM: every row takes its own tokens, and they add up. A slab, as in BATON and on the
engine `rebatch`: so many rows x the longest of them. A policy asks its worker for the footprint of
those who are there, puts into it those who might join, and compares with what there is; it never
learns which of the two it has. A cache that is paused lies beside the rows with its own tokens, in
either.

Who enters a slab is prefilled first, and that needs room as well. Prefilled apart, its cache lies
beside the slab until it is embedded; one such cache at a time counts, since the engine prefills
fewer together where memory is short. Shaped into the batch, all rows are as much longer for one
pass. What the passes compute with is not counted here: how much of the device is left for caches is
the memory law's to say.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from toolkit.sched.kernels import future_peak, padded_peak
from toolkit.sched.protocols import MemoryLaw

if TYPE_CHECKING:
    from toolkit.sched.types import Job, Worker


class Footprint:
    """Rows of a paged worker, at first its residents. All in tokens; who enters gets his first
    token by his prefill.

    `rows` is how many there are, `capacity` what they may take, `promised` what the residents and
    those who enter come to if each generates all that it may.
    """

    __slots__ = ("_fresh", "_used", "_worker", "capacity", "promised", "rows")

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.look()

    def look(self) -> Footprint:
        """That of the worker's residents as they are now."""
        worker = self._worker
        residents = worker.residents
        self.rows = rows = len(residents.jobs)
        self.capacity = worker.capacity_tokens
        self.promised = residents.committed
        self._used = (
            residents.used if residents.prefilling else residents.base + rows * residents.steps
        )
        self._fresh = 0  # tokens that the prefills to come will give
        return self

    @property
    def taken(self) -> int:
        """What the rows hold now."""
        return self._used

    @property
    def needs(self) -> int:
        """The most that they take until one step is done, the prefill of those who enter included."""
        return self._used + self._fresh + self.rows

    def taken_with(self, length: int) -> int:
        """What the rows would hold, one of `length` more among them, before its first token."""
        return self._used + length

    def promised_with(self, tokens: int) -> int:
        """What the rows would come to at most, one more that ends with `tokens` among them."""
        return self.promised + tokens

    def fits(self, length: int, limit: int, *, enters: bool = True, steps: int = 1) -> bool:
        """Whether one more may enter, or join with its cache: then, `steps` on, all are within
        `limit`.
        """
        rows = self.rows + 1
        return (
            self._used + self._fresh + length + enters * self._worker.emits + rows * steps <= limit
        )

    def room(self, limit: int) -> int:
        """Decode steps until the rows take more than `limit`."""
        return (limit - self._used - self._fresh) // self.rows

    def widest(self, limit: int) -> int:
        """What the longest that `fits` to enter comes to after its first step; it may be less than
        any does.
        """
        return limit - self.needs

    def enter(self, job: Job) -> None:
        """The job will be prefilled."""
        self.rows += 1
        self._used += job.length
        self._fresh += self._worker.emits
        self.promised += job.limit_tokens

    def join(self, length: int) -> None:
        """A row of `length` joins with its cache; what it may come to is not counted."""
        self.rows += 1
        self._used += length

    def prefilled(self) -> None:
        """Those who entered are rows like the others, and have their first tokens."""
        self._used += self._fresh
        self._fresh = 0

    def leave(self, job: Job) -> None:
        """A resident goes, before anybody joins."""
        residents = self._worker.residents
        self.rows -= 1
        self._used -= residents.holds(job)
        self.promised -= job.limit_tokens

    def emptied(self) -> Footprint:
        """The same without a row."""
        self.rows = self._used = self._fresh = self.promised = 0
        return self


class SlabFootprint(Footprint):
    """Rows of a padded worker. What each may come to at most is the number of rows x the longest
    that any may become.

    `joining` of the worker says how those who enter do so.
    """

    __slots__ = ("_entering", "_left", "_lengths", "_longest", "_newcomers", "_promises")

    def look(self) -> SlabFootprint:
        residents = self._worker.residents
        self.rows = len(residents.jobs)
        self.capacity = self._worker.capacity_tokens
        self._longest = residents.longest  # of those whose cache is there
        self.promised = residents.longest_promise
        self._newcomers = len(residents.prefilling)
        self._entering = _longest_input(
            residents.prefilling
        )  # of those who are or will be prefilled
        self._left: set[Job] = set()
        self._lengths: list[int] = []  # of the residents, ascending; once one has left
        self._promises: list[int] = []
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

    def fits(self, length: int, limit: int, *, enters: bool = True, steps: int = 1) -> bool:
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
        first_too_long = (
            bisect_left(range(1, limit + 1), True, key=lambda length: not self.fits(length, limit))
            + 1
        )
        return first_too_long + self._worker.emits

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

    def emptied(self) -> SlabFootprint:
        self.rows = self.promised = self._longest = self._newcomers = self._entering = 0
        return self

    def _shapes(self, rows: int, newcomers: int) -> bool:
        """Whether the newcomers are prefilled in a step of the others: where nobody runs, there is
        none.
        """
        return self._worker.joining == "shape" and rows > newcomers

    def _width(self, rows: int, newcomers: int, longest: int, entering: int) -> int:
        """Of the slab before its first step; where the prefill is one, it gives no token before."""
        if not newcomers:
            return longest
        return max(longest, entering + (0 if self._shapes(rows, newcomers) else self._worker.emits))

    def _sizes(
        self, rows: int, newcomers: int, longest: int, entering: int, steps: int
    ) -> tuple[int, int]:
        """Of the slab after so many steps; and the most that there is while those who enter are
        prefilled.
        """
        width = self._width(rows, newcomers, longest, entering)
        if not newcomers:
            return rows * (width + steps), 0
        shapes = self._shapes(rows, newcomers)
        return rows * (width + steps), rows * (
            width + entering
        ) if shapes else rows * width + entering


def _longest_input(jobs: Iterable[Job]) -> int:
    return max([job.length for job in jobs], default=0)


def _without(ascending: list[int], value: int) -> int:
    """Take one of this value out; the largest that is left, or 0."""
    del ascending[bisect_left(ascending, value)]
    return ascending[-1] if ascending else 0


def footprint(worker: Worker) -> Footprint:
    """That of the worker's residents."""
    return Footprint(worker) if worker.joining is None else SlabFootprint(worker)


def look(worker: Worker) -> Footprint:
    """As `footprint`, but one object per worker, which is valid until the next look at it.

    For decisions that are made at every round and keep none: making an object costs as much as the
    whole comparison.
    """
    if worker.there is None:
        worker.there = footprint(worker)
        return worker.there
    return worker.there.look()


def peak_to_come(used: NDArray[np.int64], remaining: NDArray[np.int64], *, padded: bool) -> int:
    """The most that rows will ever take together: M* of Past-Future, Eq. 2-4, and the same of a
    slab.

    Args:
        used: [n], the tokens that each holds now.
        remaining: [n], the tokens that each will still generate.
        padded: whether they are one slab.
    """
    return int(padded_peak(used, remaining) if padded else future_peak(used, remaining))


# The longest request that a worker's memory holds: what no limit of a request may pass.


def longest(memory: MemoryLaw, continuous: bool) -> int:
    """Prompt + output, in tokens, of a request alone on the worker: in rounds (`continuous`), or in
    a static batch.
    """
    return memory.usable_tokens if continuous else _longest_alone(memory)


def _longest_alone(memory: MemoryLaw) -> int:
    """By bisection, the law being monotone."""

    def fits(length: int) -> bool:
        return bool(memory.max_batch(np.array([length]), 0, 0.0)[0] >= 1)

    low, high = 0, 1 << 40
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
