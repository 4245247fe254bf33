"""Past-Future with and without knowledge of time: goodput where decode time binds, and where memory
does.

    python bench/sla_admission.py [--seconds 300] [--seeds 3] [--processes 2]

Goodput is requests per second with TTFT <= 10 s and no gap over 1.5 s (the paper's limits for 7B
and 13B). Four workers, inputs lognormal(400, 1), outputs lognormal(120, 0.75), both within 1..1024.
`only` means that the other limit is off. Two worlds, each at several rates:
- time: memory for 200,000 tokens, of which a decode step reads each in 12 us: at 125,000 tokens a
  step takes 1.5 s;
- memory: 12,000 tokens and prompts of 1 us per token: memory is full long before a step takes 0.2
  s.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np

from toolkit.estimators.laws import bilinear_law
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.parameters import Value
from toolkit.sim.api import simulate
from toolkit.sim.world import World
from toolkit.traces.types import Trace

WORKERS, LIMIT = 4, 1024
SLA = {"ttft_p99_s": 10.0, "mtpot_p99_s": 1.5}
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


def trace(rate_rps: float, seconds: float, seed: int) -> Trace:
    """Poisson arrivals, lognormal lengths."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate_rps, int(rate_rps * seconds * 1.5)))
    arrival = arrival[arrival < seconds]
    output, prompt = (
        np.clip(np.round(rng.lognormal(np.log(median), spread, len(arrival))), 1, LIMIT).astype(
            np.int64
        )
        for median, spread in ((120, 0.75), (400, 1.0))
    )
    return Trace(arrival, prompt, output, np.zeros_like(output))


def simulated(world: str, rate_rps: float, run: str, seconds: float, seed: int) -> dict[str, float]:
    """The columns of one run."""
    law, capacity = LAWS[world]
    one = World(replace(law, padded=False), ZetaMemory(capacity), WORKERS, LIMIT, seed=seed)
    policy = make_policy(*RUNS[run])
    metrics = simulate(trace(rate_rps, seconds, seed), policy, one).metrics(SLA)
    return {column: metrics[column] for column in COLUMNS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    cells = [(world, rate, run) for world in LAWS for rate in RATES[world] for run in RUNS]
    jobs = [(*cell, options.seconds, seed) for cell in cells for seed in range(options.seeds)]
    with ProcessPoolExecutor(options.processes) as pool:
        results = iter(list(pool.map(simulated, *zip(*jobs, strict=True))))
    print("| binds | requests/s | policy | " + " | ".join(COLUMNS.values()) + " |")
    print("|---|---:|---|" + "---:|" * len(COLUMNS))
    for world, rate, run in cells:
        found = [next(results) for _ in range(options.seeds)]
        figures = [f"{np.mean([one[column] for one in found]):.2f}" for column in COLUMNS]
        print(f"| {world} | {rate:g} | {run} | " + " | ".join(figures) + " |")


if __name__ == "__main__":
    main()
