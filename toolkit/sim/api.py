"""`simulate`: serve a trace under a policy in a world, and `compare` several policies and rates.

`simulate` turns a trace into requests, builds the virtual workers of the world (`virtual_workers`),
drives the scheduler over them (`toolkit.sim.loop`) and returns times and counters. A policy that is
built into an engine runs in `toolkit.sim.paged_engine` instead. `compare` yields one `PolicyRun`
after the other, as each is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.metrics import Floats, Served, latencies, sla_ratios, summarize
from toolkit.routing.routers import RoundRobinRouter
from toolkit.sched.policies import BUILT_IN, ORACLES, POLICIES
from toolkit.sched.policies.parameters import Value, parameters
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.protocols import AnyPolicy, BuiltIn, Oracle, Policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Refusal, Request
from toolkit.sim.continuous import RoundWorker
from toolkit.sim.ledger import Ledger, TokenGaps, counters
from toolkit.sim.loop import SimulationStalledError, VirtualWorker, run
from toolkit.sim.paged_engine import Reuse, serve
from toolkit.sim.replicas import Routing, ServedKind, serve_routed
from toolkit.sim.sessions import ClosedLoop
from toolkit.sim.slab import SlabWorker
from toolkit.sim.worker import NO_DELAY, Intake, SimWorker
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
    """The requests of a trace as a scheduler sees them, and the output lengths, which it does not
    see.
    """
    requests, outputs = [], []
    for k, (arrival_s, prompt, output, limit, priority) in enumerate(trace.rows()):
        limit = limit or max_new_tokens
        requests.append(Request(str(k), arrival_s, prompt, limit, priority))
        outputs.append(min(output, limit) if limits_hold else output)
    return requests, outputs


def simulate(trace: Trace, policy: AnyPolicy, world: World) -> SimResult:
    """Serve `trace` under `policy`: deterministic, in time proportional to the number of decisions.

    `InputError` if the policy is built into an engine for which `world` has no laws.
    """
    _check_room(policy, world)
    requests, outputs = requests_of(trace, world.max_new_tokens, limits_hold=world.limits_hold)
    ledger = Ledger(trace.arrival_s.tolist(), outputs, world.size)
    if world.token_gaps:
        ledger.token_gaps = TokenGaps()
    if isinstance(policy, VllmPolicy):
        return _served_by_engines(requests, policy, world, ledger, trace)
    assert not isinstance(policy, BuiltIn)
    if world.routing is not None:
        what = f"replica_router is '{world.routing.router.name}'"
        if world.refuses:
            what = "admission is 'targets'"
        raise InputError(
            f"{what}, and policy '{policy.name}' gives requests to workers itself",
            f"leave it out, or simulate the policy '{VllmPolicy.name}'",
        )
    world = world.under(policy)
    closed = trace.sessions if world.closed_loop else None
    refusals = _run(requests, policy, world, ledger, closed)
    capacity_tokens = world.memory.usable_tokens
    return SimResult(
        world.front.seen(ledger.served()),
        counters(ledger, len(refusals), capacity_tokens),
        refusals,
    )


def _served_by_engines(
    requests: Sequence[Request], policy: VllmPolicy, world: World, ledger: Ledger, trace: Trace
) -> SimResult:
    """Serve on engines with schedulers of their own: alike and in turn, or behind a router."""
    several = bool(world.others)
    kinds = [
        ServedKind(
            kind.engine(),
            kind.flags or policy,
            kind.workers,
            ledger.of_kind() if several else ledger,
            None if world.front == NO_DELAY else world.front,
        )
        for kind in world.kinds
    ]
    first, reuse = kinds[0], Reuse(trace.shared, trace.sessions, world.closed_loop)
    routing = world.routing or (Routing.of_front(RoundRobinRouter()) if several else None)
    if routing is None:
        refusals = serve(
            requests, policy, first.engine, ledger, reuse, front=first.front, drain=world.drain
        )
        served = first.usual_front.seen(ledger.served())
        found = counters(ledger, len(refusals), first.engine.capacity_tokens)
        return SimResult(served, found, refusals)
    routes = serve_routed(requests, kinds, ledger, reuse, routing, drain=world.drain)
    if several:
        for kind in kinds:
            ratio = first.engine.capacity_tokens / kind.engine.capacity_tokens
            ledger.add(kind.ledger, ratio)
    kind_of = np.array(routes.kind_of)
    served = _seen(ledger.served(), kinds, kind_of)
    found = counters(ledger, len(routes.refusals), first.engine.capacity_tokens)
    parts = _parts(served, kinds, kind_of) if several else []
    return SimResult(served, found, routes.refusals, parts)


def _seen(served: Served, kinds: Sequence[ServedKind], kind_of: NDArray[np.int64]) -> Served:
    """The requests as clients see them, each behind the front of the kind that served it."""
    fronts = [kind.usual_front for kind in kinds]
    first_s = np.array([front.first_s for front in fronts])
    last_s = np.array([front.last_s for front in fronts])
    return replace(
        served,
        first_token_s=served.first_token_s + first_s[kind_of],
        finish_s=served.finish_s + last_s[kind_of],
    )


def _parts(
    served: Served, kinds: Sequence[ServedKind], kind_of: NDArray[np.int64]
) -> list[SimResult]:
    """The result of each kind: the requests that it served, and its own counters."""
    found, first = [], 0
    for number, kind in enumerate(kinds):
        mine, book = kind_of == number, kind.ledger
        part = Served(**{f.name: getattr(served, f.name)[mine] for f in fields(Served)})
        last = first + kind.count
        book.outcomes = [each for each, is_mine in zip(book.outcomes, mine, strict=True) if is_mine]
        book.token_gaps = None
        book.busy_s, book.completed_s = book.busy_s[first:last], book.completed_s[first:last]
        found.append(SimResult(part, counters(book, 0, kind.engine.capacity_tokens)))
        first = last
    return found


def _check_room(policy: AnyPolicy, world: World) -> None:
    """`InputError` where a worker has no memory for any token."""
    if isinstance(policy, VllmPolicy):
        rooms = [kind.engine().capacity_tokens for kind in world.kinds]
    else:
        rooms = [kind.memory.usable_tokens for kind in world.under(policy).kinds]
    if min(rooms) < 1:
        raise InputError(
            "the fitted memory has no room: 0 tokens of KV cache are usable",
            "profile where the cache is larger, or give --set capacity_tokens=N",
        )


def _run(
    requests: Sequence[Request],
    policy: Policy,
    world: World,
    ledger: Ledger,
    closed: Sessions | None,
) -> list[Refusal]:
    """Serve under a policy of this project's scheduler, sessions in a closed loop where they are
    given; return the refused requests.
    """
    if isinstance(policy, Oracle):
        outputs = zip(requests, ledger.output_tokens, strict=True)
        policy = policy.with_lengths({request.request_id: tokens for request, tokens in outputs})
    known, first = world.scheduled(), requests
    if closed is None:
        scheduler = Scheduler(policy, known, seed=world.seed, finished=world.finished)
    else:
        scheduler = ClosedLoop(
            policy,
            known,
            requests,
            closed,
            ledger,
            world.front,
            seed=world.seed,
            finished=world.finished,
        )
        previous = closed.previous.tolist()
        first = [request for k, request in enumerate(requests) if previous[k] < 0]
    workers = [*virtual_workers(policy, world, ledger, requests)]
    books = [ledger.of_kind() for _ in world.others]
    for kind, book in zip(world.others, books, strict=True):
        workers += virtual_workers(policy, kind, book, requests, first=len(workers))
    refused = run(scheduler, first, workers, drain=world.drain)
    for kind, book in zip(world.others, books, strict=True):
        ledger.add(book, world.memory.usable_tokens / kind.memory.usable_tokens)
    return refused


def virtual_workers(
    policy: Policy, world: World, ledger: Ledger, requests: Sequence[Request], *, first: int = 0
) -> Sequence[VirtualWorker]:
    """The workers that run what `policy` decides and write into `ledger`, which is in the order of
    `requests`.

    For a fleet: the workers of the first kind, numbered from `first`. Each kind has a ledger of its
    own (`Ledger.of_kind`).
    """
    latency, valid = world.latency, world.valid
    counts = valid is not None and not valid.holds(requests, ledger.output_tokens)
    outside = valid.left_by if valid is not None and counts else None
    if policy.continuous:
        rounds: Callable[..., RoundWorker] = RoundWorker
        if world.joining is not None:
            rounds = partial(
                SlabWorker, joining=world.joining, capacity_tokens=world.memory.usable_tokens
            )
        return [
            rounds(
                first + k,
                latency,
                ledger,
                world.round_runs_out,
                swap=world.swap,
                future=world.future_memory,
                outside=outside,
            )
            for k in range(world.workers)
        ]
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
    """All policies but the oracles, and the one built into the fit's engine if the fit has its
    laws.
    """
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
