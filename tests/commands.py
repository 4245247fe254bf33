"""Runs commands in the test's own process. The first word of each may be a whole line."""

import json
from typing import Any, NamedTuple

import pytest

from toolkit.cli import main


class Printed(NamedTuple):
    """What a command printed to stdout and to stderr."""

    out: str
    err: str

    @property
    def said(self) -> list[str]:
        """Its error and its hint, a line each."""
        return [line for line in self.err.splitlines() if line.startswith(("error: ", "hint: "))]


def llmctl(line: str = "", *words: object) -> int:
    """One command; its exit code."""
    with pytest.raises(SystemExit) as ended:
        main.run([*line.split(), *map(str, words)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def ran(capsys: pytest.CaptureFixture[str], line: str, *words: object, code: int = 0) -> Printed:
    """What a command printed that ended with this exit code."""
    capsys.readouterr()
    found = llmctl(line, *words)
    printed = Printed(*capsys.readouterr())
    assert found == code, printed.err
    return printed


def printed(capsys: pytest.CaptureFixture[str], line: str, *words: object) -> Any:
    """What a command that succeeds prints as JSON."""
    return json.loads(ran(capsys, line, *words, "--json").out)


def refused(capsys: pytest.CaptureFixture[str], line: str, *words: object) -> list[str]:
    """The error and the hint of a command with wrong input, which prints no result."""
    ended = ran(capsys, line, *words, code=2)
    assert ended.out == ""
    return ended.said


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """One command; its exit code, and what it printed to stdout and to stderr."""
    return (llmctl(*words), *capsys.readouterr())
