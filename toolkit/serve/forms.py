"""Read the bodies of requests: strict JSON, bounded fields, and prompts in tokens.

Only JSON is accepted on which no two parsers can disagree: UTF-8 without a byte-order mark, no NaN,
no duplicate key, no half of a surrogate pair, bounded nesting. The forms bound every field, and
drop none that could change the answer: an unknown field is an error that names it, and so is a
parameter that this server does not support. Only `IGNORED` has fields of no effect.

`LargeBodies` reads large bodies in a thread, so that they do not block the event loop. A thread
that parses in C holds Python's global lock meanwhile, so `parse_json` bounds each such step.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence, Sized
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from starlette.requests import ClientDisconnect, Request

from toolkit.engines.tokenizer import Tokenizer
from toolkit.errors import InputError
from toolkit.serve.errors import ApiError, from_validation, overloaded

Json = dict[str, object]

MAX_DEPTH = 32
MAX_VALUES = 1 << 19  # of a body, counted by strings, braces and commas
MAX_LISTS = 1 << 16
LARGE_BODY_BYTES = 1 << 15
MAX_WAITING_BODIES = 64
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


async def read_json_bytes(request: Request, max_bytes: int) -> bytes:
    """The body of a request with the content-type JSON. Raises `ApiError` with 400, 413 or 415."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(f"content-type is '{kind[:80]}', and must be application/json", status=415)
    return await read_body(request, max_bytes)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body. Raises `ApiError` as soon as it exceeds `max_bytes`, whatever length it states."""
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated[:20]) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
    except ClientDisconnect:
        raise ApiError("the body ended early") from None
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    text = f"the body is larger than {max_bytes} bytes"
    return ApiError(text, status=413)


ReadT = TypeVar("ReadT")
SizedT = TypeVar("SizedT", bound=Sized)


def is_large(body: Sized) -> bool:
    """Return whether reading the body takes too long for the event loop."""
    return len(body) > LARGE_BODY_BYTES


class LargeBodies:
    """Reads one large body after another in a thread, and small ones at once."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def read(self, read: Callable[[SizedT], ReadT], body: SizedT) -> ReadT:
        """Return `read(body)`. Raises ApiError if too many large bodies wait, and what `read`
        raises.
        """
        if not is_large(body):
            return read(body)
        if self._waiting >= MAX_WAITING_BODIES:
            raise overloaded(f"{self._waiting} large bodies wait to be read; try again later")
        self._waiting += 1
        try:
            async with self._turn:
                return await asyncio.to_thread(read, body)
        finally:
            self._waiting -= 1


def parse_json(body: bytes) -> Json:
    """Return the body as a JSON object. Raises ApiError if it is none, if parsers could disagree
    about it, or if it holds too many values.
    """
    refuse_many_values(body)
    try:
        text = body.decode("utf-8")
        data = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_no_constant,
        )
        if _SURROGATE.search(text):
            json.dumps(data, ensure_ascii=False).encode("utf-8")  # raises for half a pair
    except RecursionError:
        raise ApiError(f"the body nests deeper than {MAX_DEPTH} levels") from None
    except UnicodeEncodeError:
        text = "the body holds half of a surrogate pair, which is not a character"
        raise ApiError(text) from None
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8: byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ApiError(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except ValueError as error:  # raised by the hooks below, and by int() of too many digits
        raise ApiError(f"the body cannot be read: {str(error).partition(';')[0][:200]}") from None
    if not isinstance(data, dict):
        raise ApiError("the body must be a JSON object")
    level: list[object] = [data]
    for _ in range(MAX_DEPTH):
        level = [
            value
            for container in level
            for value in (container.values() if isinstance(container, dict) else container)  # type: ignore[attr-defined]
            if isinstance(value, dict | list)
        ]
        if not level:
            return data
    raise ApiError(f"the body nests deeper than {MAX_DEPTH} levels")


def refuse_many_values(body: bytes) -> None:
    """Raise ApiError for a body with more than `MAX_LISTS` lists, or more than `MAX_VALUES`
    strings, braces and commas.

    The parser does not release Python's global lock between lists and strings: eight MiB of empty
    lists would stop all other requests for most of a second. What is inside strings costs little.
    """
    if body.count(b"[") <= MAX_LISTS and sum(map(body.count, b'",{')) <= MAX_VALUES:
        return
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = unescaped.count(b'"') // 2
    if 2 * strings > MAX_VALUES:  # each has a comma, or another string, behind it
        raise ApiError(f"the body holds more than {MAX_VALUES} values")
    marks = b"".join(unescaped.split(b'"')[::2])  # what is outside of strings
    if marks.count(b"[") > MAX_LISTS:
        raise ApiError(f"the body holds more than {MAX_LISTS} lists")
    if strings + marks.count(b",") + marks.count(b"{") > MAX_VALUES:
        raise ApiError(f"the body holds more than {MAX_VALUES} values")


# Functions of Python, also where one of C would do: calling them lets other threads run, while the
# parser goes through a long list of numbers.
def _integer(text: str) -> int:
    return int(text)


def _number(text: str) -> float:
    return float(text)


def _object(pairs: list[tuple[str, object]]) -> Json:
    result = dict(pairs)
    if len(result) < len(pairs):
        [(duplicate, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {duplicate[:80]!r} occurs twice")
    return result


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


MAX_PROMPTS = 256
MAX_MESSAGES = 2048
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_TIMEOUT_S = 86_400.0

Prompt = str | list[int]
Prompts = Sequence[Sequence[int]]  # in tokens

# Fields of OpenAI's clients, and of the libraries on top, that may have any value: why each has no
# effect on an answer here.
IGNORED = {
    "user": "is a label",
    "safety_identifier": "is a label",
    "metadata": "labels a stored answer, and none is stored",
    "store": "no answer is stored",
    "service_tier": "there is one tier",
    "prompt_cache_key": "names a cache of prompts, which only saves time",
    "prompt_cache_retention": "is about that cache",
    "cache_salt": "is about that cache",
    "parallel_tool_calls": "is about tools, which are refused",
}

# Unsupported parameters, and the values with which each has no effect. `logprobs` and
# `add_special_tokens` are missing here, because their values differ between chats and completions.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (None, True),
    "allowed_token_ids": (None, []),
    "audio": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "presence_penalty": (None, 0),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "return_token_ids": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}

# Those that vLLM has not, either: it never had them, or no longer has.
NOT_IN_VLLM = {
    *("audio", "best_of", "function_call", "functions", "modalities", "suffix"),
    *("guided_choice", "guided_grammar", "guided_json", "guided_regex"),
}


def harmless_values(*, chat: bool) -> dict[str, tuple[object, ...]]:
    """The unsupported parameters of an endpoint, and the values with which each has no effect."""
    own = {"logprobs": (None, False) if chat else (None,)}
    return UNSUPPORTED | own | {"add_special_tokens": (None, not chat)}


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _prompts(value: object) -> list[Prompt]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError(
            "should be a string, a list of strings, a list of tokens or a list of lists of tokens"
        )
    if _is_tokens(value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"holds {len(value)} prompts; the limit is {MAX_PROMPTS}")
    if all(isinstance(prompt, str) for prompt in value) or all(map(_is_tokens, value)):
        return value
    raise ValueError("should hold strings alone, tokens alone, or lists of tokens alone")


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
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise ValueError("holds a part that is not of type 'text'; this model reads only text")
        for name, given in part.items():
            if name not in ("type", "text") and given is not None:
                raise ValueError(f"holds a part with '{name[:80]}', which is not a field here")
        texts.append(part["text"])
    return "\n".join(texts)


class Form(BaseModel):
    """Strict types (no "5" for 5) and no NaN. Unknown fields are refused, and null means absent."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        frozen=True,
    )
    ignored: ClassVar[Collection[str]] = ()

    @model_validator(mode="before")
    @classmethod
    def _asked(cls, data: object) -> object:
        """Return the fields, and the first of the unknown ones that ask for something: an error
        for each of 200,000 would take a second.
        """
        if not isinstance(data, dict) or data.keys() <= cls.model_fields.keys():
            return data
        known = {name: value for name, value in data.items() if name in cls.model_fields}
        for name, value in data.items():
            if not (name in known or value is None or name in cls.ignored):
                return known | {name: value}
        return known


class StreamOptions(Form):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


class GenerationForm(Form):
    """The fields that completions and chat completions share."""

    ignored = {*IGNORED, *harmless_values(chat=True)}  # `refuse_unsupported` has seen the latter

    model: Annotated[str, Field(max_length=256)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    stop: Annotated[list[str], PlainValidator(_stops)] = Field(default_factory=list)
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64, fail_fast=True)] | None
    ) = None
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

    @property
    def prompt_count(self) -> int:
        return 1

    @property
    def limit(self) -> int | None:
        """How many new tokens a choice may have; None: the client does not say."""
        return self.max_tokens


class CompletionForm(GenerationForm):
    """POST /v1/completions."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts)]

    @property
    def prompt_count(self) -> int:
        return len(self.prompt)


class Message(Form):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, PlainValidator(_content)]


class ChatForm(GenerationForm):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


def read_form(form: type[GenerationForm], body: bytes) -> GenerationForm:
    """A body as a form. Raises `ApiError` for the first error in it."""
    data = parse_json(body)
    refuse_unsupported(data, chat=form is ChatForm)
    try:
        return form.model_validate(data)
    except ValidationError as error:
        raise from_validation(error) from None


def refuse_unsupported(data: Json, *, chat: bool) -> None:
    """Raise `ApiError` for an unsupported parameter with a value that would change the answer."""
    harmless = harmless_values(chat=chat)
    for name in data.keys() & harmless.keys():
        value = data[name]
        is_bool = isinstance(data[name], bool)  # in Python True equals 1
        if not any(value == one and is_bool == isinstance(one, bool) for one in harmless[name]):
            text = f"'{name}' is not supported by this engine"
            text += "" if name in NOT_IN_VLLM else "; a recipe with engine 'vllm' serves it"
            raise ApiError(text, param=name, code="unsupported_parameter")


class BodyReader:
    """Reads bodies for one model. Raises only ApiError."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def read(self, form: type[GenerationForm], body: bytes) -> tuple[GenerationForm, Prompts]:
        """Return a body as a form, and its prompts in tokens."""
        asked = read_form(form, body)
        prompts = self.tokens(asked)
        for prompt in prompts:
            check_room(len(prompt), self._max_model_len)
        return asked, prompts

    def tokens(self, form: GenerationForm) -> list[list[int]]:
        """The tokens of all prompts of a form. New clients call 'system' 'developer'."""
        try:
            if isinstance(form, ChatForm):
                roles = {"developer": "system"}
                messages = [
                    {"role": roles.get(one.role, one.role), "content": one.content}
                    for one in form.messages
                ]
                return [self._tokenizer.encode_chat(messages)]
            assert isinstance(form, CompletionForm)
            for prompt in form.prompt:
                if not isinstance(prompt, str):
                    self.check_tokens(prompt, "prompt")
            encode = self._tokenizer.encode
            return [encode(text) if isinstance(text, str) else text for text in form.prompt]
        except InputError as error:
            param = "messages" if isinstance(form, ChatForm) else "prompt"
            raise ApiError(error.message, param=param) from None

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raise `ApiError` for a token that is not in the model's vocabulary."""
        size = self._vocab_size
        if tokens and not (min(tokens) >= 0 and max(tokens) < size):
            token = next(token for token in tokens if not 0 <= token < size)
            raise ApiError(
                f"'{param}' holds token {short(token)}; tokens here are 0 to {size - 1}",
                param=param,
            )


def check_room(prompt_tokens: int, max_model_len: int) -> None:
    """Raise `ApiError` for an empty prompt, or one that leaves no room for a new token."""
    if prompt_tokens < 1:
        raise ApiError("the prompt has no tokens", param="prompt")
    if prompt_tokens >= max_model_len:
        limit = f"the limit of prompt + output is {max_model_len}"
        text = f"the prompt has {prompt_tokens} tokens; {limit}"
        raise ApiError(text, param="prompt", code="context_length_exceeded")


def short(number: int) -> str:
    """A number for a message. A number in JSON may have thousands of digits."""
    return str(number) if abs(number) < 10**20 else "too large a number"
