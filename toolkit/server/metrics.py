"""Show the server's counters to Prometheus, as metric families that are made at each scrape."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily, Metric

from toolkit.server.access import Account
from toolkit.server.stats import Histogram, LawComparison, Stats

Labels = Mapping[str, str]
FamilyKind = type[Gauge] | type[Counter]


class WorkerState(NamedTuple):
    """One worker at this moment, for metrics and the status page."""

    state: str  # running, idle, loading or lost
    rows: int  # requests in its batch
    kv_tokens: int  # that its batches may fill at most, including padding
    kv_capacity: int | None  # tokens; None before it was first loaded
    batch_ratio: float | None  # actual over predicted time of its batches
    load_s: float
    oom_events: int
    restarts: int

    @property
    def alive(self) -> bool:
        return self.state in ("running", "idle")

    @property
    def kv_usage(self) -> float:
        """0..1."""
        return min(self.kv_tokens / self.kv_capacity, 1.0) if self.kv_capacity else 0.0


def engine_families(
    stats: Stats,
    workers: Sequence[WorkerState],
    labels: Labels,
    *,
    running: int,
    waiting: int,
    predicted_ttft_s: float,
    engine: Mapping[str, str],
) -> Iterator[Metric]:
    """Yield what our own workers show at a scrape; `engine` is the identity of what runs."""
    capacity = sum(worker.kv_capacity or 0 for worker in workers)
    used = sum(worker.kv_tokens for worker in workers)
    alive = sum(worker.alive for worker in workers)
    usage = "Share of KV cache that running batches may fill."
    predicted = "Predicted TTFT of a request that arrives now."
    for name, text, value in (
        ("requests_running", "Requests in batches that run now.", running),
        ("requests_waiting", "Requests that no worker runs now.", waiting),
        ("kv_cache_usage_ratio", usage, min(used / capacity, 1.0) if capacity else 0.0),
        ("kv_cache_tokens", "Tokens that the workers' KV caches hold.", capacity),
        ("workers_alive", "Workers that can take batches.", alive),
        ("predicted_ttft_seconds", predicted, predicted_ttft_s),
    ):
        yield family_of(Gauge, f"llmctl_{name}", text, labels, value)
    info = {**labels, **engine}
    yield family_of(Gauge, "llmctl_engine_info", "What runs, in labels.", info, 1)
    yield from _histograms(stats, labels, _LATENCIES)
    text = "Actual over predicted batch time, for the steps that ran."
    yield histogram_family("llmctl_batch_time_ratio", text, labels, stats.batch_ratio)
    for attribute, text in _COUNTERS.items():
        name = re.sub("_s$", "_seconds", attribute)
        yield family_of(Counter, f"llmctl_{name}", text, labels, getattr(stats, attribute))
    compared = [stats.compared[index] for index in range(len(workers))]
    for name, text, attribute in _OF_WORKERS:
        kind = Counter if attribute in LawComparison.__dataclass_fields__ else Gauge
        shown: Sequence[object] = compared if kind is Counter else workers
        values = {str(index): getattr(worker, attribute) for index, worker in enumerate(shown)}
        yield family_of(kind, f"llmctl_worker_{name}", text, labels, values, "worker")


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
_OF_WORKERS = (
    ("load_seconds", "Estimated seconds of work given to a worker (SCLS Eq. 11).", "load_s"),
    ("requests_running", "Requests in a worker.", "rows"),
    ("kv_cache_usage_ratio", "Share of a worker's KV cache that its batches may fill.", "kv_usage"),
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


def family_of(
    kind: FamilyKind,
    name: str,
    text: str,
    labels: Labels,
    value: float | Mapping[str, float],
    label: str = "",
) -> Metric:
    """Return a family with one series, or with one for each value of `label`."""
    values = value if isinstance(value, Mapping) else {"": value}
    further = [label] if label else []
    family = kind(name, text, labels=[*labels, *further])
    for key, one in values.items():
        family.add_metric([*labels.values(), *([key] if label else [])], one)
    return family


def families_of_requests(
    stats: Stats, labels: Labels, accounts: Sequence[Account]
) -> Iterator[Metric]:
    """Yield what every front counts: its requests, and the requests of each key of a keys file."""
    yield from _histograms(stats, labels, _OF_REQUESTS)
    met = "Requests that met every target; of those that ended, and llmctl_refused_total."
    sent = {account.name: account.requests for account in accounts}
    values: float | Mapping[str, float]
    for name, text, values, label in (
        ("prompt_tokens", "Prompt tokens accepted.", stats.prompt_tokens, ""),
        ("generation_tokens", "Tokens generated.", stats.generation_tokens, ""),
        ("requests_within_targets", met, stats.within_targets, ""),
        ("refused", "Requests that got 503 because of overload.", stats.refused, ""),
        ("requests", "Requests that ended, and how.", dict(stats.ended), "finish_reason"),
        ("http_responses", "Answers by HTTP status.", stats.statuses, "status"),
        ("key_requests", "Requests that a key has sent.", sent, "key"),
    ):
        yield family_of(Counter, f"llmctl_{name}", text, labels, values, label)


def _histograms(stats: Stats, labels: Labels, texts: Mapping[str, str]) -> Iterator[Metric]:
    for attribute, text in texts.items():
        name = f"llmctl_{attribute}_seconds"
        yield histogram_family(name, text, labels, getattr(stats, attribute))


def histogram_family(name: str, text: str, labels: Labels, histogram: Histogram) -> Metric:
    """A family with one histogram."""
    family = HistogramMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), histogram.cumulative(), histogram.total)
    return family


def text_of(families: Iterable[Metric]) -> bytes:
    """Metrics in Prometheus' text format."""
    text: bytes = generate_latest(SimpleNamespace(collect=lambda: families))
    return text
