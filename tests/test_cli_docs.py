"""`llmctl docs`: the pages that the package contains."""

import re
from pathlib import Path

import pytest
from commands import ran
from said import says

import toolkit
from toolkit.cli.docs import FOLDERS, find, pages
from toolkit.errors import InputError

PACKAGE = Path(toolkit.__file__).parent


def test_the_list_has_every_page_and_fits_80_columns(capsys):
    lines = [line for line in ran(capsys, "docs").out.splitlines() if line]
    assert [line.split()[0] for line in lines] == list(pages())
    assert {line.partition("/")[0] for line in lines} == set(FOLDERS)
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "<!--" in line]


@pytest.mark.parametrize("name", ["how-to/vllm", "reference/engines", "explanation/structures"])
def test_a_page_fits_80_columns_and_loses_no_word_of_its_tables(name, capsys):
    shown = ran(capsys, "docs", name).out
    assert max(map(len, shown.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    assert ".md" not in re.sub(r"\S*/\S*", "", shown)


def test_a_page_has_several_names():
    serve = find("how-to/serve")
    assert serve.read_text(encoding="utf-8").startswith("# Serve")
    assert find("serve") == find("docs/how-to/serve.md") == serve


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("vllm", ("how-to/vllm", "explanation/vllm")),
        ("how-to/vlm", ("'how-to/vllm'",)),
        ("glosary", ("'glossary'",)),
        ("../README", ("llmctl docs",)),
        ("/etc/passwd", ("llmctl docs",)),
        ("", ("llmctl docs",)),
    ],
)
def test_an_unknown_page_is_one_line_with_the_nearest(name, named):
    with pytest.raises(InputError) as refused:
        find(name)
    assert says(refused.value.hint, *named)


def test_every_page_that_the_code_cites_is_one_that_is_printed():
    cited = set()
    for path in PACKAGE.rglob("*.py"):
        text = re.sub(r'"\s*"', "", path.read_text(encoding="utf-8"))
        cited |= set(re.findall(r"llmctl docs ([a-z-]+/[a-z-]+)", text))
    assert cited
    assert cited <= pages().keys()
