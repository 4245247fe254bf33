"""A request while it is served: its reply, its text, its times, and the pass that runs it.

`Reply` hands text from the driver, which writes it, to the response, which reads it. A reply merges
what arrives between two reads, so it holds at most the text of its choices: a slow reader costs
memory that `max_tokens` bounds, and never blocks the driver.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from toolkit.engines.protocol import FinishReason, Row, SamplingParams, StepOutput
from toolkit.engines.tokenizer import Detokenizer
from toolkit.routing.admission import NO_PREDICTION, PredictedLatency
from toolkit.sched.types import Pass
from toolkit.server.forecast import Forecast
from toolkit.server.stats import RequestTimes, Stats


@dataclass(slots=True)
class Delta:
    """New output of one choice. A delta with a `finish` or a `failure` is the last one.

    `tokens` counts those up to the end of the text, which a stop string may cut.
    """

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
    """The choices of one HTTP response. It has one reader, on the driver's event loop.

    `patient`: wake the reader only once, when all choices have ended or one has failed. A response
    that does not stream reads this way.
    """

    def __init__(self, choices: int, *, patient: bool = False) -> None:
        self.choices = choices
        self.open = choices  # number of choices that have not ended
        self._ready = False
        self._patient = patient
        self._unread: dict[int, Delta] = {}  # by choice
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: Delta) -> None:
        """Add new output of a choice."""
        earlier = self._unread.setdefault(delta.index, delta)
        if earlier is not delta:
            earlier.add(delta)
        self.open -= bool(delta.finish or delta.failure)
        if not self._patient or not self.open or delta.failure:
            self._ready = True
            self._wake()

    async def take(self, timeout_s: float) -> list[Delta]:
        """Wait for new output and return it; empty if none came within `timeout_s` seconds."""
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
        unread = self._unread
        self._unread = {}
        return list(unread.values())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StopFinder:
    """Finds stop strings in text that arrives in pieces. The split into pieces has no effect.

    The match that ends first wins, as if the text arrived one character at a time. If two matches
    end at the same character, the longer one wins. Text that may be the start of a stop string is
    held back until that is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Return the text that may be shown, and whether a stop string ended it."""
        text = self._held + text
        matches = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if matches:
            self._held = ""
            return text[: min(matches)[1]], True
        # Hold back the longest suffix that some stop string begins with.
        for keep in range(max(len(text) - self._longest + 1, 0), len(text)):
            if any(stop.startswith(text[keep:]) for stop in self._stops):
                break
        else:
            keep = len(text)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        held = self._held
        self._held = ""
        return held


@dataclass(slots=True)
class TextOutput:
    """The text of one choice. Stop strings are ignored in the first `min_tokens` tokens."""

    detokenizer: Detokenizer
    stops: Sequence[str] = ()
    min_tokens: int = 0
    index: int = 0  # of the choice
    tokens: int = 0
    _finder: StopFinder = field(init=False)

    def __post_init__(self) -> None:
        self._finder = StopFinder(self.stops)

    def feed(self, tokens: Sequence[int], finish: FinishReason) -> Delta:
        """Add new tokens of the engine and return what the client gets.

        If `finish` is 'stop', the last token ended the row: it counts, but has no text.
        """
        visible = tokens[:-1] if finish == "stop" else tokens
        if not self.stops:
            text = self.detokenizer.feed(visible)
        else:
            text, used, stopped = self._search(visible)
            if stopped:
                self.tokens += used
                return Delta(self.index, text, used, "stop")
        if finish:
            rest, stopped = self._finder.feed(self.detokenizer.flush())
            text += rest if stopped else rest + self._finder.flush()
            finish = "stop" if stopped else finish
        self.tokens += len(tokens)
        return Delta(self.index, text, len(tokens), finish)

    def _search(self, tokens: Sequence[int]) -> tuple[str, int, bool]:
        """Search for stop strings: return the text, the tokens used, and whether one was found.

        It feeds one token at a time, so the count does not depend on how tokens were grouped.
        """
        pieces: list[str] = []
        for used, token in enumerate(tokens, start=1):
            piece = self.detokenizer.feed((token,))
            if self.tokens + used > self.min_tokens:
                piece, stopped = self._finder.feed(piece)
                if stopped:
                    return "".join([*pieces, piece]), used, True
            pieces.append(piece)
        return "".join(pieces), len(tokens), False


Status = Literal["", "stop", "length", "cancelled", "failed"]


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One choice of a client's request, from its submission to its end. Lengths are in tokens,
    times in seconds on the driver's clock, or NaN.

    Attributes:
        end_after: output length of a replayed trace; hidden from the scheduler.
        timeout_s: from its arrival to its last token.
        predicted: the forecast when it arrived.
        tokens: generated so far.
        status: how it ended, or '' while it runs.
        flight: the pass without kept caches that runs it.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams
    output: TextOutput
    reply: Reply
    priority: int = 0
    end_after: int | None = None
    timeout_s: float = math.inf
    times: RequestTimes = field(default_factory=RequestTimes)
    predicted: PredictedLatency = NO_PREDICTION
    tokens: list[int] = field(default_factory=list)
    started_s: float = math.nan
    status: Status = ""
    flight: Pass | None = None
    deadline: asyncio.TimerHandle | None = None

    def row(self) -> Row:
        """The row that a worker needs to continue this request."""
        return Row(
            self.request_id,
            self.prompt + tuple(self.tokens),
            len(self.tokens),
            self.max_new_tokens,
            self.sampling,
            self.end_after,
        )


def merge(steps: Sequence[StepOutput]) -> dict[int, tuple[list[int], FinishReason]]:
    """The tokens of each row over all `steps`, and how the row ended, or ''."""
    tokens: dict[int, list[int]] = {}
    ended: dict[int, FinishReason] = {}
    for step in steps:
        for row, token in zip(step.rows, step.tokens, strict=True):
            tokens.setdefault(row, []).append(token)
        ended.update(step.ended)
    return {row: (tokens.get(row, []), ended.get(row, "")) for row in {**tokens, **ended}}


class ActiveRequests:
    """The requests that have not ended, by id. `on_end` is called with each that ends."""

    def __init__(
        self, stats: Stats, forecast: Forecast, on_end: Callable[[LiveRequest], None]
    ) -> None:
        self.empty = asyncio.Event()  # set while there are no requests
        self.empty.set()
        self.by_id: dict[str, LiveRequest] = {}
        self._stats = stats
        self._forecast = forecast
        self._on_end = on_end

    def begin(self, active: LiveRequest) -> None:
        """The scheduler has accepted a request."""
        self._forecast.submitted(len(active.prompt))
        self.by_id[active.request_id] = active
        self.empty.clear()
        self._stats.prompt_tokens += len(active.prompt)

    def deliver(
        self, active: LiveRequest, tokens: Sequence[int], finish: FinishReason, now_s: float
    ) -> bool:
        """Pass new tokens to the client at once. A request that has ended gets no more.

        Returns True if a stop string ended the request, because then the worker and the scheduler
        do not know yet that it ended.
        """
        if active.status or not (tokens or finish):
            return False
        active.tokens += tokens
        delta = active.output.feed(tokens, finish)
        if delta.tokens:
            times = active.times
            if math.isnan(times.first_s):
                self._forecast.first_token(active.predicted, now_s - times.arrival_s)
            self._stats.count_tokens(delta.tokens, times, now_s)
            times.came(now_s, delta.tokens)
        stopped = bool(delta.finish) and (not finish or active.output.tokens < len(active.tokens))
        if stopped:
            del active.tokens[active.output.tokens :]
        if delta.finish:
            self.end(active, delta.finish)
            latency_s = now_s - active.times.arrival_s
            self._forecast.ended(active.predicted, latency_s, active.output.tokens)
        active.reply.put(delta)
        return stopped

    def fail(self, active: LiveRequest, reason: str) -> None:
        """End a request without its output; its client gets `reason`."""
        self.end(active, "failed")
        active.reply.put(Delta(active.output.index, failure=reason))

    def end(self, active: LiveRequest, status: Status) -> None:
        """Remove a request that has ended, and count it."""
        active.status = status
        del self.by_id[active.request_id]
        if not self.by_id:
            self.empty.set()
        self._stats.count_end(status, active.times, active.output.tokens)
        self._on_end(active)
