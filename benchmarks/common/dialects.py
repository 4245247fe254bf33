"""Servers that speak OpenAI's API in several dialects, for the tests of where an answer may end.

The engine generates tokens that are pieces of UTF-8, some inside characters, each from a hash of
all before it. Its detokenizer does what vLLM's does: it holds back incomplete characters, and as
many characters as a stop string may still need. tests/test_pool_ends.py compares it with that of
Hugging Face's tokenizers. `Replica` serves it by a `StandIn`, and can end the body of its next
answer after any number of bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from benchmarks.common.standin import StandIn, http_answer

MODEL = "dialects"
CONTEXT = 4096
LETTERS = b"abcdefg "
# Whole characters, pairs, and pieces of characters: before, behind, and across their borders.
PIECES: tuple[bytes, ...] = (
    *(bytes([letter]) for letter in LETTERS),
    *(b"ab", b"ca", b" de", "é".encode(), "€".encode(), "a€".encode()),
    *(b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"\xf0\x9f", b"\x98", b"\x80"),
    *(b"a\xc3", b"\xa9b", b"\xac\xe2\x82", b"g\xf0\x9f", b"\x80 "),
)
PLAIN = len(LETTERS)  # tokens below are one character each
FIRST_ID = 100  # ids of the pieces; those below are of prompts
MASK = (1 << 61) - 1


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a server writes a stream.

    Attributes:
        ids: gives and takes token ids, as vLLM does.
        merged: tokens of an event at most; an engine that is faster than its client merges them.
        apart: the end comes in an event of its own, as from SGLang.
        crlf: lines end in CR LF, and comments keep the connection alive.
        default_tokens: of an answer without a limit by its client; 0: what the context has left.
    """

    name: str
    ids: bool = True
    merged: int = 1
    apart: bool = False
    crlf: bool = False
    default_tokens: int = 0


DIALECTS = (
    Dialect("vllm"),
    Dialect("vllm, merged", merged=3),
    Dialect("vllm, short answers", default_tokens=18),
    Dialect("text", ids=False),
    Dialect("text, apart", ids=False, apart=True),
    Dialect("vllm, CRLF", crlf=True),
)


class Detokenizer:
    """The text of ids, as they come, as vLLM's `IncrementalDetokenizer` gives it."""

    def __init__(self, stops: list[str], *, sends_stop: bool) -> None:
        self.text = ""
        self.stopped = ""
        self._stops = stops
        self._sends_stop = sends_stop
        self._hold = 0 if sends_stop else max((len(stop) - 1 for stop in stops), default=0)
        self._pending = b""
        self._sent = 0

    def add(self, token: int) -> None:
        """One more token; `stopped` is the stop string that it completed."""
        self._pending += piece_of(token)
        try:
            new = self._pending.decode()
        except UnicodeDecodeError:  # it ends inside a character
            return
        self._pending = b""
        self.text += new
        for stop in self._stops:
            at = self.text.find(stop, max(1 - len(new) - len(stop) + len(self.text), 0))
            if at >= 0:
                self.stopped = stop
                self.text = self.text[: at + (len(stop) if self._sends_stop else 0)]
                return

    def take(self, *, finished: bool) -> str:
        """The text that was not taken yet."""
        end = len(self.text) - (0 if finished else self._hold)
        if end <= self._sent:
            return ""
        new = self.text[self._sent : end]
        self._sent = end
        return new


def piece_of(token: int) -> bytes:
    return PIECES[token - FIRST_ID]


def tokens_of(text: str) -> list[int]:
    """Ids of a text of which each character is a token."""
    return [
        FIRST_ID + LETTERS.index(letter) if letter in LETTERS else letter % FIRST_ID
        for letter in text.encode()
    ]


@lru_cache(1 << 12)
def _fitting(pending: bytes, *, plain: bool) -> tuple[int, ...]:
    """The tokens that may follow an incomplete character."""
    fitting = []
    for number, piece in enumerate(PIECES[:PLAIN] if plain else PIECES):
        try:
            (pending + piece).decode()
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                continue
        fitting.append(FIRST_ID + number)
    return tuple(fitting)


def generate(prompt: list[int], *, plain: bool) -> Iterator[int]:
    """Tokens without end, each from a hash of all before it."""
    state = 0
    pending = b""
    for token in prompt:
        state = _mixed(state, token)
    behind = prompt[_last_whole(prompt) :]
    pending = b"".join(piece_of(token) for token in behind)
    while True:
        fitting = _fitting(pending, plain=plain)
        token = fitting[state // 7 % len(fitting)]
        pending += piece_of(token)
        if _is_whole(pending):
            pending = b""
        yield token
        state = _mixed(state, token)


def _mixed(state: int, token: int) -> int:
    return (state * 1_000_003 + token + 1) * 6_364_136_223_846_793_005 & MASK


def _is_whole(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _last_whole(prompt: list[int]) -> int:
    """Behind which token of a prompt its text is complete."""
    pending = b""
    last = 0
    for number, token in enumerate(prompt):
        pending = pending + piece_of(token) if token >= FIRST_ID else b""
        if _is_whole(pending):
            pending = b""
            last = number + 1
    return last


class Stream:
    """The events of one answer, as bytes of a dialect."""

    def __init__(self, dialect: Dialect, body: dict[str, Any], *, chat: bool) -> None:
        self._dialect = dialect
        self._body = body
        self._chat = chat
        self._ids = dialect.ids and bool(body.get("return_token_ids"))
        self.prompt = self._prompt()
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        room = CONTEXT - len(self.prompt)
        if limit is None:
            limit = 16 if not chat and "max_tokens" not in body else dialect.default_tokens or room
        self.limit = min(limit, room)

    def content(self) -> bytes:
        dialect = self._dialect
        body = self._body
        stops = body.get("stop") or []
        text = Detokenizer(
            [stops] if isinstance(stops, str) else stops,
            sends_stop=bool(body.get("include_stop_str_in_output")),
        )
        events = []
        if self._chat:
            events.append(self._event({"delta": {"role": "assistant", "content": ""}}, []))
        tokens = generate(self.prompt, plain=not dialect.ids)
        count = 0
        finish = ""
        merged = list[int]()
        while not finish:
            token = next(tokens)
            count += 1
            merged.append(token)
            text.add(token)
            finish = "stop" if text.stopped else "length" if count == self.limit else ""
            if finish or len(merged) > token % dialect.merged:
                new = text.take(finished=bool(finish))
                told = {} if dialect.apart else {"finish_reason": finish or None}
                if text.stopped and not dialect.apart:
                    told["stop_reason"] = text.stopped
                if new or merged or told.get("finish_reason"):
                    events.append(self._event(self._delta(new) | told, merged))
                merged = []
        if dialect.apart:
            events.append(self._event(self._delta("") | {"finish_reason": finish}, []))
        options = body.get("stream_options") or {}
        if options.get("include_usage"):
            usage = {"prompt_tokens": len(self.prompt), "completion_tokens": count}
            usage["total_tokens"] = sum(usage.values())
            events.append(self._line({"choices": [], "usage": usage}))
        whole = b"".join([*events, b"data: [DONE]\n\n"])
        return b": ping\r\n\r\n" + whole.replace(b"\n", b"\r\n") if dialect.crlf else whole

    def _prompt(self) -> list[int]:
        body = self._body
        if not self._chat:
            prompt = body["prompt"]
            return tokens_of(prompt) if isinstance(prompt, str) else list(prompt)
        contents = [one["content"] for one in body["messages"]]
        return [1, *(token for text in contents for token in [2, *tokens_of(text)]), 2]

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if self._chat else {"text": text}

    def _event(self, choice: dict[str, Any], ids: list[int]) -> bytes:
        given: dict[str, Any] = {"index": 0, "finish_reason": None} | choice
        more: dict[str, Any] = {}
        first = not self._told
        if self._ids and ids:
            given["token_ids"] = ids
        if self._ids and first:
            self._told = True
            if self._chat:
                more = {"prompt_token_ids": self.prompt}
            else:
                given["prompt_token_ids"] = self.prompt
        return self._line({"choices": [given]} | more)

    _told = False  # the ids of the prompt

    def _line(self, fields: dict[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        about = {"id": f"r{id(self) % 9973}", "object": kind, "created": 7, "model": MODEL}
        return b"data: " + json.dumps(about | fields, separators=(",", ":")).encode() + b"\n\n"


class Replica:
    """A server of a dialect. The last number of `cuts` is how many bytes of its next answer it
    sends; none: all. Several that share `cuts` are one server for that: only the first attempt of a
    request is cut.
    """

    def __init__(self, dialect: Dialect, cuts: list[int]) -> None:
        self._dialect = dialect
        self._cuts = cuts
        self._contents: dict[tuple[str, str], bytes] = {}
        self.server = StandIn(
            speaks_ids=dialect.ids, model=MODEL, max_model_len=CONTEXT, script=self._answer
        )

    @property
    def longest(self) -> int:
        """Bytes of the body of its longest answer."""
        return max(map(len, self._contents.values()), default=0)

    def _answer(self, path: str, fields: dict[str, Any]) -> bytes:
        stream = Stream(self._dialect, fields, chat="chat" in path)
        if (least := fields.get("min_tokens", 0)) > stream.limit:  # vLLM's words
            text = (
                f"min_tokens must be less than or equal to max_tokens={stream.limit}, got {least}."
            )
            error = json.dumps({"error": {"message": text}}).encode()
            return http_answer(400, b"application/json", error)
        asked = (path, json.dumps(fields))
        content = self._contents.get(asked)
        if content is None:
            if len(self._contents) > 10_000:
                self._contents.clear()
            content = self._contents[asked] = stream.content()
        if self._cuts:
            content = content[: self._cuts.pop()]
        return http_answer(200, b"text/event-stream", content)
