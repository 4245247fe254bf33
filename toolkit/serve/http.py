"""HTTP on the wire: uvicorn's protocol, with bounds on what comes before a body and errors in the API's words.

uvicorn bounds no header, answers what it cannot parse in plain text, and loses the body of a request that would rather
speak HTTP/2. What is left to it: everything that works.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from toolkit.serve.errors import ApiError, error_body

MAX_HEAD_BYTES = 1 << 16  # of the request line and all headers, and of trailers
MAX_MESSAGE_BYTES = 1 << 26  # with the frames of chunks: bodies have a smaller limit of their own
HEAD_TIMEOUT_S = 60.0  # for a head to come, from its first byte or the connection's begin

_NOT_HTTP = ApiError("this is not HTTP/1.1 as this server reads it")


class _TooLongError(Exception):
    """A head is longer than it may be."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._reading_head = True
        self._message_bytes = 0
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As uvicorn's, but that errors are answered in JSON, and floods end."""
        self._unset_keepalive_if_required()
        self._message_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._refuse(_too_long() if isinstance(error.__context__, _TooLongError) else _NOT_HTTP)
            return
        if self._reading_head and self._message_bytes > MAX_HEAD_BYTES:
            self._refuse(_too_long())
        elif self._message_bytes > MAX_MESSAGE_BYTES:
            self._refuse(ApiError(f"the request is larger than {MAX_MESSAGE_BYTES} bytes", status=413))

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(head + data[upgrade.args[0] :])

    def _head_without_upgrade(self) -> bytes:
        """A server may ignore that a client would upgrade, and the parser stops there: it reads the rest once more."""
        kept = [
            name + b": " + (_without_upgrade(value) if name == b"connection" else value)
            for name, value in self.headers
            if name != b"upgrade"
        ]
        return b"\r\n".join([b"%s %s HTTP/1.1" % (self.parser.get_method(), self.url), *kept, b"\r\n"])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading_head = True
        self._head_bytes = 0
        self._arm()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        self._disarm()
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("this is no proxy")
            return
        self._reading_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.parser.should_upgrade():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._reading_head = True
        self._message_bytes = 0
        super().on_message_complete()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _TooLongError

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if not self._message_bytes:  # nothing was asked
            self.transport.close()
        self._refuse(ApiError(f"the request's head did not come within {HEAD_TIMEOUT_S:g} s", status=408))

    def _refuse(self, error: ApiError) -> None:
        """Answer, unless an answer is under way already, and close."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body, status = error_body(error), HTTPStatus(error.status)
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode("ascii") + body)
        self.transport.close()


def _without_upgrade(connection: bytes) -> bytes:
    return b", ".join(token for token in connection.split(b",") if token.strip().lower() != b"upgrade")


def _too_long() -> ApiError:
    return ApiError(f"request line and headers are larger than {MAX_HEAD_BYTES} bytes", status=431)
