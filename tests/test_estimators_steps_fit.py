"""The fit of the law of passes: it finds known coefficients, outliers count little, and errors are
of held-out passes.
"""

import numpy as np
import pytest
from said import says
from synthetic_profiles import steps_profile

from toolkit.errors import InputError
from toolkit.estimators.part_fits import fit_front, fit_steps, point_of
from toolkit.files.profile import FrontPoint, StepsProfile
from toolkit.laws.features import StepShape
from toolkit.laws.passes import PassLaw

TERMS = {"pass": 5e-3, "row": 1e-4, "chunk": 2e-4, "cached": 3e-7, "attended": 4e-8}
LAW = PassLaw(TERMS | {"host": 2e-4, "host_row": 1e-5}, (2e-5, 1e-4), (0, 128))


def shapes(count: int, rng: np.random.Generator) -> list[StepShape]:
    """Decodes alone, chunks alone, and both."""
    found = []
    for k in range(count):
        decodes = 0 if k % 3 == 1 else int(rng.integers(1, 64))
        chunks = [] if k % 3 == 0 else [int(n) for n in rng.integers(8, 400, rng.integers(1, 4))]
        attended = sum(n * (int(rng.integers(0, 300)) + n / 2) for n in chunks)
        cached = decodes * int(rng.integers(8, 400))
        found.append(StepShape(decodes, cached, len(chunks), sum(chunks), attended))
    return found


def measured(count: int = 300, noise: float = 0.0, outliers: float = 0.0) -> StepsProfile:
    rng = np.random.default_rng(0)
    points = []
    for shape in shapes(count, rng):
        factor = np.exp(noise * rng.standard_normal()) * (5.0 if rng.random() < outliers else 1.0)
        point = point_of(shape, LAW.forward_s(shape) * factor)
        points.append(point.model_copy(update={"host_s": [LAW.after_s(shape.rows)]}))
    front = [
        FrontPoint(rows=rows, prompt_tokens=8, seconds=0.002 * (rows == 1) + 1e-4 * rows)
        for rows in (1, 4, 16)
    ]
    return steps_profile(points, block_tokens=32, blocks=127, front=front)


def test_reading_the_cache_is_told_from_computing_a_chunk():
    law = PassLaw(TERMS | {"behind": 3e-6}, (2e-5,), (0,))
    rng = np.random.default_rng(1)
    profile = measured()
    points = [point for point in profile.points if not point.prefills]
    for _ in range(100):
        new = int(rng.integers(8, 400))
        cached = int(rng.integers(0, 3000))
        shape = StepShape(0, 0, 1, new, new * (cached + new / 2), cached)
        points.append(point_of(shape, law.forward_s(shape)))
    fit = fit_steps(profile.model_copy(update={"points": points}), 0)
    assert fit.law.terms["behind"] == pytest.approx(3e-6, rel=0.05)
    shape = StepShape(0, 0, 1, 40, 40 * 2020.0, 2000)
    assert fit.law.forward_s(shape) == pytest.approx(law.forward_s(shape), rel=0.03)


def test_the_fitted_law_equals_the_law_of_the_passes():
    fit = fit_steps(measured(), 0)
    found = fit.law
    for shape in shapes(30, np.random.default_rng(1)):
        assert found.step_s(shape) == pytest.approx(LAW.step_s(shape), rel=0.01)
    assert fit.error.worst_percent < 1.0
    assert (fit.front_s, fit.front_row_s) == (pytest.approx(0.0021), pytest.approx(1e-4, rel=0.1))
    assert (fit.blocks, fit.block_tokens) == (127, 32)


def test_the_front_of_many_rows_is_not_taken_for_a_disturbance():
    """Most points have few rows, so that many rows take far longer than the median of all."""
    times_s = [(1, 0.004)] * 9 + [(rows, 2e-4 * rows) for rows in (4, 8, 96) for _ in range(3)]
    times_s.append((8, 1.0))  # another program ran
    front = [FrontPoint(rows=rows, prompt_tokens=8, seconds=taken) for rows, taken in times_s]
    constant_s, row_s = fit_front(measured(1).model_copy(update={"front": front}))
    assert constant_s == pytest.approx(0.004)
    assert row_s == pytest.approx(2e-4, rel=0.05)


def test_disturbed_passes_count_little():
    found = fit_steps(measured(noise=0.05, outliers=0.05), 0).law
    errors = [
        found.forward_s(s) / LAW.forward_s(s) - 1 for s in shapes(60, np.random.default_rng(2))
    ]
    # 5 % of the passes count half as much again: the mean is 2.5 % more
    assert abs(float(np.mean(errors))) < 0.06
    assert max(map(abs, errors)) < 0.15


def test_errors_are_of_held_out_passes():
    assert fit_steps(measured(noise=0.1), 0).error.median_percent == pytest.approx(6.7, abs=2.0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda points: points[:5], ("steps", "5 passes", "40")),
        (lambda points: [one for one in points if not one.prefills], ("steps", "chunks")),
        (
            lambda points: [*points, points[0].model_copy(update={"seconds": [0.0]})],
            ("steps", "pass"),
        ),
    ],
)
def test_the_error_names_what_the_passes_lack(change, named):
    found = measured()
    with pytest.raises(InputError) as caught:
        fit_steps(found.model_copy(update={"points": change(found.points)}), 0)
    assert says(caught.value.message, *named)
