"""The raw data of results: what `--json` of a benchmark writes."""

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks.common.command import make_parser
from benchmarks.common.results_file import Recorder, keep

TABLE = "| policy | goodput /s |\n|---|---:|\n| fcfs | 1,234.50 |\n| a / b | -1 |\n"


def started(path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """A benchmark that was called with `--json path`, from its command line on."""
    monkeypatch.setattr("atexit.register", lambda _: None)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "argv", ["x", "--seeds", "2", "--json", str(path), "/a/trace.csv"])
    parser = make_parser("What it measures.")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("trace")
    assert vars(parser.parse_args()) == {"seeds": 2, "trace": "/a/trace.csv"}
    assert isinstance(sys.stdout, Recorder)
    return sys.stdout


def test_a_run_leaves_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = started(tmp_path / "out.json", monkeypatch)
    print(f"Two policies of {tmp_path} by /v1/completions.\n")
    print(TABLE)
    keep("samples", {"fcfs": [1, 2]})
    recorder.save()
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert found["tables"] == [
        {"columns": ["policy", "goodput /s"], "rows": [["fcfs", 1234.5], ["a / b", -1]]}
    ]
    # folders of this machine are left out, routes are not
    assert found["lines"] == [f"Two policies of {tmp_path.name} by /v1/completions."]
    assert found["samples"] == {"fcfs": [1, 2]}
    assert found["command"].endswith(" --seeds 2 trace.csv")  # without this machine's folders
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    assert found["machine"]["cpu_count"] >= 1
    assert TABLE in capsys.readouterr().out  # and it is printed, as ever


def test_a_run_that_fails_leaves_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = started(tmp_path / "out.json", monkeypatch)
    monkeypatch.setattr(sys, "last_value", RuntimeError(), raising=False)
    recorder.finish()
    assert not (tmp_path / "out.json").read_text(encoding="utf-8")
