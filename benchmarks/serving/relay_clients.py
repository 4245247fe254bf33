"""CPU time per event that a process spends which only relays streams, by HTTP client.

    python -m benchmarks.serving.relay_clients [--streams 100] [--events 100] [--with aiohttp]

Takes some seconds. `ours` is `toolkit.endpoints.upstream.Upstream`, over aiohttp; `--with` names a
further library that is installed: aiohttp, httpx or httpx2. The server has a process of its own,
and sends an event of each stream every 5 ms.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import multiprocessing
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from benchmarks.common.command import make_parser
from toolkit.endpoints.upstream import Upstream

EVENT = b'data: {"id":"cmpl-0","choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVERY_S = 0.005


def serve(events: int, parent: Connection) -> None:
    """Answer each request with so many events, until the parent closes its end."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(HEAD)
                for _ in range(events):
                    await asyncio.sleep(EVERY_S)
                    writer.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
                writer.write(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
        parent.send(server.sockets[0].getsockname()[1])
        await asyncio.to_thread(parent.poll, None)

    asyncio.run(main())


async def pieces_of(name: str, http: Any, url: str) -> AsyncIterator[bytes]:
    """The pieces of one answer."""
    if name == "ours":
        async with aclosing(await http.send("GET", b"/", [], b"")) as answer:
            async for piece in answer.body():
                yield piece
    elif name == "aiohttp":
        async with http.get(url) as answer:
            async for piece in answer.content.iter_any():
                yield piece
    else:
        async with http.stream("GET", url) as answer:
            async for piece in answer.aiter_raw():
                yield piece


async def relay(name: str, url: str, streams: int) -> tuple[float, int]:
    """The CPU seconds of so many streams at once, and their bytes."""
    http: Any = Upstream(url, math.inf)
    if name == "aiohttp":
        library = importlib.import_module(name)
        connector = library.TCPConnector(limit=0)
        http = library.ClientSession(connector=connector, auto_decompress=False)
    elif name != "ours":
        library = importlib.import_module(name)
        http = library.AsyncClient(limits=library.Limits(max_connections=None), timeout=None)

    async def one() -> int:
        return sum([len(piece) async for piece in pieces_of(name, http, url)])

    await one()
    before_s = time.process_time()
    sizes = await asyncio.gather(*(one() for _ in range(streams)))
    spent_s = time.process_time() - before_s
    await (http.close() if name in ("ours", "aiohttp") else http.aclose())
    return spent_s, sum(sizes)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--with", dest="others", action="append", default=[])
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(options.events, theirs), daemon=True)
    process.start()
    url = f"http://127.0.0.1:{ours.recv()}"
    for name in ["ours", *options.others] * 2:
        spent_s, size = uvloop.run(relay(name, url, options.streams))
        events = size / len(EVENT)
        print(f"{name:10} {1e6 * spent_s / events:6.1f} us of CPU per event, {events:,.0f} events")
    process.kill()


if __name__ == "__main__":
    main()
