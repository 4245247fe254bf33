"""The interface between the scheduler's driver and the workers: calls that send slices and rounds,
and the events that report their results.
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
    """A worker has loaded its engine, at the start or after it was lost."""

    worker: int
    facts: EngineFacts


@dataclass(slots=True, frozen=True)
class WorkerLost:
    """A worker's process has ended, and a new one is being started. It follows the `BatchDone` or
    `RoundDone` of the batch that ran.
    """

    worker: int
    reason: str


@dataclass(slots=True, frozen=True)
class WorkersFailed:
    """The last event: no worker runs and none can be loaded again; `error` ends the server."""

    error: EngineError


class Times(msgspec.Struct, frozen=True):
    """Wall seconds of a batch on the worker's clock.

    Attributes:
        engine_s: inside the engine.
        reporting_s: the part of `engine_s` between steps, to send tokens and to read frames.
        gap_s: since the end of the worker's last batch; 0 for its first.
    """

    engine_s: float = 0.0
    reporting_s: float = 0.0
    gap_s: float = 0.0


@dataclass(slots=True, frozen=True)
class BatchProgress:
    """Tokens of one or more steps of a running batch; in a round, rows are numbers."""

    worker: int
    batch_id: int
    steps: tuple[StepOutput, ...]


@dataclass(slots=True, frozen=True)
class BatchDone:
    """A slice has ended. With a `failure`, `output` holds the tokens reported before it."""

    worker: int
    batch_id: int
    output: SliceOutput
    times: Times
    failure: Failure = ""

    @property
    def steps(self) -> int:
        """The largest number of tokens of a row."""
        return max(map(len, self.output.tokens), default=0)


@dataclass(slots=True, frozen=True)
class RoundDone:
    """A round has ended; `BatchProgress` has reported all its tokens.

    A round that "crashed" has no `output`, and its rows no caches. A round that ran out of memory
    ("oom") has lost the rows in `output.dropped`, if any.
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
    """N workers on one asyncio loop, each with one slice or round at a time. Events arrive through
    `on_event`.
    """

    size: int

    async def start(self, on_event: OnEvent) -> None:
        """Start all workers and return when each has reported `WorkerReady`. Raises `EngineError`
        if one cannot load its engine.
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

        A worker that is silent for much longer than `estimated_s` is killed and restarted.
        """
        ...

    def run_round(
        self, worker: int, batch_id: int, plan: Round, estimated_s: float = math.inf
    ) -> None:
        """Send a round, for engines that keep their rows. Exactly one `RoundDone` follows."""
        ...

    def interrupt(self, worker: int, batch_id: int) -> None:
        """Ask a running round to end at the next step where it may (`Round.stop_every`)."""
        ...

    def cancel(self, worker: int, batch_id: int, request_ids: Sequence[str]) -> None:
        """Cancel rows of a slice; it stops early when no row is wanted."""
        ...

    def kill(self, worker: int) -> None:
        """End a worker at once; `WorkerLost` follows, and it is restarted."""
        ...

    def silent(self) -> list[SilentWorkerError]:
        """The workers that take too long now; they are about to be killed."""
        ...

    async def stop(self) -> None:
        """End all workers."""
        ...
