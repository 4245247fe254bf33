"""What a scheduler gains that knows each worker's own laws, over one that takes all workers of a
fleet for the same.

    python bench/fleet_gain.py TRACE [--first N] [--requests N] [--loads 0.5 0.8 1.2]

An H200 and two A100s serve Llama-3.1-8B, by the analytic fits that ship: nothing of it was measured
on a GPU. Workers take what their own laws say and hold what their own memory holds. The scheduler
believes one of three things:

- own: each worker's laws and memory;
- slowest: that all are A100s, in speed and in memory;
- mean: that all are as fast as the mean of the three, and hold what an A100 does, or batches would
  not fit.

Beside them stands the best static split that a search finds, for these requests, by mean E2E: the
H200 and the A100s with a scheduler each, and a share of the requests, from 30 to 85 %, for the
H200: the shortest, the longest, or any.

Load 1 is the throughput of a backlog of the same requests under `slice` with own laws. Whatever is
believed meets the same requests; arrivals are the trace's, scaled in time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from toolkit.files.fit import Fit
from toolkit.files.io import fit_path, read_file
from toolkit.metrics import Served, summarize
from toolkit.sched.policies import make_policy
from toolkit.sched.protocols import LatencyLaw, Policy
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
    """The mean of several workers' laws, each counted as often as it stands here."""

    laws: tuple[LatencyLaw, ...]

    @property
    def prefill_emits_token(self) -> bool:
        return self.laws[0].prefill_emits_token

    @property
    def padded(self) -> bool:
        return self.laws[0].padded

    @property
    def round_s(self) -> float:
        return sum(law.round_s for law in self.laws) / len(self.laws)

    def prefill_s(self, batch_size: int, input_length: float) -> float:
        return sum(law.prefill_s(batch_size, input_length) for law in self.laws) / len(self.laws)

    def pass_s(self, batch_size: int, start: float, end: float) -> float:
        return sum(law.pass_s(batch_size, start, end) for law in self.laws) / len(self.laws)

    def decode_s(self, batch_size: int, input_length: float, steps: int) -> float:
        return sum(law.decode_s(batch_size, input_length, steps) for law in self.laws) / len(
            self.laws
        )

    def leave_s(self, length: float) -> float:
        return sum(law.leave_s(length) for law in self.laws) / len(self.laws)

    def serve_table(self, max_batch_size: int, steps: int) -> NDArray[np.float64]:
        tables = [law.serve_table(max_batch_size, steps) for law in self.laws]
        return np.asarray(sum(tables) / len(self.laws))


def believed(world: World, belief: str) -> list[Worker]:
    """The workers as a scheduler has them that believes so."""
    if belief == "own":
        return world.scheduled()
    slow = world.kinds[-1]
    laws = tuple(kind.latency for kind in world.kinds for _ in range(kind.workers))
    latency = slow.latency if belief == "slowest" else Mean(laws)
    return replace(slow, latency=latency, workers=world.size, others=()).scheduled()


def outcome(trace: Trace, policy: Policy, world: World, belief: str) -> dict[str, float]:
    """Metrics of the trace served by workers as they are, under a scheduler that believes what it
    does.
    """
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
    """The static split with the least mean E2E, in words, and its metrics."""
    first, second = (replace(kind, others=()) for kind in world.kinds)
    shortest = np.argsort(np.argsort(trace.prompt_tokens, kind="stable"))
    anyhow = np.random.default_rng(0).permutation(len(trace))
    found = []
    for which, rank in (
        ("the shortest", shortest),
        ("the longest", len(trace) - 1 - shortest),
        ("any", anyhow),
    ):
        for percent in range(30, 90, 5):
            mask = rank < len(trace) * percent // 100
            parts = [
                served(part(trace, mask), policy, first, "own"),
                served(part(trace, ~mask), policy, second, "own"),
            ]
            joined = Served(
                *[np.concatenate([getattr(one, f.name) for one in parts]) for f in fields(Served)]
            )
            found.append((f"split: {percent} % on the H200, {which}", summarize(joined, SLA)))
    return min(found, key=lambda one: one[1]["e2e_mean_s"])


def part(trace: Trace, mask: NDArray[np.bool_]) -> Trace:
    """Some of its requests."""
    return Trace(
        trace.arrival_s[mask],
        trace.prompt_tokens[mask],
        trace.output_tokens[mask],
        trace.max_tokens[mask],
    )


def rows(
    trace: Trace, world: World, name: str, loads: Sequence[float], capacity_rps: float
) -> None:
    policy = make_policy(name.partition(",")[0], POLICIES[name])
    for load in loads:
        scaled = scale_rate(trace, load * capacity_rps)
        for belief in ("own", "slowest", "mean"):
            found = outcome(scaled, policy, world, belief)
            keys = ("throughput_rps", "goodput_rps", "e2e_mean_s", "e2e_p95_s", "ttft_mean_s")
            print(
                f"| {name} | {load:g} | {belief} | "
                + " | ".join(f"{found[key]:.2f}" for key in keys)
                + " |"
            )
            sys.stdout.flush()
        split, found = best_split(scaled, policy, world)
        print(
            f"| {name} | {load:g} | {split} | "
            + " | ".join(f"{found[key]:.2f}" for key in keys)
            + " |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--first", type=int, default=6000)
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 1.2])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    arguments = parser.parse_args()
    fits = {name: read_file(Fit, fit_path(name)) for name in KINDS}
    world = fleet(
        [
            world_from_fit(fits[name], workers=count, max_new_tokens=LIMIT)
            for name, count in KINDS.items()
        ]
    )
    world = fleet(
        [replace(kind, runs_out=None) for kind in world.kinds]
    )  # the same luck with memory for all: none
    whole, _ = read_trace(arguments.trace)
    whole = scale_lengths(whole, fits[next(iter(KINDS))].engine.max_model_len, LIMIT)
    chosen = slice(arguments.first, arguments.first + arguments.requests)
    arrival_s = whole.arrival_s[chosen] - whole.arrival_s[arguments.first]
    trace = Trace(
        arrival_s,
        whole.prompt_tokens[chosen],
        whole.output_tokens[chosen],
        whole.max_tokens[chosen],
    )
    n = len(trace)
    backlog = replace(trace, arrival_s=np.zeros(n))
    capacity_rps = outcome(backlog, make_policy("slice", POLICIES["slice"]), world, "own")[
        "throughput_rps"
    ]
    print(f"{n:,} requests; a backlog of them is served at {capacity_rps:.1f} requests/s\n")
    print(
        "| policy | load | believed | throughput/s | goodput/s | E2E mean s | E2E p95 s | TTFT mean s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in arguments.policies:
        rows(trace, world, name, arguments.loads, capacity_rps)


if __name__ == "__main__":
    main()
