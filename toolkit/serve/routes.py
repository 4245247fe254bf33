"""The FastAPI application of a front: its routes, its errors, and the document that FastAPI makes.

Routes read their bodies themselves: a body must be JSON on which no two parsers disagree, a large
one must not pause other clients, and errors are in OpenAI's format. So each route names the schemas
of its body and its answers, and FastAPI makes the OpenAPI document of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import toolkit
from toolkit.serve.errors import ApiError, on_api_error, on_bug, on_http_exception

Json = dict[str, Any]
JSON = "application/json"
REASONS = {  # of the statuses that a route may answer with
    "400": "the request is invalid, or exceeds a limit",
    "401": "no key, or a wrong one",
    "404": "there is no such model",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "415": "the content-type is not JSON",
    "429": "the key's limit is reached, or the client's share of requests or bytes",
    "503": "loading, draining or overloaded; or the request failed",
}


class FrontApp(FastAPI):
    """The application. `complete` adds to the OpenAPI document what FastAPI cannot know."""

    def __init__(self, complete: Callable[[Json], None]) -> None:
        super().__init__(
            title="llmctl",
            version=toolkit.__version__,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
        )
        self.add_exception_handler(ApiError, on_api_error)
        self.add_exception_handler(HTTPException, on_http_exception)
        self.add_exception_handler(Exception, on_bug)
        self._complete = complete
        self._document: Json | None = None

    def openapi(self) -> Json:
        """The OpenAPI document."""
        if self._document is None:
            self._document = super().openapi()
            self._document["security"] = [{"key": []}, {}]
            key = {"key": {"type": "http", "scheme": "bearer"}}
            self._document.setdefault("components", {})["securitySchemes"] = key
            self._complete(self._document)
        return self._document

    def get_page(
        self,
        path: str,
        endpoint: Callable[..., Awaitable[Response]],
        answer: Json | None = None,
        *statuses: str,
        kind: str = JSON,
    ) -> None:
        """A route for GET and HEAD. `answer` is the schema of its answer; None: undocumented."""
        described = _responses(answer or {}, statuses, kind)
        self.add_api_route(
            path,
            endpoint,
            methods=["GET"],
            response_model=None,
            responses=described,
            include_in_schema=answer is not None,
        )
        self.add_api_route(
            path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False
        )

    def take_body(
        self,
        path: str,
        endpoint: Callable[..., Awaitable[Response]],
        body: Json,
        answer: Json,
        *,
        streams: bool = False,
    ) -> None:
        """A route for POST, with the schemas of its body and its answer."""
        described = _responses(answer, tuple(REASONS), JSON)
        if streams:
            described["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
        asked = {"required": True, "content": {JSON: {"schema": body}}}
        self.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            response_model=None,
            responses={**described},
            openapi_extra={"requestBody": asked},
        )


class Written(Response):
    """A response that `write` sends by itself."""

    def __init__(self, write: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._write(scope, receive, send)


def json_page(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type=JSON)


def an_object(**properties: Json) -> Json:
    """The schema of an object with these properties, all of them required."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _responses(answer: Json, statuses: Sequence[str], kind: str) -> dict[int | str, Json]:
    """Responses by status. /health and /ready describe a problem in their own format."""
    error = ref("ErrorBody")
    if statuses == ("503",):
        error = {"anyOf": [error, answer]}
    described: dict[int | str, Json] = {
        status: {"description": REASONS[status], "content": {JSON: {"schema": error}}}
        for status in ("401", *statuses)
    }
    described["200"] = {"description": "as asked", "content": {kind: {"schema": answer}}}
    return described
