"""The interface between the scheduler's driver and the workers: calls that send slices and rounds,
and the events that report their results. Below it are the frames that carry both.
"""

from __future__ import annotations

import math
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import msgspec

from toolkit.engines.protocol import Round, RoundOutput, Row, SliceOutput, StepOutput
from toolkit.errors import EngineError
from toolkit.files.profile import EngineFacts
from toolkit.sched.types import Failure
from toolkit.workers.lifeline import FrontSocket


@dataclass(slots=True, frozen=True)
class WorkerReady:
    """A worker has loaded its engine, at the start or after it was lost."""

    worker: int
    facts: EngineFacts


@dataclass(slots=True, frozen=True)
class WorkerLost:
    """A worker's process has ended, and a new one is being started. It follows the `BatchDone` or
    `RoundDone` of the batch that ran.
    """

    worker: int
    reason: str


@dataclass(slots=True, frozen=True)
class WorkersFailed:
    """The last event: no worker runs and none can be loaded again; `error` ends the server."""

    error: EngineError


@dataclass(slots=True, frozen=True)
class BatchProgress:
    """Tokens of one or more steps of a running batch; in a round, rows are numbers."""

    worker: int
    pass_id: int
    steps: tuple[StepOutput, ...]


@dataclass(slots=True, frozen=True)
class BatchDone:
    """A slice has ended. With a `failure`, `output` holds the tokens reported before it."""

    worker: int
    pass_id: int
    output: SliceOutput
    failure: Failure = ""
    gap_s: float = 0.0  # as in `Done`

    @property
    def steps(self) -> int:
        """The largest number of tokens of a row."""
        return max(map(len, self.output.tokens), default=0)


@dataclass(slots=True, frozen=True)
class RoundDone:
    """A round has ended; `BatchProgress` has reported all its tokens.

    A round that "crashed" has no `output`, and its rows no caches. A round that ran out of memory
    ("oom") has lost the rows in `output.dropped`, if any.
    """

    worker: int
    pass_id: int
    output: RoundOutput | None
    failure: Failure = ""
    gap_s: float = 0.0  # as in `Done`


WorkerEvent = WorkerReady | WorkerLost | WorkersFailed | BatchProgress | BatchDone | RoundDone
OnEvent = Callable[[WorkerEvent], None]


WorkerState = Literal["away", "starting", "loading", "idle", "running"]


class Workers(Protocol):
    """N workers on one loop; each runs one slice or round at a time, and events report it."""

    size: int

    async def start(self, on_event: OnEvent) -> None:
        """Start all workers and return when each has reported `WorkerReady`. Raises `EngineError`
        if one cannot load its engine.
        """
        ...

    def run(self, worker: int, batch: RunBatch, estimated_s: float = math.inf) -> None:
        """Send a slice, or a round to an engine that keeps its rows. Exactly one `BatchDone` or
        `RoundDone` follows, whatever happens to the process.

        A worker that is silent for much longer than `estimated_s` is killed and restarted.
        """
        ...

    def tell(self, worker: int, change: Interrupt | Cancel) -> None:
        """Change a running batch; nothing happens if it has ended."""
        ...

    def kill(self, worker: int) -> None:
        """End a worker at once; `WorkerLost` follows, and it is restarted."""
        ...

    async def stop(self) -> None:
        """End all workers."""
        ...


# The frames between the front and a worker: typed msgpack structs, each preceded by its length.
# Nothing is unpickled, and any other frame is an error.

MAX_FRAME_BYTES = 1 << 28
_HEAD_BYTES = 4


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first frame to a worker: what to load, as JSON of a `Recipe`."""

    recipe: str


class RunSlice(msgspec.Struct, frozen=True, tag="run"):
    """Serve a slice."""

    pass_id: int
    rows: tuple[Row, ...]
    steps: int


class RunRound(msgspec.Struct, frozen=True, tag="run-round"):
    """Run a round, on an engine that keeps its rows."""

    pass_id: int
    plan: Round


class Interrupt(msgspec.Struct, frozen=True, tag="interrupt"):
    """End the running round at the next step where it may end (`Round.stop_every`)."""

    pass_id: int


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Cancel these rows of a slice, which ends when no row is wanted."""

    pass_id: int
    request_ids: tuple[str, ...]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the process at the next step boundary."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is loaded and warm. `facts` is JSON of `EngineFacts`."""

    facts: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The engine cannot be loaded, for a reason that the user can correct."""

    message: str
    hint: str


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """A sign of life. `toolkit.workers.lifeline` has its bytes."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Steps of the running batch since the last frame."""

    pass_id: int
    steps: tuple[StepOutput, ...]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The batch has ended.

    Attributes:
        steps: since the last frame.
        gap_s: between the end of the worker's last batch and the start of this one, on its clock; 0
            for its first.
        output: of a round.
    """

    pass_id: int
    steps: tuple[StepOutput, ...]
    gap_s: float = 0.0
    out_of_memory: bool = False
    output: RoundOutput | None = None


RunBatch = RunSlice | RunRound
ToWorker = Start | RunSlice | RunRound | Interrupt | Cancel | Stop
FromWorker = Alive | Ready | Refused | Progress | Done
Frame = TypeVar("Frame")

_ENCODER = msgspec.msgpack.Encoder()


def pack(frame: ToWorker | FromWorker) -> bytes:
    """The frame's bytes, preceded by its length."""
    body = _ENCODER.encode(frame)
    return len(body).to_bytes(_HEAD_BYTES, "big") + body


class FrameReader(Generic[Frame]):
    """Cuts a stream of bytes into frames. It does no I/O, so both ends use it."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Frame]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete now. Raises `ValueError` for an invalid frame."""
        self._buffer += data
        while len(self._buffer) >= _HEAD_BYTES:
            size = int.from_bytes(self._buffer[:_HEAD_BYTES], "big")
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes; the limit is {MAX_FRAME_BYTES}")
            end = _HEAD_BYTES + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEAD_BYTES:end])
            del self._buffer[:end]
            yield self._decoder.decode(body)


def worker_side() -> FrameReader[ToWorker]:
    return FrameReader(msgspec.msgpack.Decoder(ToWorker))


def front_side() -> FrameReader[FromWorker]:
    return FrameReader(msgspec.msgpack.Decoder(FromWorker))


_RECEIVE_BYTES = 1 << 16


class FrontGoneError(Exception):
    """The front has closed the connection, so the worker has no more work."""


class Channel(Protocol):
    """A worker's end of the connection: frames in order. All methods raise `FrontGoneError` when
    the front has closed it.
    """

    def send(self, frame: FromWorker) -> None:
        """Send a frame; this may block."""
        ...

    def receive(self) -> ToWorker:
        """Wait for the next frame."""
        ...

    def poll(self) -> list[ToWorker]:
        """The frames that have arrived, without waiting."""
        ...


class SocketChannel:
    """`Channel` over a socket."""

    def __init__(self, line: FrontSocket) -> None:
        self._line = line
        self._socket = line.socket
        self._reader = worker_side()
        self._waiting: deque[ToWorker] = deque()

    def send(self, frame: FromWorker) -> None:
        try:
            self._line.send(pack(frame))
        except (BrokenPipeError, ConnectionResetError):
            raise FrontGoneError from None

    def receive(self) -> ToWorker:
        while not self._waiting:
            self._receive(0)
        return self._waiting.popleft()

    def poll(self) -> list[ToWorker]:
        with suppress(BlockingIOError):
            while True:
                self._receive(socket.MSG_DONTWAIT)
        frames = list(self._waiting)
        self._waiting.clear()
        return frames

    def _receive(self, flags: int) -> None:
        try:
            data = self._socket.recv(_RECEIVE_BYTES, flags)
        except ConnectionResetError:
            data = b""
        if not data:
            raise FrontGoneError
        self._waiting.extend(self._reader.feed(data))
