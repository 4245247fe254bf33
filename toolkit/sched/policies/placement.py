"""Where the caches of a worker's jobs are, and where a round puts them: the bookkeeping of preemptive policies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter

from toolkit.sched.footprint import Footprint, footprint
from toolkit.sched.protocols import LatencyLaw
from toolkit.sched.ranked import RankedInbox
from toolkit.sched.types import Job, Moves, Worker

Rank = tuple[float, float, int]  # less is served first; the last is the ticket, so that no two are equal
STARVES = -math.inf  # the first part of the rank of one that does
RUNS = -1.0  # `Row.waits_s` of one that runs


class Place(Enum):
    """Where a job's cache is."""

    DEVICE = "device"
    HOST = "host"
    INBOX = "inbox"  # it has none


@dataclass(slots=True, eq=False)
class Row:
    """One job at a scheduling point, its counters up to date."""

    job: Job
    place: Place
    tokens: int  # prompt + generated: what its cache holds, or its prefill will
    generated: int
    needs: int  # device tokens that it takes to run one step, its prefill's token with them
    waits_s: float  # since it ran last; RUNS: it does
    rank: Rank


class Newcomers:
    """Those who wait at a worker and have no cache, by rank; who could not enter any more is passed over."""

    def __init__(self, worker: Worker, now_s: float, patience_s: float) -> None:
        assert isinstance(worker.inbox, RankedInbox)
        self._inbox, self._now_s = worker.inbox, now_s
        self._grows = 1 + worker.latency.prefill_emits_token
        self._starving = worker.inbox.starving(now_s, patience_s)
        self._others = worker.inbox.others(now_s, patience_s)
        self._open = True

    def next(self, free: float, place: float) -> Row | None:
        """The next of those who need at most `free` tokens, and find a place in `place`; never ask for more later.

        One who starves and finds none is waited for: nobody enters before him.
        """
        if not self.possible(place) or self._inbox.shortest + self._grows > free:
            return None
        grows = self._grows
        for waits_s, job in self._starving:
            needs = job.length + grows
            if needs > place:
                self._open = False
                return None
            if needs <= free:
                return self._row(job, waits_s, (STARVES, -waits_s, job.ticket))
        room = min(free, place)
        for standing, job in self._others:
            if job.length + grows <= room:
                return self._row(job, self._now_s - job.waiting_since_s, (standing, 0.0, job.ticket))
        return None

    def possible(self, place: float) -> bool:
        """Whether anybody who waits could have a cache in so many tokens, as far as is known."""
        return self._open and bool(self._inbox) and self._inbox.shortest + self._grows <= place

    def _row(self, job: Job, waits_s: float, rank: Rank) -> Row:
        return Row(job, Place.INBOX, job.length, job.generated, job.length + self._grows, waits_s, rank)


def free_places(worker: Worker) -> int:
    """Tokens that caches may still take on the device and in host memory together; residents' by the last report."""
    device = worker.capacity_tokens - footprint(worker).taken - worker.held.tokens
    return device + worker.host_tokens - worker.swapped.tokens


@dataclass(slots=True)
class Chosen:
    """Those who should run, and what they take; `closed`: nobody else who waits without a cache could have one."""

    rows: list[Row]
    there: Footprint
    closed: bool = False


def _add(found: Footprint, worker: Worker, row: Row) -> None:
    if row.place is Place.INBOX or row.job in worker.residents.prefilling:
        found.enter(row.job)
    else:
        found.join(row.tokens)


@dataclass(slots=True)
class Placement:
    """What a round does with every cache. `kept` and `fetched` are those that do not run and are on the device then.

    `there` is what those who run take.
    """

    run: list[Row]
    there: Footprint
    kept: list[Row] = field(default_factory=list)
    fetched: list[Row] = field(default_factory=list)
    swap_out: list[Row] = field(default_factory=list)
    swap_in: list[Row] = field(default_factory=list)
    evict: list[Row] = field(default_factory=list)
    overlap: bool = False
    closed: bool = False  # nobody who waits without a cache could have one
    awaited: bool = False  # some who should run are in transfer, or wait for the room that it makes

    def moves(self, worker: Worker, promote: Sequence[Job]) -> Moves | None:
        """As the scheduler wants it; None where nothing changes."""
        residents = worker.residents.jobs
        running = {row.job.ticket for row in self.run}
        pause = tuple([row.job for row in self.kept if row.job in residents and row.job.ticket not in running])
        resume = tuple([row.job for row in self.run if row.place is not Place.INBOX and row.job not in residents])
        swap_out = tuple([row.job for row in self.swap_out])
        swap_in = tuple([row.job for row in self.swap_in])
        if not (pause or resume or swap_out or swap_in or promote):
            return None
        return Moves(pause, resume, swap_out, swap_in, tuple(promote), self.overlap and bool(swap_out or swap_in))

    def idle(self, cached: Sequence[Row]) -> list[Row]:
        """Those of `cached` who do not run."""
        running = {row.job for row in self.run}
        return [row for row in cached if row.job not in running]

    def room(self, worker: Worker) -> int:
        """Decode steps until those who run, and the caches on the device beside them, take more than there is."""
        running = {row.job.ticket for row in self.run}
        aside = sum([row.tokens for row in self.kept if row.job.ticket not in running])
        if self.overlap:
            aside += sum([row.tokens for row in (*self.swap_out, *self.swap_in)])
        return self.there.room(worker.capacity_tokens - aside)

    def transfers_s(self, worker: Worker) -> float:
        """Seconds that the round's transfers take, by the worker's law."""
        law = worker.swap
        if law is None:
            return 0.0
        return sum([law.out_s(row.tokens) for row in self.swap_out]) + sum(
            [law.in_s(row.tokens) for row in self.swap_in]
        )


def _keep(worker: Worker, others: Sequence[Row], chosen: Chosen, spare: int, share: int, *, fetch: bool) -> Placement:
    """Who of `others` stays on the device beside `chosen`, who leaves it, and with `fetch` who comes.

    `others` have caches; they come in the order in which they will run. `spare` tokens are left for growth, `share` for
    newcomers.
    """
    free = worker.capacity_tokens - chosen.there.needs - spare - share
    placed = Placement(list(chosen.rows), chosen.there)
    leaving: list[Row] = []
    for row in others:
        if row.place is Place.DEVICE:
            if row.tokens <= free:
                free -= row.tokens
                placed.kept.append(row)
            else:
                leaving.append(row)
    for row in others if fetch else ():
        if row.place is Place.HOST and row.tokens <= free - share:  # else it would leave again soon
            free -= row.tokens
            placed.fetched.append(row)
    room = worker.host_tokens - worker.swapped.tokens
    stuck: list[Row] = []
    for row in reversed(leaving):
        if row.tokens <= room:
            room -= row.tokens
            placed.swap_out.append(row)
        else:
            stuck.append(row)
    free += share + spare  # what was to be kept free is worth less than a prefill
    for row in reversed(stuck):
        if row.tokens <= free:
            free -= row.tokens
            placed.kept.append(row)
        else:
            placed.evict.append(row)
    return placed


def after_transfers(worker: Worker, others: Sequence[Row], chosen: Chosen, spare: int, share: int) -> Placement:
    """The round waits for its transfers, and all of `chosen` run in it."""
    placed = _keep(worker, others, chosen, spare, share, fetch=False)
    placed.swap_in = [row for row in chosen.rows if row.place is Place.HOST]
    return placed


def beside_transfers(
    worker: Worker,
    others: Sequence[Row],
    chosen: Chosen,
    spare: int,
    share: int,
    most: int,
    patience_s: float,
) -> Placement | None:
    """The round runs those of `chosen` who can now, and others in the others' rows, beside its transfers.

    None where it should rather wait for them. At most `most` rows run; who has waited for `patience_s`
    waits for no transfer.
    """
    placed = _keep(worker, others, chosen, spare, share, fetch=True)
    there = footprint(worker).emptied()  # its capacity is what the caches beside the rows leave
    placed.overlap, placed.run, placed.there = True, [], there
    there.capacity -= worker.residents.used + worker.held.tokens - sum([row.tokens for row in placed.evict])
    for row in chosen.rows:
        if row.place is Place.HOST and row.tokens <= there.capacity - there.needs and row.waits_s < patience_s:
            placed.swap_in.append(row)
            placed.awaited = True
            there.capacity -= row.tokens
        elif row.place is Place.DEVICE:
            placed.run.append(row)
            there.capacity += row.needs - 1
            _add(there, worker, row)
        elif row.place is Place.INBOX and there.fits(row.tokens, there.capacity):
            placed.run.append(row)
            there.enter(row.job)
        elif row.waits_s >= patience_s:
            return None
        else:
            placed.awaited = True
    for row in sorted(placed.kept, key=attrgetter("rank")):
        if len(placed.run) >= most:
            break
        there.capacity += row.tokens
        if there.fits(row.tokens, there.capacity, enters=False):
            placed.run.append(row)
            there.join(row.tokens)
        else:
            there.capacity -= row.tokens
    if there.needs > there.capacity or not placed.run:
        return None
    for row in placed.fetched:
        if row.tokens <= there.capacity - there.needs:
            placed.swap_in.append(row)
            there.capacity -= row.tokens
    return placed


def steps_until(law: LatencyLaw, rows: int, length: float, seconds: float, most: int) -> int:
    """The first count of decode steps, from 1 to `most`, that takes at least `seconds`; `most` where none does."""
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
