"""A request while it is served: its text, its times, the pass that runs it, and the reply that
carries its text to the client.

The driver adds text to a request and tells the reply. The reply sends what the requests have that
was not sent: a slow reader gets fewer and larger events, costs memory that `max_tokens` bounds, and
never blocks the driver.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from starlette.types import Send

from toolkit.engines.protocol import FinishReason, Row, SamplingParams
from toolkit.engines.tokenizer import Detokenizer
from toolkit.openai.answers import AnswerWriter, Usage, error_event
from toolkit.openai.errors import ApiError
from toolkit.openai.events import DONE
from toolkit.routing.admission import NO_PREDICTION, PredictedLatency
from toolkit.sched.types import Pass
from toolkit.server.stats import RequestTimes

SHUTTING_DOWN = "the server is shutting down"
TIMED_OUT = "it was not done at its deadline"
STILL_WAITING = b": waiting\n\n"
JSON_HEADERS = [(b"content-type", b"application/json")]
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Status = Literal["", "stop", "length", "cancelled", "failed"]


class TextOutput:
    """The text of one choice, up to a stop string. How the tokens are grouped has no effect.

    The match that ends first wins, as if the text arrived one character at a time. If two matches
    end at the same character, the longer one wins. Text that may be the start of a stop string is
    held back until that is decided. Stop strings are ignored in the first `min_tokens` tokens.

    Attributes:
        tokens: up to the end of the text.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        self.tokens = 0
        self._detokenizer = detokenizer
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._min_tokens = min_tokens
        self._held = ""

    def feed(self, tokens: Sequence[int], finish: FinishReason) -> tuple[str, FinishReason]:
        """Add new tokens of the engine. Return the new text, and how the text has ended, or ''.

        If `finish` is 'stop', the last token ended the row: it counts, but has no text.
        """
        visible = tokens[:-1] if finish == "stop" else tokens
        if self._stops:
            text, used = self._search_each(visible)
            if used:
                self.tokens += used
                return text, "stop"
        else:
            text = self._detokenizer.feed(visible)
        self.tokens += len(tokens)
        if finish:
            rest, stopped = self._search(self._detokenizer.flush())
            text += rest
            if stopped:
                return text, "stop"
            text += self._held
        return text, finish

    def _search_each(self, tokens: Sequence[int]) -> tuple[str, int]:
        """Return the text, and after how many of the tokens a stop string ended it; 0: none did.

        It feeds one token at a time, so the count does not depend on how tokens were grouped.
        """
        text = ""
        for used, token in enumerate(tokens, start=1):
            piece = self._detokenizer.feed((token,))
            if self.tokens + used > self._min_tokens:
                piece, stopped = self._search(piece)
                if stopped:
                    return text + piece, used
            text += piece
        return text, 0

    def _search(self, text: str) -> tuple[str, bool]:
        """Return the text that may be shown, and whether a stop string ended it."""
        text = self._held + text
        matches = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if matches:
            return text[: min(matches)[1]], True
        # Hold back the longest suffix that some stop string begins with.
        keep = max(len(text) - self._longest + 1, 0)
        while not any(stop.startswith(text[keep:]) for stop in self._stops) and keep < len(text):
            keep += 1
        self._held = text[keep:]
        return text[:keep], False


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One choice of a client's request, from its submission to its end. Lengths are in tokens,
    times in seconds on the driver's clock, or NaN.

    Attributes:
        index: of the choice.
        end_after: output length of a replayed trace; hidden from the scheduler.
        timeout_s: from its arrival to its last token.
        predicted: the forecast when it arrived.
        tokens: generated so far, up to a stop string.
        unsent: text that the reply has not sent.
        status: how it ended, or '' while it runs.
        failure: why it failed, or ''.
        flight: the pass without kept caches that runs it.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams
    output: TextOutput
    reply: Reply
    index: int = 0
    priority: int = 0
    end_after: int | None = None
    timeout_s: float = math.inf
    times: RequestTimes = field(default_factory=RequestTimes)
    predicted: PredictedLatency = NO_PREDICTION
    tokens: list[int] = field(default_factory=list)
    unsent: str = ""
    started_s: float = math.nan
    status: Status = ""
    failure: str = ""
    flight: Pass | None = None
    deadline: asyncio.TimerHandle | None = None

    def row(self) -> Row:
        """The row that a worker needs to continue this request."""
        return Row(
            self.request_id,
            self.prompt + tuple(self.tokens),
            len(self.tokens),
            self.max_new_tokens,
            self.sampling,
            self.end_after,
        )


class Reply:
    """The response to one HTTP request, of which `requests` are the choices.

    As events, the response is `data: ` lines of JSON, of which the last is `[DONE]`. A comment is
    sent after `keepalive_s` seconds without new output. If the client wants the usage, every event
    carries `usage: null`, and a last one without choices the usage.
    """

    def __init__(
        self, writer: AnswerWriter, prompt_tokens: int, *, streams: bool, keepalive_s: float
    ) -> None:
        self.requests: list[LiveRequest] = []
        self._writer = writer
        self._prompt_tokens = prompt_tokens
        self._streams = streams
        self._keepalive_s = keepalive_s
        self._news: dict[LiveRequest, None] = {}  # with new output, in the order that it came
        self._ended = 0
        self._ready = asyncio.Event()

    def tell(self, request: LiveRequest) -> None:
        """Note that a request has new output, or has ended."""
        self._news[request] = None
        self._ended += bool(request.status)
        if self._streams or self._ended == len(self.requests) or request.failure:
            self._ready.set()

    async def send(self, send: Send) -> None:
        """Send the response to its end. Raises ApiError if it fails before anything was sent."""
        if self._streams:
            await self._send_events(send)
        else:
            await self._send_whole(send)

    async def _send_whole(self, send: Send) -> None:
        await self._ready.wait()
        for request in self.requests:
            if request.failure:
                raise request_failed(request.failure)
        choices = [(request.index, request.unsent, request.status) for request in self.requests]
        content = self._writer.whole(choices, self._usage())
        await send_whole(send, 200, JSON_HEADERS, content)

    async def _send_events(self, send: Send) -> None:
        writer = self._writer
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        more = True
        while more:
            events = []
            failure = ""
            for request in await self._take():
                failure = failure or request.failure
                if request.unsent or not request.failure:
                    finish = "" if request.failure else request.status
                    events.append(writer.event(request.index, request.unsent, finish))
                    request.unsent = ""
            more = self._ended < len(self.requests) and not failure
            if failure:
                events.append(error_event(request_failed(failure)))
            elif not more and writer.shows_usage:
                events.append(writer.usage(self._usage()))
            if not more:
                events.append(DONE)
            body = b"".join(events) or STILL_WAITING
            await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _take(self) -> list[LiveRequest]:
        """Wait at most `keepalive_s` seconds for new output, and return the requests that have
        some.
        """
        if not self._ready.is_set():
            timer = asyncio.get_running_loop().call_later(self._keepalive_s, self._ready.set)
            try:
                await self._ready.wait()
            finally:
                timer.cancel()
        self._ready.clear()
        news = list(self._news)
        self._news.clear()
        return news

    def _usage(self) -> Usage:
        return Usage(self._prompt_tokens, sum(len(request.tokens) for request in self.requests))


def request_failed(reason: str) -> ApiError:
    """Return the error of a request that failed. A client should retry only at a shutdown, because
    then another server answers.
    """
    timed_out = reason.startswith(TIMED_OUT)  # it would take as long again
    status, code = (504, "deadline_exceeded") if timed_out else (503, "request_failed")
    headers = {} if reason == SHUTTING_DOWN else {"x-should-retry": "false"}
    return ApiError(f"the request failed: {reason}", status=status, code=code, headers=headers)


async def send_whole(
    send: Send, status: int, headers: list[tuple[bytes, bytes]], content: bytes
) -> None:
    """Send an answer in one piece."""
    headers = [*headers, (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": False})
