"""`simulate`: serve a trace under a policy in a world.

`simulate` turns a trace into requests, builds the virtual workers of the world (`virtual_workers`),
drives the scheduler over them (`toolkit.sim.loop`) and returns times and counters. A policy that is
built into an engine runs in `toolkit.sim.replicas` instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.tuning import BEHIND
from toolkit.interrupts import check, held
from toolkit.metrics import (
    FRONT,
    SERVED,
    Served,
    behind_percent,
    sessions_rate_rps,
    summarize,
)
from toolkit.routing.admission import UNLIMITED
from toolkit.scaling.log import FleetLog
from toolkit.sched.policies import BUILT_IN, ORACLES, POLICIES
from toolkit.sched.policies.base import Policy
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.protocols import AnyPolicy, BuiltIn
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Refusal, Request
from toolkit.sim.arrivals import arrivals_of
from toolkit.sim.continuous import ContinuousWorker
from toolkit.sim.fleet import FleetClock
from toolkit.sim.ledger import Ledger, TokenGaps, counters, worker_shares
from toolkit.sim.loop import SimulationStalledError, VirtualWorker, collector_off, run
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.replicas import ReplicaClock
from toolkit.sim.slab import SlabWorker
from toolkit.sim.worker import SliceWorker
from toolkit.sim.world import World
from toolkit.traces.types import Trace


@dataclass(slots=True, frozen=True)
class SimResult:
    """The times of the requests, the counters of the simulation, and the requests that were refused
    since they can never be served.

    `concurrency`: requests that were served at once in a closed loop; 0: they came by themselves,
    so that arrivals have a rate. `front_s`: the part of the front in a mean time to first token.
    `fleet`: when replicas came and went, where their number changes.
    """

    served: Served
    counters: dict[str, float]
    refusals: Sequence[Refusal] = ()
    concurrency: int = 0
    front_s: float = 0.0
    fleet: FleetLog | None = None

    def metrics(self, sla: Mapping[str, float]) -> dict[str, float]:
        """All metrics by name, the unit in the name."""
        closed = self.concurrency > 0
        behind = {} if closed else {BEHIND: behind_percent(self.served)}
        front = {FRONT: self.front_s} if self.front_s else {}
        own = self.fleet.metrics() if self.fleet is not None else {}
        return summarize(self.served, sla, closed=closed) | front | behind | self.counters | own


def requests_of(
    trace: Trace, max_new_tokens: int, *, limits_hold: bool = True, longest: int = 0
) -> tuple[list[Request], list[int]]:
    """Return the requests of a trace as a scheduler sees them, and the output lengths, hidden from
    it.

    Args:
        max_new_tokens: the limit of an output for which the trace gives none.
        longest: prompt and output that fit in the engine: vLLM lowers a limit that is not given to
            what is left behind the prompt; 0: no limit is lowered.
    """
    requests = []
    outputs = []
    for k, (arrival_s, prompt, output, limit, priority) in enumerate(trace.rows()):
        if not limit:
            limit = max_new_tokens
            if longest:
                limit = min(limit, max(longest - prompt, output, 1))
        requests.append(Request(str(k), arrival_s, prompt, limit, priority))
        outputs.append(min(output, limit) if limits_hold else output)
    return requests, outputs


@held(writes=False)
@collector_off()  # what reference cycles there are live as long as the caches
def simulate(trace: Trace, policy: AnyPolicy, world: World) -> SimResult:
    """Serve `trace` under `policy`: deterministic, in time proportional to the number of decisions.

    The times are of the requests after the trace's warm-up, the counters of all. Ctrl-C ends it
    between two events (`toolkit.interrupts`). `InputError` if the policy is built into an engine
    for which `world` has no laws.
    """
    if world.concurrency < 0:
        load = f"{world.concurrency} requests at once are not possible"
        raise InputError(load, "give at least 0; 0: requests come at their times")
    if world.concurrency:  # the trace gives only the order
        trace = replace(trace, sessions=None)
    result = replace(_simulate_all(trace, policy, world), concurrency=world.concurrency)
    if trace.sessions is not None and world.closed_loop and not trace.warmup:
        rate_rps = sessions_rate_rps(result.served, trace.sessions.first)
        result = replace(result, counters={SERVED: rate_rps, **result.counters})
    return replace(result, served=result.served.after(trace.warmup)) if trace.warmup else result


def _simulate_all(
    trace: Trace, policy: AnyPolicy, world: World, *, preempts: bool = True
) -> SimResult:
    """Return the times of all requests. Raises SimulationStalledError where nothing goes on, and
    if a row is preempted though nothing `preempts`.
    """
    shares = trace.shared is not None or trace.sessions is not None
    if isinstance(policy, VllmPolicy):
        engine = world.engine_of(policy)
        usable = engine.capacity_tokens
        if policy.prefix_caching and not shares and engine.caches and not engine.caches.states:
            # Only a row that was preempted finds a block again. Without keys of blocks, windows are
            # simulated in less than half the time. If a row is preempted, all is simulated anew.
            with suppress(SimulationStalledError):
                return _simulate_all(
                    trace, replace(policy, prefix_caching=False), world, preempts=False
                )
    else:
        world = world.under(policy)
        usable = world.memory.usable_tokens
    if usable < 1:
        raise InputError(
            "the fitted memory has no room: 0 tokens of KV cache are usable",
            "profile where the cache is larger, or give --set capacity_tokens=N",
        )
    requests, outputs = requests_of(
        trace,
        world.max_new_tokens,
        limits_hold=world.limits_hold,
        longest=engine.longest if isinstance(policy, VllmPolicy) else 0,
    )
    check()
    ledger = Ledger(
        trace.arrival_s.tolist(),
        outputs,
        world.workers,
        token_gaps=TokenGaps() if world.token_gaps else None,
        shares=shares and isinstance(policy, VllmPolicy),
        preempts=preempts,
    )
    front_s = world.front_s
    fleet: FleetLog | None = None
    if isinstance(policy, VllmPolicy):
        clock = (ReplicaClock if world.fleet is None else FleetClock)(
            requests, policy, engine, ledger, trace, world
        )
        clock.run()
        refusals = clock.refusals
        fleet = clock.log
        front_s = engine.seen_after_s(ledger.row_steps / max(ledger.decoding_steps, 1))
    else:
        assert not isinstance(policy, BuiltIn)
        refusals = _run(requests, policy, world, ledger, trace)
    counts = counters(ledger, len(refusals), usable)
    for pool in ledger.pools:
        pool.take(pool.free)  # keys point at each other, which the collector would find slowly
    if fleet is None:
        counts |= worker_shares(ledger)
    return SimResult(ledger.served(front_s), counts, refusals, front_s=front_s, fleet=fleet)


def _run(
    requests: Sequence[Request],
    policy: Policy,
    world: World,
    ledger: Ledger,
    trace: Trace,
) -> list[Refusal]:
    """Serve under a policy of this project's scheduler; return the refused requests."""
    if world.fleet is not None:
        raise InputError(
            f"policy '{policy.name}' has a fixed number of workers",
            f"replicas come and go under the policy '{VllmPolicy.name}'",
        )
    if world.router is not None:
        router = f"replica_router is '{world.router.name}'"
        what = "admission is 'targets'" if world.limits != UNLIMITED else router
        raise InputError(
            f"{what}, and policy '{policy.name}' gives requests to workers itself",
            f"leave it out, or simulate the policy '{VllmPolicy.name}'",
        )
    turns = trace.sessions if world.closed_loop else None
    arrivals = arrivals_of(ledger.arrival_s, turns, world.concurrency)
    if policy.knows_lengths:
        outputs = zip(requests, ledger.output_tokens, strict=True)
        policy = policy.with_lengths({request.request_id: tokens for request, tokens in outputs})
    scheduler = Scheduler(policy, world.scheduled(), seed=world.seed, finished=world.finished)
    return run(
        scheduler,
        requests,
        virtual_workers(policy, world, ledger),
        drain=world.drain,
        arrivals=arrivals,
        outcomes=ledger.outcomes,
        delay_s=world.front_s,
    )


def virtual_workers(policy: Policy, world: World, ledger: Ledger) -> Sequence[VirtualWorker]:
    """Return the workers that run what `policy` decides, numbered from 0. They write what happens
    to requests into `ledger`.
    """
    made: type[SliceWorker | ContinuousWorker] = SliceWorker
    if policy.continuous:
        made = ContinuousWorker if world.joining is None else SlabWorker
    return [made(index, ledger, world) for index in range(world.workers)]


def usual_policies(fit: Fit | None) -> list[str]:
    """All policies but oracles, and the one built into the fit's engine if the fit has its laws;
    that one alone for a model with several groups of caches, which no other knows.
    """
    built_in = [
        name
        for name, policy in BUILT_IN.items()
        if fit and fit.steps and fit.engine.engine == policy.engine
    ]
    engine = PagedEngine.of(fit) if fit else None
    if engine and engine.caches:
        return built_in
    return [*built_in, *(name for name in POLICIES if name not in ORACLES)]
