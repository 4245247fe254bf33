"""One answer out of the pieces of one or more attempts: bytes of replicas in, bytes for the client
out, without I/O.

Events of the first attempt pass as they came, without the token ids and the usage that only the
front asked for. Until one of them brings something of the answer they are held back, so that
another replica can begin anew. Afterwards another replica is asked for the rest, behind the last
token id that certainly ends no earlier or later than its text. What the client has beyond is
generated again and compared; an answer that differs ends with an error. Events are written anew, so
that the client sees one answer: each character, token id, finish reason and usage once.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any

import msgspec
from msgspec import Raw

from toolkit.openai.answers import (
    Answer,
    AnswerChoice,
    AnswerWriter,
    Usage,
    error_event,
    read_answer,
)
from toolkit.openai.errors import ApiError
from toolkit.openai.events import (
    DONE,
    MAX_EVENT_BYTES,
    MAX_EVENT_LINES,
    NOT_OPENAI,
    EventReader,
    data_of,
    lines_of,
)
from toolkit.openai.foreign import UNREADABLE, decoded, is_null
from toolkit.openai.requests import GenerationCall

SPARE_EVENT_BYTES = 256 << 10  # of an event without log probabilities, beside its tokens
BYTES_PER_TOKEN = 16  # of an event: as an id, or as escaped text
SPARE_EVENTS = 1000  # of an attempt, and of tokens, beside those that were asked for
UNKNOWN_CONTEXT = 1 << 20  # tokens, of a server that does not say
DIVERGED = "another replica generated another text"
ENDED_EARLY = "the answer ended early"
ABORTED = "the server aborted the request"
ABORTS = ("abort", "error")  # finish reasons
NAMES = ("id", "created", "model", "system_fingerprint")  # the same in all events of an answer
DELTA = b'.delta"'  # in the type of an event of /v1/responses that brings a token or more
# In a JSON string each quote has a backslash before it, so this matches keys only.
_IDS = re.compile(rb',\s*"(?:prompt_)?token_ids"\s*:\s*(?:\[[\d,\s]*\]|null)')


class _BadAnswerError(Exception):
    """Why an attempt cannot go on."""


class MergedAnswer:
    """An answer on its way to a client, made of what one replica after another sends.

    Attributes:
        begun: the client has something of it.
        ended: all of it has passed.
        failure: why this attempt cannot go on; '' while it can.
        tokens: that the client has, at least: by ids, or by events where the server gives no ids.
        new_tokens: that the last piece brought.
        finish_reason: of the last choice that ended; '' before.
        usage: as the server counted, of the whole answer; None before, and where it cannot be.
    """

    def __init__(self, call: GenerationCall, estimate: int = 1) -> None:
        self.begun = self.ended = False
        self.failure = self.finish_reason = ""
        self.tokens = self.new_tokens = 0
        self.usage: Usage | None = None
        self._call = call
        self._estimate = estimate
        self._writer = AnswerWriter({}, chat=call.chat, begun=range(call.choices))
        self._finished: set[int] = set()  # choices of which the client has the end
        self._usage_sent = False
        self._prompt_ids: list[int] | None = None
        self._ids: list[int] | None = []  # of all choices; None: the server gives none
        self._text = ""  # of the only choice, as the client has it
        self._at = 0  # where the text of this attempt is: before the end while it repeats
        # Where an attempt can begin: behind how many ids, and where their text ends. Each is of an
        # event with text, so these are enough for the characters that a server holds back.
        self._marks = deque([(0, 0)], maxlen=call.held_back + 1)
        self._has_text_alone = True
        # Of an answer that goes on elsewhere, by ids:
        self._goes_on = False
        self._base_tokens = 0  # that this attempt did not bring
        self._begin(UNKNOWN_CONTEXT)

    def _begin(self, context: int) -> None:
        """Prepare for an attempt at a server with this context, in tokens."""
        call = self._call
        self.failure = ""
        self._context = context
        self._held = b""  # events that bring nothing, before the first that does
        # A token may have an event without text, as one of a thought that is not shown.
        self._most_tokens = SPARE_EVENTS + call.choices * self._longest(call.max_tokens)
        self._events_left = self._most_tokens
        self._most_event_bytes = MAX_EVENT_BYTES
        if call.is_read and not call.has_large_events:  # reading one takes time, which others wait
            most = SPARE_EVENT_BYTES + BYTES_PER_TOKEN * context
            self._most_event_bytes = min(most, MAX_EVENT_BYTES)
        self._reader = EventReader(self._most_event_bytes)

    @property
    def is_midway(self) -> bool:
        """A part of an event has come; no engine waits before the rest."""
        return bool(self._reader.rest)

    @property
    def complete(self) -> bool:
        """The client has every token, and what the stream may lack of its last lines is known."""
        call = self._call
        is_counted = self._usage_sent or (self.usage or self._usage_by_ids()) is not None
        return len(self._finished) >= call.choices and (is_counted or not call.wants_usage)

    @property
    def goes_on(self) -> bool:
        """Another replica may take it: the client has nothing yet, or the rest can be asked for by
        ids. Only a greedy answer may repeat text, and none may repeat ids that the client has.
        """
        if not self.begun:
            return True
        if self._ids is None or self._prompt_ids is None:
            return False
        if not (self._has_text_alone and self._call.goes_on_by_ids):
            return False
        kept, end = self._kept()
        if self._call.wants_ids and len(self._ids) > kept:
            return False
        return self._call.greedy or end == len(self._text)

    @property
    def prompt_tokens(self) -> int:
        """As the server counted them, else by their ids, else estimated."""
        if self.usage is not None:
            return self.usage.prompt_tokens
        if self._call.choices == 1 and self._prompt_ids is not None:
            return len(self._prompt_ids)
        return self._estimate

    def request(
        self,
        *,
        speaks_ids: bool = False,
        context: int | None = None,
        default_tokens: int | None = None,
    ) -> tuple[str, bytes]:
        """Return the path and the body of the next attempt. The answer `goes_on`.

        Args:
            speaks_ids: the replica gives and takes token ids; it must where the answer has begun.
            context: its context, in tokens; None: it does not say.
            default_tokens: the most tokens of an answer for which its client names no limit; None:
                that is not known.
        """
        self._begin(context or UNKNOWN_CONTEXT)
        self.usage = None
        if not self.begun:
            self._writer.about = {}
            self._prompt_ids = None
            self._ids = []
            return self._call.first(speaks_ids=speaks_ids)
        assert self._ids is not None
        assert self._prompt_ids is not None
        kept, self._at = self._kept()
        self._marks.clear()
        self._marks.append((kept, self._at))
        self._goes_on = True
        del self._ids[kept:]
        self._base_tokens = kept
        limit = self._call.max_tokens
        if limit is None:
            room = None if context is None else context - len(self._prompt_ids)
            limit = min((most for most in (default_tokens, room) if most is not None), default=None)
        return self._call.rest(self._prompt_ids + self._ids, kept, limit)

    def _kept(self) -> tuple[int, int]:
        """Return behind how many ids another replica goes on, and where their text ends.

        Tokens without text yet are generated again. With stop strings a server holds back
        characters, so the text of its last ids ends behind what the client has. Several ids of one
        event may end inside a character, which would be lost there: a greedy answer goes on before
        such an event.
        """
        return next(mark for mark in reversed(self._marks) if mark[1] <= len(self._text))

    def feed(self, piece: bytes) -> bytes:
        """Take a piece of the body, and return what the client gets now. Sets `failure` if the
        attempt cannot go on behind that.
        """
        self.new_tokens = 0
        passed: list[bytes] = []
        try:
            events = self._reader.feed(piece)
            if self._reader.failure:
                raise _BadAnswerError(self._reader.failure)
            for event in events:
                passed.append(self._event(event) if self._call.is_read else self._unread(event))
                if self.ended:
                    break
        except _BadAnswerError as error:
            self.failure = str(error)
        return b"".join(passed)

    def _unread(self, event: bytes) -> bytes:
        """Pass an event of /v1/responses unread."""
        self.begun = True
        brings = DELTA in event
        self.new_tokens += brings
        self.tokens += brings
        return event

    def _event(self, event: bytes) -> bytes:
        """Read one event, and return what the client gets now."""
        self._events_left -= 1
        if self._events_left < 0:
            raise _BadAnswerError("it has too many events")
        lines = lines_of(event)
        if len(lines) > MAX_EVENT_LINES:
            raise _BadAnswerError(NOT_OPENAI)
        event = b"\n".join(lines)
        data = data_of(lines)
        if not data:
            return event + b"\n\n" if event else b""  # a comment keeps connections alive
        if data == b"[DONE]":
            if not self._finished:
                raise _BadAnswerError(ENDED_EARLY)
            return self.finish()
        try:
            data.decode()  # also where nothing here reads it
            read = read_answer(data)
            if not self._writer.about:
                fields = msgspec.json.decode(data, type=dict[str, Raw])
                self._writer.about = {name: fields[name] for name in NAMES if name in fields}
        except UNREADABLE:
            raise _BadAnswerError(NOT_OPENAI) from None
        self._check(read)
        if self._prompt_ids is None:
            first = read.choices[0].prompt_token_ids if read.choices else None
            self._prompt_ids = read.prompt_token_ids or first
        usage = self._whole_usage(read)
        self.usage = usage or self.usage
        if not read.choices and not is_null(read.usage):
            return self._on_usage(event, usage)
        if self._goes_on:
            return self._rest_of(read, usage)
        brought = [self._count_choice(choice) for choice in read.choices]
        return self._passed(event, begins=any(brought))

    def _check(self, read: Answer) -> None:
        """Raise _BadAnswerError for an event that ends the attempt."""
        most = self._call.choices
        if not is_null(read.error):
            raise _BadAnswerError("the server reported an error")
        if any(choice.finish_reason in ABORTS for choice in read.choices):
            raise _BadAnswerError(ABORTED)
        if len(read.choices) > most or any(choice.index >= most for choice in read.choices):
            raise _BadAnswerError(NOT_OPENAI)

    def _passed(self, event: bytes, *, begins: bool) -> bytes:
        """Return an event of the first attempt as it came. Events are held back until one `begins`
        the answer.
        """
        if b'token_ids"' in event and not self._call.wants_ids:
            event = _IDS.sub(b"", event)
        held = self._held + event + b"\n\n"
        if not self.begun and not begins:
            self._held = held
            if len(held) > self._most_event_bytes:
                raise _BadAnswerError("an event is too long")
            return b""
        self.begun = True
        self._held = b""
        return held

    def _rest_of(self, read: Answer, usage: Usage | None) -> bytes:
        """Return what the client lacks of an event of a later attempt, as an event of this answer.

        Raises _BadAnswerError if the texts differ.
        """
        if not read.choices:
            return b""
        choice = read.choices[0]
        text = choice.new_text
        known = self._text[self._at : self._at + len(text)]
        new = text[len(known) :]
        lacks = self._at + len(text) < len(self._text)
        if not text.startswith(known) or (lacks and choice.finish_reason):
            self._ids = None  # they are not the ids of what the client has
            raise _BadAnswerError(DIVERGED)
        self._count_choice(choice)
        if not (new or choice.finish_reason or self._call.wants_ids):
            return b""
        more: dict[str, Any] = {}
        if choice.stop_reason is not None:
            more["stop_reason"] = choice.stop_reason
        if self._call.wants_ids:
            more["token_ids"] = choice.token_ids or []
        return self._writer.event(choice.index, new, choice.finish_reason, usage, more)

    def _count_choice(self, choice: AnswerChoice) -> bool:
        """Count what an event brought of a choice. Return whether it brought anything."""
        text = choice.new_text
        ids = choice.token_ids
        if choice.beside_text:
            self._has_text_alone = False
        if ids is None and (text or choice.beside_text):
            self._ids = None
        elif ids and self._ids is not None:
            self._ids += ids
        came = bool(text or choice.beside_text) if ids is None else len(ids)
        if self._ids is not None:  # some may have come in an attempt before
            came = max(len(self._ids) - self.tokens, 0)
        self.new_tokens += came
        self.tokens += came
        if self.tokens > self._most_tokens:
            raise _BadAnswerError("it brings more tokens than were asked for")
        if text and self._ids is not None and self._call.choices == 1:
            self._text += text[len(self._text) - self._at :]
            self._at += len(text)
            if len(ids or ()) == 1 or not self._call.greedy:
                self._marks.append((len(self._ids), self._at + self._call.held_back))
        if choice.finish_reason:
            self._finished.add(choice.index)
            self.finish_reason = choice.finish_reason
        return bool(text or ids or choice.beside_text or choice.finish_reason)

    def _on_usage(self, event: bytes, usage: Usage | None) -> bytes:
        """Return what the client gets of an event with the usage alone."""
        if usage is None or not self._call.wants_usage or self._usage_sent:
            return b""  # without one, the last lines bring another
        self._usage_sent = True
        if self._goes_on:
            return self._writer.usage(usage)
        return self._passed(event, begins=True)

    def _whole_usage(self, read: Answer) -> Usage | None:
        """Return the usage of the whole answer, from the attempt's; None if it cannot be true."""
        usage = read.counted
        call = self._call
        if (
            usage is None
            or usage.prompt_tokens > self._context * max(len(call.prompts), 1)
            or usage.completion_tokens > self._longest(call.max_tokens) * call.rows
        ):
            return None
        if not self._goes_on:
            return usage
        prompt = len(self._prompt_ids or ())
        return Usage(prompt, self._base_tokens + usage.completion_tokens)

    def _longest(self, limit: int | None) -> int:
        """Return the most tokens of a choice with this limit."""
        return max(self._context if limit is None else min(limit, self._context), 1)

    def whole(self, content: bytes) -> None:
        """Read an answer in one piece."""
        if not self._call.is_read:
            return
        read = decoded(content, Answer) or Answer()
        reasons = [choice.finish_reason for choice in read.choices if choice.finish_reason]
        if any(reason in ABORTS for reason in reasons):
            self.failure = ABORTED
            return
        self.finish_reason = reasons[0] if reasons else ""
        self.usage = self._whole_usage(read)

    def end(self) -> bytes:
        """End the body, and return what the client gets then. Sets `failure` if the answer is not
        whole.
        """
        rest = bytes(self._reader.rest)
        if not self._call.is_read and (self.begun or rest) and not self.failure:
            self.begun = self.ended = True
            return rest
        if not self.ended:
            self.failure = self.failure or ENDED_EARLY
        return b""

    def error(self, error: ApiError) -> bytes:
        """Return the last lines of an answer that breaks off."""
        return error_event(error) + DONE

    def finish(self) -> bytes:
        """Return the last lines: the usage, if it is wanted, known and not sent, and the end."""
        self.ended = True
        self.usage = self.usage or self._usage_by_ids()
        if not self._call.wants_usage or self._usage_sent or self.usage is None:
            return DONE
        self._usage_sent = True
        return self._writer.usage(self.usage) + DONE

    def _usage_by_ids(self) -> Usage | None:
        """Count the ids of the only prompt and of all tokens; None if they are not known."""
        if self._ids is None or self._prompt_ids is None or len(self._call.prompts) > 1:
            return None
        return Usage(len(self._prompt_ids), len(self._ids))
