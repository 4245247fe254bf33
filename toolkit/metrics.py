"""Summaries of served requests: the same functions for simulated and measured ones.

TPOT = (E2E - TTFT) / (output tokens - 1). ITL is each gap between tokens. MTPOT is the largest gap
within a request. A request with one output token has no gap: it has neither TPOT nor MTPOT, counts
in none of their statistics, and keeps every target of theirs.

Throughput is the successful requests, and goodput the requests within every latency target, both
over the same time (`window_s`): so goodput is at most throughput. Where the server keeps up, that
is the window in which the requests arrive; the drain, the time after the last arrival, does not
count. For it says nothing of the server: the shorter a benchmark, the more of its makespan is
drain, and one long request at the end may double it. Where all requests keep their targets, goodput
is the rate of arrivals, as in DistServe (OSDI 2024, section 1): the greatest rate at which a given
share of the requests keeps the targets.

Where the queue grows with the trace, the server takes longer for the requests than they took to
arrive, and the window of arrivals would show the rate of arrivals in place of the server's. There,
and where arrivals have no rate of their own (one request, all at once, or each when another one has
ended), the time is the makespan, from the first arrival to the last completion, as `vllm bench
serve` has it for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from toolkit.files.tuning import MOST_BEHIND_PERCENT, UNSERVED

Floats = NDArray[np.float64]
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
    max_gap_s: Floats  # largest gap between two tokens of the request; with one token not read
    ok: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.arrival_s)

    def after(self, first: int) -> Served:
        """The requests from number `first` on."""
        return Served(*(getattr(self, column.name)[first:] for column in fields(self)))


def _of_all(served: Served) -> dict[str, Floats]:
    """TTFT, TPOT, MTPOT and E2E of every request, in seconds; with one token TPOT and MTPOT are 0.

    A server may end the stream of one token with an event of its own, which is no gap.
    """
    several = served.output_tokens > 1
    ttft = served.first_token_s - served.arrival_s
    e2e = served.finish_s - served.arrival_s
    tpot = np.where(several, (e2e - ttft) / np.maximum(served.output_tokens - 1, 1), 0.0)
    mtpot = np.where(several, served.max_gap_s, 0.0)
    return {"ttft": ttft, "tpot": tpot, "mtpot": mtpot, "e2e": e2e}


def latencies(served: Served) -> dict[str, Floats]:
    """TTFT, TPOT, MTPOT and E2E of each request that is ok, in seconds.

    TPOT and MTPOT omit requests with one token.
    """
    several = served.ok & (served.output_tokens > 1)
    counted = {"ttft": served.ok, "tpot": several, "mtpot": several, "e2e": served.ok}
    return {name: seconds[counted[name]] for name, seconds in _of_all(served).items()}


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


def window_s(served: Served, *, closed: bool = False) -> float:
    """The seconds that throughput and goodput are over; 0 where nothing was served in a makespan.

    It is the window of arrivals: all requests over their mean rate. It is the makespan where the
    queue grows with the trace (`behind_percent`), and where there is no rate.

    Args:
        closed: whether requests arrive when others have ended (a closed loop of fixed concurrency).
    """
    arrivals_s = float(served.arrival_s.max() - served.arrival_s.min())
    if closed or arrivals_s < SHORTEST_S or behind_percent(served) > MOST_BEHIND_PERCENT:
        return makespan_s(served)
    return arrivals_s * len(served) / (len(served) - 1)


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


def pooled_rates(
    windows: Sequence[Served], sla: Mapping[str, float], *, closed: bool = False
) -> dict[str, float]:
    """Throughput, output tokens per second and, with targets, goodput: of all windows together,
    over the length of all (`window_s`); 0 where no window has a length.
    """
    seconds = sum(window_s(window, closed=closed) for window in windows)
    counts = {
        "throughput_rps": sum(int(window.ok.sum()) for window in windows),
        "output_tokens_per_s": sum(
            int(window.output_tokens[window.ok].sum()) for window in windows
        ),
    }
    if sla:
        counts["goodput_rps"] = sum(int(meets_sla(window, sla).sum()) for window in windows)
    return {name: count / seconds if seconds else 0.0 for name, count in counts.items()}


def summarize(
    served: Served, sla: Mapping[str, float], *, closed: bool = False
) -> dict[str, float]:
    """Metric names, with their units, and values. Without targets there is neither goodput nor
    attainment.

    Args:
        sla: target name to its limit in seconds.
        closed: see `window_s`.
    """
    ok = served.ok
    if not ok.any():
        count = float(len(served))
        unserved = {"requests": count, "failed": count, "throughput_rps": 0.0}
        return unserved | ({"goodput_rps": 0.0, "sla_attainment_percent": 0.0} if sla else {})
    summary = {
        "requests": float(len(served)),
        "failed": float((~ok).sum()),
        "makespan_s": makespan_s(served),
        **pooled_rates([served], sla, closed=closed),
    }
    if sla:
        share = float(meets_sla(served, sla).sum()) / len(served)
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
