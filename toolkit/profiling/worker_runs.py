"""Measurements through the worker processes, all of them busy: sequences of rounds, whole slices.

They show what a server pays, from dispatch to result. A `Feed` keeps workers busy, with sequences
(`RowsOfSequence`) or with slices (`WholeSlice`). `RoundsStage` is the part of a profile about
passes that keep their caches.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import msgspec

from toolkit.engines.protocol import EnginePass, PassOutput, Row, SamplingParams, slice_of
from toolkit.files.profile import (
    EngineFacts,
    FailedPoint,
    MemoryPoint,
    RoundPoint,
    RoundSequence,
    RoundsProfile,
    SlicePoint,
)
from toolkit.files.recipe import ProfileSpec, Recipe
from toolkit.interrupts import cancelling
from toolkit.profiling.grid import SliceShape, log_uniform, part_points
from toolkit.profiling.measure import (
    Journal,
    admission_lengths,
    of_kind,
    probe_admission,
    record_probe,
    round_parts,
    safe_tokens,
)
from toolkit.profiling.process import TimedEngine, slice_rows
from toolkit.sched.prefills import groups_alike
from toolkit.workers.protocol import (
    PassDone,
    WorkerEvent,
    WorkerReady,
    Workers,
)

Point = TypeVar("Point", covariant=True)


class MeasuredWork(Protocol[Point]):
    """What one worker is measured at, pass by pass.

    `next_row` is the first row number that it does not use.
    """

    next_row: int

    def plan(self) -> EnginePass:
        """Return the next pass."""
        ...

    def finish(self, output: PassOutput, seconds: float) -> Point | FailedPoint | None:
        """Record a pass that ended `seconds` of wall time after its dispatch. Returns the result
        of the work; None: another pass follows.
        """
        ...

    def failed(self, reason: str) -> FailedPoint:
        """Return the result after a pass that failed."""
        ...

    def left_by(self, output: PassOutput) -> tuple[int, ...]:
        """Numbers of the rows that the engine still holds after the last pass."""
        ...


class Feed(Generic[Point]):
    """Keeps the workers busy until all numbered work is recorded.

    Each worker first runs unrecorded work, to warm up. It continues with unrecorded work until the
    last recorded one is done, so that no recorded one runs while another worker is idle.

    Args:
        workers: not yet started.
        numbers: of the work to record.
        make: makes the work of a number, with the first row number to use and the rows that the
            worker still holds, which its first pass drops.
        record: is given each number and its result, or why it failed.
    """

    def __init__(
        self,
        workers: Workers,
        numbers: Iterable[int],
        make: Callable[[int, int, Sequence[int]], MeasuredWork[Point]],
        record: Callable[[int, Point | FailedPoint], None],
    ) -> None:
        self.workers = workers
        self._make = make
        self._record = record
        self._sent = 0  # passes so far
        self._unrecorded = list(numbers)
        self._waiting = deque(self._unrecorded)
        self._left = len(self._unrecorded)
        self._begun = False
        self._done = asyncio.Event()
        # by worker: the number of its work (None: it is not recorded), the work, and when its pass
        # was sent
        self._on: dict[int, tuple[int | None, MeasuredWork[Point], float]] = {}
        # by worker: the first row number to use, and the rows that it still holds
        self._held: dict[int, tuple[int, Sequence[int]]] = {}

    async def run(self) -> None:
        """Start the workers, run all work, and stop them. Raises `EngineError` if a worker cannot
        load. Without work the workers are not needed.
        """
        if not self._left:
            return
        try:
            await self.workers.start(self._on_event)
            self._begun = True
            for worker in range(self.workers.size):
                self._start_unrecorded(worker)
            await self._done.wait()
        finally:
            await self.workers.stop()

    def _on_event(self, event: WorkerEvent) -> None:
        now_s = time.perf_counter()
        if isinstance(event, WorkerReady):
            if self._begun and event.worker not in self._on:
                self._next(event.worker)  # the worker was lost, and its rows with it
        elif isinstance(event, PassDone) and event.worker in self._on:
            self._take(event, now_s)

    def _take(self, event: PassDone, now_s: float) -> None:
        """A pass has ended: record the work if it is done, and go on."""
        worker = event.worker
        output = event.output
        number, work, sent_s = self._on[worker]
        if output is None or event.failure:
            result: Point | FailedPoint | None = work.failed(event.failure)
        else:
            result = work.finish(output, now_s - sent_s)
        if result is None:
            self._send(worker, number, work)
            return
        del self._on[worker]
        if number is not None:
            self._record(number, result)
            self._left -= 1
            if not self._left:
                self._done.set()
        if output is not None:  # a crashed worker is ready again later
            self._held[worker] = work.next_row, work.left_by(output)
            self._next(worker)

    def _next(self, worker: int) -> None:
        """Give an idle worker something to run, unless all is recorded."""
        if self._left and self._waiting:
            number = self._waiting.popleft()
            self._start(worker, number, number)
        elif self._left:
            self._start_unrecorded(worker)

    def _start_unrecorded(self, worker: int) -> None:
        self._start(worker, None, self._unrecorded[self._sent % len(self._unrecorded)])

    def _start(self, worker: int, number: int | None, made: int) -> None:
        """Start the work of the number `made`; it is recorded under `number`, if there is one."""
        first_row, stale = self._held.pop(worker, (0, ()))
        self._send(worker, number, self._make(made, first_row, stale))

    def _send(self, worker: int, number: int | None, work: MeasuredWork[Point]) -> None:
        plan = work.plan()
        self._sent += 1
        self._on[worker] = number, work, time.perf_counter()
        self.workers.run(worker, msgspec.structs.replace(plan, pass_id=self._sent))


ROUNDS = 12  # per sequence
ENTER_SHARE = 0.7  # share of the rounds with room in which rows enter
ENTER_MAX = 4  # rows that enter a running batch at once
DRAWS_MAX = 50


@dataclass(slots=True, frozen=True)
class Ranges:
    """The ranges that sequences are drawn from: the recipe's, and the most rows x longest."""

    spec: ProfileSpec
    facts: EngineFacts
    tokens_max: float


class RowsOfSequence:
    """The rows of one sequence on one worker: plans its next pass and records the result.

    Beginning with an empty batch, rows enter, decode together and end as in serving.

    Args:
        ranges: the ranges of all draws.
        number: the number of the sequence, which seeds its draws.
        first_row: the first row number to use.
        stale: rows that the worker still holds, dropped with the first pass.
    """

    def __init__(self, ranges: Ranges, number: int, first_row: int, stale: Sequence[int]) -> None:
        self._ranges = ranges
        self._rng = random.Random(f"{ranges.spec.seed}/rounds/{number}")
        self._wanted = log_uniform(ranges.spec.batch_sizes, self._rng)
        self.next_row = first_row  # not used by this sequence
        self._cached: dict[int, int] = {}  # cached tokens of each row
        self._to_come: dict[int, int] = {}  # tokens that it still generates
        self._stale = tuple(stale)
        self._entering: dict[int, Row] = {}
        self._groups: list[tuple[int, int]] = []
        self._steps = 0
        self.points: list[RoundPoint] = []

    def plan(self) -> EnginePass:
        """The next pass. The rows that enter are a full batch if none runs, else a few."""
        room = count = self._wanted - len(self._cached)
        if self._cached:
            count = self._rng.randint(1, ENTER_MAX) if self._rng.random() < ENTER_SHARE else 0
        self._entering = {}
        for _ in range(min(count, room)):
            row = self._draw_row()
            if row is None:
                break
            self._entering[self.next_row] = row
            self.next_row += 1
        lengths = [len(row.tokens) for row in self._entering.values()]
        self._groups = [
            (len(group), max(lengths[index] for index in group)) for group in groups_alike(lengths)
        ]
        self._steps = log_uniform((1, max(self._ranges.spec.slice_tokens)), self._rng)
        return EnginePass(
            self._steps, tuple(self._entering.values()), tuple(self._entering), evict=self._stale
        )

    def failed(self, reason: str) -> FailedPoint:
        """Return the result after a pass that failed."""
        return FailedPoint(kind="rounds", batch_size=0, length=0, reason=reason)

    def left_by(self, output: PassOutput) -> tuple[int, ...]:
        """Numbers of the rows that the engine still holds after the last pass."""
        gone = {*output.ended, *output.dropped}
        return tuple(number for number in (*self._cached, *self._entering) if number not in gone)

    def finish(self, output: PassOutput, seconds: float) -> RoundSequence | None:
        """Record a pass that ended `seconds` of wall time after its dispatch. Returns the sequence
        with its last one.
        """
        left = len(self._stale) + len(output.ended)
        self._stale = ()
        for number, row in self._entering.items():
            self._cached[number] = len(row.tokens)
            self._to_come[number] = row.max_new_tokens - 1
        longest = max(self._cached.values(), default=0)
        rows = len(self._cached)
        for number in self._cached:
            self._cached[number] += output.steps
            self._to_come[number] -= output.steps
        for number in output.ended:
            del self._cached[number], self._to_come[number]
        self.points.append(
            RoundPoint(
                groups=self._groups,
                rows=rows,
                cached_length=longest,
                steps=output.steps,
                left=left,
                seconds=seconds,
            )
        )
        self._entering = {}
        return RoundSequence(rounds=self.points) if len(self.points) == ROUNDS else None

    def _draw_row(self) -> Row | None:
        """Another row that fits with the running and entering ones; None if no draw fits."""
        spec = self._ranges.spec
        facts = self._ranges.facts
        rng = self._rng
        ends = [tokens + self._to_come[number] for number, tokens in self._cached.items()]
        ends += [len(row.tokens) + row.max_new_tokens for row in self._entering.values()]
        for _ in range(DRAWS_MAX):
            length = log_uniform(spec.input_lengths, rng)
            output = 1 + log_uniform((1, 2 * max(spec.slice_tokens)), rng)
            longest = max([*ends, length + output])
            has_room = (len(ends) + 1) * longest <= self._ranges.tokens_max
            if has_room and length + output <= facts.max_model_len:
                tokens = tuple(position % facts.vocab_size for position in range(length))
                name = f"profile-{self.next_row}"
                sampling = SamplingParams(ignore_eos=True)
                return Row(name, tokens, 0, output, sampling)
        return None


# Share of the machine's memory for the swapped caches of all workers, if the recipe sets no bound.
HOST_SHARE = 0.5


class RoundsStage:
    """The part of a profile about rounds: the work that is left, its execution and its results."""

    def __init__(self, recipe: Recipe, facts: EngineFacts, journal: Journal) -> None:
        self._recipe = recipe
        self._facts = facts
        self._journal = journal
        self.points = part_points(recipe.profile, facts)

    def lengths_left(self) -> list[int]:
        """Lengths at which rows have not been admitted yet."""
        lengths = admission_lengths(self._recipe.profile, self._facts)
        return [length for length in lengths if f"admission/{length}" not in self._journal.results]

    def sequences_left(self) -> list[int]:
        """Numbers of the sequences that the journal lacks."""
        numbers = range(self._recipe.profile.sequences)
        return [number for number in numbers if f"rounds/{number}" not in self._journal.results]

    def probe_admission(self, bench: TimedEngine, advance: Callable[[str], None]) -> None:
        """Measure how many rows can enter, at each length."""
        for length in self.lengths_left():
            probe = partial(probe_admission, bench, length)
            record_probe(self._journal, f"admission/{length}", length, probe)
            advance(f"rows of {length} enter")

    def run_sequences(self, workers: Workers, advance: Callable[[str], None]) -> None:
        """Run whole sequences through the worker processes."""

        def record(number: int, result: RoundSequence | FailedPoint) -> None:
            self._journal.put(f"rounds/{number}", result)
            advance(f"rounds {number + 1} of {self._recipe.profile.sequences}")

        tokens_max = safe_tokens(self._admissions(), self._facts)
        ranges = Ranges(self._recipe.profile, self._facts, tokens_max)
        feed = Feed(workers, self.sequences_left(), partial(RowsOfSequence, ranges), record)
        with cancelling():
            asyncio.run(feed.run())

    def result(self) -> RoundsProfile:
        """The profile's section on rounds. The memory for swapped caches of one worker is the
        recipe's bound, else its part of half the machine's.
        """
        recipe = self._recipe
        results = self._journal.results
        host_bytes = recipe.engine.swap_bytes(recipe.hardware.device)
        if host_bytes is None:
            total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            host_bytes = int(HOST_SHARE * total_bytes) // recipe.workers
        return RoundsProfile(
            parts=round_parts(self.points, results),
            sequences=of_kind(RoundSequence, results.values()),
            memory=self._admissions(),
            host_bytes=host_bytes,
        )

    def _admissions(self) -> list[MemoryPoint]:
        lengths = admission_lengths(self._recipe.profile, self._facts)
        probes = (self._journal.results.get(f"admission/{length}") for length in lengths)
        return of_kind(MemoryPoint, probes)


class WholeSlice:
    """A slice of the shape of its number: one pass that keeps no caches, so no row is left."""

    def __init__(
        self,
        shapes: Mapping[int, SliceShape],
        vocab_size: int,
        number: int,
        first_row: int,
        _stale: Sequence[int],
    ) -> None:
        self._shape = shapes[number]
        self._vocab_size = vocab_size
        self.next_row = first_row

    def plan(self) -> EnginePass:
        """Return the pass."""
        return slice_of(slice_rows(self._shape, self._vocab_size), self._shape.steps)

    def finish(self, output: PassOutput, seconds: float) -> SlicePoint | FailedPoint:
        """Return the point, if each row got all its tokens."""
        shape = self._shape
        if output.steps != shape.steps or len(output.ended) != shape.batch_size:
            return self.failed(f"{output.steps} of {shape.steps} tokens came for each row")
        return SlicePoint(
            batch_size=shape.batch_size,
            input_length=shape.input_length,
            steps=shape.steps,
            seconds=seconds,
        )

    def failed(self, reason: str) -> FailedPoint:
        """Return the result after a pass that failed."""
        shape = self._shape
        rows, length = shape.batch_size, shape.input_length
        return FailedPoint(kind="slice", batch_size=rows, length=length, reason=reason)

    def left_by(self, output: PassOutput) -> tuple[int, ...]:
        """The engine holds no rows of a slice."""
        return ()
