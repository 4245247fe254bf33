"""A paged engine on virtual time: vLLM's scheduler, the law of its passes, and a record of what
clients saw.

The engine's loop plans a pass, runs it and hands out its tokens before it plans the next. With
`ahead` (vLLM's `async_scheduling`) it plans a pass while the one before runs. The host's time is
then hidden behind the pass, a new request is admitted one pass later, the blocks of ended rows are
free one pass later, and a row that ends before its limit computes one token too many. Passes of
decodes alone are computed in one leap, up to the next arrival that could change anything, the first
end, or the first missing block.

Requests arrive when the trace says so. In a closed loop of sessions (`Turns`) a later turn arrives
when the turn before has ended and its client has thought about it.

`PagedEngine` describes an engine, `PagedRun` serves requests on it, `serve` on all engines of a
world.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import numpy as np
from mypy_extensions import mypyc_attr

from toolkit.compiled import Reduced, reduced
from toolkit.estimators.steps import StepLaw, StepShape, law_of_steps
from toolkit.files.fit import StepsFit
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.types import Refusal, Request
from toolkit.sim.blocks import Node, PagedRequest, contents
from toolkit.sim.ledger import Gaps, Ledger
from toolkit.sim.paged import PagedPass, PagedScheduler
from toolkit.sim.sessions import following
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
    """One engine: the law of its passes, its cache, and whether it plans ahead (`ahead`). `valid`
    None: the law holds everywhere.

    `blocks` excludes the one that vLLM keeps for itself. `front_s` is the seconds that a client
    waits for a token beyond the passes, and `front_row_s` the seconds that each running row adds.
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
        valid = PassRange(fit.valid.rows_max, fit.valid.tokens_max, fit.valid.cached_max)
        return cls(
            law_of_steps(fit),
            capacity_tokens // fit.block_tokens,
            fit.block_tokens,
            fit.async_scheduling,
            valid,
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
    """What the requests of a trace have in common, and whether sessions are a closed loop."""

    shared: SharedBlocks | None = None
    sessions: Sessions | None = None
    closed: bool = True

    def __reduce__(self) -> Reduced:
        return reduced(self)

    def __bool__(self) -> bool:
        return self.shared is not None or self.sessions is not None

    def dealt(self, requests: int, engines: int) -> list[int]:
        """The engine of each request: in turn, and in a closed loop session by session."""
        if self.sessions is None or not self.closed:
            return [number % engines for number in range(requests)]
        first = self.sessions.first
        order = np.cumsum(first == np.arange(requests)) - 1
        return [int(place) % engines for place in order[first].tolist()]

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

    def turns(self, numbers: Sequence[int]) -> dict[int, list[tuple[int, float]]]:
        """In a closed loop, the turns of the requests `numbers` that follow each of them, with
        their think times in seconds.
        """
        if self.sessions is None or not self.closed:
            return {}
        return following(self.sessions, numbers)


NO_REUSE = Reuse()


@mypyc_attr(allow_interpreted_subclasses=True)
class PagedRun:
    """One engine serving requests.

    Args:
        index: the worker's, for the ledger.
        engine, flags: see `PagedEngine` and `VllmPolicy`.
        ledger: where the outcome is written; it holds the true output lengths.
        turns: of a closed loop; see `Reuse.turns`.
        shares: whether requests have contents.
        front: what clients wait beyond the passes; None: as the engine says.
    """

    def __init__(
        self,
        index: int,
        engine: PagedEngine,
        flags: VllmPolicy,
        ledger: Ledger,
        *,
        turns: Mapping[int, Sequence[tuple[int, float]]] | None = None,
        shares: bool = False,
        front: FrontDelay | None = None,
    ) -> None:
        self._index, self._engine, self._ledger = index, engine, ledger
        self._ahead = engine.ahead
        self._blocks, self._block_tokens = engine.blocks, engine.block_tokens
        self._front = front
        self._turns = turns or {}
        self._coming: list[tuple[float, int]] = []  # a heap of (arrival, number)
        self._law = (
            replace(engine.steps, host_s=0.0, host_row_s=0.0) if engine.ahead else engine.steps
        )
        self._scheduler = PagedScheduler(
            flags, engine.blocks, engine.block_tokens, ahead=engine.ahead, shares=shares
        )
        self._gaps = Gaps()
        self._last_s = 0.0  # end of the last pass, when all decoding rows had a token

    def run(self, rows: Mapping[int, PagedRequest], *, drain: bool = True) -> None:
        """Serve the requests, by their numbers, until all have ended; without `drain`, until all
        were admitted.
        """
        scheduler, ahead, coming = self._scheduler, self._ahead, self._coming
        arrival_s = self._ledger.arrival_s
        later = {number for turns in self._turns.values() for number, _ in turns}
        # also those that are refused, if their sessions go on
        coming += [
            (arrival_s[number], number)
            for number in sorted({*rows, *self._turns})
            if number not in later
        ]
        heapify(coming)
        left = len(rows)  # to arrive
        now_s = 0.0  # when the next pass is planned
        under_way: list[PagedRequest] = []  # rows that end with the pass that is under way
        done_s = -math.inf  # when that pass ends
        while drain or left or scheduler.waiting:
            while coming and coming[0][0] <= now_s:
                came_s, number = heappop(coming)
                if number in rows:
                    scheduler.add(rows[number])
                    left -= 1
                else:
                    self._begin_turns(number, came_s)
            plan, next_s = scheduler.schedule(), coming[0][0] if coming else math.inf
            if plan.preempted:
                self._drop(plan.preempted)
            if plan.rows:
                begin_s = max(now_s, done_s)
                begun_s, done_s, ended = self._make(plan, begin_s, next_s)
                if ahead:
                    scheduler.settle(under_way)
                    now_s, under_way = begun_s, ended
                else:
                    scheduler.settle(ended)
                    now_s = done_s + self._law.after_s(plan.rows)
            elif under_way:  # no other row can run before these have left
                scheduler.settle(under_way)
                now_s, under_way = done_s, []
            elif coming:
                now_s = coming[0][0]
            else:
                break
        self._count_found()

    def _begin_turns(self, number: int, end_s: float, rows: int = 0) -> None:
        """A request ended at `end_s`, when so many rows ran: its session's next turn will come."""
        for later, think_s in self._turns.get(number, ()):
            front = self._front or self._engine.front(rows)
            arrival_s = end_s + (front.last_s + think_s)
            self._ledger.arrival_s[later] = arrival_s
            heappush(self._coming, (arrival_s, later))

    def _make(
        self, plan: PagedPass, begin_s: float, next_s: float
    ) -> tuple[float, float, list[PagedRequest]]:
        """Make the planned pass and those like it. Returns when the last of them begins and ends,
        and the rows that ended with it.

        `next_s` is when the next request arrives: it takes part in planning before the first pass
        that begins after it.
        """
        steps = self._scheduler.ahead()
        if steps > 1 and not self._scheduler.waiting:
            steps = self._steps_before(plan.shape, steps, next_s - begin_s)
        begun_s, end_s = self._times(plan, steps, begin_s)
        return begun_s, end_s, self._finish(plan, steps, begin_s, begun_s, end_s)

    def _steps_before(self, shape: StepShape, steps: int, seconds: float) -> int:
        """How many of `steps` passes are made if a request arrives after so many seconds."""
        planned = int(self._ahead)
        return planned + self._law.steps_before(shape, seconds, steps - planned)

    def _times(self, plan: PagedPass, steps: int, begin_s: float) -> tuple[float, float]:
        """When the last of `steps` passes begins and ends, if the first begins at `begin_s`."""
        law, shape = self._law, plan.shape
        if steps == 1:
            return begin_s, begin_s + law.forward_s(shape)
        begun_s = begin_s + law.stretch_s(shape, steps - 1)
        return begun_s, begun_s + law.forward_s(_grown(shape, steps))

    def _finish(
        self, plan: PagedPass, steps: int, begin_s: float, begun_s: float, end_s: float
    ) -> list[PagedRequest]:
        """Record that `steps` passes were made from `begin_s` on, the last one from `begun_s` to
        `end_s`; return the rows that ended with the last.
        """
        scheduler, law, shape, rows = self._scheduler, self._law, plan.shape, plan.rows
        first_s = end_s if steps == 1 else begin_s + law.forward_s(shape)
        shape = _grown(shape, steps)
        self._give(plan, steps, first_s, law.after_s(rows) + end_s - begun_s)
        free = scheduler.pool.free
        ended = scheduler.commit(steps)
        self._count(plan, steps, shape, free)
        self._last_s = end_s
        if ended:
            self._end(ended, end_s)
        ledger = self._ledger
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
                continue
            gap_s = first_s - outcome.last_token_s
            outcome.max_gap_s = max(outcome.max_gap_s, gap_s)
            if ledger.token_gaps is not None:
                ledger.token_gaps.add(1, gap_s, gap_s)

    def _drop(self, preempted: Sequence[PagedRequest]) -> None:
        """Record a preemption: the rows had their last token with the last pass, or none since
        they were admitted.
        """
        self._ledger.evictions += len(preempted)
        for row in preempted:
            if row.mark:
                self._close(row, self._last_s)

    def _end(self, ended: Sequence[PagedRequest], end_s: float) -> None:
        for row in ended:
            self._close(row, end_s)
            self._ledger.outcomes[row.number].ok = True
            if self._turns:
                self._begin_turns(row.number, end_s, len(self._scheduler.running))

    def _count_found(self) -> None:
        """Write what was found in the cache into the ledger."""
        ledger, pool = self._ledger, self._scheduler.pool
        ledger.query_tokens += pool.queries
        ledger.hit_tokens += pool.hits
        ledger.lost_tokens += pool.lost
        ledger.preempted_query_tokens += pool.preempted_queries
        ledger.preempted_hit_tokens += pool.preempted_hits

    def _close(self, row: PagedRequest, last_s: float) -> None:
        """The row stops decoding; its last token came at `last_s`."""
        outcome = self._ledger.outcomes[row.number]
        outcome.last_token_s = last_s
        outcome.max_gap_s = max(outcome.max_gap_s, self._gaps.largest(row.mark))
        row.mark = 0

    def _count(self, plan: PagedPass, steps: int, last: StepShape, free: int) -> None:
        """Count `steps` passes: `last` is the shape of the last one, `free` the free blocks during
        the first.
        """
        ledger, valid, size = self._ledger, self._engine.valid, self._block_tokens
        used = (self._blocks - self._scheduler.pool.free) * size
        used_first = (self._blocks - free) * size
        ledger.rounds += steps
        ledger.decoding_steps += steps
        ledger.row_steps += steps * (plan.rows if steps == 1 else last.rows)
        if plan.chunks:
            ledger.batches += 1
            ledger.computed_prompt_tokens += plan.shape.prefill_tokens
            for chunk in plan.chunks:
                ledger.rows += chunk.completes
        ledger.memory_token_steps += steps * (used_first + used) // 2  # blocks are taken one by one
        if used > ledger.peak_tokens:
            ledger.peak_tokens = float(used)
        if valid is not None and not valid.holds(last):
            ledger.extrapolated += steps


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
    reuse: Reuse = NO_REUSE,
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
    dealt: list[list[int]] = [[] for _ in range(ledger.workers)]
    places = reuse.dealt(len(requests), ledger.workers)
    for number, request in enumerate(requests):
        refused = refusal(request, outputs[number], flags, engine)
        if refused is not None:
            refusals[number] = refused
        dealt[places[number]].append(number)
    ledger.shares = bool(reuse)
    for index, numbers in enumerate(dealt):
        run = PagedRun(
            index,
            engine,
            flags,
            ledger,
            turns=reuse.turns(numbers),
            shares=bool(reuse),
            front=front,
        )
        leaves, watched = (
            reuse.contents(numbers, requests, outputs)
            if reuse and flags.prefix_caching
            else ([], [])
        )
        rows = {}
        for place, number in enumerate(numbers):
            request = requests[number]
            if number in refusals:
                continue
            rows[number] = PagedRequest(
                number,
                request.prompt_tokens,
                outputs[number],
                stops=outputs[number] < request.max_new_tokens,
                content=leaves[place] if leaves else None,
                watched=bool(watched) and watched[place],
            )
        run.run(rows, drain=drain)
    return list(refusals.values())


def refusal(
    request: Request, output: int, flags: VllmPolicy, engine: PagedEngine
) -> Refusal | None:
    """The refusal of a request that, alone and at its full length, does not fit into the cache or
    into a pass; None if it fits.
    """
    # the last token is not cached
    most = request.prompt_tokens + max(request.max_new_tokens, output) - 1
    limits = {"the cache holds": engine.capacity_tokens}
    if not flags.chunked_prefill:
        limits["without chunked prefill a pass takes"] = flags.max_num_batched_tokens
    for where, tokens in limits.items():
        if most > tokens:
            return Refusal(
                request.request_id, f"it may grow to {most:,} tokens; {where} {tokens:,}"
            )
    return None
