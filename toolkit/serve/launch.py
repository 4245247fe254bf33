"""One config and one launch for every front: over workers of our own, before replicas, a recorder.

`launch` opens what a front needs, serves until a signal ends it, and closes all of it. What a kind
of front adds is a `FrontServer`. Neither the log of events nor the log of requests holds text,
prompt tokens or names of clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Self

import uvloop
from starlette.types import Receive, Scope, Send

from toolkit.files.io import LineLog
from toolkit.sched.eventlog import Event, to_line
from toolkit.serve.access import Callers, Keyring
from toolkit.serve.assemble import FrontSettings
from toolkit.serve.background import Background, Work
from toolkit.serve.http import HttpServer
from toolkit.serve.limits import DEFAULT_LIMITS, WireLimits
from toolkit.serve.log import RefusalLog, logging_to_stderr
from toolkit.serve.server import (
    Ending,
    Signals,
    WatchedFiles,
    check_exposure,
    first_of,
    follow,
    is_loopback,
    leave,
    listen,
    url,
)
from toolkit.serve.stats import Stats
from toolkit.traces.write import TraceLog

PENDING_BYTES_MAX = 1 << 16  # of an event log, before they are written
EVENT_LOG_BYTES_MAX = 1 << 30  # an hour or so of a busy server
FLUSH_EVERY_S = 1.0
LAST_BYTES_S = 5  # for final chunks to be sent


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

    async def report_health(self, healthy: Callable[[], bool]) -> None:
        """Report health twice per `watchdog_s`, while there is any. A blocked loop reports none."""
        while self.watchdog_s:
            if healthy():
                self.beat()
            await asyncio.sleep(self.watchdog_s / 2)

    def beat(self) -> None:
        """Report once that the server is healthy, where there is a watchdog."""
        if self.watchdog_s:
            # The manager may be restarting, or too busy to read: the next report will arrive.
            with contextlib.suppress(OSError):
                self.tell("WATCHDOG=1", flags=socket.MSG_DONTWAIT)


@dataclass(slots=True, frozen=True)
class FrontConfig:
    """A front to start: its address, its keys, its logs, and its end."""

    settings: FrontSettings
    host: str
    port: int
    keys: WatchedFiles[Callers]  # without any key everything is open
    insecure: bool = False
    event_log: Path | None = None
    request_log: Path | None = None
    ending: Ending = field(default_factory=Ending)
    certificate: Path | None = None  # with it the server speaks TLS
    certificate_key: Path | None = None  # None: in the certificate's file
    manager: Manager = field(default_factory=Manager)  # gets health reports


@dataclass(slots=True, frozen=True)
class OpenedFront:
    """What `launch` has opened for a front."""

    settings: FrontSettings
    keyring: Keyring
    say: Callable[[str], None]
    events: EventLog | None = None
    requests: TraceLog | None = None


class FrontServer(ABC):
    """An ASGI application that `launch` starts, serves and ends.

    Attributes:
        limits: what clients may use.
        stats: its counters.
        background: its tasks.
        tasks: what runs beside the requests, by name.
        dated: whether responses have a Date; a proxy leaves it to the upstream server.
    """

    dated = True

    def __init__(
        self,
        stats: Stats,
        background: Background,
        limits: WireLimits = DEFAULT_LIMITS,
    ) -> None:
        self.limits = limits
        self.stats = stats
        self.background = background
        self.tasks: dict[str, Work] = {}

    @abstractmethod
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

    @property
    @abstractmethod
    def left(self) -> int:
        """Requests that have not ended."""

    @property
    def healthy(self) -> bool:
        """What its service manager is told."""
        return True

    @abstractmethod
    def announce_end(self) -> None:
        """The end is announced: load balancers should stop sending, though requests still run."""

    async def start(self) -> None:
        """Return when it can serve. It listens before, and answers that it cannot yet."""
        return

    async def broken(self) -> None:
        """Raise when it cannot go on."""
        await asyncio.Event().wait()

    @abstractmethod
    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and wait at most `timeout_s` seconds for those that run."""

    async def stop(self) -> None:
        """End what it has started."""
        return


def launch(
    config: FrontConfig,
    make: Callable[[OpenedFront], AbstractContextManager[FrontServer]],
    on_ready: Callable[[str], None],
) -> dict[str, int]:
    """Serve until a signal ends the front. Returns the number of ended requests by finish reason.

    `on_ready` gets the URL once the front can serve. Raises `InputError` for an address or a log
    that cannot be used, and what `make` and the front raise.
    """
    asks_key = any(config.keys.value)
    check_exposure(config.host, asks_key=asks_key, insecure=config.insecure)
    local = is_loopback(config.host) and not asks_key
    with ExitStack() as stack:
        listener = stack.enter_context(listen(config.host, config.port))
        stack.enter_context(logging_to_stderr())
        events = stack.enter_context(EventLog(config.event_log)) if config.event_log else None
        requests = stack.enter_context(TraceLog(config.request_log)) if config.request_log else None
        opened = OpenedFront(
            replace(config.settings, local_hosts_only=local),
            Keyring(*config.keys.value),
            config.ending.say,
            events,
            requests,
        )
        front = stack.enter_context(make(opened))
        front.tasks |= {
            "log of refusals": RefusalLog(front.stats).follow,
            "keys": lambda: follow(config.keys, opened.keyring.renew, config.ending.say),
            "health of the manager": lambda: config.manager.report_health(lambda: front.healthy),
        }
        if events is not None:
            front.tasks["event log"] = events.flushing
        gc.collect()
        # Imported objects stay: no later collection should pause all streams to walk over them.
        gc.freeze()
        address = url(listener, tls=config.certificate is not None)
        tls = config.certificate, config.certificate_key
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            serving = serve(front, listener, config.ending, lambda: on_ready(address), *tls)
            runner.run(serving)
        return dict(front.stats.ended)


async def serve(
    front: FrontServer,
    listener: socket.socket,
    ending: Ending,
    on_ready: Callable[[], None],
    certificate: Path | None = None,
    certificate_key: Path | None = None,
) -> None:
    """Serve on a bound `listener` until a signal ends the front. Raises what the front raises."""
    server = HttpServer(
        front,
        front.limits,
        dated=front.dated,
        certificate=certificate,
        key=certificate_key,
        on_status=front.stats.count_status,
    )
    signals = Signals()
    for name, work in front.tasks.items():
        front.background.start(name, work)
    starting: asyncio.Task[None] | None = None
    breaking: asyncio.Task[None] | None = None
    try:
        await server.start(listener)
        starting = asyncio.create_task(front.start())
        await first_of(starting, signals.first.wait())
        if not signals.first.is_set():
            starting.result()
            on_ready()
            breaking = asyncio.create_task(front.broken())
            await first_of(signals.first.wait(), breaking)
            if breaking.done():
                breaking.result()
            front.announce_end()
            await leave(front.left, server, ending, signals, partial(front.drain, ending.timeout_s))
    finally:
        tasks = [task for task in (starting, breaking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await front.stop()
        await front.background.stop()
        await server.stop(LAST_BYTES_S)
        signals.close()


class EventLog:
    """The calls of a scheduler, in a new file that can be replayed.

    `flushing` writes it once a second: a killed server loses little, and an event costs no system
    call. Only whole lines are written. Where an event cannot be written, the log ends
    (`toolkit.files.io`). An error of the disk raises nothing here.
    """

    def __init__(self, path: Path) -> None:
        self._pending = bytearray()
        self._log = LineLog(path, EVENT_LOG_BYTES_MAX)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        self._log.close()

    def add(self, event: Event) -> None:
        self._pending += to_line(event)
        if len(self._pending) >= PENDING_BYTES_MAX:
            self.flush()

    async def flushing(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            self.flush()

    def flush(self) -> None:
        self._log.write(bytes(self._pending))
        self._pending.clear()
