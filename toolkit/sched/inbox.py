"""The jobs that wait at one worker, in the order in which they are served.

`Inbox` orders jobs by urgency (a smaller `Request.priority` first), evicted jobs before others of
the same urgency, and then by arrival. `RankedInbox` also keeps them in the order of a policy. Both
keep more beside the jobs, so that no question walks a long backlog: `SortedBlocks` is a sorted
sequence, `LengthCounts` the lengths that wait, the least first.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Collection, Iterator
from heapq import heappop, heappush
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

if TYPE_CHECKING:
    from toolkit.sched.types import Job

# Deferred jobs that come forward together: few enough to defer again cheaply, and enough for one
# attempt to admit.
RECALL_COUNT: Final = 64
NO_JOBS: deque[Job] = deque()  # of every inbox that defers nothing; never changed
MOST_ENTRIES: Final = 512  # entries of a block: few enough to move at once when one comes or goes

# Of jobs, to sort by. Those that wait are in the order `turn_of`: of urgency, then of arrival.
priority_of = attrgetter("priority")
_ticket = attrgetter("ticket")
turn_of = attrgetter("priority", "ticket")

Key = tuple[Any, ...]
Entry = TypeVar("Entry", bound=Key)


class SortedBlocks(Generic[Entry]):
    """Distinct tuples in ascending order, in blocks of at most `MOST_ENTRIES`.

    No block is empty but an only one. An entry is found by its first values, here called its key,
    if no other entry has them. A search compares O(log n) entries, at the ends of the sequence one.
    To come or go, an entry moves those of its block.
    """

    __slots__ = ("_blocks", "size")

    def __init__(self) -> None:
        self._blocks: list[list[Entry]] = [[]]
        self.size = 0  # read only: how many entries there are

    def __iter__(self) -> Iterator[Entry]:
        return chain.from_iterable(self._blocks)

    @property
    def first(self) -> Entry:
        """The least entry; there must be one."""
        return self._blocks[0][0]

    @property
    def last(self) -> Entry:
        """The greatest entry; there must be one."""
        return self._blocks[-1][-1]

    def add(self, entry: Entry) -> None:
        """Put an entry in its place."""
        self.size += 1
        blocks = self._blocks
        block = blocks[-1]
        if not block or block[-1] < entry:
            if len(block) < MOST_ENTRIES:
                block.append(entry)
            else:
                blocks.append([entry])
            return
        at = self._block_of(entry)
        block = blocks[at]
        insort(block, entry)
        if len(block) > MOST_ENTRIES:
            blocks.insert(at + 1, block[MOST_ENTRIES // 2 :])
            del block[MOST_ENTRIES // 2 :]

    def remove(self, key: Key) -> Entry:
        """Take the entry with this key; it must be there."""
        self.size -= 1
        at = self._block_of(key)
        block = self._blocks[at]
        entry = block.pop(bisect_left(block, key) if block[0] < key else 0)
        if not block and len(self._blocks) > 1:
            del self._blocks[at]
        return entry

    def before(self, key: Key) -> int:
        """How many entries are less than this key."""
        at = self._block_of(key)
        count = bisect_left(self._blocks[at], key)
        for k in range(at):
            count += len(self._blocks[k])
        return count

    def _block_of(self, key: Key) -> int:
        """The index of the first block that does not end before this key, else of the last."""
        blocks = self._blocks
        low = 0
        high = len(blocks) - 1
        if high and blocks[0][-1] >= key:
            return 0
        while low < high:
            middle = (low + high) // 2
            if blocks[middle][-1] < key:
                low = middle + 1
            else:
                high = middle
        return low


class LengthCounts:
    """How many jobs have each length.

    `_heap` has every length of `_counts` once. Lengths that no job has any more stay in both until
    they are the least, or no job is left.
    """

    __slots__ = ("_counts", "_heap", "jobs")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._heap: list[int] = []
        self.jobs = 0  # read only: how many jobs there are

    @property
    def least(self) -> int:
        """The least length of a job; there must be one."""
        heap = self._heap
        counts = self._counts
        while not counts[heap[0]]:
            del counts[heappop(heap)]
        return heap[0]

    def add(self, length: int) -> None:
        """A job of this length came."""
        self.jobs += 1
        count = self._counts.get(length)
        if count is None:
            self._counts[length] = 1
            heappush(self._heap, length)
        else:
            self._counts[length] = count + 1

    def remove(self, length: int) -> None:
        """A job of this length left."""
        self.jobs -= 1
        if self.jobs:
            self._counts[length] -= 1
        else:
            self._counts.clear()
            self._heap.clear()


class Inbox:
    """A queue of jobs, and `tokens`, the sum of their input lengths.

    Taking a job costs its position, so policies take jobs near the front. A policy may defer jobs:
    they wait in `behind`, ordered by urgency and ticket, and come forward when no other job waits.
    `jobs`, the length and the iteration have the jobs that are not deferred.
    """

    __slots__ = ("_new", "behind", "jobs", "returned", "tokens")

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()
        self.tokens = 0
        self.behind = NO_JOBS
        self.returned: dict[Job, None] = {}  # jobs that have generated tokens before
        self._new: LengthCounts | None = None  # of the others, negative; None until it is asked for

    @property
    def longest_new(self) -> int:
        """The longest input of the jobs that have generated nothing yet; 0 if there are none."""
        if self._new is None:
            self._new = LengthCounts()
            for job in self.all_jobs():
                if not job.generated:
                    self._new.add(-job.length)
        return -self._new.least if self._new.jobs else 0

    @property
    def waiting(self) -> int:
        """The number of jobs, deferred ones included."""
        return len(self.jobs) + len(self.behind)

    def emptied(self) -> Inbox:
        """An empty inbox of the same kind."""
        return Inbox()

    def after(self, count: int) -> Job:
        """The job that is first once `count` of `jobs` were taken; one must be left."""
        return self.jobs[count] if count < len(self.jobs) else self.behind[0]

    def all_jobs(self) -> Iterator[Job]:
        """All jobs, deferred ones last."""
        return chain(self.jobs, self.behind)

    def __len__(self) -> int:
        return len(self.jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self.jobs)

    def __getitem__(self, place: int) -> Job:
        return self.jobs[place]

    def __contains__(self, job: object) -> bool:
        return job in self.jobs or job in self.behind

    def append(self, job: Job) -> None:
        """Add a job behind all that are as urgent."""
        self._place(job, last=True)
        self._added(job)

    def appendleft(self, job: Job) -> None:
        """Add a job before all that are as urgent."""
        self._place(job, last=False)
        self._added(job)

    def popleft(self) -> Job:
        """Take the first job."""
        job = self.jobs.popleft()
        self._removed(job)
        if self.behind:
            self._recall()
        return job

    def remove(self, job: Job) -> None:
        """Take a job; `ValueError` if it does not wait here."""
        if job in self.jobs:
            self.jobs.remove(job)
        else:
            self.behind.remove(job)
        self._removed(job)
        self._recall()

    def defer(self, job: Job) -> None:
        """Move a job behind all others."""
        self.jobs.remove(job)
        if not self.behind:
            self.behind = deque()
        insort(self.behind, job, key=turn_of)
        self._recall()

    def advance(self, job: Job) -> None:
        """Move a deferred job before those that are as urgent."""
        self.behind.remove(job)
        self._place(job, last=False)

    def _added(self, job: Job) -> None:
        self.tokens += job.length
        if job.generated:
            self.returned[job] = None
        elif self._new is not None:
            self._new.add(-job.length)

    def _removed(self, job: Job) -> None:
        self.tokens -= job.length
        if job.generated:
            del self.returned[job]
        elif self._new is not None:
            self._new.remove(-job.length)

    def _place(self, job: Job, *, last: bool) -> None:
        """Insert among the jobs that are not deferred, as the last or the first of its urgency."""
        jobs = self.jobs
        priority = job.priority
        if last and (not jobs or jobs[-1].priority <= priority):
            jobs.append(job)
        elif not last and (not jobs or priority <= jobs[0].priority):
            jobs.appendleft(job)
        else:
            side = bisect_right if last else bisect_left
            jobs.insert(side(jobs, priority, key=priority_of), job)

    def _recall(self) -> None:
        while not self.jobs and self.behind:
            first = [self.behind.popleft() for _ in range(min(RECALL_COUNT, len(self.behind)))]
            self.jobs.extend(first)


Aged = tuple[float, int, float, "Job"]  # waiting since, ticket, standing
Ranked = tuple[float, int, "Job"]  # standing, ticket


class RankedInbox(Inbox):
    """An `Inbox` that also keeps its jobs in the order in which a policy serves them.

    `jobs` are in order of arrival; priorities are a part of the standing. While a job waits, only
    its waiting time changes. Starving jobs are served by age, the others by standing: `_starved`
    has those that starved at the last query, by age; `_by_age` and `_by_standing` have the others.

    `standing` maps a job and its generated tokens to its standing, which must not change while the
    job waits. Less is served first; equal standings are served by ticket.
    """

    __slots__ = (
        "_by_age", "_by_standing", "_counts", "_left", "_lengths", "_now_s", "_patience_s",
        "_starved", "standing",
    )  # fmt: skip

    def __init__(self, standing: Callable[[Job, int], float]) -> None:
        super().__init__()
        self.standing = standing
        self._starved: SortedBlocks[Aged] = SortedBlocks()
        self._by_age: SortedBlocks[Aged] = SortedBlocks()
        self._by_standing: SortedBlocks[Ranked] = SortedBlocks()
        self._counts: dict[float, int] = {}  # how many of `_by_standing` have each standing
        self._now_s = -math.inf
        self._patience_s = math.inf  # of the last query
        self._lengths = LengthCounts()
        self._left = 0  # jobs that came in at the left; the others are in order of tickets, mostly

    @property
    def shortest(self) -> int:
        """The length in tokens of the shortest job; the inbox must not be empty."""
        return self._lengths.least

    def emptied(self) -> RankedInbox:
        return RankedInbox(self.standing)

    def __contains__(self, job: object) -> bool:
        return self._place_of(cast("Job", job)) >= 0

    def _place(self, job: Job, *, last: bool) -> None:
        if last:
            self.jobs.append(job)
        else:
            self.jobs.appendleft(job)
            self._left += 1

    def popleft(self) -> Job:
        job = super().popleft()
        if self._left:
            self._left -= 1
        return job

    def remove(self, job: Job) -> None:
        """Take a job; `ValueError` if it does not wait here."""
        place = self._place_of(job)
        if place < 0:
            raise ValueError(f"request {job.request_id!r} does not wait here")
        if place < self._left:
            self._left -= 1
        del self.jobs[place]
        self._removed(job)

    def _place_of(self, job: Job) -> int:
        """The place of a job in `jobs`, -1 if it does not wait here.

        It follows from the ticket, unless the job came in at the left, or came back from being
        stranded. The search goes in from both ends: most jobs leave near one.
        """
        jobs = self.jobs
        left = self._left
        ticket = job.ticket
        low = left
        high = len(jobs)
        reach = 1
        while high - low > reach:
            if jobs[low + reach].ticket > ticket:
                high = low + reach
            elif jobs[high - reach].ticket <= ticket:
                low = high - reach
            else:
                low = low + reach
                high = high - reach
                reach = 2 * reach
        place = bisect_left(jobs, ticket, low, high, key=_ticket)
        if place < len(jobs) and jobs[place] is job:
            return place
        return next((k for k, other in enumerate(jobs) if other is job), -1)

    def starving(self, now_s: float, patience_s: float) -> Iterator[Aged]:
        """Jobs that have waited for at least `patience_s`, the longest first."""
        self._ask(now_s, patience_s)
        return iter(self._starved)

    def others(self, now_s: float, patience_s: float) -> Iterator[Ranked]:
        """Jobs that have waited for less, the least standing first."""
        self._ask(now_s, patience_s)
        return iter(self._by_standing)

    def next_wait_s(self, now_s: float, patience_s: float, besides: Collection[Job]) -> float:
        """The waiting time of the next job to starve that is not in `besides`; -1: none will."""
        self._ask(now_s, patience_s)
        if self._by_age.size:
            for since_s, _, _, job in self._by_age:
                if job not in besides:
                    return now_s - since_s
        return -1.0

    def starving_before(self, now_s: float, waited_s: float, ticket: int) -> int:
        """How many jobs have waited longer than `waited_s`, or as long with an earlier ticket."""
        key = now_s - waited_s, ticket
        return self._starved.before(key) + self._by_age.before(key)

    def standings(self, now_s: float, patience_s: float) -> tuple[int, list[float], list[int]]:
        """How many jobs starve, the others' standings, ascending, and how many have each."""
        self._ask(now_s, patience_s)
        values = sorted(self._counts)
        return self._starved.size, values, [self._counts[value] for value in values]

    def others_before(self, standing: float, ticket: int) -> int:
        """How many jobs that did not starve at the last query are served before such a one."""
        return self._by_standing.before((standing, ticket))

    def _ask(self, now_s: float, patience_s: float) -> None:
        """Bring `_starved` up to the time of a query."""
        starved = self._starved
        others = self._by_age
        self._now_s = now_s
        self._patience_s = patience_s
        while others.size and now_s - others.first[0] >= patience_s:
            aged = others.remove(others.first)
            self._pass_over(aged[2], aged[1])
            starved.add(aged)
        while starved.size and now_s - starved.last[0] < patience_s:  # an earlier time
            aged = starved.remove(starved.last)
            others.add(aged)
            self._line_up(aged[2], aged[3])

    def _line_up(self, standing: float, job: Job) -> None:
        """Add a job to `_by_standing`."""
        self._by_standing.add((standing, job.ticket, job))
        self._counts[standing] = self._counts.get(standing, 0) + 1

    def _pass_over(self, standing: float, ticket: int) -> None:
        """Take a job from `_by_standing`."""
        self._by_standing.remove((standing, ticket))
        count = self._counts[standing]
        if count > 1:
            self._counts[standing] = count - 1
        else:
            del self._counts[standing]

    def _added(self, job: Job) -> None:
        super()._added(job)
        self._lengths.add(job.length)
        standing = self.standing(job, job.generated)
        aged = (job.waiting_since_s, job.ticket, standing, job)
        if self._now_s - job.waiting_since_s >= self._patience_s:
            self._starved.add(aged)
        else:
            self._by_age.add(aged)
            self._line_up(standing, job)

    def _removed(self, job: Job) -> None:
        super()._removed(job)
        self._lengths.remove(job.length)
        key = job.waiting_since_s, job.ticket
        if self._now_s - job.waiting_since_s >= self._patience_s:
            self._starved.remove(key)
        else:
            self._pass_over(self._by_age.remove(key)[2], job.ticket)
