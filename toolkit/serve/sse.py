"""The two ways to answer: a stream of server-sent events, or one JSON body when all choices have ended.

Both watch for the client to go away, and free what it had asked for. An event carries all that came since the last one
was written, so a slow reader gets fewer and larger events; one that stops reading is given up by the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from msgspec import UNSET
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from toolkit.serve.driver import SHUTTING_DOWN, TIMED_OUT
from toolkit.serve.errors import ApiError, error_body
from toolkit.serve.reply import Delta, Reply
from toolkit.serve.responses import Shape, Usage

DONE = b"data: [DONE]\n\n"
STILL_WAITING = b": waiting\n\n"
CLIENT_GONE = 499  # nginx's number for what nobody will read


@dataclass(slots=True, frozen=True)
class Exchange:
    """A request that was submitted: where its text comes from, how it is written, how it is given up."""

    reply: Reply
    shape: Shape
    prompt_tokens: int
    cancel: Callable[[], None]  # harmless for what has ended

    def usage(self, completion_tokens: int) -> Usage:
        return Usage(self.prompt_tokens, completion_tokens, self.prompt_tokens + completion_tokens)


@asynccontextmanager
async def attended(exchange: Exchange, receive: Receive) -> AsyncIterator[None]:
    """While inside, a client that goes away closes the reply; on leaving, whatever has not ended is cancelled."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        exchange.reply.close()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        exchange.cancel()


def failure(reason: str) -> ApiError:
    """A request that was accepted and could not be served. Trying again helps only where another server answers."""
    if reason.startswith(TIMED_OUT):
        headers = {"x-should-retry": "false"}  # it had its time, and would take as long again
        return ApiError(f"the request failed: {reason}", status=504, code="deadline_exceeded", headers=headers)
    headers = {} if reason == SHUTTING_DOWN else {"x-should-retry": "false"}
    return ApiError(f"the request failed: {reason}", status=503, code="request_failed", headers=headers)


async def json_response(exchange: Exchange, receive: Receive) -> Response:
    """Wait for all choices. `ApiError` if one fails."""
    choices: dict[int, Delta] = {}
    async with attended(exchange, receive):
        while exchange.reply.open or not choices:
            for delta in await exchange.reply.take(3600.0):
                if delta.failure:
                    raise failure(delta.failure)
                choices[delta.index] = delta
            if exchange.reply.closed:
                return Response(status_code=CLIENT_GONE)
    ordered = [choices[index] for index in sorted(choices)]
    usage = exchange.usage(sum(choice.tokens for choice in ordered))
    return Response(exchange.shape.whole(ordered, usage), media_type="application/json")


class EventStream(Response):
    """The choices as server-sent events, in `data: ` lines of JSON, the last one `[DONE]`.

    Args:
        exchange: what is written.
        include_usage: chunks carry `usage: null`, and one more without choices carries the usage.
        keepalive_s: a comment is sent after this long without news.
    """

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, *, include_usage: bool, keepalive_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._exchange = exchange
        self._include_usage = include_usage
        self._keepalive_s = keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with attended(self._exchange, receive):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for events, more in self._events():
                await send({"type": "http.response.body", "body": events, "more_body": more})

    async def _events(self) -> AsyncIterator[tuple[bytes, bool]]:
        """Bytes to write at once, and whether more follow."""
        reply = self._exchange.reply
        left, tokens = reply.choices, 0
        while left:
            news = await reply.take(self._keepalive_s)
            if reply.closed:
                return
            failed = next((delta.failure for delta in news if delta.failure), "")
            if failed:
                texts = b"".join(self._event(delta) for delta in news if delta.tokens)
                yield texts + b"data: " + error_body(failure(failed)) + b"\n\n" + DONE, False
                return
            left -= sum(bool(delta.finish) for delta in news)
            tokens += sum(delta.tokens for delta in news)
            events = b"".join(map(self._event, news)) or STILL_WAITING
            yield (events if left else events + self._end(tokens)), left > 0

    def _event(self, delta: Delta) -> bytes:
        return b"data: " + self._exchange.shape.chunk(delta, None if self._include_usage else UNSET) + b"\n\n"

    def _end(self, tokens: int) -> bytes:
        if not self._include_usage:
            return DONE
        return b"data: " + self._exchange.shape.last_chunk(self._exchange.usage(tokens)) + b"\n\n" + DONE
