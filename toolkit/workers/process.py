"""One worker's process as the front sees it."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import cast

from toolkit.processes.channel import FrameCutter, pack
from toolkit.processes.child import Child
from toolkit.workers.protocol import FROM_WORKER, FromWorker, Start, ToWorker

COMMAND = (sys.executable, "-m", "toolkit.workers")
# From closing the socket to exiting: an interpreter that has loaded torch needs this to end.
EXIT_GRACE_S = 5.0

OnFrame = Callable[[FromWorker], None]


class WorkerProcess(asyncio.Protocol):
    """A child that runs `toolkit.workers`, and this end of the channel to it, on an event loop: a
    `toolkit.workers.pool.Body`.
    """

    def __init__(self, on_frame: OnFrame) -> None:
        self.child: Child | None = None
        self._on_frame = on_frame
        self._cutter = FrameCutter()
        self._transport: asyncio.Transport | None = None
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def spawn(
        cls, start: Start, environment: dict[str, str], on_frame: OnFrame
    ) -> WorkerProcess:
        """Start a child with this environment. `on_frame` gets its frames."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, worker = await loop.create_connection(lambda: cls(on_frame), sock=ours)
        try:
            worker.child = await asyncio.to_thread(Child, COMMAND, environment, gives=theirs)
        except BaseException:  # also when cancelled: the child ends, if it was started
            transport.close()
            raise
        worker.send(start)
        return worker

    def send(self, frame: ToWorker) -> None:
        """Queue a frame. It is lost if the process has ended."""
        if self._transport is not None:
            self._transport.write(pack(frame))

    def kill(self) -> None:
        """End the process at once, with all that it has started."""
        if self.child is not None:
            self.child.kill()

    async def gone(self) -> str:
        """Wait until the child has ended, and reap it. Returns why it ended, in one line.

        A child that has closed its socket has nothing left to do, and is killed if it does not exit
        within `EXIT_GRACE_S`.
        """
        await self._closed
        assert self.child is not None
        return await asyncio.to_thread(self.child.end, EXIT_GRACE_S)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has the same methods but is not a subclass.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for body in self._cutter.feed(data):
            self._on_frame(FROM_WORKER.decode(body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._closed.done():
            self._closed.set_result(None)
