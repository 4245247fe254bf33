"""FastServe's claim: mean completion time of SRPT <= skip-join MLFQ <= naive MLFQ <= FCFS.

    python -m benchmarks.papers.fastserve_jct [--seeds 8] [--rate 4.5] [--duration 150]

Takes 3 s with one seed and 60 s of arrivals, on two shared, busy cores. Needs nothing but the
package.

One simulated worker of 16 rows and 40,000 tokens of KV cache, a host with room for 200,000 tokens,
and a link of 1 ms and 30,000 tokens/s each way (25 GB/s at 0.82 MB per token, a 13-billion model in
float16). A step of n rows takes 25 ms + n * (0.2 ms + 30 ns per token), a prefill of L tokens 11 ms
+ 0.1 ms * L. These laws are of that order of magnitude and measured nowhere. Prompts are
lognormal(300, 1.6) up to 8,192 tokens, outputs lognormal(20, 1.6) up to 2,048 tokens: both have
heavy tails, and at this load FCFS queues for seconds.

Rows show means over the seeds. A wait is the longest time that any request spent without running,
over all seeds. The exit code is 1 if the order does not hold in both ways of swapping, or if a
request waited longer than the starvation limit plus one round.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from benchmarks.common.command import make_parser, over_seeds
from benchmarks.common.results_file import markdown
from toolkit.estimators.laws import LinearLaw, LinearSwap
from toolkit.estimators.memory import ZetaMemory
from toolkit.laws.passes import PassLaw
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.base import Policy
from toolkit.sched.types import LatencyLaw
from toolkit.sched.view import Decision, View
from toolkit.sched.waiting import Ranking
from toolkit.sim.api import simulate
from toolkit.sim.world import World
from toolkit.traces.generate import Arrivals, Lengths, generate

ROWS = 16
STARVATION_S = 60.0
LONGEST_OUTPUT = 2048
PREFILL = PassLaw({"token": 1e-4, "row": 1e-3, "pass": 0.01})
DECODE = PassLaw({"cached": 3e-8, "row": 2e-4, "pass": 0.025})
WORLD = World(
    LinearLaw(PREFILL, DECODE, prefill_emits_token=True, padded=False),
    ZetaMemory(40_000),
    workers=1,
    max_new_tokens=LONGEST_OUTPUT,
    swap=LinearSwap(latency_s=0.001, out_tokens_per_s=30_000, in_tokens_per_s=30_000),
    host_tokens=200_000,
)
PROMPTS = Lengths("lognormal", 300, 1.6, 8192)
OUTPUTS = Lengths("lognormal", 20, 1.6, LONGEST_OUTPUT)
MLFQ = {"max_batch_size": ROWS, "starvation_s": STARVATION_S}
# by mean completion time, least first
ORDER = ("srpt-oracle", "skip-join MLFQ", "naive MLFQ", "fcfs")
METHODS: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("fcfs", ""): ("fcfs", {"max_batch_size": ROWS}),
    **{
        (method, swap): (policy, parameters | {"swap": swap})
        for swap in ("reactive", "proactive")
        for method, policy, parameters in (
            ("naive MLFQ", "mlfq", MLFQ | {"skip_join": False}),
            ("skip-join MLFQ", "mlfq", MLFQ),
            ("srpt-oracle", "srpt-oracle", {"max_batch_size": ROWS}),
        )
    },
}
COLUMNS = {
    "e2e_mean_s": "mean completion s",
    "e2e_p95_s": "p95 s",
    "ttft_mean_s": "mean TTFT s",
    "swaps_out": "swaps out",
    "swap_wait_s": "waited for swaps s",
    "longest_wait_s": "longest wait s",
    "longest_round_s": "longest round s",
}
FORMS = {"swaps_out": ",.0f"}


class Waits(Policy):
    """A policy that decides like another one and records the longest wait of a job that does not
    run, and the longest round.
    """

    name: ClassVar[str] = "waits"
    continuous: ClassVar[bool] = True

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.longest_s = self.round_s = 0.0
        self._started_s = -1.0

    def ranking(self, law: LatencyLaw) -> Ranking | None:
        return self._policy.ranking(law)

    def route(self, view: View, now_s: float) -> Sequence[int] | None:
        return self._policy.route(view, now_s)

    def plan(self, view: View, now_s: float) -> Decision:
        (worker,) = view.workers
        if worker.batch is None:
            if self._started_s >= 0.0:
                self.round_s = max(self.round_s, now_s - self._started_s)
            for job in (*worker.waiting.jobs, *worker.paused.jobs, *worker.swapped.jobs):
                self.longest_s = max(self.longest_s, now_s - job.waiting_since_s)
        decision = self._policy.plan(view, now_s)
        if decision.batches:
            self._started_s = now_s
        elif worker.batch is None:
            self._started_s = -1.0
        return decision


def measured(
    method: tuple[str, str], rate_rps: float, duration_s: float, seed: int
) -> dict[str, float]:
    """One run's metrics, waits included."""
    name, parameters = METHODS[method]
    trace = generate(Arrivals(rate_rps), duration_s, PROMPTS, OUTPUTS, seed)
    policy = make_policy(name, parameters)
    if policy.knows_lengths:
        lengths = enumerate(trace.output_tokens.tolist())
        policy = policy.with_lengths({str(number): length for number, length in lengths})
    watched = Waits(policy)
    metrics = simulate(trace, watched, WORLD).metrics({})
    return metrics | {"longest_wait_s": watched.longest_s, "longest_round_s": watched.round_s}


def table(
    rate_rps: float, duration_s: float, seeds: int, processes: int
) -> dict[tuple[str, str], dict[str, float]]:
    """Each method's figures: means over the seeds, and the longest waits and rounds."""
    cases = [(method, rate_rps, duration_s) for method in METHODS]
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for (method, *_), runs in over_seeds(measured, cases, seeds, processes).items():
        rows[method] = {}
        for key in COLUMNS:
            of_seeds = np.max if key.startswith("longest") else np.mean
            rows[method][key] = float(of_seeds([run[key] for run in runs]))
    return rows


def broken(rows: Mapping[tuple[str, str], Mapping[str, float]]) -> list[str]:
    """One line for each violation of the order or the starvation limit."""
    found = []
    for swap in ("reactive", "proactive"):
        times = [rows[name, swap if name != "fcfs" else ""]["e2e_mean_s"] for name in ORDER]
        if times != sorted(times):
            found.append(f"{swap}: mean completion times of {', '.join(ORDER)} are {times} s")
    for (name, swap), row in rows.items():
        if "MLFQ" in name and row["longest_wait_s"] > STARVATION_S + row["longest_round_s"]:
            wait = f"a request waited {row['longest_wait_s']:.2f} s"
            found.append(f"{name}, {swap}: {wait}; the limit is {STARVATION_S} s")
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--rate", type=float, default=4.5, help="requests per second")
    parser.add_argument("--duration", type=float, default=150.0, help="seconds of arrivals")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    found = table(options.rate, options.duration, options.seeds, options.processes)
    rows = [
        [name, swap or "none", *(format(row[key], FORMS.get(key, ".2f")) for key in COLUMNS)]
        for (name, swap), row in found.items()
    ]
    print(markdown(["policy", "swapping", *COLUMNS.values()], rows, words=2))
    wrong = broken(found)
    print("\n".join(wrong) or "the order holds in both ways of swapping, and no request starved")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
