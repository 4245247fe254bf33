"""`llmctl docs`: the pages of the documentation that come with the package, in the terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.arguments import JsonOption, completing
from toolkit.cli.output import WIDTH, aligned, emit, shows_unicode
from toolkit.errors import InputError, nearest
from toolkit.files.shipped import shipped_docs

FOLDERS = ("tutorials", "how-to", "reference", "explanation")  # the others are of the repository
# A picture; and a link to another page, with the page's path in its second group.
PICTURE = re.compile(r"!\[[^]]*\]\([^)]*\)")
LINK = re.compile(r"\[([^]]+)\]\((?![a-z]+:)(?:\.\./)*((?:[a-z-]+/)?[\w-]+)\.md(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\[([^]]+)\]\(#[^)]*\)")


def pages() -> dict[str, Path]:
    """The file of each page, by its name, like `how-to/serve`."""
    root = shipped_docs()
    files = (path for folder in FOLDERS for path in sorted((root / folder).glob("*.md")))
    return {f"{path.parent.name}/{path.stem}": path for path in files}


def docs(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            autocompletion=completing(pages),
            help="A page, like how-to/serve, or like serve if no other page has that name.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a page of the documentation, of this version of llmctl; without NAME, list the pages.

    A terminal shows the page in its pager. --json prints the page as Markdown.
    """
    if name is None:
        titles = {page: _title(path) for page, path in pages().items()}
        emit(as_json, {"pages": titles}, lambda: _list(titles))
        return
    path = find(name)
    page = f"{path.parent.name}/{path.stem}"
    markdown = path.read_text(encoding="utf-8")
    emit(as_json, {"page": page, "markdown": markdown}, lambda: _show(_readable(path)))


def find(name: str) -> Path:
    """The page of that name, with or without its folder. Raises `InputError`."""
    known = pages()
    plain = name.removeprefix("docs/").removesuffix(".md")
    if plain in known:
        return known[plain]
    same = [each for each in known if each.partition("/")[2] == plain]
    if len(same) == 1:
        return known[same[0]]
    if same:
        raise InputError(f"'{name}' is the name of {len(same)} pages", f"one of {', '.join(same)}")
    stems = {each.partition("/")[2]: each for each in known}
    hint = nearest(plain, [*known, *stems])
    listed = hint if hint.startswith("did you mean") else "see the list: llmctl docs"
    raise InputError(f"there is no page '{name}'", listed)


def _list(titles: Mapping[str, str]) -> None:
    rows = list(titles.items())
    show = aligned([("page", "what it is about"), *rows])
    folder = ""
    for row in rows:
        if row[0].partition("/")[0] != folder:
            if folder:
                print()
            folder = row[0].partition("/")[0]
        show(row)


def _title(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(line[2:] for line in lines if line.startswith("# ")).replace("`", "")


def _readable(path: Path) -> str:
    """The page's Markdown without pictures; links to pages name what `llmctl docs` takes."""
    text = PICTURE.sub("", path.read_text(encoding="utf-8"))

    def named(link: re.Match[str]) -> str:
        page = link[2] if "/" in link[2] else f"{path.parent.name}/{link[2]}"
        return f"{link[1]} ({page})" if page in pages() else link[1]

    return ANCHOR.sub(r"\1", LINK.sub(named, text))


def _show(text: str) -> None:
    """Print Markdown at `WIDTH`, in a pager if stdout is a terminal."""
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.markdown import Markdown, TableElement
    from rich.table import Table

    class WholeTable(TableElement):
        """A table that breaks long words, where rich would cut them."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for part in super().__rich_console__(console, options):
                if isinstance(part, Table):
                    for column in part.columns:
                        column.overflow = "fold"
                yield part

    class WholeMarkdown(Markdown):
        elements = {**Markdown.elements, "table_open": WholeTable}  # noqa: RUF012

    console = Console(width=WIDTH, highlight=False, safe_box=not shows_unicode())
    page = WholeMarkdown(text, hyperlinks=False)
    if sys.stdout.isatty():
        with console.pager(styles=False):
            console.print(page)
    else:
        console.print(page)
