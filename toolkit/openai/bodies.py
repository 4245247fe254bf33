"""The bodies of requests as JSON, by msgspec: UTF-8 without a byte-order mark, no NaN, no half of a
surrogate pair; of two equal keys the last counts.

`parse_json` returns the values; null means absent. `read_object` leaves them as they are written,
for requests that are passed on.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from toolkit.openai.errors import ApiError
from toolkit.openai.foreign import UNREADABLE

Json = dict[str, object]

MAX_VALUES = 1 << 19  # of a body, counted by strings and commas
MAX_CONTAINERS = 1 << 16  # lists, objects and their fields
LARGE_BYTES = 1 << 16  # a smaller body takes no time, whatever is in it
MAX_DIGITS = 128  # of a number in a large body; some numbers of up to twice as many pass
# How msgspec says where an error is, and which field it means.
_PATH = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_NAMED = re.compile(r"Object (contains unknown|missing required) field `(.*)`$", re.DOTALL)


def parse_json(body: bytes) -> Json:
    """Return the body as a JSON object, without fields that are null. Raises ApiError if it is
    none, or if it holds too many values.
    """
    refuse_many_values(body)
    found: Json = {}
    for name, raw in read_object(body).items():
        try:
            value = _without_nulls(msgspec.json.decode(raw))
        except UNREADABLE as error:
            reason = str(error).partition(" - at")[0][:200]
            raise ApiError(f"'{name[:80]}': {reason}", param=name[:80]) from None
        if value is not None:
            found[name] = value
    return found


def _without_nulls(value: object) -> object:
    """Return a value without the null fields of the objects in it."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_without_nulls(one) for one in value]
    return value


def refuse_many_values(body: bytes) -> None:
    """Raise ApiError for a body with more than `MAX_CONTAINERS` lists, objects and fields, more
    than `MAX_VALUES` strings and commas, or a large one with a number of more than `MAX_DIGITS`.

    The parser does not release Python's global lock: eight MiB of empty lists would stop all other
    requests for most of a second. What is inside strings costs little.
    """
    if (
        body.count(b"[") + body.count(b"{") + body.count(b":") <= MAX_CONTAINERS
        and body.count(b'"') + body.count(b",") <= MAX_VALUES
        and not _has_long_number(body)
    ):
        return
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = unescaped.count(b'"') // 2
    if 2 * strings > MAX_VALUES:  # each has a comma, or another string, behind it
        raise ApiError(f"the body holds more than {MAX_VALUES} values")
    marks = b"".join(unescaped.split(b'"')[::2])  # what is outside of strings
    if marks.count(b"[") + marks.count(b"{") + marks.count(b":") > MAX_CONTAINERS:
        raise ApiError(f"the body holds more than {MAX_CONTAINERS} lists, objects and fields")
    if _has_long_number(marks):
        raise ApiError(f"the body holds a number of more than {MAX_DIGITS} digits")
    if strings + marks.count(b",") > MAX_VALUES:
        raise ApiError(f"the body holds more than {MAX_VALUES} values")


def _has_long_number(text: bytes) -> bool:
    """Return whether a large text has a run of digits with a part of `MAX_DIGITS` in it that begins
    at a multiple of as many bytes.
    """
    places = range(0, len(text), MAX_DIGITS) if len(text) > LARGE_BYTES else ()
    return any(text[at : at + MAX_DIGITS].isdigit() for at in places)


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
