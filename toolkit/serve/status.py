"""The status page, the JSON that it reads, and the state that health checks report.

The page shows sums and settings: no text, key, address or path, and nothing of a single request. So
it needs no key, but by default it is only on if the server listens on loopback. A web page from
elsewhere cannot read it through a browser: nothing here allows other origins, and
`toolkit.serve.access` refuses a Host that is a name other than `localhost`, which its owner may
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
from toolkit.files.profile import identity
from toolkit.files.shipped import shipped_templates
from toolkit.files.tuning import ParameterValue
from toolkit.sched.memory import footprint_of
from toolkit.serve.driver import Driver
from toolkit.serve.metrics import Gauges, WorkerGauges
from toolkit.serve.stats import Histogram, Stats, quantile

PAGE = "/"
DATA = "/status.json"
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
NO_WORKER = "no worker is alive"

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
    """The routes of the page and of its data, for every front.

    Args:
        facts: the settings that it shows; a new plan may bring others.
        stats: what the front counts.
        now_s: the seconds that it has served.
        front: returns what this kind of front adds: its state, problem, uptime, workers or
            replicas, and totals.
    """

    def __init__(
        self,
        facts: Facts,
        stats: Stats,
        now_s: Callable[[], float],
        front: Callable[[], dict[str, Any]],
    ) -> None:
        self.facts = facts
        self.recent = RecentMinute(stats, now_s)
        self._front = front
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
        } | self._front()
        content = msgspec.json.encode(shown)
        return Response(content, headers=HEADERS, media_type="application/json")


def driver_status(driver: Driver) -> dict[str, Any]:
    """What the page of the server of one engine adds."""
    stats = driver.stats
    predicted_s = stats.predicted_batch_s
    return {
        "state": state(driver),
        "problem": problem(driver),
        "uptime_s": round(driver.now_s, 1) if driver.state != "loading" else 0.0,
        "running": driver.running,
        "waiting": driver.waiting,
        "workers": _workers(driver),
        "totals": {
            "ended": dict(stats.ended),
            "input_tokens": stats.prompt_tokens,
            "output_tokens": stats.generation_tokens,
            "batches": stats.batches,
            "extrapolated_batches": stats.extrapolated_batches,
            "oom_events": stats.oom_events,
            "preemptions": stats.preemptions,
            "refused": stats.refused,
            "restarts": stats.worker_restarts,
            "batch_ratio": stats.batch_s / predicted_s if predicted_s else None,
        },
    }


def _workers(driver: Driver) -> list[dict[str, Any]]:
    workers = []
    for worker, now in zip(driver.scheduler.workers, worker_gauges(driver), strict=True):
        now_state = "running" if worker.index in driver.flights else "idle"
        if worker.index not in driver.facts:
            now_state = "loading"
        elif not worker.alive:
            now_state = "lost"
        compared = driver.stats.compared[worker.index]
        ratio = compared.took_s / compared.predicted_s if compared.predicted_s else None
        workers.append(
            {
                "state": now_state,
                "rows": now.rows,
                "kv_tokens": now.kv_tokens,
                "kv_capacity": now.kv_capacity,
                "batch_ratio": ratio,
                "load_s": round(worker.load_s, 3),
                "oom_events": worker.oom_events,
                "restarts": driver.stats.restarts[worker.index],
            }
        )
    return workers


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


def failure(driver: Driver) -> str:
    """Why the front cannot continue and must be restarted, or ''."""
    if driver.bug:
        return "the scheduler stopped at a bug"
    return "no worker can be loaded" if driver.failed else ""


def state(driver: Driver) -> str:
    """The state in a few words: "ready" if requests are accepted and a worker is alive."""
    if driver.leaving:
        return "leaving"
    if driver.state != "ready":
        return driver.state
    return "ready" if any(worker.alive for worker in driver.scheduler.workers) else NO_WORKER


def problem(driver: Driver) -> str:
    """Why the server makes no progress, or ''. Loading and draining are not problems."""
    if failure(driver) or driver.state in ("loading", "stopped"):
        return failure(driver)
    return "" if any(worker.alive for worker in driver.scheduler.workers) else NO_WORKER


def gauges(driver: Driver) -> Gauges:
    """The values that metrics read at a scrape."""
    workers = worker_gauges(driver)
    capacity = sum(worker.kv_capacity or 0 for worker in workers)
    used = sum(worker.kv_tokens for worker in workers)
    return Gauges(
        driver.running,
        driver.waiting,
        min(used / capacity, 1.0) if capacity else 0.0,
        capacity,
        workers,
        driver.forecast.predict(driver.now_s).ttft_s,
        identity(next(iter(driver.facts.values()))) if driver.facts else {},
    )


def worker_gauges(driver: Driver) -> list[WorkerGauges]:
    """Each worker, as metrics and the status page show it."""
    workers = []
    for worker in driver.scheduler.workers:
        # To the scheduler a worker is alive while it loads for the first time.
        facts = driver.facts.get(worker.index)
        tokens = footprint_of(worker).taken + worker.paused.tokens
        batch = driver.flights.get(worker.index)
        if batch and not batch.keep_cache:
            # A slice may fill: every row padded to the longest, for all steps (SCLS Eq. 5).
            tokens = batch.size * (batch.input_length + batch.steps)
        workers.append(
            WorkerGauges(
                worker.alive and facts is not None,
                worker.load_s,
                driver.running_on(worker.index),
                tokens,
                facts.capacity_tokens if facts else None,
            )
        )
    return workers
