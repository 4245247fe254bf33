"""A server's /metrics, in Prometheus' text format."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from toolkit.endpoints.target import PATIENCE_S, Target
from toolkit.endpoints.trust import verify
from toolkit.errors import InputError


class Metric(NamedTuple):
    """One line of the page."""

    name: str
    labels: dict[str, str]
    value: float


def scrape(target: Target, certificate: Path | None = None) -> list[Metric]:
    """All metrics; none where the server has no such page. `InputError` where it does not answer.

    `certificate` is the server's own, where it is known.
    """
    url = f"{target.url}/metrics"
    try:
        trusted = verify(url, certificate)
        answer = httpx.get(url, headers=target.headers, timeout=PATIENCE_S, trust_env=False, verify=trusted)
    except httpx.HTTPError as error:
        raise InputError(f"{url} does not answer: {error}") from error
    if answer.status_code != 200:
        return []
    try:
        families = list(text_string_to_metric_families(answer.text))
    except ValueError:  # it is not Prometheus' format
        return []
    return [Metric(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]
