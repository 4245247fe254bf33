"""Where the driver writes what a client should get, and where its response reads it.

A reply merges what comes while nobody reads, so it holds at most the text of its choices: a slow reader costs memory
that is bounded by `max_tokens`, and never makes the driver wait.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from toolkit.engines.protocol import FinishReason


@dataclass(slots=True)
class Delta:
    """What is new of one choice. After a `finish` or a `failure` nothing follows."""

    index: int
    text: str = ""
    tokens: int = 0
    finish: FinishReason = ""
    failure: str = ""

    def add(self, later: Delta) -> None:
        self.text += later.text
        self.tokens += later.tokens
        self.finish = later.finish
        self.failure = later.failure


class Reply:
    """The choices of one HTTP response. One reader; everything on one loop.

    A `patient` reader is woken once, when all has ended: one that does not stream.
    """

    def __init__(self, choices: int, *, patient: bool = False) -> None:
        self.choices = choices
        self.open = choices  # those that have not ended
        self.closed = False
        self._ready = False
        self._patient = patient
        self._news: dict[int, Delta] = {}
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: Delta) -> None:
        """Something new of a choice."""
        earlier = self._news.setdefault(delta.index, delta)
        if earlier is not delta:
            earlier.add(delta)
        self.open -= bool(delta.finish or delta.failure)
        if not self._patient or not self.open or delta.failure:
            self._ready = True
            self._wake()

    def close(self) -> None:
        """The reader's client is gone: wake it so that it can see."""
        self.closed = True
        self._ready = True
        self._wake()

    async def take(self, timeout_s: float) -> list[Delta]:
        """What came since the last call, waiting for something to come; empty after `timeout_s`."""
        if not self._ready:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        if not self._ready:
            return []
        self._ready = False
        news, self._news = self._news, {}
        return list(news.values())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
