"""The last hour of a server: a point every few seconds, percentiles over the last minute, what went wrong when.

Made from what `Stats` counts anyway: nothing is added to the path of a request. Memory is bounded, whatever the load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from toolkit.serve.metrics import Gauges
from toolkit.serve.stats import Histogram, Stats, quantile

SAMPLE_S = 2.0
KEPT = 1800  # points: an hour, at about 200 bytes each
TRAILING = 30  # points that rates and percentiles are of: one minute
EVENTS = 20
LATENCIES = ("ttft", "tpot", "itl", "e2e")  # charts
MEASURED = (*LATENCIES, "mtpot")
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
SHOWN = ("p50", "p95", "p99")

COLUMNS = (
    *("time_s", "running", "waiting", "kv_share", "requests_per_s", "output_tokens_per_s", "input_tokens_per_s"),
    *(f"{latency}_{percentile}_s" for latency in LATENCIES for percentile in SHOWN),
    *("batch_ratio", "attainment", "failed_per_s", "oom_events"),
    "worker_batch_ratios",  # a list, by worker
)


class Counts(NamedTuple):
    """Counters at one moment. All but `at_s` only grow."""

    at_s: float
    well: int
    failed: int
    within: int
    output_tokens: int
    input_tokens: int
    compared: tuple[tuple[float, float], ...]  # by worker: seconds that batches took, and were predicted to take
    oom: int
    restarts: int
    extrapolated: int
    buckets: tuple[tuple[int, ...], ...]
    totals: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that a person should know of."""

    time_s: float
    text: str


class History:
    """Points of a server's life. `sample` is to be called every `SAMPLE_S`."""

    def __init__(self, stats: Stats, gauges: Callable[[], Gauges], now_s: Callable[[], float]) -> None:
        self.points: deque[msgspec.Raw] = deque(maxlen=KEPT)  # JSON already: each is sent many times
        self.taken = 0  # points ever
        self.happenings: deque[Happening] = deque(maxlen=EVENTS)
        self._stats = stats
        self._gauges = gauges
        self._now_s = now_s
        self._workers = len(gauges().workers)
        self._trail: deque[Counts] = deque([self._count()._replace(at_s=0.0)], maxlen=TRAILING + 1)

    def sample(self) -> None:
        """Take a point."""
        before, now = self._trail[-1], self._count()
        self._trail.append(now)
        self._note(before, now)
        self.points.append(msgspec.Raw(msgspec.json.encode(self._point(before, now))))
        self.taken += 1

    def recent(self, key: str) -> float | None:
        """A target's statistic over the last minute, `ttft_p99_s`; None where nothing ended."""
        metric, statistic, _ = key.split("_")
        old, now, index = self._trail[0], self._trail[-1], MEASURED.index(metric)
        counts = [b - a for a, b in zip(old.buckets[index], now.buckets[index], strict=True)]
        if statistic == "mean":
            count = sum(counts)
            return (now.totals[index] - old.totals[index]) / count if count else None
        return quantile(self._histogram(metric).bounds, counts, PERCENTILES[statistic])

    def attainment(self) -> float | None:
        """The share of requests that kept every target in the last minute."""
        old, now = self._trail[0], self._trail[-1]
        ended = now.well + now.failed - old.well - old.failed
        return (now.within - old.within) / ended if ended else None

    def _point(self, before: Counts, now: Counts) -> list[float | int | list[float | None] | None]:
        old, gauges = self._trail[0], self._gauges()
        span_s = max(now.at_s - old.at_s, 1e-9)
        compared = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(old.compared, now.compared, strict=True)]
        latencies = [self.recent(f"{latency}_{share}_s") for latency in LATENCIES for share in SHOWN]
        point = [
            now.at_s,
            gauges.running,
            gauges.waiting,
            gauges.kv_usage,
            (now.well - old.well) / span_s,
            (now.output_tokens - old.output_tokens) / span_s,
            (now.input_tokens - old.input_tokens) / span_s,
            *latencies,
            _ratio(compared),
            self.attainment(),
            (now.failed - old.failed) / span_s,
            now.oom - before.oom,
        ]
        ratios = [None if (ratio := _ratio([one])) is None else round(ratio, 3) for one in compared]
        return [*(round(value, 6) if isinstance(value, float) else value for value in point), ratios]

    def _note(self, before: Counts, now: Counts) -> None:
        """Troubles since the last point, one line for each kind."""
        for count, one, more in (
            (
                now.oom - before.oom,
                "a batch ran out of memory, and is run again in parts",
                "batches ran out of memory",
            ),
            (now.restarts - before.restarts, "a worker was lost, and is started again", "workers were lost"),
            (now.failed - before.failed, "a request failed", "requests failed"),
        ):
            if count:
                self.happenings.append(Happening(round(now.at_s, 1), one if count == 1 else f"{count} {more}"))

    def _count(self) -> Counts:
        stats = self._stats
        histograms = [self._histogram(name) for name in MEASURED]
        return Counts(
            self._now_s(),
            stats.ended["stop"] + stats.ended["length"],
            stats.ended["failed"],
            stats.within_targets,
            stats.generation_tokens,
            stats.prompt_tokens,
            tuple((stats.compared[k].took_s, stats.compared[k].predicted_s) for k in range(self._workers)),
            stats.oom_events,
            stats.worker_restarts,
            stats.extrapolated_batches,
            tuple(tuple(histogram.counts) for histogram in histograms),
            tuple(histogram.total for histogram in histograms),
        )

    def _histogram(self, name: str) -> Histogram:
        histogram: Histogram = getattr(self._stats, name)
        return histogram


def _ratio(compared: Sequence[tuple[float, float]]) -> float | None:
    """Seconds over predicted seconds, of all together; None where nothing was predicted."""
    took_s, predicted_s = (sum(one[part] for one in compared) for part in (0, 1))
    return took_s / predicted_s if predicted_s > 0 else None
