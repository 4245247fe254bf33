"""Which part of the pool each kind of workers batches, where they have different laws.

Algorithm 1 asks one law how long batches take and how many rows fit; a batch that it made by the laws of a large card
is wrong for a small one. So jobs are shared out first. Ordered by length, as Algorithm 1 has them anyway, the pool is
cut, and each kind batches its own stretch by its own laws: rows of a batch are alike, and little is padded. Of a few
cuts, with the shortest or with the longest for one kind, that one is taken with which the jobs wait least: the sum over
all of the seconds until the batch is done that they are in. To have all workers done at the same time instead, which a
makespan would ask for, lets everybody wait for the slow ones (docs/decisions.md).

Whom only larger workers hold is theirs whatever the cut says. A kind that would be done later than the others with
even one job gets none: that is how a slow card stays idle while a fast one is soon free again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolkit.sched.types import Batch, Job, Worker

STEPS = 8  # cuts that are looked at from either end, between two kinds; fewer where there are more kinds

Batching = Callable[[Sequence[Job], Worker], list[Batch]]  # by the laws of one worker
Offloading = Callable[[list[Batch], Sequence[Worker]], float]  # over workers of one kind


@dataclass(slots=True, frozen=True)
class Share:
    """Batches for workers of one kind or several, and the sum over their jobs of the seconds until each is done."""

    batches: list[Batch]
    waits_s: float


def share_out(
    jobs: Sequence[Job], kinds: Sequence[Sequence[Worker]], batch: Batching, offload: Offloading, now_s: float
) -> list[Batch]:
    """Batches of all `jobs`, which are ordered by length and which the last of `kinds` holds, assigned to workers.

    At most 2 `STEPS` + 2 calls of `batch` for two kinds, of at most all jobs.
    """
    return _shared(jobs, kinds, batch, offload, now_s).batches


def _shared(
    jobs: Sequence[Job], kinds: Sequence[Sequence[Worker]], batch: Batching, offload: Offloading, now_s: float
) -> Share:
    kind, others = kinds[0], kinds[1:]
    if not others or not jobs:
        return _share_of(kinds[-1], batch(jobs, kinds[-1][0]) if jobs else [], offload, now_s)

    def split(mine: Sequence[Job]) -> Share:
        """With these for `kind`, the rest for the others."""
        taken = {job.ticket for job in mine}
        rest = [job for job in jobs if job.ticket not in taken]
        own = _share_of(kind, batch(mine, kind[0]) if mine else [], offload, now_s)
        theirs = _shared(rest, others, batch, offload, now_s)
        return Share([*theirs.batches, *own.batches], theirs.waits_s + own.waits_s)

    able = [job for job in jobs if kind[0].holds(job)]
    return min(map(split, _cuts(able, max(STEPS // len(others) ** 2, 1))), key=lambda share: share.waits_s)


def _cuts(able: Sequence[Job], steps: int) -> list[Sequence[Job]]:
    """What a kind may get of those that it holds: none first, then the shortest or the longest, up to all."""
    counts = sorted({len(able) * step // steps for step in range(1, steps + 1)} - {0})
    shortest = [able[:count] for count in counts]
    return [[], *shortest, *(able[-count:] for count in counts[:-1])]


def _share_of(kind: Sequence[Worker], batches: list[Batch], offload: Offloading, now_s: float) -> Share:
    if not batches:
        return Share(batches, 0.0)
    offload(batches, kind)
    done_s, waits_s = {worker.index: worker.left_s(now_s) for worker in kind}, 0.0
    for batch in batches:
        done_s[batch.worker] += batch.estimated_s
        waits_s += len(batch.jobs) * done_s[batch.worker]
    return Share(batches, waits_s)
