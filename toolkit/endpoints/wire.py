"""One HTTP/1.1 connection to a server: requests go out as bytes, answers come back in pieces as they arrive.

An asyncio protocol over httptools' parser, for what stands between a client and its server: with httpx and h11 an event
of a stream cost 130 us of CPU (`bench/record_proxy.py`). Pieces that come before the last one was read merge, and a
server is not read from while more of its answer is held than `MAX_HELD_BYTES`. It decodes nothing and follows nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import httptools

MAX_HELD_BYTES = 1 << 18
MAX_HEAD_BYTES = 1 << 18
RawHeaders = list[tuple[bytes, bytes]]


class WireError(Exception):
    """The answer did not come, or not to its end. `timed_out`: the server was silent."""

    def __init__(self, *, timed_out: bool = False) -> None:
        super().__init__()
        self.timed_out = timed_out


class Link(asyncio.Protocol):
    """A connection. It is asked one request at a time; `reusable` says whether it may be asked another."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: RawHeaders = []
        self.idle_since_s = 0.0
        self.heard = False  # anything, since it was asked
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._news = asyncio.Event()
        self._pieces: list[bytes] = []  # of the body, that nobody has read
        self._held_bytes = 0
        self._head_bytes = 0
        self._bodyless = False
        self._has_head = False
        self._ends_with_connection = True
        self._complete = False
        self._kept = False  # the server keeps the connection after this answer
        self._closed = False

    @property
    def reusable(self) -> bool:
        return self._complete and self._kept and not self._closed

    async def ask(self, request: bytes, silence_s: float, *, bodyless: bool) -> None:
        """Send a request, and wait for the head of its answer; `bodyless`: it is a HEAD. `WireError`: none came."""
        self.status, self.headers, self._pieces, self._held_bytes, self._head_bytes = 0, [], [], 0, 0
        self.heard = self._has_head = self._complete = self._kept = False
        self._ends_with_connection, self._bodyless = True, bodyless
        if self._transport is None or self._closed:
            raise WireError
        self._transport.write(request)
        while not self._has_head:
            await self._wait(silence_s)

    async def body(self, silence_s: float) -> AsyncIterator[bytes]:
        """What comes, all of it that is there at once. `WireError` where the rest does not come."""
        while True:
            if self._pieces:
                piece = b"".join(self._pieces)
                self._pieces.clear()
                if self._held_bytes > MAX_HELD_BYTES and self._transport is not None and not self._closed:
                    self._transport.resume_reading()
                self._held_bytes = 0
                yield piece
            elif self._complete:
                return
            else:
                await self._wait(silence_s)

    def close(self) -> None:
        """At once: the server notices, and stops."""
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self, silence_s: float) -> None:
        """For anything to come."""
        if self._closed:
            raise WireError
        self._news.clear()
        try:
            async with asyncio.timeout(silence_s):
                await self._news.wait()
        except TimeoutError:
            raise WireError(timed_out=True) from None

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class is no subclass of it

    def data_received(self, data: bytes) -> None:
        if self._complete:  # nobody has asked
            self.close()
            return
        self.heard = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.close()
        self._head_bytes += 0 if self._has_head else len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.close()
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        if self._has_head and self._ends_with_connection and exc is None:
            self._complete = True
        self._news.set()

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:  # it goes on
            return
        self._has_head = True
        if self._bodyless:  # the parser does not know, and would wait for a body; so the connection is not kept
            self._complete = True

    def on_body(self, body: bytes) -> None:
        if self._bodyless:
            return
        self._pieces.append(body)
        before, self._held_bytes = self._held_bytes, self._held_bytes + len(body)
        if before <= MAX_HELD_BYTES < self._held_bytes and self._transport is not None:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if not self._has_head:
            self.headers = []
            return
        self._complete = True
        self._kept = not self._bodyless and self._parser.should_keep_alive()
