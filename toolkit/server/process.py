"""The process of a server: its address, the signals that end it, and what started it."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import ipaddress
import os
import signal
import socket
import sys

from toolkit import interrupts
from toolkit.errors import InputError

BACKLOG = 2048  # connections that wait to be accepted
END_SIGNALS = (signal.SIGTERM, signal.SIGINT)  # that end a server in order


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


class Signals:
    """The signals that end the server: the first ends it in order, the second at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            if number == signal.SIGINT:
                interrupts.note()
            (self.second if self.first.is_set() else self.first).set()

        for number in END_SIGNALS:
            self._loop.add_signal_handler(number, on_signal, number)

    def close(self) -> None:
        """Give the signals back. A closed loop of uvloop would keep them and do nothing."""
        for number in END_SIGNALS:
            self._loop.remove_signal_handler(number)


def tell_ready() -> None:
    """Tell the service manager that started this process, if any, that it serves (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        # '@' begins a name in Linux's abstract namespace.
        name = "\0" + address[1:] if address.startswith("@") else address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.connect(name)
            manager.send(b"READY=1")
