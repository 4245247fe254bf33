"""One streaming request on its own connection: the bytes go out, and the times at which tokens come back are noted.

An asyncio protocol over httptools' parser, because the load generator shares the machine with the server it measures:
16 us of CPU per token with uvloop, beside 460 us with httpx and 39 us with h11 (200 streams at once; docs/bench.md).
It reads OpenAI's event streams and nothing else: no redirects, no compression, no keep-alive.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import httptools
import msgspec

from toolkit.endpoints.target import Problem, error_text

MAX_ERROR_BYTES = 1 << 16
OVERLOADED = (429, 503)  # what a server answers that refuses a request for its load


class Usage(msgspec.Struct):
    completion_tokens: int


class Chunk(msgspec.Struct):
    """An event, as far as it matters: whether it brings tokens, how many there were in the end, what went wrong."""

    choices: list[msgspec.Raw] = []
    usage: Usage | None = None
    error: Problem | str | None = None


_decode = msgspec.json.Decoder(Chunk).decode


@dataclass(slots=True)
class Sample:
    """What the client saw of one request, in seconds since the replay began; NaN for what did not happen.

    `failure` is empty for a request that was served; `refused` says that the server had too much to do and
    took nothing of it (HTTP 429 or 503). `max_gap_s` is the longest wait between two events with tokens.
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


class StreamCall(asyncio.Protocol):
    """Sends `request` when connected and fills in `sample`; `closed` is set when all is over, however it ended."""

    def __init__(self, request: bytes, sample: Sample, clock: Callable[[], float]) -> None:
        self.closed = asyncio.Event()
        self.ended = False
        self._request = request
        self._sample = sample
        self._clock = clock
        self._now_s = math.nan
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._status = 0
        self._counted = False

    def end(self, failure: str = "") -> None:
        """It is over. The first reason given stands; a connection that was made is closed."""
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
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class is no subclass of it
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
        if chunk.usage is not None:
            self._counted = True
            self._sample.output_tokens = chunk.usage.completion_tokens

    def _on_tokens(self) -> None:
        sample, now_s = self._sample, self._now_s
        if math.isnan(sample.first_token_s):
            sample.first_token_s = now_s
        else:
            sample.max_gap_s = max(sample.max_gap_s, now_s - sample.last_token_s)
        sample.last_token_s = now_s

    def _finish(self, *, cut_off: bool) -> None:
        """Judge what has arrived. Without usage nobody knows how many tokens there were: events are not tokens."""
        if self.ended:
            return
        if self._status not in (0, 200):
            self._sample.refused = self._status in OVERLOADED
            self.end(f"HTTP {self._status}: {error_text(self._rest)}")
        elif self._counted and self._sample.output_tokens > 0 and not math.isnan(self._sample.first_token_s):
            self.end()
        else:
            self.end("the connection was lost" if cut_off else "the stream ended without tokens or their usage")
