"""The numbers that `trace inspect` shows."""

import numpy as np
import pytest

from toolkit.traces.generate import Arrivals, Lengths, generate
from toolkit.traces.types import Trace
from toolkit.traces.windows import describe


def test_rates_count_from_the_first_arrival_to_the_last():
    zeros = np.zeros(3, dtype=np.int64)
    trace = Trace(np.array([0.0, 1.0, 4.0]), np.array([10, 20, 30]), np.array([1, 2, 5]), zeros)
    found = describe(trace)
    assert (found.duration_s, found.rate_rps) == (4, 0.5)
    assert (found.input_tokens_per_s, found.output_tokens_per_s) == (15, 2)
    assert found.prompt.mean == 20
    assert found.prompt.percentiles["p50"] == 20
    assert found.output.max == 5


@pytest.mark.parametrize("cv", [0, 1, 2.5])
def test_burstiness_is_the_variation_of_the_gaps(cv):
    trace = generate(Arrivals(20, cv), 1000, Lengths("fixed", 1), Lengths("fixed", 1), seed=0)
    assert describe(trace).burstiness_cv == pytest.approx(cv, rel=0.05, abs=1e-9)


@pytest.mark.parametrize("count", [1, 4])
def test_requests_that_all_arrive_at_once_have_no_rate(count):
    ones = np.ones(count, dtype=np.int64)
    found = describe(Trace(np.zeros(count), ones, ones, ones))
    assert (found.rate_rps, found.burstiness_cv, found.input_tokens_per_s) == (0, 0, 0)
