"""The HTTP surface: OpenAI's routes, health, metrics. Each route reads a form, calls one thing, writes the answer."""

from __future__ import annotations

import time
from typing import Literal

import msgspec
from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

import toolkit
from toolkit.engines.tokenizer import Tokenizer
from toolkit.serve.body import read_json_bytes
from toolkit.serve.driver import Driver
from toolkit.serve.errors import ApiError, on_api_error, on_bug, on_http_exception
from toolkit.serve.gate import Gate
from toolkit.serve.generation import Generation, unknown_model
from toolkit.serve.health import failure, gauges, state
from toolkit.serve.helper import LARGE_BODY_BYTES, ReadLarge, in_thread
from toolkit.serve.keys import Keyring, Visit
from toolkit.serve.metrics import Exposition
from toolkit.serve.openapi import document
from toolkit.serve.prompts import BodyReader
from toolkit.serve.schemas import ChatForm, CompletionForm, GenerationForm
from toolkit.serve.settings import Settings
from toolkit.serve.sse import EventStream, Exchange, json_response
from toolkit.serve.status import DATA, PAGE, Status


def make_app(
    driver: Driver,
    tokenizer: Tokenizer,
    settings: Settings,
    status: Status | None = None,
    keyring: Keyring | None = None,
    read_large: ReadLarge | None = None,
) -> ASGIApp:
    """The application over a driver that somebody else starts and stops, and the page of a `status`.

    Who may call is who has a key of `keyring`, whose keys may be replaced at any time; by default, of the settings.
    Large bodies are read by `read_large`, by default in a thread.
    """
    app = FastAPI(title="llmctl", openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_bug)
    keyring = keyring or Keyring(settings.api_key, settings.keys)
    routes = Routes(driver, tokenizer, settings, keyring, read_large)
    for path, endpoint, methods in (
        ("/v1/completions", routes.completions, ["POST"]),
        ("/v1/chat/completions", routes.chat_completions, ["POST"]),
        ("/v1/models", routes.models, ["GET"]),
        ("/v1/models/{name:path}", routes.model, ["GET"]),
        ("/tokenize", routes.tokenize, ["POST"]),
        ("/detokenize", routes.detokenize, ["POST"]),
        ("/health", routes.health, ["GET", "HEAD"]),
        ("/ready", routes.ready, ["GET", "HEAD"]),
        ("/metrics", routes.metrics, ["GET"]),
        ("/version", routes.version, ["GET"]),
        ("/openapi.json", routes.openapi, ["GET"]),
    ):
        app.add_api_route(path, endpoint, methods=methods, response_model=None)
    open_paths = ["/health", "/ready", *(["/metrics"] if settings.open_metrics else [])]
    if status:
        app.add_api_route(PAGE, status.page, methods=["GET", "HEAD"], response_model=None)
        app.add_api_route(DATA, status.data, methods=["GET"], response_model=None)
        open_paths += [PAGE, DATA]
    local = settings.local_hosts_only
    return Gate(app, keyring, lambda: driver.now_s, open_paths=open_paths, local_hosts_only=local)


class Routes:
    """What the routes share."""

    def __init__(
        self,
        driver: Driver,
        tokenizer: Tokenizer,
        settings: Settings,
        keyring: Keyring,
        read_large: ReadLarge | None,
    ) -> None:
        self._driver = driver
        self._settings = settings
        self._reader = BodyReader(tokenizer, settings.vocab_size, settings.max_model_len)
        self._read_large = read_large or in_thread(self._reader)
        self._generation = Generation(driver, tokenizer, settings, self._reader)
        self._document = document(settings)
        self._created = int(time.time())
        self._registry = CollectorRegistry()
        self._registry.register(
            Exposition(
                driver.stats,
                lambda: gauges(driver),
                settings.model,
                vllm_names=settings.vllm_metrics,
                accounts=lambda: keyring.named,
            )
        )

    async def completions(self, request: Request) -> Response:
        body, prompts = await self._body(request), None
        if len(body) > LARGE_BODY_BYTES:
            self._generation.check_room()
            form, prompts = await self._read_large("completion", body)
        else:
            form = self._reader.form(CompletionForm, body)
        return await self._answer(request, form, self._generation.completion(form, Visit.of(request.scope), prompts))

    async def chat_completions(self, request: Request) -> Response:
        body, prompts = await self._body(request), None
        if len(body) > LARGE_BODY_BYTES:
            self._generation.check_room()
            form, prompts = await self._read_large("chat", body)
        else:
            form = self._reader.form(ChatForm, body)
        return await self._answer(request, form, self._generation.chat(form, Visit.of(request.scope), prompts))

    async def models(self) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        if name != self._settings.model:
            raise unknown_model(name)
        return _json(self._model())

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a prompt, or of messages in the model's chat template."""
        return await self._worked(request, "tokenize")

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        return await self._worked(request, "detokenize")

    async def health(self) -> Response:
        """200 as long as the front can serve: that it answers is the news. Workers are /ready's affair."""
        found = failure(self._driver)
        return _json({"status": found or "ok"}, 503 if found else 200)

    async def ready(self) -> Response:
        """200 from when all workers are loaded until the end is announced, while one of them is alive."""
        found = state(self._driver)
        return _json({"status": found}, 200 if found == "ready" else 503)

    async def metrics(self) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def version(self) -> Response:
        return _json({"version": toolkit.__version__})

    async def openapi(self) -> Response:
        """What may be asked here, with this server's limits."""
        return _json(self._document)

    async def _body(self, request: Request) -> bytes:
        return await read_json_bytes(request, self._settings.max_body_bytes)

    async def _worked(self, request: Request, kind: Literal["tokenize", "detokenize"]) -> Response:
        body = await self._body(request)
        large = len(body) > LARGE_BODY_BYTES
        found = await self._read_large(kind, body) if large else getattr(self._reader, kind)(body)
        return Response(found, media_type="application/json")

    async def _answer(self, request: Request, form: GenerationForm, exchange: Exchange) -> Response:
        if not form.stream:
            return await json_response(exchange, request.receive)
        return EventStream(
            exchange,
            include_usage=form.include_usage,
            keepalive_s=self._settings.keepalive_s,
        )

    def _model(self) -> dict[str, object]:
        return {
            "id": self._settings.model,
            "object": "model",
            "created": self._created,
            "owned_by": "llmctl",
            "max_model_len": self._settings.max_model_len,
        }


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
