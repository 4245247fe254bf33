"""What Past-Future and the continuous slices admit, worked out from a worker's residents.

The criteria of `toolkit.sched.policies.past_future` and `SliceContinuousPolicy`, with the policy's
parameters. One belongs to one scheduler (`View.rules`) and may keep what follows from laws.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from toolkit.sched.figures import Numbers, WorkerFigure
from toolkit.sched.inbox import RECALL_COUNT
from toolkit.sched.kernels import admit_past_future
from toolkit.sched.types import NO_LIMIT, Job, Worker
from toolkit.sched.view import View

if TYPE_CHECKING:
    from toolkit.sched.policies.past_future import PastFuturePolicy, PastFutureSlaPolicy
    from toolkit.sched.policies.slice import SliceContinuousPolicy

LOW = (1 << 32) - 1
CYCLE_ATTEMPTS = 100  # attempts to admit, a share of which puts late jobs first
NO_FREE_TOKENS = -(1 << 62)  # free tokens of a lost worker: less than any other has


class Peak:
    """The most tokens that rows will ever take together: M* of Past-Future, Eq. 2-4, or a slab's.

    As `toolkit.sched.kernels.peak_to_come`, for rows that come one by one.
    """

    def __init__(self, padded: bool) -> None:
        self._padded = padded
        self._keys: list[int] = []  # remaining << 32 | used, ascending after `sort`

    def add(self, used: int, remaining: int) -> None:
        """Add a row that holds `used` tokens and will add `remaining`; call `sort` after these."""
        self._keys.append((remaining << 32) + used)

    def sort(self) -> None:
        """Order the rows that `add` added."""
        self._keys.sort()

    def insert(self, used: int, remaining: int) -> None:
        """Add a row to sorted ones."""
        insort(self._keys, (remaining << 32) + used)

    def remove(self, used: int, remaining: int) -> None:
        """Remove a row of sorted ones."""
        del self._keys[bisect_left(self._keys, (remaining << 32) + used)]

    def tokens(self) -> int:
        """The peak; the rows must be sorted."""
        held = 0
        peak = 0
        n = len(self._keys)
        for count in range(1, n + 1):
            key = self._keys[n - count]
            used = key & LOW
            remaining = key >> 32
            if self._padded:
                if used > held:
                    held = used
                here = count * (held + remaining)
            else:
                held += used
                here = held + count * remaining
            if here > peak:
                peak = here
        return peak


class SampledPeak:
    """Past-Future's criterion: the peak of sampled lengths stays below a share of the capacity."""

    def __init__(self, policy: PastFuturePolicy) -> None:
        self._reserve: float = policy.reserve
        self._samples: int = policy.samples
        self._sample_rows: int = policy.sample_rows
        # The candidates' lengths, generated tokens and limits, and a view of them [n, 3]: the
        # kernel reads it, and a cell of an `array` is written much faster than one of numpy's.
        self._cells = array("q")
        self._waiting: Numbers = np.zeros((0, 3), dtype=np.int64)

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        """See `ContinuousPolicy.admit`."""
        residents = worker.residents
        rows = len(worker.residents.jobs)
        count = len(candidates)
        sets = self._sample_rows // (rows if rows else 1) + 1
        if sets > self._samples:
            sets = self._samples
        if count > len(self._waiting):
            self._cells = array("q", bytes(8 * 3 * 2 * count))
            self._waiting = np.frombuffer(self._cells, dtype=np.int64).reshape(2 * count, 3)
        cells = self._cells
        at = 0
        for job in candidates:
            cells[at] = job.length
            cells[at + 1] = job.generated
            cells[at + 2] = job.max_new_tokens
            at += 3
        return int(
            admit_past_future(
                residents.table(),
                rows,
                residents.steps,
                self._waiting,
                count,
                view.finished.ascending(),
                (1.0 - self._reserve) * worker.capacity_tokens,
                sets,
                view.rng.bit_generator.random_raw() >> 1,  # 63 bits: one type for the kernel
                worker.padded,
            )
        )


class RowLengths:
    """The number and lengths of rows, as a latency law needs them."""

    __slots__ = ("longest", "rows", "tokens")

    def __init__(self) -> None:
        self.rows = self.tokens = self.longest = 0

    def add(self, length: int) -> None:
        """Add a row of `length` tokens."""
        self.rows += 1
        self.tokens += length
        if length > self.longest:
            self.longest = length

    def length(self, padded: bool) -> float:
        """L: the longest row's length on a padded engine, else the mean."""
        return float(self.longest) if padded else self.tokens / self.rows


class WithinLimits(SampledPeak):
    """The criteria of `PastFutureSlaPolicy`: a job does not enter if the laws predict that this
    breaks a limit of time.

    An admission costs the residents a stall (the newcomers' prefill between two of their tokens)
    and a slower step from then on; both must stay within MTPOT. A newcomer with a first token that
    is already late waits behind those that are on time. Eviction is that of plain Past-Future.
    """

    def __init__(self, view: View, policy: PastFutureSlaPolicy) -> None:
        super().__init__(policy)
        self._ttft_s: float = policy.ttft_s
        self._mtpot_s: float = policy.mtpot_s
        self._late_attempts: float = policy.late_share * CYCLE_ATTEMPTS
        self._interval: int = policy.interval_steps
        self._chunk: int = policy.chunk_tokens
        # By worker and length, of a job that runs alone: seconds of its prefill and of a first step
        # (unless the prefill gives the token), and whether these break the others' MTPOT. Workers
        # with one law share it.
        shared: dict[int, dict[int, tuple[float, float, bool]]] = {}
        self._alone = [shared.setdefault(id(worker.latency), {}) for worker in view.workers]

    def reorder(self, view: View, now_s: float) -> tuple[list[Job], list[Job]]:
        """See `PastFutureSlaPolicy.reorder`."""
        behind: list[Job] = []
        first: list[Job] = []
        for worker in view.due:
            inbox = worker.inbox
            residents = worker.residents
            waiting = inbox.jobs
            if not waiting or (residents.jobs and residents.steps % self._interval):
                continue
            if self._in_turn(worker):
                if inbox.behind and inbox.behind[0].ticket < waiting[0].ticket:
                    first.append(inbox.behind[0])
                continue
            late: list[Job] = []
            evicted = True
            for job in waiting:
                if evicted and job.generated > 0:
                    continue
                evicted = False
                if not self._is_late(worker, job, now_s):
                    break
                late.append(job)
            if not late:
                continue
            in_order = not inbox.behind or inbox.behind[0].ticket > waiting[-1].ticket
            if len(late) < len(waiting) or len(late) > RECALL_COUNT or not in_order:
                behind += late
        return behind, first

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        fitting = super().admit(view, worker, candidates)
        if not fitting:
            return 0
        law = worker.latency
        chunk = self._chunk
        padded: bool = law.padded
        residents = worker.residents
        now_s = view.now_s
        expected = view.finished.mean()
        steps = residents.steps
        emits = worker.emits > 0
        peak = Peak(False)
        all_rows = RowLengths()
        entering = RowLengths()
        widest = 0  # the longest row at its end
        for job in residents.jobs:
            ran = steps - job.joined
            used = job.length + ran
            all_rows.add(used)
            left = _left(job, job.generated + ran, expected)
            peak.add(used, left)
            if used + left > widest:
                widest = used + left
        peak.sort()
        rows = all_rows.rows
        excused = self._in_turn(worker) and self._is_late(worker, candidates[0], now_s)
        deadline_s = math.inf
        count = 0
        while count < fitting:
            job = candidates[count]
            count += 1
            n = rows + count
            all_rows.add(job.length)
            entering.add(job.length)
            left = _left(job, job.generated, expected)
            peak.insert(job.length, left)
            if job.length + left > widest:
                widest = job.length + left
            step_s = law.decode_s(n, all_rows.length(padded), 1)
            prefill_s = law.prefill_s(entering.rows, entering.length(padded))
            prefilled_s = now_s + prefill_s
            stall_s = prefill_s
            if 0 < chunk < entering.tokens:
                longest = entering.longest
                stall_s = law.pass_s(1, max(longest - chunk, 0), longest)
            stepped_s = now_s + stall_s + step_s
            stalls = rows > 0 and stepped_s - worker.stepped_s > self._mtpot_s
            if rows and chunk:
                # the decode steps between the passes
                prefilled_s += entering.tokens // chunk * step_s
            if not (excused and count == 1):
                if stalls:
                    return count - 1
                if n > 1:
                    # A step of all rows at the predicted peak of memory.
                    length = float(widest) if padded else peak.tokens() / n
                    if law.decode_s(n, length, 1) > self._mtpot_s:
                        return count - 1
            if not job.generated and not self._is_late(worker, job, now_s):
                deadline_s = min(deadline_s, job.arrival_s + self._ttft_s)
            first_s = prefilled_s + (0.0 if emits else step_s)
            if count > 1 and first_s > deadline_s:
                return count - 1
        return fitting

    def _in_turn(self, worker: Worker) -> bool:
        """Whether this attempt is one of those that put the oldest late job first."""
        attempt = worker.residents.steps // self._interval % CYCLE_ATTEMPTS
        return attempt < self._late_attempts

    def _is_late(self, worker: Worker, job: Job, now_s: float) -> bool:
        """Whether its first token can only be late, or its prefill alone breaks others' MTPOT."""
        if job.generated > 0:
            return False
        known = self._alone[worker.index]
        alone = known.get(job.length)
        if alone is None:
            law = worker.latency
            length = job.length
            chunk = self._chunk
            step_s = law.decode_s(1, length, 1)
            prefill_s = law.prefill_s(1, length)
            stall_s = prefill_s
            if 0 < chunk < length:
                stall_s = law.pass_s(1, max(length - chunk, 0), length)
            breaks = stall_s + step_s > self._mtpot_s
            first_step_s = 0.0 if law.prefill_emits_token else step_s
            alone = known[length] = prefill_s, first_step_s, breaks
        prefill_s, first_step_s, breaks = alone
        first_s = now_s + prefill_s + first_step_s
        return first_s > job.arrival_s + self._ttft_s or breaks


def _left(job: Job, generated: int, expected: int) -> int:
    """The tokens that a job is expected to add, at least one."""
    limit = job.max_new_tokens
    left = (expected if expected < limit else limit) - generated
    return left if left > 1 else 1


class SliceEnds:
    """When the slices of residents end, and what follows from it: `SliceContinuousPolicy`."""

    def __init__(self, policy: SliceContinuousPolicy) -> None:
        self._slice: int = policy.slice_tokens
        self._interval: int = policy.interval_steps
        self._reserve: float = policy.reserve
        self._margin: float = policy.margin
        # steps of a slice that begins at an attempt to admit
        self.period = -(-self._slice // self._interval) * self._interval

    def limit(self, worker: Worker) -> int:
        """Tokens that slices may fill."""
        return int((1.0 - self._reserve) * worker.capacity_tokens)

    def promise(self, worker: Worker, _expected: int) -> tuple[int, int]:
        """The tokens that a worker promised, whatever the progress of the running round."""
        inbox = worker.inbox
        residents = worker.residents
        promised = inbox.tokens + len(inbox.jobs) * self.period
        if residents.jobs:
            promised += residents.used
            for job in residents.jobs:
                promised += self._left(worker, job)
            if worker.running is not None:  # prefills' tokens, counted when the round ends
                promised += len(worker.running.jobs) * worker.emits
        return promised, 0

    def release(self, view: View, promised: WorkerFigure) -> list[Job]:
        """See `SliceContinuousPolicy.release`."""
        leaving: list[Job] = []
        free: Numbers | None = None
        for worker in view.due:
            steps = worker.residents.steps
            if worker.residents.jobs and steps % self._interval == 0:
                over: list[Job] = []  # with a slice that ends just now, in order of admission
                for job in worker.residents.jobs:
                    end = self._first_end(worker, job.joined)
                    if steps >= end and (steps - end) % self.period == 0:
                        over.append(job)
                if over:
                    if free is None:
                        free = self._free(view, promised)
                    leaving += self._leaving(view, worker, over, free)
        return leaving

    def admit(self, view: View, worker: Worker, candidates: Sequence[Job]) -> int:
        """See `ContinuousPolicy.admit`."""
        residents = worker.residents
        emits = worker.emits
        most = self.limit(worker)
        steps = residents.steps
        peak = Peak(worker.padded)
        for job in residents.jobs:
            peak.add(job.length + steps - job.joined, self._to_add(worker, job))
        peak.sort()
        first = self._first_end(worker, steps) - steps
        for k in range(len(candidates)):
            job = candidates[k]
            left = job.max_new_tokens - job.generated - emits
            peak.insert(job.length + emits, first if first < left else left)
            if peak.tokens() > most:
                return k
        return len(candidates)

    def longest_round(self, worker: Worker, entering: int) -> int:
        """See `ContinuousPolicy.longest_round`."""
        residents = worker.residents
        nearest = NO_LIMIT
        for job in residents.jobs:
            left = self._left(worker, job)
            if left < nearest:
                nearest = left
        if entering or not residents.jobs:
            first = self._first_end(worker, residents.steps) - residents.steps
            if first < nearest:
                nearest = first
        return nearest

    def _first_end(self, worker: Worker, joined: int) -> int:
        """The worker's step at which the first slice of a job that joined at step `joined` ends."""
        first = self._slice - worker.emits
        return -(-(joined + (first if first > 1 else 1)) // self._interval) * self._interval

    def _left(self, worker: Worker, job: Job) -> int:
        """Steps until a resident's slice ends; a whole slice if it ends just now."""
        steps = worker.residents.steps
        end = self._first_end(worker, job.joined)
        return end - steps if steps < end else self.period - (steps - end) % self.period

    def _to_add(self, worker: Worker, job: Job) -> int:
        """Tokens that a resident can add until its slice ends."""
        left = self._left(worker, job)
        most = job.max_new_tokens - job.generated - (worker.residents.steps - job.joined)
        return left if left < most else most

    def _leaving(self, view: View, worker: Worker, over: Sequence[Job], free: Numbers) -> list[Job]:
        """The jobs of `over` that leave, in order of admission; what moves is taken off `free`."""
        residents = worker.residents
        steps = worker.residents.steps
        source = worker.index
        crowded = bool(worker.inbox.jobs)
        limit = self.limit(worker)
        staying = dict.fromkeys(residents.jobs)
        for job in over:
            del staying[job]
        source_free = int(free[source])
        free[source] = NO_FREE_TOKENS
        target = int(free.argmax()) if len(view.able) > 1 else source
        free[source] = source_free
        margin = self._margin * worker.capacity_tokens
        leaving: list[Job] = []
        peak = Peak(worker.padded)
        for job in staying:
            peak.add(job.length + steps - job.joined, self._to_add(worker, job))
        peak.sort()
        count = len(staying)
        for job in over:
            used = job.length + steps - job.joined
            left = self._to_add(worker, job)
            peak.insert(used, left)
            room = peak.tokens() <= limit
            if not crowded and (room or count == 0):
                count += 1
                continue
            needs = used + self.period
            moves = (
                target != source
                and int(free[target]) - needs - margin >= int(free[source])
                and view.workers[target].holds(job)
            )
            if not moves and (room or not crowded):
                count += 1
                continue
            leaving.append(job)
            peak.remove(used, left)
            free[source] += needs
            if moves:
                free[target] -= needs
        return leaving

    def _free(self, view: View, promised: WorkerFigure) -> Numbers:
        """Each worker's capacity less what it promised [n]; `NO_FREE_TOKENS` for lost workers."""
        free = np.full(len(view.workers), NO_FREE_TOKENS)
        able = view.able
        if view.mixed:
            capacities = [view.workers[index].capacity_tokens for index in able.tolist()]
            free[able] = np.array(capacities)
        else:
            free[able] = view.workers[0].capacity_tokens
        free[able] -= promised.bounds()[able]
        return free
