"""What a slice costs beyond its laws when it goes through a worker process and all workers run.

seconds = batch_s + stretch * T_serve(N, L, S). The laws are measured in one process; the flat part is dispatch and
pipe, the stretch is what workers cost each other, and the clock's difference where the laws are in CPU time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares

from toolkit.errors import InputError
from toolkit.estimators.held_out import Floats, Rows, percent_error, predict_held_out
from toolkit.estimators.laws import SegmentedLaw
from toolkit.files.fit import OverheadFit
from toolkit.files.profile import SlicePoint

SLICES_MIN = 6
STRETCH_MIN = 1e-3
RESOLUTION_S = 1e-6  # the solver stays off its bounds by a hair; below this, batch_s is 0
# Relative residuals beyond this count linearly: a slice that another program disturbed should not bend the line.
DISTURBED = 0.1


def fit_overhead(slices: Sequence[SlicePoint], law: SegmentedLaw, seed: int) -> OverheadFit:
    """The overhead that the measured slices show over `law`, and its held-out error.

    Raises `InputError` where fewer than six slices were measured, or one took no time.
    """
    remedy = "set profile.slices in the recipe; then: llmctl profile RECIPE"
    if len(slices) < SLICES_MIN:
        raise InputError(f"overhead: {len(slices)} slices measured, at least {SLICES_MIN} are needed", remedy)
    seconds = np.array([point.seconds for point in slices])
    if seconds.min() <= 0.0:
        raise InputError(f"overhead: a slice of {seconds.min()} s", "measure again with: llmctl profile RECIPE")
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
    return np.array([law.serve_s(point.batch_size, point.input_length, point.steps) for point in slices])


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
