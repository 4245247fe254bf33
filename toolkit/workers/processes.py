"""Workers in processes of this machine."""

from __future__ import annotations

from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec
from toolkit.workers.frames import Start
from toolkit.workers.gpus import gpus_of, visible_gpus
from toolkit.workers.pool import Body, OnFrame, Pool
from toolkit.workers.process import WorkerProcess


class ProcessWorkers(Pool):
    """The pool whose bodies are processes.

    Args:
        model, engine, hardware: what each loads.
        size: how many.
        flush_s: progress of a batch is reported at most this often, but for first tokens.
        backoff_s, stop_timeout_s: as the pool's.
    """

    def __init__(
        self,
        model: ModelSpec,
        engine: EngineSpec,
        hardware: HardwareSpec,
        size: int,
        *,
        flush_s: float = 0.05,
        backoff_s: float = 0.5,
        stop_timeout_s: float = 10.0,
    ) -> None:
        start = Start.of(model, engine, hardware, flush_s)

        visible = visible_gpus() if hardware.device == "cuda" else []

        async def spawn(worker: int, on_frame: OnFrame) -> Body:
            gpus = gpus_of(worker, engine.tensor_parallel_size, visible)
            return await WorkerProcess.spawn(start, engine.threads, on_frame, gpus)

        super().__init__(size, spawn, backoff_s=backoff_s, stop_timeout_s=stop_timeout_s)

    def pid(self, worker: int) -> int | None:
        """The process of a worker; None between two."""
        body = self._slots[worker].body
        return body.pid if isinstance(body, WorkerProcess) else None
