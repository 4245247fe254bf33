"""How Prometheus reads what the server counts: metric families, made when they are scraped.

They go under our names and, on request, under vLLM's too, for dashboards and autoscalers that
exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from toolkit.serve.access import LIMITS, Account
from toolkit.serve.stats import Histogram, Stats


class WorkerGauges(NamedTuple):
    """One worker at the moment of a scrape. `kv_tokens` are what its batches may fill at most,
    padding included.
    """

    alive: bool
    load_s: float
    rows: int  # requests in it
    kv_tokens: int
    kv_capacity: int | None  # None while it has never been loaded

    @property
    def kv_usage(self) -> float:
        """0..1."""
        return min(self.kv_tokens / self.kv_capacity, 1.0) if self.kv_capacity else 0.0


class Gauges(NamedTuple):
    """What is read at the moment of a scrape."""

    running: int
    waiting: int
    kv_usage: float  # 0..1
    kv_tokens: int
    workers: Sequence[WorkerGauges]
    predicted_ttft_s: float
    engine: Mapping[str, str]  # `toolkit.files.profile` of the workers' engine


class Exposition:
    """A collector for a prometheus-client registry."""

    def __init__(
        self,
        stats: Stats,
        gauges: Callable[[], Gauges],
        model: str,
        *,
        vllm_names: bool,
        accounts: Callable[[], Sequence[Account]] = tuple,
    ) -> None:
        self._stats = stats
        self._gauges = gauges
        self._model = model
        self._vllm_names = vllm_names
        self._accounts = accounts

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape."""
        gauges = self._gauges()
        yield from self._own(gauges)
        yield from self._keys({"model_name": self._model})
        if self._vllm_names:
            yield from self._vllm(gauges)

    def _own(self, now: Gauges) -> Iterator[Metric]:
        stats, labels = self._stats, {"model_name": self._model}
        yield _gauge(
            "llmctl_requests_running", "Requests in batches that run now.", labels, now.running
        )
        yield _gauge(
            "llmctl_requests_waiting", "Requests that no worker runs now.", labels, now.waiting
        )
        yield _gauge(
            "llmctl_kv_cache_usage_ratio",
            "Share of KV cache that running batches may fill.",
            labels,
            now.kv_usage,
        )
        yield _gauge(
            "llmctl_kv_cache_tokens",
            "Tokens that the workers' KV caches hold.",
            labels,
            now.kv_tokens,
        )
        alive = sum(one.alive for one in now.workers)
        yield _gauge("llmctl_workers_alive", "Workers that can take batches.", labels, alive)
        yield _gauge("llmctl_engine_info", "What runs, in labels.", labels | dict(now.engine), 1)
        yield from self._workers(now.workers, labels)
        yield _gauge(
            "llmctl_predicted_ttft_seconds",
            "First token of a request that came now.",
            labels,
            now.predicted_ttft_s,
        )
        yield from self._histograms(labels, _OWN_HISTOGRAMS)
        yield _counter(
            "llmctl_prompt_tokens", "Prompt tokens accepted.", labels, stats.prompt_tokens
        )
        yield _counter(
            "llmctl_generation_tokens", "Tokens generated.", labels, stats.generation_tokens
        )
        yield _ends(
            "llmctl_requests", "Requests that ended, and how.", "finish_reason", labels, stats.ended
        )
        yield _counter(
            "llmctl_requests_within_targets",
            "Requests that kept every target.",
            labels,
            stats.within_targets,
        )
        yield _counter("llmctl_batches", "Batches that ran.", labels, stats.batches)
        yield _counter(
            "llmctl_batch_seconds", "Time of batches that ended well.", labels, stats.batch_s
        )
        yield _counter(
            "llmctl_predicted_batch_seconds",
            "What the laws say of the same.",
            labels,
            stats.predicted_batch_s,
        )
        yield _sums(
            "llmctl_slice_sums",
            "Sums over slices of time, the laws' time, arrivals meanwhile, and their products.",
            labels,
            asdict(stats.slice_sums),
        )
        yield _counter(
            "llmctl_extrapolated_batches",
            "Batches outside what was measured.",
            labels,
            stats.extrapolated_batches,
        )
        yield _counter(
            "llmctl_oom_events", "Batches that ran out of memory.", labels, stats.oom_events
        )
        yield _counter(
            "llmctl_preemptions",
            "Rows that were evicted, paused or swapped out.",
            labels,
            stats.preemptions,
        )
        yield _counter(
            "llmctl_refused", "Requests that got 503 for overload.", labels, stats.refused
        )
        text = "Connections and bodies that got 429, or a reset, because one client had its share."
        yield _ends("llmctl_client_limited", text, "limit", labels, stats.share_refusals)
        yield _counter(
            "llmctl_worker_restarts",
            "Workers lost and started again.",
            labels,
            stats.worker_restarts,
        )
        yield _counter(
            "llmctl_engine_seconds",
            "Time inside workers' engines, of all workers.",
            labels,
            stats.engine_s,
        )
        yield _counter(
            "llmctl_engine_steps", "Steps that batches ran for.", labels, stats.engine_steps
        )
        yield _counter(
            "llmctl_reporting_seconds",
            "Between steps, to report; part of engine seconds.",
            labels,
            stats.reporting_s,
        )

    def _workers(self, workers: Sequence[WorkerGauges], labels: dict[str, str]) -> Iterator[Metric]:
        """What each worker does; as many series as there are workers. Actual over predicted is the
        last two's.
        """
        for name, text, attribute in _OF_WORKERS:
            yield _by_worker(
                GaugeMetricFamily, name, text, labels, [getattr(one, attribute) for one in workers]
            )
        compared = [self._stats.compared[index] for index in range(len(workers))]
        took, predicted = [one.took_s for one in compared], [one.predicted_s for one in compared]
        name = "llmctl_worker_{}batch_seconds"
        yield _by_worker(
            CounterMetricFamily, name.format(""), "As llmctl_batch_seconds_total.", labels, took
        )
        text = "As llmctl_predicted_batch_seconds_total."
        yield _by_worker(CounterMetricFamily, name.format("predicted_"), text, labels, predicted)

    def _keys(self, labels: dict[str, str]) -> Iterator[Metric]:
        """What each key of a keys file took; as many series as there are names in it."""
        requests = CounterMetricFamily(
            "llmctl_key_requests", "Requests of a key that were let in.", labels=[*labels, "key"]
        )
        tokens = CounterMetricFamily(
            "llmctl_key_tokens", "Prompt and output of a key.", labels=[*labels, "key"]
        )
        running = GaugeMetricFamily(
            "llmctl_key_running", "Choices of a key, waiting ones too.", labels=[*labels, "key"]
        )
        limited = CounterMetricFamily(
            "llmctl_key_limited",
            "Requests of a key that got 429, by limit.",
            labels=[*labels, "key", "limit"],
        )
        for account in self._accounts():
            values = [*labels.values(), account.name]
            requests.add_metric(values, account.accepted)
            tokens.add_metric(values, account.taken_tokens)
            running.add_metric(values, account.running)
            for limit in LIMITS:
                limited.add_metric([*values, limit], account.refused[limit])
        yield from (requests, tokens, running, limited)

    def _vllm(self, now: Gauges) -> Iterator[Metric]:
        stats, labels = self._stats, {"model_name": self._model, "engine": "0"}
        yield _gauge(
            "vllm:num_requests_running", "As llmctl_requests_running.", labels, now.running
        )
        yield _gauge(
            "vllm:num_requests_waiting", "As llmctl_requests_waiting.", labels, now.waiting
        )
        yield _gauge(
            "vllm:kv_cache_usage_perc",
            "As llmctl_kv_cache_usage_ratio, 0..1.",
            labels,
            now.kv_usage,
        )
        yield from self._histograms(labels, _VLLM_HISTOGRAMS)
        yield _counter(
            "vllm:prompt_tokens", "As llmctl_prompt_tokens_total.", labels, stats.prompt_tokens
        )
        yield _counter(
            "vllm:generation_tokens",
            "As llmctl_generation_tokens_total.",
            labels,
            stats.generation_tokens,
        )
        yield _counter(
            "vllm:num_preemptions", "As llmctl_preemptions_total.", labels, stats.preemptions
        )
        succeeded = {reason: stats.ended[reason] for reason in ("stop", "length")}
        yield _ends(
            "vllm:request_success",
            "Requests that ended well.",
            "finished_reason",
            labels,
            succeeded,
        )

    def _histograms(
        self, labels: dict[str, str], names: dict[str, tuple[str, str]]
    ) -> Iterator[Metric]:
        for name, (attribute, text) in names.items():
            histogram: Histogram = getattr(self._stats, attribute)
            family = HistogramMetricFamily(name, text, labels=list(labels))
            family.add_metric(list(labels.values()), histogram.cumulative(), histogram.total)
            yield family


_OWN_HISTOGRAMS = {
    "llmctl_ttft_seconds": ("ttft", "Arrival to first token."),
    "llmctl_itl_seconds": ("itl", "Between tokens; tokens that come together share their gap."),
    "llmctl_tpot_seconds": ("tpot", "First to last token, per token after the first."),
    "llmctl_mtpot_seconds": ("mtpot", "The longest time between two tokens of a request."),
    "llmctl_e2e_seconds": ("e2e", "Arrival to last token."),
    "llmctl_queue_seconds": ("queue", "Arrival to the start of the first batch."),
    "llmctl_deciding_seconds": (
        "deciding",
        "One call of the scheduler: what to start, or what has ended.",
    ),
    "llmctl_hop_seconds": (
        "hop",
        "From the end of a worker's batch to the start of the next, where one was there.",
    ),
    "llmctl_batch_time_ratio": (
        "batch_ratio",
        "Actual over predicted batch time, for the steps that ran.",
    ),
}
_OF_WORKERS = (
    (
        "llmctl_worker_load_seconds",
        "Estimated seconds of work given to a worker (SCLS Eq. 11).",
        "load_s",
    ),
    ("llmctl_worker_requests_running", "Requests in a worker.", "rows"),
    (
        "llmctl_worker_kv_cache_usage_ratio",
        "Share of its KV cache that its batches may fill.",
        "kv_usage",
    ),
)
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


def _by_worker(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    labels: dict[str, str],
    values: Sequence[float],
) -> Metric:
    family = kind(name, text, labels=[*labels, "worker"])
    for worker, value in enumerate(values):
        family.add_metric([*labels.values(), str(worker)], value)
    return family


def _counter(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _sums(name: str, text: str, labels: dict[str, str], sums: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[*labels, "of"])
    for of, value in sums.items():
        family.add_metric([*labels.values(), of], value)
    return family


def _ends(
    name: str, text: str, label: str, labels: dict[str, str], counts: dict[str, int]
) -> Metric:
    family = CounterMetricFamily(name, text, labels=[*labels, label])
    for reason, count in counts.items():
        family.add_metric([*labels.values(), reason], count)
    return family
