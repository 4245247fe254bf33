"""Requests go to engines with their own scheduler: to one, or through a router to several.

The router is the same object that serves: `Balancer` of `toolkit.routing`, with what our front can
know. It learns of a first token and of an end when a client would, and each engine's own figures
come to it every `REPORT_EVERY_S` seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit.routing.admission import Overload
from toolkit.routing.balancer import Balancer
from toolkit.routing.simple import RoundRobinRouter
from toolkit.routing.types import BLOCK_TOKENS, REPORT_EVERY_S, ReplicaTraits
from toolkit.scaling.log import FleetLog
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.types import Refusal, Request
from toolkit.sim.arrivals import arrivals_of
from toolkit.sim.clock import BEGINS, ENDS, Clock
from toolkit.sim.contents import contents, copy_of
from toolkit.sim.kv_cache import Node, PagedRow
from toolkit.sim.ledger import Ledger
from toolkit.sim.paged_engine import PagedEngine, PagedRun
from toolkit.traces.types import Trace

if TYPE_CHECKING:
    from toolkit.sim.world import World


class ReplicaClock(Clock):
    """Engines with schedulers of their own that serve requests. One engine without a router gets
    all of them; several without a router get them in turn.

    An engine leaps over passes of decodes alone, and has one event for all of them, so that the
    time that a simulation takes follows the requests, not the engines. Behind a router, that a
    client sees a first token or the end of a request are events, with twice the request's number as
    their order, and 1 more for the end.

    Attributes:
        refusals: of requests that no engine has room for, and of others by the front.
        log: what happened to the replicas, where they come and go.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        flags: VllmPolicy,
        engine: PagedEngine,
        ledger: Ledger,
        trace: Trace,
        world: World,
    ) -> None:
        self._refused: dict[int, Refusal] = {}
        for number, request in enumerate(requests):
            never = refusal(request, ledger.output_tokens[number], flags, engine)
            if never is not None:
                self._refused[number] = never
        turns = trace.sessions if world.closed_loop else None
        super().__init__(arrivals_of(ledger.arrival_s, turns, world.concurrency, self._refused))
        self.refusals = [*self._refused.values()]
        self.log: FleetLog | None = None
        self._requests = requests
        self._outputs = ledger.output_tokens
        self._engine = engine
        self._drain: bool = world.drain
        router = world.router
        self._alone: bool = ledger.workers == 1 and world.fleet is None  # all come to one engine
        if router is None and world.fleet is not None:
            router = RoundRobinRouter()
        self._turn = -1  # without a router: the engine that got the last request
        tells = router is not None or self.arrivals.follow
        self._runs = [
            PagedRun(index, engine, flags, ledger, tells=tells) for index in range(ledger.workers)
        ]
        self._leaves: list[Node] = []
        self._watched: list[bool] = []
        self._shared = trace.shared
        self._sessions = None if trace.sessions is None else trace.sessions.first.tolist()
        if ledger.shares and flags.prefix_caching:
            self._leaves, continued = contents(
                [request.prompt_tokens for request in requests],
                self._outputs,
                trace.shared,
                None if trace.sessions is None else trace.sessions.previous.tolist(),
                engine.hash_lookahead,
            )
            if not world.closed_loop:
                self._watched = continued
        self._copies: list[dict[Node, Node]] = [{} for _ in self._runs]
        size = engine.block_tokens if trace.shared is None else trace.shared.block_tokens
        self._merged = max(BLOCK_TOKENS // size, 1)  # blocks that the router sees as one
        self._router_block_tokens = self._merged * size
        self._balancer: Balancer | None = None
        self._report_s = math.inf  # when the next reports come; infinity: none is read
        if router is not None:
            rows, tokens = flags.max_num_seqs, flags.max_num_batched_tokens
            self._traits = ReplicaTraits(engine.capacity_tokens, tokens, rows, engine.steps)
            self._balancer = Balancer(
                router,
                [self._traits] * len(self._runs),
                block_tokens=self._router_block_tokens,
                limits=world.limits,
            )
            if router.reads_reports:
                self._report_s = REPORT_EVERY_S

    def happen(self, rank: int, order: int, index: int) -> None:
        self._hear()
        if rank == BEGINS:
            run = self._runs[index]
            if run.next_s == self.now_s:  # otherwise it works at another time
                self._work(run, index)
            return
        balancer = self._balancer
        assert balancer is not None
        number = order // 2
        request_id = self._requests[number].request_id
        if order % 2:
            balancer.ended(request_id, self._outputs[number])
        else:
            balancer.first_token(request_id, self.now_s)

    def arrive(self, number: int, came_s: float) -> None:
        if number in self._refused:
            self.arrivals.ended([number], came_s, self._engine.seen_after_s(0))
        else:
            self._route(number, came_s)

    def _route(self, number: int, came_s: float, full: tuple[int, ...] = ()) -> None:
        """Let the engine have a request that the router chooses, none of `full`, unless the front
        refuses it.
        """
        self._hear()
        index = self._choose(number, full)
        if isinstance(index, Refusal):
            self.refusals.append(index)
            self.arrivals.ended([number], came_s, self._engine.seen_after_s(0))
        else:
            self._give(number, index, came_s)

    def _give(self, number: int, index: int, came_s: float) -> None:
        """Let an engine have a request."""
        run = self._runs[index]
        before_s = run.next_s
        run.arrive(self._row(number, index), came_s)
        if run.next_s != before_s:
            self.add(run.next_s, BEGINS, index, index)

    def _hear(self) -> None:
        """Let the router have the reports that have come by now."""
        while self._report_s <= self.now_s:
            assert self._balancer is not None
            for index, run in enumerate(self._runs):
                self._balancer.report(index, run.report(self._report_s))
            self._report_s += REPORT_EVERY_S

    def _work(self, run: PagedRun, index: int) -> None:
        """Let an engine finish passes and plan the next ones; plan what follows from that."""
        arrivals = self.arrivals
        run.work(drain=self._drain or arrivals.left > 0, follow=arrivals.follow)
        if run.next_s < math.inf:
            self.add(run.next_s, BEGINS, index, index)
        if run.first_tokens or run.ends:
            if self._balancer is not None:
                self._learn(run)
            if run.ends:
                end_s, _, rows = run.ends[0]  # they ended with one pass
                numbers = [number for _, number, _ in run.ends]
                arrivals.ended(numbers, end_s, self._engine.seen_after_s(rows))
                run.ends.clear()
            run.first_tokens.clear()

    def _learn(self, run: PagedRun) -> None:
        """Plan when the router learns of the tokens that an engine gave just now."""
        for first_s, number in run.first_tokens:
            self.add(first_s + self._engine.seen_after_s(0), ENDS, 2 * number, 0)
        for end_s, number, rows in run.ends:
            self.add(end_s + self._engine.seen_after_s(rows), ENDS, 2 * number + 1, 0)

    def _choose(self, number: int, excluded: tuple[int, ...] = ()) -> int | Refusal:
        """Return the engine that gets a request, or why it is refused."""
        if self._balancer is None:
            self._turn = (self._turn + 1) % len(self._runs)
            return self._turn
        request = self._requests[number]
        index = self._balancer.route(self._routed(number, request), self.now_s, excluded)
        if isinstance(index, Overload):
            first_s = index.predicted.ttft_s
            text = f"its first token was forecast after {first_s:.3g} s, too late for the targets"
            return Refusal(request.request_id, text)
        assert index is not None  # one is up
        return index

    def _routed(self, number: int, request: Request) -> Request:
        """Return the request with what the router sees: the hashes of its full blocks, and its
        session. Without hashes in the trace, the turns of a session have one chain of blocks.
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
        return Request(
            request.request_id,
            request.arrival_s,
            request.prompt_tokens,
            request.max_new_tokens,
            request.priority,
            blocks,
            session,
        )

    def _row(self, number: int, index: int) -> PagedRow:
        """Return a request as an engine gets it."""
        request = self._requests[number]
        content: Node | None = None
        if self._leaves:
            content = self._leaves[number]
            if not self._alone:
                content = copy_of(content, self._copies[index])
        return PagedRow(
            number,
            request.prompt_tokens,
            self._outputs[number],
            limit=request.max_new_tokens,
            content=content,
            watched=bool(self._watched) and self._watched[number],
        )


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
