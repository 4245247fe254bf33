"""Output of the commands: results on stdout; notes and progress on stderr, for a clean `--json`.

Everything fits 80 columns; a table takes the width of a wider terminal. Numbers are rounded here
for reading, and nowhere else: the files keep every digit.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from textwrap import TextWrapper, fill
from typing import TYPE_CHECKING, Any, TextIO

from toolkit.openai.foreign import escaped
from toolkit.report.parts import Table

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console
    from rich.table import Table as RichTable

    from toolkit.report.parts import Cell, Sheet

ABOUT = """\
Measure an LLM engine, fit its time and memory, find the scheduler settings that
serve your traffic best, and start exactly that."""
WIDTH = 80
TEXT_ROOM = 24  # width that a column of text needs to be readable; longer text wraps
JUSTIFY = {"<": "left", ">": "right", "^": "center"}


def show_any_text() -> None:
    """Make stdout print '?' for each character that it cannot encode, where Python would raise an
    error: an ASCII stdout, and names of files that are not UTF-8.
    """
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out.errors in ("strict", "surrogateescape"):
        out.reconfigure(errors="replace")


def shows_unicode() -> bool:
    """Whether stdout can encode every character."""
    return "utf" in (getattr(sys.stdout, "encoding", None) or "").lower()


def emit(
    as_json: bool, result: BaseModel | Mapping[str, Any] | Any, render: Callable[[], None]
) -> None:
    """Print `result` as one JSON object, or call `render`, which prints it for people.

    `result` is a pydantic model, a dataclass or a mapping, of plain values or of more of these.
    """

    from pydantic_core import to_jsonable_python

    if not as_json:
        shown = _Shown(sys.stdout)
        try:
            with redirect_stdout(shown):
                render()
        finally:
            sys.stdout.write(shown.getvalue())
        sys.stdout.flush()
        return
    # the fallback is for numpy's numbers and arrays
    plain = to_jsonable_python(result, by_alias=False, fallback=lambda value: value.tolist())
    print(json.dumps(plain, ensure_ascii=not shows_unicode(), allow_nan=False), flush=True)


class _Shown(io.StringIO):
    """What a command prints for people. Names of files, models and columns are whatever others made
    them: here they can move no cursor and set no title of the terminal.
    """

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out

    def isatty(self) -> bool:
        return self._out.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # of the place where it is shown
        return self._out.encoding

    def write(self, text: str) -> int:
        return super().write(_plain(text))

    def write_styled(self, text: str) -> int:
        """Write what is plain already, with the terminal's codes."""
        return super().write(text)


def _plain(text: str) -> str:
    """A text without control characters but the ends of its lines, and tabs. Bytes of file names
    that are not UTF-8 stay: stdout shows them as it can.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one in "\n\t" or "\ud800" <= one <= "\udfff" else escaped(one) for one in text
    )


def note(*texts: str) -> None:
    """Print texts for the user on stderr: in the terminal's width there, else as a line each."""
    lines = [escaped(line) for text in texts for line in text.split("\n")]
    if sys.stderr.isatty():  # words stay whole, and a continued line is indented
        width = max(WIDTH, shutil.get_terminal_size().columns)
        whole = TextWrapper(
            width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        lines = [whole.fill(line) for line in lines]
    for line in lines:
        print(line, file=sys.stderr)


def paragraph(text: str) -> None:
    """Print a text within `WIDTH`: words stay whole, and a continued line is indented."""
    print(fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False))


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], title: str = "") -> None:
    """Print rows under `columns`, at most 80 columns wide or as wide as the terminal; long text
    wraps.

    A column's name may start with '<' or '>' for its alignment; otherwise columns of numbers are
    right-aligned, others left-aligned. Cells are plain text (no markup); floats are rounded by
    `number`. The first column holds names and is never cut. Numbers never wrap: where not all
    columns fit, the table continues below, with the first column repeated. Cells of a row beyond
    the columns are not shown.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=False)
    if not sys.stdout.isatty():
        console.width = WIDTH
    with console.capture() as captured:
        if title:  # printed separately, since rich wraps a table's title to the table's width
            console.print(Text(f"\n{_plain(title)}", style="bold"))
        _print_groups(console, Table(title, columns, rows))
    write = getattr(sys.stdout, "write_styled", sys.stdout.write)
    write(captured.get())


def show(sheet: Sheet) -> None:
    """Print the tables of a sheet, each with its remark, and its lines."""
    for one in sheet.tables:
        table(one.columns, one.rows, one.caption)
        if one.remark:
            paragraph(one.remark)
    for line in sheet.lines:
        paragraph(line)


def _print_groups(console: Console, whole: Table) -> None:
    """Print the columns in as many tables as their width needs."""
    unbounded = console.options.update(width=sys.maxsize)
    groups: list[list[int]] = [[0]]
    for index in range(1, len(whole.columns)):
        shown = [*groups[-1], index]
        wider = _view(console, whole, shown, narrow=True, text_room=TEXT_ROOM)
        least = console.measure(wider, options=unbounded).minimum
        if len(groups[-1]) > 1 and least > console.width:
            groups.append([0])
        groups[-1].append(index)
    for shown in groups:
        view = _view(console, whole, shown)
        if console.measure(view, options=unbounded).maximum > console.width:
            view = _view(console, whole, shown, narrow=True)
        console.print(view)


def _view(
    console: Console,
    whole: Table,
    shown: Sequence[int],
    *,
    narrow: bool = False,
    text_room: int | None = None,
) -> RichTable:
    """Return a table of the columns `shown`; with `narrow` the names of unwrapped columns have a
    line per word, and long names in the first column two lines.

    Single words never wrap. Columns of text are at most `text_room` wide; None: as they need.
    """
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    lines = box.SIMPLE_HEAD
    if console.options.ascii_only:
        lines = box.Box(str(lines).replace("\N{BOX DRAWINGS LIGHT HORIZONTAL}", "-"), ascii=True)
    view = RichTable(box=lines, pad_edge=False)
    texts: list[list[str]] = []
    rows = whole.cells
    for index in shown:
        name = whole.columns[index]
        align = name[0] if name[:1] in JUSTIFY else "><"[not whole.right[index]]
        texts.append([_plain(str(row[index])) for row in rows])
        if index == 0 and narrow:  # `kind.flag` and `recipe, router` take two lines; no path does
            for place, text in enumerate(texts[-1]):
                owner, mark, last = text.rpartition(", " if ", " in text else ".")
                if mark and len(text) > WIDTH // 2 and "/" not in text:
                    texts[-1][place] = f"{owner}{mark.strip()}\n  {last}"
        longest = max((len(line) for text in texts[-1] for line in text.split("\n")), default=0)
        unbroken = longest <= WIDTH // 2
        if index:
            words = align != ">" and any(" " in text for text in texts[-1])
            unbroken = longest <= TEXT_ROOM and not words
        heading = _plain(name.lstrip("<>^"))
        view.add_column(
            "\n".join(heading.split()) if unbroken and narrow else heading,
            justify=JUSTIFY[align],  # type: ignore[arg-type]
            overflow="fold",
            no_wrap=unbroken,
            min_width=longest if unbroken else None,
            max_width=None if unbroken else text_room,
        )
    for row in zip(*texts, strict=True):
        view.add_row(*map(Text, row))
    return view


DRAWN_S = 0.5  # between two drawings of a bar without a thread


@contextmanager
def progress(description: str, total: int, *, alone: bool = False) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr; yields `advance(steps=1, text=None, total=None)`, where `total` is
    another number of steps in all. Silent where stderr is not a terminal. The bar shows the time
    that is left if all steps take equally long.

    `alone`: without a thread that draws the bar; `advance` draws it, at most every `DRAWN_S`.

    with progress("measuring", len(points)) as advance:
        for point in points:
            advance(text=f"prefill N={point.batch_size}")
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}", markup=False),
    )
    silent = not console.is_terminal
    drawn_s = time.monotonic()
    with Progress(
        *columns, console=console, disable=silent, transient=True, auto_refresh=not alone
    ) as bar:
        task = bar.add_task(description, total=total, text="")

        def advance(steps: int = 1, text: str | None = None, total: int | None = None) -> None:
            if text is not None:
                bar.update(task, text=text)
            bar.update(task, advance=steps, total=total)
            nonlocal drawn_s
            if alone and time.monotonic() - drawn_s >= DRAWN_S:
                drawn_s = time.monotonic()
                bar.refresh()

        yield advance
