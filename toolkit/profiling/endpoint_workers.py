"""A server as a pool of one worker, for whole slices: N requests sent together, until the last has ended."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence

from toolkit.engines.protocol import FinishReason, Round, Row, SliceOutput
from toolkit.files.profile import EngineFacts
from toolkit.profiling.bench import Unmeasurable
from toolkit.profiling.endpoint import Endpoint
from toolkit.workers.protocol import BatchDone, OnEvent, Times, WorkerReady
from toolkit.workers.supervisor import Silent


class EndpointWorkers:
    """`toolkit.workers.protocol.Workers`: slices only. What the tokens were, nobody asks; they are counted."""

    size = 1

    def __init__(self, endpoint: Endpoint, facts: EngineFacts) -> None:
        self._endpoint = endpoint
        self._facts = facts
        self._on_event: OnEvent | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, on_event: OnEvent) -> None:
        """It runs already."""
        self._on_event = on_event
        on_event(WorkerReady(0, self._facts))

    def run(self, worker: int, batch_id: int, rows: Sequence[Row], steps: int, estimated_s: float = math.inf) -> None:
        """Send the rows as requests, each with a prompt of its own."""
        self._task = asyncio.create_task(self._run(batch_id, [len(row.tokens) for row in rows], steps))

    def run_round(self, worker: int, batch_id: int, plan: Round, estimated_s: float = math.inf) -> None:
        """Rounds are the server's own affair."""
        raise ValueError("a server runs no rounds for others")

    def kill(self, worker: int) -> None:
        """A server is not ours to kill."""

    def silent(self) -> list[Silent]:
        """A server's silence is its own."""
        return []

    def interrupt(self, worker: int, batch_id: int) -> None:
        """Nothing can be interrupted."""

    def cancel(self, worker: int, batch_id: int, request_ids: Sequence[str]) -> None:
        """Nothing is cancelled."""

    async def stop(self) -> None:
        """End what is under way; the server goes on."""
        self._on_event = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, batch_id: int, prompts: Sequence[int], steps: int) -> None:
        start_s = time.perf_counter()
        counts = [0] * len(prompts)
        with contextlib.suppress(Unmeasurable):  # whose tokens did not all come, counts as none: the slice has failed
            counts = [sample.output_tokens for sample in await self._endpoint.together(prompts, [steps] * len(prompts))]
        finish: FinishReason = "length"
        output = SliceOutput(tuple((0,) * count for count in counts), (finish,) * len(counts))
        if self._on_event is not None:
            self._on_event(BatchDone(0, batch_id, output, Times(engine_s=time.perf_counter() - start_s)))
