"""Writing the canonical format: Mooncake's JSONL, one request per line, times in milliseconds."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from toolkit.errors import InputError
from toolkit.files.io import write_text
from toolkit.traces.types import Trace


class TraceLine(msgspec.Struct, frozen=True, omit_defaults=True):
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
    """Milliseconds to the microsecond, whole ones without a fraction: lines stay short and read
    back the same.
    """
    value = round(seconds * 1000.0, 3)
    return int(value) if value == int(value) else value


def write_trace(trace: Trace, path: Path) -> None:
    """Write `trace` to `path` in one step: the file is whole or was not touched. Its notes are not
    kept.
    """
    lines = (
        TraceLine(to_ms(arrival), prompt, output, limit, priority=priority)
        for arrival, prompt, output, limit, priority in trace.rows()
    )
    write_lines(lines, path)


def write_lines(lines: Iterable[TraceLine], path: Path) -> None:
    """Write `lines` to `path` in one step. InputError where it cannot be written."""
    encode = msgspec.json.Encoder().encode
    write_text(path, "".join(encode(line).decode() + "\n" for line in lines))


# A trace that grows while requests are served: a line each, whole or not at all, in files of
# bounded size.
#
# Each line is written by one system call as soon as it is known, so a killed process loses none,
# and what an earlier process has logged stays: times are those of the calendar, which readers
# count from the first. A disk that is full costs lines and nothing else. Syncing to the disk is
# the kernel's business: a crash of the machine may cost seconds.

MAX_BYTES = 256 << 20  # of each of the two files: some two million requests

_encode = msgspec.json.Encoder().encode
_logger = logging.getLogger(__name__)


class TraceLog:
    """Appends to `path`. At `max_bytes` that becomes `path`.1, in place of an older one, and a new
    file begins.

    `InputError` where `path` cannot be written, or is a file that holds something else than a
    trace.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.lines = 0  # written
        self.lost = 0  # could not be written
        self._path = path.resolve()
        self._max_bytes = max_bytes
        self._offset_s = time.time() - time.monotonic()
        self._torn = False  # the last line has no end
        try:
            _check_trace(self._path)
            self._open()
        except OSError as error:
            raise InputError(
                f"{path}: cannot be written: {error.strerror}", "choose another file"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def timestamp(self, monotonic_s: float) -> float:
        """The `timestamp` of a line about something that happened then, on `time.monotonic`'s
        clock.
        """
        return to_ms(self._offset_s + monotonic_s)

    def add(self, line: TraceLine) -> None:
        """Write `line`; where that fails it is lost, and the first loss is said on stderr."""
        text = b"\n" * self._torn + _encode(line) + b"\n"
        try:
            if self._regular and self._size + len(text) > self._max_bytes:
                self._rotate()
                text = text.lstrip(b"\n")
            written = self._file.write(text) or 0
            if self._regular and written < len(
                text
            ):  # the disk was full: a part of a line is of no use
                self._file.truncate(self._size)
                written = 0
        except OSError as error:
            self._lose(error.strerror or str(error))
            return
        self._size += written
        if written < len(text):
            self._torn = self._torn if self._regular else bool(written)
            self._lose("no room")
        else:
            self._torn = False
            self.lines += 1

    def _lose(self, reason: str) -> None:
        if not self.lost:
            _logger.warning(
                "%s: cannot be written: %s; requests are served and not logged",
                self._path.name,
                reason,
            )
        self.lost += 1

    def _open(self) -> None:
        self._file = self._path.open("ab", buffering=0)
        self._regular = self._path.is_file()  # a pipe or a device has no size, and is not renamed
        self._size = os.fstat(self._file.fileno()).st_size if self._regular else 0
        self._torn = self._regular and _is_torn(self._path)

    def _rotate(self) -> None:
        os.replace(self._path, self._path.with_name(self._path.name + ".1"))
        self._file.close()
        self._open()


def _check_trace(path: Path) -> None:
    """`InputError` for a file that holds something else, which lines in it would spoil."""
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb") as file:
        first = file.readline(1 << 12)
    if not (first.startswith(b"{") and b'"timestamp"' in first):
        raise InputError(f"{path.name}: is there already, and is no trace", "choose another file")


def _is_torn(path: Path) -> bool:
    """Whether the file does not end with its line: the machine crashed, or its disk was full."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
