"""What `llmctl tune` prints: its result as tables."""

from __future__ import annotations

from toolkit.cli.output import paragraph, table
from toolkit.files.tuning import Outcome, Sizing, Tuning, share_used
from toolkit.report.rows import change_rows, policy_rows, settings_of
from toolkit.units import bracketed, word

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
    """Print a tuning: the recommendation, its gain and certainty, the limits and the trials."""
    from toolkit.report.verdict import size_lines, verdict

    before = result.defaults
    after = result.best
    same = before.key == after.key
    if result.sizing:
        print("\n".join([*size_lines(result), ""]))
        _show_sizing(result.sizing)
    if len(result.policies) > 1:
        _show_policies(result)
    rate = f"{result.load} on {result.workers} workers"
    first = settings_of(before)
    best = settings_of(after)
    settings = [
        (name, *([word(first[name])] if same else []), word(value)) for name, value in best.items()
    ]
    title = f"policy '{after.policy}', {len(result.trials)} trials at {rate}"
    table(["parameter", *(["default"] if same else []), "best"], settings, title=title)
    names = ["default", "best"]
    if not same:
        names = [f"{_short(before)}, default", f"{_short(after)}, best"]
    title = f"predicted on {result.judged.requests:,} requests of the trace"
    title += bracketed(result.changes)
    columns = ["metric", *(f">{name}" for name in names), ">change"]
    table(columns, change_rows(result, METRICS), title=title)
    limits = [(one.name, one.allowed(), one.prediction(), one.kept) for one in result.limits]
    what = "the recipe's settings" if result.keep_defaults else "the best settings"
    title = f"{what} beside the limits"
    table(["limit", ">allowed", ">predicted", "kept"], limits, title=title)
    of_best = [one.importance for one in result.policies if one.outcome.key == after.key]
    shares = of_best[0] if of_best else {}
    swings: list[tuple[object, ...]] = []
    for swept in result.sensitivity:
        share = f"{100 * shares[swept.parameter]:.0f} %" if swept.parameter in shares else "-"
        over = f"{word(swept.values[0])} .. {word(swept.values[-1])}"
        swings.append((swept.parameter, f"{swept.swing_percent:.1f} %", share, over))
    title = "how far goodput moves with one parameter, and its weight among all trials"
    table(["parameter", ">goodput swing", ">importance", "over"], swings, title=title)
    for line in verdict(result):
        paragraph(line)


def _show_policies(result: Tuning) -> None:
    from toolkit.sched.policies import footnote

    what = "router" if result.best.replica_router else "policy"
    columns = [what, ">trials", ">goodput_rps", f">{result.latency_metric}", "in limits"]
    title = f"each {what}'s best settings, on the whole trace"
    table(columns, policy_rows(result), title=title)
    remark = footnote([one.policy for one in result.policies], result.engine)
    if remark:
        paragraph(remark)
        print()


def _show_sizing(sizing: Sizing) -> None:
    """Print the tried numbers of workers."""
    rows: list[list[object]] = []
    for one in sizing.rows:
        used = share_used(one.binding_ratio).removesuffix(" of its limit")
        attained = f"{one.attainment_percent:.1f} %"
        what = f"{one.binding} {used}"
        rows.append([one.settings, one.workers, one.feasible, one.goodput_rps, attained, what])
    columns = ["settings", ">workers", "fits", ">goodput_rps", ">attained", "what binds"]
    table(columns, rows, title="numbers of workers that were tried, on the whole trace")


def _short(outcome: Outcome) -> str:
    """What the search compares: the router, or else the policy."""
    return outcome.replica_router.name if outcome.replica_router else outcome.policy
