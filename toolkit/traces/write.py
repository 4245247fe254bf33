"""Writing the canonical format: Mooncake's JSONL, one request per line, times in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from toolkit.files.io import write_text
from toolkit.traces.types import Trace


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line. The keys past `output_length` are left out where there is nothing to say."""

    timestamp: float  # ms since the first request; in a log that grows, since 1970
    input_length: int
    output_length: int
    max_tokens: int = 0  # the limit that the client set; 0: none
    ttft_ms: float | None = None
    e2e_ms: float | None = None
    status: str = ""  # "ok", or why the request failed; readers drop what failed
    priority: int = 0  # the smaller, the more urgent


def to_ms(seconds: float) -> float:
    """Milliseconds to the microsecond, whole ones without a fraction: lines stay short and read back the same."""
    value = round(seconds * 1000.0, 3)
    return int(value) if value == int(value) else value


def write_trace(trace: Trace, path: Path) -> None:
    """Write `trace` to `path` in one step: the file is whole or was not touched. Its notes are not kept."""
    lines = (
        Line(to_ms(arrival), prompt, output, limit, priority=priority)
        for arrival, prompt, output, limit, priority in trace.rows()
    )
    write_lines(lines, path)


def write_lines(lines: Iterable[Line], path: Path) -> None:
    """Write `lines` to `path` in one step. InputError where it cannot be written."""
    encode = msgspec.json.Encoder().encode
    write_text(path, "".join(encode(line).decode() + "\n" for line in lines))
