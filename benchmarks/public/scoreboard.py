"""The scoreboard: servers and runs that others measured, predicted by the product.

    python -m benchmarks.public.scoreboard --aiconfigurator AIC --servingsim SIM --peer FILE \\
        --left-out FILE --page docs/results/scoreboard.md --picture docs/pictures/scoreboard.svg \\
        --errors toolkit/estimators/elsewhere.json --json docs/results/data/scoreboard.json

Takes twenty minutes on two shared cores; --journal FILE keeps every answer, and goes on from there.
AIC is a checkout of ai-dynamo/aiconfigurator (Apache-2.0, NVIDIA), SIM one of
casys-kaist/LLMServingSim (MIT). `benchmarks.public.silicon_peer` makes the file of --peer,
`benchmarks.public.calibrate` that of --left-out.

Each judged row is one question to the product (`benchmarks.public.asking`). A row that it refuses
is counted by reason. --typed N types the commands for N drawn rows instead, and compares: the same
times come out, to the last digit.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.command import make_parser
from benchmarks.common.results_file import keep, markdown
from benchmarks.engines.gpu_windows import FIT, NAME, SPEED, errors_of
from benchmarks.public import llmservingsim
from benchmarks.public.asking import Checkpoint, Fits, Question, Times, checkpoint_of
from benchmarks.public.operators import family_of
from benchmarks.public.servers import MS, SET_NONE, Row, split_rows
from docs.make_pictures import picture
from toolkit.errors import InputError
from toolkit.estimators.gpu_operators import TABLE, EngineConstants
from toolkit.files.fit import Fit
from toolkit.files.io import digest, read_file
from toolkit.files.shipped import shipped_profiles

# ---- answers ----


@dataclass(frozen=True, slots=True)
class Answer:
    """What the product says of a row: how far its mean TPOT and TTFT are off, in percent and
    signed, or why it says nothing. What was measured stays with its source.

    Attributes:
        gpu, ..., concurrency: `Row.setting`, which repeats of a measurement share.
        experts: whether the model has experts.
        full: whether its cache was full at some time.
        tpot_left_percent, ttft_left_percent: with constants that this model did not set; NaN:
            it set none.
        peer_tpot_percent, peer_ttft_percent: of the peer; NaN: it has no answer.
        refused: why there is no prediction; "": there is one.
    """

    name: str
    gpu: str
    model: str
    precision: str
    version: str
    ranks: int
    expert_ranks: int
    data_ranks: int
    prompt: int
    output: int
    concurrency: int
    experts: bool = False
    full: bool = False
    tpot_percent: float = math.nan
    ttft_percent: float = math.nan
    tpot_left_percent: float = math.nan
    ttft_left_percent: float = math.nan
    peer_tpot_percent: float = math.nan
    peer_ttft_percent: float = math.nan
    refused: str = ""

    @property
    def setting(self) -> tuple[Any, ...]:
        """What repeats of a measurement have in common."""
        return astuple(self)[1:11]


def percent(predicted: float, measured: float) -> float:
    """Return the error of a prediction, in percent."""
    return round(100.0 * (predicted / measured - 1.0), 1)


_FITS: Fits = {}  # of a process


def answer(row: Row, checkpoint: Checkpoint, without: EngineConstants | None) -> Answer:
    """Ask the product about a row; also with the constants `without` the row's model, if there are
    any.
    """
    question = Question(row, checkpoint)
    own = Answer(row.name, *row.setting)
    try:
        found = question.predict(_FITS)
    except InputError as error:
        return replace(own, refused=error.message)
    own = replace(
        own,
        experts=question.has_experts,
        full=found.full,
        tpot_percent=percent(found.tpot_s, row.tpot_s),
        ttft_percent=percent(found.ttft_s, row.ttft_s),
    )
    if row.model in SET_NONE:
        return replace(own, tpot_left_percent=own.tpot_percent, ttft_left_percent=own.ttft_percent)
    if without is None:
        return own
    left = question.predict(_FITS, without)
    return replace(
        own,
        tpot_left_percent=percent(left.tpot_s, row.tpot_s),
        ttft_left_percent=percent(left.ttft_s, row.ttft_s),
    )


def answers_of(
    data: Path,
    rows: Sequence[Row],
    left_out: Mapping[str, Mapping[str, EngineConstants]],
    journal: Path | None,
    processes: int,
) -> list[Answer]:
    """Return an answer for each row, in their order; progress goes to stderr. Answers of the
    journal are taken from it, and new ones are added to it.
    """
    found = {one.name: one for one in read_journal(journal)}
    left = [row for row in rows if row.name not in found]
    left.sort(key=lambda row: row.setting)  # rows of one engine follow one another
    with ProcessPoolExecutor(processes) as pool:
        asked = []
        for row in left:
            without = left_out.get(row.model, {}).get(family_of(row.gpu))
            asked.append(pool.submit(answer, row, checkpoint_of(data, row), without))
        for done in as_completed(asked):
            one = done.result()
            found[one.name] = one
            print(f"\r{len(found)} of {len(rows)} rows", end="", file=sys.stderr, flush=True)
            if journal is not None:
                with journal.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(astuple(one)) + "\n")
    print(file=sys.stderr)
    return [found[row.name] for row in rows]


def read_journal(journal: Path | None) -> list[Answer]:
    """Return the answers of an interrupted run; none without a file."""
    if journal is None or not journal.exists():
        return []
    lines = journal.read_text(encoding="utf-8").splitlines()
    return [Answer(*json.loads(line)) for line in lines]


def with_peer(
    answers: Sequence[Answer], rows: Sequence[Row], peer: Mapping[str, Any]
) -> list[Answer]:
    """Return the answers with the errors of the peer, milliseconds of TTFT and TPOT by row."""
    found = []
    for one, row in zip(answers, rows, strict=True):
        given = peer.get(row.name, "not asked")
        if not isinstance(given, str):
            one = replace(
                one,
                peer_ttft_percent=percent(MS * given[0], row.ttft_s),
                peer_tpot_percent=percent(MS * given[1], row.tpot_s),
            )
        found.append(one)
    return found


def typed(data: Path, rows: Sequence[Row], count: int) -> None:
    """Type the commands for drawn rows that the product answers. Raises `SystemExit` where a time
    differs.
    """
    drawn = random.Random(count).sample(list(rows), len(rows))
    compared = 0
    for row in drawn:
        question = Question(row, checkpoint_of(data, row))
        try:
            called = question.predict(_FITS)
        except InputError:
            continue
        printed: Times = question.type()
        if printed != called:
            raise SystemExit(f"{row.name}: the commands print {printed}, the functions {called}")
        compared += 1
        print(f"\r{compared} of {count} rows", end="", file=sys.stderr, flush=True)
        if compared == count:
            break
    print(f"\n{compared} rows typed: no time differs", file=sys.stderr)


# ---- errors ----


def servers_of(answers: Iterable[Answer]) -> list[Answer]:
    """Return the answered servers, each once: of one that was measured repeatedly, the median
    errors.
    """
    repeats: dict[tuple[Any, ...], list[Answer]] = {}
    for one in answers:
        if not one.refused:
            repeats.setdefault(one.setting, []).append(one)
    return [_median_of(same) for same in repeats.values()]


def _median_of(same: Sequence[Answer]) -> Answer:
    """Return the first of some answers with the median errors of all."""
    names = [each.name for each in fields(Answer) if each.name.endswith("_percent")]
    medians: dict[str, Any] = {
        name: float(np.median([getattr(one, name) for one in same])) for name in names
    }
    return replace(same[0], **medians)


def spread_of(servers: Sequence[Answer], kind: str = "") -> dict[str, float]:
    """Return the errors of some servers in percent, by the names of `AnalyticError`: the median and
    the p90 of their sizes, and the p10 and p90 of TPOT's with their signs.

    Args:
        kind: "left_": with constants that the model did not set.
    """
    found: dict[str, float] = {"servers": len(servers)}
    for name in ("tpot", "ttft"):
        signed = [getattr(one, f"{name}_{kind}percent") for one in servers]
        median, p90 = np.percentile(np.abs(signed), [50, 90])
        found[f"{name}_percent"] = round(float(median), 1)
        found[f"{name}_p90_percent"] = round(float(p90), 1)
        if name == "tpot":
            low, high = np.percentile(signed, [10, 90])
            found["tpot_low_percent"] = round(float(low), 1)
            found["tpot_high_percent"] = round(float(high), 1)
    return found


def errors_of_servers(answers: Iterable[Answer]) -> dict[str, Any]:
    """Return the content of the file that ships: errors by GPU and class of model, of models that
    set no constant, and of all servers.
    """
    servers = servers_of(answers)
    groups: dict[tuple[str, bool], list[Answer]] = {}
    for one in servers:
        groups.setdefault((one.gpu, one.experts), []).append(one)
    apart = [one for one in servers if not math.isnan(one.tpot_left_percent)]
    classes = {kind: [one for one in apart if one.experts == kind] for kind in (False, True)}
    return {
        "about": "Errors of servers predicted by recipe new, profile --analytic, fit and simulate, "
        "in percent (docs/results/scoreboard.md)",
        "source": "ai-dynamo/aiconfigurator, silicon_sample.csv, Apache-2.0, NVIDIA",
        "all": spread_of(servers)
        | {
            "tokens_max": max(one.prompt + one.output for one in servers),
            "ranks_max": max(one.ranks for one in servers),
        },
        "groups": [
            {
                "gpu": gpu,
                "experts": experts,
                "models": sorted({one.model for one in group}),
                "errors": spread_of(group),
            }
            for (gpu, experts), group in sorted(groups.items())
        ],
        "left_out": [
            {"experts": kind, "errors": spread_of(group, "left_")}
            for kind, group in classes.items()
            if group
        ],
    }


# ---- tables ----

ERRORS = ("median, %", "p90, %", "bias, %")
COLUMNS = ("servers", *(f"{name}: {error}" for name in ("TPOT", "TTFT") for error in ERRORS))
PEER = (
    "servers",
    *(
        f"{name}: {of}, {error}"
        for name in ("TPOT", "TTFT")
        for of in ("ours", "peer's")
        for error in ERRORS[:2]
    ),
)
LEFT = (
    "servers",
    *(
        f"{name}: {of}"
        for name in ("TPOT", "TTFT")
        for of in ("as set, median, %", "left out, median, %", "left out, p90, %")
    ),
)


def tables(answers: Sequence[Answer], rows: Sequence[Row], reasons: Counter[str]) -> str:
    """Return how many rows are answered, how far off, and why others are not, as Markdown."""
    servers = servers_of(answers)
    refused = Counter(one.refused for one in answers if one.refused)
    refused_rows = sum(refused.values())
    lines = [
        f"{len(rows):,} rows of vLLM without disaggregation, each once. "
        f"{len(rows) - sum(reasons.values()) - len(answers)} set the constants, {len(answers)} are "
        f"judged, {sum(reasons.values())} are not:",
        "",
        *(f"- {reason}: {count} rows" for reason, count in reasons.most_common()),
        "",
        f"Of the {len(answers)} judged rows {len(answers) - refused_rows} can be asked for, "
        f"{len(servers)} servers. {refused_rows} are refused{':' if refused else '.'}",
        "",
        *(f"- {reason}: {count} rows" for reason, count in refused.most_common()),
        "",
        markdown(["answered", *COLUMNS], [line_of(*pair) for pair in lines_of(servers).items()]),
        "A model that set no constant: the same servers, with constants that the other models set.",
        "",
        markdown(["left out", *LEFT], left_lines(servers)),
    ]
    both = [one for one in servers if not math.isnan(one.peer_tpot_percent)]
    if both:
        kinds = {name: group for name, group in lines_of(both).items() if ", TP " not in name}
        lines += [markdown(["both answer", *PEER], [peer_line(*pair) for pair in kinds.items()])]
    settings, tpot, ttft = noise(rows)
    cells = [["repeats of a setting", settings, len(tpot), *sizes(tpot), *sizes(ttft)]]
    heads = [f"{name}: {error}" for name in ("TPOT", "TTFT") for error in ERRORS[:2]]
    lines.append(markdown(["noise", "settings", "repeats", *heads], cells))
    return "\n".join(lines)


def lines_of(servers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """Return the servers of each line of the table: all; each GPU and class; each model, and with
    each number of GPUs; each number of GPUs of all dense models; full caches.
    """
    lines: dict[str, list[Answer]] = {"**all**": list(servers)}
    for one in sorted(servers, key=lambda one: (one.setting, one.name)):
        chip = one.gpu.partition("_")[0].upper()
        kind = "with experts" if one.experts else "dense"
        model = f"{chip}, {one.model} {one.precision}"
        for name in (f"**{chip}, {kind}**", model, f"{model}, TP {one.ranks}"):
            lines.setdefault(name, []).append(one)
    for experts in (False, True):
        own = [one for one in servers if one.experts == experts]
        for ranks in sorted({one.ranks for one in own}):
            name = f"{'with experts' if experts else 'dense'}, TP {ranks}"
            lines[name] = [one for one in own if one.ranks == ranks]
    lines["cache full at some time"] = [one for one in servers if one.full]
    return {name: group for name, group in lines.items() if group}


def sizes(signed: Sequence[float]) -> list[str]:
    """Return median and p90 of the sizes of some errors, as cells."""
    return [f"{one:.1f}" for one in np.percentile(np.abs(signed), [50, 90])]


def line_of(name: str, servers: Sequence[Answer]) -> list[object]:
    """Return a line of the table."""
    cells: list[object] = [name, len(servers)]
    for key in ("tpot_percent", "ttft_percent"):
        signed = [getattr(one, key) for one in servers]
        cells += [*sizes(signed), f"{np.median(signed):+.1f}"]
    return cells


def peer_line(name: str, servers: Sequence[Answer]) -> list[object]:
    """Return a line about servers that the peer answers, too."""
    cells: list[object] = [name, len(servers)]
    for key in ("tpot_percent", "ttft_percent"):
        cells += sizes([getattr(one, key) for one in servers])
        cells += sizes([getattr(one, f"peer_{key}") for one in servers])
    return cells


def left_lines(servers: Sequence[Answer]) -> list[list[object]]:
    """Return a line for each model that set constants, and the median of these lines."""
    found: list[list[object]] = []
    for model in sorted({one.model for one in servers}):
        group = [one for one in servers if one.model == model]
        group = [one for one in group if not math.isnan(one.tpot_left_percent)]
        if not group:
            continue
        cells: list[object] = [model, len(group)]
        for name in ("tpot", "ttft"):
            cells.append(sizes([getattr(one, f"{name}_percent") for one in group])[0])
            cells += sizes([getattr(one, f"{name}_left_percent") for one in group])
        found.append(cells)
    if found:
        columns = list(zip(*found, strict=True))[2:]
        medians = [f"{np.median([float(str(one)) for one in column]):.1f}" for column in columns]
        found.append(["median over models", sum(int(str(one[1])) for one in found), *medians])
    return found


def noise(rows: Sequence[Row]) -> tuple[int, list[float], list[float]]:
    """Return how many settings were measured again, and how far each repeat is off the setting's
    first measurement: of TPOT and of TTFT, in percent.
    """
    first: dict[tuple[object, ...], Row] = {}
    again = set()
    tpot = []
    ttft = []
    for row in rows:
        before = first.setdefault(row.setting, row)
        if before is not row:
            again.add(row.setting)
            tpot.append(percent(row.tpot_s, before.tpot_s))
            ttft.append(percent(row.ttft_s, before.ttft_s))
    return len(again), tpot, ttft


def put_section(page: Path, name: str, text: str) -> None:
    """Replace the text between the markers of `name` in a page."""
    begin = f"<!-- {name} -->\n"
    end = f"<!-- end of {name} -->\n"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    page.write_text("".join((before, begin, text, end, after)), encoding="utf-8")


OWN_HEAD = ("requests/s", "with", "throughput", "mean TTFT", "mean TPOT", "mean E2E")
OWN_SHOWN = ("throughput_rps", "ttft_mean_s", "tpot_mean_s", "e2e_mean_s")


def own_table() -> str:
    """Return our own windows on an H200."""
    fit = read_file(Fit, shipped_profiles() / NAME / "fit.json")
    lines = [
        [
            f"{row['rate_rps']:g}",
            row["knows"],
            *(f"{row['error'][key]:+.1f} %" for key in OWN_SHOWN),
        ]
        for row in errors_of(fit)
        if row["knows"] in (FIT, SPEED)
    ]
    return markdown(OWN_HEAD, lines)


# ---- the drawing ----

SIDE = 300.0  # of a panel, in pixels
GAP = 60.0
LEFT_EDGE = 46.0
BOTTOM = 34.0


def drawing(answers: Sequence[Answer], rows: Sequence[Row]) -> str:
    """Draw predicted against measured on logarithmic axes: TPOT, and TTFT."""
    pairs = [(one, row) for one, row in zip(answers, rows, strict=True) if not one.refused]
    tpot = [
        (1e3 * row.tpot_s, 10 * row.tpot_s * (100 + one.tpot_percent), not one.experts)
        for one, row in pairs
    ]
    ttft = [
        (row.ttft_s, row.ttft_s * (1 + one.ttft_percent / 100), not one.experts)
        for one, row in pairs
    ]
    parts = [panel(tpot, LEFT_EDGE, "TPOT, ms")]
    parts.append(panel(ttft, LEFT_EDGE + SIDE + GAP + LEFT_EDGE, "TTFT, s"))
    label = "Predicted against measured, TPOT and TTFT, each dot a server"
    return picture("\n".join(parts), 2 * (LEFT_EDGE + SIDE) + GAP, SIDE + BOTTOM, label)


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

EXTRACT_ROWS = 24


def extract(data: Path, rows: Sequence[Row], answers: Sequence[Answer]) -> str:
    """Return judged rows of small runs, evenly over models and GPUs, with their checkpoints, for a
    test that asks about them again.
    """
    order = sorted(
        (row for row, one in zip(rows, answers, strict=True) if not one.refused),
        key=lambda row: (row.group, row.concurrency * row.output, row.name),
    )
    smallest = {row.group: row for row in reversed(order)}
    places = np.linspace(0, len(smallest) - 1, EXTRACT_ROWS).round().astype(int)
    chosen = [list(smallest.values())[place] for place in sorted(set(places.tolist()))]
    content = {
        "source": "ai-dynamo/aiconfigurator, systems/silicon_sample.csv at 095f58a (measured by "
        "InferenceX and NVIDIA)",
        "licence": "Apache-2.0, Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES",
        "columns": [each.name for each in fields(Row)],
        "rows": [list(asdict(row).values()) for row in chosen],
        "checkpoints": {
            f"{row.model} {row.precision}": asdict(checkpoint_of(data, row)) for row in chosen
        },
    }
    return json.dumps(content, indent=1) + "\n"


def read_left_out(path: Path | None) -> dict[str, dict[str, EngineConstants]]:
    """Return the constants that other models set, by model and family of GPUs."""
    if path is None:
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return {
        model: {name: EngineConstants(**one) for name, one in families.items()}
        for model, families in content.items()
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--aiconfigurator", type=Path, required=True, metavar="DIR")
    parser.add_argument("--servingsim", type=Path, metavar="DIR")
    parser.add_argument("--peer", type=Path, metavar="FILE", help="of silicon_peer")
    parser.add_argument("--left-out", type=Path, metavar="FILE", help="of calibrate")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="answers so far")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument("--typed", type=int, metavar="N", help="only type the commands of N rows")
    parser.add_argument("--page", type=Path, metavar="FILE", help="replace its sections")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="an SVG")
    parser.add_argument("--errors", type=Path, metavar="FILE", help="what ships")
    parser.add_argument("--extract", type=Path, metavar="FILE", help="what a test predicts")
    options = parser.parse_args()
    data = options.aiconfigurator
    split = split_rows(data)
    rows = split.judged
    if options.typed:
        typed(data, rows, options.typed)
        return
    constants = read_left_out(options.left_out)
    answers = answers_of(data, rows, constants, options.journal, options.processes)
    peer = json.loads(options.peer.read_text(encoding="utf-8"))["rows"] if options.peer else {}
    answers = with_peer(answers, rows, peer)
    sections = {
        "servers": tables(answers, split.rows, split.reasons),
        "own": own_table(),
    }
    if options.servingsim:
        sections["runs"] = llmservingsim.table(options.servingsim)
    for name, text in sections.items():
        print(f"{name}\n\n{text}")
        if options.page:
            put_section(options.page, name, text)
    keep("operators", digest(TABLE).sha256)
    keep("columns", [each.name for each in fields(Answer)])
    keep("rows", [[None if one != one else one for one in astuple(each)] for each in answers])
    if options.errors:
        content = json.dumps(errors_of_servers(answers), indent=1)
        options.errors.write_text(content + "\n", encoding="utf-8")
    if options.picture:
        options.picture.write_text(drawing(answers, rows), encoding="utf-8")
    if options.extract:
        options.extract.write_text(extract(data, rows, answers), encoding="utf-8")


if __name__ == "__main__":
    main()
