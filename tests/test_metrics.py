"""Summaries of served requests, on cases small enough to compute by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.metrics import Served, latencies, meets_sla, sla_ratios, statistic, summarize


def served(*rows, ok=None) -> Served:
    """Rows of (arrival, first token, finish, tokens, largest gap)."""
    arrival, first, finish, tokens, gap = (np.array(column) for column in zip(*rows, strict=True))
    flags = np.array([True] * len(rows) if ok is None else ok)
    return Served(
        arrival.astype(float),
        first.astype(float),
        finish.astype(float),
        tokens,
        gap.astype(float),
        flags,
    )


TWO = served((0, 1, 3, 5, 0.75), (1, 1.5, 4, 6, 1.0))


def test_latencies_count_from_the_arrival():
    values = latencies(TWO)
    assert {name: list(array) for name, array in values.items()} == {
        "ttft": [1, 0.5],
        "tpot": [0.5, 0.5],
        "mtpot": [0.75, 1.0],
        "e2e": [3, 3],
    }


def test_a_request_of_one_token_has_no_time_per_output_token():
    assert list(latencies(served((0, 1, 1, 1, 0), (0, 1, 3, 3, 1)))["tpot"]) == [1.0]


def test_requests_that_failed_have_no_latency():
    values = latencies(served((0, 1, 3, 5, 0.75), (0, np.nan, np.nan, 0, 0), ok=[True, False]))
    assert [len(array) for array in values.values()] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "expected"), [("mean", 2.5), ("max", 4), ("p50", 2.5), ("p100", 4), ("p0", 1)]
)
def test_statistics_by_name(name, expected):
    assert statistic(np.array([1.0, 2.0, 3.0, 4.0]), name) == expected


def test_throughput_is_over_the_time_from_first_arrival_to_last_completion():
    summary = summarize(TWO, {"e2e_p99_s": 9.0})
    assert summary["makespan_s"] == 4
    assert summary["throughput_rps"] == summary["goodput_rps"] == 0.5
    assert summary["output_tokens_per_s"] == 11 / 4
    assert (summary["requests"], summary["failed"], summary["sla_attainment_percent"]) == (
        2,
        0,
        100,
    )


def test_goodput_counts_those_that_meet_every_target():
    assert list(meets_sla(TWO, {"ttft_p99_s": 0.5})) == [False, True]
    assert list(meets_sla(TWO, {"ttft_p99_s": 0.5, "mtpot_p99_s": 0.9})) == [False, False]
    assert summarize(TWO, {"ttft_p99_s": 0.5})["goodput_rps"] == 0.25


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


def test_without_targets_there_is_neither_goodput_nor_attainment():
    assert not {"goodput_rps", "sla_attainment_percent"} & summarize(TWO, {}).keys()


@pytest.mark.parametrize(
    ("key", "ratio"),
    [("ttft_max_s", 0.5), ("e2e_mean_s", 1.5), ("itl_max_s", 0.5), ("mtpot_p50_s", 0.4375)],
)
def test_a_ratio_above_one_is_a_miss(key, ratio):
    assert sla_ratios(TWO, {key: 2.0}) == {key: ratio}


def test_every_target_is_missed_if_no_request_is_served():
    """A missing latency does not count as 0 s."""
    refused = served((0, np.nan, np.nan, 0, 0), (1, np.nan, np.nan, 0, 0), ok=[False, False])
    assert (
        min(sla_ratios(refused, {"ttft_p99_s": 2.0, "tpot_mean_s": 9.0, "itl_max_s": 1.0}).values())
        > 1
    )


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
def test_goodput_never_exceeds_throughput_and_a_looser_target_never_lowers_it(rows, limit):
    requests = served(
        *((at, at + wait, at + wait + rest, n, gap) for at, wait, rest, n, gap in rows)
    )
    tight, loose = (summarize(requests, {"e2e_p99_s": value}) for value in (limit, 2 * limit))
    assert tight["goodput_rps"] <= loose["goodput_rps"] <= loose["throughput_rps"]
