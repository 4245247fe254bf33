"""How a worker hears the front and answers it: frames, in order, over a socket or whatever else carries bytes."""

from __future__ import annotations

import socket
from collections import deque
from typing import Protocol

from toolkit.workers.frames import FromWorker, ToWorker, pack, worker_side
from toolkit.workers.lifeline import Line

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

    def __init__(self, line: Line) -> None:
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
