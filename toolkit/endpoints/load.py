"""The load generator's HTTP client: one streaming request, with the time of each token.

It shares the machine with the server that it measures, so it costs as little as possible: an
asyncio protocol over httptools' parser takes 16 us of CPU per token with uvloop
(docs/decisions/server.md has what libraries take). It reads OpenAI's event streams only: no
redirects, no compression, no keep-alive.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from toolkit.endpoints.foreign import UNREADABLE, Count
from toolkit.endpoints.sse import EventReader, data_of
from toolkit.endpoints.target import Problem, Target, error_text

MAX_EVENT_BYTES = 16 << 20
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
