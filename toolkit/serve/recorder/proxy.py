"""The proxy: passes requests on and answers back as they come, and writes a line of a trace for each that asks tokens.

A line holds lengths and times. Keys and texts pass through memory, and go nowhere but where the client sent them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from toolkit.endpoints.upstream import Answer, RawHeaders, Upstream, UpstreamError
from toolkit.serve.errors import ApiError, error_response
from toolkit.serve.gate import check_local_host
from toolkit.serve.recorder.reading import (
    Asked,
    Reader,
    StreamReader,
    WholeReader,
    ask_for_usage,
    read_request,
    split,
)
from toolkit.traces.log import TraceLog
from toolkit.traces.write import Line, to_ms

MAX_BODY_BYTES = 64 << 20
MAX_ROWS = 1024  # of one request that are written; nobody serves more
UNCOUNTED = "uncounted"
NOT_UNDERSTOOD = (400, 422)  # what servers answer that do not know `stream_options`


@dataclass(slots=True)
class Passage:
    """A request on its way through. Times on `time.monotonic`'s clock, NaN for what did not happen."""

    asked: Asked
    arrival_s: float
    first_token_s: float = math.nan
    last_token_s: float = math.nan
    status: str = "cancelled"  # until it ends otherwise
    reader: Reader | None = None

    def lines(self, timestamp: float) -> list[Line]:
        """One for each row; the usage is of all of them, so each has its share."""
        usage = self.reader.usage if self.reader else None
        rows = min(self.asked.rows, MAX_ROWS) if usage else 1
        inputs, outputs = (split(tokens, rows) for tokens in _tokens(usage))
        ttft, e2e = (_ms_or_none(at_s - self.arrival_s) for at_s in (self.first_token_s, self.last_token_s))
        return [
            Line(timestamp, inputs[row], outputs[row], self.asked.max_tokens, ttft, e2e, self.status)
            for row in range(rows)
        ]


def _tokens(usage: object) -> tuple[int, int]:
    return (getattr(usage, "prompt_tokens", 0), getattr(usage, "completion_tokens", 0))


def _ms_or_none(seconds: float) -> float | None:
    return None if math.isnan(seconds) else to_ms(seconds)


class Recorder:
    """The application. `ended` counts requests for tokens by what became of them.

    With `local_hosts_only` a Host that is a name other than localhost gets 403 (`gate.py` says why).
    """

    def __init__(self, upstream: Upstream, log: TraceLog, *, local_hosts_only: bool = False) -> None:
        self.ended: Counter[str] = Counter()
        self.leaving = False  # new requests are refused
        self.idle = asyncio.Event()
        self._upstream = upstream
        self._log = log
        self._local_hosts_only = local_hosts_only
        self._asks_usage = True  # until the server turns out not to know how
        self._under_way = 0
        self.idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self._under_way += 1
        self.idle.clear()
        try:
            await self._serve(scope, receive, send)
        except ApiError as refusal:
            await error_response(refusal)(scope, receive, send)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self.idle.set()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival_s = time.monotonic()
        if self.leaving:
            raise ApiError("the recorder is shutting down", status=503, headers={"Retry-After": "5"})
        if self._local_hosts_only:
            check_local_host(Headers(scope=scope).get("host", ""))
        body = await _read_body(receive)
        if body is None:
            return
        asked = read_request(body) if _asks_tokens(scope) else None
        passage = Passage(asked, arrival_s) if asked else None
        passing = asyncio.ensure_future(self._pass(scope, body, passage, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({passing, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not passing.done():
                passing.cancel()
            await asyncio.wait({passing})
            if passage:
                self._write(passage)
        if not passing.cancelled():
            passing.result()

    async def _pass(self, scope: Scope, body: bytes, passage: Passage | None, send: Send) -> None:
        answer = None
        try:
            answer = await self._ask(scope, body, passage)
            await self._answer(answer, passage, send)
        except UpstreamError as error:
            if passage:
                passage.status = "failed"
            if answer is not None:
                return  # of an answer that had begun; the server closes a connection whose response was not completed
            raise ApiError(str(error), status=504 if error.timed_out else 502, code="upstream") from error
        finally:
            if answer is not None:
                await answer.close()

    async def _ask(self, scope: Scope, body: bytes, passage: Passage | None) -> Answer:
        """The head of the server's answer, to the request as it came, or with the wish for its usage."""
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        headers: RawHeaders = scope["headers"]
        if passage is None:
            return await self._upstream.send(scope["method"], target, headers, body)
        headers = _without(headers, b"accept-encoding")  # what is compressed cannot be counted
        asked = passage.asked
        adds = self._asks_usage and asked.stream and not asked.usage
        if adds:
            told = _without(headers, b"content-length")
            answer = await self._upstream.send(scope["method"], target, told, ask_for_usage(body))
            if answer.status not in NOT_UNDERSTOOD:
                passage.reader = StreamReader(strip=True)
                return answer
            await answer.close()
        plain = await self._upstream.send(scope["method"], target, headers, body)
        if adds and plain.status == 200:
            self._asks_usage = False
        return plain

    async def _answer(self, answer: Answer, passage: Passage | None, send: Send) -> None:
        reader = _reader(answer, passage)
        await send({"type": "http.response.start", "status": answer.status, "headers": _head(answer, passage)})
        async for piece in answer.body():
            passed = reader.feed(piece) if reader else piece
            if passage and reader and reader.spoke:
                passage.last_token_s = time.monotonic()
                if math.isnan(passage.first_token_s):
                    passage.first_token_s = passage.last_token_s
            if passed:
                await send(_piece(passed, more=True))
        await send(_piece(reader.end() if reader else b"", more=False))
        if passage:
            passage.status = _status(answer, reader)
            if isinstance(reader, WholeReader):
                passage.last_token_s = time.monotonic()

    def _write(self, passage: Passage) -> None:
        self.ended[passage.status] += 1
        for line in passage.lines(self._log.timestamp(passage.arrival_s)):
            self._log.add(line)


def _asks_tokens(scope: Scope) -> bool:
    path: str = scope["path"]
    return scope["method"] == "POST" and path.endswith(("/v1/completions", "/v1/chat/completions"))


def _reader(answer: Answer, passage: Passage | None) -> Reader | None:
    """What reads the answer to a request for tokens."""
    if passage is None or answer.status != 200:
        return None
    if not answer.header("content-type").startswith("text/event-stream"):
        passage.reader = WholeReader()
    elif passage.reader is None:
        passage.reader = StreamReader(strip=False)
    return passage.reader


def _head(answer: Answer, passage: Passage | None) -> RawHeaders:
    """Without the length, where an event may be left out."""
    stripped = passage is not None and isinstance(passage.reader, StreamReader)
    return _without(answer.headers, b"content-length") if stripped else answer.headers


def _status(answer: Answer, reader: Reader | None) -> str:
    if answer.status != 200:
        return f"HTTP {answer.status}"
    if reader is None or reader.failed:
        return "failed"
    return "ok" if reader.usage else UNCOUNTED


def _without(headers: RawHeaders, name: bytes) -> RawHeaders:
    return [(key, value) for key, value in headers if key.lower() != name]


def _piece(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def _read_body(receive: Receive) -> bytes | None:
    """All of it; None: the client has gone. `ApiError` where it is too long."""
    pieces: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        piece = message.get("body", b"")
        size += len(piece)
        if size > MAX_BODY_BYTES:
            raise ApiError(f"the body is longer than {MAX_BODY_BYTES >> 20} MiB", status=413)
        pieces.append(piece)
        more = message.get("more_body", False)
    return b"".join(pieces)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
