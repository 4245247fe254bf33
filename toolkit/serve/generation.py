"""From a validated form to submitted requests: limits, tokens, sampling, one request per prompt and
choice.

What can be refused is refused before the work is done: a full queue before tokenizing, all of a
request or none of it.
"""

from __future__ import annotations

import asyncio
import math
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from toolkit.engines.protocol import FinishReason, SamplingParams
from toolkit.engines.tokenizer import Tokenizer
from toolkit.serve.access import KeyedRequest
from toolkit.serve.driver import SHUTTING_DOWN, TIMED_OUT, Driver, RefusedError
from toolkit.serve.errors import ApiError, error_body
from toolkit.serve.forms import (
    BodyReader,
    ChatForm,
    CompletionForm,
    GenerationForm,
    check_room,
    short,
)
from toolkit.serve.live import ActiveRequest, Delta, GenerationRequest, Reply, TextOutput
from toolkit.serve.settings import FrontSettings

# What completions and chat completions look like on the wire: whole, and as stream events.
#
# The structs mirror OpenAI's objects; msgspec writes them. Two shapes with the same methods, so
# that nothing else has to know which of the two endpoints it serves.

_encode = msgspec.json.Encoder().encode


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TextChoice(Struct, frozen=True):
    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: None = None


class ChatMessage(Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    index: int
    message: ChatMessage
    finish_reason: FinishReason | None
    logprobs: None = None


class ChatDelta(Struct, frozen=True):
    content: str
    role: str | UnsetType = UNSET


class ChatDeltaChoice(Struct, frozen=True):
    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None
    logprobs: None = None


class Completion(Struct, frozen=True):
    """The object of both endpoints, whole or as a chunk."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[TextChoice | ChatChoice | ChatDeltaChoice]
    usage: Usage | UnsetType | None = UNSET


@dataclass(slots=True, frozen=True)
class ResponseHead:
    """What all objects of one response share."""

    id: str
    created: int
    model: str


class ResponseFormat(Protocol):
    """One endpoint's objects, as JSON."""

    def chunk(self, delta: Delta, usage: UnsetType | None) -> bytes: ...

    def last_chunk(self, usage: Usage) -> bytes: ...

    def whole(self, choices: Sequence[Delta], usage: Usage) -> bytes: ...


@dataclass(slots=True, frozen=True)
class CompletionFormat:
    """/v1/completions."""

    head: ResponseHead

    def chunk(self, delta: Delta, usage: UnsetType | None) -> bytes:
        return self._object([TextChoice(delta.index, delta.text, delta.finish or None)], usage)

    def last_chunk(self, usage: Usage) -> bytes:
        return self._object([], usage)

    def whole(self, choices: Sequence[Delta], usage: Usage) -> bytes:
        return self._object(
            [TextChoice(one.index, one.text, one.finish or None) for one in choices], usage
        )

    def _object(self, choices: list[TextChoice], usage: Usage | UnsetType | None) -> bytes:
        head = self.head
        return _encode(
            Completion(head.id, "text_completion", head.created, head.model, choices, usage)
        )


@dataclass(slots=True, frozen=True)
class ChatFormat:
    """/v1/chat/completions. A choice's first chunk carries the role; clients take it for the first
    token.
    """

    head: ResponseHead
    _begun: set[int] = field(default_factory=set)

    def chunk(self, delta: Delta, usage: UnsetType | None) -> bytes:
        role = UNSET if delta.index in self._begun else "assistant"
        self._begun.add(delta.index)
        choice = ChatDeltaChoice(delta.index, ChatDelta(delta.text, role), delta.finish or None)
        return self._object("chat.completion.chunk", [choice], usage)

    def last_chunk(self, usage: Usage) -> bytes:
        return self._object("chat.completion.chunk", [], usage)

    def whole(self, choices: Sequence[Delta], usage: Usage) -> bytes:
        messages = [
            ChatChoice(one.index, ChatMessage(one.text), one.finish or None) for one in choices
        ]
        return self._object("chat.completion", messages, usage)

    def _object(
        self,
        kind: str,
        choices: Sequence[ChatChoice | ChatDeltaChoice],
        usage: Usage | UnsetType | None,
    ) -> bytes:
        head = self.head
        return _encode(Completion(head.id, kind, head.created, head.model, choices, usage))


# The two ways to answer: a stream of server-sent events, or one JSON body when all choices have
# ended.
#
# Both watch for the client to go away, and free what it had asked for. An event carries all that
# came since the last one was written, so a slow reader gets fewer and larger events; one that
# stops reading is given up by the connection.

DONE = b"data: [DONE]\n\n"
STILL_WAITING = b": waiting\n\n"
CLIENT_GONE = 499  # nginx's number for what nobody will read


@dataclass(slots=True, frozen=True)
class Exchange:
    """A request that was submitted: where its text comes from, how it is written, how it is given
    up.
    """

    reply: Reply
    shape: ResponseFormat
    prompt_tokens: int
    cancel: Callable[[], None]  # harmless for what has ended

    def usage(self, completion_tokens: int) -> Usage:
        return Usage(self.prompt_tokens, completion_tokens, self.prompt_tokens + completion_tokens)


@asynccontextmanager
async def attended(exchange: Exchange, receive: Receive) -> AsyncIterator[None]:
    """While inside, a client that goes away closes the reply; on leaving, whatever has not ended is
    cancelled.
    """

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
    """A request that was accepted and could not be served. Trying again helps only where another
    server answers.
    """
    if reason.startswith(TIMED_OUT):
        headers = {"x-should-retry": "false"}  # it had its time, and would take as long again
        return ApiError(
            f"the request failed: {reason}", status=504, code="deadline_exceeded", headers=headers
        )
    headers = {} if reason == SHUTTING_DOWN else {"x-should-retry": "false"}
    return ApiError(
        f"the request failed: {reason}", status=503, code="request_failed", headers=headers
    )


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
        return (
            b"data: "
            + self._exchange.shape.chunk(delta, None if self._include_usage else UNSET)
            + b"\n\n"
        )

    def _end(self, tokens: int) -> bytes:
        if not self._include_usage:
            return DONE
        return (
            b"data: "
            + self._exchange.shape.last_chunk(self._exchange.usage(tokens))
            + b"\n\n"
            + DONE
        )


MAX_RETRY_AFTER_S = 60
MAX_CHOICES = 1024  # of one request: all of them are submitted at once, which takes 20 us each
MAX_SEED = (1 << 63) - 1

Prompts = Sequence[Sequence[int]]


class Generation:
    """Submits what forms ask for. One per server.

    Nothing here waits, so what was counted when a request was admitted still holds when it is
    submitted.
    """

    def __init__(
        self, driver: Driver, tokenizer: Tokenizer, settings: FrontSettings, reader: BodyReader
    ) -> None:
        self._driver = driver
        self._tokenizer = tokenizer
        self._settings = settings
        self._reader = reader

    def completion(
        self, form: CompletionForm, visit: KeyedRequest, prompts: Prompts | None = None
    ) -> Exchange:
        """`prompts`, where they are tokens already; else the form has them.

        `ApiError` where it cannot be served; nothing of it is submitted then.
        """
        self._admit(form, len(form.prompt if prompts is None else prompts), form.max_tokens, visit)
        prompts = self._reader.prompts(form.prompt) if prompts is None else prompts
        limits = [self._limit(len(prompt), form.max_tokens, 16) for prompt in prompts]
        return self._submit(form, prompts, limits, CompletionFormat(self._head("cmpl")), visit)

    def chat(self, form: ChatForm, visit: KeyedRequest, prompts: Prompts | None = None) -> Exchange:
        """As `completion`; of `prompts` there is one."""
        asked = form.max_completion_tokens or form.max_tokens
        self._admit(form, 1, asked, visit)
        prompts = [self._reader.chat_tokens(form.messages)] if prompts is None else prompts
        limits = [
            self._limit(len(prompt), asked, self._settings.max_new_tokens) for prompt in prompts
        ]
        return self._submit(form, prompts, limits, ChatFormat(self._head("chatcmpl")), visit)

    def check_room(self, choices: int = 1) -> None:
        """`ApiError` where so many more requests would not be taken now, whatever they are."""
        self._check_ready()
        settings, driver = self._settings, self._driver
        if driver.waiting + choices > settings.max_waiting:
            text = f"{driver.waiting} requests wait; with {choices} more it would exceed {settings.max_waiting}"
            raise self._overloaded(text, driver.forecast.now(driver.now_s).ttft_s)

    def _admit(
        self, form: GenerationForm, prompts: int, max_tokens: int | None, visit: KeyedRequest
    ) -> None:
        """Refuse by what is known before any tokenizing: the model, the server's state, the key's
        limits, the queue.
        """
        settings, driver = self._settings, self._driver
        if form.model not in (None, settings.model):
            raise unknown_model(form.model)
        if form.llmctl_end_after is not None and not settings.allow_end_after:
            text = "'llmctl_end_after' needs a server that was started with --allow-end-after"
            raise ApiError(text, param="llmctl_end_after")
        self._check_ready()
        choices = prompts * (form.n or 1)
        if choices > MAX_CHOICES:
            text = f"{prompts} prompts with n {form.n} are {choices} choices; the limit is {MAX_CHOICES}"
            raise ApiError(text, param="n")
        visit.check_priority(form.priority or 0)
        visit.admit(choices, choices * (max_tokens or 1))
        self.check_room(choices)
        told = driver.forecast.now(driver.now_s)
        excess_s = driver.forecast.limits.excess_s(told)
        if excess_s:
            text = f"too many wait: the first token would come in {told.ttft_s:.1f} s, the last in {told.e2e_s:.1f} s"
            raise self._overloaded(text, excess_s)

    def _overloaded(self, text: str, wait_s: float) -> ApiError:
        self._driver.stats.refused += 1
        return ApiError(
            text, status=503, code="overloaded", headers={"Retry-After": _whole_seconds(wait_s)}
        )

    def _check_ready(self) -> None:
        if self._driver.state != "ready":
            text = f"the server is {self._driver.state}"
            headers = {"Retry-After": "5"} | (
                {"Connection": "close"} if self._driver.state == "draining" else {}
            )
            raise ApiError(text, status=503, code="unavailable", headers=headers)

    def _head(self, prefix: str) -> ResponseHead:
        return ResponseHead(
            f"{prefix}-{secrets.token_hex(12)}", int(time.time()), self._settings.model
        )

    def _submit(
        self,
        form: GenerationForm,
        prompts: Prompts,
        limits: Sequence[int],
        shape: CompletionFormat | ChatFormat,
        visit: KeyedRequest,
    ) -> Exchange:
        """All choices of all prompts; `limits` are how many tokens each prompt's may have."""
        n, prompt_tokens = form.n or 1, sum(map(len, prompts))
        sampling = self._sampling(form, min(limits))
        reply = Reply(len(prompts) * n, patient=not form.stream)
        tokens = [tuple(prompt) for prompt in prompts]
        asks = [
            GenerationRequest(
                f"{shape.head.id}-{index}",
                tokens[index // n],
                limits[index // n],
                _another_seed(sampling, index % n),
                form.priority or 0,
                form.llmctl_end_after,
                min(form.timeout or math.inf, self._settings.request_timeout_s),
            )
            for index in range(reply.choices)
        ]
        lives: list[ActiveRequest] = []
        visit.reserve(
            prompt_tokens + n * sum(limits),
            lambda: sum(live.output.tokens for live in lives) + (prompt_tokens if lives else 0),
        )
        lives += self._submit_all(asks, form.stop, reply)

        def cancel() -> None:
            for live in lives:
                self._driver.cancel(live)

        return Exchange(reply, shape, prompt_tokens, cancel)

    def _submit_all(
        self, asks: Sequence[GenerationRequest], stops: Sequence[str], reply: Reply
    ) -> list[ActiveRequest]:
        lives: list[ActiveRequest] = []
        try:
            for index, ask in enumerate(asks):
                output = TextOutput(self._tokenizer.detokenizer(), stops, ask.sampling.min_tokens)
                lives.append(self._driver.submit(ask, output, reply, index))
        except RefusedError as error:
            for live in lives:
                self._driver.cancel(live)
            raise ApiError(str(error), code="context_length_exceeded") from None
        return lives

    def _limit(self, prompt_tokens: int, asked: int | None, default: int) -> int:
        """How many tokens may be generated. `ApiError` naming the limit where that is not possible."""
        settings = self._settings
        check_room(prompt_tokens, settings.max_model_len)
        room = settings.max_model_len - prompt_tokens
        if asked is None:
            return min(default, settings.max_new_tokens, room)
        if asked > settings.max_new_tokens:
            text = f"max_tokens is {short(asked)}; the limit is {settings.max_new_tokens}"
            raise ApiError(text, param="max_tokens")
        if asked > room:
            text = (
                f"the prompt has {prompt_tokens} tokens and max_tokens is {asked}, together "
                f"{prompt_tokens + asked}; the limit is {settings.max_model_len}"
            )
            raise ApiError(text, param="max_tokens", code="context_length_exceeded")
        return asked

    def _sampling(self, form: GenerationForm, limit: int) -> SamplingParams:
        """OpenAI's defaults. Without a seed sampling gets one here, so that a slice run again draws
        the same.
        """
        stop_token_ids = form.stop_token_ids or []
        self._reader.check_tokens(stop_token_ids, "stop_token_ids")
        min_tokens = form.min_tokens or 0
        if min_tokens > limit:
            text = f"min_tokens is {short(min_tokens)}; max_tokens is {limit}"
            raise ApiError(text, param="min_tokens")
        temperature = 1.0 if form.temperature is None else form.temperature
        return SamplingParams(
            temperature=temperature,
            top_p=1.0 if form.top_p is None else form.top_p,
            top_k=max(form.top_k or 0, 0),
            min_p=form.min_p or 0.0,
            repetition_penalty=form.repetition_penalty or 1.0,
            seed=(random.getrandbits(62) if form.seed is None and temperature else form.seed or 0)
            & MAX_SEED,
            ignore_eos=bool(form.ignore_eos),
            min_tokens=min_tokens,
            stop_token_ids=tuple(stop_token_ids),
        )


def unknown_model(name: str | None) -> ApiError:
    text = f"there is no model {str(name)[:80]!r} here; GET /v1/models lists those there are"
    return ApiError(text, status=404, param="model", code="model_not_found")


def _whole_seconds(wait_s: float) -> str:
    return str(math.ceil(min(max(wait_s, 1.0), MAX_RETRY_AFTER_S)))


def _another_seed(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Choices of one prompt draw apart from each other; greedy ones are equal anyway."""
    if not choice or not sampling.temperature:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + choice) & MAX_SEED)
