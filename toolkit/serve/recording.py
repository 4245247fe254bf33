"""The proxy: passes requests on and answers back as they come, and writes a line of a trace for
each that asks tokens.

A line holds lengths and times. Keys and texts pass through memory, and go nowhere but where the
client sent them.
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import uvloop
from msgspec import Raw
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from toolkit.endpoints.upstream import RawHeaders, Upstream, UpstreamAnswer, UpstreamError
from toolkit.errors import InputError
from toolkit.serve.access import check_local_host
from toolkit.serve.errors import ApiError, error_response
from toolkit.serve.helper import LARGE_BODY_BYTES, ReadingProcess, Worked, work
from toolkit.serve.http import HttpServer, WireLimits
from toolkit.serve.server import LAST_BYTES_S, Signals, first_of, is_loopback, listen, url
from toolkit.traces.write import TraceLine, TraceLog, to_ms

# What the recorder reads of requests and answers as they pass: lengths, limits, the first token,
# the usage.
#
# Bytes in, bytes out, no I/O. Texts are seen and let go; nothing of them is kept. What cannot be
# read passes unread.

MAX_EVENT_BYTES = 1 << 20  # of an event that is not whole yet
MAX_COUNTED_PROMPTS = 1024
MAX_WHOLE_BYTES = 16 << 20  # of a whole answer; a longer one is not counted

_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_PROMPT = re.compile(rb'\s*(?:"[^"\\]*(?:\\.[^"\\]*)*"|\[[^\]]*\])\s*[,\]]')  # of a list of several
_LINE_END = re.compile(rb"\r\n|\n|\r")
_EMPTY = (b'""', b"null", b"[]", b"{}")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for tokens: how many rows the server makes of it, and the limit of each (0: none)."""

    stream: bool
    usage: bool  # whether a streaming client asks for the usage itself
    rows: int
    max_tokens: int


class _Options(msgspec.Struct):
    include_usage: bool | None = None


class _Request(msgspec.Struct):
    prompt: Raw = Raw(b"null")
    stream: bool | None = None
    stream_options: _Options | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


def read_request(body: bytes) -> Asked | None:
    """None for what is no request for tokens: the server will say so itself."""
    try:
        found = msgspec.json.decode(body, type=_Request)
    except (msgspec.DecodeError, RecursionError):
        return None
    rows = _prompts(found.prompt) * max(found.n or 1, 1)
    limit = found.max_completion_tokens or found.max_tokens or 0
    options = found.stream_options
    return Asked(bool(found.stream), bool(options and options.include_usage), rows, max(limit, 0))


def _prompts(prompt: Raw) -> int:
    """A list is one prompt of tokens, or several prompts, of which up to `MAX_COUNTED_PROMPTS` are
    counted.
    """
    text = bytes(prompt).lstrip()
    if not text.startswith(b"["):
        return 1
    count, found = 0, _PROMPT.match(text, 1)
    while found and count < MAX_COUNTED_PROMPTS:
        count, found = count + 1, _PROMPT.match(text, found.end())
    return max(count, 1)


def ask_for_usage(body: bytes) -> bytes:
    """The same request, which also asks for the usage. All other values keep their bytes."""
    fields = msgspec.json.decode(body, type=dict[str, Raw])
    options = {}
    if "stream_options" in fields and bytes(fields["stream_options"]).strip() != b"null":
        options = msgspec.json.decode(fields["stream_options"], type=dict[str, Raw])
    fields["stream_options"] = Raw(msgspec.json.encode(options | {"include_usage": Raw(b"true")}))
    return msgspec.json.encode(fields)


class RecordedUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Raw] | None = None

    @property
    def says_something(self) -> bool:
        """Servers announce the role in a chunk of its own, which is no token."""
        delta = self.delta or {}
        return bool(self.text) or any(
            key != "role" and bytes(value) not in _EMPTY for key, value in delta.items()
        )


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: RecordedUsage | None = None
    error: Raw | None = None


class _Whole(msgspec.Struct):
    usage: RecordedUsage | None = None


class Reader(Protocol):
    """What reads an answer: pieces go in as they come, and what the client gets comes out."""

    usage: RecordedUsage | None
    spoke: bool  # tokens have come
    failed: bool  # the server said so in an answer that had begun well

    def feed(self, piece: bytes) -> bytes: ...

    def end(self) -> bytes: ...


class StreamReader:
    """Reads an event stream. With `strip`, the event that only tells the usage is left out: the
    client did not ask.
    """

    def __init__(self, *, strip: bool) -> None:
        self.usage: RecordedUsage | None = None
        self.spoke = False
        self.failed = False
        self._strip = strip
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """What can be passed on now: with `strip`, whole events; without, the piece itself."""
        passed = []
        text, at = self._rest + piece, 0
        for end in _EVENT_END.finditer(text):
            if not (self._read(text[at : end.start()]) and self._strip):
                passed.append(text[at : end.end()])
            at = end.end()
        self._rest = text[at:]
        if len(self._rest) > MAX_EVENT_BYTES:
            passed.append(self._rest)
            self._rest = b""
        return b"".join(passed) if self._strip else piece

    def end(self) -> bytes:
        """What is left when the server has ended."""
        rest, self._rest = self._rest, b""
        told = self._read(rest)
        return rest if self._strip and not told else b""

    def _read(self, event: bytes) -> bool:
        """Whether the event tells the usage and nothing else."""
        lines = [line for line in _LINE_END.split(event) if line.startswith(b"data:")]
        try:
            chunk = msgspec.json.decode(b"\n".join(line[5:] for line in lines), type=_Chunk)
        except (
            msgspec.DecodeError,
            RecursionError,
        ):  # a comment, [DONE], or something of the server's own
            return False
        self.usage = chunk.usage or self.usage
        self.failed |= chunk.error is not None
        self.spoke |= any(choice.says_something for choice in chunk.choices)
        return chunk.usage is not None and not chunk.choices and chunk.error is None


class WholeReader:
    """Reads an answer that is one JSON object, once all of it has passed."""

    def __init__(self) -> None:
        self.usage: RecordedUsage | None = None
        self.spoke = False
        self.failed = False
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> bytes:
        self._size += len(piece)
        if self._size <= MAX_WHOLE_BYTES:
            self._pieces.append(piece)
        else:
            self._pieces.clear()
        return piece

    def end(self) -> bytes:
        try:
            self.usage = msgspec.json.decode(b"".join(self._pieces), type=_Whole).usage
        except (msgspec.DecodeError, RecursionError):
            self.usage = None
        self._pieces.clear()
        return b""


def split(total: int, rows: int) -> Sequence[int]:
    """`total` over so many rows, as evenly as whole numbers go."""
    share, more = divmod(total, rows)
    return [share + (row < more) for row in range(rows)]


# Large requests are read in a process beside the recorder, as the server's are: none stops its
# event loop.

ASKED, WITH_USAGE = "asked", "with usage"


class RequestReading:
    """What the recorder reads of requests. A body above `LARGE_BODY_BYTES` goes to the process.

    `ApiError` where that has died, or has too many to read.
    """

    def __init__(self) -> None:
        self._process = ReadingProcess("toolkit.serve.recording", b"")

    async def asked(self, body: bytes) -> Asked | None:
        """As `read_request`."""
        if len(body) <= LARGE_BODY_BYTES:
            return read_request(body)
        found = await self._process.ask(ASKED, body)
        return (
            msgspec.msgpack.decode(found, type=Asked | None) if isinstance(found, bytes) else None
        )

    async def with_usage(self, body: bytes) -> bytes:
        """As `ask_for_usage`."""
        if len(body) <= LARGE_BODY_BYTES:
            return ask_for_usage(body)
        found = await self._process.ask(WITH_USAGE, body)
        return found if isinstance(found, bytes) else body

    async def stop(self) -> None:
        await self._process.stop()


def _worked(kind: str, body: bytes) -> bytes:
    return msgspec.msgpack.encode(read_request(body)) if kind == ASKED else ask_for_usage(body)


def _prepare(_: bytes) -> Worked:
    return _worked


if __name__ == "__main__":
    work(_prepare)


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

    def lines(self, timestamp: float) -> list[TraceLine]:
        """One for each row; the usage is of all of them, so each has its share."""
        usage = self.reader.usage if self.reader else None
        rows = min(self.asked.rows, MAX_ROWS) if usage else 1
        inputs, outputs = (split(tokens, rows) for tokens in _tokens(usage))
        ttft, e2e = (
            _ms_or_none(at_s - self.arrival_s) for at_s in (self.first_token_s, self.last_token_s)
        )
        return [
            TraceLine(
                timestamp, inputs[row], outputs[row], self.asked.max_tokens, ttft, e2e, self.status
            )
            for row in range(rows)
        ]


def _tokens(usage: object) -> tuple[int, int]:
    return (getattr(usage, "prompt_tokens", 0), getattr(usage, "completion_tokens", 0))


def _ms_or_none(seconds: float) -> float | None:
    return None if math.isnan(seconds) else to_ms(seconds)


class TraceRecorder:
    """The application. `ended` counts requests for tokens by what became of them.

    Call `stop` when it is not used any more. With `local_hosts_only` a Host that is a name other
    than localhost gets 403 (`gate.py` says why).
    """

    def __init__(
        self, upstream: Upstream, log: TraceLog, *, local_hosts_only: bool = False
    ) -> None:
        self.ended: Counter[str] = Counter()
        self.leaving = False  # new requests are refused
        self.idle = asyncio.Event()
        self._upstream = upstream
        self._log = log
        self._local_hosts_only = local_hosts_only
        self._asks_usage = True  # until the server turns out not to know how
        self._under_way = 0
        self._requests = RequestReading()
        self.idle.set()

    async def stop(self) -> None:
        await self._requests.stop()

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
            raise ApiError(
                "the recorder is shutting down", status=503, headers={"Retry-After": "5"}
            )
        if self._local_hosts_only:
            check_local_host(Headers(scope=scope).get("host", ""))
        body = await _read_body(receive)
        if body is None:
            return
        asked = await self._requests.asked(body) if _asks_tokens(scope) else None
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
                # of an answer that had begun; the server closes a connection whose response was not
                # completed
                return
            raise ApiError(
                str(error), status=504 if error.timed_out else 502, code="upstream"
            ) from error
        finally:
            if answer is not None:
                await answer.close()

    async def _ask(self, scope: Scope, body: bytes, passage: Passage | None) -> UpstreamAnswer:
        """The head of the server's answer, to the request as it came, or with the wish for its
        usage.
        """
        target = scope["raw_path"] + (
            b"?" + scope["query_string"] if scope["query_string"] else b""
        )
        headers: RawHeaders = scope["headers"]
        if passage is None:
            return await self._upstream.send(scope["method"], target, headers, body)
        headers = _without(headers, b"accept-encoding")  # what is compressed cannot be counted
        asked = passage.asked
        adds = self._asks_usage and asked.stream and not asked.usage
        if adds:
            told = _without(headers, b"content-length")
            with_usage = await self._requests.with_usage(body)
            answer = await self._upstream.send(scope["method"], target, told, with_usage)
            if answer.status not in NOT_UNDERSTOOD:
                passage.reader = StreamReader(strip=True)
                return answer
            await answer.close()
        plain = await self._upstream.send(scope["method"], target, headers, body)
        if adds and plain.status == 200:
            self._asks_usage = False
        return plain

    async def _answer(self, answer: UpstreamAnswer, passage: Passage | None, send: Send) -> None:
        reader = _reader(answer, passage)
        await send(
            {
                "type": "http.response.start",
                "status": answer.status,
                "headers": _head(answer, passage),
            }
        )
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


def _reader(answer: UpstreamAnswer, passage: Passage | None) -> Reader | None:
    """What reads the answer to a request for tokens."""
    if passage is None or answer.status != 200:
        return None
    if not answer.header("content-type").startswith("text/event-stream"):
        passage.reader = WholeReader()
    elif passage.reader is None:
        passage.reader = StreamReader(strip=False)
    return passage.reader


def _head(answer: UpstreamAnswer, passage: Passage | None) -> RawHeaders:
    """Without the length, where an event may be left out."""
    stripped = passage is not None and isinstance(passage.reader, StreamReader)
    return _without(answer.headers, b"content-length") if stripped else answer.headers


def _status(answer: UpstreamAnswer, reader: Reader | None) -> str:
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


# The recorder as a process: listens, passes on until a signal ends it, lets what runs finish.


@dataclass(frozen=True, slots=True)
class Recording:
    """What to record, and where. Times in seconds."""

    upstream: str
    host: str
    port: int
    out: Path
    max_bytes: int
    silence_s: float
    ending_s: float
    insecure: bool = False
    authorities: Path | None = (
        None  # who may have signed the upstream's certificate; None: the system's
    )


def record(order: Recording, on_ready: Callable[[str], None]) -> Counter[str]:
    """Record until a signal ends it; `on_ready` gets the URL. How requests for tokens ended.

    `InputError` for an address, an upstream or a file that cannot be used.
    """
    if not (order.insecure or is_loopback(order.host)):
        raise InputError(
            f"host {order.host} can be reached from other machines, and the recorder asks for no key of its own",
            "listen on 127.0.0.1, or add --insecure where the upstream asks for its key",
        )
    with (
        listen(order.host, order.port) as listener,
        TraceLog(order.out, order.max_bytes) as log,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_record(order, listener, log, on_ready))


async def _record(
    order: Recording, listener: socket.socket, log: TraceLog, on_ready: Callable[[str], None]
) -> Counter[str]:
    async with Upstream(order.upstream, order.silence_s, order.authorities) as upstream:
        host, port = listener.getsockname()[:2]
        if upstream.address[1] == port and (
            upstream.address[0] == host or is_loopback(upstream.address[0])
        ):
            raise InputError(
                f"{upstream.shown} is the recorder itself",
                "name the server behind it as --upstream",
            )
        await upstream.check_certificate()
        recorder = TraceRecorder(upstream, log, local_hosts_only=is_loopback(order.host))
        try:
            await _serve(recorder, listener, order.ending_s, lambda: on_ready(url(listener)))
        finally:
            await recorder.stop()
        return recorder.ended


async def _serve(
    recorder: TraceRecorder, listener: socket.socket, ending_s: float, on_ready: Callable[[], None]
) -> None:
    signals = Signals()
    server = HttpServer(
        recorder, WireLimits(body_bytes=MAX_BODY_BYTES, descriptors_each=2), dated=False
    )
    await server.start(listener)
    on_ready()
    await signals.first.wait()
    recorder.leaving = True
    await first_of(recorder.idle.wait(), signals.second.wait(), asyncio.sleep(ending_s))
    await server.stop(LAST_BYTES_S)
