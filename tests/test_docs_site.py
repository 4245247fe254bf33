"""The documentation as a whole: current where it follows from the code, linked, short, a site."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.make_reference import PAGES, VARIABLES, page

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
TEXTS = [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md")), ROOT / "profiles" / "README.md"]
LINK = re.compile(r'\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)"')


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.slow
@pytest.mark.parametrize("which", PAGES)
def test_a_page_that_follows_from_the_code_is_current(which: str) -> None:
    text = (DOCS / "reference" / f"{which}.md").read_text(encoding="utf-8")
    assert text == page(which), "run `make reference`"


def test_every_variable_that_the_code_names_is_documented() -> None:
    """Variables in string literals of the code, and in the templates."""
    found = set()
    for file in (ROOT / "toolkit").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"LLMCTL_[A-Z_]*[A-Z]", node.value))
    for file in (ROOT / "templates").glob("*.j2"):
        found |= set(re.findall(r"LLMCTL_[A-Z_]*[A-Z]", file.read_text(encoding="utf-8")))
    assert found - {"LLMCTL_VLLM", "LLMCTL_COMPLETE"} == set(VARIABLES)


def anchors(text: str) -> set[str]:
    """The ids of the headings, as forges and MyST make them."""
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", plain, re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


@pytest.mark.parametrize("text", TEXTS, ids=name)
def test_every_link_leads_somewhere(text: Path) -> None:
    shown = re.sub(r"```.*?```", "", text.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for link in (found[1] or found[2] for found in LINK.finditer(shown)):
        if link.startswith(("http:", "https:")):
            continue
        target, _, anchor = link.partition("#")
        file = (text.parent / target).resolve() if target else text
        if not file.exists() or (
            anchor and file.suffix == ".md" and anchor not in anchors(file.read_text("utf-8"))
        ):
            broken.append(link)
    assert broken == []


def test_every_page_that_is_named_anywhere_exists() -> None:
    """In messages, comments and templates, too."""
    tracked = named_files()
    missing = {
        (name(file), page_)
        for file in tracked
        for page_ in re.findall(
            r"(?<![\w/.])docs/[\w/-]+\.(?:md|svg|webp)", file.read_text(encoding="utf-8")
        )
        if not (ROOT / page_).exists()
    }
    # of other projects: device plugin, SGLang
    assert {page_ for _, page_ in missing} <= {
        "docs/gpu-feature-discovery/README.md",
        "docs/advanced_features/server_arguments.md",
    }


def named_files() -> list[Path]:
    """Python files, templates, recipes and pages."""
    folders = ("toolkit", "tests", "benchmarks", "examples", "locks", "docs")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    files += [*(ROOT / "templates").rglob("*.j2"), *(ROOT / "recipes").glob("*.yaml"), *TEXTS]
    return [file for file in files if file.name not in ("CHANGELOG.md", Path(__file__).name)]


def test_decisions_are_dated_and_listed() -> None:
    folder = DOCS / "decisions"
    listed = set(
        re.findall(r"^- \[(.+)\]\(([a-z]+)\.md#", (folder / "index.md").read_text(), re.MULTILINE)
    )
    found = set()
    for text in folder.glob("*.md"):
        if text.stem != "index":
            _, *sections = text.read_text(encoding="utf-8").split("\n## ")
            for section in sections:
                title, date = section.split("\n\n")[:2]
                assert re.fullmatch(r"\*\d{4}-\d\d-\d\d\*", date), title
                found.add((title, text.stem))
    assert found == listed


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("sphinx") is None or importlib.util.find_spec("furo") is None,
    reason="needs Sphinx, MyST and Furo, which `make setup` installs",
)
def test_the_site_builds_without_a_warning_and_its_search_finds_terms(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, DOCS, tmp_path / "site"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "site" / "searchindex.js").read_text(encoding="utf-8")
    for term in ("slice_tokens?", "mtpot", "keda"):  # a stemmer may cut the plural
        assert re.search(rf'"{term}":', index), term
    assert (tmp_path / "site" / "pictures" / "status-dark.webp").exists()
