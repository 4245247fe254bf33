"""Conversations as text, such as ShareGPT's: their lengths are counted, and the text is forgotten.

A file is a JSON array, or a line of JSON for each conversation: `conversations` with messages of
`from` and `value`, or `messages` of `role` and `content`. Every answer of the model is a request:
its prompt is all that stands before it. Lengths are counted message by message, so a model's chat
template, which adds some tokens to each, is not in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from toolkit.errors import InputError
from toolkit.traces.columns import Column, Record, Unusable
from toolkit.traces.types import MAX_LENGTH

CONTAINERS = ("conversations", "conversation", "messages")
MODEL = {"gpt", "assistant", "model", "chatgpt", "bing", "bard", "claude"}  # the speaker of answers

# The columns of the rows that are made of conversations.
COLUMNS = {
    "prompt": Column("prompt tokens"),
    "output": Column("output tokens"),
    "session": Column("conversation"),
}
DESCRIBED = (
    "every answer is a request: its prompt is all before it, and the answers of a conversation are"
    " a session"
)


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """Counts the tokens of texts: `count`, and what it is, in words."""

    count: Callable[[str], int]
    name: str

    @property
    def remark(self) -> str:
        """What a user must know of lengths that it counted."""
        return f"lengths are {self.name}; what a chat template adds is not in them"


def has_messages(sample: Iterable[Record]) -> bool:
    """Return whether any of these rows is a conversation."""
    return any(record is not None and _messages(record) for record in sample)


def no_counter_error(source: str) -> InputError:
    """Return the error for conversations of which nothing counts the tokens."""
    return InputError(
        f"{source}: conversations have text and no lengths in tokens",
        f"count them: llmctl trace convert {source} OUT --tokenizer RECIPE",
    )


def _messages(record: Mapping[str, object]) -> list[Mapping[str, object]]:
    for name in CONTAINERS:
        held = record.get(name)
        if isinstance(held, list) and held and all(isinstance(one, dict) for one in held):
            return held
    return []


def requests_of(
    records: Iterable[Record], count: Callable[[str], int]
) -> Iterator[Record | Unusable]:
    """Yield a row for each answer of each conversation, with `COLUMNS`."""
    for number, record in enumerate(records):
        messages = _messages(record or {})
        texts = [message.get("value", message.get("content")) for message in messages]
        speakers = [str(message.get("from", message.get("role"))).lower() for message in messages]
        if record is None:
            yield None
        elif not messages:
            yield Unusable("without messages", "no messages")
        elif not all(isinstance(text, str) for text in texts):
            yield Unusable("with a message that is not text", f"{len(messages)} messages")
        elif MODEL.isdisjoint(speakers):
            yield Unusable("without an answer", f"{len(messages)} messages")
        else:
            yield from _turns(number, speakers, [str(text) for text in texts], count)


def _turns(
    number: int, speakers: list[str], texts: list[str], count: Callable[[str], int]
) -> Iterator[Record]:
    before = 0
    for speaker, text in zip(speakers, texts, strict=True):
        tokens = count(text) if text else 0
        if speaker in MODEL:
            yield {"prompt tokens": before, "output tokens": tokens, "conversation": number}
        before = min(before + tokens, MAX_LENGTH)
