"""What clients may use of a front, and the middleware that holds requests to it.

`Limited` bounds the time of a body, and over all requests the bytes of their bodies and large
answers. Connections are bounded in `toolkit.server.http`, the length of a body where it is read.
What one client may use is bounded by a proxy in front (docs/how-to/expose.md).
"""

from __future__ import annotations

import asyncio
import math
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolkit.openai.errors import ApiError, overloaded
from toolkit.server.errors import error_response
from toolkit.server.options import MAX_BODY_BYTES

SMALL_BYTES = 1 << 16  # a body or an answer up to this size is taken however much is held
FRAMING = (b"content-length", b"transfer-encoding")  # of requests with a body
EXCESS_ONE_IN = 4
SPARE_DESCRIPTORS = 128  # of this process, for everything but connections


@dataclass(frozen=True, slots=True)
class WireLimits:
    """What clients may use. Times are in seconds."""

    connections: int = 4096  # with a request; some more may be open (`excess`)
    descriptors_each: int = 1  # file descriptors per connection: 2 with one to an upstream server
    head_bytes: int = 1 << 16  # of the request line and all headers
    body_bytes: int = MAX_BODY_BYTES
    held_bytes: int = 256 << 20  # of bodies and large answers
    head_timeout_s: float = 60.0
    body_timeout_s: float = 60.0
    idle_timeout_s: int = 60  # longer than in clients' connection pools: they close first
    write_timeout_s: float = 30.0
    linger_timeout_s: float = 5.0  # for the rest of what was refused


DEFAULT_LIMITS = WireLimits()


def possible_connections(limits: WireLimits) -> int:
    """Ask for enough file descriptors. Return how many connections they are enough for."""
    each = limits.descriptors_each + 1 / EXCESS_ONE_IN
    wanted = math.ceil(limits.connections * each) + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits.connections
    possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < possible:
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    enough_for = int((max(soft, possible) - SPARE_DESCRIPTORS) / each)
    return max(min(limits.connections, enough_for), 1)


def excess(connections: int) -> int:
    """Return how many connections may be open beside those that may have a request."""
    return max(connections // EXCESS_ONE_IN, 1)


class Limited:
    """The middleware.

    Args:
        app: what it passes requests to.
        on_status: called with the status of each answer.

    Attributes:
        held_bytes: of bodies and large answers, of all requests.
    """

    def __init__(
        self, app: ASGIApp, limits: WireLimits, on_status: Callable[[str], None] = lambda _: None
    ) -> None:
        self.limits = limits
        self.held_bytes = 0
        self._app = app
        self.on_status = on_status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if wrong := self._wrong_head(scope):
            await error_response(wrong)(scope, receive, send)
            return
        request = _LimitedRequest(self, scope, receive, send)
        try:
            await self._app(scope, request.receive, request.send)
        finally:
            self.held_bytes -= request.held_bytes

    def _wrong_head(self, scope: Scope) -> ApiError | None:
        headers = scope["headers"]
        size = sum(len(name) + len(value) + 4 for name, value in headers)
        if size + len(scope["raw_path"]) + len(scope["query_string"]) > self.limits.head_bytes:
            return head_too_large(self.limits)
        hosts = sum(name == b"host" for name, _ in headers)
        if hosts > 1 or (not hosts and scope["http_version"] == "1.1"):
            fault = "more than one Host header" if hosts else "no Host header"
            text = f"the request has {fault}; HTTP/1.1 requires one"
            return ApiError(text, headers={"Connection": "close"})
        return None

    def hold(self, size: int) -> None:
        """Count bytes that are in memory. Raises ApiError if there is no room for them."""
        self.held_bytes += size
        if self.held_bytes > self.limits.held_bytes:
            mib = self.held_bytes >> 20
            raise overloaded(f"the server holds {mib} MiB of requests and answers; try again later")


class _LimitedRequest:
    """One request: its `receive` and `send`."""

    def __init__(self, limited: Limited, scope: Scope, receive: Receive, send: Send) -> None:
        self.held_bytes = 0
        self._limited = limited
        self._scope = scope
        self._receive = receive
        self._send = send
        self._body_bytes = 0
        self._body_is_whole = not any(name in FRAMING for name, _ in scope["headers"])
        self._is_refused = False  # the response is an error: the application's is dropped
        timeout_s = limited.limits.body_timeout_s
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s

    def _hold(self, size: int) -> None:
        self.held_bytes += size
        self._limited.hold(size)

    async def receive(self) -> Message:
        """The `receive` of ASGI. Raises `ApiError` for a body that is late or finds no room."""
        if self._body_is_whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await self._receive()
        except TimeoutError:
            text = f"the body did not come within {self._limited.limits.body_timeout_s:g} s"
            raise ApiError(text, status=408, headers={"Connection": "close"}) from None
        self._body_is_whole = not message.get("more_body", False)
        size = len(message.get("body", b""))
        self._body_bytes += size
        if self._body_bytes > SMALL_BYTES:
            self._hold(size)
        return message

    async def send(self, message: Message) -> None:
        """The `send` of ASGI. A large body leaves in pieces, each once the client has read on."""
        if self._is_refused:
            return
        if message["type"] == "http.response.start":
            for name, value in message.get("headers", ()):
                if name.lower() == b"content-length" and int(value) > SMALL_BYTES:
                    try:
                        self._hold(int(value))
                    except ApiError as refusal:
                        self._is_refused = True
                        await error_response(refusal)(self._scope, self._receive, self._send)
                        return
            self._limited.on_status(str(message["status"]))
            await self._send(message)
            return
        body = message.get("body", b"")
        at = 0
        while len(body) - at > SMALL_BYTES:
            piece = body[at : at + SMALL_BYTES]
            at += SMALL_BYTES
            await self._send({**message, "body": piece, "more_body": True})
        last = {**message, "body": body[at:]} if at else message
        if not message.get("more_body") and not self._body_is_whole:
            # A connection that closes while its client sends is reset, and the answer is lost.
            await self._send({**last, "more_body": True})
            await self._drop_body()
            last = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(last)

    async def _drop_body(self) -> None:
        """Wait for the rest of the body, for a short time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limited.limits.linger_timeout_s):
                while not self._body_is_whole:
                    self._body_is_whole = not (await self._receive()).get("more_body", False)


def head_too_large(limits: WireLimits) -> ApiError:
    text = f"request line and headers are larger than {limits.head_bytes} bytes"
    return ApiError(text, status=431, headers={"Connection": "close"})
