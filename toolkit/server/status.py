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
import time
from collections import deque
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import toolkit
from toolkit.files.plan import Plan
from toolkit.files.shipped import shipped_templates
from toolkit.server.stats import ENDED_WELL, quantile

if TYPE_CHECKING:
    from toolkit.server.backend import ServerBackend

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


Facts = Mapping[str, Any]  # the settings of a server, as its page shows them


def facts_of(plan: Plan, model: str) -> Facts:
    """Return the settings of a plan, and by target what the tuning predicts on held-out windows. A
    model folder is shown by its last part, without its path.
    """
    return {
        "model": PurePath(model).name if model.startswith(("/", ".", "~")) else model,
        "engine": plan.fit.engine.engine,
        "device": plan.fit.engine.device,
        "policy": plan.settings.policy,
        "parameters": dict(plan.settings.parameters),
        "predicted": {limit.name: limit.predicted for limit in plan.limits},
    }


class StatusPage:
    """The routes of the page and of its data, with rates and percentiles of the last minute.

    Args:
        backend: what answers requests, and counts them.
        facts: the settings that it shows.
        state: returns what the server does.
    """

    def __init__(self, backend: ServerBackend, facts: Facts, state: Callable[[], str]) -> None:
        self._backend = backend
        self._facts = facts
        self._state = state
        self._start_s = time.monotonic()
        self._page = (shipped_templates() / "status.html").read_text(encoding="utf-8")
        self._policy = content_policy(self._page)
        # When the counters were copied, and the copies.
        self._samples = deque([(self._start_s, deepcopy(backend.stats))], maxlen=SAMPLES + 1)

    async def sampling(self) -> None:
        """Look at the counters until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.sample()

    async def page(self, request: Request) -> Response:
        return Response(
            self._page,
            headers=HEADERS | {"Content-Security-Policy": self._policy},
            media_type="text/html",
        )

    async def data(self, request: Request) -> Response:
        """What the page shows."""
        backend = self._backend
        stats = backend.stats
        predicted = self._facts["predicted"]
        own = backend.shown()
        totals = {
            "ended": dict(stats.ended),
            "input_tokens": stats.prompt_tokens,
            "output_tokens": stats.generation_tokens,
            "refused": stats.refused,
        }
        shown = {
            **self._facts,
            **self.rates(),
            "state": self._state(),
            "uptime_s": round(time.monotonic() - self._start_s, 1),
            "waiting": backend.waiting,
            "workers": [],
            **own,
            "totals": {**totals, **own.get("totals", {})},
            "version": toolkit.__version__,
            "targets": [
                {
                    "name": key,
                    "limit": limit,
                    "now": self.statistic(key),
                    "predicted": predicted.get(key),
                }
                for key, limit in stats.sla.items()
            ],
            "latencies": {
                name: [self.statistic(f"{name}_{share}_s") for share in SHOWN] for name in LATENCIES
            },
        }
        content = msgspec.json.encode(shown)
        return Response(content, headers=HEADERS, media_type="application/json")

    def sample(self) -> None:
        """Look at the counters."""
        self._samples.append((time.monotonic(), deepcopy(self._backend.stats)))

    def statistic(self, key: str) -> float | None:
        """A statistic such as `ttft_p99_s`; None if no request ended."""
        metric, statistic, _ = key.split("_")
        old = self._samples[0][1].latencies[metric]
        now = self._samples[-1][1].latencies[metric]
        counts = [b - a for a, b in zip(old.counts, now.counts, strict=True)]
        if statistic == "mean":
            count = sum(counts)
            return (now.total - old.total) / count if count else None
        return quantile(now.bounds, counts, PERCENTILES[statistic])

    def rates(self) -> dict[str, Any]:
        """Return requests and tokens a second, and the share of requests that met every target. One
        that was refused or failed met none; None if no request ended.
        """
        old_s, old = self._samples[0]
        now_s, now = self._samples[-1]
        ended = now.ended - old.ended
        counts = {
            "served": sum(ended[reason] for reason in ENDED_WELL),
            "failed": ended["failed"],
            "refused": now.refused - old.refused,
        }
        requests = sum(counts.values())
        met = now.within_targets - old.within_targets
        counts["input_tokens"] = now.prompt_tokens - old.prompt_tokens
        counts["output_tokens"] = now.generation_tokens - old.generation_tokens
        span_s = max(now_s - old_s, 1e-9)
        return {
            "rates": {name: count / span_s for name, count in counts.items()},
            "attainment": met / requests if requests else None,
        }


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
