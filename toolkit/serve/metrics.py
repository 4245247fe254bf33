"""Show the server's counters to Prometheus, as metric families that are made at each scrape."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from toolkit.serve.access import Account
from toolkit.serve.stats import Histogram, Stats

Labels = Mapping[str, str]
FamilyKind = type[GaugeMetricFamily] | type[CounterMetricFamily]


class WorkerGauges(NamedTuple):
    """One worker at the moment of a scrape."""

    alive: bool
    load_s: float
    rows: int  # requests in its batch
    kv_tokens: int  # that its batches may fill at most, including padding
    kv_capacity: int | None  # tokens; None before it was first loaded

    @property
    def kv_usage(self) -> float:
        """0..1."""
        return min(self.kv_tokens / self.kv_capacity, 1.0) if self.kv_capacity else 0.0


class Gauges(NamedTuple):
    """The values that are read at the moment of a scrape."""

    running: int
    waiting: int
    kv_usage: float  # 0..1
    kv_tokens: int
    workers: Sequence[WorkerGauges]
    predicted_ttft_s: float
    engine: Mapping[str, str]  # the identity of the workers' engine (`toolkit.files.profile`)


def engine_families(
    stats: Stats, now: Gauges, model: str, accounts: Sequence[Account] = ()
) -> Iterator[Metric]:
    """Yield what the server of an engine shows at a scrape."""
    labels = {"model_name": model}
    alive = sum(worker.alive for worker in now.workers)
    usage = "Share of KV cache that running batches may fill."
    predicted = "Predicted TTFT of a request that arrives now."
    for name, text, value in (
        ("requests_running", "Requests in batches that run now.", now.running),
        ("requests_waiting", "Requests that no worker runs now.", now.waiting),
        ("kv_cache_usage_ratio", usage, now.kv_usage),
        ("kv_cache_tokens", "Tokens that the workers' KV caches hold.", now.kv_tokens),
        ("workers_alive", "Workers that can take batches.", alive),
        ("predicted_ttft_seconds", predicted, now.predicted_ttft_s),
    ):
        yield family_of(GaugeMetricFamily, f"llmctl_{name}", text, labels, value)
    info = labels | dict(now.engine)
    yield family_of(GaugeMetricFamily, "llmctl_engine_info", "What runs, in labels.", info, 1)
    for attribute, text in _LATENCIES.items():
        name = f"llmctl_{attribute}_seconds"
        yield histogram_family(name, text, labels, getattr(stats, attribute))
    text = "Actual over predicted batch time, for the steps that ran."
    yield histogram_family("llmctl_batch_time_ratio", text, labels, stats.batch_ratio)
    for attribute, text in _COUNTERS.items():
        name = re.sub("_s$", "_seconds", attribute)
        value = getattr(stats, attribute)
        yield family_of(CounterMetricFamily, f"llmctl_{name}", text, labels, value)
    compared = [stats.compared[index] for index in range(len(now.workers))]
    yield from _of_workers(GaugeMetricFamily, labels, _WORKER_GAUGES, now.workers)
    yield from _of_workers(CounterMetricFamily, labels, _WORKER_COUNTERS, compared)
    yield from families_of_requests(stats, labels, accounts)


# Of counters: attribute of `Stats` and help text. They are called llmctl_ATTRIBUTE, where `_s` is
# `_seconds`.
_COUNTERS = {
    "batches": "Batches that ran.",
    "batch_s": "Time of batches that ended well.",
    "predicted_batch_s": "Time that the laws predict for the same batches.",
    "extrapolated_batches": "Batches outside the measured range of the laws.",
    "oom_events": "Batches that ran out of memory.",
    "preemptions": "Rows that were evicted, paused or swapped out.",
    "worker_restarts": "Workers lost and started again.",
}
# Of workers: name, help text and attribute. The quotient of the counters is actual over predicted
# batch time.
_WORKER_GAUGES = (
    ("load_seconds", "Estimated seconds of work given to a worker (SCLS Eq. 11).", "load_s"),
    ("requests_running", "Requests in a worker.", "rows"),
    ("kv_cache_usage_ratio", "Share of a worker's KV cache that its batches may fill.", "kv_usage"),
)
_WORKER_COUNTERS = (
    ("batch_seconds", "As llmctl_batch_seconds_total.", "took_s"),
    ("predicted_batch_seconds", "As llmctl_predicted_batch_seconds_total.", "predicted_s"),
)
# Of histograms: attribute of `Stats` and help text. They are called llmctl_ATTRIBUTE_seconds.
_OF_REQUESTS = {
    "ttft": "Arrival to first token.",
    "itl": "Time between tokens; tokens that arrive together share their gap.",
    "tpot": "First to last token, per token after the first.",
    "mtpot": "The longest time between two tokens of a request with several.",
    "e2e": "Arrival to last token.",
}
_LATENCIES = {
    "queue": "Arrival to the start of the first batch.",
    "deciding": "Time of one call of the scheduler.",
    "hop": "From the end of a worker's batch to the start of the next, if one was ready.",
}


def _of_workers(
    kind: FamilyKind,
    labels: Labels,
    metrics: Sequence[tuple[str, str, str]],
    workers: Sequence[object],
) -> Iterator[Metric]:
    for name, text, attribute in metrics:
        values = {str(index): getattr(worker, attribute) for index, worker in enumerate(workers)}
        yield by_label(kind, f"llmctl_worker_{name}", text, labels, "worker", values)


def family_of(kind: FamilyKind, name: str, text: str, labels: Labels, value: float) -> Metric:
    """A family with one series."""
    family = kind(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def by_label(
    kind: FamilyKind, name: str, text: str, labels: Labels, label: str, values: Mapping[str, float]
) -> Metric:
    """A family with one series for each value of `label`."""
    family = kind(name, text, labels=[*labels, label])
    for key, value in values.items():
        family.add_metric([*labels.values(), key], value)
    return family


def families_of_requests(
    stats: Stats, labels: Labels, accounts: Sequence[Account]
) -> Iterator[Metric]:
    """Yield what every front counts: its requests, and those of each key of a keys file."""
    for attribute, text in _OF_REQUESTS.items():
        name = f"llmctl_{attribute}_seconds"
        yield histogram_family(name, text, labels, getattr(stats, attribute))
    met = "Requests that met every target; of those that ended, and llmctl_refused_total."
    for name, text, value in (
        ("llmctl_prompt_tokens", "Prompt tokens accepted.", stats.prompt_tokens),
        ("llmctl_generation_tokens", "Tokens generated.", stats.generation_tokens),
        ("llmctl_requests_within_targets", met, stats.within_targets),
        ("llmctl_refused", "Requests that got 503 because of overload.", stats.refused),
    ):
        yield family_of(CounterMetricFamily, name, text, labels, value)
    for name, text, label, values in (
        ("llmctl_requests", "Requests that ended, and how.", "finish_reason", dict(stats.ended)),
        ("llmctl_http_responses", "Answers by HTTP status.", "status", stats.statuses),
    ):
        yield by_label(CounterMetricFamily, name, text, labels, label, values)
    text = "Requests that a key has sent."
    sent = {account.name: account.requests for account in accounts}
    yield by_label(CounterMetricFamily, "llmctl_key_requests", text, labels, "key", sent)


def histogram_family(name: str, text: str, labels: Labels, histogram: Histogram) -> Metric:
    """A family with one histogram."""
    family = HistogramMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), histogram.cumulative(), histogram.total)
    return family


def text_of(families: Iterable[Metric]) -> bytes:
    """Metrics in Prometheus' text format."""
    text: bytes = generate_latest(SimpleNamespace(collect=lambda: families))
    return text
