"""The FastAPI application of a front: its routes, its errors, and the document that FastAPI makes.

`FrontPages` has the pages that are the same for all fronts, and the gate before all routes. Routes
read their bodies themselves: a body must be JSON on which no two parsers disagree, a large one must
not pause other clients, and errors are in OpenAI's format. So each route names the schemas of its
body and its answers, and FastAPI makes the OpenAPI document of them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import toolkit
from toolkit.serve.access import AccessGate, Keyring
from toolkit.serve.assemble import FrontSettings
from toolkit.serve.errors import ApiError, ErrorBody, on_api_error, on_bug, on_http_exception
from toolkit.serve.metrics import text_of
from toolkit.serve.status import DATA, PAGE, StatusPage

Json = dict[str, Any]
JSON = "application/json"
REF = "#/components/schemas/{name}"
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
    """The application. `complete` adds to the OpenAPI document what a front knows of it."""

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
            document = self._document = super().openapi()
            _, schemas = msgspec.json.schema_components([ErrorBody], ref_template=REF)
            key = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}, {}]
            document["components"] = {"securitySchemes": key, "schemas": schemas}
            for operations in document["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)  # an invalid field gets 400
            self._complete(document)
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


class FrontPages(ABC):
    """The pages of every front: its health, its model, its metrics and, if there is one, its status
    page.

    Args:
        now_s: the clock of the keys' limits.
        model: the schema of the model's page.
        complete: as of `FrontApp`.

    What a front adds: the model's name (`served`), and what its page has besides OpenAI's fields;
    the `state` in a few words, "ready" if it accepts requests and what is behind it can serve them;
    and its metrics, at the moment of a scrape.
    """

    metrics_type = CONTENT_TYPE_LATEST

    def __init__(
        self,
        settings: FrontSettings,
        keyring: Keyring,
        now_s: Callable[[], float],
        model: Json,
        complete: Callable[[Json], None] = lambda _: None,
    ) -> None:
        self.settings = settings
        self.keyring = keyring
        self.now_s = now_s
        self.app = FrontApp(complete)
        self._created = int(time.time())
        self._local_paths: list[str] = []  # of the gate, which may be made before them
        state = an_object(status={"type": "string"})
        models = an_object(object={"const": "list"}, data={"type": "array"})
        page = self.app.get_page
        page("/v1/models", self.models, models)
        page("/v1/models/{name:path}", self.model, model, "404")
        page("/health", self.health, state, "503")
        page("/ready", self.ready, state, "503")
        page("/version", self.version, an_object(version={"type": "string"}))
        page("/metrics", self.metrics, {"type": "string"}, kind="text/plain")

    def show(self, status: StatusPage) -> None:
        """Add a status page."""
        self._local_paths += [PAGE, DATA]
        self.app.get_page(PAGE, status.page)
        self.app.get_page(DATA, status.data)

    def gate(self, app: ASGIApp | None = None) -> AccessGate:
        """The gate before the application, or before `app`, which passes requests to it. The keys
        may be replaced at any time.
        """
        return AccessGate(
            app or self.app,
            self.keyring,
            self.now_s,
            open_paths=["/health", "/ready", *(["/metrics"] if self.settings.open_metrics else [])],
            local_paths=self._local_paths,
            local_hosts_only=self.settings.local_hosts_only,
        )

    @property
    @abstractmethod
    def served(self) -> str: ...

    @property
    @abstractmethod
    def state(self) -> str: ...

    @property
    def failure(self) -> str:
        """Why the front cannot continue and must be restarted, or ''."""
        return ""

    @abstractmethod
    def about_model(self) -> dict[str, object]: ...

    @abstractmethod
    def families(self) -> Iterable[Metric]: ...

    async def models(self) -> Response:
        return json_page({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        if name != self.served:
            raise unknown_model(name)
        return json_page(self._model())

    async def health(self) -> Response:
        """200 while the front's event loop runs. What is behind it counts in /ready alone."""
        return json_page({"status": self.failure or "ok"}, 503 if self.failure else 200)

    async def ready(self) -> Response:
        """200 from when requests can be served until the end is announced."""
        word = self.state
        return json_page({"status": word}, 200 if word == "ready" else 503)

    async def version(self) -> Response:
        return json_page({"version": toolkit.__version__})

    async def metrics(self) -> Response:
        return Response(text_of(self.families()), media_type=self.metrics_type)

    def _model(self) -> dict[str, object]:
        about = {"id": self.served, "object": "model", "created": self._created}
        return {**about, "owned_by": "llmctl", **self.about_model()}


class Written(Response):
    """A response that `write` sends by itself."""

    def __init__(self, write: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._write(scope, receive, send)


def unknown_model(name: str) -> ApiError:
    text = f"there is no model {name[:80]!r} here; GET /v1/models lists the models"
    return ApiError(text, status=404, param="model", code="model_not_found")


def json_page(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type=JSON)


def an_object(**properties: Json) -> Json:
    """The schema of an object with these properties, all of them required."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def ref(name: str) -> Json:
    return {"$ref": REF.format(name=name)}


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
