"""A running server at one glance: is it healthy, is it ready, and what do its metrics say now.

It may be llmctl's own or vLLM's, which has names of its own for some metrics, and no /ready.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import httpx

from toolkit.endpoints.scrape import Metric, scrape
from toolkit.endpoints.target import Target
from toolkit.endpoints.trust import distrusted, verify
from toolkit.errors import InputError

PATIENCE_S = 5.0
OK, NOT_FOUND = 200, 404
RUNNING = "llmctl_requests_running", "vllm:num_requests_running"
WAITING = "llmctl_requests_waiting", "vllm:num_requests_waiting"
KV_USAGE = "llmctl_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc"  # a share, all the same
ENDED = ("llmctl_requests_total", "finish_reason"), ("vllm:request_success_total", "finished_reason")


@dataclass(slots=True, frozen=True)
class Look:
    """What was seen. None: nobody answered there; no metrics: none were shown without the key."""

    healthy: bool | None
    ready: bool | None
    metrics: list[Metric]
    problem: str = "no answer"  # where nobody was healthy or not

    @property
    def state(self) -> str:
        """In a word or two. Loading and draining look alike from outside: both are healthy and not ready."""
        if self.healthy is None:
            return self.problem
        if not self.healthy:
            return "unhealthy"
        return "ready" if self.ready else "not ready"

    def total(self, *names: str) -> float | None:
        """The sum over its labels of the first of these metrics that is there; None where none is."""
        for name in names:
            values = [each.value for each in self.metrics if each.name == name]
            if values:
                return sum(values)
        return None

    @property
    def ended(self) -> dict[str, int]:
        """How requests have ended so far, by reason."""
        found = [self.by_label(name, label) for name, label in ENDED]
        return {reason: int(count) for reason, count in next(filter(None, found), {}).items()}

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The values of a metric by one of its labels."""
        return {each.labels.get(label, ""): each.value for each in self.metrics if each.name == name}


def look(url: str, api_key: str = "", certificate: Path | None = None) -> Look:
    """Ask /health, /ready and /metrics. Never raises for a server that does not answer, or that is not believed.

    `certificate` is the server's own, where it is known.
    """
    try:
        trusted = verify(url, certificate)
        status = _status(f"{url}/health", trusted)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Look(None, None, [], "not trusted" if distrusted(error) else "no answer")
    except InputError:  # its certificate's file is gone
        return Look(None, None, [], "not trusted")
    healthy = status == OK
    try:
        metrics = scrape(Target(url, api_key, "", None, own=True), certificate)
    except InputError:  # it went away in between
        metrics = []
    try:
        ready = _status(f"{url}/ready", trusted)
    except httpx.HTTPError:
        ready = None
    return Look(healthy, healthy if ready == NOT_FOUND else ready == OK, metrics)


def _status(url: str, trusted: ssl.SSLContext | bool) -> int:
    return httpx.get(url, timeout=PATIENCE_S, trust_env=False, verify=trusted).status_code
