"""Dynamic re-batching on an unmodified, padded engine: when a row ends, who waits takes its place (BATON).

*BATON: Enhancing Batch-wise Inference Efficiency for LLMs via Dynamic Re-batching*. The running batch is one slab of
KV cache, so memory is counted as the engine takes it: rows x the longest resident, after columns that are padding in
every row are released. A newcomer longer than that makes the slab wider for all.

Where the slab would pass a threshold, the last who joined leave: to host memory, from where they come back before
anybody else enters and without a prefill, or, where there is no room or no host memory, evicted and prefilled again.
Left out: the paper prefills queries ahead of their turn, and keeps their caches aside until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from toolkit.sched.policies.parameters import choice, knob, validate
from toolkit.sched.policies.routers import ROUTERS
from toolkit.sched.types import Batch, Decision, Job, Joining, Moves, View, Worker


@dataclass(frozen=True, slots=True)
class BatonPolicy:
    """First come, first served, up to a number of rows and a share of memory.

    The paper has batches of 2 to 10 rows and no value for the threshold. Without `decoupled` it is the paper's own
    baseline, which it calls equal to Orca in throughput: newcomers are prefilled within the batch, and all pay for it.
    """

    name: ClassVar[str] = "baton"
    continuous: ClassVar[bool] = True

    max_batch_size: int = knob(16, low=1, search=(1, 256), log=True, doc="the most rows that run at once on a worker")
    decoupled: bool = knob(
        True, doc="newcomers are prefilled apart and embedded; false: within the batch (vector shaping), at its cost"
    )
    memory_threshold: float = knob(
        0.9, low=0.01, high=1, search=(0.5, 1.0), doc="share of the capacity that rows leave above, padding counted"
    )
    headroom_steps: int = knob(
        16, low=1, high=10_000, search=(1, 256), log=True, doc="decode steps that must have room before a row joins"
    )
    max_prefill_tokens: int = knob(
        32_768, low=1, search=(512, 65_536), log=True, doc="a round prefills until it has so many prompt tokens"
    )
    router: str = choice("round-robin", ROUTERS, doc="how requests are dealt to workers: " + ", ".join(ROUTERS))

    def __post_init__(self) -> None:
        validate(self)

    @property
    def joining(self) -> Joining:
        """See `toolkit.sched.protocols.Rebatches`."""
        return "embed" if self.decoupled else "shape"

    def route(self, view: View, now_s: float) -> Sequence[int] | None:
        alive = view.alive()
        return ROUTERS[self.router](view, alive) if alive else None

    def plan(self, view: View, now_s: float) -> Decision:
        batches = [
            self._round(worker)
            for worker in view.free
            if worker.inbox or worker.residents.jobs or worker.held.jobs or worker.swapped.jobs
        ]
        interrupts = [index for index in dict.fromkeys(view.arrived) if self._could_use(view.workers[index])]
        return Decision(batches, interrupt=interrupts)

    def _could_use(self, worker: Worker) -> bool:
        """Whether the running round should stop, since the first who waits may enter before one ends."""
        running, inbox = worker.running, worker.inbox
        if running is None or running.interrupted or not inbox or worker.swapped.jobs:
            return False
        slab = _Slab(self, worker, list(worker.residents.jobs))
        return slab.rows < slab.most and slab.takes(inbox[0].length, enters=True)

    def _round(self, worker: Worker) -> Batch:
        stay, leave = self._leaving(worker)
        slab = _Slab(self, worker, stay)
        back: list[Job] = []
        enter: list[Job] = []
        if not leave:
            back = self._coming_back(worker, slab)
            if len(back) == len(worker.swapped):
                enter = self._entering(worker, slab)
        waits_for_step = bool(leave) or self._more_may_enter(worker, slab, len(back), len(enter))
        swap_out, evict = _placed(worker, leave)
        moves = Moves(resume=tuple(back), swap_in=tuple(back), swap_out=tuple(swap_out)) if back or swap_out else None
        return Batch(
            worker.index,
            tuple(enter),
            1 if waits_for_step else max(slab.room, 1),
            max([job.length for job in enter], default=0),
            0.0,
            "any",
            keep_cache=True,
            evict=tuple(evict),
            moves=moves,
        )

    def _more_may_enter(self, worker: Worker, slab: _Slab, back: int, entering: int) -> bool:
        """Whether the next who waits might enter in a round of its own, after one step of this one."""
        if back < len(worker.swapped) or entering == len(worker.inbox) or slab.rows >= slab.most:
            return False
        slab.settle()
        return slab.takes(worker.inbox[entering].length, enters=True)

    def _leaving(self, worker: Worker) -> tuple[list[Job], list[Job]]:
        """Who stays, and who leaves so that one more step fits: the least urgent, and of these who joined last."""
        stay, leave = sorted(worker.residents.jobs, key=_priority), []
        while len(stay) > 1 and _Slab(self, worker, stay).room < 1:
            leave.append(stay.pop())
        return stay, leave

    def _coming_back(self, worker: Worker, slab: _Slab) -> list[Job]:
        """Of those in host memory, the most urgent who was there first comes first, and nobody before him."""
        back: list[Job] = []
        for job in sorted(worker.swapped.jobs, key=lambda job: (_priority(job), job.ticket)):
            if slab.rows >= slab.most or not slab.takes(job.length, enters=False):
                break
            slab.add(job.length, enters=False)
            back.append(job)
        return back

    def _entering(self, worker: Worker, slab: _Slab) -> list[Job]:
        enter: list[Job] = []
        prefill = 0
        for job in worker.inbox:
            if slab.rows >= slab.most or prefill >= self.max_prefill_tokens or not slab.takes(job.length, enters=True):
                break
            slab.add(job.length, enters=True)
            prefill += job.length
            enter.append(job)
        return enter


class _Slab:
    """The padded batch as a round would make it: how many rows of which width, and for how many steps there is room."""

    __slots__ = (
        "_capacity",
        "_decoupled",
        "_emits",
        "_headroom",
        "_limit",
        "_longest",
        "_there",
        "most",
        "rows",
        "width",
    )

    def __init__(self, policy: BatonPolicy, worker: Worker, residents: Sequence[Job]) -> None:
        self._capacity = worker.capacity_tokens
        self._limit = int(policy.memory_threshold * self._capacity)
        self._emits = int(worker.latency.prefill_emits_token)
        self._headroom = policy.headroom_steps
        self._decoupled = policy.decoupled
        self.most = min(policy.max_batch_size, worker.row_limit)
        self.rows = self._there = len(residents)
        steps = worker.residents.steps
        self.width = max([job.length + steps - job.joined for job in residents], default=0)
        self._longest = 0  # of those who enter

    @property
    def _shapes(self) -> bool:
        """Whether those who enter are prefilled within the batch; where nobody runs, there is none."""
        return not self._decoupled and self._there > 0

    @property
    def room(self) -> int:
        """Decode steps until memory is at the threshold; a row that is alone may have all of it."""
        return (self._limit if self.rows > 1 else self._capacity) // self.rows - self.width

    def takes(self, length: int, *, enters: bool) -> bool:
        """Whether there is room for one row more, and for some steps. Where nobody is, there is."""
        if not self.rows:
            return True
        rows, width = self.rows + 1, self._width_with(length, enters=enters)
        if rows * (width + self._headroom) > self._limit:
            return False
        return not enters or self._passing(rows, width, max(self._longest, length)) <= self._capacity

    def add(self, length: int, *, enters: bool) -> None:
        self.width = self._width_with(length, enters=enters)
        self.rows += 1
        if enters:
            self._longest = max(self._longest, length)
        else:
            self._there += 1

    def settle(self) -> None:
        """All who entered are prefilled."""
        self._there, self._longest = self.rows, 0

    def _width_with(self, length: int, *, enters: bool) -> int:
        """Where the prefill is not a step, its token comes before the first."""
        return max(self.width, length + self._emits * (enters and not self._shapes))

    def _passing(self, rows: int, width: int, length: int) -> int:
        """Tokens while they enter: a newcomer's cache lies beside the slab until it is in; shaping pads all rows."""
        return rows * (width + length) if self._shapes else rows * width + length


def _priority(job: Job) -> int:
    return job.request.priority


def _placed(worker: Worker, leave: Sequence[Job]) -> tuple[list[Job], list[Job]]:
    """Of those who leave, who goes to host memory, and for whom there is no room."""
    room = worker.host_tokens - worker.swapped.tokens
    swap_out: list[Job] = []
    evict: list[Job] = []
    for job in leave:
        tokens = job.length + worker.residents.steps - job.joined
        if tokens <= room:
            room -= tokens
            swap_out.append(job)
        else:
            evict.append(job)
    return swap_out, evict
