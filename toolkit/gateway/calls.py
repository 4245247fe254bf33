"""One call of a client, without I/O: its request, the requests to replicas, and the answer.

`GenerationCall` reads only the fields that matter here; all others pass as they are. It makes the
body of the first attempt, and those that continue an answer elsewhere:

    by ids    the prompt's tokens and those that the client has; exact for greedy requests. Needs a
              server that gives and takes token ids (vLLM), one choice, and no state beside the
              tokens (tools, grammars, log probabilities; stop strings of sampled requests).
    by text   the prompt's text and that of the answer so far. The server tokenizes both again,
              which may cut the text into other tokens than it had generated.
    again     the whole request; what the client has is left out as long as the texts are equal.

`PassingAnswer` gets the pieces of each attempt and returns the bytes for the client. Events of the
first attempt pass as they came, without the token ids and the usage that only the gateway asked
for. Those of a later one get the id of the first, so that the client sees one answer.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Raw

from toolkit.serve.errors import ApiError
from toolkit.serve.prompt_blocks import prompt_content

Mode = Literal["first", "ids", "text", "again"]
Prompt = list[int] | bytes | None
ValueT = TypeVar("ValueT")

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for /v1/completions
MAX_CHOICES = 1024
# Fields with which an answer depends on more than its prompt's tokens.
STATEFUL = (
    "tools", "functions", "response_format", "structured_outputs", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar", "logprobs", "top_logprobs",
    "prompt_logprobs", "echo", "suffix", "use_beam_search", "best_of",
)  # fmt: skip
# Fields of a chat request that /v1/completions has, too.
SAMPLING = (
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "include_stop_str_in_output", "stop_token_ids", "ignore_eos", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "skip_special_tokens",
    "spaces_between_special_tokens", "bad_words", "allowed_token_ids", "cache_salt", "priority",
    "user", "vllm_xargs",
)  # fmt: skip
# Values with which a field asks for nothing.
EMPTY = (b"null", b"false", b"[]", b"{}", b'"none"', b"0", b'{"type":"text"}')
COMPLETIONS, CHAT = b"/v1/completions", b"/v1/chat/completions"


@dataclass(slots=True)
class ClientProgress:
    """What the client has of an answer, for its continuation."""

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
        listed = [] if self.prompt is not None else self._value("prompt", list[Raw]) or []
        prompts = max(sum(bytes(prompt[:1]) in (b"[", b'"') for prompt in listed), 1)
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
        added = self._added(speaks_ids=speaks_ids) if self.stream else {}
        return CHAT if self.chat else COMPLETIONS, msgspec.json.encode({**self.fields, **added})

    def continued(
        self, mode: Mode, done: ClientProgress, *, speaks_ids: bool, max_model_len: int | None
    ) -> tuple[bytes, bytes]:
        """The path and the body of a request for the rest of an answer, by "ids" or by "text"."""
        left = None if self.max_tokens is None else self.max_tokens - done.tokens
        if mode == "ids":
            assert done.prompt_ids is not None
            assert done.ids is not None
            if left is None and max_model_len is not None:
                left = max_model_len - len(done.prompt_ids) - done.tokens
            names = SAMPLING if self.chat else self.fields.keys()
            fields: dict[str, Any] = {k: self.fields[k] for k in names if k in self.fields}
            fields["prompt"] = done.prompt_ids + done.ids
        else:
            fields = dict(self.fields)
            if self.chat:
                messages = self._value("messages", list[Raw]) or []
                fields["messages"] = [*messages, {"role": "assistant", "content": done.text}]
                fields |= {"add_generation_prompt": False, "continue_final_message": True}
                fields.pop("max_completion_tokens", None)
            else:
                fields["prompt"] = (self._value("prompt", str) or "") + done.text
        if left is not None:
            fields["max_tokens"] = max(left, 1)
        if minimum := self._value("min_tokens", int):
            fields["min_tokens"] = max(minimum - done.tokens, 0)
        path = CHAT if self.chat and mode == "text" else COMPLETIONS
        return path, msgspec.json.encode({**fields, **self._added(speaks_ids=speaks_ids)})

    def _added(self, *, speaks_ids: bool) -> dict[str, Any]:
        options = {**self._options, "include_usage": True}
        ids = {"return_token_ids": True} if speaks_ids else {}
        return {"stream": True, "stream_options": options, **ids}

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


MAX_EVENT_BYTES = 16 << 20  # the first event has the prompt's token ids
DONE = b"data: [DONE]"
# In a JSON string each quote has a backslash before it, so this matches keys only.
_IDS = re.compile(rb',\s*"(?:prompt_)?token_ids"\s*:\s*(?:\[[\d,\s]*\]|null)')
_PROMPT_IDS = re.compile(rb',\s*"prompt_token_ids"\s*:\s*(?:\[[\d,\s]*\]|null)')
TEXT = "text"  # the channel of an answer's text, in both APIs


class StreamedUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Raw = Raw(b"null")


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None

    def texts(self) -> list[tuple[str, str]]:
        """Its new text, by channel."""
        texts = [(TEXT, self.text)]
        if (delta := self.delta) is not None:
            texts += [(TEXT, delta.content), ("reasoning", delta.reasoning)]
            texts.append(("reasoning_content", delta.reasoning_content))
        return [(channel, text) for channel, text in texts if text]


class _Event(msgspec.Struct):
    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[_Choice] = []
    usage: StreamedUsage | None = None
    error: Raw | None = None
    prompt_token_ids: list[int] | None = None


_decode = msgspec.json.Decoder(_Event).decode
_encode = msgspec.json.Encoder().encode
DIVERGED = "another replica generated another text"
EMPTY_CALLS = (b"null", b"[]")


class PassingAnswer:
    """A streamed answer.

    Attributes:
        begun: the client has a byte of it.
        tokens: that the client has, or their events where the server gives no ids.
        new_tokens: that the last piece brought.
        failure: why this attempt cannot go on; '' while it can.
        ended: all of it has passed.
        mode: how this attempt began.
        finish_reason: of the last choice that ended; '' before.
    """

    def __init__(self, call: GenerationCall) -> None:
        self.begun = self.ended = False
        self.tokens = self.new_tokens = 0
        self.failure = self.finish_reason = ""
        self.usage: StreamedUsage | None = None
        self._call = call
        self.mode: Mode = "first"
        self._id, self._created, self.model = "", 0, ""
        self._rest = b""
        self._texts: dict[tuple[int, str], list[str]] = {}
        self._skip: dict[tuple[int, str], str] = {}
        self._finished: set[int] = set()
        self._ids: list[int] | None = []
        # After each event with text: the ids and the characters until then.
        self._marks: list[tuple[int, int]] = []
        self._length = 0  # of the text
        self._prompt_ids: list[int] | None = None
        self._base_tokens = 0  # of earlier attempts, that this one does not count
        self._calls_tools = False
        self._only_again = False  # a server refused to continue from what the client has

    @property
    def finished(self) -> bool:
        """Every choice has its end, though the stream may lack its last lines."""
        return len(self._finished) >= self._call.choices

    def progress(self) -> ClientProgress:
        """What the client has. Tokens without text yet are generated again, unless it saw their
        ids. With stop strings a server holds back characters: the client has only a part of the
        last tokens' text, with which the next answer begins (`overlap`). The same where a stop
        string is part of the answer, and may have begun in the last characters.
        """
        text = "".join(piece for pieces in self._texts.values() for piece in pieces)
        ids = self._ids
        if ids is None:
            return ClientProgress(text, self.tokens, None, self._prompt_ids)
        if self._call.wants_ids:
            return ClientProgress(text, len(ids), ids, self._prompt_ids)
        held, reread = self._call.held_back, self._call.reread
        for kept, length in reversed(self._marks):
            if length + held + reread <= self._length:
                overlap = self._length - length - held
                return ClientProgress(text, kept, ids[:kept], self._prompt_ids, overlap)
        return ClientProgress(text, 0, [], self._prompt_ids, self._length)

    def request(self, *, speaks_ids: bool, max_model_len: int | None) -> tuple[bytes, bytes] | None:
        """The path and the body of the next attempt; None if the answer cannot be continued."""
        call = self._call
        for channel, text in self._skip.items():  # what was not generated again, the client has
            if text:
                self._texts.setdefault(channel, []).append(text)
                self._length += len(text)
        self._rest, self.failure, self._skip = b"", "", {}
        if not self.begun:
            self.mode = "first"
            self._reset()
            return call.first(speaks_ids=speaks_ids)
        done = self.progress()
        mode = call.mode(speaks_ids=speaks_ids, done=done)
        if mode == "again" or self._only_again:
            if self._calls_tools:
                return None
            self.mode = "again"
            self._skip = {channel: "".join(texts) for channel, texts in self._texts.items()}
            self._reset()
            self._finished.clear()
            return call.first(speaks_ids=speaks_ids)
        if mode == "text":
            done.tokens += self._tokens_of_overlap(done)
            self._ids = None  # the tokens of the text so far may be others there
        else:  # the next attempt begins behind the client's ids
            assert done.ids is not None
            has = len(done.text) - done.overlap
            self._ids, self._length = list(done.ids), has
            self._marks = [mark for mark in self._marks if mark[0] <= done.tokens]
            self._texts = {(0, TEXT): [done.text[:has]]}
            self._skip = {(0, TEXT): done.text[has:]} if done.overlap else {}
        self.mode, self._base_tokens, self.tokens = mode, done.tokens, done.tokens
        return call.continued(mode, done, speaks_ids=speaks_ids, max_model_len=max_model_len)

    def _tokens_of_overlap(self, done: ClientProgress) -> int:
        """About how many tokens the overlap has, where the ids also cover what is held back."""
        if not done.overlap or self._ids is None:
            return 0
        characters = self._length + self._call.held_back
        share = math.ceil(done.overlap * len(self._ids) / characters)
        return min(share, len(self._ids) - done.tokens)

    def falls_back(self) -> bool:
        """A server refused to continue: whether to ask for the whole answer again."""
        if self.mode in ("first", "again") or self._calls_tools:
            return False
        self._only_again = True
        return True

    def feed(self, piece: bytes) -> bytes:
        """Take a piece of the body; returns what the client gets now."""
        self.new_tokens = 0
        text = self._rest + piece if self._rest else piece
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        head, end, rest = text.rpartition(b"\n\n")
        self._rest = rest
        if len(rest) > MAX_EVENT_BYTES:
            self.failure = "an event is too long"
        if not end:
            return b""
        passed = []
        for event in head.split(b"\n\n"):
            out = self._event(event)
            if not self.failure:
                passed.append(out)
            if self.failure or self.ended:
                break
        return b"".join(passed)

    def finish(self) -> bytes:
        """The last lines of an answer that has all its tokens."""
        lines = []
        if not self.finished:
            self.finish_reason = "length"
            lines.append(self._made(_Choice(finish_reason="length"), "", ""))
        if self._call.wants_usage and self._prompt_ids is not None:
            lines.append(self._usage(StreamedUsage(len(self._prompt_ids), self.tokens)))
        self.ended = True
        return b"".join([*lines, DONE, b"\n\n"])

    @property
    def complete(self) -> bool:
        """Nothing is left to generate."""
        limit = self._call.max_tokens
        if self._call.choices == 1 and limit is not None and self.progress().tokens >= limit:
            return self.begun
        return self.finished

    def _reset(self) -> None:
        self._ids, self._prompt_ids, self._length = [], None, 0
        self._texts.clear()
        self._marks.clear()
        self.tokens = self._base_tokens = 0

    def _event(self, event: bytes) -> bytes:
        """Read one event; returns what of it passes on."""
        data = event[6:]
        if not event.startswith(b"data: "):  # it has other lines than one
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            data = b"\n".join(lines)
        if not data:
            return event + b"\n\n"  # a comment keeps connections alive
        if data == b"[DONE]":
            self.ended = bool(self._finished)
            if not self.ended:
                self.failure = "the answer ended early"
                return b""
            return DONE + b"\n\n"
        try:
            read = _decode(data)
        except (msgspec.DecodeError, RecursionError):
            self.failure = "an event is not OpenAI's"
            return b""
        if read.error is not None and bytes(read.error) != b"null":
            self.failure = "the server reported an error"
            return b""
        if any(choice.finish_reason in ("abort", "error") for choice in read.choices):
            self.failure = "the server aborted the request"
            return b""
        if not self.begun:
            self._id, self._created, self.model = read.id, read.created, read.model
        if self._prompt_ids is None and self.mode != "text":  # there it is a longer prompt
            first = read.choices[0].prompt_token_ids if read.choices else None
            self._prompt_ids = read.prompt_token_ids or first
        if read.choices:
            return self._on_choices(event, read)
        if read.usage is None:
            return event + b"\n\n"
        usage = read.usage
        if self.mode in ("ids", "text"):
            prompt = len(self._prompt_ids) if self._prompt_ids else usage.prompt_tokens
            if not self._prompt_ids and self.mode == "text":
                prompt = max(usage.prompt_tokens - self._base_tokens, 1)
            usage = StreamedUsage(prompt, self._base_tokens + usage.completion_tokens)
        self.usage = usage
        if not self._call.wants_usage:
            return b""
        return self._usage(usage) if self.mode in ("ids", "text") else self._renamed(event, read)

    def _on_choices(self, event: bytes, read: _Event) -> bytes:
        remade = self.mode == "ids" and self._call.chat
        empty, made = self.mode != "first", []
        for choice in read.choices:
            texts, cut = choice.texts(), False
            brought = bool(texts)
            if self._skip:
                texts, cut = self._skipped(choice, texts)
                if self.failure:
                    return b""
            self._note(choice, texts, brought=brought)
            tools = choice.delta is not None and bytes(choice.delta.tool_calls) not in EMPTY_CALLS
            self._calls_tools |= tools
            if texts or tools or choice.finish_reason or (choice.token_ids and not cut):
                empty = False
            if choice.finish_reason:
                self._finished.add(choice.index)
                self.finish_reason = choice.finish_reason
            remade |= cut
            made += [self._made(choice, name, text) for name, text in texts or [("", "")]]
        if empty:
            return b""
        self.begun = True
        return b"".join(made) if remade else self._renamed(event, read)

    def _note(self, choice: _Choice, texts: list[tuple[str, str]], *, brought: bool) -> None:
        """Count what is new for the client: a choice's ids and `texts`. `brought`: it has any text,
        perhaps none that is new.
        """
        ids = choice.token_ids
        if ids is None:
            if brought:
                self._ids = None
                self.new_tokens += bool(texts)
                self.tokens += 1
        elif ids and (self._ids is not None or texts):
            if self._ids is not None:
                self._ids += ids
            self.new_tokens += len(ids)
            self.tokens += len(ids)
        for name, text in texts:
            self._texts.setdefault((choice.index, name), []).append(text)
            self._length += len(text)
        if self._ids is not None and texts:
            if not self._call.held_back and not self._call.reread:
                self._marks.clear()
            self._marks.append((len(self._ids), self._length))

    def _skipped(
        self, choice: _Choice, texts: list[tuple[str, str]]
    ) -> tuple[list[tuple[str, str]], bool]:
        """Where an answer is repeated: the texts without what the client has, and whether that
        changed them.
        """
        left, changed = [], False
        for name, text in texts:
            channel = choice.index, name
            had = self._skip.get(channel, "")
            same = min(len(had), len(text))
            if had[:same] != text[:same]:
                self.failure = DIVERGED
                return [], True
            if had:
                changed = True
                self._skip[channel] = had[same:]
                self._texts.setdefault(channel, []).append(text[:same])
                self._length += same
            if text[same:]:
                left.append((name, text[same:]))
        if choice.finish_reason and any(
            rest for channel, rest in self._skip.items() if channel[0] == choice.index
        ):
            self.failure = DIVERGED
        return left, changed

    def _renamed(self, event: bytes, read: _Event) -> bytes:
        """The event with the answer's id, without what only the gateway asked for."""
        if self.mode != "first" and read.id != self._id:
            event = event.replace(_encode(read.id), _encode(self._id), 1)
        if b'token_ids"' in event:
            if not self._call.wants_ids:
                event = _IDS.sub(b"", event)
            elif self.mode == "ids":
                event = _PROMPT_IDS.sub(b"", event)
        return event + b"\n\n"

    def _made(self, read: _Choice, channel: str, text: str) -> bytes:
        """An event of this answer with some text."""
        choice: dict[str, Any] = {"index": read.index}
        if self._call.chat:
            name = "content" if channel in ("", TEXT) else channel
            choice["delta"] = {name: text} if text else {}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": read.finish_reason}
        if read.stop_reason is not None:
            choice["stop_reason"] = read.stop_reason
        if self._call.wants_ids:
            choice["token_ids"] = read.token_ids
        return self._line({"choices": [choice]})

    def _usage(self, usage: StreamedUsage) -> bytes:
        self.usage = usage
        counts = {
            "prompt_tokens": usage.prompt_tokens,
            "total_tokens": usage.total,
            "completion_tokens": usage.completion_tokens,
        }
        return self._line({"choices": [], "usage": counts})

    def _line(self, fields: dict[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self._call.chat else "text_completion"
        about = {"id": self._id, "object": kind, "created": self._created, "model": self.model}
        return b"data: " + _encode(about | fields) + b"\n\n"
