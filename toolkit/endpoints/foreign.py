"""JSON that others wrote: clients' requests, servers' answers and pages.

It may be anything: no JSON, not UTF-8, nested ten thousand levels deep, or numbers of four hundred
digits. `decoded` is the one place where such bytes become values, so that none of them ends a task
that runs in the background.
"""

from __future__ import annotations

import unicodedata
from typing import Annotated, TypeVar

import msgspec

# What decoding raises: msgspec's errors and UnicodeDecodeError are `ValueError`s.
UNREADABLE = (ValueError, RecursionError)
# Tokens, rows and limits: more than any engine has, and few enough to calculate with.
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Number = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
ValueT = TypeVar("ValueT")


class CountedUsage(msgspec.Struct):
    """The tokens of an answer and its prompts, as OpenAI's servers count them."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0


def decoded(content: bytes | msgspec.Raw, kind: type[ValueT]) -> ValueT | None:
    """The value in JSON; None where it is not of this kind."""
    try:
        return msgspec.json.decode(content, type=kind)
    except UNREADABLE:
        return None


def plain(text: str, limit: int = 200) -> str:
    """A foreign text for a line that people read: without control characters, and not long."""
    shown = escaped(text[:limit])
    return shown if len(text) <= limit else f"{shown}..."


def escaped(text: str) -> str:
    """A text without characters that move the cursor, begin a line or turn its direction."""
    return "".join(
        ascii(one)[1:-1] if unicodedata.category(one)[0] == "C" or one in "\u2028\u2029" else one
        for one in text
    )
