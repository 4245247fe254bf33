"""The ASGI application of every server: which keys and hosts are let in, the pages, and the backend
behind them.

FastAPI only routes. Routes read their bodies themselves: a large one must not pause other clients,
and errors are in OpenAI's format.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

from fastapi import FastAPI
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

import toolkit
from toolkit.openai.errors import ApiError, error_body
from toolkit.server.access import UNKEYED, Keys, check_key, check_local_host, digests_of
from toolkit.server.backend import ServerBackend
from toolkit.server.background import Work
from toolkit.server.metrics import families_of_requests
from toolkit.server.options import ServerOptions
from toolkit.server.process import is_loopback
from toolkit.server.status import DATA, PAGE, StatusPage
from toolkit.server.watched import follow

OPEN_PATHS = ("/health", "/ready")  # without a key
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Application:
    """OpenAI's API over a backend, with the pages of every server: its health, its model, its
    metrics and, with `status_page`, one for people.

    Attributes:
        leaving: the end is announced: load balancers should stop sending, though requests still
            run.
        tasks: what runs beside the requests, by name.
    """

    def __init__(self, backend: ServerBackend, options: ServerOptions) -> None:
        self.backend = backend
        self.options = options
        self.stats = backend.stats
        self._digests = digests_of(options.keys.value)
        self.leaving = False
        self._created = int(time.time())
        self._local_paths: set[str] = set()
        self._has_local_hosts = is_loopback(options.host) and not options.asks_key
        self.tasks: dict[str, Work] = {
            "keys": lambda: follow(options.keys, self.renew_keys, options.say),
            **backend.tasks,
        }
        self._routes = FastAPI(
            openapi_url=None,
            redirect_slashes=False,
            exception_handlers={
                ApiError: on_api_error,
                HTTPException: on_http_exception,
                Exception: on_bug,
            },
        )
        self.add("/v1/models", self.models)
        self.add("/health", self.health)
        self.add("/ready", self.ready)
        self.add("/version", self.version)
        self.add("/metrics", self.metrics)
        self.backend.add_routes(self)
        if self.options.status_page and self.backend.facts is not None:
            page = StatusPage(self, self.backend.facts)
            self._local_paths |= {PAGE, DATA}
            self.add(PAGE, page.page)
            self.add(DATA, page.data)

    def renew_keys(self, keys: Keys) -> str:
        """Accept these keys from now on. Accepted requests are answered to their end."""
        self._digests = digests_of(keys)
        return f"the keys were read again: {len(keys)}"

    def add(self, path: str, endpoint: Callable[..., Awaitable[Any]]) -> None:
        """Add a page, for GET and HEAD."""
        self._routes.add_api_route(path, endpoint, methods=["GET", "HEAD"], response_model=None)

    def generates(self, path: str) -> None:
        """Add a route for tokens, which the backend answers."""
        # Starlette takes a function for one that returns a response, and any other callable for an
        # ASGI application.
        answer = cast(Any, self.backend.generate).__call__
        self._routes.router.routes.append(Route(path, answer, methods=["POST"]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, with a request id, if its key and its Host may pass.

        Without a key only open and local paths answer, and a client cannot learn which other routes
        exist.

        A Host that is a name other than `localhost` gets 403 from local paths, and from a server of
        this machine without a key from all routes but open ones. This protects such a server: a web
        page may point a name of its own to this machine ("DNS rebinding"), and the browser then
        sends that name and lets the page read the answers.
        """
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")  # only goes back in a header
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        async def send_answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.stats.statuses[str(message["status"])] += 1
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            self._check_access(scope["path"], headers)
            await self._routes(scope, receive, send_answer)
        except ApiError as refusal:
            await error_response(refusal)(scope, receive, send_answer)

    def _check_access(self, path: str, headers: Headers) -> None:
        """Raise ApiError if the request may not pass."""
        is_local = path in self._local_paths
        is_open = is_local or path in OPEN_PATHS
        if is_local or (self._has_local_hosts and not is_open):
            what = "the status page" if is_local else UNKEYED
            check_local_host(headers.get("host", ""), what)
        if self._digests and not is_open:
            check_key(headers, self._digests)

    @property
    def state(self) -> str:
        """In a few words: "ready" if it accepts requests, and its backend can serve them."""
        return "leaving" if self.leaving else self.backend.state

    async def models(self) -> Response:
        backend = self.backend
        about = {"id": backend.model, "object": "model", "created": self._created}
        model = {**about, "owned_by": "llmctl", **backend.about_model()}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self) -> Response:
        """200 while the event loop runs. What is behind it counts in /ready alone."""
        failure = self.backend.failure
        return JSONResponse({"status": failure or "ok"}, 503 if failure else 200)

    async def ready(self) -> Response:
        """200 from when requests can be served until the end is announced."""
        word = self.state
        return JSONResponse({"status": word}, 200 if word == "ready" else 503)

    async def version(self) -> Response:
        return JSONResponse({"version": toolkit.__version__})

    async def metrics(self) -> Response:
        return Response(generate_latest(self), media_type=CONTENT_TYPE_LATEST)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics at the moment of a scrape: it is a collector of prometheus_client."""
        yield from self.backend.families()
        yield from families_of_requests(self.stats, self.backend.labels)


def error_response(error: ApiError) -> Response:
    return Response(error_body(error), error.status, error.headers, "application/json")


async def on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Errors of the router: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    text = f"{error.detail}: {request.method} {request.url.path[:80]}"
    return error_response(ApiError(text, status=error.status_code, headers=error.headers))


async def on_bug(_: Request, __: Exception) -> Response:
    """Any other exception. The server logs it; the client learns no details.

    Starlette raises the exception again once this is sent, and uvicorn then closes the connection:
    the client must not send its next request there.
    """
    headers = {"Connection": "close"}
    return error_response(ApiError("internal error", status=500, headers=headers))
