"""The front over workers of our own: OpenAI's API, the driver and the scheduler behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response

from toolkit.engine_traits import traits_of
from toolkit.engines.tokenizer import Tokenizer, load_tokenizer
from toolkit.files.plan import Plan
from toolkit.files.profile import EngineFacts, OnForeign, identity, refuse_foreign
from toolkit.openai.engine_requests import read_engine_request
from toolkit.openai.errors import ApiError
from toolkit.openai.requests import CHAT, COMPLETIONS, RESPONSES
from toolkit.routing.admission import UNLIMITED, LatencyLimits
from toolkit.sched.types import Request as PooledRequest
from toolkit.serve.access import Keyring, check_priority
from toolkit.serve.assemble import FrontSettings, make_scheduler, make_stats
from toolkit.serve.background import Background
from toolkit.serve.bodies import BodyReader, LargeBodies, Prompts, is_large, read_json_bytes
from toolkit.serve.driver import Driver
from toolkit.serve.generation import Generation
from toolkit.serve.launch import OpenedFront
from toolkit.serve.live import ActiveRequest
from toolkit.serve.metrics import engine_families
from toolkit.serve.routes import Front, Written
from toolkit.serve.status import (
    StatusPage,
    driver_status,
    facts_of,
    failure,
    gauges,
    state,
)
from toolkit.traces.write import TraceLine, ms_or_none
from toolkit.workers.pool import Patience, ProcessWorkers
from toolkit.workers.process import require_gpu
from toolkit.workers.protocol import Workers

WARM_UP_REQUESTS = 8  # for each worker: one alone needs no kernel that batches several


class EngineFront(Front):
    """OpenAI's API over a driver, which it starts and stops. Each route reads a request, makes one
    call, and writes the response.
    """

    def __init__(
        self,
        driver: Driver,
        tokenizer: Tokenizer,
        settings: FrontSettings,
        keyring: Keyring,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(settings, keyring, driver.stats, Background(say))
        self._driver = driver
        self._reader = BodyReader(tokenizer, settings.vocab_size, settings.max_model_len)
        self._large_bodies = LargeBodies()
        self._generation = Generation(driver, tokenizer, settings, self._reader)
        self.add(COMPLETIONS, self.completions, "POST")
        self.add(CHAT, self.chat_completions, "POST")
        for path in (RESPONSES, f"{RESPONSES}/{{rest:path}}"):
            self.add(path, self.responses, "GET", "POST", "DELETE")

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

    @property
    def served(self) -> str:
        return self.settings.model

    @property
    def state(self) -> str:
        return state(self._driver)

    @property
    def failure(self) -> str:
        return failure(self._driver)

    def about_model(self) -> dict[str, object]:
        return {"max_model_len": self.settings.max_model_len}

    def families(self) -> Iterable[Metric]:
        driver = self._driver
        return engine_families(driver.stats, gauges(driver), self.served, self.keyring.named)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, chat=False)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, chat=True)

    async def responses(self) -> Response:
        """Refuse the only route of OpenAI's for text that this engine lacks."""
        text = "this engine has no /v1/responses; a recipe with engine 'vllm' serves it"
        raise ApiError(text, status=404, code="unsupported_route")

    async def _generate(self, request: Request, *, chat: bool) -> Response:
        body = await read_json_bytes(request, self.settings.max_body_bytes)
        prompts: Prompts | None = None
        if is_large(body):
            self._generation.check_room()
            read = partial(self._reader.read, chat=chat)
            asked, prompts = await self._large_bodies.read(read, body)
        else:
            asked = read_engine_request(body, chat=chat)
        check_priority(request.scope, asked.priority)
        exchange = self._generation.submit(asked, prompts)
        return Written(exchange.answer)


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
        front = EngineFront(driver, tokenizer, settings, opened.keyring, opened.say)
        if settings.status_page:
            facts = facts_of(plan, settings.model)
            shown = partial(driver_status, driver)
            front.show(StatusPage(facts, driver.stats, lambda: driver.now_s, shown))
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
        scheduler.submit(PooledRequest(f"warm-up-{number}", 0.0, 1 + number, 1), 0.0)
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
