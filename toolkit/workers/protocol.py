"""The seam between whoever schedules and the workers: send a slice or a round, hear what became of
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from toolkit.engines.protocol import Round, RoundOutput, Row, SliceOutput, StepOutput
from toolkit.errors import EngineError
from toolkit.files.profile import EngineFacts
from toolkit.sched.types import Failure
from toolkit.workers.supervisor import SilentWorkerError


@dataclass(slots=True, frozen=True)
class WorkerReady:
    """A worker has loaded its engine (again, after it was lost)."""

    worker: int
    facts: EngineFacts


@dataclass(slots=True, frozen=True)
class WorkerLost:
    """A worker's process is gone; a new one is being started. Comes after the `BatchDone` of what
    it ran.
    """

    worker: int
    reason: str


@dataclass(slots=True, frozen=True)
class WorkersFailed:
    """No worker runs, and none can be loaded again; what `error` says ends the server. Nothing
    follows.
    """

    error: EngineError


class Times(msgspec.Struct, frozen=True):
    """What a worker's clock says of a batch, in wall seconds."""

    engine_s: float = 0.0  # inside the engine
    reporting_s: float = 0.0  # of these: between two steps, where tokens go out and news come in
    gap_s: float = 0.0  # since the end of the worker's last batch; 0 for its first


@dataclass(slots=True, frozen=True)
class BatchProgress:
    """Tokens of a running batch, one or more steps at once; in a round, rows go by their numbers."""

    worker: int
    batch_id: int
    steps: tuple[StepOutput, ...]


@dataclass(slots=True, frozen=True)
class BatchDone:
    """A batch is over. With a `failure`, `output` holds what had been reported as progress."""

    worker: int
    batch_id: int
    output: SliceOutput
    times: Times
    failure: Failure = ""

    @property
    def steps(self) -> int:
        """Tokens of the row that got most."""
        return max(map(len, self.output.tokens), default=0)


@dataclass(slots=True, frozen=True)
class RoundDone:
    """A round is over; all its tokens came as progress. Of one that "crashed" there is no `output`,
    and no cache.

    One that ran out of memory ("oom") has lost the rows that `output` says were dropped, if any
    were.
    """

    worker: int
    batch_id: int
    output: RoundOutput | None
    times: Times
    failure: Failure = ""

    @property
    def steps(self) -> int:
        """Decode steps."""
        return self.output.steps if self.output else 0


WorkerEvent = WorkerReady | WorkerLost | WorkersFailed | BatchProgress | BatchDone | RoundDone
OnEvent = Callable[[WorkerEvent], None]


class Workers(Protocol):
    """N workers, one slice or round at a time each, on one asyncio loop; events arrive through
    `on_event`.
    """

    size: int

    async def start(self, on_event: OnEvent) -> None:
        """Start all workers and return when each has reported `WorkerReady`; `EngineError` if one
        cannot.
        """
        ...

    def run(
        self,
        worker: int,
        batch_id: int,
        rows: Sequence[Row],
        steps: int,
        estimated_s: float = math.inf,
    ) -> None:
        """Send a slice. Exactly one `BatchDone` follows, whatever happens to the process.

        A worker that is silent for much longer than `estimated_s` is killed, and started again.
        """
        ...

    def run_round(
        self, worker: int, batch_id: int, plan: Round, estimated_s: float = math.inf
    ) -> None:
        """The same of a round, for engines that re-batch: exactly one `RoundDone` follows."""
        ...

    def interrupt(self, worker: int, batch_id: int) -> None:
        """A running round should end at the next step where it may (`Round.stop_every`)."""
        ...

    def cancel(self, worker: int, batch_id: int, request_ids: Sequence[str]) -> None:
        """These rows of a slice are not wanted any more; it may stop early when none is."""
        ...

    def kill(self, worker: int) -> None:
        """End one at once; `WorkerLost` follows, and it is started again."""
        ...

    def silent(self) -> list[SilentWorkerError]:
        """The workers that take too long now, for what they do: they are about to be killed."""
        ...

    async def stop(self) -> None:
        """End all workers."""
        ...
