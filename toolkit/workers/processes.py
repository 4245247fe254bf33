"""Workers in processes of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec, Recipe
from toolkit.workers.frames import Start
from toolkit.workers.gpus import share_gpus, visible_gpus
from toolkit.workers.pool import PATIENCE, Body, OnFrame, Pool
from toolkit.workers.process import WorkerProcess
from toolkit.workers.supervisor import Patience


@dataclass(frozen=True, slots=True)
class Outfit:
    """What one worker loads, and how often it reports; `flush_s` as `ProcessWorkers` has it."""

    model: ModelSpec
    engine: EngineSpec
    hardware: HardwareSpec
    flush_s: float = 0.05

    @classmethod
    def of(cls, recipe: Recipe) -> Outfit:
        """Of a worker of this recipe."""
        return cls(recipe.model, recipe.engine, recipe.hardware, recipe.engine.flush_s)

    @property
    def gpus(self) -> int:
        """How many it takes."""
        return self.engine.tensor_parallel_size if self.hardware.device == "cuda" else 0


class ProcessWorkers(Pool):
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
        others: Sequence[Outfit] = (),
        backoff_s: float = 0.5,
        stop_timeout_s: float = 10.0,
        patience: Patience = PATIENCE,
    ) -> None:
        outfits = [Outfit(model, engine, hardware, flush_s)] * size + list(others)
        visible = visible_gpus() if any(outfit.gpus for outfit in outfits) else []
        gpus = share_gpus([outfit.gpus for outfit in outfits], visible)

        async def spawn(worker: int, on_frame: OnFrame) -> Body:
            outfit = outfits[worker]
            start = Start.of(outfit.model, outfit.engine, outfit.hardware, outfit.flush_s)
            return await WorkerProcess.spawn(start, outfit.engine.threads, on_frame, gpus[worker])

        super().__init__(len(outfits), spawn, backoff_s=backoff_s, stop_timeout_s=stop_timeout_s, patience=patience)

    def pid(self, worker: int) -> int | None:
        """The process of a worker; None between two."""
        body = self._slots[worker].body
        return body.pid if isinstance(body, WorkerProcess) else None
