"""Rows of the tables that the page and the terminal both show. None: the value is not known."""

from __future__ import annotations

from collections.abc import Iterable

from toolkit.files.bench import BenchReport
from toolkit.files.tuning import UNSERVED, ParameterValue, Settings, Tuning
from toolkit.laws.passes import HeldOutError
from toolkit.units import percent

Row = list[str | int | float | bool | None]


def error_cells(error: HeldOutError) -> tuple[str, str, str]:
    """The median, the 95th percentile and the worst error, in percent."""
    shares = (error.median_percent, error.p95_percent, error.worst_percent)
    median, high, worst = (f"{share:.1f} %" for share in shares)
    return median, high, worst


def compared_rows(replayed: BenchReport) -> list[Row]:
    """Each metric as measured, as predicted, and as predicted by the laws as they were fitted;
    behind a prediction its error.
    """
    rows: list[Row] = []
    for one in replayed.compared:
        rows.append([one.metric, one.measured, one.predicted, _error(one.error_percent)])
        rows[-1] += [one.as_fitted, _error(one.as_fitted_error_percent)]
    return rows


def _error(error_percent: float | None) -> str | None:
    return None if error_percent is None else percent(error_percent)


def policy_rows(result: Tuning) -> list[Row]:
    """The best settings of each policy or router on the whole trace: its trials, its goodput, the
    latency of the search, and whether it keeps all limits. The best is the first.
    """
    from toolkit.sched.policies import marked

    def rank(row: Row) -> tuple[bool, float]:
        return not row[4], -float(row[2] or 0.0)

    rows: list[Row] = []
    for one in result.policies:
        settings = one.best.settings
        router = settings.replica_router
        metrics = one.best.metrics
        name = router.name if router else marked(settings.policy, result.engine)
        goodput_rps = metrics.get("goodput_rps", 0.0)
        latency_s = metrics.get(result.latency_metric, 0.0)
        rows.append([name, one.trials, goodput_rps, latency_s, one.best.outcome.kept])
    return sorted(rows, key=rank)


def change_rows(result: Tuning, metrics: Iterable[str]) -> list[Row]:
    """These metrics on the whole trace: of the defaults, of the best, and the change."""
    before = result.defaults.metrics
    after = result.best.metrics
    rows: list[Row] = []
    for name in metrics:
        if name in before and name in after:
            old = before[name]
            new = after[name]
            rows.append([name, old, new, percent(100 * (new / old - 1)) if old else None])
    return rows


def share_used(share: float) -> str:
    """The used share of a limit in words: 'at 95% of its limit'."""
    if share >= UNSERVED:
        return "broken, since no request is served"
    return f"at {share:.0%} of its limit"


def settings_of(settings: Settings) -> dict[str, ParameterValue]:
    """The policy's parameters, then the router and its parameters."""
    router = settings.replica_router
    if router is None:
        return settings.parameters
    own = {f"{router.name}.{name}": value for name, value in router.parameters.items()}
    return {**settings.parameters, "replica_router": router.name, **own}
