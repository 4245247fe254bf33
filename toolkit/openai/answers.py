"""Answers in OpenAI's format, whole or as the events of a stream: read from any server, and
written for clients.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from toolkit.openai.errors import ApiError, error_body
from toolkit.openai.foreign import NULL, Count, decoded, is_null

EMPTY_CALLS = (b"null", b"[]")


class PromptDetails(msgspec.Struct):
    cached_tokens: Count | None = None


class Usage(msgspec.Struct):
    """The tokens of an answer and its prompts, as servers count them."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    prompt_tokens_details: Raw = NULL

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompts that were in the server's cache; None: it does not say."""
        details = decoded(self.prompt_tokens_details, PromptDetails)
        return details.cached_tokens if details else None


class ChatDelta(msgspec.Struct):
    """What an event of a chat adds to the message."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Raw = NULL


class AnswerChoice(msgspec.Struct):
    """What an event of a stream, or a whole answer, says of a choice."""

    index: Count = 0
    text: str | None = None
    delta: ChatDelta | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[Count] | None = None
    prompt_token_ids: list[Count] | None = None

    @property
    def new_text(self) -> str:
        """The new text, of either API."""
        return self.text or (self.delta.content if self.delta else None) or ""

    @property
    def beside_text(self) -> bool:
        """Whether it has reasoning or calls of tools, which no ids bring back."""
        delta = self.delta
        if delta is None:
            return False
        called = bytes(delta.tool_calls) not in EMPTY_CALLS
        return called or bool(delta.reasoning or delta.reasoning_content)


class Answer(msgspec.Struct):
    """An event of a stream, or a whole answer."""

    choices: list[AnswerChoice] = []
    usage: Raw = NULL
    error: Raw = NULL
    prompt_token_ids: list[Count] | None = None

    @property
    def counted(self) -> Usage | None:
        """The usage; None where there is none, and for one that no server can have counted."""
        return None if is_null(self.usage) else decoded(self.usage, Usage)


read_answer = msgspec.json.Decoder(Answer).decode  # raises `foreign.UNREADABLE`
_encode = msgspec.json.Encoder().encode


def about_answer(model: str, *, chat: bool) -> dict[str, Any]:
    """Return what all events of a new answer say of it."""
    name = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
    return {"id": name, "created": int(time.time()), "model": model}


class AnswerWriter:
    """Writes one answer of /v1/completions or, with `chat`, of /v1/chat/completions.

    Args:
        about: the fields that all events of the answer share.
        begun: choices of which the client has the role. The first event of another chat's choice
            carries the role with the first text: clients count the first event as the first token.
        shows_usage: every event has the field `usage`.
    """

    def __init__(
        self,
        about: Mapping[str, Any],
        *,
        chat: bool,
        begun: Iterable[int] = (),
        shows_usage: bool = False,
    ) -> None:
        self.about = about
        self._chat = chat
        self._begun = set(begun)
        self.shows_usage = shows_usage

    def whole(self, choices: Sequence[tuple[int, str, str]], usage: Usage) -> bytes:
        """Return an answer in one piece, of the index, text and finish reason of its choices."""
        kind = "chat.completion" if self._chat else "text_completion"
        made = []
        for index, text, finish in choices:
            message = {"role": "assistant", "content": text, "refusal": None}
            said = {"message": message} if self._chat else {"text": text}
            made.append(_choice(index, said, finish))
        fields = {**self.about, "object": kind, "choices": made, "usage": _counts(usage)}
        return _encode(fields)

    def event(
        self,
        index: int,
        text: str,
        finish: str | None,
        usage: Usage | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Return an event with new text of a choice; `more`: further fields of the choice."""
        said: dict[str, Any] = {"text": text}
        if self._chat:
            said = {"delta": {"content": text}}
            if index not in self._begun:
                said = {"delta": {"role": "assistant", "content": text}}
                self._begun.add(index)
        choice = _choice(index, said, finish)
        return self._event([{**choice, **more} if more else choice], usage)

    def usage(self, usage: Usage) -> bytes:
        """Return the event with the usage alone."""
        return self._event([], usage)

    def _event(self, choices: list[dict[str, Any]], usage: Usage | None) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        fields = {**self.about, "object": kind, "choices": choices}
        if usage is not None or self.shows_usage:
            fields["usage"] = usage and _counts(usage)
        return b"data: %b\n\n" % _encode(fields)


def _choice(index: int, said: Mapping[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": index, **said, "logprobs": None, "finish_reason": finish or None}


def _counts(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
    }


def error_event(error: ApiError) -> bytes:
    """Return the event of an error in a stream."""
    return b"data: %b\n\n" % error_body(error)


class Model(msgspec.Struct):
    """A model in /v1/models; only OpenAI's `id` is always there. Our front adds its `replicas`."""

    id: str
    owned_by: str = ""
    max_model_len: Count | None = None
    replicas: int | None = None


class Models(msgspec.Struct):
    data: list[Model]


class Version(msgspec.Struct):
    version: str = ""
