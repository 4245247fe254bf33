"""`llmctl tune` for people: the recommendation, its gain and certainty, the limits, and the trials.

Loaded only when a tuning is printed, since it imports the policies. Everything fits 80 columns.
"""

from __future__ import annotations

from collections import Counter
from textwrap import fill

from toolkit.cli.output import WIDTH, PlotPoint, scatter, table
from toolkit.files.tuning import Outcome, ParameterValue, Sizing, SizingRow, Tuning, share_used
from toolkit.report.verdict import verdict
from toolkit.sched.policies import footnote, marked
from toolkit.units import number, word

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
    changes = []
    for name in METRICS:
        if name in before.metrics and name in after.metrics:
            old, new = before.metrics[name], after.metrics[name]
            changes.append((name, old, new, f"{100 * (new / old - 1):+.1f} %" if old else "-"))
    short = [outcome.policy for outcome in (before, after)]
    if before.replica_router and after.replica_router:
        short = [before.replica_router.name, after.replica_router.name]
    names = ("default", "best") if same else (f"{short[0]}, default", f"{short[1]}, best")
    title = f"predicted on {len(result.held_out_windows)} held-out windows"
    table(["metric", *(f">{name}" for name in names), ">change"], changes, title=title)
    # a target covers all windows' requests together
    limits = [(one.name, one.allowed(), one.prediction(), one.kept) for one in result.limits]
    what = "the recipe's settings" if result.keep_defaults else "the best settings"
    title = f"{what} beside the limits, all held-out requests together"
    table(["limit", ">allowed", ">predicted", "kept"], limits, title=title)
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
    rows: list[tuple[str, int, float, float, bool]] = []
    for one in result.policies:
        router, metrics = one.held_out.replica_router, one.held_out.metrics
        name = router.name if router else marked(one.policy, result.engines)
        goodput_rps, latency_s = metrics.get("goodput_rps", 0.0), metrics.get(latency, 0.0)
        rows.append((name, one.trials, goodput_rps, latency_s, one.feasible))
    rows.sort(key=lambda row: (not row[4], -row[2]))
    title = f"each {what}'s best trial, on {len(result.held_out_windows)} held-out windows"
    table([what, ">trials", ">goodput_rps", f">{latency}", "in limits"], rows, title=title)
    note = footnote([one.policy for one in result.policies], result.engines)
    if note:
        print(fill(note, WIDTH, subsequent_indent="  ", break_on_hyphens=False) + "\n")


def _show_sizing(sizing: Sizing) -> None:
    """The counts of workers that were tried; of a fleet's, all that keep the limits, and of each
    settings the last ones that break them.
    """
    shown: list[SizingRow] = []
    broken: Counter[str] = Counter()
    for one in reversed(sizing.rows):
        broken[one.settings] += not one.feasible
        if not sizing.kinds or one.feasible or broken[one.settings] <= BROKEN_SHOWN:
            shown.insert(0, one)
    rows: list[list[object]] = []
    for one in shown:
        counts = " + ".join(map(str, one.counts)) or one.workers
        rows.append([one.settings, counts, one.feasible])
        rows[-1] += [] if sizing.kinds else [one.goodput_rps]
        used = share_used(one.binding_ratio).removesuffix(" of its limit")
        rows[-1] += [f"{one.attainment_percent:.1f} %", f"{one.binding} {used}"]
    columns = ["settings", ">workers", "fits", ">goodput_rps", ">attained", "what binds"]
    title = "numbers of workers that were tried, on all windows"
    if sizing.kinds:
        columns[1:4] = [">servers", "fits"]
        title = f"{' + '.join(kind.recipe for kind in sizing.kinds)}, on all windows"
    table(columns, rows, title=title)
    if len(shown) < len(sizing.rows):
        print(f"{len(shown)} of {len(sizing.rows)} tried counts; the file has all\n")


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
    known = [t for t in result.trials if latency in t.outcome.metrics and t.whole]
    if len(known) < 2:
        return
    marks: dict[str, str] = {}  # of each policy, the first letter that no other has
    for name in [_short(one.held_out) for one in result.policies]:
        letters = [c for c in name if c.isalpha() and c != "o" and c not in marks.values()]
        marks[name] = letters[0] if letters else "."
    best = next((t for t in known if t.outcome.same_settings(result.best_held_out)), None)
    points = [_point(trial.outcome, latency, marks) for trial in known]
    points += [_point(t.outcome, latency, {}, "o") for t in known if t.number in result.front]
    for t in known:
        points += [_point(t.outcome, latency, {}, "D")] if t.number == 0 else []
        points += [_point(t.outcome, latency, {}, "B")] if t is best else []
    print("\ngoodput_rps of the trials")
    print("\n".join(scatter(points, x_name=latency)))
    legend = ", ".join(f"{mark} {policy}" for policy, mark in marks.items())
    text = f"{legend}; o on the front of goodput and latency, D defaults, B best"
    print(fill(text, WIDTH) + "\n")


def _point(outcome: Outcome, latency: str, marks: dict[str, str], mark: str = ".") -> PlotPoint:
    return PlotPoint(
        outcome.metrics[latency], outcome.metrics["goodput_rps"], marks.get(_short(outcome), mark)
    )


def _short(outcome: Outcome) -> str:
    """What differs between the searched spaces: the router, or else the policy."""
    return outcome.replica_router.name if outcome.replica_router else outcome.policy
