"""The documentation names options that exist, and every variable that the code reads."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from docs.make_reference import VARIABLES
from toolkit.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@cache
def options() -> dict[str, set[str]]:
    """Each command's options, 'trace convert' and its like included."""
    found: dict[str, set[str]] = {}
    for name in main.COMMANDS:
        command = main._load(name)
        for inner, one in getattr(command, "commands", {"": command}).items():
            found[f"{name} {inner}".strip()] = {
                word for item in one.params for word in item.opts + item.secondary_opts
            }
    return found


def named(page: Path, known: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    """Each command that the page shows, with each option that it shows it with."""
    longest_first = sorted(known, key=len, reverse=True)
    for words in re.findall(r"llmctl ([^`#|\n]+)", page.read_text(encoding="utf-8")):
        command = next((name for name in longest_first if f"{words} ".startswith(f"{name} ")), "")
        own = re.sub(r'"[^"]*"', "", words)  # what is quoted is another program's
        yield from (
            (command, option) for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", own) if command
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_option_that_a_page_shows_exists(page: Path) -> None:
    known = options()
    shown = list(named(page, known))
    assert [(command, option) for command, option in shown if option not in known[command]] == []


def test_every_variable_that_the_code_names_is_documented() -> None:
    files = [*(ROOT / "toolkit").rglob("*.py"), *(ROOT / "templates").glob("*.j2")]
    texts = "\n".join(file.read_text(encoding="utf-8") for file in files)
    assert set(re.findall(r"LLMCTL_[A-Z_]*[A-Z]\b", texts)) == set(VARIABLES)


def test_every_page_that_a_message_names_exists() -> None:
    texts = (file.read_text(encoding="utf-8") for file in (ROOT / "toolkit").rglob("*.py"))
    pages = {page for text in texts for page in re.findall(r"docs/[a-z-]+/[a-z-]+\.md", text)}
    assert len(pages) > 5
    assert [page for page in pages if not (ROOT / page).is_file()] == []
