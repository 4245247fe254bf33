"""A streamed answer, without I/O: pieces of each attempt in, bytes for the client out.

Events of the first attempt pass as they came, without the token ids and the usage that only the
gateway asked for. Those of a later one get the id of the first, so that the client sees one answer:
each character, token id, finish reason and usage once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from toolkit.endpoints.foreign import UNREADABLE, Count, CountedUsage, decoded
from toolkit.endpoints.sse import data_of, lines_of
from toolkit.gateway.attempts import (
    BYTES_PER_TOKEN,
    MAX_EVENT_BYTES,
    NOT_OPENAI,
    SPARE_EVENT_BYTES,
    Attempted,
    Passing,
)
from toolkit.gateway.calls import ClientProgress, GenerationCall, Mode
from toolkit.serve.errors import ApiError, error_body

MARKS = 4  # that are kept where no stop string can begin in the text
DONE = b"data: [DONE]"
# In a JSON string each quote has a backslash before it, so this matches keys only.
_IDS = re.compile(rb',\s*"(?:prompt_)?token_ids"\s*:\s*(?:\[[\d,\s]*\]|null)')
_PROMPT_IDS = re.compile(rb',\s*"prompt_token_ids"\s*:\s*(?:\[[\d,\s]*\]|null)')
TEXT = "text"  # the channel of an answer's text, in both APIs


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Raw = Raw(b"null")


class _Choice(msgspec.Struct):
    index: Count = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[Count] | None = None
    prompt_token_ids: list[Count] | None = None

    def texts(self) -> list[tuple[str, str]]:
        """Its new text, by channel."""
        texts = [(TEXT, self.text)]
        if (delta := self.delta) is not None:
            texts += [(TEXT, delta.content), ("reasoning", delta.reasoning)]
            texts.append(("reasoning_content", delta.reasoning_content))
        return [(channel, text) for channel, text in texts if text]


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Raw = Raw(b"null")
    error: Raw = Raw(b"null")
    prompt_token_ids: list[Count] | None = None


class _WholeChoice(msgspec.Struct):
    finish_reason: str | None = None


class _Whole(msgspec.Struct):
    choices: list[_WholeChoice] = []
    usage: Raw = Raw(b"null")


_decode = msgspec.json.Decoder(_Event).decode
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_encode = msgspec.json.Encoder().encode
DIVERGED = "another replica generated another text"
EMPTY_CALLS = (b"null", b"[]")
NAMES = ("id", "created", "model", "system_fingerprint")  # the same in all events of an answer


class _Mark(NamedTuple):
    """The ids and the characters of an answer after an event with text."""

    ids: int
    length: int
    is_sure: bool  # the event has one id: its text ends where the id ends


class _Channel:
    """The pieces of an answer's text in one channel, and how far an attempt has repeated them."""

    __slots__ = ("pieces", "skip")

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.skip = ""  # what is still to be generated again

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class PassingAnswer(Passing):
    """A streamed answer.

    Attributes:
        mode: how this attempt began.
    """

    goes_on = True  # another replica may go on with it

    def __init__(self, call: GenerationCall, estimate: int = 1) -> None:
        super().__init__(estimate)
        self._most_tokens = 0  # of any attempt
        self.mode: Mode = "first"
        self._call = call
        self._about: dict[str, Raw] = {}  # what all events of the answer say of it
        self._channels: dict[tuple[int, str], _Channel] = {}
        self._roles: set[int] = set()  # choices of which the client has the role
        self._finished: set[int] = set()  # choices of which the client has the end
        self._ended_here: set[int] = set()  # choices that ended in this attempt
        self._usage_sent = False
        self._ids: list[int] | None = []
        self._given_ids: dict[int, list[int]] = {}  # that the client saw, by choice
        self._skip_ids: dict[int, list[int]] = {}  # of these, what is still to be generated again
        self._marks: list[_Mark] = []  # after each event with text
        self._length = 0  # of the text
        self._prompt_ids: list[int] | None = None
        self._had_ids = 0  # before the last answer went on by ids
        self._base_tokens = 0  # of earlier attempts, that this one does not count
        self._calls_tools = False
        self._only_again = False  # a server refused to continue from what the client has

    @property
    def finished(self) -> bool:
        """The client has the end of every choice, though the stream may lack its last lines."""
        return len(self._finished) >= self._call.choices

    @property
    def complete(self) -> bool:
        """The client has every token."""
        limit = self._call.max_tokens
        if self._call.choices == 1 and limit is not None and self.progress().tokens >= limit:
            return self.begun
        return self.finished

    @property
    def countable(self) -> bool:
        """The last lines can be made here: no usage is wanted, or it is known."""
        known = self._usage_sent or self.usage is not None or self._counts_ids
        return not self._call.wants_usage or known

    @property
    def counted_tokens(self) -> int:
        """Tokens that the client has, at least: by ids, else by events."""
        return max(self._most_tokens, self.tokens)

    @property
    def unseen_tokens(self) -> int:
        """Tokens that bring no text, where no ids are counted: the last of a choice may be one."""
        return len(self._finished) if self._ids is None else 0

    @property
    def _counts_ids(self) -> bool:
        """The ids of all tokens of the answer are known, and those of its only prompt."""
        if self._ids is None or self._prompt_ids is None or len(self._call.prompts) > 1:
            return False
        repeats = any(channel.skip for channel in self._channels.values())
        repeats |= any(self._skip_ids.values())
        return not repeats and self._finished <= self._ended_here

    @property
    def prompt_tokens(self) -> int:
        """As the server counted them, else by their ids, else estimated."""
        if self.usage is not None:
            return self.usage.prompt_tokens
        known = self._call.choices == 1 and self._prompt_ids is not None
        return len(self._prompt_ids or ()) if known else self._estimate

    def progress(self) -> ClientProgress:
        """What the client has. Tokens without text yet are generated again. With stop strings a
        server holds back characters: the client has only a part of the last tokens' text, with
        which the next answer begins (`overlap`). The same where a stop string is part of the
        answer, and may have begun in the last characters.
        """
        text = "".join(channel.text for channel in self._channels.values())
        ids = self._ids
        if ids is None:
            return ClientProgress(text, self.tokens, None, self._prompt_ids)
        kept, overlap = self._kept()
        repeated = len(self._given_ids.get(0, ())) > kept
        return ClientProgress(text, kept, ids[:kept], self._prompt_ids, overlap, repeated)

    def _kept(self) -> tuple[int, int]:
        """After how many ids to go on, and how many characters behind them the client has.

        Several ids of one event may end inside a character, which would be lost there. So a greedy
        answer goes on before such an event: its text is generated again and compared.
        """
        held = self._call.held_back
        reread = self._call.reread
        compared = False
        for mark in reversed(self._marks):
            overlap = self._length - mark.length - held
            if overlap < reread or (compared and overlap <= 0):
                continue
            if mark.is_sure or not self._call.greedy or compared:
                return mark.ids, overlap
            compared = True
        return 0, self._length

    def request(self, at: Attempted) -> tuple[bytes, bytes] | None:
        """The path and the body of the next attempt; None if the answer cannot be continued."""
        call = self._call
        for channel in self._channels.values():  # what was not generated again, the client has
            if channel.skip:
                channel.pieces.append(channel.skip)
                self._length += len(channel.skip)
                channel.skip = ""
        self._most_tokens = self.counted_tokens
        self._begin(at, call.max_tokens, call.choices)
        if not call.has_large_events:  # reading one takes time, which others wait
            most = SPARE_EVENT_BYTES + BYTES_PER_TOKEN * self._context
            self._most_event_bytes = min(most, MAX_EVENT_BYTES)
        self._ended_here.clear()
        self._skip_ids = {}
        if not self.begun:
            self.mode = "first"
            self._reset()
            self._given_ids.clear()
            return call.first(speaks_ids=at.speaks_ids)
        if self.complete and not call.greedy:
            if not self.finished or self.countable:
                return None
            self.mode = "count"
            return call.counting()
        done = self.progress()
        limit = self._limit(at)
        mode = call.mode(speaks_ids=at.speaks_ids, done=done, knows_limit=limit is not None)
        channels = {name for _, name in self._channels}
        if mode == "again" or self._only_again or self.complete or channels - {TEXT}:
            return self._again(at)
        if mode == "text":
            done.tokens += self._tokens_of_overlap(done)
            self._ids = None  # the tokens of the text so far may be others there
        else:  # the next attempt begins behind the client's ids
            assert done.ids is not None
            if limit is None and at.max_model_len is not None:
                limit = at.max_model_len - len(done.prompt_ids or ())
            has = len(done.text) - done.overlap
            self._had_ids = len(self._ids or ())
            self._ids = list(done.ids)
            self._length = has
            self._marks = [mark for mark in self._marks if mark.ids <= done.tokens]
            channel = self._channels[0, TEXT]
            channel.pieces = [done.text[:has]]
            channel.skip = done.text[has:]
            self._skip_ids = {0: self._given_ids.get(0, [])[done.tokens :]}
        self.mode = mode
        self._base_tokens = done.tokens
        self.tokens = done.tokens
        return call.continued(mode, done, speaks_ids=at.speaks_ids, limit=limit)

    def falls_back(self) -> bool:
        """A server refused to continue: whether to ask for the whole answer again."""
        if self.mode in ("first", "again", "count") or self._calls_tools:
            return False
        self._only_again = True
        return True

    def whole(self, content: bytes) -> None:
        """Read an answer in one piece."""
        read = decoded(content, _Whole) or _Whole()
        reasons = [choice.finish_reason for choice in read.choices if choice.finish_reason]
        if any(reason in ("abort", "error") for reason in reasons):
            self.failure = "the server aborted the request"
            return
        self.finish_reason = reasons[0] if reasons else ""
        self.usage = self.possible(read.usage)
        self.text_bytes = len(content)

    def ends_here(self) -> bool:
        """The body has ended; returns whether the answer is whole."""
        return self.ended

    def error(self, error: ApiError) -> bytes:
        """The last lines of an answer that breaks off."""
        return b"data: " + error_body(error) + b"\n\n" + DONE + b"\n\n"

    def finish(self) -> bytes:
        """The last lines of an answer that has all its tokens."""
        made = b""
        if not self.finished:
            self.finish_reason = "length"
            made = self._made(_Choice(finish_reason="length"), "", "", [])
        return made + self._last_lines()

    def _last_lines(self) -> bytes:
        """The usage, where it is wanted and known and was not sent; and the end."""
        self.ended = True
        lines = b""
        if self._call.wants_usage and not self._usage_sent:
            if self.usage is None and self._counts_ids:
                self.usage = CountedUsage(len(self._prompt_ids or ()), len(self._ids or ()))
            if self.usage is not None:
                lines = self._usage(self.usage)
        return lines + DONE + b"\n\n"

    def _limit(self, at: Attempted) -> int | None:
        """The most tokens of the whole answer; None where only the server knows."""
        limit = self._call.max_tokens
        if limit is not None or at.default_tokens is None:
            return limit
        room = None
        if at.max_model_len is not None and self._prompt_ids is not None:
            room = at.max_model_len - len(self._prompt_ids)
        return at.default_tokens if room is None else min(at.default_tokens, room)

    def _again(self, at: Attempted) -> tuple[bytes, bytes] | None:
        """The request for the whole answer, of which the client has the beginning."""
        if self._calls_tools:
            return None
        self.mode = "again"
        for channel in self._channels.values():
            channel.skip = channel.text
            channel.pieces = []
        self._skip_ids = {index: list(ids) for index, ids in self._given_ids.items()}
        self._reset()
        return self._call.first(speaks_ids=at.speaks_ids)

    def _reset(self) -> None:
        self._ids = []
        self._prompt_ids = None
        self._length = 0
        if self.mode == "first":
            self._channels.clear()
        self._marks.clear()
        self.tokens = self._base_tokens = 0

    def _tokens_of_overlap(self, done: ClientProgress) -> int:
        """About how many tokens the overlap has, where the ids also cover what is held back."""
        if not done.overlap or self._ids is None:
            return 0
        characters = self._length + self._call.held_back
        share = math.ceil(done.overlap * len(self._ids) / characters)
        return min(share, len(self._ids) - done.tokens)

    def _event(self, event: bytes) -> bytes:
        event = b"\n".join(lines_of(event))
        data = data_of(event)
        if not data:
            return event + b"\n\n" if event else b""  # a comment keeps connections alive
        if data == b"[DONE]":
            return self._on_done()
        try:
            data.decode()  # also where nothing here reads it
            read = _decode(data)
            whole = not self.begun or self.mode != "first"  # else it passes as it came
            fields = _decode_fields(data) if whole else {}
        except UNREADABLE:
            self.failure = NOT_OPENAI
            return b""
        if bytes(read.error) != b"null":
            self.failure = "the server reported an error"
            return b""
        if len(read.choices) > self._call.choices:
            self.failure = NOT_OPENAI
            return b""
        if any(choice.finish_reason in ("abort", "error") for choice in read.choices):
            self.failure = "the server aborted the request"
            return b""
        if any(choice.index >= self._call.choices for choice in read.choices):
            self.failure = NOT_OPENAI
            return b""
        if self.mode == "count":
            return self._on_count(read)
        if not self.begun:
            self._about = {name: fields[name] for name in NAMES if name in fields}
        if self._prompt_ids is None and self.mode != "text":  # there it is a longer prompt
            first = read.choices[0].prompt_token_ids if read.choices else None
            self._prompt_ids = read.prompt_token_ids or first
        if read.choices:
            return self._on_choices(event, fields, read)
        if bytes(read.usage) == b"null":
            return event + b"\n\n" if self.mode == "first" else b""
        return self._on_usage(event, fields, read)

    def _on_done(self) -> bytes:
        if not self._ended_here:
            self.failure = "the answer ended early"
            return b""
        return self._last_lines()

    def _on_usage(self, event: bytes, fields: dict[str, Raw], read: _Event) -> bytes:
        """An event with the usage alone."""
        usage = self._whole_usage(read.usage)
        if usage is None:
            return b""  # the last line brings another
        self.usage = usage
        self._idle_events = 0
        if not self._call.wants_usage or self._usage_sent:
            return b""
        if self.mode in ("ids", "text"):
            return self._usage(usage)
        self._usage_sent = True
        return self._renamed(event, fields, None)

    def _on_count(self, read: _Event) -> bytes:
        """An event of an answer that was asked for its usage alone."""
        usage = self.possible(read.usage)
        if usage is None or read.choices:
            return b""
        self.usage = CountedUsage(usage.prompt_tokens, self.counted_tokens)
        return self._last_lines()

    def _counted(self, given: Raw) -> CountedUsage | None:
        usage = decoded(given, CountedUsage)
        call = self._call
        prompts = max(len(call.prompts), 1)
        if (
            usage is None
            or usage.prompt_tokens > self._context * prompts
            or usage.completion_tokens > self._longest(call.max_tokens) * call.rows
        ):
            return None
        return usage

    def _whole_usage(self, given: Raw) -> CountedUsage | None:
        """The usage of the whole answer, from the attempt's."""
        usage = self.possible(given)
        if usage is None or self.mode not in ("ids", "text"):
            return usage
        prompt = len(self._prompt_ids) if self._prompt_ids else usage.prompt_tokens
        if not self._prompt_ids and self.mode == "text":
            prompt = max(usage.prompt_tokens - self._base_tokens, 1)
        return CountedUsage(prompt, self._base_tokens + usage.completion_tokens)

    def _on_choices(self, event: bytes, fields: dict[str, Raw], read: _Event) -> bytes:
        remade = self.mode == "ids" and self._call.chat
        passes = self.mode == "first"
        made = []
        for choice in read.choices:
            ended_before = choice.index in self._finished and self.mode != "first"
            texts, ids, cut = self._new(choice)
            if (texts and ended_before) or self._lags(choice, ids):
                self.failure = DIVERGED
            if self.failure:
                return b""
            brought = bool(choice.texts())
            self._note(choice, texts, ids, brought=brought)
            tools = choice.delta is not None and bytes(choice.delta.tool_calls) not in EMPTY_CALLS
            self._calls_tools |= tools
            if brought or choice.token_ids or tools or choice.finish_reason:
                self._idle_events = 0
            if choice.finish_reason:
                self._ended_here.add(choice.index)
                self._finished.add(choice.index)
                self.finish_reason = choice.finish_reason
            if ended_before:  # the client has its end: nothing of it is new
                remade = True
                continue
            role = choice.delta is not None and bool(choice.delta.role)
            role &= choice.index not in self._roles
            passes |= bool(texts or tools or choice.finish_reason or ids or role)
            remade |= cut
            made += [
                self._made(choice, name, text, ids if number == 0 else [])
                for number, (name, text) in enumerate(texts or [("", "")])
            ]
        usage = self._whole_usage(read.usage)
        self.usage = usage or self.usage
        if not passes or (remade and not made):
            return b""
        self.begun = True
        out = b"".join(made) if remade else self._renamed(event, fields, usage)
        self._roles |= {one.index for one in read.choices if one.delta and one.delta.role}
        return out

    def _new(self, choice: _Choice) -> tuple[list[tuple[str, str]], list[int] | None, bool]:
        """What of a choice is new for the client: its texts and ids; and whether anything is not.

        Sets `failure` where an answer that is repeated differs from what the client has.
        """
        texts = choice.texts()
        ids = choice.token_ids
        cut = False
        repeated = self._skip_ids.get(choice.index)
        if repeated and ids:
            same = min(len(repeated), len(ids))
            if repeated[:same] != ids[:same]:
                self.failure = DIVERGED
                return [], None, True
            self._skip_ids[choice.index] = repeated[same:]
            ids = ids[same:]
            cut = True
        left = []
        for name, text in texts:
            channel = self._channels.get((choice.index, name))
            had = channel.skip if channel is not None else ""
            if channel is None or not had:
                left.append((name, text))
                continue
            same = min(len(had), len(text))
            if had[:same] != text[:same]:
                self.failure = DIVERGED
                return [], None, True
            cut = True
            channel.skip = had[same:]
            channel.pieces.append(text[:same])
            self._length += same
            if text[same:]:
                left.append((name, text[same:]))
        if choice.finish_reason and any(
            channel.skip for (index, _), channel in self._channels.items() if index == choice.index
        ):
            self.failure = DIVERGED
        return left, ids, cut

    def _lags(self, choice: _Choice, new_ids: list[int] | None) -> bool:
        """Ids came that the client lacks, before all the text that it has behind those before them:
        the server began inside a character, and gives other texts for the same ids.
        """
        ahead = bool(new_ids)
        if not self._call.wants_ids:
            count = len(self._ids or ()) + len(choice.token_ids or ())
            ahead = self.mode == "ids" and count > self._had_ids
        return ahead and any(
            channel.skip for (index, _), channel in self._channels.items() if index == choice.index
        )

    def _note(
        self,
        choice: _Choice,
        texts: list[tuple[str, str]],
        new_ids: list[int] | None,
        *,
        brought: bool,
    ) -> None:
        """Count what an attempt brought: a choice's ids, and the `texts` and `new_ids` that are new
        for the client. `brought`: it has any text, perhaps none that is new.
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
        if new_ids and self._call.wants_ids:
            self._given_ids.setdefault(choice.index, []).extend(new_ids)
        for name, text in texts:
            self._channels.setdefault((choice.index, name), _Channel()).pieces.append(text)
            self._length += len(text)
            self.text_bytes += len(text.encode())
        if self._ids is not None and brought:
            if not self._call.held_back and not self._call.reread:
                del self._marks[:-MARKS]
            self._marks.append(_Mark(len(self._ids), self._length, len(ids or ()) == 1))

    def _renamed(self, event: bytes, fields: dict[str, Raw], usage: CountedUsage | None) -> bytes:
        """The event as one of this answer, without what only the gateway asked for."""
        if self.mode != "first":
            named: dict[str, Any] = {**self._about}
            named |= {name: value for name, value in fields.items() if name not in NAMES}
            if self.mode in ("ids", "text"):
                named.pop("usage", None)
            if usage is not None:
                named["usage"] = _counts(usage)
            if b'"role"' in event:
                named["choices"] = _without_roles(fields["choices"], self._roles)
            event = _PROMPT_IDS.sub(b"", b"data: " + _encode(named))
        if b'token_ids"' in event and not self._call.wants_ids:
            event = _IDS.sub(b"", event)
        return event + b"\n\n"

    def _made(self, read: _Choice, channel: str, text: str, ids: list[int] | None) -> bytes:
        """An event of this answer with some text."""
        choice: dict[str, Any] = {"index": read.index}
        if self._call.chat:
            name = "content" if channel in ("", TEXT) else channel
            choice["delta"] = {name: text} if text else {}
            if read.delta is not None and read.delta.role and read.index not in self._roles:
                choice["delta"]["role"] = read.delta.role
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": read.finish_reason}
        if read.stop_reason is not None:
            choice["stop_reason"] = read.stop_reason
        if self._call.wants_ids:
            choice["token_ids"] = ids
        return self._line({"choices": [choice]})

    def _usage(self, usage: CountedUsage) -> bytes:
        self.usage = usage
        self._usage_sent = True
        return self._line({"choices": [], "usage": _counts(usage)})

    def _line(self, fields: dict[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self._call.chat else "text_completion"
        return b"data: " + _encode({**self._about, "object": kind, **fields}) + b"\n\n"


def _counts(usage: CountedUsage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
    }


def _without_roles(choices: Raw, told: Container[int]) -> list[dict[str, Any]]:
    """Choices of an event without the roles in their deltas of which the client was `told`."""
    listed: list[dict[str, Any]] = [*msgspec.json.decode(choices, type=list[dict[str, Raw]])]
    for choice in listed:
        if decoded(choice.get("index", Raw(b"0")), int) not in told:
            continue
        delta = decoded(choice.get("delta", Raw(b"null")), dict[str, Raw])
        if delta is not None:
            delta.pop("role", None)
            choice["delta"] = delta
    return listed
