"""The page: sections of words, charts and tables in one HTML file without scripts.

A section shows its charts before its tables. Tables are folded, except for that of the verdict.
The verdict comes first: what to run, its predicted results, each target kept or broken, and checks.
Its badge is the conclusion in one sentence. A value counts as measured where a bench or a
validation of the shown plan ran at the rate that the plan was tuned for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jinja2

import toolkit
from toolkit.files.shipped import shipped_templates
from toolkit.files.tuning import Limit, ParameterValue, broken
from toolkit.report.material import BenchResult, Material, environment_section
from toolkit.report.parts import (
    Badge,
    Cell,
    Figure,
    Judged,
    Section,
    Table,
    bars,
    metric_name,
    quantity,
)
from toolkit.report.sections import (
    bench_section,
    fit_section,
    plan_section,
    tuning_section,
    validation_section,
)
from toolkit.report.verdict import verdict
from toolkit.units import number, percent, word

KEY, TITLE = "verdict", "The verdict"
SHOWN_METRICS = ("goodput_rps", "throughput_rps", "sla_attainment_percent")  # besides the limits
CHECKED_METRICS = ("goodput_rps", "throughput_rps", "e2e_mean_s")
# Windows of a bursty trace have other rates than the whole trace. Within this share of the plan's
# rate, a validation counts as being at that rate.
WINDOWS_RATE = 0.2
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
    measured: list[MeasuredTargets] = field(default_factory=list)

    @property
    def broken_measured(self) -> list[tuple[Limit, MeasuredTargets]]:
        return [
            (limit, source)
            for source in self.measured
            for limit in self.limits
            if (judged := _judge(limit, source.values.get(limit.name))) and not judged.kept
        ]


def summary_section(found: Material) -> Section:
    """The verdict on the found files, and the next command."""
    promise = _promise(found)
    section = Section(KEY, TITLE, "", badge=_badge(found, promise))
    section.commands, section.facts = [_next_command(found)], _what_to_run(found)
    if promise:
        section.tables.append(_table(promise))
        figure = _shares(promise)
        section.figures += [figure] if figure.svg else []
    section.lines += [*_checks(found), *_notes(found)]
    return section


def _promise(found: Material) -> Promise | None:
    """The predictions of the plan or the tuning; None where there are none."""
    plan, tuning = found.plan, found.tuning
    if plan is not None:
        metrics, limits = plan.predicted, plan.limits
    elif tuning is not None:
        metrics, limits = tuning.recommended.metrics, tuning.limits
    else:
        return None
    return Promise(metrics, limits, _measured(found)) if metrics else None


def _share(limit: Limit) -> float | None:
    """The used share of a limit. A lower limit in percent is used by 100 minus the value."""
    if limit.predicted is None:
        return None
    used, may = (
        (limit.predicted, limit.limit)
        if limit.bound == "at most"
        else (100 - limit.predicted, 100 - limit.limit)
    )
    return used / may if may else (2.0 if used else 0.0)


def _judge(limit: Limit, value: float | None) -> Judged | None:
    """A measured value with its judgement against the limit."""
    if value is None:
        return None
    return Judged(
        quantity(limit.name, value),
        value <= limit.limit if limit.bound == "at most" else value >= limit.limit,
    )


def _measured(found: Material) -> list[MeasuredTargets]:
    """The newest bench and the validation of the shown plan that ran at its rate."""
    rate, sla = found.rate_rps, found.recipe.sla
    measured = []
    for bench in found.benches:
        if bench.of_plan and bench.at_rate(rate) and bench.content.sla == sla:
            # Not every target is a metric of a bench.
            targets = {target.target: target.measured_s for target in bench.content.targets}
            every = bench.content.measured | targets
            measured.append(MeasuredTargets(bench.name, every, bench.content.replay_slowdown))
            break
    validation = found.validation
    if validation is not None and rate and found.is_of_plan(validation):
        requests = sum(window.requests for window in validation.windows)
        seconds = sum(window.end_s - window.start_s for window in validation.windows)
        values = {row.metric: row.measured for row in validation.metrics}
        if (
            abs(requests - rate * seconds) <= WINDOWS_RATE * rate * seconds
            and values.keys() & sla.keys()
        ):
            measured.append(MeasuredTargets(found.file_name("validation"), values))
    return measured


def _badge(found: Material, promise: Promise | None) -> Badge:
    if promise is None:
        what = "These settings were not tuned" if found.plan else "Nothing was tuned yet"
        return Badge("open", f"{what}: nothing predicts whether the targets will be kept.")
    missed, measured = broken(promise.limits), promise.broken_measured
    if missed:
        worst_first = sorted(missed, key=lambda limit: -(_share(limit) or 0.0))
        return Badge(
            "broken", f"Not every target is kept, as predicted: {'; '.join(map(_at, worst_first))}."
        )
    if measured:
        names = _listed([metric_name(limit.name) for limit, _ in measured])
        where = _listed(sorted({source.name for _, source in measured}))
        slow = max((source.slowdown or 0.0 for _, source in measured), default=0.0)
        pace = (
            f" Batches took {slow:.2f} times as long as fitted." if slow > NOTABLE_SLOWDOWN else ""
        )
        text = f"Predicted to keep every target, but the measurement broke {names} ({where}).{pace}"
        return Badge("broken", text)
    if any(limit.kept is None for limit in promise.limits):
        unpredicted = [limit.name for limit in promise.limits if limit.kept is None]
        unknown = _listed([metric_name(name) for name in unpredicted])
        return Badge("open", f"Nothing predicts {unknown}.")
    if promise.measured:
        where = _listed([source.name for source in promise.measured])
        return Badge("kept", f"Every target is kept: as predicted, and as measured ({where}).")
    return Badge("kept", "Every target is kept, as predicted; not measured at this rate yet.")


def _at(limit: Limit) -> str:
    """A broken limit: the prediction, the limit, and the used share of it."""
    what = f"{metric_name(limit.name)} is {limit.prediction()}, must be {limit.allowed()}"
    share = _share(limit)
    if limit.bound == "at least" or not limit.limit or share is None:
        return what
    return f"{what}, {number(100 * share)} % of the limit"


def _listed(names: list[str]) -> str:
    unique = list(dict.fromkeys(names))
    return " and ".join(filter(None, [", ".join(unique[:-1]), unique[-1]]))


def _what_to_run(found: Material) -> list[tuple[str, str]]:
    """Policy, workers and workload of the plan; without one, of the tuning; else workers only."""
    plan, tuning, recipe = found.plan, found.tuning, found.recipe
    facts: list[tuple[str, str]] = []
    if plan is not None:
        facts += _policy(plan.policy.name, plan.policy.parameters, plan.kind_parameters)
        kinds = [(f"{kind.recipe.name}: ", kind.fit, kind.workers) for kind in plan.kinds]
    elif tuning is not None:
        outcome = tuning.recommended
        facts += _policy(outcome.policy, outcome.parameters, outcome.kind_parameters)
        kinds = [("", found.fit, tuning.workers)] if found.fit else []
        if tuning.sizing and tuning.sizing.kinds:
            servers = [f"{kind.workers} of {kind.recipe}" for kind in tuning.sizing.kinds]
            facts.append(("Servers", ", ".join(servers)))
            kinds = []
    else:
        kinds = [("", found.fit, recipe.workers)] if found.fit else []
    several = len(kinds) > 1
    for name, fit, workers in kinds:
        where = f"{fit.engine.engine} on {fit.engine.device}"
        facts.append(("Workers", f"{name if several else ''}{workers} with engine {where}"))
    if plan is not None and plan.workload:
        trace, rate = plan.workload.trace, plan.workload.request_rate_rps
        facts.append(("Tuned for", f"{trace} at {number(rate)} requests/s"))
    elif plan is None and tuning is not None:
        trace = tuning.inputs["trace"].name if "trace" in tuning.inputs else "a trace"
        facts.append(("Tuned for", f"{trace} at {number(tuning.request_rate_rps)} requests/s"))
    return facts


def _policy(
    name: str,
    parameters: Mapping[str, ParameterValue],
    kinds: Mapping[str, Mapping[str, ParameterValue]],
) -> list[tuple[str, str]]:
    facts = [("Policy", name)]
    named = {"Parameters": parameters} | {f"Parameters of {kind}": kinds[kind] for kind in kinds}
    for key, of_kind in named.items():
        settings = ", ".join(f"{each} {word(value)}" for each, value in of_kind.items())
        facts += [(key, settings)] if settings else []
    return facts


def _checks(found: Material) -> list[str]:
    """The measurements that the predictions were compared with, a sentence each."""
    texts = [_check(bench, found.rate_rps) for bench in found.benches if bench.of_plan]
    if found.validation is not None:
        other = "" if found.is_of_plan(found.validation) else " (another plan of the same fit)"
        texts.append(f"{found.file_name('validation')}{other}: {found.validation.summary()}")
    if found.plan is None and found.tuning is None:
        return []
    return [
        f"Checked against {text}."
        for text in texts or ["no running server yet: every number is simulated with the fit"]
    ]


def _check(bench: BenchResult, rate_rps: float | None) -> str:
    content = bench.content
    rate = ""
    if content.request_rate_rps is not None:
        rate = f" at {number(content.request_rate_rps)} requests/s"
    if bench.at_rate(rate_rps):
        rate += ", the rate it was tuned for"
    errors = {row.metric: row.error_percent for row in content.compared}
    shown = [
        f"{metric_name(key)} {percent(error)}"
        for key in CHECKED_METRICS
        if (error := errors.get(key)) is not None
    ]
    off = "; nothing was predicted for it"
    if shown:
        off = f"; the prediction's errors: {', '.join(shown)}"
    slow = content.replay_slowdown
    pace = f"; batches took {slow:.2f} times as long as fitted" if slow else ""
    return f"{bench.name}: {content.answered:,} requests{rate}{off}{pace}"


def _next_command(found: Material) -> tuple[str, str]:
    name, fit = found.recipe.name, found.file_name("fit")
    if found.plan is not None:
        return "Start it", f"llmctl serve {found.file_name('plan')}"
    if found.tuning is not None:
        tuning = found.file_name("tuning")
        return "Plan it", f"llmctl render {name} --fit {fit} --tuning {tuning}"
    if found.fit is not None:
        return "Tune it", f"llmctl tune {name} --fit {fit} --trace TRACE"
    return "Measure it", f"llmctl profile {name}; llmctl fit profile.json"


def _table(promise: Promise) -> Table:
    """The shown metrics, then every limit: predicted and, where known, measured."""
    columns = [
        "",
        "limit",
        "predicted",
        *(f"measured, {source.name}" for source in promise.measured),
    ]
    rows: list[list[Cell]] = []
    known = {limit.name for limit in promise.limits}
    for key in SHOWN_METRICS:
        if key in promise.metrics and key not in known:
            values = [m.values.get(key) for m in promise.measured]
            given = [None if value is None else quantity(key, value) for value in values]
            rows.append([metric_name(key), "none", quantity(key, promise.metrics[key]), *given])
    for limit in promise.limits:
        measured = [_judge(limit, m.values.get(limit.name)) for m in promise.measured]
        predicted = (
            limit.prediction() if limit.kept is None else Judged(limit.prediction(), limit.kept)
        )
        rows.append([metric_name(limit.name), limit.allowed(), predicted, *measured])
    return Table("What it will give", columns, rows, folded=False)


def _shares(promise: Promise) -> Figure:
    """The used share of each latency target, predicted and measured."""
    shares: dict[str, float] = {}
    titles: dict[str, str] = {}
    for limit in promise.limits:
        if not limit.name.endswith("_s") or limit.predicted is None:
            continue
        measured = [
            (f"measured, {m.name}", m.values[limit.name])
            for m in promise.measured
            if limit.name in m.values
        ]
        for where, value in [("predicted", limit.predicted), *measured]:
            name = f"{metric_name(limit.name)}, {where.partition(',')[0]}"
            if name not in shares:  # the bench comes first of two measurements
                shares[name] = 100 * value / limit.limit
                values = f"{quantity(limit.name, value)}, {limit.allowed()}"
                titles[name] = f"{metric_name(limit.name)}, {where}: {values}"
    svg = bars(shares, " %", limit=100.0, titles=titles)
    return Figure(svg, "used share of each latency target; kept up to the dashed line")


def _notes(found: Material) -> list[str]:
    """The conclusions of the tuning, and the changes to its trace."""
    tuning = found.tuning
    if tuning is None:
        return []
    lines: list[str] = []
    for line in verdict(tuning):
        if line.startswith("  ") and lines:
            lines[-1] += f"{'' if lines[-1].endswith(':') else ';'} {line.strip()}"
        else:
            lines.append(line)
    plan, best = found.plan, tuning.recommended
    # an older tuning says nothing of a fleet's further kinds
    kinds = plan.kind_parameters if plan is not None and best.kind_parameters else {}
    if plan is not None and (plan.policy.name, plan.policy.parameters, kinds) != (
        best.policy,
        best.parameters,
        best.kind_parameters,
    ):
        name = found.file_name("tuning")
        lines.insert(
            0, f"the plan runs other settings than {name} found; the rest is about the found ones"
        )
    return [
        *(f"The tuning: {line}." for line in lines),
        *(f"The trace: {note}." for note in tuning.trace_notes),
    ]


@dataclass(frozen=True, slots=True)
class Report:
    """The page, for its template."""

    title: str
    description: str
    version: str
    sections: Sequence[Section] = field(default_factory=tuple)


def report(found: Material) -> str:
    """The page as HTML. The same files give the same text."""
    sections = [
        summary_section(found),
        bench_section(found),
        validation_section(found),
        tuning_section(found),
        fit_section(found),
        plan_section(found),
        environment_section(found),
    ]
    page = Report(found.recipe.name, found.recipe.description, toolkit.__version__, sections)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(shipped_templates()),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("report.html.j2").render(page=page)
