"""`llmctl bench` beside a plain client: the same requests to the same server, in turns.

    python -m benchmarks.serving.plain_client --url URL [--trace chat-small] [--rate 10]
        [--seconds 20] [--turns 3] [--spinning 0] [--json FILE]

Takes three minutes with three turns. Needs a server that runs already, and an otherwise idle
machine; `--spinning 2` starts two processes that only compute beside it.

The plain client is the thirty lines of `plain`: aiohttp on asyncio, at real-time priority where
that is allowed, with nothing of llmctl's load generator. Both get the same part of the trace, and
tell the server the output lengths. The time to first token counts from the scheduled arrival. The
goal: mean, p95 and p99 over the requests of all turns agree within 10 %, or differ by less than the
plain client's own turns do, or `bench` says in each turn that it was late itself. A row stands for
each turn, too: there p99 is the third slowest of 240 requests, and a server is not equally fast in
two replays of the same requests. The last line says how far the plain client's own turns lie apart.
With `--turns 0` only the plain client runs, once.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import aiohttp
import numpy as np
from numpy.typing import NDArray

from benchmarks.common.command import ended, llmctl, make_parser
from benchmarks.common.results_file import markdown
from toolkit.bench.client import fitted, limits_of
from toolkit.endpoints.target import Target, find_target
from toolkit.errors import LateClientError
from toolkit.files.bench import BenchReport
from toolkit.files.io import read_file
from toolkit.traces.read import read_trace
from toolkit.traces.types import Trace, trace_path
from toolkit.traces.windows import excerpt

STATISTICS = ("mean", "p95", "p99")
AGREE = 0.1
WARMUP = 50  # requests before the first turn, which no figure has
SPIN = "while True: pass"


def plain(url: str, model: str, rows: Sequence[tuple[float, int, int]]) -> list[float]:
    """The time to first token of each request, in seconds from its scheduled arrival.

    Args:
        rows: arrival in seconds, prompt tokens and output tokens of each request.
    """
    rng = np.random.default_rng()
    fields = {"model": model, "temperature": 0, "ignore_eos": True, "stream": True}
    prompts = [rng.integers(0, 256, prompt).tolist() for _, prompt, _ in rows]

    async def send(
        session: aiohttp.ClientSession, prompt: list[int], at_s: float, output: int
    ) -> float:
        await asyncio.sleep(at_s - time.perf_counter())
        first_s = float("nan")
        body = fields | {"prompt": prompt, "max_tokens": output}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                found = line.startswith(b"data: {") and json.loads(line[6:])["choices"]
                if found and first_s != first_s:
                    first_s = time.perf_counter()
        return first_s - at_s

    async def every() -> list[float]:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            start_s = time.perf_counter() + 0.1
            sent = [
                send(session, prompt, start_s + at_s, output)
                for prompt, (at_s, _, output) in zip(prompts, rows, strict=True)
            ]
            return await asyncio.gather(*sent)

    with suppress(AttributeError, PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        return asyncio.run(every())
    finally:
        with suppress(AttributeError, PermissionError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def by_plain(target: Target, trace: Trace) -> list[float]:
    """Return the times to first token in ms that the plain client sees."""
    rows = [(at_s, prompt, output) for at_s, prompt, output, _, _ in trace.rows()]
    return [1e3 * ttft_s for ttft_s in plain(target.url, target.model, rows)]


def by_bench(words: Sequence[str]) -> tuple[list[float], BenchReport]:
    """Return the times to first token in ms that `llmctl bench` sees, and its report."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "bench.json")
        requests = Path(folder, "requests.jsonl")
        words = [*words, "--out", str(out), "--save-requests", str(requests)]
        llmctl("bench", *words, codes=(0, LateClientError.exit_code))
        report = read_file(BenchReport, out)
        rows = [json.loads(line) for line in requests.read_text().splitlines()]
    return [row["ttft_ms"] for row in rows], report


def statistics(ttft_ms: Sequence[float] | NDArray[np.float64]) -> list[float]:
    """Return mean, p95 and p99."""
    return [float(np.mean(ttft_ms)), *map(float, np.percentile(ttft_ms, [95, 99]))]


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """So many processes that compute, until the block ends."""
    others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def compare() -> None:
    """Let both measure in turns, and print a row for each turn."""
    parser = make_parser(__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--trace", default="chat-small")
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each replay")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--spinning", type=int, default=0, help="processes that compute beside it")
    given = parser.parse_args()
    target = find_target(given.url)
    path = trace_path(given.trace)
    whole = fitted(read_trace(path)[0], limits_of(None, target), given.rate)
    trace = excerpt(whole, 0.0, given.seconds)
    words = ["--url", given.url, "--trace", str(path), "--rate", str(given.rate)]
    words += ["--duration", str(given.seconds), "--lengths", "given"]
    by_plain(target, trace.take(np.arange(min(WARMUP, len(trace)))))
    plain_ms: list[list[float]] = []
    bench_ms: list[list[float]] = []
    lates: list[bool] = []
    with spinning(given.spinning):
        if not given.turns:
            print("plain client, ms:", statistics(by_plain(target, trace)))
            return
        for turn in range(given.turns):
            if turn % 2:  # neither is always the first
                measured, report = by_bench(words)
                plain_ms.append(by_plain(target, trace))
            else:
                plain_ms.append(by_plain(target, trace))
                measured, report = by_bench(words)
            bench_ms.append(measured)
            lates.append(bool(report.late))
            if report.client:
                print(f"turn {turn + 1}: {report.client.text()}", flush=True)
    turns = [statistics(one) for one in plain_ms]
    table = []
    for turn, (first, second, late) in enumerate(
        zip(turns, map(statistics, bench_ms), lates, strict=True), 1
    ):
        table += rows_of(str(turn), first, second, "late" if late else "not late")
    pooled = statistics(np.concatenate(plain_ms)), statistics(np.concatenate(bench_ms))
    table += rows_of("all", *pooled, f"late in {sum(lates)} of {given.turns}")
    columns = ("turn", "TTFT", "plain, ms", "bench, ms", "ratio", "bench says")
    print(markdown(columns, table))
    spread = np.max(turns, axis=0) / np.min(turns, axis=0)
    spreads = ", ".join(f"{one} {ratio:.2f}" for one, ratio in zip(STATISTICS, spread, strict=True))
    print(f"the plain client's slowest turn over its fastest: {spreads}")
    apart = [max(two / one, one / two) for one, two in zip(*pooled, strict=True)]
    agrees = max(apart) <= 1.0 + AGREE
    own = all(one <= other for one, other in zip(apart, spread.tolist(), strict=True))
    said = "agree" if agrees else "differ by less than its turns" if own else "differ"
    print(f"over all turns they {said}; the limit is {100 * AGREE:.0f} %")
    if not agrees and not own and not all(lates):
        raise SystemExit(1)


def rows_of(turn: str, first: list[float], second: list[float], said: str) -> list[list[str]]:
    """Return the table's rows of one turn: both clients' statistics and their ratio."""
    return [
        [turn, name, f"{one:.3g}", f"{two:.3g}", f"{two / one:.3g}", said]
        for name, one, two in zip(STATISTICS, first, second, strict=True)
    ]


if __name__ == "__main__":
    sys.exit(ended(compare))
