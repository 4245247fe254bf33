"""Summaries of served requests: the same functions for simulated and measured ones.

TPOT = (E2E - TTFT) / (output tokens - 1). ITL is each gap between tokens. MTPOT is the largest gap
within a request. Goodput is the requests per second that meet every latency target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toolkit.files.tuning import UNSERVED

Floats = NDArray[np.float64]


@dataclass(slots=True, frozen=True)
class Served:
    """Requests that ended, as parallel arrays in seconds on one clock.

    `ok` is False for a request that was refused or failed.
    """

    arrival_s: Floats
    first_token_s: Floats
    finish_s: Floats
    output_tokens: NDArray[np.int64]
    max_gap_s: Floats  # largest gap between two tokens of the request, 0 with one token
    ok: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.arrival_s)


def _of_all(served: Served) -> dict[str, Floats]:
    """TTFT, TPOT, MTPOT and E2E of every request, in seconds; one token counts as one gap."""
    ttft = served.first_token_s - served.arrival_s
    e2e = served.finish_s - served.arrival_s
    tpot = (e2e - ttft) / np.maximum(served.output_tokens - 1, 1)
    return {"ttft": ttft, "tpot": tpot, "mtpot": served.max_gap_s, "e2e": e2e}


def latencies(served: Served) -> dict[str, Floats]:
    """TTFT, TPOT, MTPOT and E2E of each request that is ok, in seconds.

    TPOT omits requests with one token.
    """
    values = {name: seconds[served.ok] for name, seconds in _of_all(served).items()}
    values["tpot"] = values["tpot"][served.output_tokens[served.ok] > 1]
    return values


def statistic(values: Floats, name: str) -> float:
    """`mean`, `max` or a percentile (`p95`) of values; 0 for an empty array."""
    if not len(values):
        return 0.0
    if name == "mean":
        return float(values.mean())
    if name == "max":
        return float(values.max())
    return float(np.percentile(values, float(name.removeprefix("p"))))


def meets_sla(served: Served, sla: Mapping[str, float]) -> NDArray[np.bool_]:
    """Per request: whether it is ok and within the limit of every target.

    The target `ttft_p99_s: 2` requires TTFT <= 2 s of each request.
    """
    good, values = served.ok.copy(), _of_all(served)
    values["itl"] = values["mtpot"]
    for key, limit in sla.items():
        good &= values[key.split("_")[0]] <= limit
    return good


def summarize(served: Served, sla: Mapping[str, float]) -> dict[str, float]:
    """Metric names, with their units, and values.

    Throughput is the successful requests over the time from the first arrival to the last
    completion. Goodput counts only those that also meet `sla`. Without targets there is neither
    goodput nor attainment.
    """
    ok = served.ok
    if not ok.any():
        count = float(len(served))
        unserved = {"requests": count, "failed": count, "throughput_rps": 0.0}
        return unserved | ({"goodput_rps": 0.0, "sla_attainment_percent": 0.0} if sla else {})
    span_s = max(float(served.finish_s[ok].max() - served.arrival_s.min()), 1e-12)
    summary = {
        "requests": float(len(served)),
        "failed": float((~ok).sum()),
        "makespan_s": span_s,
        "throughput_rps": float(ok.sum()) / span_s,
        "output_tokens_per_s": float(served.output_tokens[ok].sum()) / span_s,
    }
    if sla:
        good = float(meets_sla(served, sla).sum())
        summary["goodput_rps"] = good / span_s
        summary["sla_attainment_percent"] = 100.0 * good / len(served)
    for name, values in latencies(served).items():
        for stat in ("mean", "p50", "p95", "p99"):
            summary[f"{name}_{stat}_s"] = statistic(values, stat)
    return summary


def sla_ratios(served: Served, sla: Mapping[str, float]) -> dict[str, float]:
    """Each target's measured value over its limit. A ratio above 1 is a miss; the largest one
    binds.

    If there are requests and none succeeded, every target is missed: `UNSERVED`.
    """
    if len(served) and not served.ok.any():
        return dict.fromkeys(sla, UNSERVED)
    values = latencies(served)
    values["itl"] = values["mtpot"]
    ratios = {}
    for key, limit in sla.items():
        metric, stat, _ = key.split("_")
        ratios[key] = statistic(values[metric], stat) / limit
    return ratios
