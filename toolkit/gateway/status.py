"""What a gateway shows of itself: its metrics for Prometheus, and its status page.

A metric or a figure that the server of one engine also has, has the same name here. Metrics of
replicas are called `llmctl_replica_*`, with the replica's URL as a label. The status page numbers
replicas in the order of /replicas, since it shows no address.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from toolkit.gateway.passing import NO_REPLICA
from toolkit.gateway.replicas import LiveReplica
from toolkit.routing.routers import router_parameters
from toolkit.serve.metrics import (
    Gauges,
    Labels,
    by_label,
    family_of,
    histogram_family,
    usage_of_keys,
)
from toolkit.serve.status import Facts, MetricHistory, StatusPage

if TYPE_CHECKING:
    from toolkit.gateway.front import Gateway

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
OUT = {  # states of replicas that the history notes
    "down": "replica {} is down",
    "hung": "replica {} hangs",
    "left out": "replica {} is left out",
}


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
            yield family_of(GaugeMetricFamily, name, text, labels, getattr(gateway, attribute))
        for name, text, attribute in _COUNTERS:
            yield family_of(CounterMetricFamily, name, text, labels, getattr(stats, attribute))
        name, text = "llmctl_requests", "Requests that ended, and how."
        yield by_label(CounterMetricFamily, name, text, labels, "finish_reason", dict(stats.ended))
        text = "Answers that a second replica continued, by how."
        yield by_label(CounterMetricFamily, "llmctl_continued", text, labels, "by", gateway.moved)
        for name, text, attribute in _HISTOGRAMS:
            yield histogram_family(name, text, labels, getattr(stats, attribute))
        yield from self._replicas(labels)
        yield from usage_of_keys(labels, gateway.keyring.named)

    def _replicas(self, labels: Labels) -> Iterator[Metric]:
        replicas = self._gateway.pool.replicas
        known = self._gateway.balancer.replicas
        up = {each.url: float(each.state == "up") for each in replicas}
        text = "1 while a replica may be sent requests."
        yield by_label(GaugeMetricFamily, "llmctl_replica_up", text, labels, "replica", up)
        running = {each.url: float(len(each.attempts)) for each in replicas}
        text = "Requests that a replica has."
        yield by_label(
            GaugeMetricFamily, "llmctl_replica_running", text, labels, "replica", running
        )
        reports = {each.url: known[each.index].report for each in replicas}
        usage = {url: report.kv_usage for url, report in reports.items() if report is not None}
        text = "Share of its KV cache that a replica reported last."
        yield by_label(GaugeMetricFamily, "llmctl_replica_kv_usage", text, labels, "replica", usage)
        for kind, name, text, attribute in _REPLICAS:
            values = {each.url: float(getattr(each, attribute)) for each in replicas}
            yield by_label(kind, f"llmctl_replica_{name}", text, labels, "replica", values)


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


class GatewayStatus(StatusPage):
    """The status page of a gateway: that of one engine, with replicas for workers."""

    def __init__(self, gateway: Gateway, facts: Facts) -> None:
        self._gateway, self._start_s = gateway, gateway.now_s()
        self._states: dict[LiveReplica, str] = {}
        super().__init__(MetricHistory(gateway.stats, self._gauges, lambda: self._uptime_s), facts)

    def sample(self) -> None:
        """See `StatusPage.sample`. Replicas that went down since the last one are noted."""
        before, self._states = self._states, {}
        for number, replica in enumerate(self._gateway.pool.replicas):
            self._states[replica] = replica.state
            if replica.state in OUT and before.get(replica) != replica.state:
                self.history.note(OUT[replica.state].format(number))
        if self._gateway.pool.up or self._gateway.stats.ended:
            self.history.sample()

    @property
    def _uptime_s(self) -> float:
        return self._gateway.now_s() - self._start_s

    def _gauges(self) -> Gauges:
        gateway = self._gateway
        known = [gateway.balancer.replicas[replica.index] for replica in gateway.pool.up]
        usage = sum(each.kv_usage for each in known) / max(len(known), 1)
        waiting = gateway.waiting
        return Gauges(gateway.running - waiting, waiting, usage, 0, (), 0.0, {})

    def _now(self) -> dict[str, Any]:
        gateway, stats = self._gateway, self._gateway.stats
        router = gateway.balancer.router
        return {
            "state": gateway.state,
            "problem": NO_REPLICA if gateway.state == NO_REPLICA else "",
            "uptime_s": round(self._uptime_s, 1),
            "router": router.name,
            "knobs": router_parameters(router),
            "workers": [],
            "replicas": [self._replica(replica) for replica in gateway.pool.replicas],
            "totals": {
                "ended": dict(stats.ended),
                "input_tokens": stats.prompt_tokens,
                "output_tokens": stats.generation_tokens,
                "refused": stats.refused,
                "continued": sum(gateway.moved.values()),
                "retry_budget": gateway.budget.share,
            },
        }

    def _replica(self, replica: LiveReplica) -> dict[str, Any]:
        known = self._gateway.balancer.replicas[replica.index]
        waiting = known.waiting
        return {
            "kind": self._gateway.pool.kind_of(replica),
            "state": replica.state,
            "running": max(len(replica.attempts) - waiting, 0),
            "waiting": waiting,
            "kv_share": known.kv_usage,
            "cached_share": replica.cached_tokens / replica.prompt_tokens
            if replica.prompt_tokens
            else None,
            "requests": replica.requests,
            "failures": replica.failures,
            "moved": replica.moved,
        }
