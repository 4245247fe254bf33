"""Runs commands in the test's own process."""

import pytest

from toolkit.cli import main


def llmctl(*words: object) -> int:
    """One command; its exit code."""
    with pytest.raises(SystemExit) as ended:
        main.run([str(word) for word in words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """One command; its exit code, and what it printed to both outputs."""
    return (llmctl(*words), *capsys.readouterr())
