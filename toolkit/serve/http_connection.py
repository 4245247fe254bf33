"""One connection of the HTTP server: its phases and timers, and the order of its responses.

`Connection` stands between a transport, a `RequestParser` and the exchanges with the application.
In every phase a timer bounds what it waits for:

    phase       what it waits for                  ends with
    idle        a request to begin                 the connection closed, after `idle_timeout_s`
    head        the rest of a request's head       408, after `head_timeout_s`
    body        the rest of a request's body       408, after `body_timeout_s`
    answering   the application                    the application's own deadlines
    closing     the client to close its side       the connection aborted, after `linger_timeout_s`

In every phase a connection is aborted if its client leaves a response unread for `write_timeout_s`.

Responses leave in the order of their requests. Requests that arrive meanwhile are parsed and wait.
Input that cannot be parsed gets its error after all earlier responses; then the connection closes.

A client that half-closes its connection after a whole request (`shutdown(SHUT_WR)`) gets its
response. A client that has closed both sides looks the same until the server writes something: then
the client's machine resets the connection. To tell the two apart, the server writes bytes that do
not change the response: `100 Continue` before it, or within a chunked response a zero, which
becomes the first digit of the next chunk's size. Over TLS the end of one side ends both.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote

import httptools

from toolkit.serve.errors import ApiError
from toolkit.serve.http_messages import (
    Headers,
    HttpExchange,
    RequestParser,
    RequestRefusedError,
    error_message,
)

if TYPE_CHECKING:
    from toolkit.serve.http import HttpServer, Share

MAX_PIPELINED_REQUESTS = 16  # behind the one that is being answered
SMALL_BODY_BYTES = 1 << 16  # a body up to this size is accepted however much the server holds
MIN_READ_BYTES = 1 << 15  # a client must read this much, or all, within `write_timeout_s`
READ_PAUSE_BYTES = 1 << 16  # after this much at once other connections are served first
PROBE_AFTER_S = 0.05  # a response that begins by then has no `100 Continue` before it
RESET_WAIT_S = 0.01  # for a reset to arrive after a probe; the sweep sees later ones

_TCP_CLOSE = 7  # a state in TCP_INFO


class Connection(asyncio.Protocol):
    """One client's connection: the callbacks of its transport, its parser and its exchanges."""

    transport: asyncio.Transport

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self.shares: tuple[Share, ...] = (server.total,)  # these bound this connection
        self.writable = asyncio.Event()
        self.writable.set()
        self._loop = loop
        self._limits = server.limits
        self._parser = RequestParser(self, server.limits)
        self._parses = True  # False: further input is dropped
        self._input_left = False  # the client may still be sending
        self._receiving: HttpExchange | None = None  # its body is being read
        self._answering: HttpExchange | None = None  # its response is being made
        self._queue: deque[HttpExchange] = deque()  # pipelined requests
        self._final_error: ApiError | None = None  # the response to bad input, after all others
        self._half_closed = False  # the client has ended its side
        self._closing = False
        self._deadline_s = 0.0  # of the current phase, if it has one
        self._written_bytes = 0

    # The transport calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        self._peer = _address(transport, "peername")
        self._local = _address(transport, "sockname")
        self._progress = 0, self.server.now_s()  # bytes that the client had read, and when
        refusal = self.server.admit(self, self._peer[0] if self._peer else "")
        if refusal:
            self.transport.write(error_message(refusal, self.server.common_headers))
            self.transport.close()
            self._parses = False
            self._loop.call_later(PROBE_AFTER_S, self.transport.abort)
            return
        self._wait_idle(self._limits.head_timeout_s)

    def connection_lost(self, _: Exception | None) -> None:
        self.server.remove(self)
        self._closing = True
        self._parses = False
        for exchange in (self._answering, self._receiving, *self._queue):
            if exchange:
                exchange.abandon()
        self._queue.clear()
        self._answering = self._receiving = None
        self._parser.close()
        self.writable.set()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        if not self._parses:
            self._input_left = True
            return
        try:
            self._parser.feed(data)
        except RequestRefusedError as refused:
            self._stop_reading(refused.error)
            return
        if len(data) >= READ_PAUSE_BYTES and not self.transport.is_closing():
            self.transport.pause_reading()
            self._loop.call_soon(self._resume_reading)

    def _resume_reading(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def eof_received(self) -> bool:
        """Returns whether the transport stays open, for responses that are still to come."""
        if self._scheme == "https":
            return False
        self._half_closed = True
        if self._parses and (self._receiving or self._parser.in_head):
            part = "body" if self._receiving else "head"
            self._stop_reading(ApiError(f"the {part} ended early"))
        self._parses = False
        if self._answering is None or self._closing:
            self.transport.close()
            return False
        self._loop.call_later(0.0 if self._answering.started else PROBE_AFTER_S, self._probe)
        return True

    # The parser calls these.

    def head_begun(self) -> None:
        self._deadline_s = self.server.now_s() + self._limits.head_timeout_s
        self.server.idle.pop(self, None)
        if self._answering is None:
            self.server.heads[self] = None

    def head_complete(
        self, method: str, version: str, url: bytes, headers: Headers, *, keep_alive: bool
    ) -> None:
        self.server.heads.pop(self, None)
        parts = httptools.parse_url(url)
        raw_path: bytes = parts.path or b"/"
        path = raw_path.decode("ascii")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": method,
            "scheme": self._scheme,
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": parts.query or b"",
            "root_path": "",
            "headers": headers,
            "client": self._peer,
            "server": self._local,
        }
        exchange = HttpExchange(self, scope, keep_alive=keep_alive)
        self._receiving = exchange
        self._deadline_s = self.server.now_s() + self._limits.body_timeout_s
        if self._answering is None:
            self._start(exchange)
        elif len(self._queue) < MAX_PIPELINED_REQUESTS:
            self._queue.append(exchange)
        else:
            self._receiving = None
            raise RequestRefusedError(None)

    def body_received(self, piece: bytes) -> None:
        if (exchange := self._receiving) is None:
            return
        exchange.add_body(piece)
        if exchange.body_bytes > self._limits.body_bytes:
            raise self._parser.body_too_large()
        small = exchange.body_bytes <= SMALL_BODY_BYTES
        if exchange is self._answering:
            if not small:
                self.server.check_held(self)
        elif exchange in self._queue and (
            not small or self.server.total.held_bytes > self._limits.held_bytes
        ):
            # Drop a pipelined request that holds too much: its client may send it again.
            self._queue.remove(exchange)
            self._receiving = None
            exchange.abandon()
            raise RequestRefusedError(None)

    def body_complete(self) -> None:
        exchange = self._receiving
        self._receiving = None
        if exchange is None:
            return
        exchange.end_body()
        if not exchange.keep_alive:
            self._parses = False  # no later request gets a response

    # Exchanges call these.

    def write(self, data: bytes) -> None:
        self._written_bytes += len(data)
        self.transport.write(data)
        if len(data) > SMALL_BODY_BYTES:
            self.count_unread(len(data))
            if self.server.total.unread_bytes > self._limits.held_bytes:
                self.server.sweep()

    def count_unread(self, size: int) -> None:
        """Count bytes of responses that the client has not read."""
        for share in self.shares:
            share.unread_bytes += size

    def count_body(self, size: int) -> None:
        """Count bytes of bodies in memory; negative: they are gone."""
        for share in self.shares:
            share.body_bytes += size

    def unread_bytes(self) -> int:
        """Bytes of responses in this process that the client has not read."""
        return self.transport.get_write_buffer_size()

    def response_complete(self, exchange: HttpExchange) -> None:
        """All of a response was written: continue with the next request."""
        self._answering = None
        if not exchange.keep_alive or self.server.leaving or self.transport.is_closing():
            self._close()
        elif self._queue:
            self._start(self._queue.popleft())
        elif self._final_error:
            self._answer_and_close(self._final_error)
        elif not self._parses or self._half_closed:
            self._close()
        elif self._parser.in_head:
            self.server.heads[self] = None
        else:
            self._wait_idle(self._limits.idle_timeout_s)

    def response_missing(self, exchange: HttpExchange) -> None:
        """The application returned or raised without a whole response."""
        if exchange.started:
            self._close()  # so the client sees that the response is not whole
        else:
            self._take_over(exchange, ApiError("internal error", status=500))

    # Phases

    def _wait_idle(self, timeout_s: float) -> None:
        self._deadline_s = self.server.now_s() + timeout_s
        self.server.idle[self] = None

    def _start(self, exchange: HttpExchange) -> None:
        self._answering = exchange
        self.server.idle.pop(self, None)
        if exchange.refusal:
            self._take_over(exchange, exchange.refusal)
            return
        task = self._loop.create_task(exchange.run())
        self.server.tasks.add(task)
        task.add_done_callback(self.server.tasks.discard)

    def _stop_reading(self, error: ApiError | None) -> None:
        """Drop further input. `error` is the response to what was being read, if there is one."""
        exchange = self._receiving
        self._receiving = None
        self._parses = self._parser.in_head = False
        self._input_left = not self._half_closed
        self.server.heads.pop(self, None)
        if error is None:
            return
        if exchange is None:
            self._final_error = error
            if self._answering is None:
                self._answer_and_close(error)
        elif exchange is self._answering:
            self._take_over(exchange, error)
        elif exchange in self._queue:
            exchange.refusal = error
        else:  # its response was complete before its body
            self._close()

    def _take_over(self, exchange: HttpExchange, error: ApiError) -> None:
        """Answer in place of the application, unless its response has begun."""
        exchange.abandon()
        if exchange.started:
            self._close()
        else:
            self._answer_and_close(error)

    def _answer_and_close(self, error: ApiError) -> None:
        if not self._closing and not self.transport.is_closing():
            self.write(error_message(error, self.server.common_headers))
            self._close()

    def _close(self) -> None:
        """Close when everything written has been sent.

        A client that is still sending would lose its response to a reset. So this side is
        half-closed first.
        """
        if self._closing:
            return
        self._closing = True
        self.server.idle.pop(self, None)
        self.server.heads.pop(self, None)
        self._deadline_s = self.server.now_s() + self._limits.linger_timeout_s
        sending = not self._half_closed and (self._receiving is not None or self._input_left)
        self._parses = False
        self._receiving = None
        if sending and not self.transport.is_closing() and self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def leave(self) -> None:
        """The server ends: finish the running response, and start no other."""
        if self._answering is None:
            self._close()

    def abort(self) -> None:
        """Close at once. Unsent bytes are lost, also those in the system's buffers."""
        self.server.remove(self)
        with suppress(OSError, AttributeError):
            sock: socket.socket = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    # Timers

    def check(self, now_s: float) -> int:
        """Apply timers that have run out. Returns the bytes that the client has not read."""
        unread = self.unread_bytes()
        read, since_s = self._progress
        if not unread or self._written_bytes - unread >= read + MIN_READ_BYTES:
            self._progress = (self._written_bytes - unread, now_s)
        elif now_s - since_s > self._limits.write_timeout_s:
            self.abort()
            return 0
        if self._half_closed and self._answering:
            self._abort_if_gone()
        late = now_s > self._deadline_s
        if self._closing:
            if unread:
                self._deadline_s = now_s + self._limits.linger_timeout_s
            elif late:
                self.abort()
        elif late and self._receiving:
            text = f"the body did not come within {self._limits.body_timeout_s:g} s"
            self._stop_reading(ApiError(text, status=408))
        elif late and self._parser.in_head:
            text = f"the request's head did not come within {self._limits.head_timeout_s:g} s"
            self._stop_reading(ApiError(text, status=408))
        elif late and not self._answering:
            self._close()
        return unread

    def _probe(self) -> None:
        """Write bytes that change nothing: the machine of a client that is gone resets."""
        if self._answering is None or self._closing or self.transport.is_closing():
            return
        self._answering.probe()
        self._loop.call_later(RESET_WAIT_S, self._abort_if_gone)

    def _abort_if_gone(self) -> None:
        has_state = hasattr(socket, "TCP_INFO")
        if self._answering is None or self.transport.is_closing() or not has_state:
            return
        with suppress(OSError):
            sock: socket.socket = self.transport.get_extra_info("socket")
            if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
                self.abort()


def _address(transport: asyncio.BaseTransport, which: str) -> tuple[str, int] | None:
    address = transport.get_extra_info(which)
    return address[:2] if isinstance(address, tuple) and len(address) >= 2 else None
