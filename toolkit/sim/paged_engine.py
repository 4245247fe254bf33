"""A paged engine on virtual time: vLLM's scheduler, the law of its passes, and a record of what
clients saw.

The engine's loop plans a pass, runs it and hands out its tokens before it plans the next. With
`ahead` (vLLM's `async_scheduling`) it plans a pass while the one before runs. The host's time is
then hidden behind the pass, a new request is admitted one pass later, the blocks of ended rows are
free one pass later, and a row that ends before its limit computes one token too many. Passes of
decodes alone are computed in one leap, up to the next arrival that could change anything, the first
end, or the first missing block.

`PagedEngine` describes an engine, `PagedRun` serves requests on it, `serve` on all engines of a
world.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.estimators.steps import StepLaw, StepShape, law_of_steps
from toolkit.files.fit import StepsFit
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.types import Refusal, Request
from toolkit.sim.blocks import PagedRequest
from toolkit.sim.ledger import Gaps, Ledger
from toolkit.sim.paged import PagedPass, PagedScheduler
from toolkit.sim.worker import FrontDelay


@dataclass(slots=True, frozen=True)
class PassRange:
    """Where the law of passes was measured."""

    rows_max: int
    tokens_max: int
    cached_max: float  # tokens, summed over the decoding rows

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
    """

    steps: StepLaw
    blocks: int
    block_tokens: int
    ahead: bool = False
    valid: PassRange | None = None
    front_s: float = 0.0
    front_row_s: float = 0.0

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

    def slowed(self, factor: float) -> PagedEngine:
        """The same engine with every pass `factor` times as long."""
        return replace(self, steps=self.steps.times(factor))


class PagedRun:
    """One engine serving requests.

    Args:
        index: the worker's, for the ledger.
        engine, flags: see `PagedEngine` and `VllmPolicy`.
        ledger: where the outcome is written; it holds the true output lengths.
        limits: of outputs, by request number. The engine cannot foresee the end of an output that
            is shorter than its limit.
    """

    def __init__(
        self,
        index: int,
        engine: PagedEngine,
        flags: VllmPolicy,
        ledger: Ledger,
        limits: Sequence[int],
    ) -> None:
        self._index, self._engine, self._ledger, self._limits = index, engine, ledger, limits
        self._law = (
            replace(engine.steps, host_s=0.0, host_row_s=0.0) if engine.ahead else engine.steps
        )
        self._scheduler = PagedScheduler(
            flags, engine.blocks, engine.block_tokens, ahead=engine.ahead
        )
        self._gaps = Gaps()
        self._last_s = 0.0  # end of the last pass, when all decoding rows had a token

    def run(self, requests: Sequence[tuple[int, Request]], *, drain: bool = True) -> None:
        """Serve (number, request) pairs in order of arrival until all have ended; without `drain`,
        until all were admitted.
        """
        scheduler, ahead = self._scheduler, self._engine.ahead
        coming = deque(requests)
        now_s = 0.0  # when the next pass is planned
        under_way: list[PagedRequest] = []  # rows that end with the pass that is under way
        done_s = -math.inf  # when that pass ends
        while drain or coming or scheduler.waiting:
            while coming and coming[0][1].arrival_s <= now_s:
                scheduler.add(self._row(*coming.popleft()))
            plan, next_s = scheduler.schedule(), coming[0][1].arrival_s if coming else math.inf
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
                now_s = next_s
            else:
                return

    def _row(self, number: int, request: Request) -> PagedRequest:
        output = self._ledger.output_tokens[number]
        return PagedRequest(
            number, request.prompt_tokens, output, stops=output < self._limits[number]
        )

    def _make(
        self, plan: PagedPass, begin_s: float, next_s: float
    ) -> tuple[float, float, list[PagedRequest]]:
        """Make the planned pass and those like it. Returns when the last of them begins and ends,
        and the rows that ended with it.

        `next_s` is when the next request arrives: it takes part in planning before the first pass
        that begins after it.
        """
        scheduler, law, shape, rows = self._scheduler, self._law, plan.shape, plan.rows
        steps = scheduler.ahead()
        if steps > 1 and not scheduler.waiting:
            planned = int(self._engine.ahead)
            steps = planned + law.steps_before(shape, next_s - begin_s, steps - planned)
        begun_s, end_s = begin_s, begin_s + law.forward_s(shape)
        first_s = end_s
        if steps > 1:
            begun_s += law.stretch_s(shape, steps - 1)
            shape = StepShape(shape.decodes, shape.decode_cached + (steps - 1) * shape.decodes)
            end_s = begun_s + law.forward_s(shape)
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
        return begun_s, end_s, ended

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
            row.mark, number = mark, row.number
            if ledger.first_token_s[number] < 0.0:
                ledger.first_token_s[number] = first_s
                continue
            gap_s = first_s - ledger.last_token_s[number]
            ledger.max_gap_s[number] = max(ledger.max_gap_s[number], gap_s)
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
            self._ledger.ok[row.number] = True

    def _close(self, row: PagedRequest, last_s: float) -> None:
        """The row stops decoding; its last token came at `last_s`."""
        ledger, number = self._ledger, row.number
        ledger.last_token_s[number] = last_s
        ledger.max_gap_s[number] = max(ledger.max_gap_s[number], self._gaps.largest(row.mark))
        row.mark = 0

    def _count(self, plan: PagedPass, steps: int, last: StepShape, free: int) -> None:
        """Count `steps` passes: `last` is the shape of the last one, `free` the free blocks during
        the first.
        """
        ledger, engine, valid = self._ledger, self._engine, self._engine.valid
        used = (engine.blocks - self._scheduler.pool.free) * engine.block_tokens
        used_first = (engine.blocks - free) * engine.block_tokens
        ledger.rounds += steps
        ledger.decoding_steps += steps
        ledger.row_steps += steps * (plan.rows if steps == 1 else last.rows)
        if plan.chunks:
            ledger.batches += 1
            ledger.rows += sum([chunk.completes for chunk in plan.chunks])
        ledger.memory_token_steps += steps * (used_first + used) // 2  # blocks are taken one by one
        if used > ledger.peak_tokens:
            ledger.peak_tokens = used
        if valid is not None and not valid.holds(last):
            ledger.extrapolated += steps


def serve(
    requests: Sequence[Request],
    flags: VllmPolicy,
    engine: PagedEngine,
    ledger: Ledger,
    *,
    drain: bool = True,
) -> list[Refusal]:
    """Serve requests, dealt round-robin to as many engines as the ledger has workers. Returns the
    refusals: requests that can never be served.
    """
    refusals: list[Refusal] = []
    dealt: list[list[tuple[int, Request]]] = [[] for _ in range(ledger.workers)]
    for number, request in enumerate(requests):
        refusal = _refuse(request, ledger.output_tokens[number], flags, engine)
        if refusal is None:
            dealt[number % ledger.workers].append((number, request))
        else:
            refusals.append(refusal)
    limits = [request.max_new_tokens for request in requests]
    for index, own in enumerate(dealt):
        PagedRun(index, engine, flags, ledger, limits).run(own, drain=drain)
    return refusals


def _refuse(
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
