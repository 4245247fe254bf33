"""Makes the drawings of the pages: `make reference`.

    python -m docs.make_pictures

The diagrams are drawn from the text here, the curve from `docs/pictures/online-rebatch.json`, the
routers from a simulation. A drawing follows the reader's light or dark scheme, and has a background
of its own, so that it is legible on any page. The charts are made as those of `llmctl report`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median

from toolkit.report.parts import ChartSeries, chart

HERE = Path(__file__).parent / "pictures"
STYLE = """\
svg { --ground: #fff; --text: #18222c; --dim: #55636f; --line: #d8dfe5; --panel: #f4f6f8;
  --s0: #0b6e4f; --s1: #1f5fbf; color-scheme: light dark; font-family: system-ui, sans-serif; }
@media (prefers-color-scheme: dark) {
  svg { --ground: #0e1316; --text: #e4ebf0; --dim: #9cadb9; --line: #2b363e; --panel: #161d22;
    --s0: #4cc38a; --s1: #79b8ff; }
}
.ground { fill: var(--ground); } text { font-size: 11px; fill: var(--dim); }
.name { fill: var(--text); }
.box { fill: var(--panel); stroke: var(--line); } .own { stroke: var(--s0); }
.big { font-size: 13px; font-weight: 600; fill: var(--text); }
.arrow { stroke: var(--dim); fill: none; } .head { fill: var(--dim); }
.grid { stroke: var(--line); fill: none; } .rule { stroke: var(--dim); stroke-dasharray: 5 4; }
.line { fill: none; stroke-width: 1.8; } .hit { fill: none; }
circle.s0, rect.s0 { fill: var(--s0); } circle.s1, rect.s1 { fill: var(--s1); }
circle { fill-opacity: .75; }
path.s0 { stroke: var(--s0); } path.s1 { stroke: var(--s1); }
"""
MARGIN = 12


def picture(inner: str, width: float, height: float, label: str) -> str:
    """A whole SVG file: the shapes in `inner`, in a box of this size, with a margin around it."""
    box = f"{-MARGIN} {-MARGIN} {width + 2 * MARGIN:g} {height + 2 * MARGIN:g}"
    ground = (
        f'<rect class="ground" x="{-MARGIN}" y="{-MARGIN}" width="{width + 2 * MARGIN:g}" '
        f'height="{height + 2 * MARGIN:g}" rx="6"/>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img" '
        f'aria-label="{escape(label)}">\n<style>\n{STYLE}</style>\n{ground}\n{inner}\n</svg>\n'
    )


def charted(drawing: str, label: str) -> str:
    """A chart of the report as a file of its own."""
    size = drawing.split('viewBox="')[1].split('"')[0].split()
    inner = drawing.partition(">")[2].removesuffix("</svg>\n")
    return picture(inner, float(size[2]), float(size[3]), label)


def box(
    x: float, y: float, width: float, title: str, lines: Sequence[str], *, own: bool = False
) -> str:
    """A box with a title and lines of text under it."""
    height = 26 + 15 * len(lines)
    cls = "box own" if own else "box"
    parts = [f'<rect class="{cls}" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>']
    parts.append(f'<text class="big" x="{x + 10}" y="{y + 19}">{escape(title)}</text>')
    for number, line in enumerate(lines):
        parts.append(f'<text x="{x + 10}" y="{y + 36 + 15 * number}">{escape(line)}</text>')
    return "\n".join(parts)


def arrow(points: Sequence[tuple[float, float]], text: str = "") -> str:
    """A line through the points, with a head at the last one and a text over its first part."""
    path = "L".join(f"{x} {y}" for x, y in points)
    (x0, y0), (x1, y1) = points[-2:]
    dx, dy = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
    sides = [(x1 - 7 * dx + way * dy, y1 - 7 * dy + way * dx) for way in (-4, 4)]
    head = " ".join(f"{x},{y}" for x, y in [(x1, y1), *sides])
    parts = [f'<path class="arrow" d="M{path}"/>', f'<polygon class="head" points="{head}"/>']
    if text:
        (ax, ay), (bx, by) = points[:2]
        parts.append(
            f'<text x="{(ax + bx) / 2}" y="{(ay + by) / 2 - 5}" text-anchor="middle">'
            f"{escape(text)}</text>"
        )
    return "\n".join(parts)


PIPELINE = [  # each file, two lines about it, and the command that makes it
    ("recipe.yaml", ["model, GPU,", "targets"], ""),
    ("profile.json", ["times and memory,", "on the device"], "profile"),
    ("fit.json", ["laws, with", "their errors"], "fit"),
    ("tuning.json", ["the best settings,", "and the verdict"], "tune"),
    ("plan.json", ["every value", "explained"], "render"),
    ("a server", ["OpenAI's API"], "serve"),
]


def pipeline() -> str:
    width, gap, parts = 128, 46, []
    for number, (title, lines, command) in enumerate(PIPELINE):
        x = number * (width + gap)
        parts.append(box(x, 18, width, title, lines, own=number == len(PIPELINE) - 1))
        if command:
            parts.append(arrow([(x - gap, 46), (x, 46)], command))
    tuning, server = 3 * (width + gap) + width / 2, 5 * (width + gap) + width / 2
    lines = ["the server's scheduler", "on a virtual clock"]
    parts.append(box(tuning - 82, 128, 164, "simulator", lines, own=True))
    parts.append(arrow([(tuning, 128), (tuning, 74)]))
    parts.append(box(tuning - 300, 128, 150, "a trace", ["of your traffic:", "times and lengths"]))
    parts.append(arrow([(tuning - 150, 154), (tuning - 82, 154)]))
    parts.append(box(server - 94, 128, 158, "bench", ["measured beside", "predicted"]))
    parts.append(arrow([(tuning + 82, 154), (server - 94, 154)], "prediction"))
    parts.append(arrow([(server, 128), (server, 59)]))
    label = "The pipeline: recipe, profile, fit, tuning, plan, server; tune uses a simulator"
    return picture("\n".join(parts), 6 * width + 5 * gap, 184, label)


REQUEST = [  # where a request is, and what happens there
    ("front", ["checks the request,", "counts its tokens"]),
    ("pool", ["the job waits"]),
    ("policy", ["route: to a worker", "plan: a batch"]),
    ("worker's queue", ["batches, in order"]),
    ("worker", ["prefill, then steps:", "a slice, or a round"]),
]


def request() -> str:
    width, gap, parts = 138, 40, []
    for number, (title, lines) in enumerate(REQUEST):
        x = number * (width + gap)
        parts.append(box(x, 40, width, title, lines, own=title == "policy"))
        if number:
            parts.append(arrow([(x - gap, 66), (x, 66)]))
    right, left = 4 * (width + gap) + width / 2, (width + gap) + width / 2
    parts.append(arrow([(right, 96), (right, 140), (left, 140), (left, 81)]))
    parts.append(
        f'<text x="{(right + left) / 2}" y="134" text-anchor="middle">not ended, failed, or the '
        "worker was lost: back to the pool, tokens kept</text>"
    )
    parts.append(arrow([(right, 40), (right, 14), (width / 2, 14), (width / 2, 40)]))
    parts.append(
        f'<text x="{(right + width / 2) / 2}" y="8" text-anchor="middle">'
        "tokens, as they come</text>"
    )
    label = "The life of a request: front, pool, policy, a worker's queue, worker, and back"
    return picture("\n".join(parts), 5 * width + 4 * gap, 150, label)


def predicted() -> str:
    """Goodput over load: measured runs, and the medians of what was predicted before them."""
    runs = json.loads((HERE / "online-rebatch.json").read_text(encoding="utf-8"))["runs"]
    loads = sorted({run["load_percent"] for run in runs})
    medians = [
        (load, median(run["goodput_rps"][1] for run in runs if run["load_percent"] == load), "")
        for load in loads
    ]
    measured = ChartSeries(
        "measured, three runs each",
        [(run["load_percent"], run["goodput_rps"][0], "") for run in runs],
        "marks",
    )
    line = ChartSeries("predicted before, median", medians, "line")
    drawn = chart("load, % of capacity", "goodput, requests/s", [measured, line])
    return charted(drawn, "Goodput over load: measured runs, and what was predicted before them")


def main() -> None:
    for draw in (pipeline, request, predicted):
        path = HERE / f"{draw.__name__}.svg"
        path.write_text(draw(), encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
