"""A sheet and its parts: tables, facts, badges, words for metrics, and small SVG charts.

Text is plain text, which the template escapes; only charts are markup. They are built from XML
elements, so no text can become markup. They draw points and lines on two axes, without knowing what
the numbers mean. Colours and strokes are CSS classes that the page's style sets. A point has a
`<title>`, which browsers show under the pointer without any script. Bars are drawn by the template.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal
from xml.etree import ElementTree

from markupsafe import Markup

from toolkit.units import number, seconds


@dataclass(frozen=True, slots=True)
class Judged:
    """A value that was compared with a limit; shown as 'kept' or 'broken', in words and colour."""

    text: str
    kept: bool

    def __str__(self) -> str:
        return self.text

    @property
    def word(self) -> str:
        return "kept" if self.kept else "broken"


class MetricKey(str):
    """A metric or a limit by its key; the page shows its name for reading."""

    __slots__ = ()


Cell = str | int | float | bool | Judged | None


@dataclass(frozen=True, slots=True)
class Bar:
    """A value as the template draws it; `width` is a percentage of the widest bar."""

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
    def heads(self) -> list[str]:
        """The names of the columns."""
        return [name.lstrip("<>") for name in self.columns]

    @property
    def right(self) -> list[bool]:
        """For each column, whether it holds only numbers."""
        columns = [[row[index] for row in self.rows] for index in range(len(self.columns))]
        return [
            all(isinstance(cell, int | float) or cell in ("", None) for cell in cells)
            for cells in columns
        ]

    @property
    def cells(self) -> list[list[str | Judged]]:
        """The cells as the page shows them."""

        def shown(cell: Cell) -> str | Judged:
            if isinstance(cell, bool) or cell is None:
                return {True: "yes", False: "no", None: "–"}[cell]
            if isinstance(cell, MetricKey):
                return metric_name(cell)
            return number(cell) if isinstance(cell, int | float) else cell

        return [[shown(cell) for cell in row[: len(self.columns)]] for row in self.rows]


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
    tables and the lines. `command` makes the content where that is missing.

    `facts` are pairs of a name and a text, `commands` pairs of a name and a command. The page omits
    figures without a chart.
    """

    key: str
    lead: str
    lines: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    command: str = ""
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

Element = ElementTree.Element


ChartPoint = tuple[float, float, str]  # x, y, and what it is; '': it shows its two values


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """Points of one kind. `name` is for the legend; the index of the series decides the colour."""

    name: str
    points: Sequence[ChartPoint]
    kind: Literal["points", "line", "marks"] = "points"  # marks: larger points


@dataclass(slots=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float
    ticks: list[float]

    def place(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def chart(
    x_name: str,
    y_name: str,
    series: Sequence[ChartSeries],
    *,
    level: float | None = None,
) -> Markup:
    """Draw a chart; `level` adds a horizontal line."""
    drawn = [
        (one, one.points[:: -(-len(one.points) // MAX_POINTS)]) for one in series if one.points
    ]
    xs = [x for _, points in drawn for x, _, _ in points]
    ys = [y for _, points in drawn for _, y, _ in points]
    if not xs:
        return Markup()
    if level is not None:
        ys = [*ys, level]
    x = _scale(xs, LEFT, WIDTH - RIGHT)
    y = _scale(ys, HEIGHT - BOTTOM, TOP)
    root = _root(HEIGHT + 18 * (len(drawn) > 1), f"{y_name} over {x_name}")
    _grid(root, x_name, y_name, x, y)
    if level is not None:
        _line(root, [(x.low, level), (x.high, level)], x, y, "rule")
    for index, (one, points) in enumerate(drawn):
        cls = f"s{index % 4}"
        radius = {"marks": 5.0, "points": 2.6, "line": 4.0}[one.kind]
        if one.kind == "line":
            _line(root, [(at_x, at_y) for at_x, at_y, _ in points], x, y, cls)
            cls = "hit"  # invisible points that show their title under the pointer
        for at_x, at_y, label in points:
            point = _add(root, "circle", cx=x.place(at_x), cy=y.place(at_y), r=radius, cls=cls)
            values = f"{x_name}: {number(at_x)}; {y_name}: {number(at_y)}"
            _add(point, "title", text=f"{one.name}: {label or values}")
    left = float(LEFT)  # of the legend's next name
    for index, (one, _) in enumerate(drawn if len(drawn) > 1 else []):
        _add(root, "circle", cx=left, cy=HEIGHT + 8, r=4, cls=f"s{index % 4}")
        _add(root, "text", x=left + 8, y=HEIGHT + 12, text=one.name)
        left += 22 + 6.2 * len(one.name)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def bars(values: Mapping[str, float], most: float, beyond: str) -> list[Bar]:
    """Return a bar for each value, in percent; one of more than `most`, to either side, is red and
    has the word `beyond`.
    """
    widest = max([abs(value) for value in values.values()], default=0.0) or 1.0
    drawn = []
    for name, value in values.items():
        large = abs(value) > most
        text = f"{number(value)} %, {beyond}" if large else f"{number(value)} %"
        drawn.append(Bar(name, text, round(100.0 * abs(value) / widest, 1), large=large))
    return drawn


def _scale(values: Sequence[float], start: float, end: float) -> _Scale:
    low = min(*values, 0.0)
    high = max(*values, 0.0)
    rough = (high - low or 1.0) / 5  # the step is 1, 2 or 5 times a power of ten, not below it
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * times for times in (1, 2, 5, 10) if size * times >= rough * (1 - 1e-9))
    first = math.floor(low / step)
    last = math.ceil(high / step)
    last = max(last, first + 1)
    ticks = [round(step * k, 12) for k in range(first, last + 1)]
    return _Scale(ticks[0], ticks[-1], start, end, ticks)


def _grid(root: Element, x_name: str, y_name: str, x: _Scale, y: _Scale) -> None:
    bottom = HEIGHT - BOTTOM
    right = WIDTH - RIGHT
    for tick in x.ticks:
        at = x.place(tick)
        _add(root, "path", d=f"M{at} {TOP}V{bottom}", cls="grid")
        _add(root, "text", x=at, y=bottom + 15, text=number(tick), anchor="middle")
    for tick in y.ticks:
        at = y.place(tick)
        _add(root, "path", d=f"M{LEFT} {at}H{right}", cls="grid")
        _add(root, "text", x=LEFT - 6, y=at + 4, text=number(tick), anchor="end")
    name = {"anchor": "middle", "cls": "name"}
    _add(root, "text", x=(LEFT + right) / 2, y=HEIGHT - 6, text=x_name, **name)
    middle = (TOP + bottom) / 2
    turned = _add(root, "text", x=13, y=middle, text=y_name, **name)
    turned.set("transform", f"rotate(-90 13 {middle})")


def _line(
    root: Element, points: Sequence[tuple[float, float]], x: _Scale, y: _Scale, cls: str
) -> None:
    text = "L".join(f"{x.place(at_x)} {y.place(at_y)}" for at_x, at_y in points)
    _add(root, "path", d=f"M{text}", cls=f"line {cls}")


def _root(height: float, label: str) -> Element:
    size = {"viewBox": f"0 0 {WIDTH} {height:g}"}
    return Element("svg", size | {"role": "img", "aria-label": label})


def _add(
    parent: Element,
    tag: str,
    *,
    text: str = "",
    cls: str = "",
    anchor: str = "",
    **attributes: object,
) -> Element:
    texts = {
        name: f"{value:g}" if isinstance(value, float) else str(value)
        for name, value in attributes.items()
    }
    texts |= {key: value for key, value in (("class", cls), ("text-anchor", anchor)) if value}
    element = ElementTree.SubElement(parent, tag, texts)
    element.text = text or None
    return element
