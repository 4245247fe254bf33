"""The forms that a latency law may take, and the fit of one form to points.

A form is linear in its coefficients, so its fit is a non-negative least squares problem on relative residuals: one
optimum, no start values. The paper's `curve_fit`, with the same bounds and weights, ends at the same optimum in about a
hundred times the time (30 ms and 0.2 ms; a profile takes 70 such fits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from toolkit.errors import InputError
from toolkit.estimators.held_out import Floats, Rows
from toolkit.files.fit import Segment

CLIP = 1.5


def typical(samples: Sequence[float]) -> float:
    """The mean of a point's samples, none counted beyond 1.5 times their median.

    The mean is what a slice of many steps pays. On shared machines times have two modes, fast and slow moments, and a
    median jumps from one to the other: held-out errors on three noisy profiles were 5.5 % (median over the laws; p95
    16 %) with medians and 4.3 % (14 %) with this.
    """
    return float(np.minimum(samples, CLIP * np.median(samples)).mean())


@dataclass(slots=True, frozen=True)
class Points:
    """Measured latencies: batch sizes, lengths and seconds, each an array [n]."""

    batch_size: Floats
    length: Floats
    seconds: Floats

    def __len__(self) -> int:
        return len(self.seconds)

    def take(self, rows: Rows) -> Points:
        return Points(self.batch_size[rows], self.length[rows], self.seconds[rows])


@dataclass(slots=True, frozen=True)
class Form:
    """Seconds = a(N) + b(N) * L, where asked for + nll * N * L^2.

    Without knots, a and b are lines in N: Eq. 3 and 4. With knots, each is free at every knot and straight between two;
    beyond the last it rises in a straight line. Batches of a few rows need that: a CPU's matrix kernels change with N,
    and not monotonically. All coefficients are >= 0, so a law is positive everywhere and never falls beyond its data.
    """

    knots: tuple[int, ...] = ()  # ascending, the first is 1
    square: bool = False

    @property
    def name(self) -> str:
        bends = f"bends at {', '.join(map(str, self.knots))}" if self.knots else "bilinear"
        return f"{bends} + N*L^2" if self.square else bends

    def solve(self, points: Points, weights: Floats | None = None) -> Floats:
        """The coefficients [k], all >= 0, with the least sum of squared relative residuals, `weights` [n] or equal."""
        root = np.ones(len(points)) if weights is None else np.sqrt(weights)
        relative = self._design(points) / points.seconds[:, None] * root[:, None]
        scale = np.linalg.norm(relative, axis=0)
        scale[scale == 0] = 1.0
        coefficients, _ = nnls(relative / scale, root)
        return np.asarray(coefficients / scale, dtype=np.float64)

    def predict(self, coefficients: Floats, points: Points) -> Floats:
        """Seconds [n] at the points, whose own seconds are not looked at."""
        return self._design(points) @ coefficients

    def segments(self, coefficients: Floats) -> list[Segment]:
        """The same law as coefficients of N*L, N, L, 1 and N*L^2 for each range of batch sizes."""
        width = (len(coefficients) - self.square) // 2
        nll = float(coefficients[-1]) if self.square else 0.0
        flat = self._lines(coefficients[:width])
        slope = self._lines(coefficients[width : 2 * width])
        return [
            Segment(batch_size_min=start, nl=b_slope, n=a_slope, l=b_start, const=a_start, nll=nll)
            for start, (a_start, a_slope), (b_start, b_slope) in zip(self.knots or (1,), flat, slope, strict=True)
        ]

    def _design(self, points: Points) -> Floats:
        basis = self._basis(points.batch_size)
        columns = [basis, basis * points.length[:, None]]
        if self.square:
            columns.append((points.batch_size * points.length**2)[:, None])
        return np.concatenate(columns, axis=1)

    def _basis(self, batch_size: Floats) -> Floats:
        """The functions of N, [n, m], whose sums with coefficients >= 0 are a(N) and b(N)."""
        if not self.knots:
            return np.stack([np.ones_like(batch_size), batch_size], axis=1)
        hats = [np.interp(batch_size, self.knots, unit) for unit in np.eye(len(self.knots))]
        return np.stack([*hats, np.maximum(batch_size - self.knots[-1], 0.0)], axis=1)

    def _lines(self, values: Floats) -> list[tuple[float, float]]:
        """Intercept at N = 0 and slope of a(N) (or b(N)) in each range of batch sizes."""
        if not self.knots:
            return [(float(values[0]), float(values[1]))]
        slopes = [*(np.diff(values[:-1]) / np.diff(self.knots)), values[-1]]
        starts = zip(self.knots, values[:-1], slopes, strict=True)
        return [(float(value - slope * knot), float(slope)) for knot, value, slope in starts]


KNOTS = ((1, 2), (1, 4), (1, 2, 4), (1, 2, 3, 4), (1, 2, 4, 8), (1, 2, 4, 8, 16))
LENGTHS_PER_KNOT = 3
SIZES_BEYOND = 2


def candidates(points: Points, *, square: bool) -> list[Form]:
    """The forms that the points can tell apart, the simplest first.

    A knot needs points of that batch size at three lengths or more, and the last one two measured sizes beyond it.
    `square` adds each form with N*L^2, where three lengths were measured.
    """
    sizes, counts = np.unique(points.batch_size, return_counts=True)
    known = dict(zip(sizes.tolist(), counts.tolist(), strict=True))
    bent = [
        knots
        for knots in KNOTS
        if all(known.get(knot, 0) >= LENGTHS_PER_KNOT for knot in knots)
        and sum(size > knots[-1] for size in known) >= SIZES_BEYOND
    ]
    squares = (False, True) if square and len(np.unique(points.length)) >= 3 else (False,)
    return [Form(knots, squared) for knots in [(), *bent] for squared in squares]


def form_named(name: str, points: Points, *, square: bool) -> Form:
    """The candidate for `points` that has this name; `InputError` where it is none."""
    for form in candidates(points, square=square):
        if form.name == name:
            return form
    raise InputError(f"the points cannot tell the form '{name}'", "fit the profile again: llmctl fit PROFILE")
