"""Files that the server reads again when they change: the keys, and the TLS certificate.

`follow` checks the files once a second through stat(2). That detects a link that Kubernetes swaps,
a new file that an editor puts under the old name, and `cp` into the existing file. If a file cannot
be read, the last good version stays in force and one warning is printed per bad version. SIGHUP
triggers a check at once, and reads the files even if they seem unchanged.

`Certificate` replaces the certificate of a listener while the server runs.
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

CHECK_EVERY_S = 1.0
ValueT = TypeVar("ValueT")
Fingerprint = tuple[int, ...]  # of a file's version; () for a missing file
PEM_HINT = (
    "--ssl-certfile and --ssl-keyfile are PEM files; "
    "the certificate comes before those of its authorities"
)


class WatchedFiles(Generic[ValueT]):
    """The value that `read` makes of some files. `read` raises `InputError` if it cannot."""

    def __init__(self, files: Sequence[Path], read: Callable[[], ValueT]) -> None:
        self.files = tuple(files)
        self._read = read
        # Taken before reading: a file that changes meanwhile is read once more.
        self._fingerprints = self._take_fingerprints()
        self.value = read()

    def changed(self, *, always: bool = False) -> ValueT | None:
        """The new value if the files have changed, or with `always`; otherwise None.

        Raises `InputError` once for each bad version.
        """
        fingerprints = self._take_fingerprints()
        if fingerprints == self._fingerprints and not always:
            return None
        self._fingerprints = fingerprints
        self.value = self._read()
        return self.value

    def _take_fingerprints(self) -> list[Fingerprint]:
        """The times include that of the inode, which changes even if the length stays the same and
        both writes fall into one tick of the clock."""
        found: list[Fingerprint] = []
        for file in self.files:
            try:
                stat = file.stat()
            except OSError:
                found.append(())
                continue
            times = stat.st_mtime_ns, stat.st_ctime_ns
            found.append((stat.st_dev, stat.st_ino, stat.st_size, *times))
        return found


class Followed(Generic[ValueT]):
    """Watched files, and what applies their new value. `apply` returns a message about it."""

    def __init__(self, source: WatchedFiles[ValueT], apply: Callable[[ValueT], str]) -> None:
        self._source = source
        self._apply = apply

    async def check(self, *, always: bool) -> str:
        """Apply a change. Returns the message about it, or '' if nothing has changed."""
        try:
            # In a thread: parsing a file of 100 keys takes tens of milliseconds, which would pause
            # all streams.
            value = await asyncio.to_thread(self._source.changed, always=always)
        except InputError as error:
            return f"warning: {error.message}; the version read before stays in force"
        return "" if value is None else self._apply(value)


async def follow(everything: Sequence[Followed[Any]], say: Callable[[str], None]) -> None:
    """Check all files again and again. Returns at once if there are none, otherwise never."""
    hangup = asyncio.Event()
    with _on_hangup(hangup.set) if everything else nullcontext():
        while everything:
            with suppress(TimeoutError):
                await asyncio.wait_for(hangup.wait(), CHECK_EVERY_S)
            always = hangup.is_set()
            hangup.clear()
            for followed in everything:
                if message := await followed.check(always=always):
                    with suppress(OSError):  # stderr is closed at the other end
                        say(message)


@contextmanager
def _on_hangup(call: Callable[[], None]) -> Iterator[None]:
    """Call `call` at SIGHUP.

    In a terminal SIGHUP means that the terminal was closed, and ends the server
    (`server.end_signals`); then this does nothing.
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


def certificate_source(certificate: Path, key: Path | None) -> WatchedFiles[ssl.SSLContext]:
    """The two files as a context for a listener. Without `key`, the certificate's file has the key.

    Raises `InputError` if they cannot be read, do not match, or the key has a passphrase.
    """
    files = [certificate, key] if key else [certificate]
    return WatchedFiles(files, lambda: _read_certificate(certificate, key))


class Certificate:
    """A context for a listener. Connections made after `renew` get the new certificate."""

    def __init__(self, source: WatchedFiles[ssl.SSLContext]) -> None:
        self.context = self._current = source.value
        self.context.sni_callback = self._on_handshake

    def _on_handshake(
        self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> None:
        """OpenSSL calls this in every handshake, whether or not the client names a host."""
        connection.context = self._current

    def renew(self, context: ssl.SSLContext) -> str:
        """Use another certificate from now on. Returns a message about it.

        A pair of files of which only one is new fails to load, so it never gets here.
        """
        self._current = context
        return "the certificate was read again"


def _read_certificate(certificate: Path, key: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    for file in (certificate, key or certificate):
        try:
            file.open("rb").close()  # OpenSSL does not name the file that it cannot read
        except OSError as error:
            raise InputError(f"{file}: cannot be read: {error.strerror}", PEM_HINT) from None

    def refuse_passphrase() -> str:
        raise InputError(
            f"{key or certificate}: the key has a passphrase",
            "remove it with: openssl pkey -in KEY -out PLAIN",
        )

    try:
        context.load_cert_chain(certificate, key, refuse_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InputError(
                f"{key or certificate}: not the key of the certificate {certificate}", PEM_HINT
            ) from None
        where = certificate if key is None else f"{certificate} and {key}"
        raise InputError(f"{where}: not a certificate with its key", PEM_HINT) from None
    return context
