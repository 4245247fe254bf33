"""The process of the server: listen, load, serve, and end in order at a signal; and the files that
it reads again when they change, those of keys and of replicas.

At a signal /ready turns 503 first, while requests are still accepted (`Ending.notice_s`). Then the
listener closes and running requests may finish (`Ending.timeout_s`). Requests that are still left
get a final error.

`follow` checks files once a second through stat(2). That detects a link that Kubernetes swaps, a
new file that an editor puts under the old name, and `cp` into the existing file. If a file cannot
be read, the last good version stays in force and one warning is printed per bad version. SIGHUP
triggers a check at once, and reads the files even if they seem unchanged.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from starlette.types import Receive

from toolkit import interrupts
from toolkit.errors import InputError, LlmctlError
from toolkit.serve.http import BACKLOG, HttpServer

ACCEPT_LAST_S = 0.02  # to accept pending connections before the listener closes
CHECK_EVERY_S = 1.0  # the files that are read again
ValueT = TypeVar("ValueT")


@dataclass(slots=True, frozen=True)
class Ending:
    """How a server ends. Times are in seconds."""

    notice_s: float = 0.0  # after the signal, while requests are still accepted
    timeout_s: float = 30.0  # after that, for running requests
    # Prints what it waits for.
    say: Callable[[str], None] = field(default=lambda _: None, compare=False)


def check_exposure(host: str, *, asks_key: bool, insecure: bool) -> None:
    """Raise `InputError` for an address that other machines can reach, if there is no key."""
    if asks_key or insecure or is_loopback(host):
        return
    raise InputError(
        f"host {host} can be reached from other machines, and there is no API key",
        "set LLMCTL_API_KEY, or give --api-key-file FILE, or serve on 127.0.0.1, or add --insecure",
    )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises `InputError` if the address is taken or not of this machine.

    It is called before anything slow, so that such an error is reported at once.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # Prefer IPv4: 'localhost' is both.
        family, _, _, _, address = min(infos, key=lambda info: info[0] != socket.AF_INET)
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # the rest repeats the address
        which = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise InputError(
            f"cannot listen on {host} port {port}: {reason}", f"choose another {which}"
        ) from None


def url(listener: socket.socket, *, tls: bool = False) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def end_signals() -> tuple[signal.Signals, ...]:
    """The signals that end the server in order.

    In a terminal SIGHUP is one of them, since it means that the terminal was closed. `nohup`
    ignores it.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    if sys.stderr.isatty() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        return (*numbers, signal.SIGHUP)
    return numbers


class Signals:
    """The signals that end the server, as events: the first ends it in order, the second at once.

    Without a terminal SIGHUP means that files should be read again (`follow`); if there are no such
    files, it has no effect.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            if number == signal.SIGINT:
                interrupts.note()
            (self.second if self.first.is_set() else self.first).set()

        ending = end_signals()
        if signal.SIGHUP not in ending:
            self._loop.add_signal_handler(signal.SIGHUP, lambda: None)
        for number in ending:
            self._loop.add_signal_handler(number, on_signal, number)

    def close(self) -> None:
        """Give the signals back. A closed loop of uvloop would keep them and do nothing."""
        for number in {signal.SIGHUP, *end_signals()}:
            self._loop.remove_signal_handler(number)


async def leave(
    left: int,
    server: HttpServer,
    ending: Ending,
    signals: Signals,
    drain: Callable[[], Awaitable[object]],
) -> None:
    """Say that `left` requests may end, keep serving for the notice, then `drain`: refuse new
    requests and wait for those that run.

    A second signal ends both at once. Clients that have connected by the end of the notice get an
    answer; later ones cannot connect, and may try another server.
    """
    if left:
        requests = "1 request has" if left == 1 else f"{left} requests have"
        ending.say(
            f"ending: {requests} {ending.timeout_s:g} s to finish; "
            "a second signal or Ctrl-C ends it now"
        )
    with suppress(TimeoutError):
        await asyncio.wait_for(signals.second.wait(), ending.notice_s)
    await asyncio.sleep(ACCEPT_LAST_S)
    server.close_listener()
    await first_of(drain(), signals.second.wait())


async def first_of(*waits: Awaitable[object]) -> None:
    """Return when one of `waits` is done. It cancels coroutines; tasks and futures continue."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, wait in zip(tasks, waits, strict=True):
            if task is not wait:
                task.cancel()


class RunningRequests:
    """The requests that run, each within a `with` block."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def __len__(self) -> int:
        return self._count

    def __enter__(self) -> None:
        self._count += 1
        self._none.clear()

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count:
            self._none.set()

    async def ended(self, timeout_s: float) -> None:
        """Wait until none runs, at most `timeout_s` seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._none.wait(), timeout_s)


async def disconnected(receive: Receive) -> None:
    """Return when a request's client is gone; its body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends; cancel it if the client is gone before. Raises what it raises."""
    task = asyncio.create_task(work)
    try:
        await first_of(task, disconnected(receive))
        if task.done():
            task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        del task  # its exception knows this frame: a cycle, which only a collection would free


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

    In a terminal SIGHUP ends the server (`end_signals`), and checks nothing.
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
