"""Goodput of Past-Future with and without latency targets, where time or memory is the bound.

    python -m benchmarks.papers.sla_admission [--seconds 300] [--seeds 3] [--processes 2]

Takes half a minute with 60 s of arrivals and one seed, on two shared, busy cores. Needs nothing but
the package.

Goodput is requests per second with TTFT <= 10 s and no gap over 1.5 s (the paper's limits for 7B
and 13B). Four simulated workers, inputs lognormal(400, 1), outputs lognormal(120, 0.75), both
within 1..1024 tokens. `only` means that the other limit is off. Two worlds, each at three rates:
- time: memory for 200,000 tokens; a decode step reads each in 12 us, so that at 125,000 tokens a
  step takes 1.5 s;
- memory: memory for 12,000 tokens, and prefills of 1 us per token; memory is full long before a
  step takes 0.2 s.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.common.command import make_parser, over_seeds
from benchmarks.papers.slice_continuous import LIMIT, SLA, trace
from toolkit.estimators.laws import bilinear_law
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.parameters import Value
from toolkit.sim.api import simulate
from toolkit.sim.world import World

WORKERS = 4
LAWS = {
    "time": (bilinear_law(p=(1.3e-4, 1e-3, 0.0, 0.03), d=(1.2e-5, 2e-4, 0.0, 0.02)), 200_000),
    "memory": (bilinear_law(p=(1e-6, 1e-4, 0.0, 0.01), d=(3.5e-6, 2e-4, 0.0, 0.02)), 12_000),
}
RATES = {"time": (4.0, 8.0, 16.0), "memory": (8.0, 16.0, 32.0)}
NEVER_S = 1e9
RUNS: dict[str, tuple[str, dict[str, Value]]] = {
    "`past-future`": ("past-future", {}),
    "`past-future-sla`": ("past-future-sla", {}),
    "only MTPOT": ("past-future-sla", {"ttft_s": NEVER_S}),
    "only TTFT": ("past-future-sla", {"mtpot_s": NEVER_S}),
}
COLUMNS = {
    "goodput_rps": "goodput /s",
    "throughput_rps": "throughput /s",
    "ttft_p50_s": "TTFT p50 s",
    "ttft_p99_s": "TTFT p99 s",
    "mtpot_p50_s": "MTPOT p50 s",
    "mtpot_p99_s": "MTPOT p99 s",
    "consumed_memory_percent": "memory %",
    "evicted_percent": "evicted %",
}


def simulated(world: str, rate_rps: float, run: str, seconds: float, seed: int) -> dict[str, float]:
    """The columns of one run."""
    law, capacity = LAWS[world]
    one = World(replace(law, padded=False), ZetaMemory(capacity), WORKERS, LIMIT, seed=seed)
    policy = make_policy(*RUNS[run])
    metrics = simulate(trace(rate_rps, seconds, 0.75, seed), policy, one).metrics(SLA)
    return {column: metrics[column] for column in COLUMNS}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    seconds = options.seconds
    cases = [(world, rate, run, seconds) for world in LAWS for rate in RATES[world] for run in RUNS]
    print("| binds | requests/s | policy | " + " | ".join(COLUMNS.values()) + " |")
    print("|---|---:|---|" + "---:|" * len(COLUMNS))
    results = over_seeds(simulated, cases, options.seeds, options.processes)
    for (world, rate, run, _), runs in results.items():
        figures = [f"{np.mean([one[column] for one in runs]):.2f}" for column in COLUMNS]
        print(f"| {world} | {rate:g} | {run} | " + " | ".join(figures) + " |")


if __name__ == "__main__":
    main()
