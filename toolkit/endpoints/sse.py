"""Event streams (server-sent events) that servers answer with: one reader for all of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterable, AsyncIterator

PART_BYTES = 1 << 11  # of a stream, which others need not wait for: at most 700 events
_END = re.compile(rb"(?:\r\n\r\n|\n\r?\n|\r\r)[\r\n]*")  # with the empty lines behind it
_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventReader:
    """Cuts a stream into events, however its pieces are cut.

    Attributes:
        rest: the bytes of an event that is not whole. Its owner bounds them.
    """

    def __init__(self) -> None:
        self.rest = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that are whole now, each with the empty lines behind it."""
        rest = self.rest
        seen = max(len(rest) - 3, 0)  # no event ends before; the end of one may be cut
        rest += piece
        ends = [match.end() for match in _END.finditer(rest, seen)]
        begins = [0, *ends]
        events = [bytes(rest[begin:end]) for begin, end in zip(begins, ends, strict=False)]
        del rest[: begins[-1]]
        return events


async def in_parts(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """A stream of events in small parts. Between two parts of a piece the event loop runs others: a
    piece may hold ten thousand events.
    """
    async for piece in pieces:
        yield piece[:PART_BYTES]
        for at in range(PART_BYTES, len(piece), PART_BYTES):
            await asyncio.sleep(0)
            yield piece[at : at + PART_BYTES]


def lines_of(event: bytes) -> list[bytes]:
    """The lines of an event, without their ends."""
    text = event.rstrip(b"\r\n")
    return text.split(b"\n") if b"\r" not in text else _LINE_END.split(text)


def data_of(event: bytes) -> bytes:
    """What an event says behind `data:`; b"" for a comment."""
    lines = [line[5:].strip() for line in lines_of(event) if line.startswith(b"data:")]
    return lines[0] if len(lines) == 1 else b"\n".join(lines)
