"""N workers that are kept alive: started together, each with its engine, and started again when one
dies.

What a worker lives in, a process of this machine or an actor of a cluster, is its `Body`; the pool
knows no more of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from toolkit.engines.protocol import FinishReason, Round, Row, SliceOutput, StepOutput
from toolkit.errors import EngineError
from toolkit.files.profile import EngineFacts
from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec, Recipe
from toolkit.sched.types import Failure
from toolkit.workers.frames import (
    Alive,
    Cancel,
    Done,
    DoneRound,
    FromWorker,
    Interrupt,
    Progress,
    Ready,
    Refused,
    RunRound,
    RunSlice,
    Start,
    Stop,
    ToWorker,
)
from toolkit.workers.process import WorkerProcess, share_gpus, visible_gpus
from toolkit.workers.protocol import (
    BatchDone,
    BatchProgress,
    OnEvent,
    RoundDone,
    Times,
    WorkerEvent,
    WorkerLost,
    WorkerReady,
    WorkersFailed,
)
from toolkit.workers.supervisor import START_S, Patience, SilentWorkerError, Supervisor

# What a batch has given so far, put together from the steps that were reported.


class BatchRecord:
    """The front's copy of a batch that runs on a worker: what is left when the worker dies."""

    def __init__(self, batch_id: int, size: int) -> None:
        self.batch_id = batch_id
        self._tokens: list[list[int]] = [[] for _ in range(size)]
        self._finish: list[FinishReason] = [""] * size

    def add(self, steps: Sequence[StepOutput]) -> None:
        for step in steps:
            for row, token in zip(step.rows, step.tokens, strict=True):
                self._tokens[row].append(token)
            for row, reason in step.ended:
                self._finish[row] = reason

    def output(self) -> SliceOutput:
        return SliceOutput(tuple(map(tuple, self._tokens)), tuple(self._finish))


MAX_BACKOFF_S = 30.0
PATIENCE = Patience()
SPAWN_S = 60.0  # for a process to exist
# Loading again is given up, for this try, after so many times the longest load so far and a grace.
# The grace is long: the first load may have read the weights from the page cache, this one from a
# cold disk.
LOAD_TIMES, LOAD_GRACE_S = 3.0, 300.0
# So many failed loads in a row of every worker end the pool: a process manager starts it anew,
# perhaps elsewhere, and says so where operators look.
MAX_FAILED_LOADS = 5

OnFrame = Callable[[FromWorker], None]


class Body(Protocol):
    """What one worker lives in, until it is gone. It has been sent its `Start` frame."""

    def send(self, frame: ToWorker) -> None:
        """Send a frame, in order; one that is sent to a body that is gone, is lost."""
        ...

    def kill(self) -> None:
        """End it at once, if it still lives."""
        ...

    async def gone(self) -> str:
        """Wait until it has ended and nothing of it is left; one line that says why it has."""
        ...


Spawn = Callable[
    [int, OnFrame], Awaitable[Body]
]  # of a worker's number; what it says arrives on the running loop


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class _Slot:
    """One worker: the body that it has now, and what it runs."""

    index: int
    body: Body | None = None
    facts: EngineFacts | None = None  # None: not ready
    refusal: Refused | None = None
    batch: BatchRecord | int | None = None  # of a round its number alone: it keeps no tokens here
    load_began_s: float = 0.0  # of the body that it has now, on the loop's clock
    started: bool = False  # it was ready once
    deaths: int = 0  # in a row, without a batch served between them
    failed_loads: int = 0  # in a row
    overdue: str = ""  # why it was killed
    first_ready: asyncio.Future[None] = field(default_factory=_future)
    keeper: asyncio.Task[None] | None = None


class WorkerPool:
    """`toolkit.workers.protocol.Workers`, whatever they live in.

    Args:
        size: how many.
        spawn: starts a worker's body. `OSError` where there can be none now.
        backoff_s: the wait before a worker that died twice in a row is started again; it doubles each time.
        stop_timeout_s: how long `stop` waits for a step to end before it kills.
        load_grace_s: seconds that loading again may take beyond `LOAD_TIMES` the longest load so far.
        patience: how long a worker may say nothing, and its first load take.
        start_s: how long until its first sign of life; of bodies that wait for a place, `math.inf`.
    """

    def __init__(
        self,
        size: int,
        spawn: Spawn,
        *,
        backoff_s: float = 0.5,
        stop_timeout_s: float = 10.0,
        load_grace_s: float = LOAD_GRACE_S,
        patience: Patience = PATIENCE,
        start_s: float = START_S,
    ) -> None:
        self.size = size
        self.supervisor = Supervisor(size, self._kill_hung)
        self._patience = patience
        self._start_s = max(start_s, patience.waiting_s)
        self._load_grace_s = load_grace_s
        self._longest_load_s = 0.0
        self._spawn = spawn
        self._backoff_s = backoff_s
        self._stop_timeout_s = stop_timeout_s
        self._slots: list[_Slot] = []
        self._on_event: OnEvent | None = None
        self._stopping = asyncio.Event()

    async def start(self, on_event: OnEvent) -> None:
        """Start all workers at once. `EngineError`, with what the first to fail said, if one cannot
        load its engine.
        """
        self._on_event = on_event
        self._slots = [_Slot(index) for index in range(self.size)]
        for slot in self._slots:
            slot.keeper = asyncio.create_task(self._keep(slot), name=f"worker {slot.index}")
        self.supervisor.start()
        try:
            await asyncio.gather(*[slot.first_ready for slot in self._slots])
        except BaseException:  # cancelled while they load, too: no process may be left behind
            await self.stop()
            raise

    def run(
        self,
        worker: int,
        batch_id: int,
        rows: Sequence[Row],
        steps: int,
        estimated_s: float = math.inf,
    ) -> None:
        """Send a slice. A worker that is gone answers, too: the batch has crashed."""
        record = BatchRecord(batch_id, len(rows))
        self._send(worker, record, RunSlice(batch_id, tuple(rows), steps), estimated_s)

    def run_round(
        self, worker: int, batch_id: int, plan: Round, estimated_s: float = math.inf
    ) -> None:
        """Send a round; the same holds."""
        self._send(worker, batch_id, RunRound(batch_id, plan), estimated_s)

    def silent(self) -> list[SilentWorkerError]:
        """The workers that take too long now, for what they do."""
        return self.supervisor.silent()

    def _send(
        self, worker: int, batch: BatchRecord | int, frame: ToWorker, estimated_s: float
    ) -> None:
        slot = self._slots[worker]
        if slot.batch is not None:
            raise ValueError(f"worker {worker} runs batch {_batch_id(slot.batch)}; one at a time")
        slot.batch = batch
        if slot.facts is not None and slot.body is not None:
            self.supervisor.enter(worker, "running", self._patience.batch_s(estimated_s))
            slot.body.send(frame)
        else:
            asyncio.get_running_loop().call_soon(self._end_batch, slot, Times(), "crashed")

    def interrupt(self, worker: int, batch_id: int) -> None:
        """Tell the worker; for a round that is over, nothing happens."""
        body = self._slots[worker].body
        if body is not None:
            body.send(Interrupt(batch_id))

    def cancel(self, worker: int, batch_id: int, request_ids: Sequence[str]) -> None:
        """Tell the worker; for a batch that is over, nothing happens."""
        body = self._slots[worker].body
        if body is not None:
            body.send(Cancel(batch_id, tuple(request_ids)))

    async def stop(self) -> None:
        """End all workers: at their next step, or killed after `stop_timeout_s`. No events come any
        more.
        """
        self._stopping.set()
        self.supervisor.stop()
        self._on_event = None
        keepers = [slot.keeper for slot in self._slots if slot.keeper is not None]
        for slot in self._slots:
            if slot.body is not None and slot.facts is not None:
                slot.body.send(Stop())
            elif slot.body is not None:
                slot.body.kill()  # it is loading, and has nothing to finish
        if keepers:
            await asyncio.wait(keepers, timeout=self._stop_timeout_s)
        for slot in self._slots:
            if slot.body is not None:
                slot.body.kill()
        await asyncio.gather(*keepers)

    def kill(self, worker: int) -> None:
        """End a worker at once; it is started again."""
        body = self._slots[worker].body
        if body is not None:
            body.kill()

    async def _keep(self, slot: _Slot) -> None:
        """Keep one worker alive until the end, or until its first engine, or none, can be loaded."""
        while not self._stopping.is_set():
            slot.refusal, slot.overdue = None, ""
            reason = await self._live(slot)
            slot.body = None
            self._lost(slot, slot.overdue or reason)
            if not slot.started:
                return
            if all(one.failed_loads >= MAX_FAILED_LOADS for one in self._slots):
                self._tell(WorkersFailed(_cannot_load(slot, slot.overdue or reason)))
                return
            await self._back_off(slot)

    async def _live(self, slot: _Slot) -> str:
        """One body of a worker, from its start to its end; why it ended."""
        loop = asyncio.get_running_loop()
        slot.load_began_s = loop.time()
        spawning = self._spawn(slot.index, lambda frame: self._hear(slot, frame))
        try:
            slot.body = await asyncio.wait_for(spawning, SPAWN_S)
        except TimeoutError:
            return f"exit code 1: no process could be started in {SPAWN_S:g} s"
        except OSError as error:
            return f"exit code 1: no process could be started: {error.strerror}"
        if self._stopping.is_set():
            slot.body.kill()
        if slot.facts is None:
            self.supervisor.enter(slot.index, "starting", self._start_s, self._load_s(slot))
        try:
            return await slot.body.gone()
        finally:
            self.supervisor.enter(slot.index, "away")

    def _load_s(self, slot: _Slot) -> float:
        """What a load may take in all: the first may download the model, a later one is like those
        before it.
        """
        if not slot.started:
            return self._patience.load_s
        return LOAD_TIMES * self._longest_load_s + self._load_grace_s

    def _kill_hung(self, hung: SilentWorkerError) -> None:
        """One that hangs looks like any other from outside: only time tells."""
        slot = self._slots[hung.worker]
        if slot.body is not None:
            slot.overdue = hung.reason
            slot.body.kill()

    def _hear(self, slot: _Slot, frame: FromWorker) -> None:
        self._notice(slot, frame)
        if isinstance(frame, Alive):
            return
        if isinstance(frame, Ready):
            slot.facts = EngineFacts.model_validate_json(frame.facts)
            slot.started, slot.failed_loads = True, 0
            load_s = asyncio.get_running_loop().time() - slot.load_began_s
            self._longest_load_s = max(self._longest_load_s, load_s)
            if not slot.first_ready.done():
                slot.first_ready.set_result(None)
            self._tell(WorkerReady(slot.index, slot.facts))
        elif isinstance(frame, Refused):
            slot.refusal = frame
        elif slot.batch is not None and frame.batch_id == _batch_id(slot.batch):
            self._hear_of_batch(slot, slot.batch, frame)

    def _notice(self, slot: _Slot, frame: FromWorker) -> None:
        """What the frame says of the worker's state. An idle one is held to signs once it has given
        one.
        """
        supervisor, waiting_s = self.supervisor, self._patience.waiting_s
        state = supervisor.watched[slot.index].state
        if isinstance(frame, Ready):
            supervisor.enter(slot.index, "idle")
        elif isinstance(frame, Alive) and slot.facts is None:
            if state != "loading":
                supervisor.enter(slot.index, "loading", waiting_s, self._load_s(slot))
            supervisor.sign(slot.index)
        elif isinstance(frame, Alive) and state == "idle":
            supervisor.enter(slot.index, "idle", waiting_s)
        elif isinstance(frame, Progress):
            supervisor.sign(slot.index)

    def _hear_of_batch(
        self, slot: _Slot, batch: BatchRecord | int, frame: Progress | Done | DoneRound
    ) -> None:
        if isinstance(batch, BatchRecord):
            batch.add(frame.steps)
        if frame.steps:
            self._tell(BatchProgress(slot.index, frame.batch_id, frame.steps))
        if isinstance(frame, Done):
            slot.deaths = 0
            self._end_batch(slot, frame.times, "oom" if frame.out_of_memory else "")
        elif isinstance(frame, DoneRound):
            slot.deaths = 0
            failure: Failure = "oom" if frame.output.is_short else ""
            self._end(
                slot, RoundDone(slot.index, frame.batch_id, frame.output, frame.times, failure)
            )

    def _end_batch(self, slot: _Slot, times: Times, failure: Failure) -> None:
        batch = slot.batch
        if isinstance(batch, BatchRecord):
            self._end(slot, BatchDone(slot.index, batch.batch_id, batch.output(), times, failure))
        elif batch is not None:
            self._end(slot, RoundDone(slot.index, batch, None, times, failure))

    def _end(self, slot: _Slot, event: BatchDone | RoundDone) -> None:
        slot.batch = None
        if slot.facts is not None:
            self.supervisor.enter(slot.index, "idle")
        self._tell(event)

    def _lost(self, slot: _Slot, reason: str) -> None:
        was_ready, slot.facts = slot.facts is not None, None
        slot.deaths += 1
        slot.failed_loads += not was_ready
        self._end_batch(slot, Times(), "crashed")
        if was_ready:
            self._tell(WorkerLost(slot.index, reason))
        if not slot.first_ready.done():
            slot.first_ready.set_exception(_cannot_start(slot, reason))

    async def _back_off(self, slot: _Slot) -> None:
        """The first death may be bad luck; from the second in a row on, wait longer each time."""
        if slot.deaths < 2:
            return
        wait_s = min(self._backoff_s * 2.0 ** (slot.deaths - 2), MAX_BACKOFF_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), wait_s)

    def _tell(self, event: WorkerEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)


def _batch_id(batch: BatchRecord | int) -> int:
    return batch if isinstance(batch, int) else batch.batch_id


def _cannot_start(slot: _Slot, reason: str) -> EngineError:
    if slot.refusal is not None:
        return EngineError(slot.refusal.message, slot.refusal.hint)
    return EngineError(f"worker {slot.index} ended while it loaded its engine: {reason}")


def _cannot_load(slot: _Slot, reason: str) -> EngineError:
    said = slot.refusal.message if slot.refusal is not None else reason
    return EngineError(
        f"no worker is left, and none could be loaded again in {MAX_FAILED_LOADS} tries; worker {slot.index}: {said}",
        slot.refusal.hint
        if slot.refusal is not None and slot.refusal.hint
        else "see whether the device, its memory and the model's files are still there, and start the server again",
    )


# Workers in processes of this machine.


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What one worker loads, and how often it reports; `flush_s` as `ProcessWorkers` has it."""

    model: ModelSpec
    engine: EngineSpec
    hardware: HardwareSpec
    flush_s: float = 0.05

    @classmethod
    def of(cls, recipe: Recipe) -> WorkerSpec:
        """Of a worker of this recipe."""
        return cls(recipe.model, recipe.engine, recipe.hardware, recipe.engine.flush_s)

    @property
    def gpus(self) -> int:
        """How many it takes."""
        return self.engine.tensor_parallel_size if self.hardware.device == "cuda" else 0


class ProcessWorkers(WorkerPool):
    """The pool whose bodies are processes.

    Args:
        model, engine, hardware: what each loads.
        size: how many.
        flush_s: progress of a batch is reported at most this often, but for first tokens.
        others: further workers, numbered after these, each with what it loads: of a fleet of several kinds.
        backoff_s, stop_timeout_s, patience: as the pool's.
    """

    def __init__(
        self,
        model: ModelSpec,
        engine: EngineSpec,
        hardware: HardwareSpec,
        size: int,
        *,
        flush_s: float = 0.05,
        others: Sequence[WorkerSpec] = (),
        backoff_s: float = 0.5,
        stop_timeout_s: float = 10.0,
        patience: Patience = PATIENCE,
    ) -> None:
        outfits = [WorkerSpec(model, engine, hardware, flush_s)] * size + list(others)
        visible = visible_gpus() if any(outfit.gpus for outfit in outfits) else []
        gpus = share_gpus([outfit.gpus for outfit in outfits], visible)

        async def spawn(worker: int, on_frame: OnFrame) -> Body:
            outfit = outfits[worker]
            start = Start.of(outfit.model, outfit.engine, outfit.hardware, outfit.flush_s)
            return await WorkerProcess.spawn(start, outfit.engine.threads, on_frame, gpus[worker])

        super().__init__(
            len(outfits),
            spawn,
            backoff_s=backoff_s,
            stop_timeout_s=stop_timeout_s,
            patience=patience,
        )

    def pid(self, worker: int) -> int | None:
        """The process of a worker; None between two."""
        body = self._slots[worker].body
        return body.pid if isinstance(body, WorkerProcess) else None
