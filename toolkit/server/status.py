"""The status page, and the JSON that it reads.

The page shows sums and settings: no text, key, address or path, and nothing of a single request. So
it needs no key, but by default it is only on if the server listens on loopback. A web page from
elsewhere cannot read it through a browser: nothing here allows other origins, and
`toolkit.server.access` refuses a Host that is a name other than `localhost`, which its owner may
have pointed to this machine ("DNS rebinding").

/health is about the front alone, /ready about whether requests should be sent here. The server
replaces a dead or hung worker itself, and its requests continue; a service manager that restarted
the server for it would lose them.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import toolkit
from toolkit.files.plan import Plan
from toolkit.files.shipped import shipped_templates
from toolkit.files.tuning import ParameterValue
from toolkit.server.stats import Histogram, Stats, quantile

PAGE = "/"
DATA = "/status.json"
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

SAMPLE_S = 2.0
SAMPLES = 30  # one minute, for rates and percentiles
LATENCIES = ("ttft", "tpot", "itl", "e2e", "mtpot")
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
SHOWN = ("p50", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Facts:
    """The settings of the server that the page shows."""

    model: str
    policy: str
    parameters: Mapping[str, ParameterValue]
    engine: str
    device: str
    sla: Mapping[str, float]
    predicted: Mapping[str, float]  # from the tuning, on held-out windows


def facts_of(plan: Plan, model: str) -> Facts:
    """The facts of a plan. A model folder is shown by its last part, without its path."""
    name = PurePath(model).name if model.startswith(("/", ".", "~")) else model
    engine = plan.fit.engine
    predicted = {
        limit.name: limit.predicted for limit in plan.limits if limit.predicted is not None
    }
    return Facts(
        name,
        plan.settings.policy,
        plan.settings.parameters,
        engine.engine,
        engine.device,
        plan.recipe.sla,
        predicted,
    )


class StatusPage:
    """The routes of the page and of its data.

    Args:
        facts: the settings that it shows; a new plan may bring others.
        stats: what the front counts.
        now_s: the seconds that it has served.
        server: returns the rest: its state, problem, uptime, workers or replicas, and totals.
    """

    def __init__(
        self,
        facts: Facts,
        stats: Stats,
        now_s: Callable[[], float],
        server: Callable[[], dict[str, Any]],
    ) -> None:
        self.facts = facts
        self.recent = RecentMinute(stats, now_s)
        self._server = server
        self._page = (shipped_templates() / "status.html").read_text(encoding="utf-8")
        self._policy = content_policy(self._page)

    async def sampling(self) -> None:
        """Look at the counters until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.recent.sample()

    async def page(self, request: Request) -> Response:
        return Response(
            self._page,
            headers=HEADERS | {"Content-Security-Policy": self._policy},
            media_type="text/html",
        )

    async def data(self, request: Request) -> Response:
        """What the page shows."""
        recent = self.recent
        facts = self.facts
        shown = {
            "version": toolkit.__version__,
            "model": facts.model,
            "engine": facts.engine,
            "device": facts.device,
            "policy": facts.policy,
            "parameters": dict(facts.parameters),
            "targets": [
                {
                    "name": key,
                    "limit": limit,
                    "now": recent.statistic(key),
                    "predicted": facts.predicted.get(key),
                }
                for key, limit in facts.sla.items()
            ],
            "attainment": recent.attainment(),
            "rates": recent.rates(),
            "latencies": {
                name: [recent.statistic(f"{name}_{share}_s") for share in SHOWN]
                for name in LATENCIES
            },
        } | self._server()
        content = msgspec.json.encode(shown)
        return Response(content, headers=HEADERS, media_type="application/json")


def content_policy(page: str) -> str:
    """A Content-Security-Policy that allows only the page's own script and style."""

    def digests(tag: str) -> str:
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        encoded = (base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in texts)
        return " ".join(f"'sha256-{digest.decode()}'" for digest in encoded)

    return (
        f"default-src 'none'; script-src {digests('script')}; style-src {digests('style')}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


class _Counts(NamedTuple):
    """Counters at one moment, on the serving clock. They only grow."""

    at_s: float
    well: int
    failed: int
    refused: int
    within: int
    output_tokens: int
    input_tokens: int
    buckets: dict[str, tuple[int, ...]]  # by latency
    totals: dict[str, float]  # seconds, by latency


class RecentMinute:
    """Rates and percentiles of the last minute. Call `sample` every `SAMPLE_S` seconds."""

    def __init__(self, stats: Stats, now_s: Callable[[], float]) -> None:
        self._stats = stats
        self._now_s = now_s
        first = self._count()._replace(at_s=0.0)
        self._samples: deque[_Counts] = deque([first], maxlen=SAMPLES + 1)

    def sample(self) -> None:
        """Look at the counters."""
        self._samples.append(self._count())

    def statistic(self, key: str) -> float | None:
        """A statistic such as `ttft_p99_s`; None if no request ended."""
        metric, statistic, _ = key.split("_")
        old = self._samples[0]
        now = self._samples[-1]
        counts = [b - a for a, b in zip(old.buckets[metric], now.buckets[metric], strict=True)]
        if statistic == "mean":
            count = sum(counts)
            return (now.totals[metric] - old.totals[metric]) / count if count else None
        histogram: Histogram = getattr(self._stats, metric)
        return quantile(histogram.bounds, counts, PERCENTILES[statistic])

    def attainment(self) -> float | None:
        """The share of requests that met every target; None if none ended. One that was refused or
        failed met none.
        """
        old = self._samples[0]
        now = self._samples[-1]
        ended = now.well + now.failed + now.refused - old.well - old.failed - old.refused
        return (now.within - old.within) / ended if ended else None

    def rates(self) -> dict[str, float]:
        """Requests and tokens a second."""
        old = self._samples[0]
        now = self._samples[-1]
        span_s = max(now.at_s - old.at_s, 1e-9)
        return {
            "served": (now.well - old.well) / span_s,
            "failed": (now.failed - old.failed) / span_s,
            "refused": (now.refused - old.refused) / span_s,
            "input_tokens": (now.input_tokens - old.input_tokens) / span_s,
            "output_tokens": (now.output_tokens - old.output_tokens) / span_s,
        }

    def _count(self) -> _Counts:
        stats = self._stats
        histograms: dict[str, Histogram] = {name: getattr(stats, name) for name in LATENCIES}
        return _Counts(
            self._now_s(),
            stats.ended["stop"] + stats.ended["length"],
            stats.ended["failed"],
            stats.refused,
            stats.within_targets,
            stats.generation_tokens,
            stats.prompt_tokens,
            {name: tuple(histogram.counts) for name, histogram in histograms.items()},
            {name: histogram.total for name, histogram in histograms.items()},
        )
