"""Server-sent events: one reader of the streams that servers answer with."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterable, AsyncIterator

MAX_EVENT_BYTES = 16 << 20  # the first event may have the ids of a whole prompt
MAX_STREAM_BYTES = 256 << 20  # of all events of an answer
MAX_EVENT_LINES = 1000
PART_BYTES = 1 << 11  # of a stream, which others need not wait for: at most 700 events
NOT_OPENAI = "an event is not OpenAI's"
DONE = b"data: [DONE]\n\n"
_END = re.compile(rb"(?:\r\n\r\n|\n\r?\n|\r\r)[\r\n]*")  # with the empty lines behind it
_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventReader:
    """Cuts a stream into events, however its pieces are cut.

    Attributes:
        rest: the bytes of an event that is not whole.
        failure: which bound the stream exceeds; '' while it exceeds none.
    """

    def __init__(
        self, most_event_bytes: int = MAX_EVENT_BYTES, most_bytes: int = MAX_STREAM_BYTES
    ) -> None:
        self.rest = bytearray()
        self.failure = ""
        self._most_event_bytes = most_event_bytes
        self._bytes_left = most_bytes

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the events that are whole now, each with the empty lines behind it."""
        rest = self.rest
        seen = max(len(rest) - 3, 0)  # no event ends before; the end of one may be cut
        rest += piece
        ends = [match.end() for match in _END.finditer(rest, seen)]
        begins = [0, *ends]
        events = [bytes(rest[begin:end]) for begin, end in zip(begins, ends, strict=False)]
        del rest[: begins[-1]]
        self._bytes_left -= len(piece)
        if max(map(len, (rest, *events))) > self._most_event_bytes:
            self.failure = "an event is too long"
        elif self._bytes_left < 0:
            self.failure = "the answer is too long"
        return events


async def in_parts(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield a stream of events in small parts. Between two parts of a piece the event loop runs
    others: a piece may hold ten thousand events.
    """
    async for piece in pieces:
        yield piece[:PART_BYTES]
        for at in range(PART_BYTES, len(piece), PART_BYTES):
            await asyncio.sleep(0)
            yield piece[at : at + PART_BYTES]


def lines_of(event: bytes) -> list[bytes]:
    """Return the lines of an event, without their ends. After `MAX_EVENT_LINES` of them the rest
    stays in one.
    """
    text = event.rstrip(b"\r\n")
    if b"\r" in text:
        return _LINE_END.split(text, MAX_EVENT_LINES)
    return text.split(b"\n", MAX_EVENT_LINES)


def data_of(lines: list[bytes]) -> bytes:
    """Return what the lines of an event say behind `data:`; b"" for a comment."""
    found = [line[5:].strip() for line in lines if line.startswith(b"data:")]
    return found[0] if len(found) == 1 else b"\n".join(found)
