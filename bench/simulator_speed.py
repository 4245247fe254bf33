"""How many requests per second the simulator simulates, on one core, loop only (no reading, no metrics).

    python bench/simulator_speed.py TRACE [--workers 8] [--rounds 5]

The world is the SCLS paper's: LLaMA2-13B's laws on transformers (Fig. 11), 33,792 KV tokens per worker. With the trace
`azure-2023-conv.csv` of the Azure Public Dataset (19,366 requests) the aim for `slice` is 50,000 requests/s.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from toolkit.estimators.laws import bilinear_law
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.policies import POLICIES, make_policy
from toolkit.sched.protocols import Oracle
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Worker
from toolkit.sim.api import World, requests_of, virtual_workers
from toolkit.sim.ledger import Ledger
from toolkit.sim.loop import run
from toolkit.traces.read import read_trace
from toolkit.traces.types import Trace

LAW = bilinear_law(p=(1.3e-4, 1e-3, 1e-5, 0.03), d=(3.5421e-6, 2e-4, 5e-7, 0.022956))
MEMORY = ZetaMemory(33_792, zeta=0.9)
MAX_NEW_TOKENS = 1024


def once(trace: Trace, policy: str, workers: int) -> float:
    """Seconds of one simulation of `trace`."""
    requests, outputs = requests_of(trace, MAX_NEW_TOKENS)
    ledger = Ledger(trace.arrival_s.tolist(), outputs, workers)
    chosen = make_policy(policy, {})
    if isinstance(chosen, Oracle):
        chosen = chosen.told({request.request_id: k for request, k in zip(requests, outputs, strict=True)})
    scheduler = Scheduler(chosen, [Worker(k, LAW, MEMORY) for k in range(workers)])
    sim_workers = virtual_workers(chosen, World(LAW, MEMORY, workers, MAX_NEW_TOKENS), ledger, requests)
    start = time.perf_counter()
    run(scheduler, requests, sim_workers)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    trace, _ = read_trace(options.trace)
    print(f"{trace.source}: {len(trace):,} requests, {options.workers} workers")
    for policy in POLICIES:
        once(trace, policy, options.workers)  # compiles and warms up
        seconds = [once(trace, policy, options.workers) for _ in range(options.rounds)]
        median = len(trace) / statistics.median(seconds)
        print(f"{policy:>18}: {median:>9,.0f} requests/s (best {len(trace) / min(seconds):,.0f})")


if __name__ == "__main__":
    main()
