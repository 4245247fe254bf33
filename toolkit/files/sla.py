"""The names of latency targets: a metric, a statistic, and the unit, which is seconds."""

from __future__ import annotations

from toolkit.errors import nearest

METRICS = ("ttft", "tpot", "itl", "mtpot", "e2e")
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
SLA_KEYS = [f"{metric}_{statistic}_s" for metric in METRICS for statistic in STATISTICS]


def sla_problem(key: str, limit: float) -> str:
    """What is wrong with a key that is no latency target, and the right one; '' for a target."""
    if key in SLA_KEYS:
        return ""
    stem, _, unit = key.rpartition("_")
    if f"{stem}_s" in SLA_KEYS:
        in_seconds = f"{stem}_s: {limit / 1000:g}" if unit == "ms" else f"{stem}_s"
        return f"targets are in seconds; write '{in_seconds}'"
    if f"{key}_s" in SLA_KEYS:
        return f"the unit is missing; write '{key}_s', in seconds"
    return f"unknown target; {nearest(key, SLA_KEYS)}"
