"""What the recorder reads of requests and answers as they pass: lengths, limits, the first token, the usage.

Bytes in, bytes out, no I/O. Texts are seen and let go; nothing of them is kept. What cannot be read passes unread.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import Raw

MAX_EVENT_BYTES = 1 << 20  # of an event that is not whole yet
MAX_COUNTED_PROMPTS = 1024
MAX_WHOLE_BYTES = 16 << 20  # of a whole answer; a longer one is not counted

_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_PROMPT = re.compile(rb'\s*(?:"[^"\\]*(?:\\.[^"\\]*)*"|\[[^\]]*\])\s*[,\]]')  # of a list of several
_LINE_END = re.compile(rb"\r\n|\n|\r")
_EMPTY = (b'""', b"null", b"[]", b"{}")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for tokens: how many rows the server makes of it, and the limit of each (0: none)."""

    stream: bool
    usage: bool  # whether a streaming client asks for the usage itself
    rows: int
    max_tokens: int


class _Options(msgspec.Struct):
    include_usage: bool | None = None


class _Request(msgspec.Struct):
    prompt: Raw = Raw(b"null")
    stream: bool | None = None
    stream_options: _Options | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


def read_request(body: bytes) -> Asked | None:
    """None for what is no request for tokens: the server will say so itself."""
    try:
        found = msgspec.json.decode(body, type=_Request)
    except (msgspec.DecodeError, RecursionError):
        return None
    rows = _prompts(found.prompt) * max(found.n or 1, 1)
    limit = found.max_completion_tokens or found.max_tokens or 0
    options = found.stream_options
    return Asked(bool(found.stream), bool(options and options.include_usage), rows, max(limit, 0))


def _prompts(prompt: Raw) -> int:
    """A list is one prompt of tokens, or several prompts, of which up to `MAX_COUNTED_PROMPTS` are counted."""
    text = bytes(prompt).lstrip()
    if not text.startswith(b"["):
        return 1
    count, found = 0, _PROMPT.match(text, 1)
    while found and count < MAX_COUNTED_PROMPTS:
        count, found = count + 1, _PROMPT.match(text, found.end())
    return max(count, 1)


def ask_for_usage(body: bytes) -> bytes:
    """The same request, which also asks for the usage. All other values keep their bytes."""
    fields = msgspec.json.decode(body, type=dict[str, Raw])
    options = {}
    if "stream_options" in fields and bytes(fields["stream_options"]).strip() != b"null":
        options = msgspec.json.decode(fields["stream_options"], type=dict[str, Raw])
    fields["stream_options"] = Raw(msgspec.json.encode(options | {"include_usage": Raw(b"true")}))
    return msgspec.json.encode(fields)


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Raw] | None = None

    @property
    def says_something(self) -> bool:
        """Servers announce the role in a chunk of its own, which is no token."""
        delta = self.delta or {}
        return bool(self.text) or any(key != "role" and bytes(value) not in _EMPTY for key, value in delta.items())


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Raw | None = None


class _Whole(msgspec.Struct):
    usage: Usage | None = None


class Reader(Protocol):
    """What reads an answer: pieces go in as they come, and what the client gets comes out."""

    usage: Usage | None
    spoke: bool  # tokens have come
    failed: bool  # the server said so in an answer that had begun well

    def feed(self, piece: bytes) -> bytes: ...

    def end(self) -> bytes: ...


class StreamReader:
    """Reads an event stream. With `strip`, the event that only tells the usage is left out: the client did not ask."""

    def __init__(self, *, strip: bool) -> None:
        self.usage: Usage | None = None
        self.spoke = False
        self.failed = False
        self._strip = strip
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """What can be passed on now: with `strip`, whole events; without, the piece itself."""
        passed = []
        text, at = self._rest + piece, 0
        for end in _EVENT_END.finditer(text):
            if not (self._read(text[at : end.start()]) and self._strip):
                passed.append(text[at : end.end()])
            at = end.end()
        self._rest = text[at:]
        if len(self._rest) > MAX_EVENT_BYTES:
            passed.append(self._rest)
            self._rest = b""
        return b"".join(passed) if self._strip else piece

    def end(self) -> bytes:
        """What is left when the server has ended."""
        rest, self._rest = self._rest, b""
        told = self._read(rest)
        return rest if self._strip and not told else b""

    def _read(self, event: bytes) -> bool:
        """Whether the event tells the usage and nothing else."""
        lines = [line for line in _LINE_END.split(event) if line.startswith(b"data:")]
        try:
            chunk = msgspec.json.decode(b"\n".join(line[5:] for line in lines), type=_Chunk)
        except (msgspec.DecodeError, RecursionError):  # a comment, [DONE], or something of the server's own
            return False
        self.usage = chunk.usage or self.usage
        self.failed |= chunk.error is not None
        self.spoke |= any(choice.says_something for choice in chunk.choices)
        return chunk.usage is not None and not chunk.choices and chunk.error is None


class WholeReader:
    """Reads an answer that is one JSON object, once all of it has passed."""

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.spoke = False
        self.failed = False
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> bytes:
        self._size += len(piece)
        if self._size <= MAX_WHOLE_BYTES:
            self._pieces.append(piece)
        else:
            self._pieces.clear()
        return piece

    def end(self) -> bytes:
        try:
            self.usage = msgspec.json.decode(b"".join(self._pieces), type=_Whole).usage
        except (msgspec.DecodeError, RecursionError):
            self.usage = None
        self._pieces.clear()
        return b""


def split(total: int, rows: int) -> Sequence[int]:
    """`total` over so many rows, as evenly as whole numbers go."""
    share, more = divmod(total, rows)
    return [share + (row < more) for row in range(rows)]
