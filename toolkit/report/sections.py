"""The benches: what replays against a running server measured, beside what was predicted before
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Literal

import numpy as np

from toolkit.estimators.load import Laws, laws_from_fit
from toolkit.files.fit import Fit, LatencyFit
from toolkit.files.profile import Profile
from toolkit.files.tuning import Outcome, PolicyResult, Trial, Tuning
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
    missing,
    quantity,
    word,
)
from toolkit.sched.policies.servable import footnote, marked
from toolkit.units import number, percent, seconds

BENCH_KEY, BENCH_TITLE = "bench", "The benches"


def bench_section(found: Material) -> Section:
    """Every `llmctl bench --out` of the shown fit: the plan's own at its rate, at others, then
    other plans'.
    """
    out = [why for name, why in found.why.items() if name.endswith(".json")]
    if not found.benches:
        plan, rate = found.file_name("plan"), found.rate_rps
        at = f" --rate {rate:.3g}" if rate else ""
        command = f"llmctl bench --plan {plan} --trace TRACE{at} --out bench.json"
        section = missing(
            BENCH_KEY,
            BENCH_TITLE,
            "The plan was not replayed against a running server yet.",
            command,
        )
        section.lines += [f"Left out: {why}." for why in out]
        return section
    requests = sum(one.content.answered for one in found.benches)
    counted = f"{len(found.benches)} replay{'s' if len(found.benches) > 1 else ''}"
    section = Section(
        BENCH_KEY,
        BENCH_TITLE,
        f"{counted} against a running server, {requests:,} requests: measured, not simulated.",
    )
    for one in found.benches:
        section.lines.append(_told(one, found.rate_rps))
        errors = {
            row.metric: row.error_percent
            for row in one.content.compared
            if row.error_percent is not None
        }
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


def _title(bench: BenchResult) -> str:
    """The plan, the policy and the rate of a bench."""
    content = bench.content
    policy = f", policy '{content.policy}'" if content.policy else ""
    rate = f", {number(content.request_rate_rps)} requests/s" if content.request_rate_rps else ""
    return f"{bench.name}: {bench.plan_name}{policy}{rate}"


def _told(bench: BenchResult, rate_rps: float | None) -> str:
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
    parts = [
        f"{_title(bench)} ({what}): {content.answered:,} of {content.requests:,} requests, {failed:,} failed"
    ]
    if content.warmup and content.replay_slowdown:
        slow, warm = content.replay_slowdown, content.warmup.slowdown
        parts.append(
            f"batches took {slow:.2f} times as long as fitted, in the warm-up {warm:.2f} times"
        )
    if content.interrupted:
        parts.append("it was interrupted, so nothing is compared")
    if content.lengths == "given":
        parts.append("the server was told each output's length, which no real client can do")
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
    metrics = dict.fromkeys(row.metric for one in benches for row in one.content.compared)
    rows: list[list[Cell]] = [
        [name, *(one.content.measured.get(name) for one in benches)] for name in metrics
    ]
    return Table("Measured, side by side", ["metric", *(one.name for one in benches)], rows)


# The fit: what each law predicts beside what was measured, how large its errors are, where memory
# ends.

FIT_KEY, FIT_TITLE = "fit", "The fit"
Point = tuple[int, int, float]  # batch size, length, seconds


def fit_section(found: Material) -> Section:
    """What `fit.json` holds, with plots where the profile that it was made from is there."""
    fit = found.fit
    if fit is None:
        command = f"llmctl profile {found.recipe.name}; llmctl fit profile.json"
        return missing(
            FIT_KEY,
            FIT_TITLE,
            "Nothing was measured and fitted yet.",
            command,
            found.why.get("fit", ""),
        )
    lead = f"Laws of time and memory for {fit.engine.engine} on {fit.engine.device}, {fit.workers} workers."
    section = Section(FIT_KEY, FIT_TITLE, lead)
    if fit.engine.analytic:
        section.lines.append(f"Nothing of this was measured: {fit.engine.analytic}")
    section.tables += [_errors(fit), _candidates(fit)]
    if found.profile is None:
        why = found.why.get("profile", "there is no profile.json beside it")
        section.lines.append(f"Without its profile there are no plots of residuals: {why}.")
    else:
        section.figures += _figures(fit, found.profile)
    return section


def _errors(fit: Fit) -> Table:
    laws = [("prefill", fit.prefill), ("decode", fit.decode)]
    rows: list[tuple[Cell, ...]] = [
        (name, law.form, *error_cells(law.error), *_reach(law)) for name, law in laws
    ]
    rows.append(("whole slices", _overhead(fit), *error_cells(fit.overhead.error), "", ""))
    if fit.rounds:
        overhead = fit.rounds.overhead
        text = f"{overhead.stretch:.3g} x + {overhead.batch_s:.2g} s"
        rows.append(("rounds", text, *error_cells(overhead.error), "", ""))
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


def _overhead(fit: Fit) -> str:
    return f"{fit.overhead.stretch:.3g} x + {fit.overhead.batch_s:.2g} s"


def _reach(law: LatencyFit) -> tuple[int, int]:
    return law.valid.batch_size_max, law.valid.length_max


def _candidates(fit: Fit) -> Table:
    rows = [
        (name, one.form, *error_cells(one.error)[:2], "kept" if one.form == law.form else "")
        for name, law in (("prefill", fit.prefill), ("decode", fit.decode))
        for one in law.candidates
    ]
    return Table("Forms that competed", ["law", "form", "median error", "p95", ""], rows)


def _figures(fit: Fit, profile: Profile) -> list[Figure]:
    laws = laws_from_fit(fit)
    prefill = [(one.batch_size, one.input_length, median(one.seconds)) for one in profile.prefill]
    decode = [(one.batch_size, one.cached_length, median(one.seconds)) for one in profile.decode]
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
    segment = [one for one in law.segments if one.batch_size_min <= size][-1]
    return segment.nl * size * length + segment.n * size + segment.l * length + segment.const


def _law_figures(
    name: str, points: Sequence[Point], law: Callable[[int, int], float]
) -> list[Figure]:
    """Predicted over measured, and the residuals in percent over the length. In-sample: the law as
    it is used.
    """
    measured = [seconds for _, _, seconds in points]
    predicted = [law(size, length) for size, length, _ in points]
    residuals = [100 * (a / b - 1) if b else 0.0 for a, b in zip(predicted, measured, strict=True)]
    sizes = sorted({size for size, _, _ in points})
    third = -(-len(sizes) // 3) or 1
    groups = [sizes[start : start + third] for start in range(0, len(sizes), third)]
    labels = [
        f"N {size}, length {length}: predicted {seconds(law)}, measured {seconds(real)} ({percent(off)})"
        for (size, length, real), law, off in zip(points, predicted, residuals, strict=True)
    ]
    by_size = [
        ChartSeries(
            f"N {group[0]}" + (f" to {group[-1]}" if len(group) > 1 else ""),
            [length for size, length, _ in points if size in group],
            [one for (size, _, _), one in zip(points, residuals, strict=True) if size in group],
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
            f"{name}: {len(points)} points, medians of their repeats; on the line they agree",
        ),
        Figure(
            chart(errors), f"{name}: predicted over measured, less 1, by length and batch size N"
        ),
    ]


def _slices(laws: Laws, profile: Profile) -> Figure:
    measured = [one.seconds for one in profile.slices]
    predicted = [
        laws.latency.prefill_s(one.batch_size, one.input_length)
        + laws.latency.decode_s(one.batch_size, one.input_length, laws.engine.iterations(one.steps))
        for one in profile.slices
    ]
    labels = [
        f"N {one.batch_size}, length {one.input_length}, {one.steps} steps: predicted {seconds(law)}, "
        f"measured {seconds(one.seconds)}"
        for one, law in zip(profile.slices, predicted, strict=True)
    ]
    drawn = ChartSeries("slices", measured, predicted, labels=labels)
    axes = Axes("measured, s", "predicted, s", [drawn], log=True, diagonal=True)
    return Figure(chart(axes), f"whole slices on all workers: {len(measured)}, overhead included")


def _memory(fit: Fit, laws: Laws, profile: Profile) -> Figure:
    """The largest batch that ran, the smallest that did not, what the law allows: of the least
    steps probed.
    """
    steps = min((one.steps for one in profile.memory), default=1)
    points = sorted(
        (one for one in profile.memory if one.steps == steps), key=lambda one: one.input_length
    )
    lengths = np.array([one.input_length for one in points], dtype=np.int64)
    allowed = laws.memory.max_batch(lengths, steps, 0.0).tolist() if points else []
    failed = [
        (one.input_length, one.smallest_oom) for one in points if one.smallest_oom is not None
    ]
    series = [
        ChartSeries("ran", lengths.tolist(), [one.largest_ok for one in points]),
        ChartSeries("the law allows", lengths.tolist(), allowed, "line"),
        ChartSeries(
            "out of memory", [length for length, _ in failed], [size for _, size in failed]
        ),
    ]
    capacity = f"capacity {number(fit.memory.capacity_tokens)} tokens"
    caption = f"where memory ends, in batches of {steps} more tokens; {capacity}"
    return Figure(chart(Axes("input length, tokens", "batch size", series, log=True)), caption)


# The plan: every value that `serve` starts with, and where it comes from.

PLAN_KEY, PLAN_TITLE = "plan", "The plan"
PREDICTED = "predicted "


def plan_section(found: Material) -> Section:
    """What `plan.json` holds, as it explains itself."""
    plan = found.plan
    if plan is None:
        tuning = " --tuning tuning.json" if found.tuning else ""
        command = f"llmctl render {found.recipe.name} --fit fit.json{tuning}"
        return missing(
            PLAN_KEY,
            PLAN_TITLE,
            "There is no plan to serve yet.",
            command,
            found.why.get("plan", ""),
        )
    told = plan.explained.items()
    decided = [(key, one.value, one.source) for key, one in told if not key.startswith(PREDICTED)]
    predicted = [
        (key.removeprefix(PREDICTED), one.value) for key, one in told if key.startswith(PREDICTED)
    ]
    section = Section(
        PLAN_KEY, PLAN_TITLE, f"Policy '{plan.policy.name}' on {plan.workers} workers."
    )
    section.tables.append(
        Table("What is planned, and because of what", ["what", "planned", "because"], decided)
    )
    if predicted:
        source = next(one.source for key, one in told if key.startswith(PREDICTED))
        section.tables.append(
            Table(f"What it should give: {source}", ["metric", "predicted"], predicted)
        )
    return section


# The tuning: the trials and their front, what the best gains on held-out windows, which
# parameters matter.

TUNING_KEY, TUNING_TITLE = "tuning", "The tuning"


def tuning_section(found: Material) -> Section:
    """What `tuning.json` holds."""
    tuning = found.tuning
    if tuning is None:
        command = f"llmctl tune {found.recipe.name} --fit fit.json --trace TRACE"
        return missing(
            TUNING_KEY,
            TUNING_TITLE,
            "The settings were not tuned yet.",
            command,
            found.why.get("tuning", ""),
        )
    rate = f"{number(tuning.request_rate_rps)} requests/s on {tuning.workers} workers"
    lead = f"{len(tuning.trials):,} trials of policy '{tuning.best_held_out.policy}' and others at {rate}, simulated."
    if len(tuning.policies) < 2:
        lead = lead.replace(" and others", "")
    section = Section(TUNING_KEY, TUNING_TITLE, lead)
    section.figures += [
        one for one in (_front(tuning), _importance(tuning), _swings(tuning)) if one.svg
    ]
    section.tables += [_held_out(tuning), _parameters(tuning)]
    if tuning.policies:
        section.tables.append(_policies(tuning))
    return section


def _front(tuning: Tuning) -> Figure:
    latency = tuning.latency_metric
    known = [
        one
        for one in tuning.trials
        if latency in one.outcome.metrics and "goodput_rps" in one.outcome.metrics
    ]
    front = [one for one in known if one.number in tuning.front]
    front.sort(key=lambda one: one.outcome.metrics[latency])
    best = [one for one in known if _same(one.outcome, tuning.best_held_out)][:1]
    series = [
        _series("trials", known, latency),
        _series("the front", front, latency, "line"),
        _series("defaults", [one for one in known if one.number == 0], latency, "marks"),
        _series("best", best, latency, "marks"),
    ]
    svg = chart(Axes(latency, "goodput, requests/s", series))
    return Figure(svg, "each trial on the search windows; on the front none is better in both")


def _series(
    name: str,
    trials: list[Trial],
    latency: str,
    kind: Literal["points", "line", "marks"] = "points",
) -> ChartSeries:
    xs, ys = ([one.outcome.metrics[key] for one in trials] for key in (latency, "goodput_rps"))
    return ChartSeries(name, xs, ys, kind, [_label(one, latency) for one in trials])


def _label(trial: Trial, latency: str) -> str:
    """A trial in one line, for where a pointer rests on it."""
    outcome = trial.outcome
    settings = ", ".join(f"{name} {word(value)}" for name, value in outcome.parameters.items())
    values = ", ".join(
        f"{key} {quantity(key, outcome.metrics[key])}" for key in ("goodput_rps", latency)
    )
    limits = "in all limits" if trial.feasible else "breaks a limit"
    return f"trial {trial.number}, {outcome.policy}: {values}, {limits}; {settings}"


def _same(one: Outcome, other: Outcome) -> bool:
    return (one.policy, one.parameters) == (other.policy, other.parameters)


def _best_policy(tuning: Tuning) -> PolicyResult | None:
    return next((one for one in tuning.policies if one.policy == tuning.best_held_out.policy), None)


def _importance(tuning: Tuning) -> Figure:
    best = _best_policy(tuning)
    shares = {name: 100 * share for name, share in (best.importance if best else {}).items()}
    return Figure(
        bars(shares, " %"),
        "a parameter's share of what tells the best trials from the others (PED-ANOVA)",
    )


def _swings(tuning: Tuning) -> Figure:
    swings = {one.parameter: one.swing_percent for one in tuning.sensitivity}
    return Figure(
        bars(swings, " %"),
        "how far goodput moves when one parameter of the best is swept over its range",
    )


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
    caption = f"The defaults and the best on {len(tuning.held_out_windows)} windows that the search did not see"
    return Table(caption, ["metric", "defaults", "best", "change"], rows)


def _parameters(tuning: Tuning) -> Table:
    before, after = tuning.defaults_held_out, tuning.best_held_out
    same = before.policy == after.policy
    rows = [
        (
            name,
            word(before.parameters[name]) if same and name in before.parameters else "–",
            word(value),
        )
        for name, value in after.parameters.items()
    ]
    return Table(f"Settings of policy '{after.policy}'", ["parameter", "default", "best"], rows)


def _policies(tuning: Tuning) -> Table:
    latency = tuning.latency_metric
    rows = [
        (
            marked(one.policy, tuning.engines),
            one.trials,
            one.held_out.metrics.get("goodput_rps"),
            one.held_out.metrics.get(latency),
            one.feasible,
        )
        for one in tuning.policies
    ]
    columns = ["policy", "trials", "goodput_rps", latency, "in all limits"]
    said = footnote([one.policy for one in tuning.policies], tuning.engines)
    return Table(
        "Each policy's best trial, held out" + (f" ({said})" if said else ""), columns, rows
    )


# The validation: what was predicted beside what a server then did, with the errors' signs.

VALIDATION_KEY, VALIDATION_TITLE = "validation", "The validation"


def validation_section(found: Material) -> Section:
    """What `validation.json` holds."""
    validation = found.validation
    if validation is None:
        lead = "The predictions were not held against a running server yet."
        return missing(
            VALIDATION_KEY,
            VALIDATION_TITLE,
            lead,
            "llmctl validate plan.json --url URL",
            found.why.get("validation", ""),
        )
    requests = sum(window.requests for window in validation.windows)
    failed = sum(window.failed for window in validation.windows)
    lead = (
        f"{requests:,} requests in {len(validation.windows)} windows of a trace, replayed against {validation.model} "
        f"under policy '{validation.policy}'; {failed:,} failed."
    )
    section = Section(VALIDATION_KEY, VALIDATION_TITLE, lead, lines=[validation.summary()])
    errors = {one.metric: one.error_percent for one in validation.metrics}
    section.figures.append(
        Figure(bars(errors, " %"), "the prediction's error, of the means over the windows")
    )
    rows = [
        (
            one.metric,
            one.measured,
            one.predicted,
            percent(one.error_percent),
            percent(one.worst_percent),
        )
        for one in validation.metrics
    ]
    columns = ["metric", "measured", "predicted", "its error", "worst window"]
    section.tables.append(Table("Means over the windows", columns, rows))
    by_request = [
        (
            one.latency,
            percent(one.median_percent),
            f"{one.median_absolute_percent:.1f} %",
            one.requests,
        )
        for one in validation.requests
    ]
    columns = ["request by request", "median error", "median size of it", "requests"]
    section.tables.append(Table("Request by request", columns, by_request))
    section.lines += [f"Noted: {note}." for note in validation.notes]
    return section
