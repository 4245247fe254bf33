"""Summaries of served requests, on cases small enough to compute by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.metrics import (
    Served,
    latencies,
    makespan_s,
    meets_sla,
    pooled_rates,
    sessions_rate_rps,
    sla_ratios,
    summarize,
    window_s,
)
from toolkit.traces.types import Trace
from toolkit.traces.windows import mean_rate


def served(*rows, ok=None) -> Served:
    """Rows of (arrival, first token, finish, tokens, largest gap)."""
    arrival, first, finish, tokens, gap = (np.array(column) for column in zip(*rows, strict=True))
    flags = np.array([True] * len(rows) if ok is None else ok)
    times = (arrival.astype(float), first.astype(float), finish.astype(float))
    return Served(*times, tokens, gap.astype(float), flags)


TWO = served((0, 1, 3, 5, 0.75), (1, 1.5, 4, 6, 1.0))


def test_latencies_count_from_the_arrival():
    values = latencies(TWO)
    expected = {"ttft": [1, 0.5], "tpot": [0.5, 0.5], "mtpot": [0.75, 1.0], "e2e": [3, 3]}
    assert {name: list(array) for name, array in values.items()} == expected


def test_requests_that_failed_have_no_latency():
    values = latencies(served((0, 1, 3, 5, 0.75), (0, np.nan, np.nan, 0, 0), ok=[True, False]))
    assert [len(array) for array in values.values()] == [1, 1, 1, 1]


ONE_TOKEN = (0, 1, 1.4, 1, 0.4)  # its stream ended with an event of its own


def test_a_request_of_one_token_has_no_gap():
    """It moves no percentile of TPOT and MTPOT, and keeps each target of theirs."""
    rows = served(*[ONE_TOKEN] * 3, (0, 1, 3, 5, 0.75))
    values = latencies(rows)
    assert {name: len(array) for name, array in values.items()} == {
        "ttft": 4,
        "tpot": 1,
        "mtpot": 1,
        "e2e": 4,
    }
    assert summarize(rows, {})["mtpot_p50_s"] == 0.75
    assert sla_ratios(rows, {"mtpot_p50_s": 0.5, "itl_p50_s": 0.5}) == {
        "mtpot_p50_s": 1.5,
        "itl_p50_s": 1.5,
    }
    for target in ("tpot_p99_s", "mtpot_p99_s", "itl_p99_s"):
        assert list(meets_sla(rows, {target: 0.01})) == [True, True, True, False]


def test_throughput_is_over_the_window_of_arrivals():
    summary = summarize(TWO, {"e2e_p99_s": 9.0})
    assert summary["makespan_s"] == 4
    assert summary["throughput_rps"] == 1.0
    assert summary["output_tokens_per_s"] == 11 / 2
    assert (summary["requests"], summary["failed"]) == (2, 0)
    assert summary["sla_attainment_percent"] == 100


def test_goodput_counts_those_that_meet_every_target():
    assert list(meets_sla(TWO, {"ttft_p99_s": 0.5})) == [False, True]
    assert list(meets_sla(TWO, {"ttft_p99_s": 0.5, "mtpot_p99_s": 0.9})) == [False, False]
    assert summarize(TWO, {"ttft_p99_s": 0.5})["goodput_rps"] == 0.5, "of one arrival a second"


def test_with_all_targets_kept_goodput_is_the_arrival_rate():
    """However long the requests that came last take."""
    rng = np.random.default_rng(3)
    arrival_s = np.cumsum(rng.exponential(0.019, 997))
    none = np.zeros(997, np.int64)
    rate = mean_rate(Trace(arrival_s, none, none, none))
    for drain_s in (0.0, 4.0, 400.0):
        ended = arrival_s + 1.0 + drain_s * (np.arange(997) == 996)
        rows = served(*zip(arrival_s, arrival_s + 0.5, ended, none + 9, none + 0.1, strict=True))
        found = summarize(rows, {"ttft_p99_s": 1.0})
        assert found["goodput_rps"] == found["throughput_rps"] == pytest.approx(rate, rel=1e-12)
    assert makespan_s(rows) > 10 * window_s(rows)


@pytest.mark.parametrize("share", [1.25, 2.0, 5.0])
def test_where_the_queue_grows_both_are_over_the_makespan(share):
    """Ten arrive each second, and `share` times fewer are served: throughput is what is served."""
    count = 1000
    arrival_s = np.arange(count) / 10
    first_s = arrival_s * share + 0.5
    none = np.zeros(count, np.int64)
    rows = served(*zip(arrival_s, first_s, first_s + 0.5, none + 9, none + 0.1, strict=True))
    found = summarize(rows, {"ttft_p99_s": 25.0})
    assert found["throughput_rps"] == pytest.approx(10 / share, rel=0.02)
    good = found["sla_attainment_percent"] / 100
    assert found["goodput_rps"] == pytest.approx(good * found["throughput_rps"])


@pytest.mark.parametrize(
    ("arrivals", "closed", "rate"),
    [
        ((0.0, 1.0, 2.0), False, 1.0),
        ((0.0, 1.0, 2.0), True, 0.5),  # each came when another one had ended
        ((0.0, 0.0, 0.0), False, 0.5),  # a backlog
        ((0.0,), False, 1 / 6),
    ],
)
def test_without_a_rate_of_arrivals_the_window_is_the_makespan(arrivals, closed, rate):
    rows = served(*((at, at + 0.5, 6.0, 3, 1.0) for at in arrivals))
    assert len(rows) / window_s(rows, closed=closed) == pytest.approx(rate)
    found = summarize(rows, {"ttft_p99_s": 1.0}, closed=closed)
    assert found["goodput_rps"] == found["throughput_rps"] == pytest.approx(rate)


def test_windows_are_pooled_by_their_lengths():
    """Two good ones of two in 2 s, and one of four in 2 s."""
    slow = served((0, 0.5, 1, 2, 1), (1, 1.5, 2, 2, 1))
    dense = served((0, 9, 9, 2, 1), (0.5, 9, 9, 2, 1), (1, 9, 9, 2, 1), (1.5, 1.6, 9, 2, 1))
    targets = {"ttft_p99_s": 1.0}
    found = pooled_rates([slow, dense], targets)
    assert found["goodput_rps"] == pytest.approx(3 / 4)
    assert found["throughput_rps"] == pytest.approx(6 / 4)
    one = pooled_rates([slow], targets)
    assert one.items() <= summarize(slow, targets).items()
    unserved = pooled_rates([served((0, np.nan, np.nan, 0, 0), ok=[False])], targets)
    assert set(unserved.values()) == {0.0}


def test_a_failed_request_meets_no_target_and_stays_in_the_count():
    failed = served((0, 1, 2, 3, 0.5), (0, np.nan, np.nan, 0, 0), ok=[True, False])
    assert list(meets_sla(failed, {"e2e_p95_s": 10})) == [True, False]
    summary = summarize(failed, {"e2e_p95_s": 10})
    assert (summary["requests"], summary["failed"], summary["sla_attainment_percent"]) == (2, 1, 50)
    assert summary["throughput_rps"] == 0.5


def test_a_summary_without_served_requests_has_no_latencies():
    failed = served((0, np.nan, np.nan, 0, 0), ok=[False])
    assert summarize(failed, {}) == {"requests": 1, "failed": 1, "throughput_rps": 0}
    summary = summarize(failed, {"e2e_p95_s": 10})
    assert (summary["goodput_rps"], summary["sla_attainment_percent"]) == (0, 0)


@pytest.mark.parametrize(
    ("key", "ratio"),
    [("ttft_max_s", 0.5), ("e2e_mean_s", 1.5), ("itl_max_s", 0.5), ("mtpot_p50_s", 0.4375)],
)
def test_a_ratio_above_one_is_a_miss(key, ratio):
    assert sla_ratios(TWO, {key: 2.0}) == {key: ratio}


def test_every_target_is_missed_if_no_request_is_served():
    """A missing latency does not count as 0 s."""
    refused = served((0, np.nan, np.nan, 0, 0), (1, np.nan, np.nan, 0, 0), ok=[False, False])
    targets = {"ttft_p99_s": 2.0, "tpot_mean_s": 9.0, "itl_max_s": 1.0}
    assert min(sla_ratios(refused, targets).values()) > 1


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.floats(0, 100),
            st.floats(0, 10),
            st.floats(0, 10),
            st.integers(1, 50),
            st.floats(0, 10),
        ),
        min_size=1,
    ),
    st.floats(0.1, 20),
)
def test_goodput_is_bounded_and_monotone_in_targets(rows, limit):
    requests = served(
        *((at, at + wait, at + wait + rest, n, gap) for at, wait, rest, n, gap in rows)
    )
    tight, loose = (summarize(requests, {"e2e_p99_s": value}) for value in (limit, 2 * limit))
    assert tight["goodput_rps"] <= loose["goodput_rps"] <= loose["throughput_rps"]


def test_sessions_are_counted_between_the_first_ends_and_the_last_start():
    """A session starts each second for 100 s; its second turn comes 10 s later and ends at once."""
    rows = [(k, k, k, 1, 0) for k in range(100)] + [
        (k + 10, k + 10, k + 10, 1, 0) for k in range(100)
    ]
    first = np.array([*range(100), *range(100)])
    assert sessions_rate_rps(served(*rows), first) == pytest.approx(2.0)
    makespan_s = 109.0
    assert 200 / makespan_s < 1.9, "the beginning and the end have fewer sessions under way"
