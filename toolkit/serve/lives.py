"""The requests on their way: what of their tokens has reached their clients, and how they ended."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence

from toolkit.engines.protocol import FinishReason
from toolkit.serve.forecast import Forecast
from toolkit.serve.live import Live, Status
from toolkit.serve.reply import Delta
from toolkit.serve.stats import Stats


class Lives:
    """Requests by id, each from `begin` until it ends.

    Args:
        stats: what is counted.
        forecast: told of requests that begin, of their first tokens and of their ends.
        on_end: called with each that has ended, whatever became of it.
    """

    def __init__(self, stats: Stats, forecast: Forecast, on_end: Callable[[Live], None]) -> None:
        self.empty = asyncio.Event()  # set while nobody is on the way
        self.empty.set()
        self._by_id: dict[str, Live] = {}
        self._stats = stats
        self._forecast = forecast
        self._on_end = on_end

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Live]:
        """Of those who are on the way now; they may end meanwhile."""
        return iter(list(self._by_id.values()))

    def __getitem__(self, request_id: str) -> Live:
        return self._by_id[request_id]

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def begin(self, live: Live) -> None:
        """It was accepted."""
        self._forecast.submitted(len(live.ask.prompt))
        self._by_id[live.ask.request_id] = live
        self.empty.clear()
        self._stats.prompt_tokens += len(live.ask.prompt)

    def deliver(self, live: Live, tokens: Sequence[int], finish: FinishReason, now_s: float) -> bool:
        """New tokens go to the client at once. A row that has ended gets no more, whatever its batch still does.

        True where a stop string ended it, and the worker or the scheduler may think that it goes on.
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

    def _count(self, live: Live, tokens: int, now_s: float) -> None:
        if math.isnan(live.first_token_s):
            live.first_token_s = now_s
            self._forecast.first_token(live.told, now_s - live.arrival_s)
        else:
            live.max_gap_s = max(live.max_gap_s, (now_s - live.last_token_s) / tokens)
        self._stats.count_tokens(tokens, live.arrival_s, live.last_token_s, now_s)
        live.last_token_s = now_s

    def fail(self, live: Live, reason: str) -> None:
        """It ends without its output, and its client is told why."""
        self.end(live, "failed")
        live.reply.put(Delta(live.index, failure=reason))

    def end(self, live: Live, status: Status) -> None:
        """It is on its way no more."""
        live.status = status
        del self._by_id[live.ask.request_id]
        if not self._by_id:
            self.empty.set()
        self._stats.count_end(
            status, live.arrival_s, live.first_token_s, live.last_token_s, live.output.tokens, live.max_gap_s
        )
        self._on_end(live)
