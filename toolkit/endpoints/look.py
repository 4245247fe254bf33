"""A running server at one glance: is it healthy, is it ready, and what do its metrics say now."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

from toolkit.endpoints.scrape import Metric, scrape
from toolkit.endpoints.target import Target
from toolkit.errors import InputError

PATIENCE_S = 5.0


@dataclass(slots=True, frozen=True)
class Look:
    """What was seen. None: nobody answered there; no metrics: none were shown without the key."""

    healthy: bool | None
    ready: bool | None
    metrics: list[Metric]

    @property
    def state(self) -> str:
        """In a word or two. Loading and draining look alike from outside: both are healthy and not ready."""
        if self.healthy is None:
            return "no answer"
        if not self.healthy:
            return "unhealthy"
        return "ready" if self.ready else "not ready"

    def total(self, name: str) -> float | None:
        """The sum of a metric over its labels; None where there is none of that name."""
        values = [each.value for each in self.metrics if each.name == name]
        return sum(values) if values else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The values of a metric by one of its labels."""
        return {each.labels.get(label, ""): each.value for each in self.metrics if each.name == name}


def look(url: str, api_key: str = "") -> Look:
    """Ask /health, /ready and /metrics. Never raises for a server that does not answer."""
    healthy = _status(f"{url}/health")
    if healthy is None:
        return Look(None, None, [])
    try:
        metrics = scrape(Target(url, api_key, "", None, own=True))
    except InputError:  # it went away in between
        metrics = []
    return Look(healthy, _status(f"{url}/ready"), metrics)


def _status(url: str) -> bool | None:
    try:
        return httpx.get(url, timeout=PATIENCE_S, trust_env=False).status_code == 200
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
