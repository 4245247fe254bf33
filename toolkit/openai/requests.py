"""A client's request for tokens, and the requests that it becomes at other servers.

`GenerationCall` reads the fields that matter to a front, strictly: a field of another type is
refused, because a replica might understand what the front's limits did not. All other fields pass
as they are. It makes the body of the first attempt, and the body that asks another replica for the
rest of an answer by token ids: the prompt's and the client's. That is exact for greedy requests. It
needs a server that gives and takes token ids (vLLM), one choice, no state beside the tokens (tools,
grammars, log probabilities, a stop string that is sent and may have begun), and of chats only
fields that are known: others would be lost.

A request to another path, such as /v1/responses, passes unchanged. Its answer is not read, so
another replica can take it only before the first event.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from toolkit.openai.bodies import invalid_field, read_object
from toolkit.openai.errors import ApiError
from toolkit.openai.foreign import NULL, Number, decoded

Prompt = list[int] | bytes

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for /v1/completions
MAX_CHOICES = 1024  # of a prompt
MAX_PROMPTS = 1024
# Fields with which an answer depends on more than its prompt's tokens.
STATEFUL = (
    "tools", "functions", "response_format", "structured_outputs", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar", "logprobs", "top_logprobs",
    "prompt_logprobs", "logprob_token_ids", "echo", "suffix", "use_beam_search", "best_of",
    "prompt_embeds", "truncate_prompt_tokens", "continue_final_message", "include_reasoning",
    "thinking_token_budget", "repetition_detection", "include_stop_str_in_output",
)  # fmt: skip
LARGE = ("logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "echo")
# Fields of a chat that /v1/completions has, too; those from `cache_salt` on change no token.
SHARED = (
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "stop_token_ids", "ignore_eos", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "skip_special_tokens",
    "spaces_between_special_tokens", "bad_words", "allowed_token_ids", "priority", "vllm_xargs",
    "cache_salt", "user", "metadata", "store", "service_tier", "safety_identifier",
    "prompt_cache_key", "prompt_cache_retention", "request_id", "session_id", "stream_interval",
)  # fmt: skip
# Fields of a chat that the ids of its prompt contain, or that a continuation sets itself.
IN_IDS = (
    "messages", "documents", "chat_template", "chat_template_kwargs", "add_generation_prompt",
    "add_special_tokens", "reasoning_effort", "tool_choice", "parallel_tool_calls",
    "function_call", "n", "stream", "stream_options", "return_token_ids", "max_tokens",
    "max_completion_tokens", "min_tokens",
)  # fmt: skip
# With any other field, or an image, a chat does not go on by ids: it would be lost.
BY_IDS = {*STATEFUL, *SHARED, *IN_IDS}
# Values with which a field asks for nothing.
EMPTY = (b"null", b"false", b"[]", b"{}", b'"none"', b"0", b'{"type":"text"}')
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
# Fields of a response that become a part of the prompt.
RESPONSE_PROMPT = ("instructions", "tools", "previous_input_messages", "input")
RESPONSE_REFUSED = {
    "background": "a front could not find the answer again; use 'stream'",
    "conversation": "a front does not know which replica has it; send all of it as 'input'",
    "previous_response_id": "a front does not know which replica has it; send all of it as 'input'",
}
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Token = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class CommonFields(msgspec.Struct):
    """The fields that a front understands of every request. null is absent, as for the servers
    behind.
    """

    model: str | None = None
    stream: bool | None = None
    priority: Number | None = None
    prompt_cache_key: str | None = None


class RequestFields(CommonFields):
    """Further fields of completions and chats."""

    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    max_tokens: Number | UnsetType | None = UNSET
    max_completion_tokens: Number | None = None
    min_tokens: Number | None = None
    n: Choices | None = None
    best_of: Choices | None = None
    temperature: float | None = None
    stop: str | list[str] | None = None
    prompt: str | list[Token | str | list[Token]] | None = None
    prompt_embeds: str | list[str] | None = None


class ResponseFields(CommonFields):
    """Further fields of /v1/responses, and of other paths: their answers are not read."""

    max_output_tokens: Number | None = None
    input: str | list[Raw] | None = None
    background: bool | None = None
    conversation: Raw = NULL
    previous_response_id: str | None = None


FieldsT = TypeVar("FieldsT", bound=CommonFields)


class _Part(msgspec.Struct):
    type: str = ""


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None


class GenerationCall:
    """A request for tokens. Raises `ApiError` for a body that is no JSON object, for a field of
    another type than it should be, and for what a front cannot do.

    Attributes:
        chat: whether it is /v1/chat/completions.
        is_read: whether the events of its answer are read; of other paths than the two of
            completions they are not.
        prompts: as token ids or bytes of text; of embeddings, nothing.
        choices: of the answer, of all prompts together.
        rows: that are generated; with `best_of` more than choices.
        max_tokens: of a choice; None: the server's default.
        has_large_events: an event may have the log probabilities of a whole prompt.
        held_back: characters that a server keeps until it knows that no stop string begins there.
    """

    def __init__(self, path: str, body: bytes, session: str = "") -> None:
        self.path = path
        self.chat = path == CHAT
        self.is_read = path in (COMPLETIONS, CHAT)
        self.fields = read_object(body)
        self.choices = self.rows = 1
        self.wants_usage = self.wants_ids = self.greedy = self.has_large_events = False
        self.held_back = 0
        self._min_tokens = 0
        asked = self._read(body) if self.is_read else self._read_response(body)
        self.stream = bool(asked.stream)
        self.model = asked.model or ""
        self.session = session or asked.prompt_cache_key or ""

    def _read(self, body: bytes) -> RequestFields:
        asked = _understood(body, RequestFields)
        self.wants_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        self.wants_ids = bool(asked.return_token_ids)
        self.max_tokens = _limit(asked, chat=self.chat)
        self.prompts = self._chat_prompt() if self.chat else _text_or_ids(asked.prompt)
        embedded = asked.prompt_embeds
        count = len(self.prompts) + (len(embedded) if isinstance(embedded, list) else 0)
        self.choices = (asked.n or 1) * max(count, 1)
        self.rows = max(asked.n or 1, asked.best_of or 1) * max(count, 1)
        self.greedy = asked.temperature == 0
        self._min_tokens = asked.min_tokens or 0
        self.has_large_events = any(self._has(name) for name in LARGE)
        stops = [asked.stop or ""] if isinstance(asked.stop, str | None) else asked.stop
        self.held_back = max([0, *(len(stop) - 1 for stop in stops)])  # most of a stop string
        return asked

    def _read_response(self, body: bytes) -> ResponseFields:
        asked = _understood(body, ResponseFields)
        for name, why in RESPONSE_REFUSED.items() if self.path == RESPONSES else ():
            if getattr(asked, name) not in (None, False, "", NULL):
                raise ApiError(f"'{name}' is not served here: {why}", param=name)
        if asked.input is None and self.path == RESPONSES:
            raise ApiError("'input' should be a text or a list of items", param="input")
        self.max_tokens = asked.max_output_tokens
        texts = (bytes(self.fields[name]) for name in RESPONSE_PROMPT if name in self.fields)
        self.prompts = [b"".join(texts)]
        return asked

    @property
    def prompt(self) -> Prompt | None:
        """The only prompt; None where there are several, or none."""
        return self.prompts[0] if len(self.prompts) == 1 else None

    @property
    def goes_on_by_ids(self) -> bool:
        """Whether the ids of the prompt and the answer, and fields that /v1/completions has, are
        all that the rest of the answer depends on.
        """
        if not self.is_read or self.choices > 1 or any(self._has(name) for name in STATEFUL):
            return False
        if not self.chat:
            return True
        messages = decoded(self.fields["messages"], list[_Message])
        if messages is None or not self.fields.keys() <= BY_IDS:
            return False
        contents = [one.content for one in messages if isinstance(one.content, list)]
        return all(part.type == "text" for content in contents for part in content)

    def first(self, *, speaks_ids: bool) -> tuple[str, bytes]:
        """Return the path and the body of a whole request. A stream has its usage and token ids."""
        added = self._added(speaks_ids=speaks_ids) if self.stream and self.is_read else {}
        return self.path, msgspec.json.encode({**self.fields, **added})

    def rest(self, ids: list[int], done: int, limit: int | None) -> tuple[str, bytes]:
        """Return the path and the body of a request for the rest of an answer.

        Args:
            ids: of the prompt and of the tokens that the client has.
            done: how many tokens the client has.
            limit: the most tokens in all; None: as many as the context has room for.
        """
        names = SHARED if self.chat else self.fields.keys()
        fields: dict[str, Any] = {name: self.fields[name] for name in names if name in self.fields}
        fields["prompt"] = ids
        fields["max_tokens"] = None if limit is None else limit - done
        if self._min_tokens:
            fields["min_tokens"] = max(self._min_tokens - done, 0)
        return COMPLETIONS, msgspec.json.encode({**fields, **self._added(speaks_ids=True)})

    def _added(self, *, speaks_ids: bool) -> dict[str, Any]:
        given = decoded(self.fields.get("stream_options", NULL), dict[str, Raw]) or {}
        options = {**given, "include_usage": True}
        ids = {"return_token_ids": True} if speaks_ids else {}
        return {"stream": True, "stream_options": options, **ids}

    def _chat_prompt(self) -> list[Prompt]:
        """The bytes of a chat's tools and messages, as the client wrote them."""
        tools, messages = (bytes(self.fields.get(name, b"")) for name in ("tools", "messages"))
        if not messages.startswith(b"["):
            raise ApiError("'messages' should be a list of messages", param="messages")
        return [(b"" if tools == b"null" else tools) + messages[1:-1]]

    def _has(self, name: str) -> bool:
        return name in self.fields and bytes(self.fields[name]).strip() not in EMPTY


def _understood(body: bytes, kind: type[FieldsT]) -> FieldsT:
    """Return what is read of a body. Raises ApiError for a field of another type."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise invalid_field(error) from None


def _limit(asked: RequestFields, *, chat: bool) -> int | None:
    """Return the most tokens of a choice; None: what the server takes by default."""
    if chat and asked.max_completion_tokens is not None:
        return asked.max_completion_tokens
    if isinstance(asked.max_tokens, UnsetType):
        return None if chat else COMPLETION_TOKENS
    return asked.max_tokens


def _text_or_ids(given: str | list[int | str | list[int]] | None) -> list[Prompt]:
    """Return the prompts of a completion, texts as bytes."""
    prompts = [] if given is None else prompts_of(given, MAX_PROMPTS)
    return [one.encode() if isinstance(one, str) else one for one in prompts]


def prompts_of(given: str | list[int | str | list[int]], most: int) -> list[str | list[int]]:
    """Return the prompts of a completion. Raises ApiError where they are not of one kind, or more
    than `most`.
    """
    if isinstance(given, str):
        return [given]
    tokens = [one for one in given if isinstance(one, int)]
    if len(tokens) == len(given):
        return [tokens]
    if len(given) > most:
        text = f"'prompt' holds {len(given)} prompts; the limit is {most}"
        raise ApiError(text, param="prompt")
    texts = [one for one in given if isinstance(one, str)]
    lists = [one for one in given if isinstance(one, list)]
    if len(given) not in (len(texts), len(lists)):
        text = "should hold strings alone, tokens alone, or lists of tokens alone"
        raise ApiError(f"'prompt' {text}", param="prompt")
    return [*texts, *lists]
