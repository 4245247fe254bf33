"""Which part of the pool each kind of workers batches, where they have different laws.

Algorithm 1 asks one law how long batches take and how many rows fit; a batch that it made by the laws of a large card
is wrong for a small one. So jobs are shared out first. Ordered by length, as Algorithm 1 has them anyway, the pool is
cut: who holds the longest requests gets those from the cut up, the others what is below it, each batches its own part
by its own laws, and the cut is where both would be done at the same time. It is found by bisection, since to move it up
gives one side more to do and the other less.

Whom only larger workers hold is theirs whatever the cut says. A kind that would be done later than the others with
even one job gets none: that is how a slow card stays idle while a fast one is soon free again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolkit.sched.types import Batch, Job, Worker

Batching = Callable[[Sequence[Job], Worker], list[Batch]]  # by the laws of one worker
Offloading = Callable[[list[Batch], Sequence[Worker]], float]  # over workers of one kind


@dataclass(slots=True, frozen=True)
class Share:
    """Batches for workers of one kind or several, and in how many seconds the last of them would be done."""

    batches: list[Batch]
    done_s: float


def share_out(
    jobs: Sequence[Job], kinds: Sequence[Sequence[Worker]], batch: Batching, offload: Offloading, now_s: float
) -> list[Batch]:
    """Batches of all `jobs`, which are ordered by length and which the last of `kinds` holds, assigned to workers.

    O(log n) calls of `batch` for each kind but the last, of n jobs.
    """
    return _shared(jobs, kinds, batch, offload, now_s).batches


def _shared(
    jobs: Sequence[Job], kinds: Sequence[Sequence[Worker]], batch: Batching, offload: Offloading, now_s: float
) -> Share:
    kind, others = kinds[0], kinds[1:]
    if not others:
        return _share_of(kind, batch(jobs, kind[0]) if jobs else [], offload, now_s)
    able = [job for job in jobs if kind[0].holds(job)]

    def split(count: int) -> tuple[Share, Share]:
        """The shares of `kind` and of the others, where it gets the `count` shortest that it holds."""
        mine = able[:count]
        taken = {job.ticket for job in mine}
        rest = [job for job in jobs if job.ticket not in taken]
        below = _share_of(kind, batch(mine, kind[0]) if mine else [], offload, now_s)
        return below, _shared(rest, others, batch, offload, now_s)

    low, high = 0, len(able)
    while low < high:
        middle = (low + high) // 2
        below, above = split(middle)
        if below.done_s < above.done_s:
            low = middle + 1
        else:
            high = middle
    found = [split(count) for count in (low - 1, low) if count >= 0]
    below, above = min(found, key=lambda shares: max(shares[0].done_s, shares[1].done_s))
    return Share([*above.batches, *below.batches], max(below.done_s, above.done_s))


def _share_of(kind: Sequence[Worker], batches: list[Batch], offload: Offloading, now_s: float) -> Share:
    if not batches:
        return Share(batches, 0.0)
    offload(batches, kind)
    loads_s = {worker.index: worker.left_s(now_s) for worker in kind}
    for batch in batches:
        loads_s[batch.worker] += batch.estimated_s
    return Share(batches, max(loads_s[batch.worker] for batch in batches))
