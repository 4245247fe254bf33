"""The nouns that the scheduler, its policies and its two drivers speak in.

Times are seconds on the driver's clock; lengths are tokens. A policy sees these objects and changes
none of them: only the scheduler and its books write to a `Job` or a `Worker`. Nothing here knows
how long an output will be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from toolkit.sched.inbox import Inbox
from toolkit.sched.residents import ParkedCaches, Residents

if TYPE_CHECKING:
    from toolkit.sched.footprint import Footprint
    from toolkit.sched.protocols import LatencyLaw, MemoryLaw, SwapLaw

NO_LIMIT = 1 << 40
Until = Literal["any", "all"]
Failure = Literal["", "oom", "crashed"]
Joining = Literal[
    "embed", "shape"
]  # how newcomers join a padded batch, as in a recipe's engine.joining


@dataclass(slots=True, frozen=True)
class Request:
    """What a client asked for, as far as scheduling goes.

    `max_new_tokens` is the limit that the client set, not the length that the output will have. Of
    two requests the one with the smaller `priority` is the more urgent.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    max_new_tokens: int
    priority: int = 0


class Job:
    """A request on its way: what was generated so far, and how often it was tried.

    While a job is resident (`toolkit.sched.residents`), `length` and `generated` are those of the
    step when it joined.

    Attributes:
        request_id, prompt_tokens, max_new_tokens, priority: the request's.
        limit_tokens: tokens that it holds at its end if it generates all that it may.
        ticket: the order in which jobs entered the pool; a job that re-enters draws a new one.
        length: prompt + generated: the input of the next slice.
        strikes: batches of one job that failed.
        waiting_since_s: since when it has not run: submitted, back in the pool, paused, swapped
            out, evicted.
        home: the worker whose inbox holds it; -1: the pool.
        cancelled: its client does not want it any more.
        evictions: how often its cache was dropped to make room.
        reroutes: how often it left its worker after a slice, to be routed anew.
        joined: the worker's decode steps when it became resident.
        slot: its column in the residents' table.
        promoted_at: tokens that it had generated when a policy promoted it last; -1: never.
    """

    __slots__ = (
        "cancelled",
        "evictions",
        "generated",
        "home",
        "joined",
        "length",
        "limit_tokens",
        "max_new_tokens",
        "priority",
        "promoted_at",
        "prompt_tokens",
        "request",
        "request_id",
        "reroutes",
        "slices",
        "slot",
        "strikes",
        "ticket",
        "waiting_since_s",
    )

    def __init__(
        self,
        request: Request,
        ticket: int,
        length: int,
        generated: int = 0,
        waiting_since_s: float = 0.0,
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.prompt_tokens = prompt = request.prompt_tokens
        self.max_new_tokens = limit = request.max_new_tokens
        self.limit_tokens = prompt + limit
        self.priority = request.priority
        self.ticket = ticket
        self.length = length
        self.generated = generated
        self.slices = 0
        self.strikes = 0
        self.waiting_since_s = waiting_since_s
        self.home = -1
        self.cancelled = False
        self.evictions = 0
        self.reroutes = 0
        self.joined = 0
        self.slot = -1
        self.promoted_at = -1

    def __repr__(self) -> str:
        return f"Job({self.request!r}, ticket={self.ticket}, length={self.length}, generated={self.generated})"

    @property
    def remaining_limit(self) -> int:
        """Tokens that this job may still generate."""
        return self.max_new_tokens - self.generated


@dataclass(slots=True, frozen=True)
class Moves:
    """What a round does with caches that are neither prefilled nor dropped in it.

    Before its first step, in this order: `pause` and `swap_out` stop decoding; what is swapped out
    goes from the device to host memory, what is swapped in comes back and is paused there; `resume`
    go on decoding without a prefill. With `overlap` the transfers go on beside the round's compute:
    those who leave hold their tokens until it ends, those who come from its start, and none of them
    decodes in it. Without, the round waits for them first. Who is still being prefilled has no
    cache to keep, and is not moved.
    """

    pause: tuple[Job, ...] = ()
    resume: tuple[Job, ...] = ()
    swap_out: tuple[Job, ...] = ()
    swap_in: tuple[Job, ...] = ()
    promote: tuple[
        Job, ...
    ] = ()  # of those who enter or resume: to the first queue, see `Job.promoted_at`
    overlap: bool = False


@dataclass(slots=True, eq=False)
class Batch:
    """The one dial: these jobs, on this worker, for at most `steps` tokens each, until any or all
    of them finish.

    Sequence-level scheduling: steps = max_new_tokens, until all. Slice-level: steps = slice length,
    until all, cache dropped. Continuous: a round, until any, cache kept: `evict` and `release`
    leave first and lose their cache, `jobs` enter and are prefilled, and all who are resident then
    decode at most `steps` times, until one of them ends. A round that is interrupted stops at the
    first step where the worker's count of steps is a multiple of `stop_every`. With `chunk_tokens`,
    those who enter are prefilled in passes of at most so many tokens while anybody decodes, and a
    step follows each; what is not done when the round ends goes on in the next.
    """

    worker: int
    jobs: tuple[Job, ...]
    steps: int
    # L: the longest input in the batch, which is what the others are padded to; 0: none enters
    input_length: int
    estimated_s: float  # T_serve(N, L, S), SCLS Eq. 1-2
    until: Until = "all"
    keep_cache: bool = False
    batch_id: int = -1  # numbered by the scheduler
    started_s: float = -1.0
    evict: tuple[
        Job, ...
    ] = ()  # whose cache is dropped before the round: evicted or cancelled ones
    release: tuple[
        Job, ...
    ] = ()  # whose cache is dropped too: they have left, and were routed anew
    stop_every: int = 1
    interrupted: bool = False  # it was told to stop early
    moves: Moves | None = None  # of a policy that preempts
    chunk_tokens: int = 0  # 0: whole prefills before the first step
    refused: Job | None = None  # the policy's note: this one may not enter before the round ends

    @property
    def size(self) -> int:
        return len(self.jobs)


@dataclass(slots=True)
class BatchResult:
    """What a worker did with a batch: new tokens and whether it is done, per job in the batch's
    order.

    With a `failure`, `generated` still counts the tokens that reached the client before it.
    """

    batch_id: int
    worker: int
    generated: Sequence[int]
    finished: Sequence[bool]
    failure: Failure = ""


@dataclass(slots=True)
class RoundResult:
    """What a worker did with a round: all residents decoded `steps` times, and those who `ended`
    did so in the last.

    `joined` names those whose prefill ended in it, each with the round's steps until then, which it
    had no part in; None: everybody's did before the first step. Where prefill gives a token, they
    have it: a round in which one ends with it may have 0 steps. Who is not named is prefilled
    further in the next round.

    Those whose caches were `dropped`, the last admitted first, wait again: memory had no room for
    them, which is the failure "oom" and may be all of them, or nobody where a pass in parts
    sufficed; or an engine that also schedules (`toolkit.backends.vllm`) made room. Of a round that
    "crashed" no cache is left. Such an engine may also have `missed` residents in so many of the
    steps.
    """

    batch_id: int
    worker: int
    steps: int
    ended: tuple[str, ...] = ()
    joined: tuple[tuple[str, int], ...] | None = None
    failure: Failure = ""
    missed: tuple[tuple[str, int], ...] = ()
    dropped: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Worker:
    """One engine instance: its laws, what it runs, what waits for it. `load_s` is T_load(w) of SCLS
    Eq. 11.

    `row_limit` bounds the residents: by the engine's `slots`, and by less after a failure, so that
    a request that kills its worker ends up alone. Paused jobs are in `held`, swapped ones in
    `swapped`, whose tokens `host_tokens` bounds; 0: no host memory, nothing is swapped.
    """

    index: int
    latency: LatencyLaw
    memory: MemoryLaw
    alive: bool = True
    running: Batch | None = None
    queue: deque[Batch] = field(default_factory=deque)
    inbox: Inbox = field(default_factory=Inbox)  # jobs routed here and not batched yet
    load_s: float = 0.0
    assigned: int = 0  # batches it was given so far, the tie-break that keeps every worker fed
    oom_events: int = 0
    residents: Residents = field(default_factory=Residents)
    slots: int = NO_LIMIT  # the most residents that the engine can have
    # the longest prompt + output that its memory holds alone, in tokens; the scheduler's to say
    longest: int = NO_LIMIT
    stepped_s: float = 0.0  # when its last decode step ended, as far as it was reported
    swap: SwapLaw | None = None
    host_tokens: int = 0
    joining: Joining | None = None
    held: ParkedCaches = field(default_factory=ParkedCaches)
    swapped: ParkedCaches = field(default_factory=ParkedCaches)
    is_due: bool = False  # whether it is in `View.due`
    there: Footprint | None = None  # see `toolkit.sched.footprint.look`
    capacity_tokens: int = field(init=False)  # of KV cache, as the memory law has it
    emits: int = field(init=False)  # tokens that a prefill gives: 1 or 0
    row_limit: int = field(init=False)

    def __post_init__(self) -> None:
        self.row_limit = self.slots
        self.capacity_tokens = self.memory.usable_tokens
        self.emits = int(self.latency.prefill_emits_token)

    @property
    def padded(self) -> bool:
        """Whether its running batch is one slab: memory is rows x the longest."""
        return self.joining is not None

    def chunk_of(self, tokens: int) -> int:
        """`Batch.chunk_tokens` where a policy wants `tokens`: 0 where newcomers are shaped into the
        batch.
        """
        return 0 if self.joining == "shape" else tokens

    def holds(self, job: Job) -> bool:
        """Whether the job can run here to its end, whatever it generates: in a fleet it goes
        nowhere else.
        """
        return job.limit_tokens <= self.longest

    def is_like(self, other: Worker) -> bool:
        """Whether the two are of one kind: they take as long and hold as much."""
        return (
            self.latency == other.latency
            and self.memory == other.memory
            and self.swap == other.swap
            and (self.host_tokens, self.joining, self.slots)
            == (other.host_tokens, other.joining, other.slots)
        )

    def left_s(self, now_s: float) -> float:
        """Of `load_s`, without what its running batch has done by now."""
        running = self.running
        done_s = min(now_s - running.started_s, running.estimated_s) if running else 0.0
        return max(self.load_s - done_s, 0.0)

    @property
    def idle(self) -> bool:
        return self.alive and self.running is None and not self.queue


@dataclass(slots=True, frozen=True)
class Refusal:
    """A request that the scheduler gives up on, and why, in one line that may be shown to its
    client.
    """

    request_id: str
    reason: str
