"""Continuous re-batching on an unmodified transformers model: rows join and leave a running batch
(BATON).

Newcomers are prefilled apart, grouped by length and in bounded passes, and embedded into the
running batch between two of its steps; or, for comparison, they are prefilled within a step. Rows
may be paused, swapped to host memory and back without a prefill, or evicted. The scheduler decides
all of that: this engine performs the moves, and counts tokens and bytes. Slices run
as in the static engine, while the kept rows wait; timings are of passes and of their parts.

Memory may run out at any allocation. Each part of a pass either happens or changes nothing. A
forward pass that did not fit is repeated after all spare memory is freed, which suffices if memory
was short only for a moment, and then in two or more parts: it holds activations besides the cache,
fewer for fewer rows or fewer columns. That takes longer, but no row loses its cache and the pass
goes on. If the cache itself has no room, parts do not help, and the rows concerned are dropped: for
a move its row, for a prefill the newcomers, for a step one row. All other rows go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from toolkit.engines.fixed_step import FixedSteps
from toolkit.engines.memory import ByteLedger, on_device
from toolkit.engines.protocol import (
    EnginePass,
    LiveRow,
    OnStep,
    Part,
    PassOutput,
    PassRecord,
    Row,
    SamplingParams,
    StepOutput,
)
from toolkit.engines.rebatch_cache import RebatchCache, RowKV
from toolkit.engines.running import CachedRow, PrefillBatch, Prefiller, RunningBatch
from toolkit.engines.sampling import Sampler
from toolkit.engines.suspended import SuspendedRows
from toolkit.engines.transformers_engine import TransformersEngine
from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec
from toolkit.sched.prefills import PADDING_SHARE

STEPS = 4  # decode steps that are timed together
SHORTEST_DIVISOR = 4  # the shortest row of a timed batch has 1/4 of the longest row's tokens
UNBOUNDED_TOKENS = 1 << 40  # output limit of a timed row
PARTS_PER_TRY = (1, 1, 2, 4, 8)  # into how many parts each try splits a pass
Result = TypeVar("Result")


@dataclass(slots=True)
class Retries:
    """Makes the forward passes of one pass, and repeats a pass that does not fit into memory.

    Attributes:
        free_spare: frees memory that is held without need.
        ran_out: passes that had no room although no memory was spare.
    """

    ledger: ByteLedger
    free_spare: Callable[[], None]
    ran_out: int = 0
    # The try that the next pass begins with, so that not every pass fails twice while memory stays
    # short.
    _first_try: int = 0

    def make(
        self, work: Callable[[int], Result], parts_max: int = PARTS_PER_TRY[-1]
    ) -> Result | None:
        """The result of `work(parts)` with as few parts as needed, about `parts_max` at most; None
        if memory has no room.

        If memory runs out, `work` must leave everything as it was.
        """
        tries = [parts for parts in PARTS_PER_TRY if parts < 2 * parts_max]
        for number in range(min(self._first_try, len(tries) - 1), len(tries)):
            result = self.ledger.attempt(partial(work, tries[number]))
            if result is not None:
                self._first_try = max(number - 1, 0)
                return result
            self.ran_out += number > 0
            self.free_spare()
        return None


class RebatchEngine(TransformersEngine):
    """`toolkit.engines.protocol.Engine` on any causal language model of transformers with full
    attention. Raises what `TransformersEngine` raises.
    """

    name = "rebatch"
    has_arena = False  # its memory is the running batch's

    def __init__(self, spec: ModelSpec, engine: EngineSpec, hardware: HardwareSpec) -> None:
        super().__init__(spec, engine, hardware)
        self.facts = self.facts.model_copy(update={"joining": engine.joining})
        self._shapes_in = engine.joining == "shape"
        self.host_ledger = ByteLedger(engine.swap_bytes(hardware.device))
        cache, fixed = self._make_cache(engine)

        def make_sampler(rows: Sequence[Row]) -> Sampler:
            return Sampler(rows, self._eos_ids, self._shape.vocab, self._device)

        self._batch = RunningBatch(self._forward, cache, make_sampler, self._masks_as, fixed)
        self._suspended = SuspendedRows(self._kv_shapes, self._like, self.ledger, self.host_ledger)
        self._prefiller = Prefiller(
            self._prefill_columns, self._padded, self._shape, self.ledger, cache, self._shapes_in
        )
        # A bounded pass was made since the last step: running rows do not wait for two.
        self._step_is_due = False
        self._retries = Retries(self.ledger, cache.fit)  # of the current pass

    def run(self, plan: EnginePass, on_step: OnStep) -> PassOutput:
        """See `Engine.run`. Before a slice, slabs without rows make room."""
        if plan.keep_cache:
            return self._run_kept(plan, on_step)
        if not self._batch:
            self._batch.cache.fit()
        return self._run_slice(plan, on_step)

    @on_device
    def _run_kept(self, plan: EnginePass, on_step: OnStep) -> PassOutput:
        self._check_rows(plan.enter)
        progress = PassRecord(plan, on_step)
        self._retries = Retries(self.ledger, self._batch.cache.fit)
        self._move(plan, progress)
        self._admit(progress)
        over = progress.is_over()
        while (self._batch or self._prefiller.busy) and not over:
            if self._batch:
                step = self._retries.make(self._batch.step, parts_max=len(self._batch))
                if step is not None:
                    self._step_is_due = False
                    progress.count_step(step)
                elif not self._drop_newcomers(progress):  # those that are not prefilled lose little
                    self._drop_last(progress)
            over = progress.is_over()
            if not over:
                self._admit(progress)
                # A pass that is stopped ends after a step, not between a step and its prefill.
                over = bool(progress.ended) or progress.is_short
        self._suspended.wait()
        cache = self._batch.cache
        others = self._suspended.device_tokens + self._prefiller.tokens
        return progress.output(
            cache.tokens + others, cache.padded_tokens + others, self._retries.ran_out
        )

    @on_device
    def time_part(
        self, part: Part, rows: int, length: int, others: int, clock: Callable[[], float]
    ) -> float:
        """See `Engine.time_part`: rows with random caches of unequal lengths."""
        batch = self._batch
        cache = self._batch.cache
        try:
            if part == "join":
                self._fill(others, length)
                shortest = length - int(PADDING_SHARE * length)  # of rows prefilled together
                caches = self._caches(rows, length, shortest)
                cache.make_room(others + rows, length, ahead=1)
                return self._time(lambda: batch.join(_newcomers(caches, others)), clock)
            self._fill(rows + others, length)
            if part == "leave":

                def leave() -> None:
                    for number in range(rows):
                        batch.drop(number)

                return self._time(leave, clock)
            if part == "grow":  # per step, a move to slabs that are as large as memory allows
                ahead = cache.columns - cache.width + 1
                seconds = self._time(lambda: cache.make_room(rows + others, length, ahead), clock)
                return seconds / max(cache.columns_ahead, 1)
            if part == "swap_out":
                return self._time(lambda: self._all_to_host(rows), clock)
            self._all_to_host(rows)
            cache.make_room(rows + others, length, ahead=1)
            return self._time(lambda: self._all_back(rows), clock)
        finally:
            self._clear(rows)

    @on_device
    def time_prefill(self, batch_size: int, input_length: int, clock: Callable[[], float]) -> float:
        """See `Engine.time_prefill`: from newcomers of similar length to their first tokens."""
        rows = self._timed_rows(batch_size, input_length)
        newcomers = [(number, _timed_row(tokens)) for number, tokens in enumerate(rows)]

        def prefill() -> None:
            self._prefiller.add(newcomers)
            while self._prefiller.busy:
                for group, logits in self._prefiller.advance():
                    self._batch.first_tokens(group.newcomers, logits)
                    self._prefiller.release(group)

        try:
            return self._time(prefill, clock)
        finally:
            self._clear(0)

    @on_device
    def time_decode(self, batch_size: int, cached_length: int, clock: Callable[[], float]) -> float:
        """See `Engine.time_decode`: the mean of a few steps of rows with lengths from 1/4 of
        `cached_length`, up to it at the last step.

        An untimed step comes first, as in serving: filling the cache has evicted the weights from
        the processor's caches.
        """
        try:
            self._fill(batch_size, max(cached_length - STEPS, 1))
            self._batch.step()
            self._batch.warm_up(STEPS)
            steps = range(STEPS)
            return self._time(lambda: [self._batch.step() for _ in steps], clock) / STEPS
        finally:
            self._clear(0)

    def _drop_newcomers(self, progress: PassRecord) -> bool:
        """Drop the newcomers that are not prefilled. Returns whether there were any."""
        numbers = self._prefiller.numbers
        self._prefiller.clear()
        self._step_is_due = False
        progress.dropped += numbers
        progress.is_short = True
        return bool(numbers)

    def _drop_last(self, progress: PassRecord) -> None:
        """Drop the last admitted row, a paused one if there is any: no client waits for it."""
        number = max(self._suspended.on_device or self._batch.numbers)
        self._evict(number)
        progress.dropped.append(number)

    def _move(self, plan: EnginePass, progress: PassRecord) -> None:
        """Make the plan's moves, which come before the first step."""
        for number in plan.evict:
            self._evict(number)
        for move, numbers in (
            (self._pause, plan.pause),
            (self._swap_out, plan.swap_out),
            (self._swap_in, plan.swap_in),
        ):
            for number in numbers:
                if not self.ledger.attempt(partial(move, number)):
                    self._evict(number)
                    progress.dropped.append(number)
        if not plan.overlap:
            self._suspended.wait()
        rows: list[CachedRow] = []
        for number in plan.resume:
            if number in progress.dropped:
                continue
            live, cached = self._suspended.take(number)
            if cached is None:
                self._prefiller.add([(number, live)])
            else:
                rows.append(((number, live), cached))
        self._join(rows, progress)
        for number in plan.numbers:
            if number in self._batch or number in self._suspended:
                raise ValueError(f"row {number} is here already")
        self._prefiller.add(
            (number, LiveRow(row, self._eos_ids))
            for number, row in zip(plan.numbers, plan.enter, strict=True)
        )

    def _pause(self, number: int) -> bool:
        row = self._take_out(number)
        self._free_spare_for(row.block_bytes)
        self._suspended.pause(number, row)
        return True

    def _swap_out(self, number: int) -> bool:
        self._suspended.swap_out(number, self._take_out(number))
        return True

    def _swap_in(self, number: int) -> bool:
        self._free_spare_for(self._suspended.size_bytes(number))
        self._suspended.swap_in(number)
        return True

    def _free_spare_for(self, size_bytes: int) -> None:
        """Free the batch's spare memory if `size_bytes` do not fit."""
        if size_bytes > self.ledger.free_bytes:
            self._batch.cache.fit()

    def _evict(self, number: int) -> None:
        if number in self._batch:
            self._batch.drop(number)
        elif number in self._suspended:
            self._suspended.drop(number)
        else:
            self._prefiller.remove(number)

    def _take_out(self, number: int) -> LiveRow:
        """Remove a row that runs, is paused or waits for its prefill; partial prefills are lost."""
        if number in self._batch:
            row, cached = self._batch.peek(number)
            self._suspended.keep(row, cached)
            self._batch.drop(number)
            return row
        if number in self._suspended:
            return self._suspended.unpause(number)
        waiting = self._prefiller.remove(number)
        if waiting is None:
            raise ValueError(f"row {number} is not here")
        return waiting

    def _join(self, rows: Sequence[CachedRow], progress: PassRecord) -> None:
        """Embed rows into the batch together, or else one by one; drop what does not fit."""
        if self.ledger.attempt(partial(self._batch.join, rows)) is not None:
            return
        for row in rows:
            if self.ledger.attempt(partial(self._batch.join, [row])) is None:
                progress.dropped.append(row[0][0])
                progress.is_short = True

    def _admit(self, progress: PassRecord) -> None:
        """Prefill newcomers: all of them, or only one pass if passes are bounded and rows run."""
        chunk_tokens = progress.plan.chunk_tokens
        if progress.is_short:
            self._drop_newcomers(progress)
        while self._prefiller.busy and not (self._batch and self._step_is_due):
            if self._shapes_in and self._batch:
                if not progress.is_over():
                    self._shape_in(progress)
                return
            if chunk_tokens and progress.ended:
                return
            bound = chunk_tokens if self._batch else 0
            done = self._retries.make(
                partial(self._prefiller.advance, bound, cuts=chunk_tokens > 0)
            )
            self._step_is_due = bound > 0
            for group, logits in done or ():
                self._finish_prefill(group, logits, progress)
            if done is None or progress.is_short:
                self._drop_newcomers(progress)
                # With paused rows alone, the next passes would fail in the same way.
                if self._suspended.on_device and not self._batch:
                    self._drop_last(progress)

    def _finish_prefill(
        self, group: PrefillBatch, logits: torch.Tensor, progress: PassRecord
    ) -> None:
        """Give the rows of a group their first tokens; rows that go on join the batch."""
        newcomers = group.newcomers
        step = self._retries.make(
            lambda _: self._batch.first_tokens(newcomers, logits), parts_max=1
        )
        if step is None:
            self._prefiller.release(group)
            progress.dropped += [number for number, _ in newcomers]
            progress.is_short = True
            return
        ended = {number for number, _ in step.ended}
        self._join([row for row in group.rows() if row[0][0] not in ended], progress)
        self._prefiller.release(group)
        progress.count_joined(step.rows)
        progress.report(step)

    def _shape_in(self, progress: PassRecord) -> None:
        """Prefill all newcomers in a step of the running rows."""
        newcomers = self._prefiller.take_waiting()
        numbers = [number for number, _ in newcomers]
        width = max(len(live.row.tokens) for _, live in newcomers)
        passing = self._shape.prefill_bytes(
            len(self._batch) + len(newcomers), width, self._batch.cache.width
        )

        def together(_: int) -> StepOutput:
            with self.ledger.reserve(passing):
                return self._batch.step_with(newcomers)

        step = self._retries.make(together, parts_max=1)
        if step is None:
            progress.dropped += numbers
            progress.is_short = True
            return
        progress.count_step(step)
        progress.count_joined(numbers)

    def _make_cache(self, engine: EngineSpec) -> tuple[RebatchCache, FixedSteps | None]:
        """The cache, and what makes steps of fixed shapes, if they have any."""
        why_not = (
            "engine.joining is shape, and newcomers of any length join its steps"
            if self._shapes_in
            else ""
        )
        stays = self._wants_fixed_shapes(engine, why_not)
        cache = RebatchCache(self._kv_shapes, self._like, self.ledger, stays=stays)
        return cache, self._fixed_steps(cache) if stays else None

    def _time(self, work: Callable[[], object], clock: Callable[[], float]) -> float:
        self._synchronize()
        start = clock()
        work()
        self._synchronize()
        return clock() - start

    def _fill(self, rows: int, length: int) -> None:
        """Let `rows` rows join the empty batch, of `length` tokens down to a quarter of that."""
        caches = self._caches(rows, length, max(length // SHORTEST_DIVISOR, 1))
        self._batch.join(_newcomers(caches, 0))

    def _caches(self, rows: int, length: int, shortest: int) -> list[RowKV]:
        """Views of one row of random keys and values, of `length` tokens down to `shortest`."""
        whole = [
            tuple(self._like.new_empty(heads, length, dim).normal_() for _, heads, _, dim in pair)
            for pair in self._kv_shapes
        ]
        lengths = [length - row * (length - shortest) // max(rows - 1, 1) for row in range(rows)]
        return [
            [(keys[:, :count], values[:, :count]) for keys, values in whole] for count in lengths
        ]

    def _all_to_host(self, rows: int) -> None:
        for number in range(rows):
            self._swap_out(number)
        self._suspended.wait()

    def _all_back(self, rows: int) -> None:
        for number in range(rows):
            self._swap_in(number)
        returned: list[CachedRow] = []
        for number in range(rows):
            live, cached = self._suspended.take(number)
            assert cached is not None
            returned.append(((number, live), cached))
        self._batch.join(returned)
        self._suspended.wait()

    def _clear(self, rows: int) -> None:
        """Drop all timed rows, of which the first `rows` may be swapped out."""
        self._batch.clear()
        self._prefiller.clear()
        for number in range(rows):
            if number in self._suspended:
                self._suspended.drop(number)


def _newcomers(caches: Sequence[RowKV], first: int) -> list[CachedRow]:
    """Rows with these caches, numbered from `first`."""
    return [
        ((number, _timed_row([number % 2] * (cached[0][0].shape[1] + 1))), cached)
        for number, cached in enumerate(caches, first)
    ]


def _timed_row(tokens: Sequence[int]) -> LiveRow:
    row = Row("profile", tuple(tokens), 0, UNBOUNDED_TOKENS, SamplingParams(ignore_eos=True))
    return LiveRow(row, ())
