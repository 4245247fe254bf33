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
from heapq import heapify, heappop, heappush
from itertools import pairwise
from pathlib import Path

import msgspec

from toolkit.errors import InputError
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

# At the same time: what the router learns, then replicas that come and go, then arrivals, then what
# replicas do.
LEARN, CHANGE, ARRIVE, WORK = range(4)
SLOW_START_S = 10.0  # a replica that came back gets its share of the requests after this long


class Outage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A replica gets no requests from `from_s` to `to_s`, and comes back with an empty cache.

    Its requests go on elsewhere from the tokens that their clients have: at once, or with `drain`
    when `to_s` comes and they have not ended. Without `to_s` it does not come back.
    """

    replica: int
    from_s: float
    to_s: float = math.inf
    drain: bool = False


def read_outages(path: Path, replicas: int) -> tuple[Outage, ...]:
    """The outages of a file of JSON lines. `InputError` names a wrong line."""
    outages: list[Outage] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", "give a file of JSON lines") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            outage = msgspec.json.decode(line, type=Outage)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path.name}: line {number}: {error}", OUTAGE_HINT) from None
        if not (0 <= outage.replica < replicas and 0 <= outage.from_s < outage.to_s):
            what = f"replica {outage.replica} away from {outage.from_s:g} s to {outage.to_s:g} s"
            limit = f"replicas are 0 to {replicas - 1}, and from_s is below to_s"
            raise InputError(f"{path.name}: line {number}: {what}: {limit}", OUTAGE_HINT)
        outages.append(outage)
    outages.sort(key=lambda outage: (outage.replica, outage.from_s))
    for before, after in pairwise(outages):
        if before.replica == after.replica and after.from_s < before.to_s:
            again = f"replica {after.replica} goes away at {after.from_s:g} s, and is away"
            raise InputError(f"{path.name}: {again} until {before.to_s:g} s", OUTAGE_HINT)
    return tuple(outages)


OUTAGE_HINT = 'a line is {"replica": 0, "from_s": 60, "to_s": 90} or has "drain": true besides'


@dataclass(frozen=True)
class Routing:
    """How requests are routed."""

    router: Router = field(default_factory=RoundRobinRouter)
    report_s: float = 0.1  # seconds between two reports of a replica; llm-d reads every 0.05 s
    report_age_s: float = 0.0  # how old a report is when it comes
    seed: int = 0  # of ties
    outages: tuple[Outage, ...] = ()
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
            PassTimes(engine.believed or engine.steps),
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
        self._outages = routing.outages
        self._back_s = [-math.inf] * len(self._replicas)
        self._slow: list[int] = []  # those that came back shortly
        self._report_age_s = routing.report_age_s
        self._reports: deque[tuple[float, int, ReplicaReport]] = deque()  # under way
        self._lost: list[PagedRequest] = []  # no replica is up for them

    def serve(self, *, drain: bool) -> list[Refusal]:
        """Serve all; return the refusals of requests that can never be served.

        Without `drain` a replica stops when the last request has arrived and none waits there.
        """
        ledger = self._ledger
        events = self._events
        replicas = self._replicas
        ledger.shares = bool(self._reuse)
        for outage in self._outages:
            events.append((outage.from_s, CHANGE, outage.replica, 1 if outage.drain else 0))
            if outage.to_s < math.inf:
                events.append((outage.to_s, CHANGE, outage.replica, 2))
        heapify(events)
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
                    if self._balancer.replicas[index].is_up:
                        self._reports.append((comes_s, index, replica.report(report_s)))
                report_s += self._report_s
            while self._reports and self._reports[0][0] <= now_s:
                _, index, report = self._reports.popleft()
                self._balancer.report(index, report)
            if kind == CHANGE:
                self._change(subject, now_s, generated)
            elif kind == WORK:
                replica = replicas[subject]
                if replica.next_s == now_s:
                    replica.work(drain=drain or arrivals.left > 0, follow=arrivals.follow)
                    self._take(replica, subject)
            elif kind == ARRIVE:
                request = self._requests[subject]
                output = ledger.output_tokens[subject]
                refused = refusal(request, output, self._flags, self._engine)
                if refused is None and not any(r.is_up for r in self._balancer.replicas):
                    refused = Refusal(request.request_id, "no replica was up when it came")
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
            replica.close()
        return refusals

    def _change(self, index: int, now_s: float, what: int) -> None:
        """A replica dies (0), gets no more requests (1), or comes back with an empty cache (2)."""
        replica = self._replicas[index]
        comes = what == 2
        if not comes:
            self._balancer.change(index, is_up=False)
        lost = [] if what == 1 else replica.die(now_s)
        self._take(replica, index)
        if comes:
            self._copies[index] = {}
            self._back_s[index] = now_s
            self._slow = sorted({*self._slow, index})
            self._balancer.change(index, is_up=True, is_fresh=True)
            lost = [*self._lost, *lost]
            self._lost = []
        for row in lost:
            self._balancer.ended(self._requests[row.number].request_id, -1)
        for row in lost:
            self._route(row.number, now_s, row.left, () if comes else (index,))

    def _barred(self, now_s: float) -> tuple[int, ...]:
        """Replicas that came back shortly and have their share for now, as in the live front."""
        if not self._slow:
            return ()
        slow = self._slow = [i for i in self._slow if now_s - self._back_s[i] < SLOW_START_S]
        up = [replica for replica in self._balancer.replicas if replica.is_up]
        mean = sum(replica.requests for replica in up) / max(len(up), 1)
        return tuple(
            index
            for index in slow
            if self._balancer.replicas[index].requests
            >= 1 + mean * (now_s - self._back_s[index]) / SLOW_START_S
        )

    def _route(
        self, number: int, now_s: float, left: int | None = None, excluded: tuple[int, ...] = ()
    ) -> Refusal | None:
        """Send a request to a replica. One that moves lacks `left` tokens; a new one may be
        refused.
        """
        request = self._requests[number]
        output = self._ledger.output_tokens[number]
        moved = left is not None
        left = output if left is None else left
        prompt = request.prompt_tokens + output - left
        routed = self._routed(number, request)
        if left < output:
            limit = request.max_new_tokens - (output - left)
            routed = msgspec.structs.replace(routed, prompt_tokens=prompt, max_new_tokens=limit)
        send = self._balancer.route if moved else self._balancer.offer
        index = send(routed, now_s, (*excluded, *self._barred(now_s)))
        if isinstance(index, Overload):
            first_s = index.predicted.ttft_s
            text = f"its first token was forecast after {first_s:.3g} s, too late for the targets"
            return Refusal(request.request_id, text)
        if index is None:
            self._lost.append(PagedRequest(number, prompt, left))
            return None
        if moved:
            self._ledger.moved += 1
            self._ledger.recomputed_tokens += prompt
        shares = self._shares
        row = PagedRequest(
            number,
            prompt,
            left,
            stops=output < request.max_new_tokens,
            limit=request.max_new_tokens - (output - left),
            content=copy_of(self._leaves[number], self._copies[index]) if shares else None,
            watched=shares and self._watched[number],
        )
        replica = self._replicas[index]
        before_s = replica.next_s
        has_tokens = moved and self._ledger.outcomes[number].first_token_s >= 0.0
        replica.arrive(row, now_s, has_tokens=has_tokens)
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
