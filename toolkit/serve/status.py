"""The status page: one page and the JSON that it reads, for people who want to see a server at
work.

It holds sums and settings: nothing of any one request, no text, no key, no address, no path. So it
is shown without the key, but only to those who can connect: by default where the server listens on
loopback. A page from elsewhere that a browser shows cannot read it: nothing here allows other
origins, and `toolkit.serve.access` refuses a Host that is a name other than `localhost`, which its
owner may have pointed to this machine ("DNS rebinding").
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from toolkit.sched.footprint import footprint
from toolkit.sched.types import Worker
from toolkit.serve.driver import Driver
from toolkit.serve.live import InFlightBatch
from toolkit.serve.metrics import Gauges, WorkerGauges
from toolkit.serve.stats import Histogram, Stats, quantile

# The last hour of a server: a point every few seconds, percentiles over the last minute, what
# went wrong when.
#
# Made from what `Stats` counts anyway: nothing is added to the path of a request. Memory is
# bounded, whatever the load.

SAMPLE_S = 2.0
KEPT = 1800  # points: an hour, at about 200 bytes each
TRAILING = 30  # points that rates and percentiles are of: one minute
EVENTS = 20
LATENCIES = ("ttft", "tpot", "itl", "e2e")  # charts
MEASURED = (*LATENCIES, "mtpot")
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
SHOWN = ("p50", "p95", "p99")

COLUMNS = (
    *(
        "time_s",
        "running",
        "waiting",
        "kv_share",
        "requests_per_s",
        "output_tokens_per_s",
        "input_tokens_per_s",
    ),
    *(f"{latency}_{percentile}_s" for latency in LATENCIES for percentile in SHOWN),
    *("batch_ratio", "attainment", "failed_per_s", "oom_events"),
    "worker_batch_ratios",  # a list, by worker
)


class Counts(NamedTuple):
    """Counters at one moment. All but `at_s` only grow."""

    at_s: float
    well: int
    failed: int
    within: int
    output_tokens: int
    input_tokens: int
    compared: tuple[
        tuple[float, float], ...
    ]  # by worker: seconds that batches took, and were predicted to take
    oom: int
    restarts: int
    extrapolated: int
    buckets: tuple[tuple[int, ...], ...]
    totals: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Something that a person should know of."""

    time_s: float
    text: str


class MetricHistory:
    """Points of a server's life. `sample` is to be called every `SAMPLE_S`."""

    def __init__(
        self, stats: Stats, gauges: Callable[[], Gauges], now_s: Callable[[], float]
    ) -> None:
        self.points: deque[msgspec.Raw] = deque(
            maxlen=KEPT
        )  # JSON already: each is sent many times
        self.taken = 0  # points ever
        self.happenings: deque[RequestCounts] = deque(maxlen=EVENTS)
        self._stats = stats
        self._gauges = gauges
        self._now_s = now_s
        self._workers = len(gauges().workers)
        self._trail: deque[Counts] = deque([self._count()._replace(at_s=0.0)], maxlen=TRAILING + 1)

    def sample(self) -> None:
        """Take a point."""
        before, now = self._trail[-1], self._count()
        self._trail.append(now)
        self._note(before, now)
        self.points.append(msgspec.Raw(msgspec.json.encode(self._point(before, now))))
        self.taken += 1

    def recent(self, key: str) -> float | None:
        """A target's statistic over the last minute, `ttft_p99_s`; None where nothing ended."""
        metric, statistic, _ = key.split("_")
        old, now, index = self._trail[0], self._trail[-1], MEASURED.index(metric)
        counts = [b - a for a, b in zip(old.buckets[index], now.buckets[index], strict=True)]
        if statistic == "mean":
            count = sum(counts)
            return (now.totals[index] - old.totals[index]) / count if count else None
        return quantile(self._histogram(metric).bounds, counts, PERCENTILES[statistic])

    def attainment(self) -> float | None:
        """The share of requests that kept every target in the last minute."""
        old, now = self._trail[0], self._trail[-1]
        ended = now.well + now.failed - old.well - old.failed
        return (now.within - old.within) / ended if ended else None

    def _point(self, before: Counts, now: Counts) -> list[float | int | list[float | None] | None]:
        old, gauges = self._trail[0], self._gauges()
        span_s = max(now.at_s - old.at_s, 1e-9)
        compared = [
            (b[0] - a[0], b[1] - a[1]) for a, b in zip(old.compared, now.compared, strict=True)
        ]
        latencies = [
            self.recent(f"{latency}_{share}_s") for latency in LATENCIES for share in SHOWN
        ]
        point = [
            now.at_s,
            gauges.running,
            gauges.waiting,
            gauges.kv_usage,
            (now.well - old.well) / span_s,
            (now.output_tokens - old.output_tokens) / span_s,
            (now.input_tokens - old.input_tokens) / span_s,
            *latencies,
            _ratio(compared),
            self.attainment(),
            (now.failed - old.failed) / span_s,
            now.oom - before.oom,
        ]
        ratios = [None if (ratio := _ratio([one])) is None else round(ratio, 3) for one in compared]
        return [
            *(round(value, 6) if isinstance(value, float) else value for value in point),
            ratios,
        ]

    def _note(self, before: Counts, now: Counts) -> None:
        """Troubles since the last point, one line for each kind."""
        for count, one, more in (
            (
                now.oom - before.oom,
                "a batch ran out of memory, and is run again in parts",
                "batches ran out of memory",
            ),
            (
                now.restarts - before.restarts,
                "a worker was lost, and is started again",
                "workers were lost",
            ),
            (now.failed - before.failed, "a request failed", "requests failed"),
        ):
            if count:
                self.happenings.append(
                    RequestCounts(round(now.at_s, 1), one if count == 1 else f"{count} {more}")
                )

    def _count(self) -> Counts:
        stats = self._stats
        histograms = [self._histogram(name) for name in MEASURED]
        return Counts(
            self._now_s(),
            stats.ended["stop"] + stats.ended["length"],
            stats.ended["failed"],
            stats.within_targets,
            stats.generation_tokens,
            stats.prompt_tokens,
            tuple(
                (stats.compared[k].took_s, stats.compared[k].predicted_s)
                for k in range(self._workers)
            ),
            stats.oom_events,
            stats.worker_restarts,
            stats.extrapolated_batches,
            tuple(tuple(histogram.counts) for histogram in histograms),
            tuple(histogram.total for histogram in histograms),
        )

    def _histogram(self, name: str) -> Histogram:
        histogram: Histogram = getattr(self._stats, name)
        return histogram


def _ratio(compared: Sequence[tuple[float, float]]) -> float | None:
    """Seconds over predicted seconds, of all together; None where nothing was predicted."""
    took_s, predicted_s = (sum(one[part] for one in compared) for part in (0, 1))
    return took_s / predicted_s if predicted_s > 0 else None


# What the server says of its own state.
#
# `/health` is about the front alone: the loop that answers it turns, and nothing has ended the
# front. `/ready` says whether requests should come here. A worker that dies or hangs is the
# server's own to replace, and its requests go on; a manager that restarted the server for it
# would lose them.

NO_WORKER = "no worker is alive"


def failure(driver: Driver) -> str:
    """Why the front cannot go on and has to be started anew, or ''."""
    if driver.bug:
        return "the scheduler stopped at a bug"
    return "no worker can be loaded" if driver.failed else ""


def state(driver: Driver) -> str:
    """In a word or a few: "ready" where requests are welcome and some worker is loaded and alive."""
    if driver.leaving:
        return "leaving"
    if driver.state != "ready":
        return driver.state
    return "ready" if any(worker.alive for worker in driver.scheduler.workers) else NO_WORKER


def problem(driver: Driver) -> str:
    """What a person should know of: why nothing moves, or ''. While it loads or drains, nothing is
    wrong.
    """
    if failure(driver) or driver.state in ("loading", "stopped"):
        return failure(driver)
    alive = [worker.index for worker in driver.scheduler.workers if worker.alive]
    if not alive:
        return NO_WORKER
    hung = {one.worker: one for one in driver.silent()}
    return str(hung[alive[0]]) if hung.keys() >= set(alive) else ""


def gauges(driver: Driver) -> Gauges:
    """What metrics read at a scrape."""
    workers = worker_gauges(driver)
    capacity = sum(one.kv_capacity or 0 for one in workers)
    used = sum(one.kv_tokens for one in workers)
    return Gauges(
        driver.running,
        driver.waiting,
        min(used / capacity, 1.0) if capacity else 0.0,
        capacity,
        workers,
        driver.forecast.now(driver.now_s).ttft_s,
        identity(next(iter(driver.facts.values()))) if driver.facts else {},
    )


def worker_gauges(driver: Driver) -> list[WorkerGauges]:
    """Each worker, as metrics and the status page show it."""
    return [
        WorkerGauges(
            worker.alive
            and worker.index in driver.facts,  # to the scheduler one that loads first is alive
            worker.load_s,
            _rows(worker, driver.flights.get(worker.index)),
            footprint(worker).taken
            + worker.held.tokens
            + _padded_tokens(driver.flights.get(worker.index)),
            driver.facts[worker.index].capacity_tokens if worker.index in driver.facts else None,
        )
        for worker in driver.scheduler.workers
    ]


def _rows(worker: Worker, flight: InFlightBatch | None) -> int:
    if flight is None or flight.batch.keep_cache:
        return len(worker.residents)
    return sum(not live.status for live in flight.lives)


def _padded_tokens(flight: InFlightBatch | None) -> int:
    """What a slice may fill at most: every row is padded to the longest, and runs for all steps
    (SCLS Eq. 5).
    """
    if flight is None or flight.batch.keep_cache:
        return 0
    batch = flight.batch
    return batch.size * (batch.input_length + batch.steps)


PAGE, DATA = "/", "/status.json"
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class KindFacts:
    """Workers of one kind: the recipe's name, what runs there on what, and how many there are."""

    name: str
    engine: str
    device: str
    workers: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server was started with, as far as the page shows it."""

    model: str
    policy: str
    parameters: Mapping[str, ParameterValue]
    kinds: Sequence[KindFacts]  # in the order of the workers' numbers; one but for fleets
    sla: Mapping[str, float]
    predicted: Mapping[str, float]  # by the tuner, on held-out windows


def facts_of(plan: Plan, model: str) -> Facts:
    """A model that is a folder is called by its last part: where it lies is nobody's business."""
    name = PurePath(model).name if model.startswith(("/", ".", "~")) else model
    kinds = [
        KindFacts(kind.recipe.name, kind.fit.engine.engine, kind.fit.engine.device, kind.workers)
        for kind in plan.kinds
    ]
    predicted = {one.name: one.predicted for one in plan.limits if one.predicted is not None}
    return Facts(name, plan.policy.name, plan.policy.parameters, kinds, plan.recipe.sla, predicted)


class Status:
    """The two routes, and the history behind them."""

    def __init__(self, driver: Driver, facts: Facts) -> None:
        self.history = MetricHistory(driver.stats, lambda: gauges(driver), lambda: driver.now_s)
        self._driver = driver
        self._facts = facts
        self._instance = secrets.token_hex(
            8
        )  # so that a page knows another server from the one it has read
        self._page = (shipped_templates() / "status.html").read_text(encoding="utf-8")
        self._policy = content_policy(self._page)

    async def sampling(self) -> None:
        """Take points until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            if self._driver.state != "loading":
                self.history.sample()

    async def page(self, request: Request) -> Response:
        return Response(
            self._page,
            headers=HEADERS | {"Content-Security-Policy": self._policy},
            media_type="text/html",
        )

    async def data(self, request: Request) -> Response:
        """What the page shows now, and the points from number `since` on where `instance` is this
        server's.
        """
        query = request.query_params
        since = query.get("since", "")
        known = (
            int(since)
            if query.get("instance") == self._instance and re.fullmatch(r"\d{1,12}", since)
            else 0
        )
        return Response(
            msgspec.json.encode(self._shown(known)), headers=HEADERS, media_type="application/json"
        )

    def _shown(self, since: int) -> dict[str, Any]:
        driver, history, facts = self._driver, self.history, self._facts
        first = max(since, history.taken - len(history.points))
        skipped = first - (history.taken - len(history.points))
        return {
            "instance": self._instance,
            "version": toolkit.__version__,
            "state": state(driver),
            "problem": problem(driver),
            "uptime_s": round(driver.now_s, 1) if driver.state != "loading" else 0.0,
            "model": facts.model,
            "kinds": [asdict(kind) for kind in facts.kinds],
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
            "workers": self._workers(),
            "totals": self._totals(),
            "happenings": [{"time_s": one.time_s, "text": one.text} for one in history.happenings],
            "sample_s": SAMPLE_S,
            "kept": KEPT,
            "columns": COLUMNS,
            "first": first,
            "points": list(history.points)[skipped:],
        }

    def _workers(self) -> list[dict[str, Any]]:
        driver = self._driver
        return [
            {
                "state": self._state(worker.index, alive=worker.alive),
                "rows": now.rows,
                "kv_tokens": now.kv_tokens,
                "kv_capacity": now.kv_capacity,
                "load_s": round(worker.load_s, 3),
                "oom_events": worker.oom_events,
                "restarts": driver.stats.restarts[worker.index],
            }
            for worker, now in zip(driver.scheduler.workers, worker_gauges(driver), strict=True)
        ]

    def _state(self, worker: int, *, alive: bool) -> str:
        if worker not in self._driver.facts:
            return "loading"
        return "lost" if not alive else "running" if worker in self._driver.flights else "idle"

    def _totals(self) -> dict[str, Any]:
        stats = self._driver.stats
        return {
            "ended": dict(stats.ended),
            "input_tokens": stats.prompt_tokens,
            "output_tokens": stats.generation_tokens,
            "batches": stats.batches,
            "extrapolated_batches": stats.extrapolated_batches,
            "oom_events": stats.oom_events,
            "preemptions": stats.preemptions,
            "refused": stats.refused,
            "restarts": stats.worker_restarts,
            "batch_ratio": stats.batch_s / stats.predicted_batch_s
            if stats.predicted_batch_s
            else None,
        }


def content_policy(page: str) -> str:
    """The page's own script and style, and nothing from anywhere else."""

    def digests(tag: str) -> str:
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for text in texts
        )

    return (
        f"default-src 'none'; script-src {digests('script')}; style-src {digests('style')}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
