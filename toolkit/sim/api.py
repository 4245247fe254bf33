"""One call: a trace, a policy, the laws, so many workers -> what would happen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from toolkit.metrics import Served, sla_ratios, summarize
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.protocols import AnyPolicy, BuiltIn, Oracle, Policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Refusal, Request
from toolkit.sim.continuous import RoundWorker
from toolkit.sim.counters import counters
from toolkit.sim.front import NO_DELAY, Intake
from toolkit.sim.ledger import Ledger
from toolkit.sim.loop import VirtualWorker, run
from toolkit.sim.paged_engine import serve
from toolkit.sim.slab import SlabWorker
from toolkit.sim.token_gaps import TokenGaps
from toolkit.sim.validity import CountingRoundWorker, CountingSimWorker, CountingSlabWorker
from toolkit.sim.worker import SimWorker
from toolkit.sim.world import World
from toolkit.traces.types import Trace


@dataclass(slots=True, frozen=True)
class SimResult:
    """The requests' times, the counts that only a simulation knows, and who can never be served."""

    served: Served
    counters: dict[str, float]
    refusals: Sequence[Refusal] = ()

    def metrics(self, sla: Mapping[str, float]) -> dict[str, float]:
        """All metrics by name, the unit in the name."""
        return summarize(self.served, sla) | self.counters

    def sla_ratios(self, sla: Mapping[str, float]) -> dict[str, float]:
        """Each target's value over its limit."""
        return sla_ratios(self.served, sla)


def requests_of(trace: Trace, max_new_tokens: int, *, limits_hold: bool = True) -> tuple[list[Request], list[int]]:
    """The requests of a trace as a scheduler sees them, and the output lengths, which it does not."""
    requests, outputs = [], []
    for k, (arrival_s, prompt, output, limit, priority) in enumerate(trace.rows()):
        limit = limit or max_new_tokens
        requests.append(Request(str(k), arrival_s, prompt, limit, priority))
        outputs.append(min(output, limit) if limits_hold else output)
    return requests, outputs


def simulate(trace: Trace, policy: AnyPolicy, world: World) -> SimResult:
    """Serve `trace` under `policy`: deterministic, in time proportional to the number of decisions.

    `InputError` where the policy is built into an engine that `world` has no laws of.
    """
    requests, outputs = requests_of(trace, world.max_new_tokens, limits_hold=world.limits_hold)
    ledger = Ledger(trace.arrival_s.tolist(), outputs, world.size)
    if world.token_gaps:
        ledger.token_gaps = TokenGaps()
    if isinstance(policy, VllmPolicy):
        engine = world.engine()
        refusals, capacity_tokens = serve(requests, policy, engine, ledger, drain=world.drain), engine.capacity_tokens
        rows = ledger.row_steps / max(ledger.decoding_steps, 1)
        front = engine.front(rows) if world.front == NO_DELAY else world.front
    else:
        assert not isinstance(policy, BuiltIn)
        world = world.under(policy)
        refusals, capacity_tokens = _run(requests, policy, world, ledger), world.memory.usable_tokens
        front = world.front
    return SimResult(front.seen(ledger.served()), counters(ledger, len(refusals), capacity_tokens), refusals)


def _run(requests: Sequence[Request], policy: Policy, world: World, ledger: Ledger) -> list[Refusal]:
    """Serve under a policy of our scheduler's."""
    if isinstance(policy, Oracle):
        outputs = zip(requests, ledger.output_tokens, strict=True)
        policy = policy.told({request.request_id: tokens for request, tokens in outputs})
    scheduler = Scheduler(policy, world.scheduled(), seed=world.seed, finished=world.finished)
    workers = [*virtual_workers(policy, world, ledger, requests)]
    books = [ledger.of_kind() for _ in world.others]
    for kind, book in zip(world.others, books, strict=True):
        workers += virtual_workers(policy, kind, book, requests, first=len(workers))
    refused = run(scheduler, requests, workers, drain=world.drain)
    for kind, book in zip(world.others, books, strict=True):
        ledger.add(book, world.memory.usable_tokens / kind.memory.usable_tokens)
    return refused


def virtual_workers(
    policy: Policy, world: World, ledger: Ledger, requests: Sequence[Request], *, first: int = 0
) -> Sequence[VirtualWorker]:
    """The workers that run what `policy` decides, and write into `ledger`, whose order is that of `requests`.

    Of a fleet those of the first kind, numbered from `first`; each kind has a ledger (`Ledger.of_kind`).
    """
    number = {request.request_id: k for k, request in enumerate(requests)}
    latency, valid = world.latency, world.valid
    if valid is not None and valid.holds(requests, ledger.output_tokens):
        valid = None  # nothing to count
    if policy.continuous:
        rounds: Callable[..., RoundWorker] = RoundWorker if valid is None else partial(CountingRoundWorker, valid)
        if world.joining is not None:
            padded = SlabWorker if valid is None else partial(CountingSlabWorker, valid)
            rounds = partial(padded, joining=world.joining, capacity_tokens=world.memory.usable_tokens)
        return [
            rounds(
                first + k, latency, ledger, number, world.round_runs_out, swap=world.swap, future=world.future_memory
            )
            for k in range(world.workers)
        ]
    batches = SimWorker if valid is None else partial(CountingSimWorker, valid)
    intake = Intake([request.arrival_s for request in requests], world.arrival_cost_s)
    return [
        batches(latency, ledger, number, world.runs_out, streams=world.streams, flush_s=world.flush_s, intake=intake)
        for _ in range(world.workers)
    ]
