"""A server behind ours: requests are passed on to it, and its answers come back as they arrive, byte for byte.

Connections are kept and used again, so that a request does not pay for a handshake. Nothing is decoded or followed:
compression and redirects are between the client and the server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

import httpx

from toolkit.errors import InputError

CONNECT_S = 10.0
RawHeaders = Sequence[tuple[bytes, bytes]]

# RFC 9110, 7.6.1: these are about one connection, not about the message. `host` names the server, so it is ours to say.
HOP_BY_HOP = frozenset(
    name.encode()
    for name in (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te"),
        *("trailer", "transfer-encoding", "upgrade"),
    )
)


class UpstreamError(Exception):
    """The server did not answer. The message may be shown to a client; `timed_out` tells a wait from a refusal."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class Answer:
    """An answer whose head is there and whose body is to come."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.status = response.status_code
        self.headers = _end_to_end(response.headers.raw)

    def header(self, name: str) -> str:
        """'' where it is not there."""
        value: str = self._response.headers.get(name, "")
        return value

    async def body(self) -> AsyncIterator[bytes]:
        """Pieces as they come. `UpstreamError` where the rest does not come."""
        try:
            async for piece in self._response.aiter_raw():
                yield piece
        except httpx.TransportError as error:
            raise _problem(error) from error

    async def close(self) -> None:
        """Closes the connection of an answer that was not read to its end, which tells the server to stop."""
        await self._response.aclose()


class Upstream:
    """The server at `url`, which may have a path that comes before those of requests. Times in seconds.

    `InputError` where `url` is none. `silence_s` bounds the wait for an answer to begin, and for its next piece.
    """

    def __init__(self, url: str, silence_s: float) -> None:
        try:
            self._url = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise InputError(f"'{url}' is not a URL: {error}", "for example http://127.0.0.1:8000") from None
        if self._url.scheme not in ("http", "https") or not self._url.host:
            raise InputError(f"'{url}' is not the URL of a server", "for example http://127.0.0.1:8000")
        if self._url.userinfo or self._url.query or self._url.fragment:
            raise InputError("the URL of the server holds more than its address and a path", "leave the rest out")
        self._prefix = self._url.raw_path.rstrip(b"/").removesuffix(b"/v1")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=4.0)
        timeout = httpx.Timeout(silence_s, connect=CONNECT_S, pool=None)
        self._client = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False, follow_redirects=False)

    @property
    def address(self) -> tuple[str, int]:
        return self._url.host, self._url.port or (443 if self._url.scheme == "https" else 80)

    @property
    def shown(self) -> str:
        """The URL for people, which holds no secret."""
        return str(self._url)

    async def send(self, method: str, target: bytes, headers: RawHeaders, body: bytes) -> Answer:
        """Pass a request on; `target` is its path and query as the client sent them. `UpstreamError`: no answer."""
        kept = [(b"host", self._url.netloc), *(one for one in _end_to_end(headers) if one[0].lower() != b"host")]
        try:
            url = self._url.copy_with(raw_path=self._prefix + target)
            return Answer(await self._client.send(httpx.Request(method, url, headers=kept, content=body), stream=True))
        except httpx.InvalidURL as error:
            raise UpstreamError("the server behind this one cannot be asked for this path") from error
        except httpx.TransportError as error:
            raise _problem(error) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()


def _end_to_end(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """The headers of the message, without those of the connection, named ones included."""
    named = {
        name.strip().lower() for key, value in headers if key.lower() == b"connection" for name in value.split(b",")
    }
    return [(key, value) for key, value in headers if key.lower() not in HOP_BY_HOP | named]


def _problem(error: httpx.TransportError) -> UpstreamError:
    """In words that name no address: clients of a proxy need not learn what is behind it."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return UpstreamError("the server behind this one cannot be reached")
    if isinstance(error, httpx.TimeoutException):
        return UpstreamError("the server behind this one was silent for too long", timed_out=True)
    return UpstreamError("the connection to the server behind this one was lost")
