"""What no program can be asked about the pages: `make docs` runs it.

    python -m docs.check_pages

Each problem is a line, and then the exit code is 1:

- a link or a page that is named in code, and is not there;
- a decision without a date;
- an example that its page shows otherwise;
- raw data of a result that no page links, or a row of a page's table that its raw data lack;
- more phrases in docstrings that point back ("that of", "so many") than a reader can follow;
- a word for people that is about a thing: a request, row, worker or file is "it". A word that comes
  directly after a word for people ("an operator whose key") is right.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common.results_file import tables_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
TEXTS = (
    *sorted(DOCS.rglob("*.md")),
    *sorted(ROOT.glob("*.md")),
    ROOT / "profiles" / "README.md",
)
CODE = tuple(
    file
    for folder in ("toolkit", "tests", "benchmarks", "examples", "locks", "docs")
    for file in sorted((ROOT / folder).rglob("*.py"))
    if file != Path(__file__)
)
OTHERS = (*(ROOT / "templates").rglob("*.j2"), *(ROOT / "recipes").glob("*.yaml"))
LINK = re.compile(r'\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)"')
PAGE = re.compile(r"(?<![\w/.])docs/[\w/-]+\.(?:md|svg|webp)")
OF_OTHER_PROJECTS = ("docs/gpu-feature-discovery/README.md",)  # of the device plugin
PERSON = re.compile(
    r"\b(who|whom|whose|whoever|nobody|somebody|everybody|anybody|he|his|him)\b", re.IGNORECASE
)
OF_PEOPLE = re.compile(
    r"\b(users?|operators?|readers?|authors?|people|persons?),?\s*$", re.IGNORECASE
)
# They make a reader look for the noun, so say it; the number is of 1,000 words of docstrings.
POINTING_BACK = re.compile(
    r"\b(?:that of|those (?:of|that|which|with)|that with|the ones? (?:that|of|with)|likewise"
    r"|so (?:many|much|often)|as (?:in |of |for )?`[^`]+`)",
    re.IGNORECASE,
)
MOST_POINTING_BACK = 2.0
QUOTES = '"who" is for people'  # the glossary


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """The ids of the headings, as forges and MyST make them."""
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", plain, re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


def broken_links() -> Iterator[str]:
    for text in TEXTS:
        shown = re.sub(r"```.*?```", "", read(text), flags=re.DOTALL)
        for found in LINK.finditer(shown):
            link = found[1] or found[2]
            if link.startswith(("http:", "https:")):
                continue
            target, _, anchor = link.partition("#")
            file = (text.parent / target).resolve() if target else text
            if not file.exists():
                yield f"{name(text)}: {link} is not there"
            elif anchor and file.suffix == ".md" and anchor not in anchors(read(file)):
                yield f"{name(text)}: {link} is no heading"


def missing_pages() -> Iterator[str]:
    """In messages, comments and templates, too."""
    for file in (*CODE, *OTHERS, *TEXTS):
        if file.name == "CHANGELOG.md":
            continue
        for page in PAGE.findall(read(file)):
            if page not in OF_OTHER_PROJECTS and not (ROOT / page).exists():
                yield f"{name(file)}: {page} is not there"


def undated_decisions() -> Iterator[str]:
    for section in read(DOCS / "decisions.md").split("\n### ")[1:]:
        title, date = section.split("\n\n")[:2]
        if not re.fullmatch(r"\*\d{4}-\d\d-\d\d\*", date):
            yield f"docs/decisions.md: '{title}' does not begin with its date"


def unlike_raw_data() -> Iterator[str]:
    """Where a run printed a table with a page's columns, the page's rows are rows of it."""
    pages = [read(page) for page in sorted((DOCS / "results").glob("*.md"))]
    for file in sorted((DOCS / "results" / "data").glob("*.json")):
        linking = [page for page in pages if f"(data/{file.name})" in page]
        if len(linking) != 1:
            yield f"{name(file)}: {len(linking)} pages link it"
            continue
        for shown in tables_of(linking[0]):
            rows = []
            for run in json.loads(read(file)).get("tables", ()):
                if set(shown["columns"]) <= set(run["columns"]):
                    places = [run["columns"].index(column) for column in shown["columns"]]
                    rows += [[row[k] for k in places] for row in run["rows"]]
            for row in shown["rows"] if rows else ():
                if row not in rows:
                    yield f"{name(file)}: it lacks a row of its page: {row}"


def unshown_examples() -> Iterator[str]:
    page = DOCS / "how-to" / "simulate-in-python.md"
    for script in sorted((ROOT / "examples").glob("*.py")):
        if "import api" in read(script) and f"```python\n{read(script)}```" not in read(page):
            yield f"{name(script)}: {name(page)} does not show it as it is"


def prose_of(source: str) -> Iterator[tuple[int, str]]:
    """Each comment and string literal of Python code, with the number of its first line."""
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind in ("COMMENT", "STRING", "FSTRING_MIDDLE"):
            # what comes before may end with the word for people
            part = token.string.lstrip("# ")
            yield token.start[0], f"{before} {part}"
            before = part.strip("\"' ").rpartition(" ")[2]
        elif kind not in ("NL", "NEWLINE", "INDENT", "DEDENT"):
            before = ""


def words_for_people() -> Iterator[str]:
    markup = [*ROOT.glob(".github/**/*.*"), *OTHERS, *TEXTS]
    for file in (*CODE, *(each for each in markup if each.is_file())):
        text = read(file)
        if file.name == "CHANGELOG.md" or not PERSON.search(text):
            continue
        for first, part in prose_of(text) if file.suffix == ".py" else [(1, text)]:
            for found in PERSON.finditer(part):
                line_start = part.rfind("\n", 0, found.start()) + 1
                line = part[line_start : part.find("\n", found.start()) % (len(part) + 1)]
                if not OF_PEOPLE.search(part, 0, found.start()) and QUOTES not in line:
                    number = first + part.count("\n", 0, found.start())
                    yield f"{name(file)}:{number}: say 'it' or 'that': {line.strip()}"


def docstrings_of(source: str) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds):
            yield ast.get_docstring(node) or ""


def pointing_back() -> Iterator[str]:
    """Where there are too many phrases, the rooms that have most of them are named."""
    words = 0
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "toolkit").rglob("*.py")):
        for text in docstrings_of(read(file)):
            words += len(text.split())
            found.setdefault(name(file.parent), []).extend(POINTING_BACK.findall(text))
    count = sum(map(len, found.values()))
    if 1000 * count > MOST_POINTING_BACK * words:
        most = sorted(found, key=lambda room: -len(found[room]))[:3]
        rooms = ", ".join(f"{room} {len(found[room])}" for room in most)
        share = f"{1000 * count / words:.2f} in 1,000 words, at most {MOST_POINTING_BACK:g}"
        yield f"docstrings point back by 'that of', 'so many' and the like: {share}; most: {rooms}"


def problems() -> list[str]:
    return [
        *broken_links(),
        *missing_pages(),
        *undated_decisions(),
        *unlike_raw_data(),
        *unshown_examples(),
        *words_for_people(),
        *pointing_back(),
    ]


if __name__ == "__main__":
    found = problems()
    print("\n".join(found) or "the pages are in order")
    sys.exit(bool(found))
