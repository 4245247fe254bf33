"""What completions and chat completions look like on the wire: whole, and as stream events.

The structs mirror OpenAI's objects; msgspec writes them. Two shapes with the same methods, so that nothing else has to
know which of the two endpoints it serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from toolkit.engines.protocol import FinishReason
from toolkit.serve.reply import Delta

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
class Head:
    """What all objects of one response share."""

    id: str
    created: int
    model: str


class Shape(Protocol):
    """One endpoint's objects, as JSON."""

    def chunk(self, delta: Delta, usage: UnsetType | None) -> bytes: ...

    def last_chunk(self, usage: Usage) -> bytes: ...

    def whole(self, choices: Sequence[Delta], usage: Usage) -> bytes: ...


@dataclass(slots=True, frozen=True)
class CompletionShape:
    """/v1/completions."""

    head: Head

    def chunk(self, delta: Delta, usage: UnsetType | None) -> bytes:
        return self._object([TextChoice(delta.index, delta.text, delta.finish or None)], usage)

    def last_chunk(self, usage: Usage) -> bytes:
        return self._object([], usage)

    def whole(self, choices: Sequence[Delta], usage: Usage) -> bytes:
        return self._object([TextChoice(one.index, one.text, one.finish or None) for one in choices], usage)

    def _object(self, choices: list[TextChoice], usage: Usage | UnsetType | None) -> bytes:
        head = self.head
        return _encode(Completion(head.id, "text_completion", head.created, head.model, choices, usage))


@dataclass(slots=True, frozen=True)
class ChatShape:
    """/v1/chat/completions. A choice's first chunk carries the role; clients take it for the first token."""

    head: Head
    _begun: set[int] = field(default_factory=set)

    def chunk(self, delta: Delta, usage: UnsetType | None) -> bytes:
        role = UNSET if delta.index in self._begun else "assistant"
        self._begun.add(delta.index)
        choice = ChatDeltaChoice(delta.index, ChatDelta(delta.text, role), delta.finish or None)
        return self._object("chat.completion.chunk", [choice], usage)

    def last_chunk(self, usage: Usage) -> bytes:
        return self._object("chat.completion.chunk", [], usage)

    def whole(self, choices: Sequence[Delta], usage: Usage) -> bytes:
        messages = [ChatChoice(one.index, ChatMessage(one.text), one.finish or None) for one in choices]
        return self._object("chat.completion", messages, usage)

    def _object(
        self, kind: str, choices: Sequence[ChatChoice | ChatDeltaChoice], usage: Usage | UnsetType | None
    ) -> bytes:
        head = self.head
        return _encode(Completion(head.id, kind, head.created, head.model, choices, usage))
