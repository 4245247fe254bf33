"""One worker's process as the front sees it."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable

from toolkit.processes.channel import AsyncChannel
from toolkit.processes.child import Child
from toolkit.workers.protocol import FROM_WORKER, FromWorker, Start

# From closing the socket to exiting: an interpreter that has loaded torch needs this to end.
EXIT_GRACE_S = 5.0

OnFrame = Callable[[FromWorker], None]


COMMAND = (sys.executable, "-m", "toolkit.workers")


class WorkerProcess:
    """A child that runs `toolkit.workers`, and the channel to it: a `toolkit.workers.pool.Body`."""

    def __init__(self, child: Child, channel: AsyncChannel[FromWorker]) -> None:
        self.pid = child.pid
        self.send = channel.send
        self.kill = child.kill
        self._child = child
        self._channel = channel

    @classmethod
    async def spawn(
        cls, start: Start, environment: dict[str, str], on_frame: OnFrame
    ) -> WorkerProcess:
        """Start a child with this environment. `on_frame` gets its frames."""
        ours, theirs = socket.socketpair()
        channel = AsyncChannel(FROM_WORKER, on_frame)
        await channel.open(ours)
        try:
            child = await asyncio.to_thread(Child, COMMAND, environment, gives=theirs)
        except BaseException:  # also when cancelled
            channel.close()
            raise
        channel.send(start)
        return cls(child, channel)

    async def gone(self) -> str:
        """Wait until the child has ended, and reap it. Returns why it ended, in one line.

        A child that has closed its socket has nothing left to do, and is killed if it does not exit
        within `EXIT_GRACE_S`.
        """
        await self._channel.closed
        return await asyncio.to_thread(self._child.end, EXIT_GRACE_S)
