"""The traffic of a server by its log of passes: lengths and times of the requests, no content."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from toolkit.live.ahead import Unfinished
from toolkit.metrics import Served
from toolkit.sched.eventlog import whole_lines
from toolkit.sched.iterations import IterationLogHeader, LoggedPass, header_of, passes_of
from toolkit.traces.types import Trace

CUT_BYTES = 64 << 20  # of a log that is ours; longer ones are cut off once read
PASSES_MAX = 20_000  # that are kept for the law


@dataclass(slots=True)
class _Request:
    arrival_s: float
    prompt_tokens: int
    limit: int
    generated: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    max_gap_s: float = 0.0
    found_tokens: int = -1  # of its prompt, in the cache; -1: it was not admitted
    cached: int = 0  # tokens in the cache, while it runs
    ended: bool = False


class OutputLengths:
    """The lengths of outputs that have ended, and what they say of one that has not."""

    def __init__(self, ended: NDArray[np.int64]) -> None:
        self._sorted = np.sort(ended)
        # of each place, the sum of that length and of all longer ones
        self._sums = np.cumsum(self._sorted[::-1])[::-1]

    def expected(self, generated: int, limit: int) -> int:
        """The mean of those that are longer than what it has; at least a token more, and within the
        limit.
        """
        place = int(np.searchsorted(self._sorted, generated, side="right"))
        longer = len(self._sorted) - place
        usual = round(self._sums[place] / longer) if longer else 0
        return max(min(usual, limit), generated + 1)


class TrafficLog:
    """Follows a log of passes. `owned`: no other program reads it, so it may be cut off.

    Attributes:
        header: None until the log has one.
        passes: the newest ones.
    """

    def __init__(self, path: Path, *, owned: bool, horizon_s: float) -> None:
        self.header: IterationLogHeader | None = None
        self.passes: deque[LoggedPass] = deque(maxlen=PASSES_MAX)
        self._path = path
        self._owned = owned
        self._horizon_s = horizon_s
        self._place = 0
        self._requests: dict[str, _Request] = {}
        self._aborted = 0

    def update(self, now_s: float) -> None:
        """Read what is new. `now_s` is of the machine's monotonic clock, as the log's times are."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._place:
            self._begin_again()
        if not size:
            return
        with self._path.open("rb") as file:
            file.seek(self._place)
            lines = [*whole_lines(file)]
        self._place += sum(map(len, lines))
        if self._owned and self._place > CUT_BYTES:
            os.truncate(self._path, 0)
            self._place = 0
        if self.header is None and lines:
            self.header = header_of(lines.pop(0))
        for one in passes_of(lines):
            self.passes.append(one)
            self._take(one)
        old_s = now_s - 2.0 * self._horizon_s
        gone = [name for name, one in self._requests.items() if one.arrival_s < old_s]
        for name in gone:
            del self._requests[name]

    def _begin_again(self) -> None:
        """Another server writes the log: what the one before had not ended, it does not have."""
        self._place = 0
        self.header = None
        self._requests = {name: one for name, one in self._requests.items() if one.ended}

    def _take(self, one: LoggedPass) -> None:
        for name, arrival_s, prompt, limit in one.arrived:
            self._requests[name] = _Request(arrival_s, prompt, limit)
        for row in one.rows:
            request = self._requests.get(row.request_id)
            if request is None or request.ended:
                continue
            if request.found_tokens < 0:
                request.found_tokens = row.computed
            request.cached = row.computed + row.new
            if row.computed + row.new < request.prompt_tokens + request.generated:
                continue
            request.generated += 1
            if request.generated == 1:
                request.first_s = one.end_s
            else:
                request.max_gap_s = max(request.max_gap_s, one.end_s - request.last_s)
            request.last_s = one.end_s
        for name in one.preempted:
            if name in self._requests:
                self._requests[name].cached = 0
        for name in one.ended:
            request = self._requests.get(name)
            if request is not None:
                request.ended = True
                if request.last_s != one.end_s:  # its client has gone
                    del self._requests[name]
                    self._aborted += 1

    def requests(self, since_s: float) -> tuple[Trace, Served]:
        """The requests that have come since then, in order, and how they were served; times count
        from `since_s`. One that has not ended is as long as those usually are that got so far.
        """
        found = [one for one in self._requests.values() if one.arrival_s >= since_s]
        found.sort(key=lambda one: one.arrival_s)
        arrival = np.array([one.arrival_s - since_s for one in found])
        lengths = self._lengths()
        output = np.array(
            [
                one.generated if one.ended else lengths.expected(one.generated, one.limit)
                for one in found
            ],
            dtype=np.int64,
        )
        trace = Trace(
            arrival,
            np.array([one.prompt_tokens for one in found], dtype=np.int64),
            output,
            np.array([one.limit for one in found], dtype=np.int64),
        )
        served = Served(
            arrival,
            np.array([one.first_s - since_s for one in found]),
            np.array([one.last_s - since_s for one in found]),
            output,
            np.array([one.max_gap_s for one in found]),
            np.array([one.ended for one in found], dtype=np.bool_),
        )
        return trace, served

    def unfinished(self) -> list[Unfinished]:
        """The requests that have not ended: first those that run, then by arrival."""
        lengths = self._lengths()
        left = [one for one in self._requests.values() if not one.ended]
        left.sort(key=lambda one: (one.cached == 0, one.arrival_s))
        return [
            Unfinished(
                one.prompt_tokens + one.generated,
                one.cached,
                lengths.expected(one.generated, one.limit) - one.generated,
            )
            for one in left
        ]

    def _lengths(self) -> OutputLengths:
        ended = [one.generated for one in self._requests.values() if one.ended]
        return OutputLengths(np.array(ended, dtype=np.int64))

    def found_share(self, since_s: float) -> float:
        """The share of prompt tokens that admitted requests found in the cache."""
        admitted = [
            one
            for one in self._requests.values()
            if one.arrival_s >= since_s and one.found_tokens >= 0
        ]
        prompts = sum(one.prompt_tokens for one in admitted)
        return sum(one.found_tokens for one in admitted) / prompts if prompts else 0.0
