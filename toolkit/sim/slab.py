"""A simulated worker whose running batch is one padded slab of KV cache, as on the engine `rebatch` (BATON, section 4).

It differs from its base in two things. Memory is rows x the longest of them. And who enters joins in one of two ways:

- embed: prefilled apart, in groups of like length one after the other, then put into the slab;
- shape: prefilled in a step of those who run, all padded to the longest who enters. It costs what a prefill of all rows
  at that length would, gives everybody a token, and while it lasts the slab is longer by the padding. Where nobody
  runs it is a prefill like any other; where prefills give no token, it is one of all rows, and the step comes after it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.sched.likeness import groups_alike
from toolkit.sched.types import Batch, Failure, Joining, RoundResult
from toolkit.sim.continuous import RoundWorker


def padded_peak(used: NDArray[np.int64], remaining: NDArray[np.int64]) -> int:
    """M* of Past-Future's Eq. 2-4 on a slab: the most that rows x the longest of those still there will come to.

    Args:
        used: tokens of each row now [n].
        remaining: the steps that each has left [n].
    """
    order = np.argsort(-remaining, kind="stable")
    longest = np.maximum.accumulate(used[order]) + remaining[order]
    return int((longest * np.arange(1, len(order) + 1)).max())


class SlabWorker(RoundWorker):
    """Runs the rounds of one padded worker on virtual time; see `RoundWorker` for the other arguments.

    Args:
        joining: how those who enter do so.
    """

    def __init__(self, *args: Any, joining: Joining, **options: Any) -> None:
        super().__init__(*args, **options)
        self._shapes = joining == "shape"
        self._shaped = 0  # 1 where the current round's prefill is a step
        self._passes: list[tuple[int, int, float]] = []  # of its prefill, but for the last: rows, mark, end in seconds

    @property
    def used(self) -> int:
        """Tokens that the slab is taken for now."""
        return len(self._resident) * self._width()

    def _peak_to_come(self, used: NDArray[np.int64], remaining: NDArray[np.int64]) -> int:
        return padded_peak(used, remaining)

    def run(self, batch: Batch, now_s: float) -> float:
        """Start a round; when it will end, in seconds, if nobody interrupts it."""
        self._shaped = 0
        super().run(batch, now_s)
        if self._shaped and self._ran == batch.steps:  # the pass was the first of them
            self._ran = ran = batch.steps - 1
            decoded_s = self._decode_s(len(self._resident), self._length(), ran) if ran else 0.0
            self._stepped_s = self._prefilled_s + decoded_s
            self._done_s = max(self._stepped_s, self._moved_s)
        return self._done_s

    def finish(self) -> RoundResult:
        """The round has ended: write down what happened in it."""
        if self._failure:
            self._passes.clear()
        elif self._shaped:
            self._step_with_newcomers()
        for rows, mark, at_s in self._passes:
            self._give_tokens(self._tokenless[:rows], at_s)
            del self._tokenless[:rows]
            self._gaps.joined(at_s, mark)
        self._passes.clear()
        result = super().finish()
        if self._shaped:
            result.steps += 1
            result.prefilled = False
        return result

    def _prefill(self, batch: Batch) -> float:
        there = len(self._resident)
        if self._shapes and there:
            return self._shape(batch, there)
        if self._shapes or len(batch.jobs) == 1:
            return super()._prefill(batch)
        groups = groups_alike([job.length for job in batch.jobs])
        seconds = 0.0
        for number, group in enumerate(groups, start=1):
            jobs = tuple([batch.jobs[index] for index in group])
            seconds += super()._prefill(replace(batch, jobs=jobs, input_length=max([job.length for job in jobs])))
            if self._failure:
                break
            if self._emits and number < len(groups):
                self._passes.append((len(jobs), self._resident[jobs[0]][2], self._begun_s + seconds))
        return seconds

    def _shape(self, batch: Batch, there: int) -> float:
        if self._emits:
            self._shaped = 1
            self._steps += 1
        super()._prefill(batch)
        if self._padded:
            self._ledger.pad_tokens += there * (batch.input_length - 1)
        return self._latency.prefill_s(there + len(batch.jobs), batch.input_length)

    def _step_with_newcomers(self) -> None:
        """The pass that shaped is a step of all, which ends where the prefill does."""
        batch, ledger, at_s, n = self._batch, self._ledger, self._prefilled_s, len(self._resident)
        assert batch is not None
        ledger.decoding_steps += 1
        ledger.row_steps += n
        taken = self.used + n * (batch.input_length - 1) + (self._kept(batch.moves) if batch.moves else 0)
        ledger.peak_tokens = max(ledger.peak_tokens, taken)
        ledger.memory_token_steps += taken
        if ledger.token_gaps is not None:
            self._count_waits(at_s, ledger.token_gaps)
        self._gaps.end_waits(at_s)
        self._give_tokens(self._resumed, at_s)
        self._give_tokens(self._tokenless, at_s)
        self._gaps.wait_from(at_s)

    def _fail(self, failure: Failure) -> None:
        super()._fail(failure)
        self._steps -= self._shaped
        self._shaped = 0

    def _width(self) -> int:
        """Tokens of the longest resident."""
        if not self._resident:
            return 0
        longest = self._longest_key if self._padded else max([entry[1] for entry in self._resident.values()])
        return longest + self._steps + self._emits
