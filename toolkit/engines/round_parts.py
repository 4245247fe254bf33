"""Timing of the parts of a round, on rows with random caches of unequal lengths.

The engine's own running batch, cache and paused rows are timed. No row is left afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from toolkit.engines.protocol import LiveRow, Part, Row, SamplingParams
from toolkit.engines.rebatch_cache import RowKV
from toolkit.engines.running import Newcomer, Prefiller, RunningBatch
from toolkit.engines.slab import KVShape
from toolkit.engines.suspended import SuspendedRows
from toolkit.sched.rounds import PADDING_SHARE

SHORTEST_DIVISOR = 4  # the shortest row of a timed batch has 1/4 of the longest row's tokens
STEPS = 4  # decode steps that are timed together
UNBOUNDED_TOKENS = 1 << 40  # output limit of a timed row
Clock = Callable[[], float]


class RoundParts:
    """Times the parts of an engine's rounds; the engine must hold no rows.

    Args:
        batch, prefiller, suspended: the engine's own.
        kv_shapes: what each layer caches.
        like: a tensor of the cache's dtype, on its device.
        synchronize: waits for the device.
    """

    def __init__(
        self,
        batch: RunningBatch,
        prefiller: Prefiller,
        suspended: SuspendedRows,
        kv_shapes: Sequence[KVShape],
        like: torch.Tensor,
        synchronize: Callable[[], None],
    ) -> None:
        self._batch, self._prefiller, self._suspended = batch, prefiller, suspended
        self._kv_shapes, self._like, self._synchronize = kv_shapes, like, synchronize
        self._parts: dict[Part, Callable[[int, int, int, Clock], float]] = {
            "join": self._join,
            "leave": self._leave,
            "grow": self._grow,
            "swap_out": self._swap_out,
            "swap_in": self._swap_in,
        }

    def time(self, part: Part, rows: int, length: int, others: int, clock: Clock) -> float:
        """See `RoundEngine.time_part`."""
        try:
            return self._parts[part](rows, length, others, clock)
        finally:
            self._clear(rows)

    def prefill(self, rows: Sequence[Sequence[int]], clock: Clock) -> float:
        """Seconds from newcomers with these tokens to the first token of each, before they are
        embedded.
        """
        newcomers = [(number, _live(tokens)) for number, tokens in enumerate(rows)]

        def whole() -> None:
            self._prefiller.add(newcomers)
            while self._prefiller.busy:
                for group, logits in self._prefiller.advance():
                    self._batch.first_tokens(group.newcomers, logits)
                    self._prefiller.release(group)

        try:
            return self._time(whole, clock)
        finally:
            self._clear(0)

    def step(self, rows: int, length: int, clock: Clock) -> float:
        """Seconds of a decode step of `rows` rows, the mean of a few; at the last one, the longest
        row has `length` cached tokens.

        An untimed step comes first, as in serving: filling the cache has evicted the weights from
        the processor's caches.
        """

        def steps() -> None:
            for _ in range(STEPS):
                self._batch.step()

        try:
            self._fill(rows, max(length - STEPS, 1))
            self._batch.step()
            self._batch.warm_up(STEPS)
            return self._time(steps, clock) / STEPS
        finally:
            self._clear(0)

    def _join(self, rows: int, length: int, others: int, clock: Clock) -> float:
        self._fill(others, length)
        shortest = length - int(PADDING_SHARE * length)  # of rows that are prefilled together
        caches = self._caches(rows, length, shortest)
        self._batch.cache.make_room(others + rows, length, ahead=1)
        return self._time(lambda: self._batch.join(_newcomers(caches, others), caches), clock)

    def _leave(self, rows: int, length: int, others: int, clock: Clock) -> float:
        self._fill(rows + others, length)

        def leave() -> None:
            for number in range(rows):
                self._batch.drop(number)

        return self._time(leave, clock)

    def _grow(self, rows: int, length: int, others: int, clock: Clock) -> float:
        """Seconds of a move to slabs that are as large as memory allows, divided by the steps until
        the next move.
        """
        self._fill(rows + others, length)
        cache = self._batch.cache
        seconds = self._time(
            lambda: cache.make_room(rows + others, length, cache.columns - cache.width + 1), clock
        )
        return seconds / max(cache.columns_ahead, 1)

    def _swap_out(self, rows: int, length: int, others: int, clock: Clock) -> float:
        self._fill(rows + others, length)
        return self._time(lambda: self._to_host(rows), clock)

    def _swap_in(self, rows: int, length: int, others: int, clock: Clock) -> float:
        self._fill(rows + others, length)
        self._to_host(rows)
        self._batch.cache.make_room(rows + others, length, ahead=1)

        def back() -> None:
            for number in range(rows):
                self._suspended.swap_in(number)
            returned = [self._suspended.take(number) for number in range(rows)]
            newcomers = [(number, live) for number, (live, _) in enumerate(returned)]
            self._batch.join(newcomers, [cached for _, cached in returned if cached is not None])
            self._suspended.settle()

        return self._time(back, clock)

    def _to_host(self, rows: int) -> None:
        for number in range(rows):
            suspended = self._suspended.copy_of(*self._batch.peek(number))
            self._batch.drop(number)
            self._suspended.swap_out(number, suspended)
        self._suspended.wait()

    def _time(self, work: Callable[[], object], clock: Clock) -> float:
        self._synchronize()
        start = clock()
        work()
        self._synchronize()
        return clock() - start

    def _fill(self, rows: int, length: int) -> None:
        """Let `rows` rows join the empty batch, the first with `length` tokens, the last with a
        quarter of them.
        """
        caches = self._caches(rows, length, max(length // SHORTEST_DIVISOR, 1))
        self._batch.join(_newcomers(caches, 0), caches)

    def _caches(self, rows: int, length: int, shortest: int) -> list[RowKV]:
        """Views of one row of random keys and values: the first has `length` tokens, and the
        lengths decrease to `shortest`.
        """
        whole = [
            tuple(self._like.new_empty(heads, length, dim).normal_() for _, heads, _, dim in pair)
            for pair in self._kv_shapes
        ]
        lengths = [length - row * (length - shortest) // max(rows - 1, 1) for row in range(rows)]
        return [
            [(keys[:, :count], values[:, :count]) for keys, values in whole] for count in lengths
        ]

    def _clear(self, rows: int) -> None:
        self._batch.clear()
        self._prefiller.clear()
        for number in range(rows):
            if number in self._suspended:
                self._suspended.drop(number)


def _newcomers(caches: Sequence[RowKV], first: int) -> list[Newcomer]:
    """Rows with all tokens but the last in `caches`, numbered from `first`."""
    lengths = (cached[0][0].shape[1] for cached in caches)
    return [
        (number, _live([number % 2] * (length + 1))) for number, length in enumerate(lengths, first)
    ]


def _live(tokens: Sequence[int]) -> LiveRow:
    row = Row("profile", tuple(tokens), 0, UNBOUNDED_TOKENS, SamplingParams(ignore_eos=True))
    return LiveRow(row, ())
