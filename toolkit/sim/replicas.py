"""Requests go to engines with their own scheduler: in turn, or through a router.

In turn each engine has its own requests, and its own clock. Behind a router all engines share one.
The router is the one that serves: `Balancer` of `toolkit.routing`, with what it can know. It learns
of a first token and of an end when a client would, and each engine's own figures come to it every
`report_s` seconds.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from toolkit.routing.admission import UNLIMITED, LatencyLimits, Overload
from toolkit.routing.balancer import Balancer
from toolkit.routing.base import Router
from toolkit.routing.simple import RoundRobinRouter
from toolkit.routing.types import (
    BLOCK_TOKENS,
    REPORT_EVERY_S,
    ReplicaTraits,
    RoutedRequest,
)
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.types import Refusal, Request
from toolkit.sim.arrivals import arrivals_of
from toolkit.sim.clock import BEGINS, ENDS, Clock
from toolkit.sim.contents import contents, copy_of
from toolkit.sim.kv_cache import Node, PagedRow
from toolkit.sim.ledger import Ledger
from toolkit.sim.paged_engine import PagedEngine, PagedRun
from toolkit.traces.types import Sessions, Trace

if TYPE_CHECKING:
    from toolkit.sim.world import World


@dataclass(frozen=True)
class Routing:
    """How requests are routed."""

    router: Router = field(default_factory=RoundRobinRouter)
    report_s: float = 0.1  # seconds between two reports of a replica; llm-d reads every 0.05 s
    seed: int = 0  # of ties
    limits: LatencyLimits = UNLIMITED  # the targets by which the front refuses new requests
    block_tokens: int = 0  # of the blocks that prompts are matched by; at least the trace's own

    @classmethod
    def of_front(cls, router: Router, limits: LatencyLimits = UNLIMITED) -> Routing:
        """As our front routes: by blocks of its size, and by reports as often as it has them."""
        return cls(router, report_s=REPORT_EVERY_S, block_tokens=BLOCK_TOKENS, limits=limits)


class EngineClock(Clock):
    """Engines with schedulers of their own that serve requests: here one engine, and all requests
    are dealt to it.

    An engine leaps over passes of decodes alone, and has one event for all of them, so that the
    time that a simulation takes follows the requests, not the engines.

    Args:
        numbers: of the requests, as indices into `requests`.
        refused: the requests among these that are not served, since others may follow their ends.
        indices: of the engines, in the ledger.
        tells: whether something follows from first tokens and ends even in an open loop.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        requests: Sequence[Request],
        flags: VllmPolicy,
        engine: PagedEngine,
        ledger: Ledger,
        trace: Trace,
        world: World,
        refused: Container[int],
        indices: Sequence[int],
        *,
        tells: bool = False,
    ) -> None:
        super().__init__(
            arrivals_of(numbers, ledger.arrival_s, world.turns(trace), world.concurrency, refused)
        )
        self._requests = requests
        self._outputs = ledger.output_tokens
        self._engine = engine
        self._refused = refused
        self._drain: bool = world.drain
        self.refusals: list[Refusal] = []  # by a front
        tells = tells or self.arrivals.follow
        self._runs = [PagedRun(index, engine, flags, ledger, tells=tells) for index in indices]
        self._leaves: dict[int, Node] = {}
        self._watched: dict[int, bool] = {}
        if ledger.shares and flags.prefix_caching:
            rows = np.array(numbers, dtype=np.int64)
            leaves, continued = contents(
                [requests[number].prompt_tokens for number in numbers],
                [self._outputs[number] for number in numbers],
                None if trace.shared is None else trace.shared.take(rows),
                None if trace.sessions is None else trace.sessions.take(rows).previous.tolist(),
                engine.hash_lookahead,
            )
            self._leaves = dict(zip(numbers, leaves, strict=True))
            if not world.closed_loop:
                self._watched = dict(zip(numbers, continued, strict=True))
        self._copies: list[dict[Node, Node]] = [{} for _ in indices]

    def happen(self, rank: int, order: int, index: int) -> None:
        if rank == BEGINS:
            run = self._runs[index]
            if run.next_s == self.now_s:  # otherwise it works at another time
                self._work(run, index)

    def arrive(self, number: int, came_s: float) -> None:
        if number not in self._refused:
            index = self._choose(number)
            if isinstance(index, int):
                run = self._runs[index]
                before_s = run.next_s
                run.arrive(self._row(number, index), came_s)
                if run.next_s != before_s:
                    self.add(run.next_s, BEGINS, index, index)
                return
            self.refusals.append(index)
        self.arrivals.ended([number], came_s, self._engine.seen_after_s(0))

    def _work(self, run: PagedRun, index: int) -> None:
        """Let an engine finish passes and plan the next ones; plan what follows from that."""
        arrivals = self.arrivals
        run.work(
            drain=self._drain or arrivals.left > 0,
            follow=arrivals.follow,
            until_s=arrivals.next_s if len(self._runs) == 1 else math.inf,
        )
        if run.next_s < math.inf:
            self.add(run.next_s, BEGINS, index, index)
        if run.first_tokens or run.ends:
            self._learn(run)
            if run.ends:
                end_s, _, rows = run.ends[0]  # they ended with one pass
                numbers = [number for _, number, _ in run.ends]
                arrivals.ended(numbers, end_s, self._engine.seen_after_s(rows))
                run.ends.clear()
            run.first_tokens.clear()

    def _choose(self, number: int) -> int | Refusal:
        """Return the engine that gets a request, or why it is refused."""
        return 0

    def _learn(self, run: PagedRun) -> None:
        """Plan what is learned of the tokens that an engine gave just now."""

    def _row(self, number: int, index: int) -> PagedRow:
        """Return a request as an engine gets it."""
        request = self._requests[number]
        content: Node | None = None
        if self._leaves:
            content = self._leaves[number]
            if len(self._copies) > 1:
                content = copy_of(content, self._copies[index])
        return PagedRow(
            number,
            request.prompt_tokens,
            self._outputs[number],
            limit=request.max_new_tokens,
            content=content,
            watched=self._watched.get(number, False),
        )


class RouterClock(EngineClock):
    """Engines behind a router. That a client sees a first token or the end of a request are events,
    with twice the request's number as their order, and 1 more for the end.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        flags: VllmPolicy,
        engine: PagedEngine,
        ledger: Ledger,
        trace: Trace,
        world: World,
        refused: Container[int],
        routing: Routing,
    ) -> None:
        numbers = range(len(requests))
        engines = range(ledger.workers)
        super().__init__(
            numbers,
            requests,
            flags,
            engine,
            ledger,
            trace,
            world,
            refused,
            engines,
            tells=True,
        )
        self._shared = trace.shared
        self._sessions = trace.sessions.first.tolist() if trace.sessions is not None else None
        size = trace.shared.block_tokens if trace.shared is not None else engine.block_tokens
        self._merged = max(routing.block_tokens // size, 1)  # blocks that the router sees as one
        self._router_block_tokens = self._merged * size
        traits = ReplicaTraits(
            engine.capacity_tokens,
            flags.max_num_batched_tokens,
            flags.max_num_seqs,
            engine.steps,
        )
        self._balancer = Balancer(
            routing.router,
            [traits] * len(engines),
            block_tokens=self._router_block_tokens,
            seed=routing.seed,
            limits=routing.limits,
        )
        self._report_every_s = routing.report_s
        # when the next reports come; infinity: the router reads none
        self._report_s = routing.report_s if routing.router.reads_reports else math.inf

    def happen(self, rank: int, order: int, index: int) -> None:
        self._hear()
        if rank == BEGINS:
            super().happen(rank, order, index)
            return
        number = order // 2
        request_id = self._requests[number].request_id
        if order % 2:
            self._balancer.ended(request_id, self._outputs[number])
        else:
            self._balancer.first_token(request_id, self.now_s)

    def arrive(self, number: int, came_s: float) -> None:
        self._hear()
        super().arrive(number, came_s)

    def _hear(self) -> None:
        """Let the router have the reports that have come by now."""
        while self._report_s <= self.now_s:
            for index, run in enumerate(self._runs):
                self._balancer.report(index, run.report(self._report_s))
            self._report_s += self._report_every_s

    def _choose(self, number: int) -> int | Refusal:
        request = self._requests[number]
        index = self._balancer.offer(self._routed(number, request), self.now_s)
        if isinstance(index, Overload):
            first_s = index.predicted.ttft_s
            text = f"its first token was forecast after {first_s:.3g} s, too late for the targets"
            return Refusal(request.request_id, text)
        assert index is not None  # all replicas are up
        return index

    def _learn(self, run: PagedRun) -> None:
        for first_s, number in run.first_tokens:
            self.add(first_s + self._engine.seen_after_s(0), ENDS, 2 * number, 0)
        for end_s, number, rows in run.ends:
            self.add(end_s + self._engine.seen_after_s(rows), ENDS, 2 * number + 1, 0)

    def _routed(self, number: int, request: Request) -> RoutedRequest:
        """Return the request as the router sees it: the hashes of its full blocks, and its session.
        Without hashes in the trace, the turns of a session have one chain of blocks.
        """
        shared = self._shared
        sessions = self._sessions
        blocks: tuple[int, ...] = ()
        session = "" if sessions is None else str(sessions[number])
        full = request.prompt_tokens // self._router_block_tokens
        if shared is not None:
            first = int(shared.offsets[number])
            merged = self._merged
            last = first + full * merged
            blocks = tuple(shared.ids[first + merged - 1 : last : merged].tolist())
        elif sessions is not None:
            chain = sessions[number] << 32
            blocks = tuple(range(chain, chain + full))
        return RoutedRequest(
            request.request_id, request.prompt_tokens, request.max_new_tokens, blocks, session
        )


def serve(
    requests: Sequence[Request],
    flags: VllmPolicy,
    engine: PagedEngine,
    ledger: Ledger,
    trace: Trace,
    world: World,
) -> list[Refusal]:
    """Serve the requests of a trace on as many engines as the ledger has workers. Returns the
    refusals. Without a router requests are dealt in turn; at a fixed concurrency several engines
    share one line of requests.
    """
    outputs = ledger.output_tokens
    refused: dict[int, Refusal] = {}
    for number, request in enumerate(requests):
        never = refusal(request, outputs[number], flags, engine)
        if never is not None:
            refused[number] = never
    ledger.shares = trace.shared is not None or trace.sessions is not None
    routing = world.routing
    if routing is None and world.concurrency and ledger.workers > 1:
        routing = Routing.of_front(RoundRobinRouter())
    if routing is not None:
        routed = RouterClock(requests, flags, engine, ledger, trace, world, refused, routing)
        routed.run()
        return [*refused.values(), *routed.refusals]
    for index, numbers in enumerate(dealt(len(requests), ledger.workers, world.turns(trace))):
        EngineClock(numbers, requests, flags, engine, ledger, trace, world, refused, [index]).run()
    return list(refused.values())


def dealt(requests: int, engines: int, turns: Sessions | None) -> list[list[int]]:
    """Return the requests of each engine, dealt in turn; sessions with `turns` stay together."""
    place = np.arange(requests)
    if turns is not None:
        place = (np.cumsum(turns.first == place) - 1)[turns.first]
    return [np.flatnonzero(place % engines == engine).tolist() for engine in range(engines)]


def refusal(
    request: Request, output: int, flags: VllmPolicy, engine: PagedEngine
) -> Refusal | None:
    """Return the refusal of a request that, alone and at its longest, no cache or pass has room
    for; None: there is room.
    """
    # the last token is not cached
    most = request.prompt_tokens + max(request.max_new_tokens, output) - 1
    if most > engine.longest:
        limit = f"the cache holds {engine.longest:,}"
    elif most > flags.max_num_batched_tokens and not flags.chunked_prefill:
        limit = f"without chunked prefill a pass takes {flags.max_num_batched_tokens:,}"
    else:
        return None
    return Refusal(request.request_id, f"it may grow to {most:,} tokens; {limit}")
