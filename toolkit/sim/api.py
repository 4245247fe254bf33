"""One call: a trace, a policy, the laws, so many workers -> what would happen."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.estimators.edge import uniform_draw
from toolkit.estimators.load import laws_from_fit
from toolkit.files.fit import Fit
from toolkit.metrics import Served, sla_ratios, summarize
from toolkit.sched.protocols import LatencyLaw, MemoryLaw, Policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Request, Worker
from toolkit.sim.loop import run
from toolkit.sim.worker import Ledger, RunsOut, SimWorker
from toolkit.traces.types import Trace


@dataclass(slots=True, frozen=True)
class World:
    """What is simulated besides the policy: the laws of a worker, how many there are, and how tokens reach clients.

    `runs_out` is the truth about memory (None: the law is right); `max_new_tokens` is the limit of requests whose
    trace names none.
    """

    latency: LatencyLaw
    memory: MemoryLaw
    workers: int
    max_new_tokens: int
    runs_out: RunsOut | None = None
    streams: bool = True
    flush_s: float = 0.0  # but workers report tokens at most this often


def world_from_fit(fit: Fit, *, workers: int, max_new_tokens: int, seed: int = 0, flush_s: float = 0.0) -> World:
    """The world that a fit describes: its laws, and a memory edge drawn per batch from `seed`."""
    laws = laws_from_fit(fit)

    def runs_out(batch_id: int, size: int, length: int, steps: int) -> bool:
        return laws.edge.runs_out(size, length, steps, uniform_draw(seed, batch_id))

    return World(laws.latency, laws.memory, workers, max_new_tokens, runs_out, flush_s=flush_s)


@dataclass(slots=True, frozen=True)
class SimResult:
    """The requests' times, and the counts that only a simulation knows."""

    served: Served
    counters: dict[str, float]

    def metrics(self, sla: Mapping[str, float]) -> dict[str, float]:
        """All metrics by name, the unit in the name."""
        return summarize(self.served, sla) | self.counters

    def sla_ratios(self, sla: Mapping[str, float]) -> dict[str, float]:
        """Each target's value over its limit."""
        return sla_ratios(self.served, sla)


def requests_of(trace: Trace, max_new_tokens: int) -> tuple[list[Request], list[int]]:
    """The requests of a trace as a scheduler sees them, and the output lengths, which it does not."""
    requests, outputs = [], []
    rows = zip(
        trace.arrival_s.tolist(),
        trace.prompt_tokens.tolist(),
        trace.output_tokens.tolist(),
        trace.max_tokens.tolist(),
        strict=True,
    )
    for k, (arrival_s, prompt, output, limit) in enumerate(rows):
        limit = limit or max_new_tokens
        requests.append(Request(str(k), arrival_s, prompt, limit))
        outputs.append(min(output, limit))
    return requests, outputs


def simulate(trace: Trace, policy: Policy, world: World) -> SimResult:
    """Serve `trace` under `policy`: deterministic, in time proportional to the number of decisions."""
    requests, outputs = requests_of(trace, world.max_new_tokens)
    ledger = Ledger(trace.arrival_s.tolist(), outputs)
    ledger.busy_s = [0.0] * world.workers
    ledger.completed_s = [0.0] * world.workers
    number = {request.request_id: k for k, request in enumerate(requests)}
    scheduler = Scheduler(policy, [Worker(k, world.latency, world.memory) for k in range(world.workers)])
    sim_worker = SimWorker(world.latency, ledger, number, world.runs_out, streams=world.streams, flush_s=world.flush_s)
    refused = run(scheduler, requests, [sim_worker] * world.workers)
    return SimResult(ledger.served(), _counters(ledger, len(refused)))


def _counters(ledger: Ledger, refused: int) -> dict[str, float]:
    batches, requests = max(ledger.batches, 1), max(sum(ledger.ok), 1)
    makespan_s = max(ledger.completed_s, default=0.0)
    return {
        "refused": float(refused),
        "batches": float(ledger.batches),
        "batch_size_mean": ledger.rows / batches,
        "slices_per_request": ledger.rows / requests,
        "pad_tokens_per_request": ledger.pad_tokens / requests,
        "invalid_tokens_per_request": ledger.invalid_tokens / requests,
        "early_return_percent": 100.0 * ledger.early_returns / batches,
        "decoding_steps": float(ledger.decoding_steps),
        "oom_percent": 100.0 * ledger.oom_batches / (batches + ledger.oom_batches),
        "completion_time_std_s": statistics.pstdev(ledger.completed_s),
        "utilisation_percent": 100.0 * statistics.fmean(ledger.busy_s) / makespan_s if makespan_s else 0.0,
    }
