"""What a server looks at again while it runs: files of keys and of replicas, and names in DNS.

`follow` checks files once a second through stat(2). That detects a link that Kubernetes swaps, a
new file that an editor puts under the old name, and `cp` into the existing file. If something
cannot be read, the last good version stays in force and one warning is printed per bad version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from toolkit.errors import LlmctlError

CHECK_EVERY_S = 1.0
ValueT = TypeVar("ValueT")


class Watched(Generic[ValueT]):
    """A value that never changes; those of the subclasses may.

    Attributes:
        value: as it was read last.
        every_s: how often it may be looked at; None: it never changes.
    """

    every_s: float | None = None

    def __init__(self, value: ValueT) -> None:
        self.value = value

    def changed(self) -> ValueT | None:
        """Look, which may take a while. Return the value if it changed, else None. Raises
        `InputError` if it cannot be read.
        """
        return None


class WatchedFile(Watched[ValueT]):
    """The value that `read` makes of a file, and again when the file changes. `read` raises
    `InputError` if it cannot; for each bad version that is raised once.
    """

    every_s = CHECK_EVERY_S

    def __init__(self, file: Path, read: Callable[[Path], ValueT]) -> None:
        self._file = file
        self._read = read
        # Taken before reading: a file that changes meanwhile is read once more.
        self._fingerprint = _fingerprint(file)
        super().__init__(read(file))

    def changed(self) -> ValueT | None:
        fingerprint = _fingerprint(self._file)
        if fingerprint == self._fingerprint:
            return None
        self._fingerprint = fingerprint
        self.value = self._read(self._file)
        return self.value


def _fingerprint(file: Path) -> tuple[int, ...]:
    """A file's version; () for a missing file.

    The inode's time (ctime) changes even if the length stays the same and both writes fall into one
    tick of the clock.
    """
    try:
        stat = file.stat()
    except OSError:
        return ()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


async def follow(
    watched: Watched[ValueT], take: Callable[[ValueT], str], say: Callable[[str], None]
) -> None:
    """Look again and again; `take` gets each new value, and returns a message about the change.
    Returns only if the value never changes.
    """
    problem = ""
    while watched.every_s is not None:
        await asyncio.sleep(watched.every_s)
        before = problem
        problem = message = ""
        try:
            # In a thread: parsing a file of 100 keys takes tens of milliseconds, which would
            # pause all streams.
            value = await asyncio.to_thread(watched.changed)
            message = "" if value is None else take(value)
        except LlmctlError as error:
            problem = f"warning: {error.message}; the version read before stays in force"
        if told := message or (problem if problem != before else ""):
            with suppress(OSError):  # stderr is closed at the other end
                say(told)
