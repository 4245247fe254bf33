"""Short sequences of rounds through the worker processes, all of them busy: what a server pays for a round.

Rows enter, decode together and end as they do in serving, from an empty batch on. A round is timed from its dispatch
to its result.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from toolkit.engines.protocol import Round, RoundOutput, Row, SamplingParams
from toolkit.files.profile import EngineFacts, FailedPoint, RoundPoint, RoundSequence
from toolkit.files.recipe import ProfileSpec
from toolkit.profiling.feeding import run_feed
from toolkit.profiling.grid import log_uniform
from toolkit.sched.likeness import groups_alike
from toolkit.workers.protocol import RoundDone, WorkerEvent, WorkerReady, Workers

ROUNDS = 12  # of a sequence
ENTER_SHARE = 0.7  # of the rounds that have room; in the others nobody waits
ENTER_MAX = 4  # at once, where some run
TRIES = 50

Record = Callable[[int, RoundSequence | FailedPoint], None]


@dataclass(slots=True, frozen=True)
class Ranges:
    """What sequences are drawn from: the recipe's ranges, and tokens that rows x the longest may come to."""

    spec: ProfileSpec
    facts: EngineFacts
    tokens_max: float


class RowsOfSequence:
    """The rows of one sequence on one worker: what its next round is, and what came of it.

    Args:
        ranges: what is drawn from.
        number: of the sequence, which all draws depend on.
        first_row: the rows' numbers count from here.
        stale: rows that the worker still holds, to be dropped with the first round.
    """

    def __init__(self, ranges: Ranges, number: int, first_row: int, stale: Sequence[int]) -> None:
        self._ranges = ranges
        self._rng = random.Random(f"{ranges.spec.seed}/rounds/{number}")
        self._wanted = log_uniform(ranges.spec.batch_sizes, self._rng)
        self._next = first_row
        self._cached: dict[int, int] = {}  # tokens in the cache of each row
        self._to_come: dict[int, int] = {}  # tokens that it will still get
        self._stale = tuple(stale)
        self._entering: dict[int, Row] = {}
        self._groups: list[tuple[int, int]] = []
        self._steps = 0
        self.points: list[RoundPoint] = []

    @property
    def rows(self) -> tuple[int, ...]:
        """Numbers of those who are in the batch."""
        return tuple(self._cached)

    @property
    def next_row(self) -> int:
        """Numbers that this sequence has not used begin here."""
        return self._next

    def plan(self) -> Round:
        """The next round."""
        self._entering = self._drawn()
        lengths = [len(row.tokens) for row in self._entering.values()]
        self._groups = [(len(group), max(lengths[index] for index in group)) for group in groups_alike(lengths)]
        self._steps = log_uniform((1, max(self._ranges.spec.slice_tokens)), self._rng)
        return Round(self._steps, tuple(self._entering.values()), tuple(self._entering), evict=self._stale)

    def left_by(self, output: RoundOutput) -> tuple[int, ...]:
        """Numbers of those who are still in the engine after a round that ran out of memory."""
        gone = {*output.ended, *output.dropped}
        return tuple(number for number in (*self._cached, *self._entering) if number not in gone)

    def finish(self, output: RoundOutput, seconds: float) -> None:
        """The round has ended, so many wall seconds after it was sent."""
        left = len(self._stale) + len(output.ended)
        self._stale = ()
        for number, row in self._entering.items():
            self._cached[number], self._to_come[number] = len(row.tokens), row.max_new_tokens - 1
        longest, rows = max(self._cached.values(), default=0), len(self._cached)
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

    def _drawn(self) -> dict[int, Row]:
        """Those who enter: as many as are wanted into an empty batch, a few at a time into one that runs."""
        room = self._wanted - len(self._cached)
        count = room
        if self._cached:
            count = self._rng.randint(1, ENTER_MAX) if self._rng.random() < ENTER_SHARE else 0
        entering: dict[int, Row] = {}
        for _ in range(min(count, room)):
            row = self._draw_row(entering)
            if row is None:
                break
            entering[self._next] = row
            self._next += 1
        return entering

    def _draw_row(self, entering: dict[int, Row]) -> Row | None:
        """One more that fits beside those who run and those who enter; None: nothing was found."""
        spec, facts, rng = self._ranges.spec, self._ranges.facts, self._rng
        ends = [tokens + self._to_come[number] for number, tokens in self._cached.items()]
        ends += [len(row.tokens) + row.max_new_tokens for row in entering.values()]
        for _ in range(TRIES):
            length = log_uniform(spec.input_lengths, rng)
            output = 1 + log_uniform((1, 2 * max(spec.slice_tokens)), rng)
            longest = max([*ends, length + output])
            if length + output <= facts.max_model_len and (len(ends) + 1) * longest <= self._ranges.tokens_max:
                tokens = tuple(position % facts.vocab_size for position in range(length))
                return Row(f"profile-{self._next}", tokens, 0, output, SamplingParams(ignore_eos=True))
        return None


async def run_sequences(workers: Workers, numbers: Sequence[int], ranges: Ranges, record: Record) -> None:
    """Run the numbered sequences and `record` each, or why it failed.

    Each worker runs one unrecorded first, to warm up, and goes on with unrecorded ones until the last recorded one is
    done: none that counts runs beside an idle worker.
    """
    if not numbers:
        return
    await run_feed(workers, _Feed(workers, numbers, ranges, record))


@dataclass(slots=True)
class _OnWorker:
    """What a worker runs; `number` None where it is not recorded."""

    number: int | None
    rows: RowsOfSequence
    batch_id: int = -1
    sent_s: float = math.nan


@dataclass(slots=True)
class _Feed:
    """Gives each worker a round whenever it has none; see `Feed`."""

    workers: Workers
    numbers: Sequence[int]
    ranges: Ranges
    record: Record
    done: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting: deque[int] = field(init=False)
    _on: dict[int, _OnWorker] = field(default_factory=dict)
    _left: int = field(init=False)
    _batches: int = 0
    _begun: bool = False

    def __post_init__(self) -> None:
        self._waiting = deque(self.numbers)
        self._left = len(self.numbers)

    def begin(self) -> None:
        """Once all workers are ready: a first sequence for each, to warm up."""
        self._begun = True
        for worker in range(self.workers.size):
            self._start(worker, None, 0, ())

    def on_event(self, event: WorkerEvent) -> None:
        now_s = time.perf_counter()
        if isinstance(event, RoundDone) and event.worker in self._on:
            self._round_done(event, now_s)
        elif isinstance(event, WorkerReady) and self._begun and event.worker not in self._on:
            self._next(event.worker, 0, ())  # it was lost, and its rows with it

    def _round_done(self, event: RoundDone, now_s: float) -> None:
        running = self._on[event.worker]
        if event.output is None or event.failure:
            del self._on[event.worker]
            self._end(running, FailedPoint(kind="rounds", batch_size=0, length=0, reason=event.failure))
            if event.output is not None:  # a crashed worker is ready again later
                self._next(event.worker, running.rows.next_row, running.rows.left_by(event.output))
            return
        running.rows.finish(event.output, now_s - running.sent_s)
        if len(running.rows.points) < ROUNDS:
            self._send(event.worker)
            return
        self._end(running, RoundSequence(rounds=running.rows.points))
        self._next(event.worker, running.rows.next_row, running.rows.rows)

    def _end(self, running: _OnWorker, result: RoundSequence | FailedPoint) -> None:
        if running.number is None:
            return
        self.record(running.number, result)
        self._left -= 1
        if not self._left:
            self.done.set()

    def _next(self, worker: int, first_row: int, stale: Sequence[int]) -> None:
        if self._left:
            self._start(worker, self._waiting.popleft() if self._waiting else None, first_row, stale)

    def _start(self, worker: int, number: int | None, first_row: int, stale: Sequence[int]) -> None:
        drawn = self.numbers[self._batches % len(self.numbers)] if number is None else number
        self._on[worker] = _OnWorker(number, RowsOfSequence(self.ranges, drawn, first_row, stale))
        self._send(worker)

    def _send(self, worker: int) -> None:
        running = self._on[worker]
        plan = running.rows.plan()
        self._batches += 1
        running.batch_id, running.sent_s = self._batches, time.perf_counter()
        self.workers.run_round(worker, self._batches, plan)
