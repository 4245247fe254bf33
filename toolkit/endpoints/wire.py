"""HTTP/1.1 on the wire, as asyncio protocols over httptools' parser, for little CPU per event.

`Link` is one connection of a proxy to its server. Requests go out as bytes and answers come back in
pieces as they arrive. With httpx and h11 an event of a stream costs 130 us of CPU
(`benchmarks/serving/record_proxy.py`). Pieces that arrive before the last one was read are merged.
When more than `MAX_HELD_BYTES` of an answer is held, reading from the server pauses. `Link` decodes
no body and follows no redirect.

`StreamCall` is one streaming request of the load generator, on its own connection, which notes the
times of its tokens in a `Sample`. The load generator shares the machine with the server that it
measures: it costs 16 us of CPU per token with uvloop, against 460 us with httpx and 39 us with h11
(200 streams at once; docs/how-to/measure.md). It reads OpenAI's event streams only: no redirects,
no compression, no keep-alive. `ClientConnection` builds the requests and sends them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from toolkit.endpoints.target import Problem, Target, error_text

MAX_HELD_BYTES = 1 << 18
MAX_HEAD_BYTES = 1 << 18
RawHeaders = list[tuple[bytes, bytes]]


class WireError(Exception):
    """The answer did not arrive, or not completely. `timed_out`: the server was silent too long."""

    def __init__(self, *, timed_out: bool = False) -> None:
        super().__init__()
        self.timed_out = timed_out


class Link(asyncio.Protocol):
    """A connection with one request at a time. `reusable` says whether it can take another."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: RawHeaders = []
        self.idle_since_s = 0.0
        self.heard = False  # a byte has arrived since the last request
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._event = asyncio.Event()
        self._pieces: list[bytes] = []  # of the body, unread
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
        """Send a request and wait for the head of its answer; `bodyless`: it is a HEAD request.

        Raises `WireError` if no head arrives.
        """
        self.status, self.headers, self._pieces = 0, [], []
        self._held_bytes = self._head_bytes = 0
        self.heard = self._has_head = self._complete = self._kept = False
        self._ends_with_connection, self._bodyless = True, bodyless
        if self._transport is None or self._closed:
            raise WireError
        self._transport.write(request)
        while not self._has_head:
            await self._wait(silence_s)

    async def body(self, silence_s: float) -> AsyncIterator[bytes]:
        """Yield the body in pieces, each all that has arrived since the last one. Raises
        `WireError` if the rest does not arrive.
        """
        while True:
            if self._pieces:
                piece = b"".join(self._pieces)
                self._pieces.clear()
                paused = self._held_bytes > MAX_HELD_BYTES
                if paused and self._transport is not None and not self._closed:
                    self._transport.resume_reading()
                self._held_bytes = 0
                yield piece
            elif self._complete:
                return
            else:
                await self._wait(silence_s)

    def close(self) -> None:
        """Close the connection at once, so that the server notices and stops."""
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self, silence_s: float) -> None:
        """Wait for the next bytes, or for the end of the connection."""
        if self._closed:
            raise WireError
        self._event.clear()
        if silence_s == math.inf:  # the caller watches the time itself
            await self._event.wait()
            return
        try:
            async with asyncio.timeout(silence_s):
                await self._event.wait()
        except TimeoutError:
            raise WireError(timed_out=True) from None

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's class is no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._complete:  # no request is open
            self.close()
            return
        self.heard = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.close()
        if not self._has_head:
            self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.close()
        self._event.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        if self._has_head and self._ends_with_connection and exc is None:
            self._complete = True
        self._event.set()

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
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


MAX_ERROR_BYTES = 1 << 16
OVERLOADED = (429, 503)  # statuses of a server that refuses load


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class StreamUsage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens: int = 0
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

    `failure` is empty for a served request. `refused` means that the server was overloaded and
    refused the whole request (HTTP 429 or 503). `max_gap_s` is the longest wait between two events
    with tokens. `cached_tokens` are those that the server took from its cache; None: it does not
    say. Text and token ids of the answer are kept where `keeps_answer` says so.
    """

    scheduled_s: float
    prompt_tokens: int
    wanted_tokens: int
    sent_s: float = math.nan
    first_token_s: float = math.nan
    last_token_s: float = math.nan
    max_gap_s: float = 0.0
    output_tokens: int = 0
    failure: str = "not sent"
    refused: bool = False
    counted_prompt_tokens: int = 0  # by the server
    cached_tokens: int | None = None
    keeps_answer: bool = False
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
        self._rest = b""  # an incomplete line of events, or the body of an error
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
            self._rest = (self._rest + body)[:MAX_ERROR_BYTES]
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(line[5:].strip())

    def on_message_complete(self) -> None:
        self._finish(cut_off=False)

    def _on_event(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        try:
            chunk = _decode(data)
        except msgspec.DecodeError:
            self.end("an event is not OpenAI's")
            return
        if chunk.error is not None:
            self.end(f"error in the stream: {error_text(data)}")
        if chunk.choices:
            self._on_tokens()
            if self._sample.keeps_answer:
                self._keep(chunk.choices[0])
        if chunk.usage is not None:
            self._counted = True
            self._sample.output_tokens = chunk.usage.completion_tokens
            self._sample.counted_prompt_tokens = chunk.usage.prompt_tokens
            details = chunk.usage.prompt_tokens_details
            self._sample.cached_tokens = details.cached_tokens if details else None

    def _keep(self, choice: msgspec.Raw) -> None:
        try:
            found = _decode_choice(choice)
        except msgspec.DecodeError:
            return
        if found.text:
            self._sample.answer_text.append(found.text)
        self._sample.answer_ids.extend(found.token_ids or ())

    def _on_tokens(self) -> None:
        sample, now_s = self._sample, self._now_s
        if math.isnan(sample.first_token_s):
            sample.first_token_s = now_s
        else:
            sample.max_gap_s = max(sample.max_gap_s, now_s - sample.last_token_s)
        sample.last_token_s = now_s

    def _finish(self, *, cut_off: bool) -> None:
        """End the call with what has arrived.

        Without usage it has failed: the number of tokens is unknown, since an event may hold
        several.
        """
        if self.ended:
            return
        has_tokens = not math.isnan(self._sample.first_token_s)
        if self._status not in (0, 200):
            self._sample.refused = self._status in OVERLOADED
            self.end(f"HTTP {self._status}: {error_text(self._rest)}")
        elif self._counted and self._sample.output_tokens > 0 and has_tokens:
            self.end()
        else:
            self.end(
                "the connection was lost"
                if cut_off
                else "the stream ended without tokens or their usage"
            )


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

    def request(self, fields: dict[str, object], session: str = "") -> bytes:
        """The bytes of one request, head and body; `session` names its conversation."""
        body = msgspec.json.encode(fields)
        named = b"\r\nx-session-id: %s" % session.encode() if session else b""
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
