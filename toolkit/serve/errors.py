"""Errors as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}}, and
nothing else ever.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}


class ApiError(Exception):
    """An answer that is not 200. `message` is for the client: the value, the limit, never a path of
    this machine.

    `kind` is the body's `type`, where it is not what goes with the status.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        kind: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.kind = kind or KINDS.get(status, "invalid_request_error")
        self.code = code
        self.headers = dict(headers or {})


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def error_body(error: ApiError) -> bytes:
    """The JSON of an error."""
    return msgspec.json.encode(
        ErrorBody(ErrorDetail(error.message, error.kind, error.param, error.code))
    )


def error_response(error: ApiError) -> Response:
    return Response(error_body(error), error.status, error.headers, "application/json")


def from_validation(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a request's fields."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    text = first["msg"].removeprefix("Value error, ").replace("Input should", "should")
    return ApiError(f"'{param}': {text}" if param else text, param=param or None)


async def on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """What the router raises: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    said = {404: "there is no such route", 405: "this route does not take this method"}
    where = f"{request.method} {request.url.path[:80]}"
    text = f"{said.get(error.status_code, error.detail)}: {where}"
    return error_response(ApiError(text, status=error.status_code, headers=error.headers))


async def on_bug(_: Request, __: Exception) -> Response:
    """The edge: whatever else was raised is logged by the server, and tells the client nothing."""
    return error_response(ApiError("internal error", status=500))
