"""What commands print: results on stdout, progress and notes on stderr, so that `--json` output is one JSON object.

Everything fits 80 columns. Numbers are rounded for reading here and nowhere else; the files keep every digit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

from toolkit.units import number, percent, seconds, size

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["JUSTIFY", "WIDTH", "emit", "note", "number", "percent", "progress", "seconds", "size", "table"]

WIDTH = 80
JUSTIFY = {"<": "left", ">": "right", "^": "center"}


def emit(as_json: bool, result: BaseModel | Mapping[str, Any] | Any, render: Callable[[], None]) -> None:
    """Print `result` as one JSON object, or let `render` print it for people.

    `result` is a pydantic model, a dataclass or a mapping, of plain values or of more of these.
    """
    if not as_json:
        render()
        return
    print(json.dumps(result, default=_plain, ensure_ascii=False, allow_nan=False))


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
    """Print rows under `columns`, at most 80 columns wide; long cells wrap.

    A column's name may start with '<' or '>' for its alignment; without, columns of numbers go right, others left.
    Cells are text as it is (no markup); floats are rounded by `number`. The first column names things and stays whole.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=False)
    console.width = min(console.width, WIDTH)
    if title:  # as a line of its own: rich would wrap a table's title to the table's width
        console.print(Text(f"\n{title}", style="bold"))
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        right = all(isinstance(row[index], int | float) for row in rows)
        align = name[0] if name[:1] in JUSTIFY else "><"[not right]
        whole = index == 0 and all(len(str(row[0])) <= WIDTH // 2 for row in rows)
        view.add_column(name.lstrip("<>^"), justify=JUSTIFY[align], overflow="fold", no_wrap=whole)  # type: ignore[arg-type]
    for row in rows:
        view.add_row(*(Text(_cell(value)) for value in row))
    console.print(view)


def _cell(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    return number(value) if isinstance(value, int | float) else str(value)


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr; yields `advance(steps=1, text='')`. Silent where stderr is no terminal.

    with progress("measuring", len(points)) as advance:
        for point in points:
            advance(text=f"prefill N={point.batch_size}")
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}", markup=False),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(description, total=total, text="")

        def advance(steps: int = 1, text: str = "") -> None:
            bar.update(task, advance=steps, text=text)

        yield advance
