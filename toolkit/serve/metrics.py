"""What the server counts while it serves, and how Prometheus reads it.

`Stats` is plain numbers, cheap enough to touch per progress frame; `Exposition` turns it into metric families when it
is scraped, under our names and, on request, under vLLM's too, for dashboards and autoscalers that exist.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from toolkit.sched.protocols import LatencyLaw
from toolkit.sched.residents import LENGTH
from toolkit.sched.types import Batch, BatchResult, RoundResult, Worker

# vLLM's own buckets, so that its dashboards read ours.
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5),
    *(10, 20, 40, 80, 160, 640, 2560),
)
TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5),
    *(10, 20, 40, 80),
)
E2E_BUCKETS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
RATIO_BUCKETS = (0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 1.5, 2, 4)


class Histogram:
    """Counts by bucket; bounds are upper ones, inclusive."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """What Prometheus wants: each upper bound as text, and how many values are not above it."""
        running = 0
        buckets = []
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            running += count
            buckets.append(("+Inf" if bound == math.inf else str(float(bound)), float(running)))
        return buckets


@dataclass(slots=True)
class Stats:
    """All counters of one server. Times in seconds.

    `max_batch_size` and `max_length` say how far the latency laws were measured.
    """

    max_batch_size: int = 1 << 62
    max_length: int = 1 << 62
    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS))
    itl: Histogram = field(default_factory=lambda: Histogram(TOKEN_BUCKETS))
    tpot: Histogram = field(default_factory=lambda: Histogram(TOKEN_BUCKETS))
    e2e: Histogram = field(default_factory=lambda: Histogram(E2E_BUCKETS))
    queue: Histogram = field(default_factory=lambda: Histogram(E2E_BUCKETS))
    batch_ratio: Histogram = field(default_factory=lambda: Histogram(RATIO_BUCKETS))
    prompt_tokens: int = 0
    generation_tokens: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    batch_s: float = 0.0  # of batches that the law can be held against
    predicted_batch_s: float = 0.0  # what it says of them
    extrapolated_batches: int = 0
    oom_events: int = 0
    preemptions: int = 0
    worker_restarts: int = 0

    def count_tokens(self, tokens: int, arrival_s: float, last_token_s: float, now_s: float) -> None:
        """`tokens` came at once, the ones before at `last_token_s` (NaN: they are the first)."""
        self.generation_tokens += tokens
        if math.isnan(last_token_s):
            self.ttft.observe(now_s - arrival_s)
        else:
            self.itl.observe((now_s - last_token_s) / tokens, tokens)

    def count_end(self, status: str, arrival_s: float, first_token_s: float, last_token_s: float, tokens: int) -> None:
        """A request has ended. Latencies are of those that ended well."""
        self.ended[status] += 1
        if status not in ("stop", "length"):
            return
        self.e2e.observe(last_token_s - arrival_s)
        if tokens > 1:
            self.tpot.observe((last_token_s - first_token_s) / (tokens - 1))

    def count_batch(self, batch: Batch, result: BatchResult, now_s: float, law: LatencyLaw) -> None:
        """A batch has ended. Its time is held against the law for the steps that it ran, which may be fewer."""
        self._count_batch(result.failure, batch.size, batch.input_length + batch.steps)
        steps = max(result.generated, default=0)
        if not result.failure and steps:
            iterations = steps - law.prefill_emits_token
            expected_s = law.prefill_s(batch.size, batch.input_length)
            expected_s += law.decode_s(batch.size, batch.input_length, iterations)
            self._compare(now_s - batch.started_s, expected_s)

    def count_round(self, batch: Batch, result: RoundResult, now_s: float, worker: Worker) -> None:
        """A round has ended, of which the worker's residents do not know yet."""
        residents, law = worker.residents, worker.latency
        rows, longest = len(residents), 0
        if rows:
            longest = int(residents.table()[LENGTH].max()) + residents.steps
        self._count_batch(result.failure, rows, longest + result.steps)
        if not result.failure:
            length = longest if law.padded or not rows else residents.used / rows
            expected_s = law.prefill_s(batch.size, batch.input_length) if batch.jobs else 0.0
            expected_s += law.decode_s(rows, length, result.steps) if result.steps else 0.0
            self._compare(now_s - batch.started_s, expected_s)

    def _count_batch(self, failure: str, rows: int, length: int) -> None:
        self.batches += 1
        self.oom_events += failure == "oom"
        self.extrapolated_batches += rows > self.max_batch_size or length > self.max_length

    def _compare(self, took_s: float, expected_s: float) -> None:
        if expected_s > 0:
            self.batch_ratio.observe(took_s / expected_s)
            self.batch_s += took_s
            self.predicted_batch_s += expected_s


class Gauges(NamedTuple):
    """What is read at the moment of a scrape."""

    running: int
    waiting: int
    kv_usage: float  # 0..1
    workers_alive: int
    worker_load_s: Sequence[float]


class Exposition:
    """A collector for a prometheus-client registry."""

    def __init__(self, stats: Stats, gauges: Callable[[], Gauges], model: str, *, vllm_names: bool) -> None:
        self._stats = stats
        self._gauges = gauges
        self._model = model
        self._vllm_names = vllm_names

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape."""
        gauges = self._gauges()
        yield from self._own(gauges)
        if self._vllm_names:
            yield from self._vllm(gauges)

    def _own(self, now: Gauges) -> Iterator[Metric]:
        stats, labels = self._stats, {"model_name": self._model}
        yield _gauge("llmctl_requests_running", "Requests in batches that run now.", labels, now.running)
        yield _gauge("llmctl_requests_waiting", "Requests that no worker runs now.", labels, now.waiting)
        yield _gauge(
            "llmctl_kv_cache_usage_ratio", "Share of KV cache that running batches may fill.", labels, now.kv_usage
        )
        yield _gauge("llmctl_workers_alive", "Workers that can take batches.", labels, now.workers_alive)
        yield _worker_loads(now.worker_load_s, labels)
        yield from self._histograms(labels, _OWN_HISTOGRAMS)
        yield _counter("llmctl_prompt_tokens", "Prompt tokens accepted.", labels, stats.prompt_tokens)
        yield _counter("llmctl_generation_tokens", "Tokens generated.", labels, stats.generation_tokens)
        yield _ends("llmctl_requests", "Requests that ended, and how.", "finish_reason", labels, stats.ended)
        yield _counter("llmctl_batches", "Batches that ran.", labels, stats.batches)
        yield _counter("llmctl_batch_seconds", "Time of batches that ended well.", labels, stats.batch_s)
        yield _counter(
            "llmctl_predicted_batch_seconds", "What the laws say of the same.", labels, stats.predicted_batch_s
        )
        yield _counter(
            "llmctl_extrapolated_batches", "Batches outside what was measured.", labels, stats.extrapolated_batches
        )
        yield _counter("llmctl_oom_events", "Batches that ran out of memory.", labels, stats.oom_events)
        yield _counter(
            "llmctl_preemptions", "Rows that were evicted, paused or swapped out.", labels, stats.preemptions
        )
        yield _counter("llmctl_worker_restarts", "Workers lost and started again.", labels, stats.worker_restarts)

    def _vllm(self, now: Gauges) -> Iterator[Metric]:
        stats, labels = self._stats, {"model_name": self._model, "engine": "0"}
        yield _gauge("vllm:num_requests_running", "As llmctl_requests_running.", labels, now.running)
        yield _gauge("vllm:num_requests_waiting", "As llmctl_requests_waiting.", labels, now.waiting)
        yield _gauge("vllm:kv_cache_usage_perc", "As llmctl_kv_cache_usage_ratio, 0..1.", labels, now.kv_usage)
        yield from self._histograms(labels, _VLLM_HISTOGRAMS)
        yield _counter("vllm:prompt_tokens", "As llmctl_prompt_tokens_total.", labels, stats.prompt_tokens)
        yield _counter("vllm:generation_tokens", "As llmctl_generation_tokens_total.", labels, stats.generation_tokens)
        yield _counter("vllm:num_preemptions", "As llmctl_preemptions_total.", labels, stats.preemptions)
        succeeded = {reason: stats.ended[reason] for reason in ("stop", "length")}
        yield _ends("vllm:request_success", "Requests that ended well.", "finished_reason", labels, succeeded)

    def _histograms(self, labels: dict[str, str], names: dict[str, tuple[str, str]]) -> Iterator[Metric]:
        for name, (attribute, text) in names.items():
            histogram: Histogram = getattr(self._stats, attribute)
            family = HistogramMetricFamily(name, text, labels=list(labels))
            family.add_metric(list(labels.values()), histogram.cumulative(), histogram.total)
            yield family


_OWN_HISTOGRAMS = {
    "llmctl_ttft_seconds": ("ttft", "Arrival to first token."),
    "llmctl_itl_seconds": ("itl", "Between tokens; tokens that come together share their gap."),
    "llmctl_tpot_seconds": ("tpot", "First to last token, per token after the first."),
    "llmctl_e2e_seconds": ("e2e", "Arrival to last token."),
    "llmctl_queue_seconds": ("queue", "Arrival to the start of the first batch."),
    "llmctl_batch_time_ratio": ("batch_ratio", "Actual over predicted batch time, for the steps that ran."),
}
_VLLM_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("ttft", "As llmctl_ttft_seconds."),
    "vllm:inter_token_latency_seconds": ("itl", "As llmctl_itl_seconds."),
    "vllm:request_time_per_output_token_seconds": ("tpot", "As llmctl_tpot_seconds."),
    "vllm:e2e_request_latency_seconds": ("e2e", "As llmctl_e2e_seconds."),
    "vllm:request_queue_time_seconds": ("queue", "As llmctl_queue_seconds."),
}


def _gauge(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _worker_loads(loads_s: Sequence[float], labels: dict[str, str]) -> Metric:
    text = "Estimated seconds of work given to a worker (SCLS Eq. 11)."
    family = GaugeMetricFamily("llmctl_worker_load_seconds", text, labels=[*labels, "worker"])
    for worker, load_s in enumerate(loads_s):
        family.add_metric([*labels.values(), str(worker)], load_s)
    return family


def _counter(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _ends(name: str, text: str, label: str, labels: dict[str, str], counts: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[*labels, label])
    for reason, count in counts.items():
        family.add_metric([*labels.values(), reason], count)
    return family
