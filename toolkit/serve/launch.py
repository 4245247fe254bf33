"""From a plan to a running server: `launch` builds everything, and tears it down at the end.

Neither the log of events nor that of requests holds text, prompt tokens or names of clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from ssl import SSLContext
from typing import Self

import uvloop

from toolkit.engine_traits import traits_of
from toolkit.engines.tokenizer import load_tokenizer
from toolkit.files.io import LineLog
from toolkit.files.plan import Plan
from toolkit.files.profile import EngineFacts, OnForeign, identity, refuse_foreign
from toolkit.routing.admission import UNLIMITED, LatencyLimits
from toolkit.routing.balancer import BalancerEvent
from toolkit.sched.eventlog import Event, lost_line, to_line
from toolkit.sched.types import Request
from toolkit.serve import server
from toolkit.serve.access import Callers, Keyring
from toolkit.serve.api import make_app
from toolkit.serve.assemble import FrontSettings, make_scheduler, make_stats
from toolkit.serve.drift import CheckedWorkers, DriftCheck, OnFound
from toolkit.serve.driver import Driver
from toolkit.serve.helper import Helper
from toolkit.serve.http import CLIENT_SHARE, WireLimits
from toolkit.serve.live import ActiveRequest
from toolkit.serve.status import Status, facts_of
from toolkit.traces.write import TraceLine, TraceLog, ms_or_none
from toolkit.workers.pool import Patience, ProcessWorkers
from toolkit.workers.process import require_gpu
from toolkit.workers.protocol import Workers

PENDING_BYTES_MAX = 1 << 16  # of an event log, before they are written
EVENT_LOG_BYTES_MAX = 1 << 30  # an hour or so of a busy server
FLUSH_EVERY_S = 1.0


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
class Launch:
    """A server to start."""

    plan: Plan
    settings: FrontSettings
    host: str
    port: int
    access: Callers = ("", ())  # the one key, or several keys; without any everything is open
    insecure: bool = False
    limits: LatencyLimits = UNLIMITED
    client_share: float = CLIENT_SHARE  # of connections and of held bytes, for one client
    event_log: Path | None = None
    request_log: Path | None = None
    ending: server.Ending = field(default_factory=server.Ending)
    checks: Sequence[DriftCheck] = ()  # of the fits, before the first request
    # Called if the engine is not the fitted one; None: the server refuses to start then.
    on_foreign: OnForeign | None = None
    # The Ray cluster of the workers (`toolkit.cluster.connect.joined` lists the values); '': this
    # machine.
    ray: str = ""
    room_timeout_s: float = 60.0  # for the cluster to have room for all workers
    # The file of the keys, if it may change while the server runs.
    callers: server.WatchedFiles[Callers] | None = None
    certificate: server.WatchedFiles[SSLContext] | None = None  # None: no TLS
    manager: Manager = field(default_factory=Manager)  # gets health reports


def launch(
    order: Launch, on_ready: Callable[[str], None], on_checked: OnFound = lambda _: None
) -> dict[str, int]:
    """Serve until a signal ends the server. Returns the number of ended requests by finish reason.

    `on_checked` gets the result of the order's checks; what it raises ends the server. Then
    `on_ready` gets the URL, once all workers are loaded.

    Raises `InputError` for an address, a log or a plan that cannot be used, `ForeignError` if the
    workers load another engine, model or device than the laws are about, and `EngineError` if a
    recipe needs a GPU or a library that is missing, or if a worker cannot load.
    """
    if not order.ray:
        require_gpu(kind.recipe for kind in order.plan.kinds)
        for kind in order.plan.kinds:
            traits_of(kind.recipe.engine.name).require()
    asks_key = any(order.access)
    server.check_exposure(order.host, asks_key=asks_key, insecure=order.insecure)
    with ExitStack() as stack:
        listener = stack.enter_context(server.listen(order.host, order.port))
        events = stack.enter_context(EventLog(order.event_log)) if order.event_log else None
        requests = stack.enter_context(TraceLog(order.request_log)) if order.request_log else None
        where = f" on Ray ({order.ray})" if order.ray else ""
        order.ending.say(f"loading {order.plan.workers} workers of {order.plan.recipe.name}{where}")
        tokenizer = load_tokenizer(order.plan.recipe.model)
        warm_up(order.plan)
        workers = stack.enter_context(_workers(order.plan, order.ray, order.room_timeout_s))
        if order.checks:
            workers = CheckedWorkers(workers, order.checks, on_checked)
        driver = _driver(order, workers, events, requests)
        facts = facts_of(order.plan, order.settings.model)
        status = Status(driver, facts) if order.settings.status_page else None
        keyring = Keyring(*order.access)
        local = server.is_loopback(order.host) and not asks_key
        settings = replace(order.settings, local_hosts_only=local)
        helper = Helper(order.plan.recipe.model, settings.vocab_size, settings.max_model_len)
        app = make_app(driver, tokenizer, settings, keyring, helper, status)
        followed, tls = server.followed_files(order.callers, keyring.renew, order.certificate)
        gc.collect()
        # Imported objects stay: no later collection should pause all streams to walk over them.
        gc.freeze()

        background = [
            server.follow(followed, order.ending.say),
            order.manager.report_health(lambda: not driver.bug),
            *([flush(events)] if events else []),
            *([status.sampling()] if status else []),
        ]
        limits = WireLimits(client_share=order.client_share)
        address = server.url(listener, tls=bool(tls))
        serving = server.serve(
            driver, app, listener, order.ending, lambda: on_ready(address), tls, limits
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(serving, helper, background))
        return dict(driver.stats.ended)


async def _run(
    serving: Awaitable[None], helper: Helper, background: Sequence[Coroutine[None, None, None]]
) -> None:
    tasks = [asyncio.create_task(coroutine) for coroutine in background]
    try:
        await helper.start()
        await serving
    finally:
        await helper.stop()
        for task in tasks:
            task.cancel()


@contextmanager
def _workers(plan: Plan, ray: str, room_timeout_s: float) -> Iterator[Workers]:
    """The plan's workers, not started. With Ray, this process is in the cluster meanwhile."""
    serve_spec = plan.recipe.serve
    patience = Patience(grace_s=serve_spec.hang_s, load_s=serve_spec.load_timeout_s)
    if not ray:
        recipes = [kind.recipe for kind in plan.kinds for _ in range(kind.workers)]
        yield ProcessWorkers(recipes, patience)
        return
    from toolkit.cluster.connect import joined
    from toolkit.cluster.places import places, refuse_local_fleet
    from toolkit.cluster.workers import RayWorkers

    refuse_local_fleet(plan.kinds, ray)
    worker_places = places(plan.kinds)
    with joined(ray, sum(place.share.cpus for place in worker_places)):
        yield RayWorkers(worker_places, room_timeout_s, patience)


def _driver(
    order: Launch, workers: Workers, events: EventLog | None, requests: TraceLog | None
) -> Driver:
    plan = order.plan

    def accept(loaded: list[EngineFacts]) -> None:
        facts = iter(loaded)  # in the order of the workers' numbers, kind by kind
        for kind in plan.kinds:
            identities = map(identity, islice(facts, kind.workers))
            refuse_foreign(kind.fit.engine, identities, order.on_foreign)

    def log(active: ActiveRequest, start_s: float) -> None:
        assert requests is not None
        requests.add(trace_line(active, requests.timestamp(start_s + active.arrival_s)))

    return Driver(
        make_scheduler(plan, events.add if events else None),
        workers,
        make_stats(plan),
        on_end=log if requests else None,
        limits=order.limits,
        accept=accept,
    )


WARM_UP_REQUESTS = 8  # for each worker: one alone needs no kernel that batches several


def warm_up(plan: Plan) -> None:
    """Load or compile the policy's kernels before the first request: it takes 0.3 s or more."""
    scheduler = make_scheduler(plan)
    for number in range(WARM_UP_REQUESTS * plan.workers):
        scheduler.submit(Request(f"warm-up-{number}", 0.0, 1 + number, 1), 0.0)
    scheduler.tick(0.0)


async def flush(events: EventLog) -> None:
    """Write the log once a second: a killed server loses little; an event costs no system call."""
    while True:
        await asyncio.sleep(FLUSH_EVERY_S)
        events.flush()


class EventLog:
    """The calls of a scheduler or a balancer, in a new file that can be replayed.

    The owner calls `flush`; a killed process loses the events since. Only whole lines are written.
    Events that cannot be written are lost, and a line in the log says so where they are missing
    (`toolkit.files.io`). An error of the disk raises nothing here.
    """

    def __init__(self, path: Path) -> None:
        self._pending = bytearray()
        self._log = LineLog(path, EVENT_LOG_BYTES_MAX, lost_line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        self._log.close()

    @property
    def lost(self) -> int:
        """The number of events that could not be written."""
        return self._log.lost

    def add(self, event: Event | BalancerEvent) -> None:
        self._pending += to_line(event)
        if len(self._pending) >= PENDING_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        self._log.write(bytes(self._pending))
        self._pending.clear()


def trace_line(active: ActiveRequest, timestamp: float) -> TraceLine:
    """The line of a trace for a request that has ended."""
    return TraceLine(
        timestamp=timestamp,
        input_length=len(active.request.prompt),
        output_length=active.output.tokens,
        max_tokens=active.request.max_new_tokens,
        priority=active.request.priority,
        ttft_ms=ms_or_none(active.first_token_s - active.arrival_s),
        e2e_ms=ms_or_none(active.last_token_s - active.arrival_s),
        status="ok" if active.status in ("stop", "length") else active.status,
    )
