"""Laws of passes of models with sliding windows and with states.

The passes are synthetic, by laws with known coefficients.
"""

import itertools

import pytest
from synthetic_profiles import steps_profile

from toolkit.catalogue.resolved import CacheGroup, Resolved
from toolkit.estimators.part_fits import fit_steps, point_of
from toolkit.files.iterations import LoggedRow, shape_of_rows
from toolkit.files.profile import StepsProfile
from toolkit.laws.features import StepShape
from toolkit.laws.passes import PassLaw
from toolkit.sim.flight import grown_shape

FULL = CacheGroup("full", "FullAttentionSpec", 16, 18, 1 << 15)
WINDOW = CacheGroup("window", "SlidingWindowSpec", 16, 18, 1 << 15, window=1024)
WINDOWS = PassLaw(
    {
        "pass": 2e-3,
        "row": 1e-5,
        "cached": 3e-8,
        "attended": 1e-9,
        "inside": 9e-8,
        "attended_inside": 4e-9,
    },
    (2e-5,),
    (0,),
    window=1024,
)


def shapes(window: int) -> list[StepShape]:
    """Decodes alone, chunks alone, and both."""
    found = []
    for rows, cached in itertools.product((1, 4, 16, 40, 64, 120, 256), (100, 700, 1500, 6000)):
        found.append(shape_of_rows([LoggedRow("", cached, 1, 1)] * rows, window))
    for new, cached, rows in itertools.product((16, 256, 2048), (0, 1500), (0, 1, 8, 64)):
        decodes = [LoggedRow("", 900, 1, 1)] * rows
        found.append(shape_of_rows([LoggedRow("", cached, new, 10_000), *decodes], window))
    return found


def profile_of(law: PassLaw, groups: list[CacheGroup]) -> StepsProfile:
    points = [point_of(shape, law.forward_s(shape)) for shape in shapes(law.window)]
    return steps_profile(points, resolved=Resolved(groups, 10_000, 1 << 20))


def test_what_is_inside_the_windows_of_a_pass() -> None:
    rows = [
        LoggedRow("a", 100, 1, 20),
        LoggedRow("b", 3000, 1, 20),
        LoggedRow("c", 0, 200, 5000),
        LoggedRow("d", 2000, 200, 5000),
    ]
    shape = shape_of_rows(rows, 1024)
    assert shape.decode_inside == 100 + 1023
    assert shape.prefill_inside == 200 * 100 + 200 * 1024
    assert shape.growing == 1
    alone = shape_of_rows(rows[:2], 1024)
    later = grown_shape(alone, 11)
    assert (later.decode_cached, later.decode_inside) == (3100 + 20, 1123 + 10)
    assert shape_of_rows(rows).decode_inside == 0


def test_the_law_of_a_pass_finds_what_windows_cost() -> None:
    profile = profile_of(WINDOWS, [WINDOW, FULL])
    fit = fit_steps(profile, 0)
    assert fit.law.window == 1024
    for term in ("inside", "attended_inside"):
        assert fit.law.terms[term] == pytest.approx(WINDOWS.terms[term], rel=0.05)
    assert fit.error.p95_percent < 1.0
    law = fit.law
    for shape in shapes(1024):
        assert law.forward_s(shape) == pytest.approx(WINDOWS.forward_s(shape), rel=0.02)
        assert law.times(2.0).forward_s(shape) == pytest.approx(2.0 * law.forward_s(shape))
    without = profile.model_copy(update={"resolved": None})
    assert fit_steps(without, 0).error.p95_percent > 3.0 * fit.error.p95_percent


def test_a_step_grows_by_what_both_kinds_of_layers_read() -> None:
    shape = shape_of_rows([LoggedRow("", 100, 1, 1), LoggedRow("", 4000, 1, 1)], 1024)
    grown_s = WINDOWS.forward_s(grown_shape(shape, 6)) - WINDOWS.forward_s(shape)
    assert 5 * WINDOWS.growth_s(shape) == pytest.approx(grown_s)


def test_a_router_believes_in_windows_by_averages() -> None:
    rows = [LoggedRow("", 5000, 1, 1)] * 3
    seconds = WINDOWS.step_s(shape_of_rows(rows, 1024))
    assert WINDOWS.pass_s(3, 15_000.0, 0.0, 0.0, 0.0) == pytest.approx(seconds)
