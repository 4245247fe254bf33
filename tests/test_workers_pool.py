"""Workers in real processes: what they serve, and what happens when they end, run out of memory or
are cancelled.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import samples
import tiny
import uvloop
from said import logged_to, says
from slices import SliceTokens, run_slice, tokens_of

from toolkit.engines.protocol import (
    EnginePass,
    Row,
    SamplingParams,
    StepOutput,
    make_engine,
    slice_of,
)
from toolkit.errors import EngineError
from toolkit.files.recipe import ModelSpec
from toolkit.processes.channel import Alive
from toolkit.processes.lifeline import LifeSigns
from toolkit.workers.pool import (
    MAX_FAILED_LOADS,
    OnFrame,
    Patience,
    ProcessWorkers,
    WorkerPool,
)
from toolkit.workers.protocol import (
    Cancel,
    Interrupt,
    PassDone,
    PassProgress,
    Ready,
    Stop,
    WorkerEvent,
    WorkerLost,
    WorkerReady,
    WorkersFailed,
)

pytestmark = pytest.mark.slow

CRASH = 200
HANG = 201


@pytest.fixture(autouse=True)
def _restarts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.processes.supervisor.PAUSE_S", 0.0)


LONG = SamplingParams(ignore_eos=True)
ROWS = [Row("a", (1, 2, 3), 0, 40), Row("b", (4, 5), 0, 40, end_after=7)]
STUCK = [
    Row("a", (HANG, 1), 0, 40, LONG),
    Row("b", (2,), 0, 40, LONG),
]  # one token each, then the engine hangs


def fake(**config: object) -> ModelSpec:
    return tiny.model_spec(
        "fake", config={"model_type": "fake", "crash_token": CRASH, "hang_token": HANG, **config}
    )


ENDLESS = [
    Row("a", (1,), 0, 10**6, LONG),
    Row("b", (2,), 0, 10**6, LONG),
]  # more than an hour of steps


def slow_workers() -> ProcessWorkers:
    """A worker with steps of 5 ms."""
    engine = tiny.engine_spec("fake", budget_mib=4096, flush_s=0.01)
    return ProcessWorkers(tiny.recipe(fake(decode_s=0.005), engine), 1)


def process_workers(
    size: int = 1, model: ModelSpec | None = None, budget_mib: float = 1.0
) -> ProcessWorkers:
    engine = tiny.engine_spec("fake", budget_mib=budget_mib)
    return ProcessWorkers(tiny.recipe(model or fake(), engine), size)


class Events:
    """Collects events; a test waits for those that it expects."""

    def __init__(self) -> None:
        self.seen: list[WorkerEvent] = []
        self._news = asyncio.Event()

    def __call__(self, event: WorkerEvent) -> None:
        self.seen.append(event)
        self._news.set()

    async def until(self, kind: type[WorkerEvent], count: int = 1) -> list[WorkerEvent]:
        """All events of a kind, as soon as there are `count`."""
        while True:
            found = [event for event in self.seen if isinstance(event, kind)]
            if len(found) >= count:
                return found
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), 60)


def with_workers(
    scenario: Callable[[ProcessWorkers, Events], Awaitable[None]],
    workers: ProcessWorkers | None = None,
) -> None:
    """Run a scenario with started workers, and check that no process is left."""

    async def main() -> None:
        pool = workers or process_workers()
        events = Events()
        await pool.start(events)
        try:
            await scenario(pool, events)
        finally:
            await pool.stop()

    before = set(psutil.Process().children())
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as a server does
            runner.run(main())
    finally:
        assert set(psutil.Process().children()) <= before


def expected(rows: list[Row], steps: int) -> SliceTokens:
    engine = make_engine(fake(), tiny.engine_spec("fake"), tiny.CPU)
    return run_slice(engine, rows, steps, lambda step: True)


def test_a_slice_through_a_process_equals_one_without() -> None:
    async def scenario(workers: ProcessWorkers, events: Events) -> None:
        ready = [event for event in events.seen if isinstance(event, WorkerReady)]
        assert sorted(event.worker for event in ready) == [0, 1]
        assert {event.facts.capacity_tokens for event in ready} == {1024}
        assert len({workers.pid(0), workers.pid(1), os.getpid()}) == 3
        for worker in (0, 1):
            workers.run(worker, slice_of(ROWS, 20, 10 + worker))
        with pytest.raises(ValueError, match="one at a time"):
            workers.run(0, slice_of(ROWS, 20, 2))
        await events.until(PassDone, 2)
        done = {event.worker: event for event in events.seen if isinstance(event, PassDone)}
        for worker in (0, 1):
            assert (done[worker].pass_id, done[worker].failure) == (10 + worker, "")
            assert reported(events, 10 + worker) == expected(ROWS, 20)

    with_workers(scenario, process_workers(2))


def steps_of(events: Events, *pass_ids: int) -> list[StepOutput]:
    """The steps that the progress events of passes report."""
    progress = [event for event in events.seen if isinstance(event, PassProgress)]
    return [step for event in progress if event.pass_id in pass_ids for step in event.steps]


def reported(events: Events, pass_id: int) -> SliceTokens:
    """The tokens of a slice of two rows, as far as they were reported."""
    return tokens_of(2, steps_of(events, pass_id))


def tokens_reported(events: Events, *pass_ids: int) -> dict[int, list[int]]:
    """The tokens that the progress events of passes report, by row number."""
    tokens: dict[int, list[int]] = {}
    for step in steps_of(events, *pass_ids):
        for number, token in zip(step.rows, step.tokens, strict=True):
            tokens.setdefault(number, []).append(token)
    return tokens


def test_a_killed_worker_keeps_its_reported_tokens() -> None:
    async def scenario(workers: ProcessWorkers, events: Events) -> None:
        first_pid = workers.pid(0)
        workers.run(0, slice_of(STUCK, 40, 5))
        await events.until(PassProgress)
        workers.kill(0)
        await events.until(WorkerReady, 2)
        progress, done, lost, ready = events.seen[1:]
        assert isinstance(progress, PassProgress)
        assert isinstance(done, PassDone)
        assert (done.pass_id, done.output, done.failure) == (5, None, "crashed")
        assert [len(tokens) for tokens in reported(events, 5).tokens] == [1, 1]
        assert lost == WorkerLost(0, "killed by SIGKILL")
        assert isinstance(ready, WorkerReady)
        assert workers.pid(0) not in (None, first_pid)
        workers.run(0, slice_of(ROWS, 20, 6))
        await events.until(PassDone, 2)
        assert reported(events, 6) == expected(ROWS, 20)

    with_workers(scenario)


def test_a_slice_sent_to_a_worker_killed_while_idle_ends_as_crashed() -> None:
    async def scenario(workers: ProcessWorkers, events: Events) -> None:
        workers.kill(0)
        await events.until(WorkerLost)
        workers.run(0, slice_of(ROWS, 20, 9))
        (done,) = await events.until(PassDone)
        assert (done.pass_id, done.output, done.failure) == (9, None, "crashed")
        await events.until(WorkerReady, 2)

    with_workers(scenario)


def test_an_engine_that_raises_ends_its_process_with_the_reason() -> None:
    async def scenario(workers: ProcessWorkers, events: Events) -> None:
        workers.run(0, slice_of([Row("poison", (CRASH,), 0, 4)], 4, 1))
        (lost,) = await events.until(WorkerLost)
        assert isinstance(lost, WorkerLost)
        assert says(lost.reason, "exit code 1", "RuntimeError", "200")
        await events.until(WorkerReady, 2)

    with_workers(scenario)


def test_running_out_of_memory_keeps_the_process() -> None:
    async def scenario(workers: ProcessWorkers, events: Events) -> None:
        pid = workers.pid(0)
        many = [Row(str(index), (1,) * 60, 0, 30) for index in range(20)]
        workers.run(0, slice_of(many, 30, 1))
        (done,) = await events.until(PassDone)
        assert (done.failure, done.output.steps) == ("oom", 0)
        assert done.output.dropped == tuple(range(19, -1, -1))
        workers.run(0, slice_of(ROWS, 20, 2))
        await events.until(PassDone, 2)
        assert reported(events, 2) == expected(ROWS, 20)
        assert workers.pid(0) == pid

    with_workers(scenario)


def test_a_batch_stops_when_no_row_is_wanted_and_a_round_when_it_is_interrupted() -> None:
    async def scenario(workers: ProcessWorkers, events: Events) -> None:
        workers.run(0, slice_of(ENDLESS, 10**6, 1))
        await events.until(PassProgress)
        workers.tell(0, Cancel(1, (0,)))
        await events.until(PassProgress, 3)
        assert not [event for event in events.seen if isinstance(event, PassDone)]
        workers.tell(0, Cancel(1, (1,)))
        (done,) = await events.until(PassDone)
        assert (done.failure, done.output.ended) == ("", ())
        workers.tell(0, Cancel(1, (0, 1)))  # too late: nothing happens
        workers.run(0, slice_of(ROWS, 2, 2))
        assert (await events.until(PassDone, 2))[1].output.steps == 2
        seen = len(await events.until(PassProgress))
        workers.run(0, EnginePass(10**6, (ENDLESS[0],), (0,), pass_id=3))
        await events.until(PassProgress, seen + 2)
        workers.tell(0, Interrupt(3))
        interrupted = (await events.until(PassDone, 3))[2]
        assert 0 < interrupted.output.steps < 10**6
        assert len(tokens_reported(events, 3)[0]) == 1 + interrupted.output.steps
        workers.run(0, slice_of(ENDLESS, 10**6, 4))
        await events.until(PassProgress, len(await events.until(PassProgress)) + 1)

    with_workers(scenario, slow_workers())  # its end ends the last batch, too


def test_stop_kills_a_worker_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.workers.pool.STOP_TIMEOUT_S", 0.0)

    async def scenario(workers: ProcessWorkers, events: Events) -> None:
        workers.run(0, slice_of(STUCK, 40, 1))
        await events.until(PassProgress)

    with_workers(scenario)


async def never(workers: ProcessWorkers, events: Events) -> None:
    raise AssertionError("the workers should not have started")


@pytest.mark.parametrize(
    ("config", "message", "hint"),
    [
        ({"decode_ms": 3}, r"model\.config\.decode_ms", "'decode_s'"),
        # it ends while it loads: the warm-up holds the token
        ({"crash_token": 0}, r"worker 0.*exit code 1.*RuntimeError", ""),
    ],
)
def test_an_engine_that_cannot_be_loaded_is_an_error(
    config: dict[str, int], message: str, hint: str
) -> None:
    with pytest.raises(EngineError, match=message) as raised:
        with_workers(never, process_workers(1, fake(**config)))
    assert hint in raised.value.hint


class ManualBody:
    """A worker's body that a test controls: it ends when the test sets its end, or by `kill`."""

    def __init__(self, on_frame: OnFrame) -> None:
        self.send_frame = on_frame
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def send(self, frame: object) -> None:
        if isinstance(frame, Stop) and not self.end.done():
            self.end.set_result("exit code 0")

    def kill(self) -> None:
        if not self.end.done():
            self.end.set_result("killed by SIGKILL")

    async def gone(self) -> str:
        return await self.end


class ManualPool(WorkerPool):
    """A pool of such bodies; those of the first start load at once. Its time passes by
    `after`.
    """

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(size, **options)
        self.bodies: list[ManualBody] = []
        self.loads_at_once = True

    async def spawn(self, worker: int, on_frame: OnFrame) -> ManualBody:
        body = ManualBody(on_frame)
        self.bodies.append(body)
        if self.loads_at_once and len(self.bodies) <= self.size:
            self.load(body)
        return body

    def load(self, body: ManualBody) -> None:
        body.send_frame(Ready(samples.fit().engine.model_dump_json()))

    async def next_body(self, count: int) -> ManualBody:
        """The last body, as soon as `count` bodies were made."""
        while len(self.bodies) < count:
            await asyncio.sleep(0)
        return self.bodies[-1]

    async def until_it_starts(self) -> None:
        while self.children[0].does != "loaded":
            await asyncio.sleep(0)

    async def loading_again(self) -> ManualBody:
        """Lose the first worker. Returns its next body."""
        self.bodies[0].kill()
        body = await self.next_body(len(self.bodies) + 1)
        await self.until_it_starts()
        return body

    async def fail_to_load(self, times: int) -> None:
        for _ in range(times):
            body = await self.next_body(len(self.bodies) + 1)
            body.end.set_result("exit code 1: RuntimeError: no such device")

    def after(self, seconds: float, worker: int = 0) -> None:
        """Let a worker be silent for so long."""
        self.children[worker].sign_s -= seconds
        self.children[worker].since_s -= seconds
        self.check()


def with_bodies(scenario: Callable[[ManualPool, Events], Awaitable[None]], size: int = 1) -> None:
    """Run a scenario with a pool of workers that have loaded."""

    async def main() -> None:
        pool = ManualPool(size, patience=Patience(grace_s=10.0, load_s=1000.0))
        events = Events()
        await pool.start(events)
        while any(slot.body is None for slot in pool._slots):  # `Ready` comes before the body
            await asyncio.sleep(0)
        await scenario(pool, events)
        await pool.stop()

    asyncio.run(main())


def test_the_pool_gives_up_when_no_worker_can_be_loaded_again() -> None:
    async def scenario(pool: ManualPool, events: Events) -> None:
        pool.bodies[0].kill()
        await pool.fail_to_load(MAX_FAILED_LOADS)
        (failed,) = await events.until(WorkersFailed)
        assert isinstance(failed, WorkersFailed)
        assert says(str(failed.error), "5 tries", "worker 0", "exit code 1", "RuntimeError")
        assert len(pool.bodies) == 1 + MAX_FAILED_LOADS

    with_bodies(scenario)


def test_a_lost_worker_its_failed_loads_and_its_return_are_logged_once_each() -> None:
    said: list[str] = []

    async def scenario(pool: ManualPool, events: Events) -> None:
        pool.bodies[1].kill()
        await pool.fail_to_load(2)
        pool.load(await pool.next_body(5))
        await events.until(WorkerReady, 3)

    with logged_to(said):
        with_bodies(scenario, size=2)
    assert [line.split()[0] for line in said] == ["WARNING", "WARNING", "WARNING", "INFO"], said
    assert all(says(line, "worker 1") for line in said), "the end of the pool is no loss"
    assert all(says(line, "RuntimeError") for line in said[1:3])
    assert re.search(r"\b\d+\.\d s\b", said[3]), "how long it was away"


def test_a_successful_load_resets_the_count_of_failed_loads() -> None:
    async def scenario(pool: ManualPool, events: Events) -> None:
        for _ in range(3):
            pool.bodies[-1].kill()
            await pool.fail_to_load(MAX_FAILED_LOADS - 1)
            pool.load(await pool.next_body(len(pool.bodies) + 1))
        assert not [event for event in events.seen if isinstance(event, WorkersFailed)]

    with_bodies(scenario)


def test_beside_a_running_worker_restarts_have_no_limit() -> None:
    async def scenario(pool: ManualPool, events: Events) -> None:
        pool.bodies[0].kill()
        await pool.fail_to_load(2 * MAX_FAILED_LOADS)
        assert not [event for event in events.seen if isinstance(event, WorkersFailed)]
        pool.bodies[1].kill()
        await pool.fail_to_load(2 * MAX_FAILED_LOADS)
        await events.until(WorkersFailed)

    with_bodies(scenario, size=2)


def test_a_worker_that_hangs_while_it_loads_is_killed() -> None:
    async def scenario(pool: ManualPool, events: Events) -> None:
        body = await pool.loading_again()
        for _ in range(80):  # a long load with a sign of life every three seconds
            body.send_frame(Alive())
            pool.after(3.0)
        assert not body.end.done()
        pool.after(35.0)
        assert not body.end.done()
        pool.after(6.0)
        assert body.end.done()
        pool.load(await pool.next_body(3))
        await events.until(WorkerReady, 2)

    with_bodies(scenario)


def test_a_worker_without_a_first_sign_of_life_is_killed() -> None:
    async def scenario(pool: ManualPool, events: Events) -> None:
        body = await pool.loading_again()
        pool.after(39.0)
        assert not body.end.done()
        pool.after(2.0)
        assert body.end.done()

    with_bodies(scenario)


def test_an_endless_load_is_killed_despite_signs_of_life() -> None:
    async def scenario(pool: ManualPool, events: Events) -> None:
        body = await pool.loading_again()
        for _ in range(99):
            body.send_frame(Alive())
            pool.after(10.0)
        assert not body.end.done()
        for _ in range(2):
            body.send_frame(Alive())
            pool.after(10.0)
        assert body.end.done()  # after `load_s`

    with_bodies(scenario)


def test_the_first_load_has_a_time_limit_too() -> None:
    async def main() -> None:
        pool = ManualPool(1, patience=Patience(grace_s=10.0, load_s=1000.0))
        pool.loads_at_once = False
        starting = asyncio.create_task(pool.start(Events()))
        body = await pool.next_body(1)
        await pool.until_it_starts()
        body.send_frame(Alive())
        pool.after(41.0)
        with pytest.raises(EngineError, match="41 s while it loaded"):
            await starting

    asyncio.run(main())


def test_an_idle_worker_is_killed_only_if_its_signs_of_life_stop() -> None:
    async def scenario(pool: ManualPool, events: Events) -> None:
        pool.after(3600.0, worker=1)
        assert not pool.bodies[1].end.done()
        pool.bodies[0].send_frame(Alive())
        pool.after(39.0)
        assert not pool.bodies[0].end.done()
        pool.after(2.0)
        assert pool.bodies[0].end.done()
        lost = (await events.until(WorkerLost))[0]
        assert lost == WorkerLost(0, "killed: it was silent for 41 s while it was idle")

    with_bodies(scenario, size=2)


def test_a_worker_silent_long_beyond_its_estimate_is_killed() -> None:
    async def scenario(pool: ManualPool, events: Events) -> None:
        pool.run(0, slice_of(ROWS, 20, 7), estimated_s=2.0)
        pool.after(25.0)
        pool.bodies[0].send_frame(Alive())  # a thread sends it, so it says nothing about the engine
        pool.after(4.0)
        assert not pool.bodies[0].end.done()
        pool.bodies[0].send_frame(PassProgress(-1, 7, (StepOutput((0,), (5,), ()),)))
        pool.after(29.0)
        assert not pool.bodies[0].end.done()
        pool.after(2.0)
        assert pool.bodies[0].end.done()
        (done,) = await events.until(PassDone)
        assert done.failure == "crashed"

    with_bodies(scenario)


def test_time_in_which_the_front_stood_still_does_not_count() -> None:
    async def scenario(pool: ManualPool, events: Events) -> None:
        pool.run(0, slice_of(ROWS, 20, 7), estimated_s=2.0)
        pool._checked_s -= 3600
        pool.after(3600.0)
        assert not pool.bodies[0].end.done()

    with_bodies(scenario)


def test_a_loading_worker_gives_signs_of_life_only_if_it_works() -> None:
    signs = LifeSigns.__new__(LifeSigns)  # no thread: the test checks
    signs.state = "loading"
    signs._idle = True
    signs._children_s = 0.0
    signs._at_last_sign = (-1.0, -1)
    assert signs._is_due()
    assert [signs._is_due() for _ in range(3)][-1] is False  # nothing happened
    worked = threading.Thread(target=lambda: sum(range(10**6)))
    worked.start()
    worked.join()
    assert signs._is_due()
    signs.state = "busy"
    assert not signs._is_due()
    signs.state = "idle"
    assert signs._is_due()


FRONT = """
import asyncio, os, signal, sys
sys.path.insert(0, sys.argv[1])
import test_workers_pool as shared

async def main():
    workers, events = shared.process_workers(4, budget_mib=4096.0), shared.Events()
    await workers.start(events)
    workers.run(0, shared.slice_of(shared.ENDLESS, 10**6, 1))
    workers.run(1, shared.slice_of(shared.STUCK, 40, 2))  # hangs in its engine
    workers.run(2, shared.slice_of(shared.STUCK, 40, 3))
    await events.until(shared.PassProgress, 3)
    os.kill(workers.pid(2), signal.SIGSTOP)  # receives nothing
    print(*(workers.pid(worker) for worker in range(4)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def left_by(program: str, *words: object) -> tuple[int, int, list[psutil.Process]]:
    """Run a program that prints numbers of processes. Its exit code, how many it printed, and those
    that do not end after it.
    """
    command = [sys.executable, "-c", program, str(Path(__file__).parent), *map(str, words)]
    front = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    printed = list(map(int, front.stdout.split()))
    left = [psutil.Process(pid) for pid in printed if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(left, timeout=30)
    for process in alive:
        process.kill()
    return front.returncode, len(printed), alive


def test_workers_end_when_their_front_is_killed() -> None:
    assert left_by(FRONT) == (-signal.SIGKILL, 4, [])


STOPPED_AT_START = """
import asyncio, os, signal, sys
sys.path.insert(0, sys.argv[1])
import test_workers_pool as shared

async def main():
    workers, events = shared.process_workers(), shared.Events()
    await workers.start(events)
    before = workers.pid(0)
    workers.kill(0)
    while workers.pid(0) in (None, before):
        await asyncio.sleep(0)
    os.kill(workers.pid(0), signal.SIGSTOP)  # before its interpreter has run a line
    print(workers.pid(0), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_a_worker_stopped_early_ends_with_its_front() -> None:
    assert left_by(STOPPED_AT_START) == (-signal.SIGKILL, 1, [])


BENCH = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from benchmarks.common.serving import fake_plan
from toolkit.profiling.process import EngineProcess

bench = EngineProcess(fake_plan(Path(sys.argv[2])).recipe)
bench.start()
bench.wait()
os.kill(bench._child.pid, signal.SIGSTOP)
print(bench._child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_stopped_engine_ends_with_the_profiler(tmp_path: Path) -> None:
    assert left_by(BENCH, tmp_path) == (-signal.SIGKILL, 1, [])


def test_a_process_that_is_stopped_while_it_loads_is_replaced() -> None:
    async def scenario(workers: ProcessWorkers, events: Events) -> None:
        before = workers.pid(0)
        workers.kill(0)
        while (pid := workers.pid(0)) is None or pid == before:
            await asyncio.sleep(0)
        os.kill(pid, signal.SIGSTOP)
        workers.children[0].sign_s -= 3600
        workers.check()
        await events.until(WorkerReady, 2)
        assert not psutil.pid_exists(pid)

    with_workers(scenario)


def test_rows_stay_on_the_worker_between_rounds() -> None:
    async def scenario(workers: ProcessWorkers, events: Events) -> None:
        alone = expected(ROWS, 40).tokens
        workers.run(0, EnginePass(4, (ROWS[0],), (7,), pass_id=1))
        (first,) = await events.until(PassDone)
        assert (first.failure, first.output.steps) == ("", 4)
        assert (first.output.joined, first.output.ended) == (((7, 0),), ())
        workers.run(0, EnginePass(40, (ROWS[1],), (9,), pass_id=2))
        second = (await events.until(PassDone, 2))[1]
        assert second.output.ended == (9,)
        got = tokens_reported(events, 1, 2)
        assert tuple(got[9]) == alone[1]
        assert tuple(got[7]) == alone[0][: 1 + 4 + second.output.steps]

    with_workers(scenario)


def test_a_round_out_of_memory_names_the_dropped_rows() -> None:
    async def scenario(workers: ProcessWorkers, events: Events) -> None:
        workers.run(0, EnginePass(5, (ROWS[0], Row("huge", (1,) * 2000, 0, 40)), (0, 1), pass_id=1))
        (done,) = await events.until(PassDone)
        assert (done.failure, done.output.dropped) == ("oom", (1,))
        workers.run(0, EnginePass(5, (Row("poison", (CRASH,), 0, 4),), (2,), pass_id=2))
        crashed = (await events.until(PassDone, 2))[1]
        assert (crashed.pass_id, crashed.failure, crashed.output) == (2, "crashed", None)
        await events.until(WorkerLost)

    with_workers(scenario)
