"""The parts of a section. All text is text: the template escapes it, and only charts bring markup of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from toolkit.files.fit import HeldOutError
from toolkit.files.limits import Limit
from toolkit.files.tuning import Value
from toolkit.units import number

Cell = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart and what it shows."""

    svg: Markup
    caption: str


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text; numbers are rounded for reading and go right."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    @property
    def right(self) -> list[bool]:
        """Which columns hold numbers only."""
        return [
            all(isinstance(row[index], int | float) or row[index] in ("", None) for row in self.rows)
            for index in range(len(self.columns))
        ]

    @property
    def texts(self) -> list[list[str]]:
        return [[_text(cell) for cell in row] for row in self.rows]


@dataclass(slots=True)
class Section:
    """A heading, what it says, and where nothing is there yet, the command that makes it."""

    key: str
    title: str
    lead: str
    lines: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    command: str = ""


def missing(key: str, title: str, lead: str, command: str, why: str = "") -> Section:
    """A section without content."""
    return Section(key, title, lead, lines=[why] if why else [], command=command)


def error_cells(error: HeldOutError) -> tuple[str, str, str, int]:
    """Median, 95th percentile and worst in percent, and of how many points."""
    shares = (error.median_percent, error.p95_percent, error.worst_percent)
    median, high, worst = (f"{share:.1f} %" for share in shares)
    return median, high, worst, error.points


def limits_table(limits: Sequence[Limit], caption: str) -> Table:
    """Each limit, the value that is predicted beside it, and whether that keeps it."""
    rows = [(one.name, one.allowed(), one.told(), one.kept) for one in limits]
    return Table(caption, ["limit", "allowed", "predicted", "kept"], rows)


def word(value: Value) -> str:
    """A parameter's value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else number(value)


def _text(cell: Cell) -> str:
    if isinstance(cell, bool) or cell is None:
        return {True: "yes", False: "no", None: "–"}[cell]
    return number(cell) if isinstance(cell, int | float) else cell
