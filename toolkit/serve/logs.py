"""The two logs a server may keep: the scheduler's calls, which replay, and the requests' lengths and times, a trace.

Neither holds any text, prompt token or client's name.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import TracebackType
from typing import Self

from toolkit.files.lines import LineLog
from toolkit.sched.eventlog import Event, lost_line, to_line
from toolkit.serve.live import Live
from toolkit.traces.log import TraceLog
from toolkit.traces.write import Line, to_ms

PENDING_BYTES = 1 << 16
MAX_BYTES = 1 << 30  # of an event log: an hour or so of a busy server


class EventLog:
    """The scheduler's calls, in a new file. `flush` is the owner's business: a killed process loses what came since.

    What is written is whole lines, so the file of a killed one replays up to its end. What cannot be written is lost
    and the log says so where it is missing (`toolkit.files.lines`); nothing here raises for a disk.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._pending = bytearray()
        self._log = LineLog(path, max_bytes, lost_line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()
        self._log.close()

    @property
    def lost(self) -> int:
        """Events that are not in the file."""
        return self._log.lost

    def add(self, event: Event) -> None:
        self._pending += to_line(event)
        if len(self._pending) >= PENDING_BYTES:
            self.flush()

    def flush(self) -> None:
        self._log.write(bytes(self._pending))
        self._pending.clear()


class RequestLog:
    """Each request that has ended, as a line of a trace."""

    def __init__(self, log: TraceLog) -> None:
        self._log = log

    def add(self, live: Live, start_s: float) -> None:
        """`start_s`: when the driver's clock began, on `time.monotonic`'s."""
        self._log.add(trace_line(live, self._log.timestamp(start_s + live.arrival_s)))


def trace_line(live: Live, timestamp: float) -> Line:
    """What a trace says of a request that has ended."""
    return Line(
        timestamp=timestamp,
        input_length=len(live.ask.prompt),
        output_length=live.output.tokens,
        max_tokens=live.ask.max_new_tokens,
        priority=live.ask.priority,
        ttft_ms=_ms_or_none(live.first_token_s - live.arrival_s),
        e2e_ms=_ms_or_none(live.last_token_s - live.arrival_s),
        status="ok" if live.status in ("stop", "length") else live.status,
    )


def _ms_or_none(seconds: float) -> float | None:
    return None if math.isnan(seconds) else to_ms(seconds)
