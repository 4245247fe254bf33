"""Several paged engines behind one router, on one clock; of one kind, or of several (`ServedKind`).

The router is the one that serves: `Balancer` of `toolkit.routing`, with what it can know. It learns
of a first token and of an end when a client would, and each replica's own figures come to it every
`report_s` seconds.

Each replica leaps over passes of decodes alone, as `PagedRun` does. A request that is routed to it
in such a leap ends the leap at the pass that runs, so that a replica costs nothing while others
work: the time that a simulation takes follows the requests, not the replicas.
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
from toolkit.estimators.steps import PassTimes
from toolkit.routing.admission import UNLIMITED, LatencyLimits, Overload
from toolkit.routing.balancer import Balancer
from toolkit.routing.routers import RoundRobinRouter, Router
from toolkit.routing.types import (
    BLOCK_TOKENS,
    REPORT_EVERY_S,
    ReplicaReport,
    ReplicaTraits,
    RoutedRequest,
    weighed,
)
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.types import Refusal, Request
from toolkit.sim.blocks import PagedRequest, ReplicaContents
from toolkit.sim.collector import collector_off
from toolkit.sim.ledger import Ledger
from toolkit.sim.paged import PagedPass, PagedScheduler
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
    found: list[Outage] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", "give a file of JSON lines") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            one = msgspec.json.decode(line, type=Outage)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path.name}: line {number}: {error}", OUTAGE_HINT) from None
        if not (0 <= one.replica < replicas and 0 <= one.from_s < one.to_s):
            what = f"replica {one.replica} away from {one.from_s:g} s to {one.to_s:g} s"
            limit = f"replicas are 0 to {replicas - 1}, and from_s is below to_s"
            raise InputError(f"{path.name}: line {number}: {what}: {limit}", OUTAGE_HINT)
        found.append(one)
    found.sort(key=lambda one: (one.replica, one.from_s))
    for before, after in pairwise(found):
        if before.replica == after.replica and after.from_s < before.to_s:
            again = f"replica {after.replica} goes away at {after.from_s:g} s, and is away"
            raise InputError(f"{path.name}: {again} until {before.to_s:g} s", OUTAGE_HINT)
    return tuple(found)


OUTAGE_HINT = 'a line is {"replica": 0, "from_s": 60, "to_s": 90} or has "drain": true besides'


@dataclass(frozen=True)
class Routing:
    """How requests are routed.

    Attributes:
        router: chooses; None: to each replica in turn.
        report_s: seconds between two reports of a replica; vLLM's balancer and llm-d's scheduler
            read them about every 0.1 and 0.05 s.
        report_age_s: how old a report is when it comes.
        block_tokens: of the blocks that prompts are matched by; 0, or fewer than the trace's
            blocks have: these.
        seed: of ties.
        outages: of replicas.
        limits: the targets by which the front refuses new requests.
    """

    router: Router = field(default_factory=RoundRobinRouter)
    report_s: float = 0.1
    report_age_s: float = 0.0
    seed: int = 0
    outages: tuple[Outage, ...] = ()
    limits: LatencyLimits = UNLIMITED
    block_tokens: int = 0

    @classmethod
    def of_front(cls, router: Router, limits: LatencyLimits = UNLIMITED) -> Routing:
        """As our front routes by `router`: what it knows as coarsely and as late."""
        return cls(router, report_s=REPORT_EVERY_S, block_tokens=BLOCK_TOKENS, limits=limits)


@dataclass(frozen=True, slots=True)
class ServedKind:
    """Replicas that are alike: `count` of them, with this engine, these flags of its scheduler, and
    a ledger of their own. `front` is what clients wait beyond the passes; None: as the engine says.
    """

    engine: PagedEngine
    flags: VllmPolicy
    count: int
    ledger: Ledger
    front: FrontDelay | None = None

    def seen_after(self, rows: float) -> FrontDelay:
        """What a client waits beyond passes of so many rows."""
        return self.front or self.engine.front(rows)

    @property
    def usual_front(self) -> FrontDelay:
        """The same for the mean number of rows in the ledger."""
        return self.seen_after(self.ledger.row_steps / max(self.ledger.decoding_steps, 1))


def traits_of_kinds(kinds: Sequence[ServedKind]) -> list[ReplicaTraits]:
    """What a router knows of the replicas of each kind."""
    return weighed(
        [
            ReplicaTraits(
                kind.engine.capacity_tokens,
                kind.flags.max_num_batched_tokens,
                kind.flags.max_num_seqs,
                PassTimes(kind.engine.believed or kind.engine.steps),
                str(number) if len(kinds) > 1 else "",
            )
            for number, kind in enumerate(kinds)
        ]
    )


class ReplicaRun(PagedRun):
    """One replica, driven from outside.

    Attributes:
        next_s: when `work` is to be called next; infinity while it has nothing to do.
        first_tokens, ends: (time, number, ...) of first tokens and ends that the caller has not
            taken yet.
    """

    def __init__(
        self, index: int, engine: PagedEngine, flags: VllmPolicy, ledger: Ledger, *, shares: bool
    ) -> None:
        super().__init__(index, engine, flags, ledger, shares=shares)
        self._flags, self._shares = flags, shares
        self._moved_here: set[int] = set()  # requests that had tokens when they came
        self.next_s = math.inf
        self.first_tokens: list[tuple[float, int]] = []
        self.ends: list[tuple[float, int, int]] = []
        self._leap: tuple[PagedPass, float, int] | None = None  # plan, begin, most passes
        self._can_cut = False
        self._under_way: list[PagedRequest] = []
        self._begun_s = self._done_s = -math.inf
        self._plan_s = 0.0  # when the next pass is planned
        self._arrived: list[PagedRequest] = []

    def arrive(self, row: PagedRequest, now_s: float) -> None:
        """A request comes."""
        self._arrived.append(row)
        if self._ledger.outcomes[row.number].first_token_s >= 0.0:
            self._moved_here.add(row.number)
        if self._leap is not None:
            if self._can_cut:
                plan, begin_s, steps = self._leap
                steps = self._steps_before(plan.shape, steps, now_s - begin_s)
                self._set_leap(plan, begin_s, steps)
        elif self.next_s == math.inf:
            self.next_s = max(self._plan_s, now_s)

    def work(self, *, drain: bool) -> None:
        """Do what is due at `next_s`: finish the passes that run, or plan the next. Without
        `drain` no pass is planned where no request waits.
        """
        now_s, ahead = self.next_s, self._engine.ahead
        if self._leap is not None:
            plan, begin_s, steps = self._leap
            self._leap = None
            ended = self._finish(plan, steps, begin_s, self._begun_s, self._done_s)
            if ahead:
                self._scheduler.settle(self._under_way)
                self._under_way, self._plan_s = ended, self._begun_s
            else:
                self._scheduler.settle(ended)
                self._plan_s = self._done_s + self._law.after_s(plan.rows)
            if self._plan_s > now_s:
                self.next_s = self._plan_s
                return
        if drain or self._arrived or self._scheduler.waiting:
            self._plan_next(now_s)
        else:
            self.next_s = math.inf

    def die(self, now_s: float) -> list[PagedRequest]:
        """It dies, and comes back empty: the requests that had not ended, in the order of their
        arrival. `left` is what their clients lack.
        """
        if self._leap is not None:
            plan, begin_s, steps = self._leap
            low, high = 0, steps  # passes that were done
            while low < high:
                middle = (low + high + 1) // 2
                done = self._times(plan, middle, begin_s)[1] <= now_s
                low, high = (middle, high) if done else (low, middle - 1)
            if low:
                self._finish(plan, low, begin_s, *self._times(plan, low, begin_s))
        self.close()
        rows = [*self._scheduler.abort(), *self._arrived]
        for row in rows:
            if row.mark:
                self._close(row, self._last_s)
        engine = self._engine
        self._scheduler = PagedScheduler(
            self._flags, engine.blocks, engine.block_tokens, ahead=engine.ahead, shares=self._shares
        )
        self._arrived, self._under_way, self._leap = [], [], None
        self._begun_s = self._done_s = -math.inf
        self._plan_s, self.next_s = now_s, math.inf
        return sorted(rows, key=lambda row: row.number)

    def report(self, now_s: float) -> ReplicaReport:
        """Its own figures."""
        scheduler, engine = self._scheduler, self._engine
        used = engine.blocks - scheduler.pool.free
        if self._leap is not None and self._leap[2] > 1:
            plan, begin_s, steps = self._leap
            share = (now_s - begin_s) / max(self._done_s - begin_s, 1e-9)
            used += int(share * steps * plan.shape.decodes / engine.block_tokens)
        waiting = len(scheduler.waiting) + len(self._arrived)
        usage = min(used / engine.blocks, 1.0)
        return ReplicaReport(waiting, len(scheduler.running), usage, now_s)

    def close(self) -> None:
        """Write what was found in the cache into the ledger."""
        self._count_found()

    def _plan_next(self, now_s: float) -> None:
        scheduler = self._scheduler
        for row in self._arrived:
            scheduler.add(row)
        self._arrived.clear()
        plan = scheduler.schedule()
        if plan.preempted:
            self._drop(plan.preempted)
        if plan.rows:
            steps = scheduler.ahead()
            self._can_cut = steps > 1 and not scheduler.waiting
            self._set_leap(plan, max(now_s, self._done_s), steps)
        elif self._under_way:  # no other row can run before these have left
            scheduler.settle(self._under_way)
            self._under_way = []
            self._plan_s = self.next_s = max(self._done_s, now_s)
        else:
            self._plan_s, self.next_s = now_s, math.inf

    def _set_leap(self, plan: PagedPass, begin_s: float, steps: int) -> None:
        self._leap = plan, begin_s, steps
        self._begun_s, self._done_s = self._times(plan, steps, begin_s)
        self.next_s = self._begun_s if self._engine.ahead else self._done_s

    def _give(self, plan: PagedPass, steps: int, first_s: float, last_gap_s: float) -> None:
        outcomes = self._ledger.outcomes
        moved = self._moved_here
        new = []
        for chunk in plan.chunks:
            number = chunk.row.number
            if chunk.completes and (outcomes[number].first_token_s < 0.0 or number in moved):
                moved.discard(number)
                new.append(number)
        super()._give(plan, steps, first_s, last_gap_s)
        self.first_tokens += [(first_s, number) for number in new]

    def _end(self, ended: Sequence[PagedRequest], end_s: float) -> None:
        super()._end(ended, end_s)
        rows = len(self._scheduler.running)
        self.ends += [(end_s, row.number, rows) for row in ended]


@dataclass(frozen=True, slots=True)
class RoutedOutcome:
    """What became of the requests: the refused ones, which can never be served, and the number of
    the kind that served each last; -1: none did.
    """

    refusals: list[Refusal]
    kind_of: list[int]


def serve_routed(
    requests: Sequence[Request],
    kinds: Sequence[ServedKind],
    ledger: Ledger,
    reuse: Reuse,
    routing: Routing,
    *,
    drain: bool = True,
) -> RoutedOutcome:
    """Serve requests on the replicas of all kinds, behind a router. `ledger` has the requests; the
    kinds' ledgers share its lists, or are it.

    Without `drain` a replica stops when the last request has arrived and none waits there.
    """
    with collector_off():  # what cycles there are live as long as the caches
        run = _RoutedRun(requests, kinds, ledger, reuse, routing)
        refusals = run.serve(drain=drain)
    return RoutedOutcome(refusals, run.kind_of)


class _RoutedRun:
    """One simulation of replicas behind a router.

    Attributes:
        kind_of: see `RoutedOutcome`.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        kinds: Sequence[ServedKind],
        ledger: Ledger,
        reuse: Reuse,
        routing: Routing,
    ) -> None:
        self._requests, self._ledger, self._kinds = requests, ledger, kinds
        self._reuse = reuse
        self._numbers = [number for number, kind in enumerate(kinds) for _ in range(kind.count)]
        self.kind_of = [-1] * len(requests)
        self._shares = [bool(reuse) and kind.flags.prefix_caching for kind in kinds]
        self._replicas = [
            ReplicaRun(
                index,
                kinds[number].engine,
                kinds[number].flags,
                kinds[number].ledger,
                shares=self._shares[number],
            )
            for index, number in enumerate(self._numbers)
        ]
        self._leaves, self._watched = (
            reuse.contents(range(len(requests)), requests, ledger.output_tokens)
            if any(self._shares)
            else ([], [])
        )
        self._contents = [ReplicaContents() for _ in self._replicas]
        given = reuse.shared.block_tokens if reuse.shared else kinds[0].engine.block_tokens
        self._merged = max(routing.block_tokens // given, 1)  # blocks that the router sees as one
        self._router_block_tokens = self._merged * given
        traits = traits_of_kinds(kinds)
        self._balancer = Balancer(
            routing.router,
            [traits[number] for number in self._numbers],
            block_tokens=self._router_block_tokens,
            seed=routing.seed,
            limits=routing.limits,
        )
        self._report_s = routing.report_s if routing.router.reads_reports else math.inf
        self._turns = reuse.turns(range(len(requests)))
        self._sessions = reuse.sessions.first.tolist() if reuse.sessions else None
        # (time, kind, number or replica, what else); an entry of WORK is stale if its replica is
        # to work at another time
        self._events: list[tuple[float, int, int, int]] = []
        self._outages, self._back_s = routing.outages, [-math.inf] * len(self._replicas)
        self._slow: list[int] = []  # those that came back shortly
        self._report_age_s = routing.report_age_s
        self._reports: deque[tuple[float, int, ReplicaReport]] = deque()  # under way
        self._lost: list[PagedRequest] = []  # no replica is up for them

    def serve(self, *, drain: bool) -> list[Refusal]:
        """Serve all; return the refusals."""
        ledger, events, replicas = self._ledger, self._events, self._replicas
        for each in (ledger, *(kind.ledger for kind in self._kinds)):
            each.shares = bool(self._reuse)
        later = {number for turns in self._turns.values() for number, _ in turns}
        events += [
            (ledger.arrival_s[number], ARRIVE, number, 0)
            for number in range(len(self._requests))
            if number not in later
        ]
        for outage in self._outages:
            events.append((outage.from_s, CHANGE, outage.replica, 1 if outage.drain else 0))
            if outage.to_s < math.inf:
                events.append((outage.to_s, CHANGE, outage.replica, 2))
        heapify(events)
        refusals: list[Refusal] = []
        report_s, left = self._report_s, len(self._requests)  # to arrive
        while events:
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
                    replica.work(drain=drain or left > 0)
                    self._take(replica, subject)
            elif kind == ARRIVE:
                left -= 1
                refused = self._refused(subject)
                if refused is None and not any(r.is_up for r in self._balancer.replicas):
                    request_id = self._requests[subject].request_id
                    refused = Refusal(request_id, "no replica was up when it came")
                if refused is None:
                    refused = self._route(subject, now_s)
                if refused is not None:
                    refusals.append(refused)
                    self._begin_turns(subject, now_s, self._kinds[0].seen_after(0))
            elif generated < 0:
                self._balancer.first_token(self._requests[subject].request_id, now_s)
            else:
                self._balancer.ended(self._requests[subject].request_id, generated)
        for replica in replicas:
            replica.close()
        return refusals

    def _refused(self, number: int) -> Refusal | None:
        """The refusal of a request that a replica of some kind can never serve: each must be able
        to serve all, as servers of one context are.
        """
        request, output = self._requests[number], self._ledger.output_tokens[number]
        for kind in self._kinds:
            found = refusal(request, output, kind.flags, kind.engine)
            if found is not None:
                return found
        return None

    def _change(self, index: int, now_s: float, what: int) -> None:
        """A replica dies (0), gets no more requests (1), or comes back with an empty cache (2)."""
        replica, comes = self._replicas[index], what == 2
        if not comes:
            self._balancer.change(index, is_up=False)
        lost = [] if what == 1 else replica.die(now_s)
        self._take(replica, index)
        if comes:
            self._contents[index] = ReplicaContents()
            self._back_s[index] = now_s
            self._slow = sorted({*self._slow, index})
            self._balancer.change(index, is_up=True, is_fresh=True)
            lost, self._lost = [*self._lost, *lost], []
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
        """Send a request to a replica; one that was on another before lacks `left` tokens. Returns
        the refusal of a new one.
        """
        request, output = self._requests[number], self._ledger.output_tokens[number]
        moved, left = left is not None, output if left is None else left
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
            row = PagedRequest(number, prompt, left)
            self._lost.append(row)
            return None
        if moved:
            self._ledger.moved += 1
            self._ledger.recomputed_tokens += prompt
        kind = self.kind_of[number] = self._numbers[index]
        shares = self._shares[kind]
        row = PagedRequest(
            number,
            prompt,
            left,
            stops=output < request.max_new_tokens,
            content=self._contents[index].of(self._leaves[number]) if shares else None,
            watched=shares and self._watched[number],
        )
        replica = self._replicas[index]
        before_s = replica.next_s
        replica.arrive(row, now_s)
        if replica.next_s != before_s:
            heappush(self._events, (replica.next_s, WORK, index, 0))
        return None

    def _take(self, replica: ReplicaRun, index: int) -> None:
        """Schedule what a replica does next, and what the router learns of what it did."""
        events, kind = self._events, self._kinds[self._numbers[index]]
        if replica.next_s < math.inf:
            heappush(events, (replica.next_s, WORK, index, 0))
        for first_s, number in replica.first_tokens:
            heappush(events, (first_s + kind.seen_after(0).first_s, LEARN, number, -1))
        for end_s, number, rows in replica.ends:
            front = kind.seen_after(rows)
            output = self._ledger.output_tokens[number]
            heappush(events, (end_s + front.last_s, LEARN, number, output))
            self._begin_turns(number, end_s, front)
        replica.first_tokens.clear()
        replica.ends.clear()

    def _begin_turns(self, number: int, end_s: float, front: FrontDelay) -> None:
        """A request ended, behind this front: its session's next turn will come."""
        for later, think_s in self._turns.get(number, ()):
            arrival_s = end_s + (front.last_s + think_s)
            self._ledger.arrival_s[later] = arrival_s
            heappush(self._events, (arrival_s, ARRIVE, later, 0))

    def _routed(self, number: int, request: Request) -> RoutedRequest:
        """The request as the router sees it: the hashes of its full blocks, and its session.

        Without hashes in the trace, the turns of a session have one chain of blocks.
        """
        shared, sessions = self._reuse.shared, self._sessions
        blocks: tuple[int, ...] = ()
        session = "" if sessions is None else str(sessions[number])
        full = request.prompt_tokens // self._router_block_tokens
        if shared is not None:
            first, merged = int(shared.offsets[number]), self._merged
            last = first + full * merged
            blocks = tuple(shared.ids[first + merged - 1 : last : merged].tolist())
        elif sessions is not None:
            chain = sessions[number] << 32
            blocks = tuple(range(chain, chain + full))
        return RoutedRequest(
            request.request_id, request.prompt_tokens, request.max_new_tokens, blocks, session
        )
