"""What a client asked for, and what a replica is asked: bodies of requests, without I/O.

`GenerationCall` reads only the fields that matter here; all others pass as they are. It makes the
body of the first attempt, and those that continue an answer elsewhere:

    by ids    the prompt's tokens and those that the client has; exact for greedy requests. Needs a
              server that gives and takes token ids (vLLM), one choice, and no state beside the
              tokens (tools, grammars, log probabilities; stop strings of sampled requests).
    by text   the prompt's text and that of the answer so far. The server tokenizes both again,
              which may cut the text into other tokens than it had generated.
    again     the whole request; what the client has is left out as long as the texts are equal.

`PromptGauge` estimates a prompt's tokens and makes the block hashes for routers that look at
prefixes, both from bytes: a gateway does not tokenize.
"""

from __future__ import annotations

import secrets
from array import array
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Raw

from toolkit.routing.types import BLOCK_TOKENS
from toolkit.serve.errors import ApiError
from toolkit.serve.prompt_blocks import prompt_content

Mode = Literal["first", "ids", "text", "again"]
Prompt = list[int] | bytes | None
ValueT = TypeVar("ValueT")

BYTES_PER_TOKEN = 4.0  # of text, before any was counted
COUNTED_PROMPTS = 32  # then the bytes of a block are fixed
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for /v1/completions
MAX_CHOICES = 1024
# Fields with which an answer depends on more than its prompt's tokens.
STATEFUL = (
    "tools functions response_format structured_outputs guided_json guided_regex guided_choice "
    "guided_grammar logprobs top_logprobs prompt_logprobs echo suffix use_beam_search best_of"
).split()
# Fields of a chat request that /v1/completions has, too.
SAMPLING = (
    "model temperature top_p top_k min_p seed stop include_stop_str_in_output stop_token_ids "
    "ignore_eos repetition_penalty presence_penalty frequency_penalty logit_bias "
    "skip_special_tokens spaces_between_special_tokens bad_words allowed_token_ids cache_salt "
    "priority user vllm_xargs"
).split()
# Values with which a field asks for nothing.
EMPTY = (b"null", b"false", b"[]", b"{}", b'"none"', b"0", b'{"type":"text"}')
COMPLETIONS, CHAT = b"/v1/completions", b"/v1/chat/completions"


@dataclass(slots=True)
class ClientProgress:
    """What the client has of an answer, as far as a continuation needs it."""

    text: str
    tokens: int
    ids: list[int] | None  # None: the server gave none
    prompt_ids: list[int] | None
    overlap: int = 0  # characters at the end of the text that belong to no token of `ids`


class GenerationCall:
    """A request for tokens. Raises `ApiError` for a body that is no JSON object.

    Attributes:
        chat: whether it is /v1/chat/completions.
        choices: of all prompts together.
        max_tokens: of a choice; None: the server's default.
        held_back: characters that a server keeps until it knows that no stop string begins there.
        reread: characters to generate again where an answer goes on, since a stop string may begin
            in them.
    """

    def __init__(self, body: bytes, *, chat: bool, session: str = "") -> None:
        try:
            self.fields = msgspec.json.decode(body, type=dict[str, Raw])
        except (msgspec.DecodeError, RecursionError) as error:
            raise ApiError(f"the body is not a JSON object: {str(error)[:200]}") from None
        self.chat = chat
        self.stream = self._value("stream", bool) or False
        self._options = self._value("stream_options", dict[str, Any]) or {}
        self.wants_usage = self._options.get("include_usage") is True
        self.wants_ids = self._value("return_token_ids", bool) or False
        self.model = self._value("model", str) or ""
        limit = self._value("max_completion_tokens", int) if chat else None
        limit = self._value("max_tokens", int) if limit is None else limit
        self.max_tokens = limit if limit is not None or chat else COMPLETION_TOKENS
        self.prompt: Prompt = prompt_content(body)
        several = [] if self.prompt is not None else self._value("prompt", list[Raw]) or []
        prompts = max(sum(bytes(each[:1]) in (b"[", b'"') for each in several), 1)
        self.choices = min(max(self._value("n", int) or 1, 1), MAX_CHOICES) * prompts
        self.greedy = self._value("temperature", float) == 0
        stops = self._value("stop", list[str]) or [self._value("stop", str) or ""]
        begun = max(map(len, stops)) - 1 if self._has("stop") else 0  # most of a stop string
        sends_stops = self._value("include_stop_str_in_output", bool)
        self.held_back, self.reread = (0, begun) if sends_stops else (begun, 0)
        self.session = session or self._value("prompt_cache_key", str) or ""

    def mode(self, *, speaks_ids: bool, done: ClientProgress) -> Mode:
        """How to continue on a server; `speaks_ids`: it takes and gives token ids."""
        if not done.tokens or self.choices > 1 or any(self._has(name) for name in STATEFUL):
            return "again"
        if speaks_ids and done.ids and done.prompt_ids and (self.greedy or not done.overlap):
            return "ids"
        if self.reread and self.greedy:
            return "again"
        return "text" if self.chat or self._value("prompt", str) is not None else "again"

    def first(self, *, speaks_ids: bool) -> tuple[bytes, bytes]:
        """The path and the body of a whole request: of a stream, with its usage and token ids."""
        asked = self._asks(speaks_ids=speaks_ids) if self.stream else {}
        return CHAT if self.chat else COMPLETIONS, msgspec.json.encode({**self.fields, **asked})

    def continued(
        self, mode: Mode, done: ClientProgress, *, speaks_ids: bool, max_model_len: int | None
    ) -> tuple[bytes, bytes]:
        """The path and the body of a request for the rest of an answer."""
        left = None if self.max_tokens is None else self.max_tokens - done.tokens
        if mode == "ids":
            assert done.prompt_ids is not None
            assert done.ids is not None
            if left is None and max_model_len is not None:
                left = max_model_len - len(done.prompt_ids) - done.tokens
            names = SAMPLING if self.chat else self.fields.keys()
            fields: dict[str, Any] = {k: self.fields[k] for k in names if k in self.fields}
            fields["prompt"] = done.prompt_ids + done.ids
        elif mode == "text":
            fields = dict(self.fields)
            if self.chat:
                messages = self._value("messages", list[Raw]) or []
                fields["messages"] = [*messages, {"role": "assistant", "content": done.text}]
                fields |= {"add_generation_prompt": False, "continue_final_message": True}
                fields.pop("max_completion_tokens", None)
            else:
                fields["prompt"] = (self._value("prompt", str) or "") + done.text
        else:
            return self.first(speaks_ids=speaks_ids)
        if left is not None:
            fields["max_tokens"] = max(left, 1)
        if minimum := self._value("min_tokens", int):
            fields["min_tokens"] = max(minimum - done.tokens, 0)
        path = CHAT if self.chat and mode == "text" else COMPLETIONS
        return path, msgspec.json.encode({**fields, **self._asks(speaks_ids=speaks_ids)})

    def _asks(self, *, speaks_ids: bool) -> dict[str, Any]:
        options = {**self._options, "include_usage": True}
        asked: dict[str, Any] = {"stream": True, "stream_options": options}
        return asked | ({"return_token_ids": True} if speaks_ids else {})

    def _has(self, name: str) -> bool:
        return name in self.fields and bytes(self.fields[name]).strip() not in EMPTY

    def _value(self, name: str, kind: type[ValueT]) -> ValueT | None:
        """A field, or None where it is missing or of another type: the server will say so."""
        if name not in self.fields:
            return None
        try:
            return msgspec.json.decode(self.fields[name], type=kind)
        except (msgspec.DecodeError, RecursionError):
            return None


class PromptGauge:
    """Estimates of prompts from their bytes.

    Text counts as many tokens as its bytes make at the mean of the prompts that servers have
    counted. A block is a piece of as many bytes as 64 tokens have in the first prompts; equal
    hashes stand for equal bytes in it and in all before it. The hashes are keyed by a secret of
    this process, so that nothing can be looked up in a log of them.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._bytes, self._tokens, self._counted = 0, 0, 0
        self._block_bytes = round(BLOCK_TOKENS * BYTES_PER_TOKEN)

    @property
    def bytes_per_token(self) -> float:
        return self._bytes / self._tokens if self._tokens else BYTES_PER_TOKEN

    def tokens(self, prompt: Prompt) -> int:
        """About how many tokens a prompt has."""
        if isinstance(prompt, list):
            return max(len(prompt), 1)
        return max(round(len(prompt or b"") / self.bytes_per_token), 1)

    def blocks(self, prompt: Prompt) -> tuple[int, ...]:
        """The hashes of a prompt's full blocks."""
        if isinstance(prompt, list):
            try:
                content, size = array("q", prompt).tobytes(), 8 * BLOCK_TOKENS
            except OverflowError:
                return ()
        else:
            content, size = prompt or b"", self._block_bytes
        found, before, key = [], b"", self._key
        for at in range(0, len(content) - size + 1, size):
            before = blake2b(before + content[at : at + size], digest_size=8, key=key).digest()
            found.append(int.from_bytes(before, "big") >> 1)
        return tuple(found)

    def count(self, prompt: Prompt, tokens: int) -> None:
        """A server counted a prompt's tokens."""
        if not isinstance(prompt, bytes) or tokens < 1:
            return
        self._bytes += len(prompt)
        self._tokens += tokens
        self._counted += 1
        if self._counted == COUNTED_PROMPTS:
            self._block_bytes = max(round(BLOCK_TOKENS * self._bytes / self._tokens), 1)
