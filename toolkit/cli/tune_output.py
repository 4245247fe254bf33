"""What `llmctl tune` prints: its result as tables."""

from __future__ import annotations

from toolkit.cli.output import paragraph, table
from toolkit.files.tuning import Settings, Tuning
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
    from toolkit.report.verdict import verdict

    before = result.defaults.settings
    after = result.best.settings
    same = before.key == after.key
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
    swings: list[tuple[object, ...]] = []
    for swept in result.sensitivity:
        over = f"{word(swept.values[0])} .. {word(swept.values[-1])}"
        swings.append((swept.parameter, f"{swept.swing_percent:.1f} %", over))
    title = "how far goodput moves with one parameter"
    table(["parameter", ">goodput swing", "over"], swings, title=title)
    for line in verdict(result):
        paragraph(line)


def _show_policies(result: Tuning) -> None:
    from toolkit.sched.policies import footnote

    what = "router" if result.best.settings.replica_router else "policy"
    columns = [what, ">trials", ">goodput_rps", f">{result.latency_metric}", "in limits"]
    title = f"each {what}'s best settings, on the whole trace"
    table(columns, policy_rows(result), title=title)
    remark = footnote([one.best.settings.policy for one in result.policies], result.engine)
    if remark:
        paragraph(remark)
        print()


def _short(settings: Settings) -> str:
    """What the search compares: the router, or else the policy."""
    return settings.replica_router.name if settings.replica_router else settings.policy
