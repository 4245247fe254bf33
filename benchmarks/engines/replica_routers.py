"""Routers side by side: replicas of a paged engine, simulated, on traces with and without sharing.

    python -m benchmarks.engines.replica_routers [TRACE ...] [--replicas 8] [--loads 0.6 0.8 1.0]

Takes about two minutes for a trace of 12,000 requests. Needs nothing but the package: without TRACE
it makes up a trace of sessions. Mooncake's conversation_trace.jsonl says what its prompts share.

The engine has a made-up law of passes with the orders of magnitude of an 8B model on an H200. A
load is a share of what round-robin serves when all requests wait at the start. The targets are a
first token within 2 s and no gap between tokens above 0.2 s. With `--sizes` it measures instead
what a request costs to simulate at several numbers of replicas, at the same load per replica.
"""

from __future__ import annotations

from dataclasses import replace
from time import process_time

import numpy as np

from benchmarks.common.command import make_parser
from toolkit.estimators.laws import unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.estimators.steps import StepLaw
from toolkit.routing.routers import ROUTERS, make_router, targets_of
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import SimResult, simulate
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.replicas import Routing
from toolkit.sim.world import World
from toolkit.traces.read import read_trace
from toolkit.traces.types import Sessions, Trace, trace_path
from toolkit.traces.windows import scale_rate

LAW = StepLaw(5e-3, 0.0, 1e-5, 4e-8, 2e-9, (2e-5,))
POLICY = VllmPolicy(max_num_seqs=256, max_num_batched_tokens=8192)
BLOCKS = 40_000  # of 16 tokens, in each replica
TARGETS = {"ttft_p99_s": 2.0, "mtpot_p99_s": 0.2}
SIZES = (8, 64)


def sessions(count: int, seed: int = 0) -> Trace:
    """Conversations of one to eight turns; think times of 20 s on average."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[float, int, int, int]] = []
    previous: list[int] = []
    for start_s in np.cumsum(rng.exponential(0.05, count)):
        arrival_s, prompt, before = float(start_s), int(rng.integers(200, 2_000)), -1
        for _ in range(int(rng.integers(1, 9))):
            output = int(rng.integers(50, 400))
            rows.append((arrival_s, prompt, output, before))
            before = len(rows) - 1
            prompt += output + int(rng.integers(20, 600))
            arrival_s += float(rng.exponential(20.0))
    order = sorted(range(len(rows)), key=lambda k: rows[k][0])
    place = {k: at for at, k in enumerate(order)}
    arrival, prompts, outputs, before_rows = zip(*(rows[k] for k in order), strict=True)
    previous = [place[k] if k >= 0 else -1 for k in before_rows]
    think = np.where(np.array(previous) < 0, 0.0, 1.0)
    lengths = np.array(prompts), np.array(outputs), np.array(outputs)
    return Trace(
        np.array(arrival), *lengths, "sessions", sessions=Sessions(np.array(previous), think)
    )


def serve(trace: Trace, replicas: int, router: str) -> SimResult:
    """The trace on so many replicas behind a router; turns of sessions arrive as the trace says."""
    engine = PagedEngine(LAW, BLOCKS, 16)
    world = World(
        unit_step(),
        ZetaMemory(engine.capacity_tokens),
        replicas,
        int(trace.output_tokens.max()),
        paged=engine,
        routing=Routing(make_router(router, targets_of(router, TARGETS))),
        closed_loop=False,
    )
    return simulate(trace, POLICY, world)


def print_routers(trace: Trace, replicas: int, loads: list[float]) -> None:
    """One table for a trace: all routers at each load."""
    waiting = replace(trace, arrival_s=np.zeros(len(trace)), sessions=None)
    capacity = serve(waiting, replicas, "round-robin").metrics(TARGETS)["throughput_rps"]
    print(f"\n## {trace.source}: {len(trace):,} requests, {replicas} replicas\n")
    print("| load | router | goodput/s | hits % | TTFT mean, p99 s | E2E mean s | CPU s |")
    print("|---|---|---|---|---|---|---|")
    for load in loads:
        scaled = scale_rate(trace, load * capacity)
        for name in ROUTERS:
            start_s = process_time()
            found = serve(scaled, replicas, name).metrics(TARGETS)
            print(
                f"| {load} | {name} | {found['goodput_rps']:.2f} |"
                f" {found.get('hit_percent', 0.0):.1f} |"
                f" {found['ttft_mean_s']:.3f}, {found['ttft_p99_s']:.2f} |"
                f" {found['e2e_mean_s']:.2f} | {process_time() - start_s:.1f} |",
                flush=True,
            )


def print_sizes(trace: Trace, loads: list[float]) -> None:
    """What a request costs at each number of replicas, at the same rate per replica."""
    print(f"\n## {trace.source}: microseconds of CPU per request\n")
    print("| router | " + " | ".join(f"{size} replicas" for size in SIZES) + " | ratio |")
    print("|---" * (len(SIZES) + 2) + "|")
    waiting = replace(trace, arrival_s=np.zeros(len(trace)), sessions=None)
    rate = loads[0] * serve(waiting, SIZES[0], "round-robin").metrics(TARGETS)["throughput_rps"]
    for name in ROUTERS:
        costs = []
        for size in SIZES:
            scaled = scale_rate(trace, rate * size / SIZES[0])
            start_s = process_time()
            serve(scaled, size, name)
            costs.append(1e6 * (process_time() - start_s) / len(trace))
        shown = " | ".join(f"{cost:,.0f}" for cost in costs)
        print(f"| {name} | {shown} | {costs[-1] / costs[0]:.2f} |", flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("traces", nargs="*")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.6, 0.8, 1.0])
    parser.add_argument("--sizes", action="store_true")
    given = parser.parse_args()
    traces = [read_trace(trace_path(name))[0] for name in given.traces] or [sessions(2_000)]
    for trace in traces:
        if given.sizes:
            print_sizes(trace, given.loads)
        else:
            print_routers(trace, given.replicas, given.loads)


if __name__ == "__main__":
    main()
