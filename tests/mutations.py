"""Seeded damage to files: values deleted, replaced and retyped, bytes cut, and odd encodings."""

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 10**9, 2**31, 2**63, 10**19, 10**400, -(10**18)),
    *(0.0, -0.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), -float("inf")),
    *("", "x", "0", "NaN", "\x1b[31m", "\ud800", "a\nb", "\u202e", "x" * 5000, "../../x", "null"),
    *([], {}, [[]], [None], [0] * 300, {"": None}, {"a": {"b": []}}),
)
NUMBERS = (0, -1, 1e308, -1e308, 1e-300, 2**53, 10**18, 0.5)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each value in a document."""
    if not isinstance(value, dict | list):
        return
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in inner:
        yield (*path, key)
        yield from places(one, (*path, key))


def damaged(document: Any, rng: Random) -> Any:
    """The document with one to three of its values changed, moved or gone."""
    document = json.loads(json.dumps(document))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        listed = list(places(document))
        if not listed:
            return document
        *parents, key = rng.choice(listed)
        at = document
        for one in parents:
            at = at[one]
        how = rng.randrange(6)
        old = at[key]
        if how == 0:
            del at[key]
        elif how == 1 and isinstance(old, int | float) and not isinstance(old, bool):
            at[key] = rng.choice((*(old * factor for factor in (-1, 1000, 1e-9)), *NUMBERS))
        elif how == 2 and isinstance(old, list) and old:
            at[key] = rng.choice((old * 2, old[:1], old[::-1], old[1:]))
        elif how == 3 and isinstance(at, dict):
            at[rng.choice(("x", "", key + "x", key.upper()))] = at.pop(key)
        elif how == 4:
            other = document
            for one in rng.choice(listed):
                other = other[one] if isinstance(other, dict | list) and _has(other, one) else other
            at[key] = json.loads(json.dumps(other))
        else:
            at[key] = copy.deepcopy(rng.choice(VALUES))
    return document


def _has(value: Any, key: Any) -> bool:
    return key in value if isinstance(value, dict) else isinstance(key, int) and key < len(value)


def torn(content: bytes, rng: Random) -> bytes:
    """The bytes cut off, doubled in part, overwritten, nested deep, or in another encoding."""
    at, to = sorted((rng.randrange(len(content)), rng.randrange(len(content))))
    text = content.decode()
    return rng.choice(
        (
            content[:at],
            content[at:],
            content[:at] + content[to:],
            content[:to] + content[at:],
            content[:at] + bytes(rng.randrange(256) for _ in range(8)) + content[at:],
            content[:at] + rng.choice((b"\0", b"\xff", b"'", b'"', b"{", b"]", b",", b"\n", b"\\"))
            + content[at + 1 :],
            content[:at] + b"[" * 50_000 + content[at:],
            text.encode("utf-16"),
            text.encode("utf-32"),
            b"\xef\xbb\xbf" + content,
            content.replace(b"\n", b"\r"),
            b"",
            b"null",
            b"[" * 100_000,
        )
    )  # fmt: skip


def mutated(content: bytes, rng: Random) -> bytes:
    """A file of JSON, or of a JSON object per line, with some damage; other files are torn."""
    if rng.random() < 0.2 or content[:1] not in b"{[":
        return torn(content, rng)
    try:
        return json.dumps(damaged(json.loads(content), rng)).encode()
    except ValueError:
        lines = content.splitlines()
        for _ in range(rng.randrange(1, 4)):
            number = rng.randrange(len(lines))
            lines[number] = json.dumps(damaged(json.loads(lines[number]), rng)).encode()
        return b"\n".join(lines) + b"\n"
