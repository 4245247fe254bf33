"""The process of a server: its address, the signals that end it, and what started it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import ipaddress
import os
import signal
import socket
import sys
from dataclasses import dataclass

from toolkit import interrupts
from toolkit.errors import InputError

BACKLOG = 2048  # connections that wait to be accepted


def forget_variable(name: str) -> None:
    """Remove a variable from this process's environment, and from /proc/PID/environ on Linux.

    The latter shows the memory that the process was started with, which unsetting a variable does
    not touch.
    """
    value = os.environ.get(name)
    if value is None:
        return
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_void_p
        address = libc.getenv(os.fsencode(name))
        size = len(os.fsencode(value))
        if address and ctypes.string_at(address) == os.fsencode(value):
            ctypes.memset(address, 0, size)
    del os.environ[name]


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

    Without a terminal SIGHUP has no effect.
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


@dataclass(slots=True, frozen=True)
class Manager:
    """The service manager that started this process, if any (sd_notify(3), sd_watchdog_enabled(3)).

    It gets one datagram per report. If the server reports nothing for `watchdog_s` seconds, the
    manager ends it and usually starts it again.
    """

    address: str = ""  # of its socket; '': there is no manager
    watchdog_s: float | None = None  # None: there is no watchdog

    @classmethod
    def take(cls) -> Manager:
        """Read the environment, and remove the variables, since workers inherit the environment."""
        address, limit, process = (
            os.environ.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
        )
        watched = limit.isdecimal() and process in ("", str(os.getpid()))
        return cls(address, int(limit) / 1e6 if watched else None)

    def tell(self, state: str, *, flags: int = 0) -> None:
        """Send a state such as READY=1; '@' begins a name in Linux's abstract namespace."""
        if not self.address:
            return
        name = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.connect(name)
            manager.send(state.encode(), flags)

    def beat(self) -> None:
        """Report once that the server is healthy, where there is a watchdog."""
        if self.watchdog_s:
            # The manager may be restarting, or too busy to read: the next report will arrive.
            with contextlib.suppress(OSError):
                self.tell("WATCHDOG=1", flags=socket.MSG_DONTWAIT)
