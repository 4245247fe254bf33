"""A replica without a model and with an exactly known law.

python -m benchmarks.common.fixed_server PORT
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common.standin import StandIn, StandInConnection

TOKEN_S = 0.1  # of a pass: long, so that a busy machine's delays are small beside it
ROWS = 4  # requests that run at once


@dataclass
class FixedServer(StandIn):
    """A stand-in with passes of `TOKEN_S`, which `ROWS` requests share; more of them wait."""

    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(ROWS))
    parts: list[asyncio.Future[None]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0
    running: int = 0

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: FixedConnection(self), "127.0.0.1", self.port, backlog=1024
        )
        self.show()

    def show(self) -> None:
        self.metrics = (
            f"vllm:num_requests_waiting {self.waiting}\nvllm:num_requests_running {self.running}\n"
        )

    async def passes(self) -> None:
        """Run one pass after the other while requests are there."""
        loop = asyncio.get_running_loop()
        end_s = 0.0
        while True:
            if not self.parts:
                self.news.clear()
                await self.news.wait()
                if loop.time() - end_s > TOKEN_S / 5:  # not only late to ask
                    end_s = loop.time()
            part = self.parts
            self.parts = []
            end_s = max(end_s, loop.time() - TOKEN_S) + TOKEN_S
            await asyncio.sleep(end_s - loop.time())
            for one in part:
                if not one.done():
                    one.set_result(None)
            for _ in range(4):  # the rows ask for their next tokens
                await asyncio.sleep(0)


class FixedConnection(StandInConnection):
    server: FixedServer

    async def _generate(self, *about: Any, **more: Any) -> None:
        server = self.server
        server.waiting += 1
        server.show()
        async with server.slots:
            server.waiting -= 1
            server.running += 1
            server.show()
            try:
                await super()._generate(*about, **more)
            finally:
                server.running -= 1
                server.show()

    async def _pause(self) -> None:
        part = asyncio.get_running_loop().create_future()
        self.server.parts.append(part)
        self.server.news.set()
        await part


async def serve_fixed(port: int) -> None:
    server = FixedServer(port=port, token_s=TOKEN_S)
    await server.start()
    await server.passes()


if __name__ == "__main__":
    asyncio.run(serve_fixed(int(sys.argv[1])))
