"""`simulate`: serve a trace under a policy in a world, and `compare` several policies and rates.

`simulate` turns a trace into requests, builds the virtual workers of the world (`virtual_workers`),
drives the scheduler over them (`toolkit.sim.loop`) and returns times and counters; sessions in a
closed loop have a scheduler of their own (`ClosedLoop`). A policy that is built into an engine runs
in `toolkit.sim.paged_engine` instead. `compare` yields one `PolicyRun` after the other, as each is
done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from heapq import heappop, heappush
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.interrupts import check, held
from toolkit.metrics import Floats, Served, latencies, sla_ratios, summarize
from toolkit.routing.routers import RoundRobinRouter
from toolkit.sched.policies import BUILT_IN, ORACLES, POLICIES
from toolkit.sched.policies.parameters import Value, parameters
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.protocols import AnyPolicy, BuiltIn, Oracle, Policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Batch, BatchResult, Refusal, Request, RoundResult, Worker
from toolkit.sim.continuous import RoundSetup, RoundWorker
from toolkit.sim.ledger import Ledger, TokenGaps, counters
from toolkit.sim.loop import SimulationStalledError, VirtualWorker, collector_off, run
from toolkit.sim.paged_engine import Reuse, serve
from toolkit.sim.replicas import RoutedRun, Routing, ServedKind
from toolkit.sim.slab import SlabWorker
from toolkit.sim.worker import NO_DELAY, FrontDelay, Intake, SimWorker
from toolkit.sim.world import World
from toolkit.traces.types import Sessions, Trace
from toolkit.traces.windows import mean_rate, scale_rate


@dataclass(slots=True, frozen=True)
class SimResult:
    """The times of the requests, the counters of the simulation, and the requests that were refused
    since they can never be served. Of a fleet of servers also the results of its `kinds`.
    """

    served: Served
    counters: dict[str, float]
    refusals: Sequence[Refusal] = ()
    kinds: Sequence[SimResult] = ()

    def metrics(self, sla: Mapping[str, float]) -> dict[str, float]:
        """All metrics by name, the unit in the name."""
        return summarize(self.served, sla) | self.counters

    def sla_ratios(self, sla: Mapping[str, float]) -> dict[str, float]:
        """Each target's value over its limit."""
        return sla_ratios(self.served, sla)


def requests_of(
    trace: Trace, max_new_tokens: int, *, limits_hold: bool = True
) -> tuple[list[Request], list[int]]:
    """The requests of a trace as a scheduler sees them, and the output lengths, hidden from it."""
    requests, outputs = [], []
    for k, (arrival_s, prompt, output, limit, priority) in enumerate(trace.rows()):
        limit = limit or max_new_tokens
        requests.append(Request(str(k), arrival_s, prompt, limit, priority))
        outputs.append(min(output, limit) if limits_hold else output)
    return requests, outputs


@held()
def simulate(trace: Trace, policy: AnyPolicy, world: World) -> SimResult:
    """Serve `trace` under `policy`: deterministic, in time proportional to the number of decisions.

    Ctrl-C ends it between two events (`toolkit.interrupts`).
    `InputError` if the policy is built into an engine for which `world` has no laws.
    """
    if isinstance(policy, VllmPolicy):
        usable = [kind.engine().capacity_tokens for kind in world.kinds]
    else:
        world = world.under(policy)
        usable = [kind.memory.usable_tokens for kind in world.kinds]
    if min(usable) < 1:
        raise InputError(
            "the fitted memory has no room: 0 tokens of KV cache are usable",
            "profile where the cache is larger, or give --set capacity_tokens=N",
        )
    requests, outputs = requests_of(trace, world.max_new_tokens, limits_hold=world.limits_hold)
    check()
    gaps = TokenGaps() if world.token_gaps else None
    ledger = Ledger(trace.arrival_s.tolist(), outputs, world.size, token_gaps=gaps)
    if isinstance(policy, VllmPolicy):
        return _served_by_engines(requests, policy, world, ledger, trace)
    assert not isinstance(policy, BuiltIn)
    if world.routing is not None:
        router = f"replica_router is '{world.routing.router.name}'"
        what = "admission is 'targets'" if world.refuses else router
        raise InputError(
            f"{what}, and policy '{policy.name}' gives requests to workers itself",
            f"leave it out, or simulate the policy '{VllmPolicy.name}'",
        )
    closed = trace.sessions if world.closed_loop else None
    refusals = _run(requests, policy, world, ledger, closed)
    counts = counters(ledger, len(refusals), usable[0])
    return SimResult(world.front.seen(ledger.served()), counts, refusals)


def _served_by_engines(
    requests: Sequence[Request], policy: VllmPolicy, world: World, ledger: Ledger, trace: Trace
) -> SimResult:
    """Serve on engines with schedulers of their own: alike and in turn, or behind a router."""
    several = bool(world.others)
    front = None if world.front == NO_DELAY else world.front
    kinds = []
    for kind in world.kinds:
        book = ledger.of_kind() if several else ledger
        kinds.append(ServedKind(kind.engine(), kind.flags or policy, kind.workers, book, front))
    engine, reuse = kinds[0].engine, Reuse(trace.shared, trace.sessions, world.closed_loop)
    routing = world.routing or (Routing.of_front(RoundRobinRouter()) if several else None)
    if routing is None:
        refusals = serve(requests, policy, engine, ledger, reuse, front=front, drain=world.drain)
        served = kinds[0].usual_front.seen(ledger.served())
        counts = counters(ledger, len(refusals), engine.capacity_tokens)
        return SimResult(served, counts, refusals)
    with collector_off():  # what cycles there are live as long as the caches
        routed = RoutedRun(requests, kinds, ledger, reuse, routing)
        refusals = routed.serve(drain=world.drain)
    if several:
        for one in kinds:
            ledger.add(one.ledger, engine.capacity_tokens / one.engine.capacity_tokens)
    # as clients see the requests, each behind the front of the kind that served it
    kind_of, fronts = np.array(routed.kind_of), [kind.usual_front for kind in kinds]
    served = ledger.served()
    served = replace(
        served,
        first_token_s=served.first_token_s + np.array([front.first_s for front in fronts])[kind_of],
        finish_s=served.finish_s + np.array([front.last_s for front in fronts])[kind_of],
    )
    counts = counters(ledger, len(refusals), engine.capacity_tokens)
    return SimResult(served, counts, refusals, _parts(served, kinds, kind_of) if several else [])


def _parts(
    served: Served, kinds: Sequence[ServedKind], kind_of: NDArray[np.int64]
) -> list[SimResult]:
    """The result of each kind: the requests that it served, and its own counters."""
    results, first = [], 0
    for number, kind in enumerate(kinds):
        chosen, book = kind_of == number, kind.ledger
        part = Served(**{f.name: getattr(served, f.name)[chosen] for f in fields(Served)})
        last = first + kind.count
        book.outcomes = list(compress(book.outcomes, chosen))
        book.token_gaps = None
        book.busy_s, book.completed_s = book.busy_s[first:last], book.completed_s[first:last]
        results.append(SimResult(part, counters(book, 0, kind.engine.capacity_tokens)))
        first = last
    return results


def _run(
    requests: Sequence[Request],
    policy: Policy,
    world: World,
    ledger: Ledger,
    closed: Sessions | None,
) -> list[Refusal]:
    """Serve under a policy of this project's scheduler; return the refused requests."""
    if isinstance(policy, Oracle):
        outputs = zip(requests, ledger.output_tokens, strict=True)
        policy = policy.with_lengths({request.request_id: tokens for request, tokens in outputs})
    known, first = world.scheduled(), requests
    if closed is None:
        scheduler = Scheduler(policy, known, seed=world.seed, finished=world.finished)
    else:
        turns = requests, closed, ledger, world.front
        scheduler = ClosedLoop(policy, known, *turns, seed=world.seed, finished=world.finished)
        previous = closed.previous.tolist()
        first = [request for k, request in enumerate(requests) if previous[k] < 0]
    workers = [*virtual_workers(policy, world, ledger, requests)]
    books = [ledger.of_kind() for _ in world.others]
    for kind, book in zip(world.others, books, strict=True):
        workers += virtual_workers(policy, kind, book, requests, first=len(workers))
    refusals = run(scheduler, first, workers, drain=world.drain)
    for kind, book in zip(world.others, books, strict=True):
        ledger.add(book, world.memory.usable_tokens / kind.memory.usable_tokens)
    return refusals


def virtual_workers(
    policy: Policy, world: World, ledger: Ledger, requests: Sequence[Request], *, first: int = 0
) -> Sequence[VirtualWorker]:
    """The workers that run what `policy` decides, numbered from `first`. They write what happens to
    `requests` into `ledger`. Of a fleet, these are the workers of the first kind, since each kind
    has a ledger of its own (`Ledger.of_kind`).
    """
    latency, valid = world.latency, world.valid
    counts = valid is not None and not valid.holds(requests, ledger.output_tokens)
    outside = valid.left_by if valid is not None and counts else None
    if policy.continuous:
        setup = RoundSetup(
            latency,
            world.round_runs_out,
            world.swap,
            outside,
            world.future_memory,
            world.joining,
            world.memory.usable_tokens,
        )
        kind = RoundWorker if world.joining is None else SlabWorker
        return [kind(first + k, ledger, setup) for k in range(world.workers)]
    intake = Intake([request.arrival_s for request in requests], world.arrival_cost_s)
    return [
        SimWorker(
            latency,
            ledger,
            world.runs_out,
            streams=world.streams,
            flush_s=world.flush_s,
            intake=intake,
            outside=outside,
        )
        for _ in range(world.workers)
    ]


class ClosedLoop(Scheduler):
    """A scheduler that submits the later turns of sessions itself; `toolkit.sim.loop` submits first
    turns. It writes into `ledger` when turns arrived.

    A turn arrives when the turn before has ended and its client has seen the last token, behind
    `front`, and thought about it. If a row ends before its static batch, the next turn arrives at
    the end of the batch at the earliest, since no decision is made before.
    """

    def __init__(
        self,
        policy: Policy,
        workers: Sequence[Worker],
        requests: Sequence[Request],
        sessions: Sessions,
        ledger: Ledger,
        front: FrontDelay,
        *,
        seed: int,
        finished: Sequence[int],
    ) -> None:
        super().__init__(policy, workers, seed=seed, finished=finished)
        self._requests, self._ledger, self._front_s = requests, ledger, front.last_s
        self._number = {request.request_id: k for k, request in enumerate(requests)}
        self._turns = Reuse(sessions=sessions).turns(range(len(requests)))
        self._later = sum(map(len, self._turns.values()))  # turns that have not arrived
        self._coming: list[tuple[float, int]] = []  # a heap of (arrival, number)
        self._batches: dict[int, Batch] = {}  # by worker

    @property
    def wake_at_s(self) -> float:
        own_s = super().wake_at_s
        return min(own_s, self._coming[0][0]) if self._coming else own_s

    @property
    def waiting_jobs(self) -> int:
        return super().waiting_jobs + self._later

    def submit(self, request: Request, now_s: float, number: int = -1) -> Refusal | None:
        refusal = super().submit(request, now_s, self._number[request.request_id])
        if refusal is not None:
            self._follow(request.request_id, now_s, now_s)
        return refusal

    def tick(self, now_s: float) -> list[Batch]:
        while self._coming and self._coming[0][0] <= now_s:
            arrival_s, number = heappop(self._coming)
            self._later -= 1
            refusal = self.submit(replace(self._requests[number], arrival_s=arrival_s), now_s)
            if refusal is not None:
                self._refused.append(refusal)
        batches = super().tick(now_s)
        for batch in batches:
            self._batches[batch.worker] = batch
        return batches

    def complete(self, result: BatchResult | RoundResult, now_s: float) -> None:
        super().complete(result, now_s)
        if isinstance(result, RoundResult):
            ended: Iterable[str] = result.ended
        else:
            jobs = compress(self._batches[result.worker].jobs, result.finished)
            ended = (job.request_id for job in jobs)
        for request_id in ended:
            outcome = self._ledger.outcomes[self._number[request_id]]
            last_s = max(outcome.last_token_s, outcome.first_token_s)
            self._follow(request_id, last_s + self._front_s, now_s)

    def _follow(self, request_id: str, end_s: float, now_s: float) -> None:
        """A client saw a turn end at `end_s`: the turns after it will come."""
        for later, think_s in self._turns.get(self._number[request_id], ()):
            arrival_s = max(end_s + think_s, now_s)
            self._ledger.arrival_s[later] = arrival_s
            heappush(self._coming, (arrival_s, later))


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """One policy at one rate. `problem` says why there are no metrics."""

    policy: str
    parameters: Mapping[str, Value]
    rate_rps: float  # of arrivals; 0 if all requests arrive at once
    metrics: Mapping[str, float] = field(default_factory=dict)
    e2e_s: Floats = field(default_factory=lambda: np.empty(0))  # of the requests that ended
    refusals: Sequence[Refusal] = ()
    problem: str = ""


def usual_policies(fit: Fit | None) -> list[str]:
    """All policies but oracles, and the one built into the fit's engine if the fit has its laws."""
    built_in = [
        name
        for name, policy in BUILT_IN.items()
        if fit and fit.steps and fit.engine.engine == policy.engine
    ]
    return [*built_in, *(name for name in POLICIES if name not in ORACLES)]


def compare(
    trace: Trace,
    policies: Sequence[AnyPolicy],
    world: World,
    rates: Sequence[float],
    sla: Mapping[str, float],
) -> Iterator[PolicyRun]:
    """Run each policy at each of `rates` (none: the trace's own), all on the same requests and
    draws.

    If the simulation of a policy stalls, its run has a `problem`; the others go on.
    """
    for scaled in [scale_rate(trace, rate) for rate in rates] or [trace]:
        for policy in policies:
            given, rate = parameters(policy), mean_rate(scaled)
            try:
                result = simulate(scaled, policy, world)
            except SimulationStalledError as error:
                yield PolicyRun(policy.name, given, rate, problem=error.message)
                continue
            metrics, e2e_s = result.metrics(sla), latencies(result.served)["e2e"]
            yield PolicyRun(policy.name, given, rate, metrics, e2e_s, result.refusals)
