"""The HTTP surface: OpenAI's routes, health, metrics, and the OpenAPI document that describes them.

`document` returns the OpenAPI document for client generators and fuzzers: the schemas of requests
are those of the forms, with this server's own limits. A schema cannot state everything (a prompt's
length in tokens, one parameter against another); such errors get a 400 response that names them.
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
from toolkit.serve.assemble import FrontSettings
from toolkit.serve.driver import Driver
from toolkit.serve.errors import ApiError, ErrorBody, on_api_error, on_bug, on_http_exception
from toolkit.serve.forms import (
    FORMS,
    IGNORED,
    MAX_MESSAGES,
    NO_OTHERS,
    BodyReader,
    ChatForm,
    CompletionForm,
    DetokenizeForm,
    GenerationForm,
    Message,
    array,
    harmless_values,
    read_form,
    read_json_bytes,
)
from toolkit.serve.generation import (
    ChatChoice,
    EventStream,
    Generation,
    Prompts,
    TextChoice,
    Usage,
    json_response,
    unknown_model,
)
from toolkit.serve.helper import LARGE_BODY_BYTES, ReadLarge
from toolkit.serve.metrics import Exposition
from toolkit.serve.status import DATA, PAGE, Status, failure, gauges, state

Json = dict[str, Any]

_REQUESTS = (CompletionForm, ChatForm, DetokenizeForm, Message)
_RESPONSES = (ErrorBody, TextChoice, ChatChoice, Usage)
_TOKENS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_REASONS = {
    "400": "the request is invalid, or exceeds a limit",
    "401": "no key, or a wrong one",
    "404": "there is no such model",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "415": "the content-type is not JSON",
    "429": "the key's limit is reached, or the client's share of connections or bytes",
    "503": "loading, draining or overloaded; or the request failed",
}


def make_app(
    driver: Driver,
    tokenizer: Tokenizer,
    settings: FrontSettings,
    keyring: Keyring,
    read_large: ReadLarge,
    status: Status | None,
) -> ASGIApp:
    """The ASGI application over a driver that the caller starts and stops.

    `read_large` reads large bodies. The keys of `keyring` may be replaced at any time.
    """
    app = FastAPI(title="llmctl", openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_bug)
    routes = Routes(driver, tokenizer, settings, keyring, read_large)
    for path, endpoint, methods in (
        ("/v1/completions", routes.completions, ["POST"]),
        ("/v1/chat/completions", routes.chat_completions, ["POST"]),
        ("/v1/models", routes.models, ["GET"]),
        ("/v1/models/{name:path}", routes.model, ["GET"]),
        ("/tokenize", routes.tokenize, ["POST"]),
        ("/detokenize", routes.detokenize, ["POST"]),
        ("/v1/responses", routes.responses, ["GET", "POST"]),
        ("/v1/responses/{rest:path}", routes.responses, ["GET", "POST", "DELETE"]),
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
    """The route handlers. Each reads a form, makes one call, and writes the response."""

    def __init__(
        self,
        driver: Driver,
        tokenizer: Tokenizer,
        settings: FrontSettings,
        keyring: Keyring,
        read_large: ReadLarge,
    ) -> None:
        self._driver = driver
        self._settings = settings
        self._reader = BodyReader(tokenizer, settings.vocab_size, settings.max_model_len)
        self._read_large = read_large
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
        return await self._generate(request, "completion")

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, "chat")

    async def models(self) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        if name != self._settings.model:
            raise unknown_model(name)
        return _json(self._model())

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a prompt, or of messages in the model's chat template."""
        return await self._translate(request, "tokenize")

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        return await self._translate(request, "detokenize")

    async def responses(self) -> Response:
        """The only route of OpenAI's for text that this engine lacks."""
        text = "this engine has no /v1/responses; a recipe with engine 'vllm' serves it"
        raise ApiError(text, status=404, code="unsupported_route")

    async def health(self) -> Response:
        """200 while the front's event loop runs. Workers do not count here, but in /ready."""
        reason = failure(self._driver)
        return _json({"status": reason or "ok"}, 503 if reason else 200)

    async def ready(self) -> Response:
        """200 from when all workers are loaded until the end is announced, while one is alive."""
        word = state(self._driver)
        return _json({"status": word}, 200 if word == "ready" else 503)

    async def metrics(self) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def version(self) -> Response:
        return _json({"version": toolkit.__version__})

    async def openapi(self) -> Response:
        """The OpenAPI document, with this server's limits."""
        return _json(self._document)

    async def _generate(self, request: Request, kind: Literal["completion", "chat"]) -> Response:
        body = await read_json_bytes(request, self._settings.max_body_bytes)
        form: GenerationForm
        prompts: Prompts | None = None  # in tokens
        if len(body) > LARGE_BODY_BYTES:
            self._generation.check_room()
            form, prompts = await self._read_large(kind, body)
        else:
            form = read_form(FORMS[kind], body)
        exchange = self._generation.submit(form, KeyedRequest.of(request.scope), prompts)
        if not form.stream:
            return await json_response(exchange, request.receive)
        keepalive_s = self._settings.keepalive_s
        return EventStream(exchange, keepalive_s, include_usage=form.include_usage)

    async def _translate(
        self, request: Request, kind: Literal["tokenize", "detokenize"]
    ) -> Response:
        body = await read_json_bytes(request, self._settings.max_body_bytes)
        large = len(body) > LARGE_BODY_BYTES
        content = await self._read_large(kind, body) if large else self._reader.read(kind, body)
        return Response(content, media_type="application/json")

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


def document(settings: FrontSettings) -> Json:
    """The OpenAPI 3.1 document of a server with these settings."""
    model_names = {"type": "string", "enum": [settings.model]}
    name = {"name": "name", "in": "path", "required": True, "schema": model_names}
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
            "/v1/models/{name}": {"get": _get(_ref("Model"), "404") | {"parameters": [name]}},
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
    _, forms = models_json_schema(
        [(form, "validation") for form in _REQUESTS], ref_template="#/components/schemas/{model}"
    )
    _, responses = msgspec.json.schema_components(
        _RESPONSES, ref_template="#/components/schemas/{name}"
    )
    # A copy, since pydantic and msgspec share parts of these with the classes.
    schemas: Json = copy.deepcopy(forms["$defs"] | responses)
    detokenized = schemas["DetokenizeForm"]["properties"]["tokens"]
    detokenized["maxItems"] = settings.max_model_len
    prompt = schemas["CompletionForm"]["properties"]["prompt"]["anyOf"]
    single_tokens = [prompt[2]["items"], prompt[3]["items"]["items"], detokenized["items"]]
    for name in ("CompletionForm", "ChatForm"):
        # This server's model and bounds, and the harmless values of unsupported parameters.
        properties = schemas[name]["properties"]
        for parameter, values in harmless_values(chat=name == "ChatForm").items():
            properties[parameter] = {"enum": list(values)}
        properties |= {parameter: {} for parameter in IGNORED}
        properties["model"] = {"enum": [settings.model, None]}
        for parameter in {"max_tokens", "max_completion_tokens", "min_tokens"} & properties.keys():
            properties[parameter]["anyOf"][0]["maximum"] = settings.max_new_tokens
        if not settings.allow_end_after:
            properties["llmctl_end_after"] = {"type": "null"}
        single_tokens.append(properties["stop_token_ids"]["anyOf"][0]["items"])
    for token in single_tokens:
        token["maximum"] = settings.vocab_size - 1
    null: Json = {"type": "null"}
    model: Json = {"type": ["string", "null"]}
    messages = array(_ref("Message"), MAX_MESSAGES)
    with_prompt = {"model": model, "prompt": {"type": "string"}, "messages": null}
    with_messages = {"model": model, "prompt": null, "messages": messages}
    prompt_or_messages = [
        _object(**with_prompt) | {"required": ["prompt"], "additionalProperties": NO_OTHERS},
        _object(**with_messages) | {"required": ["messages"], "additionalProperties": NO_OTHERS},
    ]
    return schemas | {
        "TokenizeForm": {"anyOf": prompt_or_messages},
        "Completion": _response("text_completion", "TextChoice"),
        "ChatCompletion": _response("chat.completion", "ChatChoice"),
        "Model": _object(id={"const": settings.model}, object={"const": "model"}),
    }


def _response(kind: str, choice: str) -> Json:
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


def _post(form: str, response: Json, *, streams: bool = False) -> Json:
    body = {"required": True, "content": {"application/json": {"schema": _ref(form)}}}
    operation = _get(response, *_REASONS)
    if streams:
        content = operation["responses"]["200"]["content"]
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"requestBody": body, **operation}


def _get(response: Json, *statuses: str, kind: str = "application/json") -> Json:
    """The responses of an operation. /health and /ready describe a problem in their own format."""
    ok = {"description": "as asked", "content": {kind: {"schema": response}}}
    error = _ref("ErrorBody")
    if statuses == ("503",):
        error = {"anyOf": [error, response]}
    content = {"application/json": {"schema": error}}
    others = {
        status: {"description": _REASONS[status], "content": content}
        for status in ("401", *statuses)
    }
    return {"responses": {"200": ok, **others}}
