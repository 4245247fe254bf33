"""Words for people are for people: a request, row, job, worker, batch, file or command is "it".

The words are those in `PERSON`. The test reads docstrings, comments, string literals and the names
of test functions in all Python files, and all text of the pages, templates and recipes.

A hit is accepted in two cases only:

- the word comes directly after a word for people ("people who read", "an operator whose key"). Such
  a word anywhere else in the sentence is not enough: it would accept "a request whose user left".
- `ALLOWED` has the pair of the file and the phrase. Each phrase speaks of people or quotes. There
  are at most 30 pairs, and a pair that matches nothing fails.

This file quotes the words and is not checked.
"""

import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
WORDS = "who|whom|whose|whoever|nobody|somebody|everybody|anybody|he|his|him"
PERSON = re.compile(rf"\b({WORDS})\b", re.IGNORECASE)
OF_PEOPLE = re.compile(
    r"\b(users?|operators?|readers?|authors?|people|persons?),?\s*$", re.IGNORECASE
)
SENTENCE_END = re.compile(r"[.!?;]['\")]*\s+|\n\s*\n")
OPENING = re.compile(r"^[a-zA-Z]{0,2}[\"']+")  # of a string literal
ALLOWED = {
    ("docs/reference/glossary.md", '"who" is for people'),
}
MAX_ALLOWED = 30
PYTHON = ("toolkit/**/*.py", "benchmarks/**/*.py", "tests/**/*.py")
TEXT = (
    "docs/**/*.md",
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    ".github/**/*.*",
    "templates/**/*.*",
    "recipes/*.*",
)


class Hit(NamedTuple):
    """A word for people that is about something else."""

    file: str
    line: int
    sentence: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.sentence}"


Block = list[tuple[int, str]]  # lines that belong together, with their numbers


def blocks_of_python(source: str) -> Iterator[Block]:
    """Comments on consecutive lines, string literals that Python joins, names of test functions."""
    block: Block = []
    previous = tokenize.ENCODING
    was_def = False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            continue
        is_text = token.type in (tokenize.COMMENT, tokenize.STRING) or (
            tokenize.tok_name[token.type] == "FSTRING_MIDDLE"
        )
        if block and token.type != previous:
            yield block
            block = []
        if is_text:
            lines = OPENING.sub("", token.string).split("\n")
            block += [(token.start[0] + k, line.strip("# \"'")) for k, line in enumerate(lines)]
        elif was_def and token.string.startswith("test_"):
            yield [(token.start[0], token.string.replace("_", " "))]
        previous = token.type
        was_def = token.string == "def"
    if block:
        yield block


def blocks_of_text(text: str) -> Iterator[Block]:
    """Paragraphs."""
    block: Block = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            block.append((number, line))
        elif block:
            yield block
            block = []
    if block:
        yield block


def hits(file: str, blocks: Iterable[Block]) -> Iterator[Hit]:
    """The words for people in `blocks` that do not come directly after a word for people."""
    for block in blocks:
        text = "\n".join(line for _, line in block)
        for found in PERSON.finditer(text):
            if OF_PEOPLE.search(text, 0, found.start()):
                continue
            begin = max(
                (end.end() for end in SENTENCE_END.finditer(text, 0, found.start())), default=0
            )
            end = SENTENCE_END.search(text, found.end())
            sentence = " ".join(text[begin : end.start() + 1 if end else len(text)].split())
            line, _ = block[text.count("\n", 0, found.start())]
            yield Hit(file, line, sentence)


def hits_in(file: str, text: str) -> list[Hit]:
    """All hits in a file with this text, the allowed ones included."""
    if not re.search(rf"(\b|_)({WORDS})(\b|_)", text, re.IGNORECASE):
        return []  # parsing is slow, and most files have no such word
    return [*hits(file, blocks_of_python(text) if file.endswith(".py") else blocks_of_text(text))]


@pytest.fixture(scope="module")
def found() -> list[Hit]:
    paths = {path for pattern in (*PYTHON, *TEXT) for path in ROOT.glob(pattern) if path.is_file()}
    assert len(paths) > 400
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(paths)}
    del texts["tests/test_voice.py"]
    return [hit for file, text in texts.items() for hit in hits_in(file, text)]


def test_words_for_people_speak_of_people(found: list[Hit]) -> None:
    wrong = [
        str(hit)
        for hit in found
        if not any(hit.file == file and phrase in hit.sentence for file, phrase in ALLOWED)
    ]
    if wrong:
        message = f"say 'it', 'that' or 'with' in these {len(wrong)} sentences:"
        pytest.fail("\n".join([message, *wrong]), pytrace=False)


def test_each_allowed_phrase_is_still_there(found: list[Hit]) -> None:
    assert len(ALLOWED) <= MAX_ALLOWED
    for file, phrase in ALLOWED:
        assert any(hit.file == file and phrase in hit.sentence for hit in found), (file, phrase)


PYTHON_HIT = '''
def one():
    """First line.

    A row
    whose cache is dropped. The end."""
'''
JOINED_HIT = """
raise ValueError("a request. One "
    "who waits")
"""
COMMENT_HIT = "x = 1\n# A job is here. The last\n# who came in leaves.\n"


@pytest.mark.parametrize(
    ("file", "text", "line", "sentence"),
    [
        ("a.py", PYTHON_HIT, 6, "A row whose cache is dropped."),
        ("a.py", JOINED_HIT, 3, "One who waits"),
        ("a.py", COMMENT_HIT, 3, "The last who came in leaves."),
        ("a.py", "def test_nobody_waits():\n    pass\n", 1, "test nobody waits"),
        ("a.md", "One line.\n\nNobody\nwaits. End.", 3, "Nobody waits."),
        ("a.md", "A request whose user left.", 1, "A request whose user left."),
    ],
)
def test_a_hit_has_its_line_and_its_sentence(
    file: str, text: str, line: int, sentence: str
) -> None:
    assert hits_in(file, text) == [Hit(file, line, sentence)]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("a.py", "# for people who read this\n"),
        ("a.py", "# The user,\n# whose key it is\n"),
        ("a.py", "everybody = who()\n"),
        ("a.py", "# the help, the cache, this\n"),
        ("a.md", "An operator who restarts it"),
    ],
)
def test_people_and_names_in_code_are_no_hits(file: str, text: str) -> None:
    assert hits_in(file, text) == []
