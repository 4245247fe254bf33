"""Continuous re-batching on an unmodified transformers model: rows join and leave a batch that goes
on (BATON).

Newcomers are prefilled apart, grouped by length and in bounded passes, and embedded into the
running batch between two of its steps; or, for comparison, within it. Rows may be paused, swapped
to host memory and back without a prefill, or evicted. Who does what when is the scheduler's to say:
this engine offers the moves, and counts tokens and bytes. Slices (`run_slice`) are the static
engine's, beside the rows that are kept; timings are of rounds.

Memory may run out at any allocation. Each part of a round either happens or leaves everything as it
was: a pass is then made again, in the end in parts (`toolkit.engines.rebatch_engine`), and the
round goes on. Where that does not help, it costs the rows that it was for: a move its row, a
prefill the newcomers, a step one row. All others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from toolkit.engines.memory import MIB, ByteLedger, at_the_seam
from toolkit.engines.parked import Parked, ParkedRows
from toolkit.engines.protocol import LiveRow, OnStep, Part, Round, RoundOutput, Row, StepOutput
from toolkit.engines.rebatch_cache import RebatchCache, RowKV
from toolkit.engines.round_parts import RoundParts
from toolkit.engines.row_cache import BatchCache, RowCache, use_row_attention
from toolkit.engines.running import Newcomer, PrefillBatch, Prefiller, RunningBatch
from toolkit.engines.sampling import Sampler
from toolkit.engines.tensor_parallel import RankShare
from toolkit.engines.transformers_engine import TransformersEngine
from toolkit.errors import InputError
from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec

# What a round does when memory runs out in a pass: it makes the pass again, with more room, and
# then in parts.
#
# A pass holds activations beside the cache, and fewer of them over fewer rows, or over fewer
# columns of a prefill. So one that did not fit is made again when all that is spare has been
# given up, which suffices where the lack was of a moment; then in two parts, and in more. It
# takes longer, but nobody loses a cache, and the round goes on. Where the cache itself has no
# room no number of parts helps, and somebody has to go: that is the engine's to decide.

PARTS = (1, 1, 2, 4, 8)  # of a pass, try after try
Result = TypeVar("Result")


class Retries:
    """The passes of one round.

    Args:
        ledger: of the device.
        give_up: frees what memory is held without need.
    """

    def __init__(self, ledger: ByteLedger, give_up: Callable[[], None]) -> None:
        self._ledger = ledger
        self._give_up = give_up
        self._first = (
            0  # try of the next pass: where memory stays short, not every one need fail twice
        )
        self.ran_out = 0  # passes that had no room though nothing was to spare

    def make(self, work: Callable[[int], Result], most: int = PARTS[-1]) -> Result | None:
        """`work(parts)` with as few parts as it takes, `most` being there to be had; None where
        memory has no room.

        Where memory runs out, `work` has to leave everything as it was.
        """
        tries = [parts for parts in PARTS if parts < 2 * most]
        for number in range(min(self._first, len(tries) - 1), len(tries)):
            result = self._ledger.attempt(partial(work, tries[number]))
            if result is not None:
                self._first = max(number - 1, 0)
                return result
            self.ran_out += number > 0
            self._give_up()
        return None


class RebatchEngine(TransformersEngine):
    """`toolkit.engines.protocol.RoundEngine` on any causal language model of transformers with full
    attention.

    Raises `EngineError` where the model or the device cannot be used, `InputError` where the recipe lacks something.
    """

    name = "rebatch"

    def __init__(
        self,
        spec: ModelSpec,
        engine: EngineSpec,
        hardware: HardwareSpec,
        share: RankShare | None = None,
    ) -> None:
        super().__init__(spec, engine, hardware, share)
        self.facts = self.facts.model_copy(
            update={"joining": engine.joining if engine.kv_layout == "slab" else None}
        )
        self._shapes_in = engine.joining == "shape"
        swap = engine.swap_memory_mib
        self.host_ledger = ByteLedger(None if swap is None else int(swap * MIB))
        like = torch.empty(0, dtype=self._dtype, device=self._device)
        cache = self._make_cache(engine.kv_layout, like)
        self._batch = RunningBatch(
            self._forward, cache, self._sampler, masks_as_4d=self._bool_masks
        )
        self._parked = ParkedRows(self._kv_shapes, like, self.ledger, self.host_ledger)
        passes = self._prefill_columns, self._padded, self._shape, self.ledger, cache
        self._prefiller = Prefiller(*passes, mixes=self._shapes_in)
        self._parts = RoundParts(
            self._batch, self._prefiller, self._parked, self._kv_shapes, like, self._synchronize
        )
        self._step_is_due = (
            False  # a bounded pass was made since the last: those who run do not wait for two
        )

    def run_round(self, plan: Round, on_step: OnStep) -> RoundOutput:
        """See `RoundEngine.run_round`."""
        return at_the_seam(lambda: self._run(plan, on_step))

    def time_part(
        self, part: Part, rows: int, length: int, others: int, clock: Callable[[], float]
    ) -> float:
        """See `RoundEngine.time_part`."""
        return self._timed(lambda: self._parts.time(part, rows, length, others, clock))

    def time_prefill(self, batch_size: int, input_length: int, clock: Callable[[], float]) -> float:
        """See `Engine.time_prefill`: newcomers of like length, as they are prefilled before they
        join.
        """
        rows = self._timed_rows(batch_size, input_length)
        return self._timed(lambda: self._parts.prefill(rows, clock))

    def time_decode(self, batch_size: int, cached_length: int, clock: Callable[[], float]) -> float:
        """See `Engine.time_decode`: rows from a quarter of `cached_length` up, each at its own
        length in the slab.
        """
        return self._timed(lambda: self._parts.step(batch_size, cached_length, clock))

    @torch.inference_mode()
    def _timed(self, work: Callable[[], float]) -> float:
        return at_the_seam(work)

    @torch.inference_mode()
    def _run(self, plan: Round, on_step: OnStep) -> RoundOutput:
        self._check_rows(plan.enter)
        progress = _Progress(plan, on_step, Retries(self.ledger, self._batch.cache.fit))
        self._move(plan, progress)
        self._admit(progress)
        over = progress.is_over()
        while (self._batch or self._prefiller.busy) and not over:
            if self._batch:
                self._step(progress)
            over = progress.is_over()
            if not over:
                self._admit(progress)
                # who is told to stop does so after a step, not between it and its pass
                over = bool(progress.ended) or progress.is_short
        self._parked.settle()
        joined, ended = tuple(progress.joined), tuple(progress.ended)
        dropped = tuple(sorted(progress.dropped, reverse=True))
        return RoundOutput(
            progress.steps, joined, ended, *self._usage(), dropped, progress.retries.ran_out
        )

    def _step(self, progress: _Progress) -> None:
        """One step of all; where memory is too short for it, whoever came last goes instead, and
        the round is over.
        """
        step = progress.retries.make(self._batch.step, most=len(self._batch))
        if step is None:
            if not self._drop_newcomers(progress):
                self._drop_last(progress)
            return
        self._step_is_due = False
        progress.stepped(step)

    def _drop_newcomers(self, progress: _Progress) -> bool:
        """Those who are or were to be prefilled go, having little to lose; whether there are any."""
        numbers = self._prefiller.numbers
        self._prefiller.clear()
        self._step_is_due = False
        progress.dropped += numbers
        progress.is_short = True
        return bool(numbers)

    def _drop_last(self, progress: _Progress) -> None:
        """The last who was admitted goes, of the paused rows if there are any: nobody waits for
        their next tokens.
        """
        number = max(self._parked.on_device or self._batch.numbers)
        self._evict(number)
        progress.dropped.append(number)

    def _move(self, plan: Round, progress: _Progress) -> None:
        """What comes before the first step."""
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
            self._parked.wait()
        gone = set(progress.dropped)
        self._resume([number for number in plan.resume if number not in gone], progress)
        for number in plan.numbers:
            if number in self._batch or number in self._parked:
                raise ValueError(f"row {number} is here already")
        self._prefiller.add(
            (number, LiveRow(row, self._eos_ids))
            for number, row in zip(plan.numbers, plan.enter, strict=True)
        )

    def _pause(self, number: int) -> bool:
        row = self._take_out(number)
        self._see_that_fits(row.size_bytes)
        self._parked.pause(number, row)
        return True

    def _swap_out(self, number: int) -> bool:
        self._parked.swap_out(number, self._take_out(number))
        return True

    def _swap_in(self, number: int) -> bool:
        self._see_that_fits(self._parked.size_bytes(number))
        self._parked.swap_in(number)
        return True

    def _see_that_fits(self, size_bytes: int) -> None:
        """Where memory is short, the batch gives up what it has to spare."""
        if size_bytes > self.ledger.free_bytes:
            self._batch.cache.fit()

    def _evict(self, number: int) -> None:
        if number in self._batch:
            self._batch.drop(number)
        elif number in self._parked:
            self._parked.drop(number)
        else:
            self._prefiller.remove(number)

    def _take_out(self, number: int) -> Parked:
        """A row that runs, is paused, or waits for its prefill; what was prefilled of the latter is
        lost.
        """
        if number in self._batch:
            row = self._parked.copy_of(*self._batch.peek(number))
            self._batch.drop(number)
            return row
        if number in self._parked:
            return self._parked.unpause(number)
        live = self._prefiller.remove(number)
        if live is None:
            raise ValueError(f"row {number} is not here")
        return self._parked.copy_of(live, None)

    def _resume(self, numbers: Sequence[int], progress: _Progress) -> None:
        rows: list[Newcomer] = []
        caches: list[RowKV] = []
        for number in numbers:
            live, cached = self._parked.take(number)
            if cached is None:
                self._prefiller.add([(number, live)])
            else:
                rows.append((number, live))
                caches.append(cached)
        self._join(rows, caches, progress)

    def _join(self, rows: Sequence[Newcomer], caches: Sequence[RowKV], progress: _Progress) -> None:
        """They go into the batch together, or else one by one, as many as memory has room for."""
        if self.ledger.attempt(lambda: self._batch.join(rows, caches)) is not None:
            return
        for (number, live), cached in zip(rows, caches, strict=True):
            if self.ledger.attempt(partial(self._batch.join, [(number, live)], [cached])) is None:
                progress.dropped.append(number)
                progress.is_short = True

    def _admit(self, progress: _Progress) -> None:
        """Prefill newcomers: all of them, or, with chunks and a batch that waits for its step, one
        pass.
        """
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
            done = progress.retries.make(
                partial(self._prefiller.advance, bound, cuts=chunk_tokens > 0)
            )
            self._step_is_due = bound > 0
            for group, logits in done or ():
                self._welcome(group, logits, progress)
            if done is None or progress.is_short:
                self._drop_newcomers(progress)
                if (
                    self._parked.on_device and not self._batch
                ):  # or the same would happen again, for ever
                    self._drop_last(progress)

    def _welcome(self, group: PrefillBatch, logits: torch.Tensor, progress: _Progress) -> None:
        """A group's prefill has ended: its rows get their first tokens, and those who go on join
        the batch.
        """
        newcomers = group.newcomers
        step = progress.retries.make(lambda _: self._batch.first_tokens(newcomers, logits), most=1)
        if step is None:
            progress.dropped += [number for number, _ in newcomers]
            progress.is_short = True
        else:
            ended = {number for number, _ in step.ended}
            staying = [
                pair
                for pair in zip(newcomers, group.caches(), strict=True)
                if pair[0][0] not in ended
            ]
            self._join([one for one, _ in staying], [cached for _, cached in staying], progress)
        self._prefiller.release(group)
        if step is not None:
            progress.joined_now(step.rows)
            progress.saw(step)

    def _shape_in(self, progress: _Progress) -> None:
        """All newcomers are prefilled in a step of those who run."""
        newcomers = self._prefiller.take_waiting()
        numbers = [number for number, _ in newcomers]
        width = max(len(live.row.tokens) for _, live in newcomers)
        passing = self._shape.prefill_bytes(
            len(self._batch) + len(newcomers), width, self._batch.cache.width
        )

        def together(_: int) -> StepOutput:
            with self.ledger.reserve(passing):
                return self._batch.step_with(newcomers)

        step = progress.retries.make(together, most=1)
        if step is None:
            progress.dropped += numbers
            progress.is_short = True
            return
        progress.stepped(step)
        progress.joined_now(numbers)

    def _make_cache(self, layout: str, like: torch.Tensor) -> BatchCache:
        if layout == "slab":
            return RebatchCache(self._kv_shapes, like, self.ledger)
        if self._shapes_in:
            raise InputError(
                "engine.joining is shape: newcomers are shaped into a padded slab, and engine.kv_layout is rows",
                "set engine.joining to embed, or engine.kv_layout to slab",
            )
        use_row_attention(self._model)
        return RowCache(self._kv_shapes, like, self.ledger)

    def _usage(self) -> tuple[int, int]:
        """Tokens of KV cache that are held on the device, and what these take with their padding."""
        cache, apart = self._batch.cache, self._parked.device_tokens + self._prefiller.tokens
        return cache.tokens + apart, cache.padded_tokens + apart

    def _sampler(self, rows: Sequence[Row]) -> Sampler:
        return Sampler(rows, self._eos_ids, self._shape.vocab, self._device)


class _Progress:
    """What a round has done so far, and whether it goes on."""

    def __init__(self, plan: Round, on_step: OnStep, retries: Retries) -> None:
        self.plan = plan
        self.retries = retries
        self._on_step = on_step
        self._is_wanted = True
        self.steps = 0
        self.joined: list[tuple[int, int]] = []
        self.ended: list[int] = []
        self.dropped: list[int] = []  # memory had no room for them
        self.is_short = (
            False  # it has none for more steps or newcomers, until somebody decides anew
        )

    def is_over(self) -> bool:
        stopped = (
            not self._is_wanted
            and (self.plan.steps_before + self.steps) % self.plan.stop_every == 0
        )
        if self.plan.chunk_tokens and not self.steps:
            stopped = False  # a bounded pass is followed by its step
        return self.is_short or bool(self.ended) or self.steps >= self.plan.steps or stopped

    def stepped(self, step: StepOutput) -> None:
        self.steps += 1
        self.saw(step)

    def saw(self, step: StepOutput) -> None:
        self.ended += [number for number, _ in step.ended]
        self._is_wanted = self._on_step(step) and self._is_wanted

    def joined_now(self, numbers: Sequence[int]) -> None:
        self.joined += [(number, self.steps) for number in numbers]
