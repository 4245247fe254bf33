"""One request for tokens: attempts at replicas until the client has the whole answer."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

import msgspec
from starlette.types import Send

from toolkit.endpoints.upstream import LOST, NOT_HTTP, UpstreamAnswer, UpstreamError
from toolkit.openai.errors import RETRY_AFTER_S, ApiError, overloaded
from toolkit.openai.events import in_parts
from toolkit.openai.merge import MergedAnswer
from toolkit.openai.requests import GenerationCall
from toolkit.routing.admission import Overload
from toolkit.sched.types import Request
from toolkit.server.backend import late
from toolkit.server.live import send_whole
from toolkit.server.replicas import NOT_SERVED, LiveReplica
from toolkit.server.stats import ENDED_WELL, LATE, RequestTimes
from toolkit.traces.write import TraceLog

if TYPE_CHECKING:
    from toolkit.server.pool import PoolBackend

_logger = logging.getLogger(__name__)

MAX_FAILURES = 4  # attempts in a row that failed without a new token, of one request
BUSY = (429, 503)  # a replica refuses a request; another one may take it
ELSEWHERE = (*BUSY, *NOT_SERVED)  # also where it lacks what another one may have
MAX_WHOLE_BYTES = 64 << 20
WholeAnswer = tuple[int, list[tuple[bytes, bytes]], bytes]  # status, headers, body
PAUSE_S = 0.05  # before a replica is asked again that refused before
MAX_LOGGED_ROWS = 1024  # of one request; servers accept fewer
UNCOUNTED = "uncounted"  # in the log: it was served, and its server told no usage
PASSED_BACK = (b"content-type", b"retry-after", b"x-should-retry")
NO_REPLICA = "no replica is up"


class AttemptFailedError(Exception):
    """An attempt failed. `counts`: the replica may have failed because of the request."""

    def __init__(self, why: str, *, counts: bool = True) -> None:
        super().__init__(why)
        self.counts = counts


class RelayedRequest:
    """One request for tokens, from its acceptance to its end; at most one attempt runs at a time.

    Attributes:
        heard_s: when the last byte of the attempt came, or when it was sent.
        must_follow: the replica has begun to answer, and the rest is awaited: it must not be silent
            for long.
    """

    def __init__(
        self,
        backend: PoolBackend,
        call: GenerationCall,
        arrival_s: float,
    ) -> None:
        self.times = RequestTimes(arrival_s)
        self.prompt_tokens = backend.gauge.tokens(call.prompts)
        limit = call.max_tokens if (call.max_tokens or 0) > 0 else backend.options.max_new_tokens
        self.new_tokens = limit or 1
        self._backend = backend
        self._call = call
        self._merged = MergedAnswer(call, self.prompt_tokens)
        self._id = f"r{next(backend.numbers)}"
        self._blocks = backend.gauge.blocks(call.prompt)
        self._timer: asyncio.Timeout  # of the attempt
        self._cut = ""
        self._head_sent = False
        self._failed: set[LiveReplica] = set()  # since all replicas had failed it
        self._refusal: WholeAnswer | None = None
        self._status = ""  # how it ended
        self._first: LiveReplica | None = None  # where it was admitted to

    @property
    def generated(self) -> int:
        """New tokens as the server counted them, and no fewer than came."""
        merged = self._merged
        usage = merged.usage
        return merged.tokens if usage is None else max(usage.completion_tokens, merged.tokens)

    def cut(self, reason: str) -> None:
        """End the attempt: the request goes elsewhere."""
        if not self._cut:
            self._cut = reason
            self._timer.reschedule(asyncio.get_running_loop().time())

    def admit(self) -> None:
        """Choose its first replica. Raises ApiError if the forecast refuses the request."""
        backend = self._backend
        choice = backend.balancer.route(self._routed(), time.monotonic(), backend.pool.barred())
        if isinstance(choice, Overload):
            backend.stats.refusals[LATE] += 1
            raise late(choice.predicted, choice.wait_s)
        self._first = None if choice is None else backend.pool.by_index[choice]

    async def answer(self, send: Send) -> None:
        """Answer the client, or raise `ApiError` where nothing of an answer was sent."""
        self._send = send
        backend = self._backend
        limit_s = backend.options.request_timeout_s
        try:
            async with asyncio.timeout(None if math.isinf(limit_s) else limit_s):
                await self._until_answered()
        except TimeoutError:
            if not self._status:
                await self._give_up(f"no end within {limit_s:g} s", "timeout", 504)
        finally:
            self._record()

    async def _until_answered(self) -> None:
        """Ask replicas, one after the other, until the request has ended."""
        merged = self._merged
        failures = 0
        replica = self._first or await self._choose()
        while replica is not None:
            tokens = merged.tokens
            try:
                await self._attempt(replica)
                return
            except AttemptFailedError as failed:
                replica.failures += 1
                _logger.debug("%s: %s: %s", self._id, replica.url, failed)
                if merged.complete or not merged.goes_on or self._backend.stopped:
                    await self._give_up(f"the answer broke off: {failed}")
                    return
                failures = 1 if merged.tokens > tokens else failures + failed.counts
                if failures >= MAX_FAILURES:
                    text = f"the request failed on {failures} replicas; the last: {failed}"
                    await self._give_up(text)
                    return
                self._failed.add(replica)
                if merged.begun:
                    replica.moved += 1
            replica = await self._choose()

    async def _choose(self) -> LiveReplica | None:
        """The replica for the next attempt; None if the request has ended without one."""
        backend = self._backend
        pool = backend.pool
        while True:
            able = await self._able()
            fresh = [each for each in able if each not in self._failed]
            if fresh:
                # Replicas that failed it, or are in doubt, get it only if need be.
                best = [each for each in fresh if not each.in_doubt] or fresh
                barred = [index for index, each in pool.by_index.items() if each not in best]
                index = backend.balancer.route(
                    self._routed(), time.monotonic(), barred, accepted=True
                )
                assert isinstance(index, int)
                return pool.by_index[index]
            if not able:
                await self._give_up(NO_REPLICA)
                return None
            if self._refusal is not None and not self._head_sent:
                await self._send_whole(f"HTTP {self._refusal[0]}", self._refusal)
                return None
            self._failed.clear()
            await asyncio.sleep(PAUSE_S)

    async def _able(self) -> list[LiveReplica]:
        """Wait until a replica is up that can go on where the answer has begun. Return all such
        replicas; none if none was up in time.
        """
        pool = self._backend.pool
        able: list[LiveReplica] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(self._backend.options.wait_up_s):
                while not able:
                    able = [each for each in pool.up if each.speaks_ids or not self._merged.begun]
                    if not able:
                        pool.changed.clear()
                        await pool.changed.wait()
        return able

    def _routed(self) -> Request:
        """The request as the router sees it: its prompt ends with what the client has."""
        return Request(
            self._id,
            self.times.arrival_s,
            self.prompt_tokens + self._merged.tokens,
            self.new_tokens,
            blocks=self._blocks,
            session=self._call.session,
        )

    async def _attempt(self, replica: LiveReplica) -> None:
        """Ask a replica. Raises `AttemptFailedError` where another replica may take the request."""
        backend = self._backend
        self._cut = ""
        self.heard_s = time.monotonic()
        self.must_follow = self._has_token = False
        replica.requests += 1
        replica.attempts.add(self)
        generated = -1
        try:
            async with asyncio.timeout(None) as self._timer:
                await self._ask(replica)
            if self._status in ENDED_WELL:
                generated = self.generated
        except TimeoutError:  # of `cut`: the limit of the whole request cancels
            raise AttemptFailedError(self._cut) from None
        finally:
            backend.balancer.ended(self._id, generated)
            backend.pool.ended(replica, self)

    async def _ask(self, replica: LiveReplica) -> None:
        """One attempt, which ends the request or raises `AttemptFailedError`."""
        backend = self._backend
        call = self._call
        was_begun = self._merged.begun
        path, body = self._merged.request(
            speaks_ids=replica.speaks_ids and call.stream,
            context=replica.max_model_len,
            default_tokens=replica.default_tokens,
        )
        reached = False
        try:
            answer = await replica.upstream.send(
                "POST", path.encode(), backend.pool.json_headers, body
            )
            reached = True
            async with aclosing(answer):
                self.heard_s = replica.heard_s = time.monotonic()
                backend.pool.answered(replica, answer.status)
                if answer.status != 200:
                    await self._on_status(replica, answer)
                    return
                backend.continued += was_begun
                if call.stream:
                    await self._stream(replica, answer)
                else:
                    await self._relay_whole(replica, answer)
        except UpstreamError as error:
            if error.here and not self._head_sent:
                raise overloaded(str(error)) from None
            if error.here:
                raise AttemptFailedError(str(error)) from None
            reached = reached or str(error) in (LOST, NOT_HTTP)
            why = "the connection broke off" if reached else str(error)
            backend.pool.failed(replica, why)
            raise AttemptFailedError(why, counts=reached) from None

    async def _on_status(self, replica: LiveReplica, answer: UpstreamAnswer) -> None:
        """End the request with the error that a replica answered, or raise `AttemptFailedError`."""
        content = await self._whole(replica, answer)
        status = answer.status
        why = f"it answered {status}"
        if self._head_sent:
            raise AttemptFailedError(why, counts=status not in BUSY)
        self._refusal = status, kept_headers(answer), content
        if status >= 500 or status in ELSEWHERE:
            raise AttemptFailedError(why, counts=status not in ELSEWHERE)
        await self._send_whole(f"HTTP {status}", self._refusal)

    async def _stream(self, replica: LiveReplica, answer: UpstreamAnswer) -> None:
        """Pass a stream. The head goes with its first bytes: before them all may begin anew."""
        backend = self._backend
        merged = self._merged
        now_s = time.monotonic
        async for piece in in_parts(answer.body()):
            out = merged.feed(piece)
            self.heard_s = replica.heard_s = now_s()
            if merged.new_tokens:
                if not self._has_token:
                    self._has_token = True
                    backend.balancer.first_token(self._id, self.heard_s)
                backend.stats.count_tokens(merged.new_tokens, self.times, self.heard_s)
            if out:
                self.must_follow = False  # the client is waited for
                await self._send_piece(answer, out)
                self.heard_s = now_s()
            self.must_follow = self._has_token or merged.is_midway
            if merged.failure or merged.ended:
                break
        last = merged.end()
        if merged.failure:
            raise AttemptFailedError(merged.failure)
        if last:
            await self._send_piece(answer, last)
        await self._close_stream(b"")

    async def _send_piece(self, answer: UpstreamAnswer, piece: bytes) -> None:
        """Send a piece of the answer's body, behind its head."""
        if not self._head_sent:
            kind = answer.header("content-type") or "text/event-stream"
            headers = [(b"content-type", kind.encode("latin-1")), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self._head_sent = True
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _close_stream(self, last: bytes) -> None:
        self._status = _reason(self._merged.finish_reason)
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def _relay_whole(self, replica: LiveReplica, answer: UpstreamAnswer) -> None:
        content = await self._whole(replica, answer)
        self._merged.whole(content)
        if self._merged.failure:
            raise AttemptFailedError(self._merged.failure)
        self.times.last_s = time.monotonic()
        status = _reason(self._merged.finish_reason)
        await self._send_whole(status, (200, kept_headers(answer), content))

    async def _send_whole(self, status: str, answer: WholeAnswer) -> None:
        """End the request with an answer in one piece."""
        self._status = status
        await send_whole(self._send, *answer)

    async def _whole(self, replica: LiveReplica, answer: UpstreamAnswer) -> bytes:
        """The whole body of an answer; silence in the middle of it ends the attempt."""

        def heard() -> None:
            self.heard_s = replica.heard_s = time.monotonic()

        self.must_follow = True
        body = await answer.read(MAX_WHOLE_BYTES, heard)
        if len(body) > MAX_WHOLE_BYTES:
            raise UpstreamError("the answer is too long")
        return body

    async def _give_up(self, text: str, ended: str = "failed", status: int = 503) -> None:
        """End with an error: in the stream, if the client has a part of it. Where it has all tokens
        and lacks the last lines, end with those that are known.
        """
        if self._merged.complete:
            await self._close_stream(self._merged.finish())
            return
        self._status = ended
        error = ApiError(text, status=status, code="replicas")
        if not self._head_sent:
            error.headers["Retry-After"] = str(RETRY_AFTER_S)
            raise error
        last = self._merged.error(error)
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    def _record(self) -> None:
        """Count the request, and write it to the log."""
        backend = self._backend
        stats = backend.stats
        merged = self._merged
        stats.prompt_tokens += merged.prompt_tokens
        if merged.usage is not None and self._call.choices == 1:
            backend.gauge.count(self._call.prompt, merged.prompt_tokens)
        # Without ids an event may have several tokens: those that came were counted as they came.
        stats.generation_tokens += self.generated - merged.tokens
        self._status = self._status or "cancelled"
        stats.count_end(self._status, self.times, self.generated)
        if backend.log is not None:
            self._log(backend.log)

    def _log(self, log: TraceLog) -> None:
        """Write a line for each row. A server counts all rows together, so each has its share; what
        its prompt shares is known of one row alone.
        """
        call = self._call
        has_usage = self._merged.usage is not None
        ended_well = self._status in ENDED_WELL
        status = UNCOUNTED if ended_well and not has_usage else self._status
        rows = min(call.choices, MAX_LOGGED_ROWS) if has_usage else 1
        prompts = split(self._merged.prompt_tokens, rows)
        outputs = split(self.generated, rows)
        at = log.timestamp(self.times.arrival_s)
        limit = max(call.max_tokens or 0, 0)
        lines = [
            self.times.line(at, (prompt, output, limit), status)
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        size = self._backend.options.block_tokens
        if has_usage and ended_well and call.choices == 1 and size:
            ids = self._backend.gauge.logged(self._blocks, prompts[0])
            blocks = size if ids else None
            lines = [msgspec.structs.replace(lines[0], hash_ids=ids, block_tokens=blocks)]
        for line in lines:
            log.add(line)


def split(total: int, rows: int) -> list[int]:
    """Return `total` divided over `rows`, as evenly as whole numbers allow."""
    share, more = divmod(total, rows)
    return [share + (row < more) for row in range(rows)]


def _reason(told: str) -> str:
    """How an answer ended, in words that are known: a replica's own would become labels."""
    return told if told in ENDED_WELL else "other" if told else "stop"


def kept_headers(answer: UpstreamAnswer) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in answer.headers if name.lower() in PASSED_BACK]
