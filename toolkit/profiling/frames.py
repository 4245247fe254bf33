"""What a bench and its process say to each other: msgspec structs, length first, over the child's stdin and stdout."""

from __future__ import annotations

from typing import IO

import msgspec

from toolkit.profiling.grid import GridPoint, Shape


class Load(msgspec.Struct, tag=True, frozen=True):
    """The first frame: which engine."""

    recipe_json: str


class Time(msgspec.Struct, tag=True, frozen=True):
    """Time a point."""

    point: GridPoint
    warmups: int


class Fits(msgspec.Struct, tag=True, frozen=True):
    """Try a slice."""

    shape: Shape


class Admit(msgspec.Struct, tag=True, frozen=True):
    """Let rows enter one by one."""

    length: int
    limit: int


class KeepBusy(msgspec.Struct, tag=True, frozen=True):
    """Serve these slices over and over, until the stream ends. It has no reply."""

    shapes: tuple[Shape, ...]


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """The engine is ready."""

    facts_json: str


class Timed(msgspec.Struct, tag=True, frozen=True):
    """Seconds of each run."""

    seconds: tuple[float, ...]


class Tried(msgspec.Struct, tag=True, frozen=True):
    """Whether the slice fitted."""

    fitted: bool


class Admitted(msgspec.Struct, tag=True, frozen=True):
    """How many entered, and whether the next one ran out of memory."""

    rows: int
    ran_out: bool


class Failed(msgspec.Struct, tag=True, frozen=True):
    """What was asked cannot be done. `exit_code` is that of the error to raise, 0 where it is this point's alone."""

    message: str
    hint: str = ""
    exit_code: int = 0


Request = Load | Time | Fits | Admit | KeepBusy
Reply = Loaded | Timed | Tried | Admitted | Failed

_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def write_frame(stream: IO[bytes], frame: Request | Reply) -> None:
    """Length, four bytes, and the frame."""
    body = msgspec.msgpack.encode(frame)
    stream.write(len(body).to_bytes(4, "big") + body)
    stream.flush()


def read_request(stream: IO[bytes]) -> Request:
    """The next request. `EOFError` where the parent is gone."""
    return _requests.decode(_read(stream))


def read_reply(stream: IO[bytes]) -> Reply:
    """The next reply. `EOFError` where the child is gone."""
    return _replies.decode(_read(stream))


def _read(stream: IO[bytes]) -> bytes:
    head = stream.read(4)
    size = int.from_bytes(head, "big")
    body = stream.read(size)
    if len(head) < 4 or len(body) < size:
        raise EOFError
    return body
