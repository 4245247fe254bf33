"""What passes between the scheduler and a policy: the policy looks at a `View` and answers with a `Decision`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from toolkit.sched.figures import Amount, Figure, Loads, Numbers
from toolkit.sched.history import History
from toolkit.sched.types import Batch, Job, Worker


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
    finished: History  # output lengths of the last requests that ended
    rng: np.random.Generator  # the only randomness: a scheduler made with the same seed decides the same
    now_s: float = 0.0
    prioritised: bool = False  # some request had another priority than the default
    arrived: list[int] = field(default_factory=list)  # workers that jobs were routed to since the last plan
    due: list[Worker] = field(init=False)  # free, and something happened; by index
    idle: list[int] = field(init=False)  # the indices of `free`, ascending
    mixed: bool = field(init=False)
    kinds: list[list[Worker]] = field(init=False)  # of mixed workers those alive, by kind; the longest holder's last
    able: Numbers = field(init=False)  # the indices of those alive, ascending
    kind_of: Numbers = field(init=False)  # of mixed workers: by index, its place in `kinds`
    loads: Loads = field(init=False)
    _alive: list[Worker] = field(init=False)
    _able: dict[int, Numbers] = field(init=False)  # by how many of `kinds` are too small
    figures: dict[Hashable, Figure] = field(init=False)

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
        """The scheduler says that something happened to a worker; of no account while it cannot run."""
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

    def figure(self, key: Hashable, amount: Amount) -> Figure:
        """The numbers that `amount` says of workers; `key` stands for it. They are kept for the next asking."""
        if key not in self.figures:
            self.figures[key] = Figure(self.workers, amount)
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
    """What a policy wants done: batches for workers' queues, in order, and when to ask it again at the latest.

    `interrupt` names workers whose running round should stop early, since the policy could act on what has come.
    """

    batches: Sequence[Batch] = ()
    wake_at_s: float | None = None  # None: leave `View.due_s` as it is
    interrupt: Sequence[int] = ()


NOTHING = Decision()  # to do: what most ticks come to
