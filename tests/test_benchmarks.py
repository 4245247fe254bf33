"""Every benchmark takes the options that a page shows."""

import argparse
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


class AcceptedError(Exception):
    """The options of a benchmark were accepted."""


def shown(page: Path) -> set[str]:
    """The benchmark commands of a page, those in its text and its tables too; those of another
    commit are left out.
    """
    text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
    commands = re.findall(r"python -m (benchmarks\.[a-z_0-9.]+[^`|\n#]*+)(?!\W*at commit)", text)
    return {command.strip() for command in commands}


@pytest.mark.parametrize("command", sorted(set().union(*map(shown, PAGES))), ids=str)
def test_a_benchmark_takes_the_options_that_a_page_shows(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Benchmarks take minutes, so each is stopped as soon as it has read its options."""
    parse = argparse.ArgumentParser.parse_args

    def stop(
        parser: argparse.ArgumentParser, words: list[str] | None = None, namespace: object = None
    ) -> None:
        parse(parser, words, namespace)
        raise AcceptedError

    module, *options = shlex.split(command)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [module, *options])
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(AcceptedError):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
