"""Runs commands in the test's own process. The first word of each may be a whole line."""

import json
from typing import Any, NamedTuple

import pytest

from toolkit.cli import main


class Ended(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
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


def ran(capsys: pytest.CaptureFixture[str], line: str, *words: object) -> Ended:
    """One command with what it printed."""
    capsys.readouterr()
    code = llmctl(line, *words)
    return Ended(code, *capsys.readouterr())


def printed(capsys: pytest.CaptureFixture[str], line: str, *words: object) -> Any:
    """What a command that succeeds prints as JSON."""
    ended = ran(capsys, line, *words, "--json")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


def refused(capsys: pytest.CaptureFixture[str], line: str, *words: object) -> list[str]:
    """The error and the hint of a command with wrong input, which prints no result."""
    ended = ran(capsys, line, *words)
    assert (ended.code, ended.out) == (2, "")
    return ended.said
