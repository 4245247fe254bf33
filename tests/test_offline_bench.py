"""The offline benchmark's own parts: what is asked of every system, and its tables."""

from pathlib import Path

import pytest
from said import says

from benchmarks.engines import offline_work
from benchmarks.engines.offline_throughput import aims, table
from benchmarks.engines.offline_work import LONGEST_OUTPUT, LONGEST_PROMPT, SHORTEST, Work, prepare


def run(**seconds: float) -> dict[str, object]:
    systems = {
        name: {"seconds": one, "cpu_s": 2 * one, "tokens": 100, "equal": 2}
        for name, one in seconds.items()
    }
    return {"size": "15M", "requests": 10, "tokens": 100, "compared": 2, "systems": systems}


def test_ratios_are_those_of_runs_in_the_same_round() -> None:
    runs = [run(rebatch=1.0, vllm=0.5), run(rebatch=4.0, vllm=1.0), run(rebatch=2.0)]
    lines = table(runs, ["vllm", "rebatch"], []).splitlines()
    assert lines[2] == "| vllm | 150 | 100 to 200 | 2 | 0.38x | 4 of 4 |"
    assert lines[3] == "| rebatch | 50 | 25 to 100 | 3 |  | 6 of 6 |"


def test_processor_time_is_another_clock() -> None:
    assert (
        table([run(rebatch=1.0)], ["rebatch"], [], "cpu_s")
        .splitlines()[2]
        .startswith("| rebatch | 50 |")
    )


def test_what_is_not_installed_is_said() -> None:
    assert "| vllm | not installed |" in table([run(rebatch=1.0)], ["vllm", "rebatch"], ["vllm"])


def test_the_best_of_a_kind_is_what_counts() -> None:
    text = aims([run(**{"rebatch": 1.0, "static-8": 4.0, "static-16": 2.5})])
    assert says(text, "2.50x", "2.0")


def test_lengths_are_the_traces_scaled_down_and_clipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline_work, "_save_model", lambda folder, size: None)
    trace = tmp_path / "trace.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [
        f"2023-11-16 18:15:4{k}.0,{prompt},{output}"
        for k, (prompt, output) in enumerate([(8, 9999), (9999, 40)])
    ]
    trace.write_text("\n".join(lines) + "\n")
    work = prepare(tmp_path / "work", "15M", str(trace), 2, 1, 1)
    assert [len(prompt) for prompt in work.prompts] == [SHORTEST, LONGEST_PROMPT]
    assert work.outputs == [LONGEST_OUTPUT, 10]
    assert Work.read(tmp_path / "work") == work
