"""The interface between the scheduler's driver and the workers: calls that send passes,
and the events that report their results. Below it are the frames that carry both.
"""

from __future__ import annotations

import math
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec

from toolkit.engines.protocol import EnginePass, PassOutput, StepOutput
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
    """A worker's process has ended, and a new one is being started. It follows the `PassDone`
    of the pass that ran.
    """

    worker: int
    reason: str


@dataclass(slots=True, frozen=True)
class WorkersFailed:
    """The last event: no worker runs and none can be loaded again; `error` ends the server."""

    error: EngineError


class PassProgress(msgspec.Struct, tag="progress"):
    """Tokens of the running pass: its steps since the last report. It is also a frame of the
    worker, which leaves its number to the front.
    """

    worker: int
    pass_id: int
    steps: tuple[StepOutput, ...]


class PassDone(msgspec.Struct, tag="done"):
    """A pass has ended; `PassProgress` has reported its tokens. It is also a frame of the worker,
    which leaves its number to the front.

    A pass that "crashed" has no `output`, and its worker's rows no caches. One that ran out of
    memory ("oom") has lost the rows in `output.dropped`, if any.

    Attributes:
        gap_s: between the end of the worker's last pass and the start of this one, on its clock; 0
            for its first.
    """

    worker: int
    pass_id: int
    output: PassOutput | None
    failure: Failure = ""
    gap_s: float = 0.0


WorkerEvent = WorkerReady | WorkerLost | WorkersFailed | PassProgress | PassDone
OnEvent = Callable[[WorkerEvent], None]


class Workers(Protocol):
    """N workers on one loop; each runs one pass at a time, and events report it."""

    size: int

    async def start(self, on_event: OnEvent) -> None:
        """Start all workers and return when each has reported `WorkerReady`. Raises `EngineError`
        if one cannot load its engine.
        """
        ...

    def run(self, worker: int, plan: EnginePass, estimated_s: float = math.inf) -> None:
        """Send a pass. Exactly one `PassDone` follows, whatever happens to the process.

        A worker that is silent for much longer than `estimated_s` is killed and restarted.
        """
        ...

    def tell(self, worker: int, change: Interrupt | Cancel) -> None:
        """Change a running pass; nothing happens if it has ended."""
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


class Interrupt(msgspec.Struct, frozen=True, tag="interrupt"):
    """End the running pass at the next step where it may end (`EnginePass.stop_every`)."""

    pass_id: int


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Cancel these rows of a pass that keeps no caches, which ends when no row is wanted."""

    pass_id: int
    numbers: tuple[int, ...]


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


ToWorker = Start | EnginePass | Interrupt | Cancel | Stop
FromWorker = Alive | Ready | Refused | PassProgress | PassDone
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
