"""A server of a toy model in the test's process, and workers on the test's loop.

The toy model's next token is a function of all tokens before it. A request that was moved or run
again therefore gives the same text, and a token that was lost or doubled gives another text.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import samples

from benchmarks.common.samples import bilinear_law
from toolkit.engines.protocol import EnginePass, FinishReason, PassOutput, Row, StepOutput
from toolkit.engines.tokenizer import EOS, VOCAB_SIZE, ByteTokenizer
from toolkit.estimators.memory import ZetaMemory
from toolkit.routing.admission import UNLIMITED, LatencyLimits
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Failure, Worker
from toolkit.server.application import Application
from toolkit.server.driver import Driver
from toolkit.server.engine import EngineBackend
from toolkit.server.options import ServerOptions, one_key
from toolkit.server.stats import Stats
from toolkit.server.status import Facts
from toolkit.workers.protocol import (
    Cancel,
    Interrupt,
    OnEvent,
    PassDone,
    PassProgress,
    WorkerLost,
    WorkerReady,
)

LAW = bilinear_law(p=(1e-4, 1e-3, 0.0, 0.01), d=(1e-6, 1e-4, 0.0, 0.01))
FACTS = samples.fit().engine
# Of all addresses, so that any Host may be named.
OPTIONS = ServerOptions(model="toy", host="0.0.0.0", max_new_tokens=256, max_waiting=64)
MAX_MODEL_LEN = 512


def next_token(tokens: Sequence[int]) -> int:
    """The toy model's next token, a lower-case letter."""
    return 97 + hash(tuple(tokens)) % 26


def generate(prompt: Sequence[int] | str, count: int) -> list[int]:
    """The toy model's tokens after `prompt`, undisturbed."""
    tokens = list(prompt.encode() if isinstance(prompt, str) else prompt)
    start = len(tokens)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[start:]


def text(prompt: Sequence[int] | str, count: int) -> str:
    return bytes(generate(prompt, count)).decode()


def run_row(row: Row, steps: int) -> tuple[tuple[int, ...], FinishReason]:
    """The new tokens of a row, and how it ended, or ''."""
    tokens = list(row.tokens)
    count = min(steps, row.max_new_tokens - row.generated)
    for _ in range(count):
        generated = row.generated + len(tokens) - len(row.tokens) + 1
        ends = row.end_after is not None and generated >= row.end_after
        tokens.append(EOS if ends else next_token(tokens))
        if ends:
            return tuple(tokens[len(row.tokens) :]), "stop"
    new = tuple(tokens[len(row.tokens) :])
    return new, "length" if row.generated + len(new) >= row.max_new_tokens else ""


class HandWorkers:
    """Workers that a test moves by hand: passes wait in `running` until the test ends them. Slices
    only.
    """

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.running: dict[int, tuple[int, list[Row], int]] = {}
        self.plans: dict[int, EnginePass] = {}
        self.rows: list[list[Row]] = []  # of every pass that was started
        self.unwanted: list[str] = []
        self.killed: list[int] = []
        self.stopped = False
        self._reported: dict[int, int] = {}  # steps of the pass that runs

    async def start(self, on_event: OnEvent) -> None:
        self.on_event = on_event
        for worker in range(self.size):
            on_event(WorkerReady(worker, FACTS))

    def run(self, worker: int, plan: EnginePass, estimated_s: float = math.inf) -> None:
        assert worker not in self.running, "one pass at a time"
        if plan.keep_cache:
            raise NotImplementedError
        self.estimated_s = estimated_s
        self.plans[worker] = plan
        self._reported[worker] = 0
        self.running[worker] = (plan.pass_id, list(plan.enter), plan.steps)
        self.rows.append(list(plan.enter))

    def tell(self, worker: int, change: Interrupt | Cancel) -> None:
        if not isinstance(change, Cancel):
            raise NotImplementedError
        assert self.running[worker][0] == change.pass_id
        plan = self.plans[worker]
        names = dict(zip(plan.numbers, [row.request_id for row in plan.enter], strict=True))
        self.unwanted += [names[number] for number in change.numbers]

    def kill(self, worker: int) -> None:
        self.killed.append(worker)

    async def stop(self) -> None:
        self.stopped = True

    def progress(self, worker: int = 0, steps: int = 1, done_before: int = 0) -> None:
        """Report `steps` more tokens of each row, after the first `done_before`."""
        pass_id, rows, _ = self.running[worker]
        numbers = self.plans[worker].numbers
        self._reported[worker] = done_before + steps
        frames = []
        for step in range(done_before, done_before + steps):
            so_far = [
                (number, *run_row(row, step + 1)) for number, row in zip(numbers, rows, strict=True)
            ]
            new = [part for part in so_far if len(part[1]) == step + 1]
            ended = tuple((row, finish) for row, _, finish in new if finish)
            got = (row for row, _, _ in new)
            last = (tokens[-1] for _, tokens, _ in new)
            frames.append(StepOutput(tuple(got), tuple(last), ended))
        self.on_event(PassProgress(worker, pass_id, tuple(frames)))

    def finish(self, worker: int = 0, *, steps: int | None = None, failure: Failure = "") -> None:
        """End the pass after `steps` of its steps; those that were not reported are now."""
        pass_id, rows, planned = self.running[worker]
        steps = planned if steps is None else steps
        reported = self._reported[worker]
        if steps > reported:
            self.progress(worker, steps - reported, reported)
        plan = self.plans[worker]
        results = [run_row(row, steps) for row in rows]
        ended = [
            number for number, (_, reason) in zip(plan.numbers, results, strict=True) if reason
        ]
        longest = max(len(tokens) for tokens, _ in results)
        del self.running[worker]
        output = None if failure == "crashed" else PassOutput(longest, ended=tuple(ended))
        self.on_event(PassDone(worker, pass_id, output, failure))

    def crash(self, worker: int = 0, *, steps: int = 0) -> None:
        self.finish(worker, steps=steps, failure="crashed")
        self.on_event(WorkerLost(worker, "killed"))

    def recover(self, worker: int = 0) -> None:
        self.on_event(WorkerReady(worker, FACTS))


class ToyWorkers(HandWorkers):
    """Workers that run alone and report every `stride` steps, each in a turn of the loop."""

    def __init__(self, size: int = 2, stride: int = 4) -> None:
        super().__init__(size)
        self.stride = stride

    def run(self, worker: int, plan: EnginePass, estimated_s: float = math.inf) -> None:
        super().run(worker, plan, estimated_s)
        asyncio.get_running_loop().call_soon(self._go_on, worker, 0)

    def _go_on(self, worker: int, at: int) -> None:
        _, rows, steps = self.running[worker]
        wanted = [row for row in rows if row.request_id not in self.unwanted]
        longest = max((row.max_new_tokens - row.generated for row in wanted), default=0)
        if at >= min(steps, longest):
            self.finish(worker, steps=at)
            return
        stride = min(self.stride, steps - at)
        self.progress(worker, stride, at)
        asyncio.get_running_loop().call_soon(self._go_on, worker, at + stride)


def make_driver(
    workers: HandWorkers,
    *,
    policy: str = "slice",
    capacity: int = 4096,
    limits: LatencyLimits = UNLIMITED,
    **parameters: Any,
) -> Driver:
    """A driver of such workers, each with a `capacity` in tokens."""
    planned = [Worker(index, LAW, ZetaMemory(capacity)) for index in range(workers.size)]
    scheduler = Scheduler(make_policy(policy, parameters or {"slice_tokens": 8}), planned)
    return Driver(scheduler, workers, Stats(), limits)


def app_of(
    driver: Driver, options: ServerOptions = OPTIONS, facts: Facts | None = None
) -> Application:
    """The application of the toy model; with `facts`, and the option, it has a status page."""
    backend = EngineBackend(
        driver,
        ByteTokenizer(),
        options,
        FACTS.model_copy(update={"max_model_len": MAX_MODEL_LEN, "vocab_size": VOCAB_SIZE}),
    )
    backend.facts = facts
    return Application(backend, options)


class Client(httpx.AsyncClient):
    """A client of a server in this process, with access to its parts."""

    def __init__(self, driver: Driver, workers: HandWorkers, options: ServerOptions) -> None:
        self.app = app_of(driver, options)
        super().__init__(transport=httpx.ASGITransport(self.app), base_url="http://test")
        self.driver = driver
        self.workers = workers
        self.renew_keys = self.app.renew_keys


@asynccontextmanager
async def client(
    workers: HandWorkers | None = None,
    *,
    capacity: int = 4096,
    limits: LatencyLimits = UNLIMITED,
    api_key: str = "",
    **options: Any,
) -> AsyncIterator[Client]:
    """A server in this process, and its client."""
    workers = workers or ToyWorkers()
    driver = make_driver(workers, capacity=capacity, limits=limits)
    await driver.start()
    async with Client(driver, workers, replace(OPTIONS, keys=one_key(api_key), **options)) as http:
        yield http
    await driver.stop()


def events(body: str) -> list[Any]:
    """The data of server-sent events, parsed."""
    lines = [line for line in body.split("\n\n") if line.startswith("data: ")]
    data = [line.removeprefix("data: ") for line in lines]
    return [line if line == "[DONE]" else msgspec.json.decode(line) for line in data]


async def turns(count: int = 20) -> None:
    """Let the event loop run, without waiting for any clock."""
    for _ in range(count):
        await asyncio.sleep(0)
