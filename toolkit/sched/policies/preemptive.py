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

In order: ranked jobs and newcomers, `Placement` and the functions that decide where caches go, and
`PreemptivePolicy`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from operator import attrgetter
from typing import ClassVar

from toolkit.sched.footprint import Footprint, footprint_of, shared_footprint
from toolkit.sched.inbox import RankedInbox
from toolkit.sched.policies.parameters import choice, chunk_knob, knob, validate
from toolkit.sched.policies.routers import ROUTERS
from toolkit.sched.protocols import Decision, LatencyLaw, Standing, View
from toolkit.sched.types import Batch, Job, Moves, Worker

# (standing, negative waiting time or 0, ticket): less is served first; tickets make ranks distinct.
Rank = tuple[float, float, int]
STARVES = -math.inf  # the standing of a starving job
RUNS = -1.0  # `RankedJob.waits_s` of a running job


class CacheLocation(Enum):
    """Where a job's cache is."""

    DEVICE = "device"
    HOST = "host"
    INBOX = "inbox"  # it has no cache


@dataclass(slots=True, eq=False)
class RankedJob:
    """A job at a scheduling point, with up-to-date counters."""

    job: Job
    location: CacheLocation
    tokens: int  # prompt + generated: the size of its cache, or of its prefill
    generated: int
    needs: int  # device tokens to run one step, including the token of its prefill
    waits_s: float  # seconds since it last ran; RUNS if it runs
    rank: Rank


class Newcomers:
    """The waiting jobs without a cache, in order of rank. Jobs that no longer fit are skipped for
    good.
    """

    def __init__(self, worker: Worker, now_s: float, patience_s: float) -> None:
        assert isinstance(worker.inbox, RankedInbox)
        self._inbox, self._now_s = worker.inbox, now_s
        self._grows = 1 + worker.latency.prefill_emits_token
        self._starving = worker.inbox.starving(now_s, patience_s)
        self._others = worker.inbox.others(now_s, patience_s)
        self._open = True

    def next(self, free: float, cache_room: float) -> RankedJob | None:
        """The next job that needs at most `free` device tokens and has room for its cache in
        `cache_room` tokens.

        Later calls must not pass more of either. If a starving job does not fit `cache_room`, no
        other job may enter before it.
        """
        if not self.possible(cache_room) or self._inbox.shortest + self._grows > free:
            return None
        grows = self._grows
        for waits_s, job in self._starving:
            needs = job.length + grows
            if needs > cache_room:
                self._open = False
                return None
            if needs <= free:
                return self._row(job, waits_s, (STARVES, -waits_s, job.ticket))
        room = min(free, cache_room)
        for standing, job in self._others:
            if job.length + grows <= room:
                return self._row(
                    job, self._now_s - job.waiting_since_s, (standing, 0.0, job.ticket)
                )
        return None

    def possible(self, cache_room: float) -> bool:
        """Whether the cache of a waiting job might fit `cache_room` tokens, as far as is known."""
        return self._open and bool(self._inbox) and self._inbox.shortest + self._grows <= cache_room

    def _row(self, job: Job, waits_s: float, rank: Rank) -> RankedJob:
        return RankedJob(
            job,
            CacheLocation.INBOX,
            job.length,
            job.generated,
            job.length + self._grows,
            waits_s,
            rank,
        )


def free_cache_tokens(worker: Worker) -> int:
    """Tokens that are free for caches on the device and in host memory together, as of the last
    report.
    """
    device = worker.capacity_tokens - shared_footprint(worker).taken - worker.held.tokens
    return device + worker.host_tokens - worker.swapped.tokens


@dataclass(slots=True)
class Chosen:
    """The jobs that should run and their footprint.

    `closed`: no other waiting job without a cache could get one.
    """

    rows: list[RankedJob]
    footprint: Footprint
    closed: bool = False


def _add(found: Footprint, worker: Worker, row: RankedJob) -> None:
    if row.location is CacheLocation.INBOX or row.job in worker.residents.prefilling:
        found.enter(row.job)
    else:
        found.join(row.tokens)


@dataclass(slots=True)
class Placement:
    """What a round does with every cache.

    `footprint` is that of the jobs in `run`. `kept` and `fetched` are the jobs that do not run
    and have caches on the device.
    """

    run: list[RankedJob]
    footprint: Footprint
    kept: list[RankedJob] = field(default_factory=list)
    fetched: list[RankedJob] = field(default_factory=list)
    swap_out: list[RankedJob] = field(default_factory=list)
    swap_in: list[RankedJob] = field(default_factory=list)
    evict: list[RankedJob] = field(default_factory=list)
    overlap: bool = False
    closed: bool = False  # no waiting job without a cache could get one
    # jobs that should run are in transfer, or wait for the room that transfers make
    awaited: bool = False

    def moves(self, worker: Worker, promote: Sequence[Job]) -> Moves | None:
        """The placement as `Moves`; None if nothing changes."""
        residents = worker.residents.jobs
        running = {row.job.ticket for row in self.run}
        pause = tuple(
            [row.job for row in self.kept if row.job in residents and row.job.ticket not in running]
        )
        resume = tuple(
            [
                row.job
                for row in self.run
                if row.location is not CacheLocation.INBOX and row.job not in residents
            ]
        )
        swap_out = tuple([row.job for row in self.swap_out])
        swap_in = tuple([row.job for row in self.swap_in])
        if not (pause or resume or swap_out or swap_in or promote):
            return None
        return Moves(
            pause,
            resume,
            swap_out,
            swap_in,
            tuple(promote),
            self.overlap and bool(swap_out or swap_in),
        )

    def idle(self, cached: Sequence[RankedJob]) -> list[RankedJob]:
        """Those of `cached` that do not run."""
        running = {row.job for row in self.run}
        return [row for row in cached if row.job not in running]

    def room(self, worker: Worker) -> int:
        """Decode steps until the running rows and the caches beside them exceed the device's
        capacity.
        """
        running = {row.job.ticket for row in self.run}
        aside = sum([row.tokens for row in self.kept if row.job.ticket not in running])
        if self.overlap:
            aside += sum([row.tokens for row in (*self.swap_out, *self.swap_in)])
        return self.footprint.room(worker.capacity_tokens - aside)

    def transfers_s(self, worker: Worker) -> float:
        """Seconds of the round's transfers, by the worker's law."""
        law = worker.swap
        if law is None:
            return 0.0
        return sum([law.out_s(row.tokens) for row in self.swap_out]) + sum(
            [law.in_s(row.tokens) for row in self.swap_in]
        )


def _keep(
    worker: Worker,
    others: Sequence[RankedJob],
    chosen: Chosen,
    spare: int,
    share: int,
    *,
    fetch: bool,
) -> Placement:
    """Decide which caches of `others` stay on the device beside `chosen`, leave it, or (`fetch`)
    come.

    `others` have caches and are in the order in which they will run. `spare` tokens are left for
    growth, `share` tokens for newcomers.
    """
    free = worker.capacity_tokens - chosen.footprint.needs - spare - share
    placed = Placement(list(chosen.rows), chosen.footprint)
    leaving: list[RankedJob] = []
    for row in others:
        if row.location is CacheLocation.DEVICE:
            if row.tokens <= free:
                free -= row.tokens
                placed.kept.append(row)
            else:
                leaving.append(row)
    for row in others if fetch else ():
        # With less room it would soon leave again.
        if row.location is CacheLocation.HOST and row.tokens <= free - share:
            free -= row.tokens
            placed.fetched.append(row)
    room = worker.host_tokens - worker.swapped.tokens
    stuck: list[RankedJob] = []
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


def after_transfers(
    worker: Worker, others: Sequence[RankedJob], chosen: Chosen, spare: int, share: int
) -> Placement:
    """The round waits for its transfers, and then runs all of `chosen`."""
    placed = _keep(worker, others, chosen, spare, share, fetch=False)
    placed.swap_in = [row for row in chosen.rows if row.location is CacheLocation.HOST]
    return placed


def beside_transfers(
    worker: Worker,
    others: Sequence[RankedJob],
    chosen: Chosen,
    spare: int,
    share: int,
    most: int,
    patience_s: float,
) -> Placement | None:
    """The round runs beside its transfers: those of `chosen` that can, and others in the free rows.

    At most `most` rows run. A job that has waited for `patience_s` waits for no transfer. None if
    the round should wait for its transfers instead.
    """
    placed = _keep(worker, others, chosen, spare, share, fetch=True)
    footprint = footprint_of(worker).emptied()  # its capacity excludes the caches beside the rows
    placed.overlap, placed.run, placed.footprint = True, [], footprint
    footprint.capacity -= (
        worker.residents.used + worker.held.tokens - sum([row.tokens for row in placed.evict])
    )
    for row in chosen.rows:
        if (
            row.location is CacheLocation.HOST
            and row.tokens <= footprint.capacity - footprint.needs
            and row.waits_s < patience_s
        ):
            placed.swap_in.append(row)
            placed.awaited = True
            footprint.capacity -= row.tokens
        elif row.location is CacheLocation.DEVICE:
            placed.run.append(row)
            footprint.capacity += row.needs - 1
            _add(footprint, worker, row)
        elif row.location is CacheLocation.INBOX and footprint.fits(row.tokens, footprint.capacity):
            placed.run.append(row)
            footprint.enter(row.job)
        elif row.waits_s >= patience_s:
            return None
        else:
            placed.awaited = True
    for row in sorted(placed.kept, key=attrgetter("rank")):
        if len(placed.run) >= most:
            break
        footprint.capacity += row.tokens
        if footprint.fits(row.tokens, footprint.capacity, enters=False):
            placed.run.append(row)
            footprint.join(row.tokens)
        else:
            footprint.capacity -= row.tokens
    if footprint.needs > footprint.capacity or not placed.run:
        return None
    for row in placed.fetched:
        if row.tokens <= footprint.capacity - footprint.needs:
            placed.swap_in.append(row)
            footprint.capacity -= row.tokens
    return placed


def steps_until(law: LatencyLaw, rows: int, length: float, seconds: float, most: int) -> int:
    """The first number of decode steps, from 1 to `most`, that takes at least `seconds`, else
    `most`.
    """
    low, high = 1, most
    if seconds == float("inf") or law.decode_s(rows, length, most) < seconds:
        return most
    while low < high:
        middle = (low + high) // 2
        if law.decode_s(rows, length, middle) >= seconds:
            high = middle
        else:
            low = middle + 1
    return low


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
        if not any(job.length < cache_room for job in islice(reversed(inbox), newcomers)):
            return False
        if running.steps > self.interval_steps and inbox.waiting > newcomers:
            return True  # no job could enter when it began, so it does not end when ranks change
        since, standing = residents.steps, inbox.standing
        new_ranks = [
            (standing(job, job.generated), job.ticket) for job in islice(reversed(inbox), newcomers)
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
        return shared_footprint(worker).fits(inbox[-1].length, worker.capacity_tokens)

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
        footprint, capacity, inbox = shared_footprint(worker), worker.capacity_tokens, worker.inbox
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
