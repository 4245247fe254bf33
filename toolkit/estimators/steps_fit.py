"""From measured forward passes to the law of a paged engine's pass: coefficients >= 0, by least relative squares.

Where the cost of a new token changes (`StepLaw.knots`) competes on held-out error, the fewest knots first. A pass is
seen once: what disturbed it counts up to half of it, and the law is then raised to the mean, which serving pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from scipy.optimize import nnls

from toolkit.errors import InputError
from toolkit.estimators.forms import CLIP, typical
from toolkit.estimators.held_out import Floats, Rows, choose, percent_error, predict_held_out
from toolkit.estimators.steps import StepLaw, StepShape, features
from toolkit.files.fit import Candidate, StepRange, StepsFit
from toolkit.files.profile import FrontPoint, StepPoint, StepsProfile

POINTS_MIN = 40
PLACES = (8, 32, 128, 512)  # tokens at which a knot may be
KNOTS_MAX = 2
ROUNDS = 4  # of fitting and clipping
REMEDY = "measure again with: llmctl profile RECIPE"


def fit_steps(measured: StepsProfile | None, seed: int) -> StepsFit | None:
    """The law of a profile's passes; None where they were not seen.

    Raises `InputError` where there are too few of them, or of those without chunks, or one that took no time.
    """
    if measured is None:
        return None
    points = measured.points
    _check(points)
    shapes = [shape_of(point) for point in points]
    seconds = np.array([typical(point.seconds) for point in points])
    weight = np.sqrt([min(len(point.seconds), 16) for point in points])
    tried = _knots(max(shape.tokens for shape in shapes))
    columns = [np.array([features(shape, knots) for shape in shapes]) for knots in tried]
    predicted = [_held_out(each, seconds, weight, seed) for each in columns]
    kept = choose([np.abs(one / seconds - 1.0) for one in predicted])
    law = StepLaw.of(_solve(columns[kept], seconds, weight).tolist(), tried[kept])
    host_s, host_row_s = _host(points)
    front_s, front_row_s = _front(measured.front)
    errors = [percent_error(one, seconds) for one in predicted]
    return StepsFit(
        base_s=law.base_s,
        row_s=law.row_s,
        prefill_s=law.prefill_s,
        cached_s=law.cached_s,
        attended_s=law.attended_s,
        token_s=list(law.token_s),
        knots=list(law.knots),
        host_s=host_s,
        host_row_s=host_row_s,
        error=errors[kept],
        candidates=[
            Candidate(form=f"knots {', '.join(map(str, knots))}", error=error)
            for knots, error in zip(tried, errors, strict=True)
        ],
        valid=StepRange(
            rows_max=max(shape.rows for shape in shapes),
            tokens_max=max(shape.tokens for shape in shapes),
            cached_max=max(shape.decode_cached for shape in shapes),
        ),
        front_s=front_s,
        front_row_s=front_row_s,
        block_tokens=measured.block_tokens,
        blocks=measured.blocks,
        async_scheduling=measured.async_scheduling,
    )


def shape_of(point: StepPoint) -> StepShape:
    """The composition of a measured pass."""
    return StepShape(
        point.decodes, round(point.decode_cached), point.prefills, point.prefill_tokens, point.prefill_attended
    )


def _knots(tokens_max: int) -> list[tuple[int, ...]]:
    places = [place for place in PLACES if place < tokens_max]
    return [(0, *chosen) for count in range(KNOTS_MAX + 1) for chosen in combinations(places, count)]


def _held_out(columns: Floats, seconds: Floats, weight: Floats, seed: int) -> Floats:
    def predict(seen: Rows, rows: Rows) -> Floats:
        return np.asarray(columns[rows] @ _solve(columns[seen], seconds[seen], weight[seen]), dtype=np.float64)

    return predict_held_out(len(seconds), predict, seed)


def _solve(columns: Floats, seconds: Floats, weight: Floats) -> Floats:
    """Coefficients >= 0 of the usual pass, raised to the mean of passes none of which counts beyond 1.5 times that."""
    clipped, found = seconds, np.zeros(columns.shape[1])
    for _ in range(ROUNDS):
        found = _least_squares(columns, clipped, weight)
        usual = columns @ found
        clipped = np.minimum(seconds, CLIP * usual)
    weights = np.square(weight)
    return np.asarray(found * float((weights * clipped).sum() / (weights * usual).sum()), dtype=np.float64)


def _least_squares(columns: Floats, seconds: Floats, weight: Floats) -> Floats:
    relative = columns * (weight / seconds)[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0.0] = 1.0
    found, _ = nnls(relative / scale, weight)
    return np.asarray(found / scale, dtype=np.float64)


def _host(points: Sequence[StepPoint]) -> tuple[float, float]:
    """Flat and per row. A gap in which somebody else had the machine counts as three usual ones."""
    rows = np.array([point.decodes + point.prefills for point in points if point.host_s], dtype=float)
    if not len(rows):
        return 0.0, 0.0
    seconds = np.array([typical(point.host_s) for point in points if point.host_s])
    seconds = np.minimum(seconds, 3.0 * np.median(seconds))
    found, _ = nnls(np.stack([np.ones(len(rows)), rows], axis=1), seconds)
    return float(found[0]), float(found[1])


def _front(points: Sequence[FrontPoint]) -> tuple[float, float]:
    """What a first token takes there and back for a request alone, and what other rows add to the way back."""
    alone = [point.seconds for point in points if point.rows == 1]
    if not alone:
        return 0.0, 0.0
    several = [point for point in points if point.rows > 1]
    rows = np.array([point.rows for point in several], dtype=float)
    seconds = np.array([point.seconds for point in several])
    if not len(several):
        return typical(alone), 0.0
    found, _ = nnls(np.stack([np.ones(len(rows)), rows], axis=1), np.minimum(seconds, 3.0 * np.median(seconds)))
    return typical(alone), float(found[1])


def _check(points: Sequence[StepPoint]) -> None:
    if len(points) < POINTS_MIN:
        raise InputError(f"steps: {len(points)} passes were measured, at least {POINTS_MIN} are needed", REMEDY)
    if not any(point.prefills for point in points) or all(point.prefills for point in points):
        raise InputError("steps: passes with chunks of prompts and passes without are both needed", REMEDY)
    if any(not point.seconds or min(point.seconds) <= 0.0 for point in points):
        raise InputError("steps: a pass took no time", REMEDY)
