"""The backend of one server that is recorded: a proxy that writes lengths and times of requests for
tokens.

`Recorder` passes requests to the upstream server and responses back as they arrive, and writes one
line per row. Keys and texts pass through memory, but go only where the client sent them. What
cannot be read passes unread. What prompts share is noted by `toolkit.server.prompt_blocks`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from msgspec.structs import replace
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from toolkit.endpoints.upstream import RawHeaders, Upstream, UpstreamAnswer, UpstreamError
from toolkit.errors import InputError
from toolkit.openai.answers import Answer, Usage
from toolkit.openai.errors import ApiError
from toolkit.openai.events import EventReader, data_of, in_parts, lines_of
from toolkit.openai.foreign import decoded, is_null
from toolkit.openai.requests import CHAT, COMPLETIONS, GenerationCall
from toolkit.server.backend import SendAnswer, ServerBackend
from toolkit.server.background import while_connected
from toolkit.server.bodies import LargeBodies
from toolkit.server.options import ServerOptions
from toolkit.server.process import is_loopback
from toolkit.server.prompt_blocks import PromptBlocks
from toolkit.server.stats import RequestTimes, Stats
from toolkit.traces.types import MOONCAKE_BLOCK
from toolkit.traces.write import TraceLine

TOKEN_PATHS = (COMPLETIONS, CHAT)
SILENCE_S = 600.0  # of the upstream, after which a request is given up
RECORDED_BODY_BYTES = 64 << 20
MAX_EVENT_BYTES = 1 << 20  # of an incomplete event; a longer one passes unread
MAX_WHOLE_BYTES = 16 << 20  # of a response without a stream; a longer one is not counted
MAX_ROWS = 1024  # written per request; servers accept fewer
UNCOUNTED = "uncounted"
UNSUPPORTED_STATUSES = (400, 422)  # of servers that do not know `stream_options`


@contextmanager
def recorder_of(url: str, options: ServerOptions, block_tokens: int = 16) -> Iterator[Recorder]:
    """Make the backend that records the server at `url`, not started.

    `block_tokens` are those of the blocks of prompts; 0: what they share is not noted. Raises
    `InputError` for a URL that cannot be used, and when it starts, for a certificate that is not
    trusted.
    """
    upstream = Upstream(url, SILENCE_S)
    host = upstream.url.host or ""
    if upstream.url.port == options.port and (host == options.host or is_loopback(host)):
        raise InputError(
            f"{upstream.url} is the recorder itself",
            "name the server behind it as --upstream",
        )
    yield Recorder(upstream, options, block_tokens)


class Recorder(ServerBackend):
    """The server that is recorded. Its counters count requests for tokens alone, by status."""

    transparent = True
    descriptors_each = 2

    def __init__(self, upstream: Upstream, options: ServerOptions, block_tokens: int = 0) -> None:
        super().__init__(options, Stats())
        self.upstream = upstream
        self.asks_usage = True  # until the server turns out not to support it
        self._bodies = LargeBodies()
        self._blocks = PromptBlocks(block_tokens, self._bodies)
        self._block_tokens = block_tokens

    @property
    def state(self) -> str:
        return "ready"

    async def start(self) -> None:
        await self.upstream.check_certificate()

    async def stop(self) -> None:
        await self.upstream.close()

    def check_type(self, headers: Headers) -> None:
        """Any body passes."""

    async def take(self, request: Request, body: bytes, arrival_s: float) -> SendAnswer:
        """Take any request. The server refuses what it does not serve."""
        scope = request.scope
        call = None
        route = next((path for path in TOKEN_PATHS if scope["path"].endswith(path)), "")
        if route and request.method == "POST":
            with suppress(ApiError):
                call = await self._bodies.read(partial(GenerationCall, route), body)
        return RecordedRequest(self, scope, body, call, arrival_s).answer

    async def write(self, recorded: RecordedRequest, call: GenerationCall) -> None:
        """Count a request for tokens that has ended, and write its lines."""
        self.stats.ended[recorded.status] += 1
        if self.log is None:
            return
        lines = recorded.lines(call, self.log.timestamp(recorded.times.arrival_s))
        if self._block_tokens and recorded.status == "ok" and len(lines) == 1:
            ids = await self._blocks.ids(call.prompt, lines[0].input_length)
            size = self._block_tokens if self._block_tokens != MOONCAKE_BLOCK else None
            lines = [replace(lines[0], hash_ids=ids, block_tokens=size if ids else None)]
        for line in lines:
            self.log.add(line)


class RecordedRequest:
    """A request that passes through. Without a `call` nothing of it is recorded.

    Attributes:
        times: of `time.monotonic`.
        status: "cancelled" until it ends otherwise.
    """

    def __init__(
        self,
        recorder: Recorder,
        scope: Scope,
        body: bytes,
        call: GenerationCall | None,
        arrival_s: float,
    ) -> None:
        self.times = RequestTimes(arrival_s)
        self.status = "cancelled"
        self._recorder = recorder
        self._scope = scope
        self._body = body
        self._call = call
        self._reader: AnswerReader | None = None

    async def answer(self, receive: Receive, send: Send) -> None:
        """Pass the request and its answer. Raises `ApiError` where no answer began."""
        try:
            await while_connected(receive, self._pass(send))
        finally:
            if self._call is not None:
                await self._recorder.write(self, self._call)

    def lines(self, call: GenerationCall, timestamp: float) -> list[TraceLine]:
        """One line for each row. The usage is of all rows, so each line has its share."""
        usage = self._reader.usage if self._reader else None
        rows = min(call.choices, MAX_ROWS) if usage else 1
        counts = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
        inputs, outputs = (split(tokens, rows) for tokens in counts)
        limit = max(call.max_tokens or 0, 0)
        pairs = zip(inputs, outputs, strict=True)
        return [self.times.line(timestamp, (*lengths, limit), self.status) for lengths in pairs]

    async def _pass(self, send: Send) -> None:
        answer = None
        try:
            answer = await self._ask()
            await self._relay(answer, send)
        except UpstreamError as error:
            self.status = "failed"
            if answer is not None:
                return  # the response had begun: the server closes the incomplete connection
            status = 504 if error.timed_out else 502
            text = f"the server behind this one: {error}"
            raise ApiError(text, status=status, code="upstream") from error
        finally:
            if answer is not None:
                await answer.aclose()

    async def _ask(self) -> UpstreamAnswer:
        """Send the request, if possible with a wish for the usage. Returns the response's head."""
        recorder = self._recorder
        call = self._call
        headers: RawHeaders = self._scope["headers"]
        if call is None:
            return await self._send(headers, self._body)
        headers = _without(headers, b"accept-encoding")  # a compressed response cannot be counted
        adds = recorder.asks_usage and call.stream and not call.wants_usage
        if adds:
            _, with_usage = call.first(speaks_ids=False)
            answer = await self._send(_without(headers, b"content-length"), with_usage)
            if answer.status not in UNSUPPORTED_STATUSES:
                self._reader = AnswerReader(strip=True)
                return answer
            await answer.aclose()
        plain = await self._send(headers, self._body)
        if adds and plain.status == 200:
            recorder.asks_usage = False
        return plain

    async def _send(self, headers: RawHeaders, body: bytes) -> UpstreamAnswer:
        scope = self._scope
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        return await self._recorder.upstream.send(scope["method"], target, headers, body)

    async def _relay(self, answer: UpstreamAnswer, send: Send) -> None:
        reader: AnswerReader | None = None
        if self._call is not None and answer.status == 200:
            if not answer.header("content-type").startswith("text/event-stream"):
                self._reader = AnswerReader(streams=False)
            reader = self._reader = self._reader or AnswerReader()
        headers: RawHeaders = answer.headers
        if reader and reader.streams:  # it may remove an event
            headers = _without(headers, b"content-length")
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        async for piece in in_parts(answer.body()) if reader else answer.body():
            passed = reader.feed(piece) if reader else piece
            if reader and reader.has_tokens:
                self.times.came(time.monotonic())
            if passed:
                await send(_piece(passed, more=True))
        await send(_piece(reader.end() if reader else b"", more=False))
        if reader is None:
            self.status = f"HTTP {answer.status}"
            return
        self.status = "ok" if reader.usage else UNCOUNTED
        if reader.failed:
            self.status = "failed"
        if not reader.streams:
            self.times.last_s = time.monotonic()


def _without(headers: RawHeaders, name: bytes) -> RawHeaders:
    return [(key, value) for key, value in headers if key.lower() != name]


def _piece(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


class AnswerReader:
    """Reads an answer as its pieces pass, and returns what to pass to the client.

    Args:
        streams: the answer is an event stream, else one JSON object.
        strip: remove the event that only carries the usage, for a client that did not ask for it.

    Attributes:
        usage: as the server counted; None before, and where it does not say.
        has_tokens: tokens have arrived.
        failed: the response has status 200 but contains an error.
    """

    def __init__(self, *, streams: bool = True, strip: bool = False) -> None:
        self.streams = streams
        self.usage: Usage | None = None
        self.has_tokens = False
        self.failed = False
        self._strip = strip
        self._reader = EventReader()
        self._content = bytearray()
        self._fits = True

    def feed(self, piece: bytes) -> bytes:
        """Return what to pass on now: with `strip` whole events, otherwise the piece itself."""
        if not self.streams:
            self._content += piece if self._fits else b""
            if len(self._content) > MAX_WHOLE_BYTES:
                self._fits = False
                self._content.clear()
            return piece
        passed = [event for event in self._reader.feed(piece) if self._passes(event)]
        if len(self._reader.rest) > MAX_EVENT_BYTES:
            passed.append(bytes(self._reader.rest))
            self._reader.rest.clear()
        return b"".join(passed) if self._strip else piece

    def end(self) -> bytes:
        """Return what is left to pass on at the end of the response."""
        if not self.streams:
            self._note(bytes(self._content))
            return b""
        rest = bytes(self._reader.rest)
        return rest if self._passes(rest) and self._strip else b""

    def _passes(self, event: bytes) -> bool:
        """Note what an event says. Return whether the client gets it."""
        only_usage = self._note(data_of(lines_of(event)))
        return not (only_usage and self._strip)

    def _note(self, content: bytes) -> bool:
        """Note what the JSON of an answer says. Return whether it is the usage and nothing else."""
        read = decoded(content, Answer)
        if read is None:
            return False  # a comment, [DONE], or an unknown format
        self.usage = read.counted or self.usage
        is_error = not is_null(read.error)
        self.failed |= is_error
        self.has_tokens |= any(one.new_text or one.beside_text for one in read.choices)
        return not (is_null(read.usage) or read.choices or is_error)


def split(total: int, rows: int) -> Sequence[int]:
    """`total` divided over `rows`, as evenly as whole numbers allow."""
    share, more = divmod(total, rows)
    return [share + (row < more) for row in range(rows)]
