"""The two logs a server may keep: the scheduler's calls, which replay, and the requests' lengths and times, a trace.

Neither holds any text, prompt token or client's name.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from toolkit.errors import InputError
from toolkit.sched.eventlog import Event, to_line
from toolkit.serve.live import Live
from toolkit.traces.write import Line, to_ms


class LineLog:
    """A file that gets whole lines. Buffered: `flush` is the owner's business, and a killed process loses the rest."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def flush(self) -> None:
        self._file.flush()

    def event(self, event: Event) -> None:
        """A call of the scheduler."""
        self._file.write(to_line(event))

    def request(self, live: Live) -> None:
        """A request that has ended."""
        self._file.write(msgspec.json.encode(trace_line(live)) + b"\n")


def trace_line(live: Live) -> Line:
    """What a trace says of a request that has ended."""
    return Line(
        timestamp=to_ms(live.arrival_s),
        input_length=len(live.ask.prompt),
        output_length=live.output.tokens,
        max_tokens=live.ask.max_new_tokens,
        ttft_ms=_ms_or_none(live.first_token_s - live.arrival_s),
        e2e_ms=_ms_or_none(live.last_token_s - live.arrival_s),
        status="ok" if live.status in ("stop", "length") else live.status,
    )


def _ms_or_none(seconds: float) -> float | None:
    return None if math.isnan(seconds) else to_ms(seconds)
