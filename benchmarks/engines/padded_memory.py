"""The cost of counting real tokens where the engine keeps one padded slab, simulated.

    python -m benchmarks.engines.padded_memory TRACE [--requests 2000] [--capacity 4096]

Takes seconds to minutes by --requests. Needs a trace.

One worker of the engine `rebatch`: the tiny Llama's laws as fitted for
recipes/tiny-llama-cpu-rebatch.yaml, rounded, and --capacity tokens of KV cache. The lengths are a
trace's: the prompt divided by 8 and the output by 4, within 4 to 256 and 4 to 128 tokens; the limit
is 128 tokens. All requests wait from the start. The simulated worker runs out of memory where the
slab would be larger than memory: all its rows are prefilled again, and half as many may enter.

A scheduler that counts real tokens can also be configured with less memory than there is. The table
shows the share, of those tried, with the most tokens per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.common.command import add_markdown, make_parser
from benchmarks.common.results_file import put_section
from toolkit.estimators.laws import bilinear_law
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sim.api import requests_of, virtual_workers
from toolkit.sim.ledger import Ledger, counters
from toolkit.sim.loop import run
from toolkit.sim.world import World
from toolkit.traces.read import read_trace
from toolkit.traces.types import Trace

LAW = bilinear_law(
    p=(9.3e-5, 1.1e-4, 0.0, 8.1e-3), d=(8.7e-7, 1.7e-4, 0.0, 7.4e-3), prefill_emits_token=True
)
LIMIT = 128
POLICIES = ("past-future", "aggressive", "conservative", "mlfq")
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)  # of memory


@dataclass(slots=True, frozen=True)
class Outcome:
    """One simulation: tokens per second until all requests had ended, and its counters."""

    tokens_per_s: float
    found: dict[str, float]


def scaled(trace: Trace, count: int) -> Trace:
    """The lengths of the trace's first requests, scaled down; all arrive at once."""
    prompts = np.clip(trace.prompt_tokens[:count] // 8, 4, 256)
    outputs = np.clip(trace.output_tokens[:count] // 4, 4, LIMIT)
    return Trace(np.zeros(len(prompts)), prompts, outputs, np.zeros_like(outputs))


def simulated(
    trace: Trace, name: str, capacity: int, *, padded: bool, share: float = 1.0
) -> Outcome:
    """The policy on a padded worker, which its scheduler treats as padded, or as a paged one with
    less memory.
    """
    world = World(LAW, ZetaMemory(capacity), 1, LIMIT, joining="embed")
    joining = world.joining if padded else None
    memory = ZetaMemory(capacity, zeta=share)
    believed = replace(world, memory=memory, joining=joining)
    requests, outputs = requests_of(trace, LIMIT)
    ledger = Ledger(trace.arrival_s.tolist(), outputs, 1)
    policy = make_policy(name, {})
    workers = virtual_workers(policy, world, ledger, requests)
    refusals = run(Scheduler(policy, believed.scheduled()[:1]), requests, workers)
    took_s = max(each.last_token_s for each in ledger.outcomes)
    return Outcome(sum(outputs) / took_s, counters(ledger, len(refusals), capacity))


def row(name: str, counts: str, one: Outcome) -> str:
    """A line of the table."""
    found = one.found
    evicted = found["evicted_percent"]
    rows = found["batch_size_mean"]
    return (
        f"| {name} | {counts} | {found['oom_percent']:.1f} | {evicted:.1f} | {rows:.1f} "
        f"| {found['consumed_memory_percent']:.0f} | {one.tokens_per_s:,.0f} |"
    )


def table(trace: Trace, capacity: int) -> list[str]:
    """Per policy: counting real tokens, the same with the best share of memory, and counting the
    slab.
    """
    lines = ["| policy | counts | OOM % | evicted % | rows | memory % | tokens/s |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    for name in POLICIES:
        tried: Sequence[tuple[float, Outcome]] = [
            (share, simulated(trace, name, capacity, padded=False, share=share)) for share in SHARES
        ]
        share, best = max(tried, key=lambda one: one[1].tokens_per_s)
        lines += [
            row(name, "real tokens", simulated(trace, name, capacity, padded=False)),
            row(name, f"real tokens, of {share:g} of the memory", best),
            row(name, "the slab", simulated(trace, name, capacity, padded=True)),
        ]
    return lines


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--capacity", type=int, default=4096)
    add_markdown(parser)
    options = parser.parse_args()
    trace, _ = read_trace(options.trace)
    text = "\n".join(table(scaled(trace, options.requests), options.capacity))
    print(text)
    if options.markdown:
        words = f"{options.trace.name} --requests {options.requests} --capacity {options.capacity}"
        command = f"`python -m benchmarks.engines.padded_memory {words}`, simulated"
        section = f"{command}:\n\n{text}\n"
        put_section(options.markdown, "padded_memory", "Counting a padded slab", section)


if __name__ == "__main__":
    main()
