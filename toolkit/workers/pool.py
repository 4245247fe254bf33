"""A pool that starts N workers together, each with its engine, and restarts a worker that ends.

The body of a worker (`Body`) is a process of this machine or an actor of a cluster; the pool does
not know which.

A worker counts as alive if it makes progress, not if its process exists. It is in one state at a
time; a state limits how long the worker may be silent, and how long the state may take.
"""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from toolkit.engines.protocol import EnginePass
from toolkit.engines.resources import (
    GPUS_VARIABLE,
    engine_environment,
    share_gpus,
    visible_gpus,
)
from toolkit.errors import EngineError, LlmctlError
from toolkit.files.profile import EngineFacts
from toolkit.files.recipe import Recipe
from toolkit.processes.channel import Alive
from toolkit.processes.supervisor import Supervisor
from toolkit.workers.process import OnFrame, WorkerProcess
from toolkit.workers.protocol import (
    Cancel,
    FromWorker,
    Interrupt,
    OnEvent,
    PassDone,
    PassProgress,
    Ready,
    Refused,
    Start,
    Stop,
    ToWorker,
    WorkerEvent,
    WorkerLost,
    WorkerReady,
    WorkersFailed,
)

STOP_TIMEOUT_S = 10.0  # for a step to end before `stop` kills
START_S = 20.0  # until a process's first sign of life: its interpreter starts on a busy machine
SPAWN_S = 60.0  # for a process to start
BATCH_TIMES = 10.0
WAITING_TIMES = 4.0
# When every worker has failed to load this many times in a row, the pool gives up: a process
# manager then restarts the server, perhaps on another machine, and reports it to operators.
MAX_FAILED_LOADS = 5

# What a worker does, as the reason of a kill says it.
LOADS = "loaded"
IDLE = "was idle"
RUNS = "ran a batch"


@dataclass(slots=True, frozen=True)
class Patience:
    """How long a worker may be silent, and how long its load may take, in seconds.

    - In a batch: `BATCH_TIMES` its estimate plus `grace_s`.
    - While it loads or is idle, where it gives a sign of life every half second: `WAITING_TIMES`
      `grace_s`. No client waits for its tokens then, and disks may stall.
    - A load may take `load_s` in all.
    """

    grace_s: float = 30.0
    load_s: float = 3600.0

    @property
    def waiting_s(self) -> float:
        return WAITING_TIMES * self.grace_s

    def batch_s(self, estimated_s: float) -> float:
        return BATCH_TIMES * estimated_s + self.grace_s


PATIENCE = Patience()


class Body(Protocol):
    """The process or actor of a worker. Its `Start` frame has been sent."""

    def send(self, frame: ToWorker) -> None:
        """Send a frame, in order. A frame to a body that has ended is lost."""
        ...

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        ...

    async def gone(self) -> str:
        """Wait until it has ended and nothing of it is left. Returns in one line why it ended."""
        ...


@dataclass(slots=True, eq=False)
class _Slot:
    """One process of a worker: its body and its pass.

    Attributes:
        facts: of its engine; None: it is not ready.
        pass_id: of the running pass.
    """

    index: int
    body: Body | None = None
    facts: EngineFacts | None = None
    refusal: Refused | None = None
    pass_id: int | None = None


class WorkerPool(Supervisor):
    """`toolkit.workers.protocol.Workers` for any kind of body.

    Args:
        patience: how long a worker may be silent, and how long its load may take.

    Attributes:
        start_s: how long until a body's first sign of life; `math.inf` for bodies that wait for a
            place.
    """

    called = "worker"
    start_s = START_S

    def __init__(self, size: int, patience: Patience = PATIENCE) -> None:
        super().__init__(size)
        self._patience = patience
        self._slots = [_Slot(index) for index in range(size)]
        self._emit: OnEvent = _ignore

    @abstractmethod
    async def spawn(self, worker: int, on_frame: OnFrame) -> Body:
        """Start the body of a worker; its frames arrive on the running loop. Raises `OSError` if
        that is not possible now.
        """

    async def start(self, on_event: OnEvent) -> None:
        """Start all workers at once. Raises `EngineError`, with the first worker's reason, if one
        cannot load its engine.
        """
        self._emit = on_event
        try:
            await self.start_children()
        except BaseException:  # also when cancelled: no process may be left behind
            await self.stop()
            raise

    def run(self, worker: int, plan: EnginePass, estimated_s: float = math.inf) -> None:
        """Send a pass. If the worker is gone, it ends as crashed."""
        slot = self._slots[worker]
        if slot.pass_id is not None:
            raise ValueError(f"worker {worker} runs pass {slot.pass_id}; one at a time")
        slot.pass_id = plan.pass_id
        if slot.facts is not None and slot.body is not None:
            self.enter(worker, RUNS, self._patience.batch_s(estimated_s))
            slot.body.send(plan)
        else:
            asyncio.get_running_loop().call_soon(self._crash, slot)

    def tell(self, worker: int, change: Interrupt | Cancel) -> None:
        """Change a running pass; nothing happens if it has ended."""
        body = self._slots[worker].body
        if body is not None:
            body.send(change)

    async def stop(self) -> None:
        """End all workers at a step, or kill them after `STOP_TIMEOUT_S`. No event follows."""
        self._emit = _ignore
        for slot in self._slots:
            if slot.body is not None and slot.facts is not None:
                slot.body.send(Stop())
            elif slot.body is not None:
                slot.body.kill()  # it is loading, so there is no step to end
        await self.end_children(STOP_TIMEOUT_S)

    def kill(self, number: int) -> None:
        """End a worker at once; it is restarted."""
        body = self._slots[number].body
        if body is not None:
            body.kill()

    async def live(self, number: int) -> str:
        """See `Supervisor.live`. Raises `EngineError` for an engine that refuses its recipe."""
        slot = self._slots[number] = _Slot(number)
        spawning = self.spawn(number, partial(self._receive, slot))
        try:
            slot.body = await asyncio.wait_for(spawning, SPAWN_S)
        except TimeoutError:
            return f"exit code 1: no process could be started in {SPAWN_S:g} s"
        if self.ending.is_set():
            slot.body.kill()
        if slot.facts is None:
            start_s = max(self.start_s, self._patience.waiting_s)
            self.enter(number, LOADS, start_s, self._patience.load_s)
        gone = asyncio.ensure_future(slot.body.gone())
        try:
            why = await asyncio.shield(gone)
        except asyncio.CancelledError:
            slot.body.kill()
            await gone
            raise
        if slot.refusal is not None:
            raise EngineError(slot.refusal.message, slot.refusal.hint)
        return why

    def ended(self, number: int, error: LlmctlError) -> bool:
        """See `Supervisor.ended`: not again if no worker could be loaded in several tries."""
        slot = self._slots[number]
        slot.body = slot.facts = None
        self._crash(slot)
        if self.children[number].is_ready:
            self._emit(WorkerLost(number, error.message))
        if any(child.failed_starts < MAX_FAILED_LOADS for child in self.children):
            return True
        failed = EngineError(
            f"no worker is left, and none could be loaded again in {MAX_FAILED_LOADS} tries; "
            f"worker {number}: {error.message}",
            error.hint
            or "check that the device, its memory and the model's files are still there, "
            "and start the server again",
        )
        self._emit(WorkersFailed(failed))
        return False

    def _receive(self, slot: _Slot, frame: FromWorker) -> None:
        index = slot.index
        if isinstance(frame, Alive):
            if slot.pass_id is None:  # from its first sign of life on, it must give more
                self.sign(index, self._patience.waiting_s)
        elif isinstance(frame, Ready):
            self.enter(index, IDLE)
            slot.facts = EngineFacts.model_validate_json(frame.facts)
            self.ready(index)
            self._emit(WorkerReady(index, slot.facts))
        elif isinstance(frame, Refused):
            slot.refusal = frame
        else:
            self._receive_of_pass(slot, frame)

    def _receive_of_pass(self, slot: _Slot, frame: PassProgress | PassDone) -> None:
        self.sign(slot.index)
        if frame.pass_id != slot.pass_id:
            return
        frame.worker = slot.index
        if isinstance(frame, PassProgress):
            self._emit(frame)
        else:
            self.succeeded(slot.index)
            self._end_pass(slot, frame)

    def _crash(self, slot: _Slot) -> None:
        """End the running pass, if there is one: its worker has gone."""
        if slot.pass_id is not None:
            self._end_pass(slot, PassDone(slot.index, slot.pass_id, None, "crashed"))

    def _end_pass(self, slot: _Slot, done: PassDone) -> None:
        slot.pass_id = None
        if slot.facts is not None:
            self.enter(slot.index, IDLE)
        self._emit(done)


def _ignore(event: WorkerEvent) -> None:
    """Events before the start and after the stop."""


class ProcessWorkers(WorkerPool):
    """The pool of processes on this machine.

    Args:
        recipe: what each worker loads.
        workers: how many there are.
        patience: as in `WorkerPool`.

    Raises `EngineError` if there are fewer GPUs than the workers take and the recipe does not share
    them (`engine.share_gpus`).
    """

    def __init__(self, recipe: Recipe, workers: int, patience: Patience = PATIENCE) -> None:
        super().__init__(workers, patience)
        self._recipe = recipe
        size = int(recipe.hardware.device == "cuda")
        visible = visible_gpus() if size else []
        self._gpus = share_gpus(workers, size, visible, shared=recipe.engine.share_gpus)

    async def spawn(self, worker: int, on_frame: OnFrame) -> Body:
        recipe = self._recipe
        share = self._gpus[worker]
        engine = recipe.engine.on_part_of_gpu(share.workers)
        start = Start(recipe.model_copy(update={"engine": engine}).model_dump_json())
        environment = engine_environment(engine.threads, recipe.hardware.device)
        if share.names is not None:
            environment[GPUS_VARIABLE] = share.names
        return await WorkerProcess.spawn(start, environment, on_frame)

    def pid(self, worker: int) -> int | None:
        """The process id of a worker; None between two processes."""
        body = self._slots[worker].body
        return body.child.pid if isinstance(body, WorkerProcess) and body.child else None
