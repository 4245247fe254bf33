"""A replay of a live server's log repeats all decisions, under every policy.

Whatever happens to workers or memory meanwhile, each request gets the output that it would get on
an idle server, and each token once.
"""

import asyncio
import functools
import random
from typing import NamedTuple

import pytest
import tiny
from live import ThreadWorkers
from slices import run_slice
from toy_server import LAW

from toolkit.engines.protocol import Row, SamplingParams, make_engine
from toolkit.engines.tokenizer import ByteDetokenizer
from toolkit.engines.transformers_engine import TransformersEngine
from toolkit.estimators.laws import LinearSwap
from toolkit.estimators.memory import ZetaMemory
from toolkit.openai.answers import AnswerWriter
from toolkit.sched.eventlog import (
    Complete,
    End,
    Event,
    RecordingScheduler,
    Tick,
    from_lines,
    replay,
    to_line,
)
from toolkit.sched.policies import ORACLES, POLICIES, make_policy
from toolkit.sched.policies.base import Policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Joining, Worker
from toolkit.server.driver import Driver
from toolkit.server.live import LiveRequest, Reply, TextOutput
from toolkit.server.stats import Stats

pytestmark = pytest.mark.slow

SLICE = {"slice_tokens": 8, "min_interval_s": 0.02, "eager": False}
MLFQ = {"quantum_s": 0.02, "starvation_s": 1.0, "interval_steps": 2, "max_batch_size": 2}
CASES = {  # the static engine, or how newcomers join on `rebatch`; a policy and its parameters
    "slice": ("transformers", "slice", SLICE),
    "sequence": ("transformers", "sequence", {"batch_size": 3}),
    "slice, rebatch": ("embed", "slice", SLICE),
    "sequence, rebatch": ("embed", "sequence", {"batch_size": 3, "slice_tokens": 8}),
    "conservative": ("embed", "conservative", {"interval_steps": 4}),
    "aggressive": ("embed", "aggressive", {"watermark": 1.0, "interval_steps": 1}),
    "fcfs": ("embed", "fcfs", {"max_batch_size": 3, "interval_steps": 2}),
    "past-future": ("embed", "past-future", {"interval_steps": 2, "router": "future-memory"}),
    "past-future-sla": (
        "embed",
        "past-future-sla",
        {"interval_steps": 2, "ttft_s": 0.5, "mtpot_s": 0.1},
    ),
    "slice-continuous": ("embed", "slice-continuous", {"slice_tokens": 5, "interval_steps": 2}),
    "mlfq": ("embed", "mlfq", MLFQ),
    "mlfq, reactive": ("embed", "mlfq", MLFQ | {"swap": "reactive"}),
    "baton": ("embed", "baton", {"memory_threshold": 0.6, "headroom_steps": 1}),
    "past-future, shaping": ("shape", "past-future", {"interval_steps": 2}),
    "baton, shaping": ("shape", "baton", {"memory_threshold": 0.6, "headroom_steps": 1}),
}
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, top_p=0.9, seed=7),
    SamplingParams(temperature=0.8, top_k=40, min_p=0.01, seed=8),
    SamplingParams(repetition_penalty=1.3, min_tokens=3, ignore_eos=True, stop_token_ids=(260,)),
)
CAPACITY = 110  # tokens: two or three of the requests at their ends
TROUBLES = 4  # times that memory is short


class Shown(NamedTuple):
    """What a client got: the text, how many tokens, and how it ended."""

    text: str
    tokens: int
    finish: str


def planned(joining: Joining | None = None) -> list[Worker]:
    swap = LinearSwap(0.001, 1e5, 1e5)
    memory = ZetaMemory(CAPACITY)
    return [
        Worker(index, LAW, memory, swap=swap, host_tokens=150, joining=joining)
        for index in range(2)
    ]


class Ask(NamedTuple):
    """A request, before it is submitted."""

    request_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams
    priority: int = 0


def asks() -> list[tuple[Ask, tuple[str, ...]]]:
    """Requests of various lengths, priorities and sampling. A stop string ends every third one."""
    rng = random.Random(0)
    found = []
    for number in range(14):
        prompt = f"request number {number}"[: 4 + number]
        sampling = SAMPLINGS[number % len(SAMPLINGS)]
        ask = Ask(
            f"r{number}",
            tuple(prompt.encode()),
            rng.randint(2, 30),
            sampling,
            (0, 1, -1)[number % 3],
        )
        text, _ = TextOutput(ByteDetokenizer()).feed(alone(ask)[0], "")
        found.append(
            (ask, (text[len(text) // 2 :][:2],) if number % 3 == 1 and len(text) > 6 else ())
        )
    return found


@functools.cache
def engine() -> TransformersEngine:
    return make_engine(tiny.model_spec(), tiny.engine_spec(), tiny.CPU)


@functools.cache
def alone(ask: Ask) -> tuple[tuple[int, ...], str]:
    """The output of a request on an otherwise idle server, and how it ends."""
    row = Row("alone", ask.prompt, 0, ask.max_new_tokens, ask.sampling)
    output = run_slice(engine(), [row], 100, lambda step: True)
    return output.tokens[0], output.finish[0]


def expected(ask: Ask, stops: tuple[str, ...]) -> Shown:
    output = TextOutput(ByteDetokenizer(), stops)
    text, finish = output.feed(*alone(ask))
    return Shown(text, output.tokens, finish)


async def serve(
    workers: ThreadWorkers, policy: Policy, lines: list[bytes], joining: Joining | None = None
) -> list[tuple[LiveRequest, Shown]]:
    """Submit many requests, some tokens apart; cancel two meanwhile and kill a worker."""
    scheduler = RecordingScheduler(
        policy, planned(joining), lambda event: lines.append(to_line(event))
    )
    workers.scheduler = scheduler
    driver = Driver(scheduler, workers, Stats())
    await driver.start()
    crowd: list[LiveRequest] = []
    wanted = asks()
    for number, (ask, stops) in enumerate(wanted):
        while len(crowd) > 3 and not (crowd[-3].tokens or crowd[-3].status):
            await asyncio.sleep(0.001)
        reply = Reply(AnswerWriter({}, chat=False), 0, streams=True, keepalive_s=10.0)
        output = TextOutput(ByteDetokenizer(), stops)
        live = LiveRequest(*ask[:4], output, reply, priority=ask.priority)
        driver.submit(live)
        crowd.append(live)
        if number == 4:
            driver.abort(crowd[0])
        if number == 8:
            driver.abort(crowd[8])
            workers.killed[max(workers.running, default=0)].set()
    stay = [k for k, said in enumerate(crowd) if said.status != "cancelled"]
    async with asyncio.timeout(30.0):
        while not all(said.status for said in crowd):
            await asyncio.sleep(0.001)
        while scheduler.jobs:  # cancelled rows end with their batches
            await asyncio.sleep(0.001)
    await driver.stop()
    return [(crowd[k], expected(*wanted[k])) for k in stay]


def test_every_policy_that_can_be_served_has_a_case() -> None:
    assert {policy for _, policy, _ in CASES.values()} == POLICIES.keys() - ORACLES


@pytest.mark.parametrize("case", CASES)
def test_a_live_run_replays_exactly_and_loses_no_token(case: str) -> None:
    kind, name, parameters = CASES[case]
    policy = make_policy(name, parameters)
    joining = None if kind == "transformers" else kind
    spec = tiny.engine_spec("rebatch", joining=joining) if joining else tiny.engine_spec()
    lines: list[bytes] = []
    workers = ThreadWorkers(
        lambda: make_engine(tiny.model_spec(), spec, tiny.CPU), troubles=TROUBLES
    )
    crowd = asyncio.run(serve(workers, policy, lines, joining))
    for said, shown in crowd:
        assert Shown(said.unsent, len(said.tokens), said.status) == shown
    events: list[Event] = list(from_lines(lines))
    decided = [batch for event in events if isinstance(event, Tick) for batch in event.started]
    assert {batch.worker for batch in decided} == {0, 1}
    failures = [event.result.failure for event in events if isinstance(event, Complete)]
    assert failures.count("crashed") == 1
    assert workers.ran_out > 0
    assert (
        failures.count("oom") <= workers.ran_out
    )  # a step is tried again, and one may have come in a killed round
    assert policy.continuous == any(isinstance(event, End) for event in events)
    assert list(replay(events, Scheduler(policy, planned(joining)))) == []


def test_a_replay_with_another_parameter_differs() -> None:
    lines: list[bytes] = []
    make = functools.partial(make_engine, tiny.model_spec(), tiny.engine_spec(), tiny.CPU)
    asyncio.run(serve(ThreadWorkers(make), make_policy("slice", SLICE), lines))
    other = Scheduler(make_policy("slice", SLICE | {"slice_tokens": 9}), planned())
    assert next(replay(from_lines(lines), other)).startswith("event ")
