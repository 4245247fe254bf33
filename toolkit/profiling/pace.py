"""How long a server's runs take, from the first passes that were measured, and how much is left.

A profile announces its time. The first runs of a server tell how long a decode step and a chunk
take; the announcement follows from these, and is corrected by the runs that have ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from toolkit.profiling.grid import (
    APART,
    BESIDE_STEPS,
    HITS,
    LOAD_S,
    MIX_STEPS,
    STEPS,
    GridPoint,
    SliceShape,
    log_uniform_mean,
)

VISIT_SAMPLES = 3  # of a visit to a cheap point
TRAFFIC_OUTPUTS_MIN = 8  # tokens
ONCE = ("lone", "burst", "load")  # kinds with one sample in a visit, which has several requests
SURE_SHARE = 0.1  # of the estimate must have passed before the runs correct it


@dataclass(slots=True, frozen=True)
class ServerPace:
    """Seconds of a server's runs, roughly.

    Attributes:
        step_s, row_s: a decode step of one row, and each further row in it.
        chunk_s, token_s: a pass with chunks, and each token of them.
        run_s, request_s: a run besides its passes, and each request of it.
        budget: the most new tokens of a pass.
        longest: the most output tokens of a request in traffic.
    """

    step_s: float
    row_s: float
    chunk_s: float
    token_s: float
    run_s: float
    request_s: float
    budget: int
    longest: int

    def steps_s(self, rows: int) -> float:
        """A decode step of so many rows."""
        return self.step_s + self.row_s * max(rows - 1, 0)

    def chunks_s(self, tokens: float) -> float:
        """Passes that compute so many tokens of prompts."""
        return math.ceil(tokens / self.budget) * self.chunk_s + tokens * self.token_s

    def batch_s(self, rows: int, prompt: int, steps: int) -> float:
        """Requests that are sent at once, until the last one has ended."""
        if not rows:
            return self.run_s
        besides_s = self.run_s + rows * self.request_s
        return besides_s + self.chunks_s(rows * prompt) + (steps - 1) * self.steps_s(rows)

    def slices_s(self, slices: Iterable[SliceShape]) -> float:
        """Slices, one after another."""
        return sum(self.batch_s(one.batch_size, one.input_length, one.steps) for one in slices)

    def visit_s(self, point: GridPoint, warmups: int) -> float:
        """A visit to a point, with so many runs before its samples."""
        return self.point_s(point) * (warm_runs(point, warmups) + samples_of(point))

    def point_s(self, point: GridPoint) -> float:
        """One run of a point of the grid."""
        rows = point.batch_size
        length = point.length
        others = point.others
        if point.kind == "prefill":
            return self.batch_s(rows, length, 1)
        if point.kind == "decode":
            return self.batch_s(rows, max(length - STEPS // 2, 1), STEPS)
        if point.kind == "hit":
            return (1 + HITS) * (self.run_s + self.chunks_s(others)) + self.chunks_s(length)
        if point.kind == "load":
            return LOAD_S + self.run_s + self.longest * self.steps_s(rows) / 2
        if point.kind == "traffic":
            outputs = log_uniform_mean(TRAFFIC_OUTPUTS_MIN, self.longest)
            generating_s = (others / rows + 1) * outputs * self.steps_s(rows)
            return self.run_s + generating_s + others * self.chunks_s(length)
        arriving_s = others * (self.chunks_s(length) + self.request_s)
        if point.kind == "mix":
            return self.batch_s(rows, MIX_STEPS, MIX_STEPS) + arriving_s
        # their prompts come when the rows decode, and the rows go on until the last one has come
        if point.kind == "lone":
            arriving_s += others * (self.run_s + APART * self.steps_s(rows))
        decoding_s = self.batch_s(rows, MIX_STEPS, BESIDE_STEPS) if rows else 0.0
        begins_s = rows * self.request_s + APART * self.steps_s(rows)
        return max(decoding_s + arriving_s, begins_s + arriving_s + self.run_s)


def samples_of(point: GridPoint) -> int:
    """How many times a server's visit to a point samples it."""
    return 1 if point.kind in ONCE or point.tokens > STEPS else VISIT_SAMPLES


def warm_runs(point: GridPoint, warmups: int) -> int:
    """How many runs come before them: traffic has many requests, and needs none."""
    return 0 if point.kind == "traffic" else warmups


class Remaining:
    """The time of the whole work, corrected by what has been done. `now_s` is a clock."""

    def __init__(self, about_s: float, now_s: Callable[[], float]) -> None:
        self.about_s = about_s
        self._planned_s = about_s
        self._done_s = 0.0
        self._now_s = now_s
        self._start_s = now_s()

    def done(self, planned_s: float) -> float:
        """A part has ended that was expected to take `planned_s`; seconds of the whole work now."""
        self._done_s += planned_s
        if self._done_s >= SURE_SHARE * self._planned_s:
            passed_s = self._now_s() - self._start_s
            left_s = max(self._planned_s - self._done_s, 0.0)
            self.about_s = passed_s + left_s * passed_s / self._done_s
        return self.about_s
