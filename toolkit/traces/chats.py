"""Conversations as text, such as ShareGPT's: their lengths are counted, and the text is forgotten.

A file is a JSON array, or a line of JSON for each conversation: `conversations` with messages of
`from` and `value`, or `messages` of `role` and `content`. Every answer of the model is a request:
its prompt is all that stands before it. Lengths are counted message by message, so a model's chat
template, which adds some tokens to each, is not in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from toolkit.errors import InputError
from toolkit.traces.formats import BLAMED, MAX_LENGTH, REASON, Format, Record

CONVERSATIONS = "conversations"  # the name of the format
CONTAINERS = ("conversations", "conversation", "messages")
MODEL = {"gpt", "assistant", "model", "chatgpt", "bing", "bard", "claude"}  # the speaker of answers

NO_MESSAGES = "without messages"
NO_TEXT = "with a message that is not text"
NO_ANSWER = "without an answer"
PROMPT = "prompt tokens"
OUTPUT = "output tokens"
SESSION = "conversation"


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """Counts the tokens of texts: `count`, and what it is, in words."""

    count: Callable[[str], int]
    name: str


def estimated(chars_per_token: float) -> TokenCounter:
    """An estimate that follows from the number of characters. `InputError` for a number that is not
    from 0.1 to 100.
    """
    if not 0.1 <= chars_per_token <= 100:
        raise InputError(
            f"{chars_per_token:g} characters per token are not possible", "give 0.1 to 100"
        )
    name = f"an estimate from {chars_per_token:g} characters per token, not counted"
    return TokenCounter(lambda text: -int(-len(text) // chars_per_token), name)


def has_messages(sample: list[Record]) -> bool:
    """Whether any of these rows is a conversation."""
    return any(record is not None and _messages(record) for record in sample)


def conversations(counter: TokenCounter | None, source: str) -> Format:
    """The format of conversations. `InputError` without a counter."""
    if counter is None:
        raise InputError(
            f"{source}: conversations have text and no lengths in tokens",
            f"count them: llmctl trace convert {source} OUT --tokenizer RECIPE"
            " (or --chars-per-token 4, an estimate)",
        )
    return Format(
        CONVERSATIONS,
        prompt=PROMPT,
        output=OUTPUT,
        session=SESSION,
        think="think_ms",
        whole=partial(_requests, count=counter.count),
        described="every answer is a request: its prompt is all before it, and the answers of a"
        " conversation are a session",
        remarks=(f"lengths are {counter.name}; what a chat template adds is not in them",),
        think_remark="no time to think is known: a later turn follows the turn before at once",
    )


def _messages(record: Mapping[str, object]) -> list[Mapping[str, object]]:
    for name in CONTAINERS:
        held = record.get(name)
        if isinstance(held, list) and held and all(isinstance(one, dict) for one in held):
            return held
    return []


def _requests(
    records: Iterator[Record], _: str, *, count: Callable[[str], int]
) -> Iterator[Record]:
    """A row for each answer of each conversation."""
    for number, record in enumerate(records):
        if record is None:
            yield None
            continue
        messages = _messages(record)
        texts = [message.get("value", message.get("content")) for message in messages]
        shown = {BLAMED: "messages", "messages": len(messages)}
        speakers = [str(message.get("from", message.get("role"))).lower() for message in messages]
        if not messages:
            yield {REASON: NO_MESSAGES, **shown}
        elif not all(isinstance(text, str) for text in texts):
            yield {REASON: NO_TEXT, **shown}
        elif MODEL.isdisjoint(speakers):
            yield {REASON: NO_ANSWER, **shown}
        else:
            yield from _turns(number, speakers, [str(text) for text in texts], count)


def _turns(
    number: int, speakers: list[str], texts: list[str], count: Callable[[str], int]
) -> Iterator[Record]:
    before = 0
    for speaker, text in zip(speakers, texts, strict=True):
        tokens = count(text) if text else 0
        if speaker in MODEL:
            yield {PROMPT: before, OUTPUT: tokens, SESSION: number}
        before = min(before + tokens, MAX_LENGTH)
