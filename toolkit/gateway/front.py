"""The gateway's application: requests in, attempts at replicas, one answer out.

`Gateway` is the ASGI application behind `AccessGate`. It passes a request for tokens to the replica
that the balancer names, and to another one when that fails, until the client has the whole answer
(`toolkit.gateway.passing`). Nothing that was accepted is lost as long as a replica is up, or comes
back within the time that a request waits for one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

import toolkit
from toolkit.endpoints.target import REPLICA_METRICS
from toolkit.endpoints.wire import UpstreamError
from toolkit.gateway.calls import GenerationCall, PromptGauge
from toolkit.gateway.passing import (
    NO_REPLICA,
    PassedRequest,
    RetryBudget,
    kept_headers,
    send_whole,
    whole_body,
)
from toolkit.gateway.replicas import ReplicaPool
from toolkit.gateway.status import merged_metrics
from toolkit.routing.balancer import Balancer
from toolkit.routing.routers import router_parameters
from toolkit.serve.access import AccessGate, KeyedRequest, Keyring
from toolkit.serve.errors import RETRY_AFTER_S, ApiError, error_response, overloaded
from toolkit.serve.forms import read_body, read_json_bytes
from toolkit.serve.stats import Stats
from toolkit.serve.status import DATA, PAGE, StatusPage
from toolkit.traces.write import TraceLog

_logger = logging.getLogger(__name__)

METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
WAIT_UP_S = 60.0  # an accepted request waits this long for a replica to be up
# The path of a request passes only where it is one of these.
RELAYED = ("/tokenize", "/detokenize", "/v1/embeddings")


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The gateway's limits. Times are in seconds.

    Attributes:
        model: by which clients call it; '': any.
        max_new_tokens: what a request may take where it names no limit; for limits of keys.
        max_waiting: requests beyond those that the replicas run, before new ones get 503.
        request_timeout_s: from a request's arrival to its end.
    """

    model: str = ""
    max_new_tokens: int = 256
    max_waiting: int = 4096
    max_body_bytes: int = 8 << 20
    request_timeout_s: float = math.inf
    open_metrics: bool = False
    status_page: bool = False
    local_hosts_only: bool = False
    wait_up_s: float = WAIT_UP_S


class Gateway:
    """The application, and what its requests share. `access` is the ASGI application to serve.

    Attributes:
        running: requests for tokens that have not ended.
        leaving: the end is announced.
        draining: new requests are refused.
        idle: no request runs.
        moved: answers that went on at another replica, by how: first, ids, text, again.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        balancer: Balancer,
        settings: GatewaySettings,
        keyring: Keyring,
        *,
        stats: Stats | None = None,
        gauge: PromptGauge | None = None,
        log: TraceLog | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool, self.balancer, self.settings = pool, balancer, settings
        self.stats, self.gauge = stats or Stats(), gauge or PromptGauge()
        self.budget = RetryBudget()
        self.running = 0
        self.leaving = self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self.moved: dict[str, int] = {}
        self.now_s, self.keyring = now_s, keyring
        self.log, self._start_s = log, now_s()
        self.numbers = count(1)  # of the requests
        self._created = int(time.time())
        self.metrics: Callable[[], bytes] = lambda: b""
        self.status: StatusPage | None = None
        open_paths = ["/health", "/ready", *(["/metrics"] if settings.open_metrics else [])]
        self.access: ASGIApp = AccessGate(
            self._answer,
            keyring,
            now_s,
            open_paths=open_paths,
            local_paths=[PAGE, DATA] if settings.status_page else [],
            local_hosts_only=settings.local_hosts_only,
        )

    @property
    def state(self) -> str:
        if self.leaving:
            return "leaving"
        return "ready" if self.pool.up else NO_REPLICA

    @property
    def waiting(self) -> int:
        """Requests beyond the rows that the replicas run at once."""
        replicas = self.balancer.replicas
        return sum(max(each.requests - each.traits.max_rows, 0) for each in replicas)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and wait at most `timeout_s` seconds for those that run."""
        self.draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self.idle.wait(), timeout_s)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._route(scope, receive, send)
        except ApiError as error:
            await error_response(error)(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path in ("/v1/completions", "/v1/chat/completions") and method == "POST":
            await self._generate(scope, receive, send)
        elif path in RELAYED and method == "POST":
            await self._relay(scope, receive, send)
        elif path == REPLICA_METRICS and method == "GET":
            content = await asyncio.to_thread(merged_metrics, await self.pool.read_metrics())
            await send_whole(send, 200, [(b"content-type", METRICS_TYPE)], content)
        elif method not in ("GET", "HEAD"):
            raise ApiError(f"there is no such route: {method} {path[:80]}", status=404)
        elif self.status is not None and path in (PAGE, DATA):
            show = self.status.page if path == PAGE else self.status.data
            response = await show(Request(scope, receive))
            await response(scope, receive, send)
        else:
            status, kind, content = self._page(path)
            await send_whole(send, status, [(b"content-type", kind)], content)

    def _page(self, path: str) -> tuple[int, bytes, bytes]:
        """The status, the content type and the content of a page."""
        kind, encode = b"application/json", msgspec.json.encode
        match path:
            case "/health":
                return 200, kind, encode({"status": "ok"})
            case "/ready":
                return (200 if self.state == "ready" else 503), kind, encode({"status": self.state})
            case "/version":
                return 200, kind, encode({"version": toolkit.__version__})
            case "/metrics":
                return 200, METRICS_TYPE, self.metrics()
            case "/v1/models":
                return 200, kind, encode({"object": "list", "data": [self._model()]})
            case "/replicas":
                return 200, kind, encode(self._shown())
        if path.removeprefix("/v1/models/") == self.model and self.model:
            return 200, kind, encode(self._model())
        raise ApiError(f"there is no such route: GET {path[:80]}", status=404)

    @property
    def model(self) -> str:
        return self.settings.model or self.pool.model

    def _model(self) -> dict[str, object]:
        lengths = [each.max_model_len for each in self.pool.up if each.max_model_len]
        about = {"id": self.model, "object": "model", "created": self._created}
        about |= {"owned_by": "llmctl", "replicas": len(self.pool.up)}
        return about | {"max_model_len": min(lengths, default=None)}

    def _shown(self) -> dict[str, object]:
        """The state of all replicas."""
        shown = [
            {
                "url": each.url,
                "state": each.state,
                "problem": each.problem,
                "version": each.version,
                "running": len(each.attempts),
                "requests": each.requests,
                "failures": each.failures,
                "moved": each.moved,
            }
            | ({"kind": self.pool.kind_of(each)} if self.pool.kinds[1:] else {})
            for each in self.pool.replicas
        ]
        router = self.balancer.router
        about = {"router": router.name, "parameters": router_parameters(router)}
        return about | {"state": self.state, "replicas": shown}

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a small request to any replica, and its whole answer back."""
        body = await read_body(Request(scope, receive), self.settings.max_body_bytes)
        for replica in sorted(self.pool.up, key=lambda each: len(each.attempts)):
            headers = [*self.pool.headers, (b"content-type", b"application/json")]
            try:
                path = scope["path"].encode()
                answer = await replica.upstream.send("POST", path, headers, body)
                try:
                    content = await whole_body(answer)
                finally:
                    await answer.close()
            except UpstreamError:
                continue
            await send_whole(send, answer.status, kept_headers(answer), content)
            return
        raise overloaded(NO_REPLICA)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.draining:
            headers = {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"}
            raise ApiError("the server is draining", status=503, headers=headers)
        if not self.pool.up:
            self.stats.refused += 1
            raise overloaded(NO_REPLICA)
        arrival_s = self.now_s()
        body = await read_json_bytes(Request(scope, receive), self.settings.max_body_bytes)
        session = Headers(scope=scope).get("x-session-id", "")
        call = GenerationCall(body, chat=scope["path"].startswith("/v1/chat"), session=session)
        if self.model and call.model and call.model != self.model:
            text = f"there is no model '{call.model[:80]}'; this server has '{self.model}'"
            raise ApiError(text, status=404, param="model", code="model_not_found")
        if self.waiting >= self.settings.max_waiting:
            self.stats.refused += 1
            raise overloaded(f"{self.waiting} requests wait, which is the limit; try again later")
        request = PassedRequest(self, call, send, arrival_s)
        limit = call.max_tokens or self.settings.max_new_tokens
        most = call.choices * (request.prompt_tokens + max(limit, 1))
        keyed = KeyedRequest.of(scope)
        keyed.admit(call.choices, most)
        request.admit()
        keyed.reserve(most, lambda: request.used)
        self.running += 1
        self.idle.clear()
        try:
            await request.run(receive)
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()
