"""What the scheduler gains from each worker's own laws in a fleet of unlike workers.

    python -m benchmarks.papers.fleet_gain TRACE [--first N] [--requests N] [--loads 0.5 0.8 1.2]

Takes seconds to minutes by --requests. Needs a trace, such as azure-2023-conv.csv of the Azure
Public Dataset.

One H200 and two A100s serve Llama-3.1-8B by the analytic fits that ship; nothing was measured on a
GPU. Simulated workers take the time of their own laws and hold what their own memory holds. The
scheduler believes one of three things:

- own: each worker's laws and memory;
- slowest: all workers are A100s, in speed and in memory;
- mean: all workers are as fast as the mean of the three, and hold as much as an A100, since larger
  batches would not fit.

Beside them stands the best static split that a search finds for these requests, by mean E2E: the
H200 and the A100s have a scheduler each, and 30 to 85 % of the requests go to the H200: the
shortest, the longest, or random ones.

Load 1 is the throughput of a backlog of the same requests under `slice` with own laws. Every belief
gets the same requests; arrivals are the trace's, scaled in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.command import make_parser
from toolkit.files.fit import Fit
from toolkit.files.io import fit_path, read_file
from toolkit.metrics import Served, summarize
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.base import Policy
from toolkit.sched.protocols import LatencyLaw
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Worker
from toolkit.sim.api import requests_of, virtual_workers
from toolkit.sim.ledger import Ledger
from toolkit.sim.loop import run
from toolkit.sim.world import World, fleet, world_from_fit
from toolkit.traces.read import read_trace
from toolkit.traces.types import Trace
from toolkit.traces.windows import scale_lengths, scale_rate

KINDS = {"llama-3.1-8b-h200-transformers": 1, "llama-3.1-8b-a100-80gb-transformers": 2}
LIMIT = 1024
SLA = {"ttft_p99_s": 10.0, "mtpot_p99_s": 1.5}
POLICIES: dict[str, dict[str, bool | int | float | str]] = {
    "slice": {"slice_tokens": 128, "min_interval_s": 6.0},
    "sequence": {"batch_size": 64},
    "past-future": {},
    "past-future, least-loaded": {"router": "least-loaded"},
}


@dataclass(frozen=True)
class Mean:
    """The mean of several workers' laws, each counted as often as it occurs."""

    laws: tuple[LatencyLaw, ...]

    @property
    def prefill_emits_token(self) -> bool:
        return self.laws[0].prefill_emits_token

    @property
    def padded(self) -> bool:
        return self.laws[0].padded

    @property
    def round_s(self) -> float:
        return fmean(law.round_s for law in self.laws)

    def prefill_s(self, batch_size: int, input_length: float) -> float:
        return fmean(law.prefill_s(batch_size, input_length) for law in self.laws)

    def pass_s(self, batch_size: int, start: float, end: float) -> float:
        return fmean(law.pass_s(batch_size, start, end) for law in self.laws)

    def decode_s(self, batch_size: int, input_length: float, steps: int) -> float:
        return fmean(law.decode_s(batch_size, input_length, steps) for law in self.laws)

    def leave_s(self, length: float) -> float:
        return fmean(law.leave_s(length) for law in self.laws)

    def serve_table(self, max_batch_size: int, steps: int) -> NDArray[np.float64]:
        tables = [law.serve_table(max_batch_size, steps) for law in self.laws]
        return np.asarray(sum(tables) / len(self.laws))


def believed(world: World, belief: str) -> list[Worker]:
    """The workers as a scheduler with this belief has them."""
    if belief == "own":
        return world.scheduled()
    slow = world.kinds[-1]
    laws = tuple(kind.latency for kind in world.kinds for _ in range(kind.workers))
    latency = slow.latency if belief == "slowest" else Mean(laws)
    return replace(slow, latency=latency, workers=world.size, others=()).scheduled()


def outcome(trace: Trace, policy: Policy, world: World, belief: str) -> dict[str, float]:
    """Metrics of the trace on the actual workers, under a scheduler with this belief."""
    return summarize(served(trace, policy, world, belief), SLA)


def served(trace: Trace, policy: Policy, world: World, belief: str) -> Served:
    """The same, request by request."""
    world = world.under(policy)
    requests, outputs = requests_of(trace, LIMIT)
    ledger = Ledger(trace.arrival_s.tolist(), outputs, world.size)
    workers = [*virtual_workers(policy, world, ledger, requests)]
    for kind in world.others:
        workers += virtual_workers(policy, kind, ledger.of_kind(), requests, first=len(workers))
    run(Scheduler(policy, believed(world, belief)), requests, workers)
    return ledger.served()


def best_split(trace: Trace, policy: Policy, world: World) -> tuple[str, dict[str, float]]:
    """A description of the static split with the least mean E2E, and its metrics."""
    first, second = (replace(kind, others=()) for kind in world.kinds)
    shortest = np.argsort(np.argsort(trace.prompt_tokens, kind="stable"))
    random_rank = np.random.default_rng(0).permutation(len(trace))
    longest = len(trace) - 1 - shortest
    found = []
    for which, rank in (("the shortest", shortest), ("the longest", longest), ("any", random_rank)):
        for percent in range(30, 90, 5):
            mask = rank < len(trace) * percent // 100
            parts = [
                served(trace.take(np.flatnonzero(mask)), policy, first, "own"),
                served(trace.take(np.flatnonzero(~mask)), policy, second, "own"),
            ]
            columns = [[getattr(one, f.name) for one in parts] for f in fields(Served)]
            joined = Served(*map(np.concatenate, columns))
            found.append((f"split: {percent} % on the H200, {which}", summarize(joined, SLA)))
    return min(found, key=lambda one: one[1]["e2e_mean_s"])


def rows(
    trace: Trace, world: World, name: str, loads: Sequence[float], capacity_rps: float
) -> None:
    policy = make_policy(name.partition(",")[0], POLICIES[name])
    for load in loads:
        scaled = scale_rate(trace, load * capacity_rps)
        for belief in ("own", "slowest", "mean"):
            print_row(name, load, belief, outcome(scaled, policy, world, belief))
        print_row(name, load, *best_split(scaled, policy, world))


def print_row(name: str, load: float, belief: str, found: dict[str, float]) -> None:
    keys = ("throughput_rps", "goodput_rps", "e2e_mean_s", "e2e_p95_s", "ttft_mean_s")
    figures = " | ".join(f"{found[key]:.2f}" for key in keys)
    print(f"| {name} | {load:g} | {belief} | {figures} |", flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--first", type=int, default=6000)
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 1.2])
    parser.add_argument(
        "--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES), metavar="POLICY"
    )
    arguments = parser.parse_args()
    fits = {name: read_file(Fit, fit_path(name)) for name in KINDS}
    worlds = [
        world_from_fit(fits[name], workers=count, max_new_tokens=LIMIT)
        for name, count in KINDS.items()
    ]
    # memory never runs out by chance, so that no belief has better luck
    world = fleet([replace(kind, runs_out=None) for kind in worlds])
    whole, _ = read_trace(arguments.trace)
    whole = scale_lengths(whole, fits[next(iter(KINDS))].engine.max_model_len, LIMIT)
    chosen = slice(arguments.first, arguments.first + arguments.requests)
    trace = replace(whole, shared=None, sessions=None, priority=None).take(chosen)
    trace = replace(trace, arrival_s=trace.arrival_s - trace.arrival_s[0])
    n = len(trace)
    backlog = replace(trace, arrival_s=np.zeros(n))
    own = outcome(backlog, make_policy("slice", POLICIES["slice"]), world, "own")
    capacity_rps = own["throughput_rps"]
    print(f"{n:,} requests; a backlog of them is served at {capacity_rps:.1f} requests/s\n")
    heads = "throughput/s | goodput/s | E2E mean s | E2E p95 s | TTFT mean s"
    print(f"| policy | load | believed | {heads} |")
    print("|---|---|---|---|---|---|---|---|")
    for name in arguments.policies:
        rows(trace, world, name, arguments.loads, capacity_rps)


if __name__ == "__main__":
    main()
