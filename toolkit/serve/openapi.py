"""What the server says of itself to clients that are generated, and to fuzzers: an OpenAPI document that is true.

Requests' schemas are the forms', with this server's own limits; what a schema cannot say (a prompt's length in tokens,
one parameter against another) is left to the 400 that names it. What a route answers is what `responses.py` writes.
"""

from __future__ import annotations

import copy
from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema

import toolkit
from toolkit.serve.errors import ErrorBody
from toolkit.serve.responses import ChatChoice, TextChoice, Usage
from toolkit.serve.schemas import ChatForm, CompletionForm, DetokenizeForm, Message, asking_for_nothing
from toolkit.serve.settings import Settings

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
    "429": "the key's limit is reached",
    "503": "loading, draining or overloaded; or the request failed",
}


def document(settings: Settings) -> Json:
    """The OpenAPI 3.1 document of a server with these settings."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmctl", "version": toolkit.__version__},
        "paths": {
            "/v1/completions": {"post": _post("CompletionForm", _ref("Completion"), streams=True)},
            "/v1/chat/completions": {"post": _post("ChatForm", _ref("ChatCompletion"), streams=True)},
            "/tokenize": {"post": _post("TokenizeForm", _object(count={"type": "integer"}, tokens=_TOKENS))},
            "/detokenize": {"post": _post("DetokenizeForm", _object(prompt={"type": "string"}))},
            "/v1/models": {"get": _get(_object(object={"const": "list"}, data={"type": "array"}))},
            "/v1/models/{name}": {"get": _get(_ref("Model"), "404") | {"parameters": [_name(settings)]}},
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


def _schemas(settings: Settings) -> Json:
    _, forms = models_json_schema([(form, "validation") for form in _FORMS], ref_template=_REF)
    _, answers = msgspec.json.schema_components(_ANSWERS, ref_template="#/components/schemas/{name}")
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


def _limit(properties: Json, settings: Settings, *, chat: bool) -> None:
    """This server's model and bounds, and which values of parameters that it does not have are harmless."""
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
        found[name]["properties"]["stop_token_ids"]["anyOf"][0]["items"] for name in ("CompletionForm", "ChatForm")
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


def _name(settings: Settings) -> Json:
    return {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "enum": [settings.model]}}


def _post(form: str, answer: Json, *, streams: bool = False) -> Json:
    body = {"required": True, "content": {"application/json": {"schema": _ref(form)}}}
    operation = _get(answer, *_REASONS)
    if streams:
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {"requestBody": body, **operation}


def _get(answer: Json, *statuses: str, kind: str = "application/json") -> Json:
    """An operation's answers; health and readiness say what is wrong in their own words."""
    ok = {"description": "as asked", "content": {kind: {"schema": answer}}}
    error = {"schema": {"anyOf": [_ref("ErrorBody"), answer]} if statuses == ("503",) else _ref("ErrorBody")}
    others = {
        status: {"description": _REASONS[status], "content": {"application/json": error}}
        for status in ("401", *statuses)
    }
    return {"responses": {"200": ok, **others}}
