"""Laws as they might have been fitted: around the fitted ones, in the same forms, and the same for
a seed.
"""

import numpy as np
import pytest
import samples
from synthetic_profiles import make_profile

from toolkit.errors import InputError
from toolkit.estimators.fitting import fit_profile, resampled_fits, scaled_fits
from toolkit.estimators.load import laws_from_fit
from toolkit.files.fit import Fit
from toolkit.files.profile import Profile


def fit_of(profile: Profile) -> Fit:
    fitted = fit_profile(profile)
    changed = {
        "prefill": fitted.prefill.fit,
        "decode": fitted.decode.fit,
        "overhead": fitted.overhead,
    }
    return samples.fit().model_copy(update=changed | {"memory": fitted.memory})


def slice_s(fit: Fit) -> float:
    """A slice in the middle of the grid, overhead included."""
    law = laws_from_fit(fit).latency
    return law.prefill_s(8, 100) + law.decode_s(8, 100, 31)


def test_resampled_laws_lie_around_the_fitted_one_and_closer_with_less_noise():
    spread = []
    for noise in (0.02, 0.2):
        profile = make_profile(noise=noise)
        fit = fit_of(profile)
        ratios = [slice_s(one) / slice_s(fit) for one in resampled_fits(profile, fit, 30, seed=0)]
        assert min(ratios) < 1.0 < max(ratios)
        spread.append(np.std(ratios))
    assert 0 < 5 * spread[0] < spread[1]


@pytest.mark.slow
def test_the_truth_is_within_what_resampling_spans():
    covered = []
    for seed in range(12):
        profile = make_profile(noise=0.1, seed=seed)
        drawn = [slice_s(one) for one in resampled_fits(profile, fit_of(profile), 20, seed=0)]
        truth = slice_s(fit_of(make_profile()))
        covered.append(np.percentile(drawn, 5) <= truth <= np.percentile(drawn, 95))
    assert sum(covered) >= 8  # of 12, where 90 % are meant: overhead and laws are resampled apart


def test_a_seed_gives_the_same_draws_and_more_draws_begin_alike():
    profile = make_profile(noise=0.1)
    fit = fit_of(profile)
    assert resampled_fits(profile, fit, 2, seed=3) == resampled_fits(profile, fit, 4, seed=3)[:2]
    assert resampled_fits(profile, fit, 2, seed=3) != resampled_fits(profile, fit, 2, seed=4)
    assert scaled_fits(fit, 2, seed=3) == scaled_fits(fit, 4, seed=3)[:2]


def test_scaled_laws_err_as_the_held_out_points_did():
    fit = samples.fit()  # whose laws are off by 1 % in the median
    errors = [
        abs(one.decode.segments[0].const / fit.decode.segments[0].const - 1)
        for one in scaled_fits(fit, 2000, 0)
    ]
    assert np.median(errors) == pytest.approx(0.01, rel=0.1)


def test_a_law_is_scaled_as_a_whole():
    fit = samples.fit()
    before, after = fit.decode.segments[0], scaled_fits(fit, 1, 0)[0].decode.segments[0]
    assert after.nl / before.nl == pytest.approx(after.const / before.const)


def test_a_form_that_the_profile_does_not_show_is_an_error():
    profile = make_profile()
    fit = fit_of(profile)
    other = fit.model_copy(
        update={"prefill": fit.prefill.model_copy(update={"form": "bends at 7"})}
    )
    with pytest.raises(InputError, match="bends at 7"):
        resampled_fits(profile, other, 1, 0)
