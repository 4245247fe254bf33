"""Requests without generation, each answered whole by one replica: /tokenize, /detokenize and
embeddings.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from typing import TYPE_CHECKING

from starlette.types import Receive, Send

from toolkit.endpoints.upstream import RawHeaders, UpstreamError
from toolkit.gateway.passing import (
    BUSY,
    NO_REPLICA,
    WholeAnswer,
    kept_headers,
    send_whole,
    whole_body,
)
from toolkit.gateway.replicas import LiveReplica
from toolkit.serve.errors import ApiError, overloaded
from toolkit.serve.server import disconnected, first_of

if TYPE_CHECKING:
    from toolkit.gateway.front import Gateway

# The path of a request passes only where it is one of these.
RELAYED = ("/tokenize", "/detokenize", "/v1/embeddings")


async def relay(
    gateway: Gateway, path: str, headers: RawHeaders, body: bytes, receive: Receive, send: Send
) -> None:
    """Answer a client as one replica does. Raises `ApiError` where none answers in time."""
    limit_s = gateway.settings.request_timeout_s
    answering = asyncio.create_task(_answer(gateway, path, headers, body))
    gone = asyncio.create_task(disconnected(receive))
    try:
        async with asyncio.timeout(None if math.isinf(limit_s) else limit_s):
            await first_of(answering, gone)
        if answering.done():
            await send_whole(send, *answering.result())
    except TimeoutError:
        text = f"no end within {limit_s:g} s"
        raise ApiError(text, status=504, code="replicas") from None
    finally:
        for task in (answering, gone):
            task.cancel()
        await asyncio.gather(answering, gone, return_exceptions=True)


async def _answer(gateway: Gateway, path: str, headers: RawHeaders, body: bytes) -> WholeAnswer:
    """The answer of the first replica that has one; of all refusals, the last."""
    pool = gateway.pool
    refusal = None
    for replica in sorted(pool.up, key=lambda each: len(each.attempts)):
        try:
            async with asyncio.timeout(pool.hang_s):
                answer = await _ask(replica, path, headers, body)
        except TimeoutError:
            pool.doubt(replica)
            continue
        except UpstreamError as error:
            if error.here:
                raise overloaded(str(error)) from None
            pool.failed(replica, "the connection broke off")
            continue
        status = answer[0]
        pool.answered(replica, status)
        if status < 500 and status not in BUSY:
            return answer
        refusal = answer
    if refusal is None:
        raise overloaded(NO_REPLICA)
    return refusal


async def _ask(replica: LiveReplica, path: str, headers: RawHeaders, body: bytes) -> WholeAnswer:
    answer = await replica.upstream.send("POST", path.encode(), headers, body)
    async with aclosing(answer):
        return answer.status, kept_headers(answer), await whole_body(answer)
