"""A file of whole lines that grows while something else works, and never ends what it is a log of.

A full disk, a limit on the size or a device that fails costs lines. The log says so in itself: a
mark stands where lines are missing, so that a reader does not take the rest for all there was.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from toolkit.errors import InputError

MARK_BYTES = 256  # a mark is padded to this, so that its count can be changed in place
LOOK_BACK_BYTES = 1 << 20  # where a mark looks for the end of a line to stand behind
NEWLINE = b"\n"

_logger = logging.getLogger(__name__)


class LineLog:
    """Writes lines to a new file at `path`; `InputError` where there can be none.

    Args:
        max_bytes: the file never gets longer than this; further lines are lost.
        mark: the line, without its end and of less than 200 bytes, that says how many lines are missing and why.

    No method raises for what the file system does. The first loss is said on stderr; `lost` counts
    all of them.
    """

    def __init__(self, path: Path, max_bytes: int, mark: Callable[[int, str], bytes]) -> None:
        self.lost = 0  # lines, in all
        self._name = path.name
        self._max_bytes = max_bytes
        self._mark = mark
        self._full = False
        self._gap, self._reason = 0, ""  # lines that are missing where the file ends now, and why
        self._mark_at: int | None = None  # where the mark of that gap begins, if it is written
        flags = (
            os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK
        )  # a full pipe must not stall us
        try:
            self._fd = os.open(path, flags, 0o666)
        except OSError as error:
            raise InputError(
                f"{path}: cannot be written: {error.strerror}", "choose another file"
            ) from None
        self._regular = (
            path.is_file()
        )  # a pipe or a device has no size, and nothing in it can be replaced
        self._size = 0  # of the whole lines in it
        self._torn = False  # a pipe or a device got a part of a line last

    def write(self, lines: bytes) -> None:
        """Append whole lines. Those that do not fit are lost, and the file still ends with a whole
        line.
        """
        if not lines:
            return
        self._full = self._full or (self._regular and self._size + len(lines) > self._max_bytes)
        if self._full:  # for good: what would fit into the last bytes explains nothing
            self._lose(lines, f"its limit of {self._max_bytes} bytes is reached")
            return
        if self._gap and self._mark_at is None:
            done, reason = self._append(self._line())
            if not done:
                self._lose(lines, reason)
                return
        done, reason = self._append(lines)
        if done:
            self._gap, self._mark_at = 0, None
        if done < len(lines):
            self._lose(lines[done:], reason)

    def _append(self, lines: bytes) -> tuple[int, str]:
        """The size of the lines that were written whole, and why the others were not."""
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
        """Nothing follows. Losses are summed up on stderr."""
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
            with contextlib.suppress(
                OSError
            ):  # the disk itself fails: there is no place for a mark
                self._mark_gap()

    def _line(self) -> bytes:
        return self._mark(self._gap, self._reason).ljust(MARK_BYTES - 1) + NEWLINE

    def _mark_gap(self) -> None:
        """Write the mark over the end of what is there: on a full disk that takes no new room.

        The lines that it replaces are lost as well. The next mark of the same gap replaces this
        one.
        """
        at = self._place() if self._mark_at is None else self._mark_at
        written = os.pwrite(self._fd, self._line(), at)
        if written == MARK_BYTES:
            self._mark_at, self._size = at, at + MARK_BYTES
        elif at < self._size:
            self._size = at  # what stood there is spoilt
        os.ftruncate(self._fd, self._size)
        os.lseek(self._fd, self._size, os.SEEK_SET)

    def _place(self) -> int:
        """Where a mark begins: behind the last line whose end leaves it enough bytes that were
        written already.
        """
        has = os.fstat(self._fd).st_size
        if self._size + MARK_BYTES <= has:
            return self._size
        first = max(self._size - LOOK_BACK_BYTES, 0)
        tail = os.pread(self._fd, self._size - first, first)
        end = max(has - MARK_BYTES - first, 0)
        at = tail.rfind(NEWLINE, 0, end) + 1
        replaced = tail.count(NEWLINE, at)
        self.lost += replaced
        self._gap += replaced
        return first + at
