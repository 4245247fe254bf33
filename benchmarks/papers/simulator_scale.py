"""How the simulator's speed changes with workers, load and requests, beside bare loops in the same
run.

    python -m benchmarks.papers.simulator_scale --policies all --most 1000000 --rows scale.json

Takes up to half a minute per policy with `--most 1000000`, and about a minute in all with
`--quick`. With `--budget` it begins no row after so many seconds; the same command goes on from
the file of `--rows` until the table is whole. Needs nothing; a C compiler for the loop in C, and
matplotlib for the plot.

Requests per second of processor time, loop only, on one core. The world is that of
`benchmarks/papers/simulator_speed.py`; the trace is made up, and its rate is `load` times what the
policy's workers serve of a backlog. To compare machines, the same run also measures a loop in
Python and, with a compiler, one in C. They do the least that a simulator of one queue can do:
compute the start and the end of each request. Each row is divided by them as well. Three ratios
follow: the cost of a request with 512 workers over that with 8, with ten times the backlog, and
with ten times the requests. `--policies all` takes every policy but the oracles and `vllm`, which
may be named.
The first line says whether compiled code or plain Python ran; `LLMCTL_COMPILED=0` forces the
latter. The rows of these ratios come first, and their runs take turns. Beside the first ratio is
that of the batches and rounds per request: with many workers, requests meet less often in a batch.
"""

from __future__ import annotations

import ctypes
import json
import random
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cache
from pathlib import Path
from time import monotonic, process_time

import numpy as np

from benchmarks.common.command import make_parser
from benchmarks.papers.simulator_speed import ENGINE, LAW, MAX_NEW_TOKENS, MEMORY
from toolkit.compiled import running
from toolkit.errors import InputError
from toolkit.sched.policies import ORACLES, POLICIES, make_policy
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Request
from toolkit.sim.api import requests_of, virtual_workers
from toolkit.sim.ledger import Ledger
from toolkit.sim.loop import run
from toolkit.sim.paged_engine import Reuse, serve
from toolkit.sim.world import World
from toolkit.traces.types import Trace

Plan = tuple[int, float, int]  # workers, load and requests of a row
WORKERS = (8, 64, 512, 1024)
LOADS = (0.3, 1.0, 3.0)
REQUESTS = (10_000, 100_000, 1_000_000)
DEFAULT = 8, 0.5, 10_000  # workers, load and requests of the rows in which another of them varies
BACKLOG = 8, 3.0, 100_000  # ten times the requests, and so the backlog, of another row
MANY = 512  # workers: the cost of a request is compared with that of 8
PER_WORKER = 60  # requests of a row with many workers, at least
TYPICAL = ("conservative", "conservative:least-loaded", "past-future", "slice", "mlfq")
ALL = "all"
QUICK = 10_240, 1, 10  # of a quick run: the most requests, repeats, and requests per worker
C_LOOP = """
double serve(const double *arrival, const double *seconds, double *end, long n) {
    double free = 0.0;
    for (long i = 0; i < n; i++) {
        double start = arrival[i] > free ? arrival[i] : free;
        free = start + seconds[i];
        end[i] = free;
    }
    return free;
}
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One run: its workers, load and requests, requests per second, and batches and rounds per
    request.
    """

    policy: str
    workers: int
    load: float
    requests: int
    rate_rps: float
    batches: float


def made_up(requests: int, rate_rps: float) -> Trace:
    """Poisson arrivals, prompts and outputs with long tails as in conversations."""
    rng = np.random.default_rng(0)
    arrival_s = np.cumsum(rng.exponential(1.0 / rate_rps, requests))
    prompts = np.minimum(rng.lognormal(6.3, 1.1, requests).astype(np.int64) + 1, 8_000)
    outputs = np.minimum(rng.lognormal(4.9, 0.9, requests).astype(np.int64) + 1, MAX_NEW_TOKENS)
    return Trace(arrival_s, prompts, outputs, np.zeros(requests, dtype=np.int64))


def world_of(
    policy: str, trace: Trace, requests: Sequence[Request], outputs: list[int], workers: int
) -> tuple[Callable[[], object], Ledger]:
    """What serves the requests with these workers, and where it writes what it does."""
    name, _, router = policy.partition(":")
    ledger = Ledger(trace.arrival_s.tolist(), outputs, workers)
    if name == VllmPolicy.name:
        return (lambda: serve(requests, VllmPolicy(), ENGINE, ledger, Reuse())), ledger
    world = World(LAW, MEMORY, workers, MAX_NEW_TOKENS)
    chosen = make_policy(name, {"router": router} if router else {})
    scheduler = Scheduler(chosen, world.scheduled())
    virtual = virtual_workers(chosen, world, ledger, requests)
    return (lambda: run(scheduler, requests, virtual)), ledger


@cache
def served_rps(policy: str, count: int = 4_000) -> float:
    """Requests per second that each of a few workers serves of a backlog."""
    trace = replace(made_up(count, 1.0), arrival_s=np.zeros(count))
    serve_all, ledger = world_of(policy, trace, *requests_of(trace, MAX_NEW_TOKENS), DEFAULT[0])
    serve_all()
    return count / max(each.last_token_s for each in ledger.outcomes) / DEFAULT[0]


def rates_of(policy: str, plan: Plan, repeats: int) -> Iterator[tuple[float, float]]:
    """Requests per second, and batches and rounds per request, of `repeats` runs, after one that
    warms up.
    """
    workers, load, count = plan
    trace = made_up(count, load * served_rps(policy) * workers)
    requests, outputs = requests_of(trace, MAX_NEW_TOKENS)
    for _ in range(repeats):
        serve_all, ledger = world_of(policy, trace, requests, outputs, workers)
        start_s = process_time()
        serve_all()
        rate_rps = count / (process_time() - start_s)
        yield rate_rps, (ledger.rounds or ledger.batches) / count


def simulated(policy: str, plans: Sequence[Plan], repeats: int) -> list[Row]:
    """A row per plan: the median of `repeats` runs. The plans take turns, so that they share what
    the machine's speed does meanwhile.
    """
    turns = list(zip(*[rates_of(policy, plan, repeats) for plan in plans], strict=True))
    rows = []
    for plan, runs in zip(plans, zip(*turns, strict=True), strict=True):
        rate_rps = statistics.median(rate for rate, _ in runs)
        rows.append(Row(policy, *plan, rate_rps, runs[0][1]))
    return rows


def bare_python(count: int = 1_000_000) -> float:
    """Requests per second of the least loop in Python."""
    rng = random.Random(0)
    arrival_s = [float(k) for k in range(count)]
    seconds = [rng.random() for _ in range(count)]
    end_s = [0.0] * count
    start_s = process_time()
    free_s = 0.0
    for k in range(count):
        begin_s = arrival_s[k] if arrival_s[k] > free_s else free_s
        free_s = begin_s + seconds[k]
        end_s[k] = free_s
    return count / (process_time() - start_s)


def bare_c(count: int = 1_000_000, times: int = 20) -> float | None:
    """The same in C; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "loop.c"
        library = Path(folder) / "loop.so"
        source.write_text(C_LOOP)
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        serve = ctypes.CDLL(str(library)).serve
    serve.restype = ctypes.c_double
    arrays = np.arange(count, dtype=float), np.random.default_rng(0).random(count), np.zeros(count)
    pointers = [array.ctypes.data_as(ctypes.POINTER(ctypes.c_double)) for array in arrays]
    start_s = process_time()
    for _ in range(times):
        serve(*pointers, ctypes.c_long(count))
    return times * count / (process_time() - start_s)


@dataclass(slots=True)
class Measured:
    """What this benchmark has measured: which code ran, the bare loops' requests/s, and the
    rows.
    """

    compiled: bool
    python_rps: float
    c_rps: float | None
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def begun(cls, path: Path | None) -> Measured:
        """What `path` keeps of earlier pieces, else the bare loops alone. `InputError` if it has
        rows of the other code, compiled or plain.
        """
        code = running()
        if path is None or not path.exists():
            return cls(code.compiled, bare_python(), bare_c())
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["compiled"] != code.compiled:
            names = {True: "compiled code", False: "plain Python"}
            raise InputError(
                f"{path} has rows of {names[not code.compiled]}; {names[code.compiled]} runs now",
                "give --rows another file, or set LLMCTL_COMPILED",
            )
        kept["rows"] = [Row(*values) for values in kept["rows"]]
        return cls(**kept)

    def row(self, policy: str, plan: Plan) -> Row | None:
        """The row of this plan (workers, load, requests), if it was measured."""
        wanted = (policy, *plan)
        return next((row for row in self.rows if astuple(row)[:4] == wanted), None)

    def save(self, path: Path) -> None:
        """Write all to `path`, one row a line."""
        head = {"compiled": self.compiled, "python_rps": self.python_rps, "c_rps": self.c_rps}
        rows = ",\n".join(json.dumps(astuple(row)) for row in self.rows)
        path.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{rows}\n]}}\n', encoding="utf-8")


def plans_of(most: int, per_worker: int) -> list[list[Plan]]:
    """A policy's rows in groups that are measured together; those that are compared come first."""
    workers, load, requests = DEFAULT
    compared = [
        DEFAULT,
        (MANY, load, max(requests, per_worker * MANY)),
        (workers, BACKLOG[1], requests),
        BACKLOG,
        (workers, load, BACKLOG[2]),
    ]
    others = {(count, load, max(requests, per_worker * count)) for count in WORKERS}
    others |= {(workers, other, requests) for other in LOADS}
    others |= {(workers, load, count) for count in REQUESTS}
    groups = [compared, *([plan] for plan in sorted(others - set(compared)))]
    fitting = [[plan for plan in group if plan[2] <= most] for group in groups]
    return [group for group in fitting if group]


def print_head(measured: Measured) -> None:
    """Print which code runs, the bare loops and the head of the table."""
    c_rps = measured.c_rps
    print("compiled code" if measured.compiled else f"plain Python: {running().reason}")
    print(f"bare loop in Python: {measured.python_rps:,.0f} requests/s; in C: ", end="")
    print(f"{c_rps:,.0f}\n" if c_rps else "there is no compiler\n")
    print("| policy | workers | load | requests | requests/s | us/request | of Python | of C |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")


def print_row(row: Row, measured: Measured) -> None:
    """Print a row of the table."""
    rate = row.rate_rps
    c_rps = measured.c_rps
    of_c = f"1 / {c_rps / rate:,.0f}" if c_rps else ""
    print(
        f"| {row.policy} | {row.workers:,} | {row.load:g} | {row.requests:,} | {rate:,.0f} "
        f"| {1e6 / rate:.1f} | 1 / {measured.python_rps / rate:,.0f} | {of_c} |",
        flush=True,
    )


def measure(
    measured: Measured,
    policies: Sequence[str],
    groups: Sequence[Sequence[Plan]],
    repeats: int,
    *,
    budget_s: float | None,
    path: Path | None,
) -> int:
    """Measure and print the rows that `measured` lacks, and print those it has; returns how many
    are left because `budget_s` seconds have passed.
    """
    begun_s = monotonic()
    left = 0
    print_head(measured)
    for policy in policies:
        for group in groups:
            missing = [plan for plan in group if measured.row(policy, plan) is None]
            if missing and budget_s is not None and monotonic() - begun_s >= budget_s:
                left += len(missing)
            elif missing:
                once = max(count for _, _, count in missing) >= 1_000_000
                measured.rows += simulated(policy, missing, 1 if once else repeats)
                if path is not None:
                    measured.save(path)
            for plan in group:
                row = measured.row(policy, plan)
                if row is not None:
                    print_row(row, measured)
    return left


def print_growth(rows: Sequence[Row]) -> None:
    """Print how the cost of a request grows with workers, with the backlog, and with as many more
    requests without one.
    """
    workers, load, count = DEFAULT
    by_plan = {(row.policy, row.workers, row.load, row.requests): row for row in rows}
    many = next((row.requests for row in rows if row.workers == MANY), count)
    pairs = (
        ((workers, load, count), (MANY, load, many)),
        ((workers, BACKLOG[1], count), BACKLOG),
        ((workers, load, count), (workers, load, BACKLOG[2])),
    )
    print(f"\n| policy | us/request, {MANY} workers over {workers} | its batches | ", end="")
    print("10 times the backlog | 10 times the requests |\n|---|---:|---:|---:|---:|")
    for policy in dict.fromkeys(row.policy for row in rows):
        cells = []
        for pair in pairs:
            one, other = (by_plan.get((policy, *plan)) for plan in pair)
            costs = batches = ""
            if one is not None and other is not None:
                costs = f"{one.rate_rps / other.rate_rps:.2f}"
                batches = f"{other.batches / one.batches:.2f}"
            cells += [costs, batches] if pair is pairs[0] else [costs]
        print(f"| {policy} | {' | '.join(cells)} |")


def draw(rows: Sequence[Row], out: Path) -> None:
    """Three plots side by side: against workers, load and requests."""
    try:
        import matplotlib as mpl
    except ImportError:
        print(f"\n{out} is not drawn: matplotlib is not installed; pip install matplotlib")
        return
    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 4), sharey=True)
    workers, load, requests = DEFAULT
    for policy in dict.fromkeys(row.policy for row in rows):
        own = [row for row in rows if row.policy == policy]
        at_load = [row for row in own if row.load == load]
        few = [row for row in own if row.workers == workers]
        lines: list[list[tuple[float, float]]] = [
            [
                (row.workers, row.rate_rps)
                for row in at_load
                if row.requests <= max(requests, PER_WORKER * row.workers)
            ],
            [(row.load, row.rate_rps) for row in few if row.requests == requests],
            [(row.requests, row.rate_rps) for row in few if row.load == load],
        ]
        for axis, line in zip(axes, lines, strict=True):
            axis.plot(*zip(*sorted(line), strict=True), marker="o", label=policy)
    for axis, name in zip(axes, ("workers", "load", "requests"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel=name)
        axis.grid(alpha=0.3)
        at = sorted({x for line in axis.get_lines() for x in line.get_xdata()})
        axis.set_xticks(at, [f"{x:,g}" if x < 1e5 else f"{x:.0e}" for x in at], minor=False)
        axis.set_xticks([], minor=True)
    axes[0].set_ylabel("requests/s, one core")
    axes[2].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(out, dpi=120)
    print(f"\nwrote {out}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--policies", nargs="+", default=TYPICAL, help="POLICY[:ROUTER], or all")
    parser.add_argument(
        "--most", type=int, default=100_000, metavar="N", help="the most requests of a row"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small rows, each measured once")
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="keep the rows here; those in it are not repeated"
    )
    parser.add_argument(
        "--budget", type=float, metavar="S", help="begin no row after so many seconds"
    )
    parser.add_argument("--out", type=Path, help="an SVG or PNG with the plots")
    options = parser.parse_args()
    every = sorted(POLICIES.keys() - ORACLES)
    named = [every if name == ALL else [name] for name in options.policies]
    most, repeats, per_worker = QUICK if options.quick else (options.most, options.repeats, None)
    measured = Measured.begun(options.rows)
    left = measure(
        measured,
        list(dict.fromkeys(name for names in named for name in names)),
        plans_of(most, per_worker or PER_WORKER),
        repeats,
        budget_s=options.budget,
        path=options.rows,
    )
    print_growth(measured.rows)
    if left:
        print(f"\n{left} rows are left; the same command measures them")
    elif options.out:
        draw(measured.rows, options.out)


if __name__ == "__main__":
    main()
