"""Metrics of a server: its page of them, and Prometheus' queries over time."""

from __future__ import annotations

import math
from urllib.parse import urlencode

import msgspec

from toolkit.endpoints.foreign import UNREADABLE
from toolkit.endpoints.target import Metric, Target, base_url, get, page_metrics
from toolkit.errors import InputError

MAX_POINTS = 11_000  # Prometheus' limit on the points of a series


class Series(msgspec.Struct):
    """A series of a query over time: its labels, and pairs of time and value."""

    metric: dict[str, str]
    values: list[tuple[float, str]] = []

    def points(self) -> list[tuple[float, float]]:
        """Its finite values, each with its time in seconds since 1970. Raises `ValueError` for a
        value that is no number.
        """
        pairs = ((time_s, float(value)) for time_s, value in self.values)
        return [(time_s, value) for time_s, value in pairs if math.isfinite(value)]


class _Result(msgspec.Struct):
    result: list[Series]


class _Answer(msgspec.Struct):
    status: str
    data: _Result


def metrics_page(url: str, api_key: str = "") -> list[Metric]:
    """The metrics at `url`: a page of them, or a server with the page /metrics.

    Raises `InputError` where it does not answer, or the page is not in Prometheus' text format.
    """
    base = base_url(url)
    page = "" if "/metrics" in base else "/metrics"
    body = get(Target(base, api_key, "", None, own=False), page)
    metrics = page_metrics(body, f"{base}{page}")
    if not metrics:
        raise InputError(f"{base}{page}: no metrics in it", "name a server of vLLM")
    return metrics


def query_range(
    url: str, query: str, start_s: float, end_s: float, step_s: float, api_key: str = ""
) -> list[Series]:
    """The series of `query` from `start_s` to `end_s` (since 1970), a point each `step_s`.

    Raises `InputError` where the server does not answer, or is not a Prometheus, and for more
    points than Prometheus gives.
    """
    if (end_s - start_s) / step_s > MAX_POINTS:
        raise InputError(
            f"{(end_s - start_s) / step_s:,.0f} points of {step_s:g} s are too many",
            f"Prometheus gives {MAX_POINTS:,}: give a longer --every",
        )
    words = {
        "query": query,
        "start": f"{start_s:.3f}",
        "end": f"{end_s:.3f}",
        "step": f"{step_s:g}",
    }
    base = base_url(url)
    body = get(
        Target(base, api_key, "", None, own=False), f"/api/v1/query_range?{urlencode(words)}"
    )
    try:
        found = msgspec.json.decode(body, type=_Answer).data.result
        for series in found:
            series.points()
        return found
    except UNREADABLE as error:
        raise InputError(
            f"{base}: its answer is not Prometheus': {error}",
            "name a Prometheus server, or leave out --past for a server's /metrics",
        ) from error
