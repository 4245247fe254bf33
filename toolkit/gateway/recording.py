"""Record real traffic as a trace: a proxy that writes lengths and times of requests for tokens.

`TraceRecorder` passes requests to the upstream server and responses back as they arrive, and writes
one line per row. Keys and texts pass through memory, but go only where the client sent them. What
cannot be read passes unread. What prompts share is noted by `toolkit.gateway.prompt_blocks`.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvloop
from msgspec.structs import replace
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from toolkit.endpoints.upstream import RawHeaders, Upstream, UpstreamAnswer, UpstreamError
from toolkit.errors import InputError
from toolkit.gateway.prompt_blocks import PromptBlocks
from toolkit.openai.answers import Answer, Usage
from toolkit.openai.errors import ApiError
from toolkit.openai.events import EventReader, data_of, in_parts, lines_of
from toolkit.openai.foreign import decoded, is_null
from toolkit.openai.requests import CHAT, COMPLETIONS, GenerationCall
from toolkit.serve.access import check_local_host
from toolkit.serve.background import Background
from toolkit.serve.bodies import LargeBodies, read_body
from toolkit.serve.errors import error_response
from toolkit.serve.launch import FrontServer, serve
from toolkit.serve.limits import WireLimits
from toolkit.serve.server import Ending, RunningRequests, is_loopback, listen, url, while_connected
from toolkit.serve.stats import Stats
from toolkit.traces.types import MOONCAKE_BLOCK
from toolkit.traces.write import TraceLine, TraceLog, ms_or_none

TOKEN_PATHS = (COMPLETIONS, CHAT)
SILENCE_S = 600.0  # of the upstream, after which a request is given up
MAX_BODY_BYTES = 64 << 20
MAX_EVENT_BYTES = 1 << 20  # of an incomplete event; a longer one passes unread
MAX_WHOLE_BYTES = 16 << 20  # of a response without a stream; a longer one is not counted
MAX_ROWS = 1024  # written per request; servers accept fewer
UNCOUNTED = "uncounted"
UNSUPPORTED_STATUSES = (400, 422)  # of servers that do not know `stream_options`


def record(
    upstream: str,
    host: str,
    port: int,
    out: Path,
    on_ready: Callable[[str], None],
    *,
    insecure: bool = False,
    block_tokens: int = 16,
) -> Counter[str]:
    """Record until a signal ends it. Returns the number of requests for tokens by status.

    `on_ready` gets the URL. `block_tokens` are those of the blocks of prompts; 0: what they share
    is not noted. Raises `InputError` for an address, an upstream or a file that cannot be used.
    """
    if not (insecure or is_loopback(host)):
        raise InputError(
            f"host {host} can be reached from other machines, "
            "and the recorder asks for no key of its own",
            "listen on 127.0.0.1, or add --insecure if the upstream asks for its key",
        )
    with (
        listen(host, port) as listener,
        TraceLog(out) as log,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        server = Upstream(upstream, SILENCE_S)
        return runner.run(record_on(listener, server, log, on_ready, block_tokens))


async def record_on(
    listener: socket.socket,
    upstream: Upstream,
    log: TraceLog,
    on_ready: Callable[[str], None],
    block_tokens: int,
) -> Counter[str]:
    """Record on a bound `listener`; see `record`."""
    async with upstream:
        host, port = listener.getsockname()[:2]
        upstream_host, upstream_port = upstream.address
        if upstream_port == port and (upstream_host == host or is_loopback(upstream_host)):
            raise InputError(
                f"{upstream.shown} is the recorder itself",
                "name the server behind it as --upstream",
            )
        await upstream.check_certificate()
        local = is_loopback(host)
        recorder = TraceRecorder(upstream, log, local_hosts_only=local, block_tokens=block_tokens)
        await serve(recorder, listener, Ending(), lambda: on_ready(url(listener)))
        return recorder.ended


@dataclass(slots=True)
class RecordedRequest:
    """A request for tokens that passes through. Times are of `time.monotonic`, or NaN."""

    call: GenerationCall
    arrival_s: float
    first_token_s: float = math.nan
    last_token_s: float = math.nan
    status: str = "cancelled"  # until it ends otherwise
    reader: AnswerReader | None = None  # of its response

    def lines(self, timestamp: float) -> list[TraceLine]:
        """One line for each row. The usage is that of all rows, so each line has its share."""
        usage = self.reader.usage if self.reader else None
        rows = min(self.call.choices, MAX_ROWS) if usage else 1
        counts = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
        inputs, outputs = (split(tokens, rows) for tokens in counts)
        ttft_ms = ms_or_none(self.first_token_s - self.arrival_s)
        e2e_ms = ms_or_none(self.last_token_s - self.arrival_s)
        limit = max(self.call.max_tokens or 0, 0)
        status = self.status
        return [
            TraceLine(timestamp, *lengths, limit, ttft_ms, e2e_ms, status)
            for lengths in zip(inputs, outputs, strict=True)
        ]


class TraceRecorder(FrontServer):
    """The proxy, an ASGI application. `ended` counts requests for tokens by status.

    Call `stop` at the end. With `local_hosts_only` a Host that is a name other than localhost gets
    403 (`toolkit.serve.routes.Front` says why).
    """

    dated = False

    def __init__(
        self,
        upstream: Upstream,
        log: TraceLog,
        *,
        local_hosts_only: bool = False,
        block_tokens: int = 0,
    ) -> None:
        limits = WireLimits(body_bytes=MAX_BODY_BYTES, descriptors_each=2)
        super().__init__(Stats(), Background(), limits)
        self.ended: Counter[str] = Counter()
        self.running = RunningRequests()
        self._leaving = False  # new requests are refused
        self._upstream = upstream
        self._log = log
        self._local_hosts_only = local_hosts_only
        self._asks_usage = True  # until the upstream turns out not to support it
        self._bodies = LargeBodies()
        self._blocks = PromptBlocks(block_tokens, self._bodies)
        self._block_tokens = block_tokens

    @property
    def left(self) -> int:
        return len(self.running)

    def announce_end(self) -> None:
        self._leaving = True

    async def drain(self, timeout_s: float) -> None:
        await self.running.ended(timeout_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.running:
            try:
                await self._serve(scope, receive, send)
            except ApiError as refusal:
                await error_response(refusal)(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival_s = time.monotonic()
        if self._leaving:
            headers = {"Retry-After": "5"}
            raise ApiError("the recorder is shutting down", status=503, headers=headers)
        http_request = Request(scope, receive)
        if self._local_hosts_only:
            check_local_host(http_request.headers.get("host", ""))
        body = await read_body(http_request, MAX_BODY_BYTES)
        recorded = None
        route = next((path for path in TOKEN_PATHS if scope["path"].endswith(path)), "")
        if route and scope["method"] == "POST":
            with suppress(ApiError):  # the server will refuse it
                call = await self._bodies.read(partial(GenerationCall, route), body)
                recorded = RecordedRequest(call, arrival_s)
        try:
            await while_connected(receive, self._pass(scope, body, recorded, send))
        finally:
            if recorded:
                await self._write(recorded)

    async def _pass(
        self, scope: Scope, body: bytes, recorded: RecordedRequest | None, send: Send
    ) -> None:
        answer = None
        try:
            answer = await self._ask(scope, body, recorded)
            await self._answer(answer, recorded, send)
        except UpstreamError as error:
            if recorded:
                recorded.status = "failed"
            if answer is not None:
                return  # the response had begun: the server closes the incomplete connection
            status = 504 if error.timed_out else 502
            raise ApiError(str(error), status=status, code="upstream") from error
        finally:
            if answer is not None:
                await answer.aclose()

    async def _ask(
        self, scope: Scope, body: bytes, recorded: RecordedRequest | None
    ) -> UpstreamAnswer:
        """Send the request, if possible with a wish for the usage. Returns the response's head."""
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        headers: RawHeaders = scope["headers"]
        if recorded is None:
            return await self._upstream.send(scope["method"], target, headers, body)
        headers = _without(headers, b"accept-encoding")  # a compressed response cannot be counted
        call = recorded.call
        adds = self._asks_usage and call.stream and not call.wants_usage
        if adds:
            changed = _without(headers, b"content-length")
            _, with_usage = call.first(speaks_ids=False)
            answer = await self._upstream.send(scope["method"], target, changed, with_usage)
            if answer.status not in UNSUPPORTED_STATUSES:
                recorded.reader = AnswerReader(strip=True)
                return answer
            await answer.aclose()
        plain = await self._upstream.send(scope["method"], target, headers, body)
        if adds and plain.status == 200:
            self._asks_usage = False
        return plain

    async def _answer(
        self, answer: UpstreamAnswer, recorded: RecordedRequest | None, send: Send
    ) -> None:
        reader: AnswerReader | None = None
        if recorded and answer.status == 200:
            if not answer.header("content-type").startswith("text/event-stream"):
                recorded.reader = AnswerReader(streams=False)
            reader = recorded.reader = recorded.reader or AnswerReader()
        headers: RawHeaders = answer.headers
        if reader and reader.streams:  # it may remove an event
            headers = _without(headers, b"content-length")
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        async for piece in in_parts(answer.body()) if reader else answer.body():
            passed = reader.feed(piece) if reader else piece
            if recorded and reader and reader.has_tokens:
                recorded.last_token_s = time.monotonic()
                if math.isnan(recorded.first_token_s):
                    recorded.first_token_s = recorded.last_token_s
            if passed:
                await send(_piece(passed, more=True))
        await send(_piece(reader.end() if reader else b"", more=False))
        if recorded and reader is None:
            recorded.status = f"HTTP {answer.status}"
        elif recorded and reader:
            recorded.status = "ok" if reader.usage else UNCOUNTED
            if reader.failed:
                recorded.status = "failed"
            if not reader.streams:
                recorded.last_token_s = time.monotonic()

    async def _write(self, recorded: RecordedRequest) -> None:
        self.ended[recorded.status] += 1
        lines = recorded.lines(self._log.timestamp(recorded.arrival_s))
        if self._block_tokens and recorded.status == "ok" and len(lines) == 1:
            ids = await self._blocks.ids(recorded.call.prompt, lines[0].input_length)
            size = self._block_tokens if self._block_tokens != MOONCAKE_BLOCK else None
            lines = [replace(lines[0], hash_ids=ids, block_tokens=size if ids else None)]
        for line in lines:
            self._log.add(line)


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
