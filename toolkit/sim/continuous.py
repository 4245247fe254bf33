"""A simulated worker that keeps its caches between passes and computes a pass in closed form.

A pass means the same as to the engine `rebatch`: some rows leave, caches move, new rows are
prefilled, and all decode until one ends. `toolkit.sim.decoding` counts the rows; `ContinuousWorker`
runs the passes.

A pass is laid out before it runs, as stretches (`Stretch`): the times of its chunks and of the
decode steps between them. As in the engine, a bounded chunk and a step alternate until no row waits
for its prefill; the rest are steps alone. If no row decodes, a chunk takes all that is left of its
group. Each stretch of steps costs one evaluation of the law, so a pass costs as many evaluations as
it has chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from toolkit.sched.prefills import PrefillChunk, PrefillChunks, PrefillGroup
from toolkit.sched.types import NO_LIMIT, Failure, Job, Moves, Pass, PassResult
from toolkit.sim.decoding import Decoding
from toolkit.sim.ledger import Ledger

if TYPE_CHECKING:
    from toolkit.sim.world import World


NO_CHUNKS: Final[tuple[tuple[int, float], ...]] = ()


class Stretch:
    """Prefill chunks, then decode steps.

    Attributes:
        chunks: the bound in tokens (0: none) and the end of each.
        begin_s, end_s: of the steps.
        steps: how many, of `rows` rows, of L `length` before the first step.
    """

    __slots__ = ("begin_s", "chunks", "end_s", "length", "rows", "steps")

    def __init__(
        self,
        chunks: tuple[tuple[int, float], ...],
        begin_s: float,
        steps: int,
        end_s: float,
        rows: int,
        length: float,
    ) -> None:
        self.chunks = chunks
        self.begin_s = begin_s
        self.steps = steps
        self.end_s = end_s
        self.rows = rows
        self.length = length


class ContinuousWorker(Decoding):
    """The worker of passes that keep their caches: tokens reach the client step by step."""

    def __init__(self, index: int, ledger: Ledger, world: World) -> None:
        super().__init__(index, ledger, world)
        self._future: bool = world.future_memory
        self._batch: Pass | None = None
        self._start_s = 0.0
        self._begun_s = 0.0
        self._prefilled_s = 0.0
        self._moved_s = 0.0  # when the current pass's transfers end
        self._ran = 0  # steps that the current pass will have made
        self._failure: Failure = ""  # of a padded worker
        self._dropped: tuple[str, ...] = ()  # the requests that the failure dropped
        # rows in a prefill of several chunks
        self._newcomers: PrefillChunks[Job] = PrefillChunks()
        self._step_is_due = False  # before their next chunk
        self._in_chunks = False  # whether the current pass has such chunks
        self._stretches: list[Stretch] = []  # of the current pass

    def run(self, batch: Pass, now_s: float) -> float:
        times = self._latency
        jobs = batch.jobs
        self._batch = batch
        self._start_s = now_s
        self._failure = ""
        self._dropped = ()
        begun_s = now_s + self._round_s
        if batch.evict or batch.release or batch.moves is not None:
            for job in batch.evict:
                self._ledger.evictions += self._drop(job)
            for job in batch.release:
                self._ledger.reroutes += self._drop(job)
            left = len(batch.evict) + len(batch.release)
            if left and self._resident:
                begun_s += left * times.leave_s(self._length())
            if batch.moves is not None:
                begun_s = self._move(batch.moves, begun_s)
        self._begun_s = self._prefilled_s = begun_s
        self._in_chunks = False
        if (batch.chunk_tokens and jobs) or self._newcomers:
            self._in_chunks = True
            for job in jobs:
                self._newcomers.add(job, job.length)
        elif jobs:
            self._prefilled_s += self._prefill(jobs, batch.input_length)
        if self._failure:
            self._ran = 0
            self._done_s = self.known_s = max(self._prefilled_s, self._moved_s)
            return self._done_s
        if not self._resident:
            self._ends.clear()
        elif len(self._ends) > len(self._resident):
            self._drop_stale_ends()
        self._stretches = self._lay_out(batch, self._prefilled_s)
        self._end()
        return self._done_s

    def _end(self) -> None:
        """Note what the stretches say of the pass's end."""
        self._ran = 0
        for stretch in self._stretches:
            self._ran += stretch.steps
        self.known_s = self._stretches[-1].end_s
        self._done_s = max(self.known_s, self._moved_s)

    def interrupt(self, now_s: float) -> float:
        batch = self._batch
        assert batch is not None
        if self._failure or now_s >= self.known_s:
            return self._done_s
        least = int(self._in_chunks or batch.chunk_tokens > 0)
        ran = 0
        for stretch in self._stretches:
            if now_s <= stretch.end_s:
                ran += max(self._steps_within(stretch, now_s), least)
                break
            ran += stretch.steps
        ran += -(self._steps + ran) % batch.stop_every
        if ran <= self._ran:
            self._cut(ran)
        return self._done_s

    def finish(self) -> PassResult:
        batch = self._batch
        ledger = self._ledger
        ran = self._ran
        index = self._index
        assert batch is not None
        self._count_time(self._start_s)
        moves = batch.moves
        if self._resident:
            rows = len(self._resident)
            entering = self._prefilled_rows(batch)
            longest = batch.input_length if entering else 0
            self._count_extrapolated(entering, longest, rows, self._length() + ran)
        if self._failure:
            if moves is not None and moves.overlap:
                self._swap_store.transfer(moves)
            failed = self._failure
            return PassResult(batch.pass_id, index, 0, (), (), failed, dropped=self._dropped)
        if self._future:
            # the true peak to come, once for each attempt to admit: it is constant until an end
            steps = self._steps
            every = batch.stop_every
            attempts = -(-(steps + ran) // every) - -(-steps // every)
            if attempts:
                coming = [
                    (job.length + self._emits, self._left(job) - self._emits)
                    for job in self._newcomers.all_keys()
                ]
                ledger.future_token_attempts += attempts * self._future_peak(coming)
                ledger.attempts += attempts
        ledger.rounds += 1
        if batch.jobs and self._emits and not self._in_chunks:
            self._give_tokens(self._tokenless, self._prefilled_s)
            self._gaps.joined(self._prefilled_s)
        joined = self._take_stretches(batch)
        if moves is not None and moves.overlap:
            ledger.swap_wait_s += self._done_s - self.known_s
            self._swap_store.transfer(moves)
        ended = self._end_due() if self._ends[0].end <= self._steps else ()
        return PassResult(batch.pass_id, index, ran, ended, joined if self._in_chunks else None)

    def _prefilled_rows(self, batch: Pass) -> int:
        """Rows of the pass's prefill."""
        return len(batch.jobs)

    def _lay_out(self, batch: Pass, now_s: float) -> list[Stretch]:
        """Return the stretches of a pass, which begins at `now_s`. While a row decodes,
        `chunk_tokens` bounds a chunk; at 0 all chunks come before the first step.
        """
        newcomers = self._newcomers.copy()
        times = self._latency
        chunk_tokens = batch.chunk_tokens
        # of the rows that will decode: how many, their keys, and the step at which the first ends
        rows = len(self._resident)
        keys = self._key_sum
        longest = self._longest_key
        first_end = self._ends[0].end if rows else NO_LIMIT
        steps = self._steps
        step_is_due = self._step_is_due
        last = steps + batch.steps
        stretches: list[Stretch] = []
        while True:
            chunks = NO_CHUNKS
            while newcomers and not (step_is_due and rows):
                if chunk_tokens and first_end <= steps:
                    break
                bound = chunk_tokens if rows else 0
                made = newcomers.next(bound)
                now_s += self._chunk_s(made)
                chunks += ((bound, now_s),)
                newcomers.made(made)
                if made.completes:
                    for job in made.group.keys:
                        key = job.length - steps
                        longest = max(longest, key) if rows else key
                        keys += key
                        rows += 1
                        first_end = min(first_end, steps + self._left(job) - self._emits)
                step_is_due = bound > 0
            due = first_end - steps
            ran = min(due, last - steps)
            if newcomers:
                ran = min(ran, 1)
            length = steps + (float(longest) if self._padded else keys / rows)
            begin_s = now_s
            now_s += times.decode_s(rows, length, ran) if ran else 0.0
            if ran and ran == due:
                now_s += times.leave_s(length + ran)
            stretches.append(Stretch(chunks, begin_s, ran, now_s, rows, length))
            steps += ran
            if not newcomers or ran == due or steps == last:
                return stretches
            step_is_due = False

    def _steps_within(self, stretch: Stretch, now_s: float) -> int:
        """The number of a stretch's steps up to the first that ends at or after `now_s`."""
        times = self._latency
        n = stretch.rows
        length = stretch.length
        ran = stretch.steps
        begin_s = stretch.begin_s
        steps = 0
        if now_s > begin_s and ran:
            steps = int(ran * (now_s - begin_s) / (stretch.end_s - begin_s))  # a guess
        while steps > 0 and begin_s + times.decode_s(n, length, steps - 1) >= now_s:
            steps -= 1
        while (
            steps < ran and begin_s + (times.decode_s(n, length, steps) if steps else 0.0) < now_s
        ):
            steps += 1
        return steps

    def _cut(self, steps: int) -> None:
        """Stop the laid-out pass after `steps` steps, before any chunk that follows them."""
        for number, stretch in enumerate(self._stretches):
            if stretch.steps >= steps:
                if stretch.steps > steps:
                    took_s = self._latency.decode_s(stretch.rows, stretch.length, steps)
                    stretch.steps = steps
                    stretch.end_s = stretch.begin_s + (took_s if steps else 0.0)
                del self._stretches[number + 1 :]
                break
            steps -= stretch.steps
        self._end()

    def _take_stretches(self, batch: Pass) -> tuple[tuple[str, int], ...]:
        """Record the stretches; each request that joined, and after how many steps of the pass."""
        joined: list[tuple[str, int]] = []
        before = self._steps
        ledger = self._ledger
        for stretch in self._stretches:
            for bound, end_s in stretch.chunks:
                made = self._newcomers.next(bound)
                self._newcomers.made(made)
                self._step_is_due = bound > 0
                if made.completes:
                    total = self._enter(made.group.keys)
                    rows = len(made.group.keys)
                    ledger.batches += 1
                    ledger.rows += rows
                    if self._padded:
                        ledger.pad_tokens += rows * made.group.width - total
                    if self._emits:
                        self._give_tokens(self._tokenless, end_s)
                        self._gaps.joined(end_s)
                    joined += [(job.request_id, self._steps - before) for job in made.group.keys]
            if stretch.steps:
                group = self._newcomers.group
                beside = self._beside(batch.moves)
                if group is not None:
                    beside += self._taken_by(group)
                self._take_steps(stretch.begin_s, stretch.steps, stretch.end_s, beside)
                self._step_is_due = False
        return tuple(joined) if joined else ()

    def _chunk_s(self, made: PrefillChunk[Job]) -> float:
        """Seconds of a chunk; in a paged engine by the mean length of its rows."""
        rows = len(made.group.keys)
        lengths = made.group.lengths
        share = 1.0 if self._padded else sum(lengths) / rows / made.group.width
        return self._latency.pass_s(rows, made.start * share, made.end * share)

    def _taken_by(self, group: PrefillGroup[Job]) -> int:
        """Tokens of KV cache that a group takes besides the rows that decode."""
        return sum(group.lengths)

    def _left(self, job: Job) -> int:
        """Tokens that the job will still generate."""
        return self._ledger.outcomes[job.number].output_tokens - job.generated

    def _move(self, moves: Moves, now_s: float) -> float:
        """Move caches; when the pass's own work begins."""
        store = self._swap_store
        resident = self._resident
        for job in (*moves.pause, *moves.swap_out):
            row = resident.get(job)
            if row is not None:
                self._leave(row)
                store.put(job, row.key + self._steps + self._emits)
        self._moved_s = moved_s = now_s + store.duration_s(moves)
        waits = not (moves.overlap and store.law is not None and store.law.overlaps)
        if waits:  # the pass's compute
            self._ledger.swap_wait_s += moved_s - now_s
        if not moves.overlap:
            store.transfer(moves)
        if moves.resume:
            self._resume(moves.resume)
        return moved_s if waits else now_s

    def _prefill(self, jobs: Sequence[Job], longest: int) -> float:
        """Return the seconds of the prefill of jobs, which decode from here on; `longest`: tokens
        of the longest input.
        """
        ledger = self._ledger
        total = self._enter(jobs)
        ledger.batches += 1
        ledger.rows += len(jobs)
        if self._padded:
            ledger.pad_tokens += len(jobs) * longest - total
        mean = float(longest) if self._padded else total / len(jobs)
        return self._latency.prefill_s(len(jobs), mean)

    def _drop(self, job: Job) -> bool:
        """Drop the job's cache; False if it was cancelled before and has none."""
        row = self._resident.get(job)
        if row is not None:
            self._leave(row)
            return True
        if job in self._newcomers:
            self._newcomers.remove(job)
            return True
        return self._swap_store.drop(job)
