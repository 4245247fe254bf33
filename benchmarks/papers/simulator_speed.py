"""Requests per second that the simulator's loop handles on one core, by policy.

    python -m benchmarks.papers.simulator_speed TRACE [--workers 8] [--repeats 5] [--million]

Takes minutes, by the length of the trace. Needs a trace. The aims are for azure-2023-conv.csv of
the Azure Public Dataset (19,366 requests).

Reading the trace and computing metrics are not counted. The world is the SCLS paper's: the laws of
LLaMA2-13B on transformers (Fig. 11), 33,792 KV tokens per worker, outputs up to 1,024 tokens. Times
are processor time, since other processes may share the core. Memory is the peak of what the loop
allocates, over the first 4,000 requests, and again with outputs, memory and time four times as
long. vLLM's own scheduler runs on a law of passes with the same coefficients and 2,112 blocks of 16
tokens, one engine per worker. `--million` also runs a million requests, the trace repeated.
"""

from __future__ import annotations

import resource
import statistics
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time

import numpy as np

from benchmarks.common.command import make_parser
from toolkit.estimators.laws import bilinear_law
from toolkit.estimators.memory import ZetaMemory
from toolkit.estimators.steps import StepLaw
from toolkit.sched.kernels import split_by_serving_time
from toolkit.sched.policies import ORACLES, POLICIES, make_policy
from toolkit.sched.policies.past_future import PastFuturePolicy
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Job, Request, Worker
from toolkit.sched.view import LengthHistory, View
from toolkit.sim.api import requests_of, virtual_workers
from toolkit.sim.ledger import Ledger
from toolkit.sim.loop import run
from toolkit.sim.paged_engine import PagedEngine, Reuse, serve
from toolkit.sim.world import World
from toolkit.traces.read import read_trace
from toolkit.traces.types import Trace

LAW = bilinear_law(p=(1.3e-4, 1e-3, 1e-5, 0.03), d=(3.5421e-6, 2e-4, 5e-7, 0.022956))
MEMORY = ZetaMemory(33_792, zeta=0.9)
ENGINE = PagedEngine(StepLaw(0.022956, 2e-4, 1e-3, 3.5421e-6, 0.0, (1.3e-4,)), 2112, 16)
MAX_NEW_TOKENS = 1024
TRACED_REQUESTS = 4000  # of the run with traced memory, which takes several times as long
# requests/s
AIMS = {"conservative": 150_000, "fcfs": 150_000, "past-future": 50_000, "slice": 100_000}


@dataclass(slots=True, frozen=True)
class Run:
    """One simulation: the time of the loop, and its amount of work."""

    seconds: float
    batches_per_request: float  # rounds, of a continuous policy
    peak_bytes: int  # of the loop; 0 where it was not traced


def once(trace: Trace, policy: str, workers: int, *, longer: int = 1, traced: bool = False) -> Run:
    """Simulate `trace`, with outputs, their limit, memory and time `longer` times as large."""
    requests, outputs = requests_of(trace, MAX_NEW_TOKENS * longer)
    outputs = [tokens * longer for tokens in outputs]
    requests = [replace(request, arrival_s=request.arrival_s * longer) for request in requests]
    memory = ZetaMemory(33_792 * longer, zeta=0.9)
    world = World(LAW, memory, workers, MAX_NEW_TOKENS * longer)
    ledger = Ledger([request.arrival_s for request in requests], outputs, workers)
    chosen = make_policy(policy, {})
    scheduler = Scheduler(chosen, [Worker(k, LAW, memory) for k in range(workers)])
    sim_workers = virtual_workers(chosen, world, ledger, requests)
    if traced:
        tracemalloc.start()
    start_s = process_time()
    run(scheduler, requests, sim_workers)
    seconds = process_time() - start_s
    peak_bytes = tracemalloc.get_traced_memory()[1] if traced else 0
    tracemalloc.stop()
    return Run(seconds, (ledger.rounds or ledger.batches) / len(trace), peak_bytes)


def repeated(trace: Trace, times: int) -> Trace:
    """The trace, repeated `times` times in sequence."""
    span_s = float(trace.arrival_s[-1]) + 1.0
    arrival_s = np.concatenate([trace.arrival_s + k * span_s for k in range(times)])
    rows = np.tile(np.arange(len(trace)), times)
    return replace(trace.take(rows), arrival_s=arrival_s)


def past_future_decision(rows: int) -> Callable[[], object]:
    """One admission decision of Past-Future with `rows` resident rows, after a request ended."""
    rng = np.random.default_rng(0)
    worker = Worker(0, LAW, ZetaMemory(10_000 * rows))
    for k in range(rows):
        prompt = int(rng.integers(10, 2000))
        generated = int(rng.integers(0, 200))
        request = Request(str(k), 0.0, prompt, MAX_NEW_TOKENS)
        worker.running.join(Job(request, k, prompt + generated, generated))
    history = LengthHistory(1000, rng.geometric(1 / 250, 1000).tolist())
    view = View([], [worker], 0.0, history, rng)
    policy = PastFuturePolicy()
    waiting = [Job(Request("next", 0.0, 500, MAX_NEW_TOKENS), rows, 500)]

    def decide() -> int:
        history.add(200)
        return policy.admit(view, worker, waiting)

    return decide


def algorithm_1(requests: int) -> Callable[[], object]:
    """SCLS's dynamic programming over this many pooled requests, slices of 128 tokens."""
    lengths = np.sort(np.random.default_rng(0).lognormal(6, 1, requests).astype(np.int64) + 1)
    max_batch = np.maximum(MEMORY.max_batch(lengths, 128, 0.1), 1)
    table = LAW.serve_table(int(max_batch.max()), 128)
    return lambda: split_by_serving_time(lengths, max_batch, table)


def microseconds(call: Callable[[], object], repeats: int = 2000) -> float:
    """The median of `repeats` calls, each timed separately; a first call compiles."""
    call()
    seconds = []
    for _ in range(repeats):
        start_s = process_time()
        call()
        seconds.append(process_time() - start_s)
    return 1e6 * statistics.median(seconds)


def print_policies(trace: Trace, workers: int, repeats: int) -> None:
    head = trace.take(slice(TRACED_REQUESTS))
    heads = "batches or rounds per request | peak memory of the loop | outputs x4"
    print(f"| policy | requests/s | best | aim | {heads} |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for policy in (name for name in POLICIES if name not in ORACLES):
        once(trace, policy, workers)  # compiles and warms up
        runs = [once(trace, policy, workers) for _ in range(repeats)]
        rates = [len(trace) / one.seconds for one in runs]
        short, long = (
            once(head, policy, workers, longer=k, traced=True).peak_bytes / 1e6 for k in (1, 4)
        )
        aim = f"{AIMS[policy]:,}" if policy in AIMS else ""
        print(
            f"| {policy} | {statistics.median(rates):,.0f} | {max(rates):,.0f} | {aim} "
            f"| {runs[0].batches_per_request:.2f} | {short:.1f} MB | {long:.1f} MB |",
            flush=True,
        )


def print_vllm(trace: Trace, workers: int, repeats: int) -> None:
    """Print the row of vLLM's own scheduler, with its default flags."""
    requests, outputs = requests_of(trace, MAX_NEW_TOKENS)
    rates = []
    for _ in range(repeats):
        ledger = Ledger([request.arrival_s for request in requests], outputs, workers)
        start_s = process_time()
        serve(requests, VllmPolicy(), ENGINE, ledger, Reuse())
        rates.append(len(trace) / (process_time() - start_s))
    passes = ledger.rounds / len(trace)
    median = statistics.median(rates)
    print(f"| vllm | {median:,.0f} | {max(rates):,.0f} | | {passes:.2f} passes | | |")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--million", action="store_true")
    options = parser.parse_args()
    trace, _ = read_trace(options.trace)
    trace = replace(trace, shared=None, sessions=None, priority=None)
    print(f"{trace.source}: {len(trace):,} requests, {options.workers} workers\n")
    print_policies(trace, options.workers, options.repeats)
    print_vllm(trace, options.workers, options.repeats)
    deciding_us, cutting_us = map(microseconds, (past_future_decision(256), algorithm_1(1000)))
    print(f"\nPast-Future, one decision at batch 256: {deciding_us:.1f} us (aim 20)")
    print(f"Algorithm 1 for 1,000 requests: {cutting_us / 1000:.3f} ms (aim 0.5)")
    if options.million:
        long = repeated(trace, -(-1_000_000 // len(trace)))
        one = once(long, "conservative", options.workers)
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB, on Linux
        print(f"conservative, {len(long):,} requests in one run: {one.seconds:.1f} s, ", end="")
        rate = f"{len(long) / one.seconds:,.0f} requests/s"
        print(f"{rate}; the process at its largest: {peak_mb:,.0f} MiB")


if __name__ == "__main__":
    main()
