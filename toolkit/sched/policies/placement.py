"""Where the caches of a worker's jobs are, and where a round puts them: the bookkeeping of preemptive policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from toolkit.sched.protocols import LatencyLaw
from toolkit.sched.types import Job, Moves, Worker

Rank = tuple[float, float, int]  # less is served first; the last is the ticket, so that no two are equal
Order = Callable[[Job, int, float], Rank]  # from a job, what it generated, and how long it has waited or RUNS
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
    needs: int  # device tokens that it takes to run one step
    waits_s: float  # since it ran last; RUNS: it does
    rank: Rank


def rows_of(worker: Worker, now_s: float, rank: Order) -> list[Row]:
    """All jobs of a worker between two rounds, ranked."""
    growth = 1 + worker.latency.prefill_emits_token
    since = worker.residents.steps
    rows = []
    for job in worker.residents.jobs:
        ran = since - job.joined
        tokens, generated = job.length + ran, job.generated + ran
        rows.append(Row(job, Place.DEVICE, tokens, generated, tokens + 1, RUNS, rank(job, generated, RUNS)))
    for place, jobs, grows in (
        (Place.DEVICE, worker.held.jobs, 1),
        (Place.HOST, worker.swapped.jobs, 1),
        (Place.INBOX, worker.inbox, growth),
    ):
        for job in jobs:
            waits_s = now_s - job.waiting_since_s
            ranked = rank(job, job.generated, waits_s)
            rows.append(Row(job, place, job.length, job.generated, job.length + grows, waits_s, ranked))
    rows.sort(key=lambda row: row.rank)
    return rows


@dataclass(slots=True)
class Placement:
    """What a round does with every cache. `kept` and `fetched` are those that do not run and are on the device then."""

    run: list[Row]
    kept: list[Row] = field(default_factory=list)
    fetched: list[Row] = field(default_factory=list)
    swap_out: list[Row] = field(default_factory=list)
    swap_in: list[Row] = field(default_factory=list)
    evict: list[Row] = field(default_factory=list)
    overlap: bool = False
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

    def waiting(self, rows: Sequence[Row]) -> list[Row]:
        """Those of `rows` who do not run."""
        running = {row.job.ticket for row in self.run}
        return [row for row in rows if row.job.ticket not in running]

    def device_tokens(self, worker: Worker) -> int:
        """What the device holds after the round's prefill, before its first step."""
        emits = worker.latency.prefill_emits_token
        running = {row.job.ticket for row in self.run}
        held = sum([row.tokens + (emits and row.place is Place.INBOX) for row in self.run])
        held += sum([row.tokens for row in self.kept if row.job.ticket not in running])
        if self.overlap:
            held += sum([row.tokens for row in (*self.swap_out, *self.swap_in)])
        return held

    def transfers_s(self, worker: Worker) -> float:
        """Seconds that the round's transfers take, by the worker's law."""
        law = worker.swap
        if law is None:
            return 0.0
        return sum([law.out_s(row.tokens) for row in self.swap_out]) + sum(
            [law.in_s(row.tokens) for row in self.swap_in]
        )


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
