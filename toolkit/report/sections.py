"""The sections about benches, the validation, the tuning, the fit and the plan.

Each `..._section` shows one kind of file. Where the file is missing, the section names the command
that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Literal

import numpy as np

from toolkit.estimators.load import Laws, laws_from_fit
from toolkit.files.fit import Fit, LatencyFit
from toolkit.files.plan import PREDICTED
from toolkit.files.profile import Profile
from toolkit.files.tuning import Outcome, Trial, Tuning
from toolkit.report.material import BenchResult, Material
from toolkit.report.parts import (
    Axes,
    Cell,
    ChartSeries,
    Figure,
    Section,
    Table,
    bars,
    chart,
    error_cell,
    error_cells,
    metric_name,
    quantity,
)
from toolkit.sched.policies import footnote, marked
from toolkit.units import number, percent, seconds, word

TITLES = {  # of the sections, by their keys
    "bench": "The benches",
    "fit": "The fit",
    "plan": "The plan",
    "tuning": "The tuning",
    "validation": "The validation",
}

Point = tuple[int, int, float]  # batch size, length, seconds


def _missing(found: Material, key: str, lead: str, command: str) -> Section:
    """A section without content, the command that makes it, and why its file was left out."""
    why = found.why.get(key)
    return Section(key, TITLES[key], lead, lines=[why] if why else [], command=command)


def bench_section(found: Material) -> Section:
    """The replays against running servers (`llmctl bench --out`), measured and predicted."""
    left_out = [why for name, why in found.why.items() if name.endswith(".json")]
    if not found.benches:
        plan, rate = found.file_name("plan"), found.rate_rps
        at = f" --rate {rate:.3g}" if rate else ""
        command = f"llmctl bench --plan {plan} --trace TRACE{at} --out bench.json"
        lead = "No trace was replayed against a running server of this plan yet."
        section = _missing(found, "bench", lead, command)
        section.lines += [f"Left out: {why}." for why in left_out]
        return section
    requests = sum(bench.content.answered for bench in found.benches)
    counted = f"{len(found.benches)} replay{'s' if len(found.benches) > 1 else ''}"
    section = Section(
        "bench",
        TITLES["bench"],
        f"{counted} against a running server, {requests:,} requests: measured, not simulated.",
    )
    for bench in found.benches:
        section.lines.append(_bench_line(bench, found.rate_rps))
        errors = {
            row.metric: row.error_percent
            for row in bench.content.compared
            if row.error_percent is not None
        }
        values = {row.metric: (row.predicted, row.measured) for row in bench.content.compared}
        titles = {
            name: f"{metric_name(name)}: predicted {quantity(name, predicted)}, "
            f"measured {quantity(name, measured)}"
            for name, (predicted, measured) in values.items()
            if predicted is not None and measured is not None
        }
        svg = bars(errors, " %", titles=titles)
        if svg:
            section.figures.append(Figure(svg, f"{_title(bench)}: the prediction's error"))
        section.tables.append(_table(bench))
    if len(found.benches) > 1:
        section.tables.insert(0, _side_by_side(found.benches))
    section.lines += [f"Left out: {why}." for why in left_out]
    return section


def _title(bench: BenchResult) -> str:
    """The plan, the policy and the rate of a bench."""
    content = bench.content
    policy = f", policy '{content.policy}'" if content.policy else ""
    rate = f", {number(content.request_rate_rps)} requests/s" if content.request_rate_rps else ""
    return f"{bench.name}: {bench.plan_name}{policy}{rate}"


def _bench_line(bench: BenchResult, rate_rps: float | None) -> str:
    """What was replayed, and its caveats."""
    content = bench.content
    if not bench.of_plan:
        what = "another plan of the same fit"
    elif bench.at_rate(rate_rps):
        what = "this plan at the rate that it was tuned for"
    elif content.request_rate_rps is None or rate_rps is None:
        what = "this plan"
    else:
        times = content.request_rate_rps / rate_rps
        what = f"this plan at {times:.2f} times the rate that it was tuned for"
    failed = sum(content.failures.values())
    counts = f"{content.answered:,} of {content.requests:,} requests, {failed:,} failed"
    parts = [f"{_title(bench)} ({what}): {counts}"]
    if content.warmup and content.replay_slowdown:
        slow, warm = content.replay_slowdown, content.warmup.slowdown
        parts.append(
            f"batches took {slow:.2f} times as long as fitted, in the warm-up {warm:.2f} times"
        )
    if content.interrupted:
        parts.append("it was interrupted, so nothing is compared")
    if content.lengths == "given":
        parts.append("each request had its output length as limit, unlike those of real clients")
    return "; ".join(parts) + "."


def _table(bench: BenchResult) -> Table:
    warm = bench.content.warmup is not None
    rows: list[list[Cell]] = []
    for row in bench.content.compared:
        rows.append([row.metric, row.measured, row.predicted, error_cell(row.error_percent)])
        if warm:
            rows[-1] += [row.as_fitted, error_cell(row.as_fitted_error_percent)]
    columns = [
        "metric",
        "measured",
        "predicted",
        "its error",
        *(["as fitted", "its error"] if warm else []),
    ]
    return Table(_title(bench), columns, rows)


def _side_by_side(benches: Sequence[BenchResult]) -> Table:
    metrics = dict.fromkeys(row.metric for bench in benches for row in bench.content.compared)
    rows: list[list[Cell]] = [
        [name, *(bench.content.measured.get(name) for bench in benches)] for name in metrics
    ]
    return Table("Measured, side by side", ["metric", *(bench.name for bench in benches)], rows)


def fit_section(found: Material) -> Section:
    """The laws of `fit.json` and their errors, with plots where their profile is known."""
    fit = found.fit
    if fit is None:
        command = f"llmctl profile {found.recipe.name}; llmctl fit profile.json"
        return _missing(found, "fit", "Nothing was fitted yet.", command)
    where = f"{fit.engine.engine} on {fit.engine.device}, {fit.workers} workers"
    section = Section("fit", TITLES["fit"], f"Laws of time and memory for {where}.")
    if fit.engine.analytic:
        section.lines.append(f"Nothing here was measured: {fit.engine.analytic}")
    section.tables += [_errors(fit), _candidates(fit)]
    if found.profile is None:
        why = found.why.get("profile", "there is no profile.json in its folder")
        section.lines.append(f"There are no plots of residuals without its profile: {why}.")
    else:
        section.figures += _figures(fit, found.profile)
    return section


def _errors(fit: Fit) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, law in (("prefill", fit.prefill), ("decode", fit.decode)):
        reach = law.valid.batch_size_max, law.valid.length_max
        rows.append((name, law.form, *error_cells(law.error), *reach))
    overheads = [("whole slices", fit.overhead)]
    if fit.rounds:
        overheads.append(("rounds", fit.rounds.overhead))
    for name, overhead in overheads:
        form = f"{overhead.stretch:.3g} x + {overhead.batch_s:.2g} s"
        rows.append((name, form, *error_cells(overhead.error), "", ""))
    if fit.steps:
        knots = f"knots {', '.join(map(str, fit.steps.knots))}"
        rows.append(("passes", knots, *error_cells(fit.steps.error), fit.steps.valid.rows_max, ""))
    columns = [
        "law",
        "form",
        "median error",
        "p95",
        "worst",
        "points",
        "up to batch",
        "up to length",
    ]
    return Table("Errors on points that the fit did not see", columns, rows)


def _candidates(fit: Fit) -> Table:
    rows = [
        (
            name,
            candidate.form,
            *error_cells(candidate.error)[:2],
            "kept" if candidate.form == law.form else "",
        )
        for name, law in (("prefill", fit.prefill), ("decode", fit.decode))
        for candidate in law.candidates
    ]
    return Table("Forms that competed", ["law", "form", "median error", "p95", ""], rows)


def _figures(fit: Fit, profile: Profile) -> list[Figure]:
    laws = laws_from_fit(fit)
    prefill = [
        (point.batch_size, point.input_length, median(point.seconds)) for point in profile.prefill
    ]
    decode = [
        (point.batch_size, point.cached_length, median(point.seconds)) for point in profile.decode
    ]
    figures = [
        *_law_figures("prefill", prefill, lambda size, length: laws.engine.prefill_s(size, length)),
        *_law_figures(
            "decode step", decode, lambda size, length: _step_s(fit.decode, size, length)
        ),
        _slices(laws, profile),
        _memory(fit, laws, profile),
    ]
    return [figure for figure in figures if figure.svg]


def _step_s(law: LatencyFit, size: int, length: int) -> float:
    """tau(l, N), Eq. 4."""
    segment = [candidate for candidate in law.segments if candidate.batch_size_min <= size][-1]
    linear = segment.nl * size * length + segment.n * size + segment.l * length + segment.const
    return max(segment.flat, linear)


def _law_figures(
    name: str, points: Sequence[Point], law: Callable[[int, int], float]
) -> list[Figure]:
    """Two charts: predicted over measured, and residuals in percent over the length.

    The residuals are in-sample: the law is the one in use.
    """
    measured = [real_s for _, _, real_s in points]
    predicted = [law(size, length) for size, length, _ in points]
    residuals = [100 * (a / b - 1) if b else 0.0 for a, b in zip(predicted, measured, strict=True)]
    sizes = sorted({size for size, _, _ in points})
    third = -(-len(sizes) // 3) or 1
    groups = [sizes[start : start + third] for start in range(0, len(sizes), third)]
    labels = [
        f"N {size}, length {length}: predicted {seconds(by_law_s)}, "
        f"measured {seconds(real_s)} ({percent(off)})"
        for (size, length, real_s), by_law_s, off in zip(points, predicted, residuals, strict=True)
    ]
    by_size = [
        ChartSeries(
            f"N {group[0]}" + (f" to {group[-1]}" if len(group) > 1 else ""),
            [length for size, length, _ in points if size in group],
            [
                residual
                for (size, _, _), residual in zip(points, residuals, strict=True)
                if size in group
            ],
            labels=[
                label for (size, _, _), label in zip(points, labels, strict=True) if size in group
            ],
        )
        for group in groups
    ]
    drawn = ChartSeries(name, measured, predicted, labels=labels)
    both = Axes("measured, s", "predicted, s", [drawn], log=True, diagonal=True)
    errors = Axes("length, tokens", "residual, %", by_size, level=0.0)
    return [
        Figure(
            chart(both),
            f"{name}: {len(points)} points, medians of their repeats; equal on the line",
        ),
        Figure(
            chart(errors), f"{name}: predicted over measured, less 1, by length and batch size N"
        ),
    ]


def _slices(laws: Laws, profile: Profile) -> Figure:
    measured = [point.seconds for point in profile.slices]
    predicted = [
        laws.latency.prefill_s(point.batch_size, point.input_length)
        + laws.latency.decode_s(
            point.batch_size, point.input_length, laws.engine.iterations(point.steps)
        )
        for point in profile.slices
    ]
    labels = [
        f"N {point.batch_size}, length {point.input_length}, {point.steps} steps: "
        f"predicted {seconds(by_law_s)}, measured {seconds(point.seconds)}"
        for point, by_law_s in zip(profile.slices, predicted, strict=True)
    ]
    drawn = ChartSeries("slices", measured, predicted, labels=labels)
    axes = Axes("measured, s", "predicted, s", [drawn], log=True, diagonal=True)
    return Figure(chart(axes), f"whole slices on all workers: {len(measured)}, overhead included")


def _memory(fit: Fit, laws: Laws, profile: Profile) -> Figure:
    """The memory edge, probed and by the law, for the least number of steps that was probed."""
    steps = min((point.steps for point in profile.memory), default=1)
    points = sorted(
        (point for point in profile.memory if point.steps == steps),
        key=lambda point: point.input_length,
    )
    lengths = np.array([point.input_length for point in points], dtype=np.int64)
    allowed = laws.memory.max_batch(lengths, steps, 0.0).tolist() if points else []
    failed = [
        (point.input_length, point.smallest_oom)
        for point in points
        if point.smallest_oom is not None
    ]
    series = [
        ChartSeries("ran", lengths.tolist(), [point.largest_ok for point in points]),
        ChartSeries("the law allows", lengths.tolist(), allowed, "line"),
        ChartSeries(
            "out of memory", [length for length, _ in failed], [size for _, size in failed]
        ),
    ]
    capacity = f"capacity {number(fit.memory.capacity_tokens)} tokens"
    caption = f"the memory edge of batches that generate {steps} more tokens; {capacity}"
    return Figure(chart(Axes("input length, tokens", "batch size", series, log=True)), caption)


def plan_section(found: Material) -> Section:
    """Every value of `plan.json`, with the explanation that the plan holds."""
    plan = found.plan
    if plan is None:
        tuning = " --tuning tuning.json" if found.tuning else ""
        command = f"llmctl render {found.recipe.name} --fit fit.json{tuning}"
        return _missing(found, "plan", "There is no plan to serve yet.", command)
    decided: list[tuple[str, str, str]] = []
    predicted: list[tuple[str, str]] = []
    source = ""
    for key, explained in plan.explained.items():
        if key.startswith(PREDICTED):
            predicted.append((key.removeprefix(PREDICTED), explained.value))
            source = source or explained.source
        else:
            decided.append((key, explained.value, explained.source))
    lead = f"Policy '{plan.policy.name}' on {plan.workers} workers."
    section = Section("plan", TITLES["plan"], lead)
    columns = ["key", "value", "reason"]
    section.tables.append(Table("The plan's values and their reasons", columns, decided))
    if predicted:
        caption = f"Predicted results: {source}"
        section.tables.append(Table(caption, ["metric", "predicted"], predicted))
    return section


def tuning_section(found: Material) -> Section:
    """The trials of `tuning.json`, their front, the gain on held-out windows, and what matters."""
    tuning = found.tuning
    if tuning is None:
        command = f"llmctl tune {found.recipe.name} --fit fit.json --trace TRACE"
        return _missing(found, "tuning", "The settings were not tuned yet.", command)
    rate = f"{number(tuning.request_rate_rps)} requests/s on {tuning.workers} workers"
    others = " and others" if len(tuning.policies) > 1 else ""
    policies = f"policy '{tuning.best_held_out.policy}'{others}"
    lead = f"{len(tuning.trials):,} trials of {policies} at {rate}, simulated."
    section = Section("tuning", TITLES["tuning"], lead)
    section.figures += [figure for figure in (_front(tuning), *_sensitivity(tuning)) if figure.svg]
    section.tables += [_held_out(tuning), _parameters(tuning)]
    if tuning.policies:
        section.tables.append(_policies(tuning))
    return section


def _front(tuning: Tuning) -> Figure:
    latency = tuning.latency_metric
    known = [
        trial
        for trial in tuning.trials
        if {latency, "goodput_rps"} <= trial.outcome.metrics.keys() and trial.whole
    ]
    front = [trial for trial in known if trial.number in tuning.front]
    front.sort(key=lambda trial: trial.outcome.metrics[latency])
    best = [trial for trial in known if _same(trial.outcome, tuning.best_held_out)][:1]
    series = [
        _series("trials", known, latency),
        _series("the front", front, latency, "line"),
        _series("defaults", [trial for trial in known if trial.number == 0], latency, "marks"),
        _series("best", best, latency, "marks"),
    ]
    svg = chart(Axes(latency, "goodput, requests/s", series))
    return Figure(
        svg, "each trial on the search windows; no trial beats those on the front in both"
    )


def _series(
    name: str,
    trials: list[Trial],
    latency: str,
    kind: Literal["points", "line", "marks"] = "points",
) -> ChartSeries:
    xs, ys = ([trial.outcome.metrics[key] for trial in trials] for key in (latency, "goodput_rps"))
    return ChartSeries(name, xs, ys, kind, [_label(trial, latency) for trial in trials])


def _label(trial: Trial, latency: str) -> str:
    """A trial in one line, shown under the pointer."""
    outcome = trial.outcome
    settings = ", ".join(f"{name} {word(value)}" for name, value in outcome.every_parameter.items())
    values = ", ".join(
        f"{key} {quantity(key, outcome.metrics[key])}" for key in ("goodput_rps", latency)
    )
    limits = "keeps all limits" if trial.feasible else "breaks a limit"
    return f"trial {trial.number}, {outcome.policy}: {values}, {limits}; {settings}"


def _same(first: Outcome, second: Outcome) -> bool:
    return (first.policy, first.every_parameter) == (second.policy, second.every_parameter)


def _sensitivity(tuning: Tuning) -> list[Figure]:
    """What matters: by all trials, and by sweeps of one parameter of the best."""
    shares: dict[str, float] = {}
    for result in tuning.policies:
        if result.policy == tuning.best_held_out.policy:
            shares = {name: 100 * share for name, share in result.importance.items()}
    swings = {swept.parameter: swept.swing_percent for swept in tuning.sensitivity}
    trials = "how much each parameter separates the best trials from the others (PED-ANOVA)"
    swept = "how far goodput moves when one parameter of the best is swept over its range"
    return [Figure(bars(shares, " %"), trials), Figure(bars(swings, " %"), swept)]


def _held_out(tuning: Tuning) -> Table:
    before, after = tuning.defaults_held_out.metrics, tuning.best_held_out.metrics
    rows: list[tuple[Cell, ...]] = [
        (
            name,
            before[name],
            after[name],
            f"{100 * (after[name] / before[name] - 1):+.1f} %" if before[name] else "–",
        )
        for name in before
        if name in after
    ]
    windows = f"{len(tuning.held_out_windows)} windows that the search did not see"
    caption = f"The defaults and the best on {windows}"
    return Table(caption, ["metric", "defaults", "best", "change"], rows)


def _parameters(tuning: Tuning) -> Table:
    before, after = tuning.defaults_held_out, tuning.best_held_out
    known = before.every_parameter if before.policy == after.policy else {}
    rows = [
        (name, word(known[name]) if name in known else "–", word(value))
        for name, value in after.every_parameter.items()
    ]
    return Table(f"Settings of policy '{after.policy}'", ["parameter", "default", "best"], rows)


def _policies(tuning: Tuning) -> Table:
    latency = tuning.latency_metric
    rows = [
        (
            marked(result.policy, tuning.engines),
            result.trials,
            result.held_out.metrics.get("goodput_rps"),
            result.held_out.metrics.get(latency),
            result.feasible,
        )
        for result in tuning.policies
    ]
    columns = ["policy", "trials", "goodput_rps", latency, "keeps all limits"]
    note = footnote([result.policy for result in tuning.policies], tuning.engines)
    caption = "Each policy's best trial, held out" + (f" ({note})" if note else "")
    return Table(caption, columns, rows)


def validation_section(found: Material) -> Section:
    """The predictions and measurements of `validation.json`, with signed errors."""
    validation = found.validation
    if validation is None:
        lead = "The predictions were not compared with a running server yet."
        return _missing(found, "validation", lead, "llmctl validate plan.json --url URL")
    requests = sum(window.requests for window in validation.windows)
    failed = sum(window.failed for window in validation.windows)
    lead = (
        f"{requests:,} requests in {len(validation.windows)} windows of a trace, replayed against "
        f"{validation.model} with policy '{validation.policy}'; {failed:,} failed."
    )
    section = Section("validation", TITLES["validation"], lead, lines=[validation.summary()])
    errors = {row.metric: row.error_percent for row in validation.metrics}
    section.figures.append(
        Figure(bars(errors, " %"), "the prediction's error, of the means over the windows")
    )
    rows = [
        (
            row.metric,
            row.measured,
            row.predicted,
            percent(row.error_percent),
            percent(row.worst_percent),
        )
        for row in validation.metrics
    ]
    columns = ["metric", "measured", "predicted", "its error", "worst window"]
    section.tables.append(Table("Means over the windows", columns, rows))
    by_request = [
        (
            row.latency,
            percent(row.median_percent),
            f"{row.median_absolute_percent:.1f} %",
            row.requests,
        )
        for row in validation.requests
    ]
    columns = ["latency", "median error", "median absolute error", "requests"]
    section.tables.append(Table("Request by request", columns, by_request))
    section.lines += [f"Noted: {note}." for note in validation.notes]
    return section
