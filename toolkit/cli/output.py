"""What commands print: results on stdout, progress and notes on stderr, so that `--json` output is
one JSON object.

Everything fits 80 columns; a table takes the width of a wider terminal. Numbers are rounded for
reading here and nowhere else; the files keep every digit.
"""

from __future__ import annotations

import codecs
import io
import json
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

from toolkit.units import number, percent, seconds, size

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "JUSTIFY",
    "WIDTH",
    "aligned",
    "emit",
    "note",
    "number",
    "percent",
    "progress",
    "seconds",
    "show_any_text",
    "size",
    "table",
]

WIDTH = 80
TEXT_ROOM = 24  # columns that a column of text needs to be read; what is longer wraps
JUSTIFY = {"<": "left", ">": "right", "^": "center"}
NEAREST = {
    "\N{FULL BLOCK}": "#",
    "\N{EN DASH}": "-",
    "\N{EM DASH}": "-",
    "\N{MULTIPLICATION SIGN}": "x",
}


def show_any_text() -> None:
    """Have stdout replace each character that it cannot encode, where Python would raise an error.

    An ASCII stdout (`LC_ALL=C` without UTF-8 mode, `PYTHONIOENCODING=ascii`) shows the nearest
    ASCII text, or '?'. UTF-8 cannot encode the bytes of a file's name that are not UTF-8.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in (
        "strict",
        "surrogateescape",
    ):
        codecs.register_error("llmctl-nearest", _nearest_text)
        sys.stdout.reconfigure(errors="llmctl-nearest")


def _nearest_text(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_nearest(one) for one in error.object[error.start : error.end]), error.end


def _nearest(character: str) -> str:
    plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return NEAREST.get(character) or plain or "?"


def shows_unicode() -> bool:
    """Whether stdout can encode every character."""
    return "utf" in (getattr(sys.stdout, "encoding", None) or "").lower()


def emit(
    as_json: bool, result: BaseModel | Mapping[str, Any] | Any, render: Callable[[], None]
) -> None:
    """Print `result` as one JSON object, or let `render` print it for people.

    `result` is a pydantic model, a dataclass or a mapping, of plain values or of more of these.
    """
    if not as_json:
        render()
        return
    print(json.dumps(result, default=_plain, ensure_ascii=not shows_unicode(), allow_nan=False))


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if hasattr(value, "tolist"):  # numpy's numbers and arrays
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def note(text: str) -> None:
    """A line for the person at the terminal, on stderr."""
    print(text, file=sys.stderr)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Print rows under `columns`: 80 columns wide at most, or as wide as the terminal; long text
    wraps.

    A column's name may start with '<' or '>' for its alignment; without, columns of numbers go
    right, others left. Cells are text as it is (no markup); floats are rounded by `number`. The
    first column names things and stays whole. Numbers never wrap: where not all columns fit, the
    table goes on below, with the first column again.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=False)
    if not sys.stdout.isatty():
        console.width = WIDTH
    if title:  # as a line of its own: rich would wrap a table's title to the table's width
        console.print(Text(f"\n{title}", style="bold"))
    unbounded = console.options.update(width=sys.maxsize)
    groups: list[list[int]] = [[0]]
    for index in range(1, len(columns)):
        wider = _view(
            console, columns, rows, [*groups[-1], index], narrow=True, text_room=TEXT_ROOM
        )
        if (
            len(groups[-1]) > 1
            and console.measure(wider, options=unbounded).minimum > console.width
        ):
            groups.append([0])
        groups[-1].append(index)
    for shown in groups:
        view = _view(console, columns, rows, shown)
        if console.measure(view, options=unbounded).maximum > console.width:
            view = _view(console, columns, rows, shown, narrow=True)
        console.print(view)


def _view(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    shown: Sequence[int],
    *,
    narrow: bool = False,
    text_room: int | None = None,
) -> Table:
    """A table of the columns `shown`; with `narrow` the names of columns that stay whole have a
    line per word.

    Columns of text are at most `text_room` wide; None: as wide as they need.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    lines = box.SIMPLE_HEAD
    if console.options.ascii_only:
        lines = box.Box(str(lines).replace("\N{BOX DRAWINGS LIGHT HORIZONTAL}", "-"), ascii=True)
    view = Table(box=lines, pad_edge=False)
    for index in shown:
        name, cells = columns[index], [row[index] for row in rows]
        right = any(map(_is_number, cells)) and all(
            _is_number(cell) or cell is None for cell in cells
        )
        align = name[0] if name[:1] in JUSTIFY else "><"[not right]
        longest = max((len(_cell(cell)) for cell in cells), default=0)
        whole = longest <= WIDTH // 2 if index == 0 else align == ">" and longest <= TEXT_ROOM
        heading = name.lstrip("<>^")
        view.add_column(
            "\n".join(heading.split()) if whole and narrow else heading,
            justify=JUSTIFY[align],  # type: ignore[arg-type]
            overflow="fold",
            no_wrap=whole,
            max_width=None if whole else text_room,
        )
    for row in rows:
        view.add_row(*(Text(_cell(row[index])) for index in shown))
    return view


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def aligned(rows: Sequence[Sequence[str]]) -> Callable[[Sequence[str]], None]:
    """A function that prints one of `rows`, a line each, its cells below those of the others."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def show(row: Sequence[str]) -> None:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )

    return show


def _cell(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    return number(value) if isinstance(value, int | float) else str(value)


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr; yields `advance(steps=1, text='')`. Silent where stderr is no
    terminal.

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
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task(description, total=total, text="")

        def advance(steps: int = 1, text: str = "") -> None:
            bar.update(task, advance=steps, text=text)

        yield advance
