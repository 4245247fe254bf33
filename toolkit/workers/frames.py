"""What goes over the socket between the front and a worker's process: typed frames, msgpack, each
after its length.

Nothing is unpickled, and a frame that is not one of these is an error.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import msgspec

from toolkit.engines.protocol import Round, RoundOutput, Row, StepOutput
from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec
from toolkit.workers.lifeline import FrontSocket
from toolkit.workers.protocol import Times

MAX_FRAME_BYTES = 1 << 28
_HEAD_BYTES = 4


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first frame to a worker: what to load. The specs are JSON of the recipe's models."""

    model: str
    engine: str
    hardware: str
    flush_s: float  # progress is sent at most this often, but for a slice's first tokens

    @classmethod
    def of(
        cls, model: ModelSpec, engine: EngineSpec, hardware: HardwareSpec, flush_s: float
    ) -> Start:
        """Of the recipe's models."""
        return cls(
            model.model_dump_json(), engine.model_dump_json(), hardware.model_dump_json(), flush_s
        )


class RunSlice(msgspec.Struct, frozen=True, tag="run"):
    """Serve a slice."""

    batch_id: int
    rows: tuple[Row, ...]
    steps: int


class RunRound(msgspec.Struct, frozen=True, tag="run-round"):
    """Run a round, on an engine that keeps its rows."""

    batch_id: int
    plan: Round


class Interrupt(msgspec.Struct, frozen=True, tag="interrupt"):
    """The running round should end at the next step where it may."""

    batch_id: int


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """These rows of a batch are not wanted any more."""

    batch_id: int
    request_ids: tuple[str, ...]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End, at the next step boundary."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is loaded and warm. `facts` is JSON of `EngineFacts`."""

    facts: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The engine cannot be loaded, and for a reason that the user can mend."""

    message: str
    hint: str


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Nothing but a sign of life. `toolkit.workers.lifeline` has its bytes."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Steps of the running batch that were not sent yet."""

    batch_id: int
    steps: tuple[StepOutput, ...]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The batch is over. `steps` are those that were not sent yet."""

    batch_id: int
    steps: tuple[StepOutput, ...]
    times: Times
    out_of_memory: bool = False


class DoneRound(msgspec.Struct, frozen=True, tag="done-round"):
    """The round is over; `output` also names the rows that memory had no room for."""

    batch_id: int
    steps: tuple[StepOutput, ...]
    times: Times
    output: RoundOutput


ToWorker = Start | RunSlice | RunRound | Interrupt | Cancel | Stop
FromWorker = Alive | Ready | Refused | Progress | Done | DoneRound
Frame = TypeVar("Frame")

_ENCODER = msgspec.msgpack.Encoder()


def pack(frame: ToWorker | FromWorker) -> bytes:
    """The frame's bytes, its length before it."""
    body = _ENCODER.encode(frame)
    return len(body).to_bytes(_HEAD_BYTES, "big") + body


class FrameReader(Generic[Frame]):
    """Cuts a stream of bytes into frames; sans-IO, so both ends use it."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Frame]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete now. `ValueError` (msgspec's among them) for what is no
        frame.
        """
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
    """Reads what a worker gets."""
    return FrameReader(msgspec.msgpack.Decoder(ToWorker))


def front_side() -> FrameReader[FromWorker]:
    """Reads what the front gets."""
    return FrameReader(msgspec.msgpack.Decoder(FromWorker))


# How a worker hears the front and answers it: frames, in order, over a socket or whatever else
# carries bytes.

_CHUNK = 1 << 16


class FrontGoneError(Exception):
    """The other end of the socket is closed: there is nothing to work for."""


class Channel(Protocol):
    """A worker's end. All methods raise `FrontGoneError` when the other end has closed."""

    def send(self, frame: FromWorker) -> None:
        """Send a frame; may wait."""
        ...

    def receive(self) -> ToWorker:
        """The next frame, waiting for it."""
        ...

    def poll(self) -> list[ToWorker]:
        """The frames that are here now."""
        ...

    def put_back(self, frame: ToWorker) -> None:
        """`receive` gives this frame next."""
        ...


class SocketChannel:
    """Blocking frames over a socket."""

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
        """The next frame, waiting for it."""
        while not self._waiting:
            self._receive(0)
        return self._waiting.popleft()

    def poll(self) -> list[ToWorker]:
        """The frames that are here now."""
        try:
            while True:
                self._receive(socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        frames = list(self._waiting)
        self._waiting.clear()
        return frames

    def put_back(self, frame: ToWorker) -> None:
        """`receive` gives this frame next."""
        self._waiting.appendleft(frame)

    def _receive(self, flags: int) -> None:
        try:
            data = self._socket.recv(_CHUNK, flags)
        except ConnectionResetError:
            data = b""
        if not data:
            raise FrontGoneError
        self._waiting.extend(self._reader.feed(data))
