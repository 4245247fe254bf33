"""The data types of the scheduler: requests, jobs, batches, results and workers.

Times are seconds on the driver's clock; lengths are tokens. Policies read these objects and never
write to them: only the scheduler and its parts (`pool`, `queues`, `caches`) change a `Job` or a
`Worker`. No type here knows how long an output will be.

The types that a decision creates have constructors by hand: a generated one takes several times as
long where this module is compiled. Fields that a class gives a value are set by later events only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from mypy_extensions import mypyc_attr
from numpy.typing import NDArray

from toolkit.sched.caches import ParkedCaches, RunningJobs
from toolkit.sched.results import Failure as Failure
from toolkit.sched.results import PassResult as PassResult
from toolkit.sched.waiting import WaitingJobs

if TYPE_CHECKING:
    from toolkit.sched.protocols import MemoryLaw, SwapLaw

NO_LIMIT: Final = 1 << 40
# How newcomers join a padded batch: `engine.joining` of a recipe.
Joining = Literal["embed", "shape"]


@mypyc_attr(acyclic=True)
@dataclass(frozen=True)
class Request:
    """What a client asked for, as far as schedulers and routers are concerned.

    Attributes:
        max_new_tokens: the client's limit on output tokens, not the length that the output will
            have.
        priority: a request with a smaller one is more urgent.
        blocks: for a router, chain hashes of the prompt's full blocks: equal values stand for equal
            tokens in that block and in all before it.
        session: for a router, names the conversation; empty: there is none.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    max_new_tokens: int
    priority: int = 0
    blocks: tuple[int, ...] = ()
    session: str = ""


@mypyc_attr(acyclic=True)
class Job:
    """A request inside the scheduler: the tokens generated so far and the history of its attempts.

    While a job runs (`toolkit.sched.caches`), `length` and `generated` have
    their values of the step at which it joined, not the current ones.

    Attributes:
        request_id, arrival_s, prompt_tokens, max_new_tokens, priority: copied from the request.
        limit_tokens: prompt_tokens + max_new_tokens, the most tokens that the job can hold.
        number: what the driver calls it, as given to `Scheduler.submit`: a simulation counts its
            requests, and its workers look the job up by this; -1 elsewhere.
        ticket: position in the order in which jobs entered the pool; a job that re-enters gets a
            new ticket.
        length: prompt + generated tokens, which is the input of the next slice.
        failures: how often it failed as the only job of a batch, in all.
        failures_here: how many of these since it last generated a token.
        failed_at: tokens that it had generated at the last of them; -1 if there was none.
        waiting_since_s: when it last stopped running: submitted, returned to the pool, paused,
            swapped out or evicted.
        home: index of the worker where it waits; -1 while it is in the pool.
        cancelled: whether its client withdrew it.
        joined: the worker's count of decode steps when the job began to run.
        slot: its row in `RunningJobs.table` while it runs.
        promoted_at: tokens that it had generated when it was last promoted; -1: it never was.
    """

    __slots__ = (
        "arrival_s",
        "cancelled",
        "failed_at",
        "failures",
        "failures_here",
        "generated",
        "home",
        "joined",
        "length",
        "limit_tokens",
        "max_new_tokens",
        "number",
        "priority",
        "promoted_at",
        "prompt_tokens",
        "request_id",
        "slot",
        "ticket",
        "waiting_since_s",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        ticket: int,
        length: int,
        generated: int = 0,
        waiting_since_s: float = 0.0,
    ) -> None:
        prompt = request.prompt_tokens
        limit = request.max_new_tokens
        # What every slice and the end of a job need lies together, as in `Worker`: the jobs of a
        # long backlog come from memory each time.
        self.length = length
        self.number = -1
        self.generated = generated
        self.cancelled = False
        self.request_id = request.request_id
        self.ticket = ticket
        self.home = -1
        self.waiting_since_s = waiting_since_s
        self.limit_tokens = prompt + limit
        self.joined = 0
        self.arrival_s = request.arrival_s
        self.prompt_tokens = prompt
        self.max_new_tokens = limit
        self.failures = self.failures_here = 0
        self.failed_at = -1
        self.slot = -1
        self.promoted_at = -1
        self.priority = request.priority

    def __repr__(self) -> str:
        return (
            f"Job({self.request_id!r}, ticket={self.ticket}, length={self.length}, "
            f"generated={self.generated})"
        )


@mypyc_attr(acyclic=True)
@dataclass(frozen=True)
class Moves:
    """What a pass does with caches that it keeps without computing on them.

    The moves take effect before the first step, in this order: jobs in `pause` and `swap_out` stop
    decoding; caches in `swap_out` go from the device to host memory; caches in `swap_in` come back
    and are paused on the device; jobs in `resume` decode again without a prefill.

    With `overlap`, transfers run beside the pass's compute. A cache that leaves holds its device
    memory until the pass ends, a cache that comes back holds it from the pass's start, and
    neither job decodes in that pass. Without `overlap`, the pass waits for its transfers first. A
    job that is still being prefilled has no complete cache, so it is never moved.
    """

    pause: tuple[Job, ...] = ()
    resume: tuple[Job, ...] = ()
    swap_out: tuple[Job, ...] = ()
    swap_in: tuple[Job, ...] = ()
    # Entering or resuming jobs that go to the first queue, see `Job.promoted_at`.
    promote: tuple[Job, ...] = ()
    overlap: bool = False


@mypyc_attr(acyclic=True)
class Pass:
    """What a worker is told to do: compute these jobs, for at most `steps` decode steps.

    Jobs in `evict` and `release` leave first and lose their caches, and caches move. Then `jobs`
    enter and are prefilled, and all running jobs decode.

    With `keep_cache` (continuous batching) the pass ends after `steps` steps, or earlier when a job
    ends, and the caches stay for the next pass. Without, it is a slice of S = `steps` tokens (SCLS,
    Eq. 1-2: the token of a prefill counts): it ends when all jobs have ended or used it up, and
    all caches are dropped at its end. Sequence-level scheduling is one slice of max_new_tokens.

    A pass that keeps caches and is interrupted stops at the first step at which the worker's count
    of decode steps is a multiple of `stop_every`. With `chunk_tokens`, entering jobs are prefilled
    in chunks of at most this number of tokens while other rows decode, with one step after each. A
    prefill that has not ended with the pass continues in the next one.

    Attributes:
        input_length: L, the longest input of the jobs that enter, to which the others are padded; 0
            if none enters.
        estimated_s: T_serve(N, L, S) in seconds, SCLS Eq. 1-2.
        evict: evicted or cancelled jobs: their caches are dropped before the pass.
        release: jobs that left the worker and were routed again: their caches are dropped too.
        chunk_tokens: 0: whole prefills before the first step.
    """

    started_s: float = -1.0
    interrupted: bool = False

    def __init__(
        self,
        worker: int,
        jobs: tuple[Job, ...],
        steps: int,
        input_length: int,
        estimated_s: float = 0.0,
        keep_cache: bool = False,
        *,
        pass_id: int = -1,
        evict: tuple[Job, ...] = (),
        release: tuple[Job, ...] = (),
        stop_every: int = 1,
        moves: Moves | None = None,
        chunk_tokens: int = 0,
    ) -> None:
        self.worker = worker
        self.jobs = jobs
        self.steps = steps
        self.input_length = input_length
        self.estimated_s = estimated_s
        self.keep_cache = keep_cache
        self.pass_id = pass_id
        self.evict = evict
        self.release = release
        self.stop_every = stop_every
        self.moves = moves
        self.chunk_tokens = chunk_tokens


@mypyc_attr(allow_interpreted_subclasses=True)
class LatencyLaw:
    """How long a pass and its parts take, in seconds (SCLS paper, Eq. 1-4).

    N is the batch size and L the batch's padded input length in tokens. Laws are values: equal laws
    give equal answers, so a law may cache what it derives. It is a class, not a protocol: where
    this module is compiled, a pass asks it several times.

    Attributes:
        prefill_emits_token: whether prefill gives the first output token; if so, S - 1 steps follow
            (Eq. 1-2).
        padded: whether every row costs as much as the longest. If not, L is the rows' mean length.
        round_s: seconds of a pass besides prefills and steps: dispatch, result. 0: not measured.
    """

    prefill_emits_token: bool
    padded: bool
    round_s: float

    def prefill_s(self, batch_size: int, input_length: float) -> float:
        """Return T_prefill(N, L), Eq. 3, with the constant cost of a batch."""
        return self.pass_s(batch_size, 0.0, input_length)

    def pass_s(self, batch_size: int, start: float, end: float) -> float:
        """Return the seconds of a prefill pass over columns `start` to `end` of N rows.

        It is T(N, end) - T(N, start) + T(N, 0): the first pass has the fixed cost of a batch.
        """
        raise NotImplementedError

    def decode_s(self, batch_size: int, input_length: float, steps: int) -> float:
        """Return the sum of tau(L + i, N) over i = 1..steps: decode steps after L tokens, Eq. 2."""
        raise NotImplementedError

    def serve_table(self, max_batch_size: int, steps: int) -> NDArray[np.float64]:
        """Return T_serve of static batches as coefficients t [3, max_batch_size + 1] of 1, L and
        L^2: T_serve = t[0,N] + t[1,N] L + t[2,N] L^2.

        Column 0 is unused. Laws with a flat part have two rows more: T_serve is the larger of this
        and t[3,N] + t[4,N] L + t[2,N] L^2. A slice of S tokens takes S decode steps, or S - 1 if
        `prefill_emits_token`.
        """
        raise NotImplementedError

    def leave_s(self, length: float) -> float:
        """Return the seconds to remove a row of about `length` tokens from a batch; 0: none."""
        return 0.0

    def times(self, factor: float) -> LatencyLaw:
        """Return the law of an engine on which everything takes `factor` times as long."""
        raise NotImplementedError


class Worker:
    """One engine instance: its laws, what it runs and what waits for it.

    Args:
        index: its number, from 0.
        latency, memory: its laws.
        slots: the most running jobs that the engine supports.
        swap: the law of swaps to host memory; None: nothing is swapped.
        host_tokens: the most tokens of `swapped` jobs; 0 means no host memory.
        joining: how rows join a running batch that is one padded slab; None: memory is paged.

    Attributes:
        waiting: jobs routed here and not yet batched.
        queue: batches that wait here.
        batch: the pass that it runs; None: it is idle.
        running: the jobs that have caches and decode.
        load_s: T_load(w) of SCLS Eq. 11, in seconds.
        assigned: batches assigned so far: breaks ties so that every worker gets work.
        longest: prompt + output in tokens of the longest job that fits; set by the scheduler.
        stepped_s: when its last reported decode step ended.
        paused, swapped: jobs that are paused, and jobs with caches in host memory.
        is_due: whether it is in `View.due`.
        capacity_tokens: KV cache in tokens, from the memory law.
        emits: tokens that a prefill gives: 1 or 0.
        row_limit: the most running jobs: `slots`, and less after a failure, until a request that
            kills its worker runs alone.
    """

    def __init__(
        self,
        index: int,
        latency: LatencyLaw,
        memory: MemoryLaw,
        *,
        slots: int = NO_LIMIT,
        swap: SwapLaw | None = None,
        host_tokens: int = 0,
        joining: Joining | None = None,
    ) -> None:
        self.latency = latency
        self.memory = memory
        self.queue: deque[Pass] = deque()
        self.load_s = 0.0
        self.oom_events = 0
        self.swap = swap
        self.host_tokens = host_tokens
        self.joining = joining
        self.swapped = ParkedCaches()
        self.paused = ParkedCaches()
        # What every pass needs lies together: with hundreds of workers, a pass waits for memory.
        self.index = index
        self.alive = True
        self.is_due = False
        self.batch: Pass | None = None
        self.waiting = WaitingJobs()
        self.emits = int(latency.prefill_emits_token)
        self.running = RunningJobs(self.emits)
        self.assigned = 0
        self.stepped_s = 0.0
        self.slots = slots
        self.row_limit = slots
        self.capacity_tokens: int = memory.usable_tokens

    @property
    def padded(self) -> bool:
        """Whether its running batch is one slab, which takes rows x the longest row."""
        return self.joining is not None

    @property
    def has_jobs(self) -> bool:
        """Whether a job waits or has a cache here."""
        return bool(self.waiting.jobs or self.running.jobs or self.paused.jobs or self.swapped.jobs)

    def left_s(self, now_s: float) -> float:
        """Seconds of `load_s` that remain, without what the running batch has done by now."""
        batch = self.batch
        done_s = min(now_s - batch.started_s, batch.estimated_s) if batch else 0.0
        return max(self.load_s - done_s, 0.0)


@mypyc_attr(acyclic=True)
@dataclass(frozen=True)
class Refusal:
    """A request that the scheduler gives up on, with a reason in one line that clients may see."""

    request_id: str
    reason: str
