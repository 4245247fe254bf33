"""Simulated workers, and the one of slices: it knows the true output lengths, and computes all
steps of a slice at once by the fitted laws.

A slice costs one evaluation of the laws and a few additions per job, and nothing per token.

- `SimulatedWorker`: what all simulated workers have;
- `SliceWorker`: the worker of passes that drop their caches. `toolkit.sim.continuous` has the
  worker of passes that keep them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit.laws.passes import PassRange
from toolkit.sched.types import LatencyLaw, Pass, PassResult
from toolkit.sim.ledger import Ledger, RequestOutcome, RunsOut, TokenGaps

if TYPE_CHECKING:
    from toolkit.sim.world import World


class SimulatedWorker:
    """What all workers have that run passes on virtual time (`toolkit.sim.loop.VirtualWorker`).

    Args:
        index: its place in the ledger, which gets what happens and has the true output lengths.
        world: its laws (the policy may know others).
    """

    def __init__(self, index: int, ledger: Ledger, world: World) -> None:
        self._index = index
        self._ledger = ledger
        self._latency: LatencyLaw = world.latency
        if world.slowdown != 1.0:
            self._latency = self._latency.times(world.slowdown)
        self._prefill_range: PassRange = world.prefill_range
        self._decode_range: PassRange = world.decode_range
        self._emits = int(self._latency.prefill_emits_token)
        self._done_s = 0.0  # when the current pass ends
        self.known_s = 0.0  # when its result is known

    def _count_extrapolated(
        self, entering: int, input_length: int, rows: int, cached_length: float
    ) -> None:
        """Write into the ledger whether the pass, a prefill of `entering` rows, then decode steps
        of `rows` rows, is outside the range that the laws were measured in.
        """
        inside = self._decode_range.holds_batch(rows, cached_length)
        inside = inside and self._prefill_range.holds_batch(entering, input_length)
        self._ledger.extrapolated += not inside

    def _count_time(self, start_s: float) -> None:
        """Write into the ledger that the pass, which began then, has been computed."""
        self._ledger.busy_s[self._index] += self._done_s - start_s
        self._ledger.completed_s[self._index] = self._done_s


class SliceWorker(SimulatedWorker):
    """The worker of slices."""

    def __init__(self, index: int, ledger: Ledger, world: World) -> None:
        super().__init__(index, ledger, world)
        self._runs_out: RunsOut | None = world.runs_out
        self._streams: bool = world.streams
        self._flush_s: float = world.flush_s
        self._result = PassResult(-1, -1, 0)

    def run(self, batch: Pass, now_s: float) -> float:
        size = len(batch.jobs)
        length = batch.input_length
        prefill_s = self._latency.prefill_s(size, length)
        if self._runs_out and self._runs_out(batch.pass_id, size, length, batch.steps):
            self._ledger.oom_batches += 1
            result = PassResult(batch.pass_id, batch.worker, 0, failure="oom")
            return self._end(result, now_s, now_s + prefill_s)
        known = self._ledger.outcomes
        outcomes = [known[job.number] for job in batch.jobs]
        remaining = [
            outcome.output_tokens - job.generated
            for outcome, job in zip(outcomes, batch.jobs, strict=True)
        ]
        ran = min(batch.steps, max(remaining))
        generated = [left if left < ran else ran for left in remaining]
        ledger = self._ledger
        ledger.batches += 1
        ledger.rows += size
        ledger.decoding_steps += ran
        ledger.pad_tokens += size * length - sum([job.length for job in batch.jobs])
        ledger.invalid_tokens += size * ran - sum(generated)
        ledger.early_returns += ran < batch.steps
        peak = size * (length + ran)
        ledger.memory_token_steps += ran * peak - size * (ran * (ran - 1) // 2)
        ledger.peak_tokens = max(ledger.peak_tokens, float(peak))
        ledger.attempts += 1
        ledger.future_token_attempts += peak
        self._count_extrapolated(size, length, size, length + ran)
        done_s = now_s + (prefill_s + self._latency.decode_s(size, length, ran - self._emits))
        ended: list[str] = []
        missed: list[tuple[str, int]] = []
        for place, job in enumerate(batch.jobs):
            left = remaining[place]
            if left <= ran:
                outcomes[place].ok = True
                ended.append(job.request_id)
                if left < ran:
                    missed.append((job.request_id, ran - left))
        result = PassResult(batch.pass_id, batch.worker, ran, tuple(ended), missed=tuple(missed))
        self._stamp(batch, generated, outcomes, now_s, prefill_s, done_s)
        return self._end(result, now_s, done_s)

    def finish(self) -> PassResult:
        return self._result

    def interrupt(self, now_s: float) -> float:
        return self._done_s  # a slice runs to its end

    def _end(self, result: PassResult, now_s: float, done_s: float) -> float:
        self.known_s = now_s
        self._done_s = done_s
        self._count_time(now_s)
        self._result = result
        return done_s

    def _stamp(
        self,
        batch: Pass,
        generated: Sequence[int],
        outcomes: list[RequestOutcome],
        now_s: float,
        prefill_s: float,
        done_s: float,
    ) -> None:
        """Record when each job's tokens reached its client."""
        streams = self._streams
        emits = self._emits
        size = len(batch.jobs)
        length = batch.input_length

        def made_s(tokens: int) -> float:
            """When each row has `tokens` new tokens."""
            return now_s + (prefill_s + self._latency.decode_s(size, length, tokens - emits))

        first_s = made_s(1) if streams else done_s
        gaps = self._ledger.token_gaps
        ran = max(generated)
        step_s = done_s - made_s(ran - 1) if streams and ran > emits else 0.0
        for outcome, tokens in zip(outcomes, generated, strict=True):
            outcome.go_on(first_s, gaps)
            if step_s > outcome.max_gap_s:
                outcome.max_gap_s = step_s
            last_s = done_s
            if streams and tokens != ran:  # it ended before the others
                token_s = made_s(tokens)
                if self._flush_s:  # it is reported later
                    reports = math.ceil((token_s - first_s) / self._flush_s)
                    token_s = first_s + reports * self._flush_s
                last_s = min(token_s, done_s)
            outcome.last_token_s = last_s
        if gaps is not None:
            self._count_gaps(gaps, generated, size, length)

    def _count_gaps(
        self, gaps: TokenGaps, generated: Sequence[int], size: int, length: int
    ) -> None:
        """Count the gaps inside a slice, by when the worker makes the tokens, not when it reports
        them: before each row's second token, and then ever longer ones.
        """
        second_s = growth_s = 0.0
        if self._streams:
            step = 2 - self._emits
            before_s, with_s, behind_s = (
                self._latency.decode_s(size, length, step + k) for k in (-1, 0, 1)
            )
            second_s = with_s - before_s
            growth_s = behind_s - with_s - second_s
        for tokens in generated:
            gaps.add(tokens - 1, second_s, second_s + (tokens - 2) * growth_s)
