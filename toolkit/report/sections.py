"""The sections about benches, the tuning and the fit.

Each `..._section` shows one kind of file. Where the file is missing, the section names the command
that makes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from toolkit.files.tuning import Evaluation, Tuning
from toolkit.report.material import BenchResult, Material
from toolkit.report.parts import (
    ChartPoint,
    ChartSeries,
    Figure,
    Sheet,
    bars,
    chart,
)
from toolkit.report.rows import (
    agreement_notes,
    bench_notes,
    bench_tables,
    fit_table,
    tuning_tables,
)
from toolkit.report.steps import typed
from toolkit.report.verdict import verdict
from toolkit.units import counted, number, words

LARGE_PERCENT = 15.0  # a larger error of a prediction is red: the aim for latencies


def _missing(files: Material, key: str, lead: str, command: str) -> Sheet:
    """A section without content, the command that makes it, and why its file was left out."""
    why = files.why.get(key)
    makes = [("This makes it", command)]
    return Sheet(key, lead, lines=[why] if why else [], commands=makes)


def bench_section(files: Material) -> Sheet:
    """The replays against running servers (`llmctl bench --out`), measured and predicted."""
    left_out = [why for name, why in files.why.items() if name.endswith(".json")]
    if not files.benches:
        rate = ["--rate", f"{files.rate_rps:.3g}"] if files.rate_rps else []
        command = typed("bench", "--plan", files.file_name("plan"), *rate)
        lead = "No trace was replayed against a running server of this plan yet."
        section = _missing(files, "bench", lead, command)
        section.lines += [f"Left out: {why}." for why in left_out]
        return section
    requests = sum(bench.content.answered for bench in files.benches)
    replays = counted(len(files.benches), "replay")
    lead = f"{replays} against a running server, {requests:,} requests: measured, not simulated."
    section = Sheet("bench", lead)
    for bench in files.benches:
        section.lines.append(_bench_line(bench, files.rate_rps))
        section.lines += bench_notes(bench.content)
        errors = {
            row.metric: row.error_percent
            for row in bench.content.compared
            if row.error_percent is not None
        }
        drawn = bars(errors, LARGE_PERCENT, "large")
        caption = f"{_title(bench)}: the prediction's error; red beyond {LARGE_PERCENT:g} %"
        section.figures.append(Figure(drawn, caption))
        section.tables += bench_tables(bench.content, _title(bench))
    section.lines += [f"Left out: {why}." for why in left_out]
    return section


def _title(bench: BenchResult) -> str:
    """The plan, the policy and the rate of a bench."""
    content = bench.content
    policy = f", policy '{content.policy}'" if content.policy else ""
    rate = f", {number(content.request_rate_rps)} requests/s" if content.request_rate_rps else ""
    return f"{bench.name}: {content.inputs['plan'].name}{policy}{rate}"


def _bench_line(bench: BenchResult, rate_rps: float | None) -> str:
    """What was replayed."""
    content = bench.content
    what = " at the rate that it was tuned for" if bench.at_rate(rate_rps) else ""
    given = ""
    if content.lengths == "given":
        given = "; each request had its output length as limit, unlike those of real clients"
    counts = f"{content.answered:,} of {content.requests:,} requests"
    return f"{_title(bench)}{what}: {counts}{given}."


def fit_section(files: Material) -> Sheet:
    """The laws of `fit.json` and their errors."""
    fit = files.fit
    tuning = files.tuning
    if fit is None and tuning is not None and tuning.analytic:
        section = Sheet("fit", "The laws were computed for the tuning; no file has them.")
        section.lines.append(f"Nothing here was measured: {tuning.analytic}")
        return section
    if fit is None:
        command = f"{typed('profile', files.recipe_file)}; llmctl fit profile.json"
        return _missing(files, "fit", "Nothing was fitted yet.", command)
    where = f"{fit.engine.engine} on {fit.engine.device}, {counted(fit.workers, 'worker')}"
    section = Sheet("fit", f"Laws of time and memory for {where}.")
    if fit.engine.analytic:
        section.lines.append(f"Nothing here was measured: {fit.engine.analytic}")
    if fit.steps and fit.steps.resolved:
        version = f"{fit.engine.engine} {fit.engine.engine_version}"
        served = fit.steps.resolved.words(fit.engine.dtype)
        section.lines.append(f"Measured was {version} with {served}.")
    section.lines += [f"{line}." for line in agreement_notes(fit)]
    section.tables.append(fit_table(fit))
    return section


def tuning_section(files: Material) -> Sheet:
    """The trials of `tuning.json`, their front, the gain on the whole trace, and what matters."""
    tuning = files.tuning
    if tuning is None:
        command = typed("tune", files.recipe_file)
        return _missing(files, "tuning", "The settings were not tuned yet.", command)
    sheet = tuning_sheet(tuning, tuning.defaults.metrics)
    sheet.lines += [f"The trace: {note}" for note in tuning.trace_notes]
    ours, found = (one and one.settings for one in (files.plan, tuning.recommended))
    if ours and found and (ours.policy, ours.parameters) != (found.policy, found.parameters):
        other = f"the plan runs other settings than {files.file_name('tuning')} found"
        sheet.lines.insert(0, f"{other}; the rest is about the found ones")
    return sheet


def tuning_sheet(tuning: Tuning, metrics: Iterable[str]) -> Sheet:
    """Return a tuning with these metrics: its trials and their front, the gain on the whole trace,
    and what matters.
    """
    rate = f"{tuning.load} on {counted(tuning.workers, 'worker')}"
    others = " and others" if len(tuning.policies) > 1 else ""
    policies = f"policy '{tuning.best.settings.policy}'{others}"
    lead = f"{len(tuning.trials):,} trials of {policies} at {rate}, simulated."
    swings = {swept.parameter: swept.swing_percent for swept in tuning.sensitivity}
    swept = "how far goodput moves when one parameter of the best is swept over its range"
    figures = [_front(tuning), Figure(bars(swings, math.inf, ""), swept)]
    tables = tuning_tables(tuning, metrics)
    return Sheet("tuning", lead, tables=tables, figures=figures, lines=verdict(tuning))


def _front(tuning: Tuning) -> Figure:
    latency = tuning.latency_metric
    metrics = {latency, "goodput_rps"}
    known = {
        number: trial
        for number, trial in enumerate(tuning.trials)
        if metrics <= trial.metrics.keys() and not trial.screened_out
    }
    front = [number for number in tuning.front if number in known]
    front.sort(key=lambda number: known[number].metrics[latency])
    best = [number for number in known if known[number].settings == tuning.best.settings][:1]
    defaults = [number for number in known if number == 0]
    series = [
        _series("trials", known, [*known], latency),
        _series("the front", known, front, latency, "line"),
        _series("defaults", known, defaults, latency, "marks"),
        _series("best", known, best, latency, "marks"),
    ]
    caption = "each trial on the search windows; no trial beats those on the front in both"
    return Figure(chart(latency, "goodput, requests/s", series), caption)


def _series(
    name: str,
    trials: Mapping[int, Evaluation],
    numbers: Sequence[int],
    latency: str,
    kind: Literal["points", "line", "marks"] = "points",
) -> ChartSeries:
    """The goodput of the trials of these numbers over a latency; a point's label is its trial in
    one line.
    """
    points: list[ChartPoint] = []
    for index in numbers:
        trial = trials[index]
        limits = "keeps all limits" if trial.outcome.kept else "breaks a limit"
        which = f"trial {index}, {trial.settings.policy}, {limits}"
        label = f"{which}: {words(trial.settings.parameters)}"
        points.append((trial.metrics[latency], trial.goodput_rps, label))
    return ChartSeries(name, points, kind)
