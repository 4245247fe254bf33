"""A request on its way and the batch that it is in, as the driver sees them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from toolkit.engines.protocol import FinishReason, Row, SamplingParams, StepOutput
from toolkit.engines.tokenizer import Detokenizer
from toolkit.sched.types import Batch
from toolkit.serve.forecast import NOTHING, Forecast, PredictedLatency
from toolkit.serve.stats import Stats

# Where the driver writes what a client should get, and where its response reads it.
#
# A reply merges what comes while nobody reads, so it holds at most the text of its choices: a
# slow reader costs memory that is bounded by `max_tokens`, and never makes the driver wait.


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


# From tokens to the text that a client may see: detokenised as it comes, and cut at the first
# stop string.


class StopFinder:
    """Finds stop strings in text that comes in pieces. The result does not depend on where the
    pieces end.

    The match that is complete first wins, as if the text came one character at a time; of two that
    are complete at the same character, the longer. Text that may be the beginning of a stop string
    is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that may be shown, and whether a stop string ended it."""
        text = self._held + text
        found = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        keep = self._beginning(text)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Where the longest end of `text` starts that a stop string begins with; its length if none
        does.
        """
        for start in range(max(len(text) - self._longest + 1, 0), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)


@dataclass(slots=True, frozen=True)
class Shown:
    """What a client gets of some new tokens. `tokens` counts those up to the end, which a stop
    string may move up.
    """

    text: str
    tokens: int
    finish: FinishReason


@dataclass(slots=True)
class TextOutput:
    """The text of one choice. Stop strings are not looked for in the first `min_tokens` tokens."""

    detokenizer: Detokenizer
    stops: Sequence[str] = ()
    min_tokens: int = 0
    tokens: int = 0
    _finder: StopFinder = field(init=False)

    def __post_init__(self) -> None:
        self._finder = StopFinder(self.stops)

    def feed(self, tokens: Sequence[int], finish: FinishReason) -> Shown:
        """New tokens of the engine. One that ended the row (`finish` is 'stop') counts, and has no
        text.
        """
        visible = tokens[:-1] if finish == "stop" else tokens
        if not self.stops:
            text = self.detokenizer.feed(visible)
        else:
            text, used, stopped = self._search(visible)
            if stopped:
                self.tokens += used
                return Shown(text, used, "stop")
        if finish:
            rest, stopped = self._finder.feed(self.detokenizer.flush())
            text += rest if stopped else rest + self._finder.flush()
            finish = "stop" if stopped else finish
        self.tokens += len(tokens)
        return Shown(text, len(tokens), finish)

    def _search(self, tokens: Sequence[int]) -> tuple[str, int, bool]:
        """One token at a time, so that the count of tokens does not depend on how they were
        delivered.
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


@dataclass(slots=True, frozen=True)
class GenerationRequest:
    """What one choice asks for, in tokens."""

    request_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams
    priority: int = 0
    end_after: int | None = None  # for replayed traces; the scheduler never sees it
    timeout_s: float = math.inf  # from its arrival to its last token


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request on its way, and when what happened to it, in seconds on the driver's clock."""

    ask: GenerationRequest
    output: TextOutput
    reply: Reply
    index: int
    arrival_s: float
    told: PredictedLatency = NOTHING  # what the forecast said of one like it
    tokens: list[int] = field(default_factory=list)  # generated so far
    started_s: float = math.nan
    first_token_s: float = math.nan
    last_token_s: float = math.nan
    max_gap_s: float = 0.0  # between two tokens; tokens that come together share their gap
    status: Status = ""  # how it ended
    flight: InFlightBatch | None = None
    deadline: asyncio.TimerHandle | None = None

    def row(self) -> Row:
        """What a worker must know to go on with it."""
        ask = self.ask
        tokens = ask.prompt + tuple(self.tokens)
        return Row(
            ask.request_id,
            tokens,
            len(self.tokens),
            ask.max_new_tokens,
            ask.sampling,
            ask.end_after,
        )


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """A batch on a worker: its rows, and how many tokens of each have come."""

    batch: Batch
    lives: tuple[ActiveRequest, ...]
    received: list[int]
    # it was sent as soon as the worker's last batch had ended: nothing else kept that waiting
    follows: bool = False
    arrived: int = 0  # requests that had been submitted when it started


def merge(steps: Sequence[StepOutput]) -> dict[int, tuple[list[int], FinishReason]]:
    """Row to its tokens of all `steps`, and how it ended or ''."""
    tokens: dict[int, list[int]] = {}
    ended: dict[int, FinishReason] = {}
    for step in steps:
        for row, token in zip(step.rows, step.tokens, strict=True):
            tokens.setdefault(row, []).append(token)
        ended.update(step.ended)
    return {row: (tokens.get(row, []), ended.get(row, "")) for row in {**tokens, **ended}}


# The requests on their way: what of their tokens has reached their clients, and how they ended.


class ActiveRequests:
    """Requests by id, each from `begin` until it ends.

    Args:
        stats: what is counted.
        forecast: told of requests that begin, of their first tokens and of their ends.
        on_end: called with each that has ended, whatever became of it.
    """

    def __init__(
        self, stats: Stats, forecast: Forecast, on_end: Callable[[ActiveRequest], None]
    ) -> None:
        self.empty = asyncio.Event()  # set while nobody is on the way
        self.empty.set()
        self._by_id: dict[str, ActiveRequest] = {}
        self._stats = stats
        self._forecast = forecast
        self._on_end = on_end

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[ActiveRequest]:
        """Of those who are on the way now; they may end meanwhile."""
        return iter(list(self._by_id.values()))

    def __getitem__(self, request_id: str) -> ActiveRequest:
        return self._by_id[request_id]

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def begin(self, live: ActiveRequest) -> None:
        """It was accepted."""
        self._forecast.submitted(len(live.ask.prompt))
        self._by_id[live.ask.request_id] = live
        self.empty.clear()
        self._stats.prompt_tokens += len(live.ask.prompt)

    def deliver(
        self, live: ActiveRequest, tokens: Sequence[int], finish: FinishReason, now_s: float
    ) -> bool:
        """New tokens go to the client at once. A row that has ended gets no more, whatever its
        batch still does.

        True where a stop string ended it, and the worker or the scheduler may think that it goes
        on.
        """
        if live.status or not (tokens or finish):
            return False
        live.tokens += tokens
        shown = live.output.feed(tokens, finish)
        if shown.tokens:
            self._count(live, shown.tokens, now_s)
        stopped = bool(shown.finish) and (not finish or live.output.tokens < len(live.tokens))
        if stopped:
            del live.tokens[live.output.tokens :]
        if shown.finish:
            self.end(live, shown.finish)
            self._forecast.ended(live.told, now_s - live.arrival_s, live.output.tokens)
        live.reply.put(Delta(live.index, shown.text, shown.tokens, shown.finish))
        return stopped

    def _count(self, live: ActiveRequest, tokens: int, now_s: float) -> None:
        if math.isnan(live.first_token_s):
            live.first_token_s = now_s
            self._forecast.first_token(live.told, now_s - live.arrival_s)
        else:
            live.max_gap_s = max(live.max_gap_s, (now_s - live.last_token_s) / tokens)
        self._stats.count_tokens(tokens, live.arrival_s, live.last_token_s, now_s)
        live.last_token_s = now_s

    def fail(self, live: ActiveRequest, reason: str) -> None:
        """It ends without its output, and its client is told why."""
        self.end(live, "failed")
        live.reply.put(Delta(live.index, failure=reason))

    def end(self, live: ActiveRequest, status: Status) -> None:
        """It is on its way no more."""
        live.status = status
        del self._by_id[live.ask.request_id]
        if not self._by_id:
            self.empty.set()
        self._stats.count_end(
            status,
            live.arrival_s,
            live.first_token_s,
            live.last_token_s,
            live.output.tokens,
            live.max_gap_s,
        )
        self._on_end(live)
