"""`simulate --json` prints the documented keys."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from commands import llmctl, printed
from conversations import conversations

from toolkit.files.simulation import ComparedRun, Comparison, Simulation
from toolkit.traces.write import write_trace

PAGE = (Path(__file__).parent.parent / "docs" / "reference" / "simulation.md").read_text(
    encoding="utf-8"
)
STATISTICS = ("mean", "p50", "p95", "p99")


def table_under(head: str) -> str:
    """The text of the table with `head` as its first heading cell."""
    start = PAGE.index(f"| {head} |")
    return PAGE[start : PAGE.index("\n\n", start)]


def keys_under(head: str) -> set[str]:
    """What is in backticks in the first column of the rows below that heading."""
    rows = table_under(head).splitlines()[2:]
    return {key for row in rows for key in re.findall(r"`([^`]+)`", row.split("|")[1])}


@pytest.mark.parametrize(
    ("head", "model"),
    [
        ("one run", Simulation),
        ("several runs", Comparison),
        ("a run of `runs`", ComparedRun),
    ],
)
def test_the_documented_keys_are_those_of_the_models(head, model):
    assert keys_under(head) == set(model.model_fields)


WORDS = "--trace bursty-small --sla ttft_p99_s=2"


@pytest.mark.parametrize("policy", ["slice", "past-future", "mlfq"])
def test_every_metric_that_is_printed_is_documented(policy, capsys):
    shown = printed(capsys, f"simulate tiny-llama-cpu --policies {policy} {WORDS}")
    found = Simulation.model_validate(shown)
    assert found.model_dump(mode="json") == shown
    assert found.policy == policy
    assert found.sla == {"ttft_p99_s": 2.0}
    documented = {key.replace("worker_K", "worker_*") for key in keys_under("metric")}
    extra = found.model_extra or {}
    assert [key for key in extra if not any(fnmatchcase(key, name) for name in documented)] == []
    assert all(isinstance(value, float) for value in extra.values())


def test_every_documented_metric_is_printed(capsys, tmp_path):
    """Those of the prefix cache by vLLM's scheduler, for a trace that says what prompts share."""
    names = printed(capsys, f"simulate unit-step --policies past-future {WORDS}")
    shared = tmp_path / "shared.jsonl"
    assert llmctl("trace generate --backlog 20 --system-tokens 64 --out", shared) == 0
    words = "llama-3.1-8b-h200-measured --policies vllm"
    names |= printed(capsys, f"simulate {words} --trace", shared)
    sessions = tmp_path / "sessions.jsonl"
    write_trace(conversations([0.5 * k for k in range(20)], turns=2, think_s=1.0), sessions)
    names |= printed(capsys, f"simulate {words} --trace", sessions)
    documented = {key.replace("worker_K", "worker_0") for key in keys_under("metric")}
    expected = {
        key.replace("*", one) for key in documented for one in (STATISTICS if "*" in key else [""])
    }
    assert expected - names.keys() == set()


def test_several_runs_print_their_model(capsys):
    words = "tiny-llama-cpu --policies slice,past-future-oracle"
    shown = printed(capsys, f"simulate {words} {WORDS}")
    found = Comparison.model_validate(shown)
    assert found.model_dump(mode="json") == shown
    assert {run.policy: run.servable for run in found.runs} == {
        "slice": True,
        "past-future-oracle": False,
    }
    assert found.schema_version == 1
