"""From a request's body to a form and its prompts in tokens. No I/O: it runs in the server and in the helper alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from toolkit.engines.tokenizer import Tokenizer
from toolkit.errors import InputError
from toolkit.serve.body import parse_json
from toolkit.serve.errors import ApiError
from toolkit.serve.schemas import (
    ChatForm,
    CompletionForm,
    DetokenizeForm,
    FormT,
    Message,
    Prompt,
    TokenizeForm,
    validate,
)

MAX_ANSWERED_TOKENS = 1 << 20  # by /tokenize, unless the model takes more

NOTHING_SAID = Message(role="user", content="")

Worked = TypeVar("Worked")


class BodyReader:
    """Reads bodies for one model, within its limits. Everything it raises is an `ApiError`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def form(self, kind: type[FormT], body: bytes) -> FormT:
        return validate(kind, parse_json(body))

    def completion(self, body: bytes) -> tuple[CompletionForm, list[list[int]]]:
        """The form, with nothing for its prompts, and their tokens."""
        form = self.form(CompletionForm, body)
        prompts = self.prompts(form.prompt)
        for prompt in prompts:
            check_room(len(prompt), self._max_model_len)
        return form.model_copy(update={"prompt": [""]}), prompts

    def chat(self, body: bytes) -> tuple[ChatForm, list[list[int]]]:
        """The form, with nothing for its messages, and the tokens that they are."""
        form = self.form(ChatForm, body)
        prompt = self.chat_tokens(form.messages)
        check_room(len(prompt), self._max_model_len)
        return form.model_copy(update={"messages": [NOTHING_SAID]}), [prompt]

    def tokenize(self, body: bytes) -> bytes:
        """The answer's JSON."""
        form = self.form(TokenizeForm, body)
        if (form.prompt is None) == (form.messages is None):
            raise ApiError("one of 'prompt' and 'messages' is needed", param="prompt")
        if form.messages is not None:
            tokens = self.chat_tokens(form.messages)
        else:
            tokens = self._encoded(lambda: self._tokenizer.encode(form.prompt or ""), "prompt")
        limit = max(MAX_ANSWERED_TOKENS, self._max_model_len)
        if len(tokens) > limit:
            text = f"the text has {len(tokens)} tokens; an answer holds at most {limit}"
            raise ApiError(text, param="messages" if form.messages is not None else "prompt")
        return msgspec.json.encode({"count": len(tokens), "max_model_len": self._max_model_len, "tokens": tokens})

    def detokenize(self, body: bytes) -> bytes:
        """The answer's JSON."""
        tokens = self.form(DetokenizeForm, body).tokens
        if len(tokens) > self._max_model_len:
            text = f"'tokens' holds {len(tokens)} tokens; the limit is {self._max_model_len}, as of prompt + output"
            raise ApiError(text, param="tokens")
        self.check_tokens(tokens, "tokens")
        return msgspec.json.encode({"prompt": self._tokenizer.decode(tokens)})

    def prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """All prompts as tokens."""
        for prompt in prompts:
            if not isinstance(prompt, str):
                self.check_tokens(prompt, "prompt")
        encode = self._tokenizer.encode
        return self._encoded(lambda: [encode(one) if isinstance(one, str) else one for one in prompts], "prompt")

    def chat_tokens(self, messages: Sequence[Message]) -> list[int]:
        """The messages in the model's chat template. 'developer' is what newer clients call 'system'."""
        roles = {"developer": "system"}
        plain = [{"role": roles.get(one.role, one.role), "content": one.content} for one in messages]
        return self._encoded(lambda: self._tokenizer.encode_chat(plain), "messages")

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """`ApiError` for a token that the model does not have."""
        size = self._vocab_size
        if tokens and not (min(tokens) >= 0 and max(tokens) < size):
            token = next(one for one in tokens if not 0 <= one < size)
            raise ApiError(f"'{param}' holds token {short(token)}; tokens here are 0 to {size - 1}", param=param)

    def _encoded(self, work: Callable[[], Worked], param: str) -> Worked:
        try:
            return work()
        except InputError as error:
            raise ApiError(error.message, param=param) from None


def check_room(prompt_tokens: int, max_model_len: int) -> None:
    """`ApiError` for a prompt that leaves no room for a token."""
    if prompt_tokens < 1:
        raise ApiError("the prompt has no tokens", param="prompt")
    if prompt_tokens >= max_model_len:
        text = f"the prompt has {prompt_tokens} tokens; the limit of prompt + output is {max_model_len}"
        raise ApiError(text, param="prompt", code="context_length_exceeded")


def short(number: int) -> str:
    """A number for a message; JSON's may have thousands of digits."""
    return str(number) if abs(number) < 10**20 else "too large a number"
