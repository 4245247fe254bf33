"""The event log of a scheduler: its inputs and decisions, and a replay that checks them.

The log is a sequence of typed events, one JSON line each, after a header that names its format.
`RecordingScheduler` produces it; the driver decides where the lines go. `replay` makes the same
calls on another scheduler and compares the decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Literal

import msgspec

from toolkit.errors import InputError
from toolkit.sched.policies.base import Policy
from toolkit.sched.policies.parameters import Value
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Job, Moves, Pass, PassResult, Refusal, Request, Worker

FORMAT: Literal[2] = 2  # of the log; another one is not read
_NO_MOVES = Moves()


class StartedPass(msgspec.Struct, frozen=True, omit_defaults=True):
    """A pass as the scheduler decided it, with request ids."""

    pass_id: int
    worker: int
    steps: int
    entered: tuple[str, ...] = ()
    estimated_s: float = 0.0
    evicted: tuple[str, ...] = ()
    released: tuple[str, ...] = ()
    paused: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    swapped_out: tuple[str, ...] = ()
    swapped_in: tuple[str, ...] = ()
    promoted: tuple[str, ...] = ()
    overlap: bool = False
    chunk_tokens: int = 0


class EventLogHeader(msgspec.Struct, frozen=True, tag="header"):
    """The configuration of the scheduler: with the plan, enough to create an equal one."""

    format: Literal[2]
    policy: str
    parameters: dict[str, bool | int | float | str]
    workers: int
    seed: int = 0
    capacity_tokens: int = 0  # set if there is no plan, as inside another engine
    slots: int = 0


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    now_s: float
    request: Request
    refused: str = ""


class Tick(msgspec.Struct, frozen=True, tag="tick"):
    now_s: float
    started: tuple[StartedPass, ...] = ()
    interrupts: tuple[int, ...] = ()


class Complete(msgspec.Struct, frozen=True, tag="complete"):
    now_s: float
    result: PassResult


class CancelCall(msgspec.Struct, frozen=True, tag="cancel"):
    now_s: float
    request_id: str


class End(msgspec.Struct, frozen=True, tag="end"):
    now_s: float
    request_id: str
    generated: int


class WorkerChange(msgspec.Struct, frozen=True, tag="worker"):
    now_s: float
    worker: int
    alive: bool


class Resize(msgspec.Struct, frozen=True, tag="resize"):
    worker: int
    capacity_tokens: int


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """New values of the policy's parameters, and of the rows of each worker (0: as before)."""

    parameters: dict[str, bool | int | float | str]
    slots: int = 0


Event = (
    EventLogHeader | Submit | Tick | Complete | End | CancelCall | WorkerChange | Resize | Configure
)
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Event).decode


def to_line(event: msgspec.Struct) -> bytes:
    """The event, of this log or another, as one JSON line. Floats keep every digit."""
    return _encode(event) + b"\n"


def whole_lines(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a log, without a last one that is incomplete, as after a kill."""
    return takewhile(lambda line: line.endswith(b"\n"), lines)


def from_lines(lines: Iterable[bytes]) -> Iterator[Event]:
    """Return the events of a log. Raises InputError for a line that is no event of this format."""
    for number, line in enumerate(whole_lines(lines), start=1):
        try:
            yield _decode(line)
        except msgspec.DecodeError as error:
            raise InputError(
                f"line {number} of the event log: {error}",
                f"logs of format {FORMAT} are read: write one with llmctl serve --event-log",
            ) from None


class RecordingScheduler(Scheduler):
    """A scheduler that also reports every call and every decision to `sink`."""

    def __init__(
        self,
        policy: Policy,
        workers: Sequence[Worker],
        sink: Callable[[Event], None],
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(policy, workers, seed=seed)
        self._sink = sink

    def submit(self, request: Request, now_s: float, number: int = -1) -> Refusal | None:
        refusal = super().submit(request, now_s, number)
        self._sink(Submit(now_s, request, refusal.reason if refusal else ""))
        return refusal

    def tick(self, now_s: float) -> list[Pass]:
        before = len(self.interrupts)
        batches = super().tick(now_s)
        self._sink(
            Tick(now_s, tuple(in_ids(batch) for batch in batches), tuple(self.interrupts[before:]))
        )
        return batches

    def complete(self, result: PassResult, now_s: float) -> None:
        super().complete(result, now_s)
        self._sink(Complete(now_s, result))

    def end(self, request_id: str, generated: int, now_s: float) -> None:
        super().end(request_id, generated, now_s)
        self._sink(End(now_s, request_id, generated))

    def cancel(self, request_id: str, now_s: float) -> None:
        super().cancel(request_id, now_s)
        self._sink(CancelCall(now_s, request_id))

    def worker_lost(self, index: int, now_s: float) -> None:
        super().worker_lost(index, now_s)
        self._sink(WorkerChange(now_s, index, alive=False))

    def worker_ready(self, index: int, now_s: float) -> None:
        super().worker_ready(index, now_s)
        self._sink(WorkerChange(now_s, index, alive=True))

    def resize(self, index: int, capacity_tokens: int) -> None:
        super().resize(index, capacity_tokens)
        self._sink(Resize(index, capacity_tokens))

    def configure(self, settings: Mapping[str, Value], slots: int = 0) -> None:
        super().configure(settings, slots)
        self._sink(Configure(dict(settings), slots))


def in_ids(batch: Pass) -> StartedPass:
    """Return the decision behind a pass, in a form that can be compared."""
    moves = batch.moves or _NO_MOVES
    return StartedPass(
        batch.pass_id,
        batch.worker,
        batch.steps,
        _ids(batch.jobs),
        batch.estimated_s,
        _ids(batch.evict),
        _ids(batch.release),
        _ids(moves.pause),
        _ids(moves.resume),
        _ids(moves.swap_out),
        _ids(moves.swap_in),
        _ids(moves.promote),
        moves.overlap,
        batch.chunk_tokens,
    )


def _ids(jobs: Iterable[Job]) -> tuple[str, ...]:
    return tuple(job.request_id for job in jobs)


def replay(events: Iterable[Event], scheduler: Scheduler) -> Iterator[str]:
    """Make the logged calls on a fresh `scheduler` and yield a line for each decision that differs.

    At a gap in the log the replay yields a line that says so, and ends.
    """
    for number, event in enumerate(events, start=1):
        at = f"event {number}:"
        match event:
            case Submit(now_s, request, refused):
                refusal = scheduler.submit(request, now_s)
                if (refusal.reason if refusal else "") != refused:
                    yield f"{at} {request.request_id} refused: {refusal}, logged: {refused!r}"
            case Tick(now_s, logged, interrupts):
                scheduler.take_interrupts()  # drop those of cancellations before this tick
                decided = tuple(in_ids(batch) for batch in scheduler.tick(now_s))
                if decided != logged:
                    yield f"{at} at {now_s} s decided {decided}, logged {logged}"
                if (interrupted := tuple(scheduler.take_interrupts())) != interrupts:
                    yield f"{at} at {now_s} s interrupted {interrupted}, logged {interrupts}"
            case Complete(now_s, result):
                scheduler.complete(result, now_s)
            case End(now_s, request_id, generated):
                scheduler.end(request_id, generated, now_s)
            case CancelCall(now_s, request_id):
                scheduler.cancel(request_id, now_s)
            case WorkerChange(now_s, worker, alive):
                (scheduler.worker_ready if alive else scheduler.worker_lost)(worker, now_s)
            case Resize(worker, capacity_tokens):
                scheduler.resize(worker, capacity_tokens)
            case Configure(settings, slots):
                scheduler.configure(settings, slots)
            case EventLogHeader():
                pass
