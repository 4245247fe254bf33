"""One scheduler, two clocks: what a live server decided, a replay of its log decides again."""

import asyncio
import random
import threading
from collections.abc import Callable, Sequence

import pytest
import tiny
from serving import LAW, HandWorkers

from toolkit.engines.bytes_tokenizer import ByteDetokenizer
from toolkit.engines.factory import make_engine
from toolkit.engines.protocol import Engine, Round, Row, SamplingParams, SliceOutput, StepOutput
from toolkit.estimators.memory import ZetaMemory
from toolkit.estimators.swap import LinearSwap
from toolkit.sched.eventlog import Complete, CompleteRound, Event, Recorder, Tick, from_lines, replay, to_line
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Worker
from toolkit.serve.driver import Driver
from toolkit.serve.live import Ask, Live
from toolkit.serve.reply import Reply
from toolkit.serve.stats import Stats
from toolkit.serve.text import TextOutput
from toolkit.workers.protocol import BatchDone, BatchProgress, RoundDone, Times, WorkerLost
from toolkit.workers.record import BatchRecord

PROMPTS = [f"request number {number}"[: 4 + number] for number in range(12)]
POLICIES = {
    "slice": {"slice_tokens": 8, "min_interval_s": 0.02, "eager": False},
    "sequence": {"batch_size": 3},
}
ROUNDS = {
    "past-future": {"interval_steps": 2},
    "aggressive": {"watermark": 1.0, "interval_steps": 1},
    "slice-continuous": {"slice_tokens": 5},
    "mlfq": {"quantum_s": 0.02, "starvation_s": 1.0, "interval_steps": 2},
}


class ThreadWorkers(HandWorkers):
    """Real engines, each on a thread of this process; `kill` ends a batch as a killed process would."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        super().__init__(len(engines))
        self.engines = engines
        self.killed = [threading.Event() for _ in engines]
        self.tasks: set[asyncio.Task] = set()

    def run(self, worker: int, batch_id: int, rows: Sequence[Row], steps: int) -> None:
        super().run(worker, batch_id, rows, steps)
        task = asyncio.create_task(self.serve(worker, BatchRecord(batch_id, len(rows)), tuple(rows), steps))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def serve(self, worker: int, record: BatchRecord, rows: tuple[Row, ...], steps: int) -> None:
        loop = asyncio.get_running_loop()

        def tell(step: StepOutput) -> None:
            record.add((step,))
            self.on_event(BatchProgress(worker, record.batch_id, (step,)))

        def on_step(step: StepOutput) -> bool:
            loop.call_soon_threadsafe(tell, step)
            return not self.killed[worker].is_set()

        await asyncio.to_thread(self.engines[worker].run_slice, rows, steps, on_step)
        await asyncio.sleep(0)  # the last steps were told to the loop before this
        del self.running[worker]
        killed = self.killed[worker].is_set()
        failure = "crashed" if killed else ""
        self.on_event(BatchDone(worker, record.batch_id, record.output(), Times(), failure))
        if killed:
            self._die(worker)

    def _die(self, worker: int) -> None:
        self.killed[worker].clear()
        self.on_event(WorkerLost(worker, "killed"))
        asyncio.get_running_loop().call_soon(self.recover, worker)


class ThreadRounds(ThreadWorkers):
    """The same with rounds. A worker that was killed comes back with a new engine."""

    def __init__(self, make: Callable[[], Engine], size: int = 2) -> None:
        super().__init__([make() for _ in range(size)])
        self.make = make
        self.stopping = [threading.Event() for _ in range(size)]

    def run_round(self, worker: int, batch_id: int, plan: Round) -> None:
        assert worker not in self.running, "one round at a time"
        self.running[worker] = (batch_id, [], plan.steps)
        self.stopping[worker].clear()
        task = asyncio.create_task(self.go_round(worker, batch_id, plan))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def interrupt(self, worker: int, batch_id: int) -> None:
        if worker in self.running and self.running[worker][0] == batch_id:
            self.stopping[worker].set()

    async def go_round(self, worker: int, batch_id: int, plan: Round) -> None:
        loop = asyncio.get_running_loop()

        def on_step(step: StepOutput) -> bool:
            loop.call_soon_threadsafe(self.on_event, BatchProgress(worker, batch_id, (step,)))
            return not (self.killed[worker].is_set() or self.stopping[worker].is_set())

        output = await asyncio.to_thread(self.engines[worker].run_round, plan, on_step)
        await asyncio.sleep(0)
        del self.running[worker]
        killed = self.killed[worker].is_set()
        if killed:
            self.engines[worker] = self.make()
        self.on_event(RoundDone(worker, batch_id, None if killed else output, Times(), "crashed" if killed else ""))
        if killed:
            self._die(worker)


def planned() -> list[Worker]:
    swap = LinearSwap(0.001, 1e5, 1e5)
    return [Worker(index, LAW, ZetaMemory(400), swap=swap, host_tokens=10_000) for index in range(2)]


def submit(driver: Driver, name: str, prompt: str, limit: int) -> tuple[Live, Reply]:
    reply = Reply(1, patient=True)
    ask = Ask(name, tuple(prompt.encode()), limit, SamplingParams())
    return driver.submit(ask, TextOutput(ByteDetokenizer()), reply, 0), reply


async def serve(workers: ThreadWorkers, policy: str, lines: list[bytes]) -> dict[str, list[int]]:
    """A crowd of requests, each some tokens after the ones before; two given up on the way, a worker killed."""
    chosen = make_policy(policy, (POLICIES | ROUNDS)[policy])
    scheduler = Recorder(chosen, planned(), lambda event: lines.append(to_line(event)))
    driver = Driver(scheduler, workers, Stats())
    await driver.start()
    rng = random.Random(0)
    asked: list[tuple[Live, Reply]] = []
    for number, prompt in enumerate(PROMPTS):
        while len(asked) > 3 and not (asked[-3][0].tokens or asked[-3][0].status):
            await asyncio.sleep(0.001)
        asked.append(submit(driver, f"r{number}", prompt, rng.randint(2, 30)))
        if number == 4:
            driver.cancel(asked[0][0])
        if number == 8:
            driver.cancel(asked[8][0])
            workers.killed[max(workers.running, default=0)].set()
    for live, reply in asked:
        while not live.status:
            await reply.take(10.0)
    await driver.stop()
    return {prompt: live.tokens for prompt, (live, _) in zip(PROMPTS, asked, strict=True) if live.status != "cancelled"}


def alone(engine: Engine, prompt: str, count: int) -> list[int]:
    """What the engine says after `prompt` when nobody else is there."""
    row = Row("alone", tuple(prompt.encode()), 0, count)
    output: SliceOutput = engine.run_slice([row], count, lambda step: True)
    return list(output.tokens[0])


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    return [make_engine(tiny.model_spec(), tiny.engine_spec(), tiny.CPU) for _ in range(2)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_live_run_of_a_real_engine_replays_exactly(policy: str, engines: list[Engine]):
    lines: list[bytes] = []
    tokens = asyncio.run(serve(ThreadWorkers(engines), policy, lines))
    events: list[Event] = list(from_lines(lines))
    decided = [batch for event in events if isinstance(event, Tick) for batch in event.started]
    assert {batch.worker for batch in decided} == {0, 1}
    assert any(len(batch.request_ids) > 1 for batch in decided)
    assert any(event.result.failure == "crashed" for event in events if isinstance(event, Complete))
    assert list(replay(events, Scheduler(make_policy(policy, POLICIES[policy]), planned()))) == []
    assert tokens == {prompt: alone(engines[0], prompt, len(made)) for prompt, made in tokens.items()}


@pytest.mark.parametrize("policy", ROUNDS)
def test_a_live_run_of_rounds_replays_exactly_and_gives_everybody_his_own_text(policy: str, engines: list[Engine]):
    lines: list[bytes] = []
    tokens = asyncio.run(serve(ThreadRounds(rebatch), policy, lines))
    events: list[Event] = list(from_lines(lines))
    decided = [batch for event in events if isinstance(event, Tick) for batch in event.started]
    assert {batch.worker for batch in decided} == {0, 1}
    assert any(event.result.failure == "crashed" for event in events if isinstance(event, CompleteRound))
    assert list(replay(events, Scheduler(make_policy(policy, ROUNDS[policy]), planned()))) == []
    assert tokens == {prompt: alone(engines[0], prompt, len(made)) for prompt, made in tokens.items()}


def rebatch() -> Engine:
    return make_engine(tiny.model_spec(), tiny.engine_spec("rebatch"), tiny.CPU)


def test_a_replay_with_another_parameter_is_told_apart():
    lines: list[bytes] = []
    engine = make_engine(tiny.model_spec("fake"), tiny.engine_spec("fake"), tiny.CPU)
    asyncio.run(serve(ThreadWorkers([engine, engine]), "slice", lines))
    other = Scheduler(make_policy("slice", POLICIES["slice"] | {"slice_tokens": 9}), planned())
    assert next(replay(from_lines(lines), other)).startswith("event ")
