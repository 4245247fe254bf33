"""A paged engine on virtual time: vLLM's scheduler, a law of passes, and what clients saw.

The engine's loop plans a pass, runs it and hands out its tokens before it plans the next. With
`ahead` (vLLM's `async_scheduling`) it plans a pass while the one before runs. The host's time is
then hidden behind the pass, a new request is admitted one pass later, the blocks of ended rows are
free one pass later, and a row that ends before its limit computes one token too many. Passes of
decodes alone are computed in one leap, up to the next arrival that could change anything, the first
end, or the first missing block.

Requests arrive when the trace says so, or in a closed loop after others (`Reuse.arrivals`).

`PagedEngine` describes an engine, `PagedRun` runs it, and `serve` gives the engines of a world
requests in turn; `toolkit.sim.replicas` puts them behind a router.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from toolkit.compiled import Reduced, reduced
from toolkit.estimators.load import law_of_steps
from toolkit.estimators.steps import StepLaw, StepShape
from toolkit.files.fit import StepsFit
from toolkit.interrupts import check
from toolkit.routing.types import ReplicaReport
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.types import Refusal, Request
from toolkit.sim.arrivals import DueRequests, FixedConcurrency, Later
from toolkit.sim.blocks import Node, PagedRequest, contents
from toolkit.sim.ledger import Gaps, Ledger
from toolkit.sim.loop import CHECK_EVERY
from toolkit.sim.paged import PagedPass, PagedScheduler
from toolkit.sim.worker import FrontDelay
from toolkit.traces.types import Sessions, SharedBlocks


@dataclass(slots=True, frozen=True)
class PassRange:
    """Where the law of passes was measured."""

    rows_max: int
    tokens_max: int
    cached_max: float  # tokens, summed over the decoding rows

    def __reduce__(self) -> Reduced:
        return reduced(self)

    def holds(self, shape: StepShape) -> bool:
        """Whether a pass is within the range."""
        return (
            shape.rows <= self.rows_max
            and shape.tokens <= self.tokens_max
            and shape.decode_cached <= self.cached_max
        )

    def __str__(self) -> str:
        cached = f"{self.cached_max:,.0f} cached tokens"
        return f"passes up to {self.rows_max:,} rows, {self.tokens_max:,} new tokens and {cached}"


@dataclass(slots=True, frozen=True)
class PagedEngine:
    """One engine: the law of its passes, its cache, and whether it plans `ahead`.

    `blocks` excludes the one that vLLM keeps for itself. `valid` None: the law holds everywhere. A
    client waits `front_s` for a token beyond the passes, and `front_row_s` for each running row.
    `believed` is the law that a router believes; None: `steps`.
    """

    steps: StepLaw
    blocks: int
    block_tokens: int
    ahead: bool = False
    valid: PassRange | None = None
    front_s: float = 0.0
    front_row_s: float = 0.0
    believed: StepLaw | None = None

    def __reduce__(self) -> Reduced:
        return reduced(self)

    @classmethod
    def of(cls, fit: StepsFit, capacity_tokens: int) -> PagedEngine:
        """The engine that a fit describes, with a cache of `capacity_tokens`."""
        return cls(
            law_of_steps(fit),
            capacity_tokens // fit.block_tokens,
            fit.block_tokens,
            fit.async_scheduling,
            PassRange(fit.valid.rows_max, fit.valid.tokens_max, fit.valid.cached_max),
            fit.front_s,
            fit.front_row_s,
        )

    @property
    def capacity_tokens(self) -> int:
        """Tokens that its cache holds."""
        return self.blocks * self.block_tokens

    def front(self, rows: float) -> FrontDelay:
        """What clients wait beyond passes of so many rows. A single delay covers the way in and
        the way out, so that the first and the last token are late by the same time.
        """
        delay_s = self.front_s + self.front_row_s * rows
        return FrontDelay(delay_s, delay_s)

    def drawn(self, steps: StepLaw) -> PagedEngine:
        """The same engine with passes by another law, while routers believe the one so far."""
        return replace(self, steps=steps, believed=self.believed or self.steps)

    def slowed(self, factor: float) -> PagedEngine:
        """The same engine with every pass `factor` times as long."""
        return replace(self, steps=self.steps.times(factor))


@dataclass(slots=True, frozen=True)
class Reuse:
    """What the requests of a trace share, and whether they are a closed loop: of sessions, or of
    `concurrency` requests at once (0: not fixed), the first of them spread over `ramp_s`.
    """

    shared: SharedBlocks | None = None
    sessions: Sessions | None = None
    closed: bool = True
    concurrency: int = 0
    ramp_s: float = 0.0

    def __reduce__(self) -> Reduced:
        return reduced(self)

    def __bool__(self) -> bool:
        return self.shared is not None or self.sessions is not None

    def dealt(self, requests: int, engines: int) -> list[list[int]]:
        """The requests of each engine: dealt in turn, and in a closed loop session by session."""
        place = np.arange(requests)
        if self.sessions is not None and self.closed:
            first = self.sessions.first
            place = (np.cumsum(first == place) - 1)[first]
        return [np.flatnonzero(place % engines == engine).tolist() for engine in range(engines)]

    def contents(
        self, numbers: Sequence[int], requests: Sequence[Request], outputs: Sequence[int]
    ) -> tuple[list[Node], list[bool]]:
        """Content and `watched` of the requests `numbers`; see `PagedRequest`."""
        rows = np.array(numbers, dtype=np.int64)
        sessions = None if self.sessions is None else self.sessions.take(rows)
        leaves, continued = contents(
            [requests[number].prompt_tokens for number in numbers],
            [outputs[number] for number in numbers],
            None if self.shared is None else self.shared.take(rows),
            None if sessions is None else sessions.previous.tolist(),
        )
        return leaves, [False] * len(leaves) if self.closed else continued

    def arrivals(
        self, numbers: Sequence[int], arrival_s: list[float], refused: Container[int] = ()
    ) -> DueRequests:
        """When each of `numbers` comes; `arrival_s` has and gets the times of all requests.

        One that is `refused` does not come, except where others follow it. At a fixed concurrency
        `numbers` are all requests.
        """
        if self.concurrency:
            return FixedConcurrency(arrival_s, self.concurrency, self.ramp_s)
        turns: dict[int, list[Later]] = {}
        if self.sessions is not None and self.closed:
            previous, think_s = self.sessions.previous.tolist(), self.sessions.think_s.tolist()
            for number in numbers:
                if previous[number] >= 0:
                    turns.setdefault(previous[number], []).append((number, think_s[number]))
        later = {number for after in turns.values() for number, _ in after}
        first = [
            number
            for number in numbers
            if number not in later and (number not in refused or number in turns)
        ]
        return DueRequests(arrival_s, first, turns)


class PagedRun:
    """One engine that serves requests. Its caller tells it of each that comes (`arrive`), and calls
    `work` at `next_s`.

    A request that comes during a leap ends the leap with the pass that runs then, so that an engine
    costs nothing while others work.

    Args:
        index: its place in the ledger.
        ledger: gets what happens.
        shares: whether requests have contents.
        tells: whether the caller takes `first_tokens` and `ends`, since requests may follow.

    Attributes:
        next_s: when `work` is to be called next; infinity while it has nothing to do.
        first_tokens: (time, number) of first tokens here that the caller has not taken yet.
        ends: (time, number, rows that ran) of requests that ended, likewise.
    """

    def __init__(
        self,
        index: int,
        engine: PagedEngine,
        flags: VllmPolicy,
        ledger: Ledger,
        *,
        shares: bool,
        tells: bool,
    ) -> None:
        self._index, self._engine, self._flags, self._ledger = index, engine, flags, ledger
        self._ahead, self._shares, self._tells = engine.ahead, shares, tells
        self._blocks, self._block_tokens = engine.blocks, engine.block_tokens
        self._law = (
            replace(engine.steps, host_s=0.0, host_row_s=0.0) if engine.ahead else engine.steps
        )
        self._gaps = Gaps()
        self._last_s = 0.0  # end of the last pass, when all decoding rows had a token
        self._moved_here: set[int] = set()  # requests that had tokens when they came
        self.first_tokens: list[tuple[float, int]] = []
        self.ends: list[tuple[float, int, int]] = []
        self._restart(0.0)

    def _restart(self, now_s: float) -> None:
        """It begins with an empty cache and without requests."""
        self._scheduler = PagedScheduler(
            self._flags, self._blocks, self._block_tokens, ahead=self._ahead, shares=self._shares
        )
        self._arrived: list[PagedRequest] = []
        self._leap: PagedPass | None = None  # its first pass; the passes that run are a leap
        self._begin_s, self._steps = 0.0, 0  # of the leap: when it begins, and how many passes
        self._can_cut = False  # whether a request that comes ends the leap
        self._begun_s = self._done_s = -math.inf  # of the leap's last pass
        self._under_way: list[PagedRequest] = []  # rows that end with the pass that is under way
        self._plan_s = now_s  # when the next pass is planned
        self.next_s = math.inf

    def arrive(self, row: PagedRequest, now_s: float, *, has_tokens: bool = False) -> None:
        """A request comes; `has_tokens`: it has some from another engine."""
        self._arrived.append(row)
        if has_tokens:
            self._moved_here.add(row.number)
        if self._leap is None:
            if self.next_s == math.inf:
                self.next_s = max(self._plan_s, now_s)
        elif self._can_cut:
            self._set_leap(self._leap, self._begin_s, self._steps, now_s)

    def work(self, *, drain: bool, follow: bool, until_s: float = math.inf) -> None:
        """Do what is due at `next_s`: finish the passes that run, and plan the next.

        Args:
            drain: False: no pass is planned where no request waits.
            follow: whether requests may follow from ends: the caller takes these before the next
                pass is planned.
            until_s: no other request comes before that time, if it is known.
        """
        now_s, scheduler, leap = self.next_s, self._scheduler, self._leap
        if leap is not None:
            self._leap = None
            ended = self._finish(leap)
            if self._ahead:
                scheduler.settle(self._under_way)
                self._under_way, self._plan_s = ended, self._begun_s
            else:
                scheduler.settle(ended)
                self._plan_s = self._done_s + self._law.after_s(leap.rows)
            if self._plan_s > now_s or (follow and ended):
                self.next_s = self._plan_s
                return
        if not (drain or self._arrived or scheduler.waiting):
            self.next_s = math.inf
            return
        for row in self._arrived:
            scheduler.add(row)
        self._arrived.clear()
        plan = scheduler.schedule()
        self._ledger.evictions += len(plan.preempted)
        for row in plan.preempted:
            if row.mark:  # it had its last token with the last pass; else none since its admission
                self._close(row, self._last_s)
        if plan.rows:
            steps = scheduler.ahead()
            self._can_cut = steps > 1 and not scheduler.waiting
            self._set_leap(plan, max(now_s, self._done_s), steps, until_s)
        elif self._under_way:  # no other row can run before these have left
            scheduler.settle(self._under_way)
            self._under_way = []
            self._plan_s = self.next_s = max(self._done_s, now_s)
        else:
            self._plan_s, self.next_s = now_s, math.inf

    def die(self, now_s: float) -> list[PagedRequest]:
        """The engine dies and comes back empty; its requests in order, with what they lack as
        `left`.
        """
        leap = self._leap
        if leap is not None:
            passes = range(1, self._steps + 1)
            self._steps = bisect_right(passes, now_s, key=lambda k: self._times(leap, k)[1])
            if self._steps:
                self._begun_s, self._done_s = self._times(leap, self._steps)
                self._finish(leap)
        self.close()
        rows = [*self._scheduler.abort(), *self._arrived]
        for row in rows:
            if row.mark:
                self._close(row, self._last_s)
        self._restart(now_s)
        return sorted(rows, key=lambda row: row.number)

    def report(self, now_s: float) -> ReplicaReport:
        """Its own figures."""
        scheduler = self._scheduler
        used = self._blocks - scheduler.pool.free
        if self._leap is not None and self._steps > 1:
            share = (now_s - self._begin_s) / max(self._done_s - self._begin_s, 1e-9)
            used += int(share * self._steps * self._leap.shape.decodes / self._block_tokens)
        waiting = len(scheduler.waiting) + len(self._arrived)
        return ReplicaReport(waiting, len(scheduler.running), min(used / self._blocks, 1.0), now_s)

    def close(self) -> None:
        """Write what was found in the cache into the ledger."""
        ledger, pool = self._ledger, self._scheduler.pool
        ledger.query_tokens += pool.queries
        ledger.hit_tokens += pool.hits
        ledger.lost_tokens += pool.lost
        ledger.preempted_query_tokens += pool.preempted_queries
        ledger.preempted_hit_tokens += pool.preempted_hits

    def _set_leap(self, plan: PagedPass, begin_s: float, steps: int, until_s: float) -> None:
        """At most `steps` passes run like the planned one, from `begin_s` on, the last of them when
        a request comes at `until_s`.
        """
        if self._can_cut and until_s < math.inf:
            planned = int(self._ahead)  # one more pass is planned already
            begun = self._law.steps_before(plan.shape, until_s - begin_s, steps - planned)
            steps, self._can_cut = max(planned + begun, 1), False
        self._leap, self._begin_s, self._steps = plan, begin_s, steps
        self._begun_s, self._done_s = self._times(plan, steps)
        self.next_s = self._begun_s if self._ahead else self._done_s

    def _times(self, plan: PagedPass, steps: int) -> tuple[float, float]:
        """When the last of the first `steps` passes of the leap begins and ends."""
        law, shape, begin_s = self._law, plan.shape, self._begin_s
        if steps == 1:
            return begin_s, begin_s + law.forward_s(shape)
        begun_s = begin_s + law.stretch_s(shape, steps - 1)
        return begun_s, begun_s + law.forward_s(_grown(shape, steps))

    def _finish(self, plan: PagedPass) -> list[PagedRequest]:
        """Record the passes of the leap; the rows that ended."""
        scheduler, ledger, law = self._scheduler, self._ledger, self._law
        steps, begin_s, end_s = self._steps, self._begin_s, self._done_s
        first_s = end_s if steps == 1 else begin_s + law.forward_s(plan.shape)
        last = _grown(plan.shape, steps)
        last_gap_s = law.after_s(plan.rows) + end_s - self._begun_s
        self._give(plan, steps, first_s, last_gap_s)
        size = self._block_tokens
        used_first = (self._blocks - scheduler.pool.free) * size
        ended = scheduler.commit(steps)
        used = (self._blocks - scheduler.pool.free) * size
        ledger.rounds += steps
        ledger.decoding_steps += steps
        ledger.row_steps += steps * plan.rows
        if plan.chunks:
            ledger.batches += 1
            ledger.computed_prompt_tokens += plan.shape.prefill_tokens
            for chunk in plan.chunks:
                ledger.rows += chunk.completes
        ledger.memory_token_steps += steps * (used_first + used) // 2  # blocks are taken one by one
        if used > ledger.peak_tokens:
            ledger.peak_tokens = float(used)
        valid = self._engine.valid
        if valid is not None and not valid.holds(last):
            ledger.extrapolated += steps
        self._last_s = end_s
        for row in ended:
            self._close(row, end_s)
            ledger.outcomes[row.number].ok = True
            if self._tells:
                self.ends.append((end_s, row.number, len(scheduler.running)))
        ledger.busy_s[self._index] += end_s - begin_s
        ledger.completed_s[self._index] = end_s
        return ended

    def _give(self, plan: PagedPass, steps: int, first_s: float, last_gap_s: float) -> None:
        """Record the tokens of every row in the pass: one at `first_s`, and one with each of the
        following steps, each longer than the one before.
        """
        ledger, gaps, decoding = self._ledger, self._gaps, self._scheduler.decoding
        gap_s = first_s - self._last_s
        if decoding:
            gaps.push(max(gap_s, last_gap_s) if steps > 1 else gap_s)
            if ledger.token_gaps is not None:
                growth_s = self._law.cached_s * plan.shape.decodes
                ledger.token_gaps.add(decoding, gap_s, gap_s)
                ledger.token_gaps.add(
                    decoding * (steps - 1), last_gap_s - (steps - 2) * growth_s, last_gap_s
                )
        if not plan.chunks:
            return
        joined = [chunk.row for chunk in plan.chunks if chunk.completes]
        if not joined:
            return
        mark = gaps.mark(alone=not decoding)
        for row in joined:
            row.mark, outcome = mark, ledger.outcomes[row.number]
            if outcome.first_token_s < 0.0:
                outcome.first_token_s = first_s
                if self._tells:
                    self.first_tokens.append((first_s, row.number))
                continue
            if row.number in self._moved_here:
                self._moved_here.remove(row.number)
                self.first_tokens.append((first_s, row.number))
            gap_s = first_s - outcome.last_token_s
            outcome.max_gap_s = max(outcome.max_gap_s, gap_s)
            if ledger.token_gaps is not None:
                ledger.token_gaps.add(1, gap_s, gap_s)

    def _close(self, row: PagedRequest, last_s: float) -> None:
        """The row stops decoding; its last token came at `last_s`."""
        outcome = self._ledger.outcomes[row.number]
        outcome.last_token_s = last_s
        outcome.max_gap_s = max(outcome.max_gap_s, self._gaps.largest(row.mark))
        row.mark = 0


def _grown(shape: StepShape, steps: int) -> StepShape:
    """The shape of the last of `steps` passes of the same rows."""
    if steps == 1:
        return shape
    return StepShape(shape.decodes, shape.decode_cached + (steps - 1) * shape.decodes)


def serve(
    requests: Sequence[Request],
    flags: VllmPolicy,
    engine: PagedEngine,
    ledger: Ledger,
    reuse: Reuse,
    *,
    front: FrontDelay | None = None,
    drain: bool = True,
) -> list[Refusal]:
    """Serve requests, dealt in turn to as many engines as the ledger has workers (see
    `Reuse.dealt`). Returns the refusals: requests that can never be served.

    The engine cannot foresee the end of an output that is shorter than its limit.
    """
    refusals: dict[int, Refusal] = {}
    outputs = ledger.output_tokens
    for number, request in enumerate(requests):
        refused = refusal(request, outputs[number], flags, engine)
        if refused is not None:
            refusals[number] = refused
    ledger.shares = bool(reuse)
    shares = bool(reuse) and flags.prefix_caching
    for index, numbers in enumerate(reuse.dealt(len(requests), ledger.workers)):
        leaves, watched = reuse.contents(numbers, requests, outputs) if shares else ([], [])
        rows = {
            number: PagedRequest(
                number,
                requests[number].prompt_tokens,
                outputs[number],
                stops=outputs[number] < requests[number].max_new_tokens,
                content=leaves[place] if shares else None,
                watched=shares and watched[place],
            )
            for place, number in enumerate(numbers)
            if number not in refusals
        }
        arrivals = reuse.arrivals(numbers, ledger.arrival_s, refusals)
        run = PagedRun(index, engine, flags, ledger, shares=bool(reuse), tells=arrivals.follow)
        _drive(run, rows, arrivals, front, engine, drain)
    return list(refusals.values())


def _drive(
    run: PagedRun,
    rows: Mapping[int, PagedRequest],
    arrivals: DueRequests,
    front: FrontDelay | None,
    engine: PagedEngine,
    drain: bool,
) -> None:
    """Serve requests, by their numbers, until all have ended; without `drain`, until all were
    admitted. Requests without a row are refused when they arrive.
    """
    left = len(rows)  # to arrive
    events = 0
    while arrivals.next_s < math.inf or run.next_s < math.inf:
        events += 1
        if events % CHECK_EVERY == 0:
            check()
        came_s = arrivals.next_s
        if came_s <= run.next_s:
            number = arrivals.take()
            if number in rows:
                run.arrive(rows[number], came_s)
                left -= 1
            else:
                run.ends.append((came_s, number, 0))
        else:
            run.work(drain=drain or left > 0, follow=arrivals.follow, until_s=came_s)
        if run.ends:
            end_s, _, running = run.ends[0]  # they ended with one pass
            numbers = [number for _, number, _ in run.ends]
            arrivals.ended(numbers, end_s, (front or engine.front(running)).last_s)
            run.ends.clear()
            run.first_tokens.clear()
    run.close()


def refusal(
    request: Request, output: int, flags: VllmPolicy, engine: PagedEngine
) -> Refusal | None:
    """The refusal of a request that, alone and at its longest, no cache or pass has room for."""
    # the last token is not cached
    most = request.prompt_tokens + max(request.max_new_tokens, output) - 1
    limit = f"the cache holds {engine.capacity_tokens:,}"
    if most <= engine.capacity_tokens:
        if flags.chunked_prefill or most <= flags.max_num_batched_tokens:
            return None
        limit = f"without chunked prefill a pass takes {flags.max_num_batched_tokens:,}"
    return Refusal(request.request_id, f"it may grow to {most:,} tokens; {limit}")
