"""uvicorn serves HTTP/1.1; what it leaves without a bound on a connection is bounded here.

That is the bytes and the time of a head, the time until a client reads on, and the number of
connections, of which those without a request give way. Errors have OpenAI's format. Requests are
bounded in `toolkit.serve.limits`.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from toolkit.serve.errors import ApiError, error_body, overloaded
from toolkit.serve.limits import (
    DEFAULT_LIMITS,
    Limited,
    WireLimits,
    head_too_large,
    possible_connections,
)

BACKLOG = 2048  # connections that wait to be accepted
POLL_S = 0.01
UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
NO_UPGRADE = b"\r\nproxy-connection:"  # has no meaning here
MAX_FRAMING_FACTOR = 8  # a body in chunks of one byte takes six bytes for each


class HttpServer:
    """An ASGI application on a listening socket. It gets only scopes of type `http`.

    Attributes:
        waiting: connections without a request, the longest waiting first.

    Args:
        dated: whether responses have a Date; a proxy leaves it to the upstream server.
        options: those of `Limited`.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: WireLimits = DEFAULT_LIMITS,
        *,
        dated: bool = True,
        **options: Callable[[str], Any],
    ) -> None:
        self.limits = limits
        self.waiting: dict[BoundedConnection, None] = {}
        self._most_connections = possible_connections(limits)
        self.app = Limited(app, limits, self._most_connections, **options)
        self._config = uvicorn.Config(
            self.app,
            http=cast(type[asyncio.Protocol], partial(BoundedConnection, self)),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=dated,
            backlog=BACKLOG,
            timeout_keep_alive=limits.idle_timeout_s,
        )
        self._server = uvicorn.Server(self._config)
        self._dating: asyncio.Task[None] | None = None  # keeps the Date

    @property
    def connections(self) -> set[BoundedConnection]:
        return cast(set[BoundedConnection], self._server.server_state.connections)

    def enter(self, new: BoundedConnection) -> ApiError | None:
        """Make room for a new connection: those that wait give way. An error if none does."""
        while len(self.connections) > self._most_connections:
            if not self.waiting:
                text = f"the server has {self._most_connections} connections, as many as it takes"
                return overloaded(f"{text}; try again later")
            next(iter(self.waiting)).abort()
        self.waiting[new] = None
        return None

    async def start(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Accept connections from a bound `listener`, with TLS if `tls` is given."""
        self._config.load()
        self._config.ssl = tls
        self._server.lifespan = self._config.lifespan_class(self._config)
        await self._server.on_tick(0)
        await self._server.startup(sockets=[listener])
        self._dating = asyncio.create_task(self._server.main_loop())

    def close_listener(self) -> None:
        """Accept no more connections. Existing ones continue."""
        for server in self._server.servers if self._server.started else ():
            server.close()

    async def stop(self, timeout_s: float) -> None:
        """Close idle connections, wait `timeout_s` for running responses, and abort the rest."""
        self.close_listener()
        for connection in list(self.connections):
            connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.connections:
                    await asyncio.sleep(POLL_S)
        for connection in list(self.connections):
            connection.abort()
        tasks = [*self._server.server_state.tasks, *([self._dating] if self._dating else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection, with bounds."""

    def __init__(self, server: HttpServer, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._limits = server.limits
        self._server = server
        self._in_head = False
        self._is_refused = False  # what still comes is dropped, so that its answer arrives
        self._received = 0  # bytes since the packet in which the request began
        # "head": of a head, or of a body that nothing waits for; "read": of the client's reading.
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._start("head", self._limits.head_timeout_s, self._late)
        if full := self._server.enter(self):
            self._refuse(full)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._server.waiting.pop(self, None)
        self._unset_keepalive_if_required()
        self._stop("head", "read")

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if b"pgrade" in data and self in self._server.waiting:
            # Java's client asks for h2c with each request, and uvicorn would lose the body.
            head, end, rest = data.partition(b"\r\n\r\n")
            data = UPGRADE.sub(NO_UPGRADE, head) + end + rest
        self._received += len(data)
        super().data_received(data)
        limits = self._limits
        if self.transport.is_closing():
            return
        if self._in_head and self._received > limits.head_bytes:
            self._refuse(head_too_large(limits))
        elif self._received > MAX_FRAMING_FACTOR * (limits.body_bytes + limits.head_bytes):
            self._refuse(ApiError(f"the body is larger than {limits.body_bytes} bytes", status=413))
        elif self in self._server.waiting and "head" not in self._timers:
            self._start("head", limits.head_timeout_s, self._late)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._received = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer is dropped: none that is read here may be one (RFC 9110, 6.5)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
        self._stop("head")
        self._server.waiting.pop(self, None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not (self.transport.is_closing() or self.pipeline):
            self._server.waiting[self] = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError("the request is not valid HTTP/1.1"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start("read", self._limits.write_timeout_s, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("read")

    def abort(self) -> None:
        """Close at once. Unsent bytes are lost."""
        self.connections.discard(self)
        self._server.waiting.pop(self, None)
        self.transport.abort()

    def _late(self) -> None:
        """A head, or the rest of a body that nothing waits for, did not come in time."""
        if self._in_head:
            text = f"the request's head did not come within {self._limits.head_timeout_s:g} s"
            self._refuse(ApiError(text, status=408))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer in place of the application, unless its response has begun; and close."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = error_body(error)
            headers = {"content-type": "application/json", "content-length": str(len(body))}
            headers |= {"connection": "close", **error.headers}
            lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            self.transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        self.pipeline.clear()
        self._is_refused = True
        self._start("head", self._limits.linger_timeout_s, self.transport.close)
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()
        else:
            self.transport.close()

    def _start(self, name: str, seconds: float, then: Callable[[], None]) -> None:
        self._stop(name)
        self._timers[name] = self.loop.call_later(seconds, then)

    def _stop(self, *names: str) -> None:
        for name in names:
            if timer := self._timers.pop(name, None):
                timer.cancel()
