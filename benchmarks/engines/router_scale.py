"""What a simulated request costs behind each router, at several numbers of replicas.

    python -m benchmarks.engines.router_scale [--routers by-law] [--replicas 8 64] [--most 1000000]

Takes four minutes for all routers with 100,000 requests, and ten seconds for one with `--most
10000`. Needs nothing.

Each row is one simulation: 10,000 requests, then ten times as many up to `--most`. Its time is the
processor time of all of `simulate`, on one core, without the making of the trace. Requests arrive
at random, at the same rate per replica whatever their number: `--load` times what round-robin
serves of a backlog. They are short, so that the router is a large part of the time: a prompt begins
with one of 25 templates per replica. A row that would take longer than `--cell-s`, by the row with
fewer requests, is left out. The first line says whether compiled code or plain Python ran;
`LLMCTL_COMPILED=0` forces the latter. To compare machines, the same run measures a loop in Python
that does the least that a simulator of one queue can do, and each row is divided by it as well. The
last table has the cost of a request at each number of replicas over that at the first.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from time import process_time

import numpy as np

from benchmarks.common.command import make_parser
from benchmarks.common.results_file import keep
from benchmarks.engines.replica_routers import TARGETS, serve
from benchmarks.papers.simulator_scale import bare_python
from toolkit.compiled import running
from toolkit.routing.routers import ROUTERS
from toolkit.traces.generate import Arrivals, SharedContent, generate, parse_lengths
from toolkit.traces.types import Trace

SIZES = (8, 64)
REQUESTS = (10_000, 100_000, 1_000_000)
TEMPLATES = 25  # for each replica, all asked equally often
TEMPLATE = "uniform:64:256"
PROMPT = "uniform:16:128"
OUTPUT = "uniform:8:64"
BACKLOG = 4_000  # requests that the capacity is measured with


@dataclass(frozen=True, slots=True)
class Row:
    """One simulation, and its processor time per request."""

    router: str
    replicas: int
    requests: int
    us: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of this benchmark: which code ran, the bare loop's requests/s, the rows, and the most
    memory in GiB.
    """

    compiled: bool
    python_rps: float
    rows: list[Row]
    memory_gib: float


def requests(count: int, replicas: int, rate_rps: float) -> Trace:
    """`count` requests at a rate in requests/s."""
    lengths = parse_lengths(PROMPT), parse_lengths(OUTPUT)
    content = SharedContent(0, TEMPLATES * replicas, parse_lengths(TEMPLATE), zipf=0.0)
    seconds = 1.05 * count / rate_rps + 10.0 / rate_rps
    made = generate(Arrivals(rate_rps), seconds, *lengths, 0, content)
    return made.take(np.arange(count))


def capacity_rps() -> float:
    """Requests/s of one replica of the first size when all requests wait at the start."""
    replicas = SIZES[0]
    made = requests(BACKLOG, replicas, 1.0)
    waiting = replace(made, arrival_s=np.zeros(len(made)))
    found = serve(waiting, replicas, "round-robin").metrics(TARGETS)
    return found["throughput_rps"] / replicas


def simulated(router: str, replicas: int, count: int, rate_rps: float) -> Row:
    """One row, at a rate in requests/s of each replica."""
    trace = requests(count, replicas, rate_rps * replicas)
    gc.collect()
    start_s = process_time()
    serve(trace, replicas, router)
    return Row(router, replicas, count, 1e6 * (process_time() - start_s) / count)


def measure(
    routers: Sequence[str], replicas: Sequence[int], most: int, load: float, cell_s: float
) -> Measured:
    """All rows, each printed as soon as it is measured."""
    code = running()
    python_rps = bare_python()
    print("compiled code" if code.compiled else f"plain Python: {code.reason}")
    print(f"bare loop in Python: {python_rps:,.0f} requests/s")
    rate_rps = load * capacity_rps()
    print(f"each replica gets {rate_rps:,.1f} requests/s\n")
    print("| router | replicas | requests | requests/s | us/request | of Python |")
    print("|---|---:|---:|---:|---:|---:|")
    rows: list[Row] = []
    for router in routers:
        for size in replicas:
            us = 0.0
            for count in REQUESTS:
                if count > most:
                    continue
                if us * count > 1e6 * cell_s:
                    print(f"| {router} | {size} | {count:,} | | more than {cell_s:g} s | |")
                    continue
                row = simulated(router, size, count, rate_rps)
                rows.append(row)
                us = row.us
                rate = 1e6 / row.us
                print(
                    f"| {router} | {size} | {count:,} | {rate:,.0f} | {us:.1f} "
                    f"| 1 / {python_rps / rate:,.0f} |",
                    flush=True,
                )
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Measured(code.compiled, python_rps, rows, kib / 2**20)


def print_growth(rows: Sequence[Row], replicas: Sequence[int]) -> None:
    """Print how the cost of a request grows with the replicas."""
    first, *others = replicas
    heads = " | ".join(f"{size} replicas over {first}" for size in others)
    print(f"\n| router | requests | {heads} |\n|---|---:|{'---:|' * len(others)}")
    us = {(row.router, row.requests, row.replicas): row.us for row in rows}
    for router, count in dict.fromkeys((row.router, row.requests) for row in rows):
        few = us.get((router, count, first))
        many = [us.get((router, count, size)) for size in others]
        cells = [f"{each / few:.2f}" if few and each else "" for each in many]
        print(f"| {router} | {count:,} | {' | '.join(cells)} |")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--routers", nargs="+", choices=list(ROUTERS), default=list(ROUTERS), metavar="ROUTER"
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=list(SIZES))
    parser.add_argument(
        "--most", type=int, default=100_000, metavar="N", help="the most requests of a row"
    )
    parser.add_argument("--load", type=float, default=0.5, help="share of a replica's capacity")
    parser.add_argument(
        "--cell-s", type=float, default=300.0, metavar="SECONDS", help="the most for one row"
    )
    options = parser.parse_args()
    measured = measure(
        options.routers, options.replicas, options.most, options.load, options.cell_s
    )
    if len(options.replicas) > 1:
        print_growth(measured.rows, options.replicas)
    print(f"\nat most {measured.memory_gib:.1f} GiB of memory")
    keep("measured", asdict(measured))


if __name__ == "__main__":
    main()
