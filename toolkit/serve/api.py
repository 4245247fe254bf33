"""The HTTP surface: OpenAI's routes, health, metrics. Each route reads a form, calls one thing,
writes the answer.
"""

from __future__ import annotations

import copy
import time
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

import toolkit
from toolkit.engines.tokenizer import Tokenizer
from toolkit.serve.access import AccessGate, KeyedRequest, Keyring
from toolkit.serve.driver import Driver
from toolkit.serve.errors import ApiError, ErrorBody, on_api_error, on_bug, on_http_exception
from toolkit.serve.forms import (
    BodyReader,
    ChatForm,
    CompletionForm,
    DetokenizeForm,
    GenerationForm,
    Message,
    asking_for_nothing,
    read_json_bytes,
)
from toolkit.serve.generation import (
    ChatChoice,
    EventStream,
    Exchange,
    Generation,
    TextChoice,
    Usage,
    json_response,
    unknown_model,
)
from toolkit.serve.helper import LARGE_BODY_BYTES, ReadLarge, in_thread
from toolkit.serve.metrics import Exposition
from toolkit.serve.settings import FrontSettings
from toolkit.serve.status import DATA, PAGE, Status, failure, gauges, state

# What the server says of itself to clients that are generated, and to fuzzers: an OpenAPI
# document that is true.
#
# Requests' schemas are the forms', with this server's own limits; what a schema cannot say (a
# prompt's length in tokens, one parameter against another) is left to the 400 that names it. What
# a route answers is what `responses.py` writes.

Json = dict[str, Any]

_REF = "#/components/schemas/{model}"
_FORMS = (CompletionForm, ChatForm, DetokenizeForm, Message)
_ANSWERS = (ErrorBody, TextChoice, ChatChoice, Usage)
_TOKENS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_REASONS = {
    "400": "the request cannot be served as it is",
    "401": "no key, or a wrong one",
    "404": "there is no such model",
    "408": "the body did not come in time",
    "413": "the body is too large",
    "415": "the body is not JSON by its type",
    "429": "the key's limit is reached, or the client's share of connections or bytes",
    "503": "loading, draining or overloaded; or the request failed",
}


def document(settings: FrontSettings) -> Json:
    """The OpenAPI 3.1 document of a server with these settings."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmctl", "version": toolkit.__version__},
        "paths": {
            "/v1/completions": {"post": _post("CompletionForm", _ref("Completion"), streams=True)},
            "/v1/chat/completions": {
                "post": _post("ChatForm", _ref("ChatCompletion"), streams=True)
            },
            "/tokenize": {
                "post": _post("TokenizeForm", _object(count={"type": "integer"}, tokens=_TOKENS))
            },
            "/detokenize": {"post": _post("DetokenizeForm", _object(prompt={"type": "string"}))},
            "/v1/models": {"get": _get(_object(object={"const": "list"}, data={"type": "array"}))},
            "/v1/models/{name}": {
                "get": _get(_ref("Model"), "404") | {"parameters": [_name(settings)]}
            },
            "/health": {"get": _get(_object(status={"type": "string"}), "503")},
            "/ready": {"get": _get(_object(status={"type": "string"}), "503")},
            "/version": {"get": _get(_object(version={"type": "string"}))},
            "/metrics": {"get": _get({"type": "string"}, kind="text/plain")},
        },
        "components": {
            "schemas": _schemas(settings),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _schemas(settings: FrontSettings) -> Json:
    _, forms = models_json_schema([(form, "validation") for form in _FORMS], ref_template=_REF)
    _, answers = msgspec.json.schema_components(
        _ANSWERS, ref_template="#/components/schemas/{name}"
    )
    found: Json = copy.deepcopy(forms["$defs"] | answers)  # parts of them are the forms' own
    for name in ("CompletionForm", "ChatForm"):
        _limit(found[name]["properties"], settings, chat=name == "ChatForm")
    found["DetokenizeForm"]["properties"]["tokens"]["maxItems"] = settings.max_model_len
    for token in _tokens_of(found):
        token["maximum"] = settings.vocab_size - 1
    return found | {
        "TokenizeForm": _tokenize_form(),
        "Completion": _whole("text_completion", "TextChoice"),
        "ChatCompletion": _whole("chat.completion", "ChatChoice"),
        "Model": _object(id={"const": settings.model}, object={"const": "model"}),
    }


def _limit(properties: Json, settings: FrontSettings, *, chat: bool) -> None:
    """This server's model and bounds, and which values of parameters that it does not have are
    harmless.
    """
    for name, values in asking_for_nothing(chat=chat).items():
        properties[name] = {"enum": list(values)}
    properties["model"] = {"enum": [settings.model, None]}
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        if name in properties:
            properties[name]["anyOf"][0]["maximum"] = settings.max_new_tokens
    if not settings.allow_end_after:
        properties["llmctl_end_after"] = {"type": "null"}


def _tokens_of(found: Json) -> list[Json]:
    """The schemas of single tokens."""
    prompt = found["CompletionForm"]["properties"]["prompt"]["anyOf"]
    stops = [
        found[name]["properties"]["stop_token_ids"]["anyOf"][0]["items"]
        for name in ("CompletionForm", "ChatForm")
    ]
    return [
        prompt[2]["items"],
        prompt[3]["items"]["items"],
        found["DetokenizeForm"]["properties"]["tokens"]["items"],
        *stops,
    ]


def _tokenize_form() -> Json:
    """A prompt or messages, and not both."""
    null: Json = {"type": "null"}
    messages: Json = {"type": "array", "items": _ref("Message"), "minItems": 1, "maxItems": 2048}
    model: Json = {"type": ["string", "null"]}
    either = {"model": model, "prompt": {"type": "string"}, "messages": null}
    other = {"model": model, "prompt": null, "messages": messages}
    return {
        "anyOf": [
            {"type": "object", "properties": either, "required": ["prompt"]},
            {"type": "object", "properties": other, "required": ["messages"]},
        ]
    }


def _whole(kind: str, choice: str) -> Json:
    return _object(
        id={"type": "string"},
        object={"const": kind},
        created={"type": "integer"},
        model={"type": "string"},
        choices={"type": "array", "items": _ref(choice)},
        usage=_ref("Usage"),
    )


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _name(settings: FrontSettings) -> Json:
    return {
        "name": "name",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "enum": [settings.model]},
    }


def _post(form: str, answer: Json, *, streams: bool = False) -> Json:
    body = {"required": True, "content": {"application/json": {"schema": _ref(form)}}}
    operation = _get(answer, *_REASONS)
    if streams:
        operation["responses"]["200"]["content"]["text/event-stream"] = {
            "schema": {"type": "string"}
        }
    return {"requestBody": body, **operation}


def _get(answer: Json, *statuses: str, kind: str = "application/json") -> Json:
    """An operation's answers; health and readiness say what is wrong in their own words."""
    ok = {"description": "as asked", "content": {kind: {"schema": answer}}}
    error = {
        "schema": {"anyOf": [_ref("ErrorBody"), answer]}
        if statuses == ("503",)
        else _ref("ErrorBody")
    }
    others = {
        status: {"description": _REASONS[status], "content": {"application/json": error}}
        for status in ("401", *statuses)
    }
    return {"responses": {"200": ok, **others}}


def make_app(
    driver: Driver,
    tokenizer: Tokenizer,
    settings: FrontSettings,
    status: Status | None = None,
    keyring: Keyring | None = None,
    read_large: ReadLarge | None = None,
) -> ASGIApp:
    """The application over a driver that somebody else starts and stops, and the page of a
    `status`.

    Who may call is who has a key of `keyring`, whose keys may be replaced at any time; by default,
    of the settings. Large bodies are read by `read_large`, by default in a thread.
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
    return AccessGate(
        app,
        keyring,
        lambda: driver.now_s,
        open_paths=open_paths,
        local_paths=[PAGE, DATA] if status else [],
        local_hosts_only=settings.local_hosts_only,
    )


class Routes:
    """What the routes share."""

    def __init__(
        self,
        driver: Driver,
        tokenizer: Tokenizer,
        settings: FrontSettings,
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
        return await self._answer(
            request,
            form,
            self._generation.completion(form, KeyedRequest.of(request.scope), prompts),
        )

    async def chat_completions(self, request: Request) -> Response:
        body, prompts = await self._body(request), None
        if len(body) > LARGE_BODY_BYTES:
            self._generation.check_room()
            form, prompts = await self._read_large("chat", body)
        else:
            form = self._reader.form(ChatForm, body)
        return await self._answer(
            request, form, self._generation.chat(form, KeyedRequest.of(request.scope), prompts)
        )

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
        """200 as long as the front can serve: that it answers is the news. Workers are /ready's
        affair.
        """
        found = failure(self._driver)
        return _json({"status": found or "ok"}, 503 if found else 200)

    async def ready(self) -> Response:
        """200 from when all workers are loaded until the end is announced, while one of them is
        alive.
        """
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
