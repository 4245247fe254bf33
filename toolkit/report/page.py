"""The page: sections of words, charts and tables in one HTML file without scripts.

A section shows its charts before its tables. Tables are folded, except for the verdict's. The
verdict comes first: what to run, its predicted results, and each target kept or broken. Its
badge is the conclusion in one sentence. A value counts as measured where a bench of the shown plan
ran at the rate that the plan was tuned for.
"""

from __future__ import annotations

from dataclasses import dataclass

import toolkit
from toolkit.files.tuning import Limit, Outcome, broken
from toolkit.report.material import BenchResult, Material
from toolkit.report.parts import (
    Badge,
    Cell,
    Figure,
    Judged,
    Sheet,
    Table,
    bars,
    metric_name,
    page_templates,
    quantity,
)
from toolkit.report.sections import (
    bench_section,
    fit_section,
    tuning_section,
)
from toolkit.units import number, words

SHOWN_METRICS = ("goodput_rps", "throughput_rps", "sla_attainment_percent")  # besides the limits


@dataclass(frozen=True, slots=True)
class Promise:
    """The predicted outcome of the settings, their limits, and the bench that measured them."""

    outcome: Outcome
    limits: list[Limit]
    bench: BenchResult | None

    def measured(self, limit: Limit) -> Judged | None:
        """Return the measured value of a limit with its judgement; None: it was not measured."""
        value = self.bench.values.get(limit.name) if self.bench else None
        if value is None:
            return None
        kept = value <= limit.limit if limit.bound == "at most" else value >= limit.limit
        return Judged(quantity(limit.name, value), kept)


def summary_section(files: Material) -> Sheet:
    """The verdict on the files, and the next command."""
    promise = _promise(files)
    sheet = Sheet("verdict", "", badge=_badge(files, promise), commands=[files.next_step])
    sheet.facts = _what_to_run(files)
    if promise:
        sheet.tables.append(_table(promise))
        sheet.figures.append(_shares(promise))
    return sheet


def _promise(files: Material) -> Promise | None:
    """Return what the plan, else the tuning, predicts; None: nothing is predicted."""
    plan = files.plan
    tuning = files.tuning
    bench = next((one for one in files.benches if one.at_rate(files.rate_rps)), None)
    if bench and bench.content.sla != files.recipe.sla:
        bench = None
    if plan is not None and plan.outcome.metrics:
        return Promise(plan.outcome, plan.limits, bench)
    if plan is None and tuning is not None:
        return Promise(tuning.recommended.outcome, tuning.limits, bench)
    return None


def _badge(files: Material, promise: Promise | None) -> Badge:
    if promise is None:
        what = "These settings were not tuned" if files.plan else "Nothing was tuned yet"
        return Badge("open", f"{what}: nothing predicts whether the targets will be kept.")
    if missed := broken(promise.limits):
        texts = [
            f"{metric_name(one.name)} is {one.prediction()}, must be {one.allowed()}"
            for one in missed
        ]
        return Badge("broken", f"Not every target is kept, as predicted: {'; '.join(texts)}.")
    bench = promise.bench
    judged = {metric_name(limit.name): promise.measured(limit) for limit in promise.limits}
    over = [name for name, one in judged.items() if one and not one.kept]
    if bench and over:
        measured = f"{bench.name} measured {', '.join(over)} broken"
        return Badge("broken", f"Predicted to keep every target, but {measured}.")
    unpredicted = [metric_name(limit.name) for limit in promise.limits if limit.kept is None]
    if unpredicted:
        return Badge("open", f"Nothing predicts {', '.join(unpredicted)}.")
    measured = f"as measured ({bench.name})" if bench else "not measured at this rate yet"
    return Badge("kept", f"Every target is kept, as predicted; {measured}.")


def _what_to_run(files: Material) -> list[tuple[str, str]]:
    """Policy, workers and workload of the plan; without one, of the tuning; else workers only."""
    plan = files.plan
    tuning = files.tuning
    facts: list[tuple[str, str]] = []
    settings = plan.settings if plan else tuning.recommended.settings if tuning else None
    if settings:
        facts.append(("Policy", settings.policy))
    if settings and settings.parameters:
        facts.append(("Parameters", words(settings.parameters)))
    fit = plan.fit if plan else files.fit
    if fit is not None:
        workers = (plan or tuning or files.recipe).workers
        where = f"{fit.engine.engine} on {fit.engine.device}"
        facts.append(("Workers", f"{workers} with engine {where}"))
    if plan is not None and plan.workload:
        rate = f"{number(plan.workload.request_rate_rps)} requests/s"
        facts.append(("Tuned for", f"{plan.workload.trace} at {rate}"))
    elif plan is None and tuning is not None:
        trace = tuning.inputs["trace"].name if "trace" in tuning.inputs else "a trace"
        facts.append(("Tuned for", f"{trace} at {tuning.load}"))
    return facts


def _table(promise: Promise) -> Table:
    """The shown metrics, then every limit: predicted and, where known, measured."""
    bench = promise.bench
    rows: list[list[Cell]] = []
    known = {limit.name for limit in promise.limits}
    sources = [promise.outcome.metrics, *([bench.values] if bench else [])]
    for key in SHOWN_METRICS:
        if key in promise.outcome.metrics and key not in known:
            shown = [quantity(key, one[key]) if key in one else None for one in sources]
            rows.append([metric_name(key), "none", *shown])
    for limit in promise.limits:
        text = limit.prediction()
        predicted = text if limit.kept is None else Judged(text, limit.kept)
        cells = [predicted, promise.measured(limit)]
        rows.append([metric_name(limit.name), limit.allowed(), *cells[: len(sources)]])
    columns = ["", "limit", "predicted", *([f"measured, {bench.name}"] if bench else [])]
    return Table("What it will give", columns, rows, folded=False)


def _shares(promise: Promise) -> Figure:
    """The used share of each latency target, predicted and measured."""
    bench = promise.bench
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
        bars(shares, 100.0, "broken"),
        "used share of each latency target; kept up to 100 %",
    )


def report(files: Material) -> str:
    """The page as HTML. The same files give the same text."""
    sources: list[list[Cell]] = [
        [one.role, one.name, one.date, one.sha256] for one in files.sources
    ]
    sections = [
        summary_section(files),
        bench_section(files),
        tuning_section(files),
        fit_section(files),
        Sheet(
            "origin",
            "Made from these files; another digest is another file.",
            tables=[Table("Files", ["role", "name", "date", "sha256"], sources)],
        ),
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
    return page_templates().get_template("report.html.j2").render(page=page)
