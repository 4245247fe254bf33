"""The status page: one page and the JSON that it reads, for people who want to see a server at work.

It holds sums and settings: nothing of any one request, no text, no key, no address, no path. So it is shown without the
key, but only to those who can connect: by default where the server listens on loopback. A page from elsewhere that a
browser shows cannot read it: nothing here allows other origins, and a Host that is a name (which its owner may have
pointed to this machine, "DNS rebinding") is refused; only addresses and `localhost` answer.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import toolkit
from toolkit.files.plan import Plan
from toolkit.files.shipped import shipped_templates
from toolkit.files.tuning import Value
from toolkit.serve.driver import Driver
from toolkit.serve.errors import ApiError
from toolkit.serve.health import gauges, problem, state, worker_gauges
from toolkit.serve.history import COLUMNS, KEPT, SAMPLE_S, History

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
    parameters: Mapping[str, Value]
    kinds: Sequence[KindFacts]  # in the order of the workers' numbers; one but for fleets
    sla: Mapping[str, float]
    predicted: Mapping[str, float]  # by the tuner, on held-out windows


def facts_of(plan: Plan, model: str) -> Facts:
    """A model that is a folder is called by its last part: where it lies is nobody's business."""
    name = PurePath(model).name if model.startswith(("/", ".", "~")) else model
    kinds = [
        KindFacts(kind.recipe.name, kind.fit.engine.engine, kind.fit.engine.device, kind.workers) for kind in plan.kinds
    ]
    predicted = {one.name: one.predicted for one in plan.limits if one.predicted is not None}
    return Facts(name, plan.policy.name, plan.policy.parameters, kinds, plan.recipe.sla, predicted)


class Status:
    """The two routes, and the history behind them."""

    def __init__(self, driver: Driver, facts: Facts) -> None:
        self.history = History(driver.stats, lambda: gauges(driver), lambda: driver.now_s)
        self._driver = driver
        self._facts = facts
        self._instance = secrets.token_hex(8)  # so that a page knows another server from the one it has read
        self._page = (shipped_templates() / "status.html").read_text(encoding="utf-8")
        self._policy = content_policy(self._page)

    async def sampling(self) -> None:
        """Take points until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            if self._driver.state != "loading":
                self.history.sample()

    async def page(self, request: Request) -> Response:
        check_host(request.headers.get("host", ""))
        return Response(self._page, headers=HEADERS | {"Content-Security-Policy": self._policy}, media_type="text/html")

    async def data(self, request: Request) -> Response:
        """What the page shows now, and the points from number `since` on where `instance` is this server's."""
        check_host(request.headers.get("host", ""))
        query = request.query_params
        since = query.get("since", "")
        known = int(since) if query.get("instance") == self._instance and re.fullmatch(r"\d{1,12}", since) else 0
        return Response(msgspec.json.encode(self._shown(known)), headers=HEADERS, media_type="application/json")

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
                {"name": key, "limit": limit, "now": history.recent(key), "predicted": facts.predicted.get(key)}
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
            "batch_ratio": stats.batch_s / stats.predicted_batch_s if stats.predicted_batch_s else None,
        }


def check_host(host: str) -> None:
    """`ApiError` for a Host that is a name other than localhost: anybody may point a name of theirs here."""
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        if name.lower().rstrip(".") != "localhost":
            text = "the status page answers to addresses and to localhost, not to other names"
            raise ApiError(text, status=403, code="host_refused") from None


def content_policy(page: str) -> str:
    """The page's own script and style, and nothing from anywhere else."""

    def digests(tag: str) -> str:
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts
        )

    return (
        f"default-src 'none'; script-src {digests('script')}; style-src {digests('style')}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
