"""The control of a running server over HTTP, with a key of its own.

`SettingsMiddleware` answers `ROUTE` before a server's application, llmctl's or vLLM's. GET shows
the settings and their bounds; POST takes a request of `toolkit.sched.live` and answers the same
afterwards. This module runs inside vLLM, too, and needs nothing but Python.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

ROUTE = "/llmctl/settings"
HEADER = b"authorization"
MAX_BODY_BYTES = 1 << 14
BODY_S = 5.0  # for a body to arrive
MAX_WAITING = 8  # requests with the key that are answered in turn

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class SettingsMiddleware:
    """ASGI middleware that passes on everything but `ROUTE`. Without a key it answers nothing.

    Args:
        ask: gets the request's scope and its fields; its answer has `status`, unless it is 200.
    """

    def __init__(
        self, app: App, key: str, ask: Callable[[Scope, object], Awaitable[dict[str, Any]]]
    ) -> None:
        self._app = app
        self._ask = ask
        self._digest = hashlib.sha256(key.encode()).digest() if key else b""
        self._lock = asyncio.Lock()
        self._waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope.get("path", "")).removeprefix(str(scope.get("root_path", "")))
        if scope["type"] != "http" or path != ROUTE or not self._digest:
            await self._app(scope, receive, send)
            return
        status, answer = await self._answer(scope, receive)
        body = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
        headers.append((b"content-length", str(len(body)).encode()))
        if status >= 400:
            headers.append((b"connection", b"close"))  # its body may not have been read
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, dict[str, Any]]:
        """Status and body. Nothing reaches the engine without the key."""
        if not self._knows_key(scope):
            return 401, {"error": "the control needs its key", "hint": "give LLMCTL_CONTROL_KEY"}
        if scope["method"] not in ("GET", "POST"):
            return 405, {"error": f"{scope['method']}: only GET and POST", "hint": ""}
        if self._waiting >= MAX_WAITING:
            return 429, {"error": "too many requests at once", "hint": "ask again later"}
        self._waiting += 1
        try:
            fields: object = {}
            if scope["method"] == "POST":
                try:
                    fields = json.loads(await asyncio.wait_for(_body(receive), BODY_S))
                except (ValueError, RecursionError, TimeoutError):
                    return 400, {"error": "the body is no short JSON", "hint": ""}
            async with self._lock:
                answer = await self._ask(scope, fields)
                return int(answer.pop("status", 200)), answer
        finally:
            self._waiting -= 1

    def _knows_key(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == HEADER:
                scheme, _, key = value.partition(b" ")
                digest = hashlib.sha256(key).digest()
                return scheme.lower() == b"bearer" and hmac.compare_digest(digest, self._digest)
        return False


async def _body(receive: Receive) -> bytes:
    """The body of a request. `ValueError` where it is long or cut off."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ValueError("the client has gone")
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise ValueError("too long")
        if not message.get("more_body"):
            return bytes(body)
