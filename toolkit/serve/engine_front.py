"""The front over workers of our own: the scheduler, its driver, and the routes before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from starlette.types import ASGIApp

from toolkit.engine_traits import traits_of
from toolkit.engines.tokenizer import load_tokenizer
from toolkit.files.plan import Plan
from toolkit.files.profile import EngineFacts, OnForeign, identity, refuse_foreign
from toolkit.routing.admission import UNLIMITED, LatencyLimits
from toolkit.sched.types import Request
from toolkit.serve.api import Routes
from toolkit.serve.assemble import make_scheduler, make_stats
from toolkit.serve.background import Background
from toolkit.serve.driver import Driver
from toolkit.serve.launch import FrontServer, OpenedFront
from toolkit.serve.live import ActiveRequest
from toolkit.serve.status import StatusPage, driver_status, facts_of
from toolkit.traces.write import TraceLine, ms_or_none
from toolkit.workers.pool import Patience, ProcessWorkers
from toolkit.workers.process import require_gpu
from toolkit.workers.protocol import Workers

WARM_UP_REQUESTS = 8  # for each worker: one alone needs no kernel that batches several


class EngineFront(FrontServer):
    """The front over a driver, and its application."""

    def __init__(
        self,
        driver: Driver,
        app: ASGIApp,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(app, driver.stats, Background(say))
        self._driver = driver

    @property
    def left(self) -> int:
        return self._driver.running + self._driver.waiting

    @property
    def healthy(self) -> bool:
        return self._driver.bug is None

    def announce_end(self) -> None:
        self._driver.leaving = True

    async def start(self) -> None:
        """Load the workers. Raises `EngineError` if one cannot load."""
        await self._driver.start()

    async def broken(self) -> None:
        """Raises `EngineError` if no worker is left and none can be loaded again; also an exception
        of the scheduler.
        """
        await self._driver.broke.wait()
        if ended_by := self._driver.bug or self._driver.failed:
            raise ended_by

    async def drain(self, timeout_s: float) -> None:
        await self._driver.drain(timeout_s)

    async def stop(self) -> None:
        await self._driver.stop()


@contextmanager
def engine_front(
    plan: Plan,
    opened: OpenedFront,
    *,
    limits: LatencyLimits = UNLIMITED,
    on_foreign: OnForeign | None = None,
    ray: str = "",
) -> Iterator[EngineFront]:
    """Make the front for a plan, not started.

    Args:
        limits: the latency targets of admission.
        on_foreign: called if the engine is not the fitted one; None: the server refuses to start.
        ray: the Ray cluster of the workers (`toolkit.cluster.connect.joined` lists the values); '':
            this machine.

    Raises `ForeignError` when it starts, if the workers load another engine, model or device than
    the laws are about; `InputError` for a plan that cannot be used, and `EngineError` if a recipe
    needs a GPU or a library that is missing.
    """
    if not ray:
        require_gpu(plan.recipe)
        traits_of(plan.recipe.engine.name).require()
    where = f" on Ray ({ray})" if ray else ""
    opened.say(f"loading {plan.workers} workers of {plan.recipe.name}{where}")
    settings = opened.settings
    tokenizer = load_tokenizer(plan.recipe.model)
    warm_up(plan)
    with ExitStack() as stack:
        workers = stack.enter_context(_workers(plan, ray))
        driver = _driver(plan, workers, opened, limits, on_foreign)
        routes = Routes(driver, tokenizer, settings, opened.keyring)
        front = EngineFront(driver, routes.gate(), opened.say)
        if settings.status_page:
            facts = facts_of(plan, settings.model)
            shown = partial(driver_status, driver)
            status = StatusPage(facts, driver.stats, lambda: driver.now_s, shown)
            routes.show(status)
            front.at_start.append(partial(front.background.start, "status page", status.sampling))
        yield front


@contextmanager
def _workers(plan: Plan, ray: str) -> Iterator[Workers]:
    """The plan's workers, not started. With Ray, this process is in the cluster meanwhile."""
    serve_spec = plan.recipe.serve
    patience = Patience(grace_s=serve_spec.hang_s, load_s=serve_spec.load_timeout_s)
    if not ray:
        yield ProcessWorkers(plan.recipe, plan.workers, patience)
        return
    from toolkit.cluster.connect import joined
    from toolkit.cluster.workers import RayWorkers, bundle_of

    with joined(ray, bundle_of(plan.recipe)["CPU"] * plan.workers):
        yield RayWorkers(plan.recipe, plan.workers, patience)


def _driver(
    plan: Plan,
    workers: Workers,
    opened: OpenedFront,
    limits: LatencyLimits,
    on_foreign: OnForeign | None,
) -> Driver:
    requests = opened.requests

    def accept(loaded: list[EngineFacts]) -> None:
        refuse_foreign(plan.fit.engine, map(identity, loaded), on_foreign)

    def log(active: ActiveRequest, start_s: float) -> None:
        assert requests is not None
        requests.add(trace_line(active, requests.timestamp(start_s + active.arrival_s)))

    return Driver(
        make_scheduler(plan, opened.events.add if opened.events else None),
        workers,
        make_stats(plan),
        on_end=log if requests else None,
        limits=limits,
        accept=accept,
    )


def warm_up(plan: Plan) -> None:
    """Load or compile the policy's kernels before the first request: it takes 0.3 s or more."""
    scheduler = make_scheduler(plan)
    for number in range(WARM_UP_REQUESTS * plan.workers):
        scheduler.submit(Request(f"warm-up-{number}", 0.0, 1 + number, 1), 0.0)
    scheduler.tick(0.0)


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
