"""What it costs to simulate that prompts share blocks.

    python -m benchmarks.engines.sharing_speed TRACE [--repeats 5]

Takes half a minute for a trace of 12,000 requests. Needs a trace that says what its prompts share,
such as Mooncake's conversation_trace.jsonl.

The whole trace under vLLM's scheduler, with its shared blocks and without, in turn in one process;
processor time, with the tree of contents built anew each time. The engine has a made-up law of
passes with the orders of magnitude of an 8B model on an H200, and caches of several sizes: in a
cache that is small for the load requests wait and are preempted. The aim is at most twice the time.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time

from benchmarks.common.command import make_parser
from toolkit.estimators.laws import unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.estimators.steps import StepLaw
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import simulate
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.world import World
from toolkit.traces.read import read_trace
from toolkit.traces.types import Trace, trace_path

LAW = StepLaw(5e-3, 0.0, 1e-5, 4e-8, 2e-9, (2e-5,))
POLICY = VllmPolicy(max_num_seqs=256, max_num_batched_tokens=8192)
ENGINES = ((1, 60_000), (1, 400_000), (4, 12_000), (4, 60_000), (4, 400_000))  # count, blocks of 16
AIM = 2.0  # times


@dataclass(slots=True, frozen=True)
class Pair:
    """One world: processor seconds without sharing and with it, and what that found."""

    engines: int
    blocks: int
    alone_s: float
    shared_s: float
    ratio: float
    hit_percent: float
    evicted_percent: float


def measure(trace: Trace, engines: int, blocks: int, repeats: int) -> Pair:
    """Medians of `repeats` pairs."""
    engine = PagedEngine(LAW, blocks, 16)
    memory = ZetaMemory(engine.capacity_tokens)
    world = World(unit_step(), memory, engines, int(trace.output_tokens.max()), paged=engine)
    alone = replace(trace, shared=None, sessions=None)
    pairs = []
    counters = {}
    for _ in range(repeats):
        seconds = []
        for one in (alone, trace):
            start_s = process_time()
            counters = simulate(one, POLICY, world).counters
            seconds.append(process_time() - start_s)
        pairs.append(seconds)
    alone_s, shared_s = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(shared / alone for alone, shared in pairs)
    found = counters["hit_percent"], counters["evicted_percent"]
    return Pair(engines, blocks, alone_s, shared_s, ratio, *found)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("trace")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    trace, _ = read_trace(Path(trace_path(given.trace)))
    if trace.shared is None and trace.sessions is None:
        parser.error(f"{given.trace} does not say what its prompts share")
    print(f"{len(trace):,} requests, {int(trace.prompt_tokens.sum()):,} prompt tokens\n")
    print("| engines | blocks of 16 | alone s | sharing s | ratio | hits % | preempted % |")
    print("|---|---|---|---|---|---|---|")
    worst = 0.0
    for engines, blocks in ENGINES:
        one = measure(trace, engines, blocks, given.repeats)
        worst = max(worst, one.ratio)
        print(
            f"| {engines} | {blocks:,} | {one.alone_s:.2f} | {one.shared_s:.2f} | {one.ratio:.2f}"
            f" | {one.hit_percent:.1f} | {one.evicted_percent:.1f} |"
        )
    kept = "within" if worst <= AIM else "above"
    print(f"\nThe largest ratio is {worst:.2f}, {kept} the aim of {AIM:g}.")


if __name__ == "__main__":
    main()
