"""From a validated request to submitted requests, and from their replies to a response.

`Generation` submits one request per prompt and choice, all choices of a request or none. It refuses
what it can before the work is done: a full queue before tokenizing.

`Exchange` writes the response, and cancels the requests when the client disconnects. An event
carries everything that arrived since the last one, so a slow reader gets fewer and larger events.
`toolkit.serve.http` disconnects a reader that stops.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from toolkit.engines.protocol import SamplingParams
from toolkit.engines.tokenizer import Tokenizer
from toolkit.openai.answers import AnswerWriter, Usage, about_answer, error_event
from toolkit.openai.engine_requests import EngineChat, EngineRequest
from toolkit.openai.errors import ApiError, overloaded, retry_after_s
from toolkit.openai.events import DONE
from toolkit.openai.requests import COMPLETION_TOKENS
from toolkit.serve.assemble import FrontSettings
from toolkit.serve.bodies import BodyReader, Prompts, check_room, short
from toolkit.serve.driver import SHUTTING_DOWN, TIMED_OUT, Driver, RefusedError
from toolkit.serve.errors import late
from toolkit.serve.live import ActiveRequest, Delta, GenerationRequest, Reply, TextOutput
from toolkit.serve.routes import unknown_model
from toolkit.serve.server import while_connected
from toolkit.serve.stats import LATE, QUEUE_FULL

MAX_CHOICES = 1024  # of one request: all are submitted at once, at 20 us each
MAX_SEED = (1 << 63) - 1
STILL_WAITING = b": waiting\n\n"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Generation:
    """Submits requests. It awaits nothing, so the counts that admitted a request still hold."""

    def __init__(
        self, driver: Driver, tokenizer: Tokenizer, settings: FrontSettings, reader: BodyReader
    ) -> None:
        self._driver = driver
        self._tokenizer = tokenizer
        self._settings = settings
        self._reader = reader

    def submit(self, asked: EngineRequest, prompts: Prompts | None) -> Exchange:
        """Submit a request. `prompts` are in tokens; None: the body was small.

        Raises ApiError for a request that cannot be served, and then submits nothing.
        """
        self._admit(asked)
        if prompts is None:
            prompts = self._reader.tokens(asked)
        is_chat = isinstance(asked, EngineChat)
        default = self._settings.max_new_tokens if is_chat else COMPLETION_TOKENS
        limits = [self._limit(len(prompt), asked.limit, default) for prompt in prompts]
        about = about_answer(self._settings.model, chat=is_chat)
        shows_usage = bool(asked.stream_options.include_usage)
        writer = AnswerWriter(about, chat=is_chat, shows_usage=shows_usage)
        return self._submit(asked, prompts, limits, writer)

    def check_room(self, choices: int = 1) -> None:
        """Raise `ApiError` if the server does not accept `choices` more requests now."""
        self._check_ready()
        settings = self._settings
        driver = self._driver
        if driver.waiting + choices > settings.max_waiting:
            waiting = driver.waiting
            limit = settings.max_waiting
            text = f"{waiting} requests wait; with {choices} more it would exceed {limit}"
            driver.stats.refusals[QUEUE_FULL] += 1
            wait_s = driver.forecast.predict(driver.now_s).ttft_s
            raise overloaded(text, retry_after_s(wait_s))

    def _admit(self, asked: EngineRequest) -> None:
        """Refuse, before tokenizing, by model, server state, queue and forecast."""
        settings = self._settings
        driver = self._driver
        if asked.model is not None and asked.model != settings.model:
            raise unknown_model(asked.model)
        if asked.llmctl_end_after is not None and not settings.allow_end_after:
            text = "'llmctl_end_after' needs a server that was started with --allow-end-after"
            raise ApiError(text, param="llmctl_end_after")
        self._check_ready()
        choices = asked.prompt_count * asked.n
        if choices > MAX_CHOICES:
            text = f"{asked.prompt_count} prompts with n {asked.n} are {choices} choices"
            raise ApiError(f"{text}; the limit is {MAX_CHOICES}", param="n")
        self.check_room(choices)
        predicted = driver.forecast.predict(driver.now_s)
        excess_s = driver.forecast.limits.excess_s(predicted)
        if excess_s:
            driver.stats.refusals[LATE] += 1
            raise late(predicted, excess_s)

    def _check_ready(self) -> None:
        if self._driver.state != "ready":
            text = f"the server is {self._driver.state}"
            headers = {"Retry-After": "5"}
            if self._driver.state == "draining":
                headers["Connection"] = "close"
            raise ApiError(text, status=503, code="unavailable", headers=headers)

    def _submit(
        self,
        asked: EngineRequest,
        prompts: Prompts,
        limits: Sequence[int],
        writer: AnswerWriter,
    ) -> Exchange:
        """Submit all choices of all prompts; `limits` bounds the new tokens for each prompt."""
        n = asked.n
        prompt_tokens = sum(map(len, prompts))
        sampling = self._sampling(asked, min(limits))
        reply = Reply(len(prompts) * n, patient=not asked.stream)
        tokens = [tuple(prompt) for prompt in prompts]
        choices: list[ActiveRequest] = []

        def cancel() -> None:
            for active in choices:
                self._driver.cancel(active)

        try:
            for index in range(reply.choices):
                own = sampling
                if index % n and sampling.temperature:  # each choice of a prompt has its own seed
                    seed = (sampling.seed + index % n) & MAX_SEED
                    own = msgspec.structs.replace(sampling, seed=seed)
                request = GenerationRequest(
                    f"{writer.about['id']}-{index}",
                    tokens[index // n],
                    limits[index // n],
                    own,
                    asked.priority,
                    asked.llmctl_end_after,
                    min(asked.timeout or math.inf, self._settings.request_timeout_s),
                )
                detokenizer = self._tokenizer.detokenizer()
                output = TextOutput(detokenizer, asked.stops, own.min_tokens, index)
                choices.append(self._driver.submit(request, output, reply))
        except RefusedError as error:
            cancel()
            raise ApiError(str(error), code="context_length_exceeded") from None
        keepalive_s = self._settings.keepalive_s
        return Exchange(reply, writer, prompt_tokens, cancel, asked.stream, keepalive_s)

    def _limit(self, prompt_tokens: int, wanted: int | None, default: int) -> int:
        """How many tokens may be generated. Raises `ApiError` if `wanted` exceeds a limit."""
        settings = self._settings
        check_room(prompt_tokens, settings.max_model_len)
        room = settings.max_model_len - prompt_tokens
        if wanted is None:
            return min(default, settings.max_new_tokens, room)
        if wanted > settings.max_new_tokens:
            text = f"max_tokens is {short(wanted)}; the limit is {settings.max_new_tokens}"
            raise ApiError(text, param="max_tokens")
        if wanted > room:
            text = (
                f"the prompt has {prompt_tokens} tokens and max_tokens is {wanted}, together "
                f"{prompt_tokens + wanted}; the limit is {settings.max_model_len}"
            )
            raise ApiError(text, param="max_tokens", code="context_length_exceeded")
        return wanted

    def _sampling(self, asked: EngineRequest, limit: int) -> SamplingParams:
        """The request's sampling parameters, with OpenAI's defaults.

        Sampling without a seed gets a random one here, so that a slice that runs again draws the
        same tokens.
        """
        self._reader.check_tokens(asked.stop_token_ids, "stop_token_ids")
        if asked.min_tokens > limit:
            text = f"min_tokens is {short(asked.min_tokens)}; max_tokens is {limit}"
            raise ApiError(text, param="min_tokens")
        drawn = asked.seed is None and asked.temperature
        seed = random.getrandbits(62) if drawn else asked.seed or 0
        return SamplingParams(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=max(asked.top_k, 0),
            min_p=asked.min_p,
            repetition_penalty=asked.repetition_penalty,
            seed=seed & MAX_SEED,
            ignore_eos=asked.ignore_eos,
            min_tokens=asked.min_tokens,
            stop_token_ids=tuple(asked.stop_token_ids),
        )


def request_failed(reason: str) -> ApiError:
    """Return the error of a request that failed. A client should retry only at a shutdown, because
    then another server answers.
    """
    timed_out = reason.startswith(TIMED_OUT)  # it would take as long again
    status, code = (504, "deadline_exceeded") if timed_out else (503, "request_failed")
    headers = {} if reason == SHUTTING_DOWN else {"x-should-retry": "false"}
    return ApiError(f"the request failed: {reason}", status=status, code=code, headers=headers)


@dataclass(slots=True, frozen=True)
class Exchange:
    """A submitted request: the source of its text, the writer of its response, and its cancel.

    As events, the response is `data: ` lines of JSON, of which the last is `[DONE]`. A comment is
    sent after `keepalive_s` seconds without new output. If the client wants the usage, every event
    carries `usage: null`, and a last one without choices the usage.
    """

    reply: Reply
    writer: AnswerWriter
    prompt_tokens: int
    cancel: Callable[[], None]  # has no effect on choices that have ended
    streams: bool
    keepalive_s: float

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; cancel the request if its client leaves. Raises ApiError if it fails
        before anything was sent.
        """
        work = self._stream(send) if self.streams else self._send_whole(scope, receive, send)
        try:
            await while_connected(receive, work)
        finally:
            self.cancel()

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        choices: dict[int, Delta] = {}
        while self.reply.open or not choices:
            for delta in await self.reply.take(3600.0):
                if delta.failure:
                    raise request_failed(delta.failure)
                choices[delta.index] = delta
        made = [(index, choices[index].text, choices[index].finish) for index in sorted(choices)]
        usage = Usage(self.prompt_tokens, sum(choice.tokens for choice in choices.values()))
        content = self.writer.whole(made, usage)
        await Response(content, media_type="application/json")(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        reply = self.reply
        writer = self.writer
        left = reply.choices
        tokens = 0
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        while left:
            deltas = await reply.take(self.keepalive_s)
            failed = next((delta.failure for delta in deltas if delta.failure), "")
            events = [
                writer.event(delta.index, delta.text, delta.finish)
                for delta in deltas
                if delta.tokens or not failed
            ]
            left = 0 if failed else left - sum(bool(delta.finish) for delta in deltas)
            tokens += sum(delta.tokens for delta in deltas)
            if failed:
                events.append(error_event(request_failed(failed)))
            elif not left and writer.shows_usage:
                events.append(writer.usage(Usage(self.prompt_tokens, tokens)))
            body = b"".join(events) or STILL_WAITING
            body += b"" if left else DONE
            await send({"type": "http.response.body", "body": body, "more_body": left > 0})
