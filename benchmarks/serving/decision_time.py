"""How long the scheduler takes to decide behind many requests, as a live front asks it.

    python -m benchmarks.serving.decision_time [--workers 64] [--waiting 10000] [--decisions 3000]

Takes minutes for all policies. Needs nothing else.

Workers are made up: a round or a batch takes what the laws of `benchmarks.papers.simulator_speed`
say, on a virtual clock. For each request that ends another arrives, so the backlog stays. What
is timed is what the front's metric `deciding` times, a `tick` or a `complete`; and beside it what
an arrival costs: the forecast that decides whether it is refused, its `submit` and the tick that
follows. Processor time, in microseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from heapq import heappop, heappush
from time import process_time

import numpy as np

from benchmarks.common.command import make_parser
from benchmarks.papers.simulator_scale import made_up
from benchmarks.papers.simulator_speed import LAW, MAX_NEW_TOKENS, MEMORY
from toolkit.routing.admission import UNLIMITED
from toolkit.sched.policies import ORACLES, POLICIES, make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Request
from toolkit.serve.forecast import Forecast
from toolkit.sim.api import requests_of, virtual_workers
from toolkit.sim.ledger import Ledger
from toolkit.sim.loop import VirtualWorker
from toolkit.sim.world import World
from toolkit.traces.types import Trace

SERVED_RPS = 0.25  # requests per second that a worker of this world serves, approximately


def simulated(
    policy: str, workers: int, trace: Trace
) -> tuple[Scheduler, Sequence[VirtualWorker], Sequence[Request]]:
    """A scheduler of `policy`, its virtual workers, and the trace's requests."""
    name, _, router = policy.partition(":")
    requests, outputs = requests_of(trace, MAX_NEW_TOKENS)
    world = World(LAW, MEMORY, workers, MAX_NEW_TOKENS)
    chosen = make_policy(name, {"router": router} if router else {})
    ledger = Ledger(trace.arrival_s.tolist(), outputs, workers)
    virtual = virtual_workers(chosen, world, ledger, requests)
    return Scheduler(chosen, world.scheduled()), virtual, requests


def times_us(
    policy: str, workers: int, waiting: int, decisions: int
) -> tuple[list[float], list[float]]:
    """Of each tick or completion, and of each arrival."""
    trace = made_up(waiting + decisions + workers * 64, SERVED_RPS * workers)
    scheduler, virtual, requests = simulated(policy, workers, trace)
    forecast = Forecast(scheduler, UNLIMITED)
    deciding = []
    arriving = []
    ends: list[tuple[float, int, int]] = []
    planned: dict[int, tuple[float, int, int]] = {}
    coming = iter(requests)
    numbers = itertools.count()
    now_s = 0.0

    def tick() -> float:
        start_s = process_time()
        batches = scheduler.tick(now_s)
        took_s = process_time() - start_s
        for batch in batches:
            at(batch.worker, virtual[batch.worker].run(batch, now_s))
        for index in scheduler.take_interrupts():
            at(index, virtual[index].interrupt(now_s))
        return took_s

    def at(index: int, end_s: float) -> None:
        planned[index] = end_s, next(numbers), index
        heappush(ends, planned[index])

    def arrive() -> None:
        start_s = process_time()
        forecast.predict(now_s)
        scheduler.submit(next(coming), now_s)
        took_s = process_time() - start_s
        tick_s = tick()
        deciding.append(1e6 * tick_s)
        arriving.append(1e6 * (took_s + tick_s))

    for _ in range(waiting):
        scheduler.submit(next(coming), now_s)
    tick()
    deciding.clear()
    while len(deciding) < decisions:
        while scheduler.waiting_jobs < waiting:
            arrive()
        wake_s = scheduler.wake_at_s
        if not ends or wake_s < ends[0][0]:
            now_s = max(wake_s, now_s)
            deciding.append(1e6 * tick())
            continue
        end = heappop(ends)
        if planned.get(end[2]) != end:
            continue
        now_s = max(end[0], now_s)
        result = virtual[end[2]].finish()
        start_s = process_time()
        scheduler.complete(result, now_s)
        deciding.append(1e6 * (process_time() - start_s))
        deciding.append(1e6 * tick())
    return deciding, arriving


def percentiles(values: Sequence[float]) -> str:
    """The median, the 99th percentile and the most."""
    return " | ".join(f"{value:,.0f}" for value in (*np.percentile(values, (50, 99)), max(values)))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--decisions", type=int, default=3_000)
    parser.add_argument("--policies", nargs="+", default=sorted(POLICIES.keys() - ORACLES))
    options = parser.parse_args()
    print(f"{options.workers} workers, {options.waiting:,} waiting\n")
    print("| policy | a decision: median | p99 | most | an arrival: median | p99 | most |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for policy in options.policies:
        found = times_us(policy, options.workers, options.waiting, options.decisions)
        print(f"| {policy} | {' | '.join(map(percentiles, found))} |", flush=True)


if __name__ == "__main__":
    main()
