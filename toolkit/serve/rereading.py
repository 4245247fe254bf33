"""Files that are read again while the server runs, when they change: who may call, and the certificate.

Their names are looked at once a second. What Kubernetes mounts changes by a link that is swapped, an editor puts a new
file under the old name, `cp` writes into the one that is there: all of it shows in what stat(2) says of the name. What
cannot be read leaves in force what was read before, and is told once, until the file changes again. SIGHUP asks for a
look at once, and for a reading even where nothing seems to have changed.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from toolkit.errors import InputError

LOOK_EVERY_S = 1.0
ValueT = TypeVar("ValueT")
Mark = tuple[int, ...]  # of a file as it was; () where there was none


class Source(Generic[ValueT]):
    """What `read` makes of some files. `InputError` where it cannot."""

    def __init__(self, files: Sequence[Path], read: Callable[[], ValueT]) -> None:
        self.files = tuple(files)
        self._read = read
        self._marks = self._look()  # before they are read: what is written meanwhile is read once more
        self.value = read()

    def news(self, *, always: bool = False) -> ValueT | None:
        """What the files say now, where they have changed; None where not. `InputError` once for each bad version."""
        marks = self._look()
        if marks == self._marks and not always:
            return None
        self._marks = marks
        self.value = self._read()
        return self.value

    def _look(self) -> list[Mark]:
        return [_mark(file) for file in self.files]


def _mark(file: Path) -> Mark:
    """The times of the node too: what was written twice within a tick, at the same length, has other ones."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class Followed(Generic[ValueT]):
    """A source, and who takes what it says once it has changed. `take` returns what to say of that."""

    def __init__(self, source: Source[ValueT], take: Callable[[ValueT], str]) -> None:
        self._source = source
        self._take = take

    async def look(self, *, always: bool) -> str:
        """What to say; '' where nothing has changed."""
        try:
            # on a thread: a file of 100 keys takes tens of milliseconds to parse, in which streams would stand still
            found = await asyncio.to_thread(self._source.news, always=always)
        except InputError as error:
            return f"warning: {error.message}; what was read before stays in force"
        return "" if found is None else self._take(found)


async def follow(everything: Sequence[Followed[Any]], say: Callable[[str], None]) -> None:
    """Look at all of them, again and again. Never ends, unless there is nothing to look at."""
    hangup = asyncio.Event()
    with _on_hangup(hangup.set) if everything else nullcontext():
        while everything:
            with suppress(TimeoutError):
                await asyncio.wait_for(hangup.wait(), LOOK_EVERY_S)
            asked = hangup.is_set()
            hangup.clear()
            for one in everything:
                if line := await one.look(always=asked):
                    with suppress(OSError):  # whoever read stderr has left
                        say(line)


@contextmanager
def _on_hangup(call: Callable[[], None]) -> Iterator[None]:
    """In a terminal SIGHUP says that the terminal has gone, and ends the server in order (`server.end_signals`)."""
    if sys.stderr.isatty():
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, call)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
