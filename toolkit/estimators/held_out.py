"""Held-out error: how far off a fit is on points that it did not see.

The points are dealt into five parts; each part is predicted by a fit of the other four, so every point is held out
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from toolkit.files.fit import HeldOutError

PARTS = 5
NO_DIFFERENCE = 1e-3  # of relative error, on exact data

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]


def predict_held_out(count: int, predict: Callable[[Rows, Rows], Floats], seed: int) -> Floats:
    """An array [count], each value from `predict(seen rows, held-out rows)` where its row was held out."""
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
    """The index of the form to keep, given each form's held-out errors [n], the simplest form first.

    The one with the least mean, or the first that is not worse by more than the standard error of the paired
    difference: less than that is luck in which points were held out.
    """
    best = min(errors, key=np.mean)

    def as_good(error: Floats) -> bool:
        worse = error - best
        return bool(worse.mean() <= worse.std() / np.sqrt(len(worse)) + NO_DIFFERENCE)

    return next(index for index, error in enumerate(errors) if as_good(error))
