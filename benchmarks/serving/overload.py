"""Overload, five times the capacity: refusals, their latency, targets kept, and memory.

    python -m benchmarks.serving.overload [--seconds 30] [--times 5] [--plan plan.json]

Takes three to four minutes with --seconds 4, and four times --seconds in general. Needs nothing but
the package.

Without a plan two workers with fake engines take the fit's times, so that the cores belong to the
front and its clients. First a closed loop without refusals gives the capacity. Then Poisson
arrivals at half of it, and at `--times` of it, once with admission by the recipe's targets and once
without. Clients are raw sockets in this process; a refusal is timed from the start of the
connection to the last byte of the answer.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.command import make_parser
from benchmarks.common.raw_client import request, send
from benchmarks.common.serving import Server, fake_plan
from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.routing.admission import LatencyLimits

FAKE = {
    "eos_one_in": 0,
    "prefill_s": 4e-3,
    "prefill_token_s": 2e-5,
    "decode_s": 4e-3,
    "decode_row_s": 1e-4,
}
CLOSED_LOOP = 256


@dataclass
class Got:
    """The outcome of one request, in seconds since it was sent."""

    status: int = 0
    first_s: float = math.nan
    end_s: float = math.nan
    retry_after: str = ""
    complete: bool = False


@dataclass
class Phase:
    """The results of one phase."""

    got: list[Got] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def line(self, limits: LatencyLimits) -> dict[str, Any]:
        served = [one for one in self.got if one.status == 200]
        refused = sorted(one.end_s for one in self.got if one.status in (429, 503))
        kept = sum(
            one.complete and one.first_s <= limits.ttft_s and one.end_s <= limits.e2e_s
            for one in served
        )
        return {
            "sent": len(self.got),
            "served": len(served),
            "incomplete": sum(not one.complete for one in served),
            "refused": len(refused),
            "other": len(self.got) - len(served) - len(refused),
            "goodput_rps": round(kept / self.seconds, 1),
            "attainment_percent": round(100 * kept / len(served), 1) if served else None,
            "ttft_p50_s": _quantile([one.first_s for one in served], 0.5),
            "ttft_p99_s": _quantile([one.first_s for one in served], 0.99),
            "e2e_p99_s": _quantile([one.end_s for one in served], 0.99),
            "refusal_p50_ms": _quantile([1e3 * one for one in refused], 0.5),
            "refusal_p99_ms": _quantile([1e3 * one for one in refused], 0.99),
            "refusal_max_ms": _quantile([1e3 * one for one in refused], 1.0),
            "retry_after": sorted({one.retry_after for one in self.got if one.retry_after}),
            "rss_mib": [round(one, 1) for one in self.rss_mib],
        }


def _quantile(values: list[float], share: float) -> float | None:
    ordered = sorted(value for value in values if not math.isnan(value))
    return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 3) if ordered else None


async def ask(port: int, rng: random.Random) -> Got:
    """One streamed request of random lengths."""
    prompt = "x" * rng.randint(20, 200)
    tokens = rng.randint(32, 192)
    asked = request(prompt=prompt, max_tokens=tokens, stream=True, temperature=0, ignore_eos=True)
    got = Got()
    begin_s = time.perf_counter()
    reader, writer = await send(port, asked)
    head = await reader.readuntil(b"\r\n\r\n")
    got.status = int(head[9:12])
    for line in head.decode().lower().split("\r\n"):
        if line.startswith("retry-after: "):
            got.retry_after = line[13:]
    rest = b""
    while piece := await reader.read(1 << 14):
        rest = (rest + piece)[-64:]
        if math.isnan(got.first_s) and b"data: {" in piece:
            got.first_s = time.perf_counter() - begin_s
    got.end_s = time.perf_counter() - begin_s
    got.complete = b"[DONE]" in rest
    writer.close()
    return got


async def closed_loop(port: int, seconds: float, rng: random.Random) -> float:
    """Requests per second with this many always in flight, without the first third of them."""
    ends: list[float] = []
    stop_s = time.perf_counter() + seconds

    async def one() -> None:
        while time.perf_counter() < stop_s:
            await ask(port, rng)
            ends.append(time.perf_counter())

    await asyncio.gather(*[one() for _ in range(CLOSED_LOOP)])
    begin_s = stop_s - seconds * 2 / 3
    return sum(begin_s <= end <= stop_s for end in ends) / (stop_s - begin_s)


async def open_loop(
    port: int, rate_rps: float, seconds: float, rng: random.Random, front: psutil.Process
) -> Phase:
    """Poisson arrivals for this long, then wait for all requests."""
    phase = Phase(seconds=seconds)
    tasks = []
    begin_s = time.perf_counter()

    async def watch() -> None:
        while True:
            phase.rss_mib.append(front.memory_info().rss / 2**20)
            await asyncio.sleep(seconds / 10)

    watching = asyncio.create_task(watch())
    due_s = 0.0
    while (due_s := due_s + rng.expovariate(rate_rps)) < seconds:
        await asyncio.sleep(max(begin_s + due_s - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(ask(port, rng)))
    phase.got = list(await asyncio.gather(*tasks))
    watching.cancel()
    return phase


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--policy", default="slice")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--times", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    policy = ["--policy", options.policy, *(part for one in options.set for part in ("--set", one))]
    rng = random.Random(options.seed)
    lines = {}
    with tempfile.TemporaryDirectory() as folder:
        path = options.plan or Path(folder) / "plan.json"
        if options.plan is None:
            fake_plan(Path(folder), **FAKE)
        limits = LatencyLimits.of(read_file(Plan, path).recipe.sla)
        with Server(path, *policy, "--admission", "queue") as server:
            capacity = asyncio.run(closed_loop(server.port, options.seconds / 2, rng))
            print(f"capacity {capacity:.1f} requests/s; targets {limits}", flush=True)
            server.end()
        phases = [
            ("half", "targets", 0.5),
            ("overload", "targets", options.times),
            ("overload, all admitted", "queue", options.times),
        ]
        for name, admission, load in phases:
            with Server(path, *policy, "--admission", admission) as server:
                port = server.port
                front = server.front
                asyncio.run(closed_loop(port, 3.0, rng))  # warms up
                seconds = options.seconds if admission == "targets" else options.seconds / 3
                phase = asyncio.run(open_loop(port, load * capacity, seconds, rng, front))
                lines[name] = phase.line(limits)
                print(name, json.dumps(lines[name]), flush=True)
                server.end()
    share = lines["overload"]["attainment_percent"] / lines["half"]["attainment_percent"]
    print(f"attainment of the admitted: {100 * share:.1f} % of the uncontended one")
    rss_mib = lines["overload"]["rss_mib"]
    end_mib = statistics.mean(rss_mib[-3:])
    begin_mib = statistics.mean(rss_mib[1:4])
    rss = f"{end_mib:.1f} MiB at its end, {begin_mib:.1f} MiB near its begin"
    print(f"front's RSS over the overload: {rss}")


if __name__ == "__main__":
    main()
