"""A scatter of points in plain text: the same in a terminal, in a file and in an e-mail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.cli.output import WIDTH, number

ROWS = 14


@dataclass(slots=True, frozen=True)
class Point:
    """Where, and the one character that marks it. Later points are drawn over earlier ones."""

    x: float
    y: float
    mark: str


def scatter(points: Sequence[Point], x_label: str, y_label: str) -> list[str]:
    """Lines of at most 80 columns, y upwards, both axes from the least value to the greatest; [] for no points.

    x is a latency, which spans decades: its axis is logarithmic where all are positive.
    """
    if not points:
        return []
    xs, ys = [point.x for point in points], [point.y for point in points]
    along = math.log if min(xs) > 0 else float
    start, end = along(min(xs)), along(max(xs))
    ends = [number(max(ys)), number(min(ys))]
    margin = max(map(len, ends)) + 1
    columns = WIDTH - margin - 2
    grid = [[" "] * columns for _ in range(ROWS)]
    for point in points:
        row = _place(point.y, min(ys), max(ys), ROWS)
        grid[ROWS - 1 - row][_place(along(point.x), start, end, columns)] = point.mark
    labels = [ends[0], *[""] * (ROWS - 2), ends[1]]
    body = [f"{label:>{margin - 1}} |{''.join(cells)}".rstrip() for label, cells in zip(labels, grid, strict=True)]
    low, high = number(min(xs)), number(max(xs))
    axis = f"{low}{x_label:^{columns - len(low) - len(high)}}{high}"
    return [y_label, *body, f"{'':>{margin}}+{'-' * columns}", f"{'':>{margin + 1}}{axis}"]


def _place(value: float, low: float, high: float, cells: int) -> int:
    """The cell of `value` where `low` is the first and `high` the last."""
    return round((value - low) / (high - low) * (cells - 1)) if high > low else 0
