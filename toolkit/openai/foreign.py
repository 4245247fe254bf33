"""JSON that others wrote: clients' requests, servers' answers and pages.

Such bytes may be anything: no JSON, not UTF-8, nested ten thousand levels deep, or numbers of four
hundred digits. `decoded` never raises, so none of them ends a task that runs in the background.
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
NULL = msgspec.Raw(b"null")
ValueT = TypeVar("ValueT")


def decoded(content: bytes | msgspec.Raw, kind: type[ValueT]) -> ValueT | None:
    """Return the value in JSON; None where it is not of this kind."""
    try:
        return msgspec.json.decode(content, type=kind)
    except UNREADABLE:
        return None


def is_null(value: msgspec.Raw) -> bool:
    return bytes(value) == b"null"


def plain(text: str, limit: int = 200) -> str:
    """Return a foreign text for a line that people read: no control characters, not long."""
    shown = escaped(text[:limit])
    return shown if len(text) <= limit else f"{shown}..."


def escaped(text: str) -> str:
    """Return a text without characters that move the cursor, begin a line or turn its direction."""
    return "".join(
        ascii(one)[1:-1] if unicodedata.category(one)[0] == "C" or one in "\u2028\u2029" else one
        for one in text
    )
