"""Clients that stop reading and clients that go away: what the others notice, and how soon their
places are free.

    python bench/bad_clients.py [--clients 16] [--stalled 64] [--leaving 30]

Fake engines in two workers, 4 ms a step. First streams alone and then the same beside streams whose
clients never read, alternating; then clients that leave in the middle of a stream, one after the
other, and the time until the server runs nothing any more (`llmctl_requests_running`), held against
the longest batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil
from raw_client import request, send

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from serving import Server, fake_plan

STEP_S, SLICE_TOKENS = 0.004, 32


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
    """Median seconds of streams of 128 tokens beside so many that nobody reads, which stand still
    from their start.
    """
    stuck = [stall(port, 8) for _ in range(stalled)]
    await asyncio.sleep(0.5)
    took = await asyncio.gather(*[read_all(port, 128) for _ in range(clients)])
    for one in stuck:
        one.close()
    return statistics.median(took)


async def running(http: httpx.AsyncClient) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return next(
        float(line.split()[-1]) for line in lines if line.startswith("llmctl_requests_running{")
    )


async def leave(port: int, http: httpx.AsyncClient) -> float:
    """Seconds from a client's end until nothing runs."""
    reader, writer = await send(port, streamed(250))
    while b"data: {" not in await reader.read(1 << 14):
        pass
    writer.transport.abort()
    left_s = time.perf_counter()
    while await running(http):
        await asyncio.sleep(0.001)
    return time.perf_counter() - left_s


async def measure(
    url: str, front: psutil.Process, options: argparse.Namespace
) -> dict[str, object]:
    port = int(url.rpartition(":")[2])
    alone, crowded = [], []
    for _ in range(5):
        alone.append(await beside(port, options.clients, 0))
        crowded.append(await beside(port, options.clients, options.stalled))
    async with httpx.AsyncClient(base_url=url) as http:
        freed = sorted([await leave(port, http) for _ in range(options.leaving)])
    return {
        "stream_s_alone": round(statistics.median(alone), 3),
        "stream_s_beside_stalled": round(statistics.median(crowded), 3),
        "stalled": options.stalled,
        "rss_mib": round(front.memory_info().rss / 2**20, 1),
        "freed_ms_median": round(1e3 * statistics.median(freed), 1),
        "freed_ms_max": round(1e3 * freed[-1], 1),
        "slice_ms": round(1e3 * STEP_S * SLICE_TOKENS, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--stalled", type=int, default=64)
    parser.add_argument("--leaving", type=int, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fake_plan(Path(folder), eos_one_in=0, decode_s=STEP_S)
        command = ("--admission", "queue", "--set", f"slice_tokens={SLICE_TOKENS}")
        with Server(Path(folder) / "plan.json", *command) as server:
            print(
                json.dumps(
                    asyncio.run(measure(server.url, psutil.Process(server.process.pid), options))
                )
            )
            server.end()


if __name__ == "__main__":
    main()
