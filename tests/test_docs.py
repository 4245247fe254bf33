"""The documentation names commands, options and parameters that exist, with their defaults and
search ranges.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit.cli import main
from toolkit.sched.policies import KNOWN
from toolkit.sched.policies.parameters import defaults, knobs

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
POLICY_PAGE = (ROOT / "docs" / "explanation" / "policies.md").read_text(encoding="utf-8")
SECTIONS = {
    name: section
    for section in re.split(r"^## ", POLICY_PAGE, flags=re.MULTILINE)
    for name in re.findall(r"\A`([a-z-]+)`", section)
    if name in KNOWN
}
ROW = re.compile(r"^\| `([a-z_]+)` \| ([^|]*)\| ([^|]*)\|", re.MULTILINE)


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
        yield from (
            (command, option) for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", words) if command
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_option_that_a_page_shows_exists(page: Path) -> None:
    known = options()
    shown = list(named(page, known))
    assert [(command, option) for command, option in shown if option not in known[command]] == []


@pytest.mark.parametrize("policy", KNOWN)
def test_every_parameter_of_a_policy_is_documented(policy: str) -> None:
    missing = [name for name in knobs(KNOWN[policy]) if f"`{name}`" not in POLICY_PAGE]
    assert f"`{policy}`" in POLICY_PAGE
    assert missing == []


@pytest.mark.parametrize("policy", SECTIONS)
def test_documented_defaults_and_search_ranges_are_those_of_the_code(policy: str) -> None:
    of_code, limits = defaults(KNOWN[policy]), knobs(KNOWN[policy])
    for name, default, searched in ROW.findall(SECTIONS[policy]):
        value, search = of_code[name], limits[name].search
        if default.strip():
            assert default.strip() == (
                f"{value:g}" if type(value) in (int, float) else str(value).lower()
            ), name
        assert bool(searched.strip()) == bool(search), name
        if search:
            assert searched.startswith(f"{search[0]:g} .. {search[1]:g}"), name
