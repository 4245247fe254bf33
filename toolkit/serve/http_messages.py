"""HTTP/1.1 messages: parse requests, and frame the responses of an ASGI application.

llhttp (through httptools) parses; the bounds on sizes are here.
"""

from __future__ import annotations

import asyncio
import logging
import re
from http import HTTPStatus
from typing import TYPE_CHECKING

import httptools
from starlette.types import Message, Scope

from toolkit.serve.errors import RETRY_AFTER_S, ApiError, error_body

if TYPE_CHECKING:
    from toolkit.serve.http import WireLimits
    from toolkit.serve.http_connection import Connection

MAX_FRAMING_FACTOR = 8  # a body in chunks of one byte takes six bytes for each

Headers = list[tuple[bytes, bytes]]  # names in lower case

_NOT_HTTP = "the request is not valid HTTP/1.1"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_HEADER_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(rb"[^\x00-\x08\x0a-\x1f\x7f]*")
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode("ascii")
    for status in HTTPStatus
}
_logger = logging.getLogger(__name__)


class RequestRefusedError(Exception):
    """A request that is not read further. `error` is the response; None: there is no response."""

    def __init__(self, error: ApiError | None) -> None:
        super().__init__()
        self.error = error


class RequestParser:
    """Parses the requests of one connection, within bounds on the sizes of head and body.

    It does no I/O: its connection feeds it bytes, and gets each request's parts by the methods
    `head_begun`, `head_complete`, `body_received` and `body_complete`, which may raise
    `RequestRefusedError`.
    """

    def __init__(self, connection: Connection, limits: WireLimits) -> None:
        self.in_head = False
        self._connection = connection
        self._limits = limits
        self._parser = httptools.HttpRequestParser(self)
        self._raw_bytes = 0  # of the current request, including framing
        self._head_bytes = 0
        self._url = b""
        self._headers: Headers = []

    def feed(self, data: bytes) -> None:
        """Parse more bytes. Raises `RequestRefusedError` for a request that cannot be read further.

        The parser stops at a request to upgrade to another protocol. A server may ignore that wish:
        the head is parsed once more without it, and then the rest of the data.
        """
        self._raw_bytes += len(data)
        try:
            while True:
                try:
                    self._parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    data = self._head_without_upgrade() + data[upgrade.args[0] :]
                    self._parser = httptools.HttpRequestParser(self)
        except httptools.HttpParserError as error:
            cause = error.__context__  # what a callback raised
            refused = cause if isinstance(cause, RequestRefusedError) else None
            raise refused or RequestRefusedError(ApiError(_NOT_HTTP)) from None
        limits = self._limits
        if self.in_head and self._raw_bytes > limits.head_bytes:
            raise self._head_too_large()
        if self._raw_bytes > MAX_FRAMING_FACTOR * (limits.body_bytes + limits.head_bytes):
            raise self.body_too_large()

    def close(self) -> None:
        """Forget the connection; no more bytes may be fed.

        Otherwise connection and parser refer to each other, and a closed connection stays in memory
        until the garbage collector finds it, at a moment when streams wait for it.
        """
        del self._parser, self._connection

    def body_too_large(self) -> RequestRefusedError:
        text = f"the body is larger than {self._limits.body_bytes} bytes"
        return RequestRefusedError(ApiError(text, status=413))

    def _head_too_large(self) -> RequestRefusedError:
        text = f"request line and headers are larger than {self._limits.head_bytes} bytes"
        return RequestRefusedError(ApiError(text, status=431))

    def _head_without_upgrade(self) -> bytes:
        parser = self._parser
        version = parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (parser.get_method(), self._url, version)]
        for name, value in self._headers:
            if name == b"connection":
                tokens = value.split(b",")
                value = b", ".join(token for token in tokens if token.strip().lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"\r\n"])

    # httptools calls these.

    def on_message_begin(self) -> None:
        if not self.in_head:  # otherwise a head is parsed once more
            self._raw_bytes = 0
            self._connection.head_begun()
        self.in_head = True
        self._head_bytes = 0
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        # Fields of a trailer are dropped: none that this server reads may be in it (RFC 9110,
        # section 6.5.1).
        if self.in_head:
            name = name.lower()
            self._headers.append((name, value.lower() if name == b"expect" else value))

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._limits.head_bytes:
            raise self._head_too_large()

    def on_headers_complete(self) -> None:
        parser = self._parser
        method = parser.get_method()
        version = parser.get_http_version()
        if parser.should_upgrade():
            if method == b"CONNECT":
                raise RequestRefusedError(ApiError("this server is not a proxy"))
            return
        self.in_head = False
        if version not in ("1.1", "1.0"):
            raise RequestRefusedError(ApiError(f"HTTP/{version} is not supported; use HTTP/1.1"))
        hosts = sum(name == b"host" for name, _ in self._headers)
        if hosts > 1 or (not hosts and version == "1.1"):
            fault = "more than one Host header" if hosts else "no Host header"
            raise RequestRefusedError(ApiError(f"the request has {fault}; HTTP/1.1 requires one"))
        # HTTP/1.0 connections are not kept alive.
        keep_alive = version == "1.1" and parser.should_keep_alive()
        self._connection.head_complete(
            method.decode("ascii"), version, self._url, self._headers, keep_alive=keep_alive
        )

    def on_body(self, body: bytes) -> None:
        self._connection.body_received(body)

    def on_message_complete(self) -> None:
        if not self._parser.should_upgrade():
            self._raw_bytes = 0
            self._connection.body_complete()


class HttpExchange:
    """One request and its response: gives the application the body, and frames what it sends."""

    def __init__(self, connection: Connection, scope: Scope, *, keep_alive: bool) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.refusal: ApiError | None = None  # the response, if the application is not asked
        self.started = False  # the head of the response was written
        self.complete = False  # all of the response was written
        self.body_bytes = 0  # of the request, received so far
        self._connection = connection
        self._chunkable = scope["http_version"] == "1.1"  # 1.0 has no chunks and no 100 Continue
        self._body = bytearray()  # not yet given to the application
        self._body_complete = False
        self._end_delivered = False  # the application got the end of the body
        self._abandoned = False
        self._running = False  # the application has it, and with it the body
        self._changed = asyncio.Event()
        self._expects_100 = (b"expect", b"100-continue") in scope["headers"]
        self._chunked = False
        self._bodiless = scope["method"] == "HEAD"
        self._left_bytes: int | None = None  # of the response's Content-Length

    async def run(self) -> None:
        """Run the application."""
        self._running = True
        try:
            await self._connection.server.app(self.scope, self.receive, self.send)
        except Exception as error:  # a bug in one request must not end other connections
            _logger.error("exception in the application", exc_info=error)
        finally:
            self._running = False
            self._release_body()
            if not self.complete and not self._abandoned:
                self._connection.response_missing(self)

    def add_body(self, piece: bytes) -> None:
        if self.complete or self._abandoned:
            return
        self.body_bytes += len(piece)
        self._connection.count_body(len(piece))
        self._body += piece
        self._changed.set()

    def end_body(self) -> None:
        self._body_complete = True
        self._changed.set()

    def probe(self) -> None:
        """Write bytes that do not change the response, if there are any at this point."""
        if self._chunkable and not self.started:
            self._connection.write(_CONTINUE)
        elif self._chunked:
            self._connection.write(b"0")  # the first digit of the next chunk's size

    def abandon(self) -> None:
        """The client is gone, or gets another response. The application sees a disconnect."""
        self._abandoned = True
        self._changed.set()
        if not self._running:
            self._release_body()

    def _release_body(self) -> None:
        self._connection.count_body(-self.body_bytes)
        self.body_bytes = 0
        self._body = bytearray()

    async def receive(self) -> Message:
        """The `receive` of ASGI."""
        if self._expects_100 and not (self.started or self._abandoned or self._body_complete):
            self._connection.write(_CONTINUE)
        self._expects_100 = False
        while not (self.complete or self._abandoned):
            if not self._end_delivered and (self._body or self._body_complete):
                body = bytes(self._body)
                self._body = bytearray()
                self._end_delivered = self._body_complete
                return {"type": "http.request", "body": body, "more_body": not self._body_complete}
            self._changed.clear()
            await self._changed.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """The `send` of ASGI. Messages for a client that is gone are dropped."""
        writable = self._connection.writable
        if not writable.is_set() and not self._abandoned:
            await writable.wait()
        if self._abandoned:
            return
        if not self.started:
            self._send_head(message)
        elif not self.complete:
            self._send_body(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"{message['type']} after the end of the response")

    def _send_head(self, message: Message) -> None:
        if message["type"] != "http.response.start":
            raise RuntimeError(f"{message['type']} before http.response.start")
        server = self._connection.server
        status = message["status"]
        closes = False
        lines = [_status_line(status), server.common_headers]
        for name, value in message.get("headers", ()):
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                raise RuntimeError(f"not a header: {name[:80]!r}")
            lower = name.lower()
            if lower == b"transfer-encoding":  # this hop chooses it
                continue
            if lower == b"connection":
                closes = b"close" in [token.strip() for token in value.lower().split(b",")]
                if not closes:
                    continue
            elif lower == b"content-length":
                self._left_bytes = int(value)
            lines += (name, b": ", value, b"\r\n")
        if not self._body_complete:  # the client has to learn that it may stop sending
            self.keep_alive = False
        self._bodiless = self._bodiless or status in (204, 304)
        if self._left_bytes is None and not self._bodiless:
            if self._chunkable:
                self._chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
            else:
                self.keep_alive = False
        self.keep_alive = self.keep_alive and not closes and not server.leaving
        if not self.keep_alive and not closes:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self.started = True
        self._connection.write(b"".join(lines))

    def _send_body(self, body: bytes, *, more: bool) -> None:
        if self._chunked:
            framed = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self._connection.write(framed if more else framed + b"0\r\n\r\n")
        elif not self._bodiless:
            if self._left_bytes is not None:
                self._left_bytes -= len(body)
                if self._left_bytes < 0 or (self._left_bytes and not more):
                    raise RuntimeError("the body is not as long as its Content-Length")
            if body:
                self._connection.write(body)
        if not more:
            self.complete = True
            self._body = bytearray()
            self._changed.set()
            self._connection.response_complete(self)


def over_share(text: str) -> ApiError:
    """The error for a request that exceeds one client's share."""
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return ApiError(text, status=429, code="client_share", headers=headers)


def error_message(error: ApiError, common_headers: bytes) -> bytes:
    """A whole response with an error, after which the connection closes."""
    body = error_body(error)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers | error.headers).items())
    return _status_line(error.status) + common_headers + lines.encode("ascii") + b"\r\n" + body


def _status_line(status: int) -> bytes:
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
