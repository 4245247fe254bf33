"""Preemptive policies: the jobs that rank highest run, the others keep their caches.

At every scheduling point all jobs of a worker are ranked, and as many of the highest run as rows
and memory allow. A job that makes way is paused and keeps its cache on the device if there is room,
else in host memory; without room in either, its cache is dropped and computed again later. Caches
move in one of two ways:

- reactive: caches that memory has no room for are swapped out, and the pass waits for its
  transfers;
- proactive (FastServe's key-value cache management): a share of the device is kept free for
  newcomers, caches that are needed last leave first, caches that are needed soonest come back
  before they are needed, and transfers run beside a pass's compute. A pass waits for its
  transfers only if it has nothing to compute, or if a starving job would wait longer.

A pass ends when a row ends, when ranks change (`Ranking.changes_at`), when memory is full, when
the caches arrive that higher-ranked jobs wait for, every `interval_steps` while any job waits, and
when a job arrives that would run. If no waiting job could enter whatever its rank, and none is
paused or swapped out, the pass continues until a row ends. Most passes change nothing: the running
jobs go on. These are found without ranks (`_unchanged`).

`PreemptivePolicy` is the base: a subclass ranks jobs, as `mlfq` and `srpt` do.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice
from operator import attrgetter

from toolkit.sched.memory import Footprint, footprint_of, free_cache_tokens, no_rows
from toolkit.sched.policies.base import (
    Policy,
    chunk_parameter,
    prefill_parameter,
    router_choice,
    rows_parameter,
)
from toolkit.sched.policies.parameters import choice, parameter, policy
from toolkit.sched.queues import transfers_s
from toolkit.sched.types import Job, LatencyLaw, Moves, Pass, Worker
from toolkit.sched.view import View
from toolkit.sched.waiting import RankedJobs, Ranking

# (rank of the policy, negative waiting time or 0, ticket): the least is served first.
Rank = tuple[float, float, int]
STARVES = -math.inf  # the rank of a starving job
RUNS = -1.0  # `RankedRow.waits_s` of a running job

# Where a job's cache is.
ON_DEVICE = 0
IN_HOST = 1
NOWHERE = 2  # it waits without one


class RankedRow:
    """A job at a scheduling point, with up-to-date counters.

    Attributes:
        location: where its cache is.
        tokens: prompt + generated: the size of its cache, or of its prefill.
        generated: its generated tokens.
        needs: device tokens to run one step, including the token of its prefill.
        waits_s: seconds since it last ran; RUNS if it runs.
        rank: its place in the order in which jobs are served.
    """

    __slots__ = ("generated", "job", "location", "needs", "rank", "tokens", "waits_s")

    def __init__(
        self,
        job: Job,
        location: int,
        tokens: int,
        generated: int,
        needs: int,
        waits_s: float,
        rank: Rank,
    ) -> None:
        self.job = job
        self.location = location
        self.tokens = tokens
        self.generated = generated
        self.needs = needs
        self.waits_s = waits_s
        self.rank = rank


_rank = attrgetter("rank")


class Newcomers:
    """The waiting jobs without a cache, by rank. Jobs that no longer fit are skipped for good."""

    def __init__(self, worker: Worker, now_s: float, patience_s: float) -> None:
        self._waiting = ranked(worker)
        self._now_s = now_s
        self._grows = 1 + worker.emits
        self._starving = self._waiting.starving(now_s, patience_s)
        self._others = self._waiting.others(now_s, patience_s)
        self._open = True

    def next(self, free: float, cache_room: float) -> RankedRow | None:
        """The next job that needs at most `free` device tokens, and `cache_room` for its cache.

        Later calls must not pass more of either. If a starving job does not fit `cache_room`, no
        other job may enter before it.
        """
        waiting = self._waiting
        if not self.possible(cache_room) or waiting.shortest + self._grows > free:
            return None
        for since_s, _, _, job in self._starving:
            needs = job.length + self._grows
            if needs > cache_room:
                self._open = False
                return None
            if needs <= free:
                waits_s = self._now_s - since_s
                return self._row(job, waits_s, (STARVES, -waits_s, job.ticket))
        room = min(free, cache_room)
        for rank, _, job in self._others:
            if job.length + self._grows <= room:
                return self._row(job, self._now_s - job.waiting_since_s, (rank, 0.0, job.ticket))
        return None

    def possible(self, cache_room: float) -> bool:
        """Whether the cache of a waiting job might fit `cache_room` tokens, as far as is known."""
        return (
            self._open
            and bool(self._waiting.jobs)
            and self._waiting.shortest + self._grows <= cache_room
        )

    def _row(self, job: Job, waits_s: float, rank: Rank) -> RankedRow:
        needs = job.length + self._grows
        return RankedRow(job, NOWHERE, job.length, job.generated, needs, waits_s, rank)


def ranked(worker: Worker) -> RankedJobs:
    """The waiting jobs of a worker, in order of their rank."""
    assert isinstance(worker.waiting, RankedJobs)
    return worker.waiting


class Placement:
    """What a pass does with every cache; at first, the jobs that should run.

    Attributes:
        run: the jobs that run; `footprint` is their memory.
        closed: no other waiting job without a cache could get one.
        kept: the jobs that do not run and keep their caches on the device.
        fetched: the jobs that do not run and may get their caches back.
        swap_out, swap_in, evict: the jobs with caches that leave, come back, or are dropped.
        overlap: whether transfers run beside the pass's compute.
        awaited: jobs that should run are in transfer, or wait for the room that transfers make.
    """

    def __init__(self, run: list[RankedRow], footprint: Footprint, closed: bool) -> None:
        self.run = run
        self.footprint = footprint
        self.closed = closed
        self.kept: list[RankedRow] = []
        self.fetched: list[RankedRow] = []
        self.swap_out: list[RankedRow] = []
        self.swap_in: list[RankedRow] = []
        self.evict: list[RankedRow] = []
        self.overlap = False
        self.awaited = False

    def moves(self, promote: Sequence[Job]) -> Moves | None:
        """The placement as `Moves`; None if nothing changes."""
        pause = tuple([row.job for row in self.kept if row.waits_s == RUNS])
        resume = tuple(
            [row.job for row in self.run if row.location != NOWHERE and row.waits_s != RUNS]
        )
        swap_out = tuple([row.job for row in self.swap_out])
        swap_in = tuple([row.job for row in self.swap_in])
        if not (pause or resume or swap_out or swap_in or promote):
            return None
        overlap = self.overlap and bool(swap_out or swap_in)
        return Moves(pause, resume, swap_out, swap_in, tuple(promote), overlap)

    def room(self, worker: Worker) -> int:
        """Decode steps until rows and caches exceed the device's capacity."""
        aside = sum([row.tokens for row in self.kept])
        if self.overlap:
            aside += sum([row.tokens for row in self.swap_out])
            aside += sum([row.tokens for row in self.swap_in])
        return self.footprint.room(worker.capacity_tokens - aside)

    def transfers_s(self, worker: Worker) -> float:
        """Seconds of the pass's transfers, by the worker's law."""
        law = worker.swap
        if law is None:
            return 0.0
        out = [row.tokens for row in self.swap_out]
        return transfers_s(law, out, [row.tokens for row in self.swap_in])


@policy()
class PreemptivePolicy(Policy):
    """Base of the preemptive policies: subclasses rank jobs with `ranking`.

    They may also say which caches can wait (`next_runs`).
    """

    max_batch_size: int = rows_parameter(32)
    interval_steps: int = parameter(
        64,
        low=1,
        high=10_000,
        search=(8, 256),
        log=True,
        doc="decode steps between scheduling points, at the most",
    )
    max_prefill_tokens: int = prefill_parameter()
    swap: str = choice(
        "proactive", ("proactive", "reactive"), doc="when caches are swapped: proactive, reactive"
    )
    free_share: float = parameter(
        0.1,
        low=0,
        high=0.9,
        search=(0.0, 0.5),
        doc="proactive: share of the device's memory kept free for newcomers",
    )
    router: str = router_choice()
    chunk_tokens: int = chunk_parameter()

    @property
    def patience_s(self) -> float:
        """A job that has waited for so many seconds goes first, and is promoted when it runs."""
        return math.inf

    def ranking(self, law: LatencyLaw) -> Ranking:
        """How jobs rank, running ones too: the least goes first, unless another starves."""
        raise NotImplementedError

    def next_runs(
        self, worker: Worker, cached: Sequence[RankedRow], rows: Sequence[RankedRow], now_s: float
    ) -> list[tuple[float, Rank]]:
        """When each of `rows` will run next, in any unit, and its rank: the latest leave first.

        `cached` are all jobs of the worker with a cache, in order of rank; `rows` are some of them,
        in the same order.
        """
        return [(0.0, row.rank) for row in rows]

    def plan_worker(self, view: View, worker: Worker, now_s: float) -> Pass:
        """Rank all jobs, choose which run, and place the caches of the others."""
        steps = self._unchanged(worker)
        if steps:
            return self.make_pass(worker, [], steps)
        cached = self._with_caches(worker, now_s)
        chosen = self._choose(worker, cached, now_s)
        others = _not_in(chosen.run, cached)
        if others:
            next_runs = self.next_runs(worker, cached, others, now_s)
            others = [row for _, row in sorted(zip(next_runs, others, strict=True))]
        placed = self._place(worker, others, chosen)
        entering = [row for row in placed.run if row.location == NOWHERE]
        idle = _not_in(placed.run, cached)
        patience_s = self.patience_s
        return self.make_pass(
            worker,
            [row.job for row in entering],
            self._steps(worker, placed, idle, entering, now_s),
            [row.job for row in placed.evict],
            placed.moves([row.job for row in placed.run if row.waits_s >= patience_s]),
        )

    def should_interrupt(self, view: View, worker: Worker, newcomers: int) -> bool:
        """Whether one of the last `newcomers` at the worker would run if its pass stopped.

        Running jobs are ranked as of the pass's start: a change of ranks ends a pass by itself.
        """
        batch = worker.batch
        running = worker.running
        waiting = ranked(worker)
        assert batch is not None
        cache_room = free_cache_tokens(worker)
        last = list(islice(reversed(waiting.jobs), newcomers))
        if all(job.length >= cache_room for job in last):
            return False
        if batch.steps > self.interval_steps and waiting.count > newcomers:
            return True  # no job could enter when it began, so it does not end when ranks change
        ranking = waiting.ranking
        best = min([(ranking.rank(job, job.generated), job.ticket) for job in last])
        for job in running.jobs:
            if job not in running.prefilling:
                generated = job.generated + running.steps - job.joined
                if best < (ranking.rank(job, generated), job.ticket):
                    return True
        if len(running.jobs) >= self._rows_of(worker):
            return False
        return footprint_of(worker).fits(waiting.jobs[-1].length, worker.capacity_tokens)

    def _unchanged(self, worker: Worker) -> int:
        """Steps of a pass in which just the running jobs go on; 0 if their ranks must decide.

        The ranks do not matter if all running jobs fit, no other job has a cache, and no waiting
        job could get one.
        """
        running = worker.running
        if running.prefilling or worker.paused.jobs or worker.swapped.jobs:
            return 0
        footprint = footprint_of(worker)
        rows = footprint.rows
        capacity = worker.capacity_tokens
        if not rows or rows > self._rows_of(worker) or (rows > 1 and footprint.needs > capacity):
            return 0
        steps = max(footprint.room(capacity), 1)
        waiting = ranked(worker)
        if waiting.jobs:
            free = capacity - footprint.taken + worker.host_tokens
            free -= spare_tokens(worker, 1, self.interval_steps)
            return 0 if waiting.shortest + 1 + worker.emits <= free else steps
        ranking = waiting.ranking
        for job in running.jobs:
            generated = job.generated + running.steps - job.joined
            steps = min(steps, ranking.changes_at(job, generated, job.promoted_at) - generated)
        return steps

    def _rows_of(self, worker: Worker) -> int:
        """The most rows on this worker."""
        return min(self.max_batch_size, worker.row_limit)

    def _with_caches(self, worker: Worker, now_s: float) -> list[RankedRow]:
        """The jobs with a cache at a worker between two passes, in order of rank."""
        running = worker.running
        ranking = ranked(worker).ranking
        patience_s = self.patience_s
        rows: list[RankedRow] = []
        for job in running.jobs:
            decoded = running.steps - job.joined
            generated = job.generated + decoded
            needs = running.holds(job) + 1
            rank = ranking.rank(job, generated), 0.0, job.ticket
            rows.append(
                RankedRow(job, ON_DEVICE, job.length + decoded, generated, needs, RUNS, rank)
            )
        for location, parked in ((ON_DEVICE, worker.paused), (IN_HOST, worker.swapped)):
            for job in parked.jobs:
                waits_s = now_s - job.waiting_since_s
                if waits_s >= patience_s:
                    rank = STARVES, -waits_s, job.ticket
                else:
                    rank = ranking.rank(job, job.generated), 0.0, job.ticket
                needs = job.length + 1
                rows.append(
                    RankedRow(job, location, job.length, job.generated, needs, waits_s, rank)
                )
        rows.sort(key=_rank)
        return rows

    def _choose(self, worker: Worker, cached: Sequence[RankedRow], now_s: float) -> Placement:
        """The jobs that should run: the jobs that fit, by rank; lower ranks fill what room is left.

        A running job continues while one more step fits. A job that joins needs room for more
        steps, otherwise every step would move a cache. No cache is dropped to compute another: a
        newcomer needs room for the caches that it displaces. Half-made caches are not dropped
        either: jobs that are being prefilled continue before all others.
        """
        prefilling = worker.running.prefilling
        capacity = worker.capacity_tokens
        most = self._rows_of(worker)
        footprint = no_rows(worker)
        cache_room = float(free_cache_tokens(worker)) if cached else math.inf
        newcomers = Newcomers(worker, now_s, self.patience_s)
        growth = self.interval_steps
        most_prefill = self.max_prefill_tokens
        chosen = [row for row in cached if row.job in prefilling]
        prefill = 0
        for row in chosen:
            footprint = footprint.entered(row.job)
            prefill += row.tokens
        with_cache = iter([row for row in cached if row.job not in prefilling])
        first = next(with_cache, None)
        newcomer = None
        if prefill < most_prefill:
            newcomer = newcomers.next(math.inf, cache_room - spare_tokens(worker, 1, growth))
        while len(chosen) < most and (first is not None or newcomer is not None):
            spare = spare_tokens(worker, len(chosen) + 1, growth)
            if newcomer is None or (first is not None and first.rank < newcomer.rank):
                assert first is not None
                limit = capacity - (0 if first.waits_s == RUNS else spare)
                if not chosen or footprint.fits(first.tokens, limit, enters=False):
                    chosen.append(first)
                    footprint = footprint.joined(first.tokens)
                first = next(with_cache, None)
                continue
            if not chosen or (
                newcomer.needs + spare <= cache_room
                and footprint.fits(newcomer.tokens, capacity - spare)
            ):
                chosen.append(newcomer)
                footprint = footprint.entered(newcomer.job)
                cache_room -= newcomer.needs
                prefill += newcomer.tokens
            newcomer = None
            if prefill < most_prefill:
                spare = spare_tokens(worker, len(chosen) + 1, growth)
                free = footprint.widest(capacity - spare)
                newcomer = newcomers.next(free, cache_room - spare)
        spare = spare_tokens(worker, len(chosen) + 1, growth)
        return Placement(chosen, footprint, not newcomers.possible(cache_room - spare))

    def _place(self, worker: Worker, others: Sequence[RankedRow], chosen: Placement) -> Placement:
        """Where the caches go, if `others` do not run: they are ordered by when they will."""
        if self.swap == "proactive":
            placed = self._beside_transfers(worker, others, chosen)
            if placed is not None:
                return placed
        placed = self._keep(worker, others, chosen, fetch=False)
        placed.swap_in = [row for row in chosen.run if row.location == IN_HOST]
        return placed

    def _keep(
        self, worker: Worker, others: Sequence[RankedRow], chosen: Placement, *, fetch: bool
    ) -> Placement:
        """Decide which caches of `others` stay on the device, leave it, or (with `fetch`) come.

        Tokens are left free for the growth of the rows, and a share for newcomers if swapping is
        proactive.
        """
        spare = spare_tokens(worker, len(chosen.run), self.interval_steps)
        share = 0
        if self.swap == "proactive":
            share = int(self.free_share * worker.capacity_tokens)
        free = worker.capacity_tokens - chosen.footprint.needs - spare - share
        placed = Placement(list(chosen.run), chosen.footprint, chosen.closed)
        leaving: list[RankedRow] = []
        for row in others:
            if row.location == ON_DEVICE:
                if row.tokens <= free:
                    free -= row.tokens
                    placed.kept.append(row)
                else:
                    leaving.append(row)
        for row in others if fetch else ():
            # With less room it would soon leave again.
            if row.location == IN_HOST and row.tokens <= free - share:
                free -= row.tokens
                placed.fetched.append(row)
        room = worker.host_tokens - worker.swapped.tokens
        stuck: list[RankedRow] = []
        for row in reversed(leaving):
            if row.tokens <= room:
                room -= row.tokens
                placed.swap_out.append(row)
            else:
                stuck.append(row)
        free += share + spare  # avoiding a prefill is worth more than keeping this free
        for row in reversed(stuck):
            if row.tokens <= free:
                free -= row.tokens
                placed.kept.append(row)
            else:
                placed.evict.append(row)
        return placed

    def _beside_transfers(
        self, worker: Worker, others: Sequence[RankedRow], chosen: Placement
    ) -> Placement | None:
        """The pass runs beside its transfers: the jobs of `chosen` that can, and others in the
        rows that stay free. None if the pass should wait for its transfers instead.

        A job that has waited for `patience_s` waits for no transfer.
        """
        placed = self._keep(worker, others, chosen, fetch=True)
        placed.overlap = True
        placed.run = []
        running = worker.running
        patience_s = self.patience_s
        most = self._rows_of(worker)
        dropped = sum([row.tokens for row in placed.evict])
        # The caches of rows count as beside the rows until the rows run.
        rows = no_rows(worker).beside(running.used + worker.paused.tokens - dropped)
        for row in chosen.run:
            if (
                row.location == IN_HOST
                and row.tokens <= rows.capacity - rows.needs
                and row.waits_s < patience_s
            ):
                placed.swap_in.append(row)
                placed.awaited = True
                rows = rows.beside(row.tokens)
            elif row.location == ON_DEVICE:
                placed.run.append(row)
                rows = rows.beside(1 - row.needs)
                if row.job in running.prefilling:
                    rows = rows.entered(row.job)
                else:
                    rows = rows.joined(row.tokens)
            elif row.location == NOWHERE and rows.fits(row.tokens, rows.capacity):
                placed.run.append(row)
                rows = rows.entered(row.job)
            elif row.waits_s >= patience_s:
                return None
            else:
                placed.awaited = True
        if len(placed.run) < most:
            joined: set[int] = set()  # of thousands of kept rows, few join
            for row in sorted(placed.kept, key=_rank):
                with_row = rows.beside(-row.tokens)
                if with_row.fits(row.tokens, with_row.capacity, enters=False):
                    placed.run.append(row)
                    rows = with_row.joined(row.tokens)
                    joined.add(id(row))
                    if len(placed.run) == most:
                        break
            placed.kept = [row for row in placed.kept if id(row) not in joined]
        if rows.needs > rows.capacity or not placed.run:
            return None
        placed.footprint = rows
        for row in placed.fetched:
            if row.tokens <= rows.capacity - rows.needs:
                placed.swap_in.append(row)
                rows = rows.beside(row.tokens)
        return placed

    def _steps(
        self,
        worker: Worker,
        placed: Placement,
        idle: Sequence[RankedRow],
        entering: Sequence[RankedRow],
        now_s: float,
    ) -> int:
        """Steps until a new decision is needed, by the worker's laws.

        `idle` are the jobs that have a cache and do not run.
        """
        law = worker.latency
        run = placed.run
        left = len(worker.waiting.jobs) - len(entering)
        steps = max(placed.room(worker), 1)
        if placed.closed and not idle and left > 0:
            return steps  # no job can enter before a row ends, whatever the ranks
        if idle or left > 0:
            steps = min(steps, self.interval_steps)
        ranking = ranked(worker).ranking
        patience_s = self.patience_s
        for row in run:
            generated = row.generated + row.needs - 1 - row.tokens
            starved = row.waits_s >= patience_s  # so it is promoted when it runs
            promoted_at = row.generated if starved else row.job.promoted_at
            steps = min(steps, ranking.changes_at(row.job, generated, promoted_at) - generated)
        starving_s = self._starving_in_s(worker, idle, entering, now_s)
        if starving_s == math.inf and not placed.awaited:
            return steps
        lengths = [row.needs - 1 - worker.emits for row in run]
        length = max(lengths) if law.padded else sum(lengths) / len(run)
        prefilling = worker.running.prefilling
        inputs = [row.tokens for row in entering]
        inputs += [row.tokens for row in run if row.job in prefilling]
        begins_s = 0.0
        if inputs:
            size = max(inputs) if law.padded else sum(inputs) / len(inputs)
            begins_s = law.prefill_s(len(inputs), size)
        transfers_s = placed.transfers_s(worker)
        if not placed.overlap:
            begins_s += transfers_s
        elif placed.awaited and transfers_s:
            steps = steps_until(law, len(run), length, transfers_s - begins_s, steps)
        return steps_until(law, len(run), length, starving_s - begins_s, steps)

    def _starving_in_s(
        self, worker: Worker, idle: Sequence[RankedRow], entering: Sequence[RankedRow], now_s: float
    ) -> float:
        """Seconds until the next waiting job starves; infinity if none will."""
        patience_s = self.patience_s
        waits_s = [max(row.waits_s, 0.0) for row in idle if row.waits_s < patience_s]
        entering_jobs = {row.job for row in entering}
        longest_s = max([ranked(worker).next_wait_s(now_s, patience_s, entering_jobs), *waits_s])
        return patience_s - longest_s if longest_s >= 0.0 else math.inf


def spare_tokens(worker: Worker, rows: int, steps: int) -> int:
    """Return the tokens left free for `rows` rows to grow by `steps` steps; fewer in a small
    memory.
    """
    return min(rows * steps, worker.capacity_tokens // 16)


def _not_in(run: Sequence[RankedRow], cached: Sequence[RankedRow]) -> list[RankedRow]:
    """The rows `cached` that are not in `run`."""
    running = {row.job for row in run}
    return [row for row in cached if row.job not in running]


def steps_until(law: LatencyLaw, rows: int, length: float, seconds: float, most: int) -> int:
    """The fewest decode steps, from 1 to `most`, that take at least `seconds`; else `most`."""
    if seconds == math.inf or law.decode_s(rows, length, most) < seconds:
        return most
    counts = range(1, most)
    return counts.start + bisect_left(
        counts, seconds, key=lambda steps: law.decode_s(rows, length, steps)
    )
