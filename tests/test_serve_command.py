"""`llmctl serve`: its options, and what it refuses before it loads anything."""

import socket
from pathlib import Path

import pytest
from commands import llmctl
from said import says

import toolkit
from benchmarks.common.serving import fake_plan
from toolkit.files.io import write_file


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The last line of a `llmctl serve` that ends with exit code 2."""
    assert llmctl("serve", *words) == 2
    lines = [
        line
        for line in capsys.readouterr().err.splitlines()
        if not line.startswith(("note:", "loading"))
    ]
    assert lines[0].startswith("error: ")
    return "\n".join(lines)


@pytest.fixture
def plan(tmp_path: Path) -> str:
    fake_plan(tmp_path)
    return str(tmp_path / "plan.json")


def test_it_needs_a_plan(capsys: pytest.CaptureFixture[str]):
    assert says(fails(capsys), "--fit")
    assert "hint: llmctl serve plan.json" in fails(capsys, "tiny-llama-cpu")


def test_a_plan_and_a_fit_are_one_too_many(capsys: pytest.CaptureFixture[str], plan: str):
    error = fails(capsys, "--plan", plan, "--fit", "fit.json")
    assert says(error, "plan", "llmctl serve plan.json", "llmctl serve RECIPE --fit fit.json")


def test_a_public_address_needs_a_key(capsys: pytest.CaptureFixture[str], plan: str):
    for host in ("0.0.0.0", "::", "example.com"):
        assert host in fails(capsys, plan, "--host", host)


def test_a_taken_port_is_refused(capsys: pytest.CaptureFixture[str], plan: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = fails(capsys, plan, "--port", str(port))
        assert says(error, "127.0.0.1", str(port), "Address already in use")


def test_an_unknown_policy_is_refused(capsys: pytest.CaptureFixture[str], plan: str):
    assert says(fails(capsys, plan, "--policy", "slicee"), "'slicee'", "'slice'")


def test_an_unknown_parameter_is_refused(capsys: pytest.CaptureFixture[str], plan: str):
    assert says(fails(capsys, plan, "--set", "slice_token=5"), "'slice_token'", "'slice_tokens'")


def test_a_log_that_cannot_be_written_is_refused(
    capsys: pytest.CaptureFixture[str], plan: str, tmp_path: Path
):
    log = tmp_path / "nowhere" / "events.jsonl"
    assert says(fails(capsys, plan, "--event-log", str(log)), str(log))


@pytest.mark.slow
def test_an_engine_that_cannot_load_ends_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    fake_plan(tmp_path, no_such_key=1)
    assert llmctl("serve", tmp_path / "plan.json") == 3
    assert says(capsys.readouterr().err, "model.config.no_such_key")


@pytest.mark.slow
def test_a_fit_of_another_engine_is_refused_with_both_sides(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    plan = fake_plan(tmp_path)
    other = plan.fit.engine.model_copy(update={"engine_version": "0.1", "device": "NVIDIA A100"})
    foreign = plan.model_copy(update={"fit": plan.fit.model_copy(update={"engine": other})})
    write_file(foreign, tmp_path / "plan.json")
    told = fails(capsys, str(tmp_path / "plan.json"))
    assert says(told, "NVIDIA A100", "fake 0.1", toolkit.__version__)
    assert "--force" in told


def test_policy_parameters_and_workers_can_be_others_than_the_plans(plan: str):
    from toolkit.cli.serve_start import override
    from toolkit.files.io import read_file
    from toolkit.files.plan import Plan

    original = read_file(Plan, plan)
    assert original.policy.parameters["slice_tokens"] == 128
    smaller = override(original, None, ["slice_tokens=64"], 3)
    assert (smaller.policy.parameters["slice_tokens"], smaller.workers) == (64, 3)
    other = override(original, "sequence", ["batch_size=4"], None)
    assert (other.policy.name, other.policy.parameters["batch_size"]) == ("sequence", 4)
