"""Files that a server reads again when they change: those of keys and of replicas.

`follow` checks files once a second through stat(2). That detects a link that Kubernetes swaps, a
new file that an editor puts under the old name, and `cp` into the existing file. If a file cannot
be read, the last good version stays in force and one warning is printed per bad version. SIGHUP
triggers a check at once, and reads the files even if they seem unchanged.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from toolkit.errors import LlmctlError

CHECK_EVERY_S = 1.0
ValueT = TypeVar("ValueT")


class WatchedFiles(Generic[ValueT]):
    """The value that `read` makes of some files. `read` raises `InputError` if it cannot."""

    def __init__(self, files: Sequence[Path], read: Callable[[], ValueT]) -> None:
        self.files = tuple(files)
        self._read = read
        # Taken before reading: a file that changes meanwhile is read once more.
        self._fingerprints = [_fingerprint(file) for file in self.files]
        self.value = read()

    def changed(self, *, always: bool = False) -> ValueT | None:
        """The new value if the files have changed, or with `always`; otherwise None.

        Raises `InputError` once for each bad version.
        """
        fingerprints = [_fingerprint(file) for file in self.files]
        if fingerprints == self._fingerprints and not always:
            return None
        self._fingerprints = fingerprints
        self.value = self._read()
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
    files: WatchedFiles[ValueT], take: Callable[[ValueT], str], say: Callable[[str], None]
) -> None:
    """Check the files again and again, and at once at SIGHUP; `take` gets each new value, and
    returns a message about the change. Returns only if there are none.

    In a terminal SIGHUP ends the server (`toolkit.server.process.end_signals`), and checks nothing.
    """
    if not files.files:
        return
    loop = asyncio.get_running_loop()
    hangup = asyncio.Event()
    rereads_at_hangup = not sys.stderr.isatty()
    if rereads_at_hangup:
        loop.add_signal_handler(signal.SIGHUP, hangup.set)
    try:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(hangup.wait(), CHECK_EVERY_S)
            always = hangup.is_set()
            hangup.clear()
            try:
                # In a thread: parsing a file of 100 keys takes tens of milliseconds, which would
                # pause all streams.
                value = await asyncio.to_thread(files.changed, always=always)
                message = "" if value is None else take(value)
            except LlmctlError as error:
                message = f"warning: {error.message}; the version read before stays in force"
            if message:
                with suppress(OSError):  # stderr is closed at the other end
                    say(message)
    finally:
        if rereads_at_hangup:
            loop.remove_signal_handler(signal.SIGHUP)
