"""The report of a bench as others use it: exit codes, the file beside the plan, and the commands
that quote its errors.
"""

from pathlib import Path

import pytest
import samples
from commands import llmctl
from said import says
from sse_server import late_client, sse_server

from toolkit.bench.predict import slowdown_of
from toolkit.bench.session import hold
from toolkit.cli.basis import find_bench
from toolkit.cli.main import run
from toolkit.deploy.plan import make_plan
from toolkit.errors import InputError, LateClientError, TargetMissedError
from toolkit.files.bench import BENCH, NOT_SERVERS, BenchReport
from toolkit.files.io import read_file, record_inputs, write_file
from toolkit.traces.write import TraceLine, write_lines


def test_the_limit_is_about_throughput_and_means():
    errors = [("throughput_rps", -20.0), ("e2e_p95_s", 900.0), ("ttft_mean_s", None)]
    with pytest.raises(TargetMissedError, match=r"^beyond 15 %: throughput_rps -20.0 %$"):
        hold(errors, 15.0)
    hold(errors, 25.0)


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
    write_lines([TraceLine(10 * k, 20 + k, 3 + k) for k in range(5)], tmp_path / "trace.jsonl")
    return tmp_path / "plan.json"


def bench(plan: Path, url: str, *options: str) -> int:
    trace = plan.with_name("trace.jsonl")
    words = ["--plan", str(plan), "--url", url, "--trace", str(trace), "--warmup", "0"]
    return llmctl("bench", *words, *options)


def test_a_report_beside_the_plan_is_quoted_with_predictions_of_its_fit(
    plan: Path, capsys: pytest.CaptureFixture[str]
):
    with sse_server() as server:
        assert bench(plan, server.url) == 0
    assert read_file(BenchReport, plan.with_name(BENCH)).answered == 5
    assert says(capsys.readouterr().err, str(plan.with_name(BENCH)))
    folder = plan.parent
    render(folder)
    assert says(capsys.readouterr().err, "5 requests", "throughput_rps")
    write_fit(folder / "recipe.yaml", folder / "fit.json", 4096)
    render(folder)
    assert says(capsys.readouterr().err, "bench.json", "another")


@pytest.mark.slow
def test_each_run_against_a_server_has_prompts_of_its_own(plan: Path):
    """Else its prefix cache holds those of an earlier run, where the trace shares nothing."""
    prompts = []
    with sse_server() as server:
        for _ in range(2):
            server.bodies.clear()
            assert bench(plan, server.url) == 0
            prompts.append({tuple(body["prompt"]) for body in server.bodies})
    long = [{one for one in each if len(one) > 8} for each in prompts]
    assert min(map(len, long)) > 4
    assert not long[0] & long[1]


@pytest.mark.slow
def test_errors_beyond_the_limit_are_exit_code_4(plan: Path, capsys: pytest.CaptureFixture[str]):
    with sse_server() as server:  # answers at once: the laws predict far more
        assert bench(plan, server.url, "--max-error", "1") == 4
    assert "beyond 1 %: " in capsys.readouterr().err
    assert plan.with_name(BENCH).is_file()


@pytest.mark.slow
def test_a_plan_of_another_engine_is_refused_unless_forced(
    plan: Path, capsys: pytest.CaptureFixture[str]
):
    with sse_server() as server:
        server.metrics = (
            'llmctl_engine_info{model_name="tiny",engine="rebatch 5.23.0",dtype="bfloat16"} 1\n'
        )
        assert bench(plan, server.url) == 2
        told = capsys.readouterr().err
        assert "another engine fake" in told
        assert "(here rebatch 5.23.0)" in told
        assert says(told, "float32", "bfloat16")
        assert server.bodies == []
        assert bench(plan, server.url, "--force") == 0
    assert "another engine" in capsys.readouterr().err


def test_a_report_of_a_late_client_is_marked_and_not_quoted(
    plan: Path, capsys: pytest.CaptureFixture[str]
):
    written = plan.with_name(BENCH)
    with sse_server() as server, late_client():
        assert bench(plan, server.url) == LateClientError.exit_code
    printed, said = capsys.readouterr()
    assert NOT_SERVERS in printed
    assert NOT_SERVERS in said
    found = read_file(BenchReport, written)
    assert (bool(found.late), found.measured.metrics["requests"]) == (True, 5)
    assert find_bench(plan, found.inputs["fit"].sha256) is None
    with pytest.raises(InputError, match="measured"):
        slowdown_of(found)
    assert found.client is not None
    punctual = found.client.model_copy(update={"late": False})
    write_file(found.model_copy(update={"client": punctual}), written)
    assert find_bench(plan, found.inputs["fit"].sha256) is not None
    write_file(found.model_copy(update={"client": punctual, "compared": []}), written)
    assert find_bench(plan, found.inputs["fit"].sha256) is None, "nothing was predicted"
