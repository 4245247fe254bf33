"""`llmctl tune` for people: the recommendation, its gain and certainty, the limits, and the trials.

Loaded only when a tuning is printed, since it imports the policies. Everything fits 80 columns.
"""

from __future__ import annotations

from textwrap import fill

from toolkit.cli.output import WIDTH, PlotPoint, scatter, table
from toolkit.files.tuning import (
    Outcome,
    ParameterValue,
    PolicyResult,
    Sizing,
    Tuning,
    share_used,
)
from toolkit.report.verdict import verdict
from toolkit.sched.policies import footnote, marked
from toolkit.units import number, word

Row = tuple[object, ...]

BROKEN_SHOWN = 4  # counts of a fleet that break a limit, of each settings
METRICS = (
    "goodput_rps",
    "throughput_rps",
    "sla_attainment_percent",
    "sla_attainment_lower_percent",
    "ttft_mean_s",
    "ttft_p99_s",
    "tpot_mean_s",
    "e2e_mean_s",
    "e2e_p95_s",
    "batch_size_mean",
    "oom_percent",
    "evicted_percent",
    "hit_percent",
)


def show(result: Tuning) -> None:
    """Print a tuning, within 80 columns."""
    before, after = result.defaults_held_out, result.best_held_out
    same = before.key == after.key
    if result.sizing:
        _show_sizing(result.sizing)
    if len(result.policies) > 1:
        _show_policies(result)
    rate = f"{number(result.request_rate_rps)} requests/s on {result.workers} workers"
    first, best = _settings(before), _settings(after)
    rows = [
        (name, *([word(first[name])] if same else []), word(value)) for name, value in best.items()
    ]
    title = f"policy '{after.policy}', {len(result.trials)} trials at {rate}"
    table(["parameter", *(["default"] if same else []), "best"], rows, title=title)
    changes = [
        (
            name,
            before.metrics[name],
            after.metrics[name],
            f"{100 * (after.metrics[name] / before.metrics[name] - 1):+.1f} %"
            if before.metrics[name]
            else "-",
        )
        for name in METRICS
        if name in before.metrics and name in after.metrics
    ]
    short = [outcome.policy for outcome in (before, after)]
    if before.replica_router and after.replica_router:
        short = [before.replica_router.name, after.replica_router.name]
    names = ("default", "best") if same else (f"{short[0]}, default", f"{short[1]}, best")
    title = f"predicted on {len(result.held_out_windows)} held-out windows"
    table(["metric", *(f">{name}" for name in names), ">change"], changes, title=title)
    _show_limits(result)
    _show_sensitivity(result)
    _show_chart(result)
    for line in verdict(result):
        print(fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False))


def _settings(outcome: Outcome) -> dict[str, ParameterValue]:
    """The policy's parameters, those of further kinds, then the router and its parameters."""
    router, found = outcome.replica_router, outcome.every_parameter
    if router is None:
        return found
    knobs = {f"{router.name}.{name}": value for name, value in router.parameters.items()}
    return {**found, "replica_router": router.name, **knobs}


def _show_policies(result: Tuning) -> None:
    latency = result.latency_metric
    what = "router" if result.best_held_out.replica_router else "policy"
    rows = [
        (
            one.held_out.replica_router.name
            if one.held_out.replica_router
            else marked(one.policy, result.engines),
            one.trials,
            one.held_out.metrics.get("goodput_rps", 0.0),
            one.held_out.metrics.get(latency, 0.0),
            one.feasible,
        )
        for one in sorted(result.policies, key=_by_limits_and_goodput)
    ]
    table(
        [what, ">trials", ">goodput_rps", f">{latency}", "in limits"],
        rows,
        title=f"each {what}'s best trial, on {len(result.held_out_windows)} held-out windows",
    )
    note = footnote([one.policy for one in result.policies], result.engines)
    if note:
        print(fill(note, WIDTH, subsequent_indent="  ", break_on_hyphens=False) + "\n")


def _show_limits(result: Tuning) -> None:
    """The recommendation beside every limit. A target covers all windows' requests together."""
    rows = [(one.name, one.allowed(), one.prediction(), one.kept) for one in result.limits]
    what = "the recipe's settings" if result.keep_defaults else "the best settings"
    title = f"{what} beside the limits, all held-out requests together"
    table(["limit", ">allowed", ">predicted", "kept"], rows, title=title)


def _show_sizing(sizing: Sizing) -> None:
    rows: list[Row] = [
        (
            one.settings,
            " + ".join(map(str, one.counts)) or one.workers,
            one.feasible,
            one.goodput_rps,
            f"{one.attainment_percent:.1f} %",
            f"{one.binding} {share_used(one.binding_ratio).removesuffix(' of its limit')}",
        )
        for one in sizing.rows
    ]
    columns = ["settings", ">workers", "fits", ">goodput_rps", ">attained", "what binds"]
    title = "numbers of workers that were tried, on all windows"
    if sizing.kinds:
        columns[1] = ">servers"
        columns.remove(">goodput_rps")
        title = f"{' + '.join(kind.recipe for kind in sizing.kinds)}, on all windows"
        rows = [(*row[:3], *row[4:]) for row in _outlined(sizing, rows)]
    table(columns, rows, title=title)
    if sizing.kinds and len(rows) < len(sizing.rows):
        print(f"{len(rows)} of {len(sizing.rows)} tried counts; the file has all\n")


def _outlined(sizing: Sizing, rows: list[Row]) -> list[Row]:
    """The rows that keep the limits, and of each settings the last ones that break them."""
    shown: set[int] = set()
    for name in dict.fromkeys(one.settings for one in sizing.rows):
        places = [place for place, one in enumerate(sizing.rows) if one.settings == name]
        shown.update([place for place in places if not sizing.rows[place].feasible][-BROKEN_SHOWN:])
        shown.update(place for place in places if sizing.rows[place].feasible)
    return [row for place, row in enumerate(rows) if place in shown]


def _by_limits_and_goodput(one: PolicyResult) -> tuple[bool, float]:
    return (not one.feasible, -one.held_out.metrics.get("goodput_rps", 0.0))


def _show_sensitivity(result: Tuning) -> None:
    shares = next(
        (one.importance for one in result.policies if one.held_out.key == result.best_held_out.key),
        {},
    )
    rows = [
        (
            one.parameter,
            f"{one.swing_percent:.1f} %",
            f"{100 * shares[one.parameter]:.0f} %" if one.parameter in shares else "-",
            f"{word(one.values[0])} .. {word(one.values[-1])}",
        )
        for one in result.sensitivity
    ]
    title = "how far goodput moves with one parameter, and its weight among all trials"
    table(["parameter", ">goodput swing", ">importance", "over"], rows, title=title)


def _show_chart(result: Tuning) -> None:
    latency = result.latency_metric
    marks = _marks([_short(one.held_out) for one in result.policies])
    known = [t for t in result.trials if latency in t.outcome.metrics and t.whole]
    if len(known) < 2:
        return
    number_of_best = next(
        (t.number for t in known if t.outcome.same_settings(result.best_held_out)), None
    )
    points = [_point(trial.outcome, latency, marks) for trial in known]
    on_front = [_point(t.outcome, latency, {}, "o") for t in known if t.number in result.front]
    ends = [
        _point(t.outcome, latency, {}, m)
        for t in known
        for n, m in ((0, "D"), (number_of_best, "B"))
        if t.number == n
    ]
    print("\ngoodput_rps of the trials")
    print("\n".join(scatter([*points, *on_front, *ends], x_name=latency)))
    legend = ", ".join(f"{mark} {policy}" for policy, mark in marks.items())
    print(
        fill(f"{legend}; o on the front of goodput and latency, D defaults, B best", WIDTH) + "\n"
    )


def _marks(policies: list[str]) -> dict[str, str]:
    """A character for each policy: the first letter of its name that no other policy has."""
    marks: dict[str, str] = {}
    for policy in policies:
        letters = [c for c in policy if c.isalpha() and c != "o" and c not in marks.values()]
        marks[policy] = letters[0] if letters else "."
    return marks


def _point(outcome: Outcome, latency: str, marks: dict[str, str], mark: str = ".") -> PlotPoint:
    return PlotPoint(
        outcome.metrics[latency], outcome.metrics["goodput_rps"], marks.get(_short(outcome), mark)
    )


def _short(outcome: Outcome) -> str:
    """What differs between the searched spaces: the router, or else the policy."""
    return outcome.replica_router.name if outcome.replica_router else outcome.policy
