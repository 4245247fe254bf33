"""What a front before replicas costs: ours beside `sglang-router` and `vllm-router`.

    python -m benchmarks.serving.router_cost [--bin FOLDER] [--requests 3000]

Takes about two minutes on two idle cores. Needs the two routers in FOLDER, the `bin`
of a virtual environment with `pip install sglang-router vllm-router`; without it ours is measured
alone.

Each front stands before the same two stand-in replicas, which answer at once. Requests per CPU
second count the CPU time of the front's process alone, so they hold whatever the load generator and
the replicas, which share the machine, cost. Prompts have 1.2 kB and share beginnings. Whole answers
come over 32 connections, streams of 64 events over 32, an event every 5 ms; the latency that a
front adds is that of one connection, less that without a front. At last one of the two replicas is
killed while the streams run: an answer is failed that is no 200, breaks off, or lacks a token.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import uvloop

from benchmarks.common.command import make_parser
from benchmarks.common.raw_client import free_ports, wait_for
from benchmarks.common.serving import cpu_s, fake_plan
from benchmarks.common.standin import MODEL, StandIn

CONNECTIONS = 32
EVENTS = 64
EVENT_S = 0.005
ALONE = 400  # requests over one connection
STREAMS = 320


class Cost(NamedTuple):
    """What a front costs. `added` are the percentiles 50 and 99 of one connection, in ms."""

    front: str
    requests_s: float
    requests_cpu_s: float
    events_cpu_s: float
    added: tuple[float, float]
    rss_mb: float
    failed: int  # of the streams, where a replica was killed


KILL_AFTER_S = 1.0


def _replica(port: int, token_s: float) -> None:
    async def serve() -> None:
        await StandIn(port=port, token_s=token_s, speaks_ids=False, token_bytes=4).start()
        await asyncio.Event().wait()

    uvloop.run(serve())


@contextmanager
def replicas(ports: Sequence[int], token_s: float) -> Iterator[list[BaseProcess]]:
    """Stand-in replicas, each in a process."""
    context = multiprocessing.get_context("spawn")
    made = [context.Process(target=_replica, args=(port, token_s)) for port in ports]
    for process in made:
        process.start()
    try:
        for port in ports:
            wait_for(port)
        yield list(made)
    finally:
        for process in made:
            process.terminate()
            process.join()


async def wait_served(port: int, model: str) -> None:
    """Wait until the front has found its replicas."""
    for _ in range(300):
        client = Client(port)
        await client.open()
        if await client.ask(bodies(1, model=model)[0], checks=False):
            await asyncio.sleep(1.0)
            return
        await asyncio.sleep(0.2)
    raise SystemExit("the front finds no replicas")


class Client:
    """One connection that is kept."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self) -> None:
        self._in, self._out = await asyncio.open_connection("127.0.0.1", self._port)

    async def ask(self, body: bytes, *, checks: bool = True, counts: bytes = b"") -> int:
        """Send a request; returns the bytes of its answer, or how often it has `counts`, or 0 for
        an error that may be.
        """
        self._out.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        head = (await self._in.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in head.split(b"\r\n")[0]:
            if not checks:
                return 0
            raise SystemExit(f"the front answered {head!r}")
        if b"content-length: " in head:
            size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
            return len(await self._in.readexactly(size))
        size = 0
        while True:
            chunk = int(await self._in.readuntil(b"\r\n"), 16)
            piece = await self._in.readexactly(chunk + 2)
            size += piece.count(counts) if counts else chunk
            if not chunk:
                return size


async def load(port: int, bodies: Sequence[bytes], connections: int) -> list[float]:
    """Send all; returns the latencies in seconds."""
    left = iter(bodies)
    took = []

    async def work() -> None:
        client = Client(port)
        await client.open()
        for body in left:
            start_s = time.perf_counter()
            await client.ask(body)
            took.append(time.perf_counter() - start_s)

    await asyncio.gather(*(work() for _ in range(connections)))
    return took


async def count_failed(port: int, asked: Sequence[bytes], replica: BaseProcess) -> int:
    """Send streams, kill a replica among them, and count those that failed."""
    left = iter(asked)
    failed = 0
    asyncio.get_running_loop().call_later(KILL_AFTER_S, replica.kill)

    async def work() -> None:
        nonlocal failed
        for body in left:
            events = 0
            with suppress(OSError, asyncio.IncompleteReadError, ValueError):
                client = Client(port)
                await client.open()
                events = await client.ask(body, checks=False, counts=b'"text":"')
            failed += events != EVENTS

    await asyncio.gather(*(work() for _ in range(CONNECTIONS)))
    return failed


def bodies(count: int, **more: Any) -> list[bytes]:
    rng = random.Random(0)
    heads = ["".join(rng.choices("abcdefgh ", k=800)) for _ in range(16)]
    return [
        json.dumps(
            {"model": MODEL, "prompt": rng.choice(heads) + "".join(rng.choices("xyz", k=400)),
             "max_tokens": 1, "ignore_eos": True} | more
        ).encode()
        for _ in range(count)
    ]  # fmt: skip


def measure(front: str, command: Sequence[str], ports: Sequence[int], requests: int) -> Cost:
    """The cost of one front."""
    (port,) = free_ports(1)
    words = [word.replace("PORT", str(port)) for word in command]
    with replicas(ports, 0.0), open_front(words, port) as process:
        uvloop.run(load(port, bodies(200), CONNECTIONS))  # warm
        before_s = cpu_s(process)
        start_s = time.perf_counter()
        uvloop.run(load(port, bodies(requests), CONNECTIONS))
        took_s = time.perf_counter() - start_s
        used_s = cpu_s(process) - before_s
        through = sorted(uvloop.run(load(port, bodies(ALONE), 1)))
        direct = sorted(uvloop.run(load(ports[0], bodies(ALONE), 1)))
        rss = process.memory_info().rss / 1e6
    with replicas(ports, EVENT_S), open_front(words, port) as process:
        asked = bodies(STREAMS, stream=True, max_tokens=EVENTS)
        before_s = cpu_s(process)
        uvloop.run(load(port, asked, CONNECTIONS))
        streamed_s = cpu_s(process) - before_s
    with replicas(ports, EVENT_S) as made, open_front(words, port) as process:
        failed = uvloop.run(count_failed(port, asked, made[0]))
    p50, p99 = (1000 * (through[int(p * ALONE)] - direct[int(p * ALONE)]) for p in (0.5, 0.99))
    rates = requests / took_s, requests / used_s, STREAMS * EVENTS / streamed_s
    return Cost(front, *rates, (p50, p99), rss, failed)


@contextmanager
def open_front(words: Sequence[str], port: int, model: str = MODEL) -> Iterator[psutil.Process]:
    """A front of this command line; it has found its replicas, which serve `model`."""
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(port)
        uvloop.run(wait_served(port, model))
        try:
            yield psutil.Process(process.pid)
        finally:
            process.terminate()


def commands(
    folder: Path, plan: Path, urls: Sequence[str], model: str = MODEL
) -> dict[str, list[str]]:
    """The fronts that are there."""
    ours = [sys.executable, "-m", "toolkit", "serve", str(plan), "--port", "PORT"]
    ours += ["--served-model-name", model, *(word for url in urls for word in ("--replica", url))]
    found = {"llmctl, round-robin": ours, "llmctl, sglang": [*ours, "--router", "sglang"]}
    where = ["--host", "127.0.0.1", "--port", "PORT", "--worker-urls", *urls]
    if (folder / "sglang-router").is_file():
        words = [str(folder / "sglang-router"), "launch", *where, "--policy", "cache_aware"]
        found["sglang-router, cache_aware"] = [*words, "--prometheus-port", str(free_ports(1)[0])]
    if (folder / "vllm-router").is_file():
        words = [str(folder / "vllm-router"), *where, "--policy", "cache_aware"]
        found["vllm-router, cache_aware"] = [*words, "--prometheus-port", str(free_ports(1)[0])]
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--bin", type=Path, default=Path(sys.executable).parent)
    parser.add_argument("--requests", type=int, default=3000)
    given = parser.parse_args()
    ports = free_ports(2)
    with tempfile.TemporaryDirectory() as name:
        fake_plan(Path(name))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        fronts = commands(given.bin, Path(name) / "plan.json", urls)
        costs = [measure(front, words, ports, given.requests) for front, words in fronts.items()]
    heads = "requests/s | requests per CPU s | events per CPU s | added p50 / p99 | RSS | failed"
    print(f"| front | {heads} |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for cost in costs:
        p50, p99 = cost.added
        print(
            f"| {cost.front} | {cost.requests_s:,.0f} | {cost.requests_cpu_s:,.0f} "
            f"| {cost.events_cpu_s:,.0f} | {p50:.2f} / {p99:.2f} ms | {cost.rss_mb:.0f} MB "
            f"| {cost.failed} of {STREAMS} |"
        )
    best = statistics.mean(cost.requests_cpu_s for cost in costs if cost.front.startswith("llmctl"))
    print(f"llmctl serves {best:,.0f} requests per CPU second on average")


if __name__ == "__main__":
    main()
