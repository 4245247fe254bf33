"""The HTTP surface: OpenAI's routes, health, metrics, and the OpenAPI document that describes them.

The OpenAPI document is for client generators and fuzzers: the schemas of requests are those of the
forms, with this server's own limits. A schema cannot state everything (a prompt's length in tokens,
one parameter against another); such errors get a 400 response that names them.
"""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

import toolkit
from toolkit.engines.tokenizer import Tokenizer
from toolkit.serve.access import AccessGate, KeyedRequest, Keyring
from toolkit.serve.assemble import FrontSettings
from toolkit.serve.driver import Driver
from toolkit.serve.errors import ApiError, ErrorBody
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
from toolkit.serve.routes import FrontApp, Json, an_object, json_page, ref
from toolkit.serve.status import DATA, PAGE, Status, failure, gauges, state

_REQUESTS = (CompletionForm, ChatForm, DetokenizeForm, Message)
_RESPONSES = (ErrorBody, TextChoice, ChatChoice, Usage)
_TOKENS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def make_app(
    driver: Driver,
    tokenizer: Tokenizer,
    settings: FrontSettings,
    keyring: Keyring,
    read_large: ReadLarge,
    status: Status | None,
) -> AccessGate:
    """The ASGI application over a driver that the caller starts and stops.

    `read_large` reads large bodies. The keys of `keyring` may be replaced at any time.
    """
    app = FrontApp(partial(complete_document, settings))
    routes = Routes(driver, tokenizer, settings, keyring, read_large)
    tokens = an_object(count={"type": "integer"}, tokens=_TOKENS)
    health = an_object(status={"type": "string"})
    models = an_object(object={"const": "list"}, data={"type": "array"})
    take = app.take_body
    take(
        "/v1/completions",
        routes.completions,
        ref("CompletionForm"),
        ref("Completion"),
        streams=True,
    )
    take(
        "/v1/chat/completions",
        routes.chat_completions,
        ref("ChatForm"),
        ref("ChatCompletion"),
        streams=True,
    )
    take("/tokenize", routes.tokenize, ref("TokenizeForm"), tokens)
    take(
        "/detokenize",
        routes.detokenize,
        ref("DetokenizeForm"),
        an_object(prompt={"type": "string"}),
    )
    page = app.get_page
    page("/v1/models", routes.models, models)
    page("/v1/models/{name:path}", routes.model, ref("Model"), "404")
    page("/health", routes.health, health, "503")
    page("/ready", routes.ready, health, "503")
    page("/version", routes.version, an_object(version={"type": "string"}))
    page("/metrics", routes.metrics, {"type": "string"}, kind="text/plain")
    for path in ("/v1/responses", "/v1/responses/{rest:path}"):
        app.add_api_route(
            path,
            routes.responses,
            methods=["GET", "POST", "DELETE"],
            response_model=None,
            include_in_schema=False,
        )
    if status:
        page(PAGE, status.page)
        page(DATA, status.data)
    open_paths = ["/health", "/ready", *(["/metrics"] if settings.open_metrics else [])]
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
        return json_page({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        if name != self._settings.model:
            raise unknown_model(name)
        return json_page(self._model())

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
        return json_page({"status": reason or "ok"}, 503 if reason else 200)

    async def ready(self) -> Response:
        """200 from when all workers are loaded until the end is announced, while one is alive."""
        word = state(self._driver)
        return json_page({"status": word}, 200 if word == "ready" else 503)

    async def metrics(self) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def version(self) -> Response:
        return json_page({"version": toolkit.__version__})

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


def complete_document(settings: FrontSettings, document: Json) -> None:
    """Add the schemas, and the bounds of a server with these settings."""
    document["components"]["schemas"] = _schemas(settings)
    model = document["paths"]["/v1/models/{name}"]["get"]
    model["parameters"][0]["schema"] = {"type": "string", "enum": [settings.model]}
    model["responses"].pop("422", None)  # an invalid field gets 400


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
    messages = array(ref("Message"), MAX_MESSAGES)
    with_prompt = {"model": model, "prompt": {"type": "string"}, "messages": null}
    with_messages = {"model": model, "prompt": null, "messages": messages}
    prompt_or_messages = [
        an_object(**with_prompt) | {"required": ["prompt"], "additionalProperties": NO_OTHERS},
        an_object(**with_messages) | {"required": ["messages"], "additionalProperties": NO_OTHERS},
    ]
    return schemas | {
        "TokenizeForm": {"anyOf": prompt_or_messages},
        "Completion": _response("text_completion", "TextChoice"),
        "ChatCompletion": _response("chat.completion", "ChatChoice"),
        "Model": an_object(id={"const": settings.model}, object={"const": "model"}),
    }


def _response(kind: str, choice: str) -> Json:
    return an_object(
        id={"type": "string"},
        object={"const": kind},
        created={"type": "integer"},
        model={"type": "string"},
        choices={"type": "array", "items": ref(choice)},
        usage=ref("Usage"),
    )
