"""`llmctl serve`: its options, and what it refuses before it loads anything."""

import socket
from pathlib import Path

import pytest
from commands import llmctl
from said import says

import toolkit
from benchmarks.common.serving import fake_plan
from toolkit.cli.arguments import ScenarioOptions
from toolkit.cli.scenario import Scenario
from toolkit.files.io import write_file
from toolkit.files.plan import Plan
from toolkit.files.tuning import Outcome


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
    assert says(fails(capsys), "PLAN.json")
    assert says(fails(capsys, "tiny-llama-cpu"), "llmctl render tiny-llama-cpu")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        *((f"--host {host}", host) for host in ("0.0.0.0", "::", "example.com")),
        ("--event-log /proc/nowhere/events.jsonl", "/proc/nowhere/events.jsonl"),
    ],
)
def test_wrong_input_is_refused(
    capsys: pytest.CaptureFixture[str], plan: str, words: str, named: str
):
    assert named in fails(capsys, plan, *words.split())


def test_a_taken_port_is_refused(capsys: pytest.CaptureFixture[str], plan: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = fails(capsys, plan, "--port", str(port))
        assert says(error, "127.0.0.1", str(port), "Address already in use")


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


def test_another_number_of_workers_has_no_predictions(tmp_path: Path):
    plan = fake_plan(tmp_path)
    used = {one.name: 1.0 for one in plan.limits}
    outcome = Outcome(metrics={"goodput_rps": 3.0}, used=used)
    write_file(plan.model_copy(update={"outcome": outcome}), tmp_path / "plan.json")

    def with_workers(count: int) -> Plan:
        options = ScenarioOptions(plan=tmp_path / "plan.json", workers=count)
        found = Scenario.of_plan(options).plan
        assert found is not None
        return found

    same = with_workers(plan.workers)
    assert (same.outcome.metrics, {one.kept for one in same.limits}) == (
        {"goodput_rps": 3.0},
        {True},
    )
    other = with_workers(plan.workers + 1)
    assert other.workers == plan.workers + 1
    assert (other.outcome.metrics, {one.kept for one in other.limits}) == ({}, {None})
