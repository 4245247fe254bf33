"""The HTTP surface: OpenAI's routes, health, metrics, and the OpenAPI document that describes them.

The OpenAPI document is for client generators and fuzzers: the schemas of requests are those of the
forms, with this server's own limits. A schema cannot state everything (a prompt's length in tokens,
one parameter against another); such errors get a 400 response that names them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import Literal

import msgspec
from prometheus_client.core import Metric
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from toolkit.engines.tokenizer import Tokenizer
from toolkit.serve.access import KeyedRequest, Keyring
from toolkit.serve.assemble import FrontSettings
from toolkit.serve.driver import Driver
from toolkit.serve.errors import ApiError
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
)
from toolkit.serve.helper import LARGE_BODY_BYTES, ReadLarge
from toolkit.serve.metrics import Exposition
from toolkit.serve.routes import REF, FrontPages, Json, an_object, ref
from toolkit.serve.status import failure, gauges, state

_REQUESTS = (CompletionForm, ChatForm, DetokenizeForm, Message)
_RESPONSES = (TextChoice, ChatChoice, Usage)
_TOKENS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}}


class Routes(FrontPages):
    """The routes over a driver that its owner starts and stops. Each reads a form, makes one call,
    and writes the response. `read_large` reads large bodies.
    """

    def __init__(
        self,
        driver: Driver,
        tokenizer: Tokenizer,
        settings: FrontSettings,
        keyring: Keyring,
        read_large: ReadLarge,
    ) -> None:
        complete = partial(complete_document, settings)
        super().__init__(settings, keyring, lambda: driver.now_s, ref("Model"), complete)
        self._driver = driver
        self._reader = BodyReader(tokenizer, settings.vocab_size, settings.max_model_len)
        self._read_large = read_large
        self._generation = Generation(driver, tokenizer, settings, self._reader)
        self._exposition = Exposition(
            driver.stats,
            lambda: gauges(driver),
            settings.model,
            vllm_names=settings.vllm_metrics,
            accounts=lambda: keyring.named,
        )
        tokens = an_object(count={"type": "integer"}, tokens=_TOKENS)
        text = an_object(prompt={"type": "string"})
        take = self.app.take_body
        completion = ref("Completion")
        chat = ref("ChatCompletion")
        take("/v1/completions", self.completions, ref("CompletionForm"), completion, streams=True)
        take("/v1/chat/completions", self.chat_completions, ref("ChatForm"), chat, streams=True)
        take("/tokenize", self.tokenize, ref("TokenizeForm"), tokens)
        take("/detokenize", self.detokenize, ref("DetokenizeForm"), text)
        for path in ("/v1/responses", "/v1/responses/{rest:path}"):
            self.app.add_api_route(
                path,
                self.responses,
                methods=["GET", "POST", "DELETE"],
                response_model=None,
                include_in_schema=False,
            )

    @property
    def served(self) -> str:
        return self.settings.model

    @property
    def state(self) -> str:
        return state(self._driver)

    @property
    def failure(self) -> str:
        return failure(self._driver)

    def about_model(self) -> dict[str, object]:
        return {"max_model_len": self.settings.max_model_len}

    def families(self) -> Iterable[Metric]:
        return self._exposition.collect()

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, "completion")

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, "chat")

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

    async def _generate(self, request: Request, kind: Literal["completion", "chat"]) -> Response:
        body = await read_json_bytes(request, self.settings.max_body_bytes)
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
        keepalive_s = self.settings.keepalive_s
        return EventStream(exchange, keepalive_s, include_usage=form.include_usage)

    async def _translate(
        self, request: Request, kind: Literal["tokenize", "detokenize"]
    ) -> Response:
        body = await read_json_bytes(request, self.settings.max_body_bytes)
        large = len(body) > LARGE_BODY_BYTES
        content = await self._read_large(kind, body) if large else self._reader.read(kind, body)
        return Response(content, media_type="application/json")


def complete_document(settings: FrontSettings, document: Json) -> None:
    """Add the schemas, and the bounds of a server with these settings."""
    document["components"]["schemas"] |= _schemas(settings)
    model = document["paths"]["/v1/models/{name}"]["get"]
    model["parameters"][0]["schema"] = {"type": "string", "enum": [settings.model]}


def _schemas(settings: FrontSettings) -> Json:
    _, forms = models_json_schema(
        [(form, "validation") for form in _REQUESTS], ref_template="#/components/schemas/{model}"
    )
    _, responses = msgspec.json.schema_components(_RESPONSES, ref_template=REF)
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
