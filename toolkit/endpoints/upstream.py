"""A proxy's client: requests are passed on to one server, and its answers come back byte for byte.

Connections are kept and reused, so that a request does not pay for a handshake. Nothing is decoded
or followed: compression and redirects are between the client and the server.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Self

from toolkit.endpoints.target import distrusted, server_url, trust
from toolkit.endpoints.wire import Link, WireError
from toolkit.errors import InputError

CONNECT_S = 10.0
IDLE_S = 4.0  # servers close theirs after five seconds or more
MAX_IDLE = 256
LINE_BREAKS = re.compile(rb"[\r\n\0]")
# The proxy sets these itself. It sends a body at once, so it does not pass `expect` on.
SET_BY_PROXY = (b"host", b"content-length", b"expect")
RawHeaders = Sequence[tuple[bytes, bytes]]

# RFC 9110, 7.6.1: these headers are about one connection, not about the message.
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)


class UpstreamError(Exception):
    """The server did not answer. The message may be shown to a client.

    `timed_out` tells a timeout from a refusal.
    """

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class UpstreamAnswer:
    """An answer: its head has arrived, its body is still to come."""

    def __init__(self, link: Link, upstream: Upstream) -> None:
        self._link = link
        self._upstream = upstream
        self.status = link.status
        self.headers = _end_to_end(link.headers)

    def header(self, name: str) -> str:
        """The value of a header; '' if it is absent."""
        wanted = name.lower().encode("latin-1")
        found = (value for key, value in self.headers if key.lower() == wanted)
        return next(found, b"").decode("latin-1")

    async def body(self) -> AsyncIterator[bytes]:
        """Yield pieces as they arrive. Raises `UpstreamError` if the rest does not arrive."""
        try:
            async for piece in self._link.body(self._upstream.silence_s):
                yield piece
        except WireError as error:
            raise _problem(error) from None

    async def close(self) -> None:
        """Release the connection.

        If the answer was not read to its end the connection is closed, which tells the server to
        stop.
        """
        self._upstream.release(self._link)


class Upstream:
    """The server at `url`; a path in it is put before the paths of requests. Times are in seconds.

    Raises `InputError` for an invalid `url`. `silence_s` bounds the wait for the start of an answer
    and for each next piece. `authorities` is a file of the authorities that may have signed its
    certificate, by default the system's.
    """

    def __init__(self, url: str, silence_s: float, authorities: Path | None = None) -> None:
        self._url = server_url(url)
        if self._url.userinfo or self._url.query or self._url.fragment:
            raise InputError(
                "the URL of the server holds more than its address and a path", "leave the rest out"
            )
        self.silence_s = silence_s
        self._prefix = self._url.raw_path.rstrip(b"/").removesuffix(b"/v1")
        if authorities is not None and self._url.scheme != "https":
            raise InputError(
                f"'{url}' shows no certificate that {authorities} could have signed",
                "https://, or none",
            )
        self._tls = trust(authorities) if self._url.scheme == "https" else None
        self._idle: list[Link] = []  # the most recently used is last
        self._busy: set[Link] = set()

    @property
    def address(self) -> tuple[str, int]:
        return self._url.host, self._url.port or (443 if self._url.scheme == "https" else 80)

    @property
    def shown(self) -> str:
        """The URL for people, without secrets."""
        return str(self._url)

    async def send(
        self, method: str, target: bytes, headers: RawHeaders, body: bytes
    ) -> UpstreamAnswer:
        """Pass a request on; `target` is its path and query as the client sent them.

        Raises `UpstreamError` if there is no answer. The server may close a kept connection at the
        moment of its reuse: if it ends without a byte of an answer, the request is sent once more
        on a new one, as curl does.
        """
        request, bodyless = self._request(method, target, headers, body), method == "HEAD"
        try:
            kept = self._kept()
            if kept:
                try:
                    return await self._ask(kept, request, bodyless=bodyless)
                except WireError as error:
                    if kept.heard or error.timed_out:
                        raise
            return await self._ask(await self._connect(), request, bodyless=bodyless)
        except WireError as error:
            raise _problem(error) from None

    async def _ask(self, link: Link, request: bytes, *, bodyless: bool) -> UpstreamAnswer:
        self._busy.add(link)
        try:
            await link.ask(request, self.silence_s, bodyless=bodyless)
        except (WireError, asyncio.CancelledError):
            self.release(link)
            raise
        return UpstreamAnswer(link, self)

    def release(self, link: Link) -> None:
        """Keep a connection for the next request if its answer was read; close any other."""
        self._busy.discard(link)
        if link.reusable and len(self._idle) < MAX_IDLE:
            link.idle_since_s = asyncio.get_running_loop().time()
            self._idle.append(link)
        else:
            link.close()

    def _request(self, method: str, target: bytes, headers: RawHeaders, body: bytes) -> bytes:
        kept = [pair for pair in _end_to_end(headers) if pair[0].lower() not in SET_BY_PROXY]
        if body or method not in ("GET", "HEAD", "OPTIONS"):
            kept.append((b"content-length", b"%d" % len(body)))
        lines = [
            b"%s %s HTTP/1.1" % (method.encode("ascii"), self._prefix + target),
            b"host: " + self._url.netloc,
        ]
        lines += [b"%s: %s" % pair for pair in kept]
        if any(LINE_BREAKS.search(line) for line in lines) or b" " in target:
            raise UpstreamError("the server behind this one does not accept this path")
        return b"\r\n".join([*lines, b"", body])

    def _kept(self) -> Link | None:
        """A kept connection that the server has not closed and is not about to close."""
        oldest_s = asyncio.get_running_loop().time() - IDLE_S
        while self._idle:
            link = self._idle.pop()
            if link.reusable and link.idle_since_s > oldest_s:
                return link
            link.close()
        return None

    async def _connect(self) -> Link:
        try:
            return await self._open()
        except OSError as error:
            untrusted = "shows a certificate that is not trusted"
            problem = untrusted if distrusted(error) else "cannot be reached"
            raise UpstreamError(f"the server behind this one {problem}") from None

    async def _open(self) -> Link:
        """Open a connection. Raises `OSError`, for a timeout or an untrusted certificate too."""
        host, port = self.address
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            _, link = await loop.create_connection(Link, host, port, ssl=self._tls)
        return link

    async def check_certificate(self) -> None:
        """Raises `InputError` for a certificate that is not trusted.

        A server that cannot be reached is no error: it may start later.
        """
        if self._tls is None:
            return
        try:
            link = await self._open()
        except OSError as error:
            if untrusted := distrusted(error):
                raise InputError(
                    f"{self.shown}: {untrusted}",
                    "--upstream-ca FILE names the authority that signed it",
                ) from None
        else:
            link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for link in (*self._idle, *self._busy):
            link.close()


def _end_to_end(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """The headers of the message, without those of the connection and those that it names."""
    named = {
        name.strip().lower()
        for key, value in headers
        if key.lower() == b"connection"
        for name in value.split(b",")
    }
    return [(key, value) for key, value in headers if key.lower() not in HOP_BY_HOP | named]


def _problem(error: WireError) -> UpstreamError:
    """The error in words that name no address: a proxy's clients need not know its server."""
    if error.timed_out:
        return UpstreamError("the server behind this one was silent for too long", timed_out=True)
    return UpstreamError("the connection to the server behind this one was lost")
