"""Clients that stop reading, and clients that disconnect: the cost for other clients.

    python -m benchmarks.serving.bad_clients [--clients 16] [--stalled 64] [--leaving 30]

Takes about a minute. Needs nothing but the package: two workers with fake engines, 4 ms a step.

First streams run alone and beside streams that their clients never read, in turns. Then clients
disconnect in the middle of a stream, one after the other; measured is the time until the server
runs no request (`llmctl_requests_running`), beside the longest batch. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import time

import httpx

from benchmarks.common.command import make_parser
from benchmarks.common.raw_client import request, send
from benchmarks.common.serving import Server, fake_server, metric

STEP_S = 0.004
SLICE_TOKENS = 32


def streamed(tokens: int) -> bytes:
    return request(prompt="x" * 20, max_tokens=tokens, stream=True, temperature=0)


async def read_all(port: int, tokens: int) -> float:
    """Seconds of one stream."""
    begin_s = time.perf_counter()
    reader, writer = await send(port, streamed(tokens))
    if b"[DONE]" not in await reader.read(-1):
        raise RuntimeError("a stream was cut off")
    writer.close()
    return time.perf_counter() - begin_s


def stall(port: int, tokens: int) -> socket.socket:
    """A client with the smallest buffer that never reads."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    one.connect(("127.0.0.1", port))
    one.sendall(streamed(tokens))
    return one


async def beside(port: int, clients: int, stalled: int) -> float:
    """Median seconds of streams of 128 tokens beside this many unread ones, which stall from their
    start.
    """
    stuck = [stall(port, 8) for _ in range(stalled)]
    await asyncio.sleep(0.5)
    took = await asyncio.gather(*[read_all(port, 128) for _ in range(clients)])
    for one in stuck:
        one.close()
    return statistics.median(took)


async def leave(port: int, http: httpx.AsyncClient) -> float:
    """Seconds from a client's disconnect until the server runs no request."""
    reader, writer = await send(port, streamed(250))
    while b"data: {" not in await reader.read(1 << 14):
        pass
    writer.transport.abort()
    left_s = time.perf_counter()
    while metric((await http.get("/metrics")).text, "llmctl_requests_running"):
        await asyncio.sleep(0.001)
    return time.perf_counter() - left_s


async def measure(server: Server, options: argparse.Namespace) -> dict[str, object]:
    port = server.port
    alone = []
    crowded = []
    for _ in range(5):
        alone.append(await beside(port, options.clients, 0))
        crowded.append(await beside(port, options.clients, options.stalled))
    async with httpx.AsyncClient(base_url=server.url) as http:
        freed = sorted([await leave(port, http) for _ in range(options.leaving)])
    return {
        "stream_s_alone": round(statistics.median(alone), 3),
        "stream_s_beside_stalled": round(statistics.median(crowded), 3),
        "stalled": options.stalled,
        "rss_mib": round(server.front.memory_info().rss / 2**20, 1),
        "freed_ms_median": round(1e3 * statistics.median(freed), 1),
        "freed_ms_max": round(1e3 * freed[-1], 1),
        "slice_ms": round(1e3 * STEP_S * SLICE_TOKENS, 1),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--stalled", type=int, default=64)
    parser.add_argument("--leaving", type=int, default=30)
    options = parser.parse_args()
    command = ("--admission", "queue", "--set", f"slice_tokens={SLICE_TOKENS}")
    with fake_server(*command, eos_one_in=0, decode_s=STEP_S) as server:
        print(json.dumps(asyncio.run(measure(server, options))))
        server.end()


if __name__ == "__main__":
    main()
