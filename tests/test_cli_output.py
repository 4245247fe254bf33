"""The output of commands."""

import io
import json
import re
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import samples

from toolkit.cli.output import emit, note, paragraph, progress, show_any_text, table
from toolkit.files.fit import Fit
from toolkit.units import counted, number, percent, seconds, size


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


def test_a_noun_is_counted():
    assert [counted(count, "worker") for count in (0, 1, 2, 1024)] == [
        "0 workers",
        "1 worker",
        "2 workers",
        "1,024 workers",
    ]


def test_json_is_one_object_on_stdout(capsys):
    result = {"point": Point(1), "mean": np.float64(0.5), "all": np.arange(2)}
    emit(True, result, lambda: pytest.fail("rendered for people"))
    assert json.loads(capsys.readouterr().out) == {"point": {"x": 1}, "mean": 0.5, "all": [0, 1]}


def test_a_model_is_printed_as_it_would_be_written(capsys):
    emit(True, samples.fit(), lambda: None)
    assert Fit.model_validate_json(capsys.readouterr().out) == samples.fit()


def test_without_json_the_output_is_for_people(capsys):
    emit(False, {}, lambda: print("hello"))
    assert capsys.readouterr().out == "hello\n"


def test_not_a_number_is_a_bug():
    with pytest.raises(ValueError, match="not JSON compliant"):
        emit(True, {"x": float("nan")}, lambda: None)


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


@pytest.mark.usefixtures("wide_terminal")
def test_a_wide_terminal_shows_all_columns_at_once(capsys):
    table(["policy", *MANY], [["first-policy", *([1234] * 12)]])
    [row] = [line for line in capsys.readouterr().out.splitlines() if "first-policy" in line]
    assert row.split() == ["first-policy", *["1,234"] * 12]


def test_text_wraps_before_a_column_moves_below(capsys):
    table(["name", "text", ">a value", ">another"], [("a", "long " * 40, "1.25 ms", 3)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    [row] = [line for line in lines if "1.25" in line]
    assert row.split()[-3:] == ["1.25", "ms", "3"]


def test_a_long_name_breaks_at_its_dot_where_the_table_is_too_wide(capsys):
    name = "a-kind-of-some-hardware.a_flag_with_a_long_name"
    path = "folder/" + 40 * "x" + ".json"
    rows = [(name, 1.5), (path, 2), ("short.flag", 3)]
    table(["name", "value"], rows)
    assert f" {name} " in capsys.readouterr().out  # there is room
    table(["name", "value", "text"], [(*row, 5 * "more words ") for row in rows])
    lines = capsys.readouterr().out.splitlines()
    first = next(place for place, line in enumerate(lines) if "a-kind-of" in line)
    assert lines[first].startswith(" a-kind-of-some-hardware. ")
    assert lines[first + 1].startswith("   a_flag_with_a_long_name ")
    assert any(line.startswith(" short.flag ") for line in lines)
    assert not any(line.strip() == "json" for line in lines)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("█▌ é – … µ 中", "#? e - ... ? ?"), ("plain", "plain"), ("\udcff.json", "?.json")],
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


def test_progress_is_silent_without_a_terminal(capsys):
    with progress("measuring", 2) as advance:
        advance(text="one")
        advance()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        ("80", "warning: " + "word " * 13 + "word\n  word word --a-long-option-that-stays-whole\n"),
        ("200", "warning: " + "word " * 16 + "--a-long-option-that-stays-whole\n"),
    ],
)
def test_a_note_fits_the_terminal_and_is_one_line_in_a_file(columns, shown, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    text = "warning: " + "word " * 16 + "--a-long-option-that-stays-whole"
    note(text)
    assert capsys.readouterr().err == f"{text}\n"
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _: True)
    note(text)
    assert capsys.readouterr().err == shown


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
