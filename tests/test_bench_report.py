"""The report of a replay: metrics of the answered requests, beside the prediction."""

import pytest
import samples

from toolkit.bench.client import Replay
from toolkit.bench.report import Prediction, compare, report, request_lines
from toolkit.endpoints.load import INTERRUPTED, Sample
from toolkit.files.tuning import NO_OUTCOME, Outcome
from toolkit.traces.read import read_trace
from toolkit.traces.write import write_lines

HEAD = {"tool_version": "0", "environment": samples.ENVIRONMENT, "inputs": {}}


def sample(at: float, first: float, last: float, tokens: int = 5, failure: str = "") -> Sample:
    return Sample(at, 10, 5, at, first, last, 0.5, tokens, failure)


GOOD = [sample(0, 1, 3), sample(1, 1.5, 4)]
REFUSED = Sample(2.0, 10, 5, 2.0, failure="HTTP 503: busy")


def report_on(*rows: Sample, interrupted: bool = False, predicted=None, sla=None):
    return report(
        Replay(list(rows), interrupted),
        HEAD,
        model="tiny",
        lengths="hidden",
        trace_notes=["a note"],
        sla=sla or {},
        predicted=Prediction(Outcome(metrics=predicted or {}, used={})),
    )


def test_measured_metrics_are_those_of_the_simulator():
    """One of two is good, of one arrival a second; both end."""
    result = report_on(*GOOD, sla={"ttft_p99_s": 0.5})
    assert (result.requests, result.answered, result.failures) == (2, 2, {})
    assert (result.measured.metrics["throughput_rps"], result.measured.metrics["goodput_rps"]) == (
        1.0,
        0.5,
    )
    means = [result.measured.metrics[f"{name}_mean_s"] for name in ("ttft", "tpot", "e2e")]
    assert means == [0.75, 0.5625, 3.0]


def test_failures_are_counted_by_reason_and_stay_in_the_requests():
    result = report_on(*GOOD, REFUSED, REFUSED)
    assert result.failures == {"HTTP 503: busy": 2}
    assert (
        result.answered,
        result.measured.metrics["requests"],
        result.measured.metrics["failed"],
    ) == (4, 4, 2)


def test_an_interrupted_replay_compares_nothing():
    cut_off = Sample(2.0, 10, 5, 2.0, failure=INTERRUPTED)
    unsent = Sample(9.0, 10, 5)
    result = report_on(*GOOD, cut_off, unsent, interrupted=True, predicted={"throughput_rps": 1.0})
    assert (result.requests, result.answered, result.failures) == (4, 2, {})
    assert result.measured.metrics["throughput_rps"] == 1.0
    assert result.predicted == NO_OUTCOME


def test_a_replay_without_a_single_answer_has_no_metrics():
    result = report_on(Sample(0.0, 10, 5), interrupted=True)
    assert (result.measured, result.compared) == (NO_OUTCOME, [])


def test_outputs_of_another_length_are_counted():
    assert report_on(*GOOD, sample(2, 3, 4, tokens=6)).wrong_length == 1


def test_the_error_is_the_prediction_s():
    measured = {"throughput_rps": 2.0, "e2e_mean_s": 4.0}
    fitted = {"throughput_rps": 3.0, "e2e_mean_s": 4.0}
    rows = compare(measured, {"throughput_rps": 1.0, "e2e_mean_s": 5.0}, fitted)
    assert [tuple(row.model_dump().values()) for row in rows] == [
        ("throughput_rps", 2.0, 1.0, -50.0, 3.0, 50.0),
        ("e2e_mean_s", 4.0, 5.0, 25.0, 4.0, 0.0),
    ]


@pytest.mark.parametrize(
    ("measured", "predicted"),
    [
        ({"goodput_rps": 2.0}, {}),
        ({}, {"goodput_rps": 2.0}),
        ({"goodput_rps": 0.0}, {}),
        ({"goodput_rps": 0.0}, {"goodput_rps": 1.0}),
    ],
)
def test_there_is_no_error_where_one_side_is_missing_or_nothing(measured, predicted):
    [row] = compare(measured, predicted, {})
    assert row.error_percent is None


def test_saved_requests_are_a_trace_of_what_was_served(tmp_path):
    path = tmp_path / "requests.jsonl"
    write_lines(request_lines([*GOOD, REFUSED]), path)
    trace, read = read_trace(path)
    assert read.dropped == {"failed responses": 1}
    assert trace.arrival_s.tolist() == [0, 1]
    assert trace.output_tokens.tolist() == [5, 5]
    assert '"ttft_ms":1000,"e2e_ms":3000,"status":"ok"' in path.read_text().splitlines()[0]
