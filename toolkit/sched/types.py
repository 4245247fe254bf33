"""The nouns that the scheduler, its policies and its two drivers speak in.

Times are seconds on the driver's clock; lengths are tokens. A policy sees these objects and changes none of them: only
`toolkit.sched.scheduler.Scheduler` writes to a `Job` or a `Worker`. Nothing here knows how long an output will be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from toolkit.sched.protocols import LatencyLaw, MemoryLaw

Until = Literal["any", "all"]
Failure = Literal["", "oom", "crashed"]


@dataclass(slots=True, frozen=True)
class Request:
    """What a client asked for, as far as scheduling goes.

    `max_new_tokens` is the limit that the client set, not the length that the output will have.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    max_new_tokens: int
    priority: int = 0


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way: what was generated so far, and how often it was tried."""

    request: Request
    ticket: int  # the order in which jobs entered the pool; a job that re-enters draws a new one
    length: int  # prompt + generated: the input of the next slice
    generated: int = 0
    slices: int = 0
    strikes: int = 0  # batches of one job that failed
    pooled_s: float = 0.0  # when it entered the pool last
    home: int = -1  # the worker whose inbox holds it; -1: the pool
    cancelled: bool = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def remaining_limit(self) -> int:
        """Tokens that this job may still generate."""
        return self.request.max_new_tokens - self.generated


@dataclass(slots=True, eq=False)
class Batch:
    """The one dial: these jobs, on this worker, for at most `steps` tokens each, until any or all of them finish.

    Sequence-level scheduling: steps = max_new_tokens, until all. Slice-level: steps = slice length, until all, cache
    dropped. Continuous: steps = the scheduling interval, until any, cache kept.
    """

    worker: int
    jobs: tuple[Job, ...]
    steps: int
    input_length: int  # L: the longest input in the batch, which is what the others are padded to
    estimated_s: float  # T_serve(N, L, S), SCLS Eq. 1-2
    until: Until = "all"
    keep_cache: bool = False
    batch_id: int = -1  # numbered by the scheduler
    started_s: float = -1.0

    @property
    def size(self) -> int:
        return len(self.jobs)


@dataclass(slots=True)
class BatchResult:
    """What a worker did with a batch: new tokens and whether it is done, per job in the batch's order.

    With a `failure`, `generated` still counts the tokens that reached the client before it.
    """

    batch_id: int
    worker: int
    generated: Sequence[int]
    finished: Sequence[bool]
    failure: Failure = ""


@dataclass(slots=True, eq=False)
class Worker:
    """One engine instance: its laws, what it runs, what waits for it. `load_s` is T_load(w) of SCLS Eq. 11."""

    index: int
    latency: LatencyLaw
    memory: MemoryLaw
    alive: bool = True
    running: Batch | None = None
    queue: deque[Batch] = field(default_factory=deque)
    inbox: deque[Job] = field(default_factory=deque)  # jobs routed here and not batched yet
    load_s: float = 0.0
    assigned: int = 0  # batches it was given so far, the tie-break that keeps every worker fed
    oom_events: int = 0

    @property
    def idle(self) -> bool:
        return self.alive and self.running is None and not self.queue


@dataclass(slots=True)
class View:
    """What a policy may look at. The lists are the scheduler's own, live: read them, never write."""

    pool: Sequence[Job]  # waiting and not routed, oldest ticket first
    workers: Sequence[Worker]
    due_s: float  # when the policy asked to be woken; -inf before its first plan
    finished_lengths: Sequence[int]  # of the last finished requests, oldest first

    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.alive]


@dataclass(slots=True, frozen=True)
class Decision:
    """What a policy wants done: batches for workers' queues, in order, and when to ask it again at the latest."""

    batches: Sequence[Batch] = ()
    wake_at_s: float | None = None  # None: leave `View.due_s` as it is


@dataclass(slots=True, frozen=True)
class Refusal:
    """A request that the scheduler gives up on, and why, in one line that may be shown to its client."""

    request_id: str
    reason: str
