"""Whole slices through the worker processes, all of them busy: what a server pays, from dispatch to result."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from toolkit.engines.protocol import SliceOutput
from toolkit.files.profile import FailedPoint, SlicePoint
from toolkit.profiling.bench import slice_rows
from toolkit.profiling.feeding import run_feed
from toolkit.profiling.grid import Shape
from toolkit.workers.protocol import BatchDone, WorkerEvent, WorkerReady, Workers

Record = Callable[[int, SlicePoint | FailedPoint], None]


async def run_slices(workers: Workers, shapes: Mapping[int, Shape], vocab_size: int, record: Record) -> None:
    """Run the numbered slices and `record` each, its wall seconds, or why it failed.

    Each worker runs one slice unrecorded first, to warm up, and goes on with unrecorded ones at the end until the last
    recorded one is done: none of those that count runs beside an idle worker.
    """
    if not shapes:
        return
    await run_feed(workers, _Feed(workers, shapes, vocab_size, record))


@dataclass(slots=True, frozen=True)
class _Sent:
    """A slice under way; `number` None where it is not recorded."""

    number: int | None
    shape: Shape
    sent_s: float


class _Feed:
    """Gives each worker a slice whenever it has none; see `Feed`."""

    def __init__(self, workers: Workers, shapes: Mapping[int, Shape], vocab_size: int, record: Record) -> None:
        self.done = asyncio.Event()
        self._workers = workers
        self._waiting = deque(shapes.items())
        self._unrecorded = list(shapes.values())
        self._vocab_size = vocab_size
        self._record = record
        self._left = len(shapes)
        self._sent: dict[int, _Sent] = {}
        self._batches = 0
        self._begun = False

    def begin(self) -> None:
        """Once all workers are ready: a first slice for each, to warm up."""
        self._begun = True
        for worker in range(self._workers.size):
            self._send(worker, None)

    def on_event(self, event: WorkerEvent) -> None:
        now_s = time.perf_counter()
        if isinstance(event, BatchDone):
            self._finish(self._sent.pop(event.batch_id), event, now_s)
            if event.failure != "crashed":  # a crashed worker is ready again later
                self._next(event.worker)
        elif isinstance(event, WorkerReady) and self._begun:
            self._next(event.worker)

    def _next(self, worker: int) -> None:
        if self._left:
            self._send(worker, self._waiting.popleft() if self._waiting else None)

    def _send(self, worker: int, numbered: tuple[int, Shape] | None) -> None:
        number, shape = numbered or (None, self._unrecorded[self._batches % len(self._unrecorded)])
        rows = slice_rows(shape, self._vocab_size)
        self._batches += 1
        self._sent[self._batches] = _Sent(number, shape, time.perf_counter())
        self._workers.run(worker, self._batches, rows, shape.steps)

    def _finish(self, sent: _Sent, event: BatchDone, now_s: float) -> None:
        if sent.number is None:
            return
        self._record(sent.number, _outcome(sent, event, now_s - sent.sent_s))
        self._left -= 1
        if not self._left:
            self.done.set()


def _outcome(sent: _Sent, event: BatchDone, seconds: float) -> SlicePoint | FailedPoint:
    shape = sent.shape
    if event.failure or _tokens(event.output) != shape.batch_size * shape.steps:
        reason = event.failure or f"{_tokens(event.output)} tokens came back"
        return FailedPoint(kind="slice", batch_size=shape.batch_size, length=shape.input_length, reason=reason)
    return SlicePoint(batch_size=shape.batch_size, input_length=shape.input_length, steps=shape.steps, seconds=seconds)


def _tokens(output: SliceOutput) -> int:
    return sum(map(len, output.tokens))
