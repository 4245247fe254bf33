"""What is the same for all fronts: their pages, and which keys and hosts are let in.

FastAPI only routes. Routes read their bodies themselves: a body must be JSON on which no two
parsers disagree, a large one must not pause other clients, and errors are in OpenAI's format.
"""

from __future__ import annotations

import re
import time
import uuid
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable

import msgspec
from fastapi import FastAPI
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

import toolkit
from toolkit.openai.errors import ApiError
from toolkit.serve.access import (
    ACCOUNT,
    UNKEYED,
    Account,
    Keyring,
    check_local_host,
    refused_key,
)
from toolkit.serve.assemble import FrontSettings
from toolkit.serve.background import Background
from toolkit.serve.errors import error_response, on_api_error, on_bug, on_http_exception
from toolkit.serve.launch import FrontServer
from toolkit.serve.limits import DEFAULT_LIMITS, WireLimits
from toolkit.serve.metrics import text_of
from toolkit.serve.stats import Stats
from toolkit.serve.status import DATA, PAGE, StatusPage

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Front(FrontServer):
    """A server of OpenAI's API with the pages of every front: its health, its model, its metrics
    and, if there is one, its status page.

    What a kind of front adds: the model's name (`served`), and what its page has besides OpenAI's
    fields; the `state` in a few words, "ready" if it accepts requests and what is behind it can
    serve them; its metrics, at the moment of a scrape; and its routes.
    """

    metrics_type = CONTENT_TYPE_LATEST

    def __init__(
        self,
        settings: FrontSettings,
        keyring: Keyring,
        stats: Stats,
        background: Background,
        limits: WireLimits = DEFAULT_LIMITS,
    ) -> None:
        super().__init__(stats, background, limits)
        self._open_paths = {"/health", "/ready", *(["/metrics"] if settings.open_metrics else [])}
        self._local_paths: set[str] = set()
        self.settings = settings
        self.keyring = keyring
        self._routes = FastAPI(openapi_url=None, redirect_slashes=False)
        self._routes.add_exception_handler(ApiError, on_api_error)
        self._routes.add_exception_handler(HTTPException, on_http_exception)
        self._routes.add_exception_handler(Exception, on_bug)
        self._created = int(time.time())
        for path, endpoint in (
            ("/v1/models", self.models),
            ("/v1/models/{name:path}", self.model),
            ("/health", self.health),
            ("/ready", self.ready),
            ("/version", self.version),
            ("/metrics", self.metrics),
        ):
            self.add(path, endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, with a request id, if its key and its Host may pass.

        Without a key only open and local paths answer, and a client cannot learn which other routes
        exist.

        A Host that is a name other than `localhost` gets 403 from local paths, and with
        `local_hosts_only` from all routes but open ones. This protects a server of this machine
        without a key: a web page may point a name of its own to this machine ("DNS rebinding"), and
        the browser then sends that name and lets the page read the answers.
        """
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")  # only goes back in a header
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            scope[ACCOUNT] = account = self._account(scope["path"], headers)
        except ApiError as refusal:
            await error_response(refusal)(scope, receive, send_with_id)
            return
        if account is not None:
            account.requests += scope["method"] == "POST"
        await self._route(scope, receive, send_with_id)

    def _account(self, path: str, headers: Headers) -> Account | None:
        """Return the request's account; None on a path that needs no key. Raises ApiError if the
        request may not pass.
        """
        is_local = path in self._local_paths
        is_open = is_local or path in self._open_paths
        if is_local or (self.settings.local_hosts_only and not is_open):
            what = "the status page" if is_local else UNKEYED
            check_local_host(headers.get("host", ""), what)
        account = self.keyring.find(headers)
        if account is None and not is_open:
            raise refused_key(headers)
        return account

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._routes(scope, receive, send)

    def add(self, path: str, endpoint: Callable[..., Awaitable[Response]], *methods: str) -> None:
        """Add a route, by default for GET and HEAD."""
        self._routes.add_api_route(
            path, endpoint, methods=list(methods or ("GET", "HEAD")), response_model=None
        )

    def show(self, status: StatusPage) -> None:
        """Add a status page."""
        self._local_paths |= {PAGE, DATA}
        self.add(PAGE, status.page)
        self.add(DATA, status.data)
        self.tasks["status page"] = status.sampling

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
    return Response(msgspec.json.encode(content), status, media_type="application/json")
