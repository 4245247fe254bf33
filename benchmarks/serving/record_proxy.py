"""The cost of `llmctl trace record`: throughput and latency with and without the recorder.

    python -m benchmarks.serving.record_proxy [--clients 64] [--tokens 64] [--repeats 7]

Takes 15 s with one repeat. Needs nothing but the package.

A stand-in server, raw ASGI on uvicorn with its bytes ready, is asked directly and through the
recorder in turns. It answers as fast as such a server can, so that the recorder's share shows.
Streams have an event per token, written in one burst; `whole` answers are one JSON. Throughput is
that of a crowd of clients with a connection each; added latency is that of single requests, one
after the other, on connections of their own. The trace is checked: it has as many lines as requests
went through, all counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.common.command import make_parser
from benchmarks.common.raw_client import free_ports, request, send, wait_for

STAND_IN = """
import json

EVENT = b'data: {"id":"c-1","object":"text_completion","choices":[{"index":0,"text":"x"}]}\\n\\n'
WHOLE = '{"id":"c-1","object":"text_completion","choices":[{"index":0,"text":"%s"}],"usage":%s}'


LAST = b'data: {"id":"c-1","object":"text_completion","choices":[],"usage":%s}\\n\\n'


async def start(send, kind):
    headers = [(b"content-type", kind)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def app(scope, receive, send):
    body = json.loads((await receive())["body"])
    tokens = body["max_tokens"]
    counts = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
    usage = json.dumps(counts)
    if not body.get("stream"):
        await start(send, b"application/json")
        await send({"type": "http.response.body", "body": (WHOLE % ("x" * tokens, usage)).encode()})
        return
    await start(send, b"text/event-stream")
    for _ in range(tokens):
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
    if body.get("stream_options", {}).get("include_usage"):
        last = LAST % usage.encode()
        await send({"type": "http.response.body", "body": last, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\\n\\n", "more_body": False})
"""


class Took(NamedTuple):
    """Seconds of a request from before it connects to its first and to its last byte."""

    first_s: float
    whole_s: float


async def ask(port: int, tokens: int, *, stream: bool) -> Took:
    asked = request(prompt="x" * 50, max_tokens=tokens, stream=stream)
    begin_s = time.perf_counter()
    reader, writer = await send(port, asked)
    received = await reader.read(1 << 16)
    first_s = time.perf_counter() - begin_s
    received += await reader.read(-1)
    writer.close()
    if not received.startswith(b"HTTP/1.1 200") or (stream and b"[DONE]" not in received):
        raise RuntimeError(f"no whole answer: {received[:200]!r}")
    return Took(first_s, time.perf_counter() - begin_s)


async def crowd(port: int, clients: int, tokens: int, *, stream: bool) -> float:
    """Seconds for all clients."""
    begin_s = time.perf_counter()
    await asyncio.gather(*[ask(port, tokens, stream=stream) for _ in range(clients)])
    return time.perf_counter() - begin_s


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def throughput(ports: dict[str, int], options: argparse.Namespace, recorder: psutil.Process) -> int:
    """Print it for streams and whole answers; the number of requests through the recorder."""
    through = 0
    for stream in (True, False):
        rates: dict[str, list[float]] = {name: [] for name in ports}
        cpu_s = 0.0
        for repeat in range(options.repeats + 1):  # the first warms up
            for name in sorted(ports, reverse=bool(repeat % 2)):
                before = recorder.cpu_times()
                crowded = crowd(ports[name], options.clients, options.tokens, stream=stream)
                took_s = asyncio.run(crowded)
                after = recorder.cpu_times()
                through += options.clients if name == "recorder" else 0
                if repeat:
                    rates[name].append(options.clients / took_s)
                    cpu_s += sum(after[:2]) - sum(before[:2]) if name == "recorder" else 0.0
        shares = [100 * a / b for a, b in zip(rates["recorder"], rates["direct"], strict=True)]
        direct, proxied = (statistics.median(rates[name]) for name in ("direct", "recorder"))
        cpu_us = 1e6 * cpu_s / options.repeats / options.clients
        what = f"whole answers of {options.tokens} tokens"
        what = f"streams of {options.tokens}" if stream else what
        print(
            f"{what}: {direct:,.0f} requests/s directly, {proxied:,.0f} through the recorder;"
            f" paired {statistics.median(shares):.0f} % ({min(shares):.0f} to {max(shares):.0f});"
            f" {cpu_us:.0f} us of its CPU each"
        )
    return through


def latency(ports: dict[str, int], count: int, tokens: int) -> int:
    """Print the added latency of a single stream; the number of requests through the recorder."""
    found: dict[str, list[Took]] = {name: [] for name in ports}

    async def one_by_one() -> None:
        for _ in range(count):
            for name, port in ports.items():
                found[name].append(await ask(port, tokens, stream=True))

    asyncio.run(one_by_one())
    for part in Took._fields:
        times = {name: [1e3 * getattr(one, part) for one in all_] for name, all_ in found.items()}
        added = [b - a for a, b in zip(times["direct"], times["recorder"], strict=True)]
        direct, proxied = (statistics.median(times[name]) for name in ("direct", "recorder"))
        which = "first" if part == "first_s" else "last"
        p50 = statistics.median(added)
        p99 = quantile(added, 0.99)
        print(
            f"alone, to the {which} byte: {direct:.2f} ms directly, {proxied:.2f} ms through;"
            f" added p50 {p50:.2f}, p99 {p99:.2f} ms"
        )
    return count


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--alone", type=int, default=400, help="single requests, each way")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "stand_in.py").write_text(STAND_IN)
        ports = dict(zip(("direct", "recorder"), free_ports(2), strict=True))
        trace = Path(folder, "trace.jsonl")
        uvicorn = [
            "-m",
            "uvicorn",
            "--log-level",
            "critical",
            "--no-access-log",
            "stand_in:app",
            "--port",
        ]
        words = [sys.executable, *uvicorn, str(ports["direct"])]
        stand_in = subprocess.Popen(words, cwd=folder)
        wait_for(ports["direct"])
        words = [sys.executable, *["-m", "toolkit", "trace", "record", "--out"], str(trace)]
        words += ["--upstream", f"http://127.0.0.1:{ports['direct']}"]
        words += ["--listen", f"127.0.0.1:{ports['recorder']}"]
        recorder = subprocess.Popen(words)
        wait_for(ports["recorder"])
        asked = throughput(ports, options, psutil.Process(recorder.pid))
        asked += latency(ports, options.alone, options.tokens)
        for process in (recorder, stand_in):
            process.terminate()
            process.wait(60)
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
    ok = [line for line in lines if line["status"] == "ok"]
    whole = sum(line["output_length"] == options.tokens for line in ok)
    through = f"{asked:,} requests went through the recorder"
    print(f"{through}; {len(lines):,} lines in its trace, {whole:,} of them counted")


if __name__ == "__main__":
    main()
