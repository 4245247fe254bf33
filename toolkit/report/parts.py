"""A sheet and its parts: tables, facts, badges, words for metrics, and small SVG charts.

Text is plain text, which the templates escape; only charts are markup. They draw points and lines
on two axes, without knowing what the numbers mean. Colours and strokes are CSS classes that the
page's style sets. A point has a `<title>`, which browsers show under the pointer without a script.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

from markupsafe import Markup

from toolkit.files.shipped import shipped_templates
from toolkit.units import number, seconds

if TYPE_CHECKING:
    import jinja2


@dataclass(frozen=True, slots=True)
class Judged:
    """A value that was compared with a limit; shown as 'kept' or 'broken', in words and colour."""

    text: str
    kept: bool

    def __str__(self) -> str:
        return self.text


Cell = str | int | float | bool | Judged | None


@dataclass(frozen=True, slots=True)
class Bar:
    """A value as the template draws it; `width` is in percent of the figure's."""

    name: str
    text: str
    width: float
    large: bool


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart, or bars, and what it shows."""

    drawing: Markup | list[Bar]
    caption: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the terminal and of the page. Cells beyond the columns are left out.

    A column's name may begin with '<' or '>' for its alignment in the terminal; otherwise columns
    of numbers are right-aligned. `remark` stands below. The page folds a table to its caption
    unless told otherwise.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    folded: bool = True
    remark: str = ""

    @property
    def right(self) -> list[bool]:
        """For each column, whether it holds only numbers."""
        columns = [[row[index] for row in self.rows] for index in range(len(self.columns))]
        return [all(is_number(cell) or cell in ("", None) for cell in cells) for cells in columns]

    @property
    def cells(self) -> list[list[str | Judged]]:
        """The cells for reading."""

        def shown(cell: Cell) -> str | Judged:
            if isinstance(cell, bool) or cell is None:
                return {True: "yes", False: "no", None: "-"}[cell]
            return number(cell) if isinstance(cell, int | float) else cell

        return [[shown(cell) for cell in row[: len(self.columns)]] for row in self.rows]


def is_number(value: object) -> bool:
    """Return whether it is a number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Badge:
    """A section's conclusion in one sentence. 'open': not known yet."""

    state: Literal["kept", "broken", "open"]
    text: str


TITLES = {  # by key; those of a page in their order there
    "simulation": "The simulation",
    "plan": "The plan",
    "verdict": "The verdict",
    "capacity": "The curves",
    "scaling": "Replicas over time",
    "bench": "The benches",
    "tuning": "The tuning",
    "fit": "The fit",
    "origin": "Where this comes from",
}


@dataclass(slots=True)
class Sheet:
    """What a command found, for the terminal and as a section of the page. The terminal shows the
    tables and the lines.

    `facts` are pairs of a name and a text, `commands` pairs of a name and a command. The page omits
    figures without a chart.
    """

    key: str
    lead: str
    lines: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    badge: Badge | None = None
    facts: list[tuple[str, str]] = field(default_factory=list)
    commands: list[tuple[str, str]] = field(default_factory=list)

    @property
    def title(self) -> str:
        return TITLES[self.key]


def metric_name(key: str) -> str:
    """The name of a metric or limit for reading: 'TTFT p99' for `ttft_p99_s`."""
    if key in METRICS:
        return METRICS[key]
    metric, _, rest = key.partition("_")
    if metric in LATENCIES and rest.endswith("_s"):
        return f"{metric.upper()} {rest.removesuffix('_s')}"
    return key


def quantity(key: str, value: float) -> str:
    """The value of a metric with its unit, which is the end of the metric's name."""
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
    "behind_percent": "behind at the end of the trace",
    "evicted_percent": "evictions per 100 requests",
    "hit_percent": "prompt tokens found in the prefix cache",
}
UNITS = {
    "_tokens_per_s": lambda value: f"{number(value)} tokens/s",
    "_rps": lambda value: f"{number(value)} requests/s",
    "_percent": lambda value: f"{number(value)} %",
    "_s": seconds,
}


# Sizes in the units of the charts' view box.
WIDTH = 420
HEIGHT = 260
# RIGHT holds half of the last tick's number
LEFT = 56
RIGHT = 20
TOP = 12
BOTTOM = 40
MAX_POINTS = 2000  # of a series: more would show nothing new and make the page larger


ChartPoint = tuple[float, float, str]  # x, y, and what else it is


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """Points of one kind. `name` is for the legend; the index of the series decides the colour."""

    name: str
    points: Sequence[ChartPoint]
    kind: Literal["points", "line", "marks"] = "points"  # marks: larger points


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from `start` to `end` in the view box; its ticks go from its lowest value to its
    highest one.
    """

    name: str
    start: int
    end: int
    ticks: list[float]

    def place(self, value: float) -> float:
        """Return where a value is in the view box."""
        low, *_, high = self.ticks
        share = (value - low) / (high - low)
        return round(self.start + share * (self.end - self.start), 1)


@cache
def page_templates() -> jinja2.Environment:
    """Return the templates of pages and charts, which escape every text."""
    import jinja2  # only pages need it, and it would slow every command down

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(shipped_templates()),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["number"] = number
    return environment


def chart(
    x_name: str,
    y_name: str,
    series: Sequence[ChartSeries],
    *,
    level: float | None = None,
) -> Markup:
    """Draw a chart as SVG; `level` adds a horizontal line. '' without points."""
    drawn = [
        replace(one, points=one.points[:: -(-len(one.points) // MAX_POINTS)])
        for one in series
        if one.points
    ]
    if not drawn:
        return Markup()
    xs = [x for one in drawn for x, _, _ in one.points]
    ys = [y for one in drawn for _, y, _ in one.points]
    levels = [] if level is None else [level]
    template = page_templates().get_template("chart.svg.j2")
    text = template.render(
        x=Axis(x_name, LEFT, WIDTH - RIGHT, _ticks(xs)),
        y=Axis(y_name, HEIGHT - BOTTOM, TOP, _ticks([*ys, *levels])),
        series=drawn,
        level=level,
        width=WIDTH,
        height=HEIGHT,
    )
    return Markup(text)


def bars(values: Mapping[str, float], most: float, beyond: str) -> list[Bar]:
    """Return a bar for each value, in percent; one of more than `most`, to either side, is red and
    has the word `beyond`. A bar of `most` fills the width, unless another one is longer.
    """
    lengths = [abs(value) for value in (*values.values(), most)]
    widest = max([length for length in lengths if length < math.inf], default=0.0) or 1.0
    drawn = []
    for name, value in values.items():
        large = abs(value) > most
        text = f"{number(value)} %, {beyond}" if large else f"{number(value)} %"
        drawn.append(Bar(name, text, round(100.0 * abs(value) / widest, 1), large=large))
    return drawn


def _ticks(values: Sequence[float]) -> list[float]:
    """Return round numbers from 0 or below these values to 0 or above them."""
    low = min(*values, 0.0)
    high = max(*values, 0.0)
    rough = (high - low or 1.0) / 5  # the step is 1, 2 or 5 times a power of ten, not below it
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * times for times in (1, 2, 5, 10) if size * times >= rough * (1 - 1e-9))
    first = math.floor(low / step)
    last = max(math.ceil(high / step), first + 1)
    return [round(step * k, 12) for k in range(first, last + 1)]
