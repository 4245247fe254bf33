"""Frames between two processes: msgspec structs in msgpack, each preceded by its length.

Nothing is unpickled, and whatever is no frame of the expected types is an error. A child has a
`Channel` over the socket that its parent gave it. The parent has one, too, or on an event loop a
protocol of asyncio with a `FrameCutter`.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeVar

import msgspec

MAX_FRAME_BYTES = 1 << 28
_HEAD_BYTES = 4
_RECEIVE_BYTES = 1 << 16
_ENCODER = msgspec.msgpack.Encoder()
Frame = TypeVar("Frame")


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """A sign of life."""


class ChannelClosedError(ConnectionError):
    """The process at the other end has closed the channel or has ended."""


def pack(frame: msgspec.Struct) -> bytes:
    """Return the bytes of a frame, preceded by its length."""
    body = _ENCODER.encode(frame)
    return len(body).to_bytes(_HEAD_BYTES, "big") + body


class FrameCutter:
    """Cuts a stream of bytes into frames. It does no I/O, so both ends use it."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the frames that are complete now, without their lengths. Raises `ValueError` for
        one that is too long.
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
            yield body


class Channel:
    """One end of a socket with frames in both directions. Several threads may send.

    All methods raise `ChannelClosedError` when the other end is closed, and `ValueError` for what
    is no frame of the decoder's types.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._cutter = FrameCutter()
        self._waiting: deque[bytes] = deque()

    def send(self, frame: msgspec.Struct) -> None:
        """Send a frame; this may block."""
        data = pack(frame)
        try:
            with self._lock:
                self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            raise ChannelClosedError from None

    def receive(self, decoder: msgspec.msgpack.Decoder[Frame]) -> Frame:
        """Wait for the next frame."""
        while not self._waiting:
            self._read(0)
        return decoder.decode(self._waiting.popleft())

    def poll(self, decoder: msgspec.msgpack.Decoder[Frame]) -> list[Frame]:
        """Return the frames that have arrived, without waiting."""
        with suppress(BlockingIOError):
            while True:
                self._read(socket.MSG_DONTWAIT)
        frames = [decoder.decode(body) for body in self._waiting]
        self._waiting.clear()
        return frames

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _read(self, flags: int) -> None:
        try:
            data = self._socket.recv(_RECEIVE_BYTES, flags)
        except ConnectionResetError:
            data = b""
        if not data:
            raise ChannelClosedError
        self._waiting.extend(self._cutter.feed(data))
