"""Show the server's counters to Prometheus, as metric families that are made at each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily, Metric

from toolkit.files.profile import identity
from toolkit.sched.memory import footprint_of
from toolkit.server.stats import Histogram, Stats

if TYPE_CHECKING:
    from toolkit.server.driver import Driver

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


def worker_states(driver: Driver) -> list[WorkerState]:
    """Return each worker, as metrics and the status page show it."""
    states = []
    for worker in driver.scheduler.workers:
        # To the scheduler a worker is alive while it loads for the first time.
        facts = driver.facts.get(worker.index)
        tokens = footprint_of(worker).taken + worker.paused.tokens
        batch = driver.rows[worker.index].batch
        if batch and not batch.keep_cache:
            # A slice may fill: every row padded to the longest, for all steps (SCLS Eq. 5).
            tokens = len(batch.jobs) * (batch.input_length + batch.steps)
        state = "loading" if facts is None else "running" if batch else "idle"
        states.append(
            WorkerState(
                state=state if worker.alive or facts is None else "lost",
                rows=driver.running_on(worker.index),
                kv_tokens=tokens,
                kv_capacity=facts.capacity_tokens if facts else None,
                batch_ratio=driver.stats.ratio_of([worker.index]),
                load_s=round(worker.load_s, 3),
                oom_events=worker.oom_events,
                restarts=driver.stats.restarts[worker.index],
            )
        )
    return states


def engine_families(driver: Driver, labels: Labels) -> Iterator[Metric]:
    """Yield the metrics of a driver and its workers at the moment of a scrape."""
    stats = driver.stats
    workers = worker_states(driver)
    info = identity(next(iter(driver.facts.values()))) if driver.facts else {}
    yield family_of(Gauge, "llmctl_engine_info", "What runs, in labels.", {**labels, **info}, 1)
    capacity = sum(worker.kv_capacity or 0 for worker in workers)
    used = sum(worker.kv_tokens for worker in workers)
    usage = min(used / capacity, 1.0) if capacity else 0.0
    alive = sum(worker.alive for worker in workers)
    predicted_s = driver.forecast.predict(driver.now_s).ttft_s
    for kind, name, text, value in (
        (Gauge, "requests_running", "Requests in batches that run now.", driver.running),
        (Gauge, "requests_waiting", "Requests that no worker runs now.", driver.waiting),
        (Gauge, "kv_cache_usage_ratio", "Share of KV cache that running batches may fill.", usage),
        (Gauge, "kv_cache_tokens", "Tokens that the workers' KV caches hold.", capacity),
        (Gauge, "workers_alive", "Workers that can take batches.", alive),
        (
            Gauge,
            "predicted_ttft_seconds",
            "Predicted TTFT of a request that arrives now.",
            predicted_s,
        ),
        (Counter, "batches", "Batches that ran.", stats.batches),
        (
            Counter,
            "batch_seconds",
            "Time of batches that ended well.",
            sum(stats.batch_s.values()),
        ),
        (
            Counter,
            "predicted_batch_seconds",
            "Time that the laws predict for the same batches.",
            sum(stats.predicted_batch_s.values()),
        ),
        (
            Counter,
            "extrapolated_batches",
            "Batches outside the measured range of the laws.",
            stats.extrapolated_batches,
        ),
        (Counter, "oom_events", "Batches that ran out of memory.", stats.oom_events),
        (
            Counter,
            "preemptions",
            "Rows that were evicted, paused or swapped out.",
            stats.preemptions,
        ),
        (
            Counter,
            "worker_restarts",
            "Workers lost and started again.",
            stats.restarts.total(),
        ),
    ):
        yield family_of(kind, f"llmctl_{name}", text, labels, value)
    # Of workers. The quotient of the counters is actual over predicted batch time.
    for kind, name, text, values in (
        (
            Gauge,
            "load_seconds",
            "Estimated seconds of work given to a worker (SCLS Eq. 11).",
            [worker.load_s for worker in workers],
        ),
        (Gauge, "requests_running", "Requests in a worker.", [worker.rows for worker in workers]),
        (
            Gauge,
            "kv_cache_usage_ratio",
            "Share of a worker's KV cache that its batches may fill.",
            [worker.kv_usage for worker in workers],
        ),
        (Counter, "batch_seconds", "As llmctl_batch_seconds_total.", stats.batch_s),
        (
            Counter,
            "predicted_batch_seconds",
            "As llmctl_predicted_batch_seconds_total.",
            stats.predicted_batch_s,
        ),
    ):
        each = {str(index): values[index] for index in range(len(workers))}
        yield family_of(kind, f"llmctl_worker_{name}", text, labels, each, "worker")
    for name, text, histogram in (
        ("queue_seconds", "Arrival to the start of the first batch.", stats.latencies["queue"]),
        (
            "batch_time_ratio",
            "Actual over predicted batch time, for the steps that ran.",
            stats.batch_ratio,
        ),
    ):
        yield histogram_of(f"llmctl_{name}", text, labels, histogram)


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


def families_of_requests(stats: Stats, labels: Labels) -> Iterator[Metric]:
    """Yield what every front counts: its requests."""
    for name, text in (
        ("ttft", "Arrival to first token."),
        ("itl", "Time between tokens; tokens that arrive together share their gap."),
        ("tpot", "First to last token, per token after the first."),
        ("mtpot", "The longest time between two tokens of a request with several."),
        ("e2e", "Arrival to last token."),
    ):
        yield histogram_of(f"llmctl_{name}_seconds", text, labels, stats.latencies[name])
    met = "Requests that met every target; of those that ended, and llmctl_refused_total."
    values: float | Mapping[str, float]
    for name, text, values, label in (
        ("prompt_tokens", "Prompt tokens accepted.", stats.prompt_tokens, ""),
        ("generation_tokens", "Tokens generated.", stats.generation_tokens, ""),
        ("requests_within_targets", met, stats.within_targets, ""),
        ("refused", "Requests that got 503 because of overload.", stats.refused, ""),
        ("requests", "Requests that ended, and how.", dict(stats.ended), "finish_reason"),
        ("http_responses", "Answers by HTTP status.", stats.statuses, "status"),
    ):
        yield family_of(Counter, f"llmctl_{name}", text, labels, values, label)


def histogram_of(name: str, text: str, labels: Labels, histogram: Histogram) -> Metric:
    """Return a family with one histogram."""
    family = HistogramMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), histogram.cumulative(), histogram.total)
    return family
