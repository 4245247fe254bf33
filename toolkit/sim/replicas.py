"""Several equal paged engines behind one router, on one clock.

The router is the one that serves: `Balancer` of `toolkit.routing`, with what it can know. It learns
of a first token and of an end when a client would, and each replica's own figures come to it every
`report_s` seconds.

The time that a simulation takes follows the requests, not the replicas: each leaps over passes of
decodes alone (`PagedRun`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from toolkit.estimators.pipeline import PassTimes
from toolkit.interrupts import check
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
from toolkit.sim.blocks import Node, PagedRequest, copy_of
from toolkit.sim.ledger import Ledger
from toolkit.sim.paged_engine import PagedEngine, PagedRun, Reuse, refusal
from toolkit.sim.worker import FrontDelay

# At the same time: what the router learns, then arrivals, then what replicas do.
LEARN, ARRIVE, WORK = range(3)


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


class RoutedRun:
    """One simulation: requests are served on as many replicas of an engine as `ledger` has workers,
    behind a router.

    `flags` are those of each replica's scheduler. `front` is what clients wait beyond the passes;
    None: as the engine says.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        flags: VllmPolicy,
        engine: PagedEngine,
        ledger: Ledger,
        reuse: Reuse,
        routing: Routing,
        front: FrontDelay | None = None,
    ) -> None:
        self._requests = requests
        self._flags = flags
        self._engine = engine
        self._ledger = ledger
        self._reuse = reuse
        self._front = front
        self._shares = bool(reuse) and flags.prefix_caching
        self._replicas = [
            PagedRun(index, engine, flags, ledger, shares=bool(reuse), tells=True)
            for index in range(ledger.workers)
        ]
        self._leaves: list[Node] = []
        self._watched: list[bool] = []
        if self._shares:
            self._leaves, self._watched = reuse.contents(
                range(len(requests)), requests, ledger.output_tokens, engine.hash_lookahead
            )
        self._copies: list[dict[Node, Node]] = [{} for _ in self._replicas]
        size = reuse.shared.block_tokens if reuse.shared else engine.block_tokens
        self._merged = max(routing.block_tokens // size, 1)  # blocks that the router sees as one
        self._router_block_tokens = self._merged * size
        traits = ReplicaTraits(
            engine.capacity_tokens,
            flags.max_num_batched_tokens,
            flags.max_num_seqs,
            PassTimes(engine.steps),
        )
        self._balancer = Balancer(
            routing.router,
            [traits] * ledger.workers,
            block_tokens=self._router_block_tokens,
            seed=routing.seed,
            limits=routing.limits,
        )
        self._report_s = routing.report_s if routing.router.reads_reports else math.inf
        self._arrivals = reuse.arrivals(range(len(requests)), ledger.arrival_s)
        self._sessions = reuse.sessions.first.tolist() if reuse.sessions else None
        # (time, event, number or replica, what else); an entry of WORK is stale if its replica is
        # to work at another time
        self._events: list[tuple[float, int, int, int]] = []
        self._report_age_s = routing.report_age_s
        self._reports: deque[tuple[float, int, ReplicaReport]] = deque()  # under way

    def serve(self, *, drain: bool) -> list[Refusal]:
        """Serve all; return the refusals of requests that can never be served.

        Without `drain` a replica stops when the last request has arrived and none waits there.
        """
        ledger = self._ledger
        events = self._events
        replicas = self._replicas
        ledger.shares = bool(self._reuse)
        refusals: list[Refusal] = []
        report_s = self._report_s
        arrivals = self._arrivals
        while events or arrivals.next_s < math.inf:
            check()
            if not events or (arrivals.next_s, ARRIVE) < events[0][:2]:
                now_s = arrivals.next_s
                kind = ARRIVE
                subject = arrivals.take()
                generated = 0
            else:
                now_s, kind, subject, generated = heappop(events)
            while report_s <= now_s:
                comes_s = report_s + self._report_age_s
                for index, replica in enumerate(replicas):
                    self._reports.append((comes_s, index, replica.report(report_s)))
                report_s += self._report_s
            while self._reports and self._reports[0][0] <= now_s:
                _, index, report = self._reports.popleft()
                self._balancer.report(index, report)
            if kind == WORK:
                replica = replicas[subject]
                if replica.next_s == now_s:
                    replica.work(drain=drain or arrivals.left > 0, follow=arrivals.follow)
                    self._take(replica, subject)
            elif kind == ARRIVE:
                request = self._requests[subject]
                output = ledger.output_tokens[subject]
                refused = refusal(request, output, self._flags, self._engine)
                if refused is None:
                    refused = self._route(subject, now_s)
                if refused is not None:
                    refusals.append(refused)
                    arrivals.ended([subject], now_s, self._seen_after(0).last_s)
            elif generated < 0:
                self._balancer.first_token(self._requests[subject].request_id, now_s)
            else:
                self._balancer.ended(self._requests[subject].request_id, generated)
        for replica in replicas:
            replica.count()
        return refusals

    def _route(self, number: int, now_s: float) -> Refusal | None:
        """Send a request to a replica, or refuse it."""
        request = self._requests[number]
        output = self._ledger.output_tokens[number]
        index = self._balancer.offer(self._routed(number, request), now_s)
        if isinstance(index, Overload):
            first_s = index.predicted.ttft_s
            text = f"its first token was forecast after {first_s:.3g} s, too late for the targets"
            return Refusal(request.request_id, text)
        assert index is not None  # all replicas are up
        shares = self._shares
        row = PagedRequest(
            number,
            request.prompt_tokens,
            output,
            stops=output < request.max_new_tokens,
            limit=request.max_new_tokens,
            content=copy_of(self._leaves[number], self._copies[index]) if shares else None,
            watched=shares and self._watched[number],
        )
        replica = self._replicas[index]
        before_s = replica.next_s
        replica.arrive(row, now_s)
        if replica.next_s != before_s:
            heappush(self._events, (replica.next_s, WORK, index, 0))
        return None

    def _take(self, replica: PagedRun, index: int) -> None:
        """Schedule what a replica does next, and what the router learns of what it did."""
        events = self._events
        if replica.next_s < math.inf:
            heappush(events, (replica.next_s, WORK, index, 0))
        for first_s, number in replica.first_tokens:
            heappush(events, (first_s + self._seen_after(0).first_s, LEARN, number, -1))
        for end_s, number, rows in replica.ends:
            front = self._seen_after(rows)
            output = self._ledger.output_tokens[number]
            heappush(events, (end_s + front.last_s, LEARN, number, output))
        if replica.ends:
            end_s, _, rows = replica.ends[0]  # they ended with one pass
            numbers = [number for _, number, _ in replica.ends]
            self._arrivals.ended(numbers, end_s, self._seen_after(rows).last_s)
        replica.first_tokens.clear()
        replica.ends.clear()

    def _seen_after(self, rows: int) -> FrontDelay:
        """What a client waits beyond passes of this many rows."""
        return self._front or self._engine.front(rows)

    def _routed(self, number: int, request: Request) -> RoutedRequest:
        """The request as the router sees it: the hashes of its full blocks, and its session.

        Without hashes in the trace, the turns of a session have one chain of blocks.
        """
        shared = self._reuse.shared
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
