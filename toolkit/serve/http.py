"""An HTTP/1.1 server for an ASGI application that bounds what its clients may use.

uvicorn listens; `http_connection` runs one connection with its timers; `http_messages` parses
requests and frames responses. `HttpServer` bounds connections, and the bytes of bodies and unread
responses, over all connections. One client may use a share of both, so that it cannot use all. A
client is an IPv4 address or an IPv6 network of 64 bits. Connections from this machine, such as
those of a proxy, have no share.

One sweep a second checks all connections, so a timer may be up to `SWEEP_EVERY_S` late.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate
from itertools import chain
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from toolkit.serve.assemble import MAX_BODY_BYTES
from toolkit.serve.errors import ApiError, overloaded
from toolkit.serve.http_connection import Connection
from toolkit.serve.http_messages import RequestRefusedError, over_share

BACKLOG = 2048  # connections that wait to be accepted
CLIENT_SHARE = 0.5  # of connections and of held bytes, for one client
SWEEP_EVERY_S = 1.0
SPARE_DESCRIPTORS = 128  # of this process, for everything but connections


@dataclass(frozen=True, slots=True)
class WireLimits:
    """What clients may use. Times are in seconds."""

    connections: int = 4096
    descriptors_each: int = 1  # file descriptors per connection: 2 with one to an upstream server
    head_bytes: int = 1 << 16  # of the request line and all headers, and of trailers
    body_bytes: int = MAX_BODY_BYTES
    held_bytes: int = 256 << 20  # of bodies and unread responses, over all connections
    client_share: float = 1.0  # of `connections` and `held_bytes`, for one client; 1: no shares
    head_timeout_s: float = 60.0
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 60.0  # longer than in clients' connection pools: they close first
    write_timeout_s: float = 30.0
    linger_timeout_s: float = 5.0


def client_of(address: str) -> str | None:
    """The address, or its IPv6 network of 64 bits; None for this machine's, and for no address."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip
    if ip.is_loopback:
        return None
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((ip, 64), strict=False))
    return str(ip)


class Share:
    """The connections of one client or of all clients, the bytes that they hold, and the caps."""

    def __init__(self, name: str, max_connections: int, max_bytes: int) -> None:
        self.name = name
        self.max_connections = max_connections
        self.max_bytes = max_bytes
        self.connections: set[Connection] = set()
        self.body_bytes = 0  # of requests that have not ended
        self.unread_bytes = 0  # of responses, at the last sweep, plus large writes since

    @property
    def held_bytes(self) -> int:
        return self.body_bytes + self.unread_bytes


class HttpServer:
    """An ASGI application on a listening socket, and its connections.

    Args:
        app: gets only scopes of type `http`.
        limits: what clients may use.
        dated: whether responses have a Date; a proxy leaves it to the upstream server.
        now_s: the clock of all timers, in seconds.
        client_of: the client of an address; None: only the caps over all connections bound it.
        on_share: called with `connections` or `bytes` when a client gets 429 or a reset because of
            its share.
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
        self.total = Share("", _raise_descriptor_limit(limits), limits.held_bytes)
        self.clients: dict[str, Share] = {}
        self.now_s = now_s
        self.idle: dict[Connection, None] = {}  # the longest idle first
        self.heads: dict[Connection, None] = {}  # reading a request's head, the oldest first
        self.tasks: set[asyncio.Task[None]] = set()
        self.leaving = False
        self.common_headers = b""
        self._client_of = client_of
        self._on_share = on_share
        self._dated = dated
        self._server: uvicorn.Server | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()

    async def start(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Accept connections from a bound `listener`, with TLS if `tls` is given."""
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
        """Accept no more connections. Existing ones continue."""
        for server in self._server.servers if self._server else ():
            server.close()

    async def stop(self, timeout_s: float) -> None:
        """Close idle connections, wait `timeout_s` for running responses, and abort the rest."""
        self.leaving = True
        self.close_listener()
        connections = self.total.connections
        for connection in list(connections):
            connection.leave()
        if connections:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), timeout_s)
        tasks = list(self.tasks)
        for connection in list(connections):
            connection.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._sweeping:
            self._sweeping.cancel()

    def sweep(self) -> None:
        """Apply all timers that have run out, and abort connections with too much unread."""
        now_s = self.now_s()
        for share in (self.total, *self.clients.values()):
            share.unread_bytes = 0
        for connection in list(self.total.connections):
            connection.count_unread(connection.check(now_s))
        self._abort_excess(self.total)
        for client in list(self.clients.values()):
            if self._abort_excess(client):
                self._on_share("bytes")

    def _abort_excess(self, share: Share) -> bool:
        """Abort connections with the most unread bytes, until the rest are within the cap.

        Returns whether they were above it.
        """
        excess = share.unread_bytes - share.max_bytes
        if excess <= 0:
            return False
        for connection in sorted(share.connections, key=Connection.unread_bytes, reverse=True):
            if excess <= 0:
                break
            excess -= connection.unread_bytes()
            self.total.unread_bytes -= connection.unread_bytes()
            connection.abort()
        return True

    def admit(self, connection: Connection, address: str) -> ApiError | None:
        """Add a connection, closing an inactive one if necessary; an error if there is none."""
        total = self.total
        part = self.limits.client_share
        name = self._client_of(address) if part < 1 else None
        if name is not None:
            client = self.clients.get(name) or Share(
                name, max(int(total.max_connections * part), 1), int(total.max_bytes * part)
            )
            while len(client.connections) >= client.max_connections:
                if not self._abort_inactive(client.connections):
                    self._on_share("connections")
                    text = f"{name} has {client.max_connections} connections"
                    return over_share(f"{text}, as many as one client gets")
            self.clients[name] = client  # again: closing its last connection has removed it
            connection.shares = (total, client)
            client.connections.add(connection)
        while len(total.connections) >= total.max_connections:
            if not self._abort_inactive(total.connections):
                self.remove(connection)
                text = f"the server has {total.max_connections} connections, as many as it takes"
                return overloaded(f"{text}; try again later")
        total.connections.add(connection)
        self._empty.clear()
        return None

    def _abort_inactive(self, connections: set[Connection]) -> bool:
        """Abort the one idle longest, else the one longest in a head; False if there is none."""
        for connection in chain(self.idle, self.heads):
            if connection in connections:
                connection.abort()
                return True
        return False

    def remove(self, connection: Connection) -> None:
        """Remove a connection that is closed, or is about to be."""
        self.idle.pop(connection, None)
        self.heads.pop(connection, None)
        for share in connection.shares:
            share.connections.discard(connection)
            if not share.connections and self.clients.get(share.name) is share:
                del self.clients[share.name]
        if not self.total.connections:
            self._empty.set()

    def check_held(self, connection: Connection) -> None:
        """Raise `RequestRefusedError` if there is no room for more of a connection's body."""
        for share in connection.shares:
            if share.held_bytes <= share.max_bytes:
                continue
            mib = share.held_bytes >> 20
            if share is self.total:
                text = f"the server holds {mib} MiB of requests and answers"
                raise RequestRefusedError(overloaded(f"{text}; try again later"))
            self._on_share("bytes")
            text = f"this client's requests and unread answers are {mib} MiB, which is its share"
            raise RequestRefusedError(over_share(text))

    def _tick(self) -> None:
        if self._dated:
            self.common_headers = b"date: " + formatdate(usegmt=True).encode("ascii") + b"\r\n"
        self._sweeping = asyncio.get_running_loop().call_later(SWEEP_EVERY_S, self._tick)
        self.sweep()


def _raise_descriptor_limit(limits: WireLimits) -> int:
    """Ask for enough file descriptors. Returns how many connections they are enough for."""
    wanted = limits.connections * limits.descriptors_each + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits.connections
    possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < possible:
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    enough_for = (max(soft, possible) - SPARE_DESCRIPTORS) // limits.descriptors_each
    return max(min(limits.connections, enough_for), 1)
