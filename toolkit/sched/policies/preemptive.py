"""The base of preemptive policies: the jobs that rank highest run, the others keep their caches.

At every scheduling point all jobs of a worker are ranked, and as many of the highest run as rows
and memory allow. A job that makes way is paused and keeps its cache on the device if there is room,
else in host memory; without room in either, its cache is dropped and computed again later. Caches
move in one of two ways:

- reactive: caches that memory has no room for are swapped out, and the round waits for its
  transfers;
- proactive (FastServe's key-value cache management): a share of the device is kept free for
  newcomers, caches that are needed last leave first, caches that are needed soonest come back
  before they are needed, and transfers run beside a round's compute. A round waits for its
  transfers only if it has nothing to compute, or if a starving job would wait longer.

A round ends when a row ends, when ranks change (the policy's `horizon`), when memory is full, when
the caches arrive that higher-ranked jobs wait for, every `interval_steps` while any job waits, and
when a job arrives that would run. If no waiting job could enter whatever its rank, and none is
paused or swapped out, the round continues until a row ends.

`toolkit.sched.policies.placement` has the ranked jobs, the newcomers and where caches go.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import ClassVar

from toolkit.sched.footprint import footprint_of
from toolkit.sched.inbox import RankedInbox
from toolkit.sched.policies.parameters import choice, chunk_knob, knob, validate
from toolkit.sched.policies.placement import (
    RUNS,
    STARVES,
    CacheLocation,
    Chosen,
    Newcomers,
    Placement,
    Rank,
    RankedJob,
    after_transfers,
    beside_transfers,
    free_cache_tokens,
    steps_until,
)
from toolkit.sched.policies.routers import ROUTERS
from toolkit.sched.protocols import LatencyLaw, Standing
from toolkit.sched.types import Batch, Job, Worker
from toolkit.sched.view import Decision, View


@dataclass(frozen=True, slots=True)
class PreemptivePolicy(ABC):
    """Base of the preemptive policies: subclasses rank jobs and say when ranks change."""

    name: ClassVar[str]
    continuous: ClassVar[bool] = True

    max_batch_size: int = knob(
        32, low=1, search=(1, 256), log=True, doc="the most rows that run at once on a worker"
    )
    interval_steps: int = knob(
        64,
        low=1,
        high=10_000,
        search=(8, 256),
        log=True,
        doc="decode steps between scheduling points, at the most",
    )
    max_prefill_tokens: int = knob(
        32_768,
        low=1,
        search=(512, 65_536),
        log=True,
        doc="a round prefills until it has so many prompt tokens",
    )
    swap: str = choice(
        "proactive", ("proactive", "reactive"), doc="when caches are swapped: proactive, reactive"
    )
    free_share: float = knob(
        0.1,
        low=0,
        high=0.9,
        search=(0.0, 0.5),
        doc="proactive: share of the device's memory kept free for newcomers",
    )
    router: str = choice(
        "round-robin", ROUTERS, doc="how requests are assigned to workers: " + ", ".join(ROUTERS)
    )
    chunk_tokens: int = chunk_knob()

    def __post_init__(self) -> None:
        validate(self)

    @property
    def patience_s(self) -> float:
        """A job that has waited for so many seconds goes first, and is promoted when it runs."""
        return math.inf

    @abstractmethod
    def standings(self, law: LatencyLaw) -> Standing:
        """See `Ranks`. Of two jobs that do not starve, the one with the lesser standing goes
        first.
        """

    def next_runs(
        self, worker: Worker, cached: Sequence[RankedJob], rows: Sequence[RankedJob], now_s: float
    ) -> dict[Job, tuple[float, Rank]]:
        """When each of `rows` will run next, in any unit, and its rank: the latest caches leave
        first.

        `cached` are all jobs of the worker with a cache, in order of rank; `rows` are some of them.
        """
        return {row.job: (0.0, row.rank) for row in rows}

    def horizon(self, worker: Worker, running: Sequence[RankedJob], steps: int) -> int:
        """The steps, at most `steps`, after which ranks change by what `running` do."""
        return steps

    def route(self, view: View, now_s: float) -> Sequence[int] | None:
        return ROUTERS[self.router](view, self.max_batch_size) if view.alive() else None

    def plan(self, view: View, now_s: float) -> Decision:
        batches = [
            self._round(worker, now_s)
            for worker in view.due
            if worker.inbox or worker.residents.jobs or worker.held.jobs or worker.swapped.jobs
        ]
        interrupts = [
            index
            for index in dict.fromkeys(view.arrived)
            if self._preempts(view.workers[index], view.arrived.count(index))
        ]
        return Decision(batches, interrupt=interrupts)

    def _preempts(self, worker: Worker, newcomers: int) -> bool:
        """Whether one of the last `newcomers` at the worker would run if its round stopped.

        Residents are ranked as of the round's start: a change of ranks ends a round by itself.
        """
        running, residents, inbox = worker.running, worker.residents, worker.inbox
        if running is None or running.interrupted or not inbox:
            return False
        assert isinstance(inbox, RankedInbox)
        cache_room = free_cache_tokens(worker)
        if not any(job.length < cache_room for job in islice(reversed(inbox.jobs), newcomers)):
            return False
        if running.steps > self.interval_steps and inbox.waiting > newcomers:
            return True  # no job could enter when it began, so it does not end when ranks change
        since, standing = residents.steps, inbox.standing
        new_ranks = [
            (standing(job, job.generated), job.ticket)
            for job in islice(reversed(inbox.jobs), newcomers)
        ]
        ranks = [
            (standing(job, job.generated + since - job.joined), job.ticket)
            for job in residents.jobs
            if job not in residents.prefilling
        ]
        if ranks and min(new_ranks) < max(ranks):
            return True
        if len(residents) >= self._most(worker):
            return False
        return worker.footprint.reset().fits(inbox[-1].length, worker.capacity_tokens)

    def _most(self, worker: Worker) -> int:
        return min(self.max_batch_size, worker.row_limit)

    def _spare(self, worker: Worker, rows: int) -> int:
        """Tokens left free for the growth of so many rows in an interval, bounded for a small
        memory.
        """
        return min(rows * self.interval_steps, worker.capacity_tokens // 16)

    def _round(self, worker: Worker, now_s: float) -> Batch:
        if not (worker.held.jobs or worker.swapped.jobs or worker.residents.prefilling):
            steps = self._unchanged_round(worker, now_s)
            if steps:
                chunk = worker.chunk_of(self.chunk_tokens)
                return Batch(
                    worker.index, (), steps, 0, 0.0, "any", keep_cache=True, chunk_tokens=chunk
                )
        cached = self._cached(worker, now_s)
        chosen = self._choose(worker, cached, now_s)
        running = {row.job for row in chosen.rows}
        others = [row for row in cached if row.job not in running]
        if others:
            next_runs = self.next_runs(worker, cached, others, now_s)
            others.sort(key=lambda row: next_runs[row.job])
        proactive, most, spare = (
            self.swap == "proactive",
            self._most(worker),
            self._spare(worker, len(chosen.rows)),
        )
        share = int(self.free_share * worker.capacity_tokens) if proactive else 0
        placed = None
        if proactive:
            placed = beside_transfers(worker, others, chosen, spare, share, most, self.patience_s)
        if placed is None:
            placed = after_transfers(worker, others, chosen, spare, share)
        placed.closed = chosen.closed
        return self._batch(worker, placed, cached, now_s)

    def _unchanged_round(self, worker: Worker, now_s: float) -> int:
        """Steps of a round in which all residents continue and no job enters; 0 if that is not
        certain.

        A shortcut that ranks nothing. It applies if all residents fit, no other job has a cache,
        and no job waits that could get one.
        """
        footprint, capacity, inbox = worker.footprint.reset(), worker.capacity_tokens, worker.inbox
        rows = footprint.rows
        if not rows or rows > self._most(worker) or (rows > 1 and footprint.needs > capacity):
            return 0
        if inbox:
            assert isinstance(inbox, RankedInbox)
            place = capacity - footprint.taken + worker.host_tokens - self._spare(worker, 1)
            if inbox.shortest + 1 + worker.emits <= place:
                return 0
            return max(footprint.room(capacity), 1)
        return self.horizon_of_residents(worker, max(footprint.room(capacity), 1), now_s)

    def horizon_of_residents(self, worker: Worker, steps: int, now_s: float) -> int:
        """`horizon` if exactly the worker's residents run."""
        return self.horizon(worker, self._cached(worker, now_s), steps)

    def _cached(self, worker: Worker, now_s: float) -> list[RankedJob]:
        """The jobs with a cache at a worker between two rounds, in order of rank."""
        assert isinstance(worker.inbox, RankedInbox)
        since, standing, patience_s = worker.residents.steps, worker.inbox.standing, self.patience_s
        rows, prefilling = [], worker.residents.prefilling
        for job in worker.residents.jobs:
            ran = since - job.joined
            tokens, generated = job.length + ran, job.generated + ran
            rank = (standing(job, generated), 0.0, job.ticket)
            needs = (worker.residents.holds(job) if prefilling else tokens) + 1
            rows.append(RankedJob(job, CacheLocation.DEVICE, tokens, generated, needs, RUNS, rank))
        for location, parked in (
            (CacheLocation.DEVICE, worker.held),
            (CacheLocation.HOST, worker.swapped),
        ):
            for job in parked.jobs:
                waits_s = now_s - job.waiting_since_s
                starves = waits_s >= patience_s
                rank = (
                    (STARVES, -waits_s, job.ticket)
                    if starves
                    else (standing(job, job.generated), 0.0, job.ticket)
                )
                rows.append(
                    RankedJob(
                        job, location, job.length, job.generated, job.length + 1, waits_s, rank
                    )
                )
        rows.sort(key=attrgetter("rank"))
        return rows

    def _choose(self, worker: Worker, cached: Sequence[RankedJob], now_s: float) -> Chosen:
        """The jobs that should run: those that fit, by rank; lower ranks fill the room that is
        left.

        A running job continues while one more step fits. A job that joins needs room for more
        steps, otherwise every step would move a cache. No cache is dropped to compute another: a
        newcomer needs room for the caches that it displaces. Half-made caches are not dropped
        either: jobs that are being prefilled continue before all others.
        """
        prefilling = worker.residents.prefilling
        capacity, most, prefill = worker.capacity_tokens, self._most(worker), 0
        footprint = footprint_of(worker).emptied()
        cache_room: float = free_cache_tokens(worker) if cached else math.inf
        newcomers = Newcomers(worker, now_s, self.patience_s)
        chosen = [row for row in cached if row.job in prefilling] if prefilling else []
        for prefilling_row in chosen:
            footprint.enter(prefilling_row.job)
            prefill += prefilling_row.tokens
        rows_left = iter(
            [row for row in cached if row.job not in prefilling] if prefilling else cached
        )
        row = next(rows_left, None)
        closed = prefill >= self.max_prefill_tokens
        newcomer = None if closed else newcomers.next(math.inf, cache_room - self._spare(worker, 1))
        while len(chosen) < most and (row or newcomer):
            spare = self._spare(worker, len(chosen) + 1)
            if newcomer and not (row and row.rank < newcomer.rank):
                if not chosen or (
                    newcomer.needs + spare <= cache_room
                    and footprint.fits(newcomer.tokens, capacity - spare)
                ):
                    chosen.append(newcomer)
                    footprint.enter(newcomer.job)
                    cache_room -= newcomer.needs
                    prefill += newcomer.tokens
                more = self._spare(worker, len(chosen) + 1)
                goes_on = prefill < self.max_prefill_tokens
                newcomer = (
                    newcomers.next(footprint.widest(capacity - more), cache_room - more)
                    if goes_on
                    else None
                )
            elif row:
                limit = capacity - (0 if row.waits_s == RUNS else spare)
                if not chosen or footprint.fits(row.tokens, limit, enters=False):
                    chosen.append(row)
                    footprint.join(row.tokens)
                row = next(rows_left, None)
        return Chosen(
            chosen,
            footprint,
            not newcomers.possible(cache_room - self._spare(worker, len(chosen) + 1)),
        )

    def _batch(
        self, worker: Worker, placed: Placement, cached: Sequence[RankedJob], now_s: float
    ) -> Batch:
        enter = [row for row in placed.run if row.location is CacheLocation.INBOX]
        moves = placed.moves(
            worker, [row.job for row in placed.run if row.waits_s >= self.patience_s]
        )
        return Batch(
            worker.index,
            tuple([row.job for row in enter]),
            self._steps(worker, placed, cached, enter, now_s),
            max([row.tokens for row in enter], default=0),
            0.0,
            "any",
            keep_cache=True,
            evict=tuple([row.job for row in placed.evict]),
            moves=moves,
            chunk_tokens=worker.chunk_of(self.chunk_tokens),
        )

    def _steps(
        self,
        worker: Worker,
        placed: Placement,
        cached: Sequence[RankedJob],
        enter: Sequence[RankedJob],
        now_s: float,
    ) -> int:
        """Steps until a new decision is needed, by the worker's laws."""
        law, run, n = worker.latency, placed.run, len(placed.run)
        emits = int(law.prefill_emits_token)
        steps = max(placed.room(worker), 1)
        idle = placed.idle(cached)
        if placed.closed and not idle and len(worker.inbox) > len(enter):
            return steps  # no job can enter before a row ends, whatever the ranks
        if idle or len(worker.inbox) > len(enter):
            steps = min(steps, self.interval_steps)
        steps = self.horizon(worker, run, steps)
        starving_s = self._starving_in_s(worker, idle, enter, now_s)
        if starving_s == math.inf and not placed.awaited:
            return steps
        lengths = [row.needs - 1 - emits for row in run]
        length = max(lengths) if law.padded else sum(lengths) / n
        begins_s = 0.0
        inputs = [
            row.tokens
            for row in run
            if row.location is CacheLocation.INBOX or row.job in worker.residents.prefilling
        ]
        if inputs:
            begins_s = law.prefill_s(
                len(inputs), max(inputs) if law.padded else sum(inputs) / len(inputs)
            )
        transfers_s = placed.transfers_s(worker)
        if not placed.overlap:
            begins_s += transfers_s
        elif placed.awaited and transfers_s:
            steps = steps_until(law, n, length, transfers_s - begins_s, steps)
        return steps_until(law, n, length, starving_s - begins_s, steps)

    def _starving_in_s(
        self, worker: Worker, idle: Sequence[RankedJob], enter: Sequence[RankedJob], now_s: float
    ) -> float:
        """Seconds until the next waiting job starves; infinity if none will."""
        patience_s, inbox = self.patience_s, worker.inbox
        if patience_s == math.inf:
            return math.inf
        assert isinstance(inbox, RankedInbox)
        waits_s = [max(row.waits_s, 0.0) for row in idle if row.waits_s < patience_s]
        longest_s = inbox.next_wait_s(now_s, patience_s, {row.job for row in enter})
        if longest_s >= 0.0:
            waits_s.append(longest_s)
        return patience_s - max(waits_s) if waits_s else math.inf
