"""From a plan to a running server: everything is put together here, and taken apart when the server
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from ssl import SSLContext
from types import TracebackType
from typing import Any, Self

import uvloop

from toolkit.engines.tokenizer import load_tokenizer
from toolkit.errors import InputError
from toolkit.files.lines import LineLog
from toolkit.files.plan import Plan
from toolkit.files.profile import EngineFacts, OnForeign, identity, refuse_foreign
from toolkit.sched.eventlog import Event, lost_line, to_line
from toolkit.sched.types import Request
from toolkit.serve.access import Callers, Keyring
from toolkit.serve.api import make_app
from toolkit.serve.assemble import make_scheduler, make_stats
from toolkit.serve.drift import CheckedWorkers, DriftCheck, OnFound
from toolkit.serve.driver import Driver
from toolkit.serve.forecast import UNLIMITED, LatencyLimits
from toolkit.serve.helper import Helper
from toolkit.serve.http import CLIENT_SHARE, WireLimits
from toolkit.serve.live import ActiveRequest
from toolkit.serve.rereading import Certificate, Followed, WatchedFiles, follow
from toolkit.serve.server import Ending, check_exposure, is_loopback, listen, serve, url
from toolkit.serve.settings import FrontSettings
from toolkit.serve.status import Status, facts_of
from toolkit.traces.write import TraceLine, TraceLog, to_ms
from toolkit.workers.pool import ProcessWorkers, WorkerSpec
from toolkit.workers.process import require_gpu
from toolkit.workers.protocol import Workers
from toolkit.workers.supervisor import Patience

# What a service manager is told: that the server is ready, and from then on that its loop still
# turns.
#
# systemd's protocol, one datagram each time (sd_notify(3), sd_watchdog_enabled(3)).

USEC = 1e-6


@dataclass(slots=True, frozen=True)
class Manager:
    """Who started this process and wants to be told; `address` is '' where nobody does.

    A server that has said nothing for `watchdog_s` seconds is ended, and as a rule started again;
    None: it is not.
    """

    address: str = ""
    watchdog_s: float | None = None

    @classmethod
    def take(cls) -> Manager:
        """From the environment, and out of it: workers inherit that."""
        address, limit, process = (
            os.environ.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
        )
        asked = limit.isdecimal() and process in ("", str(os.getpid()))
        return cls(address, int(limit) * USEC if asked else None)

    def tell(self, state: str, *, flags: int = 0) -> None:
        """Send `state`, like READY=1. A leading '@' of the address is Linux' abstract space.
        `flags`: as of send(2).
        """
        if not self.address:
            return
        name = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.connect(name)
            manager.send(state.encode(), flags)

    async def keep_told(self, well: Callable[[], bool]) -> None:
        """Tell twice in `watchdog_s` that the server is well, if it is; a loop that stands still
        tells nothing.
        """
        while self.watchdog_s:
            if well():
                with contextlib.suppress(
                    OSError
                ):  # it starts itself anew, or has no time to read; the next one arrives
                    self.tell("WATCHDOG=1", flags=socket.MSG_DONTWAIT)
            await asyncio.sleep(self.watchdog_s / 2)


# The two logs a server may keep: the scheduler's calls, which replay, and the requests' lengths
# and times, a trace.
#
# Neither holds any text, prompt token or client's name.

PENDING_BYTES = 1 << 16
MAX_BYTES = 1 << 30  # of an event log: an hour or so of a busy server


class EventLog:
    """The scheduler's calls, in a new file. `flush` is the owner's business: a killed process loses
    what came since.

    What is written is whole lines, so the file of a killed one replays up to its end. What cannot
    be written is lost and the log says so where it is missing (`toolkit.files.lines`); nothing here
    raises for a disk.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._pending = bytearray()
        self._log = LineLog(path, max_bytes, lost_line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.flush()
        self._log.close()

    @property
    def lost(self) -> int:
        """Events that are not in the file."""
        return self._log.lost

    def add(self, event: Event) -> None:
        self._pending += to_line(event)
        if len(self._pending) >= PENDING_BYTES:
            self.flush()

    def flush(self) -> None:
        self._log.write(bytes(self._pending))
        self._pending.clear()


class RequestLog:
    """Each request that has ended, as a line of a trace."""

    def __init__(self, log: TraceLog) -> None:
        self._log = log

    def add(self, live: ActiveRequest, start_s: float) -> None:
        """`start_s`: when the driver's clock began, on `time.monotonic`'s."""
        self._log.add(trace_line(live, self._log.timestamp(start_s + live.arrival_s)))


def trace_line(live: ActiveRequest, timestamp: float) -> TraceLine:
    """What a trace says of a request that has ended."""
    return TraceLine(
        timestamp=timestamp,
        input_length=len(live.ask.prompt),
        output_length=live.output.tokens,
        max_tokens=live.ask.max_new_tokens,
        priority=live.ask.priority,
        ttft_ms=_ms_or_none(live.first_token_s - live.arrival_s),
        e2e_ms=_ms_or_none(live.last_token_s - live.arrival_s),
        status="ok" if live.status in ("stop", "length") else live.status,
    )


def _ms_or_none(seconds: float) -> float | None:
    return None if math.isnan(seconds) else to_ms(seconds)


FLUSH_EVERY_S = 1.0


@dataclass(slots=True, frozen=True)
class Launch:
    """A server to start: what it serves, where, and what it writes down.

    `ray` is the cluster that its workers run on (`toolkit.cluster.connect.joined` says what can be
    given); '' keeps them in processes of this machine. `room_timeout_s` is how long the cluster may
    take to have room for all of them.
    """

    plan: Plan
    settings: FrontSettings
    host: str
    port: int
    insecure: bool = False
    limits: LatencyLimits = UNLIMITED
    client_share: float = CLIENT_SHARE  # of connections and of held bytes, for one client
    event_log: Path | None = None
    request_log: Path | None = None
    ending: Ending = field(default_factory=Ending)
    checks: Sequence[DriftCheck] = ()  # of the fits, before the first request
    on_foreign: OnForeign | None = (
        None  # told where the engine is not the fitted one; None: it is refused
    )
    ray: str = ""
    room_timeout_s: float = 60.0
    callers: WatchedFiles[Callers] | None = (
        None  # where the settings' keys are from, if they may change while it runs
    )
    certificate: WatchedFiles[SSLContext] | None = None  # None: no TLS
    manager: Manager = field(
        default_factory=Manager
    )  # of the machine's services; told as long as the loop turns


def launch(
    order: Launch, on_ready: Callable[[str], None], on_checked: OnFound = lambda _: None
) -> dict[str, int]:
    """Serve until a signal ends it; `on_ready` gets the URL once all workers are loaded.

    Returns how many requests ended, by finish reason.
    Before that `on_checked` gets what the order's check found; what it raises ends the server.
    `InputError` for an address, a log or a plan that cannot be used, `ForeignError` for laws of
    another engine, model or device than the workers loaded; `EngineError` where there is no GPU for
    a recipe that needs one, or a worker cannot load.
    """
    if not order.ray:
        require_gpu(kind.recipe for kind in order.plan.kinds)
    check_exposure(order.host, asks_key=order.settings.asks_key, insecure=order.insecure)
    with ExitStack() as stack:
        listener = stack.enter_context(listen(order.host, order.port))
        events = stack.enter_context(EventLog(order.event_log)) if order.event_log else None
        requests = stack.enter_context(TraceLog(order.request_log)) if order.request_log else None
        order.ending.say(_loading(order))
        tokenizer = load_tokenizer(order.plan.recipe.model)
        warm_up(order.plan)
        workers = stack.enter_context(_workers(order.plan, order.ray, order.room_timeout_s))
        if order.checks:
            workers = CheckedWorkers(workers, order.checks, on_checked)
        driver = _driver(order, workers, events, requests)
        status = (
            Status(driver, facts_of(order.plan, order.settings.model))
            if order.settings.status_page
            else None
        )
        keyring = Keyring(order.settings.api_key, order.settings.keys)
        local = is_loopback(order.host) and not order.settings.asks_key
        settings = replace(order.settings, local_hosts_only=local)
        helper = Helper(order.plan.recipe.model, settings.vocab_size, settings.max_model_len)
        app = make_app(driver, tokenizer, settings, status, keyring, helper)
        certificate = Certificate(order.certificate) if order.certificate else None
        gc.collect()
        # what was imported stays: no collection should stall all streams to walk over it
        gc.freeze()
        tls = certificate.context if certificate else None
        at, wire = url(listener, tls=tls is not None), WireLimits(client_share=order.client_share)
        serving = serve(driver, app, listener, order.ending, lambda: on_ready(at), tls, wire)
        serving = _helped(helper, serving)
        following = follow(_followed(order, keyring, certificate), order.ending.say)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            told = order.manager.keep_told(lambda: not driver.bug)
            runner.run(
                _beside(
                    serving,
                    _flushes(events),
                    following,
                    told,
                    status.sampling() if status else None,
                )
            )
        return dict(driver.stats.ended)


def _loading(order: Launch) -> str:
    where = f" on Ray ({order.ray})" if order.ray else ""
    return f"loading {order.plan.workers} workers of {order.plan.recipe.name}{where}"


@contextmanager
def _workers(plan: Plan, ray: str, room_timeout_s: float) -> Iterator[Workers]:
    """The plan's workers, not started yet; until the block ends, this process belongs to the
    cluster.
    """
    serve_spec = plan.recipe.serve
    patience = Patience(grace_s=serve_spec.hang_s, load_s=serve_spec.load_timeout_s)
    if not ray:
        recipe, flush_s = plan.recipe, plan.recipe.engine.flush_s
        first, *others = plan.kinds
        outfits = [WorkerSpec.of(kind.recipe) for kind in others for _ in range(kind.workers)]
        loaded = recipe.model, recipe.engine, recipe.hardware, first.workers
        yield ProcessWorkers(*loaded, flush_s=flush_s, others=outfits, patience=patience)
        return
    from toolkit.cluster.connect import LOCAL, joined
    from toolkit.cluster.workers import RayWorkers, places

    if plan.others and ray == LOCAL:
        raise InputError(
            f"--ray {LOCAL}: a cluster of this machine alone is one node of one kind; the fleet has {len(plan.kinds)}",
            "leave --ray out: processes of this machine are of all kinds; or join a cluster, with --ray auto",
        )
    wanted = places(plan.kinds)
    with joined(ray, sum(place.share.cpus for place in wanted)):
        yield RayWorkers(wanted, room_timeout_s=room_timeout_s, patience=patience)


def _driver(
    order: Launch, workers: Workers, events: EventLog | None, requests: TraceLog | None
) -> Driver:
    plan = order.plan

    def accept(loaded: list[EngineFacts]) -> None:
        rest = iter(loaded)
        for kind in plan.kinds:
            refuse_foreign(
                kind.fit.engine, map(identity, islice(rest, kind.workers)), order.on_foreign
            )

    return Driver(
        make_scheduler(plan, events.add if events else None),
        workers,
        make_stats(plan),
        on_end=RequestLog(requests).add if requests else None,
        limits=order.limits,
        accept=accept,
    )


def warm_up(plan: Plan) -> None:
    """Have the policy's kernels compiled, or read from their cache, before the first request needs
    them.
    """
    scheduler = make_scheduler(plan)
    scheduler.submit(Request("warm-up", 0.0, 1, 1), 0.0)
    scheduler.tick(0.0)


def _followed(
    order: Launch, keyring: Keyring, certificate: Certificate | None
) -> list[Followed[Any]]:
    """What is read again while the server runs, and who takes it."""
    found: list[Followed[Any]] = []
    if order.callers:
        found.append(Followed(order.callers, keyring.renew))
    if order.certificate and certificate:
        found.append(Followed(order.certificate, certificate.renew))
    return found


async def _helped(helper: Helper, serving: Awaitable[None]) -> None:
    await helper.start()
    try:
        await serving
    finally:
        await helper.stop()


async def _flushes(events: EventLog | None) -> None:
    """The log is then never far behind, should the process be killed; and no line costs a system
    call.
    """
    while events:
        await asyncio.sleep(FLUSH_EVERY_S)
        events.flush()


async def _beside(serving: Awaitable[None], *others: Coroutine[None, None, None] | None) -> None:
    """What goes on as long as the server does."""
    tasks = [asyncio.create_task(other) for other in others if other]
    try:
        await serving
    finally:
        for task in tasks:
            task.cancel()
