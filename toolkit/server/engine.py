"""The backend of our own workers: the driver, and behind it the scheduler and the workers.

A request becomes one row per prompt and choice, all of them or none. What can be refused is refused
before the work is done: a full queue before tokenizing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client.core import Metric
from starlette.requests import Request

from toolkit.engine_traits import traits_of
from toolkit.engines.protocol import SamplingParams
from toolkit.engines.resources import require_gpu
from toolkit.engines.tokenizer import Tokenizer, load_tokenizer
from toolkit.errors import InputError
from toolkit.estimators.load import laws_from_fit
from toolkit.files.plan import Plan
from toolkit.files.profile import EngineFacts, identity, refuse_foreign
from toolkit.openai.answers import AnswerWriter, about_answer
from toolkit.openai.engine_requests import EngineChat, EngineRequest, read_engine_request
from toolkit.openai.errors import ApiError
from toolkit.openai.requests import CHAT, COMPLETION_TOKENS, RESPONSES
from toolkit.routing.admission import UNLIMITED, LatencyLimits
from toolkit.sched.eventlog import FORMAT, Event, EventLogHeader, RecordingScheduler
from toolkit.sched.memory import footprint_of
from toolkit.sched.policies import make_policy, refuse_unservable
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Request as PooledRequest
from toolkit.sched.types import Worker
from toolkit.server.backend import SendAnswer, ServerBackend, late, unavailable
from toolkit.server.bodies import LargeBodies, PromptReader, Prompts, check_room, is_large, short
from toolkit.server.driver import Driver, RefusedError
from toolkit.server.exchange import Exchange
from toolkit.server.live import LiveRequest, Reply, TextOutput
from toolkit.server.log import EventLog
from toolkit.server.metrics import Labels, WorkerState, engine_families
from toolkit.server.options import ServerOptions
from toolkit.server.stats import LATE, Stats
from toolkit.server.status import facts_of
from toolkit.workers.pool import Patience, ProcessWorkers
from toolkit.workers.protocol import Workers

if TYPE_CHECKING:
    from toolkit.server.application import Application

WARM_UP_REQUESTS = 8  # for each worker: one alone needs no kernel that batches several
MAX_CHOICES = 1024  # of one request: all are submitted at once, at 20 us each
MAX_SEED = (1 << 63) - 1
NO_WORKER = "no worker is alive"


class EngineBackend(ServerBackend):
    """Our own workers, behind a driver that it starts and stops.

    Args:
        max_model_len: of a request, prompt and output together, in tokens.
    """

    def __init__(
        self,
        driver: Driver,
        tokenizer: Tokenizer,
        options: ServerOptions,
        *,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        super().__init__(options, driver.stats)
        self.driver = driver
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._reader = PromptReader(tokenizer, vocab_size)
        self._large_bodies = LargeBodies()
        driver.on_end = self._write

    @property
    def state(self) -> str:
        driver = self.driver
        return NO_WORKER if driver.state == "ready" and not self._lives else driver.state

    @property
    def _lives(self) -> bool:
        return any(worker.alive for worker in self.driver.scheduler.workers)

    @property
    def failure(self) -> str:
        if self.driver.bug:
            return "the scheduler stopped at a bug"
        return "no worker can be loaded" if self.driver.failed else ""

    @property
    def problem(self) -> str:
        """Loading and draining are not problems."""
        if self.failure or self._lives or self.driver.state in ("loading", "stopped"):
            return self.failure
        return NO_WORKER

    @property
    def left(self) -> int:
        return self.driver.running + self.driver.waiting

    @property
    def waiting(self) -> int:
        return self.driver.waiting

    def about_model(self) -> dict[str, object]:
        return {"max_model_len": self._max_model_len}

    def families(self) -> Iterable[Metric]:
        return families_of(self.driver, self.labels)

    def shown(self) -> dict[str, Any]:
        stats = self.stats
        predicted_s = stats.predicted_batch_s
        return {
            "running": self.driver.running,
            "workers": [worker._asdict() for worker in worker_states(self.driver)],
            "totals": {
                "batches": stats.batches,
                "extrapolated_batches": stats.extrapolated_batches,
                "oom_events": stats.oom_events,
                "preemptions": stats.preemptions,
                "restarts": stats.worker_restarts,
                "batch_ratio": stats.batch_s / predicted_s if predicted_s else None,
            },
        }

    def add_routes(self, application: Application) -> None:
        super().add_routes(application)
        for path in (RESPONSES, f"{RESPONSES}/{{rest:path}}"):
            application.add(path, responses, "GET", "POST", "DELETE")

    async def start(self) -> None:
        """Load the workers. Raises `EngineError` if one cannot load."""
        await self.driver.start()

    async def broken(self) -> None:
        """Raises `EngineError` if no worker is left and none can be loaded again; also an exception
        of the scheduler.
        """
        await self.driver.broke.wait()
        if ended_by := self.driver.bug or self.driver.failed:
            raise ended_by

    async def drain(self, timeout_s: float) -> None:
        await self.driver.drain(timeout_s)

    async def stop(self) -> None:
        await self.driver.stop()

    async def take(self, request: Request, body: bytes, arrival_s: float) -> SendAnswer:
        chat = request.scope["path"] == CHAT
        read = partial(read_engine_request, chat=chat)
        asked = await self._large_bodies.read(read, body)
        self._admit(request, asked)
        prompts = await self._large_bodies.read(lambda _: self._reader.tokens(asked), body)
        if is_large(body):  # others were admitted, or a drain began, while a thread read
            self._admit(request, asked)
        return self._submit(asked, prompts).answer

    def check_open(self) -> None:
        state = self.driver.state
        if state != "ready":
            raise unavailable(state, {"Connection": "close"} if state == "draining" else {})

    def check_room(self, choices: int = 1) -> None:
        """Raise `ApiError` also if a new request would miss a target by the forecast."""
        super().check_room(choices)
        forecast = self.driver.forecast
        predicted = forecast.predict(self.driver.now_s)
        excess_s = forecast.limits.excess_s(predicted)
        if excess_s:
            self.stats.refusals[LATE] += 1
            raise late(predicted, excess_s)

    def expected_wait_s(self) -> float:
        return self.driver.forecast.predict(self.driver.now_s).ttft_s

    def _admit(self, request: Request, asked: EngineRequest) -> None:
        """Raise `ApiError` for a request that is refused."""
        if asked.llmctl_end_after is not None and not self.options.allow_end_after:
            text = "'llmctl_end_after' needs a server that was started with --allow-end-after"
            raise ApiError(text, param="llmctl_end_after")
        choices = asked.prompt_count * asked.n
        if choices > MAX_CHOICES:
            text = f"{asked.prompt_count} prompts with n {asked.n} are {choices} choices"
            raise ApiError(f"{text}; the limit is {MAX_CHOICES}", param="n")
        self.check_open()  # it may have begun to drain while the body was read
        self.admit(request, asked.model, asked.priority, choices)

    def _submit(self, asked: EngineRequest, prompts: Prompts) -> Exchange:
        """Submit all choices of all prompts. Raises `ApiError` for a request that cannot be served,
        and then submits nothing. It awaits nothing, so the counts that admitted a request hold.
        """
        is_chat = isinstance(asked, EngineChat)
        default = self.options.max_new_tokens if is_chat else COMPLETION_TOKENS
        limits = [self._limit(len(prompt), asked.limit, default) for prompt in prompts]
        about = about_answer(self.model, chat=is_chat)
        shows_usage = bool(asked.stream_options.include_usage)
        writer = AnswerWriter(about, chat=is_chat, shows_usage=shows_usage)
        n = asked.n
        prompt_tokens = sum(map(len, prompts))
        sampling = self._sampling(asked, min(limits))
        reply = Reply(len(prompts) * n, patient=not asked.stream)
        tokens = [tuple(prompt) for prompt in prompts]
        keepalive_s = self.options.keepalive_s
        exchange = Exchange(self.driver, reply, writer, prompt_tokens, asked.stream, keepalive_s)
        try:
            for index in range(reply.choices):
                own = sampling
                if index % n and sampling.temperature:  # each choice of a prompt has its own seed
                    seed = (sampling.seed + index % n) & MAX_SEED
                    own = msgspec.structs.replace(sampling, seed=seed)
                detokenizer = self._tokenizer.detokenizer()
                active = LiveRequest(
                    f"{writer.about['id']}-{index}",
                    tokens[index // n],
                    limits[index // n],
                    own,
                    TextOutput(detokenizer, asked.stops, own.min_tokens, index),
                    reply,
                    asked.priority,
                    asked.llmctl_end_after,
                    min(asked.timeout or math.inf, self.options.request_timeout_s),
                )
                self.driver.submit(active)
                exchange.choices.append(active)
        except RefusedError as error:
            exchange.cancel()
            raise ApiError(str(error), code="context_length_exceeded") from None
        return exchange

    def _limit(self, prompt_tokens: int, wanted: int | None, default: int) -> int:
        """How many tokens may be generated. Raises `ApiError` if `wanted` exceeds a limit."""
        longest = self.options.max_new_tokens
        check_room(prompt_tokens, self._max_model_len)
        room = self._max_model_len - prompt_tokens
        if wanted is None:
            return min(default, longest, room)
        if wanted > longest:
            text = f"max_tokens is {short(wanted)}; the limit is {longest}"
            raise ApiError(text, param="max_tokens")
        if wanted > room:
            text = (
                f"the prompt has {prompt_tokens} tokens and max_tokens is {wanted}, together "
                f"{prompt_tokens + wanted}; the limit is {self._max_model_len}"
            )
            raise ApiError(text, param="max_tokens", code="context_length_exceeded")
        return wanted

    def _sampling(self, asked: EngineRequest, limit: int) -> SamplingParams:
        """The request's sampling parameters, with OpenAI's defaults.

        Sampling without a seed gets a random one here, so that a slice that runs again draws the
        same tokens.
        """
        self._reader.check_tokens(asked.stop_token_ids, "stop_token_ids")
        if asked.min_tokens > limit:
            text = f"min_tokens is {short(asked.min_tokens)}; max_tokens is {limit}"
            raise ApiError(text, param="min_tokens")
        drawn = asked.seed is None and asked.temperature
        seed = random.getrandbits(62) if drawn else asked.seed or 0
        return SamplingParams(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=max(asked.top_k, 0),
            min_p=asked.min_p,
            repetition_penalty=asked.repetition_penalty,
            seed=seed & MAX_SEED,
            ignore_eos=asked.ignore_eos,
            min_tokens=asked.min_tokens,
            stop_token_ids=tuple(asked.stop_token_ids),
        )

    def _write(self, active: LiveRequest, start_s: float) -> None:
        """Write a request that has ended to the log."""
        if self.log is not None:
            at = self.log.timestamp(start_s + active.times.arrival_s)
            tokens = len(active.prompt), active.output.tokens, active.max_new_tokens
            self.log.add(active.times.line(at, tokens, active.status, active.priority))


async def responses() -> None:
    """Refuse the only route of OpenAI's for text that this engine lacks."""
    text = "this engine has no /v1/responses; a recipe with engine 'vllm' serves it"
    raise ApiError(text, status=404, code="unsupported_route")


@contextmanager
def engine_backend(plan: Plan, options: ServerOptions) -> Iterator[EngineBackend]:
    """Make the backend of a plan's workers, not started.

    Raises `ForeignError` when it starts, if the workers load another engine, model or device than
    the laws are about; `InputError` for a plan that cannot be used, and `EngineError` if a recipe
    needs a GPU or a library that is missing.
    """
    engine = plan.fit.engine
    if not options.ray:
        require_gpu(plan.recipe)
        traits_of(plan.recipe.engine.name).require()
    where = f" on Ray ({options.ray})" if options.ray else ""
    options.say(f"loading {plan.workers} workers of {plan.recipe.name}{where}")

    def accept(loaded: list[EngineFacts]) -> None:
        refuse_foreign(engine, map(identity, loaded), options.on_foreign)

    log = EventLog(options.event_log) if options.event_log else nullcontext()
    with log as events, _workers(plan, options.ray) as workers:
        tokenizer = load_tokenizer(plan.recipe.model)
        warm_up(plan)
        driver = Driver(
            make_scheduler(plan, events.add if events else None),
            workers,
            Stats(plan.fit.prefill.valid.both(plan.fit.decode.valid), plan.recipe.sla),
            limits=make_limits(plan, options),
            accept=accept,
        )
        backend = EngineBackend(
            driver,
            tokenizer,
            options,
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
        )
        backend.facts = facts_of(plan, options.model)
        if events is not None:
            backend.tasks["event log"] = events.flushing
        yield backend


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


def make_scheduler(plan: Plan, event_sink: Callable[[Event], None] | None = None) -> Scheduler:
    """The plan's scheduler in its first state, for a server or for the replay of a server's log.

    `event_sink` gets every call and decision of the scheduler. Raises `InputError` for a plan that
    cannot be served.
    """
    policy = make_policy(plan.settings.policy, plan.settings.parameters)
    engine = plan.recipe.engine
    if not traits_of(engine.name).started:
        raise InputError(
            f"engine '{engine.name}' is a server already, at {engine.url}; "
            "there is nothing to start",
            f"put a front before it with --replica {engine.url}; or replay a trace against it: "
            f"llmctl bench --plan plan.json --url {engine.url}",
        )
    refuse_unservable(policy, engine.name)
    laws = laws_from_fit(plan.fit)
    workers = [
        Worker(
            index,
            laws.rounds if policy.continuous else laws.latency,
            laws.round_memory if policy.continuous else laws.memory,
            swap=laws.swap,
            host_tokens=laws.host_tokens,
            joining=laws.joining,
            slots=laws.slots,
        )
        for index in range(plan.workers)
    ]
    if event_sink is None:
        return Scheduler(policy, workers)
    chosen = plan.settings
    event_sink(EventLogHeader(FORMAT, chosen.policy, dict(chosen.parameters), plan.workers))
    return RecordingScheduler(policy, workers, event_sink)


def make_limits(plan: Plan, options: ServerOptions) -> LatencyLimits:
    """Return the targets with which admission compares the forecast. A server for replays refuses
    no request of a trace by a forecast, unless it is told to.
    """
    default = "queue" if options.allow_end_after else plan.recipe.serve.admission
    admission = options.admission or default
    return LatencyLimits.of(plan.recipe.sla) if admission == "targets" else UNLIMITED


def warm_up(plan: Plan) -> None:
    """Load or compile the policy's kernels before the first request: it takes 0.3 s or more."""
    scheduler = make_scheduler(plan)
    for number in range(WARM_UP_REQUESTS * plan.workers):
        scheduler.submit(PooledRequest(f"warm-up-{number}", 0.0, 1 + number, 1), 0.0)
    scheduler.tick(0.0)


def families_of(driver: Driver, labels: Labels) -> Iterable[Metric]:
    """Return the metrics of a driver and its workers at the moment of a scrape."""
    return engine_families(
        driver.stats,
        worker_states(driver),
        labels,
        running=driver.running,
        waiting=driver.waiting,
        predicted_ttft_s=driver.forecast.predict(driver.now_s).ttft_s,
        engine=identity(next(iter(driver.facts.values()))) if driver.facts else {},
    )


def worker_states(driver: Driver) -> list[WorkerState]:
    """Return each worker, as metrics and the status page show it."""
    states = []
    for worker in driver.scheduler.workers:
        # To the scheduler a worker is alive while it loads for the first time.
        facts = driver.facts.get(worker.index)
        tokens = footprint_of(worker).taken + worker.paused.tokens
        batch = driver.flights.get(worker.index)
        if batch and not batch.keep_cache:
            # A slice may fill: every row padded to the longest, for all steps (SCLS Eq. 5).
            tokens = len(batch.jobs) * (batch.input_length + batch.steps)
        state = "loading" if facts is None else "running" if batch else "idle"
        compared = driver.stats.compared[worker.index]
        states.append(
            WorkerState(
                state=state if worker.alive or facts is None else "lost",
                rows=driver.running_on(worker.index),
                kv_tokens=tokens,
                kv_capacity=facts.capacity_tokens if facts else None,
                batch_ratio=compared.took_s / compared.predicted_s
                if compared.predicted_s
                else None,
                load_s=round(worker.load_s, 3),
                oom_events=worker.oom_events,
                restarts=driver.stats.restarts[worker.index],
            )
        )
    return states
