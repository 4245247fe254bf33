"""The counts of an engine's passes: their time and the law's, and the times of tokens."""

from types import SimpleNamespace

import fake_vllm
import pytest
from pass_logs import one_pass

from toolkit.estimators.steps import StepLaw, StepShape
from toolkit.sched.iterations import LoggedPass, LoggedRow

LAW = StepLaw(1e-2, 1e-3, 0.0, 0.0, 0.0, (1e-4,), host_s=2e-3)


PassCounts = fake_vllm.imported("toolkit.backends.vllm.iterations").PassCounts


@pytest.fixture
def series() -> SimpleNamespace:
    return fake_vllm.pass_series()


@pytest.fixture
def counts(series):
    return PassCounts(LAW, series)


def one(start_s: float, end_s: float, rows: list[LoggedRow], *ended: str) -> LoggedPass:
    return one_pass(start_s, end_s, rows, ended=list(ended))


def test_a_pass_counts_with_the_gap_before_it(counts, series):
    counts.arrived("a", 1.0, 1.0)
    counts.looked(1.0)
    counts.passed(one(1.0, 1.5, [LoggedRow("a", 0, 8, 8)]))
    counts.looked(1.6)
    counts.passed(one(1.6, 2.0, [LoggedRow("a", 8, 1, 8)], "a"))
    alone = LAW.forward_s(StepShape(0, 0, 1, 8, 32.0)) + LAW.forward_s(StepShape(1, 8))
    assert (sum(series.took), sum(series.predicted)) == (
        pytest.approx(1.0),
        pytest.approx(alone + LAW.after_s(1)),
    )


def test_idle_time_is_not_counted(counts, series):
    for start_s in (1.0, 5.0):
        counts.arrived("a", start_s, start_s)
        counts.looked(start_s)
        counts.passed(one(start_s, start_s + 0.5, [LoggedRow("a", 0, 8, 8)], "a"))
    assert sum(series.took) == pytest.approx(1.0)
    assert series.ttft == series.e2e == [0.5, 0.5]


def test_an_arrival_counts_from_when_the_engine_has_it(counts, series):
    counts.arrived("a", 1.0, 0.9)  # so 0.1 s lie between the front and the engine
    counts.looked(1.0)
    counts.passed(one(1.0, 2.0, [LoggedRow("a", 0, 8, 8)]))
    counts.arrived("b", 2.0, 1.2)  # the first look since 1.0
    counts.looked(2.0)
    counts.passed(one(2.0, 3.0, [LoggedRow("a", 8, 1, 8), LoggedRow("b", 0, 4, 8)]))
    counts.looked(3.0)
    counts.passed(one(3.0, 4.0, [LoggedRow("a", 9, 1, 8), LoggedRow("b", 4, 4, 8)], "a", "b"))
    assert series.ttft == pytest.approx([1.0, 2.7])
    assert series.e2e == pytest.approx([3.0, 2.7])


@pytest.mark.parametrize(("made_s", "waited_s"), [(-7.0, 2.0), (1.95, 1.0), (9.0, 1.0)])
def test_an_arrival_is_between_two_looks_of_the_engine(
    counts, series, made_s: float, waited_s: float
):
    counts.arrived("a", 1.0, 0.9)
    counts.looked(1.0)
    counts.passed(one(1.0, 2.0, [LoggedRow("a", 0, 8, 8)]))
    counts.arrived("b", 2.0, made_s)
    counts.looked(2.0)
    counts.passed(one(2.0, 3.0, [LoggedRow("b", 0, 4, 4)], "a", "b"))
    assert series.ttft[-1] == pytest.approx(waited_s)


def test_a_first_token_is_counted_once(counts, series):
    counts.arrived("a", 0.0, 0.0)
    counts.looked(0.0)
    counts.passed(one(0.0, 1.0, [LoggedRow("a", 0, 8, 8)]))
    counts.passed(one(1.0, 2.0, [LoggedRow("a", 0, 9, 8)], "a"))
    assert (series.ttft, series.e2e) == ([1.0], [2.0])


def test_an_aborted_request_is_in_no_sum(counts, series):
    counts.arrived("a", 0.0, 0.0)
    counts.looked(0.0)
    counts.passed(one(0.0, 1.0, [LoggedRow("a", 0, 8, 9)]))
    counts.gone("a")
    counts.passed(one(7.0, 7.0, [], "a"))
    counts.arrived("b", 9.0, 9.0)
    counts.looked(9.0)
    counts.passed(one(9.0, 10.0, [LoggedRow("b", 0, 8, 8)], "b"))
    assert sum(series.took) == pytest.approx(2.0)
    assert series.ttft == [1.0]
