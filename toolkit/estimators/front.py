"""The fit of an engine's front: HTTP, tokenizing, and the streams of tokens to clients.

The front of a server is one process. What it adds to a token has a constant part and a part for
each row that runs: the tokens of a pass reach it together, and it passes them on one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from toolkit.estimators.forms import typical
from toolkit.files.profile import FrontPoint, StepsProfile

OUTLIER = 3.0  # times the median: how much a longer time among others of as many rows counts


@dataclass(slots=True, frozen=True)
class FrontFit:
    """Seconds that the front adds to a request alone, and for each row that runs."""

    constant_s: float
    row_s: float


def fit_front(measured: StepsProfile) -> FrontFit:
    """The front of a profile.

    The constant is of requests alone. The slope is of the way back of several at once. Another
    program may have used the machine, so a time counts at most three times the median of the times
    of as many rows.
    """
    alone = [point.seconds for point in measured.front if point.rows == 1]
    several = [point for point in measured.front if point.rows > 1]
    constant_s = typical(alone) if alone else 0.0
    if not alone or not several:
        return FrontFit(constant_s, 0.0)
    return FrontFit(constant_s, _slope(several))


def _slope(points: Sequence[FrontPoint]) -> float:
    """Seconds per row, by least squares with a constant, both >= 0."""
    of_rows: defaultdict[int, list[float]] = defaultdict(list)
    for point in points:
        of_rows[point.rows].append(point.seconds)
    rows = np.repeat(list(of_rows), [len(times) for times in of_rows.values()])
    columns = np.stack([np.ones(len(rows)), rows.astype(float)], axis=1)
    times_s = [np.minimum(times, OUTLIER * np.median(times)) for times in of_rows.values()]
    (_, row_s), _ = nnls(columns, np.concatenate(times_s))
    return float(row_s)
