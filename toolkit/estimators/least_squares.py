"""Least squares for all laws: passes with known times in, a `PassLaw` and its held-out error out.

A law is linear in its terms, so its fit is a non-negative least squares problem on relative
residuals, with one optimum and no start values. The paper's `curve_fit`, with the same bounds and
weights, ends at the same optimum in about a hundred times the time (30 ms against 0.2 ms).

In this order: typical times of samples, solvers, held-out errors, `fit_terms`, which fits a law,
and lines: the overhead of slices and rounds, and seconds by the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from toolkit.errors import InputError
from toolkit.files.fit import OverheadFit
from toolkit.laws.features import StepShape
from toolkit.laws.passes import HeldOutError, PassLaw

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
Solve = Callable[[Floats, Floats, Floats], Floats]  # such as `solve_relative`

MEASURE_AGAIN = "measure again with: llmctl profile RECIPE"

LEAST_S = 1e-9  # of a sample: no clock measures less, and a relative error has no bound there
HELD_OUT_PARTS = 5
TYPICAL_MAX = 1.5  # times the median (or the law): how much a longer sample counts
SAMPLES_COUNTED_MAX = 16  # of a point of passes: one with more weighs no more
CLIP_ROUNDS = 4  # of fitting passes and clipping them
SINGULAR = 1e-6  # beside columns of length 1: what keeps the inverse of equal columns finite
LEAST_POINTS = 3  # of a flat part, and of a linear one
OUTLIER = 3.0  # times a line: how much a longer time counts
LINE_ROUNDS = 12  # of fitting a line and clipping
STRETCH_MIN = 1e-3


def typical(samples: Sequence[float]) -> float:
    """Return the mean of a point's samples, each counted as at most 1.5 times their median.

    A slice of many steps pays the mean. On shared machines a median jumps between fast and slow
    moments: held-out errors on three noisy profiles were 5.5 % (median over the laws; p95 16 %)
    with medians and 4.3 % (14 %) with this.
    """
    return float(np.minimum(samples, TYPICAL_MAX * np.median(samples)).mean())


def typical_seconds(points: Iterable[tuple[str, Sequence[float]]]) -> Floats:
    """Return the typical seconds of each point [n], given what it is, for messages, and its
    samples. Raises InputError if a point has no sample, or one that took no time.
    """
    found = []
    for what, samples in points:
        if not samples or min(samples) < LEAST_S:
            problem = f"a sample of {min(samples)} s" if samples else "no samples"
            raise InputError(f"{what}: {problem}", MEASURE_AGAIN)
        found.append(typical(samples))
    return np.array(found)


def solve_relative(
    columns: Floats, seconds: Floats, root_weight: Floats, free: slice = slice(0)
) -> Floats:
    """Return the coefficients [k] with the least sum of squared relative residuals, all >= 0 but
    for those that are `free`.

    Args:
        columns: what each coefficient multiplies [n, k].
        seconds: measured [n].
        root_weight: the square root of each point's weight [n].
    """
    count = columns.shape[1]
    # a free coefficient is the difference of two that are >= 0
    relative = np.hstack([columns, -columns[:, free]]) * (root_weight / seconds)[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0.0] = 1.0
    both = nnls(relative / scale, root_weight)[0] / scale
    both[:count][free] -= both[count:]
    return np.asarray(both[:count], dtype=np.float64)


def solve_passes(
    columns: Floats, seconds: Floats, root_weight: Floats, below: float = math.inf
) -> Floats:
    """Return the coefficients [k], all >= 0, of the typical pass, raised to the mean, which is what
    serving pays; the arguments are those of `solve_relative`.

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
    far its predictions are off. A column that others can replace has a deviation beyond any bound.
    """
    noise = np.sqrt(np.mean(np.square(np.minimum(seconds / predicted, TYPICAL_MAX) - 1.0)))
    relative = columns / seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0.0] = 1.0
    unit = relative / scale
    inverse = np.linalg.inv(unit.T @ unit + SINGULAR**2 * np.eye(len(scale)))
    return np.asarray(noise * np.sqrt(np.diag(inverse)) / scale, dtype=np.float64)


def predict_held_out(count: int, predict: Callable[[Rows, Rows], Floats], seed: int) -> Floats:
    """Return predictions [count], each from a fit that did not see its row: `predict(seen rows,
    held-out rows)` predicts each of five parts from the other four.
    """
    predicted = np.empty(count)
    shuffled = np.random.default_rng(seed).permutation(count)
    for part in range(HELD_OUT_PARTS):
        rows = shuffled[part::HELD_OUT_PARTS]
        predicted[rows] = predict(np.setdiff1d(shuffled, rows), rows)
    return predicted


def percent_error(predicted: Floats, measured: Floats) -> HeldOutError:
    """Return the median, p95 and worst of |predicted / measured - 1|, in percent."""
    errors = 100.0 * np.abs(predicted / measured - 1.0)
    return HeldOutError(
        median_percent=float(np.median(errors)),
        p95_percent=float(np.percentile(errors, 95)),
        worst_percent=float(errors.max()),
        points=len(errors),
    )


def fit_terms(
    form: PassLaw,
    shapes: Sequence[StepShape],
    seconds: Floats,
    seed: int,
    solve: Solve = solve_relative,
    root_weight: Floats | None = None,
) -> PassLaw:
    """Return the law that passes [n] show, with its held-out error: each pass is predicted by a law
    that did not see a fifth of the passes, this one among them.

    Args:
        form: which terms and knots the law has, with any seconds. With `flat_s` it may be flat, and
            then linear; its passes are of decodes alone.
        seed: deals the passes into held-out parts.
        root_weight: the square root of each pass's weight [n]; None: all weigh the same.
    """
    columns = np.array(form.columns(shapes))
    weights = np.ones(len(seconds)) if root_weight is None else root_weight

    def fitted(rows: Rows) -> PassLaw:
        return least_law(form, columns[rows], seconds[rows], weights[rows], solve)

    def predict(seen: Rows, rows: Rows) -> Floats:
        law = fitted(seen)
        return np.array([law.forward_s(shapes[row]) for row in rows])

    error = percent_error(predict_held_out(len(seconds), predict, seed), seconds)
    return replace(fitted(np.arange(len(seconds))), error=error)


def least_law(
    form: PassLaw, columns: Floats, seconds: Floats, root_weight: Floats, solve: Solve
) -> PassLaw:
    """Return the law of this form with the least sum of squared relative residuals. Terms that the
    passes do not show are 0.

    A decode step on a GPU takes as long as the launches of its kernels, until the weights and the
    caches that it reads take longer. Which points of a flat form are flat is not known before: they
    are the fastest ones, and every number of them is tried.
    """
    order = np.argsort(seconds, kind="stable")

    def flat_below(count: int) -> tuple[Floats, float]:
        fast, slow = np.split(order, [count])
        values = solve(columns[slow], seconds[slow], root_weight[slow])
        return values, float(1.0 / np.mean(1.0 / seconds[fast])) if count else 0.0

    def error(found: tuple[Floats, float]) -> float:
        values, flat_s = found
        predicted = np.maximum(columns @ values, flat_s)
        return float(np.square(predicted / seconds - 1.0).sum())

    most = len(seconds) - LEAST_POINTS if form.flat_s else 0
    tried = map(flat_below, (0, *range(LEAST_POINTS, most + 1)))
    values, flat_s = min(tried, key=error)
    return replace(form.with_values(values.tolist()), flat_s=flat_s)


def fit_overhead(times: Sequence[Floats], seed: int) -> OverheadFit:
    """Return what serving adds to laws: seconds = batch_s + stretch * (seconds by the laws). The
    laws are measured in one process. `batch_s` is dispatch and pipe; `stretch` is how much workers
    slow one another down, and the difference between clocks where the laws are in CPU time.

    Args:
        times: of each slice, or each round of a sequence, the seconds by the laws and as measured:
            [2, n]. Parts of the slices, or of the sequences, are held out.
    """

    def line(its: Sequence[Floats]) -> tuple[float, float]:
        served, seconds = np.concatenate(its, axis=1)
        both = np.stack([np.ones_like(served), served], axis=1)
        batch_s, stretch = solve_passes(both, seconds, np.ones_like(served)).tolist()
        return batch_s, max(stretch, STRETCH_MIN)

    def predict(seen: Rows, rows: Rows) -> Floats:
        batch_s, stretch = line([times[k] for k in seen])
        return np.array([batch_s * times[k].shape[1] + stretch * times[k][0].sum() for k in rows])

    totals = np.array([seconds.sum() for _, seconds in times])
    error = percent_error(predict_held_out(len(times), predict, seed), totals)
    batch_s, stretch = line(times)
    return OverheadFit(batch_s=batch_s, stretch=stretch, error=error)


def line_in_rows(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return a constant and the seconds per row, both >= 0, by least squares, given the rows and
    the seconds of each point.

    Another program may have used the machine, so a time counts as at most three times the line.
    """
    rows, seconds = np.array(points, dtype=float).T
    columns = np.stack([np.ones_like(rows), rows], axis=1)
    counted = seconds
    for _ in range(LINE_ROUNDS):
        line, _ = nnls(columns, counted)
        counted = np.minimum(seconds, OUTLIER * (columns @ line))
    return float(line[0]), float(line[1])
