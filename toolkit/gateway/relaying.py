"""Requests without generation, each answered whole by one replica: /tokenize, /detokenize,
embeddings, and those for a response that a replica keeps.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw
from starlette.types import Receive, Send

from toolkit.endpoints.foreign import CountedUsage, decoded
from toolkit.endpoints.upstream import RawHeaders, UpstreamError
from toolkit.gateway.passing import BUSY, NO_REPLICA, kept_headers, send_whole, whole_body
from toolkit.gateway.replicas import LiveReplica
from toolkit.serve.errors import ApiError, overloaded
from toolkit.serve.server import disconnected, first_of

if TYPE_CHECKING:
    from toolkit.gateway.front import Gateway

# The path of a request passes only where it is one of these.
EMBEDDINGS = "/v1/embeddings"
RELAYED = ("/tokenize", "/detokenize", EMBEDDINGS)
MAX_TOKENS_PER_BYTE = 4
Whole = tuple[int, list[tuple[bytes, bytes]], bytes]


class _Counted(msgspec.Struct):
    usage: Raw = Raw(b"null")


class RelayedRequest:
    """One request that a replica answers as a whole: `only` this one, or any.

    Attributes:
        most_tokens: what its key may pay: the prompt of embeddings; other requests compute nothing.
        charged: what its key pays, as the server counted, else by the estimate.
    """

    def __init__(
        self,
        gateway: Gateway,
        method: str,
        target: str,
        body: bytes,
        headers: RawHeaders,
        only: LiveReplica | None = None,
    ) -> None:
        self._gateway = gateway
        self._method = method
        self._target = target
        self._body = body
        self._headers = headers
        self._only = only
        self.most_tokens = gateway.gauge.tokens([body]) if target == EMBEDDINGS else 0
        self.charged = 0

    async def run(self, receive: Receive, send: Send) -> None:
        """Answer the client. Raises `ApiError` where no replica answers in time."""
        limit_s = self._gateway.settings.request_timeout_s
        answering = asyncio.create_task(self._answer())
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

    async def _answer(self) -> Whole:
        """The answer of the first replica that has one; of all refusals, the last."""
        pool = self._gateway.pool
        refusal = None
        able = sorted(pool.up, key=lambda each: len(each.attempts))
        for replica in able if self._only is None else [self._only]:
            try:
                async with asyncio.timeout(pool.hang_s):
                    status, headers, content = await self._ask(replica)
            except TimeoutError:
                pool.doubt(replica)
                continue
            except UpstreamError as error:
                if error.here:
                    raise overloaded(str(error)) from None
                pool.failed(replica, "the connection broke off")
                continue
            if self._only is None:  # else its 404 may be about what it keeps
                pool.answered(replica, status)
            if status < 500 and status not in BUSY:
                self._charge(replica, status, content)
                return status, headers, content
            refusal = status, headers, content
        self.charged = 0
        if refusal is None:
            raise overloaded(NO_REPLICA)
        return refusal

    async def _ask(self, replica: LiveReplica) -> Whole:
        target = self._target.encode("latin-1")
        self.charged = self.most_tokens
        answer = await replica.upstream.send(self._method, target, self._headers, self._body)
        async with aclosing(answer):
            return answer.status, kept_headers(answer), await whole_body(answer)

    def _charge(self, replica: LiveReplica, status: int, content: bytes) -> None:
        if status != 200:
            self.charged = 0
        elif self.most_tokens:
            read = decoded(content, _Counted) or _Counted()
            usage = decoded(read.usage, CountedUsage)
            # A server adds some tokens to each text, but never so many.
            if usage is not None and 0 < usage.prompt_tokens <= MAX_TOKENS_PER_BYTE * len(
                self._body
            ):
                self.charged = usage.prompt_tokens
