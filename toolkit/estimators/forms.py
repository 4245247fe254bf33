"""The forms that a latency law may take, and the fit of one form to points.

A form is linear in its coefficients, so its fit is a non-negative least squares problem on relative
residuals: one optimum, no start values. The paper's `curve_fit`, with the same bounds and weights,
ends at the same optimum in about a hundred times the time (30 ms and 0.2 ms; a profile takes 70
such fits).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from toolkit.errors import InputError
from toolkit.estimators.laws import SegmentedLaw
from toolkit.files.fit import HeldOutError, OverheadFit, Segment
from toolkit.files.profile import SlicePoint

# Held-out error: how far off a fit is on points that it did not see.
#
# The points are dealt into five parts; each part is predicted by a fit of the other four, so
# every point is held out once.

PARTS = 5
NO_DIFFERENCE = 1e-3  # of relative error, on exact data

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]


def predict_held_out(count: int, predict: Callable[[Rows, Rows], Floats], seed: int) -> Floats:
    """An array [count], each value from `predict(seen rows, held-out rows)` where its row was held
    out.
    """
    predicted = np.empty(count)
    shuffled = np.random.default_rng(seed).permutation(count)
    for part in range(PARTS):
        rows = shuffled[part::PARTS]
        predicted[rows] = predict(np.setdiff1d(shuffled, rows), rows)
    return predicted


def percent_error(predicted: Floats, measured: Floats) -> HeldOutError:
    """Median, p95 and worst of |predicted / measured - 1|, in percent."""
    errors = 100.0 * np.abs(predicted / measured - 1.0)
    return HeldOutError(
        median_percent=float(np.median(errors)),
        p95_percent=float(np.percentile(errors, 95)),
        worst_percent=float(errors.max()),
        points=len(errors),
    )


def choose(errors: Sequence[Floats]) -> int:
    """The index of the form to keep, given each form's held-out errors [n], the simplest form
    first.

    The one with the least mean, or the first that is not worse by more than the standard error of
    the paired difference: less than that is luck in which points were held out.
    """
    best = min(errors, key=np.mean)

    def as_good(error: Floats) -> bool:
        worse = error - best
        return bool(worse.mean() <= worse.std() / np.sqrt(len(worse)) + NO_DIFFERENCE)

    return next(index for index, error in enumerate(errors) if as_good(error))


CLIP = 1.5


def typical(samples: Sequence[float]) -> float:
    """The mean of a point's samples, none counted beyond 1.5 times their median.

    The mean is what a slice of many steps pays. On shared machines times have two modes, fast and
    slow moments, and a median jumps from one to the other: held-out errors on three noisy profiles
    were 5.5 % (median over the laws; p95 16 %) with medians and 4.3 % (14 %) with this.
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
class LawForm:
    """Seconds = a(N) + b(N) * L, where asked for + nll * N * L^2.

    Without knots, a and b are lines in N: Eq. 3 and 4. With knots, each is free at every knot and
    straight between two; beyond the last it rises in a straight line. Batches of a few rows need
    that: a CPU's matrix kernels change with N, and not monotonically. All coefficients are >= 0, so
    a law is positive everywhere and never falls beyond its data.
    """

    knots: tuple[int, ...] = ()  # ascending, the first is 1
    square: bool = False

    @property
    def name(self) -> str:
        bends = f"bends at {', '.join(map(str, self.knots))}" if self.knots else "bilinear"
        return f"{bends} + N*L^2" if self.square else bends

    def solve(self, points: Points, weights: Floats | None = None) -> Floats:
        """The coefficients [k], all >= 0, with the least sum of squared relative residuals,
        `weights` [n] or equal.
        """
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
            for start, (a_start, a_slope), (b_start, b_slope) in zip(
                self.knots or (1,), flat, slope, strict=True
            )
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


def candidates(points: Points, *, square: bool) -> list[LawForm]:
    """The forms that the points can tell apart, the simplest first.

    A knot needs points of that batch size at three lengths or more, and the last one two measured
    sizes beyond it. `square` adds each form with N*L^2, where three lengths were measured.
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
    return [LawForm(knots, squared) for knots in [(), *bent] for squared in squares]


def form_named(name: str, points: Points, *, square: bool) -> LawForm:
    """The candidate for `points` that has this name; `InputError` where it is none."""
    for form in candidates(points, square=square):
        if form.name == name:
            return form
    raise InputError(
        f"the points cannot tell the form '{name}'", "fit the profile again: llmctl fit PROFILE"
    )


# What a slice costs beyond its laws when it goes through a worker process and all workers run.
#
# seconds = batch_s + stretch * T_serve(N, L, S). The laws are measured in one process; the flat
# part is dispatch and pipe, the stretch is what workers cost each other, and the clock's
# difference where the laws are in CPU time.

SLICES_MIN = 6
STRETCH_MIN = 1e-3
RESOLUTION_S = 1e-6  # the solver stays off its bounds by a hair; below this, batch_s is 0
# Relative residuals beyond this count linearly: a slice that another program disturbed should not
# bend the line.
DISTURBED = 0.1


def fit_overhead(slices: Sequence[SlicePoint], law: SegmentedLaw, seed: int) -> OverheadFit:
    """The overhead that the measured slices show over `law`, and its held-out error.

    Raises `InputError` where fewer than six slices were measured, or one took no time.
    """
    remedy = "set profile.slices in the recipe; then: llmctl profile RECIPE"
    if len(slices) < SLICES_MIN:
        raise InputError(
            f"overhead: {len(slices)} slices measured, at least {SLICES_MIN} are needed", remedy
        )
    seconds = np.array([point.seconds for point in slices])
    if seconds.min() <= 0.0:
        raise InputError(
            f"overhead: a slice of {seconds.min()} s", "measure again with: llmctl profile RECIPE"
        )
    served = _served(slices, law)

    def predict(seen: Rows, rows: Rows) -> Floats:
        batch_s, stretch = fit_line(served[seen], seconds[seen])
        return batch_s + stretch * served[rows]

    error = percent_error(predict_held_out(len(slices), predict, seed), seconds)
    batch_s, stretch = fit_line(served, seconds)
    return OverheadFit(batch_s=batch_s, stretch=stretch, error=error)


def refit_overhead(slices: Sequence[SlicePoint], law: SegmentedLaw) -> tuple[float, float]:
    """batch_s and stretch of `slices` that were checked before, without the held-out error."""
    return fit_line(_served(slices, law), np.array([point.seconds for point in slices]))


def _served(slices: Sequence[SlicePoint], law: SegmentedLaw) -> Floats:
    return np.array(
        [law.serve_s(point.batch_size, point.input_length, point.steps) for point in slices]
    )


def fit_line(served: Floats, seconds: Floats) -> tuple[float, float]:
    """batch_s >= 0 and stretch > 0 with the least sum of soft-L1 relative residuals."""
    columns = np.stack([1.0 / seconds, served / seconds], axis=1)
    scale = np.linalg.norm(columns, axis=0)
    start = np.maximum([0.0, np.median(seconds / served)] * scale, STRETCH_MIN)
    found = least_squares(
        lambda x: columns @ (x / scale) - 1.0,
        start,
        jac=lambda _: columns / scale,
        bounds=([0.0, STRETCH_MIN], np.inf),
        loss="soft_l1",
        f_scale=DISTURBED,
    )
    batch_s, stretch = found.x / scale
    return (float(batch_s) if batch_s > RESOLUTION_S else 0.0), float(stretch)
