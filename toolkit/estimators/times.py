"""A latency law in the form in which the simulator asks it, several times a round.

`LinearTimes` has the arithmetic of `toolkit.estimators.laws.SegmentedLaw`, `LawTimes` asks any
other law.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from toolkit.files.fit import Segment
    from toolkit.sched.protocols import LatencyLaw

COEFFICIENTS = ("nl", "n", "l", "const", "nll")
LEAST_SIZES = 64  # batch sizes with coefficients that are computed together


class LawTimes:
    """Seconds of a prefill, of decode steps and of a row that leaves, by `law`."""

    def __init__(self, law: LatencyLaw | None) -> None:
        self._law = law
        self.round_s: float = law.round_s if law is not None else 0.0

    def prefill_s(self, batch_size: int, input_length: float) -> float:
        """See `LatencyLaw.prefill_s`."""
        assert self._law is not None
        return self._law.prefill_s(batch_size, input_length)

    def decode_s(self, batch_size: int, input_length: float, steps: int) -> float:
        """See `LatencyLaw.decode_s`."""
        assert self._law is not None
        return self._law.decode_s(batch_size, input_length, steps)

    def leave_s(self, length: float) -> float:
        """See `LatencyLaw.leave_s`."""
        assert self._law is not None
        return self._law.leave_s(length)


class LinearTimes(LawTimes):
    """The times of a law in segments of batch sizes; the arguments are those of `SegmentedLaw`.

    The coefficients of a batch size are computed at its first use.
    """

    def __init__(
        self,
        prefill: Sequence[Segment],
        decode: Sequence[Segment],
        round_s: float,
        leaving: tuple[float, float],
    ) -> None:
        super().__init__(None)
        self.round_s = round_s
        self._segments = prefill, decode
        self._leaving = leaving
        self._leave_fixed, self._leave_slope = leaving
        # By batch size: the coefficients of 1, L and L^2 in T_prefill, and of 1 and l in tau.
        self._fixed: list[float] = []
        self._slope: list[float] = []
        self._square: list[float] = []
        self._step_fixed: list[float] = []
        self._step_slope: list[float] = []

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (*self._segments, self.round_s, self._leaving)

    def prefill_s(self, batch_size: int, input_length: float) -> float:
        """T_prefill(N, L) in seconds, Eq. 3."""
        if batch_size >= len(self._fixed):
            self._extend(batch_size)
        return self._fixed[batch_size] + input_length * (
            self._slope[batch_size] + input_length * self._square[batch_size]
        )

    def pass_s(self, batch_size: int, start: float, end: float) -> float:
        """T_prefill(N, end) - T_prefill(N, start) + T_prefill(N, 0)."""
        if batch_size >= len(self._fixed):
            self._extend(batch_size)
        slope, square = self._slope[batch_size], self._square[batch_size]
        return self._fixed[batch_size] + (end - start) * (slope + (end + start) * square)

    def decode_s(self, batch_size: int, input_length: float, steps: int) -> float:
        """Sum of tau(L + i, N) over i = 1..steps, in seconds (Eq. 2), in closed form."""
        if batch_size >= len(self._fixed):
            self._extend(batch_size)
        return steps * (
            self._step_fixed[batch_size]
            + self._step_slope[batch_size] * (input_length + (steps + 1) * 0.5)
        )

    def leave_s(self, length: float) -> float:
        """Seconds until a row of about `length` tokens has left a running batch."""
        return self._leave_fixed + self._leave_slope * length

    def _extend(self, batch_size: int) -> None:
        sizes = np.arange(max(2 * batch_size, LEAST_SIZES))
        prefill, decode = (by_size(segments, sizes) for segments in self._segments)
        self._fixed, self._slope, self._square = prefill.tolist()
        self._step_fixed, self._step_slope, _ = decode.tolist()


class FlatTimes(LinearTimes):
    """The times of a law with decode steps that take at least `Segment.flat`: flat, and then
    linear, as on a GPU that waits for the launches of a step's kernels.
    """

    def decode_s(self, batch_size: int, input_length: float, steps: int) -> float:
        """Sum of tau(L + i, N) over i = 1..steps, in seconds (Eq. 2), in closed form."""
        if batch_size >= len(self._fixed):
            self._extend(batch_size)
        slope, flat = self._step_slope[batch_size], self._step_flat[batch_size]
        before = self._step_fixed[batch_size] + slope * input_length
        if before + slope * steps <= flat:
            return steps * flat
        # Steps 1..under take the flat time. Where the slope is 0, all are over it.
        under = max(math.ceil((flat - before) / slope) - 1, 0) if flat > before else 0
        over = steps - under
        return under * flat + over * (before + slope * (under + (over + 1) * 0.5))

    def _extend(self, batch_size: int) -> None:
        super()._extend(batch_size)
        self._step_flat: list[float] = flat_by_size(
            self._segments[1], np.arange(len(self._fixed))
        ).tolist()


def flat_by_size(segments: Sequence[Segment], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """`Segment.flat` for each batch size: an array [len(sizes)]."""
    return np.array([segment.flat for segment in segments])[_segment_of(segments, sizes)]


def _segment_of(segments: Sequence[Segment], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    starts = np.array([segment.batch_size_min for segment in segments])
    return np.maximum(np.searchsorted(starts, sizes, side="right") - 1, 0)


def by_size(segments: Sequence[Segment], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Coefficients of 1, L and L^2 for each batch size: an array [3, len(sizes)]."""
    chosen = _segment_of(segments, sizes)
    table = np.array([[getattr(segment, key) for key in COEFFICIENTS] for segment in segments])
    nl, n, l, const, nll = table[chosen].T  # noqa: E741
    return np.array([n * sizes + const, nl * sizes + l, nll * sizes])
