"""Summaries of served requests: the same functions for simulated and measured ones.

TPOT = (E2E - TTFT) / (output tokens - 1). ITL is each gap between tokens. MTPOT is the largest gap
within a request.

Throughput is the successful requests over the makespan, from the first arrival to the last
completion, as in `vllm bench serve`.

Goodput is the requests of a window that meet every latency target, over the length of the window:
the rate of arrivals times the share of good requests. DistServe (OSDI 2024, section 1) calls
goodput the greatest request rate at which a given share of the requests keeps the targets; where
all keep them, the rate of arrivals is such a rate. `request_goodput` of `vllm bench serve` counts
the same requests, but divides by the whole duration of the benchmark. That includes the drain: the
time after the last arrival, in which a server that keeps up only finishes. So the same server has
the less of that goodput the shorter the benchmark is. Here the drain counts only where arrivals
have no rate of their own: one request, all at once (a backlog), or each when another one has ended.

So goodput may be above throughput, which has the drain. In an overload of a window that is short
beside the latencies, it may even be above what the server sustains: good requests end after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from toolkit.files.tuning import UNSERVED

Floats = NDArray[np.float64]
MOST_BEHIND_PERCENT = 5.0  # a server that is further behind does not keep up
FRONT = "front_mean_s"  # the part of the front in the mean time to first token
SERVED = "served_rps"  # of sessions in a closed loop (`sessions_rate_rps`)
SHORTEST_S = 1e-12  # of a makespan, and of a window: a shorter one has no rate


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
    good = served.ok.copy()
    values = _of_all(served)
    values["itl"] = values["mtpot"]
    for key, limit in sla.items():
        good &= values[key.split("_")[0]] <= limit
    return good


def makespan_s(served: Served) -> float:
    """Seconds from the first arrival to the last successful completion; 0 without one."""
    if not served.ok.any():
        return 0.0
    return max(float(served.finish_s[served.ok].max() - served.arrival_s.min()), SHORTEST_S)


def window_rate_rps(served: Served, *, closed: bool = False) -> float:
    """All requests over the length of their window, per second.

    Args:
        closed: whether requests arrive when others have ended (a closed loop of fixed concurrency).
            Then, and where all arrive at once, the window is the makespan, and the rate is 0 where
            no request succeeded; else this is the mean rate of arrivals.
    """
    span_s = float(served.arrival_s.max() - served.arrival_s.min())
    if span_s >= SHORTEST_S and not closed:
        return (len(served) - 1) / span_s
    return len(served) / makespan_s(served) if served.ok.any() else 0.0


def sessions_rate_rps(served: Served, first: NDArray[np.int64]) -> float:
    """Requests of sessions that are served, per second, while sessions keep starting; 0 where they
    start at once.

    Turns follow the answers before, so arrivals have no rate of their own, and a trace begins and
    ends with few sessions under way. So this counts from when the first sessions are as good as
    over (99 of 100 requests end that soon after the start of their session; at most half of the
    time) to the last start. `first`: the row of the first turn of each row's session.
    """
    starts_s = served.arrival_s[first]
    begin_s = float(starts_s.min())
    last_s = float(starts_s.max())
    usual_s = float(np.percentile(served.finish_s - starts_s, 99.0))
    begin_s += min(usual_s, 0.5 * (last_s - begin_s))
    if last_s - begin_s < SHORTEST_S:
        return 0.0
    ended = served.ok & (served.finish_s > begin_s) & (served.finish_s <= last_s)
    return float(ended.sum()) / (last_s - begin_s)


def pooled_goodput_rps(
    windows: Sequence[Served], sla: Mapping[str, float], *, closed: bool = False
) -> float:
    """The good requests of all windows over the length of all windows, per second; 0 where no
    window has a length. `closed`: see `window_rate_rps`.
    """
    good = sum(int(meets_sla(window, sla).sum()) for window in windows)
    rates = [(len(window), window_rate_rps(window, closed=closed)) for window in windows]
    total_s = sum(count / rate_rps for count, rate_rps in rates if rate_rps)
    return good / total_s if total_s else 0.0


def summarize(
    served: Served, sla: Mapping[str, float], *, closed: bool = False
) -> dict[str, float]:
    """Metric names, with their units, and values. Without targets there is neither goodput nor
    attainment.

    Args:
        sla: target name to its limit in seconds.
        closed: see `window_rate_rps`.
    """
    ok = served.ok
    if not ok.any():
        count = float(len(served))
        unserved = {"requests": count, "failed": count, "throughput_rps": 0.0}
        return unserved | ({"goodput_rps": 0.0, "sla_attainment_percent": 0.0} if sla else {})
    span_s = makespan_s(served)
    summary = {
        "requests": float(len(served)),
        "failed": float((~ok).sum()),
        "makespan_s": span_s,
        "throughput_rps": float(ok.sum()) / span_s,
        "output_tokens_per_s": float(served.output_tokens[ok].sum()) / span_s,
    }
    if sla:
        share = float(meets_sla(served, sla).sum()) / len(served)
        summary["goodput_rps"] = window_rate_rps(served, closed=closed) * share
        summary["sla_attainment_percent"] = 100.0 * share
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


def judge(served: Served, sla: Mapping[str, float]) -> Literal["kept", "broken", "overloaded"]:
    """Whether every target is kept, or the queue grows with the trace (`MOST_BEHIND_PERCENT`)."""
    if behind_percent(served) > MOST_BEHIND_PERCENT:
        return "overloaded"
    kept = all(ratio <= 1.0 for ratio in sla_ratios(served, sla).values())
    return "kept" if kept else "broken"


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


SAME = 1e-9  # a smaller share between two figures is rounding
# What a simulation that leaps over passes of the same rows spreads evenly over them.
SPREAD = ("itl_", "utilisation_", "consumed_memory_percent")


def differences(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """The metrics of both that are not the same, each with the share by which they differ, but for
    those that depend on whether passes were simulated one by one.
    """
    found = {}
    for name in one:
        if name in other and one[name] != other[name] and not name.startswith(SPREAD):
            share = abs(one[name] - other[name]) / max(abs(one[name]), abs(other[name]))
            if share > SAME:
                found[name] = share
    return found
