"""HTTP/1.1 on the wire, as asyncio protocols over httptools' parser, for little CPU per event.

`Upstream` is a proxy's client: it passes requests on to one server, and the answers come back byte
for byte, in pieces as they arrive. Nothing is decoded or followed: compression and redirects are
between the client and the server. Pieces that arrive before the last one was read are merged. When
more than `MAX_HELD_BYTES` of an answer is held, reading from the server pauses. With httpx and h11
an event of a stream costs 130 us of CPU (`benchmarks/serving/record_proxy.py` at commit 53d1949e).

`StreamCall` is one streaming request of the load generator, which shares the machine with the
server that it measures: it costs 16 us of CPU per token with uvloop, against 460 us with httpx and
39 us with h11 (200 streams at once; docs/how-to/measure.md). It reads OpenAI's event streams only:
no redirects, no compression, no keep-alive.
"""

from __future__ import annotations

import asyncio
import errno
import math
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from toolkit.endpoints.foreign import UNREADABLE, Count
from toolkit.endpoints.sse import EventReader, data_of
from toolkit.endpoints.target import Problem, Target, distrusted, error_text, server_url, trust
from toolkit.errors import InputError

MAX_HELD_BYTES = 1 << 18
# Between two pieces of a body: a head, interim answers, framing, trailers.
MAX_HEAD_BYTES = 1 << 18
MAX_EVENT_BYTES = 16 << 20  # as the load generator reads them
CONNECT_S = 10.0
IDLE_S = 4.0  # servers close theirs after five seconds or more
MAX_IDLE = 256
NO_ROOM_HERE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
LINE_BREAKS = re.compile(rb"[\r\n\0]")
# The proxy sets these itself. It sends a body at once, so it does not pass `expect` on.
SET_BY_PROXY = (b"host", b"content-length", b"expect")
LOST = "the connection to the server behind this one was lost"
RawHeaders = Sequence[tuple[bytes, bytes]]

# RFC 9110, 7.6.1: these headers are about one connection, not about the message.
HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization"),
        *(b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    )
)


class UpstreamError(Exception):
    """The answer did not arrive, or not completely. `timed_out`: the server was silent too long.
    `here`: this process lacks what a connection needs, and the server is not at fault.

    The message may be shown to a proxy's client: it names no address of the server.
    """

    def __init__(self, message: str, *, timed_out: bool = False, here: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out
        self.here = here


class Link(asyncio.Protocol):
    """A connection with one request at a time. `reusable` says whether it can take another."""

    _transport: asyncio.Transport  # from `connection_made` on

    def __init__(self, open_links: OpenLinks) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._open_links = open_links
        self._is_counted = True
        self.idle_since_s = 0.0
        self.heard = False  # a byte has arrived since the last request
        self._event = asyncio.Event()
        self._pieces: list[bytes] = []  # of the body, unread
        self._held_bytes = 0
        self._bodyless_bytes = 0  # that came since the last piece of a body
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
        """Send a request, a HEAD if `bodyless`. Raises `UpstreamError` if no answer begins."""
        self.status = 0
        self.headers = []
        self._pieces = []
        self._held_bytes = self._bodyless_bytes = 0
        self.heard = self._has_head = self._complete = self._kept = False
        self._ends_with_connection = True
        self._bodyless = bodyless
        if self._closed:
            raise UpstreamError(LOST)
        self._transport.write(request)
        while not self._has_head:
            await self._wait(silence_s)

    async def body(self, silence_s: float) -> AsyncIterator[bytes]:
        """Yield the body in pieces as they arrive. Raises `UpstreamError` if the rest does not."""
        while True:
            if self._pieces:
                piece = b"".join(self._pieces)
                self._pieces.clear()
                if self._held_bytes > MAX_HELD_BYTES and not self._closed:
                    self._transport.resume_reading()
                self._held_bytes = 0
                yield piece
            elif self._complete:
                return
            else:
                await self._wait(silence_s)

    def close(self) -> None:
        """Close the connection at once, so that the server notices and stops."""
        self._uncount()
        self._transport.abort()

    def _uncount(self) -> None:
        self._open_links.count -= self._is_counted
        self._is_counted = False

    async def _wait(self, silence_s: float) -> None:
        """Wait for the next bytes, or for the end of the connection."""
        if self._closed:
            raise UpstreamError(LOST)
        self._event.clear()
        if silence_s == math.inf:  # the caller watches the time itself
            await self._event.wait()
            return
        try:
            async with asyncio.timeout(silence_s):
                await self._event.wait()
        except TimeoutError:
            text = "the server behind this one was silent for too long"
            raise UpstreamError(text, timed_out=True) from None

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's class is no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)  # a cycle, until the connection is lost

    def data_received(self, data: bytes) -> None:
        if self._complete:  # no request is open
            self.close()
            return
        self.heard = True
        self._bodyless_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.close()
        if self._bodyless_bytes > MAX_HEAD_BYTES:
            self.close()
        self._event.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._uncount()
        del self._parser  # its callbacks are ours: a cycle, which only a collection would free
        self._complete |= self._has_head and self._ends_with_connection and exc is None
        self._event.set()

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._has_head:  # a trailer: nothing here reads one, and it may be endless
            return
        self.headers.append((name, value))
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:  # an interim response: the final one follows
            return
        self._has_head = True
        if self._bodyless:
            # The parser would wait for a body, so the connection cannot be reused.
            self._complete = True

    def on_body(self, body: bytes) -> None:
        self._bodyless_bytes = 0
        if self._bodyless:
            return
        self._pieces.append(body)
        before = self._held_bytes
        self._held_bytes = self._held_bytes + len(body)
        if before <= MAX_HELD_BYTES < self._held_bytes:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if not self._has_head:
            self.headers = []
            return
        self._complete = True
        self._kept = not self._bodyless and self._parser.should_keep_alive()


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

    def body(self) -> AsyncIterator[bytes]:
        """Pieces as they arrive. Raises `UpstreamError` if the rest does not arrive."""
        return self._link.body(self._upstream.silence_s)

    async def aclose(self) -> None:  # for `contextlib.aclosing`
        """Release the connection.

        If the answer was not read to its end the connection is closed, which tells the server to
        stop.
        """
        self._upstream.release(self._link)


class OpenLinks:
    """The connections to several upstreams: beyond `most`, those that are idle close for others.

    An idle connection has a file descriptor, which a client may need.
    """

    def __init__(self, most: int = 1 << 30) -> None:
        self.most = most
        self.count = 0
        self.upstreams: set[Upstream] = set()

    def add(self) -> None:
        """Count another one, before it opens."""
        self.count += 1
        while self.count > self.most:
            idle = [each.idle for each in self.upstreams if each.idle]
            if not idle:
                return
            longest = min(idle, key=lambda links: links[0].idle_since_s)
            longest.pop(0).close()


class Upstream:
    """The server at `url`; a path in it is put before the paths of requests. Times are in seconds.

    Raises `InputError` for an invalid `url`. `silence_s` bounds the wait for the start of an answer
    and for each next piece. `authorities` is a file of the authorities that may have signed its
    certificate, by default the system's. `open_links` bounds its connections with those of others.
    """

    def __init__(
        self,
        url: str,
        silence_s: float,
        authorities: Path | None = None,
        open_links: OpenLinks | None = None,
    ) -> None:
        self._url = server_url(url)
        if self._url.userinfo or self._url.query or self._url.fragment:
            text = "the URL of the server holds more than its address and a path"
            raise InputError(text, "leave the rest out")
        self.silence_s = silence_s
        self._prefix = self._url.raw_path.rstrip(b"/").removesuffix(b"/v1")
        if authorities is not None and self._url.scheme != "https":
            text = f"'{url}' shows no certificate that {authorities} could have signed"
            raise InputError(text, "https://, or none")
        self._tls = trust(authorities) if self._url.scheme == "https" else None
        self.idle: list[Link] = []  # the most recently used is last
        self._busy: set[Link] = set()
        self._open_links = open_links or OpenLinks()
        self._open_links.upstreams.add(self)

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
        request = self._request(method, target, headers, body)
        bodyless = method == "HEAD"
        if kept := self._kept():
            try:
                return await self._ask(kept, request, bodyless=bodyless)
            except UpstreamError as error:
                if kept.heard or error.timed_out:
                    raise
        try:
            link = await self._open()
        except OSError as error:
            if error.errno in NO_ROOM_HERE:
                raise UpstreamError("this server has no room for a connection", here=True) from None
            untrusted = "shows a certificate that is not trusted"
            problem = untrusted if distrusted(error) else "cannot be reached"
            raise UpstreamError(f"the server behind this one {problem}") from None
        return await self._ask(link, request, bodyless=bodyless)

    async def _ask(self, link: Link, request: bytes, *, bodyless: bool) -> UpstreamAnswer:
        self._busy.add(link)
        try:
            await link.ask(request, self.silence_s, bodyless=bodyless)
        except (UpstreamError, asyncio.CancelledError):
            self.release(link)
            raise
        return UpstreamAnswer(link, self)

    def release(self, link: Link) -> None:
        """Keep a connection for the next request if its answer was read; close any other."""
        self._busy.discard(link)
        if link.reusable and len(self.idle) < MAX_IDLE:
            link.idle_since_s = asyncio.get_running_loop().time()
            self.idle.append(link)
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
        while self.idle:
            link = self.idle.pop()
            if link.reusable and link.idle_since_s > oldest_s:
                return link
            link.close()
        return None

    async def _open(self) -> Link:
        """Open a connection. Raises `OSError`, for a timeout or an untrusted certificate too."""
        loop = asyncio.get_running_loop()
        self._open_links.add()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, link = await loop.create_connection(
                    lambda: Link(self._open_links), *self.address, ssl=self._tls
                )
        except BaseException:  # also where it is cancelled, or has no time left
            self._open_links.count -= 1
            raise
        return link

    async def check_certificate(self) -> None:
        """Raise `InputError` if the certificate is not trusted. An absent server is no error."""
        if self._tls is None:
            return
        try:
            (await self._open()).close()
        except OSError as error:
            if untrusted := distrusted(error):
                hint = "--upstream-ca FILE names the authority that signed it"
                raise InputError(f"{self.shown}: {untrusted}", hint) from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; answers that were not read to their end break off."""
        self._open_links.upstreams.discard(self)
        for link in (*self.idle, *self._busy):
            link.close()
        self.idle.clear()


def _end_to_end(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """The headers of the message, without those of the connection and those that it names."""
    left_out = set(HOP_BY_HOP)
    for key, value in headers:
        if key.lower() == b"connection":
            left_out.update(name.strip().lower() for name in value.split(b","))
    return [(key, value) for key, value in headers if key.lower() not in left_out]


MAX_ERROR_BYTES = 1 << 16
OVERLOADED = (429, 503)  # statuses of a server that refuses load


class PromptDetails(msgspec.Struct):
    cached_tokens: Count | None = None


class StreamUsage(msgspec.Struct):
    completion_tokens: Count
    prompt_tokens: Count = 0
    prompt_tokens_details: PromptDetails | None = None


class StreamChoice(msgspec.Struct):
    """What a choice brings, where answers are kept."""

    text: str | None = None
    token_ids: list[int] | None = None


class StreamEvent(msgspec.Struct):
    """An event of a stream: whether it brings tokens, the final count, and what went wrong."""

    choices: list[msgspec.Raw] = []
    usage: StreamUsage | None = None
    error: Problem | str | None = None


_decode = msgspec.json.Decoder(StreamEvent).decode
_decode_choice = msgspec.json.Decoder(StreamChoice).decode


@dataclass(slots=True)
class Sample:
    """What the client saw of one request, in seconds since the replay began; NaN for events that
    never happened.
    """

    scheduled_s: float
    prompt_tokens: int
    wanted_tokens: int
    sent_s: float = math.nan
    first_token_s: float = math.nan
    last_token_s: float = math.nan
    max_gap_s: float = 0.0  # between two events with tokens
    output_tokens: int = 0
    failure: str = "not sent"  # '' for a served request
    refused: bool = False  # as a whole, by an overloaded server (HTTP 429 or 503)
    counted_prompt_tokens: int = 0  # by the server
    cached_tokens: int | None = None  # taken from the server's cache; None: it does not say
    keeps_answer: bool = False  # its text and its token ids
    answer_text: list[str] = field(default_factory=list)
    answer_ids: list[int] = field(default_factory=list)


class StreamCall(asyncio.Protocol):
    """Sends `request` once connected, and fills in `sample`. `closed` is set when the connection
    is gone, or could not be made.
    """

    def __init__(self, request: bytes, sample: Sample, clock: Callable[[], float]) -> None:
        self.closed = asyncio.Event()
        self.ended = False
        self._request = request
        self._sample = sample
        self._clock = clock
        self._now_s = math.nan
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._reader = EventReader()
        self._error = b""  # the body of an error
        self._status = 0
        self._counted = False  # the server has told how many tokens it generated

    def end(self, failure: str = "") -> None:
        """End the call, and close the connection. Of several reasons the first is kept."""
        if self.ended:
            return
        self.ended = True
        self._sample.failure = failure
        if self._transport is None:
            self.closed.set()
        else:
            self._transport.abort()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's class is no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._sample.sent_s = self._clock()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now_s = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.end("the answer is not HTTP")

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(cut_off=True)
        self.closed.set()

    # httptools' callbacks

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._status != 200:
            self._error = (self._error + body)[:MAX_ERROR_BYTES]
            return
        for event in self._reader.feed(body):
            if data := data_of(event):
                self._on_event(data)
        if len(self._reader.rest) > MAX_EVENT_BYTES:
            self.end("an event is too long")

    def on_message_complete(self) -> None:
        self._finish(cut_off=False)

    def _on_event(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        try:
            chunk = _decode(data)
        except UNREADABLE:
            self.end("an event is not OpenAI's")
            return
        if chunk.error is not None:
            self.end(f"error in the stream: {error_text(data)}")
        sample = self._sample
        now_s = self._now_s
        if chunk.choices:
            if math.isnan(sample.first_token_s):
                sample.first_token_s = now_s
            else:
                sample.max_gap_s = max(sample.max_gap_s, now_s - sample.last_token_s)
            sample.last_token_s = now_s
            if sample.keeps_answer:
                with suppress(*UNREADABLE):
                    kept = _decode_choice(chunk.choices[0])
                    sample.answer_text += [kept.text] if kept.text else []
                    sample.answer_ids += kept.token_ids or []
        if chunk.usage is not None:
            self._counted = True
            sample.output_tokens = chunk.usage.completion_tokens
            sample.counted_prompt_tokens = chunk.usage.prompt_tokens
            details = chunk.usage.prompt_tokens_details
            sample.cached_tokens = details.cached_tokens if details else None

    def _finish(self, *, cut_off: bool) -> None:
        """End the call. Without usage it failed: an event may hold several tokens."""
        if self.ended:
            return
        has_tokens = not math.isnan(self._sample.first_token_s)
        if self._status not in (0, 200):
            self._sample.refused = self._status in OVERLOADED
            self.end(f"HTTP {self._status}: {error_text(self._error)}")
        elif self._counted and self._sample.output_tokens > 0 and has_tokens:
            self.end()
        elif cut_off:
            self.end("the connection was lost")
        else:
            self.end("the stream ended without tokens or their usage")


INTERRUPTED = "interrupted"


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's loop if it is installed: the client shares the machine with its server."""
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class ClientConnection:
    """How requests reach a target. Building them before the clock starts costs nothing later."""

    def __init__(self, target: Target) -> None:
        parts = urlsplit(target.url)
        self._tls = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        host = parts.netloc.rpartition("@")[2]
        lines = [f"POST {parts.path}/v1/completions HTTP/1.1", f"host: {host}", "connection: close"]
        lines += ["content-type: application/json", "accept: text/event-stream"]
        lines += [f"{name}: {value}" for name, value in target.headers.items()]
        self._head = "\r\n".join(lines).encode()

    def request(self, fields: dict[str, object], session: str = "", name: str = "") -> bytes:
        """The bytes of one request, head and body; `session` names its conversation, `name` the
        request itself.
        """
        body = msgspec.json.encode(fields)
        named = b"\r\nx-session-id: %s" % session.encode() if session else b""
        named += b"\r\nx-request-id: %s" % name.encode() if name else b""
        return b"%s%s\r\ncontent-length: %d\r\n\r\n%s" % (self._head, named, len(body), body)

    async def send(
        self, request: bytes, sample: Sample, clock: Callable[[], float], timeout_s: float
    ) -> None:
        """Send one request and wait for its end. Failures are in `sample`; none is raised."""
        call = StreamCall(request, sample, clock)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: call, self._host, self._port, ssl=self._tls or None
                )
                await call.closed.wait()
        except TimeoutError:
            call.end(f"no end within {timeout_s:g} s")
        except OSError as error:
            call.end(f"cannot connect: {error.strerror or error}")
        except asyncio.CancelledError:
            call.end(INTERRUPTED)
        await call.closed.wait()
