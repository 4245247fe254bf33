"""Plans the rounds of `PreemptivePolicy`: which jobs run, and where the caches of the others are.

`toolkit.sched.policies.preemptive` says what the rounds are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from toolkit.sched.footprint import footprint_of
from toolkit.sched.inbox import RankedInbox
from toolkit.sched.policies.placement import (
    IN_HOST,
    NOWHERE,
    ON_DEVICE,
    RUNS,
    STARVES,
    Newcomers,
    Placement,
    Rank,
    RankedJob,
    after_transfers,
    beside_transfers,
    free_cache_tokens,
    mark_running,
    steps_until,
)
from toolkit.sched.types import Batch, Job, Worker
from toolkit.sched.view import RoundPlanner, View

if TYPE_CHECKING:
    from toolkit.sched.policies.preemptive import PreemptivePolicy


@mypyc_attr(allow_interpreted_subclasses=True)
class PreemptiveRounds(RoundPlanner):
    """The planner of a `PreemptivePolicy`.

    A subclass says with `horizon` when ranks change, with `next_runs` which caches can wait.
    """

    def __init__(self, view: View, policy: PreemptivePolicy) -> None:
        super().__init__(view, policy.chunk_tokens)
        self.max_batch_size: int = policy.max_batch_size
        self.interval_steps: int = policy.interval_steps
        self.max_prefill_tokens: int = policy.max_prefill_tokens
        self.proactive: bool = policy.swap == "proactive"
        self.free_share: float = policy.free_share
        self.patience_s: float = policy.patience_s
        # By worker: the rows of jobs with a cache, by rank as of the last decision, and by job.
        self._ranked: list[list[RankedJob]] = [[] for _ in view.workers]
        self._rows_of: list[dict[Job, RankedJob]] = [{} for _ in view.workers]

    def rank(self, worker: Worker, row: RankedJob, generated: int) -> float:
        """The standing of a row's job that has generated so many tokens: see `Ranks`.

        A subclass may say in the row how long it holds.
        """
        inbox = worker.inbox
        assert isinstance(inbox, RankedInbox)
        return inbox.standing(row.job, generated)

    def next_runs(
        self, worker: Worker, cached: Sequence[RankedJob], rows: Sequence[RankedJob], now_s: float
    ) -> dict[Job, tuple[float, Rank]]:
        """When each of `rows` will run next, in any unit, and its rank: the latest leave first.

        `cached` are all jobs of the worker with a cache, in order of rank; `rows` are some of them.
        """
        return {row.job: (0.0, row.rank) for row in rows}

    def horizon(self, worker: Worker, running: Sequence[RankedJob], steps: int) -> int:
        """The steps, at most `steps`, after which ranks change by what `running` do."""
        return steps

    def should_interrupt(self, worker: Worker, newcomers: int) -> bool:
        """Whether one of the last `newcomers` at the worker would run if its round stopped.

        Residents are ranked as of the round's start: a change of ranks ends a round by itself.
        """
        running = worker.running
        residents = worker.residents
        inbox = worker.inbox
        assert running is not None
        assert isinstance(inbox, RankedInbox)
        cache_room = free_cache_tokens(worker)
        last = list(islice(reversed(inbox.jobs), newcomers))
        if all(job.length >= cache_room for job in last):
            return False
        if running.steps > self.interval_steps and inbox.waiting > newcomers:
            return True  # no job could enter when it began, so it does not end when ranks change
        best_standing, best_ticket = min(
            [(inbox.standing(job, job.generated), job.ticket) for job in last]
        )
        for job in residents.jobs:  # whether the best of them ranks before a resident
            if job not in residents.prefilling:
                row = self._row_of(worker, job)
                ran = residents.steps - job.joined
                standing = self._own(worker, row, job.generated + ran)
                if best_standing < standing:
                    return True
                if best_standing == standing and best_ticket < job.ticket:
                    return True
        if len(residents) >= self._most(worker):
            return False
        return worker.footprint.fits(inbox[-1].length, worker.capacity_tokens)

    def _most(self, worker: Worker) -> int:
        return min(self.max_batch_size, worker.row_limit)

    def _spare(self, worker: Worker, rows: int) -> int:
        """Tokens left free for the growth of so many rows in an interval; few in a small memory."""
        return min(rows * self.interval_steps, worker.capacity_tokens // 16)

    def plan_round(self, worker: Worker, now_s: float) -> Batch:
        """The worker's next round."""
        if not (worker.held.jobs or worker.swapped.jobs or worker.residents.prefilling):
            steps = self._unchanged_round(worker, now_s)
            if steps:
                return self.make_round(worker, [], steps, [])
        cached = self._cached(worker, now_s)
        chosen = self._choose(worker, cached, now_s)
        mark_running(cached, chosen.run)
        others = [row for row in cached if not row.runs]
        if others:
            next_runs = self.next_runs(worker, cached, others, now_s)
            others.sort(key=lambda row: next_runs[row.job])
        proactive = self.proactive
        most = self._most(worker)
        spare = self._spare(worker, len(chosen.run))
        share = int(self.free_share * worker.capacity_tokens) if proactive else 0
        placed = None
        if proactive:
            placed = beside_transfers(worker, others, chosen, spare, share, most, self.patience_s)
        if placed is None:
            placed = after_transfers(worker, others, chosen, spare, share)
        mark_running(cached, placed.run)
        enter = [row for row in placed.run if row.location == NOWHERE]
        return self.make_round(
            worker,
            [row.job for row in enter],
            self._steps(worker, placed, cached, enter, now_s),
            [row.job for row in placed.evict],
            placed.moves([row.job for row in placed.run if row.waits_s >= self.patience_s]),
        )

    def _unchanged_round(self, worker: Worker, now_s: float) -> int:
        """Steps of a round in which residents continue and no job enters; 0: that is uncertain.

        A shortcut that ranks nothing. It applies if all residents fit, no other job has a cache,
        and no job waits that could get one.
        """
        footprint = worker.footprint
        capacity = worker.capacity_tokens
        inbox = worker.inbox
        rows = footprint.rows
        if not rows or rows > self._most(worker) or (rows > 1 and footprint.needs > capacity):
            return 0
        if inbox:
            assert isinstance(inbox, RankedInbox)
            place = capacity - footprint.taken + worker.host_tokens - self._spare(worker, 1)
            if inbox.shortest + 1 + worker.emits <= place:
                return 0
            return max(footprint.room(capacity), 1)
        return self.horizon(worker, self._cached(worker, now_s), max(footprint.room(capacity), 1))

    def _cached(self, worker: Worker, now_s: float) -> list[RankedJob]:
        """The jobs with a cache at a worker between two rounds, in order of rank.

        Rows are kept from one decision to the next: most keep their places.
        """
        here = worker.residents.jobs
        paused = worker.held.jobs
        away = worker.swapped.jobs
        known = self._rows_of[worker.index]
        ranked = self._ranked[worker.index]
        rows: list[RankedJob] = []
        self._ranked[worker.index] = rows
        for row in ranked:
            job = row.job
            if job in here:
                self._refresh_resident(worker, row)
            elif job in paused or job in away:
                self._refresh_parked(worker, row, ON_DEVICE if job in paused else IN_HOST, now_s)
            else:
                del known[job]
                continue
            rows.append(row)
        if len(rows) < len(here) + len(paused) + len(away):
            for job in here:
                if job not in known:
                    self._refresh_resident(worker, self._row_of(worker, job))
            for location, parked in ((ON_DEVICE, paused), (IN_HOST, away)):
                for job in parked:
                    if job not in known:
                        self._refresh_parked(worker, self._row_of(worker, job), location, now_s)
        before: RankedJob | None = None
        for k, row in enumerate(rows):
            if before is None or not row.goes_before(before):
                before = row
                continue
            at = k  # it moves before those that it goes before
            while at > 0 and row.goes_before(rows[at - 1]):
                rows[at] = rows[at - 1]
                at -= 1
            rows[at] = row
        return rows

    def _row_of(self, worker: Worker, job: Job) -> RankedJob:
        """The job's row, made if it has none."""
        known = self._rows_of[worker.index]
        row = known.get(job)
        if row is None:
            row = known[job] = RankedJob(job, ON_DEVICE)
            self._ranked[worker.index].append(row)
        return row

    def _refresh_resident(self, worker: Worker, row: RankedJob) -> None:
        job = row.job
        residents = worker.residents
        ran = residents.steps - job.joined
        tokens = job.length + ran
        row.location = ON_DEVICE
        row.ticket = job.ticket
        row.tokens = tokens
        row.generated = job.generated + ran
        row.needs = (residents.holds(job) if residents.prefilling else tokens) + 1
        row.waits_s = RUNS
        row.age_s = 0.0
        row.standing = self._own(worker, row, row.generated)

    def _refresh_parked(self, worker: Worker, row: RankedJob, location: int, now_s: float) -> None:
        job = row.job
        row.location = location
        waits_s = now_s - job.waiting_since_s
        row.ticket = job.ticket
        row.tokens = job.length
        row.generated = job.generated
        row.needs = job.length + 1
        row.waits_s = waits_s
        if waits_s >= self.patience_s:
            row.standing = STARVES
            row.age_s = -waits_s
        else:
            row.standing = self._own(worker, row, job.generated)
            row.age_s = 0.0

    def _own(self, worker: Worker, row: RankedJob, generated: int) -> float:
        """The standing of a row's job with so many generated tokens, if it does not starve."""
        if not row.keeps(generated, row.job.promoted_at):
            row.own = self.rank(worker, row, generated)
        return row.own

    def _choose(self, worker: Worker, cached: Sequence[RankedJob], now_s: float) -> Placement:
        """The jobs that should run: those that fit, by rank; lower ranks fill what room is left.

        A running job continues while one more step fits. A job that joins needs room for more
        steps, otherwise every step would move a cache. No cache is dropped to compute another: a
        newcomer needs room for the caches that it displaces. Half-made caches are not dropped
        either: jobs that are being prefilled continue before all others.
        """
        prefilling = worker.residents.prefilling
        capacity = worker.capacity_tokens
        most = self._most(worker)
        prefill = 0
        footprint = footprint_of(worker).emptied()
        cache_room: float = float(free_cache_tokens(worker)) if cached else math.inf
        newcomers = Newcomers(worker, now_s, self.patience_s)
        chosen = [row for row in cached if row.job in prefilling] if prefilling else []
        for prefilling_row in chosen:
            footprint.enter(prefilling_row.job)
            prefill += prefilling_row.tokens
        left = [row for row in cached if row.job not in prefilling] if prefilling else cached
        count = len(left)
        taken = 0
        row: RankedJob | None = left[0] if count else None
        closed = prefill >= self.max_prefill_tokens
        newcomer = None if closed else newcomers.next(math.inf, cache_room - self._spare(worker, 1))
        while len(chosen) < most and (row is not None or newcomer is not None):
            spare = self._spare(worker, len(chosen) + 1)
            if newcomer is not None and not (row is not None and row.goes_before(newcomer)):
                if not chosen or (
                    newcomer.needs + spare <= cache_room
                    and footprint.fits(newcomer.tokens, capacity - spare)
                ):
                    chosen.append(newcomer)
                    footprint.enter(newcomer.job)
                    cache_room -= newcomer.needs
                    prefill += newcomer.tokens
                more = self._spare(worker, len(chosen) + 1)
                newcomer = None
                if prefill < self.max_prefill_tokens:
                    free = footprint.widest(capacity - more)
                    newcomer = newcomers.next(free, cache_room - more)
            elif row is not None:
                limit = capacity - (0 if row.waits_s == RUNS else spare)
                if not chosen or footprint.fits(row.tokens, limit, enters=False):
                    chosen.append(row)
                    footprint.join(row.tokens)
                taken += 1
                row = left[taken] if taken < count else None
        more = self._spare(worker, len(chosen) + 1)
        return Placement(chosen, footprint, not newcomers.possible(cache_room - more))

    def _steps(
        self,
        worker: Worker,
        placed: Placement,
        cached: Sequence[RankedJob],
        enter: Sequence[RankedJob],
        now_s: float,
    ) -> int:
        """Steps until a new decision is needed, by the worker's laws."""
        law = worker.latency
        run = placed.run
        n = len(placed.run)
        emits = worker.emits
        steps = max(placed.room(worker), 1)
        idle = [row for row in cached if not row.runs]
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
        inputs = [row.tokens for row in enter]
        if worker.residents.prefilling:
            prefilling = worker.residents.prefilling
            inputs += [row.tokens for row in run if row.job in prefilling]
        if inputs:
            size = max(inputs) if law.padded else sum(inputs) / len(inputs)
            begins_s = law.prefill_s(len(inputs), size)
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
        patience_s = self.patience_s
        inbox = worker.inbox
        if patience_s == math.inf:
            return math.inf
        assert isinstance(inbox, RankedInbox)
        waits_s = [max(row.waits_s, 0.0) for row in idle if row.waits_s < patience_s]
        longest_s = inbox.next_wait_s(now_s, patience_s, {row.job for row in enter})
        if longest_s >= 0.0:
            waits_s.append(longest_s)
        return patience_s - max(waits_s) if waits_s else math.inf
