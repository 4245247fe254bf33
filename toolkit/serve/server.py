"""The process: listen, load, serve, and end in order when told to.

On a signal /ready turns 503 first, while requests are still taken; then the listener closes and
nothing new is taken, streams go on, and what is left in the end gets a final error.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.types import ASGIApp

from toolkit.errors import InputError
from toolkit.serve.driver import Driver
from toolkit.serve.http import BACKLOG, HttpServer, WireLimits

NO_SHARES = WireLimits()
LAST_BYTES_S = 5  # for final chunks to leave
ACCEPTED_S = 0.02  # for the loop to accept who has connected, before the listener closes


def _nobody(_: str) -> None:
    """Is told, and does nothing."""


@dataclass(slots=True, frozen=True)
class Ending:
    """How long a server that was told to stop takes requests still (`notice_s`), and waits for them
    (`timeout_s`).

    `say` is told what it waits for, where it does.
    """

    notice_s: float = 0.0
    timeout_s: float = 30.0
    say: Callable[[str], None] = field(default=_nobody, compare=False)


def check_exposure(host: str, *, asks_key: bool, insecure: bool) -> None:
    """`InputError` for an address that others can reach, without a key."""
    if asks_key or insecure or is_loopback(host):
        return
    raise InputError(
        f"host {host} can be reached from other machines, and there is no API key",
        "set LLMCTL_API_KEY, or give --api-keys FILE, or serve on 127.0.0.1, or add --insecure",
    )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, before anything slow is done. `InputError` where the address is taken or not
    ours.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = min(
            found, key=lambda one: one[0] != socket.AF_INET
        )  # 'localhost' is both
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
    """What asks for an orderly end. SIGHUP where a terminal has gone with it, unless `nohup` has it
    ignored.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    if sys.stderr.isatty() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        return (*numbers, signal.SIGHUP)
    return numbers


class Signals:
    """The signals that end it, as events: the first asks for an orderly end, the second for one at
    once.

    SIGHUP without a terminal asks for files to be read again, and where there are none
    (`rereading`) for nothing.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        ending = end_signals()
        if signal.SIGHUP not in ending:
            loop.add_signal_handler(signal.SIGHUP, lambda: None)
        for number in ending:
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def serve(
    driver: Driver,
    app: ASGIApp,
    listener: socket.socket,
    ending: Ending,
    on_ready: Callable[[], None],
    tls: ssl.SSLContext | None = None,
    limits: WireLimits = NO_SHARES,
) -> None:
    """Serve until a signal ends it; `limits` is what clients may take.

    `EngineError` where a worker cannot load, or where none is left and none can be loaded again; a
    bug of the scheduler is raised.
    """
    signals = Signals()
    server = HttpServer(app, limits, on_share=driver.stats.count_share)
    await server.start(listener, tls)
    loading = asyncio.create_task(driver.start())
    try:
        await first_of(loading, signals.first.wait())
        if not signals.first.is_set():
            loading.result()
            on_ready()
            await first_of(signals.first.wait(), driver.broke.wait())
            for ended_by in (driver.bug, driver.failed):
                if ended_by:
                    raise ended_by
            await leave(driver, server, ending, signals)
    finally:
        loading.cancel()
        await asyncio.wait([loading])
        await driver.stop()
        await server.stop(LAST_BYTES_S)


async def leave(driver: Driver, server: HttpServer, ending: Ending, signals: Signals) -> None:
    """Announce the end, keep serving for the notice, then wait for what runs. A second signal cuts
    both short.

    Whoever has connected by then is heard, and whoever has not may try elsewhere at once.
    """
    driver.leaving = True
    left = driver.running + driver.waiting
    if left:
        requests = "1 request has" if left == 1 else f"{left} requests have"
        ending.say(
            f"ending: {requests} {ending.timeout_s:g} s to finish; a second signal or Ctrl-C ends it now"
        )
    with suppress(TimeoutError):
        await asyncio.wait_for(signals.second.wait(), ending.notice_s)
    await asyncio.sleep(ACCEPTED_S)
    server.close_listener()
    await first_of(driver.drain(ending.timeout_s), signals.second.wait())


async def first_of(*waits: Awaitable[object]) -> None:
    """Return when one of these is done; coroutines among them are cancelled then, tasks and futures
    go on.
    """
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, wait in zip(tasks, waits, strict=True):
            if task is not wait:
                task.cancel()
