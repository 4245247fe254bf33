"""A request's body, read within a limit and parsed strictly.

Strict means that two parsers cannot read it differently: UTF-8 without a mark, no NaN, no key twice, no half of a
surrogate pair, bounded nesting. What is left is plain JSON values.
"""

from __future__ import annotations

import json
import re

from starlette.requests import ClientDisconnect, Request

from toolkit.serve.errors import ApiError

Json = dict[str, object]

MAX_DEPTH = 32
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


async def read_json_bytes(request: Request, max_bytes: int) -> bytes:
    """The body, which says that it is JSON. `ApiError` with 400, 413 or 415."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(f"content-type is '{kind[:80]}', and must be application/json", status=415)
    return await read_body(request, max_bytes)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The bytes, given up on as soon as they are too many: the length that a client states proves nothing."""
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated[:20]) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
    except ClientDisconnect:
        raise ApiError("the body ended early") from None
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    text = f"the body is larger than {max_bytes} bytes"
    return ApiError(text, status=413, headers={"Connection": "close"})


def parse_json(body: bytes) -> Json:
    """The JSON object that `body` is. `ApiError` where it is not, or where parsers could disagree on it."""
    try:
        text = body.decode("utf-8")
        data = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
        if _SURROGATE.search(text):
            _check_surrogates(data)
    except RecursionError:
        raise ApiError(f"the body nests deeper than {MAX_DEPTH} levels") from None
    except UnicodeEncodeError:
        raise ApiError("the body holds half of a surrogate pair, which is no character") from None
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8: byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ApiError(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except ValueError as error:  # raised by the hooks below, and by int() of too many digits
        raise ApiError(f"the body cannot be read: {str(error).partition(';')[0][:200]}") from None
    if not isinstance(data, dict):
        raise ApiError("the body must be a JSON object")
    _check_depth(data)
    return data


def _object(pairs: list[tuple[str, object]]) -> Json:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} comes twice")
    return result


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _check_surrogates(data: object) -> None:
    json.dumps(data, ensure_ascii=False).encode("utf-8")


def _check_depth(data: object) -> None:
    level = [data]
    for _ in range(MAX_DEPTH):
        level = [
            value
            for container in level
            for value in (container.values() if isinstance(container, dict) else container)  # type: ignore[attr-defined]
            if isinstance(value, dict | list)
        ]
        if not level:
            return
    raise ApiError(f"the body nests deeper than {MAX_DEPTH} levels")
