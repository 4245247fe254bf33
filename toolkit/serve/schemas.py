"""What requests may say, with bounds on everything; and which of OpenAI's parameters are refused rather than ignored.

Fields that nobody here knows are ignored, as OpenAI's own servers do. Fields that would change the answer, and that
this server cannot honour, are errors that name them.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema
from pydantic.json_schema import JsonSchemaValue

from toolkit.serve.body import Json
from toolkit.serve.errors import ApiError, from_validation

MAX_PROMPTS = 256
MAX_MESSAGES = 2048
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_TIMEOUT_S = 86_400.0

Prompt = str | list[int]

# Parameter to the values with which it asks for nothing. Those of chats and of completions differ in one.
REFUSED: dict[str, tuple[object, ...]] = {
    "audio": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "presence_penalty": (None, 0),
    "prompt_logprobs": (None,),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "use_beam_search": (None, False),
}


def asking_for_nothing(*, chat: bool) -> dict[str, tuple[object, ...]]:
    """`REFUSED`, and what the one endpoint in question adds to it."""
    return REFUSED | {"logprobs": (None, False) if chat else (None,)}


def _some(items: JsonSchemaValue, most: int | None = None) -> JsonSchemaValue:
    limit = {} if most is None else {"maxItems": most}
    return {"type": "array", "items": items, "minItems": 1, **limit}


_TEXT: JsonSchemaValue = {"type": "string", "minLength": 1}
_TOKEN: JsonSchemaValue = {"type": "integer", "minimum": 0}
_STOP: JsonSchemaValue = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_PART: JsonSchemaValue = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
PROMPT_SCHEMA: JsonSchemaValue = {
    "anyOf": [_TEXT, _some(_TEXT, MAX_PROMPTS), _some(_TOKEN), _some(_some(_TOKEN), MAX_PROMPTS)]
}
STOP_SCHEMA: JsonSchemaValue = {
    "anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}, {"type": "null"}]
}
CONTENT_SCHEMA: JsonSchemaValue = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _prompts(value: object) -> list[Prompt]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("should be a string, a list of strings, a list of tokens or a list of lists of tokens")
    if _is_tokens(value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"holds {len(value)} prompts; the limit is {MAX_PROMPTS}")
    if all(isinstance(prompt, str) for prompt in value) or all(_is_tokens(prompt) for prompt in value):
        return value
    raise ValueError("should hold strings alone, tokens alone, or lists of tokens alone")


def _tokens(value: object) -> list[int]:
    """One error for all items: an error for each would be larger than the body."""
    if not _is_tokens(value):
        raise ValueError("should be a list of tokens, which are integers")
    return value  # type: ignore[return-value]


def _stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("should be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"holds {len(stops)} strings; the limit is {MAX_STOPS}")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"strings should have 1 to {MAX_STOP_CHARS} characters")
    return stops


def _content(value: object) -> str:
    """A message's text: a string, or parts of type text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("should be a string or a list of parts of type 'text'")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError("holds a part that is not of type 'text', which is all that this model reads")
        texts.append(part["text"])
    return "\n".join(texts)


class Form(BaseModel):
    """Values as they are: no "5" for 5, no NaN; unknown fields ignored; null is the same as absent."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(Form):
    include_usage: bool | None = None


class GenerationForm(Form):
    """What completions and chat completions have in common."""

    model: Annotated[str, Field(max_length=256)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    stop: Annotated[list[str], PlainValidator(_stops), WithJsonSchema(STOP_SCHEMA)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    llmctl_end_after: Annotated[int, Field(ge=1)] | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionForm(GenerationForm):
    """POST /v1/completions."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts), WithJsonSchema(PROMPT_SCHEMA)]


class Message(Form):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, PlainValidator(_content), WithJsonSchema(CONTENT_SCHEMA)]


class ChatForm(GenerationForm):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


class TokenizeForm(Form):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None


class DetokenizeForm(Form):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], PlainValidator(_tokens), WithJsonSchema({"type": "array", "items": _TOKEN})]


FormT = TypeVar("FormT", bound=Form)


def validate(form: type[FormT], data: Json) -> FormT:
    """`data` as a form. `ApiError` for the first thing that is wrong with it."""
    if issubclass(form, GenerationForm):
        refuse_unsupported(data, chat=form is ChatForm)
    try:
        return form.model_validate(data)
    except ValidationError as error:
        raise from_validation(error) from None


def refuse_unsupported(data: Json, *, chat: bool) -> None:
    """`ApiError` for a parameter that would change the answer and cannot be honoured."""
    harmless = asking_for_nothing(chat=chat)
    for name in data.keys() & harmless.keys():
        if not any(_same(data[name], value) for value in harmless[name]):
            raise ApiError(f"'{name}' is not supported here", param=name, code="unsupported_parameter")


def _same(one: object, other: object) -> bool:
    """Equal as JSON: in Python true is 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)
