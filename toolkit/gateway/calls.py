"""A client's request for tokens, without I/O, and the requests that it becomes at replicas.

`GenerationCall` reads the fields that matter here, strictly: a field of another type is refused,
because a replica might understand what the gateway's limits did not. All other fields pass as they
are. It makes the body of the first attempt, and those that continue an answer elsewhere:

    by ids    the prompt's tokens and those that the client has; exact for greedy requests. Needs a
              server that gives and takes token ids (vLLM), one choice, no state beside the tokens
              (tools, grammars, log probabilities; stop strings of sampled requests), and of chats
              only fields that are known: others would be lost.
    by text   the prompt's text and that of the answer so far. The server tokenizes both again,
              which may cut the text into other tokens than it had generated.
    again     the whole request; what the client has is left out as long as the texts are equal.
    count     one token, for the usage that only an answer's last lines have.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from toolkit.endpoints.foreign import Number, decoded
from toolkit.serve.errors import ApiError

Mode = Literal["first", "ids", "text", "again", "count"]
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
    "thinking_token_budget", "repetition_detection",
)  # fmt: skip
LARGE = ("logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "echo")
# Fields of a chat that /v1/completions has, too; those from `cache_salt` on change no token.
SHARED = (
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "include_stop_str_in_output", "stop_token_ids", "ignore_eos", "repetition_penalty",
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
COMPLETIONS = b"/v1/completions"
CHAT = b"/v1/chat/completions"
_PLAIN_SESSION = re.compile(r"[0-9]{1,20}")
_FIELD = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)

Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Token = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
AskedT = TypeVar("AskedT")


class _Asked(msgspec.Struct):
    """The fields that are understood here. null is absent, as for the servers behind."""

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Raw] | None = None
    return_token_ids: bool | None = None
    max_tokens: Number | UnsetType | None = UNSET
    max_completion_tokens: Number | None = None
    min_tokens: Number | None = None
    n: Choices | None = None
    best_of: Choices | None = None
    priority: Number | None = None
    temperature: float | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    prompt: str | list[Token | str | list[Token]] | None = None
    prompt_embeds: str | list[str] | None = None
    prompt_cache_key: str | None = None


class _Part(msgspec.Struct):
    type: str = ""


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None


_decode_asked = msgspec.json.Decoder(_Asked).decode


@dataclass(slots=True)
class ClientProgress:
    """What the client has of an answer, for its continuation."""

    text: str
    tokens: int
    ids: list[int] | None  # None: the server gave none
    prompt_ids: list[int] | None
    overlap: int = 0  # characters at the end of the text that belong to no token of `ids`
    repeated: bool = False  # the client has ids behind those of `ids`


class GenerationCall:
    """A request for tokens. Raises `ApiError` for a body that is no JSON object, and for a field
    of another type than it should be.

    Attributes:
        chat: whether it is /v1/chat/completions.
        prompts: as token ids or bytes of text; of embeddings, nothing.
        copies: choices of each prompt.
        choices: of the answer, of all prompts together.
        rows: that run at once; with `best_of` more than choices.
        max_tokens: of a choice; None: the server's default.
        has_large_events: an event may have the log probabilities of a whole prompt.
        held_back: characters that a server keeps until it knows that no stop string begins there.
        reread: characters to generate again where an answer goes on, since a stop string may begin
            in them.
    """

    earlier = None  # a response that it continues
    absent = ""  # what its client is told where no replica has the route

    def __init__(self, body: bytes, *, chat: bool, session: str = "") -> None:
        self.fields = read_object(body)
        asked = understood(self.fields, _decode_asked)
        self.chat = chat
        self.stream = bool(asked.stream)
        self._options = asked.stream_options or {}
        self.wants_usage = self._wants_usage()
        self.wants_ids = bool(asked.return_token_ids)
        self.model = asked.model or ""
        self.max_tokens = _limit(asked, chat=chat)
        self.prompts = self._chat_prompt() if chat else _prompts(asked.prompt)
        self._is_text = chat or isinstance(asked.prompt, str)
        embedded = asked.prompt_embeds
        count = len(self.prompts) + (len(embedded) if isinstance(embedded, list) else 0)
        self.copies = asked.n or 1
        self.choices = self.copies * max(count, 1)
        self.rows = max(self.copies, asked.best_of or 1) * max(count, 1)
        self.priority = asked.priority or 0
        self.greedy = asked.temperature == 0
        self._min_tokens = asked.min_tokens or 0
        self.has_large_events = any(self._has(name) for name in LARGE)
        stops = [asked.stop or ""] if isinstance(asked.stop, str | None) else asked.stop
        begun = max((len(stop) - 1 for stop in stops), default=0)  # most of a stop string
        begun = max(begun, 0)
        sends_stops = bool(asked.include_stop_str_in_output)
        self.held_back, self.reread = (0, begun) if sends_stops else (begun, 0)
        self.session = session_name(session or asked.prompt_cache_key or "")

    @property
    def prompt(self) -> Prompt | None:
        """The only prompt; None where there are several, or none."""
        return self.prompts[0] if len(self.prompts) == 1 else None

    def mode(self, *, speaks_ids: bool, done: ClientProgress, knows_limit: bool) -> Mode:
        """How to continue on a server. `speaks_ids`: it takes and gives token ids. `knows_limit`:
        how many tokens the whole answer may have.
        """
        if not done.tokens or self.choices > 1 or any(self._has(name) for name in STATEFUL):
            return "again"
        if self.greedy and not knows_limit:
            return "again"
        exact = self.greedy or not (done.overlap or done.repeated)
        if speaks_ids and done.ids and done.prompt_ids and exact and self._is_in_ids():
            return "ids"
        # Without ids it is not known how many tokens the text has behind which a stop may begin.
        if (self.greedy and (self.held_back or self.reread)) or self.wants_ids:
            return "again"
        return "text" if self._is_text else "again"

    def first(self, *, speaks_ids: bool) -> tuple[bytes, bytes]:
        """The path and the body of a whole request: of a stream, with its usage and token ids."""
        added = self._added(speaks_ids=speaks_ids) if self.stream else {}
        return CHAT if self.chat else COMPLETIONS, msgspec.json.encode({**self.fields, **added})

    def counting(self) -> tuple[bytes, bytes]:
        """The path and the body of a request for a token of each prompt, and the usage."""
        fields: dict[str, Any] = dict(self.fields)
        for name in ("n", "best_of", "min_tokens", "max_completion_tokens", "use_beam_search"):
            fields.pop(name, None)
        fields |= {"max_tokens": 1, **self._added(speaks_ids=False)}
        return CHAT if self.chat else COMPLETIONS, msgspec.json.encode(fields)

    def continued(
        self, mode: Mode, done: ClientProgress, *, speaks_ids: bool, limit: int | None
    ) -> tuple[bytes, bytes]:
        """The path and the body of a request for the rest of an answer, by "ids" or by "text", of
        at most `limit` tokens in all; None: the server's default.
        """
        if mode == "ids":
            assert done.prompt_ids is not None
            assert done.ids is not None
            names = SHARED if self.chat else self.fields.keys()
            fields: dict[str, Any] = {k: self.fields[k] for k in names if k in self.fields}
            fields["prompt"] = done.prompt_ids + done.ids
        else:
            fields = dict(self.fields)
            if self.chat:
                messages = msgspec.json.decode(self.fields["messages"], type=list[Raw])
                fields["messages"] = [*messages, {"role": "assistant", "content": done.text}]
                fields |= {"add_generation_prompt": False, "continue_final_message": True}
                fields.pop("max_completion_tokens", None)
            else:
                prompt = msgspec.json.decode(self.fields["prompt"], type=str)
                fields["prompt"] = prompt + done.text
        if limit is not None:
            fields["max_tokens"] = max(limit - done.tokens, 1)
        elif mode == "ids":
            fields["max_tokens"] = None  # what the context has left; the path's default is 16
        if self._min_tokens:
            fields["min_tokens"] = max(self._min_tokens - done.tokens, 0)
        path = CHAT if self.chat and mode == "text" else COMPLETIONS
        return path, msgspec.json.encode({**fields, **self._added(speaks_ids=speaks_ids)})

    def _added(self, *, speaks_ids: bool) -> dict[str, Any]:
        options = {**self._options, "include_usage": True}
        ids = {"return_token_ids": True} if speaks_ids else {}
        return {"stream": True, "stream_options": options, **ids}

    def _wants_usage(self) -> bool:
        value = bytes(self._options.get("include_usage", b"null")).strip()
        if value not in (b"null", b"true", b"false"):
            name = "stream_options.include_usage"
            raise ApiError(f"'{name}' should be true or false", param=name)
        return value == b"true"

    def _chat_prompt(self) -> list[Prompt]:
        """The bytes of a chat's tools and messages, as the client wrote them."""
        tools, messages = (bytes(self.fields.get(name, b"")) for name in ("tools", "messages"))
        if not messages.startswith(b"["):
            raise ApiError("'messages' should be a list of messages", param="messages")
        return [(b"" if tools == b"null" else tools) + messages[1:-1]]

    def _is_in_ids(self) -> bool:
        """Whether the ids of the prompt, and fields that /v1/completions has, are all of it."""
        if not self.chat:
            return True
        messages = decoded(self.fields["messages"], list[_Message])
        if messages is None or not self.fields.keys() <= BY_IDS:
            return False
        contents = [one.content for one in messages if isinstance(one.content, list)]
        return all(part.type == "text" for content in contents for part in content)

    def _has(self, name: str) -> bool:
        return name in self.fields and bytes(self.fields[name]).strip() not in EMPTY


def read_object(body: bytes) -> dict[str, Raw]:
    """The fields of a body, each once. Raises `ApiError` where it is no JSON object in UTF-8."""
    try:
        body.decode()  # also where nothing here reads it: a replica would fail on it
        return msgspec.json.decode(body, type=dict[str, Raw])
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8: byte {error.start}") from None
    except RecursionError:
        raise ApiError("the body nests too deeply") from None
    except ValueError as error:
        reason = str(error).replace("`", "")
        raise ApiError(f"the body is not a JSON object: {reason[:200]}") from None


def understood(fields: dict[str, Raw], decode: Callable[[bytes], AskedT]) -> AskedT:
    """What is read of the fields. Raises `ApiError` for one of another type."""
    try:
        return decode(msgspec.json.encode(fields))
    except msgspec.DecodeError as error:
        text = str(error)
        found = _FIELD.search(text)
        name = found[1][:80] if found else ""
        reason = (text[: found.start()] if found else text).replace("`", "")
        raise ApiError(f"'{name}': {reason[:200]}", param=name or None) from None


def _limit(asked: _Asked, *, chat: bool) -> int | None:
    """The most tokens of a choice; None: what the server takes by default."""
    if chat and asked.max_completion_tokens is not None:
        return asked.max_completion_tokens
    if isinstance(asked.max_tokens, UnsetType):
        return None if chat else COMPLETION_TOKENS
    return asked.max_tokens


def _prompts(given: str | list[int | str | list[int]] | None) -> list[Prompt]:
    """The prompts of a completion. Raises `ApiError` where they are not of one kind."""
    if given is None:
        return []
    if isinstance(given, str):
        return [given.encode()]
    tokens = [one for one in given if isinstance(one, int)]
    texts = [one.encode() for one in given if isinstance(one, str)]
    lists = [one for one in given if isinstance(one, list)]
    if len(tokens) == len(given):
        return [tokens]
    if len(given) not in (len(texts), len(lists)):
        text = "should hold strings alone, tokens alone, or lists of tokens alone"
        raise ApiError(f"'prompt' {text}", param="prompt")
    if len(given) > MAX_PROMPTS:
        text = f"'prompt' holds {len(given)} prompts; the limit is {MAX_PROMPTS}"
        raise ApiError(text, param="prompt")
    return [*texts, *lists]


def session_name(given: str) -> str:
    """A client's name of a conversation, for routers and their log: of bounded length, and without
    its words. Every front makes the same of it; numbers stay, as the simulator names sessions.
    """
    if not given or _PLAIN_SESSION.fullmatch(given):
        return given
    return blake2b(given.encode(errors="surrogatepass"), digest_size=12).hexdigest()
