"""Read the bodies of requests: within their bounds, and prompts in tokens.

`EngineBackend` reads a large body in a thread, so that it does not block the event loop. A thread
that parses in C holds Python's global lock meanwhile, so `toolkit.openai.bodies.parse_json` bounds
each such step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from toolkit.engines.tokenizer import Tokenizer
from toolkit.errors import InputError
from toolkit.openai.engine_requests import (
    EngineChat,
    EngineCompletion,
    EngineRequest,
)
from toolkit.openai.errors import ApiError

BODY_S = 60.0  # for a body
Prompts = Sequence[Sequence[int]]  # in tokens


def check_json(headers: Headers) -> None:
    """Raise `ApiError` where the content-type is not JSON."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(f"content-type is '{kind[:80]}', and must be application/json", status=415)


async def read_body(request: Request, max_bytes: int, hold: Callable[[int], None]) -> bytes:
    """Return the body; `hold` gets the size of each piece. Raises `ApiError` as soon as it exceeds
    `max_bytes`, whatever length it states, and for one that takes too long.
    """
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated[:20]) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                hold(len(piece))
                body += piece
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        text = f"the body did not come within {BODY_S:g} s"
        raise ApiError(text, status=408, headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ApiError("the body ended early") from None
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    text = f"the body is larger than {max_bytes} bytes"
    return ApiError(text, status=413)


class PromptReader:
    """Reads the prompts of requests for one model. Raises only ApiError."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def tokens(self, asked: EngineRequest) -> list[list[int]]:
        """Return the tokens of all prompts of a request. New clients call 'system' 'developer'."""
        try:
            if isinstance(asked, EngineChat):
                roles = {"developer": "system"}
                messages = [
                    {"role": roles.get(one.role, one.role), "content": one.text}
                    for one in asked.messages
                ]
                return [self._tokenizer.encode_chat(messages)]
            assert isinstance(asked, EngineCompletion)
            for prompt in asked.prompts:
                if not isinstance(prompt, str):
                    self.check_tokens(prompt, "prompt")
            encode = self._tokenizer.encode
            return [encode(text) if isinstance(text, str) else text for text in asked.prompts]
        except InputError as error:
            param = "messages" if isinstance(asked, EngineChat) else "prompt"
            raise ApiError(error.message, param=param) from None

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raise `ApiError` for a token that is not in the model's vocabulary."""
        size = self._vocab_size
        if tokens and not (min(tokens) >= 0 and max(tokens) < size):
            token = next(token for token in tokens if not 0 <= token < size)
            raise ApiError(
                f"'{param}' holds token {short(token)}; tokens here are 0 to {size - 1}",
                param=param,
            )


def check_room(prompt_tokens: int, max_model_len: int) -> None:
    """Raise `ApiError` for an empty prompt, or one that leaves no room for a new token."""
    if prompt_tokens < 1:
        raise ApiError("the prompt has no tokens", param="prompt")
    if prompt_tokens >= max_model_len:
        limit = f"the limit of prompt + output is {max_model_len}"
        text = f"the prompt has {prompt_tokens} tokens; {limit}"
        raise ApiError(text, param="prompt", code="context_length_exceeded")


def short(number: int) -> str:
    """A number for a message. A number in JSON may have thousands of digits."""
    return str(number) if abs(number) < 10**20 else "too large a number"
