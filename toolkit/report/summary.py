"""The page's first section: what to run, what it will give, each target kept or broken, and what
checked that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from toolkit.files.plan import Plan
from toolkit.files.tuning import Limit, Outcome, ParameterValue, broken
from toolkit.report.material import BenchResult, Material
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
    word,
)
from toolkit.report.verdict import verdict
from toolkit.units import number, percent

KEY, TITLE = "verdict", "The verdict"
GIVEN = (
    "goodput_rps",
    "throughput_rps",
    "sla_attainment_percent",
)  # what it gives besides its limits
# Windows of a bursty trace have other rates than the whole: within this share a validation is at
# the plan's rate.
WINDOWS_RATE = 0.2
SLOW = 1.2  # from here on a slow machine is named where a target was broken
TOLD_OF_CHECKS = ("goodput_rps", "throughput_rps", "e2e_mean_s")


@dataclass(frozen=True, slots=True)
class MeasuredTargets:
    """Where values were measured at the rate that the plan was tuned for.

    `slowdown`: batches took so many times as long as fitted meanwhile; None where nothing says
    that.
    """

    name: str
    values: Mapping[str, float]
    slowdown: float | None = None


@dataclass(frozen=True, slots=True)
class Promise:
    """What the settings are expected to give, and what they gave."""

    metrics: Mapping[str, float]
    limits: list[Limit]
    measured: list[MeasuredTargets] = field(default_factory=list)

    @property
    def broken_measured(self) -> list[tuple[Limit, MeasuredTargets]]:
        return [
            (limit, one)
            for one in self.measured
            for limit in self.limits
            if (judged := _judge(limit, one.values.get(limit.name))) and not judged.kept
        ]


def summary_section(found: Material) -> Section:
    """The verdict on what is there. Where nothing was tuned it says so, and names the next command."""
    promise = _promise(found)
    section = Section(KEY, TITLE, "", badge=_badge(found, promise))
    section.commands, section.facts = [_next_command(found)], _what_to_run(found)
    if promise:
        section.tables.append(_table(promise))
        figure = _shares(promise)
        section.figures += [figure] if figure.svg else []
    section.lines += [*_checks(found), *_notes(found)]
    return section


def _is_of(plan: Plan, outcome: Outcome) -> bool:
    return (plan.policy.name, plan.policy.parameters) == (outcome.policy, outcome.parameters)


def _promise(found: Material) -> Promise | None:
    """None where nothing predicts what the settings will give."""
    plan, tuning = found.plan, found.tuning
    if plan is not None:
        metrics, limits = plan.predicted, plan.limits
    elif tuning is not None:
        metrics, limits = tuning.recommended.metrics, tuning.limits
    else:
        return None
    return Promise(metrics, limits, _measured(found)) if metrics else None


def _share(one: Limit) -> float | None:
    """The share of a limit that is used up; of one from below, of what may be missing to 100
    percent.
    """
    if one.predicted is None:
        return None
    used, may = (
        (one.predicted, one.limit)
        if one.bound == "at most"
        else (100 - one.predicted, 100 - one.limit)
    )
    return used / may if may else (2.0 if used else 0.0)


def _judge(one: Limit, value: float | None) -> Judged | None:
    """A measured value held against the limit."""
    if value is None:
        return None
    return Judged(
        quantity(one.name, value),
        value <= one.limit if one.bound == "at most" else value >= one.limit,
    )


def _predicted(one: Limit) -> Cell:
    """The prediction beside the limit, as the tuning judged it."""
    return one.told() if one.kept is None else Judged(one.told(), one.kept)


def _measured(found: Material) -> list[MeasuredTargets]:
    """The benches and the validation of the shown plan that ran at its rate, the newest bench
    first.
    """
    rate, sla = found.rate_rps, found.recipe.sla
    benches = [
        one for one in found.benches if one.of_plan and one.at_rate(rate) and one.content.sla == sla
    ]
    found_there = [
        MeasuredTargets(one.name, _values(one), one.content.replay_slowdown) for one in benches[:1]
    ]
    validation = found.validation
    if validation is not None and rate and found.is_of_plan(validation):
        requests = sum(one.requests for one in validation.windows)
        seconds = sum(one.end_s - one.start_s for one in validation.windows)
        values = {one.metric: one.measured for one in validation.metrics}
        if (
            abs(requests - rate * seconds) <= WINDOWS_RATE * rate * seconds
            and values.keys() & sla.keys()
        ):
            found_there.append(MeasuredTargets(found.file_name("validation"), values))
    return found_there


def _values(bench: BenchResult) -> dict[str, float]:
    """Its metrics, and the value of every target, of which not each is a metric."""
    return bench.content.measured | {one.target: one.measured_s for one in bench.content.targets}


def _badge(found: Material, promise: Promise | None) -> Badge:
    if promise is None:
        what = "These settings were not tuned" if found.plan else "Nothing was tuned yet"
        return Badge("open", f"{what}: nothing says whether the targets will be kept.")
    missed, measured = broken(promise.limits), promise.broken_measured
    if missed:
        worst_first = sorted(missed, key=lambda one: -(_share(one) or 0.0))
        return Badge(
            "broken", f"Not every target is kept, as predicted: {'; '.join(map(_at, worst_first))}."
        )
    if measured:
        names = _listed([metric_name(limit.name) for limit, _ in measured])
        where = _listed(sorted({one.name for _, one in measured}))
        slow = max((one.slowdown or 0.0 for _, one in measured), default=0.0)
        pace = f" Batches took {slow:.2f} times as long as fitted." if slow > SLOW else ""
        return Badge(
            "broken",
            f"Predicted to keep every target, but measured it broke {names} ({where}).{pace}",
        )
    if any(one.kept is None for one in promise.limits):
        unknown = _listed([metric_name(one.name) for one in promise.limits if one.kept is None])
        return Badge("open", f"Nothing predicts {unknown}.")
    if promise.measured:
        where = _listed([one.name for one in promise.measured])
        return Badge("kept", f"Every target is kept: as predicted, and as measured ({where}).")
    return Badge("kept", "Every target is kept, as predicted; not measured at this rate yet.")


def _at(one: Limit) -> str:
    """By how much a limit is broken."""
    what = f"{metric_name(one.name)} is {one.told()}, {one.allowed()} is asked for"
    share = _share(one)
    if one.bound == "at least" or not one.limit or share is None:
        return what
    return f"{what}, {number(100 * share)} % of the limit"


def _listed(names: list[str]) -> str:
    unique = list(dict.fromkeys(names))
    return " and ".join(filter(None, [", ".join(unique[:-1]), unique[-1]]))


def _what_to_run(found: Material) -> list[tuple[str, str]]:
    """What the plan runs; without a plan, what the tuning found; without that, nothing."""
    plan, tuning, recipe = found.plan, found.tuning, found.recipe
    facts: list[tuple[str, str]] = []
    if plan is not None:
        facts += _policy(plan.policy.name, plan.policy.parameters)
        kinds = [(f"{one.recipe.name}: ", one.fit, one.workers) for one in plan.kinds]
    elif tuning is not None:
        outcome = tuning.recommended
        facts += _policy(outcome.policy, outcome.parameters)
        kinds = [("", found.fit, tuning.workers)] if found.fit else []
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


def _policy(name: str, parameters: Mapping[str, ParameterValue]) -> list[tuple[str, str]]:
    settings = ", ".join(f"{key} {word(value)}" for key, value in parameters.items())
    return [("Policy", name), *([("Parameters", settings)] if settings else [])]


def _checks(found: Material) -> list[str]:
    """What the predictions were held against, a sentence each."""
    texts = [_check(one, found.rate_rps) for one in found.benches if one.of_plan]
    if found.validation is not None:
        other = "" if found.is_of_plan(found.validation) else " (another plan of the same fit)"
        texts.append(f"{found.file_name('validation')}{other}: {found.validation.summary()}")
    if found.plan is None and found.tuning is None:
        return []
    return [
        f"Checked against {text}."
        for text in texts or ["no running server yet: it is all simulated with the fit"]
    ]


def _check(bench: BenchResult, rate_rps: float | None) -> str:
    content = bench.content
    rate = (
        ""
        if content.request_rate_rps is None
        else f" at {number(content.request_rate_rps)} requests/s"
    )
    if bench.at_rate(rate_rps):
        rate += ", the rate it was tuned for"
    errors = {one.metric: one.error_percent for one in content.compared}
    told = [
        f"{metric_name(key)} {percent(error)}"
        for key in TOLD_OF_CHECKS
        if (error := errors.get(key)) is not None
    ]
    off = (
        f"; the prediction's errors: {', '.join(told)}"
        if told
        else "; nothing was predicted for it"
    )
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
    """What is given, then every limit: predicted, and measured where it was."""
    columns = ["", "limit", "predicted", *(f"measured, {one.name}" for one in promise.measured)]
    rows: list[list[Cell]] = []
    known = {one.name for one in promise.limits}
    for key in GIVEN:
        if key in promise.metrics and key not in known:
            values = [m.values.get(key) for m in promise.measured]
            given = [None if value is None else quantity(key, value) for value in values]
            rows.append([metric_name(key), "none", quantity(key, promise.metrics[key]), *given])
    for one in promise.limits:
        measured = [_judge(one, m.values.get(one.name)) for m in promise.measured]
        rows.append([metric_name(one.name), one.allowed(), _predicted(one), *measured])
    return Table("What it will give", columns, rows, folded=False)


def _shares(promise: Promise) -> Figure:
    """Each latency target's share that is used up, predicted and measured."""
    shares: dict[str, float] = {}
    titles: dict[str, str] = {}
    for one in promise.limits:
        if not one.name.endswith("_s") or one.predicted is None:
            continue
        measured = [
            (f"measured, {m.name}", m.values[one.name])
            for m in promise.measured
            if one.name in m.values
        ]
        for where, value in [("predicted", one.predicted), *measured]:
            name = f"{metric_name(one.name)}, {where.partition(',')[0]}"
            if name not in shares:  # of two measurements the bench's is drawn
                shares[name] = 100 * value / one.limit
                titles[name] = (
                    f"{metric_name(one.name)}, {where}: {quantity(one.name, value)}, {one.allowed()}"
                )
    svg = bars(shares, " %", limit=100.0, titles=titles)
    return Figure(
        svg, "how much of each latency target is used up; up to the dashed line it is kept"
    )


def _notes(found: Material) -> list[str]:
    """What the tuning concluded, and what was done to its trace."""
    tuning = found.tuning
    if tuning is None:
        return []
    lines: list[str] = []
    for line in verdict(tuning):
        if line.startswith("  ") and lines:
            lines[-1] += f"{'' if lines[-1].endswith(':') else ';'} {line.strip()}"
        else:
            lines.append(line)
    if found.plan is not None and not _is_of(found.plan, tuning.recommended):
        lines.insert(
            0,
            f"the plan runs other settings than {found.file_name('tuning')} found; this is about those",
        )
    return [
        *(f"The tuning: {line}." for line in lines),
        *(f"The trace: {note}." for note in tuning.trace_notes),
    ]
