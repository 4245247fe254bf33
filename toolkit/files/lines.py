"""A log of whole lines that never stops the process that writes it.

A full disk, the limit on the size, or a failing device costs lines. A mark in the file shows where
lines are missing, so that a reader does not take the rest for the whole log.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from toolkit.errors import InputError

MARK_BYTES = 256  # a mark is padded to this, so that its count can be changed in place
LOOK_BACK_BYTES = 1 << 20  # a mark is placed behind the end of a line, searched this far back
NEWLINE = b"\n"

_logger = logging.getLogger(__name__)


class LineLog:
    """Writes lines to a new file at `path`; `InputError` where it cannot be made.

    Args:
        max_bytes: the greatest length of the file; further lines are lost.
        mark: makes the line (below 200 bytes, without its end) that says how many lines are missing
            and why.

    No method raises for errors of the file system. The first loss logs a warning; `lost` counts all
    lost lines.
    """

    def __init__(self, path: Path, max_bytes: int, mark: Callable[[int, str], bytes]) -> None:
        self.lost = 0  # lines
        self._name = path.name
        self._max_bytes = max_bytes
        self._mark = mark
        self._full = False
        self._gap, self._reason = 0, ""  # lines that are missing where the file ends now, and why
        self._mark_at: int | None = None  # where the mark of that gap begins, if it is written
        # O_NONBLOCK: a full pipe must not stall the process.
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._fd = os.open(path, flags, 0o666)
        except OSError as error:
            raise InputError(
                f"{path}: cannot be written: {error.strerror}", "choose another file"
            ) from None
        # A pipe or a device has no size, and nothing in it can be replaced.
        self._regular = path.is_file()
        self._size = 0  # of the whole lines in the file
        self._torn = False  # the last write to a pipe or a device was a part of a line

    def write(self, lines: bytes) -> None:
        """Append whole lines. Lines that do not fit are lost; the file always ends with a line."""
        if not lines:
            return
        self._full = self._full or (self._regular and self._size + len(lines) > self._max_bytes)
        if self._full:  # permanently: later lines that still fit would explain nothing
            self._lose(lines, f"its limit of {self._max_bytes} bytes is reached")
            return
        if self._gap and self._mark_at is None:
            done, reason = self._append(self._mark_line())
            if not done:
                self._lose(lines, reason)
                return
        done, reason = self._append(lines)
        if done:
            self._gap, self._mark_at = 0, None
        if done < len(lines):
            self._lose(lines[done:], reason)

    def _append(self, lines: bytes) -> tuple[int, str]:
        """Write lines. Returns the size of those written whole, and why the rest was not."""
        data = NEWLINE * self._torn + lines
        done, reason = 0, ""
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError as error:
            reason = error.strerror or str(error)
        if not done:
            return 0, reason
        done -= self._torn
        whole = lines.rfind(NEWLINE, 0, done) + 1
        self._torn = not self._regular and whole < done
        self._size += whole
        return whole, reason

    def close(self) -> None:
        """Close the file; a warning says how many lines were lost."""
        if self.lost:
            _logger.warning("%s: %d lines are missing in it", self._name, self.lost)
        os.close(self._fd)

    def _lose(self, lines: bytes, reason: str) -> None:
        count = lines.count(NEWLINE)
        if not self.lost:
            _logger.warning(
                "%s: cannot be written: %s; requests are served and not logged", self._name, reason
            )
        self.lost += count
        self._gap += count
        self._reason = reason
        if self._regular:
            with contextlib.suppress(OSError):  # if the disk itself fails, no mark can be written
                self._mark_gap()

    def _mark_line(self) -> bytes:
        return self._mark(self._gap, self._reason).ljust(MARK_BYTES - 1) + NEWLINE

    def _mark_gap(self) -> None:
        """Write the mark over the end of the file, which takes no new room on a full disk.

        The replaced lines are lost too. The next mark of the same gap replaces this one.
        """
        at = self._mark_place() if self._mark_at is None else self._mark_at
        written = os.pwrite(self._fd, self._mark_line(), at)
        if written == MARK_BYTES:
            self._mark_at, self._size = at, at + MARK_BYTES
        elif at < self._size:
            self._size = at  # a partial mark has overwritten the lines there
        os.ftruncate(self._fd, self._size)
        os.lseek(self._fd, self._size, os.SEEK_SET)

    def _mark_place(self) -> int:
        """Where a mark begins: after the last line behind which the file has room for a mark."""
        length = os.fstat(self._fd).st_size
        if self._size + MARK_BYTES <= length:
            return self._size
        first = max(self._size - LOOK_BACK_BYTES, 0)
        tail = os.pread(self._fd, self._size - first, first)
        end = max(length - MARK_BYTES - first, 0)
        at = tail.rfind(NEWLINE, 0, end) + 1
        replaced = tail.count(NEWLINE, at)
        self.lost += replaced
        self._gap += replaced
        return first + at
