"""Plots: for the terminal as plain text (bars, curves of one letter each, and points), and for
`llmctl compare --png` with matplotlib, an extra: `pip install 'llmctl[plot]'`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from toolkit.cli.output import WIDTH, number, shows_unicode
from toolkit.errors import InputError

EIGHTHS = " ▏▎▍▌▋▊▉"
ROWS, COLUMNS = 12, 60
Curve = tuple[Sequence[float], Sequence[float]]  # x ascending, y


def blocks() -> bool:
    """Whether stdout shows block characters: a terminal that supports Unicode. Otherwise bars are
    of '#'.
    """
    return sys.stdout.isatty() and shows_unicode()


def bars(values: Mapping[str, float], *, unicode: bool) -> list[str]:
    """A line per value: its name, a bar as long as its share of the largest, the value."""
    names = max(len(name) for name in values)
    figures = {name: number(value) for name, value in values.items()}
    room = WIDTH - names - max(len(figure) for figure in figures.values()) - 3
    most = max(*values.values(), 0.0) or 1.0
    return [
        f" {name:<{names}} {_bar(value / most, room, unicode=unicode)} {figures[name]}"
        for name, value in values.items()
    ]


def _bar(share: float, room: int, *, unicode: bool) -> str:
    if not unicode:
        return "#" * round(share * room)
    whole, rest = divmod(round(share * room * len(EIGHTHS)), len(EIGHTHS))
    return "█" * whole + EIGHTHS[rest].strip()


def chart(curves: Mapping[str, Curve], *, x_name: str, log_x: bool = False) -> list[str]:
    """Curves over a common axis, linear between their points; where two meet, the first is drawn.

    With `log_x` equal distances are equal factors, and points at x <= 0 are left out.
    """
    import numpy as np

    scale = np.log if log_x else np.asarray
    kept = {name: _above_zero(curve) if log_x else curve for name, curve in curves.items()}
    kept = {name: (xs, ys) for name, (xs, ys) in kept.items() if len(xs)}
    if not kept:
        return []
    low, high = min(xs[0] for xs, _ in kept.values()), max(xs[-1] for xs, _ in kept.values())
    top = max(max(ys) for _, ys in kept.values()) or 1.0
    grid = np.linspace(scale(low), scale(high), COLUMNS)
    canvas = [[" "] * COLUMNS for _ in range(ROWS)]
    for letter, (xs, ys) in zip(_letters(kept), kept.values(), strict=True):
        places = scale(np.asarray(xs, dtype=float))
        heights = np.interp(grid, places, ys, left=np.nan, right=np.nan)
        for column, height in enumerate(heights):
            if not np.isnan(height):
                row = ROWS - 1 - round(float(height) / top * (ROWS - 1))
                canvas[row][column] = letter if canvas[row][column] == " " else canvas[row][column]
    return [*_framed(canvas, top), _axis(low, high, x_name), *_legend(kept)]


@dataclass(slots=True, frozen=True)
class PlotPoint:
    """A point, and the character that marks it. Later points are drawn over earlier ones."""

    x: float
    y: float
    mark: str


def scatter(points: Sequence[PlotPoint], *, x_name: str) -> list[str]:
    """Points; both axes run from the least value to the greatest, and x is logarithmic if all x are
    positive.
    """
    if not points:
        return []
    xs, ys = [point.x for point in points], [point.y for point in points]
    along = math.log if min(xs) > 0 else float
    canvas = [[" "] * COLUMNS for _ in range(ROWS)]
    for point in points:
        column = _place(along(point.x), along(min(xs)), along(max(xs)), COLUMNS)
        canvas[ROWS - 1 - _place(point.y, min(ys), max(ys), ROWS)][column] = point.mark
    return [*_framed(canvas, max(ys), number(min(ys))), _axis(min(xs), max(xs), x_name)]


def _place(value: float, low: float, high: float, cells: int) -> int:
    """The cell of `value` where `low` is the first and `high` the last."""
    return round((value - low) / (high - low) * (cells - 1)) if high > low else 0


def _above_zero(curve: Curve) -> Curve:
    pairs = [(x, y) for x, y in zip(*curve, strict=True) if x > 0]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _letters(names: Mapping[str, Curve]) -> str:
    return (ascii_lowercase * (len(names) // len(ascii_lowercase) + 1))[: len(names)]


def _framed(canvas: Sequence[Sequence[str]], top: float, bottom: str = "0") -> list[str]:
    labels = {0: number(top), len(canvas) - 1: bottom}
    return [f"{labels.get(k, ''):>8} |{''.join(row)}".rstrip() for k, row in enumerate(canvas)] + [
        " " * 9 + "+" + "-" * COLUMNS
    ]


def _axis(low: float, high: float, name: str) -> str:
    left, right = number(low), number(high)
    return " " * 10 + left + name.center(COLUMNS - len(left) - len(right)) + right


def _legend(names: Mapping[str, Curve]) -> list[str]:
    """Letters and names, as many per line as fit."""
    lines = [" " * 9]
    for letter, name in zip(_letters(names), names, strict=True):
        word = f" {letter} {name} "
        if len(lines[-1]) + len(word) > WIDTH:
            lines.append(" " * 9)
        lines[-1] += word
    return [line.rstrip() for line in lines]


@dataclass(frozen=True, slots=True)
class FigurePanel:
    """A panel with bars or curves, by name."""

    title: str
    bars: Mapping[str, float] | None = None
    curves: Mapping[str, Curve] | None = None
    x_name: str = ""
    log_x: bool = False


def require_matplotlib() -> None:
    """`InputError` with the remedy where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError(
            "--png needs matplotlib, which is not installed", "pip install 'llmctl[plot]'"
        ) from None


def draw(panels: Sequence[FigurePanel], path: Path) -> None:
    """Write the panels side by side as a PNG. `InputError` where the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from toolkit.files.io import write_bytes

    figure = Figure(figsize=(6.4 * len(panels), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_panel(axes, panel)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_bytes(path, picture.getvalue())


def _draw_panel(axes: Any, panel: FigurePanel) -> None:
    axes.set_title(panel.title)
    if panel.bars is not None:
        axes.barh(list(panel.bars), list(panel.bars.values()))
        axes.invert_yaxis()  # the first on top
        return
    for name, (xs, ys) in (panel.curves or {}).items():
        axes.plot(xs, ys, label=name, marker="o" if len(xs) < 30 else None)
    axes.set_xlabel(panel.x_name)
    if panel.log_x:
        axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.legend()
