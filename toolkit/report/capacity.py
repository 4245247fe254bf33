"""The page of a capacity: the answer, then the curves and the tables behind it."""

from __future__ import annotations

from toolkit.files.capacity import Capacities, CapacityOf
from toolkit.files.tuning import changes_in_words
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
from toolkit.units import bracketed, counted, number

CURVE_RATIO = 2.0  # the used share of a limit up to which the chart goes


def shared_changes(result: Capacities) -> str:
    """What makes the requests of all rows other ones than the trace's, in words: repeats too, where
    they are the same. '' where rows differ in more.
    """
    for each in (
        {one.changes for one in result.capacities},
        {changes_in_words(one.scaling) for one in result.capacities},
    ):
        if len(each) == 1:
            return each.pop()
    return ""


def conclusion(result: Capacities) -> list[str]:
    """Return the answer in a few sentences: the highest rate, what each changed key brings, and the
    fewest workers for the wanted rate.
    """
    lines = _highest(result.capacities)
    lines += [_effect(one, result.capacities) for one in result.capacities if one.changed]
    if result.wanted_rps is not None:
        lines.append(_fewest(result.capacities, f"{number(result.wanted_rps)} requests/s"))
    return lines


def _highest(capacities: list[CapacityOf]) -> list[str]:
    """Up to which rate the best of these settings keeps the targets; nothing where none does."""
    kept = [one for one in capacities if one.capacity_rps is not None]
    if not kept:
        return []
    best = max(kept, key=lambda one: one.capacity_rps or 0.0)
    most = f"{number(best.capacity_rps or 0.0)} requests/s{bracketed('; '.join(_errors(best)))}"
    which = f"{best.name}: " if len(capacities) > 1 else ""
    lines = [f"{which}all targets hold up to {most} on {best.traffic}"]
    if best.at_least:
        lines.append("at more, the trace is over before its queue could grow")
    if len({one.traffic for one in kept}) > 1:
        lines += [f"{one.name}: on {one.traffic}" for one in kept if one is not best]
    return lines


def _errors(one: CapacityOf) -> list[str]:
    """How far off a capacity may be: by the law's error, and by the search."""
    found = []
    if one.interval:
        found.append(f"{one.interval.text} by {one.interval.law.basis}")
    if one.error_percent:
        found.append(f"search to {one.error_percent:.1f} %")
    return found


def _effect(one: CapacityOf, group: list[CapacityOf]) -> str:
    """How much more a recipe serves with its keys changed than as it is, in a sentence."""
    [own, *_] = [other for other in group if other.recipe == one.recipe]
    before = own.capacity_rps
    after = one.capacity_rps
    if before is None or after is None:
        kept = [other.name for other in (own, one) if other.capacity_rps is not None]
        return f"{one.name}: {' and '.join(kept) or 'neither'} keeps the targets at some rate"
    if own.at_least and one.at_least:
        return f"{one.name}: the trace is too short to say what that changes"
    ratio = after / before
    error = max(own.error_percent, one.error_percent) / 100.0
    times = f"{ratio:.3g} times the requests/s of the recipe itself"
    if abs(ratio - 1.0) <= error:
        times = f"as many requests/s as the recipe itself, to {100.0 * error:.1f} %"
    hits, hits_before = (other.metrics.get("hit_percent") for other in (one, own))
    if hits is not None and hits_before is not None and hits != hits_before:
        times += f"; the cache has {hits:.3g} % of the prompts' tokens, not {hits_before:.3g} %"
    return f"{one.name}: {times}"


def _fewest(capacities: list[CapacityOf], wanted: str) -> str:
    """Return the fewest GPUs for the wanted rate, in a sentence; the table has the costs."""
    able = [one for one in capacities if one.needed is not None]
    if not able:
        return f"no number of workers that was tried keeps the targets at {wanted}"
    fewest = min(able, key=lambda one: one.needed.gpus if one.needed else 0)
    assert fewest.needed is not None
    gpus = counted(fewest.needed.gpus, "GPU")
    about = bracketed(changes_in_words(fewest.scaling))
    return f"the fewest for {wanted}{about}: {gpus}, {fewest.name}"


def capacity_page(result: Capacities) -> str:
    """The page as HTML. The same result gives the same text."""
    names = list(dict.fromkeys(one.recipe for one in result.capacities))
    title = f"Capacity of {' and '.join(names)}"
    about = bracketed(result.trace.changes)
    traffic = f"{result.trace.requests:,} requests of {result.trace.source}{about}"
    return render_page(title, f"For {traffic}.", [_answer(result), _curves(result)])


def capacity_sheet(result: Capacities) -> Sheet:
    """Return the answer: the highest rates, what they cost, and the fewest workers for a wanted
    one.
    """
    kept = any(one.capacity_rps is not None for one in result.capacities)
    lines = conclusion(result)
    badge = Badge("kept", f"{'; '.join(lines)}.")
    if not kept:
        badge = Badge("broken", "No rate that was tried keeps every target.")
    sheet = Sheet("verdict", "", badge=badge, tables=[_highest_rates(result)], lines=lines)
    costs: list[list[Cell]] = []
    for one in result.capacities:
        cost = one.cost
        if cost is not None:
            usd = (cost.usd_per_hour, cost.usd_per_million_requests)
            costs.append([one.name, *usd, cost.usd_per_million_in, cost.usd_per_million_out])
    if costs:
        columns = ["", ">an hour", ">M requests", ">M tokens in", ">M tokens out"]
        title = f"USD, at capacity{bracketed(shared_changes(result))}"
        sheet.tables.append(Table(title, columns, costs, folded=False))
    if result.wanted_rps is not None:
        sheet.tables.append(_fewest_workers(result, result.wanted_rps))
    return sheet


def _highest_rates(result: Capacities) -> Table:
    several = len(result.capacities) > 1
    recipes = {one.recipe for one in result.capacities}
    rows: list[list[Cell]] = []
    for one in result.capacities:
        name = one.name if several else one.recipe
        if one.changed and len(recipes) == 1:
            name = f"with {one.settings}"
        rate = "none" if one.capacity_rps is None else number(one.capacity_rps)
        if one.at_least:
            rate = f">= {rate}"
        interval = one.interval.text if one.interval else None
        breaks = one.binding and metric_name(one.binding)
        rows.append([name, one.gpus, rate, interval, breaks, one.concurrency])
    columns = ["", ">GPUs", ">requests/s", ">by the law's error", "then breaks"]
    if any(one.concurrency for one in result.capacities):
        columns.append(">at once")
    about = bracketed(shared_changes(result))
    title = f"capacity of {result.trace.source}{about}: all targets hold up to"
    return Table(title, columns, rows, folded=False)


def _fewest_workers(result: Capacities, wanted_rps: float) -> Table:
    rows: list[list[Cell]] = []
    for one in result.capacities:
        needed = one.needed
        found = (needed.workers, needed.gpus, needed.usd_per_hour) if needed else None
        rows.append([one.name, *(found or ("none keeps", None, None))])
    fitted = {changes_in_words(one.scaling) for one in result.capacities}
    about = bracketed(fitted.pop()) if len(fitted) == 1 else ""
    title = f"the fewest that keep all targets at {number(wanted_rps)} requests/s{about}"
    return Table(title, ["", ">workers", ">GPUs", ">USD an hour"], rows, folded=False)


def _answer(result: Capacities) -> Sheet:
    """Return the answer with what it rests on."""
    sheet = capacity_sheet(result)
    analytic = {one.recipe: one.analytic for one in result.capacities if one.analytic}
    sheet.lines = [
        f"{name} is analytic, nothing was measured: {analytic[name]}." for name in analytic
    ]
    sheet.lines += [f"The trace: {note}." for note in result.trace.notes]
    return sheet


def _curves(result: Capacities) -> Sheet:
    section = Sheet("capacity", "Every rate was simulated on the whole trace.")
    for one in result.capacities:
        points = [p for p in one.curve if max(p.usage.values(), default=0.0) <= CURVE_RATIO]
        series = []
        for target in result.sla:
            marks = [(p.load, p.usage[target], "") for p in points if target in p.usage]
            series.append(ChartSeries(metric_name(target), marks, "line"))
        svg = chart("requests/s that arrive", "target over its limit", series, level=1.0)
        section.figures.append(Figure(svg, f"{one.name}: a target breaks above the line"))
    reached = [
        ChartSeries(
            one.name,
            [(p.load, p.attainment_percent, "") for p in one.curve],
            "line",
        )
        for one in result.capacities
    ]
    svg = chart("requests/s that arrive", "within all targets, %", reached)
    section.figures.append(Figure(svg, "the share of requests within all targets"))
    return section
