"""The fit of an engine's front: HTTP, tokenizing, and the streams of tokens to clients.

The front of a server is one process. What it adds to a token has a constant part and a part for
each row that runs: the tokens of a pass reach it together, and it passes them on one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from toolkit.estimators.forms import line_in_rows, typical
from toolkit.files.profile import FrontPoint, StepsProfile, TrafficFront

# How much a longer time counts: so many times the median of the times of as many rows, or the line.
OUTLIER = 3.0
CLIP_ROUNDS = 8  # of fitting and clipping
LEAST_ERROR_S = 1e-3  # of a request's time in the front: scheduling of the machine's processes
TRAFFIC_MIN = 20  # requests; fewer show nothing of a mean


def fit_front(measured: StepsProfile) -> tuple[float, float]:
    """The seconds that the front adds to a request alone, and for each row that runs.

    Where passes overlap it is of requests in traffic, at loads that the engine keeps up with, and
    of requests alone. Traffic of other engines goes up to what they can serve and beyond, where
    requests wait for reasons of overload: there the constant is of requests alone, and the slope of
    the way back of several at once.
    """
    alone = [point.seconds for point in measured.front if point.rows == 1]
    if measured.async_scheduling and len(measured.front_in_traffic) >= TRAFFIC_MIN:
        return _in_traffic(measured.front_in_traffic, alone)
    several = [point for point in measured.front if point.rows > 1]
    constant_s = typical(alone) if alone else 0.0
    row_s = _slope(several) if alone and several else 0.0
    return constant_s, row_s


def _in_traffic(points: Sequence[TrafficFront], alone: Sequence[float]) -> tuple[float, float]:
    """The line through all requests, those alone as rows of one.

    A time on the way in is uncertain by the time between two schedules, evenly within half of it on
    either side, and weighs accordingly.
    """
    rows = np.array([*(float(point.rows) for point in points), *np.ones(len(alone))])
    seconds = np.array([*(point.in_s + point.out_s for point in points), *alone])
    uncertain_s = np.array([*(point.scheduled_s for point in points), *np.zeros(len(alone))])
    weight = 1.0 / np.sqrt(LEAST_ERROR_S**2 + uncertain_s**2 / 12)
    counted = seconds
    for _ in range(CLIP_ROUNDS):
        constant_s, row_s = line_in_rows(rows, counted, weight)
        line = constant_s + row_s * rows
        counted = np.minimum(seconds, OUTLIER * line + uncertain_s / 2)
    return constant_s, row_s


def _slope(points: Sequence[FrontPoint]) -> float:
    """Seconds per row of several requests at once. Another program may have used the machine, so a
    time counts at most three times the median of the times of as many rows.
    """
    of_rows: defaultdict[int, list[float]] = defaultdict(list)
    for point in points:
        of_rows[point.rows].append(point.seconds)
    rows = np.repeat(list(of_rows), [len(times) for times in of_rows.values()])
    times_s = [np.minimum(times, OUTLIER * np.median(times)) for times in of_rows.values()]
    _, row_s = line_in_rows(rows.astype(float), np.concatenate(times_s))
    return row_s
