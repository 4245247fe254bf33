"""Requests to another server, by aiohttp: of fronts and the recorder, of the load generator
(`toolkit.endpoints.load`), and of commands that read a server's pages (`toolkit.endpoints.ask`).

The answer comes back byte for byte, in pieces as they arrive. Nothing is decoded or followed:
compression and redirects are between the client and the server. While pieces are unread, reading
from the server pauses.

Nothing here turns certificate verification off. The system's authorities are OpenSSL's:
SSL_CERT_FILE and SSL_CERT_DIR name others.
"""

from __future__ import annotations

import asyncio
import errno
import io
import math
import os
import re
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawResponseMessage
from aiohttp.http_exceptions import BadHttpMessage
from yarl import URL

from toolkit.errors import InputError
from toolkit.openai.foreign import plain

TRUST_HINT = "SSL_CERT_FILE=ca.pem names the authority that signed it"
MAX_HELD_BYTES = 1 << 18
MAX_LINE_BYTES = 1 << 16  # of a head
MAX_ANSWERS = 33  # to a request: interim ones, such as 100 Continue, and the last
HEADS_BYTES = 1 << 12  # of what comes before a body, that are read in one go
CONNECT_S = 10.0
IDLE_S = 4.0  # servers close theirs after five seconds or more
LARGE_BYTES = 1 << 20  # a body that is written in pieces
NO_ROOM_HERE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
BAD_TARGET = re.compile(rb"[\x00-\x20\x7f-\xff]")
NOT_ADDED = ("accept", "accept-encoding", "content-type", "user-agent")  # by aiohttp
# The proxy sets these itself. It sends a body at once, so it does not pass `expect` on.
SET_BY_PROXY = (b"host", b"content-length", b"expect")
# What a kept connection that the server closes at the moment of its reuse ends with.
STALE = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)
LOST = "the connection was lost"
NOT_HTTP = "its answer is not HTTP"
PLAIN = ("", "identity")  # values of content-encoding
RawHeaders = Sequence[tuple[bytes, bytes]]

# RFC 9110, 7.6.1: these headers are about one connection, not about the message.
HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization"),
        *(b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    )
)


def server_url(url: str) -> URL:
    """Return the URL of a server, parsed. Raises `InputError` for any other text."""
    example = "for example http://127.0.0.1:8000"
    try:
        parsed = URL(url)
        (parsed.host or "").encode("idna")  # as the resolver does
    except ValueError as error:
        raise InputError(f"'{url[:200]}' is not a URL: {error}", example) from error
    if parsed.scheme not in ("http", "https") or not parsed.host or not parsed.port:
        raise InputError(f"'{url[:200]}' is not the URL of a server", example)
    return parsed


class UpstreamError(Exception):
    """The answer did not arrive, or not completely. `here`: this process lacks what a connection
    needs, and the server is not at fault. `untrusted`: why its certificate is not trusted.

    The message calls the server "it". It may be shown to a proxy's client: it names no address.
    """

    def __init__(self, message: str, *, here: bool = False, untrusted: str = "") -> None:
        super().__init__(message)
        self.here = here
        self.untrusted = untrusted


@dataclass
class UsedConnection:
    """The connection of one request. `kept`: one before had it, too. `on_connect` is called when it
    is a new one, with TLS after its handshake.
    """

    on_connect: Callable[[], None]
    kept: bool = False


async def _note_kept(_session: aiohttp.ClientSession, trace: Any, _params: object) -> None:
    trace.trace_request_ctx.kept = True


async def _note_connected(_session: aiohttp.ClientSession, trace: Any, _params: object) -> None:
    trace.trace_request_ctx.on_connect()


class UpstreamConnection(ResponseHandler):
    """aiohttp's connection, on which a request gets a bounded number of answers.

    aiohttp waits for the final one behind any number of interim ones, and keeps those that no
    request waits for.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._answers = 0

    def set_response_params(self, **options: Any) -> None:
        """A request begins."""
        self._answers = 0
        super().set_response_params(**options)

    def data_received(self, data: bytes) -> None:
        """Heads are read in small parts: a packet may hold ten thousand of them."""
        at = 0
        while len(data) - at > HEADS_BYTES and (self._payload is None or self._payload.is_eof()):
            super().data_received(data[at : at + HEADS_BYTES])
            at += HEADS_BYTES
            if self._answers > MAX_ANSWERS:
                return
        super().data_received(data[at:] if at else data)

    def feed_data(self, data: tuple[RawResponseMessage, Any], size: int = 0) -> None:
        """Keep the head of an answer, unless it is an interim one."""
        self._answers += 1
        if self._answers > MAX_ANSWERS:
            self.abort()
            self.set_exception(BadHttpMessage("too many answers"))
        elif data[0].code == 101 or not 100 <= data[0].code < 200:
            super().feed_data(data, size)


class HttpClient:
    """The connections to other servers, opened in the event loop of the first request.

    While more than `most_kept` are in use, none is kept for a next request: an idle one has a file
    descriptor, which a client may need. A `resolver` looks names up in place of aiohttp's.
    """

    def __init__(self, most_kept: int = 1 << 30, resolver: AbstractResolver | None = None) -> None:
        self.most_kept = most_kept
        self._resolver = resolver
        self.in_use = 0
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            trace = aiohttp.TraceConfig()
            trace.on_connection_reuseconn.append(_note_kept)
            trace.on_connection_create_end.append(_note_connected)
            connector = aiohttp.TCPConnector(
                limit=0, keepalive_timeout=IDLE_S, resolver=self._resolver
            )
            factory = partial(UpstreamConnection, loop=asyncio.get_running_loop())
            connector._factory = factory  # type: ignore[assignment]  # aiohttp has no option
            self._session = aiohttp.ClientSession(
                trace_configs=[trace],
                connector=connector,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=NOT_ADDED,
                read_bufsize=MAX_HELD_BYTES // 2,  # reading pauses at twice as much
                max_line_size=MAX_LINE_BYTES,
                max_field_size=MAX_LINE_BYTES,
            )
        return self._session

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()


class UpstreamAnswer:
    """An answer: its head has arrived, its body is still to come."""

    def __init__(self, response: aiohttp.ClientResponse, http: HttpClient) -> None:
        self._response = response
        self._http = http
        self.status = response.status
        self.headers = _end_to_end(response.raw_headers)

    def header(self, name: str) -> str:
        """Return the value of a header, a character for each of its bytes; '' if it is absent."""
        found = (value for key, value in self.headers if key.lower() == name.encode())
        return next(found, b"").decode("latin-1")

    def refuse_compressed(self) -> None:
        """Raise `UpstreamError` if its body is compressed: a few KiB may stand for gigabytes."""
        encoding = self.header("content-encoding").strip().lower()
        if encoding not in PLAIN:
            raise UpstreamError(f"its answer is compressed ({plain(encoding, 40)})")

    async def body(self) -> AsyncIterator[bytes]:
        """Pieces as they arrive. Raises `UpstreamError` if the rest does not arrive."""
        try:
            async for piece in self._response.content.iter_any():
                yield piece
        except (aiohttp.ClientError, OSError) as error:
            self._response.close()
            raise _lost(error) from None

    async def read(self, most_bytes: int, heard: Callable[[], object] = lambda: None) -> bytes:
        """The body, until it has ended or has more than `most_bytes`; `heard` is called for each
        piece. Raises as `body`.
        """
        content = bytearray()
        async for piece in self.body():
            heard()
            content += piece
            if len(content) > most_bytes:
                break
        return bytes(content)

    async def aclose(self) -> None:  # for `contextlib.aclosing`
        """Release the connection. It is called once.

        If the answer was not read to its end the connection is closed, which tells the server to
        stop.
        """
        self._response.close()
        self._http.in_use -= 1


class Upstream:
    """The server at `url`; a path in it is put before the paths of requests. Times are in seconds.

    Raises `InputError` for an invalid `url`. `silence_s` bounds the wait for the start of an answer
    and for each next piece. `http` has its connections, with those of others.
    """

    def __init__(self, url: str, silence_s: float, http: HttpClient | None = None) -> None:
        parsed = server_url(url)
        if parsed.user is not None or parsed.query_string or parsed.fragment:
            text = "the URL of the server holds more than its address and a path"
            raise InputError(text, "leave the rest out")
        self._base = str(parsed).rstrip("/").removesuffix("/v1")
        self._tls = ssl.create_default_context() if parsed.scheme == "https" else True
        self._http = http or HttpClient()
        self._timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=CONNECT_S,
            sock_read=None if math.isinf(silence_s) else silence_s,
        )

    async def send(
        self,
        method: str,
        target: bytes,
        headers: RawHeaders,
        body: bytes = b"",
        on_connect: Callable[[], None] = lambda: None,
    ) -> UpstreamAnswer:
        """Pass a request on; `target` is its path and query as the client sent them. `on_connect`
        is called when it has a new connection.

        Raises `UpstreamError` if there is no answer. The server may close a kept connection at the
        moment of its reuse: if it ends without an answer, the request is sent once more, as curl
        does.
        """
        if not target.startswith(b"/") or BAD_TARGET.search(target):  # it would change the host
            raise UpstreamError("it does not accept this path")
        kept = [pair for pair in _end_to_end(headers) if pair[0].lower() not in SET_BY_PROXY]
        passed = [(name.decode("latin-1"), _text(value)) for name, value in kept]
        http = self._http
        connection = UsedConnection(on_connect)
        if http.in_use >= http.most_kept:
            passed.append(("connection", "close"))
        url = URL(self._base + target.decode("ascii"), encoded=True)
        http.in_use += 1
        try:
            async with asyncio.timeout(self._timeout.sock_read):  # also behind an interim answer
                try:
                    response = await self._ask(method, url, passed, body, connection)
                except STALE:
                    if not connection.kept:
                        raise
                    response = await self._ask(method, url, passed, body, connection)
            # below: another protocol, which nothing here speaks; above: no status of HTTP
            if not 200 <= response.status < 600:
                response.close()
                raise UpstreamError(LOST)
        except BaseException as error:  # also where it is cancelled
            http.in_use -= 1
            if isinstance(error, (aiohttp.ClientError, OSError, ValueError)):
                raise _lost(error) from None
            raise
        return UpstreamAnswer(response, http)

    async def _ask(
        self,
        method: str,
        url: URL,
        headers: list[tuple[str, str]],
        body: bytes,
        connection: UsedConnection,
    ) -> aiohttp.ClientResponse:
        """The head of the answer. Raises what aiohttp raises."""
        data = io.BytesIO(body) if len(body) > LARGE_BYTES else body
        return await self._http.session.request(
            method,
            url,
            headers=headers,
            data=data or None,
            allow_redirects=False,
            timeout=self._timeout,
            ssl=self._tls,
            trace_request_ctx=connection,
        )

    async def aclose(self) -> None:  # for `contextlib.aclosing`
        """Close its connections, and those of others with which it shares them."""
        await self._http.close()


def _lost(error: Exception) -> UpstreamError:
    """What an error of aiohttp means."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno in NO_ROOM_HERE:
        return UpstreamError("this server has no room for a connection", here=True)
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        why = getattr(error.certificate_error, "verify_message", "").rstrip(".")
        untrusted = f"its certificate is not trusted: {why}"
        return UpstreamError("it shows a certificate that is not trusted", untrusted=untrusted)
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        number = getattr(error, "errno", None)
        why = f": {os.strerror(number).lower()}" if number and number > 0 else ""
        return UpstreamError(f"it cannot be reached{why}")
    if isinstance(error, TimeoutError):
        return UpstreamError("it was silent for too long")
    if isinstance(error, aiohttp.ClientResponseError):
        return UpstreamError(NOT_HTTP)
    return UpstreamError(LOST)


def _text(value: bytes) -> str:
    """A header's value as text of which aiohttp, which writes UTF-8, makes the same bytes again."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _end_to_end(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """The headers of the message, without those of the connection and those that it names."""
    left_out = set(HOP_BY_HOP)
    for key, value in headers:
        if key.lower() == b"connection":
            left_out.update(name.strip().lower() for name in value.split(b","))
    return [(key, value) for key, value in headers if key.lower() not in left_out]
