"""Files that are read again while the server runs, when they change: who may call, and the
certificate.

Their names are looked at once a second. What Kubernetes mounts changes by a link that is swapped,
an editor puts a new file under the old name, `cp` writes into the one that is there: all of it
shows in what stat(2) says of the name. What cannot be read leaves in force what was read before,
and is told once, until the file changes again. SIGHUP asks for a look at once, and for a reading
even where nothing seems to have changed.
"""

from __future__ import annotations

import asyncio
import signal
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from toolkit.errors import InputError

LOOK_EVERY_S = 1.0
ValueT = TypeVar("ValueT")
Mark = tuple[int, ...]  # of a file as it was; () where there was none


class WatchedFiles(Generic[ValueT]):
    """What `read` makes of some files. `InputError` where it cannot."""

    def __init__(self, files: Sequence[Path], read: Callable[[], ValueT]) -> None:
        self.files = tuple(files)
        self._read = read
        self._marks = (
            self._look()
        )  # before they are read: what is written meanwhile is read once more
        self.value = read()

    def news(self, *, always: bool = False) -> ValueT | None:
        """What the files say now, where they have changed; None where not. `InputError` once for
        each bad version.
        """
        marks = self._look()
        if marks == self._marks and not always:
            return None
        self._marks = marks
        self.value = self._read()
        return self.value

    def _look(self) -> list[Mark]:
        return [_mark(file) for file in self.files]


def _mark(file: Path) -> Mark:
    """The times of the node too: what was written twice within a tick, at the same length, has
    other ones.
    """
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class Followed(Generic[ValueT]):
    """A source, and who takes what it says once it has changed. `take` returns what to say of that."""

    def __init__(self, source: WatchedFiles[ValueT], take: Callable[[ValueT], str]) -> None:
        self._source = source
        self._take = take

    async def look(self, *, always: bool) -> str:
        """What to say; '' where nothing has changed."""
        try:
            # on a thread: a file of 100 keys takes tens of milliseconds to parse, in which streams
            # would stand still
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
    """In a terminal SIGHUP says that the terminal has gone, and ends the server in order
    (`server.end_signals`).
    """
    if sys.stderr.isatty():
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, call)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


# The certificate that the server shows, where it speaks TLS itself: read, checked, and replaced
# while it runs.

PEM_HINT = "--ssl-certfile and --ssl-keyfile are PEM files, the certificate before those of its authorities"


def certificate_source(certificate: Path, key: Path | None) -> WatchedFiles[ssl.SSLContext]:
    """The two files as a context for a listener; without `key`, the key is in the certificate's
    file.

    `InputError` where they cannot be read, do not belong together, or the key has a passphrase.
    """
    return WatchedFiles([certificate, *([key] if key else [])], lambda: _read(certificate, key))


class Certificate:
    """A context to listen with. Connections made after `renew` get the newer certificate; older
    ones go on.
    """

    def __init__(self, source: WatchedFiles[ssl.SSLContext]) -> None:
        self.context = self._now = source.value
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called in every handshake, whether or not the client names a host."""
        connection.context = self._now

    def renew(self, context: ssl.SSLContext) -> str:
        """Another certificate from now on, whole: a pair of files that is half new never gets here.
        What to say.
        """
        self._now = context
        return "the certificate was read again"


def _read(certificate: Path, key: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    for file in (certificate, key or certificate):
        try:
            file.open("rb").close()  # OpenSSL does not say which one it cannot read
        except OSError as error:
            raise InputError(f"{file}: cannot be read: {error.strerror}", PEM_HINT) from None

    def refuse_passphrase() -> str:
        raise InputError(
            f"{key or certificate}: the key has a passphrase",
            "openssl pkey -in KEY -out PLAIN takes it off",
        )

    try:
        context.load_cert_chain(certificate, key, refuse_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InputError(
                f"{key or certificate}: not the key of the certificate {certificate}", PEM_HINT
            ) from None
        where = certificate if key is None else f"{certificate} and {key}"
        raise InputError(f"{where}: no certificate and its key", PEM_HINT) from None
    return context
