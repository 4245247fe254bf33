"""The sheet of scaling rules: which keeps the targets, at what cost, and the day in charts."""

from __future__ import annotations

from toolkit.files.scaling import FleetResult, ScalingResult
from toolkit.report.page import render_page
from toolkit.report.parts import (
    Badge,
    Cell,
    ChartSeries,
    Figure,
    Sheet,
    Table,
    chart,
    metric_name,
)
from toolkit.units import bracketed, counted, number, seconds, word

HOUR_S = 3600.0


def scaling_sheet(result: ScalingResult) -> Sheet:
    """Return the answer, the rules beside each other, and how the fleet of the best one changes."""
    best = result.best
    if best is None:
        text = "No rule that was tried keeps every target, and neither do so many replicas all day."
        badge = Badge("broken", text)
    else:
        badge = Badge("kept", f"{_answer(result, best)}.")
    sheet = Sheet("scaling", "", badge=badge, tables=[_rules(result)])
    sheet.lines = _lines(result)
    return sheet


def _answer(result: ScalingResult, best: FleetResult) -> str:
    """The conclusion in a sentence."""
    cost = f"{number(best.gpu_hours_per_day)} GPU-hours a day"
    if best.usd_per_day is not None:
        cost += f", {number(best.usd_per_day)} USD"
    if best.rule == "static":
        count = counted(best.replicas_max, "replica")
        return f"no rule is cheaper than {count} all the time: {cost}"
    saved = result.saved_percent(best)
    beside = ""
    if saved is not None and result.static is not None:
        count = counted(result.static.replicas_max, "replica")
        beside = f", {number(saved)} % fewer than {count} all the time"
    return f"{best.rule} keeps every target with {cost}{beside}"


def _lines(result: ScalingResult) -> list[str]:
    """What a reader must know besides the table."""
    start_s = sum(result.scale.start_s) / len(result.scale.start_s)
    best = result.best
    lines = [] if best is None else [_answer(result, best)]
    lines += [
        f"a replica among others serves {number(result.replica_rps)} requests/s within the "
        f"targets, and takes {seconds(start_s)} to start"
    ]
    lines += [
        f"{one.rule} does not settle: its number swings with a period of {seconds(one.period_s)}"
        for one in result.rules
        if one.period_s is not None
    ]
    if result.clairvoyant is not None:
        hours = number(result.clairvoyant.gpu_hours_per_day)
        lines.append(f"a schedule that knows the arrivals takes {hours} GPU-hours a day")
    return lines


def _rules(result: ScalingResult) -> Table:
    rows: list[list[Cell]] = []
    beside = [one for one in (result.static, result.clairvoyant) if one is not None]
    for one in (*result.rules, *beside):
        limit = one.outcome.binding
        used = f"{metric_name(limit)} {one.outcome.used[limit]:.2f}" if limit else None
        cost = [one.gpu_hours_per_day, one.usd_per_day]
        state = "kept" if one.kept else "broken"
        rows.append([one.rule, state, *cost, one.replicas_mean, one.replicas_max, used])
    columns = ["rule", "targets", ">GPU-hours", ">USD", ">replicas", ">most", "nearest limit"]
    about = bracketed(result.trace.changes)
    title = (
        f"a day of {result.trace.source}{about}: {result.trace.requests:,} requests in "
        f"{number(result.hours)} hours"
    )
    return Table(title, columns, rows, folded=False)


def scaling_page(result: ScalingResult) -> str:
    """Return the page as HTML. The same result gives the same text."""
    sheet = scaling_sheet(result)
    best = result.best or result.rules[0]
    step_h = result.step_s / HOUR_S
    sheet.figures = [
        Figure(
            chart("hours", "requests/s", [_curve("demand", step_h, result.demand_rps)]),
            "requests that arrive",
        ),
        Figure(
            chart(
                "hours",
                "replicas",
                [_curve(one.rule, step_h, one.curve.ready) for one in _shown(result, best)],
            ),
            "replicas that take requests",
        ),
        Figure(
            chart(
                "hours",
                "within all targets, %",
                [_curve(best.rule, step_h, best.curve.attainment_percent)],
            ),
            f"requests within every target, under {best.rule}",
        ),
    ]
    rows: list[list[Cell]] = []
    for one in result.rules:
        settings = {**one.scaling.parameters, **one.scaling.behaviour}
        rows += [[one.rule, name, word(value), one.trials] for name, value in settings.items()]
    sheet.tables.append(Table("The settings", ["rule", "parameter", "value", "trials"], rows))
    traffic = f"{result.trace.requests:,} requests of {result.trace.source}"
    return render_page(f"Scaling of {result.recipe_name}", f"For {traffic}.", [sheet])


def _shown(result: ScalingResult, best: FleetResult) -> list[FleetResult]:
    """The fleets of the chart: the best, the static one, and the clairvoyant one."""
    shown = {one.rule: one for one in (best, result.static, result.clairvoyant) if one is not None}
    return list(shown.values())


def _curve(name: str, step_h: float, values: list[float] | list[float | None]) -> ChartSeries:
    points = [(k * step_h, value, "") for k, value in enumerate(values) if value is not None]
    return ChartSeries(name, points, "line")
