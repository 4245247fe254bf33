"""The seams of the scheduler: what it needs of a policy, of a latency law and of a memory law."""

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

# Output lengths of the requests that ended last: what Past-Future takes the future from (its
# section 3.2).


class LengthHistory:
    """The last `window` lengths, in order of completion; and sorted, which costs nothing until it
    is asked for.

    Args:
        window: how many are remembered.
        start: lengths to begin with, until real ones push them out.
    """

    def __init__(self, window: int, start: Iterable[int] = ()) -> None:
        self.recent: deque[int] = deque(start, maxlen=window)
        self._sorted: NDArray[np.int64] | None = None
        self._count = 0  # how many are in _sorted
        self._sum = sum(self.recent)
        self._pending: list[
            tuple[int, int]
        ] = []  # (length that left or -1, length that came), not yet in _sorted

    def add(self, length: int) -> None:
        """A request ended after `length` tokens."""
        recent, pending = self.recent, self._pending
        if self._sorted is not None:
            pending.append((recent[0] if len(recent) == recent.maxlen else -1, length))
            if len(pending) == recent.maxlen:  # all that was sorted is gone
                self._sorted = None
                pending.clear()
        if len(recent) == recent.maxlen:
            self._sum -= recent[0]
        self._sum += length
        recent.append(length)

    def mean(self) -> int:
        """The mean length, rounded down; 1 where nothing is remembered."""
        return int(self._sum / len(self.recent)) if self.recent else 1

    def ascending(self) -> NDArray[np.int64]:
        """All remembered lengths, sorted: a view that is valid until the next `add`."""
        if self._sorted is None:
            self._sorted = np.zeros(self.recent.maxlen or 0, dtype=np.int64)
            self._count = len(self.recent)
            self._sorted[: self._count] = sorted(self.recent)
        elif self._pending:
            self._count = replace_sorted(self._sorted, self._count, np.array(self._pending))
            self._pending.clear()
        return self._sorted[: self._count]


# What passes between the scheduler and a policy: the policy looks at a `View` and answers with a
# `Decision`.


@dataclass(slots=True)
class View:
    """What a policy may look at. The lists are the scheduler's own, live: read them, never write.

    Workers that something happened to since the last plan are `due`: a round or batch ended, jobs
    were routed to an idle one, it came back. A policy that never leaves an idle worker with work
    looks at these alone, and costs nothing for workers that nothing happens to; one that lets work
    wait at an idle worker has to look at `free`.

    Where workers are `mixed`, of several kinds, each job of the pool fits a worker that is alive
    (`Worker.holds`), and may only be given to such a worker.
    """

    pool: Sequence[Job]  # waiting and not routed, oldest ticket first
    workers: Sequence[Worker]
    due_s: float  # when the policy asked to be woken; -inf before its first plan
    finished: LengthHistory  # output lengths of the last requests that ended
    rng: (
        np.random.Generator
    )  # the only randomness: a scheduler made with the same seed decides the same
    now_s: float = 0.0
    prioritised: bool = False  # some request had another priority than the default
    arrived: list[int] = field(
        default_factory=list
    )  # workers that jobs were routed to since the last plan
    due: list[Worker] = field(init=False)  # free, and something happened; by index
    idle: list[int] = field(init=False)  # the indices of `free`, ascending
    mixed: bool = field(init=False)
    kinds: list[list[Worker]] = field(
        init=False
    )  # of mixed workers those alive, by kind; the longest holder's last
    able: Numbers = field(init=False)  # the indices of those alive, ascending
    kind_of: Numbers = field(init=False)  # of mixed workers: by index, its place in `kinds`
    loads: Loads = field(init=False)
    _alive: list[Worker] = field(init=False)
    _able: dict[int, Numbers] = field(init=False)  # by how many of `kinds` are too small
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
        return self._alive

    @property
    def free(self) -> list[Worker]:
        """Alive and running nothing, by index: those that a plan can be for."""
        return [self.workers[index] for index in self.idle]

    def make_due(self, worker: Worker) -> None:
        """The scheduler says that something happened to a worker; of no account while it cannot
        run.
        """
        if not worker.is_due and worker.alive and worker.running is None:
            worker.is_due = True
            self.due.append(worker)

    def workers_changed(self) -> None:
        """The scheduler says that a worker was lost or came back."""
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
        """The indices of those alive that a job may go to, ascending."""
        if not self.mixed:
            return self.able
        small = sum([not kind[0].holds(job) for kind in self.kinds])  # the first ones: kinds ascend
        if small not in self._able:
            self._able[small] = self.able[self.kind_of[self.able] >= small]
        return self._able[small]

    def figure(self, key: Hashable, amount: Amount) -> WorkerFigure:
        """The numbers that `amount` says of workers; `key` stands for it. They are kept for the
        next asking.
        """
        if key not in self.figures:
            self.figures[key] = WorkerFigure(self.workers, amount)
        return self.figures[key]

    def changed(self, index: int) -> None:
        """The scheduler says that what waits or runs at a worker is not what it was."""
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


@dataclass(slots=True)  # not frozen: one is made per tick, and freezing triples its price
class Decision:
    """What a policy wants done: batches for workers' queues, in order, and when to ask it again at
    the latest.

    `interrupt` names workers whose running round should stop early, since the policy could act on
    what has come.
    """

    batches: Sequence[Batch] = ()
    wake_at_s: float | None = None  # None: leave `View.due_s` as it is
    interrupt: Sequence[int] = ()


NOTHING = Decision()  # to do: what most ticks come to


class LatencyLaw(Protocol):
    """How long a worker takes (SCLS paper, Eq. 1-4). N is the batch size, L the batch's padded
    input length.

    Laws are values: equal ones answer alike, and what was derived from one may be kept by it.
    """

    def __hash__(self) -> int: ...

    @property
    def prefill_emits_token(self) -> bool:
        """True: a slice of S tokens is a prefill and S - 1 decode iterations; False: and S of them
        (Eq. 1-2).
        """
        ...

    @property
    def padded(self) -> bool:
        """Whether rows of unequal length all cost what the longest does; else L below is their
        mean.
        """
        ...

    def prefill_s(self, batch_size: int, input_length: float) -> float:
        """T_prefill(N, L) in seconds, Eq. 3."""
        ...

    def pass_s(self, batch_size: int, start: float, end: float) -> float:
        """Seconds of a pass of prefill over the columns from `start` to `end` of N rows, the
        earlier ones being cached.

        T(N, end) - T(N, start) + T(N, 0), with what a batch costs on top of T counted in its first
        pass.
        """
        ...

    def decode_s(self, batch_size: int, input_length: float, steps: int) -> float:
        """Seconds of `steps` decode iterations after an input of L: sum over i = 1..steps of tau(L
        + i, N), Eq. 2.
        """
        ...

    @property
    def round_s(self) -> float:
        """Seconds of a round besides its prefills and steps: dispatch and result. 0 where rounds
        were not measured.
        """
        ...

    def leave_s(self, length: float) -> float:
        """Seconds until a row of about `length` tokens has left a running batch; 0 where rounds
        were not measured.
        """
        ...

    def serve_table(self, max_batch_size: int, steps: int) -> NDArray[np.float64]:
        """T_serve as coefficients t [3, max_batch_size + 1]: T_serve(N, L, S) = t[0,N] + t[1,N] L +
        t[2,N] L^2.

        Column 0 is unused. A slice of S tokens is S decode iterations, or S - 1 where
        `prefill_emits_token`.
        """
        ...


class MemoryLaw(Protocol):
    """How many rows fit (SCLS paper, Eq. 5-9 and Algorithm 2)."""

    def max_batch(
        self, input_lengths: NDArray[np.int64], steps: int, reserve: float
    ) -> NDArray[np.int64]:
        """N_max for batches padded to each of `input_lengths` and run for `steps`, with the share
        `reserve` kept free.

        0 where not even one row fits.
        """
        ...

    @property
    def usable_tokens(self) -> int:
        """Tokens of KV cache that rows may take together, padding counted where the engine pads:
        what continuous batching counts against.
        """
        ...


class SwapLaw(Protocol):
    """How long a cache takes between the device and host memory, each way, in seconds for so many
    tokens.
    """

    @property
    def overlaps(self) -> bool:
        """Whether transfers go on beside compute; where not, a round waits for them even if its
        `Moves` overlap.
        """
        ...

    def out_s(self, tokens: int) -> float:
        """Seconds from the device to host memory."""
        ...

    def in_s(self, tokens: int) -> float:
        """Seconds from host memory to the device."""
        ...


class Policy(Protocol):
    """A scheduling policy: a frozen object whose fields are its parameters.

    It keeps no state: all it may remember is in the `View`. So a decision is a function of what the
    scheduler saw, and a log of calls replays exactly.
    """

    name: ClassVar[str]
    continuous: ClassVar[bool]  # its batches are rounds: caches stay on the worker

    def route(self, view: View, now_s: float) -> Sequence[int] | None:
        """The worker of each pooled job, in the pool's order; None where jobs stay pooled until
        they are batched.
        """
        ...

    def plan(self, view: View, now_s: float) -> Decision:
        """What to run next. Called at every tick; an empty `Decision` means: nothing yet."""
        ...


@runtime_checkable
class BuiltIn(Protocol):
    """A policy that an engine has built in: a frozen object whose fields are its parameters, as
    flags of that engine.

    It is named, compared and tuned as ours are, and simulated by a model of that engine; our
    scheduler cannot run it.
    """

    name: ClassVar[str]
    continuous: ClassVar[bool]
    engine: ClassVar[str]  # the recipe's `engine.name` that it is built into


AnyPolicy: TypeAlias = Policy | BuiltIn


@runtime_checkable
class UsesHistory(Protocol):
    """A policy that says how many finished lengths it wants to see, and with which to begin."""

    def first_history(self) -> LengthHistory:
        """The history before the first request ends."""
        ...


@runtime_checkable
class Reschedules(Protocol):
    """A policy whose jobs may leave their worker before they have ended, and run on elsewhere."""

    def release(self, view: View, now_s: float) -> Sequence[Job]:
        """Residents of workers that run nothing who leave now: their caches are dropped, their
        tokens are kept.

        Asked at every tick before `route`, which gives each of them a worker, behind those who wait
        there.
        """
        ...


Standing = Callable[["Job", int], float]  # of a job that has generated so many tokens


@runtime_checkable
class Ranks(Protocol):
    """A policy whose jobs wait in the order of their standing: each worker gets a `RankedInbox` by
    it.
    """

    def standings(self, law: LatencyLaw) -> Standing:
        """How jobs stand under a worker's law; less is served first. It must not change while a job
        waits.
        """
        ...


@runtime_checkable
class Reorders(Protocol):
    """A policy whose jobs do not always wait in the order in which they came."""

    def reorder(self, view: View, now_s: float) -> tuple[Sequence[Job], Sequence[Job]]:
        """Who goes behind all others at his worker, and who of those behind comes before all
        others.

        Asked at every tick before `plan`.
        """
        ...


@runtime_checkable
class Oracle(Protocol):
    """A policy that needs the future, which only a simulation can tell it."""

    def told(self, output_tokens: Mapping[str, int]) -> Policy:
        """The same policy, with the true output length of each request id."""
        ...
