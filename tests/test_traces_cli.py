"""`llmctl trace`, and the shipped traces, which the commands in docs/reference/traces.md make."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from commands import shown as llmctl
from said import says

from toolkit.traces.read import read_trace
from toolkit.traces.types import FOLDER, trace_path
from toolkit.traces.write import TraceLine, write_lines

DOCS = (Path(__file__).parent.parent / "docs" / "reference" / "traces.md").read_text(
    encoding="utf-8"
)
COMMANDS = [line.strip() for line in DOCS.splitlines() if "trace generate --rate" in line]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_documented_command_makes_the_shipped_trace(capsys, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    code, _, _ = llmctl(capsys, *shlex.split(command)[1:])
    assert code == 0
    [made] = tmp_path.iterdir()
    assert made.read_bytes() == (FOLDER / made.name).read_bytes()


def test_every_shipped_trace_is_documented():
    lines = [line for line in DOCS.splitlines() if line.startswith("    ") and " --out " in line]
    made = {shlex.split(line)[-1] for line in lines}
    assert {file.name for file in FOLDER.iterdir()} <= made


def test_no_row_of_a_shipped_trace_is_dropped():
    for file in FOLDER.iterdir():
        trace, report = read_trace(file)
        assert (report.dropped, report.reordered, trace.arrival_s[0]) == ({}, False, 0)


def test_a_trace_is_given_by_its_shipped_name_or_its_path(tmp_path):
    assert trace_path("chat-small") == FOLDER / "chat-small.jsonl"
    own = tmp_path / "own.jsonl"
    shutil.copy(FOLDER / "bursty-small.jsonl", own)
    assert trace_path(own) == own


def test_inspect_fits_80_columns(capsys):
    code, out, _ = llmctl(capsys, "trace", "inspect", "chat-small")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert says(out, "3,040 of 3,040", "timestamp")
    assert "20.3 requests/s" in out


def test_inspect_reports_dropped_rows(capsys, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,6\n1,0,6\n2,8,8\n")
    code, out, _ = llmctl(capsys, "trace", "inspect", path, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["report"]["dropped"] == {"with a non-positive length": 1}
    assert (found["requests"], found["duration_s"], found["rate_rps"]) == (2, 2.0, 0.5)
    assert found["prompt"]["max"] == 8


def test_inspect_says_what_a_cache_could_reuse(capsys, tmp_path):
    path = tmp_path / "shared.jsonl"
    lines = [
        TraceLine(k, 16 * len(ids), 3, block_tokens=16, hash_ids=ids)
        for k, ids in enumerate([[0, 1, 2, 3], [0, 1], [9, 10], [0, 1, 2]])
    ]
    write_lines(lines, path)
    code, out, _ = llmctl(capsys, "trace", "inspect", path)
    assert code == 0
    assert "45.5 %" in out.splitlines()[-1]  # 80 of 176 tokens
    _, out, _ = llmctl(capsys, "trace", "inspect", path, "--json")
    assert json.loads(out)["reusable_percent"] == pytest.approx(100 * 80 / 176)
    _, out, _ = llmctl(capsys, "trace", "inspect", "chat-small", "--json")
    assert json.loads(out)["reusable_percent"] is None


def test_convert_cuts_and_scales_and_reports_it(capsys, tmp_path):
    out_file = tmp_path / "small.jsonl"
    part = "--start", 10, "--duration", 60, "--rate", 5
    code, out, err = llmctl(capsys, "trace", "convert", "chat-small", out_file, *part)
    trace, _ = read_trace(out_file)
    assert code == 0
    assert out == f"wrote {len(trace):,} requests to {out_file}\n"
    assert [line.split()[0] for line in err.splitlines()] == ["read", "arrival", "cut"]
    assert trace.arrival_s[-1] <= 60


def test_convert_draws_arrivals_for_a_trace_without_times(capsys, tmp_path):
    source = tmp_path / "o1.json"
    out_file = tmp_path / "o1.jsonl"
    source.write_text(json.dumps([{"prompt_tokens": 5, "completion_tokens": 6}] * 50))
    code, out, _ = llmctl(capsys, "trace", "convert", source, out_file, "--draw-rate", 2, "--json")
    assert code == 0
    assert says(json.loads(out)["notes"][-1], "2 requests/s", "cv 1", "seed 0")
    assert read_trace(out_file)[0].arrival_s[-1] > 10


@pytest.mark.parametrize(
    "args",
    [
        ["inspect", "no-such-trace"],
        ["convert", "chat-small", "x.jsonl", "--rate", "0"],
        ["convert", "chat-small", "x.jsonl", "--start", "1e6"],
        ["generate", "--out", "x.jsonl", "--prompt", "lognorml:4:1"],
    ],
)
def test_bad_input_is_one_line_and_a_hint_with_exit_code_2(capsys, tmp_path, monkeypatch, args):
    monkeypatch.chdir(tmp_path)
    code, out, err = llmctl(capsys, "trace", *args)
    assert (code, out) == (2, "")
    assert [line.split(":")[0] for line in err.splitlines()] == ["error", "hint"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["convert", "chat-small", "--rate", "5", "--draw-rate", "3"],
            "--rate 5 and --draw-rate 3 contradict",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(capsys, tmp_path, words, problem):
    out = tmp_path / "out.jsonl"
    to = ["--out", out] if words[0] == "generate" else [out]
    code, _, err = llmctl(capsys, "trace", *words, *to)
    assert code == 2
    assert problem in err
    assert not out.exists()
