"""The scoreboard: predictions beside measurements of others, and beside a peer's.

    python -m benchmarks.public.scoreboard --aiconfigurator DIR --servingsim DIR [--peer FILE] \\
        --json docs/results/data/scoreboard.json

Takes three minutes. DIR are checkouts of ai-dynamo/aiconfigurator and casys-kaist/LLMServingSim;
FILE is what `benchmarks.public.silicon_peer` wrote. It predicts the runs of LLMServingSim
(`benchmarks.public.llmservingsim`), our own windows (`benchmarks.engines.gpu_windows`) and the
measured servers (`benchmarks.public.silicon`), prints their tables, and puts them with --page into
the sections of the page, with --picture into a drawing, and with --extract into the file of a
test. The servers are predicted by a pipeline of its own; `benchmarks.public.product` predicts them
by llmctl's commands, and writes the errors that these quote.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.command import make_parser
from benchmarks.common.results_file import keep
from benchmarks.engines.gpu_windows import FIT, NAME, SPEED, errors_of
from benchmarks.public import llmservingsim, servers, silicon
from benchmarks.public.operators import flat_json
from benchmarks.public.servers import Row
from benchmarks.public.silicon import Board, Compared
from docs.make_pictures import picture
from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.io import read_file
from toolkit.files.shipped import shipped_profiles

KAIST_HEAD = (
    "| run | prediction | makespan | mean TTFT | mean TPOT | mean E2E |\n"
    "|---|---|---:|---:|---:|---:|"
)
PEER_ROWS = ("TTFT Mean", "TPOT Mean", "Latency Mean")
OWN_HEAD = (
    "| requests/s | with | throughput | mean TTFT | mean TPOT | mean E2E |\n"
    "|---:|---|---:|---:|---:|---:|"
)
OWN_SHOWN = ("throughput_rps", "ttft_mean_s", "tpot_mean_s", "e2e_mean_s")


def kaist_table(data: Path) -> str:
    """The runs of LLMServingSim, each predicted from attention at equal and at unequal lengths."""
    lines = [KAIST_HEAD]
    for folder in llmservingsim.runs_of(data):
        name = " ".join(folder.parts[-3:-1])
        try:
            lines += kaist_lines(data, folder)
        except InputError as error:
            lines.append(f"| {name} | not predicted: {error.message.partition(': ')[2]} | | | | |")
        lines.append(peer_line(name, folder.parent / "validation" / "summary.txt"))
    return "\n".join(lines) + "\n"


def kaist_lines(data: Path, folder: Path) -> list[str]:
    """The lines of one run. `InputError` if it is not modelled."""
    case = llmservingsim.read_case(data, folder)
    measured = llmservingsim.metrics(case.measured)
    lines = []
    for unequal in (False, True):
        law = llmservingsim.law_of(data, case, unequal=unequal).law
        result = llmservingsim.predict(case, law)
        predicted = llmservingsim.metrics(result.served)
        errors = [f"{silicon.percent(predicted[key], measured[key]):+.1f} %" for key in measured]
        lengths = "unequal" if unequal else "equal"
        cells = [case.name, f"llmctl, attention at {lengths} lengths", *errors]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def peer_line(name: str, summary: Path) -> str:
    """What LLMServingSim's own simulation of the run was off, by its own summary."""
    found = dict(re.findall(r"(\w+ Mean) .* ([+-][\d.]+)%", summary.read_text(encoding="utf-8")))
    cells = [name, "LLMServingSim", "", *(f"{found[key]} %" for key in PEER_ROWS)]
    return f"| {' | '.join(cells)} |"


def own_table() -> str:
    """Our own windows on an H200."""
    fit = read_file(Fit, shipped_profiles() / NAME / "fit.json")
    lines = [OWN_HEAD]
    for row in (one for one in errors_of(fit) if one["knows"] in (FIT, SPEED)):
        errors = [f"{row['error'][key]:+.1f} %" for key in OWN_SHOWN]
        cells = [f"{row['rate_rps']:g}", row["knows"], *errors]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def put_section(page: Path, name: str, text: str) -> None:
    """Replace the text between the markers of `name` in a page."""
    begin = f"<!-- {name} -->\n"
    end = f"<!-- end of {name} -->\n"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    page.write_text("".join((before, begin, text, end, after)), encoding="utf-8")


# ---- servers ----

HEAD = (
    "| {} | rows | TPOT: median, % | TPOT: p90, % | TPOT: bias, % | TTFT: median, % "
    "| TTFT: p90, % | TTFT: bias, % | peer: rows | peer, TPOT: median, % | peer, TPOT: p90, % "
    "| peer, TTFT: median, % | peer, TTFT: p90, % |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)
SAME_HEAD = (
    "| {} | rows | TPOT: ours, % | ours, p90, % | TPOT: peer's, % | peer's, p90, % "
    "| TTFT: ours, % | TTFT: ours, p90, % | TTFT: peer's, % | TTFT: peer's, p90, % |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)
NOISE_HEAD = (
    "| noise | settings | repeats | TPOT: median, % | TPOT: p90, % | TTFT: median, % "
    "| TTFT: p90, % |\n|---|---:|---:|---:|---:|---:|---:|"
)
REFUSAL_MAX = 90
HOPPER = ("h100_sxm", "h200_sxm")


def tables(board: Board) -> str:
    """What was read, and all errors, as Markdown."""
    found = board.judged
    lines = [
        f"{len(board.rows):,} rows of vLLM without disaggregation, each once. "
        f"{len(board.tenth)} set the constants, {len(found)} are judged, "
        f"{sum(board.reasons.values())} are not predicted:",
        "",
    ]
    lines += [f"- {reason}: {count} rows" for reason, count in board.reasons.most_common()]
    full = [one for one in found if one.ours.full]
    groups = groups_of(found)
    same = {name: group for name, group in groups.items() if ", " not in name}
    same["cache full at some time"] = full
    lines += ["", SAME_HEAD.format("rows that both answer")]
    lines += [same_line(name, group) for name, group in same.items()]
    refused = Counter(refusal(one.peer) for one in found if isinstance(one.peer, str))
    answered = len(found) - sum(refused.values())
    lines += [
        "",
        f"The peer, AIConfigurator {board.peer_version}, answers {answered} rows. Others:",
    ]
    lines += ["", *(f"- {words}: {count} rows" for words, count in refused.most_common())]
    lines += ["", HEAD.format("judged rows")]
    lines += [line(name, group) for name, group in groups.items()]
    lines.append(line("cache full at some time", full))
    settings, tpot, ttft = noise(board.rows)
    cells = ["repeats of a setting", str(settings), str(len(tpot)), spread(tpot), spread(ttft)]
    lines += ["", NOISE_HEAD, f"| {' | '.join(cells)} |"]
    return "\n".join(lines) + "\n"


def groups_of(found: Sequence[Compared]) -> dict[str, list[Compared]]:
    """The lines of the table: each GPU, and on it each model in each precision, version of vLLM
    and number of GPUs.
    """
    lines: dict[str, list[Compared]] = {"all": list(found)}
    for hopper in (True, False):
        own = [one for one in found if (one.row.gpu in HOPPER) == hopper]
        if own:
            lines["H100 and H200" if hopper else "B200 and B300"] = own
    for one in sorted(found, key=lambda one: one.row.group):
        gpu, model, precision, version, ranks = one.row.group
        chip = gpu.partition("_")[0].upper()
        lines.setdefault(f"**{chip}**", []).append(one)
        name = f"{chip}, {model} {precision}, vLLM {version or 'not said'}, TP {ranks}"
        lines.setdefault(name, []).append(one)
    return {name: group for name, group in lines.items() if group}


def line(name: str, group: Sequence[Compared]) -> str:
    """A line of the table: errors of ours, and of the peer where it has an answer."""
    ours = [one.errors() for one in group]
    theirs = [found for one in group if (found := one.peer_errors()) is not None]
    cells = [name, str(len(group))]
    for k in (0, 1):
        signed = [error[k] for error in ours]
        cells.append(f"{spread(signed)} | {np.median(signed):+.1f}")
    cells.append(str(len(theirs)))
    cells += [spread([error[k] for error in theirs]) for k in (0, 1)]
    return f"| {' | '.join(cells)} |"


def same_line(name: str, group: Sequence[Compared]) -> str:
    """A line about the rows that the peer answers."""
    both = [one for one in group if one.peer_errors() is not None]
    cells = [name, str(len(both))]
    for k in (0, 1):
        cells.append(spread([one.errors()[k] for one in both]))
        cells.append(spread([found[k] for one in both if (found := one.peer_errors())]))
    return f"| {' | '.join(cells)} |"


def spread(errors: Sequence[float]) -> str:
    """Median and p90 of their sizes."""
    if not errors:
        return "- | -"
    median, p90 = np.percentile(np.abs(errors), [50, 90])
    return f"{median:.1f} | {p90:.1f}"


def noise(rows: Sequence[Row]) -> tuple[int, list[float], list[float]]:
    """Settings that were measured again, and how far each repeat is off the setting's first
    measurement: of TPOT and of TTFT, in percent.
    """
    first: dict[tuple[object, ...], Row] = {}
    again = set()
    tpot = []
    ttft = []
    for row in rows:
        before = first.setdefault(row.setting, row)
        if before is not row:
            again.add(row.setting)
            tpot.append(abs(silicon.percent(row.tpot_s, before.tpot_s)))
            ttft.append(abs(silicon.percent(row.ttft_s, before.ttft_s)))
    return len(again), tpot, ttft


def refusal(words: str) -> str:
    """What the peer says of a row, without the row's own names and numbers."""
    plain = re.sub(r"/\S+|'[^']*'|\(.*?\)|\d[\d.]*", "", words.partition(". ")[0])
    return " ".join(plain.split())[:REFUSAL_MAX].rstrip(" :,")


def derived(one: Compared) -> list[Any]:
    """A row as the results keep it: its setting, and the errors of TPOT and TTFT, ours and the
    peer's. What was measured stays with its source.
    """
    errors = [round(error, 1) for error in one.errors()]
    peer = [round(error, 1) for error in one.peer_errors() or ()]
    return [one.row.name, *errors, one.ours.full, *peer]


# ---- the drawing ----

SIDE = 300.0  # of a panel, in pixels
GAP = 60.0
LEFT = 46.0
BOTTOM = 34.0


def drawing(found: Sequence[Compared]) -> str:
    """Predicted against measured on logarithmic axes: TPOT, and TTFT."""
    tpot = [(1e3 * one.row.tpot_s, 1e3 * one.ours.tpot_s, is_dense(one)) for one in found]
    ttft = [(one.row.ttft_s, one.ours.ttft_s, is_dense(one)) for one in found]
    parts = [panel(tpot, LEFT, "TPOT, ms"), panel(ttft, LEFT + SIDE + GAP + LEFT, "TTFT, s")]
    label = "Predicted against measured, TPOT and TTFT, each dot a server"
    return picture("\n".join(parts), 2 * (LEFT + SIDE) + GAP, SIDE + BOTTOM, label)


def is_dense(one: Compared) -> bool:
    """Whether the model has no experts."""
    return "Llama" in one.row.model or one.row.model == "Qwen3-32B"


def panel(points: Sequence[tuple[float, float, bool]], left: float, name: str) -> str:
    """One square, with decades as its grid."""
    values = [value for point in points for value in point[:2]]
    low = math.log10(min(values)) - 0.05
    high = math.log10(max(values)) + 0.05

    def place(value: float) -> float:
        return SIDE * (math.log10(value) - low) / (high - low)

    parts = [f'<rect class="box" x="{left}" y="0" width="{SIDE}" height="{SIDE}"/>']
    for decade in range(math.ceil(low), math.floor(high) + 1):
        for times in (1, 2, 5):
            value = times * 10.0**decade
            if not low <= math.log10(value) <= high:
                continue
            at = place(value)
            x = left + at
            y = SIDE - at
            parts.append(f'<path class="grid" d="M{x:.1f} 0V{SIDE}M{left} {y:.1f}h{SIDE}"/>')
            parts.append(f'<text x="{x:.1f}" y="{SIDE + 14}" text-anchor="middle">{value:g}</text>')
            parts.append(f'<text x="{left - 5}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    parts.append(f'<path class="rule" d="M{left} {SIDE}L{left + SIDE} 0"/>')
    for dense, color in ((True, "s0"), (False, "s1")):
        dots = "".join(
            f"M{left + place(measured):.1f} {SIDE - place(predicted):.1f}h0"
            for measured, predicted, own in points
            if own == dense
        )
        style = "fill:none;stroke-width:3.4;stroke-linecap:round;stroke-opacity:.65"
        parts.append(f'<path class="{color}" style="{style}" d="{dots}"/>')
    middle = left + SIDE / 2
    parts.append(f'<text class="name" x="{left + 8}" y="18">{name}, predicted</text>')
    parts.append(
        f'<text class="name" x="{middle}" y="{SIDE + 30}" text-anchor="middle">measured</text>'
    )
    for y, word, color in ((SIDE - 24, "dense", "s0"), (SIDE - 9, "experts", "s1")):
        place_of = f'x="{left + SIDE - 8}" y="{y}" text-anchor="end"'
        parts.append(f'<text {place_of} style="fill:var(--{color})">{word}</text>')
    return "\n".join(parts)


# ---- what a test predicts ----

EXTRACT_ROWS = 80


def extract(data: Path, board: Board) -> str:
    """Judged rows, evenly over all, with the shapes of their models, for a test: the medians of
    their errors may not get worse unseen.
    """
    ordered = sorted(board.judged, key=lambda one: (one.row.setting, one.row.name).__repr__())
    places = np.linspace(0, len(ordered) - 1, EXTRACT_ROWS).round().astype(int)
    chosen = [ordered[place] for place in places]
    shapes = {
        f"{row.model} {row.precision}": asdict(servers.shapes_of(data, row.model, row.precision))
        for row in (one.row for one in chosen)
    }
    content = {
        "source": "ai-dynamo/aiconfigurator, systems/silicon_sample.csv at 095f58a (measured by "
        "InferenceX and NVIDIA)",
        "licence": "Apache-2.0, Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES",
        "tpot_percent": silicon.median_error(chosen, 0),
        "ttft_percent": silicon.median_error(chosen, 1),
        "columns": [each.name for each in fields(servers.Row)],
        "rows": [list(asdict(one.row).values()) for one in chosen],
        "shapes": shapes,
    }
    return flat_json(content)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--aiconfigurator", type=Path, required=True, metavar="DIR")
    parser.add_argument("--servingsim", type=Path, required=True, metavar="DIR")
    parser.add_argument("--peer", type=Path, metavar="FILE", help="of silicon_peer")
    parser.add_argument("--page", type=Path, metavar="FILE", help="replace its sections")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="an SVG")
    parser.add_argument("--extract", type=Path, metavar="FILE", help="what a test predicts")
    options = parser.parse_args()
    peer = silicon.read_peer(options.peer)
    board = silicon.board_of(options.aiconfigurator, silicon.shipped_constants(), peer)
    sections = {
        "kaist": ("Runs, request by request", kaist_table(options.servingsim)),
        "own": ("Our own windows", own_table()),
        "silicon": ("Servers", tables(board)),
    }
    for name, (title, text) in sections.items():
        print(f"{title}\n\n{text}")
        if options.page:
            put_section(options.page, name, text)
    keep("rows", [derived(one) for one in board.judged])
    if options.picture:
        options.picture.write_text(drawing(board.judged), encoding="utf-8")
    if options.extract:
        options.extract.write_text(extract(options.aiconfigurator, board), encoding="utf-8")


if __name__ == "__main__":
    main()
