"""The requests that our own engines serve: every field is known and bounded.

No field that could change the answer is dropped: an unknown field is an error that names it, and so
is a parameter that these engines do not support. Only `IGNORED` has fields of no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from toolkit.openai.bodies import Json, invalid_field, parse_json
from toolkit.openai.errors import ApiError
from toolkit.openai.foreign import Count
from toolkit.openai.requests import StreamOptions, Token, prompts_of

MAX_PROMPTS = 256
MAX_TIMEOUT_S = 86_400.0

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
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
OPTIONS_OFF = ("include_obfuscation", "continuous_usage_stats")  # may be false

# Those that vLLM has not, either: it never had them, or no longer has.
NOT_IN_VLLM = {
    *("audio", "best_of", "function_call", "functions", "modalities", "suffix"),
    *("guided_choice", "guided_grammar", "guided_json", "guided_regex"),
}

Positive = Annotated[int, Meta(ge=1, lt=1 << 31)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]


def harmless_values(*, chat: bool) -> dict[str, tuple[object, ...]]:
    """Return the unsupported parameters of an endpoint, and the values with which each has no
    effect.
    """
    own: dict[str, tuple[object, ...]] = {"logprobs": (False,) if chat else ()}
    return UNSUPPORTED | own | {"add_special_tokens": (not chat,)}


class EngineStreamOptions(StreamOptions, frozen=True, forbid_unknown_fields=True):
    """Further fields of `StreamOptions` are refused."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chats share, with strict types (no "5" for 5)."""

    model: Annotated[str, Meta(max_length=256)] | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=16)] = 1
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] = []
    stop_token_ids: Annotated[list[Token], Meta(max_length=64)] = []
    ignore_eos: bool = False
    min_tokens: Count = 0
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] = 0
    timeout: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)] | None = None
    stream: bool = False
    stream_options: EngineStreamOptions = EngineStreamOptions()
    llmctl_end_after: Positive | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def prompt_count(self) -> int:
        return 1

    @property
    def limit(self) -> int | None:
        """How many new tokens a choice may have; None: the client does not say."""
        return self.max_tokens


class EngineCompletion(EngineRequest, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Token | str | list[Token]]

    @property
    def prompt_count(self) -> int:
        return len(self.prompts)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts. Raises ApiError where they are not of one kind, or too many."""
        return prompts_of(self.prompt, MAX_PROMPTS)


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message; these models read only text."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        content = self.content
        return content if isinstance(content, str) else "\n".join(part.text for part in content)


class EngineChat(EngineRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=2048)]
    max_completion_tokens: Positive | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


def read_engine_request(body: bytes, *, chat: bool) -> EngineRequest:
    """Return the request in a body. Raises ApiError for the first error in it."""
    data = parse_json(body)
    harmless = harmless_values(chat=chat)
    refuse_unsupported(data, harmless)
    fields = {name: data[name] for name in data if name not in IGNORED and name not in harmless}
    options = fields.get("stream_options")
    if isinstance(options, dict):
        off = {name for name in OPTIONS_OFF if options.get(name) is False}
        fields["stream_options"] = {name: options[name] for name in options if name not in off}
    try:
        if chat:
            return msgspec.convert(fields, EngineChat)
        request = msgspec.convert(fields, EngineCompletion)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None
    # A prompt of many ids is looked through once.
    return msgspec.structs.replace(request, prompt=prompts_of(request.prompt, MAX_PROMPTS))


def refuse_unsupported(data: Json, harmless: Mapping[str, tuple[object, ...]]) -> None:
    """Raise ApiError for an unsupported parameter with a value that would change the answer."""
    for name in data.keys() & harmless.keys():
        value = data[name]
        is_bool = isinstance(value, bool)  # in Python True equals 1
        if not any(value == one and is_bool == isinstance(one, bool) for one in harmless[name]):
            text = f"'{name}' is not supported by this engine"
            text += "" if name in NOT_IN_VLLM else "; a recipe with engine 'vllm' serves it"
            raise ApiError(text, param=name, code="unsupported_parameter")
