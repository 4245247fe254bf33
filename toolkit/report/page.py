"""The page: sections of words, charts and tables in one HTML file without scripts.

A section shows its charts before its tables. Tables are folded, except for that of the verdict.
The verdict comes first: what to run, its predicted results, each target kept or broken, and checks.
Its badge is the conclusion in one sentence. A value counts as measured where a bench of
the shown plan ran at the rate that the plan was tuned for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jinja2

import toolkit
from toolkit.files.shipped import shipped_templates
from toolkit.files.tuning import Limit, ParameterValue, broken
from toolkit.report.material import Material, environment_section
from toolkit.report.parts import (
    Badge,
    Cell,
    Figure,
    Judged,
    Sheet,
    Table,
    bars,
    metric_name,
    quantity,
)
from toolkit.report.sections import (
    bench_section,
    fit_section,
    tuning_section,
)
from toolkit.report.verdict import verdict
from toolkit.units import number, percent, words

SHOWN_METRICS = ("goodput_rps", "throughput_rps", "sla_attainment_percent")  # besides the limits
CHECKED_METRICS = ("goodput_rps", "throughput_rps", "e2e_mean_s")
NOTABLE_SLOWDOWN = 1.2  # above it, the slow machine is named where a target was broken


@dataclass(frozen=True, slots=True)
class MeasuredTargets:
    """Values from one file, measured at the rate that the plan was tuned for.

    `slowdown` is the measured over the fitted batch time; None where it is not known.
    """

    name: str
    values: Mapping[str, float]
    slowdown: float | None = None


@dataclass(frozen=True, slots=True)
class Promise:
    """The predicted results of the settings, and the measured ones."""

    metrics: Mapping[str, float]
    limits: list[Limit]
    measured: MeasuredTargets | None


def summary_section(files: Material) -> Sheet:
    """The verdict on the files, and the next command."""
    promise: Promise | None = None
    if files.plan is not None:
        promise = Promise(files.plan.outcome.metrics, files.plan.limits, _measured(files))
    elif files.tuning is not None:
        tuned = files.tuning
        promise = Promise(tuned.recommended.metrics, tuned.limits, _measured(files))
    if promise is not None and not promise.metrics:
        promise = None
    section = Sheet("verdict", "", badge=_badge(files, promise))
    section.commands = [files.next_step]
    section.facts = _what_to_run(files)
    if promise:
        section.tables.append(_table(promise))
        section.figures.append(_shares(promise))
    section.lines += [*_checks(files), *_notes(files)]
    return section


def _share(limit: Limit) -> float | None:
    """The used share of a limit. A lower limit in percent is used by 100 minus the value."""
    if limit.predicted is None:
        return None
    used = limit.predicted
    may = limit.limit
    if limit.bound == "at least":
        used = 100 - used
        may = 100 - may
    if may:
        return used / may
    return 2.0 if used else 0.0


def _judge(limit: Limit, bench: MeasuredTargets | None) -> Judged | None:
    """Return the measured value of a limit with its judgement; None where it was not measured."""
    value = bench.values.get(limit.name) if bench else None
    if value is None:
        return None
    kept = value <= limit.limit if limit.bound == "at most" else value >= limit.limit
    return Judged(quantity(limit.name, value), kept)


def _measured(files: Material) -> MeasuredTargets | None:
    """Return the newest bench of the shown plan that ran at its rate."""
    rate = files.rate_rps
    sla = files.recipe.sla
    for bench in files.benches:
        if bench.at_rate(rate) and bench.content.sla == sla:
            # Not every target is a metric of a bench.
            measured = bench.content.measured
            targets = {name: share * sla[name] for name, share in measured.used.items()}
            every = measured.metrics | targets
            return MeasuredTargets(bench.name, every, bench.content.replay_slowdown)
    return None


def _badge(files: Material, promise: Promise | None) -> Badge:
    if promise is None:
        what = "These settings were not tuned" if files.plan else "Nothing was tuned yet"
        return Badge("open", f"{what}: nothing predicts whether the targets will be kept.")
    missed = broken(promise.limits)
    bench = promise.measured
    measured = [
        metric_name(limit.name)
        for limit in (promise.limits if bench else ())
        if (judged := _judge(limit, bench)) and not judged.kept
    ]
    if missed:
        texts = []
        for limit in sorted(missed, key=lambda limit: -(_share(limit) or 0.0)):
            what = f"{metric_name(limit.name)} is {limit.prediction()}, must be {limit.allowed()}"
            share = _share(limit)
            if limit.bound == "at most" and limit.limit and share is not None:
                what += f", {number(100 * share)} % of the limit"
            texts.append(what)
        return Badge("broken", f"Not every target is kept, as predicted: {'; '.join(texts)}.")
    if bench and measured:
        names = _listed(measured)
        text = f"Predicted to keep every target, but the measurement broke {names} ({bench.name})."
        if bench.slowdown and bench.slowdown > NOTABLE_SLOWDOWN:
            text += f" Batches took {bench.slowdown:.2f} times as long as fitted."
        return Badge("broken", text)
    unpredicted = [metric_name(limit.name) for limit in promise.limits if limit.kept is None]
    if unpredicted:
        return Badge("open", f"Nothing predicts {_listed(unpredicted)}.")
    if bench:
        text = f"Every target is kept: as predicted, and as measured ({bench.name})."
        return Badge("kept", text)
    return Badge("kept", "Every target is kept, as predicted; not measured at this rate yet.")


def _listed(names: list[str]) -> str:
    *first, last = dict.fromkeys(names)
    return f"{', '.join(first)} and {last}" if first else last


def _what_to_run(files: Material) -> list[tuple[str, str]]:
    """Policy, workers and workload of the plan; without one, of the tuning; else workers only."""
    plan = files.plan
    tuning = files.tuning
    recipe = files.recipe
    facts: list[tuple[str, str]] = []
    if plan is not None:
        facts += _policy(plan.settings.policy, plan.settings.parameters)
    elif tuning is not None:
        settings = tuning.recommended.settings
        facts += _policy(settings.policy, settings.parameters)
    fit = plan.fit if plan else files.fit
    if fit is not None:
        workers = (plan or tuning or recipe).workers
        where = f"{fit.engine.engine} on {fit.engine.device}"
        facts.append(("Workers", f"{workers} with engine {where}"))
    if plan is not None and plan.workload:
        trace = plan.workload.trace
        rate = plan.workload.request_rate_rps
        facts.append(("Tuned for", f"{trace} at {number(rate)} requests/s"))
    elif plan is None and tuning is not None:
        trace = tuning.inputs["trace"].name if "trace" in tuning.inputs else "a trace"
        facts.append(("Tuned for", f"{trace} at {tuning.load}"))
    return facts


def _policy(name: str, parameters: Mapping[str, ParameterValue]) -> list[tuple[str, str]]:
    facts = [("Policy", name)]
    return [*facts, ("Parameters", words(parameters))] if parameters else facts


def _checks(files: Material) -> list[str]:
    """The measurements that the predictions were compared with, a sentence each."""
    if files.plan is None and files.tuning is None:
        return []
    texts = []
    for bench in files.benches:
        content = bench.content
        text = f"{bench.name}: {content.answered:,} requests"
        if content.request_rate_rps is not None:
            text += f" at {number(content.request_rate_rps)} requests/s"
        if bench.at_rate(files.rate_rps):
            text += ", the rate it was tuned for"
        errors = {row.metric: row.error_percent for row in content.compared}
        shown = [
            f"{metric_name(key)} {percent(error)}"
            for key in CHECKED_METRICS
            if (error := errors.get(key)) is not None
        ]
        off = f"the prediction's errors: {', '.join(shown)}"
        text += f"; {off if shown else 'nothing was predicted for it'}"
        if content.replay_slowdown:
            text += f"; batches took {content.replay_slowdown:.2f} times as long as fitted"
        texts.append(text)
    none = "no running server yet: every number is simulated with the fit"
    return [f"Checked against {text}." for text in texts or [none]]


def _table(promise: Promise) -> Table:
    """The shown metrics, then every limit: predicted and, where known, measured."""
    bench = promise.measured
    rows: list[list[Cell]] = []
    known = {limit.name for limit in promise.limits}
    for key in SHOWN_METRICS:
        if key in promise.metrics and key not in known:
            values = [promise.metrics[key], *([bench.values.get(key)] if bench else [])]
            shown = [None if value is None else quantity(key, value) for value in values]
            rows.append([metric_name(key), "none", *shown])
    for limit in promise.limits:
        measured = [_judge(limit, bench)] if bench else []
        text = limit.prediction()
        kept = limit.kept
        predicted = text if kept is None else Judged(text, kept)
        rows.append([metric_name(limit.name), limit.allowed(), predicted, *measured])
    columns = ["", "limit", "predicted", *([f"measured, {bench.name}"] if bench else [])]
    return Table("What it will give", columns, rows, folded=False)


def _shares(promise: Promise) -> Figure:
    """The used share of each latency target, predicted and measured."""
    bench = promise.measured
    shares: dict[str, float] = {}
    for limit in promise.limits:
        if not limit.name.endswith("_s") or limit.predicted is None:
            continue
        values = {"predicted": limit.predicted}
        if bench and limit.name in bench.values:
            values["measured"] = bench.values[limit.name]
        for where, value in values.items():
            shares[f"{metric_name(limit.name)}, {where}"] = 100 * value / limit.limit
    return Figure(
        bars(shares, " %", limit=100.0),
        "used share of each latency target; kept up to the dashed line",
    )


def _notes(files: Material) -> list[str]:
    """The conclusions of the tuning, and the changes to its trace."""
    tuning = files.tuning
    if tuning is None:
        return []
    lines: list[str] = []
    for line in verdict(tuning):
        if line.startswith("  ") and lines:
            lines[-1] += f"{'' if lines[-1].endswith(':') else ';'} {line.strip()}"
        else:
            lines.append(line)
    plan = files.plan
    recommended = tuning.recommended.settings
    same = plan is None or (
        plan.settings.policy == recommended.policy
        and plan.settings.parameters == recommended.parameters
    )
    if not same:
        other = f"the plan runs other settings than {files.file_name('tuning')} found"
        lines.insert(0, f"{other}; the rest is about the found ones")
    noted = [f"The trace: {note}." for note in tuning.trace_notes]
    return [*(f"The tuning: {line}." for line in lines), *noted]


def report(files: Material) -> str:
    """The page as HTML. The same files give the same text."""
    sections = [
        summary_section(files),
        bench_section(files),
        tuning_section(files),
        fit_section(files),
        environment_section(files),
    ]
    return render_page(files.recipe.name, files.recipe.description, sections, files.made)


def render_page(title: str, description: str, sections: list[Sheet], made: str = "") -> str:
    """A page of these sections as HTML; `made` says when and on which machine."""
    page = {
        "title": title,
        "description": description,
        "made": made,
        "version": toolkit.__version__,
        "sections": sections,
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(shipped_templates()),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("report.html.j2").render(page=page)
