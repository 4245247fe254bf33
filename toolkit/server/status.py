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

import base64
import hashlib
import re
import time
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import toolkit
from toolkit.files.plan import Plan
from toolkit.files.shipped import shipped_templates
from toolkit.server.stats import ENDED_WELL

if TYPE_CHECKING:
    from toolkit.server.application import Application

PAGE = "/"
DATA = "/status.json"
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

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
    """The routes of the page and of its data: counters, of which the page makes rates and
    percentiles of the last minute.

    Args:
        application: has a backend with facts.
    """

    def __init__(self, application: Application, facts: Facts) -> None:
        self._application = application
        self._facts = facts
        self._start_s = time.monotonic()
        self._page = (shipped_templates() / "status.html").read_text(encoding="utf-8")
        self._policy = content_policy(self._page)

    async def page(self, request: Request) -> Response:
        return Response(
            self._page,
            headers=HEADERS | {"Content-Security-Policy": self._policy},
            media_type="text/html",
        )

    async def data(self, request: Request) -> Response:
        """What the page shows."""
        backend = self._application.backend
        stats = backend.stats
        predicted = self._facts["predicted"]
        own = backend.shown()
        totals = {
            "ended": dict(stats.ended),
            "served": sum(stats.ended[reason] for reason in ENDED_WELL),
            "within_targets": stats.within_targets,
            "input_tokens": stats.prompt_tokens,
            "output_tokens": stats.generation_tokens,
            "refused": stats.refused,
        }
        shown = {
            **self._facts,
            "state": self._application.state,
            "uptime_s": round(time.monotonic() - self._start_s, 1),
            "waiting": backend.waiting,
            "workers": [],
            **own,
            "totals": {**totals, **own.get("totals", {})},
            "version": toolkit.__version__,
            "targets": [
                {"name": key, "limit": limit, "predicted": predicted.get(key)}
                for key, limit in stats.sla.items()
            ],
            "latencies": {
                name: {"bounds": one.bounds, "counts": one.counts, "total": one.total}
                for name, one in stats.latencies.items()
            },
        }
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
