"""Requests go to engines with their own scheduler: in turn, or through a router.

In turn each engine has its own requests, and its own clock. Behind a router all engines share one.
The router is the one that serves: `Balancer` of `toolkit.routing`, with what it can know. It learns
of a first token and of an end when a client would, and each engine's own figures come to it every
`report_s` seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from toolkit.routing.admission import UNLIMITED, LatencyLimits, Overload
from toolkit.routing.balancer import Balancer
from toolkit.routing.routers import RoundRobinRouter, Router
from toolkit.routing.types import (
    BLOCK_TOKENS,
    REPORT_EVERY_S,
    ReplicaReport,
    ReplicaTraits,
    RoutedRequest,
)
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.types import Refusal, Request
from toolkit.sim.clock import SEEN, Chooser, Clock, Event
from toolkit.sim.contents import copy_of
from toolkit.sim.kv_cache import Node
from toolkit.sim.ledger import Ledger
from toolkit.sim.paged_engine import PagedEngine, PagedRun, Reuse
from toolkit.sim.vllm import PagedRow
from toolkit.sim.worker import FrontDelay


@dataclass(frozen=True)
class Routing:
    """How requests are routed."""

    router: Router = field(default_factory=RoundRobinRouter)
    report_s: float = 0.1  # seconds between two reports of a replica; llm-d reads every 0.05 s
    report_age_s: float = 0.0  # how old a report is when it comes
    seed: int = 0  # of ties
    limits: LatencyLimits = UNLIMITED  # the targets by which the front refuses new requests
    block_tokens: int = 0  # of the blocks that prompts are matched by; at least the trace's own

    @classmethod
    def of_front(cls, router: Router, limits: LatencyLimits = UNLIMITED) -> Routing:
        """As our front routes: by blocks of its size, and by reports as often as it has them."""
        return cls(router, report_s=REPORT_EVERY_S, block_tokens=BLOCK_TOKENS, limits=limits)


class Line(Chooser):
    """The requests of one engine, dealt to it in advance, or the base of other choosers.

    Args:
        numbers: of the requests, as indices into `requests`.
        engines: among which each request has a copy of its content.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        requests: Sequence[Request],
        flags: VllmPolicy,
        engine: PagedEngine,
        ledger: Ledger,
        reuse: Reuse,
        engines: int = 1,
    ) -> None:
        self._requests = requests
        self._outputs = ledger.output_tokens
        self._leaves: dict[int, Node] = {}
        self._watched: dict[int, bool] = {}
        if reuse and flags.prefix_caching:
            leaves, watched = reuse.contents(
                numbers, requests, self._outputs, engine.hash_lookahead
            )
            self._leaves = dict(zip(numbers, leaves, strict=True))
            self._watched = dict(zip(numbers, watched, strict=True))
        self._copies: list[dict[Node, Node]] = [{} for _ in range(engines)]

    def row(self, number: int, index: int) -> PagedRow:
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
            watched=content is not None and self._watched[number],
        )


class Routed(Line):
    """Requests of several engines behind a router."""

    def __init__(
        self,
        requests: Sequence[Request],
        flags: VllmPolicy,
        engine: PagedEngine,
        ledger: Ledger,
        reuse: Reuse,
        routing: Routing,
        replicas: Sequence[PagedRun],
    ) -> None:
        numbers = range(len(requests))
        super().__init__(numbers, requests, flags, engine, ledger, reuse, len(replicas))
        self._shared = reuse.shared
        self._sessions = reuse.sessions.first.tolist() if reuse.sessions else None
        size = reuse.shared.block_tokens if reuse.shared else engine.block_tokens
        self._merged = max(routing.block_tokens // size, 1)  # blocks that the router sees as one
        self._router_block_tokens = self._merged * size
        traits = ReplicaTraits(
            engine.capacity_tokens,
            flags.max_num_batched_tokens,
            flags.max_num_seqs,
            engine.steps,
        )
        self.balancer = Balancer(
            routing.router,
            [traits] * len(replicas),
            block_tokens=self._router_block_tokens,
            seed=routing.seed,
            limits=routing.limits,
        )
        self._replicas = replicas
        self._report_every_s = routing.report_s
        self._report_age_s = routing.report_age_s
        # when the next reports are made; infinity: the router reads none
        self._report_s = routing.report_s if routing.router.reads_reports else math.inf
        self._reports: deque[tuple[float, int, ReplicaReport]] = deque()  # under way

    def choose(self, number: int, now_s: float) -> int | Refusal:
        request = self._requests[number]
        index = self.balancer.offer(self._routed(number, request), now_s)
        if isinstance(index, Overload):
            first_s = index.predicted.ttft_s
            text = f"its first token was forecast after {first_s:.3g} s, too late for the targets"
            return Refusal(request.request_id, text)
        assert index is not None  # all replicas are up
        return index

    def hear(self, now_s: float) -> None:
        while self._report_s <= now_s:
            comes_s = self._report_s + self._report_age_s
            for index, replica in enumerate(self._replicas):
                self._reports.append((comes_s, index, replica.report(self._report_s)))
            self._report_s += self._report_every_s
        while self._reports and self._reports[0][0] <= now_s:
            _, index, report = self._reports.popleft()
            self.balancer.report(index, report)

    def learn(self, engine: PagedRun, clock: Clock) -> None:
        for first_s, number in engine.first_tokens:
            seen_s = first_s + clock.seen_after(0).first_s
            clock.add(seen_s, FirstToken(self.balancer, number, self._requests[number]))
        for end_s, number, rows in engine.ends:
            seen_s = end_s + clock.seen_after(rows).last_s
            ended = Ended(self.balancer, number, self._requests[number], self._outputs[number])
            clock.add(seen_s, ended)

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


class FirstToken(Event):
    """A client sees its first token."""

    __slots__ = ("_balancer", "_request")

    def __init__(self, balancer: Balancer, number: int, request: Request) -> None:
        super().__init__(SEEN, 2 * number)
        self._balancer = balancer
        self._request = request

    def happen(self, now_s: float) -> None:
        self._balancer.first_token(self._request.request_id, now_s)


class Ended(Event):
    """A client sees the end of its output of `tokens` tokens."""

    __slots__ = ("_balancer", "_request", "_tokens")

    def __init__(self, balancer: Balancer, number: int, request: Request, tokens: int) -> None:
        super().__init__(SEEN, 2 * number + 1)  # after its first token
        self._balancer = balancer
        self._request = request
        self._tokens = tokens

    def happen(self, now_s: float) -> None:
        self._balancer.ended(self._request.request_id, self._tokens)


def serve(
    requests: Sequence[Request],
    flags: VllmPolicy,
    engine: PagedEngine,
    ledger: Ledger,
    reuse: Reuse,
    *,
    routing: Routing | None = None,
    front: FrontDelay | None = None,
    drain: bool = True,
) -> list[Refusal]:
    """Serve requests on as many engines as the ledger has workers. Returns the refusals.

    Args:
        flags: of each engine's scheduler.
        routing: None: requests are dealt in turn (see `Reuse.dealt`).
        front: what clients wait beyond the passes; None: as the engine says.
        drain: False: an engine stops when the last request has come and none waits there.
    """
    outputs = ledger.output_tokens
    refused: dict[int, Refusal] = {}
    for number, request in enumerate(requests):
        never = refusal(request, outputs[number], flags, engine)
        if never is not None:
            refused[number] = never
    ledger.shares = bool(reuse)
    if routing is not None:
        replicas = [
            PagedRun(index, engine, flags, ledger, tells=True) for index in range(ledger.workers)
        ]
        chooser = Routed(requests, flags, engine, ledger, reuse, routing, replicas)
        arrivals = reuse.arrivals(range(len(requests)), ledger.arrival_s, refused)
        clock = Clock(replicas, arrivals, chooser, engine, refused=refused, front=front)
        clock.run(drain=drain)
        return [*refused.values(), *clock.refusals]
    for index, numbers in enumerate(reuse.dealt(len(requests), ledger.workers)):
        line = Line(numbers, requests, flags, engine, ledger, reuse)
        arrivals = reuse.arrivals(numbers, ledger.arrival_s, refused)
        run = PagedRun(index, engine, flags, ledger, tells=arrivals.follow)
        Clock([run], arrivals, line, engine, refused=refused, front=front).run(drain=drain)
    return list(refused.values())


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
