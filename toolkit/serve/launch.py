"""From a plan to a running server: everything is put together here, and taken apart when the server ends."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from ssl import SSLContext
from typing import Any

import uvloop

from toolkit.engines.tokenizer import load_tokenizer
from toolkit.errors import InputError
from toolkit.files.identity import OnForeign, identity, refuse_foreign
from toolkit.files.plan import Plan
from toolkit.files.profile import EngineFacts
from toolkit.sched.types import Request
from toolkit.serve.api import make_app
from toolkit.serve.assemble import make_scheduler, make_stats
from toolkit.serve.certificate import Certificate
from toolkit.serve.drift import Check, CheckedWorkers, OnFound
from toolkit.serve.driver import Driver
from toolkit.serve.forecast import UNLIMITED, Limits
from toolkit.serve.helper import Helper
from toolkit.serve.keys import Callers, Keyring
from toolkit.serve.logs import EventLog, RequestLog
from toolkit.serve.notify import Manager
from toolkit.serve.rereading import Followed, Source, follow
from toolkit.serve.server import Ending, check_exposure, is_loopback, listen, serve, url
from toolkit.serve.settings import Settings
from toolkit.serve.status import Status, facts_of
from toolkit.traces.log import TraceLog
from toolkit.workers.gpus import require_gpu
from toolkit.workers.processes import Outfit, ProcessWorkers
from toolkit.workers.protocol import Workers
from toolkit.workers.supervisor import Patience

FLUSH_EVERY_S = 1.0


@dataclass(slots=True, frozen=True)
class Launch:
    """A server to start: what it serves, where, and what it writes down.

    `ray` is the cluster that its workers run on (`toolkit.cluster.connect.joined` says what can be given); '' keeps
    them in processes of this machine. `room_timeout_s` is how long the cluster may take to have room for all of them.
    """

    plan: Plan
    settings: Settings
    host: str
    port: int
    insecure: bool = False
    limits: Limits = UNLIMITED
    event_log: Path | None = None
    request_log: Path | None = None
    ending: Ending = field(default_factory=Ending)
    checks: Sequence[Check] = ()  # of the fits, before the first request
    on_foreign: OnForeign | None = None  # told where the engine is not the fitted one; None: it is refused
    ray: str = ""
    room_timeout_s: float = 60.0
    callers: Source[Callers] | None = None  # where the settings' keys are from, if they may change while it runs
    certificate: Source[SSLContext] | None = None  # None: no TLS
    manager: Manager = field(default_factory=Manager)  # of the machine's services; told as long as the loop turns


def launch(order: Launch, on_ready: Callable[[str], None], on_checked: OnFound = lambda _: None) -> dict[str, int]:
    """Serve until a signal ends it; `on_ready` gets the URL once all workers are loaded.

    Returns how many requests ended, by finish reason.
    Before that `on_checked` gets what the order's check found; what it raises ends the server.
    `InputError` for an address, a log or a plan that cannot be used, `ForeignError` for laws of another engine, model
    or device than the workers loaded; `EngineError` where there is no GPU for a recipe that needs one, or a worker
    cannot load.
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
        status = Status(driver, facts_of(order.plan, order.settings.model)) if order.settings.status_page else None
        keyring = Keyring(order.settings.api_key, order.settings.keys)
        local = is_loopback(order.host) and not order.settings.asks_key
        settings = replace(order.settings, local_hosts_only=local)
        helper = Helper(order.plan.recipe.model, settings.vocab_size, settings.max_model_len)
        app = make_app(driver, tokenizer, settings, status, keyring, helper)
        certificate = Certificate(order.certificate) if order.certificate else None
        gc.collect()
        gc.freeze()  # what was imported stays: no collection should stall all streams to walk over it
        tls = certificate.context if certificate else None
        serving = serve(driver, app, listener, order.ending, lambda: on_ready(url(listener, tls=tls is not None)), tls)
        serving = _helped(helper, serving)
        following = follow(_followed(order, keyring, certificate), order.ending.say)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            told = order.manager.keep_told(lambda: not driver.bug)
            runner.run(_beside(serving, _flushes(events), following, told, status.sampling() if status else None))
        return dict(driver.stats.ended)


def _loading(order: Launch) -> str:
    where = f" on Ray ({order.ray})" if order.ray else ""
    return f"loading {order.plan.workers} workers of {order.plan.recipe.name}{where}"


@contextmanager
def _workers(plan: Plan, ray: str, room_timeout_s: float) -> Iterator[Workers]:
    """The plan's workers, not started yet; until the block ends, this process belongs to the cluster."""
    serve_spec = plan.recipe.serve
    patience = Patience(grace_s=serve_spec.hang_s, load_s=serve_spec.load_timeout_s)
    if not ray:
        recipe, flush_s = plan.recipe, plan.recipe.engine.flush_s
        first, *others = plan.kinds
        outfits = [Outfit.of(kind.recipe) for kind in others for _ in range(kind.workers)]
        loaded = recipe.model, recipe.engine, recipe.hardware, first.workers
        yield ProcessWorkers(*loaded, flush_s=flush_s, others=outfits, patience=patience)
        return
    from toolkit.cluster.connect import LOCAL, joined
    from toolkit.cluster.places import places
    from toolkit.cluster.workers import RayWorkers

    if plan.others and ray == LOCAL:
        raise InputError(
            f"--ray {LOCAL}: a cluster of this machine alone is one node of one kind; the fleet has {len(plan.kinds)}",
            "leave --ray out: processes of this machine are of all kinds; or join a cluster, with --ray auto",
        )
    wanted = places(plan.kinds)
    with joined(ray, sum(place.share.cpus for place in wanted)):
        yield RayWorkers(wanted, room_timeout_s=room_timeout_s, patience=patience)


def _driver(order: Launch, workers: Workers, events: EventLog | None, requests: TraceLog | None) -> Driver:
    plan = order.plan

    def accept(loaded: list[EngineFacts]) -> None:
        rest = iter(loaded)
        for kind in plan.kinds:
            refuse_foreign(kind.fit.engine, map(identity, islice(rest, kind.workers)), order.on_foreign)

    return Driver(
        make_scheduler(plan, events.add if events else None),
        workers,
        make_stats(plan),
        on_end=RequestLog(requests).add if requests else None,
        limits=order.limits,
        accept=accept,
    )


def warm_up(plan: Plan) -> None:
    """Have the policy's kernels compiled, or read from their cache, before the first request needs them."""
    scheduler = make_scheduler(plan)
    scheduler.submit(Request("warm-up", 0.0, 1, 1), 0.0)
    scheduler.tick(0.0)


def _followed(order: Launch, keyring: Keyring, certificate: Certificate | None) -> list[Followed[Any]]:
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
    """The log is then never far behind, should the process be killed; and no line costs a system call."""
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
