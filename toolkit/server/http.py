"""uvicorn serves HTTP/1.1; what it leaves without a bound on a connection is bounded here.

That is the bytes and the time of a head, the time until a client reads on, and the number of
connections, of which those without a request give way. Errors have OpenAI's format. Requests are
bounded in `toolkit.server.limits`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from toolkit.errors import InputError
from toolkit.openai.errors import ApiError, error_body
from toolkit.server.limits import (
    DEFAULT_LIMITS,
    LINGER_S,
    Limited,
    WireLimits,
    excess,
    head_too_large,
)
from toolkit.server.process import BACKLOG

PEM_HINT = (
    "--ssl-certfile and --ssl-keyfile are PEM files; "
    "the certificate comes before those of its authorities"
)
POLL_S = 0.01
HANDSHAKE_S = 5.0  # of TLS, and of its end


class HttpServer:
    """An ASGI application on a listening socket. It gets only scopes of type `http`.

    Args:
        dated: whether responses have a Date; a proxy leaves it to the upstream server.
        certificate: a PEM file; with it the server speaks TLS.
        key: the file of its key; None: the certificate's.
        on_status: called with the status of each answer.

    Raises `InputError` for a certificate or a key that cannot be used.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: WireLimits = DEFAULT_LIMITS,
        *,
        dated: bool = True,
        certificate: Path | None = None,
        key: Path | None = None,
        on_status: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.app = Limited(app, limits, on_status)
        self._config = uvicorn.Config(
            self.app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=dated,
            timeout_keep_alive=limits.idle_timeout_s,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        try:
            self._config.load()
        except OSError as error:  # OpenSSL's, which names no file, is one as well
            files = " and ".join(str(file) for file in (certificate, key) if file)
            raise InputError(f"{files}: {error.strerror or error}", PEM_HINT) from None
        self._server = uvicorn.Server(self._config)
        self._listening: asyncio.Server | None = None
        self._dating: asyncio.Task[None] | None = None  # keeps the Date

    @property
    def connections(self) -> set[BoundedConnection]:
        return cast(set[BoundedConnection], self._server.server_state.connections)

    async def start(self, listener: socket.socket) -> None:
        """Accept connections from a bound `listener`."""
        self._server.lifespan = self._config.lifespan_class(self._config)
        await self._server.on_tick(0)
        # uvicorn's own call leaves a minute for a handshake: a silent client has a descriptor.
        tls: dict[str, Any] = {}
        if self._config.ssl:
            tls = {"ssl": self._config.ssl, "ssl_handshake_timeout": HANDSHAKE_S}
            tls["ssl_shutdown_timeout"] = HANDSHAKE_S
        self._listening = await asyncio.get_running_loop().create_server(
            lambda: BoundedConnection(self.app, self._config, self._server.server_state),
            sock=listener,
            backlog=BACKLOG,
            **tls,
        )
        self._dating = asyncio.create_task(self._server.main_loop())

    def close_listener(self) -> None:
        """Accept no more connections. Existing ones continue."""
        if self._listening is not None:
            self._listening.close()

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

    def __init__(self, limited: Limited, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config, state, app_state={})
        self._limits = limited.limits
        self._idle = cast("dict[BoundedConnection, None]", limited.idle)
        self._most_open = limited.most_requests + excess(limited.most_requests)
        self._in_head = False
        self._is_refused = False
        self._received = 0  # bytes since the packet in which the request began
        self._running: RequestResponseCycle | None = None  # the last that the application got
        # "head": of a head, or of a body that nothing waits for; "read": of the client's reading.
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection that waits longest without a request gives way to one too many. Some more
        are open than may have a request, so that those too many get an answer.
        """
        super().connection_made(cast(asyncio.Transport, transport))
        if len(self.connections) > self._most_open:
            next(iter(self._idle), self).abort()
        self._idle[self] = None
        self._start("head", self._limits.head_timeout_s, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_requests()
        super().connection_lost(exc)
        self._idle.pop(self, None)
        self.cycle = self._running = None  # type: ignore[assignment]
        self._unset_keepalive_if_required()
        self._stop("head", "read")

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return  # what comes is dropped, so that the answer arrives
        self._unset_keepalive_if_required()
        self._received += len(data)
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError as error:
            refusal = error.__context__  # what a callback raised
            invalid = ApiError("the request is not valid HTTP/1.1")
            self._refuse(refusal if isinstance(refusal, ApiError) else invalid)
            return
        limits = self._limits
        if self._in_head and self._received > limits.head_bytes:
            self._refuse(head_too_large(limits))
        elif self in self._idle and "head" not in self._timers:
            self._start("head", limits.head_timeout_s, self._late)

    def _parse(self, data: memoryview) -> None:
        """Feed the parser. Raises its errors; an `ApiError` of a callback is their context.

        Nothing but HTTP/1.1 is spoken, so `Upgrade` has no effect (RFC 9110, 7.8; Java's client
        sends it with its first request). Behind a head with it the parser would read the body as
        the next request. So another parser gets this head without it, and then the body.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as behind:
                data = data[behind.args[0] :]
            before = self.parser
            first = b"%b %b HTTP/%b" % (
                *(before.get_method(), self.url, before.get_http_version().encode()),
            )
            lines = [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(b"\r\n".join([first, *lines, b"", b""]))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._received = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer is dropped: none that is read here may be one (RFC 9110, 6.5)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ApiError("CONNECT is not served here", status=405)
            return  # the head comes again, to another parser
        self._in_head = False
        super().on_headers_complete()
        self._stop("head")
        self._idle.pop(self, None)

    def on_message_complete(self) -> None:
        if not self._in_head:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not (self.transport.is_closing() or self.pipeline):
            self._idle[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start("read", self._limits.write_timeout_s, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("read")

    def abort(self) -> None:
        """Close at once. Unsent bytes are lost."""
        self.connections.discard(self)
        self._idle.pop(self, None)
        self.transport.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _late(self) -> None:
        """A head, or the rest of a body that nothing waits for, did not come in time."""
        if self._in_head:
            text = f"the request's head did not come within {self._limits.head_timeout_s:g} s"
            self._refuse(ApiError(text, status=408))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer in place of the application, and close. Nothing is sent where the client would
        take it for a part of another answer, which has begun or is due first.
        """
        running = self._running
        if running is None:
            is_due = True
        elif running is self.cycle and running.more_body and not self._in_head:  # of its body
            is_due = not running.response_started
        else:
            is_due = running.response_complete
        if is_due:
            body = error_body(error)
            headers = {"content-type": "application/json", "content-length": str(len(body))}
            headers |= {"connection": "close", **error.headers}
            lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            self.transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        self._end_requests()
        self._is_refused = True
        self._idle[self] = None
        self._start("head", LINGER_S, self.transport.close)
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()
        else:
            self.transport.close()

    def _end_requests(self) -> None:
        """Tell the application that the client is gone. uvicorn tells the last request alone, which
        may wait behind the one that runs.
        """
        for cycle in (self._running, self.cycle):
            if cycle is not None:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()

    def _start(self, name: str, seconds: float, then: Callable[[], None]) -> None:
        self._stop(name)
        self._timers[name] = self.loop.call_later(seconds, then)

    def _stop(self, *names: str) -> None:
        for name in names:
            if timer := self._timers.pop(name, None):
                timer.cancel()
