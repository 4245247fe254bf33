"""Summaries of served requests: the same functions for simulated and measured ones.

TPOT = (E2E - TTFT) / (output tokens - 1). ITL is each gap between tokens. MTPOT is the largest gap
within a request. Goodput is the requests per second that meet every latency target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from toolkit.files.tuning import UNSERVED

Floats = NDArray[np.float64]
MOST_BEHIND_PERCENT = 5.0  # a server that is further behind does not keep up


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

    def after(self, first: int) -> Served:
        """The requests from number `first` on."""
        return Served(*(getattr(self, column.name)[first:] for column in fields(self)))


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
    completion. Goodput counts only those that also meet `sla`.
    """
    if not served.ok.any():
        count = float(len(served))
        return {"requests": count, "failed": count, "throughput_rps": 0.0, "goodput_rps": 0.0}
    ok = served.ok
    span_s = max(float(served.finish_s[ok].max() - served.arrival_s.min()), 1e-12)
    good = meets_sla(served, sla)
    summary = {
        "requests": float(len(served)),
        "failed": float((~ok).sum()),
        "makespan_s": span_s,
        "throughput_rps": float(ok.sum()) / span_s,
        "goodput_rps": float(good.sum()) / span_s,
        "sla_attainment_percent": 100.0 * float(good.sum()) / len(served),
        "output_tokens_per_s": float(served.output_tokens[ok].sum()) / span_s,
    }
    for name, values in latencies(served).items():
        for stat in ("mean", "p50", "p95", "p99"):
            summary[f"{name}_{stat}_s"] = statistic(values, stat)
    return summary


def behind_s(served: Served) -> float:
    """How much longer the last tenth of the requests waits for its first token than the first
    tenth, in seconds: medians of TTFT by arrival, of requests that are ok; 0 for fewer than 20.
    """
    waits_s = _of_all(served)["ttft"][served.ok]
    tenth = len(waits_s) // 10
    if tenth < 2:
        return 0.0
    return max(float(np.median(waits_s[-tenth:]) - np.median(waits_s[:tenth])), 0.0)


def behind_percent(served: Served) -> float:
    """`behind_s` in percent of the time from the first arrival to the last; 0 without such a time.

    A server that serves the share 1/x of what arrives is (1 - 1/x) of that time behind at its end,
    however long the trace is.
    """
    span_s = float(served.arrival_s[-1] - served.arrival_s[0]) if len(served) else 0.0
    return 100.0 * behind_s(served) / span_s if span_s > 0.0 else 0.0


def keeps_up(served: Served) -> bool:
    """Whether the queue does not grow with the trace, by `MOST_BEHIND_PERCENT`."""
    return behind_percent(served) <= MOST_BEHIND_PERCENT


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
