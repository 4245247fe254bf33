"""Every benchmark has a `--help`, and takes the options that a page shows."""

import argparse
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

import benchmarks

FOLDER = Path(benchmarks.__file__).parent
SCRIPTS = sorted(
    ".".join(("benchmarks", *path.relative_to(FOLDER).with_suffix("").parts))
    for path in FOLDER.glob("*/*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)
PAGES = [FOLDER.parent / "README.md", *sorted((FOLDER.parent / "docs").rglob("*.md"))]


@pytest.mark.parametrize("module", SCRIPTS)
def test_every_benchmark_has_a_help(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    monkeypatch.delitem(sys.modules, module, raising=False)  # another benchmark imported it
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    file = module.replace(".", "/") + ".py"  # one that runs in an environment without llmctl
    out = capsys.readouterr().out
    assert f"-m {module}" in out or file in out


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
