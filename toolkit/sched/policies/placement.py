"""Where the caches of a preemptive policy's jobs are, and where a round moves them.

`RankedJob` is a job at a scheduling point and `Newcomers` the jobs that may enter, in order of
rank. `Placement` decides which caches move between device and host memory in a round: reactive or
proactive, as `toolkit.sched.policies.preemptive` describes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from mypy_extensions import mypyc_attr

from toolkit.sched.footprint import Footprint, footprint_of
from toolkit.sched.inbox import Aged, Ranked, RankedInbox
from toolkit.sched.protocols import SliceLaw
from toolkit.sched.types import Job, Moves, Worker

# (standing, negative waiting time or 0, ticket): less is served first; tickets make ranks distinct.
Rank = tuple[float, float, int]
STARVES: Final = float("-inf")  # the standing of a starving job
RUNS: Final = -1.0  # `RankedJob.waits_s` of a running job


# The queue that a job joins, and the generated tokens at which it leaves that and later queues.
Path = tuple[int, list[int]]


# Where a job's cache is.
ON_DEVICE: Final = 0
IN_HOST: Final = 1
NOWHERE: Final = 2  # it waits in the inbox


@mypyc_attr(acyclic=True)
class RankedJob:
    """A job at a scheduling point, with up-to-date counters.

    Attributes:
        location: where its cache is.
        tokens: prompt + generated: the size of its cache, or of its prefill.
        needs: device tokens to run one step, including the token of its prefill.
        waits_s: seconds since it last ran; RUNS if it runs.
        standing, age_s: its rank, with the job's ticket; less is served first. Of starving jobs the
            age is the negative waiting time, else it is 0.
        own: its standing if it does not starve, which holds while it was promoted at `promoted_at`
            and has generated at least `since` tokens and less than `leaves`.
        path: of feedback queues: how the job goes through them since it was promoted.
        runs: whether it was in the last `run` of `mark_running`.
    """

    __slots__ = (
        "age_s", "generated", "job", "leaves", "location", "needs", "own", "path", "promoted_at",
        "runs", "since", "standing", "ticket", "tokens", "waits_s",
    )  # fmt: skip

    def __init__(self, job: Job, location: int) -> None:
        self.job = job
        self.location = location
        self.ticket = job.ticket
        self.tokens = self.generated = self.needs = 0
        self.waits_s = RUNS
        self.standing = self.age_s = self.own = 0.0
        self.since = self.leaves = 0  # `own` holds nowhere
        self.promoted_at = -1
        self.path: Path | None = None
        self.runs = False

    def keeps(self, generated: int, promoted_at: int) -> bool:
        """Whether `own` holds for a job that has generated so much and was promoted there."""
        return self.since <= generated < self.leaves and self.promoted_at == promoted_at

    @property
    def rank(self) -> Rank:
        """Its place in the order in which jobs are served."""
        return self.standing, self.age_s, self.ticket

    def goes_before(self, other: RankedJob) -> bool:
        """Whether its rank is before the other's."""
        if self.standing != other.standing:
            return self.standing < other.standing
        if self.age_s != other.age_s:
            return self.age_s < other.age_s
        return self.ticket < other.ticket


def mark_running(cached: Sequence[RankedJob], run: Sequence[RankedJob]) -> None:
    """Set `RankedJob.runs` of the rows `cached`, and of those that `run`."""
    for row in cached:
        row.runs = False
    for row in run:
        row.runs = True


class Newcomers:
    """The waiting jobs without a cache, by rank. Jobs that no longer fit are skipped for good."""

    def __init__(self, worker: Worker, now_s: float, patience_s: float) -> None:
        assert isinstance(worker.inbox, RankedInbox)
        self._inbox = worker.inbox
        self._now_s = now_s
        self._grows = 1 + worker.emits
        self._patience_s = patience_s
        self._starving: Iterator[Aged] | None = None  # made when they are first asked for
        self._others: Iterator[Ranked] | None = None
        self._open = True

    def next(self, free: float, cache_room: float) -> RankedJob | None:
        """The next job that needs at most `free` device tokens, and `cache_room` for its cache.

        Later calls must not pass more of either. If a starving job does not fit `cache_room`, no
        other job may enter before it.
        """
        if not self.possible(cache_room) or self._inbox.shortest + self._grows > free:
            return None
        inbox = self._inbox
        now_s = self._now_s
        grows = self._grows
        if self._starving is None:
            self._starving = inbox.starving(now_s, self._patience_s)
        for since_s, _, _, job in self._starving:
            needs = job.length + grows
            if needs > cache_room:
                self._open = False
                return None
            if needs <= free:
                waits_s = now_s - since_s
                return self._row(job, waits_s, STARVES, -waits_s)
        if self._others is None:
            self._others = inbox.others(now_s, self._patience_s)
        room = min(free, cache_room)
        for standing, _, job in self._others:
            if job.length + grows <= room:
                return self._row(job, now_s - job.waiting_since_s, standing, 0.0)
        return None

    def possible(self, cache_room: float) -> bool:
        """Whether the cache of a waiting job might fit `cache_room` tokens, as far as is known."""
        return self._open and bool(self._inbox) and self._inbox.shortest + self._grows <= cache_room

    def _row(self, job: Job, waits_s: float, standing: float, age_s: float) -> RankedJob:
        row = RankedJob(job, NOWHERE)
        row.tokens = job.length
        row.generated = job.generated
        row.needs = job.length + self._grows
        row.waits_s = waits_s
        row.standing = standing
        row.age_s = age_s
        return row


def free_cache_tokens(worker: Worker) -> int:
    """Tokens free for caches on the device and in host memory together, as last reported."""
    device = worker.capacity_tokens - worker.footprint.taken - worker.held.tokens
    return device + worker.host_tokens - worker.swapped.tokens


class Placement:
    """What a round does with every cache; at first, the jobs that should run.

    Attributes:
        run: the jobs that run, of which `footprint` is.
        closed: no other waiting job without a cache could get one.
        kept, fetched: the jobs that do not run and have caches on the device.
        overlap: whether transfers run beside the round's compute.
        awaited: jobs that should run are in transfer, or wait for the room that transfers make.
    """

    __slots__ = (
        "awaited", "closed", "evict", "fetched", "footprint", "kept", "overlap", "run", "swap_in",
        "swap_out",
    )  # fmt: skip

    def __init__(self, run: list[RankedJob], footprint: Footprint, closed: bool) -> None:
        self.run = run
        self.footprint = footprint
        self.closed = closed
        self.kept: list[RankedJob] = []
        self.fetched: list[RankedJob] = []
        self.swap_out: list[RankedJob] = []
        self.swap_in: list[RankedJob] = []
        self.evict: list[RankedJob] = []
        self.overlap = False
        self.awaited = False

    def moves(self, promote: Sequence[Job]) -> Moves | None:
        """The placement as `Moves`, after `mark_running`; None if nothing changes."""
        pause = tuple([row.job for row in self.kept if not row.runs and row.waits_s == RUNS])
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
        """Decode steps until rows and caches exceed the device's capacity, after `mark_running`."""
        aside = 0
        for row in self.kept:
            if not row.runs:
                aside += row.tokens
        if self.overlap:
            for row in self.swap_out:
                aside += row.tokens
            for row in self.swap_in:
                aside += row.tokens
        return self.footprint.room(worker.capacity_tokens - aside)

    def transfers_s(self, worker: Worker) -> float:
        """Seconds of the round's transfers, by the worker's law."""
        law = worker.swap
        if law is None:
            return 0.0
        # by hand: compiled code takes the sum of a list of floats for an integer
        out_s = in_s = 0.0
        for row in self.swap_out:
            out_s += law.out_s(row.tokens)
        for row in self.swap_in:
            in_s += law.in_s(row.tokens)
        return out_s + in_s


def _keep(
    worker: Worker,
    others: Sequence[RankedJob],
    chosen: Placement,
    spare: int,
    share: int,
    *,
    fetch: bool,
) -> Placement:
    """Decide which caches of `others` stay on the device, leave it, or (with `fetch`) come.

    `others` have caches and are in the order in which they will run. `spare` tokens are left for
    growth, `share` tokens for newcomers.
    """
    free = worker.capacity_tokens - chosen.footprint.needs - spare - share
    placed = Placement(list(chosen.run), chosen.footprint, chosen.closed)
    leaving: list[RankedJob] = []
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
    worker: Worker, others: Sequence[RankedJob], chosen: Placement, spare: int, share: int
) -> Placement:
    """The round waits for its transfers, and then runs all of `chosen`."""
    placed = _keep(worker, others, chosen, spare, share, fetch=False)
    placed.swap_in = [row for row in chosen.run if row.location == IN_HOST]
    return placed


def beside_transfers(
    worker: Worker,
    others: Sequence[RankedJob],
    chosen: Placement,
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
    placed.overlap = True
    placed.run = []
    placed.footprint = footprint
    prefilling = worker.residents.prefilling
    footprint.capacity -= (
        worker.residents.used + worker.held.tokens - sum([row.tokens for row in placed.evict])
    )
    for row in chosen.run:
        if (
            row.location == IN_HOST
            and row.tokens <= footprint.capacity - footprint.needs
            and row.waits_s < patience_s
        ):
            placed.swap_in.append(row)
            placed.awaited = True
            footprint.capacity -= row.tokens
        elif row.location == ON_DEVICE:
            placed.run.append(row)
            footprint.capacity += row.needs - 1
            if prefilling and row.job in prefilling:
                footprint.enter(row.job)
            else:
                footprint.join(row.tokens)
        elif row.location == NOWHERE and footprint.fits(row.tokens, footprint.capacity):
            placed.run.append(row)
            footprint.enter(row.job)
        elif row.waits_s >= patience_s:
            return None
        else:
            placed.awaited = True
    for row in sorted(placed.kept, key=lambda row: row.rank):
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


def steps_until(law: SliceLaw, rows: int, length: float, seconds: float, most: int) -> int:
    """The fewest decode steps, from 1 to `most`, that take at least `seconds`; else `most`."""
    low = 1
    high = most
    if seconds == float("inf") or law.decode_s(rows, length, most) < seconds:
        return most
    while low < high:
        middle = (low + high) // 2
        if law.decode_s(rows, length, middle) >= seconds:
            high = middle
        else:
            low = middle + 1
    return low
