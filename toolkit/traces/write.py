"""Writing traces in the canonical format: Mooncake's JSONL, a request per line, times in ms.

`write_trace` writes a finished trace in one step. `TraceLog` is the trace that grows while
requests are served:

* Each line is written by one system call as soon as it is known, so a killed process loses none.
  Lines of earlier processes stay: times are calendar times, which readers count from the first.
* A full disk costs lines and nothing else. Only the kernel decides when to sync: a crash of the
  machine may cost seconds.
* Two files of bounded size hold the last requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from toolkit.errors import InputError
from toolkit.files.io import LineLog, target_of, write_text
from toolkit.traces.types import MOONCAKE_BLOCK, Sessions, Trace

MAX_BYTES = 256 << 20  # of each of the log's two files: some two million requests

_encode = msgspec.json.Encoder().encode


class TraceLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line. Keys after `output_length` are omitted where they hold their default."""

    timestamp: float  # ms since the first request; in a log that grows, since 1970
    input_length: int
    output_length: int
    max_tokens: int = 0  # the limit that the client set; 0: none
    ttft_ms: float | None = None
    e2e_ms: float | None = None
    status: str = ""  # "ok", or why the request failed; readers drop failed requests
    priority: int = 0  # smaller is more urgent
    block_tokens: int | None = None  # of the blocks of `hash_ids`; None: 512, as in Mooncake's
    session: int | None = None  # a row continues the last row before it with the same label
    think_ms: float = 0  # from the end of the turn before
    hash_ids: Sequence[int] | None = None  # of the prompt's blocks (`SharedBlocks`)


def to_ms(seconds: float) -> float:
    """Milliseconds, rounded to the microsecond; an int where whole, which keeps lines short."""
    value = round(seconds * 1000.0, 3)
    return int(value) if value == int(value) else value


def write_trace(trace: Trace, path: Path) -> None:
    """Write `trace` to `path` atomically, without its notes. Raises `InputError` if it cannot be
    written.
    """
    shared = trace.shared
    count = len(trace)
    block = shared.block_tokens if shared else MOONCAKE_BLOCK
    size = None if block == MOONCAKE_BLOCK else block
    ids = (shared.of(row).tolist() or None if shared else None for row in range(count))
    labels, think_ms = _turns(trace.sessions, count)
    lines = (
        TraceLine(
            to_ms(arrival),
            prompt,
            output,
            limit,
            priority=priority,
            block_tokens=size if blocks else None,
            session=label,
            think_ms=think,
            hash_ids=blocks,
        )
        for (arrival, prompt, output, limit, priority), label, think, blocks in zip(
            trace.rows(), labels, think_ms, ids, strict=True
        )
    )
    write_lines(lines, path)


def _turns(sessions: Sessions | None, count: int) -> tuple[Iterable[int | None], Iterable[float]]:
    """The label of each row's session, the row of its first turn, and its time to think; None and 0
    for a session of one turn.
    """
    if sessions is None:
        return repeat(None, count), repeat(0, count)
    first = sessions.first
    several = np.bincount(first, minlength=count)[first] > 1
    labels = [label if more else None for label, more in zip(first.tolist(), several, strict=True)]
    return labels, [to_ms(think_s) for think_s in sessions.think_s.tolist()]


def write_lines(lines: Iterable[TraceLine], path: Path) -> None:
    """Write `lines` to `path` atomically. Raises `InputError` if it cannot be written."""
    write_text(path, "".join(_encode(line).decode() + "\n" for line in lines))


def ms_or_none(seconds: float) -> float | None:
    """Milliseconds as traces have them; None for NaN, a time that never came."""
    return None if math.isnan(seconds) else to_ms(seconds)


class TraceLog:
    """Appends lines to `path`. At `max_bytes` it renames the file to `path`.1, replacing an older
    one, and begins a new file. Raises `InputError` if `path` cannot be written, or holds
    something else than a trace.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._offset_s = time.time() - time.monotonic()
        try:
            target = target_of(path)
            if target.is_file():
                with target.open("rb") as file:
                    first = file.readline(1 << 12)
                if first and not (first.startswith(b"{") and b'"timestamp"' in first):
                    name = target.name  # lines would spoil what it holds
                    raise InputError(f"{name}: exists and is not a trace", "choose another file")
        except OSError as error:
            raise InputError(
                f"{path}: cannot be written: {error.strerror}", "choose another file"
            ) from None
        self._log = LineLog(target, max_bytes, endless=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()

    @property
    def lost(self) -> int:
        """The lines that could not be written."""
        return self._log.lost

    def timestamp(self, monotonic_s: float) -> float:
        """The `timestamp` of a line: calendar time in ms, from a `time.monotonic` time in s."""
        return to_ms(self._offset_s + monotonic_s)

    def add(self, line: TraceLine) -> None:
        """Write `line`. A line that cannot be written is lost; the first loss logs a warning."""
        self._log.write(_encode(line) + b"\n")
