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
import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
POINTS_MAX = 1800  # an hour, at about 200 bytes per point
WINDOW_POINTS = 30  # one minute, for rates and percentiles
INCIDENTS_MAX = 20
LATENCIES = ("ttft", "tpot", "itl", "e2e")  # with a chart each
MEASURED = (*LATENCIES, "mtpot")
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
CHART_PERCENTILES = ("p50", "p95", "p99")

LATENCY_COLUMNS = [f"{latency}_{share}_s" for latency in LATENCIES for share in CHART_PERCENTILES]
COLUMNS = (
    *("time_s", "running", "waiting", "kv_share"),
    *("requests_per_s", "output_tokens_per_s", "input_tokens_per_s"),
    *LATENCY_COLUMNS,
    *("batch_ratio", "attainment", "failed_per_s", "refused_per_s", "oom_events"),
    "worker_batch_ratios",  # a list, by worker
)


@dataclass(frozen=True, slots=True)
class KindFacts:
    """The workers of one kind: recipe, engine, device, how many there are, and the parameters of
    their policy, which only kinds of servers have each of its own.
    """

    name: str
    engine: str
    device: str
    workers: int
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """The settings of the server that the page shows."""

    model: str
    policy: str
    parameters: Mapping[str, ParameterValue]
    kinds: Sequence[KindFacts]  # in the order of the workers' numbers; several only for a fleet
    sla: Mapping[str, float]
    predicted: Mapping[str, float]  # from the tuning, on held-out windows


def facts_of(plan: Plan, model: str) -> Facts:
    """The facts of a plan. A model folder is shown by its last part, without its path."""
    name = PurePath(model).name if model.startswith(("/", ".", "~")) else model
    kinds = [
        KindFacts(
            kind.recipe.name,
            kind.fit.engine.engine,
            kind.fit.engine.device,
            kind.workers,
            plan.policy_of(number),
        )
        for number, kind in enumerate(plan.kinds)
    ]
    predicted = {
        limit.name: limit.predicted for limit in plan.limits if limit.predicted is not None
    }
    return Facts(name, plan.policy.name, plan.policy.parameters, kinds, plan.recipe.sla, predicted)


class StatusPage(ABC):
    """The routes of the page and of its data, and the history behind them."""

    def __init__(self, history: MetricHistory, facts: Facts) -> None:
        self.history = history
        self.facts = facts  # a new plan may bring others
        # By this a page notices that another server answers than before.
        self._instance = secrets.token_hex(8)
        self._page = (shipped_templates() / "status.html").read_text(encoding="utf-8")
        self._policy = content_policy(self._page)

    async def sampling(self) -> None:
        """Take points of the history until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.sample()

    @abstractmethod
    def sample(self) -> None:
        """Take a point of the history, if the server can serve."""

    @abstractmethod
    def _now(self) -> dict[str, Any]:
        """What this kind of server adds: its state, problem, uptime, workers and totals."""

    async def page(self, request: Request) -> Response:
        return Response(
            self._page,
            headers=HEADERS | {"Content-Security-Policy": self._policy},
            media_type="text/html",
        )

    async def data(self, request: Request) -> Response:
        """What the page shows. For this server's `instance`, only points from `since` on."""
        history = self.history
        facts = self.facts
        query = request.query_params
        since = query.get("since", "")
        is_ours = query.get("instance") == self._instance and re.fullmatch(r"\d{1,12}", since)
        oldest = history.taken - len(history.points)
        first = max(int(since) if is_ours else 0, oldest)
        shown = {
            "instance": self._instance,
            "version": toolkit.__version__,
            "model": facts.model,
            "kinds": facts.kinds,
            "policy": facts.policy,
            "parameters": dict(facts.parameters),
            "targets": [
                {
                    "name": key,
                    "limit": limit,
                    "now": history.recent(key),
                    "predicted": facts.predicted.get(key),
                }
                for key, limit in facts.sla.items()
            ],
            "attainment": history.attainment(),
            "happenings": list(history.incidents),
            "sample_s": SAMPLE_S,
            "kept": POINTS_MAX,
            "columns": COLUMNS,
            "first": first,
            "points": list(history.points)[first - oldest :],
        } | self._now()
        content = msgspec.json.encode(shown)
        return Response(content, headers=HEADERS, media_type="application/json")


class Status(StatusPage):
    """The status of the server of one engine."""

    def __init__(self, driver: Driver, facts: Facts) -> None:
        history = MetricHistory(driver.stats, lambda: gauges(driver), lambda: driver.now_s)
        super().__init__(history, facts)
        self._driver = driver

    def sample(self) -> None:
        """See `StatusPage.sample`."""
        if self._driver.state != "loading":
            self.history.sample()

    def _now(self) -> dict[str, Any]:
        driver = self._driver
        stats = self._driver.stats
        predicted_s = stats.predicted_batch_s
        return {
            "state": state(driver),
            "problem": problem(driver),
            "uptime_s": round(driver.now_s, 1) if driver.state != "loading" else 0.0,
            "workers": self._workers(),
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

    def _workers(self) -> list[dict[str, Any]]:
        driver = self._driver
        workers = []
        for worker, now in zip(driver.scheduler.workers, worker_gauges(driver), strict=True):
            now_state = "running" if worker.index in driver.flights else "idle"
            if worker.index not in driver.facts:
                now_state = "loading"
            elif not worker.alive:
                now_state = "lost"
            workers.append(
                {
                    "state": now_state,
                    "rows": now.rows,
                    "kv_tokens": now.kv_tokens,
                    "kv_capacity": now.kv_capacity,
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


class Counts(NamedTuple):
    """Counters at one moment, on the serving clock. They only grow."""

    at_s: float
    well: int
    failed: int
    refused: int
    within: int
    output_tokens: int
    input_tokens: int
    compared: tuple[tuple[float, float], ...]  # by worker: actual and predicted seconds of batches
    oom: int
    restarts: int
    buckets: tuple[tuple[int, ...], ...]
    totals: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Incident:
    """A problem that the page shows, and when it happened, in seconds on the serving clock."""

    time_s: float
    text: str


INCIDENTS = (  # a counter of `Counts`, and what one and several mean
    ("oom", "a batch ran out of memory, and is run again in parts", "batches ran out of memory"),
    ("restarts", "a worker was lost, and is started again", "workers were lost"),
    ("failed", "a request failed", "requests failed"),
)


class MetricHistory:
    """The last hour of a server, in bounded memory: points, percentiles of the last minute, and
    incidents. Call `sample` every `SAMPLE_S` seconds.
    """

    def __init__(
        self, stats: Stats, gauges: Callable[[], Gauges], now_s: Callable[[], float]
    ) -> None:
        # As JSON, since each is sent many times.
        self.points: deque[msgspec.Raw] = deque(maxlen=POINTS_MAX)
        self.taken = 0  # points since the start
        self.incidents: deque[Incident] = deque(maxlen=INCIDENTS_MAX)
        self._stats = stats
        self._gauges = gauges
        self._now_s = now_s
        self._workers = len(gauges().workers)
        first = self._count()._replace(at_s=0.0)
        self._window: deque[Counts] = deque([first], maxlen=WINDOW_POINTS + 1)

    def sample(self) -> None:
        """Take a point, and note the incidents since the last one."""
        before = self._window[-1]
        now = self._count()
        self._window.append(now)
        for counter, singular, plural in INCIDENTS:
            count = getattr(now, counter) - getattr(before, counter)
            if count:
                self.note(singular if count == 1 else f"{count} {plural}")
        self.points.append(msgspec.Raw(msgspec.json.encode(self._point(before, now))))
        self.taken += 1

    def note(self, text: str) -> None:
        """Show a problem."""
        self.incidents.append(Incident(round(self._now_s(), 1), text))

    def recent(self, key: str) -> float | None:
        """A statistic such as `ttft_p99_s` over the last minute; None if no request ended."""
        metric, statistic, _ = key.split("_")
        old = self._window[0]
        now = self._window[-1]
        index = MEASURED.index(metric)
        counts = [b - a for a, b in zip(old.buckets[index], now.buckets[index], strict=True)]
        if statistic == "mean":
            count = sum(counts)
            return (now.totals[index] - old.totals[index]) / count if count else None
        return quantile(self._histogram(metric).bounds, counts, PERCENTILES[statistic])

    def attainment(self) -> float | None:
        """The share of requests in the last minute that met every target; None if none ended. One
        that was refused or failed met none.
        """
        old = self._window[0]
        now = self._window[-1]
        ended = now.well + now.failed + now.refused - old.well - old.failed - old.refused
        return (now.within - old.within) / ended if ended else None

    def _point(self, before: Counts, now: Counts) -> list[float | int | list[float | None] | None]:
        old = self._window[0]
        gauges = self._gauges()
        span_s = max(now.at_s - old.at_s, 1e-9)
        compared = [
            (b[0] - a[0], b[1] - a[1]) for a, b in zip(old.compared, now.compared, strict=True)
        ]
        point = [
            now.at_s,
            gauges.running,
            gauges.waiting,
            gauges.kv_usage,
            (now.well - old.well) / span_s,
            (now.output_tokens - old.output_tokens) / span_s,
            (now.input_tokens - old.input_tokens) / span_s,
            *map(self.recent, LATENCY_COLUMNS),
            _ratio(compared),
            self.attainment(),
            (now.failed - old.failed) / span_s,
            (now.refused - old.refused) / span_s,
            now.oom - before.oom,
        ]
        ratios = [_ratio([worker]) for worker in compared]
        rounded = [None if ratio is None else round(ratio, 3) for ratio in ratios]
        plain = (round(value, 6) if isinstance(value, float) else value for value in point)
        return [*plain, rounded]

    def _count(self) -> Counts:
        stats = self._stats
        compared = [stats.compared[worker] for worker in range(self._workers)]
        histograms = [self._histogram(name) for name in MEASURED]
        return Counts(
            self._now_s(),
            stats.ended["stop"] + stats.ended["length"],
            stats.ended["failed"],
            stats.refused,
            stats.within_targets,
            stats.generation_tokens,
            stats.prompt_tokens,
            tuple((worker.took_s, worker.predicted_s) for worker in compared),
            stats.oom_events,
            stats.worker_restarts,
            tuple(tuple(histogram.counts) for histogram in histograms),
            tuple(histogram.total for histogram in histograms),
        )

    def _histogram(self, name: str) -> Histogram:
        histogram: Histogram = getattr(self._stats, name)
        return histogram


def _ratio(compared: Sequence[tuple[float, float]]) -> float | None:
    """Actual over predicted seconds in total; None if nothing was predicted."""
    took_s, predicted_s = (sum(pair[part] for pair in compared) for part in (0, 1))
    return took_s / predicted_s if predicted_s > 0 else None


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
    alive = [worker.index for worker in driver.scheduler.workers if worker.alive]
    if not alive:
        return NO_WORKER
    hung = {error.worker: error for error in driver.silent()}
    return str(hung[alive[0]]) if hung.keys() >= set(alive) else ""


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
        rows = len(worker.running)
        padded_tokens = 0
        flight = driver.flights.get(worker.index)
        if flight and not flight.batch.keep_cache:
            # A slice may fill: every row padded to the longest, for all steps (SCLS Eq. 5).
            batch = flight.batch
            rows = sum(not active.status for active in flight.requests)
            padded_tokens = batch.size * (batch.input_length + batch.steps)
        workers.append(
            WorkerGauges(
                worker.alive and facts is not None,
                worker.load_s,
                rows,
                footprint_of(worker).taken + worker.paused.tokens + padded_tokens,
                facts.capacity_tokens if facts else None,
            )
        )
    return workers
