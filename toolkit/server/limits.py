"""What clients may use of a front, and the middleware that holds requests to it.

`Limited` bounds the number of requests, the time of a body, and the bytes of all bodies together.
Connections are bounded in `toolkit.server.http`, the length of a body where it is read.
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

SMALL_BYTES = 1 << 16  # a body up to this size is taken however much is held
FRAMING = (b"content-length", b"transfer-encoding")  # of requests with a body
EXCESS_ONE_IN = 4
LINGER_S = 5.0  # for the rest of a body that is answered already
SPARE_DESCRIPTORS = 128  # of this process, for everything but connections


@dataclass(frozen=True, slots=True)
class WireLimits:
    """What clients may use. Times are in seconds."""

    connections: int = 4096  # with a request; some more may be open (`excess`)
    descriptors_each: int = 1  # file descriptors per connection: 2 with one to an upstream server
    head_bytes: int = 1 << 16  # of the request line and all headers
    held_bytes: int = 256 << 20  # of bodies, of all requests
    head_timeout_s: float = 60.0
    body_timeout_s: float = 60.0
    idle_timeout_s: int = 60  # longer than in clients' connection pools: they close first
    write_timeout_s: float = 30.0


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
        most_requests: at once.
        idle: connections without a request, the longest waiting first.
        held_bytes: of the bodies of all requests.
    """

    def __init__(
        self, app: ASGIApp, limits: WireLimits, on_status: Callable[[str], None] = lambda _: None
    ) -> None:
        self.limits = limits
        self.on_status = on_status
        self.most_requests = possible_connections(limits)
        self.idle: dict[object, None] = {}
        self.held_bytes = 0
        self._app = app
        self._requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = _LimitedRequest(self, scope, receive, send)
        self._requests += 1
        try:
            self._check(scope)
            await self._app(scope, request.receive, request.send)
        except ApiError as refusal:
            await error_response(refusal)(scope, receive, request.send)
        finally:
            self._requests -= 1
            self.held_bytes -= request.held_bytes

    def _check(self, scope: Scope) -> None:
        """Raise `ApiError` for a request too many, a head too large, or other than one Host."""
        close = {"Connection": "close"}
        if self._requests > self.most_requests:
            text = f"the server answers {self.most_requests} requests, as many as it takes"
            full = overloaded(f"{text}; try again later")
            full.headers |= close
            raise full
        headers = scope["headers"]
        size = sum(len(name) + len(value) + 4 for name, value in headers)
        if size + len(scope["raw_path"]) + len(scope["query_string"]) > self.limits.head_bytes:
            raise head_too_large(self.limits)
        hosts = sum(name == b"host" for name, _ in headers)
        if hosts > 1 or (not hosts and scope["http_version"] == "1.1"):
            fault = "more than one Host header" if hosts else "no Host header"
            text = f"the request has {fault}; HTTP/1.1 requires one"
            raise ApiError(text, headers=close)


class _LimitedRequest:
    """One request: its `receive` and `send`."""

    def __init__(self, limited: Limited, scope: Scope, receive: Receive, send: Send) -> None:
        self.held_bytes = 0
        self._limited = limited
        self._receive = receive
        self._send = send
        self._body_bytes = 0
        self._body_is_whole = not any(name in FRAMING for name, _ in scope["headers"])
        timeout_s = limited.limits.body_timeout_s
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s

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
        self._body_bytes += len(message.get("body", b""))
        if self._body_bytes > SMALL_BYTES:
            self._hold(self._body_bytes - self.held_bytes)
        return message

    def _hold(self, size: int) -> None:
        """Count bytes that are in memory. Raises `ApiError` if there is no room for them."""
        limited = self._limited
        self.held_bytes += size
        limited.held_bytes += size
        if limited.held_bytes > limited.limits.held_bytes:
            mib = limited.held_bytes >> 20
            raise overloaded(f"the server holds {mib} MiB of requests; try again later")

    async def send(self, message: Message) -> None:
        """The `send` of ASGI. A large body leaves in pieces, each once the client has read on: a
        slow client has as long for each piece as one that does not read.
        """
        if message["type"] == "http.response.start":
            self._limited.on_status(str(message["status"]))
        body = message.get("body", b"")
        at = 0
        while len(body) - at > SMALL_BYTES:
            piece = body[at : at + SMALL_BYTES]
            at += SMALL_BYTES
            await self._send({**message, "body": piece, "more_body": True})
        last = {**message, "body": body[at:]} if at else message
        is_end = message["type"] == "http.response.body" and not message.get("more_body")
        if is_end and not self._body_is_whole:
            # A connection that closes while its client sends is reset, and the answer is lost.
            await self._send({**last, "more_body": True})
            await self._drop_body()
            last = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(last)

    async def _drop_body(self) -> None:
        """Wait for the rest of the body, for a short time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while not self._body_is_whole:
                    self._body_is_whole = not (await self._receive()).get("more_body", False)


def head_too_large(limits: WireLimits) -> ApiError:
    text = f"request line and headers are larger than {limits.head_bytes} bytes"
    return ApiError(text, status=431, headers={"Connection": "close"})
