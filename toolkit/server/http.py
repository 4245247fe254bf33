"""uvicorn serves HTTP/1.1 to the application.

What one client may use is bounded by a proxy in front (docs/how-to/expose.md). Here uvicorn bounds
the number of connections, and `BoundedConnection` the bytes and the time of a head. It also ends
what a proxy and uvicorn could understand differently: a wish to upgrade, trailers, and an error
while another answer is due.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from toolkit.openai.errors import ApiError, error_body

CONNECTIONS = 4096  # at once; with more, requests get 503
SPARE_DESCRIPTORS = 128  # of this process, for everything but connections
HEAD_BYTES = 1 << 16  # of the request line and all headers
NOT_HTTP = (
    f"the request is not valid HTTP/1.1, its head exceeds {HEAD_BYTES} bytes, or it asks for an "
    "upgrade to another protocol: set your client to HTTP/1.1"
)
REFUSED = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n"
)


def possible_connections(descriptors_each: int) -> int:
    """Ask for enough file descriptors. Return how many connections they are enough for, where each
    needs `descriptors_each`: 2 with one to an upstream server.
    """
    wanted = CONNECTIONS * descriptors_each + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < possible:
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    return max((possible - SPARE_DESCRIPTORS) // descriptors_each, 1)


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection, with bounds of a head. uvicorn's own timer runs from the connection on
    until a head is there, and between requests.

    Nothing but HTTP/1.1 is spoken. A wish to upgrade is refused: the parser would take the body for
    the next request.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._in_head = False
        self._received = 0  # bytes since the packet in which the request began

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self.cycle = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._received += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._refuse()
            return
        if self._in_head and self._received > HEAD_BYTES:
            self._refuse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._received = 0
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer is dropped: none that is read here may be one (RFC 9110, 6.5)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size + len(self.url) > HEAD_BYTES or self.parser.should_upgrade():
            raise httptools.HttpParserError
        self._in_head = False
        self._unset_keepalive_if_required()
        super().on_headers_complete()

    def _await_head(self) -> None:
        """Close the connection if no whole head comes in time."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _refuse(self) -> None:
        """Close, with an answer where it is no part of another one, which has begun or is due."""
        last = self.cycle
        reads_body = last is not None and last.more_body and not self.pipeline
        if (
            last is None
            or last.response_complete
            or (reads_body and not self._in_head and not last.response_started)
        ):
            body = error_body(ApiError(NOT_HTTP))
            self.transport.write(REFUSED % len(body) + body)
        self.transport.close()
