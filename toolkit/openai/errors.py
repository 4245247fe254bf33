"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from toolkit.openai.foreign import decoded, plain

RETRY_AFTER_S = 5
MAX_RETRY_AFTER_S = 60
TYPES = {  # the body's `type`, by status
    401: "authentication_error",
    404: "not_found_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}


class ApiError(Exception):
    """A response with an error status.

    Args:
        message: for the client: the value and the limit, never a path of this machine.
        param: the field of the request that is wrong.
        code: a machine-readable reason.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.kind = TYPES.get(status, "invalid_request_error")
        self.code = code
        self.headers = dict(headers or {})


def overloaded(text: str, wait_s: float = RETRY_AFTER_S) -> ApiError:
    """Return the error for a request that exceeds what the server can take now. It may come again
    after `wait_s` seconds, in whole ones and within limits.
    """
    headers = {"Retry-After": str(math.ceil(min(max(wait_s, 1.0), MAX_RETRY_AFTER_S)))}
    return ApiError(text, status=503, code="overloaded", headers=headers)


def error_body(error: ApiError) -> bytes:
    """Return the JSON of an error."""
    detail = {
        "message": error.message,
        "type": error.kind,
        "param": error.param,
        "code": error.code,
    }
    return msgspec.json.encode({"error": detail})


class ErrorDetail(msgspec.Struct):
    message: str = ""


class ForeignErrorBody(msgspec.Struct):
    """OpenAI's error object. Some servers put a string there, or omit the outer level."""

    error: ErrorDetail | str | None = None
    message: str = ""


def error_text(body: bytes) -> str:
    """Return the message of an error's body, in one line of at most 200 characters."""
    read = decoded(body, ForeignErrorBody)
    if read is None:
        text = body[:4096].decode(errors="replace")
    else:
        error = read.error
        text = (error.message if isinstance(error, ErrorDetail) else error) or read.message
    return plain(" ".join(text[:4096].split())[:200])
