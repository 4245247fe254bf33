"""The lower bound of the attainment: it covers the true share, also where neighbouring requests are
correlated.
"""

import numpy as np
import pytest

from toolkit.tuning.evaluate import lower_bound_percent, wilson_lower


def stretches(rng: np.random.Generator, count: int, mean_length: float, share: float) -> np.ndarray:
    """Requests that are good or late in stretches, as those are that meet one queue."""
    lengths = rng.geometric(1 / mean_length, count)
    return np.repeat(rng.random(count) < share, lengths)[:count]


def test_wilson_s_bound_is_that_of_the_textbook():
    # One-sided 95 % of 8 in 10 (Wilson 1927): 0.541 by hand from the score equation.
    share = wilson_lower(0.8, 10)
    assert (0.8 - share) / np.sqrt(share * (1 - share) / 10) == pytest.approx(1.6449, abs=1e-4)


def test_the_bound_of_100_percent_is_below_it_and_rises_with_more_requests():
    few, many = (lower_bound_percent([np.ones(n, bool)]) for n in (50, 5000))
    assert 90 < few < many < 100


def test_no_good_request_gives_a_bound_of_zero():
    assert lower_bound_percent([np.zeros(40, bool)]) == 0.0
    assert lower_bound_percent([np.zeros(0, bool)]) == 0.0


@pytest.mark.slow
def test_it_covers_correlated_requests_where_a_bound_for_independent_ones_does_not():
    rng = np.random.default_rng(0)
    drawn = [[stretches(rng, 600, 20, 0.9) for _ in range(2)] for _ in range(400)]
    mine = np.mean([lower_bound_percent(windows) <= 90.0 for windows in drawn])
    plain = np.mean(
        [100 * wilson_lower(float(np.mean(windows)), 1200) <= 90.0 for windows in drawn]
    )
    assert mine > 0.87  # of the 95 % that are meant: late stretches are few
    assert plain < 0.6


def test_for_independent_requests_the_bound_is_little_lower():
    rng = np.random.default_rng(0)
    windows = [rng.random(2000) < 0.95 for _ in range(2)]
    plain = 100 * wilson_lower(float(np.mean(windows)), 4000)
    assert plain - 1.0 < lower_bound_percent(windows) <= plain
