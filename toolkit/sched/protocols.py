"""The interfaces of the scheduler: policies, latency laws, memory laws and swap laws.

In order: the history of output lengths, `View` and `Decision` (what passes between the scheduler
and a policy), the laws, and the policy with its optional capabilities (`UsesHistory`,
`Reschedules`, `Ranks`, `Reorders`, `Oracle`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from toolkit.sched.figures import Amount, Loads, Numbers, WorkerFigure
from toolkit.sched.kernels import replace_sorted
from toolkit.sched.types import Batch, Job, Worker

# The history of output lengths, from which Past-Future predicts (its section 3.2).


class LengthHistory:
    """The output lengths of the last `window` finished requests.

    It keeps them in order of completion, and sorted once `ascending` was called.

    Args:
        window: how many lengths are kept.
        start: initial lengths, which real ones replace.
    """

    def __init__(self, window: int, start: Iterable[int] = ()) -> None:
        self.recent: deque[int] = deque(start, maxlen=window)
        self._sorted: NDArray[np.int64] | None = None
        self._count = 0  # how many lengths `_sorted` holds
        self._sum = sum(self.recent)
        # (removed length or -1, added length) pairs that `_sorted` does not have yet.
        self._pending: list[tuple[int, int]] = []

    def add(self, length: int) -> None:
        """Record the output length of a request that ended."""
        recent, pending = self.recent, self._pending
        if self._sorted is not None:
            pending.append((recent[0] if len(recent) == recent.maxlen else -1, length))
            if len(pending) == recent.maxlen:  # every sorted length was replaced
                self._sorted = None
                pending.clear()
        if len(recent) == recent.maxlen:
            self._sum -= recent[0]
        self._sum += length
        recent.append(length)

    def mean(self) -> int:
        """The mean length, rounded down; 1 if the history is empty."""
        return int(self._sum / len(self.recent)) if self.recent else 1

    def ascending(self) -> NDArray[np.int64]:
        """All lengths, sorted: a view that is valid until the next `add`."""
        if self._sorted is None:
            self._sorted = np.zeros(self.recent.maxlen or 0, dtype=np.int64)
            self._count = len(self.recent)
            self._sorted[: self._count] = sorted(self.recent)
        elif self._pending:
            self._count = replace_sorted(self._sorted, self._count, np.array(self._pending))
            self._pending.clear()
        return self._sorted[: self._count]


# The exchange between the scheduler and a policy: the policy reads a `View` and returns a
# `Decision`.


@dataclass(slots=True)
class View:
    """What a policy may read. The lists are the scheduler's own and change with it: never write to
    them.

    A worker is `due` if it is free and something happened to it since the last plan: a round or
    batch ended, jobs were routed to it while it was idle, or it came back. A policy that never
    leaves an idle worker with work needs only these, so workers without events cost nothing. A
    policy that may let work wait at an idle worker has to look at `free`.

    If workers are `mixed` (of several kinds), every pooled job fits some worker that is alive
    (`Worker.holds`), and the policy may only give it to such a worker.
    """

    pool: Sequence[Job]  # waiting jobs that are not routed, oldest ticket first
    workers: Sequence[Worker]
    due_s: float  # when the policy asked to be called again; -inf before its first plan
    finished: LengthHistory  # output lengths of the last requests that ended
    # The only source of randomness: a scheduler with the same seed makes the same decisions.
    rng: np.random.Generator
    now_s: float = 0.0
    prioritised: bool = False  # whether any request had a priority other than the default
    # Indices of workers that jobs were routed to since the last plan, one entry per job.
    arrived: list[int] = field(default_factory=list)
    due: list[Worker] = field(init=False)  # free workers with an event, by index
    idle: list[int] = field(init=False)  # the indices of `free`, ascending
    mixed: bool = field(init=False)
    # Of mixed workers, those alive grouped by kind, in ascending order of `Worker.longest`.
    kinds: list[list[Worker]] = field(init=False)
    able: Numbers = field(init=False)  # the indices of workers alive, ascending
    kind_of: Numbers = field(init=False)  # of mixed workers: worker index -> index in `kinds`
    loads: Loads = field(init=False)
    _alive: list[Worker] = field(init=False)
    # Indices of able workers, by the number of leading `kinds` that are too small for a job.
    _able: dict[int, Numbers] = field(init=False)
    figures: dict[Hashable, WorkerFigure] = field(init=False)

    def __post_init__(self) -> None:
        self.mixed = not all(worker.is_like(self.workers[0]) for worker in self.workers)
        self.due = []
        self.figures = {}
        self.loads = Loads(self.workers)
        self.workers_changed()
        for worker in self.free:
            self.make_due(worker)

    def alive(self) -> Sequence[Worker]:
        """The workers that are alive, by index."""
        return self._alive

    @property
    def free(self) -> list[Worker]:
        """Workers that are alive and run nothing, by index: a plan may start batches on these."""
        return [self.workers[index] for index in self.idle]

    def make_due(self, worker: Worker) -> None:
        """For the scheduler: something happened to `worker`. Has no effect while it cannot run."""
        if not worker.is_due and worker.alive and worker.running is None:
            worker.is_due = True
            self.due.append(worker)

    def workers_changed(self) -> None:
        """For the scheduler: a worker was lost or came back."""
        self._alive = [worker for worker in self.workers if worker.alive]
        self.idle = [worker.index for worker in self._alive if worker.running is None]
        for worker in self.due:
            worker.is_due = worker.alive
        self.due = [worker for worker in self.due if worker.alive]
        self.kinds = _by_kind(self._alive) if self.mixed else []
        self.able = np.array([worker.index for worker in self._alive], dtype=np.int64)
        self.kind_of = np.zeros(len(self.workers), dtype=np.int64)
        for k, kind in enumerate(self.kinds):
            self.kind_of[[worker.index for worker in kind]] = k
        self._able = {}
        self.loads.forget()

    def holders(self, job: Job) -> Numbers:
        """The indices of the alive workers that hold the job (`Worker.holds`), ascending."""
        if not self.mixed:
            return self.able
        # kinds ascend by what they hold
        small = sum([not kind[0].holds(job) for kind in self.kinds])
        if small not in self._able:
            self._able[small] = self.able[self.kind_of[self.able] >= small]
        return self._able[small]

    def figure(self, key: Hashable, amount: Amount) -> WorkerFigure:
        """The numbers that `amount` computes per worker, cached under `key` for the next call."""
        if key not in self.figures:
            self.figures[key] = WorkerFigure(self.workers, amount)
        return self.figures[key]

    def changed(self, index: int) -> None:
        """For the scheduler: the jobs that wait or run at a worker changed, so its figures are
        stale.
        """
        for figure in self.figures.values():
            figure.forget(index)


def _by_kind(workers: Sequence[Worker]) -> list[list[Worker]]:
    kinds: list[list[Worker]] = []
    for worker in workers:
        kind = next((kind for kind in kinds if kind[0].is_like(worker)), None)
        if kind is None:
            kinds.append([worker])
        else:
            kind.append(worker)
    return sorted(kinds, key=lambda kind: kind[0].longest)


@dataclass(slots=True)  # not frozen: one is made per tick, and freezing triples its cost
class Decision:
    """What a policy wants done: batches for workers' queues, in order, and the latest time to ask
    again.

    `interrupt` names workers that should stop their round early, so that the policy can act on what
    arrived.
    """

    batches: Sequence[Batch] = ()
    wake_at_s: float | None = None  # None: `View.due_s` stays as it is
    interrupt: Sequence[int] = ()


NOTHING = Decision()  # the decision of most ticks


class LatencyLaw(Protocol):
    """How long a worker takes (SCLS paper, Eq. 1-4), in seconds.

    N is the batch size and L the batch's padded input length in tokens. Laws are values: equal laws
    give equal answers, so a law may cache what it derives.
    """

    def __hash__(self) -> int: ...

    @property
    def prefill_emits_token(self) -> bool:
        """Whether prefill gives the first output token.

        If so, a slice of S tokens is a prefill and S - 1 decode steps, otherwise a prefill and S
        decode steps (Eq. 1-2).
        """
        ...

    @property
    def padded(self) -> bool:
        """Whether every row costs as much as the longest. If not, L below is the mean length of the
        rows.
        """
        ...

    def prefill_s(self, batch_size: int, input_length: float) -> float:
        """T_prefill(N, L) in seconds, Eq. 3."""
        ...

    def pass_s(self, batch_size: int, start: float, end: float) -> float:
        """Seconds of a prefill pass over columns `start` to `end` of N rows after cached columns.

        It is T(N, end) - T(N, start) + T(N, 0). The fixed cost of a batch is counted in its first
        pass.
        """
        ...

    def decode_s(self, batch_size: int, input_length: float, steps: int) -> float:
        """Seconds of `steps` decode steps after an input of L: sum over i = 1..steps of tau(L + i,
        N), Eq. 2.
        """
        ...

    @property
    def round_s(self) -> float:
        """Seconds of a round besides its prefills and steps: dispatch and result. 0 if not
        measured.
        """
        ...

    def leave_s(self, length: float) -> float:
        """Seconds to remove a row of about `length` tokens from a running batch; 0 if not
        measured.
        """
        ...

    def serve_table(self, max_batch_size: int, steps: int) -> NDArray[np.float64]:
        """Coefficients t [3, max_batch_size + 1] of T_serve(N, L, S) = t[0,N] + t[1,N] L + t[2,N]
        L^2.

        Column 0 is unused. A slice of S tokens takes S decode steps, or S - 1 if
        `prefill_emits_token`.
        """
        ...


class MemoryLaw(Protocol):
    """How many rows fit a worker's memory (SCLS paper, Eq. 5-9 and Algorithm 2)."""

    def max_batch(
        self, input_lengths: NDArray[np.int64], steps: int, reserve: float
    ) -> NDArray[np.int64]:
        """N_max for batches padded to each of `input_lengths` [n] tokens that run for `steps`
        steps.

        The share `reserve` of the memory is kept free. 0 if not even one row fits.
        """
        ...

    @property
    def usable_tokens(self) -> int:
        """The KV cache in tokens that all rows may take together, which continuous batching counts
        against.

        If the engine pads, padding counts too.
        """
        ...


class SwapLaw(Protocol):
    """How long the cache of so many tokens takes between device and host memory, in seconds each
    way.
    """

    @property
    def overlaps(self) -> bool:
        """Whether transfers can run beside compute. If not, rounds wait for them even if
        `Moves.overlap`.
        """
        ...

    def out_s(self, tokens: int) -> float:
        """Seconds from the device to host memory."""
        ...

    def in_s(self, tokens: int) -> float:
        """Seconds from host memory to the device."""
        ...


class Policy(Protocol):
    """A scheduling policy: a frozen object with its parameters as fields.

    It keeps no state: everything that it may remember is in the `View`. So a decision depends only
    on what the scheduler saw, and a log of the calls replays exactly.
    """

    name: ClassVar[str]
    continuous: ClassVar[bool]  # whether its batches are rounds, which keep caches on the worker

    def route(self, view: View, now_s: float) -> Sequence[int] | None:
        """The index of the worker for each pooled job, in the pool's order.

        None if jobs stay in the pool until they are batched.
        """
        ...

    def plan(self, view: View, now_s: float) -> Decision:
        """What to run next. Called at every tick; an empty `Decision` starts nothing."""
        ...


@runtime_checkable
class BuiltIn(Protocol):
    """A scheduling policy of an engine: a frozen object with flags of that engine as fields.

    It is named, compared and tuned like the toolkit's policies, and simulated by a model of the
    engine. The toolkit's scheduler cannot run it.
    """

    name: ClassVar[str]
    continuous: ClassVar[bool]
    engine: ClassVar[str]  # `engine.name` of the recipes that have it


AnyPolicy: TypeAlias = Policy | BuiltIn


@runtime_checkable
class UsesHistory(Protocol):
    """A policy that sets the size and the start of the history of output lengths."""

    def first_history(self) -> LengthHistory:
        """The history before the first request ends."""
        ...


@runtime_checkable
class Reschedules(Protocol):
    """A policy that lets jobs leave their worker before they end and continue on another."""

    def release(self, view: View, now_s: float) -> Sequence[Job]:
        """Residents of idle workers that leave now: their caches are dropped, their tokens are
        kept.

        Called at every tick before `route`, which gives each of them a worker. There they wait
        behind the jobs that are already waiting.
        """
        ...


# Maps a job and its generated tokens to its standing; less is served first.
Standing = Callable[["Job", int], float]


@runtime_checkable
class Ranks(Protocol):
    """A policy that serves jobs in order of their standing: each worker gets a `RankedInbox`."""

    def standings(self, law: LatencyLaw) -> Standing:
        """The standing of jobs under a worker's law. It must not change while a job waits."""
        ...


@runtime_checkable
class Reorders(Protocol):
    """A policy that changes the order in which jobs wait."""

    def reorder(self, view: View, now_s: float) -> tuple[Sequence[Job], Sequence[Job]]:
        """The jobs to move behind all others at their worker, and the deferred jobs to move to the
        front.

        Called at every tick before `plan`.
        """
        ...


@runtime_checkable
class Oracle(Protocol):
    """A policy that needs the true output lengths, which only a simulation knows."""

    def with_lengths(self, output_tokens: Mapping[str, int]) -> Policy:
        """The same policy, with the true output length of each request id."""
        ...
