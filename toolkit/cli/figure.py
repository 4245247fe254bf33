"""The comparison as a picture, with matplotlib, which is an extra: `pip install 'llmctl[plot]'`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from toolkit.cli.plots import Curve
from toolkit.errors import InputError


@dataclass(frozen=True, slots=True)
class FigurePanel:
    """Bars by name, or curves by name."""

    title: str
    bars: Mapping[str, float] | None = None
    curves: Mapping[str, Curve] | None = None
    x_name: str = ""
    log_x: bool = False


def require_matplotlib() -> None:
    """`InputError` that names the remedy where matplotlib is not installed."""
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
