"""A server behind ours: requests are passed on to it, and its answers come back as they arrive,
byte for byte.

Connections are kept and used again, so that a request does not pay for a handshake. Nothing is
decoded or followed: compression and redirects are between the client and the server.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from toolkit.endpoints.target import distrusted, trust
from toolkit.endpoints.wire import Link, WireError
from toolkit.errors import InputError

CONNECT_S = 10.0
IDLE_S = 4.0  # servers close theirs after five and more
MAX_IDLE = 256
NOT_IN_A_LINE = re.compile(rb"[\r\n\0]")
OURS_TO_SAY = (
    b"host",
    b"content-length",
    b"expect",
)  # a body goes out at once, whatever a client would wait for
RawHeaders = Sequence[tuple[bytes, bytes]]

# RFC 9110, 7.6.1: these are about one connection, not about the message. `host` names the server,
# so it is ours to say.
HOP_BY_HOP = frozenset(
    name.encode()
    for name in (
        *(
            "connection",
            "keep-alive",
            "proxy-authenticate",
            "proxy-authorization",
            "proxy-connection",
            "te",
        ),
        *("trailer", "transfer-encoding", "upgrade"),
    )
)


class UpstreamError(Exception):
    """The server did not answer. The message may be shown to a client; `timed_out` tells a wait
    from a refusal.
    """

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class UpstreamAnswer:
    """An answer whose head is there and whose body is to come."""

    def __init__(self, link: Link, upstream: Upstream) -> None:
        self._link = link
        self._upstream = upstream
        self.status = link.status
        self.headers = _end_to_end(link.headers)

    def header(self, name: str) -> str:
        """'' where it is not there."""
        wanted = name.lower().encode("latin-1")
        found = (value for key, value in self.headers if key.lower() == wanted)
        return next(found, b"").decode("latin-1")

    async def body(self) -> AsyncIterator[bytes]:
        """Pieces as they come. `UpstreamError` where the rest does not come."""
        try:
            async for piece in self._link.body(self._upstream.silence_s):
                yield piece
        except WireError as error:
            raise _problem(error) from None

    async def close(self) -> None:
        """Closes the connection of an answer that was not read to its end, which tells the server
        to stop.
        """
        self._upstream.release(self._link)


class Upstream:
    """The server at `url`, which may have a path that comes before those of requests. Times in
    seconds.

    `InputError` where `url` is none. `silence_s` bounds the wait for an answer to begin, and for
    its next piece. `authorities` is a file of those who may have signed its certificate; by default
    the system's may.
    """

    def __init__(self, url: str, silence_s: float, authorities: Path | None = None) -> None:
        try:
            self._url = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise InputError(
                f"'{url}' is not a URL: {error}", "for example http://127.0.0.1:8000"
            ) from None
        if self._url.scheme not in ("http", "https") or not self._url.host:
            raise InputError(
                f"'{url}' is not the URL of a server", "for example http://127.0.0.1:8000"
            )
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
        self._idle: list[Link] = []  # the last is the youngest
        self._busy: set[Link] = set()

    @property
    def address(self) -> tuple[str, int]:
        return self._url.host, self._url.port or (443 if self._url.scheme == "https" else 80)

    @property
    def shown(self) -> str:
        """The URL for people, which holds no secret."""
        return str(self._url)

    async def send(
        self, method: str, target: bytes, headers: RawHeaders, body: bytes
    ) -> UpstreamAnswer:
        """Pass a request on; `target` is its path and query as the client sent them.
        `UpstreamError`: no answer.

        A kept connection may be closed by the server in the moment in which it is used: if it ends
        without a byte of an answer, the request goes out once more on a new one, as curl does.
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
        """Keep a connection whose answer was read, for another request; close any other."""
        self._busy.discard(link)
        if link.reusable and len(self._idle) < MAX_IDLE:
            link.idle_since_s = asyncio.get_running_loop().time()
            self._idle.append(link)
        else:
            link.close()

    def _request(self, method: str, target: bytes, headers: RawHeaders, body: bytes) -> bytes:
        kept = [one for one in _end_to_end(headers) if one[0].lower() not in OURS_TO_SAY]
        if body or method not in ("GET", "HEAD", "OPTIONS"):
            kept.append((b"content-length", b"%d" % len(body)))
        lines = [
            b"%s %s HTTP/1.1" % (method.encode("ascii"), self._prefix + target),
            b"host: " + self._url.netloc,
        ]
        lines += [b"%s: %s" % one for one in kept]
        if any(NOT_IN_A_LINE.search(line) for line in lines) or b" " in target:
            raise UpstreamError("the server behind this one cannot be asked for this path")
        return b"\r\n".join([*lines, b"", body])

    def _kept(self) -> Link | None:
        """A connection that was used before, and that the server has not closed or is about to."""
        oldest_s = asyncio.get_running_loop().time() - IDLE_S
        while self._idle:
            link = self._idle.pop()
            if link.reusable and link.idle_since_s > oldest_s:
                return link
            link.close()
        return None

    async def _connect(self) -> Link:
        host, port = self.address
        try:
            async with asyncio.timeout(CONNECT_S):
                made = await asyncio.get_running_loop().create_connection(
                    Link, host, port, ssl=self._tls
                )
        except (
            OSError
        ) as error:  # TimeoutError is one, and so is a certificate that is not believed
            shown = (
                "shows a certificate that is not trusted"
                if distrusted(error)
                else "cannot be reached"
            )
            raise UpstreamError(f"the server behind this one {shown}") from None
        return made[1]

    async def check_certificate(self) -> None:
        """`InputError` for a certificate that is not believed. A server that cannot be reached may
        come later.
        """
        if self._tls is None:
            return
        host, port = self.address
        try:
            async with asyncio.timeout(CONNECT_S):
                link = (
                    await asyncio.get_running_loop().create_connection(
                        Link, host, port, ssl=self._tls
                    )
                )[1]
        except OSError as error:
            if untrusted := distrusted(error):
                raise InputError(
                    f"{self.shown}: {untrusted}", "--upstream-ca FILE names who signed it"
                ) from None
        else:
            link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for link in (*self._idle, *self._busy):
            link.close()


def _end_to_end(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """The headers of the message, without those of the connection, named ones included."""
    named = {
        name.strip().lower()
        for key, value in headers
        if key.lower() == b"connection"
        for name in value.split(b",")
    }
    return [(key, value) for key, value in headers if key.lower() not in HOP_BY_HOP | named]


def _problem(error: WireError) -> UpstreamError:
    """In words that name no address: clients of a proxy need not learn what is behind it."""
    if error.timed_out:
        return UpstreamError("the server behind this one was silent for too long", timed_out=True)
    return UpstreamError("the connection to the server behind this one was lost")
