"""The ASGI layer before all routes: who may call, and a request id on every response."""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolkit.serve.errors import ApiError, error_response

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Gate:
    """Denies by default: without the key only `open_paths` answer, and nobody learns which other routes exist."""

    def __init__(self, app: ASGIApp, *, api_key: str, open_paths: Collection[str]) -> None:
        self._app = app
        self._key = api_key.encode()
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        if self._key and scope["path"] not in self._open_paths and not self._has_key(headers):
            denied = ApiError(
                "this server needs its API key, as 'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error_response(denied)(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._key)


def _request_id(headers: Headers) -> str:
    """The client's own where it is plain, else a new one. It goes back in a header, and is used for nothing else."""
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
