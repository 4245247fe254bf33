"""What every answer on its way has, whatever its route: an attempt's events, and their bounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from msgspec import Raw

from toolkit.endpoints.foreign import CountedUsage
from toolkit.endpoints.sse import EventReader

MAX_EVENT_BYTES = 16 << 20  # the first event has the prompt's token ids
SPARE_EVENT_BYTES = 256 << 10  # of an event without log probabilities, beside its tokens
BYTES_PER_TOKEN = 16  # of an event: as an id, or as escaped text
MAX_EVENT_LINES = 1000
MAX_ANSWER_BYTES = 256 << 20  # of all events of an attempt
SPARE_EVENTS = 1000  # in a row that bring nothing, and of tokens, beside those that were asked for
UNKNOWN_CONTEXT = 1 << 20  # tokens, of a server that does not say
NOT_OPENAI = "an event is not OpenAI's"


@dataclass(frozen=True, slots=True)
class Attempted:
    """What is known of the replica that an attempt is sent to.

    Attributes:
        speaks_ids: it gives and takes token ids.
        max_model_len: its context, in tokens; None: it does not say.
        default_tokens: the most tokens of an answer for which its client names no limit; None: that
            is not known.
    """

    speaks_ids: bool = False
    max_model_len: int | None = None
    default_tokens: int | None = None


class Passing(ABC):
    """An answer on its way to a client.

    Attributes:
        begun: the client has a byte of it.
        tokens: that this attempt and those that it continues brought, or their events where the
            server gives no ids.
        new_tokens: that the last piece brought.
        text_bytes: of the text that the client has.
        failure: why this attempt cannot go on; '' while it can.
        ended: all of it has passed.
        finish_reason: of the last choice that ended; '' before.
        usage: as the server counted, of the whole answer; None before, and where it cannot be.
        odd_usages: usages that no server can have counted.
        response_id: by which its server keeps it; '' while it is not known, and where none does.
    """

    def __init__(self, estimate: int) -> None:
        self.begun = self.ended = False
        self.tokens = self.new_tokens = self.text_bytes = self.odd_usages = 0
        self.failure = self.finish_reason = self.response_id = ""
        self.usage: CountedUsage | None = None
        self._estimate = estimate
        self._context = UNKNOWN_CONTEXT
        self._reader = EventReader()
        self._passed_bytes = 0
        self._idle_events = 0  # in a row that brought nothing
        self._most_events = SPARE_EVENTS
        self._most_event_bytes = MAX_EVENT_BYTES

    @property
    def is_midway(self) -> bool:
        """A part of an event has come; no engine waits before the rest."""
        return bool(self._reader.rest)

    @property
    def prompt_tokens(self) -> int:
        """As the server counted them, else estimated."""
        return self._estimate if self.usage is None else self.usage.prompt_tokens

    def feed(self, piece: bytes) -> bytes:
        """Take a piece of the body; returns what the client gets now."""
        self.new_tokens = 0
        self._passed_bytes += len(piece)
        events = self._reader.feed(piece)
        if max(map(len, (self._reader.rest, *events))) > self._most_event_bytes:
            self.failure = "an event is too long"
        if self._passed_bytes > MAX_ANSWER_BYTES:
            self.failure = "the answer is too long"
        if self.failure:
            return b""
        passed = []
        for event in events:
            self._idle_events += 1
            if event.count(b"\n") + event.count(b"\r") > MAX_EVENT_LINES and event.strip(b"\r\n"):
                self.failure = NOT_OPENAI
                break
            out = self._event(event)
            if self._idle_events > self._most_events:
                self.failure = self.failure or "its events bring nothing"
            if self.tokens > self._most_events:
                self.failure = self.failure or "it brings more tokens than were asked for"
            if self.failure:
                break
            passed.append(out)
            if self.ended:
                break
        return b"".join(passed)

    def possible(self, given: Raw) -> CountedUsage | None:
        """A usage that the attempt can have; None for any other."""
        if bytes(given) == b"null":
            return None
        usage = self._counted(given)
        self.odd_usages += usage is None
        return usage

    def _begin(self, at: Attempted, limit: int | None, choices: int) -> None:
        """An attempt begins, at an answer of so many choices with at most `limit` tokens each."""
        self._context = at.max_model_len or UNKNOWN_CONTEXT
        self._reader = EventReader()
        self._passed_bytes = self._idle_events = 0
        # A token may have an event without text, as one of a thought that is not shown.
        self._most_events = SPARE_EVENTS + choices * self._longest(limit)
        self.failure = ""

    def _longest(self, limit: int | None) -> int:
        """The most tokens of an output with this limit."""
        return max(self._context if limit is None else min(limit, self._context), 1)

    @abstractmethod
    def _event(self, event: bytes) -> bytes:
        """Read one event; returns what of it passes on. Sets `_idle_events` to 0 if it brings a
        token, whether the client has it or not, or anything else of the answer.
        """

    @abstractmethod
    def _counted(self, given: Raw) -> CountedUsage | None:
        """A usage, if it is one that the attempt can have."""
