"""What preemptive policies share: who ranks highest runs, the others keep their caches, on the device or the host.

At every scheduling point all jobs of a worker are ranked, and the best run, as many as rows and memory allow. Who has
to make way is paused and keeps its cache on the device while there is room, else in host memory, else not at all and is
prefilled again. Caches move in one of two ways:

- reactive: those that memory has no room for are swapped out, and the round waits for its transfers;
- proactive (FastServe's key-value cache management): a share of the device is kept free for newcomers, caches that
  will be needed last leave first, those needed soonest come back before they are, and all of that beside a round's
  compute. A round waits for its transfers only where it would have nothing to compute, or where one that starved would
  wait longer.

A round ends when one ends, when a policy's `horizon` says that ranks change, when memory is full, when the caches come
that those who rank higher wait for, every `interval_steps` while anybody waits, and when one arrives who would run.
Where nobody could enter whatever the ranks, and nobody is paused or swapped out, it goes on until one ends.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import ClassVar

from toolkit.sched.footprint import footprint, look
from toolkit.sched.policies.parameters import choice, chunk_knob, knob, validate
from toolkit.sched.policies.placement import (
    RUNS,
    STARVES,
    Chosen,
    Newcomers,
    Place,
    Placement,
    Rank,
    Row,
    after_transfers,
    beside_transfers,
    free_places,
    steps_until,
)
from toolkit.sched.policies.routers import ROUTERS
from toolkit.sched.protocols import LatencyLaw, Standing
from toolkit.sched.ranked import RankedInbox
from toolkit.sched.types import Batch, Job, Worker
from toolkit.sched.view import Decision, View


@dataclass(frozen=True, slots=True)
class PreemptivePolicy(ABC):
    """Base of the preemptive policies: subclasses say who goes first (`order`), and until when (`horizon`)."""

    name: ClassVar[str]
    continuous: ClassVar[bool] = True

    max_batch_size: int = knob(32, low=1, search=(1, 256), log=True, doc="the most rows that run at once on a worker")
    interval_steps: int = knob(
        64, low=1, high=10_000, search=(8, 256), log=True, doc="decode steps between scheduling points, at the most"
    )
    max_prefill_tokens: int = knob(
        32_768, low=1, search=(512, 65_536), log=True, doc="a round prefills until it has so many prompt tokens"
    )
    swap: str = choice("proactive", ("proactive", "reactive"), doc="when caches are swapped: proactive, reactive")
    free_share: float = knob(
        0.1, low=0, high=0.9, search=(0.0, 0.5), doc="proactive: share of the device's memory kept free for newcomers"
    )
    router: str = choice("round-robin", ROUTERS, doc="how requests are dealt to workers: " + ", ".join(ROUTERS))
    chunk_tokens: int = chunk_knob()

    def __post_init__(self) -> None:
        validate(self)

    @property
    def patience_s(self) -> float:
        """Who has waited for so many seconds goes first, and is promoted when he runs."""
        return math.inf

    @abstractmethod
    def standings(self, law: LatencyLaw) -> Standing:
        """See `Ranks`; of two who do not starve, the lesser goes first."""

    def next_runs(
        self, worker: Worker, cached: Sequence[Row], rows: Sequence[Row], now_s: float
    ) -> dict[Job, tuple[float, Rank]]:
        """When each of `rows` will run next, in any unit, and its rank: caches of the latest leave first.

        `cached` are all of the worker's who have a cache, ranked, and `rows` some of them.
        """
        return {row.job: (0.0, row.rank) for row in rows}

    def horizon(self, worker: Worker, running: Sequence[Row], steps: int) -> int:
        """Steps after which ranks change by what `running` do, at most `steps`."""
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

        Residents are ranked as they were when it began: a change of ranks ends a round by itself.
        """
        running, residents, inbox = worker.running, worker.residents, worker.inbox
        if running is None or running.interrupted or not inbox:
            return False
        assert isinstance(inbox, RankedInbox)
        place = free_places(worker)
        if not any(job.length < place for job in islice(reversed(inbox), newcomers)):
            return False
        if running.steps > self.interval_steps and inbox.waiting > newcomers:
            return True  # nobody could enter when it began, so it does not end where ranks change
        since, standing = residents.steps, inbox.standing
        came = [(standing(job, job.generated), job.ticket) for job in islice(reversed(inbox), newcomers)]
        ranks = [
            (standing(job, job.generated + since - job.joined), job.ticket)
            for job in residents.jobs
            if job not in residents.prefilling
        ]
        if ranks and min(came) < max(ranks):
            return True
        if len(residents) >= self._most(worker):
            return False
        return footprint(worker).fits(inbox[-1].length, worker.capacity_tokens)

    def _most(self, worker: Worker) -> int:
        return min(self.max_batch_size, worker.row_limit)

    def _spare(self, worker: Worker, rows: int) -> int:
        """Tokens that are left free for so many rows to grow into: an interval's, but little of a small memory."""
        return min(rows * self.interval_steps, worker.capacity_tokens // 16)

    def _round(self, worker: Worker, now_s: float) -> Batch:
        if not (worker.held.jobs or worker.swapped.jobs or worker.residents.prefilling):
            steps = self._as_before(worker, now_s)
            if steps:
                chunk = worker.chunk_of(self.chunk_tokens)
                return Batch(worker.index, (), steps, 0, 0.0, "any", keep_cache=True, chunk_tokens=chunk)
        cached = self._cached(worker, now_s)
        chosen = self._choose(worker, cached, now_s)
        running = {row.job for row in chosen.rows}
        others = [row for row in cached if row.job not in running]
        if others:
            enst = self.next_runs(worker, cached, others, now_s)
            others.sort(key=lambda row: enst[row.job])
        proactive, most, spare = self.swap == "proactive", self._most(worker), self._spare(worker, len(chosen.rows))
        share = int(self.free_share * worker.capacity_tokens) if proactive else 0
        placed = None
        if proactive:
            placed = beside_transfers(worker, others, chosen, spare, share, most, self.patience_s)
        if placed is None:
            placed = after_transfers(worker, others, chosen, spare, share)
        placed.closed = chosen.closed
        return self._batch(worker, placed, cached, now_s)

    def _as_before(self, worker: Worker, now_s: float) -> int:
        """Steps of a round in which all residents go on, and nothing enters; 0: that has to be worked out.

        What the rest of this class would come to, without ranking anything: all residents fit, no
        other job has a cache, and none waits, or none that could have one.
        """
        there, capacity, inbox = look(worker), worker.capacity_tokens, worker.inbox
        rows = there.rows
        if not rows or rows > self._most(worker) or (rows > 1 and there.needs > capacity):
            return 0
        if inbox:
            assert isinstance(inbox, RankedInbox)
            place = capacity - there.taken + worker.host_tokens - self._spare(worker, 1)
            if inbox.shortest + 1 + worker.emits <= place:
                return 0
            return max(there.room(capacity), 1)
        return self.horizon_of_residents(worker, max(there.room(capacity), 1), now_s)

    def horizon_of_residents(self, worker: Worker, steps: int, now_s: float) -> int:
        """`horizon` where all residents of a worker run, and nothing else."""
        return self.horizon(worker, self._cached(worker, now_s), steps)

    def _cached(self, worker: Worker, now_s: float) -> list[Row]:
        """The jobs of a worker between two rounds that have a cache, ranked."""
        assert isinstance(worker.inbox, RankedInbox)
        since, standing, patience_s = worker.residents.steps, worker.inbox.standing, self.patience_s
        rows, prefilling = [], worker.residents.prefilling
        for job in worker.residents.jobs:
            ran = since - job.joined
            tokens, generated = job.length + ran, job.generated + ran
            rank = (standing(job, generated), 0.0, job.ticket)
            needs = (worker.residents.holds(job) if prefilling else tokens) + 1
            rows.append(Row(job, Place.DEVICE, tokens, generated, needs, RUNS, rank))
        for place, shelf in ((Place.DEVICE, worker.held), (Place.HOST, worker.swapped)):
            for job in shelf.jobs:
                waits_s = now_s - job.waiting_since_s
                starves = waits_s >= patience_s
                rank = (STARVES, -waits_s, job.ticket) if starves else (standing(job, job.generated), 0.0, job.ticket)
                rows.append(Row(job, place, job.length, job.generated, job.length + 1, waits_s, rank))
        rows.sort(key=attrgetter("rank"))
        return rows

    def _choose(self, worker: Worker, cached: Sequence[Row], now_s: float) -> Chosen:
        """Those who should run: by rank, who fits; what ranks lower fills the room that the higher ones leave.

        Who runs already goes on while one more step fits; who joins needs room for more, or each step would move one.
        No cache is dropped so that another may be computed: who enters needs a place for what he displaces. Nor is a
        half-made one: who is being prefilled goes on before all others.
        """
        prefilling = worker.residents.prefilling
        capacity, most, prefill = worker.capacity_tokens, self._most(worker), 0
        there = footprint(worker).emptied()
        place: float = free_places(worker) if cached else math.inf
        newcomers = Newcomers(worker, now_s, self.patience_s)
        chosen = [row for row in cached if row.job in prefilling] if prefilling else []
        for one in chosen:
            there.enter(one.job)
            prefill += one.tokens
        ahead = iter([row for row in cached if row.job not in prefilling] if prefilling else cached)
        row = next(ahead, None)
        closed = prefill >= self.max_prefill_tokens
        came = None if closed else newcomers.next(math.inf, place - self._spare(worker, 1))
        while len(chosen) < most and (row or came):
            spare = self._spare(worker, len(chosen) + 1)
            if came and not (row and row.rank < came.rank):
                if not chosen or (came.needs + spare <= place and there.fits(came.tokens, capacity - spare)):
                    chosen.append(came)
                    there.enter(came.job)
                    place -= came.needs
                    prefill += came.tokens
                more = self._spare(worker, len(chosen) + 1)
                goes_on = prefill < self.max_prefill_tokens
                came = newcomers.next(there.widest(capacity - more), place - more) if goes_on else None
            elif row:
                limit = capacity - (0 if row.waits_s == RUNS else spare)
                if not chosen or there.fits(row.tokens, limit, enters=False):
                    chosen.append(row)
                    there.join(row.tokens)
                row = next(ahead, None)
        return Chosen(chosen, there, not newcomers.possible(place - self._spare(worker, len(chosen) + 1)))

    def _batch(self, worker: Worker, placed: Placement, cached: Sequence[Row], now_s: float) -> Batch:
        enter = [row for row in placed.run if row.place is Place.INBOX]
        moves = placed.moves(worker, [row.job for row in placed.run if row.waits_s >= self.patience_s])
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
        self, worker: Worker, placed: Placement, cached: Sequence[Row], enter: Sequence[Row], now_s: float
    ) -> int:
        """Steps until something calls for a new decision, by the worker's laws."""
        law, run, n = worker.latency, placed.run, len(placed.run)
        emits = int(law.prefill_emits_token)
        steps = max(placed.room(worker), 1)
        idle = placed.idle(cached)
        if placed.closed and not idle and len(worker.inbox) > len(enter):
            return steps  # whatever the ranks, nobody's turn comes before one ends
        if idle or len(worker.inbox) > len(enter):
            steps = min(steps, self.interval_steps)
        steps = self.horizon(worker, run, steps)
        starving_s = self._starving_in_s(worker, idle, enter, now_s)
        if starving_s == math.inf and not placed.awaited:
            return steps
        lengths = [row.needs - 1 - emits for row in run]
        length = max(lengths) if law.padded else sum(lengths) / n
        begins_s = 0.0
        inputs = [row.tokens for row in run if row.place is Place.INBOX or row.job in worker.residents.prefilling]
        if inputs:
            begins_s = law.prefill_s(len(inputs), max(inputs) if law.padded else sum(inputs) / len(inputs))
        transfers_s = placed.transfers_s(worker)
        if not placed.overlap:
            begins_s += transfers_s
        elif placed.awaited and transfers_s:
            steps = steps_until(law, n, length, transfers_s - begins_s, steps)
        return steps_until(law, n, length, starving_s - begins_s, steps)

    def _starving_in_s(self, worker: Worker, idle: Sequence[Row], enter: Sequence[Row], now_s: float) -> float:
        """Seconds until the next of those who wait starves; infinity: none will."""
        patience_s, inbox = self.patience_s, worker.inbox
        if patience_s == math.inf:
            return math.inf
        assert isinstance(inbox, RankedInbox)
        waits_s = [max(row.waits_s, 0.0) for row in idle if row.waits_s < patience_s]
        longest_s = inbox.next_wait_s(now_s, patience_s, {row.job for row in enter})
        if longest_s >= 0.0:
            waits_s.append(longest_s)
        return patience_s - max(waits_s) if waits_s else math.inf
