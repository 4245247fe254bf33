"""The demo: its last screen, and all of it with a model that computes nothing and short replays."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from said import says
from samples import computes_nothing

from toolkit.traces.write import TraceLine, write_lines

SCRIPT = Path(__file__).parent.parent / "examples" / "demo.py"
RECIPE = computes_nothing(
    "small",
    config="decode_row_s: 0.002",
    tune="policies: [own], windows: 1, held_out_windows: 1, window_s: 2",
).replace("5.0, e2e_p95_s: 10.0", "0.5, e2e_p95_s: 1.0")  # a short trace is enough


def tuning(rate_rps: float = 30.0) -> dict[str, Any]:
    metrics = {"goodput_rps": 25.1, "throughput_rps": 26.0}
    usage = {"ttft_p99_s": 0.72, "e2e_p95_s": 0.61}
    best = {"outcome": {"metrics": metrics, "used": usage}}
    told = {"request_rate_rps": rate_rps, "keep_defaults": False, "best": best}
    return told | {"defaults": {"outcome": {"metrics": {}, "used": {}}}}


def bench(*, kept: bool = True) -> dict[str, Any]:
    measured = {"ttft_p99_s": (3.9 if kept else 7.5) / 5.0, "e2e_p95_s": 0.62}
    predicted = {"ttft_p99_s": 3.7 / 5.0, "e2e_p95_s": 0.6}
    return {
        "request_rate_rps": 30.001,
        "replay_slowdown": 1.7,
        "sla": {"ttft_p99_s": 5.0, "e2e_p95_s": 10.0},
        "predicted": {"metrics": {"goodput_rps": 24.9}, "used": predicted},
        "measured": {"metrics": {"goodput_rps": 24.0}, "used": measured},
    }


def test_the_last_screen_has_promised_predicted_and_measured(capsys: pytest.CaptureFixture[str]):
    show = runpy.run_path(str(SCRIPT))["show_promise"]
    assert says(show(tuning(), bench()), "30 requests/s", "kept", "2 targets")
    out = capsys.readouterr().out
    [row] = [line for line in out.splitlines() if line.startswith(" ttft_p99_s")]
    assert row.split() == ["ttft_p99_s", "5", "3.6", "3.7", "3.9", "yes"]
    [row] = [line for line in out.splitlines() if line.startswith(" goodput_rps")]
    assert row.split() == ["goodput_rps", "-", "25.1", "24.9", "24", "-"]
    text = show(tuning(), bench(kept=False))
    assert says(text, "ttft_p99_s")
    assert "1.70" not in text


def test_at_another_rate_tune_promised_nothing(capsys: pytest.CaptureFixture[str]):
    show = runpy.run_path(str(SCRIPT))["show_promise"]
    text = show(tuning(51.0), bench())
    assert says(text, "30 requests/s", "1.70", "51 requests/s")
    [row] = [line for line in capsys.readouterr().out.splitlines() if "ttft_p99_s" in line]
    assert row.split() == ["ttft_p99_s", "5", "-", "3.7", "3.9", "yes"]


@pytest.mark.slow
def test_the_whole_demo_runs_the_commands_in_order(tmp_path: Path):
    write_lines(
        [TraceLine(50 * k, 20 + k % 90, 3 + k % 20) for k in range(240)], tmp_path / "trace.jsonl"
    )
    (tmp_path / "small.yaml").write_text(RECIPE, encoding="utf-8")
    words = ["--recipe", "small.yaml", "--trace", "trace.jsonl", "--out", "out", "--scale", "0.05"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    ran = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("$ llmctl ")]
    assert ran == [
        *("profile", "fit", "tune", "render", "serve", "bench", "simulate", "bench"),
        *("render", "serve", "bench", "trace", "simulate", "simulate", "report"),
    ]
    for title in ("what tune promised", "under overload", "prompts that share a beginning"):
        assert title in done.stdout
    judged = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert judged["lengths"] == "hidden"
    assert judged["predicted"]
    assert (tmp_path / "out" / "report.html").is_file()
