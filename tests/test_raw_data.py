"""The raw data of results: what `--json` of a benchmark writes, and the files that pages link."""

import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks.common.command import make_parser
from benchmarks.common.results_file import Recorder, keep, tables_of

RESULTS = Path(__file__).parent.parent / "docs" / "results"
FILES = sorted((RESULTS / "data").glob("*.json"))
TEXTS = [page.read_text(encoding="utf-8") for page in sorted(RESULTS.glob("*.md"))]
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


def test_a_run_leaves_its_tables_its_lines_its_command_its_machine_and_its_date(
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


@pytest.mark.slow
def test_every_benchmark_that_a_page_shows_has_the_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in RESULTS.glob("*.md"))
    lacking = []
    for module in sorted(set(re.findall(r"python -m (benchmarks\.[\w.]+)", pages))):
        monkeypatch.setattr(sys, "argv", [module, "--help"])
        monkeypatch.delitem(sys.modules, module, raising=False)
        with pytest.raises(SystemExit):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        if "--json FILE" not in capsys.readouterr().out:
            lacking.append(module)
    assert lacking == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_page_links_its_raw_data_and_shows_what_it_says(file: Path) -> None:
    found = json.loads(file.read_text(encoding="utf-8"))
    pages = [text for text in TEXTS if f"(data/{file.name})" in text]
    assert len(pages) == 1
    [page] = pages
    assert file.stat().st_size < 30_000
    words = found["command"].split()
    module = words[2]
    assert importlib.util.find_spec(module) is not None
    assert module in page
    # if the run printed tables with these columns, the page's rows are rows of them
    for shown in tables_of(page):
        alike = [
            run for run in found.get("tables", ()) if set(shown["columns"]) <= set(run["columns"])
        ]
        places = [[run["columns"].index(name) for name in shown["columns"]] for run in alike]
        rows = [
            [row[k] for k in picked]
            for run, picked in zip(alike, places, strict=True)
            for row in run["rows"]
        ]
        assert not alike or [row for row in shown["rows"] if row not in rows] == []
