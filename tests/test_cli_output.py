"""What commands print."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import samples

from toolkit.cli.output import emit, number, percent, progress, seconds, size, table
from toolkit.files.fit import Fit


@dataclass(frozen=True, slots=True)
class Point:
    x: int


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7, "7"), (12345, "12,345"), (1234.5, "1,234"), (2.0, "2"), (3.14159, "3.14"), (0.0027149, "0.00271"),
     (-0.5, "-0.5"), (0.0, "0")],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 s"), (8.12e-4, "812 us"), (0.0362, "36.2 ms"), (4.25, "4.25 s"), (119, "119 s"), (720, "12 min"),
     (9000, "2.5 h")],
)  # fmt: skip
def test_durations_have_the_unit_that_suits_them(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(512, "512 B"), (1536, "1.5 KiB"), (85 * 2**30, "85.0 GiB"), (0, "0 B")])
def test_sizes_are_binary(value: float, text: str) -> None:
    assert size(value) == text


def test_percentages_have_a_sign() -> None:
    assert (percent(12.34), percent(-1.0)) == ("+12.3 %", "-1.0 %")


def test_json_is_one_object_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    result = {"point": Point(1), "mean": np.float64(0.5), "all": np.arange(2)}
    emit(True, result, lambda: pytest.fail("rendered for people"))
    assert json.loads(capsys.readouterr().out) == {"point": {"x": 1}, "mean": 0.5, "all": [0, 1]}


def test_a_model_is_printed_as_it_would_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    emit(True, samples.fit(), lambda: None)
    assert Fit.model_validate_json(capsys.readouterr().out) == samples.fit()


def test_without_json_people_are_served(capsys: pytest.CaptureFixture[str]) -> None:
    emit(False, {}, lambda: print("hello"))
    assert capsys.readouterr().out == "hello\n"


def test_not_a_number_is_a_bug() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        emit(True, {"x": float("nan")}, lambda: None)


def test_a_table_fits_80_columns_and_is_plain_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    table(["name", "value", ">text"], [("[red]a", 12345, "long " * 40), ("b", 0.12345, None)], title="a title")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "[red]a" in lines[5]
    assert "12,345" in lines[5]
    assert "0.123" in "".join(lines)


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("measuring", 2) as advance:
        advance(text="one")
        advance()
    assert capsys.readouterr() == ("", "")
