"""The interface between the scheduler's driver and the workers: calls that send passes,
and the events that report their results. Below it are the frames that carry both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from toolkit.engines.protocol import EnginePass, PassOutput, StepOutput
from toolkit.errors import EngineError
from toolkit.files.profile import EngineFacts
from toolkit.processes.channel import Alive
from toolkit.sched.types import Failure


@dataclass(slots=True, frozen=True)
class WorkerReady:
    """A worker has loaded its engine, at the start or after it was lost."""

    worker: int
    facts: EngineFacts


@dataclass(slots=True, frozen=True)
class WorkerLost:
    """A worker's process has ended, and a new one is being started. It follows the `PassDone`
    of the pass that ran.
    """

    worker: int
    reason: str


@dataclass(slots=True, frozen=True)
class WorkersFailed:
    """The last event: no worker runs and none can be loaded again; `error` ends the server."""

    error: EngineError


class PassProgress(msgspec.Struct, tag="progress"):
    """Tokens of the running pass: its steps since the last report. It is also a frame of the
    worker, which leaves its number to the front.
    """

    worker: int
    pass_id: int
    steps: tuple[StepOutput, ...]


class PassDone(msgspec.Struct, tag="done"):
    """A pass has ended; `PassProgress` has reported its tokens. It is also a frame of the worker,
    which leaves its number to the front.

    A pass that "crashed" has no `output`, and its worker's rows no caches. One that ran out of
    memory ("oom") has lost the rows in `output.dropped`, if any.
    """

    worker: int
    pass_id: int
    output: PassOutput | None
    failure: Failure = ""


WorkerEvent = WorkerReady | WorkerLost | WorkersFailed | PassProgress | PassDone
OnEvent = Callable[[WorkerEvent], None]


class Workers(Protocol):
    """N workers on one loop; each runs one pass at a time, and events report it."""

    size: int

    async def start(self, on_event: OnEvent) -> None:
        """Start all workers and return when each has reported `WorkerReady`. Raises `EngineError`
        if one cannot load its engine.
        """
        ...

    def run(self, worker: int, plan: EnginePass, estimated_s: float = math.inf) -> None:
        """Send a pass. Exactly one `PassDone` follows, whatever happens to the process.

        A worker that is silent for much longer than `estimated_s` is killed and restarted.
        """
        ...

    def tell(self, worker: int, change: Interrupt | Cancel) -> None:
        """Change a running pass; nothing happens if it has ended."""
        ...

    def kill(self, worker: int) -> None:
        """End a worker at once; `WorkerLost` follows, and it is restarted."""
        ...

    async def stop(self) -> None:
        """End all workers."""
        ...


# The frames between the front and a worker.


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first frame to a worker: what to load, as JSON of a `Recipe`."""

    recipe: str


class Interrupt(msgspec.Struct, frozen=True, tag="interrupt"):
    """End the running pass at the next step where it may end (`EnginePass.stop_every`)."""

    pass_id: int


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Cancel these rows of a pass that keeps no caches, which ends when no row is wanted."""

    pass_id: int
    numbers: tuple[int, ...]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the process at the next step boundary."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is loaded and warm. `facts` is JSON of `EngineFacts`."""

    facts: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The engine cannot be loaded, for a reason that the user can correct."""

    message: str
    hint: str


ToWorker = Start | EnginePass | Interrupt | Cancel | Stop
FromWorker = Alive | Ready | Refused | PassProgress | PassDone
TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
