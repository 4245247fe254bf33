"""A pool that starts N workers together, each with its engine, and restarts a worker that ends.

The body of a worker (`Body`) is a process of this machine or an actor of a cluster; the pool does
not know which.

A worker counts as alive if it makes progress, not if its process exists. It is in one state at a
time; a state limits how long the worker may be silent, and how long the state may take.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from toolkit.engines.protocol import EnginePass
from toolkit.errors import EngineError
from toolkit.files.profile import EngineFacts
from toolkit.files.recipe import Recipe
from toolkit.workers.process import (
    GPUS_VARIABLE,
    OnFrame,
    WorkerProcess,
    engine_environment,
    share_gpus,
    visible_gpus,
)
from toolkit.workers.protocol import (
    Alive,
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
    WorkerState,
)

# The wait before a worker that ended twice in a row is restarted; it doubles each time.
BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
STOP_TIMEOUT_S = 10.0  # for a step to end before `stop` kills
CHECK_EVERY_S = 1.0
START_S = 20.0  # until a process's first sign of life: its interpreter starts on a busy machine
SPAWN_S = 60.0  # for a process to start
BATCH_TIMES = 10.0
WAITING_TIMES = 4.0
# A reload may take this many times the longest load so far, plus the grace. The grace is long: the
# first load may have read the weights from the page cache, and a reload from a cold disk.
LOAD_TIMES = 3.0
LOAD_GRACE_S = 300.0
# When every worker has failed to load this many times in a row, the pool gives up: a process
# manager then restarts the server, perhaps on another machine, and reports it to operators.
MAX_FAILED_LOADS = 5

_logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Patience:
    """How long a worker may be silent, and how long its first load may take, in seconds.

    - In a batch: `BATCH_TIMES` its estimate plus `grace_s`.
    - While it loads or is idle, where it gives a sign of life every half second: `WAITING_TIMES`
      `grace_s`. No client waits for its tokens then, and disks may stall.
    - The first load may take `load_s` in all. A later one may take three times the longest load so
      far plus five minutes.
    """

    grace_s: float = 30.0
    load_s: float = 3600.0

    @property
    def waiting_s(self) -> float:
        return WAITING_TIMES * self.grace_s

    def batch_s(self, estimated_s: float) -> float:
        return BATCH_TIMES * estimated_s + self.grace_s


PATIENCE = Patience()
WHILE: dict[WorkerState, str] = {
    "away": "",
    "starting": "while it started",
    "loading": "while it loaded",
    "idle": "while it was idle",
    "running": "in a batch",
}


@dataclass(slots=True)
class SupervisedWorker:
    """One worker's state, its start, its last sign of life (on the monotonic clock), and the
    limits of silence and total time, in seconds.
    """

    state: WorkerState = "away"
    since_s: float = 0.0
    sign_s: float = 0.0
    silence_s: float = math.inf
    total_s: float = math.inf

    def overdue(self, now_s: float) -> str:
        """Why it is to be killed; '' while it is in time. A worker may give signs of life and still
        not have loaded in time.
        """
        silent_s = now_s - self.sign_s
        total_s = now_s - self.since_s
        if silent_s > self.silence_s:
            return f"killed: it was silent for {silent_s:.0f} s {WHILE[self.state]}"
        if total_s > self.total_s:
            return f"killed: it had not loaded after {total_s:.0f} s"
        return ""


class Supervisor:
    """Checks all workers once a second, and kills those that take too long."""

    def __init__(self, size: int, kill: Callable[[int, str], None]) -> None:
        self.watched = [SupervisedWorker() for _ in range(size)]
        self._kill = kill
        self._checked_s = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    def enter(
        self,
        worker: int,
        state: WorkerState,
        silence_s: float = math.inf,
        total_s: float = math.inf,
    ) -> None:
        """The worker enters a state, which is also a sign of life."""
        now_s = time.monotonic()
        self.watched[worker] = SupervisedWorker(state, now_s, now_s, silence_s, total_s)

    def sign(self, worker: int) -> None:
        self.watched[worker].sign_s = time.monotonic()

    def start(self) -> None:
        """Check now, and every `CHECK_EVERY_S` until `stop`."""
        self._checked_s = time.monotonic()
        self.check()

    def stop(self) -> None:
        if self._timer:
            self._timer.cancel()

    def check(self) -> None:
        """Kill the workers that take too long, and schedule the next check.

        Time in which this process itself stood still does not count: on a suspended machine no
        worker hangs.
        """
        now_s = time.monotonic()
        late_s = now_s - self._checked_s - CHECK_EVERY_S
        self._checked_s = now_s
        if late_s > CHECK_EVERY_S:
            for watched in self.watched:
                watched.sign_s += late_s
                watched.since_s += late_s
        for worker, watched in enumerate(self.watched):
            if why := watched.overdue(now_s):
                self._kill(worker, why)
        self._timer = asyncio.get_running_loop().call_later(CHECK_EVERY_S, self.check)


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
    """One worker: its body and its pass.

    Attributes:
        facts: of its engine; None: the worker is not ready.
        pass_id: of the running pass.
        load_began_s: of its current body, on the loop's clock.
        exits: in a row, without a pass that was run.
        failed_loads: in a row.
        kill_reason: why the supervisor killed its current body.
        lost_s: when it was lost, on the loop's clock; None while it is ready, and before.
    """

    index: int
    body: Body | None = None
    facts: EngineFacts | None = None
    refusal: Refused | None = None
    pass_id: int | None = None
    load_began_s: float = 0.0
    exits: int = 0
    failed_loads: int = 0
    kill_reason: str = ""
    lost_s: float | None = None
    first_ready: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class WorkerPool(ABC):
    """`toolkit.workers.protocol.Workers` for any kind of body.

    Args:
        patience: how long a worker may be silent, and how long its first load may take.

    Attributes:
        start_s: how long until a body's first sign of life; `math.inf` for bodies that wait for a
            place.
    """

    start_s = START_S

    def __init__(self, size: int, patience: Patience = PATIENCE) -> None:
        self.size = size
        self.supervisor = Supervisor(size, self._kill_silent)
        self._patience = patience
        self._longest_load_s = 0.0
        self._keepers: list[asyncio.Task[None]] = []  # they start the bodies, one for each worker
        self._slots: list[_Slot] = []
        self._emit: OnEvent = _ignore
        self._stopping = asyncio.Event()

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
        self._slots = [_Slot(index) for index in range(self.size)]
        self._keepers = [
            asyncio.create_task(self._keep(slot), name=f"worker {slot.index}")
            for slot in self._slots
        ]
        self.supervisor.start()
        try:
            await asyncio.gather(*[slot.first_ready for slot in self._slots])
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
            self.supervisor.enter(worker, "running", self._patience.batch_s(estimated_s))
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
        self._stopping.set()
        self.supervisor.stop()
        self._emit = _ignore
        for slot in self._slots:
            if slot.body is not None and slot.facts is not None:
                slot.body.send(Stop())
            elif slot.body is not None:
                slot.body.kill()  # it is loading, so there is no step to end
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=STOP_TIMEOUT_S)
        for slot in self._slots:
            if slot.body is not None:
                slot.body.kill()
        await asyncio.gather(*self._keepers)

    def kill(self, worker: int) -> None:
        """End a worker at once; it is restarted."""
        body = self._slots[worker].body
        if body is not None:
            body.kill()

    async def _keep(self, slot: _Slot) -> None:
        """Restart one worker until the pool stops, its first load fails, or none can be loaded."""
        while not self._stopping.is_set():
            ended = await self._run_body(slot)
            reason = slot.kill_reason or ended
            was_ready = slot.facts is not None
            refusal = slot.refusal
            slot.body = slot.facts = None
            slot.exits += 1
            slot.failed_loads += not was_ready
            self._crash(slot)
            if was_ready:
                self._emit(WorkerLost(slot.index, reason))
            if not self._stopping.is_set():
                self._log_end(slot, refusal.message if refusal else reason, was_ready=was_ready)
            if not slot.first_ready.done():
                error = EngineError(
                    f"worker {slot.index} ended while it loaded its engine: {reason}"
                )
                if refusal:
                    error = EngineError(refusal.message, refusal.hint)
                slot.first_ready.set_exception(error)
                return
            if all(other.failed_loads >= MAX_FAILED_LOADS for other in self._slots):
                error = EngineError(
                    "no worker is left, and none could be loaded again in "
                    f"{MAX_FAILED_LOADS} tries; worker {slot.index}: "
                    f"{refusal.message if refusal else reason}",
                    (refusal.hint if refusal else "")
                    or "check that the device, its memory and the model's files are still there, "
                    "and start the server again",
                )
                self._emit(WorkersFailed(error))
                return
            if slot.exits > 1:  # wait before a restart, longer after each further end
                wait_s = min(BACKOFF_S * 2.0 ** (slot.exits - 2), MAX_BACKOFF_S)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), wait_s)

    def _log_end(self, slot: _Slot, why: str, *, was_ready: bool) -> None:
        """Log a lost worker, or one that could not be loaded again; the first load raises."""
        if was_ready:
            slot.lost_s = asyncio.get_running_loop().time()
            _logger.warning("worker %d is lost: %s; it is loaded again", slot.index, why)
        elif slot.lost_s is not None:
            _logger.warning("worker %d could not be loaded again: %s", slot.index, why)

    async def _run_body(self, slot: _Slot) -> str:
        """Run one body of a worker from its start to its end. Returns why it ended."""
        loop = asyncio.get_running_loop()
        slot.refusal = None
        slot.kill_reason = ""
        slot.load_began_s = loop.time()
        spawning = self.spawn(slot.index, lambda frame: self._receive(slot, frame))
        try:
            slot.body = await asyncio.wait_for(spawning, SPAWN_S)
        except TimeoutError:
            return f"exit code 1: no process could be started in {SPAWN_S:g} s"
        except OSError as error:
            return f"exit code 1: no process could be started: {error.strerror}"
        if self._stopping.is_set():
            slot.body.kill()
        if slot.facts is None:
            start_s = max(self.start_s, self._patience.waiting_s)
            self.supervisor.enter(slot.index, "starting", start_s, self._load_s(slot))
        try:
            return await slot.body.gone()
        finally:
            self.supervisor.enter(slot.index, "away")

    def _load_s(self, slot: _Slot) -> float:
        """Seconds that a load may take in all: the first may download the model, and a later one is
        like those before it.
        """
        if not slot.first_ready.done():
            return self._patience.load_s
        return LOAD_TIMES * self._longest_load_s + LOAD_GRACE_S

    def _kill_silent(self, worker: int, why: str) -> None:
        """Kill a worker that takes too long: nothing else shows that it hangs."""
        slot = self._slots[worker]
        if slot.body is not None:
            slot.kill_reason = why
            slot.body.kill()

    def _receive(self, slot: _Slot, frame: FromWorker) -> None:
        index = slot.index
        supervisor = self.supervisor
        waiting_s = self._patience.waiting_s
        state = supervisor.watched[index].state
        if isinstance(frame, Alive):
            if slot.facts is None:
                if state != "loading":
                    supervisor.enter(index, "loading", waiting_s, self._load_s(slot))
                supervisor.sign(index)
            elif state == "idle":  # from its first sign of life on, it must give more
                supervisor.enter(index, "idle", waiting_s)
        elif isinstance(frame, Ready):
            supervisor.enter(index, "idle")
            slot.facts = EngineFacts.model_validate_json(frame.facts)
            slot.failed_loads = 0
            load_s = asyncio.get_running_loop().time() - slot.load_began_s
            self._longest_load_s = max(self._longest_load_s, load_s)
            if not slot.first_ready.done():
                slot.first_ready.set_result(None)
            if slot.lost_s is not None:
                away_s = asyncio.get_running_loop().time() - slot.lost_s
                slot.lost_s = None
                _logger.info("worker %d is back: it was away for %.1f s", index, away_s)
            self._emit(WorkerReady(index, slot.facts))
        elif isinstance(frame, Refused):
            slot.refusal = frame
        else:
            self._receive_of_pass(slot, frame)

    def _receive_of_pass(self, slot: _Slot, frame: PassProgress | PassDone) -> None:
        self.supervisor.sign(slot.index)
        if frame.pass_id != slot.pass_id:
            return
        frame.worker = slot.index
        if isinstance(frame, PassProgress):
            self._emit(frame)
        else:
            slot.exits = 0
            self._end_pass(slot, frame)

    def _crash(self, slot: _Slot) -> None:
        """End the running pass, if there is one: its worker has gone."""
        if slot.pass_id is not None:
            self._end_pass(slot, PassDone(slot.index, slot.pass_id, None, "crashed"))

    def _end_pass(self, slot: _Slot, done: PassDone) -> None:
        slot.pass_id = None
        if slot.facts is not None:
            self.supervisor.enter(slot.index, "idle")
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
        return body.pid if isinstance(body, WorkerProcess) else None
