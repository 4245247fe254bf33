"""The output of commands."""

import io
import json
import re
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from toolkit.cli.output import emit, note, paragraph, show_any_text, table
from toolkit.units import number, percent, seconds, size


@dataclass(frozen=True, slots=True)
class Point:
    x: int


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        (number, {0: "0", 7: "7", 12345: "12,345", 1234.5: "1,234", 2.0: "2", 3.14159: "3.14"}),
        (number, {0.0027149: "0.00271", -0.5: "-0.5", 0.0: "0"}),
        (seconds, {0.0: "0 s", 8.12e-4: "812 us", 0.0362: "36.2 ms", 4.25: "4.25 s"}),
        (seconds, {119: "119 s", 720: "12 min", 9000: "2.5 h"}),
        (size, {512: "512 B", 1536: "1.5 KiB", 85 * 2**30: "85.0 GiB", 0: "0 B"}),
        (percent, {12.34: "+12.3 %", -1.0: "-1.0 %"}),
    ],
)
def test_numbers_are_short_and_have_the_unit_that_suits_them(form, shown):
    assert {value: form(value) for value in shown} == shown


def test_json_is_one_object_on_stdout(capsys):
    result = {"point": Point(1), "mean": np.float64(0.5), "all": np.arange(2)}
    emit(True, result, lambda: pytest.fail("rendered for people"))
    assert json.loads(capsys.readouterr().out) == {"point": {"x": 1}, "mean": 0.5, "all": [0, 1]}


def test_a_table_fits_80_columns_and_is_plain_text(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    table(
        ["name", "value", ">text"],
        [("[red]a", 12345, "long " * 40), ("b", 0.12345, None)],
        title="a title",
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "[red]a" in lines[5]
    assert "12,345" in lines[5]
    assert "0.123" in "".join(lines)


@pytest.fixture
def wide_terminal(capsys, monkeypatch) -> None:
    """Stdout is a terminal of 200 columns."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)


@pytest.mark.usefixtures("wide_terminal")
def test_a_table_takes_the_width_of_the_terminal(capsys):
    table(["name", "text"], [("a", "long " * 30)])
    lines = capsys.readouterr().out.splitlines()
    assert 150 < max(map(len, lines)) <= 200
    assert sum("long" in line for line in lines) == 1


MANY = [f">column\nnumber {k}" for k in range(12)]


def test_numbers_never_wrap_and_the_table_continues_below(capsys):
    rows = [
        [name, *(round(1234.5 * (k + 1)) for k in range(12))] for name in ("first-policy", "second")
    ]
    table(["policy", *MANY], rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.strip() and "," in line] == [
        "first-policy",
        "second",
    ] * 2
    shown = {word for line in lines for word in line.split() if "," in word}
    assert shown == {f"{round(1234.5 * (k + 1)):,}" for k in range(12)}


def test_ranges_and_single_words_never_wrap(capsys):
    names = ["llama-3.1-8b-a100-80gb, defaults", "llama-3.1-8b-a100-80gb, router least-requests"]
    columns = ["", ">GPUs", ">requests/s", ">by the law's error", "then breaks"]
    table(columns, [(name, 2, "30.6", "27.5 to 32.5", "ttft_p99_s") for name in names])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("27.5 to 32.5" in line for line in lines) == 2
    assert sum("ttft_p99_s" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("text", "shown"),
    [("█▌ é – … µ 中", "?? ? ? ? ? ?"), ("plain", "plain"), ("\udcff.json", "?.json")],
)
def test_what_stdout_cannot_encode_is_replaced(text, shown, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii", "strict"))
    show_any_text()
    print(text, flush=True)
    assert sys.stdout.buffer.getvalue().decode() == f"{shown}\n"


def test_json_loses_nothing_where_stdout_is_ascii(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii", "strict"))
    emit(True, {"name": "é中"}, lambda: None)
    sys.stdout.flush()
    assert json.loads(sys.stdout.buffer.getvalue()) == {"name": "é中"}


def test_a_note_moves_no_cursor_and_forges_no_line(capsys):
    note("replica \x1b[2Jx\r\u202eup\u2028error: forged", "second")
    said = capsys.readouterr().err
    assert said.splitlines() == [r"replica \x1b[2Jx\r\u202eup\u2028error: forged", "second"]


NAME = "a\x1b[2J\x1b]0;title\x07b\u202e\r.csv"


@pytest.mark.parametrize("terminal", [False, True])
def test_what_others_named_moves_no_cursor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: terminal, raising=False)

    def show() -> None:
        print(f"trace {NAME}\n\tof 3 rows")
        table([NAME, "<what"], [[NAME, 1], ["b", NAME]], NAME)
        paragraph(NAME)

    emit(False, {}, show)
    out = capsys.readouterr().out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out) if terminal else out  # styles of tables
    assert "".join(plain.split()).isprintable()
    assert "\n\tof 3 rows" in out
    assert r"\x1b[2J" in plain
