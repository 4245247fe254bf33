"""The counts of an engine's passes: their time and the law's."""

from types import SimpleNamespace

import fake_vllm
import pytest
from pass_logs import one_pass

from toolkit.files.iterations import LoggedPass, LoggedRow
from toolkit.laws.features import StepShape
from toolkit.laws.passes import PassLaw

LAW = PassLaw({"pass": 1e-2, "row": 1e-3, "host": 2e-3}, (1e-4,), (0,))


INSIDE = fake_vllm.imported("toolkit.backends.vllm.iterations")


@pytest.fixture
def series() -> SimpleNamespace:
    return fake_vllm.pass_series()


@pytest.fixture
def counts(series):
    return INSIDE.PassCounts(LAW, series)


def one(start_s: float, end_s: float, rows: list[LoggedRow], *ended: str) -> LoggedPass:
    return one_pass(start_s, end_s, rows, ended=list(ended))


def test_a_pass_counts_with_the_gap_before_it(counts, series):
    counts.passed(one(1.0, 1.5, [LoggedRow("a", 0, 8, 8)]))
    counts.passed(one(1.6, 2.0, [LoggedRow("a", 8, 1, 8)], "a"))
    alone = LAW.forward_s(StepShape(0, 0, 1, 8, 32.0)) + LAW.forward_s(StepShape(1, 8))
    assert (sum(series.took), sum(series.predicted)) == (
        pytest.approx(1.0),
        pytest.approx(alone + LAW.after_s(1)),
    )


def test_idle_time_and_passes_of_nothing_are_not_counted(counts, series):
    for start_s in (1.0, 5.0):
        counts.passed(one(start_s, start_s + 0.5, [LoggedRow("a", 0, 8, 8)], "a"))
        counts.rest()
        counts.passed(one(3.0, 3.0, [], "a"))
    assert sum(series.took) == pytest.approx(1.0)


def test_where_the_last_request_is_aborted_the_time_until_the_next_is_not_counted(counts, series):
    scheduler = object.__new__(INSIDE.CountedAsyncScheduler)
    scheduler.requests = {"a": fake_vllm.Request("a", 8, 9, 9)}
    scheduler.running = []
    scheduler.waiting = SimpleNamespace(remove_requests=lambda _: None)
    scheduler._gone = []
    scheduler._counts = counts
    counts.passed(one(0.0, 1.0, [LoggedRow("a", 0, 8, 9)]))
    scheduler.finish_requests(["a"], None)
    counts.passed(one(9.0, 10.0, [LoggedRow("b", 0, 8, 8)], "b"))
    assert sum(series.took) == pytest.approx(2.0)
