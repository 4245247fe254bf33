"""The backend of our own workers: the driver, and behind it the scheduler and the workers.

A request becomes one row per prompt and choice, all of them or none. What can be refused is refused
before the work is done: a full queue before tokenizing.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import msgspec
from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.types import Send

from toolkit.engine_traits import traits_of
from toolkit.engines.protocol import SamplingParams
from toolkit.engines.resources import require_gpu
from toolkit.engines.tokenizer import Tokenizer, load_tokenizer
from toolkit.errors import EngineError, InputError
from toolkit.estimators.load import laws_from_fit
from toolkit.files.plan import Plan
from toolkit.files.profile import EngineFacts, identity, refuse_foreign
from toolkit.openai.answers import AnswerWriter, about_answer
from toolkit.openai.engine_requests import (
    EngineChat,
    EngineCompletion,
    EngineRequest,
    read_engine_request,
)
from toolkit.openai.errors import ApiError
from toolkit.openai.requests import CHAT, COMPLETION_TOKENS
from toolkit.routing.admission import UNLIMITED, LatencyLimits
from toolkit.sched.eventlog import FORMAT, Event, EventLogHeader, RecordingScheduler
from toolkit.sched.policies import make_policy, refuse_unservable
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import NO_LIMIT, Worker
from toolkit.sched.types import Request as PooledRequest
from toolkit.server.backend import Answer, ServerBackend, late, unavailable
from toolkit.server.driver import Driver
from toolkit.server.live import LiveRequest, Reply, TextOutput
from toolkit.server.log import EventLog
from toolkit.server.metrics import engine_families, worker_states
from toolkit.server.options import ServerOptions
from toolkit.server.stats import LATE, Stats
from toolkit.server.status import facts_of
from toolkit.workers.pool import Patience, ProcessWorkers
from toolkit.workers.protocol import Workers

WARM_UP_REQUESTS = 8  # for each worker: one alone needs no kernel that batches several
MAX_CHOICES = 1024  # of one request: all are submitted at once, at 20 us each
MAX_SEED = (1 << 63) - 1
# A larger body is read in a thread, since it would block the event loop for too long. A thread that
# parses in C holds Python's global lock meanwhile: `toolkit.openai.bodies` bounds each such step.
LARGE_BODY_BYTES = 1 << 15
NO_WORKER = "no worker is alive"


class EngineBackend(ServerBackend):
    """Our own workers, behind a driver that it starts and stops.

    Args:
        engine: the engine that the laws are about.
    """

    def __init__(
        self, driver: Driver, tokenizer: Tokenizer, options: ServerOptions, engine: EngineFacts
    ) -> None:
        super().__init__(options, driver.stats)
        self.driver = driver
        self._tokenizer = tokenizer
        self._engine = engine
        self._reading = ThreadPoolExecutor(1, "bodies")  # one large body after another
        driver.on_end = self._write

    @property
    def state(self) -> str:
        lives = any(worker.alive for worker in self.driver.scheduler.workers)
        is_stuck = self.driver.state == "ready" and not lives
        return self.failure or (NO_WORKER if is_stuck else self.driver.state)

    @property
    def failure(self) -> str:
        error = self.driver.error
        if isinstance(error, EngineError):
            return "no worker can be loaded"
        return "the scheduler stopped at a bug" if error else ""

    @property
    def waiting(self) -> int:
        return self.driver.waiting

    def about_model(self) -> dict[str, object]:
        return {"max_model_len": self._engine.max_model_len}

    def families(self) -> Iterable[Metric]:
        return engine_families(self.driver, self.labels)

    def shown(self) -> dict[str, Any]:
        stats = self.stats
        return {
            "running": self.driver.running,
            "workers": [worker._asdict() for worker in worker_states(self.driver)],
            "totals": {
                "batches": stats.batches,
                "extrapolated_batches": stats.extrapolated_batches,
                "oom_events": stats.oom_events,
                "preemptions": stats.preemptions,
                "restarts": stats.restarts.total(),
                "batch_ratio": stats.ratio_of(range(len(self.driver.rows))),
            },
        }

    async def start(self) -> None:
        """Load the workers. Raises `EngineError` if one cannot load, and `ForeignError` if it has
        loaded another engine, model or device than the laws are about.
        """
        await self.driver.start()
        loaded = map(identity, self.driver.facts.values())
        refuse_foreign(self._engine, loaded, self.options.on_foreign)

    async def broken(self) -> None:
        """Raises `EngineError` if no worker is left and none can be loaded again; also an exception
        of the scheduler.
        """
        await self.driver.broke.wait()
        assert self.driver.error is not None
        raise self.driver.error

    async def stop(self) -> None:
        await self.driver.stop()

    async def take(self, request: Request, body: bytes, arrival_s: float) -> Answer:
        chat = request.scope["path"] == CHAT
        read = partial(read_engine_request, chat=chat)
        if len(body) <= LARGE_BODY_BYTES:
            asked = read(body)
            self._admit(asked)
            prompts = self._tokens(asked)
        else:
            in_thread = partial(asyncio.get_running_loop().run_in_executor, self._reading)
            asked = await in_thread(read, body)
            self._admit(asked)
            prompts = await in_thread(self._tokens, asked)
            self._admit(asked)  # others were admitted meanwhile, or a drain began
        return partial(self._answer, self._submit(asked, prompts))

    async def _answer(self, reply: Reply, send: Send) -> None:
        """Send the response, and cancel what is left of its requests."""
        try:
            await reply.send(send)
        finally:
            self._cancel(reply)

    def _cancel(self, reply: Reply) -> None:
        """Cancel all requests of a reply. It has no effect on ended ones."""
        for active in reply.requests:
            self.driver.abort(active)

    def check_open(self) -> None:
        super().check_open()
        if self.driver.state != "ready":
            raise unavailable(self.driver.state, {})

    def check_room(self, choices: int = 1) -> None:
        """Raise `ApiError` also if a new request would miss a target by the forecast."""
        super().check_room(choices)
        forecast = self.driver.forecast
        predicted = forecast.predict(self.driver.now_s)
        excess_s = forecast.limits.excess_s(predicted)
        if excess_s:
            self.stats.refusals[LATE] += 1
            raise late(predicted, excess_s)

    def _admit(self, asked: EngineRequest) -> None:
        """Raise `ApiError` for a request that is refused."""
        if asked.llmctl_end_after is not None and not self.options.allow_end_after:
            text = "'llmctl_end_after' needs a server that was started with --allow-end-after"
            raise ApiError(text, param="llmctl_end_after")
        choices = asked.prompt_count * asked.n
        if choices > MAX_CHOICES:
            text = f"{asked.prompt_count} prompts with n {asked.n} are {choices} choices"
            raise ApiError(f"{text}; the limit is {MAX_CHOICES}", param="n")
        self.check_open()  # it may have begun to drain while the body was read
        self.admit(asked.model, choices)

    def _tokens(self, asked: EngineRequest) -> list[list[int]]:
        """Return the tokens of all prompts of a request. New clients call 'system' 'developer'."""
        try:
            if isinstance(asked, EngineChat):
                roles = {"developer": "system"}
                messages = [
                    {"role": roles.get(one.role, one.role), "content": one.text}
                    for one in asked.messages
                ]
                return [self._tokenizer.encode_chat(messages)]
            assert isinstance(asked, EngineCompletion)
            for prompt in asked.prompts:
                if not isinstance(prompt, str):
                    self._check_tokens(prompt, "prompt")
            encode = self._tokenizer.encode
            return [encode(text) if isinstance(text, str) else text for text in asked.prompts]
        except InputError as error:
            param = "messages" if isinstance(asked, EngineChat) else "prompt"
            raise ApiError(error.message, param=param) from None

    def _check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raise `ApiError` for a token that is not in the model's vocabulary."""
        size = self._engine.vocab_size
        if tokens and not (min(tokens) >= 0 and max(tokens) < size):
            token = next(token for token in tokens if not 0 <= token < size)
            raise ApiError(
                f"'{param}' holds token {token}; tokens here are 0 to {size - 1}",
                param=param,
            )

    def _submit(self, asked: EngineRequest, prompts: Sequence[Sequence[int]]) -> Reply:
        """Submit all choices of all prompts. Raises `ApiError` for a request that cannot be served,
        and then submits nothing. It awaits nothing, so the counts that admitted a request hold.
        """
        is_chat = isinstance(asked, EngineChat)
        default = self.options.max_new_tokens if is_chat else COMPLETION_TOKENS
        limits = [self._limit(len(prompt), asked.limit, default) for prompt in prompts]
        about = about_answer(self.model, chat=is_chat)
        shows_usage = bool(asked.stream_options.include_usage)
        writer = AnswerWriter(about, chat=is_chat, shows_usage=shows_usage)
        sampling = self._sampling(asked, min(limits))
        tokens = [tuple(prompt) for prompt in prompts]
        reply = Reply(
            writer,
            sum(map(len, prompts)),
            streams=asked.stream,
            keepalive_s=self.options.keepalive_s,
        )
        n = asked.n
        for index in range(len(prompts) * n):
            own = sampling
            if index % n and sampling.temperature:  # each choice of a prompt has its own seed
                seed = (sampling.seed + index % n) & MAX_SEED
                own = msgspec.structs.replace(sampling, seed=seed)
            active = LiveRequest(
                f"{about['id']}-{index}",
                tokens[index // n],
                limits[index // n],
                own,
                TextOutput(self._tokenizer.detokenizer(), asked.stops, own.min_tokens),
                reply,
                index,
                asked.priority,
                asked.llmctl_end_after,
                min(asked.timeout or math.inf, self.options.request_timeout_s),
            )
            refusal = self.driver.submit(active)
            if refusal:
                self._cancel(reply)
                raise ApiError(refusal.reason, code="context_length_exceeded")
            reply.requests.append(active)
        return reply

    def _limit(self, prompt_tokens: int, wanted: int | None, default: int) -> int:
        """Return how many tokens may be generated. Raises `ApiError` for an empty prompt, one that
        leaves no room for a new token, and if `wanted` exceeds a limit.
        """
        longest = self.options.max_new_tokens
        max_model_len = self._engine.max_model_len
        room = max_model_len - prompt_tokens
        if prompt_tokens < 1:
            raise ApiError("the prompt has no tokens", param="prompt")
        if wanted is not None and wanted > longest:
            text = f"max_tokens is {wanted}; the limit is {longest}"
            raise ApiError(text, param="max_tokens")
        if room < (wanted or 1):
            text = (
                f"the prompt has {prompt_tokens} tokens and max_tokens is {wanted or 1}, together "
                f"{prompt_tokens + (wanted or 1)}; the limit is {max_model_len}"
            )
            param = "prompt" if room < 1 else "max_tokens"
            raise ApiError(text, param=param, code="context_length_exceeded")
        return wanted or min(default, longest, room)

    def _sampling(self, asked: EngineRequest, limit: int) -> SamplingParams:
        """The request's sampling parameters, with OpenAI's defaults.

        Sampling without a seed gets a random one here, so that a slice that runs again draws the
        same tokens.
        """
        self._check_tokens(asked.stop_token_ids, "stop_token_ids")
        if asked.min_tokens > limit:
            text = f"min_tokens is {asked.min_tokens}; max_tokens is {limit}"
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

    def _write(self, active: LiveRequest) -> None:
        """Write a request that has ended to the log."""
        if self.log is not None:
            at = self.log.timestamp(self.driver.start_s + active.times.arrival_s)
            tokens = len(active.prompt), len(active.tokens), active.max_new_tokens
            self.log.add(active.times.line(at, tokens, active.status, active.priority))


@contextmanager
def engine_backend(plan: Plan, options: ServerOptions) -> Iterator[EngineBackend]:
    """Make the backend of a plan's workers, not started.

    Raises `InputError` for a plan that cannot be used, and `EngineError` if a recipe needs a GPU or
    a library that is missing.
    """
    if not options.ray:
        require_gpu(plan.recipe)
        traits_of(plan.recipe.engine.name).require()
    where = f" on Ray ({options.ray})" if options.ray else ""
    options.say(f"loading {plan.workers} workers of {plan.recipe.name}{where}")
    log = EventLog(options.event_log) if options.event_log else nullcontext()
    with log as events, _workers(plan, options.ray) as workers:
        tokenizer = load_tokenizer(plan.recipe.model)
        warm_up(plan)
        driver = Driver(
            make_scheduler(plan, events.add if events else None),
            workers,
            Stats(plan.recipe.sla, plan.fit.prefill.valid.both(plan.fit.decode.valid)),
            make_limits(plan, options),
        )
        backend = EngineBackend(driver, tokenizer, options, plan.fit.engine)
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
            joining=plan.fit.engine.joining,
            slots=plan.fit.engine.max_rows or NO_LIMIT,
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
