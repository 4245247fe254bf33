"""The offline benchmark's own parts: what is asked of every system, and its tables."""

from pathlib import Path

import pytest
from said import says

from benchmarks.engines import offline_work
from benchmarks.engines.offline_throughput import aims, table
from benchmarks.engines.offline_work import LONGEST_OUTPUT, LONGEST_PROMPT, SHORTEST, Work, prepare


def test_ratios_are_those_of_runs_in_the_same_round() -> None:
    rounds = [
        {"vllm": (200.0, 2), "rebatch": (100.0, 2), "generate": (10.0, 2)},
        {"vllm": (100.0, 2), "rebatch": (25.0, 1), "generate": (10.0, 2)},
    ]
    lines = table(rounds).splitlines()
    assert lines[3] == "| rebatch | 62 | 25 to 100 | 2 |  | 3 of 4 |"
    assert lines[4] == "| vllm | 150 | 100 to 200 | 2 | 0.38x | 4 of 4 |"


def test_the_best_of_a_kind_is_what_counts() -> None:
    text = aims([{"rebatch": (100.0, 1), "static-8": (25.0, 1), "static-16": (40.0, 1)}])
    assert says(text, "2.50x", "2.0")


def test_lengths_are_the_traces_scaled_down_and_clipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline_work, "save_llama", lambda folder, sizes: None)
    trace = tmp_path / "trace.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [
        f"2023-11-16 18:15:4{k}.0,{prompt},{output}"
        for k, (prompt, output) in enumerate([(8, 9999), (9999, 40)])
    ]
    trace.write_text("\n".join(lines) + "\n")
    work = prepare(tmp_path / "work", str(trace), 2, 1, 1)
    assert [len(prompt) for prompt in work.prompts] == [SHORTEST, LONGEST_PROMPT]
    assert work.outputs == [LONGEST_OUTPUT, 10]
    assert Work.read(tmp_path / "work") == work
