"""The load generator's HTTP client: one streaming request, with the time of each token.

It reads OpenAI's event streams only: no redirects, no cookies, no keep-alive. It shares the machine
with the server that it measures; docs/decisions.md has what that costs. It runs on asyncio's
own loop, and nothing in it waits for a thread: names are resolved before the first request. uvloop
opens connections by other threads, which wait for hundreds of milliseconds where a server polls.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache

import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from toolkit.endpoints.target import Target
from toolkit.endpoints.upstream import HttpClient, RawHeaders, Upstream, UpstreamError
from toolkit.openai.answers import read_answer
from toolkit.openai.errors import error_text
from toolkit.openai.events import MAX_STREAM_BYTES, NOT_OPENAI, EventReader, data_of, lines_of
from toolkit.openai.foreign import UNREADABLE, is_null
from toolkit.openai.requests import COMPLETIONS

MAX_ERROR_BYTES = 1 << 16
OVERLOADED = (429, 503)  # statuses of a server that refuses load


@dataclass(slots=True)
class Sample:
    """One request for completions: as it is sent, and what its client saw, in seconds since the
    replay began; NaN for events that never happened.
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
    keeps_answer: bool = False  # its token ids
    answer_ids: list[int] = field(default_factory=list)
    connected_s: float = math.nan  # with TLS: after its handshake
    # written before the clock starts, and gone once it is sent
    headers: RawHeaders = field(default_factory=list)
    body: bytes = b""

    def write(
        self, target: Target, fields: dict[str, object], session: str = "", name: str = ""
    ) -> None:
        """Write the request with these fields; `session` names its conversation, `name` the request
        itself.
        """
        headers = {
            "content-type": "application/json",
            "accept": "text/event-stream",
            "accept-encoding": "identity",
        }
        if target.api_key:
            headers["authorization"] = f"Bearer {target.api_key}"
        if session:
            headers["x-session-id"] = session
        if name:
            headers["x-request-id"] = name
        self.headers = [(key.encode(), value.encode()) for key, value in headers.items()]
        self.body = msgspec.json.encode(fields)


class StreamedAnswer:
    """Notes in `sample` what an event stream says, as its pieces come.

    Attributes:
        failure: what is wrong with the stream; '' so far. Of several reasons the first is kept.
    """

    def __init__(self, sample: Sample) -> None:
        self.failure = ""
        self._sample = sample
        self._reader = EventReader(most_bytes=MAX_STREAM_BYTES)
        self._counted = False  # the server has told how many tokens it generated

    @property
    def complete(self) -> bool:
        """Without usage it is not: an event may hold several tokens."""
        has_tokens = not math.isnan(self._sample.first_token_s)
        return self._counted and self._sample.output_tokens > 0 and has_tokens

    def feed(self, piece: bytes, now_s: float) -> None:
        """Take a piece that arrived at `now_s`."""
        for event in self._reader.feed(piece):
            data = data_of(lines_of(event))
            if data and data != b"[DONE]":
                self._on_event(data, now_s)
        self._fail(self._reader.failure)

    def _on_event(self, data: bytes, now_s: float) -> None:
        try:
            read = read_answer(data)
        except UNREADABLE:
            self._fail(NOT_OPENAI)
            return
        if not is_null(read.error):
            self._fail(f"error in the stream: {error_text(data)}")
        sample = self._sample
        if read.choices:
            if math.isnan(sample.first_token_s):
                sample.first_token_s = now_s
            else:
                sample.max_gap_s = max(sample.max_gap_s, now_s - sample.last_token_s)
            sample.last_token_s = now_s
            if sample.keeps_answer:
                sample.answer_ids += read.choices[0].token_ids or []
        if not is_null(read.usage):
            usage = read.counted
            if usage is None:
                self._fail(NOT_OPENAI)
                return
            self._counted = True
            sample.output_tokens = usage.completion_tokens
            sample.counted_prompt_tokens = usage.prompt_tokens
            sample.cached_tokens = usage.cached_tokens

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason


INTERRUPTED = "interrupted"
BEAT_S = 0.01


@contextmanager
def heartbeat() -> Iterator[list[float]]:
    """Note every `BEAT_S` how late the running loop comes to a timer, in seconds.

    A beat that passes while the loop does something else counts as well, so that the noted times
    are the delays of events at random moments.
    """
    loop = asyncio.get_running_loop()
    late_s: list[float] = []
    due_s = time.perf_counter() + BEAT_S
    timer: asyncio.TimerHandle

    def beat() -> None:
        nonlocal due_s, timer
        now_s = time.perf_counter()
        while due_s <= now_s:
            late_s.append(now_s - due_s)
            due_s += BEAT_S
        timer = loop.call_later(due_s - now_s, beat)

    beat()
    try:
        yield late_s
    finally:
        timer.cancel()
        beat()  # notes what was missed since the last one
        timer.cancel()


REACH_S = 1.0  # an address of several that does not answer within this time is not used


@cache
def addresses_of(host: str, port: int) -> tuple[ResolveResult, ...]:
    """Return the addresses of a host, looked up once in the life of the process. Of several, the
    first that takes a connection; all of them if none does. Raises OSError for a name that is not
    known.
    """
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    every = tuple(
        ResolveResult(
            hostname=host, host=str(at[0]), port=port, family=family, proto=proto, flags=flags
        )
        for family, _, proto, _, at in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )
    for one in every if len(every) > 1 else ():
        with suppress(OSError), socket.create_connection((one["host"], port), REACH_S):
            return (one,)
    return every


class KnownAddresses(AbstractResolver):
    """The resolver of a client that has looked its server up before its first request."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return list(addresses_of(host, port))

    async def close(self) -> None:
        """Do nothing: nothing is open."""


def load_client(target: Target) -> Upstream:
    """Return a client that opens a connection for each request to `target`.

    The target's name is resolved here, so that requests need no other thread.
    """
    url = URL(target.url).with_user(None)
    with suppress(OSError):  # a name that is not known fails each request
        addresses_of(url.raw_host or "", url.port or 0)
    return Upstream(str(url), math.inf, HttpClient(most_kept=0, resolver=KnownAddresses()))


async def send_timed(
    server: Upstream, sample: Sample, clock: Callable[[], float], timeout_s: float
) -> None:
    """Send one request and wait for its end. Failures are in `sample`; none is raised."""
    sample.sent_s = clock()
    try:
        async with asyncio.timeout(timeout_s):
            sample.failure = await _answered(server, sample, clock)
    except TimeoutError:
        sample.failure = f"no end within {timeout_s:g} s"
    except UpstreamError as error:
        if math.isnan(sample.connected_s):
            sample.sent_s = math.nan
        sample.failure = error.untrusted or str(error)
    except asyncio.CancelledError:
        sample.failure = INTERRUPTED


async def _answered(server: Upstream, sample: Sample, clock: Callable[[], float]) -> str:
    """Read the answer to its end. Return what is wrong with it, or ''."""

    def connected() -> None:
        sample.connected_s = clock()

    read = StreamedAnswer(sample)
    sent = server.send("POST", COMPLETIONS.encode(), sample.headers, sample.body, connected)
    sample.headers, sample.body = [], b""
    async with aclosing(await sent) as answer:
        if answer.status != 200:
            sample.refused = answer.status in OVERLOADED
            return f"HTTP {answer.status}: {error_text(await answer.read(MAX_ERROR_BYTES))}"
        answer.refuse_compressed()
        try:
            async for piece in answer.body():
                read.feed(piece, clock())
                if read.failure:
                    return read.failure
        except UpstreamError:
            if not read.complete:
                raise
    return "" if read.complete else "the stream ended without tokens or their usage"
