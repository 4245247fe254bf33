"""SCLS on continuous batching beside other policies: balance, throughput and goodput.

    python -m benchmarks.papers.slice_continuous [--rate 20] [--seconds 300] [--seeds 3]

Takes 18 s with 60 s of arrivals and one seed, on two shared, busy cores. Needs nothing but the
package.

The SCLS paper's world with heavy-tailed outputs: 8 simulated workers with 33,792 tokens each,
inputs lognormal(400, 1), outputs lognormal(120, sigma), both within 1..1024 tokens, and clients
that allow 1,024 tokens. `slice` has padded batches; the other policies pay for the real lengths.
Goodput counts requests with TTFT <= 10 s and no gap over 1.5 s. CT STD is the standard deviation of
the times at which the workers finished.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.common.command import make_parser, over_seeds
from toolkit.estimators.laws import bilinear_law
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.parameters import Value
from toolkit.sim.api import simulate
from toolkit.sim.world import World
from toolkit.traces.types import Trace

LAW = bilinear_law(p=(1.3e-4, 1e-3, 1e-5, 0.03), d=(3.5421e-6, 2e-4, 5e-7, 0.022956))
WORKERS = 8
CAPACITY_TOKENS = 33_792
LIMIT = 1024
SLA = {"ttft_p99_s": 10.0, "mtpot_p99_s": 1.5}
SIGMAS = (0.75, 1.25)
RUNS: tuple[tuple[str, dict[str, Value]], ...] = (
    ("slice", {}),
    ("conservative", {}),
    ("conservative", {"router": "least-loaded"}),
    ("aggressive", {}),
    ("aggressive", {"router": "least-loaded"}),
    ("past-future", {}),
    ("past-future", {"router": "least-loaded"}),
    ("past-future", {"router": "future-memory"}),
    ("slice-continuous", {}),
    ("slice-continuous", {"router": "round-robin"}),
    ("slice-continuous", {"margin": 1.0}),
    ("slice-continuous", {"reserve": 0.1}),
)
COLUMNS = {
    "throughput_rps": "throughput /s",
    "goodput_rps": "goodput /s",
    "e2e_mean_s": "mean response s",
    "ttft_p99_s": "TTFT p99 s",
    "completion_time_std_s": "CT STD s",
    "least_utilised_percent": "least busy worker %",
    "evicted_percent": "evicted %",
    "rerouted_percent": "rerouted %",
}


def trace(rate_rps: float, seconds: float, sigma: float, seed: int) -> Trace:
    """Poisson arrivals, lognormal lengths."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate_rps, int(rate_rps * seconds * 1.5)))
    arrival = arrival[arrival < seconds]
    output, prompt = (
        np.round(rng.lognormal(np.log(median), spread, len(arrival))).clip(1, LIMIT)
        for median, spread in ((120, sigma), (400, 1.0))
    )
    none = np.zeros(len(arrival), np.int64)
    return Trace(arrival, prompt.astype(np.int64), output.astype(np.int64), none)


def simulated(
    sigma: float, run: int, rate_rps: float, seconds: float, seed: int
) -> dict[str, float]:
    """The columns of one run."""
    name, parameters = RUNS[run]
    policy = make_policy(name, parameters)
    law = replace(LAW, padded=not policy.continuous)
    memory = ZetaMemory(CAPACITY_TOKENS)
    world = World(law, memory, WORKERS, LIMIT, seed=seed)
    metrics = simulate(trace(rate_rps, seconds, sigma, seed), policy, world).metrics(SLA)
    metrics["least_utilised_percent"] = min(
        metrics[f"utilisation_worker_{k}_percent"] for k in range(WORKERS)
    )
    return {column: metrics.get(column, 0.0) for column in COLUMNS}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    load = options.rate, options.seconds
    cases = [(sigma, run, *load) for sigma in SIGMAS for run in range(len(RUNS))]
    print("| sigma | policy | " + " | ".join(COLUMNS.values()) + " |")
    print("|---|---|" + "---:|" * len(COLUMNS))
    results = over_seeds(simulated, cases, options.seeds, options.processes)
    for (sigma, run, *_), runs in results.items():
        name, parameters = RUNS[run]
        label = " ".join([f"`{name}`", *(f"{key}={value}" for key, value in parameters.items())])
        figures = [f"{np.mean([one[column] for one in runs]):.2f}" for column in COLUMNS]
        print(f"| {sigma} | {label} | " + " | ".join(figures) + " |")


if __name__ == "__main__":
    main()
