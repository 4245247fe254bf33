"""The tuning: the trials and their front, what the best gains on held-out windows, which parameters matter."""

from __future__ import annotations

from typing import Literal

from toolkit.files.tuning import Outcome, PolicyResult, Trial, Tuning
from toolkit.report.material import Material
from toolkit.report.parts import Cell, Figure, Section, Table, missing, quantity, word
from toolkit.report.svg import Axes, Series, bars, chart
from toolkit.sched.policies.servable import footnote, marked
from toolkit.units import number

KEY, TITLE = "tuning", "The tuning"


def tuning_section(found: Material) -> Section:
    """What `tuning.json` holds."""
    tuning = found.tuning
    if tuning is None:
        command = f"llmctl tune {found.recipe.name} --fit fit.json --trace TRACE"
        return missing(KEY, TITLE, "The settings were not tuned yet.", command, found.why.get("tuning", ""))
    rate = f"{number(tuning.request_rate_rps)} requests/s on {tuning.workers} workers"
    lead = f"{len(tuning.trials):,} trials of policy '{tuning.best_held_out.policy}' and others at {rate}, simulated."
    if len(tuning.policies) < 2:
        lead = lead.replace(" and others", "")
    section = Section(KEY, TITLE, lead)
    section.figures += [one for one in (_front(tuning), _importance(tuning), _swings(tuning)) if one.svg]
    section.tables += [_held_out(tuning), _parameters(tuning)]
    if tuning.policies:
        section.tables.append(_policies(tuning))
    return section


def _front(tuning: Tuning) -> Figure:
    latency = tuning.latency_metric
    known = [one for one in tuning.trials if latency in one.outcome.metrics and "goodput_rps" in one.outcome.metrics]
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
    name: str, trials: list[Trial], latency: str, kind: Literal["points", "line", "marks"] = "points"
) -> Series:
    xs, ys = ([one.outcome.metrics[key] for one in trials] for key in (latency, "goodput_rps"))
    return Series(name, xs, ys, kind, [_label(one, latency) for one in trials])


def _label(trial: Trial, latency: str) -> str:
    """A trial in one line, for where a pointer rests on it."""
    outcome = trial.outcome
    settings = ", ".join(f"{name} {word(value)}" for name, value in outcome.parameters.items())
    values = ", ".join(f"{key} {quantity(key, outcome.metrics[key])}" for key in ("goodput_rps", latency))
    limits = "in all limits" if trial.feasible else "breaks a limit"
    return f"trial {trial.number}, {outcome.policy}: {values}, {limits}; {settings}"


def _same(one: Outcome, other: Outcome) -> bool:
    return (one.policy, one.parameters) == (other.policy, other.parameters)


def _best_policy(tuning: Tuning) -> PolicyResult | None:
    return next((one for one in tuning.policies if one.policy == tuning.best_held_out.policy), None)


def _importance(tuning: Tuning) -> Figure:
    best = _best_policy(tuning)
    shares = {name: 100 * share for name, share in (best.importance if best else {}).items()}
    return Figure(bars(shares, " %"), "a parameter's share of what tells the best trials from the others (PED-ANOVA)")


def _swings(tuning: Tuning) -> Figure:
    swings = {one.parameter: one.swing_percent for one in tuning.sensitivity}
    return Figure(bars(swings, " %"), "how far goodput moves when one parameter of the best is swept over its range")


def _held_out(tuning: Tuning) -> Table:
    before, after = tuning.defaults_held_out.metrics, tuning.best_held_out.metrics
    rows: list[tuple[Cell, ...]] = [
        (name, before[name], after[name], f"{100 * (after[name] / before[name] - 1):+.1f} %" if before[name] else "–")
        for name in before
        if name in after
    ]
    caption = f"The defaults and the best on {len(tuning.held_out_windows)} windows that the search did not see"
    return Table(caption, ["metric", "defaults", "best", "change"], rows)


def _parameters(tuning: Tuning) -> Table:
    before, after = tuning.defaults_held_out, tuning.best_held_out
    same = before.policy == after.policy
    rows = [
        (name, word(before.parameters[name]) if same and name in before.parameters else "–", word(value))
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
    return Table("Each policy's best trial, held out" + (f" ({said})" if said else ""), columns, rows)
