"""Error responses in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from toolkit.routing.admission import PredictedLatency

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


def overloaded(text: str, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    """The error for a request that exceeds what the server can take now."""
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(text, status=503, code="overloaded", headers=headers)


def late(predicted: PredictedLatency, wait_s: float) -> ApiError:
    """The error for a request that would miss a target: its forecast, and for how many seconds."""
    first = f"{predicted.ttft_s:.1f} s"
    last = f"{predicted.e2e_s:.1f} s"
    text = f"too many requests wait: the first token would come in {first}, the last in {last}"
    return overloaded(text, retry_after_s(wait_s))


def retry_after_s(wait_s: float) -> int:
    """For the header `Retry-After`: whole seconds, within limits."""
    return math.ceil(min(max(wait_s, 1.0), MAX_RETRY_AFTER_S))


def error_body(error: ApiError) -> bytes:
    """The JSON of an error."""
    detail = {
        "message": error.message,
        "type": error.kind,
        "param": error.param,
        "code": error.code,
    }
    return msgspec.json.encode({"error": detail})


def error_response(error: ApiError) -> Response:
    return Response(error_body(error), error.status, error.headers, "application/json")


def from_validation(error: ValidationError) -> ApiError:
    """The first error in a request's fields."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ".".join(str(part)[:80] for part in first["loc"])
    if first["type"] == "extra_forbidden":
        text = f"'{param}' is not a field here; leave it out"
        return ApiError(text, param=param, code="unknown_parameter")
    text = first["msg"].removeprefix("Value error, ").replace("Input should", "should")
    return ApiError(f"'{param}': {text}" if param else text, param=param or None)


async def on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Errors of the router: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    reasons = {404: "there is no such route", 405: "this route does not take this method"}
    reason = reasons.get(error.status_code, error.detail)
    text = f"{reason}: {request.method} {request.url.path[:80]}"
    return error_response(ApiError(text, status=error.status_code, headers=error.headers))


async def on_bug(_: Request, __: Exception) -> Response:
    """Any other exception. The server logs it; the client learns no details.

    Starlette raises the exception again once this is sent, and uvicorn then closes the connection:
    the client must not send its next request there.
    """
    headers = {"Connection": "close"}
    return error_response(ApiError("internal error", status=500, headers=headers))
