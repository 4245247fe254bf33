"""The benches: what replays against a running server measured, beside what was predicted before them."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.report.material import Bench, Material
from toolkit.report.parts import Cell, Figure, Section, Table, error_cell, metric_name, missing, quantity
from toolkit.report.svg import bars
from toolkit.units import number

KEY, TITLE = "bench", "The benches"


def bench_section(found: Material) -> Section:
    """Every `llmctl bench --out` of the shown fit: the plan's own at its rate, at others, then other plans'."""
    out = [why for name, why in found.why.items() if name.endswith(".json")]
    if not found.benches:
        plan, rate = found.file_name("plan"), found.rate_rps
        at = f" --rate {rate:.3g}" if rate else ""
        command = f"llmctl bench --plan {plan} --trace TRACE{at} --out bench.json"
        section = missing(KEY, TITLE, "The plan was not replayed against a running server yet.", command)
        section.lines += [f"Left out: {why}." for why in out]
        return section
    requests = sum(one.content.answered for one in found.benches)
    counted = f"{len(found.benches)} replay{'s' if len(found.benches) > 1 else ''}"
    section = Section(
        KEY, TITLE, f"{counted} against a running server, {requests:,} requests: measured, not simulated."
    )
    for one in found.benches:
        section.lines.append(_told(one, found.rate_rps))
        errors = {row.metric: row.error_percent for row in one.content.compared if row.error_percent is not None}
        values = {row.metric: (row.predicted, row.measured) for row in one.content.compared}
        titles = {
            name: f"{metric_name(name)}: predicted {quantity(name, predicted)}, measured {quantity(name, measured)}"
            for name, (predicted, measured) in values.items()
            if predicted is not None and measured is not None
        }
        svg = bars(errors, " %", titles=titles)
        if svg:
            section.figures.append(Figure(svg, f"{_title(one)}: the prediction's error"))
        section.tables.append(_table(one))
    if len(found.benches) > 1:
        section.tables.insert(0, _side_by_side(found.benches))
    section.lines += [f"Left out: {why}." for why in out]
    return section


def _title(bench: Bench) -> str:
    """The plan, the policy and the rate of a bench."""
    content = bench.content
    policy = f", policy '{content.policy}'" if content.policy else ""
    rate = f", {number(content.request_rate_rps)} requests/s" if content.request_rate_rps else ""
    return f"{bench.name}: {bench.plan_name}{policy}{rate}"


def _told(bench: Bench, rate_rps: float | None) -> str:
    """What was replayed, and what a reader must know before believing it."""
    content = bench.content
    if not bench.of_plan:
        what = "another plan of the same fit"
    elif bench.at_rate(rate_rps):
        what = "this plan at the rate that it was tuned for"
    elif content.request_rate_rps is None or rate_rps is None:
        what = "this plan"
    else:
        what = f"this plan at {content.request_rate_rps / rate_rps:.2f} times the rate that it was tuned for"
    failed = sum(content.failures.values())
    parts = [f"{_title(bench)} ({what}): {content.answered:,} of {content.requests:,} requests, {failed:,} failed"]
    if content.warmup and content.replay_slowdown:
        slow, warm = content.replay_slowdown, content.warmup.slowdown
        parts.append(f"batches took {slow:.2f} times as long as fitted, in the warm-up {warm:.2f} times")
    if content.interrupted:
        parts.append("it was interrupted, so nothing is compared")
    if content.lengths == "given":
        parts.append("the server was told each output's length, which no real client can do")
    return "; ".join(parts) + "."


def _table(bench: Bench) -> Table:
    warm = bench.content.warmup is not None
    rows: list[list[Cell]] = []
    for row in bench.content.compared:
        rows.append([row.metric, row.measured, row.predicted, error_cell(row.error_percent)])
        if warm:
            rows[-1] += [row.as_fitted, error_cell(row.as_fitted_error_percent)]
    columns = ["metric", "measured", "predicted", "its error", *(["as fitted", "its error"] if warm else [])]
    return Table(_title(bench), columns, rows)


def _side_by_side(benches: Sequence[Bench]) -> Table:
    metrics = dict.fromkeys(row.metric for one in benches for row in one.content.compared)
    rows: list[list[Cell]] = [[name, *(one.content.measured.get(name) for one in benches)] for name in metrics]
    return Table("Measured, side by side", ["metric", *(one.name for one in benches)], rows)
