"""Requests to /v1/responses, without I/O: what a front reads of one, and its answer.

A front passes them to servers that have this route (vLLM does), and their answers back unchanged.
An answer cannot go on elsewhere: its events carry numbers and states that only their server knows.
So another replica takes a request only before the first event.

A server keeps the responses that it made, where it keeps any. `MadeResponses` remembers which
replica made which one, for requests that name it; each key sees its own only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from toolkit.endpoints.foreign import UNREADABLE, Count, CountedUsage, Number, decoded
from toolkit.endpoints.sse import data_of
from toolkit.gateway.attempts import NOT_OPENAI, Attempted, Passing
from toolkit.gateway.calls import Prompt, read_object, session_name, understood
from toolkit.gateway.replicas import LiveReplica
from toolkit.serve.errors import ApiError, overloaded

RESPONSES = "/v1/responses"
ABSENT = "no replica of this front has /v1/responses: engine vllm has; ask /v1/chat/completions"
MAX_MADE = 4096  # responses that are remembered for a key
MAX_TURNS = 64  # of the tools that a server calls itself, each with a prompt and an output
OWN_TOOLS = ("function", "custom")  # that the client calls
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
REASONS = {"max_output_tokens": "length", "content_filter": "content_filter"}
_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")
# Fields that become a part of the prompt.
PROMPTS = ("instructions", "tools", "previous_input_messages", "previous_response", "input")
REFUSED = {
    "background": "this front could not count its tokens, nor move it; use 'stream'",
    "conversation": "this front does not know which replica has it; use 'previous_response_id'",
    "request_id": "the server names its responses: a chosen name may be that of another",
}


class _Tool(msgspec.Struct):
    type: str = ""


class _Asked(msgspec.Struct):
    """The fields that are understood here. null is absent, as for the servers behind."""

    model: str | None = None
    stream: bool | None = None
    max_output_tokens: Number | None = None
    priority: Number | None = None
    input: str | list[Raw] | None = None
    instructions: str | None = None
    tools: list[_Tool] | None = None
    background: bool | None = None
    conversation: Raw = Raw(b"null")
    request_id: str | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None


_decode_asked = msgspec.json.Decoder(_Asked).decode


@dataclass(frozen=True, slots=True)
class MadeResponse:
    """A response, the replica that made it, and the tokens of its prompt and its output."""

    replica: LiveReplica
    tokens: int


class MadeResponses:
    """The last responses of each key, by their ids."""

    def __init__(self, limit: int = MAX_MADE) -> None:
        self._limit = limit
        self._made: dict[str, dict[str, MadeResponse]] = {}  # by the key's name

    def add(self, key: str, response_id: str, made: MadeResponse) -> None:
        if not _ID.fullmatch(response_id):
            return
        known = self._made.setdefault(key, {})
        known.pop(response_id, None)
        known[response_id] = made
        if len(known) > self._limit:
            del known[next(iter(known))]

    def find(self, key: str, response_id: str, param: str | None = None) -> MadeResponse:
        """Raises `ApiError` for a response that this key did not get, or that is out of reach."""
        made = self._made.get(key, {}).get(response_id)
        name = response_id[:80]
        code = "response_not_found"
        if made is None:
            text = f"there is no response '{name}' among the last {self._limit} of this key"
            raise ApiError(text, status=404, param=param, code=code)
        state = made.replica.state
        if state == "gone":
            text = f"the replica that made response '{name}' is gone, and the response with it"
            raise ApiError(text, status=404, param=param, code=code)
        if state != "up":
            raise overloaded(f"the replica that made response '{name}' is not up: {state}")
        return made


class ResponsesCall:
    """A request for a response. Raises `ApiError` for a body that is no JSON object, for a field of
    another type than it should be, and for what a front cannot do (`REFUSED`).

    Attributes:
        earlier: the response that it continues, once it is found.
        prompt: bytes of all that its prompt is made of; None where that is not all of it.
        copies, choices, rows: as `toolkit.gateway.calls.GenerationCall`.
        max_tokens: of the output; None: the server's default.
        turns: how many prompts and outputs it may have.
        absent: what its client is told where no replica has the route.
    """

    copies = 1
    choices = 1
    rows = 1

    def __init__(self, body: bytes, session: str = "") -> None:
        self.fields = read_object(body)
        asked = understood(self.fields, _decode_asked)
        for name, why in REFUSED.items():
            if getattr(asked, name) not in (None, False, Raw(b"null")):
                raise ApiError(f"'{name}' is not served here: {why}", param=name)
        if asked.input is None:
            raise ApiError("'input' should be a text or a list of items", param="input")
        self.stream = bool(asked.stream)
        self.model = asked.model or ""
        self.max_tokens = asked.max_output_tokens
        self.priority = asked.priority or 0
        self.session = session_name(session or asked.prompt_cache_key or "")
        self.stored = asked.store is not False
        self.previous_id = asked.previous_response_id or ""
        self.earlier: MadeResponse | None = None
        own = all(tool.type in OWN_TOOLS for tool in asked.tools or ())
        self.turns = 1 if own else MAX_TURNS
        text = b"".join(bytes(self.fields[name]) for name in PROMPTS if name in self.fields)
        self.prompts: list[Prompt] = [text]
        self.prompt = text if own and not self.previous_id else None

    @property
    def absent(self) -> str:
        return "" if self.earlier else ABSENT


class _Reason(msgspec.Struct):
    reason: str = ""


class _Counted(msgspec.Struct):
    input_tokens: Count = 0
    output_tokens: Count = 0


class _Response(msgspec.Struct):
    id: str = ""
    status: str = ""
    usage: Raw = Raw(b"null")
    incomplete_details: _Reason | None = None


class _Event(msgspec.Struct):
    type: str = ""
    delta: Raw = Raw(b"null")
    text: Raw = Raw(b"null")
    arguments: Raw = Raw(b"null")
    response: Raw = Raw(b"null")
    sequence_number: Count = 0


_decode = msgspec.json.Decoder(_Event).decode


class PassingResponse(Passing):
    """An answer of /v1/responses on its way.

    Attributes:
        finished: the last event has passed. The end of the body is the end of the answer.
    """

    mode = "first"
    countable = True
    unseen_tokens = 0

    def __init__(self, call: ResponsesCall, estimate: int = 1) -> None:
        super().__init__(estimate)
        self.finished = False
        self._call = call
        self._delta_bytes = self._done_bytes = 0  # the same text, in pieces and as a whole
        self._number = -1  # of the last event

    @property
    def goes_on(self) -> bool:
        """Another replica may take the request."""
        return not self.begun

    @property
    def complete(self) -> bool:
        return self.finished

    @property
    def counted_tokens(self) -> int:
        """Tokens that the client has, at least: an event has one or more."""
        return self.tokens

    def request(self, at: Attempted) -> tuple[bytes, bytes] | None:
        """The path and the body of the next attempt; None if there can be none."""
        if self.begun:
            return None
        self._begin(at, self._call.max_tokens, self._call.turns)
        return RESPONSES.encode(), msgspec.json.encode(self._call.fields)

    def falls_back(self) -> bool:
        return False

    def whole(self, content: bytes) -> None:
        """Read an answer in one piece."""
        read = decoded(content, _Response) or _Response()
        if read.status == "cancelled":
            self.failure = "the server aborted the request"
            return
        self._end(read)
        self.text_bytes = len(content)

    def ends_here(self) -> bool:
        """The body has ended; returns whether the answer is whole."""
        return self.finished

    def finish(self) -> bytes:
        """The last lines of an answer that is whole."""
        return b""

    def error(self, error: ApiError) -> bytes:
        """The last event of an answer that breaks off, as OpenAI's and the clients' exception."""
        about = {"message": error.message, "code": error.code, "param": error.param}
        fields: dict[str, Any] = {"type": "error", "sequence_number": self._number + 1, **about}
        fields["error"] = {"type": error.kind, **about}
        return b"event: error\ndata: " + msgspec.json.encode(fields) + b"\n\n"

    def _counted(self, given: Raw) -> CountedUsage | None:
        usage = decoded(given, _Counted)
        call = self._call
        most = self._longest(call.max_tokens) if call.turns == 1 else self._context * call.turns
        if (
            usage is None
            or not 1 <= usage.input_tokens <= self._context * call.turns
            or usage.output_tokens > most
        ):
            return None
        return CountedUsage(usage.input_tokens, usage.output_tokens)

    def _event(self, event: bytes) -> bytes:
        """Read one event, which passes as it came."""
        data = data_of(event)
        if not data or data == b"[DONE]":
            return event
        try:
            data.decode()  # also where nothing here reads it
            read = _decode(data)
        except UNREADABLE:
            self.failure = NOT_OPENAI
            return b""
        if read.type == "error" and not self.begun:
            self.failure = "the server reports an error"
            return b""
        self.begun = True
        self._number = read.sequence_number
        if read.type.endswith(".delta"):
            self._delta_bytes += _length(read.delta)
            self.tokens += 1
            self.new_tokens += 1
            self._idle_events = 0
        else:
            self._done_bytes += _length(read.text) + _length(read.arguments)
        self.text_bytes = max(self._delta_bytes, self._done_bytes)
        if read.type in ENDS:
            self._end(decoded(read.response, _Response) or _Response())
        return event

    def _end(self, response: _Response) -> None:
        self.finished = True
        self.response_id = response.id
        self.usage = self.possible(response.usage)
        reason = response.incomplete_details.reason if response.incomplete_details else ""
        ended = "stop" if response.status == "completed" else response.status or "error"
        self.finish_reason = REASONS.get(reason, ended)


def _length(text: Raw) -> int:
    """Bytes of a text; 0 for anything else."""
    return len((decoded(text, str) or "").encode()) if bytes(text) != b"null" else 0
