"""Routers side by side: replicas of a paged engine, simulated, on traces with and without sharing.

    python -m benchmarks.engines.replica_routers [TRACE ...] [--replicas 8] [--loads 0.8 1.0]

Takes about two minutes for a trace of 12,000 requests. Needs nothing but the package: without TRACE
it makes up one of sessions and one of templates. Mooncake's conversation_trace.jsonl says what its
prompts share.

The engine has a made-up law of passes with the orders of magnitude of an 8B model on an H200. A
load is a share of what round-robin serves when all requests wait at the start. The targets are a
first token within 2 s and no gap between tokens above 0.2 s. What a request costs to simulate at
several numbers of replicas is in `router_scale`.

With `--regret N` it asks of N requests what would have been best: each is sent to every replica in
turn, the others go where they went, and all is simulated again. So this oracle knows all lengths,
caches and arrivals, past and to come, but decides one request at a time. The regret of a request is
how many more requests would have met their targets, and how much lower the sum of all E2E latencies
would have been, on the best replica for either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import process_time
from typing import Any, cast

import numpy as np

from benchmarks.common.command import make_parser
from toolkit.estimators.laws import unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.estimators.steps import StepLaw
from toolkit.metrics import meets_sla
from toolkit.routing.replicas import RouterView
from toolkit.routing.routers import ROUTERS, Router, make_router, targets_of
from toolkit.routing.types import RoutedRequest
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import SimResult, simulate
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.replicas import Routing
from toolkit.sim.world import World
from toolkit.traces.generate import Arrivals, SharedContent, generate, parse_lengths
from toolkit.traces.read import read_trace
from toolkit.traces.types import Sessions, Trace, trace_path
from toolkit.traces.windows import scale_rate

LAW = StepLaw(5e-3, 0.0, 1e-5, 4e-8, 2e-9, (2e-5,))
POLICY = VllmPolicy(max_num_seqs=256, max_num_batched_tokens=8192)
BLOCKS = 40_000  # of 16 tokens, in each replica
TARGETS = {"ttft_p99_s": 2.0, "mtpot_p99_s": 0.2}


def sessions(count: int, seed: int = 0) -> Trace:
    """Conversations of one to eight turns; think times of 20 s on average."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[float, int, int, int]] = []
    previous: list[int] = []
    for start_s in np.cumsum(rng.exponential(0.05, count)):
        arrival_s = float(start_s)
        prompt = int(rng.integers(200, 2_000))
        before = -1
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
    turns = Sessions(np.array(previous), think)
    return Trace(np.array(arrival), *lengths, "sessions", sessions=turns)


def templates(seed: int = 0) -> Trace:
    """Questions to 200 templates of 500 to 6,000 tokens, some of them asked often."""
    content = SharedContent(256, 200, parse_lengths("uniform:500:6000"), zipf=0.9)
    lengths = parse_lengths("uniform:50:800"), parse_lengths("uniform:50:400")
    return replace(generate(Arrivals(40.0), 400.0, *lengths, seed, content), source="templates")


@dataclass
class RecordedRouter:
    """Chooses as `inner` does and keeps the choices, or makes the choices that it is given."""

    inner: Router
    made: list[int] = field(default_factory=list)
    given: Sequence[int] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def choose(self, request: RoutedRequest, view: RouterView) -> int:
        if self.given:
            return self.given[view.routed]
        self.made.append(self.inner.choose(request, view))
        return self.made[-1]


def print_regret(trace: Trace, replicas: int, loads: list[float], names: list[str], n: int) -> None:
    """The regret of `n` requests in the middle of a trace, under each router."""
    print(f"\n## {trace.source}: regret per request, {n} of {len(trace):,} requests\n")
    print("| load | router | goodput/s | best replica | good requests lost | seconds lost |")
    print("|---|---|---|---|---|---|")
    capacity = capacity_rps(trace, replicas)
    for load in loads:
        scaled = scale_rate(trace, load * capacity)
        asked = np.linspace(0.3, 0.7, n) * len(scaled)
        for name in names:
            recorded = RecordedRouter(make_router(name, targets_of(name, TARGETS)))
            own = serve(scaled, replicas, cast(Router, recorded))
            found = []
            for k in asked.astype(int).tolist():
                options = {recorded.made[k]: _worth(own)}
                for other in set(range(replicas)) - options.keys():
                    given = [*recorded.made[:k], other, *recorded.made[k + 1 :]]
                    forced = RecordedRouter(recorded.inner, given=given)
                    options[other] = _worth(serve(scaled, replicas, cast(Router, forced)))
                good, seconds = options[recorded.made[k]]
                most = max(each[0] for each in options.values())
                least_s = min(each[1] for each in options.values())
                found.append((most - good, seconds - least_s, least_s == seconds))
            lost, late_s, best = np.array(found, dtype=float).mean(axis=0).tolist()
            goodput = own.metrics(TARGETS)["goodput_rps"]
            cells = f"{goodput:.2f} | {100 * best:.0f} % | {lost:.2f} | {late_s:.2f}"
            print(f"| {load} | {name} | {cells} |", flush=True)


def _worth(result: SimResult) -> tuple[int, float]:
    """How many requests met their targets, and the sum of all E2E latencies."""
    served = result.served
    return int(meets_sla(served, TARGETS).sum()), float((served.finish_s - served.arrival_s).sum())


def capacity_rps(trace: Trace, replicas: int) -> float:
    """Requests/s of round-robin when all requests wait at the start."""
    waiting = replace(trace, arrival_s=np.zeros(len(trace)), sessions=None)
    return serve(waiting, replicas, "round-robin").metrics(TARGETS)["throughput_rps"]


def serve(trace: Trace, replicas: int, router: str | Router) -> SimResult:
    """The trace on so many replicas behind a router; turns of sessions arrive as the trace says."""
    engine = PagedEngine(LAW, BLOCKS, 16)
    if isinstance(router, str):
        router = make_router(router, targets_of(router, TARGETS))
    memory = ZetaMemory(engine.capacity_tokens)
    limit = int(trace.output_tokens.max())
    world = World(unit_step(), memory, replicas, limit, paged=engine, closed_loop=False)
    return simulate(trace, POLICY, replace(world, routing=Routing(router)))


def print_routers(trace: Trace, replicas: int, loads: list[float], names: list[str]) -> None:
    """One table for a trace: all routers at each load."""
    capacity = capacity_rps(trace, replicas)
    print(f"\n## {trace.source}: {len(trace):,} requests, {replicas} replicas\n")
    print("| load | router | goodput/s | hits % | TTFT mean, p99 s | E2E mean s | CPU s |")
    print("|---|---|---|---|---|---|---|")
    for load in loads:
        scaled = scale_rate(trace, load * capacity)
        for name in names:
            start_s = process_time()
            found = serve(scaled, replicas, name).metrics(TARGETS)
            print(
                f"| {load} | {name} | {found['goodput_rps']:.2f} |"
                f" {found.get('hit_percent', 0.0):.1f} |"
                f" {found['ttft_mean_s']:.3f}, {found['ttft_p99_s']:.2f} |"
                f" {found['e2e_mean_s']:.2f} | {process_time() - start_s:.1f} |",
                flush=True,
            )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("traces", nargs="*")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.8, 1.0])
    parser.add_argument(
        "--routers", nargs="+", choices=list(ROUTERS), default=list(ROUTERS), metavar="ROUTER"
    )
    parser.add_argument("--requests", type=int, help="of each trace: the first ones")
    parser.add_argument("--regret", type=int, metavar="N")
    given = parser.parse_args()
    traces = [read_trace(trace_path(name))[0] for name in given.traces]
    for whole in traces or [sessions(2_000), templates()]:
        trace = whole.take(np.arange(min(given.requests or len(whole), len(whole))))
        if given.regret:
            print_regret(trace, given.replicas, given.loads, given.routers, given.regret)
        else:
            print_routers(trace, given.replicas, given.loads, given.routers)


if __name__ == "__main__":
    main()
