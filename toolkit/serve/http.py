"""HTTP/1.1 on the wire: connections with a timer and a byte bound in every phase, in front of an
ASGI application.

The server of `llmctl serve` and the recorder of `llmctl trace record` share it. uvicorn listens,
llhttp (through
httptools) parses; everything that bounds a client is here:

    phase       what it waits for                  ends with
    idle        a request to begin                 the connection closed, after `idle_timeout_s`
    head        the rest of a request's head       408, after `head_timeout_s`
    body        the rest of a request's body       408, after `body_timeout_s`
    answering   the application                    the application's own deadlines
    closing     the client to close its side       the connection aborted, after `linger_timeout_s`

In every phase a client that leaves an answer unread for `write_timeout_s` is given up. One sweep a
second looks at all connections, so a timer may be up to `SWEEP_EVERY_S` late.

Connections, and the bytes of bodies and of unread answers, have a cap over all connections. One
client may have a share of both, so that it cannot have all. A client is an IPv4 address or an IPv6
network of 64 bits; what connects from this machine, as a proxy does, has no share of its own.

Answers leave in the order of their requests. While one is made, requests behind it are parsed and
wait; what cannot be parsed is answered after them, and then the connection closes.

A client that ends its side of the connection after a whole request (`shutdown(SHUT_WR)`) gets its
answer. One that has closed both sides looks the same until it is written to, and then its machine
resets the connection. So something that changes nothing is written at once: `100 Continue` before
an answer has begun, and in a chunked answer a zero, which is then the first digit of the next
chunk's size. Over TLS an end of one side is the end of both.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import resource
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from itertools import chain
from typing import Any, cast
from urllib.parse import unquote

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Scope

from toolkit.serve.errors import ApiError, error_body
from toolkit.serve.settings import MAX_BODY_BYTES

MAX_HEAD_BYTES = 1 << 16  # of the request line and all headers, and of trailers
MAX_FRAMING_FACTOR = 8  # a body in chunks of one byte takes six bytes for each
MAX_PIPELINED_REQUESTS = 16  # behind the one that is answered
MAX_CONNECTIONS = 4096
BACKLOG = 2048  # connections that wait to be accepted
MAX_HELD_BYTES = 256 << 20  # of bodies and unread answers, over all connections
CLIENT_SHARE = 0.5  # of connections and of held bytes, for one client
SMALL_BODY_BYTES = 1 << 16  # a body up to this size is taken even when `MAX_HELD_BYTES` are held

HEAD_TIMEOUT_S = 60.0
BODY_TIMEOUT_S = 60.0
IDLE_TIMEOUT_S = (
    60.0  # longer than clients' connection pools keep theirs, so that they do not meet a closed one
)
WRITE_TIMEOUT_S = 30.0
LINGER_TIMEOUT_S = 5.0
MIN_READ_BYTES = (
    1 << 15
)  # what a client has to read of a waiting answer within `WRITE_TIMEOUT_S`, or all of it
SWEEP_EVERY_S = 1.0
PROBE_AFTER_S = 0.05  # an answer that begins by then has no `100 Continue` before it
PROBED_AFTER_S = 0.01  # for a reset to arrive; later ones are seen by the sweep

RETRY_AFTER_S = 5
SPARE_DESCRIPTORS = 128  # of this process, for everything but connections
READ_AGAIN_BYTES = (
    1 << 16
)  # after so many at once, other connections are served before this one is read again

_NOT_HTTP = "this is not HTTP/1.1 as this server reads it"
_HEADER_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(rb"[^\x00-\x08\x0a-\x1f\x7f]*")
_TCP_CLOSE = 7  # of TCP_INFO's states
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WireLimits:
    """What a client may take. Times in seconds."""

    connections: int = MAX_CONNECTIONS
    descriptors_each: int = 1  # of open files: two where each connection has another one behind it
    head_bytes: int = MAX_HEAD_BYTES
    body_bytes: int = MAX_BODY_BYTES
    held_bytes: int = MAX_HELD_BYTES
    client_share: float = 1.0  # of `connections` and `held_bytes`, for one client; 1: all
    head_timeout_s: float = HEAD_TIMEOUT_S
    body_timeout_s: float = BODY_TIMEOUT_S
    idle_timeout_s: float = IDLE_TIMEOUT_S
    write_timeout_s: float = WRITE_TIMEOUT_S
    linger_timeout_s: float = LINGER_TIMEOUT_S


def client_of(address: str) -> str | None:
    """The client that an address belongs to: itself, or its IPv6 network; None for this machine's,
    and for none.
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is None:
            return (
                None if found.is_loopback else str(ipaddress.ip_network((found, 64), strict=False))
            )
        found = found.ipv4_mapped
    return None if found.is_loopback else str(found)


class Client:
    """The connections of one client, and what they hold."""

    def __init__(self) -> None:
        self.connections: set[Connection] = set()
        self.body_bytes = 0
        self.unread_bytes = 0

    @property
    def held_bytes(self) -> int:
        return self.body_bytes + self.unread_bytes


class HttpServer:
    """An application on a listening socket: its connections, and what they hold together.

    Args:
        app: the ASGI application; scopes of type `http` are all that it gets.
        limits: what clients may take.
        dated: whether answers say the date; a proxy leaves that to the server behind it.
        now_s: the clock of all timers, in seconds.
        client_of: whose an address is; None: nothing but the caps over all connections bounds it.
        on_share: told `connections` or `bytes` when a client got 429, or a reset, because it had its share.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: WireLimits = WireLimits(),
        *,
        dated: bool = True,
        now_s: Callable[[], float] = time.monotonic,
        client_of: Callable[[str], str | None] = client_of,
        on_share: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.app = app
        self.limits = limits
        self.max_connections = _most_connections(limits)
        self.client_connections = max(int(self.max_connections * limits.client_share), 1)
        self.client_bytes = int(limits.held_bytes * limits.client_share)
        self.clients: dict[str, Client] = {}
        self.now_s = now_s
        self.connections: set[Connection] = set()
        self.idle: dict[Connection, None] = {}  # the longest idle first
        self.heads: dict[
            Connection, None
        ] = {}  # in the middle of a request's head, the oldest first
        self.tasks: set[asyncio.Task[None]] = set()
        self.body_bytes = 0  # of requests that have not ended
        self.unread_bytes = 0  # of answers, as of the last sweep and what was written since
        self.leaving = False
        self.common_headers = b""
        self._client_of = client_of
        self._on_share = on_share
        self._dated = dated
        self._server: uvicorn.Server | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()

    async def start(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Accept connections from `listener`, which is bound; with `tls`, encrypted ones."""
        loop = asyncio.get_running_loop()
        self._tick()

        def connection(**_: object) -> Connection:
            return Connection(self, loop)

        config = uvicorn.Config(
            self.app,
            http=cast(type[asyncio.Protocol], connection),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            backlog=BACKLOG,
        )
        config.load()
        config.ssl = tls
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        await self._server.startup(sockets=[listener])

    def close_listener(self) -> None:
        """Accept nothing more. Connections that exist go on."""
        for server in self._server.servers if self._server else ():
            server.close()

    async def stop(self, timeout_s: float) -> None:
        """Close idle connections, wait `timeout_s` for answers under way to leave, and cut the rest
        off.
        """
        self.leaving = True
        self.close_listener()
        for connection in list(self.connections):
            connection.leave()
        if self.connections:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), timeout_s)
        tasks = list(self.tasks)
        for connection in list(self.connections):
            connection.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._sweeping:
            self._sweeping.cancel()

    @property
    def held_bytes(self) -> int:
        return self.body_bytes + self.unread_bytes

    def sweep(self) -> None:
        """Let every timer that has run out have its effect, and reset who leaves too much unread."""
        now_s, self.unread_bytes = self.now_s(), 0
        for client in self.clients.values():
            client.unread_bytes = 0
        for connection in list(self.connections):
            connection.count_unread(connection.check(now_s))
        self.unread_bytes -= self._shed(
            self.connections, self.unread_bytes - self.limits.held_bytes
        )
        for client in list(self.clients.values()):
            excess = client.unread_bytes - self.client_bytes
            if excess > 0:
                self._on_share("bytes")
                self.unread_bytes -= self._shed(client.connections, excess)

    def _shed(self, connections: Iterable[Connection], excess: int) -> int:
        """Reset those that leave the most unread, until it is `excess` bytes less. How many bytes
        it is less.
        """
        shed = 0
        if excess > 0:
            for connection in sorted(connections, key=Connection.waiting_bytes, reverse=True):
                if shed >= excess:
                    break
                shed += connection.waiting_bytes()
                connection.abort()
        return shed

    def entered(self, connection: Connection, address: str) -> ApiError | None:
        """A new connection. The error where it cannot be, and none could be closed for it."""
        name = self._client_of(address) if self.limits.client_share < 1 else None
        if name is not None:
            client = self.clients.get(name) or Client()
            while len(client.connections) >= self.client_connections:
                if not self._close_one(client.connections):
                    self._on_share("connections")
                    text = f"{name} has {self.client_connections} connections, as many as one client gets"
                    return _too_many(text)
            self.clients[name] = client  # again: closing its last one has removed it
            connection.client = client
            client.connections.add(connection)
        while len(self.connections) >= self.max_connections:
            if not self._close_one(self.connections):
                self.left(connection)
                text = f"the server has {self.max_connections} connections, as many as it takes; try again later"
                return _busy(text)
        self.connections.add(connection)
        self._empty.clear()
        return None

    def _close_one(self, among: set[Connection]) -> bool:
        """Close the one that is idle longest, else the one that is longest in its request's head.
        False: none is.
        """
        oldest = next((each for each in chain(self.idle, self.heads) if each in among), None)
        if oldest is not None:
            oldest.abort()
        return oldest is not None

    def left(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self.idle.pop(connection, None)
        self.heads.pop(connection, None)
        client = connection.client
        if client is not None and connection in client.connections:
            client.connections.discard(connection)
            if not client.connections:
                self.clients = {
                    name: one for name, one in self.clients.items() if one is not client
                }
        if not self.connections:
            self._empty.set()

    def check_share(self, connection: Connection) -> None:
        """`_RefusedError` where there is no room for more of a body."""
        client = connection.client
        if self.held_bytes > self.limits.held_bytes:
            text = f"the server holds {self.held_bytes >> 20} MiB of requests and answers; try again later"
            raise _RefusedError(_busy(text))
        if client is not None and client.held_bytes > self.client_bytes:
            self._on_share("bytes")
            text = f"this client's requests and unread answers are {client.held_bytes >> 20} MiB, which is its share"
            raise _RefusedError(_too_many(text))

    def _tick(self) -> None:
        if self._dated:
            self.common_headers = b"date: " + formatdate(usegmt=True).encode("ascii") + b"\r\n"
        self._sweeping = asyncio.get_running_loop().call_later(SWEEP_EVERY_S, self._tick)
        self.sweep()


class _RefusedError(Exception):
    """Raised in a callback of the parser, which cannot go on: `error` is the answer."""

    def __init__(self, error: ApiError | None) -> None:
        super().__init__()
        self.error = error


class Connection(asyncio.Protocol):
    """One client's connection."""

    transport: asyncio.Transport

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self._loop = loop
        self._limits = server.limits
        self._parser = httptools.HttpRequestParser(self)
        self._parses = True  # False: what still comes is thrown away
        self._sends_on = False  # the client sends more than was read
        self._in_head = False
        self._message: HttpExchange | None = None  # whose body is being read
        self._running: HttpExchange | None = None  # whose answer is being made
        self._queue: deque[HttpExchange] = deque()  # requests behind it
        self._last_words: ApiError | None = (
            None  # the answer to what cannot be parsed, after all others
        )
        self._ended = False  # the client has ended its side
        self._closing = False
        self._deadline_s = 0.0  # of the phase, where the phase has one
        self._raw_bytes = 0  # of the message that is being read, framing included
        self._head_bytes = 0
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._written_bytes = 0
        self._taken = (0, 0.0)  # how many bytes the client had taken, and when
        self.client: Client | None = None  # whose share it counts to
        self._client: tuple[str, int] | None = None
        self._local: tuple[str, int | None] | None = None
        self._scheme = "http"
        self.writable = asyncio.Event()
        self.writable.set()

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        transport = self.transport
        if transport.get_extra_info("sslcontext"):
            self._scheme = "https"
        self._client, self._local = _address(transport, "peername"), _address(transport, "sockname")
        self._taken = (0, self.server.now_s())
        refusal = self.server.entered(self, self._client[0] if self._client else "")
        if refusal:
            self.transport.write(_refusal(refusal, self.server.common_headers))
            self.transport.close()
            self._parses = False
            self._loop.call_later(PROBE_AFTER_S, transport.abort)
            return
        self._wait_idle(self._limits.head_timeout_s)

    def connection_lost(self, _: Exception | None) -> None:
        self.server.left(self)
        self._closing, self._parses = True, False
        for exchange in (self._running, self._message, *self._queue):
            if exchange:
                exchange.give_up()
        self._queue.clear()
        self._message = None
        self.writable.set()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        if not self._parses:
            self._sends_on = True
            return
        self._raw_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._stop_reading(
                cause.error if isinstance(cause, _RefusedError) else ApiError(_NOT_HTTP)
            )
            return
        if self._in_head and self._raw_bytes > self._limits.head_bytes:
            self._stop_reading(self._head_too_long())
        elif self._raw_bytes > MAX_FRAMING_FACTOR * (
            self._limits.body_bytes + self._limits.head_bytes
        ):
            self._stop_reading(self._body_too_long())
        if len(data) >= READ_AGAIN_BYTES and not self.transport.is_closing():
            self.transport.pause_reading()
            self._loop.call_soon(self._read_again)

    def _read_again(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def eof_received(self) -> bool:
        """Whether the transport stays open, for the answers that are still to come."""
        if self._scheme == "https":
            return False
        self._ended = True
        if self._parses and (self._message or self._in_head):
            self._stop_reading(ApiError(f"the {'body' if self._message else 'head'} ended early"))
        self._parses = False
        if self._running is None or self._closing:
            self.transport.close()
            return False
        begun = self._running.started
        self._loop.call_later(0.0 if begun else PROBE_AFTER_S, self._probe)
        return True

    # What the parser calls

    def _feed(self, data: bytes) -> None:
        """Give the parser `data`.

        It stops where a request would rather speak another protocol, which a server may ignore: the
        head is read once more without that wish, and what follows with it.
        """
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self._parser = httptools.HttpRequestParser(self)

    def _head_without_upgrade(self) -> bytes:
        kept = [
            name + b": " + (_without_upgrade(value) if name == b"connection" else value)
            for name, value in self._headers
            if name != b"upgrade"
        ]
        line = b"%s %s HTTP/%s" % (
            self._parser.get_method(),
            self._url,
            self._parser.get_http_version().encode(),
        )
        return b"\r\n".join([line, *kept, b"\r\n"])

    def on_message_begin(self) -> None:
        if not self._in_head:  # else: a head that is read once more
            self._raw_bytes = 0
            self._deadline_s = self.server.now_s() + self._limits.head_timeout_s
            self.server.idle.pop(self, None)
            if self._running is None:
                self.server.heads[self] = None
        self._in_head = True
        self._head_bytes = 0
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if (
            self._in_head
        ):  # else a trailer: no field of those that this server reads may be one (RFC 9110, 6.5.1)
            name = name.lower()
            self._headers.append((name, value.lower() if name == b"expect" else value))

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._limits.head_bytes:
            raise _RefusedError(self._head_too_long())

    def on_headers_complete(self) -> None:
        parser = self._parser
        if parser.should_upgrade():
            if parser.get_method() == b"CONNECT":
                raise _RefusedError(ApiError("this is no proxy"))
            return
        self._in_head = False
        self.server.heads.pop(self, None)
        exchange = HttpExchange(self, self._scope(parser.get_method(), parser.get_http_version()))
        exchange.keep_alive = exchange.chunkable and parser.should_keep_alive()
        self._message = exchange
        self._deadline_s = self.server.now_s() + self._limits.body_timeout_s
        if self._running is None:
            self._start(exchange)
        elif len(self._queue) < MAX_PIPELINED_REQUESTS:
            self._queue.append(exchange)
        else:
            self._message = None
            raise _RefusedError(None)

    def _scope(self, method: bytes, version: str) -> Scope:
        """ASGI's description of the request. `_RefusedError` for a head that no request may have."""
        if version not in ("1.1", "1.0"):
            raise _RefusedError(ApiError(f"HTTP/{version} is not spoken here; HTTP/1.1 is"))
        hosts = sum(name == b"host" for name, _ in self._headers)
        if hosts > 1 or (not hosts and version == "1.1"):
            said = "more than one Host header" if hosts else "no Host header"
            raise _RefusedError(ApiError(f"the request has {said}; HTTP/1.1 asks for one"))
        found = httptools.parse_url(self._url)
        raw_path: bytes = found.path or b"/"
        path = raw_path.decode("ascii")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": method.decode("ascii"),
            "scheme": self._scheme,
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": found.query or b"",
            "root_path": "",
            "headers": self._headers,
            "client": self._client,
            "server": self._local,
        }

    def on_body(self, body: bytes) -> None:
        if (exchange := self._message) is None:
            return
        exchange.take(body)
        server = self.server
        if exchange.body_bytes > self._limits.body_bytes:
            raise _RefusedError(self._body_too_long())
        small = exchange.body_bytes <= SMALL_BODY_BYTES
        if exchange is self._running:
            if not small:
                server.check_share(self)
        elif exchange in self._queue and (not small or server.held_bytes > self._limits.held_bytes):
            # a client may send it again
            self._queue.remove(exchange)
            self._message = None
            exchange.give_up()
            raise _RefusedError(None)

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return
        exchange, self._message = self._message, None
        self._raw_bytes = 0
        if exchange is None:
            return
        exchange.end_body()
        if not exchange.keep_alive:
            self._parses = False  # nothing behind it will be answered

    # Phases

    def _wait_idle(self, timeout_s: float) -> None:
        self._deadline_s = self.server.now_s() + timeout_s
        self.server.idle[self] = None

    def _start(self, exchange: HttpExchange) -> None:
        self._running = exchange
        self.server.idle.pop(self, None)
        if exchange.refusal:
            self._take_over(exchange, exchange.refusal)
            return
        task = self._loop.create_task(exchange.run())
        self.server.tasks.add(task)
        task.add_done_callback(self.server.tasks.discard)

    def answered(self, exchange: HttpExchange) -> None:
        """All of an answer was written: what is next?"""
        self._running = None
        if not exchange.keep_alive or self.server.leaving or self.transport.is_closing():
            self._close()
        elif self._queue:
            self._start(self._queue.popleft())
        elif self._last_words:
            self._answer_and_close(self._last_words)
        elif not self._parses or self._ended:
            self._close()
        elif self._in_head:
            self.server.heads[self] = None
        else:
            self._wait_idle(self._limits.idle_timeout_s)

    def ran(self, exchange: HttpExchange) -> None:
        """The application has returned, or raised, without a whole answer."""
        if exchange.started:
            self._close()  # the client sees that it is not whole
        else:
            self._take_over(exchange, ApiError("internal error", status=500))

    def _stop_reading(self, error: ApiError | None) -> None:
        """What comes now is thrown away. `error` is the answer to what was being read; None: there
        is none.
        """
        exchange, self._message = self._message, None
        self._parses = self._in_head = False
        self._sends_on = not self._ended
        self.server.heads.pop(self, None)
        if error is None:
            return
        if exchange is None:
            self._last_words = error
            if self._running is None:
                self._answer_and_close(error)
        elif exchange is self._running:
            self._take_over(exchange, error)
        elif exchange in self._queue:
            exchange.refusal = error
        else:  # it was answered before all of it had come
            self._close()

    def _take_over(self, exchange: HttpExchange, error: ApiError) -> None:
        """Answer in the application's place, unless it has begun to."""
        exchange.give_up()
        if exchange.started:
            self._close()
        else:
            self._answer_and_close(error)

    def _answer_and_close(self, error: ApiError) -> None:
        if not self._closing and not self.transport.is_closing():
            self.write(_refusal(error, self.server.common_headers))
            self._close()

    def _close(self) -> None:
        """Close once all that was written has left.

        A client that is still sending would lose its answer to a reset: it may see the end of this
        side first.
        """
        if self._closing:
            return
        self._closing = True
        self.server.idle.pop(self, None)
        self.server.heads.pop(self, None)
        self._deadline_s = self.server.now_s() + self._limits.linger_timeout_s
        sends = not self._ended and (self._message is not None or self._sends_on)
        self._parses, self._message = False, None
        if sends and not self.transport.is_closing() and self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def leave(self) -> None:
        """The server ends: what runs is answered, and nothing after it."""
        if self._running is None:
            self._close()

    def abort(self) -> None:
        """Close at once; what was not sent yet is lost, in the system's buffers too."""
        self.server.left(self)
        with suppress(OSError, AttributeError):
            reset = struct.pack("ii", 1, 0)
            self.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, reset
            )
        self.transport.abort()

    # Timers

    @property
    def phase(self) -> str:
        if self._closing:
            return "closing"
        if self._message:
            return "body"
        if self._in_head:
            return "head"
        return "answering" if self._running else "idle"

    def check(self, now_s: float) -> int:
        """Let timers that have run out have their effect. How many bytes of answers wait for the
        client to read.
        """
        waiting = self.waiting_bytes()
        taken, since_s = self._taken
        if not waiting or self._written_bytes - waiting >= taken + MIN_READ_BYTES:
            self._taken = (self._written_bytes - waiting, now_s)
        elif now_s - since_s > self._limits.write_timeout_s:
            self.abort()
            return 0
        if self._ended and self._running:
            self._abort_if_gone()
        phase = self.phase
        if phase == "closing" and waiting:
            self._deadline_s = now_s + self._limits.linger_timeout_s
        elif phase != "answering" and now_s > self._deadline_s:
            self._late(phase)
        return waiting

    def _late(self, phase: str) -> None:
        limits = self._limits
        if phase == "closing":
            self.abort()
        elif phase == "idle":
            self._close()
        elif phase == "head":
            text = f"the request's head did not come within {limits.head_timeout_s:g} s"
            self._stop_reading(ApiError(text, status=408))
        else:
            text = f"the body did not come within {limits.body_timeout_s:g} s"
            self._stop_reading(ApiError(text, status=408))

    def _probe(self) -> None:
        """Write something that changes nothing: a client that is gone answers with a reset."""
        exchange = self._running
        if exchange is None or self._closing or self.transport.is_closing():
            return
        exchange.probe()
        self._loop.call_later(PROBED_AFTER_S, self._abort_if_gone)

    def _abort_if_gone(self) -> None:
        if self._running is None or self.transport.is_closing() or not hasattr(socket, "TCP_INFO"):
            return
        with suppress(OSError):
            state = self.transport.get_extra_info("socket").getsockopt(
                socket.IPPROTO_TCP, socket.TCP_INFO, 1
            )
            if state[0] == _TCP_CLOSE:
                self.abort()

    # Writing

    def write(self, data: bytes) -> None:
        self._written_bytes += len(data)
        self.transport.write(data)
        if len(data) > SMALL_BODY_BYTES:
            self.count_unread(len(data))
            if self.server.unread_bytes > self._limits.held_bytes:
                self.server.sweep()

    def count_unread(self, size: int) -> None:
        self.server.unread_bytes += size
        if self.client is not None:
            self.client.unread_bytes += size

    def count_body(self, size: int) -> None:
        self.server.body_bytes += size
        if self.client is not None:
            self.client.body_bytes += size

    def waiting_bytes(self) -> int:
        """Bytes of answers that wait for the client to read."""
        return self.transport.get_write_buffer_size()

    def _head_too_long(self) -> ApiError:
        text = f"request line and headers are larger than {self._limits.head_bytes} bytes"
        return ApiError(text, status=431)

    def _body_too_long(self) -> ApiError:
        return ApiError(f"the body is larger than {self._limits.body_bytes} bytes", status=413)


class HttpExchange:
    """One request and its answer, as the application sees them."""

    def __init__(self, connection: Connection, scope: Scope) -> None:
        self.scope = scope
        self.keep_alive = True
        self.chunkable = (
            scope["http_version"] == "1.1"
        )  # HTTP/1.0 knows neither chunks nor 100 Continue
        self.refusal: ApiError | None = (
            None  # the answer, where the application should not be asked
        )
        self.started = False  # the answer's head was written
        self.complete = False
        self.body_bytes = 0
        self._connection = connection
        self._server = connection.server
        self._body = bytearray()
        self._whole = False  # all of the body has come
        self._told_whole = False
        self._given_up = False
        self._runs = False  # the application has it, and with it what came of its body
        self._news = asyncio.Event()
        self._expects_100 = (b"expect", b"100-continue") in scope["headers"]
        self._chunked = False
        self._bodiless = scope["method"] == "HEAD"
        self._left_bytes: int | None = None  # of the answer's stated length

    async def run(self) -> None:
        """Have the application answer."""
        self._runs = True
        try:
            await self._server.app(self.scope, self.receive, self.send)
        except (
            Exception
        ) as error:  # an edge: a bug in one request must not end the others' connections
            _logger.error("exception in the application", exc_info=error)
        finally:
            self._runs = False
            self._let_go()
            if not self.complete and not self._given_up:
                self._connection.ran(self)

    def take(self, piece: bytes) -> None:
        """More of the body."""
        if self.complete or self._given_up:
            return
        self.body_bytes += len(piece)
        self._connection.count_body(len(piece))
        self._body += piece
        self._news.set()

    def end_body(self) -> None:
        self._whole = True
        self._news.set()

    def probe(self) -> None:
        """Write something that changes nothing of the answer, where there is such a thing."""
        if self.chunkable and not self.started:
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif self._chunked:
            self._connection.write(b"0")

    def give_up(self) -> None:
        """The client is gone, or has another answer: the application hears that it is."""
        self._given_up = True
        self._news.set()
        if not self._runs:
            self._let_go()

    def _let_go(self) -> None:
        self._connection.count_body(-self.body_bytes)
        self.body_bytes = 0
        self._body = bytearray()

    async def receive(self) -> Message:
        """ASGI's."""
        if self._expects_100 and not self.started and not self._given_up and not self._whole:
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._expects_100 = False
        while not (self.complete or self._given_up):
            if not self._told_whole and (self._body or self._whole):
                body, self._body = bytes(self._body), bytearray()
                self._told_whole = self._whole
                return {"type": "http.request", "body": body, "more_body": not self._whole}
            self._news.clear()
            await self._news.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """ASGI's. What is sent to a client that is gone is dropped."""
        connection = self._connection
        if not connection.writable.is_set() and not self._given_up:
            await connection.writable.wait()
        if self._given_up:
            return
        if not self.started:
            self._send_head(message)
        elif not self.complete:
            self._send_body(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"{message['type']} after the answer's end")

    def _send_head(self, message: Message) -> None:
        if message["type"] != "http.response.start":
            raise RuntimeError(f"{message['type']} before http.response.start")
        status, closes = message["status"], False
        lines = [_status_line(status), self._server.common_headers]
        for name, value in message.get("headers", ()):
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                raise RuntimeError(f"not a header: {name[:80]!r}")
            lower = name.lower()
            if lower == b"transfer-encoding":  # that is for this hop to choose
                continue
            if lower == b"connection":
                closes = b"close" in [token.strip() for token in value.lower().split(b",")]
                if not closes:
                    continue
            elif lower == b"content-length":
                self._left_bytes = int(value)
            lines += (name, b": ", value, b"\r\n")
        if not self._whole:  # a client that does not know that it may stop sending has to be told
            self.keep_alive = False
        self._bodiless = self._bodiless or status in (204, 304)
        if self._left_bytes is None and not self._bodiless:
            if self.chunkable:
                self._chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
            else:
                self.keep_alive = False
        self.keep_alive = self.keep_alive and not closes and not self._server.leaving
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
            self._news.set()
            self._connection.answered(self)


def _most_connections(limits: WireLimits) -> int:
    """As many as may be, or as this process may have open files for, once it has asked for enough."""
    wanted = limits.connections * limits.descriptors_each + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits.connections
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(
        min(limits.connections, (max(soft, most) - SPARE_DESCRIPTORS) // limits.descriptors_each), 1
    )


def _address(transport: asyncio.Transport, which: str) -> Any:
    found = transport.get_extra_info(which)
    return (found[0], found[1]) if isinstance(found, tuple) and len(found) >= 2 else None


def _without_upgrade(connection: bytes) -> bytes:
    return b", ".join(
        token for token in connection.split(b",") if token.strip().lower() != b"upgrade"
    )


def _status_line(status: int) -> bytes:
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


_STATUS_LINES = {
    one.value: f"HTTP/1.1 {one.value} {one.phrase}\r\n".encode("ascii") for one in HTTPStatus
}


def _busy(text: str) -> ApiError:
    return ApiError(
        text, status=503, code="overloaded", headers={"Retry-After": str(RETRY_AFTER_S)}
    )


def _too_many(text: str) -> ApiError:
    return ApiError(
        text, status=429, code="client_share", headers={"Retry-After": str(RETRY_AFTER_S)}
    )


def _refusal(error: ApiError, common_headers: bytes) -> bytes:
    """A whole answer that ends the connection."""
    body = error_body(error)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers | error.headers).items())
    return _status_line(error.status) + common_headers + lines.encode("ascii") + b"\r\n" + body
