"""The forms that a latency law may take, the fit of one form to points, and held-out errors.

A form is linear in its coefficients, so its fit is a non-negative least squares problem on relative
residuals, with one optimum and no start values. The paper's `curve_fit`, with the same bounds and
weights, ends at the same optimum in about a hundred times the time (30 ms against 0.2 ms; a profile
takes 70 such fits).

In this order: held-out prediction and the choice of a form by it, the solver, the latency forms,
and the overhead of slices that go through a worker process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from toolkit.errors import InputError
from toolkit.estimators.laws import SegmentedLaw, by_size, piece_of
from toolkit.files.fit import OverheadFit
from toolkit.files.profile import SlicePoint
from toolkit.laws.passes import HeldOutError, PassLaw

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

HELD_OUT_PARTS = 5
CHOICE_TOLERANCE = 1e-3  # of mean relative error: a smaller difference does not decide
TYPICAL_MAX = 1.5  # times the median (or the law): how much a longer sample counts
CLIP_ROUNDS = 4  # of fitting passes and clipping them
SINGULAR = 1e-6  # of the largest singular value: a smaller one does not count
SAMPLES_COUNTED_MAX = 16  # of a point of passes: one with more weighs no more


def predict_held_out(count: int, predict: Callable[[Rows, Rows], Floats], seed: int) -> Floats:
    """Predictions [count], each from a fit that did not see its row: `predict(seen rows, held-out
    rows)` predicts each of five parts from the other four.
    """
    predicted = np.empty(count)
    shuffled = np.random.default_rng(seed).permutation(count)
    for part in range(HELD_OUT_PARTS):
        rows = shuffled[part::HELD_OUT_PARTS]
        predicted[rows] = predict(np.setdiff1d(shuffled, rows), rows)
    return predicted


def percent_error(predicted: Floats, measured: Floats) -> HeldOutError:
    """Median, p95 and worst of |predicted / measured - 1|, in percent."""
    errors = 100.0 * relative_error(predicted, measured)
    return HeldOutError(
        median_percent=float(np.median(errors)),
        p95_percent=float(np.percentile(errors, 95)),
        worst_percent=float(errors.max()),
        points=len(errors),
    )


def relative_error(predicted: Floats, measured: Floats) -> Floats:
    """|predicted / measured - 1| of each point [n]."""
    return np.asarray(np.abs(predicted / measured - 1.0), dtype=np.float64)


def choose(predicted: Sequence[Floats], measured: Floats) -> int:
    """The index of the form to keep, given each form's held-out predictions [n], simplest first.

    This is the first form with a mean relative error that exceeds the least by no more than the
    standard error of the paired difference: that may come from which points were held out.
    """
    errors = [relative_error(prediction, measured) for prediction in predicted]
    best = min(errors, key=np.mean)

    def as_good(error: Floats) -> bool:
        worse = error - best
        return bool(worse.mean() <= worse.std() / np.sqrt(len(worse)) + CHOICE_TOLERANCE)

    return next(index for index, error in enumerate(errors) if as_good(error))


def typical(samples: Sequence[float]) -> float:
    """The mean of a point's samples, each counted as at most 1.5 times their median.

    A slice of many steps pays the mean. On shared machines a median jumps between fast and slow
    moments: held-out errors on three noisy profiles were 5.5 % (median over the laws; p95 16 %)
    with medians and 4.3 % (14 %) with this.
    """
    return float(np.minimum(samples, TYPICAL_MAX * np.median(samples)).mean())


def solve_relative(columns: Floats, seconds: Floats, root_weight: Floats | None = None) -> Floats:
    """The coefficients [k], all >= 0, with the least sum of squared relative residuals, given
    `columns` [n, k] and `seconds` [n]. `root_weight` [n] is the square root of each point's weight;
    None: all weigh the same.
    """
    root = np.ones(len(seconds)) if root_weight is None else root_weight
    relative = columns * (root / seconds)[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0.0] = 1.0
    coefficients, _ = nnls(relative / scale, root)
    return np.asarray(coefficients / scale, dtype=np.float64)


def solve_passes(
    columns: Floats, seconds: Floats, root_weight: Floats, below: float = math.inf
) -> Floats:
    """The coefficients [k], all >= 0, of the typical pass, raised to the mean, which is what
    serving pays; `root_weight` [n] as in `solve_relative`.

    A pass was measured once, and something may have disturbed it. So it counts as at most 1.5 times
    the typical one, and as no less than the typical one over `below`.
    """
    clipped = seconds
    for _ in range(CLIP_ROUNDS):
        coefficients = solve_relative(columns, clipped, root_weight)
        expected = columns @ coefficients
        longest = TYPICAL_MAX * expected
        clipped = np.clip(seconds, expected / below, longest)
    weights = np.square(root_weight)
    raised = (weights * np.minimum(seconds, longest)).sum() / (weights * expected).sum()
    return np.asarray(coefficients * raised, dtype=np.float64)


def standard_deviations(columns: Floats, seconds: Floats, predicted: Floats) -> Floats:
    """Return the standard deviation of each coefficient [k] of a fit to relative residuals, by how
    far its predictions are off; infinity for a column that others can replace or that is empty.
    """
    noise = float(np.sqrt(np.mean(np.square(np.minimum(seconds / predicted, TYPICAL_MAX) - 1.0))))
    relative = columns / seconds[:, None]
    seen = np.any(columns > 0.0, axis=0)
    found: Floats = np.full(columns.shape[1], math.inf)
    scale = np.linalg.norm(relative[:, seen], axis=0)
    _, singular, right = np.linalg.svd(relative[:, seen] / scale, full_matrices=False)
    lost = singular <= SINGULAR * singular[0]
    part = np.square(right)
    variance = (part[~lost] / np.square(singular[~lost, None])).sum(axis=0)
    replaced = (part[lost] > SINGULAR).any(axis=0)
    found[seen] = np.where(replaced, math.inf, noise * np.sqrt(variance) / scale)
    return found


def line_in_rows(
    rows: Floats, seconds: Floats, weight: Floats | None = None
) -> tuple[float, float]:
    """Constant and seconds per row, both >= 0, by least squares; `weight` [n] of each residual, or
    None for equal ones.
    """
    each = np.ones(len(rows)) if weight is None else weight
    columns = np.stack([np.ones(len(rows)), rows], axis=1)
    (constant_s, row_s), _ = nnls(columns * each[:, None], seconds * each)
    return float(constant_s), float(row_s)


@dataclass(slots=True, frozen=True)
class Points:
    """Measured latencies: batch sizes, lengths and seconds, each an array [n]; `term`: what N * L
    counts in the law, "token" of prefills and "cached" of decode steps.
    """

    batch_size: Floats
    length: Floats
    seconds: Floats
    term: str = "token"

    def __len__(self) -> int:
        return len(self.seconds)

    def take(self, rows: Rows) -> Points:
        """The points at the indices `rows`."""
        return Points(self.batch_size[rows], self.length[rows], self.seconds[rows], self.term)


def seconds_of(pieces: Sequence[PassLaw], points: Points) -> Floats:
    """Return the seconds [n] of the points by a law in pieces, from batch sizes and lengths."""
    fixed, slope, square, flat = by_size(pieces, points.batch_size)
    linear = fixed + points.length * (slope + points.length * square)
    return np.asarray(np.maximum(linear, flat), dtype=np.float64)


@dataclass(slots=True, frozen=True)
class LawForm:
    """Seconds = a(N) + b(N) * L, and with `square` + nll * N * L^2.

    Without knots, a and b are linear in N: Eq. 3 and 4. With `knots` (batch sizes, ascending from
    1), a and b have a free value at each, are linear between two, and rise linearly beyond the
    last. Batches of a few rows need that: a CPU's matrix kernels change with N, and not
    monotonically. All coefficients are >= 0, so a law is positive everywhere and never falls beyond
    its data.
    """

    knots: tuple[int, ...] = ()
    square: bool = False

    @property
    def name(self) -> str:
        """The form's name in reports and in fit.json."""
        bends = f"bends at {', '.join(map(str, self.knots))}" if self.knots else "bilinear"
        return f"{bends} + N*L^2" if self.square else bends

    def solve(self, points: Points) -> list[PassLaw]:
        """Return the pieces of the law with the least sum of squared relative residuals."""
        values = solve_relative(self._design(points), points.seconds)
        width = (len(values) - self.square) // 2
        fixed = self._lines(values[:width])
        slope = self._lines(values[width : 2 * width])
        pieces = []
        for start, (constant, row), (length, tokens) in zip(
            self.knots or (1,), fixed, slope, strict=True
        ):
            terms = {"pass": constant, "row": row, "length": length, points.term: tokens}
            if self.square:
                terms["attended"] = 2 * float(values[-1])
            pieces.append(piece_of(terms, start))
        return pieces

    def _design(self, points: Points) -> Floats:
        """The columns [n, k] that the coefficients multiply: a basis for a(N), the same basis times
        L for b(N), and N * L^2.
        """
        size = points.batch_size
        if self.knots:
            hats = [np.interp(size, self.knots, unit) for unit in np.eye(len(self.knots))]
            basis = np.stack([*hats, np.maximum(size - self.knots[-1], 0.0)], axis=1)
        else:
            basis = np.stack([np.ones_like(size), size], axis=1)
        columns = [basis, basis * points.length[:, None]]
        if self.square:
            columns.append((size * points.length**2)[:, None])
        return np.concatenate(columns, axis=1)

    def _lines(self, values: Floats) -> list[tuple[float, float]]:
        """Intercept at N = 0 and slope of a(N) (or b(N)) in each range of batch sizes."""
        if not self.knots:
            return [(float(values[0]), float(values[1]))]
        slopes = [*(np.diff(values[:-1]) / np.diff(self.knots)), values[-1]]
        starts = zip(self.knots, values[:-1], slopes, strict=True)
        return [(float(value - slope * knot), float(slope)) for knot, value, slope in starts]


@dataclass(slots=True, frozen=True)
class FlatForm:
    """Seconds = max(flat, a + b*N + c*N*L), all coefficients >= 0.

    A decode step on a GPU takes as long as the launches of its kernels, until the weights and the
    caches that it reads take longer. Which points are flat is not known before: they are the
    fastest ones, and every number of them is tried.
    """

    name: str = "flat, then linear"

    def solve(self, points: Points) -> list[PassLaw]:
        """Return the law, one piece, with the least sum of squared relative residuals."""
        size = points.batch_size
        columns = np.stack([np.ones_like(size), size, size * points.length], axis=1)
        order = np.argsort(points.seconds, kind="stable")
        best = np.empty(0)
        best_flat = 0.0
        least = np.inf
        for count in range(FLAT_POINTS_MIN, len(points) - LINEAR_POINTS_MIN + 1):
            fast = order[:count]
            slow = order[count:]
            inverse = 1.0 / points.seconds[fast]
            flat = inverse.sum() / (inverse / points.seconds[fast]).sum()
            linear = solve_relative(columns[slow], points.seconds[slow])
            residual = np.maximum(columns @ linear, flat) / points.seconds - 1.0
            error = float((residual**2).sum())
            if error < least:
                best = linear
                best_flat = float(flat)
                least = error
        terms = dict(zip(("pass", "row", points.term), best.tolist(), strict=True))
        return [piece_of(terms, flat_s=best_flat)]


Form = LawForm | FlatForm
FLAT_POINTS_MIN = 3
LINEAR_POINTS_MIN = 3
KNOTS = ((1, 2), (1, 4), (1, 2, 4), (1, 2, 3, 4), (1, 2, 4, 8), (1, 2, 4, 8, 16))
LENGTHS_PER_KNOT = 3
SIZES_BEYOND_LAST_KNOT = 2


def candidates(points: Points, *, square: bool) -> list[Form]:
    """The forms that the points can distinguish, the simplest first.

    A knot needs points of that batch size at three or more lengths, and the last knot needs two
    measured sizes beyond it. With `square`, each form also comes with N*L^2, given three lengths.
    Without, as for decode steps, the last form is flat and then linear.
    """
    sizes, counts = np.unique(points.batch_size, return_counts=True)
    points_of = dict(zip(sizes.tolist(), counts.tolist(), strict=True))
    bent = [
        knots
        for knots in KNOTS
        if all(points_of.get(knot, 0) >= LENGTHS_PER_KNOT for knot in knots)
        and sum(size > knots[-1] for size in points_of) >= SIZES_BEYOND_LAST_KNOT
    ]
    squares = (False, True) if square and len(np.unique(points.length)) >= 3 else (False,)
    forms: list[Form] = [LawForm(knots, squared) for knots in [(), *bent] for squared in squares]
    if not square and may_be_flat(points):
        forms.append(FlatForm())
    return forms


def may_be_flat(points: Points) -> bool:
    """Return whether the points suffice for a flat form, also without the held-out ones."""
    fewest_seen = len(points) - -(-len(points) // HELD_OUT_PARTS)
    return fewest_seen >= FLAT_POINTS_MIN + LINEAR_POINTS_MIN


SLICES_MIN = 6
STRETCH_MIN = 1e-3
BATCH_S_MIN = 1e-6  # the solver stays slightly above its bounds; a smaller batch_s is 0
# Relative residuals beyond this count linearly, so that a slice that another program disturbed does
# not bend the line.
SOFT_RESIDUAL = 0.1


def overhead_of_slices(slices: Sequence[SlicePoint], law: SegmentedLaw, seed: int) -> OverheadFit:
    """What a slice costs beyond `law` when it goes through a worker process and all workers run.

    The laws are measured in one process. `batch_s` is dispatch and pipe; `stretch` is how much
    workers slow one another down, and the difference between clocks where the laws are in CPU time.

    Raises `InputError` if fewer than six slices were measured, or if one took no time.
    """
    if len(slices) < SLICES_MIN:
        raise InputError(
            f"overhead: {len(slices)} slices measured, at least {SLICES_MIN} are needed",
            "set profile.slices in the recipe; then: llmctl profile RECIPE",
        )
    least_s = min(point.seconds for point in slices)
    if least_s <= 0.0:
        raise InputError(
            f"overhead: a slice of {least_s} s", "measure again with: llmctl profile RECIPE"
        )
    served = [law.serve_s(point.batch_size, point.input_length, point.steps) for point in slices]
    times = [
        np.array([[law_s], [point.seconds]]) for law_s, point in zip(served, slices, strict=True)
    ]
    return fit_overhead(times, fit_line, seed)


def fit_overhead(
    times: Sequence[Floats], line: Callable[[Floats, Floats], tuple[float, float]], seed: int
) -> OverheadFit:
    """The line batch_s + stretch * (seconds by the laws), and its held-out error.

    Args:
        times: of each slice, or each round of a sequence, the seconds by the laws and as measured:
            [2, n]. Parts of the slices, or of the sequences, are held out.
        line: fits it to seconds by the laws [n] and as measured [n].
    """

    def predict(seen: Rows, rows: Rows) -> Floats:
        batch_s, stretch = line(*np.concatenate([times[k] for k in seen], axis=1))
        return np.array([batch_s * times[k].shape[1] + stretch * times[k][0].sum() for k in rows])

    totals = np.array([seconds.sum() for _, seconds in times])
    error = percent_error(predict_held_out(len(times), predict, seed), totals)
    batch_s, stretch = line(*np.concatenate(times, axis=1))
    return OverheadFit(batch_s=batch_s, stretch=stretch, error=error)


def fit_line(served: Floats, seconds: Floats) -> tuple[float, float]:
    """batch_s >= 0 and stretch > 0 with the least sum of soft-L1 relative residuals."""
    columns = np.stack([1.0 / seconds, served / seconds], axis=1)
    scale = np.linalg.norm(columns, axis=0)
    start = np.maximum([0.0, np.median(seconds / served)] * scale, STRETCH_MIN)
    solution = least_squares(
        lambda x: columns @ (x / scale) - 1.0,
        start,
        jac=lambda _: columns / scale,
        bounds=([0.0, STRETCH_MIN], np.inf),
        loss="soft_l1",
        f_scale=SOFT_RESIDUAL,
    )
    batch_s, stretch = solution.x / scale
    return (float(batch_s) if batch_s > BATCH_S_MIN else 0.0), float(stretch)
