"""The bodies of requests as JSON.

`parse_json` accepts only JSON on which no two parsers can disagree: UTF-8 without a byte-order
mark, no NaN, no duplicate key, no half of a surrogate pair, bounded nesting. Null means absent.
`read_object` leaves the values as they are written, for requests that are passed on.
"""

from __future__ import annotations

import json
import re
from collections import Counter

import msgspec
from msgspec import Raw

from toolkit.openai.errors import ApiError

Json = dict[str, object]

MAX_DEPTH = 32
MAX_VALUES = 1 << 19  # of a body, counted by strings, braces and commas
MAX_LISTS = 1 << 16
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# How msgspec says where an error is, and which field it means.
_PATH = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_NAMED = re.compile(r"Object (contains unknown|missing required) field `(.*)`$", re.DOTALL)


def parse_json(body: bytes) -> Json:
    """Return the body as a JSON object, without fields that are null. Raises ApiError if it is
    none, if parsers could disagree about it, or if it holds too many values.
    """
    refuse_many_values(body)
    try:
        text = body.decode("utf-8")
        data = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_no_constant,
        )
        if _SURROGATE.search(text):
            json.dumps(data, ensure_ascii=False).encode("utf-8")  # raises for half a pair
    except RecursionError:
        raise ApiError(f"the body nests deeper than {MAX_DEPTH} levels") from None
    except UnicodeEncodeError:
        text = "the body holds half of a surrogate pair, which is not a character"
        raise ApiError(text) from None
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8: byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ApiError(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except ValueError as error:  # raised by the hooks below, and by int() of too many digits
        raise ApiError(f"the body cannot be read: {str(error).partition(';')[0][:200]}") from None
    if not isinstance(data, dict):
        raise ApiError("the body must be a JSON object")
    level: list[object] = [data]
    for _ in range(MAX_DEPTH):
        level = [
            value
            for container in level
            for value in (container.values() if isinstance(container, dict) else container)  # type: ignore[attr-defined]
            if isinstance(value, dict | list)
        ]
        if not level:
            return data
    raise ApiError(f"the body nests deeper than {MAX_DEPTH} levels")


def refuse_many_values(body: bytes) -> None:
    """Raise ApiError for a body with more than `MAX_LISTS` lists, or more than `MAX_VALUES`
    strings, braces and commas.

    The parser does not release Python's global lock between lists and strings: eight MiB of empty
    lists would stop all other requests for most of a second. What is inside strings costs little.
    """
    if body.count(b"[") <= MAX_LISTS and sum(map(body.count, b'",{')) <= MAX_VALUES:
        return
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = unescaped.count(b'"') // 2
    if 2 * strings > MAX_VALUES:  # each has a comma, or another string, behind it
        raise ApiError(f"the body holds more than {MAX_VALUES} values")
    marks = b"".join(unescaped.split(b'"')[::2])  # what is outside of strings
    if marks.count(b"[") > MAX_LISTS:
        raise ApiError(f"the body holds more than {MAX_LISTS} lists")
    if strings + marks.count(b",") + marks.count(b"{") > MAX_VALUES:
        raise ApiError(f"the body holds more than {MAX_VALUES} values")


# Functions of Python, also where one of C would do: calling them lets other threads run, while the
# parser goes through a long list of numbers.
def _integer(text: str) -> int:
    return int(text)


def _number(text: str) -> float:
    return float(text)


def _object(pairs: list[tuple[str, object]]) -> Json:
    result = dict(pairs)
    if len(result) < len(pairs):
        [(duplicate, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {duplicate[:80]!r} occurs twice")
    return {key: value for key, value in pairs if value is not None}


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def read_object(body: bytes) -> dict[str, Raw]:
    """Return the fields of a body, each once, as they are written. Raises ApiError where it is no
    JSON object in UTF-8.
    """
    try:
        body.decode()  # also where nothing here reads it: a replica would fail on it
        return msgspec.json.decode(body, type=dict[str, Raw])
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8: byte {error.start}") from None
    except RecursionError:
        raise ApiError("the body nests too deeply") from None
    except ValueError as error:
        reason = str(error).replace("`", "")
        raise ApiError(f"the body is not a JSON object: {reason[:200]}") from None


def invalid_field(error: msgspec.DecodeError) -> ApiError:
    """Return the error of a request for one of a field of its body."""
    text = str(error)
    found = _PATH.search(text)
    path = re.sub(r"\[(\d+)\]", r".\1", found[1][:200]) if found else ""
    reason = text[: found.start()] if found else text
    named = _NAMED.match(reason)
    if named is None:
        reason = reason.replace("`", "")[:200]
        return ApiError(f"'{path}': {reason}", param=path or None)
    param = ".".join(part for part in (path, named[2][:80]) if part)
    if named[1] == "missing required":
        return ApiError(f"'{param}' is missing", param=param)
    text = f"'{param}' is not a field here; leave it out"
    return ApiError(text, param=param, code="unknown_parameter")
