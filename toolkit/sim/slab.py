"""A simulated worker that runs its batch in one padded slab of KV cache, as the engine `rebatch`
(BATON, section 4).

It differs from `ContinuousWorker` in three ways. Memory is the number of rows times the longest
row. A pass that needs more memory than there is runs out of it at that step, and the row admitted
last is dropped. New rows join in one of two ways:

- embed: they are prefilled apart, in groups of similar length one after the other, and then put
  into the slab;
- shape: they are prefilled in a step of the running rows, with all rows padded to the longest new
  input. This costs as much as a prefill of all rows at that length and gives every row a token.
  Meanwhile the slab is longer by the padding. If no row runs, it is a normal prefill. If prefills
  give no token, it is a prefill of all rows, and the step follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit.sched.prefills import PrefillGroup, groups_alike
from toolkit.sched.types import Job, Pass, PassResult
from toolkit.sim.continuous import ContinuousWorker
from toolkit.sim.ledger import Ledger

if TYPE_CHECKING:
    from toolkit.sim.world import World


class SlabWorker(ContinuousWorker):
    """The worker of passes that keep their caches in a slab."""

    def __init__(self, index: int, ledger: Ledger, world: World) -> None:
        super().__init__(index, ledger, world)
        self._capacity: int = world.memory.usable_tokens
        # decode steps of the current pass for which memory suffices; -1: all of them
        self._spills_after = -1
        self._in_slab = True
        self._shapes = world.joining == "shape"
        self._shaped = 0  # 1 if the current pass's prefill is a step
        # its prefill passes except the last: rows, gap mark, end in seconds
        self._passes: list[tuple[int, int, float]] = []

    @property
    def used(self) -> int:
        """Tokens that the slab takes now."""
        return len(self._resident) * self._width()

    def _prefilled_rows(self, batch: Pass) -> int:
        return len(self._resident) if batch.jobs and self._shapes else len(batch.jobs)

    def _taken_by(self, group: PrefillGroup[Job]) -> int:
        return group.width * len(group.keys)

    def run(self, batch: Pass, now_s: float) -> float:
        self._shaped = 0
        self._spills_after = -1
        super().run(batch, now_s)
        if self._failure or self._in_chunks:
            # a row prefilled in chunks counts with its whole input from admission on: memory
            # cannot run out during the pass
            return self._done_s
        if self._shaped and self._ran == batch.steps:  # the pass was the first of the steps
            self._cut(batch.steps - 1)
        n = len(self._resident)
        left = self._capacity - self._beside(batch.moves)
        width = self._width()
        if n * (width + self._ran) > left:
            self._spills_after = max(left // n - width, 0)
            self._cut(self._spills_after)
        return self._done_s

    def finish(self) -> PassResult:
        batch = self._batch
        assert batch is not None
        if self._failure:
            self._passes.clear()
        elif self._shaped:  # the new rows were prefilled in a step, which ends with the prefill
            ledger = self._ledger
            at_s = self._prefilled_s
            n = len(self._resident)
            ledger.decoding_steps += 1
            ledger.row_steps += n
            taken = self.used + n * (batch.input_length - 1) + self._beside(batch.moves)
            ledger.peak_tokens = max(ledger.peak_tokens, float(taken))
            ledger.memory_token_steps += taken
            if ledger.token_gaps is not None:
                self._count_waits(at_s, ledger.token_gaps)
            self._gaps.end_waits(at_s)
            self._give_tokens(self._resumed, at_s)
            self._give_tokens(self._tokenless, at_s)
            self._gaps.wait_from(at_s)
        for rows, mark, at_s in self._passes:
            self._give_tokens(self._tokenless[:rows], at_s)
            del self._tokenless[:rows]
            self._gaps.joined(at_s, mark)
        self._passes.clear()
        spills = not self._failure and self._ran == self._spills_after
        result = super().finish()
        if self._shaped:
            result.steps += 1
            result.joined = tuple([(job.request_id, 1) for job in batch.jobs])
        if spills and self._resident:
            self._shaped = 0  # its step is done
            self._run_out_of_memory([next(reversed(self._swap_store.device or self._resident))])
            result.failure = self._failure
            result.dropped = self._dropped
        return result

    def _prefill(self, jobs: Sequence[Job], longest: int) -> float:
        running = len(self._resident)
        if self._shapes and running:
            if self._emits:
                self._shaped = 1
                self._steps += 1
            super()._prefill(jobs, longest)
            if self._padded:
                self._ledger.pad_tokens += running * (longest - 1)
            seconds = self._latency.prefill_s(running + len(jobs), longest)
        else:
            seconds = self._prefill_apart(jobs, longest)
        n = len(self._resident)
        if not self._failure and n != 1:
            # the peak in tokens while new rows are prefilled: see `SlabFootprint`
            longer = longest * (n if self._shapes and running else 1)
            assert self._batch is not None
            beside = self._beside(self._batch.moves)
            if n * (self._width() - self._shaped) + longer + beside > self._capacity:
                self._run_out_of_memory(jobs)
        return seconds

    def _prefill_apart(self, jobs: Sequence[Job], longest: int) -> float:
        if self._shapes or len(jobs) == 1:
            return super()._prefill(jobs, longest)
        groups = groups_alike([job.length for job in jobs])
        seconds = 0.0
        for number, group in enumerate(groups, start=1):
            alike = [jobs[index] for index in group]
            seconds += super()._prefill(alike, max([job.length for job in alike]))
            if self._emits and number < len(groups):
                mark = self._resident[alike[0]].mark
                self._passes.append((len(alike), mark, self._begun_s + seconds))
        return seconds

    def _run_out_of_memory(self, jobs: Sequence[Job]) -> None:
        """Memory has run out: drop `jobs` and end the pass."""
        self._failure = "oom"
        self._ledger.oom_batches += 1
        self._stretches = []
        self._step_is_due = False
        for job in jobs:
            self._drop(job)
        self._dropped = tuple([job.request_id for job in reversed(jobs)])
        self._steps -= self._shaped
        self._shaped = 0

    def _width(self) -> int:
        """Tokens of the longest resident."""
        if not self._resident:
            return 0
        longest = self._longest_key
        if not self._padded:
            longest = max([row.key for row in self._resident.values()])
        return longest + self._steps + self._emits
