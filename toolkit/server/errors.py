"""Error responses: OpenAI's errors over HTTP, also those of the router and of bugs."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from toolkit.openai.errors import ApiError, error_body, overloaded, retry_after_s
from toolkit.routing.admission import PredictedLatency


def late(predicted: PredictedLatency, wait_s: float) -> ApiError:
    """Return the error for a request that would miss a target: its forecast, and for how many
    seconds.
    """
    first = f"{predicted.ttft_s:.1f} s"
    last = f"{predicted.e2e_s:.1f} s"
    text = f"too many requests wait: the first token would come in {first}, the last in {last}"
    return overloaded(text, retry_after_s(wait_s))


def error_response(error: ApiError) -> Response:
    return Response(error_body(error), error.status, error.headers, "application/json")


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
