"""The parts of a section. All text is text: the template escapes it, and only charts bring markup of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from markupsafe import Markup

from toolkit.files.fit import HeldOutError
from toolkit.files.tuning import Value
from toolkit.units import number, percent, seconds


@dataclass(frozen=True, slots=True)
class Judged:
    """A value that was held against a limit. The page says 'kept' or 'broken' in words and in colour."""

    text: str
    kept: bool

    @property
    def word(self) -> str:
        return "kept" if self.kept else "broken"


Cell = str | int | float | bool | Judged | None


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart and what it shows."""

    svg: Markup
    caption: str


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers are rounded for reading and go right. A folded table shows its caption until it is opened."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    folded: bool = True

    @property
    def right(self) -> list[bool]:
        """Which columns hold numbers only."""
        return [
            all(isinstance(row[index], int | float) or row[index] in ("", None) for row in self.rows)
            for index in range(len(self.columns))
        ]

    @property
    def cells(self) -> list[list[str | Judged]]:
        """The cells as the page shows them."""
        return [[cell if isinstance(cell, Judged) else _text(cell) for cell in row] for row in self.rows]


@dataclass(frozen=True, slots=True)
class Badge:
    """A section's conclusion in one sentence. 'open': nothing decides it yet."""

    state: Literal["kept", "broken", "open"]
    text: str


@dataclass(slots=True)
class Section:
    """A heading, what it says, and where nothing is there yet, the command that makes it.

    `facts` are pairs of a name and what it is; a fact that is a command is one of `commands`, pairs as well.
    """

    key: str
    title: str
    lead: str
    lines: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    command: str = ""
    badge: Badge | None = None
    facts: list[tuple[str, str]] = field(default_factory=list)
    commands: list[tuple[str, str]] = field(default_factory=list)


def missing(key: str, title: str, lead: str, command: str, why: str = "") -> Section:
    """A section without content."""
    return Section(key, title, lead, lines=[why] if why else [], command=command)


def error_cells(error: HeldOutError) -> tuple[str, str, str, int]:
    """Median, 95th percentile and worst in percent, and of how many points."""
    shares = (error.median_percent, error.p95_percent, error.worst_percent)
    median, high, worst = (f"{share:.1f} %" for share in shares)
    return median, high, worst, error.points


def error_cell(error: float | None) -> str | None:
    """A prediction's error with its sign; None where it has none."""
    return None if error is None else percent(error)


def word(value: Value) -> str:
    """A parameter's value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else number(value)


def metric_name(key: str) -> str:
    """A metric or a limit for reading: 'TTFT p99' for `ttft_p99_s`. A name that is not known stays as it is."""
    if key in METRICS:
        return METRICS[key]
    metric, _, rest = key.partition("_")
    if metric in LATENCIES and rest.endswith("_s"):
        return f"{metric.upper()} {rest.removesuffix('_s')}"
    return key


def quantity(key: str, value: float) -> str:
    """A metric's value with its unit, which the end of its name tells."""
    for end, form in UNITS.items():
        if key.endswith(end):
            return form(value)
    return number(value)


LATENCIES = ("ttft", "tpot", "itl", "mtpot", "e2e")
METRICS = {
    "goodput_rps": "goodput",
    "throughput_rps": "throughput",
    "sla_attainment_percent": "requests within every target",
    "sla_attainment_lower_percent": "requests within every target, at least",
    "oom_percent": "batches out of memory",
    "evicted_percent": "evictions per 100 requests",
}
UNITS = {
    "_tokens_per_s": lambda value: f"{number(value)} tokens/s",
    "_rps": lambda value: f"{number(value)} requests/s",
    "_percent": lambda value: f"{number(value)} %",
    "_s": seconds,
}


def _text(cell: str | float | bool | None) -> str:
    if isinstance(cell, bool) or cell is None:
        return {True: "yes", False: "no", None: "–"}[cell]
    return number(cell) if isinstance(cell, int | float) else cell
