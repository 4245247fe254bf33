"""The gateway's counters as Prometheus shows them.

What the server of one engine also has, has the same name here; what is about replicas is called
`llmctl_replica_*`, with the replica's URL as a label.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

if TYPE_CHECKING:
    from toolkit.gateway.front import Gateway

Labels = Mapping[str, str]

_GAUGES = (
    ("llmctl_requests_running", "Requests for tokens that have not ended.", "running"),
    ("llmctl_requests_waiting", "Requests beyond the rows that replicas run at once.", "waiting"),
)
_COUNTERS = (
    ("llmctl_prompt_tokens", "Prompt tokens of ended requests.", "prompt_tokens"),
    ("llmctl_generation_tokens", "Tokens generated.", "generation_tokens"),
    ("llmctl_requests_within_targets", "Requests that met every target.", "within_targets"),
    (
        "llmctl_refused",
        "Requests that got 503 because of overload, or without a replica.",
        "refused",
    ),
)
_HISTOGRAMS = (
    ("llmctl_ttft_seconds", "Arrival to first token, of streams.", "ttft"),
    ("llmctl_itl_seconds", "Time between tokens of streams.", "itl"),
    ("llmctl_tpot_seconds", "First to last token, per token after the first.", "tpot"),
    ("llmctl_e2e_seconds", "Arrival to last token.", "e2e"),
)
_REPLICAS = (
    (CounterMetricFamily, "requests", "Attempts sent to a replica.", "requests"),
    (CounterMetricFamily, "failures", "Attempts that failed there.", "failures"),
    (CounterMetricFamily, "moved", "Answers that went on elsewhere.", "moved"),
)


class GatewayExposition:
    """A collector for a registry of prometheus-client."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        text: bytes = generate_latest(self._registry)
        return text

    def collect(self) -> Iterator[Metric]:
        """The registry calls this at each scrape."""
        gateway, stats = self._gateway, self._gateway.stats
        labels = {"model_name": gateway.model, "router": gateway.balancer.router.name}
        for name, text, attribute in _GAUGES:
            yield _one(GaugeMetricFamily, name, text, labels, getattr(gateway, attribute))
        for name, text, attribute in _COUNTERS:
            yield _one(CounterMetricFamily, name, text, labels, getattr(stats, attribute))
        yield _by(CounterMetricFamily, "llmctl_requests", "Requests that ended, and how.", labels,
                  "finish_reason", dict(stats.ended))  # fmt: skip
        text = "Answers that a second replica continued, by how."
        yield _by(CounterMetricFamily, "llmctl_continued", text, labels, "by", gateway.moved)
        for name, text, attribute in _HISTOGRAMS:
            histogram = getattr(stats, attribute)
            family = HistogramMetricFamily(name, text, labels=list(labels))
            family.add_metric(list(labels.values()), histogram.cumulative(), histogram.total)
            yield family
        yield from self._replicas(labels)
        yield from self._keys(labels)

    def _replicas(self, labels: Labels) -> Iterator[Metric]:
        replicas = self._gateway.pool.replicas
        known = self._gateway.balancer.replicas
        up = {each.url: float(each.state == "up") for each in replicas}
        text = "1 while a replica may be sent requests."
        yield _by(GaugeMetricFamily, "llmctl_replica_up", text, labels, "replica", up)
        running = {each.url: float(len(each.attempts)) for each in replicas}
        text = "Requests that a replica has."
        yield _by(GaugeMetricFamily, "llmctl_replica_running", text, labels, "replica", running)
        reports = {each.url: known[each.index].report for each in replicas}
        usage = {url: report.kv_usage for url, report in reports.items() if report is not None}
        text = "Share of its KV cache that a replica reported last."
        yield _by(GaugeMetricFamily, "llmctl_replica_kv_usage", text, labels, "replica", usage)
        for kind, name, text, attribute in _REPLICAS:
            values = {each.url: float(getattr(each, attribute)) for each in replicas}
            yield _by(kind, f"llmctl_replica_{name}", text, labels, "replica", values)

    def _keys(self, labels: Labels) -> Iterator[Metric]:
        named = self._gateway.keyring.named
        for name, text, attribute in (
            ("llmctl_key_requests", "Accepted requests of a key.", "accepted"),
            ("llmctl_key_tokens", "Prompt and output tokens of a key.", "taken_tokens"),
        ):
            values = {account.name: float(getattr(account, attribute)) for account in named}
            yield _by(CounterMetricFamily, name, text, labels, "key", values)


class _Families:
    """Families for `generate_latest`."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def merged_metrics(texts: Mapping[str, str]) -> bytes:
    """The metrics of several servers, by URL, as one text with the URLs as the label `replica`.

    A text that is not in Prometheus' format is left out.
    """
    found: dict[str, Metric] = {}
    for url, text in texts.items():
        try:
            families = list(text_string_to_metric_families(text))
        except ValueError:
            continue
        for family in families:
            known = found.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            known.samples += [
                Sample(one.name, {"replica": url, **one.labels}, one.value)
                for one in family.samples
            ]
    text_of_all: bytes = generate_latest(_Families(found.values()))
    return text_of_all


Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]


def _one(kind: Kind, name: str, text: str, labels: Labels, value: float) -> Metric:
    family = kind(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _by(
    kind: Kind, name: str, text: str, labels: Labels, label: str, values: Mapping[str, float]
) -> Metric:
    """A family with one series for each value of `label`."""
    family = kind(name, text, labels=[*labels, label])
    for key, value in values.items():
        family.add_metric([*labels.values(), key], value)
    return family
