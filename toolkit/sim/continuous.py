"""A simulated worker that keeps its caches between rounds, and leaps over a round's steps in closed form.

A round costs O(log n) and nothing per token: who ends next is the top of a heap of end steps; the largest gap between a
request's tokens comes from a stack of the gaps that nothing later exceeded; memory is summed as a series. The worker
keeps its own books, so that it can hold the scheduler to its capacity.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from toolkit.sched.kernels import future_peak
from toolkit.sched.protocols import LatencyLaw, SwapLaw
from toolkit.sched.types import Batch, Failure, Job, Moves, RoundResult
from toolkit.sim.gaps import Gaps
from toolkit.sim.ledger import Ledger, RunsOut
from toolkit.sim.shelves import Shelves
from toolkit.sim.token_gaps import TokenGaps


class RoundWorker:
    """Runs the rounds of one worker on virtual time: `run` says when one ends, `finish` makes it so.

    Between the two, `interrupt` may bring the end forward. Tokens reach their client step by step.

    Args:
        index: the worker's, for the ledger.
        latency: the law that time follows here.
        ledger: where the outcome is written; it holds the true output lengths.
        number: request id to its index in the ledger.
        runs_out: whether a round in which some enter runs out of memory.
        swap: how long transfers to host memory and back take; None: nothing is swapped.
        future: whether the true peak of memory to come is computed, which costs O(n log n) per round.
    """

    def __init__(
        self,
        index: int,
        latency: LatencyLaw,
        ledger: Ledger,
        number: dict[str, int],
        runs_out: RunsOut | None = None,
        *,
        swap: SwapLaw | None = None,
        future: bool = False,
    ) -> None:
        self._index, self._latency, self._ledger, self._number = index, latency, ledger, number
        self._runs_out, self._future = runs_out, future
        self._emits = int(latency.prefill_emits_token)
        self._padded = latency.padded
        self._decode_s: Callable[[int, float, int], float] = latency.decode_s
        self._steps = 0  # decode steps since the start
        self._ends: list[tuple[int, int, Job]] = []  # heap of (end step, admission, job); stale if the job has left
        self._admissions = 0
        self._resident: dict[
            Job, tuple[int, int, int, int]
        ] = {}  # (admission, length - steps at entry, gap mark, number)
        self._key_sum = 0  # of length - steps at entry, the prefill's token not counted
        self._longest_key = 0
        self._gaps = Gaps()
        self._tokenless: list[Job] = []  # entered, and their next token has not come yet
        self._resumed: list[Job] = []  # the same of those who came back with their caches
        self._shelves = Shelves(swap, ledger)
        self._batch: Batch | None = None
        self._start_s = self._begun_s = self._prefilled_s = self._stepped_s = self._done_s = 0.0
        self._moved_s = 0.0  # when the current round's transfers end
        self._ran = 0  # steps that the current round will have made
        self._failure: Failure = ""

    @property
    def used(self) -> int:
        """Tokens in the residents' caches now."""
        return self._key_sum + len(self._resident) * (self._steps + self._emits)

    def run(self, batch: Batch, now_s: float) -> float:
        """Start a round; when it will end, in seconds, if nobody interrupts it."""
        for job in batch.evict:
            self._ledger.evictions += self._drop(job)
        for job in batch.release:
            self._ledger.reroutes += self._drop(job)
        self._batch, self._start_s, self._failure = batch, now_s, ""
        self._begun_s = prefilled_s = self._begin(batch, now_s)
        if batch.jobs:
            prefilled_s += self._prefill(batch)
            if self._failure:
                self._ran, self._prefilled_s, self._done_s = 0, prefilled_s, prefilled_s
                return prefilled_s
        ends, n = self._ends, len(self._resident)
        if len(ends) > n:
            self._drop_stale_ends()
        due = ends[0][0] - self._steps
        ran = due if due < batch.steps else batch.steps
        self._ran, self._prefilled_s = ran, prefilled_s
        stepped_s = prefilled_s + self._decode_s(n, self._length(), ran) if ran else prefilled_s
        if ran and ran == due:
            stepped_s += self._latency.leave_s(self._length() + ran)
        self._stepped_s = stepped_s
        self._done_s = done_s = stepped_s if stepped_s > self._moved_s else self._moved_s
        return done_s

    def _begin(self, batch: Batch, now_s: float) -> float:
        """Rows leave and caches change places; when the first prefill or step begins."""
        left = len(batch.evict) + len(batch.release)
        begin_s = now_s + self._latency.round_s
        if left and self._resident:
            begin_s += left * self._latency.leave_s(self._length())
        return begin_s if batch.moves is None else self._move(batch.moves, begin_s)

    def _drop_stale_ends(self) -> None:
        """What is on top of the heap belongs to a resident, not to one who was evicted or paused meanwhile."""
        ends, resident = self._ends, self._resident
        while True:
            _, admission, job = ends[0]
            if job in resident and resident[job][0] == admission:
                return
            heappop(ends)

    def interrupt(self, now_s: float) -> float:
        """Stop at the first step from now on where that is allowed; when the round ends now."""
        batch = self._batch
        assert batch is not None
        if self._failure or now_s >= self._stepped_s:
            return self._done_s
        n, length, decode_s, begin_s = len(self._resident), self._length(), self._decode_s, self._prefilled_s
        guess = int(self._ran * (now_s - begin_s) / (self._stepped_s - begin_s)) if now_s > begin_s else 0
        while guess > 0 and begin_s + decode_s(n, length, guess - 1) >= now_s:
            guess -= 1
        while guess < self._ran and begin_s + (decode_s(n, length, guess) if guess else 0.0) < now_s:
            guess += 1
        guess += -(self._steps + guess) % batch.stop_every
        if guess < self._ran:
            self._ran = guess
            self._stepped_s = begin_s + decode_s(n, length, guess) if guess else begin_s
            self._done_s = max(self._stepped_s, self._moved_s)
        return self._done_s

    def finish(self) -> RoundResult:
        """The round has ended: write down what happened in it."""
        batch, ledger, ran, done_s, index = self._batch, self._ledger, self._ran, self._done_s, self._index
        assert batch is not None
        ledger.busy_s[index] += done_s - self._start_s
        ledger.completed_s[index] = done_s
        if self._failure:
            return RoundResult(batch.batch_id, index, 0, (), False, self._failure)
        moves = batch.moves
        if self._future:
            self._count_future(batch)
        ledger.rounds += 1
        if batch.jobs and self._emits:
            self._give_tokens(self._tokenless, self._prefilled_s)
            self._gaps.joined(self._prefilled_s)
        if ran:
            n, used = len(self._resident), self.used + self._beside(moves)
            row_steps = n * ran
            ledger.decoding_steps += ran
            ledger.row_steps += row_steps
            if used + row_steps > ledger.peak_tokens:
                ledger.peak_tokens = used + row_steps
            ledger.memory_token_steps += ran * used + n * (ran * (ran + 1) // 2)
            self._step_gaps(n, ran)
            self._steps += ran
        if moves is not None and moves.overlap:
            self._transferred(moves, done_s)
        return RoundResult(batch.batch_id, index, ran, self._end_those_due() if self._ends[0][0] <= self._steps else ())

    def _move(self, moves: Moves, now_s: float) -> float:
        """Caches change places; when the round's own work begins."""
        shelves, resident = self._shelves, self._resident
        for job in (*moves.pause, *moves.swap_out):
            if job in resident:
                held = resident[job][1] + self._steps + self._emits
                self._leave(job)
                shelves.put(job, held)
        self._moved_s = moved_s = now_s + shelves.duration_s(moves)
        if not moves.overlap:
            shelves.transfer(moves)
            self._ledger.swap_wait_s += moved_s - now_s
        if moves.resume:
            self._resume(moves.resume)
        return now_s if moves.overlap else moved_s

    def _resume(self, jobs: Sequence[Job]) -> None:
        """They are resident again, as if they had never been away: their next token comes with the next step."""
        resident, before = self._resident, self._steps + self._emits
        outputs, number = self._ledger.output_tokens, self._number
        mark = self._gaps.mark(alone=not resident)
        for job in jobs:
            key = self._shelves.take(job) - before
            self._admissions = admission = self._admissions + 1
            if not resident or key > self._longest_key:
                self._longest_key = key
            k = number[job.request.request_id]
            resident[job] = (admission, key, mark, k)
            self._key_sum += key
            heappush(self._ends, (self._steps + outputs[k] - job.generated, admission, job))
        self._resumed += jobs

    def _transferred(self, moves: Moves, done_s: float) -> None:
        """Transfers beside a round are done."""
        self._ledger.swap_wait_s += done_s - self._stepped_s
        self._shelves.transfer(moves)

    def _beside(self, moves: Moves | None) -> int:
        """Tokens on the device besides the residents', those in transfer with them."""
        shelves = self._shelves
        return shelves.device_tokens + (shelves.arriving(moves) if moves is not None and moves.overlap else 0)

    def _prefill(self, batch: Batch) -> float:
        """Seconds that it takes those who enter, who are resident from here on."""
        jobs, resident, ends, steps, ledger = batch.jobs, self._resident, self._ends, self._steps, self._ledger
        outputs, number, admission = ledger.output_tokens, self._number, self._admissions
        mark = self._gaps.mark(alone=not resident)
        longest = self._longest_key if resident else jobs[0].length - steps
        decoded = steps - self._emits
        total = 0
        for job in jobs:
            length = job.length
            total += length
            key = length - steps
            if key > longest:
                longest = key
            admission += 1
            k = number[job.request.request_id]
            resident[job] = (admission, key, mark, k)
            heappush(ends, (decoded + outputs[k] - job.generated, admission, job))
        self._key_sum += total - len(jobs) * steps
        self._longest_key, self._admissions = longest, admission
        self._tokenless += jobs
        ledger.batches += 1
        ledger.rows += len(jobs)
        if self._padded:
            ledger.pad_tokens += len(jobs) * batch.input_length - total
        mean = batch.input_length if self._padded else total / len(jobs)
        if self._runs_out:
            n = len(resident)
            if self._runs_out(batch.batch_id, n, self.used // n, batch.steps):
                self._fail("oom")
        return self._latency.prefill_s(len(jobs), mean)

    def _fail(self, failure: Failure) -> None:
        """All caches are lost."""
        self._failure = failure
        self._ledger.oom_batches += 1
        for job in list(self._resident):
            self._leave(job)
        self._ends.clear()
        self._tokenless.clear()
        self._resumed.clear()
        self._shelves.drop_device()

    def _length(self) -> float:
        """L of the next decode steps: the longest resident's, or the mean of a paged engine's."""
        if self._padded:
            return self._longest_key + self._steps
        return self._key_sum / len(self._resident) + self._steps

    def _give_tokens(self, jobs: list[Job], at_s: float) -> None:
        """A token for each of `jobs`, the first since they entered or came back; they wait for it no more."""
        ledger, number = self._ledger, self._number
        for job in jobs:
            k = number[job.request.request_id]
            if ledger.first_token_s[k] < 0.0:
                ledger.first_token_s[k] = at_s
            else:
                ledger.max_gap_s[k] = max(ledger.max_gap_s[k], at_s - ledger.last_token_s[k])
                if ledger.token_gaps is not None:
                    ledger.token_gaps.add(1, at_s - ledger.last_token_s[k], at_s - ledger.last_token_s[k])
            ledger.last_token_s[k] = at_s
        jobs.clear()

    def _step_gaps(self, n: int, ran: int) -> None:
        """The first step ends the wait since everybody's last token; of the others the last takes longest."""
        length, decode_s, gaps, prefilled_s = self._length(), self._decode_s, self._gaps, self._prefilled_s
        if self._ledger.token_gaps is not None:
            self._count_gaps(n, ran, self._ledger.token_gaps)
        if self._tokenless or self._resumed or ran == 1 or gaps.waiting_since != prefilled_s:
            first_s = prefilled_s + decode_s(n, length, 1)
            gaps.end_waits(first_s)
            if self._tokenless:
                self._give_tokens(self._tokenless, first_s)
            if self._resumed:
                self._give_tokens(self._resumed, first_s)
        if ran > 1:
            gaps.push(self._stepped_s - (prefilled_s + decode_s(n, length, ran - 1)))
        gaps.wait_from(self._stepped_s)

    def _count_gaps(self, n: int, ran: int, into: TokenGaps) -> None:
        """Every gap of a round's steps; those of who has just come back are counted when they get their token."""
        length, decode_s, begin_s = self._length(), self._decode_s, self._prefilled_s
        first_s = begin_s + decode_s(n, length, 1)
        self._count_waits(first_s, into)
        if ran > 1:
            second_s = begin_s + decode_s(n, length, 2) - first_s
            last_s = self._stepped_s - (begin_s + decode_s(n, length, ran - 1))
            into.add(n * (ran - 1), second_s, last_s)

    def _count_waits(self, at_s: float, into: TokenGaps) -> None:
        """The gaps that end with a token for all at `at_s`."""
        fresh = {*self._tokenless, *self._resumed}
        joined = Counter(mark for job, (_, _, mark, _) in self._resident.items() if job not in fresh)
        for mark, count in joined.items():
            waited_s = at_s - self._gaps.since(mark)
            into.add(count, waited_s, waited_s)

    def _end_those_due(self) -> tuple[str, ...]:
        ends, steps, resident, ledger = self._ends, self._steps, self._resident, self._ledger
        ended: list[str] = []
        while ends and ends[0][0] <= steps:
            _, admission, job = heappop(ends)
            if job in resident and resident[job][0] == admission:
                ledger.ok[self._leave(job)] = True
                ended.append(job.request.request_id)
        return tuple(ended)

    def _drop(self, job: Job) -> bool:
        """Its cache is dropped; false for one that was cancelled and has gone."""
        if job not in self._resident:
            return self._shelves.drop(job)
        self._leave(job)
        return True

    def _leave(self, job: Job) -> int:
        """The job is resident no more; its number. Its tokens so far, and their gaps, are in the ledger."""
        _, key, mark, k = self._resident.pop(job)
        self._key_sum -= key
        if self._padded and key == self._longest_key and self._resident:
            self._longest_key = max([entry[1] for entry in self._resident.values()])
        ledger, last_s = self._ledger, self._gaps.last_s
        for waiting in (self._tokenless, self._resumed):
            if waiting and job in waiting:
                waiting.remove(job)  # no token has come since it joined
                return k
        if last_s > ledger.last_token_s[k]:
            ledger.last_token_s[k] = last_s
        gap_s = self._gaps.largest(mark)
        if gap_s > ledger.max_gap_s[k]:
            ledger.max_gap_s[k] = gap_s
        return k

    def _count_future(self, batch: Batch) -> None:
        """The true peak to come, once for each attempt to admit in this round: it stays the same between two ends."""
        attempts = -(-(self._steps + self._ran) // batch.stop_every) - -(-self._steps // batch.stop_every)
        if attempts:
            ends = {admission: end for end, admission, _ in self._ends}
            held = self._steps + self._emits
            used = np.array([key + held for _, key, _, _ in self._resident.values()], dtype=np.int64)
            remaining = np.array([ends[admission] - self._steps for admission, *_ in self._resident.values()])
            self._ledger.future_token_attempts += attempts * self._peak_to_come(used, remaining)
            self._ledger.attempts += attempts

    def _peak_to_come(self, used: NDArray[np.int64], remaining: NDArray[np.int64]) -> int:
        """The most tokens that rows of `used` tokens will take, each leaving after its `remaining` steps."""
        return int(future_peak(used, remaining))
