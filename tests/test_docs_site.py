"""The reference pages that follow from the code are current; `make docs` checks the others."""

import ast
import re
from pathlib import Path

import pytest

from docs.make_reference import PAGES, VARIABLES, page

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.mark.slow
@pytest.mark.parametrize("which", PAGES)
def test_a_page_that_follows_from_the_code_is_current(which: str) -> None:
    text = (DOCS / "reference" / f"{which}.md").read_text(encoding="utf-8")
    assert text == page(which), "run `make reference`"


@pytest.mark.slow
def test_every_variable_that_the_code_names_is_documented() -> None:
    """Variables in string literals of the code, and in the templates."""
    found = set()
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "toolkit").rglob("*.py")]
    for text in texts:
        for node in ast.walk(ast.parse(text)) if "LLMCTL_" in text else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"LLMCTL_[A-Z_]*[A-Z]", node.value))
    for file in (ROOT / "templates").glob("*.j2"):
        found |= set(re.findall(r"LLMCTL_[A-Z_]*[A-Z]", file.read_text(encoding="utf-8")))
    assert found - {"LLMCTL_VLLM", "LLMCTL_COMPLETE"} == set(VARIABLES)
