"""From a validated form to submitted requests: limits, tokens, sampling, one request per prompt and choice.

What can be refused is refused before the work is done: a full queue before tokenizing, all of a request or none of it.
"""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Sequence

import msgspec

from toolkit.engines.protocol import SamplingParams
from toolkit.engines.tokenizer import Tokenizer
from toolkit.serve.driver import Driver, RefusedError
from toolkit.serve.errors import ApiError
from toolkit.serve.keys import Visit
from toolkit.serve.live import Ask, Live
from toolkit.serve.prompts import BodyReader, check_room, short
from toolkit.serve.reply import Reply
from toolkit.serve.responses import ChatShape, CompletionShape, Head
from toolkit.serve.schemas import ChatForm, CompletionForm, GenerationForm
from toolkit.serve.settings import Settings
from toolkit.serve.sse import Exchange
from toolkit.serve.text import TextOutput

MAX_RETRY_AFTER_S = 60
MAX_CHOICES = 1024  # of one request: all of them are submitted at once, which takes 20 us each
MAX_SEED = (1 << 63) - 1

Prompts = Sequence[Sequence[int]]


class Generation:
    """Submits what forms ask for. One per server.

    Nothing here waits, so what was counted when a request was admitted still holds when it is submitted.
    """

    def __init__(self, driver: Driver, tokenizer: Tokenizer, settings: Settings, reader: BodyReader) -> None:
        self._driver = driver
        self._tokenizer = tokenizer
        self._settings = settings
        self._reader = reader

    def completion(self, form: CompletionForm, visit: Visit, prompts: Prompts | None = None) -> Exchange:
        """`prompts`, where they are tokens already; else the form has them.

        `ApiError` where it cannot be served; nothing of it is submitted then.
        """
        self._admit(form, len(form.prompt if prompts is None else prompts), form.max_tokens, visit)
        prompts = self._reader.prompts(form.prompt) if prompts is None else prompts
        limits = [self._limit(len(prompt), form.max_tokens, 16) for prompt in prompts]
        return self._submit(form, prompts, limits, CompletionShape(self._head("cmpl")), visit)

    def chat(self, form: ChatForm, visit: Visit, prompts: Prompts | None = None) -> Exchange:
        """As `completion`; of `prompts` there is one."""
        asked = form.max_completion_tokens or form.max_tokens
        self._admit(form, 1, asked, visit)
        prompts = [self._reader.chat_tokens(form.messages)] if prompts is None else prompts
        limits = [self._limit(len(prompt), asked, self._settings.max_new_tokens) for prompt in prompts]
        return self._submit(form, prompts, limits, ChatShape(self._head("chatcmpl")), visit)

    def check_room(self, choices: int = 1) -> None:
        """`ApiError` where so many more requests would not be taken now, whatever they are."""
        self._check_ready()
        settings, driver = self._settings, self._driver
        if driver.waiting + choices > settings.max_waiting:
            text = f"{driver.waiting} requests wait; with {choices} more it would exceed {settings.max_waiting}"
            raise self._overloaded(text, driver.forecast.now(driver.now_s).ttft_s)

    def _admit(self, form: GenerationForm, prompts: int, max_tokens: int | None, visit: Visit) -> None:
        """Refuse by what is known before any tokenizing: the model, the server's state, the key's limits, the queue."""
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
        return ApiError(text, status=503, code="overloaded", headers={"Retry-After": _whole_seconds(wait_s)})

    def _check_ready(self) -> None:
        if self._driver.state != "ready":
            text = f"the server is {self._driver.state}"
            headers = {"Retry-After": "5"} | ({"Connection": "close"} if self._driver.state == "draining" else {})
            raise ApiError(text, status=503, code="unavailable", headers=headers)

    def _head(self, prefix: str) -> Head:
        return Head(f"{prefix}-{secrets.token_hex(12)}", int(time.time()), self._settings.model)

    def _submit(
        self,
        form: GenerationForm,
        prompts: Prompts,
        limits: Sequence[int],
        shape: CompletionShape | ChatShape,
        visit: Visit,
    ) -> Exchange:
        """All choices of all prompts; `limits` are how many tokens each prompt's may have."""
        n, prompt_tokens = form.n or 1, sum(map(len, prompts))
        sampling = self._sampling(form, min(limits))
        reply = Reply(len(prompts) * n, patient=not form.stream)
        tokens = [tuple(prompt) for prompt in prompts]
        asks = [
            Ask(
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
        lives: list[Live] = []
        visit.reserve(
            prompt_tokens + n * sum(limits),
            lambda: sum(live.output.tokens for live in lives) + (prompt_tokens if lives else 0),
        )
        lives += self._submit_all(asks, form.stop, reply)

        def cancel() -> None:
            for live in lives:
                self._driver.cancel(live)

        return Exchange(reply, shape, prompt_tokens, cancel)

    def _submit_all(self, asks: Sequence[Ask], stops: Sequence[str], reply: Reply) -> list[Live]:
        lives: list[Live] = []
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
        """OpenAI's defaults. Without a seed sampling gets one here, so that a slice run again draws the same."""
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
            seed=(random.getrandbits(62) if form.seed is None and temperature else form.seed or 0) & MAX_SEED,
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
