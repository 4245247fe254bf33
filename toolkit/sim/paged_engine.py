"""A paged engine on virtual time: vLLM's scheduler, a law of passes, and what clients saw.

The engine's loop plans a pass, runs it and hands out its tokens before it plans the next. With
`ahead` (vLLM's `async_scheduling`) it plans a pass while the one before runs. Then a new request is
admitted one pass later, the blocks of ended rows are free one pass later, and a row that ends
before its limit computes one token too many. The host's time is hidden behind the pass, unless the
law knows launches (`PassLaw.graphs`). Passes of decodes alone are computed in one leap, up to the
next arrival that could change anything, the first end, or the first missing block.

`PagedEngine` describes an engine and `PagedRun` runs it: `toolkit.sim.vllm` plans its passes, and
`toolkit.sim.flight` times them. `toolkit.sim.replicas` gives it requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from toolkit.catalogue.releases import Release, release_of
from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.recipe import AcceptanceSpec
from toolkit.laws.passes import PassLaw
from toolkit.routing.types import ReplicaReport
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.cache_settings import CacheSettings, settings_of
from toolkit.sim.drafts import DrawnDrafts, drafts_of
from toolkit.sim.flight import Flight, OverlappingFlight, grown_shape
from toolkit.sim.kv_cache import PagedRow
from toolkit.sim.ledger import Gaps, Ledger
from toolkit.sim.loop import SimulationStalledError
from toolkit.sim.vllm import PlannedPass, VllmScheduler


@dataclass(slots=True, frozen=True)
class PagedEngine:
    """One engine: the law of its passes, its cache, and whether it plans `ahead`.

    `blocks` excludes the one that vLLM keeps for itself. A client waits `front_s` for a token
    beyond the passes, and `front_row_s` for each running row. `caches` are the groups of KV caches
    that share the blocks; None: one of full attention, in blocks of `block_tokens`.
    `draft_tokens` of a row are in its passes, made by `draft_method`, and `drafts` says how many
    are accepted; `hash_lookahead` and `release`: see `VllmScheduler`. `others`
    are the same engine with other numbers of drafts.
    """

    steps: PassLaw
    blocks: int
    block_tokens: int
    ahead: bool = False
    front_s: float = 0.0
    front_row_s: float = 0.0
    caches: CacheSettings | None = None
    draft_method: str = ""
    draft_tokens: int = 0
    drafts: DrawnDrafts | None = None
    hash_lookahead: int = 0
    release: Release | None = None
    others: tuple[PagedEngine, ...] = ()

    @classmethod
    def of(cls, fit: Fit) -> PagedEngine | None:
        """Return the engine that a fit describes, with all numbers of drafts that were measured;
        None: its passes were not. Raises InputError for caches that are not modelled.
        """
        steps = fit.steps
        if steps is None:
            return None
        caches = settings_of(steps.resolved, fit.engine.max_model_len, fit.engine.device)
        found = []
        for one in (steps, *fit.drafts):
            tokens = fit.memory.capacity_tokens if one is steps else one.blocks * one.block_tokens
            blocks = tokens // one.block_tokens
            if caches is not None:
                blocks = round(one.blocks * tokens / caches.capacity_tokens(one.blocks))
            drafts = one.resolved.drafts if one.resolved is not None else None
            engine = cls(
                one.law,
                blocks,
                one.block_tokens,
                one.async_scheduling,
                one.front_s,
                one.front_row_s,
                caches=caches,
                draft_method=one.draft_method,
                draft_tokens=one.draft_tokens,
                hash_lookahead=drafts.hash_lookahead if drafts is not None else 0,
                release=release_of(fit.engine.engine_version),
            )
            found.append(engine)
        return replace(found[0], others=tuple(found[1:]))

    def with_drafts(self, tokens: int, acceptance: AcceptanceSpec | None, seed: int) -> PagedEngine:
        """Return the engine with `tokens` drafts of a row in a pass. `InputError` where their law
        was not measured, or nothing says how many are accepted.
        """
        several = [self, *self.others]
        found = [engine for engine in several if engine.draft_tokens == tokens]
        if not found:
            numbers = " and ".join(str(engine.draft_tokens) for engine in several)
            raise InputError(
                f"num_speculative_tokens is {tokens}, and the laws are of {numbers} drafts",
                "measure them: llmctl profile RECIPE --drafts N, and llmctl fit PROFILE --also "
                "OTHER",
            )
        if not tokens:
            return replace(found[0], others=())
        drafts = drafts_of(found[0].draft_method, tokens, acceptance, seed)
        return replace(found[0], drafts=drafts, others=())

    @property
    def capacity_tokens(self) -> int:
        """Tokens that its cache holds; with several cache groups, as many as vLLM logs."""
        if self.caches is not None:
            return self.caches.capacity_tokens(self.blocks)
        return self.blocks * self.block_tokens

    @property
    def longest(self) -> int:
        """Tokens of the longest request that it can serve."""
        if self.caches is not None:
            return self.caches.max_model_len - 1
        return self.capacity_tokens - (self.drafts is not None)  # vLLM's longest context

    def allowed(self, flags: VllmPolicy) -> VllmPolicy:
        """The flags nearest to `flags` with which vLLM starts."""
        if self.caches is None:
            return flags
        return self.caches.allowed(flags, self.blocks, ahead=self.ahead)

    def scheduler(self, flags: VllmPolicy) -> VllmScheduler:
        """Return a scheduler of its passes, with an empty cache. Raises InputError where vLLM would
        not start with these flags, or they are not modelled.
        """
        return VllmScheduler(
            flags,
            self.blocks,
            self.block_tokens,
            caches=self.caches,
            ahead=self.ahead,
            drafts=self.drafts,
            hash_lookahead=self.hash_lookahead,
            release=self.release,
        )

    def seen_after_s(self, rows: float) -> float:
        """Return what clients wait beyond passes of `rows` rows. A single delay covers the way in
        and the way out, so that the first and the last token are late by the same time.
        """
        return self.front_s + self.front_row_s * rows

    def slowed(self, factor: float) -> PagedEngine:
        """Return the same engine, with this number of drafts, with every pass `factor` times as
        long.
        """
        return replace(self, steps=self.steps.times(factor), others=())


class PagedRun:
    """One engine that serves requests. Its caller tells it of each that comes (`arrive`), and calls
    `work` at `next_s`.

    A request that comes during a leap ends the leap with the pass that is planned then, so that an
    engine costs nothing while others work.

    Args:
        index: its place in the ledger.
        ledger: gets what happens.
        tells: whether the caller takes `first_tokens` and `ends`, since requests may follow.

    Attributes:
        next_s: when `work` is to be called next; infinity while it has nothing to do.
        scheduler: plans its passes.
        first_tokens: (time, number) of first tokens here.
        ends: (time, number, rows that ran) of requests that ended. The caller takes both.
    """

    def __init__(
        self,
        index: int,
        engine: PagedEngine,
        flags: VllmPolicy,
        ledger: Ledger,
        *,
        tells: bool,
    ) -> None:
        self._index = index
        self._engine = engine
        self._ledger = ledger
        self._tells = tells
        # with several groups of caches, of the longest request
        self._tokens_per_block: float = engine.capacity_tokens / max(engine.blocks, 1)
        self._gaps = Gaps()
        self.first_tokens: list[tuple[float, int]] = []
        self.ends: list[tuple[float, int, int]] = []
        self.scheduler = engine.scheduler(flags)
        ledger.pools.append(self.scheduler.pool)
        self._flight = (OverlappingFlight if engine.ahead else Flight)(engine.steps)
        self._leap: PlannedPass | None = None  # the first of the passes that are under way
        self._since_s = 0.0  # when the engine began to work for them alone
        self._can_cut = False  # whether a request that comes ends the leap
        self._done_s = -math.inf  # the end of the last pass before them, with its tokens
        self._plan_s = 0.0  # when the next pass is planned
        self.next_s = math.inf

    def arrive(self, row: PagedRow, now_s: float) -> None:
        """A request comes."""
        self.scheduler.add(row)
        if self._leap is None:
            if self.next_s == math.inf:
                self.next_s = max(self._plan_s, now_s)
        elif self._can_cut:
            self._can_cut = False
            self._flight.cut(now_s)
            self.next_s = self._flight.due_s

    def work(self, *, drain: bool, follow: bool) -> None:
        """Do what is due at `next_s`: finish the passes that run, and plan the next.

        Args:
            drain: False: no pass is planned where no request waits.
            follow: whether requests may follow from ends: the caller takes these before the next
                pass is planned.
        """
        now_s = self.next_s
        scheduler = self.scheduler
        flight = self._flight
        leap = self._leap  # passes that end when the next one is launched
        self._leap = None
        if leap is not None:
            self._commit(leap)
            if self._engine.ahead:
                scheduler.settle()
            else:
                self._give(leap, now_s)
                scheduler.settle()
                self._plan_s = now_s + self._engine.steps.after_s(leap.rows)
                if self._plan_s > now_s or (follow and leap.ended):
                    self.next_s = self._plan_s
                    return
                leap = None
        plan: PlannedPass | None = None
        if drain or scheduler.waiting:
            plan = scheduler.schedule()
            self._ledger.evictions += len(plan.preempted)
            if plan.preempted and not self._ledger.preempts:
                raise SimulationStalledError("a row was preempted, and no block has a key", "")
        shape = plan.shape if plan is not None and plan.rows else None
        if leap is not None or shape is not None:
            end_s = flight.follow(shape, now_s)
            if leap is not None:
                self._give(leap, end_s)
        if plan is not None:
            for row in plan.preempted:
                if row.mark:  # it had its last token with the last pass; else none since admitted
                    self._close(row, self._done_s)
            for row in plan.paused:
                self._close(row, self._done_s)
        if plan is not None and shape is not None:
            self._begin(plan, now_s)
            return
        self._plan_s = max(self._done_s, now_s)
        self.next_s = math.inf
        if plan is not None and (scheduler.settle(idle=True) or plan.preempted):
            self.next_s = self._plan_s  # no other row could run before these had left

    def report(self, now_s: float) -> ReplicaReport:
        """Its own figures."""
        scheduler = self.scheduler
        flight = self._flight
        pool = scheduler.pool
        used = pool.blocks - pool.free
        if self._leap is not None and flight.steps > 1:
            share = (now_s - flight.begin_s) / max(flight.end_s - flight.begin_s, 1e-9)
            used += int(share * flight.steps * self._leap.shape.decodes / self._engine.block_tokens)
        return ReplicaReport(len(scheduler.waiting), min(used / pool.blocks, 1.0))

    def _begin(self, plan: PlannedPass, now_s: float) -> None:
        """The planned pass begins, and with it those that decode the same rows."""
        scheduler = self.scheduler
        flight = self._flight
        steps = scheduler.ahead()
        self._can_cut = steps > 1 and not scheduler.waiting
        flight.start(plan.shape, now_s, steps)
        self._leap = plan
        self._since_s = max(now_s, self._done_s)
        self.next_s = flight.due_s

    def _commit(self, plan: PlannedPass) -> None:
        """Record the passes that are under way, but for their times."""
        scheduler = self.scheduler
        ledger = self._ledger
        steps = self._flight.steps
        pool = scheduler.pool
        free_first = pool.free
        scheduler.commit(steps)
        ledger.rounds += steps
        ledger.decoding_steps += steps
        ledger.row_steps += steps * plan.rows
        if plan.shape.prefills:
            ledger.batches += 1
            ledger.computed_prompt_tokens += plan.shape.prefill_tokens
        # blocks are taken one by one
        held = pool.blocks * steps - 0.5 * steps * (free_first + pool.free)
        ledger.memory_token_steps += held * self._tokens_per_block
        most = pool.blocks - min(free_first, pool.free, scheduler.least_free)
        ledger.peak_tokens = max(ledger.peak_tokens, most * self._tokens_per_block)
        valid = self._engine.steps.valid
        if valid is not None:
            last = plan.shape if steps == 1 else grown_shape(plan.shape, steps)
            if not valid.holds(last):
                ledger.extrapolated += steps
        ledger.drafted_tokens += plan.drafted
        ledger.accepted_tokens += plan.accepted

    def _give(self, leap: PlannedPass, end_s: float) -> None:
        """Record the tokens of the passes that were under way; the last ones come at `end_s`."""
        ledger = self._ledger
        gaps = self._gaps
        flight = self._flight
        steps = flight.steps
        decoding = leap.decoding
        first_s = end_s if steps == 1 else flight.first_s
        if decoding:
            gap_s = first_s - self._done_s
            between = flight.gaps(end_s) if steps > 1 else []
            longest_s = gap_s
            for _, _, last_s in between:
                if last_s > longest_s:
                    longest_s = last_s
            gaps.push(longest_s)
            if ledger.token_gaps is not None:
                ledger.token_gaps.add(decoding, gap_s, gap_s)
                for count, least_s, last_s in between:
                    ledger.token_gaps.add(decoding * count, least_s, last_s)
                if leap.accepted:
                    ledger.token_gaps.add(leap.accepted, 0.0, 0.0)
        if leap.joined:
            self._join(leap.joined, gaps.mark(alone=not decoding), first_s)
        self._done_s = end_s
        for row in leap.ended:
            self._close(row, end_s)
            ledger.outcomes[row.number].ok = True
            if self._tells:
                self.ends.append((end_s, row.number, leap.running))
        ledger.busy_s[self._index] += end_s - self._since_s
        ledger.completed_s[self._index] = end_s

    def _join(self, joined: list[PagedRow], mark: int, first_s: float) -> None:
        """Rows have computed their input and get a token at `first_s`."""
        ledger = self._ledger
        for row in joined:
            row.mark = mark
            outcome = ledger.outcomes[row.number]
            if self._tells and outcome.first_token_s < 0.0:
                self.first_tokens.append((first_s, row.number))
            outcome.go_on(first_s, ledger.token_gaps)

    def _close(self, row: PagedRow, last_s: float) -> None:
        """The row stops decoding; its last token came at `last_s`."""
        outcome = self._ledger.outcomes[row.number]
        outcome.last_token_s = last_s
        outcome.max_gap_s = max(outcome.max_gap_s, self._gaps.largest(row.mark))
        row.mark = 0
