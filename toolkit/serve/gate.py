"""The ASGI layer before all routes: who may call, and how often; and a request id on every response.

A server of this machine alone, without a key, also looks at the Host. A web page may point a name of its own to this
machine ("DNS rebinding"), and the browser then sends that name and lets the page read the answers.
"""

from __future__ import annotations

import ipaddress
import re
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolkit.serve.errors import ApiError, error_response
from toolkit.serve.keys import Keyring, Visit

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Gate:
    """Denies by default: without a key only `open_paths` answer, and nobody learns which other routes exist.

    What a key POSTs counts against its limits, on the clock `now_s`. With `local_hosts_only` a Host that is a name
    other than `localhost` gets 403 from all routes but `open_paths`.
    """

    def __init__(
        self,
        app: ASGIApp,
        keyring: Keyring,
        now_s: Callable[[], float],
        *,
        open_paths: Collection[str],
        local_hosts_only: bool = False,
    ) -> None:
        self._app = app
        self._keyring = keyring
        self._now_s = now_s
        self._open_paths = frozenset(open_paths)
        self._local_hosts_only = local_hosts_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)

        account, visit, status = self._keyring.find(headers), None, 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = MutableHeaders(scope=message)
                added["X-Request-Id"] = request_id
                added.update(visit.headers() if visit else {})
            await send(message)

        if self._local_hosts_only and scope["path"] not in self._open_paths:
            try:
                check_local_host(headers.get("host", ""))
            except ApiError as refusal:
                await error_response(refusal)(scope, receive, send_with_id)
                return
        if account is None and scope["path"] not in self._open_paths:
            await error_response(_denied(headers))(scope, receive, send_with_id)
            return
        if account is None or scope["method"] != "POST":
            await self._app(scope, receive, send_with_id)
            return
        visit = Visit(account, self._now_s)
        try:
            visit.enter(scope)
        except ApiError as refusal:
            await error_response(refusal)(scope, receive, send_with_id)
            return
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            visit.leave(status)


def check_local_host(host: str) -> None:
    """`ApiError` for a Host that is a name other than localhost. Addresses and an empty Host pass: no page has them."""
    name = host.rpartition(":")[0] if re.search(r":\d*$", host) else host
    with suppress(ValueError):
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        return
    if name.lower().rstrip(".") not in ("localhost", ""):
        raise ApiError(
            f"without a key this server answers to addresses and to localhost, not to the Host {name[:80]!r}; "
            "start it with an API key, or have the proxy in front send an address as Host",
            status=403,
            code="host_refused",
        )


def _denied(headers: Headers) -> ApiError:
    given = headers.get("authorization", "").lower().startswith("bearer ")
    missing = "this server needs its API key, as 'Authorization: Bearer KEY'"
    return ApiError(
        "the API key is not one of this server's" if given else missing,
        status=401,
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _request_id(headers: Headers) -> str:
    """The client's own where it is plain, else a new one. It goes back in a header, and is used for nothing else."""
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
