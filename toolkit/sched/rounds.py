"""The life of rounds: who is resident on a worker, who leaves it and how, and what a failed round
leaves behind.

Nothing is decided here: a `Batch` says who enters, is evicted or moved, and these methods keep the
worker's books. Jobs whose cache an engine still holds though they have gone are remembered until
the worker's next round, which names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from toolkit.sched import residents as moves
from toolkit.sched.types import Batch, Job, RoundResult, Worker


class WorkerRounds:
    """The rounds of all workers. Jobs that it returns have ended: the scheduler forgets them."""

    def __init__(self) -> None:
        self._cancelled: dict[int, list[Job]] = {}  # by worker: ended, and its cache still there
        self._released: dict[int, list[Job]] = {}  # by worker: left it, and its cache still there

    def begin(self, worker: Worker, batch: Batch, now_s: float) -> None:
        """A round starts; the engine hears from `batch` who was cancelled or released since the
        last.
        """
        for job in batch.evict:
            self.evict(worker, job, now_s)
        if batch.moves is not None:
            moves.begin(worker, batch.moves, now_s)
        residents, jobs = worker.residents, batch.jobs
        if jobs:
            for job in jobs:
                residents.join(job)
                job.slices += 1
        if batch.chunk_tokens and jobs:
            residents.prefill_on(
                (*residents.prefilling, *batch.jobs), emits=worker.latency.prefill_emits_token
            )
        if self._cancelled and worker.index in self._cancelled:
            batch.evict += tuple(self._cancelled.pop(worker.index))
        if self._released and worker.index in self._released:
            batch.release = tuple(self._released.pop(worker.index))

    def finish(
        self,
        worker: Worker,
        batch: Batch,
        result: RoundResult,
        jobs: Mapping[str, Job],
        now_s: float,
    ) -> list[Job]:
        """A round has ended, well or not: the jobs that ended in it, also those that were cancelled
        meanwhile.
        """
        residents = worker.residents
        if batch.jobs or residents.prefilling:
            self._finish_prefills(worker, batch, result)
        residents.steps += result.steps
        if result.missed:
            for request_id, steps in result.missed:
                residents.miss(jobs[request_id], steps)
        if result.steps:
            worker.stepped_s = now_s
        ended: list[Job] = []
        for request_id in result.ended:
            job = jobs[request_id]
            residents.leave(job)
            ended.append(job)
        if self._cancelled and worker.index in self._cancelled:
            ended += self._finish_cancelled(worker, result)
        if result.failure == "crashed":
            return ended
        if batch.moves is not None:
            moves.finish(worker, batch.moves)
        if worker.row_limit < worker.slots:
            worker.row_limit = min(2 * worker.row_limit, worker.slots)
        for request_id in result.dropped:
            dropped = jobs.get(request_id)  # it may have been cancelled meanwhile
            if dropped is not None and moves.holds(worker, dropped):
                self.evict(worker, dropped, now_s)
        return ended

    def run_short(self, worker: Worker, result: RoundResult, jobs: Mapping[str, Job]) -> Job | None:
        """Memory ran out in the round that has finished: of those who were dropped, half may enter
        with the next.

        Who was alone on the device, and had to go even so. Where nobody had to go, nobody is kept
        out either.
        """
        if not result.dropped:
            return None
        dropped = [
            job for request_id in result.dropped if (job := jobs.get(request_id)) is not None
        ]
        stay = len(worker.residents)
        worker.row_limit = max(stay + len(dropped) // 2, 1)
        return dropped[0] if len(dropped) == 1 and not (stay or worker.held) else None

    def _finish_prefills(self, worker: Worker, batch: Batch, result: RoundResult) -> None:
        """Who joined has the prefill's token and the steps since; who did not, has neither."""
        residents, emits = worker.residents, worker.latency.prefill_emits_token
        if result.joined is None and not residents.prefilling:
            if emits:
                residents.emitted(batch.jobs)
            return
        waited = dict.fromkeys((*residents.prefilling, *batch.jobs))
        after = (
            dict.fromkeys([job.request_id for job in waited], 0)
            if result.joined is None
            else dict(result.joined)
        )
        for job in waited:
            residents.miss(job, after.get(job.request_id, result.steps))
        residents.prefill_on([job for job in waited if job.request_id not in after], emits=emits)
        if emits:
            residents.emitted([job for job in waited if job.request_id in after])

    def _finish_cancelled(self, worker: Worker, result: RoundResult) -> list[Job]:
        left = [job for job in self._cancelled[worker.index] if job.request_id not in result.ended]
        self._cancelled[worker.index] = left
        leaving = [job for job in left if job in worker.residents.jobs]
        for job in leaving:
            worker.residents.leave(job)
        return leaving

    def crash(self, worker: Worker, now_s: float) -> Job | None:
        """No cache is left on the device: all wait again, in order, and half as many may enter; who
        was alone.

        Copies in host memory go with `lose`, which comes next.
        """
        rows = len(worker.residents)
        jobs = [*worker.residents.jobs, *worker.held.jobs]
        for job in reversed(jobs):
            self.evict(worker, job, now_s)
        worker.row_limit = max(rows // 2, 1)
        return jobs[0] if len(jobs) == 1 else None

    def lose(self, worker: Worker, now_s: float) -> None:
        """The worker's process is gone, and what it kept in host memory with it."""
        for job in reversed([*worker.residents.jobs, *worker.held.jobs, *worker.swapped.jobs]):
            self.evict(worker, job, now_s)
        self._released.pop(worker.index, None)
        self._cancelled.pop(worker.index, None)

    def evict(self, worker: Worker, job: Job, now_s: float) -> None:
        """Its cache is dropped, its tokens are kept: it waits before all others. Called for the
        last admitted first.
        """
        if job in worker.residents.jobs:
            job.waiting_since_s = now_s
        moves.forget(worker, job)
        job.evictions += 1
        job.home = worker.index
        worker.inbox.appendleft(job)

    def release(self, worker: Worker, job: Job, now_s: float) -> None:
        """It leaves its worker between two rounds, to be routed anew."""
        worker.residents.leave(job)
        job.reroutes += 1
        job.waiting_since_s = now_s
        self._released.setdefault(worker.index, []).append(job)

    def cancel(self, worker: Worker, job: Job) -> bool:
        """Nobody wants a job whose cache `worker` holds. Whether it has ended at once; else it does
        with the round.
        """
        self._cancelled.setdefault(worker.index, []).append(job)
        if job in worker.residents.jobs and worker.running is not None:
            return False
        moves.forget(worker, job)
        return True


# Which newcomers are worth one padded prefill together: those of similar length (BATON, section
# 4.2).
#
# One rule for the engine that makes the passes and for the simulated worker that costs them.

# A row joins a group if the padding that it brings is less than this, or than this share of the
# longest: as much as a forward call of its own would cost on top.
PADDING_TOKENS = 32
PADDING_SHARE = 0.25


def alike(lengths: Sequence[int], limit: int | None = None) -> list[int]:
    """Indices of those who share a pass with the first: lengths that span little, nearest to the
    first one's first.

    Args:
        lengths: tokens of each, oldest first; at least one.
        limit: the most tokens of the pass, padding counted; the first goes whatever its length. None: no limit.
    """
    first = lengths[0]
    low = high = first
    members: list[int] = []
    for index in sorted(
        range(len(lengths)), key=lambda k: abs(lengths[k] - first)
    ):  # stable: oldest first
        low, high = min(low, lengths[index]), max(high, lengths[index])
        too_wide = high - low > max(PADDING_TOKENS, PADDING_SHARE * high)
        if too_wide or (members and limit is not None and high * (len(members) + 1) > limit):
            break
        members.append(index)
    return members


def groups_alike(lengths: Sequence[int]) -> list[list[int]]:
    """All indices, in groups of like length; each begins with the oldest that no group before it
    took.
    """
    left, groups = list(range(len(lengths))), []
    while left:
        members = [left[k] for k in alike([lengths[index] for index in left])]
        groups.append(members)
        taken = set(members)
        left = [index for index in left if index not in taken]
    return groups


# How newcomers are prefilled: who shares a pass, how far each pass goes, and what is left of it
# when one leaves.
#
# A pass is one forward call over some columns of a group of like length
# (`toolkit.sched.rounds`). While rows decode, passes are bounded, so that a long prompt does
# not hold up those who run: a pass, a step, the next pass. One book of it for the engine that
# makes the passes, for the fake one, and for the simulated worker that costs them, so that all
# three agree on who joins when.

Key = TypeVar("Key")  # what newcomers go by: an engine's numbers, a scheduler's jobs


@dataclass(slots=True, eq=False)
class PrefillGroup(Generic[Key]):
    """Newcomers that are prefilled together, the longest first, padded to its length; `done`
    columns are cached.
    """

    keys: list[Key]
    lengths: list[int]
    done: int = 0

    @property
    def width(self) -> int:
        """Columns in all."""
        return self.lengths[0]


@dataclass(slots=True, frozen=True)
class PrefillPass(Generic[Key]):
    """Columns `start` to `end` of a group."""

    group: PrefillGroup[Key]
    start: int
    end: int

    @property
    def completes(self) -> bool:
        """Whether the group's prefill ends with it."""
        return self.end == self.group.width


class PrefillPasses(Generic[Key]):
    """Newcomers on their way into a batch, in the order of their arrival as far as groups allow.

    Args:
        mixes: newcomers of any lengths share a group, as in a static batch; else those of like length.
    """

    __slots__ = ("_mixes", "_waiting", "group")

    def __init__(self, *, mixes: bool = False) -> None:
        self._mixes = mixes
        self._waiting: list[tuple[Key, int]] = []
        self.group: PrefillGroup[Key] | None = None  # the one that is being prefilled

    def __bool__(self) -> bool:
        return self.group is not None or bool(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting) + (len(self.group.keys) if self.group else 0)

    def __contains__(self, key: Key) -> bool:
        return bool(self) and key in self.everybody()

    def everybody(self) -> list[Key]:
        """All who are here, those of the group in the works first."""
        return [*(self.group.keys if self.group else ()), *[key for key, _ in self._waiting]]

    def copy(self) -> PrefillPasses[Key]:
        """What can be advanced without this one."""
        other: PrefillPasses[Key] = PrefillPasses(mixes=self._mixes)
        other._waiting = self._waiting.copy()
        if self.group is not None:
            other.group = PrefillGroup(self.group.keys, self.group.lengths, self.group.done)
        return other

    def add(self, key: Key, length: int) -> None:
        """A newcomer of so many tokens, at least one."""
        self._waiting.append((key, length))

    def remove(self, key: Key) -> None:
        """A newcomer goes. If it was in the group in the works, that is no more, and the others
        come first anew.

        To cut one out of a half-made cache would save a rare pass and cost every engine the code
        for it.
        """
        group = self.group
        if group is not None and key in group.keys:
            self.group = None
            self._waiting[:0] = zip(group.keys, group.lengths, strict=True)
        self._waiting = [one for one in self._waiting if one[0] != key]

    def take_waiting(self) -> list[Key]:
        """All who wait, for whoever prefills them otherwise."""
        taken = [key for key, _ in self._waiting]
        self._waiting.clear()
        return taken

    def clear(self) -> None:
        """Nobody is here any more."""
        self._waiting.clear()
        self.group = None

    def form(
        self, bound: int = 0, fits: Callable[[Sequence[int]], bool] | None = None
    ) -> PrefillGroup[Key]:
        """The group in the works; where there is none, it is the first who waits from now on, and
        those like it.

        Args:
            bound: tokens of a pass, at most, padding counted; 0: no bound. The first goes whatever its length.
            fits: whether memory has room for a group of these lengths; it is halved until it does, or is one row.
        """
        if self.group is None:
            lengths = [length for _, length in self._waiting]
            chosen = list(range(len(lengths))) if self._mixes else alike(lengths, bound or None)
            while fits and not fits([lengths[index] for index in chosen]) and len(chosen) > 1:
                chosen = chosen[: (len(chosen) + 1) // 2]
            members = sorted([self._waiting[index] for index in chosen], key=lambda one: -one[1])
            gone = set(chosen)
            self._waiting = [one for index, one in enumerate(self._waiting) if index not in gone]
            self.group = PrefillGroup(
                [key for key, _ in members], [length for _, length in members]
            )
        return self.group

    def next(self, bound: int = 0) -> PrefillPass[Key]:
        """The next pass: of at most `bound` tokens, padding counted, and at least one column; 0:
        all that is left.
        """
        group = self.form(bound)
        end = (
            min(group.width, group.done + max(bound // len(group.keys), 1))
            if bound
            else group.width
        )
        return PrefillPass(group, group.done, end)

    def made(self, one: PrefillPass[Key]) -> None:
        """The pass was made."""
        one.group.done = one.end
        if one.completes:
            self.group = None
