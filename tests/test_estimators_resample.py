"""Resampled and scaled laws: around the fitted ones, in the same forms, and the same for a seed."""

import numpy as np
import pytest
import samples
from synthetic_profiles import fit_of, make_profile
from test_estimators_steps_fit import measured

from toolkit.errors import InputError
from toolkit.estimators.fitting import resampled_fits, scaled_fits
from toolkit.estimators.load import law_of_steps, laws_from_fit
from toolkit.estimators.steps import StepShape
from toolkit.files.fit import Fit
from toolkit.files.profile import AnalyticError


def slice_s(fit: Fit) -> float:
    """A slice in the middle of the grid, overhead included."""
    law = laws_from_fit(fit).latency
    return law.prefill_s(8, 100) + law.decode_s(8, 100, 31)


@pytest.mark.slow
def test_resampled_laws_lie_around_the_fitted_one():
    spread = []
    for noise in (0.02, 0.2):
        profile = make_profile(noise=noise)
        fit = fit_of(profile)
        ratios = [
            slice_s(other) / slice_s(fit) for other in resampled_fits(profile, fit, 30, seed=0)
        ]
        assert min(ratios) < 1.0 < max(ratios)
        spread.append(np.std(ratios))
    assert 0 < 5 * spread[0] < spread[1]


@pytest.mark.slow
def test_the_truth_lies_within_the_range_of_resampled_fits():
    covered = []
    for seed in range(12):
        profile = make_profile(noise=0.1, seed=seed)
        drawn = [slice_s(fit) for fit in resampled_fits(profile, fit_of(profile), 20, seed=0)]
        truth = slice_s(fit_of(make_profile()))
        covered.append(np.percentile(drawn, 5) <= truth <= np.percentile(drawn, 95))
    assert sum(covered) >= 8  # of 12, where 90 % are meant: overhead and laws are resampled apart


def test_a_seed_gives_the_same_draws_whatever_their_number():
    profile = make_profile(noise=0.1)
    fit = fit_of(profile)
    assert resampled_fits(profile, fit, 2, seed=3) == resampled_fits(profile, fit, 4, seed=3)[:2]
    assert resampled_fits(profile, fit, 2, seed=3) != resampled_fits(profile, fit, 2, seed=4)
    assert scaled_fits(fit, 2, seed=3) == scaled_fits(fit, 4, seed=3)[:2]


def test_scaled_laws_have_the_held_out_error():
    fit = samples.fit()  # the median error of its laws is 1 %
    errors = [
        abs(other.decode.segments[0].const / fit.decode.segments[0].const - 1)
        for other in scaled_fits(fit, 2000, 0)
    ]
    assert np.median(errors) == pytest.approx(0.01, rel=0.1)


def test_computed_laws_are_scaled_by_the_errors_beside_measured_servers():
    fit = samples.fit()
    error = AnalyticError(
        gpu="h100_sxm",
        servers=9,
        tpot_percent=8.0,
        tpot_p90_percent=28.0,
        ttft_percent=12.0,
        ttft_p90_percent=40.0,
    )
    computed = fit.engine.model_copy(update={"analytic": "sums", "analytic_error": error})
    fit = fit.model_copy(update={"engine": computed})
    for law, off in (("decode", 0.08), ("prefill", 0.12)):
        before = getattr(fit, law).segments[0].n
        factors = [
            getattr(other, law).segments[0].n / before for other in scaled_fits(fit, 2000, 0)
        ]
        assert np.median(np.abs(np.log(factors))) == pytest.approx(off, rel=0.1)


def test_a_law_is_scaled_as_a_whole():
    fit = samples.fit()
    before = fit.decode.segments[0]
    after = scaled_fits(fit, 1, 0)[0].decode.segments[0]
    assert after.nl / before.nl == pytest.approx(after.const / before.const)


def test_a_form_that_the_profile_does_not_determine_is_an_error():
    profile = make_profile()
    fit = fit_of(profile)
    other = fit.model_copy(
        update={"prefill": fit.prefill.model_copy(update={"form": "bends at 7"})}
    )
    with pytest.raises(InputError, match="'bends at 7'"):
        resampled_fits(profile, other, 1, 0)


PASS = StepShape(32, 8000, 2, 400, 60000.0)


def pass_s(fit: Fit) -> float:
    assert fit.steps is not None
    return law_of_steps(fit.steps).step_s(PASS)


@pytest.mark.slow
def test_passes_are_resampled_around_the_fitted_law() -> None:
    spread = []
    for noise in (0.02, 0.2):
        profile = make_profile().model_copy(update={"steps": measured(100, noise=noise)})
        fit = fit_of(profile)
        drawn = resampled_fits(profile, fit, 10, seed=0)
        ratios = [pass_s(other) / pass_s(fit) for other in drawn]
        assert min(ratios) < 1.0 < max(ratios)
        assert all(other.steps.knots == fit.steps.knots for other in drawn)
        spread.append(np.std(ratios))
    assert 0 < 5 * spread[0] < spread[1]


@pytest.mark.slow
def test_passes_are_scaled_as_a_whole_by_their_held_out_error() -> None:
    fit = samples.paged_fit()  # the median error of its laws is 1 %
    drawn = scaled_fits(fit, 2000, 0)
    assert np.median([abs(pass_s(other) / pass_s(fit) - 1) for other in drawn]) == pytest.approx(
        0.01, rel=0.1
    )
    one = drawn[0].steps
    assert one.host_s / fit.steps.host_s == pytest.approx(one.base_s / fit.steps.base_s)
    assert one.front_s == fit.steps.front_s


def test_a_fit_of_passes_without_their_profile_keeps_its_law() -> None:
    profile = make_profile()
    fit = fit_of(profile).model_copy(update={"steps": samples.paged_fit().steps})
    assert resampled_fits(profile, fit, 1, 0)[0].steps == fit.steps
