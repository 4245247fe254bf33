"""Predictions compared with a server: errors, the file, exit codes, and the commands that show
it.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import samples
from commands import llmctl
from said import says
from sse_server import late_client, serve_request, sse_server, whole

from toolkit.bench import session
from toolkit.bench.session import Pair, hold, metric_errors, request_errors
from toolkit.cli.basis import find_validation
from toolkit.cli.main import run
from toolkit.deploy.plan import make_plan
from toolkit.errors import LateClientError, TargetMissedError
from toolkit.files.bench import NOT_SERVERS, Validation, WindowResult
from toolkit.files.io import read_file, record_inputs, write_file
from toolkit.metrics import Served


def window(measured: dict[str, float], predicted: dict[str, float]) -> WindowResult:
    names = ("throughput_rps", "ttft_mean_s", "tpot_mean_s", "e2e_mean_s", "e2e_p95_s")
    return WindowResult(
        start_s=0.0,
        end_s=1.0,
        requests=1,
        failed=0,
        slowdown=1.0,
        measured=dict.fromkeys(names, 1.0) | measured,
        predicted=dict.fromkeys(names, 1.0) | predicted,
    )


def served(first: list[float], finish: list[float], ok: list[bool] | None = None) -> Served:
    n = len(first)
    return Served(
        np.zeros(n),
        np.array(first),
        np.array(finish),
        np.ones(n, int),
        np.zeros(n),
        np.array(ok or [True] * n),
    )


def test_errors_are_of_means_and_the_worst_keeps_its_sign():
    found = metric_errors(
        [
            window({"ttft_mean_s": 2.0}, {"ttft_mean_s": 1.0}),
            window({"ttft_mean_s": 2.0}, {"ttft_mean_s": 2.4}),
        ]
    )
    ttft = next(each for each in found if each.metric == "ttft_mean_s")
    assert (ttft.measured, ttft.predicted) == (2.0, 1.7)
    assert ttft.error_percent == pytest.approx(-15.0)
    assert ttft.worst_percent == pytest.approx(-50.0)


def test_a_metric_of_which_nothing_was_measured_is_left_out():
    found = metric_errors([window({"tpot_mean_s": 0.0}, {})])
    assert "tpot_mean_s" not in [each.metric for each in found]


def test_requests_are_compared_one_by_one_where_both_were_served():
    measured = served([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [True, True, False])
    predicted = served([1.1, 0.8, 9.0], [2.0, 3.0, 9.0])
    ttft, e2e = request_errors([Pair(measured, predicted)])
    assert (ttft.latency, ttft.requests) == ("ttft", 2)
    assert ttft.median_percent == pytest.approx(-5.0)
    assert ttft.median_absolute_percent == pytest.approx(15.0)
    assert e2e.median_percent == pytest.approx(25.0)


def test_the_limit_is_about_throughput_and_means():
    found = metric_errors([window({}, {"e2e_p95_s": 9.0, "throughput_rps": 0.8})])
    errors = [(each.metric, each.error_percent) for each in found]
    with pytest.raises(TargetMissedError, match=r"^beyond 15 %: throughput_rps -20.0 %$"):
        hold(errors, 15.0)
    hold([*errors, ("ttft_mean_s", None)], 25.0)


def write_fit(recipe: Path, fit: Path, capacity_tokens: int) -> None:
    made_from = record_inputs({"recipe": recipe})
    write_file(samples.fit(capacity_tokens).model_copy(update={"inputs": made_from}), fit)


def render(folder: Path) -> None:
    files = {"--fit": "fit.json", "--out": "new.json"}
    options = [word for option, name in files.items() for word in (option, str(folder / name))]
    with pytest.raises(SystemExit, match="0"):
        run(["render", str(folder / "recipe.yaml"), *options])


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    recipe = samples.recipe()
    inputs = {"recipe": tmp_path / "recipe.yaml", "fit": tmp_path / "fit.json"}
    write_file(recipe, inputs["recipe"])
    write_fit(inputs["recipe"], inputs["fit"], 8192)
    write_file(make_plan(recipe, samples.fit(), None, inputs), tmp_path / "plan.json")
    return tmp_path / "plan.json"


def validate(plan: Path, url: str, *options: str) -> int:
    words = [
        "validate",
        str(plan),
        "--url",
        url,
        "--windows",
        "2",
        "--window",
        "1",
        "--rate",
        "20",
        *options,
    ]
    return llmctl(*words)


@pytest.mark.slow
def test_a_validation_is_written_and_shown_with_predictions(
    plan: Path, capsys: pytest.CaptureFixture[str]
):
    with sse_server() as server:
        server.batch_s = (1.0, 1.0)
        assert validate(plan, server.url, "--warmup", "0") == 0
    found = read_file(Validation, plan.with_name("validation.json"))
    assert len(found.windows) == 2
    assert {"throughput_rps", "ttft_mean_s", "e2e_mean_s"} <= {
        each.metric for each in found.metrics
    }
    # Timers may fire up to a millisecond early, and a latency of nothing has no error in percent.
    assert 0 < found.requests[0].requests <= sum(each.requests for each in found.windows)
    capsys.readouterr()
    folder = plan.parent
    render(folder)
    assert says(capsys.readouterr().err, "2 windows", "throughput_rps")


@pytest.mark.slow
def test_each_run_against_a_server_has_prompts_of_its_own(plan: Path):
    """Else its prefix cache holds those of an earlier run, where the trace shares nothing."""
    prompts = []
    with sse_server() as server:
        for _ in range(2):
            server.bodies.clear()
            assert validate(plan, server.url, "--warmup", "0", "--window", "0.5") == 0
            prompts.append({tuple(body["prompt"]) for body in server.bodies})
    long = [{one for one in each if len(one) > 8} for each in prompts]
    assert min(map(len, long)) > 4
    assert not long[0] & long[1]


@pytest.mark.slow
def test_windows_fit_the_trace_and_lengths_are_told_first(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = [{"timestamp": 50 * k, "input_length": 9, "output_length": 4} for k in range(30)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with sse_server() as server:
        assert (
            validate(plan, server.url, "--warmup", "0", "--trace", str(tmp_path / "t.jsonl")) == 0
        )
    lines = capsys.readouterr().err.splitlines()
    assert says(lines[0], "384", "128")
    note = "windows of 0.58 s instead of 1 s: t.jsonl lasts 1.45 s at 20 requests/s, for 2 windows"
    assert f"trace: {note}" in lines
    found = read_file(Validation, plan.with_name("validation.json"))
    assert note in found.notes
    assert [window.end_s - window.start_s for window in found.windows] == pytest.approx([0.58] * 2)


@pytest.mark.slow
def test_a_validation_of_another_fit_is_not_shown(plan: Path, capsys: pytest.CaptureFixture[str]):
    with sse_server() as server:
        assert validate(plan, server.url, "--warmup", "0") == 0
    folder = plan.parent
    write_fit(folder / "recipe.yaml", folder / "fit.json", 4096)
    capsys.readouterr()
    render(folder)
    assert "it is about another fit" in capsys.readouterr().err


@pytest.mark.slow
def test_errors_beyond_the_limit_are_exit_code_4(plan: Path, capsys: pytest.CaptureFixture[str]):
    with sse_server() as server:  # answers at once: the laws predict far more
        assert validate(plan, server.url, "--warmup", "0", "--max-error", "1") == 4
    assert "beyond 1 %: " in capsys.readouterr().err
    assert plan.with_name("validation.json").is_file()


@pytest.mark.slow
def test_a_server_that_fails_every_request_is_reported(
    plan: Path, capsys: pytest.CaptureFixture[str]
):
    tried = []

    def answer(body: dict) -> bytes:
        tried.append(body)
        return serve_request(body) if len(tried) == 1 else whole({"error": {"message": "no"}}, 500)

    with sse_server(answer) as server:
        assert validate(plan, server.url, "--warmup", "0", "--json") == 0
    out = json.loads(capsys.readouterr().out)
    assert out["metrics"] == []
    assert all(each["failed"] == each["requests"] for each in out["windows"])


@pytest.mark.slow
def test_a_plan_of_another_engine_is_refused_unless_forced(
    plan: Path, capsys: pytest.CaptureFixture[str]
):
    with sse_server() as server:
        server.metrics = (
            'llmctl_engine_info{model_name="tiny",engine="rebatch 5.23.0",dtype="bfloat16"} 1\n'
        )
        assert validate(plan, server.url, "--warmup", "0") == 2
        told = capsys.readouterr().err
        assert "another engine fake" in told
        assert "(here rebatch 5.23.0)" in told
        assert says(told, "float32", "bfloat16")
        assert server.bodies == []
        assert validate(plan, server.url, "--warmup", "0", "--force") == 0
    assert "another engine" in capsys.readouterr().err


def test_a_validation_by_a_late_client_is_marked_and_not_used(
    plan: Path, capsys: pytest.CaptureFixture[str]
):
    written = plan.with_name("validation.json")
    with sse_server() as server, late_client():
        assert validate(plan, server.url, "--warmup", "0") == LateClientError.exit_code
    assert NOT_SERVERS in capsys.readouterr().out
    found = read_file(Validation, written)
    assert [window.client.late for window in found.windows] == [True, True]
    assert find_validation(plan, found.inputs["fit"].sha256) is None
    punctual = [
        window.model_copy(update={"client": window.client.model_copy(update={"late": False})})
        for window in found.windows
    ]
    write_file(found.model_copy(update={"windows": punctual}), written)
    assert find_validation(plan, found.inputs["fit"].sha256) is not None


@pytest.mark.slow
@pytest.mark.parametrize("windows", [0, 1])
def test_ctrl_c_keeps_the_windows_that_were_replayed(
    plan: Path, windows: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """In a prediction, between two replays."""
    real = session.predicted
    calls = []

    def predicted(*args: object) -> object:
        calls.append(1)
        if len(calls) > windows:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(session, "predicted", predicted)
    with sse_server() as server:
        assert validate(plan, server.url, "--warmup", "0") == 130
    written = plan.with_name("validation.json")
    assert written.exists() == bool(windows)
    if windows:
        assert len(read_file(Validation, written).windows) == windows
    assert "interrupted" in capsys.readouterr().err
