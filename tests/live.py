"""Real engines behind a driver, on threads of the test's process: passes of both kinds, killed
workers, short memory.
"""

import asyncio
import math
import threading
from collections.abc import Callable

import torch
from toy_server import HandWorkers

from toolkit.engines.protocol import EnginePass, StepOutput
from toolkit.engines.transformers_engine import TransformersEngine
from toolkit.sched.scheduler import Scheduler
from toolkit.workers.protocol import (
    Cancel,
    Interrupt,
    PassDone,
    PassProgress,
    WorkerLost,
)


class ThreadWorkers(HandWorkers):
    """Engines, each on a thread.

    `killed` ends a batch as a killed process would, and the worker comes back with a new engine.
    While `troubles` are left, an allocation of each second batch of several rows fails, the first
    of one, the second of another.
    """

    def __init__(
        self, make: Callable[[], TransformersEngine], size: int = 2, troubles: int = 0
    ) -> None:
        super().__init__(size)
        self.make = make
        self.engines = [make() for _ in range(size)]
        self.killed = [threading.Event() for _ in range(size)]
        self.stopping = [threading.Event() for _ in range(size)]
        self.scheduler: Scheduler | None = None
        self.tasks: set[asyncio.Task] = set()
        self.troubles = troubles
        self.ran_out = 0
        self.crowded = 0

    def run(self, worker: int, plan: EnginePass, estimated_s: float = math.inf) -> None:
        assert worker not in self.running, "one pass at a time"
        self.running[worker] = (plan.pass_id, list(plan.enter), plan.steps)
        self.plans[worker] = plan
        self.stopping[worker].clear()
        self.start_task(self.go(worker, plan.pass_id, plan))

    def tell(self, worker: int, change: Interrupt | Cancel) -> None:
        if isinstance(change, Cancel):
            super().tell(worker, change)
        elif worker in self.running and self.running[worker][0] == change.pass_id:
            self.stopping[worker].set()

    def start_task(self, work) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def go(self, worker: int, pass_id: int, plan: EnginePass) -> None:
        on_step = self.telling(worker, pass_id)
        rows = len(plan.enter)
        if plan.keep_cache:
            assert self.scheduler is not None
            kept = self.scheduler.workers[worker]
            rows = len(kept.running.jobs) + len(kept.paused.jobs)
        with Trouble(self, worker, rows):
            output = await asyncio.to_thread(self.engines[worker].run, plan, on_step)
        await asyncio.sleep(0)  # the last steps were told to the loop before this
        failure = self.after(worker) or ("oom" if output.is_short else "")
        self.on_event(PassDone(worker, pass_id, None if failure == "crashed" else output, failure))
        self.revive(worker, failure)

    def telling(self, worker: int, pass_id: int) -> Callable[[StepOutput], bool]:
        """What an engine calls between two steps."""
        loop = asyncio.get_running_loop()

        def tell(step: StepOutput) -> None:
            self.on_event(PassProgress(worker, pass_id, (step,)))

        def on_step(step: StepOutput) -> bool:
            loop.call_soon_threadsafe(tell, step)
            return not (self.killed[worker].is_set() or self.stopping[worker].is_set())

        return on_step

    def after(self, worker: int) -> str:
        del self.running[worker]
        return "crashed" if self.killed[worker].is_set() else ""

    def revive(self, worker: int, failure: str) -> None:
        if failure != "crashed":
            return
        self.engines[worker] = self.make()
        self.killed[worker].clear()
        self.on_event(WorkerLost(worker, "killed"))
        asyncio.get_running_loop().call_soon(self.recover, worker)


class Trouble:
    """Within it, an allocation of the worker's engine may fail. Only of a batch of several: alone,
    two are the end.
    """

    def __init__(self, workers: ThreadWorkers, worker: int, rows: int) -> None:
        self.workers = workers
        self.ledger = workers.engines[worker].ledger
        workers.crowded += rows > 1
        self.after = 1 + workers.crowded // 2 % 3
        self.armed = rows > 1 and workers.ran_out < workers.troubles and workers.crowded % 2 == 1

    def __enter__(self) -> None:
        if self.armed:
            take = self.ledger.take
            self.ledger.take = self.fail
            self.take = take

    def __exit__(self, *error: object) -> None:
        if self.armed:
            del self.ledger.take

    def fail(self, size_bytes: int) -> None:
        self.after -= size_bytes > 0
        if size_bytes > 0 and self.after == 0:
            self.workers.ran_out += 1
            raise torch.OutOfMemoryError("injected")
        self.take(size_bytes)
