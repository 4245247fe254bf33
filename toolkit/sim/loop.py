"""The scheduler on a virtual clock: arrivals, completions and wake-ups in the order of time.

The loop is the same as the live driver's: tell the scheduler what happened, tick it, start what it says.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from toolkit.errors import LlmctlError
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import BatchResult, Refusal, Request
from toolkit.sim.worker import SimWorker

MAX_IDLE_WAKES = 1000  # wake-ups in a row that started nothing while nothing ran: no policy needs as many


class SimulationStalledError(LlmctlError):
    """Requests wait, and nothing will ever happen again."""


def run(scheduler: Scheduler, requests: Sequence[Request], workers: Sequence[SimWorker]) -> list[Refusal]:
    """Drive `scheduler` through `requests` (sorted by arrival) until every one has ended; returns those refused.

    Raises `SimulationStalledError`, naming the state, where the scheduler leaves requests waiting for ever.
    """
    ends: list[tuple[float, int, BatchResult]] = []  # a heap; batch ids are unique, so results are never compared
    refused: list[Refusal] = []
    arrived, count, idle_wakes = 0, len(requests), 0
    next_arrival_s = requests[0].arrival_s if count else math.inf
    while True:
        now_s = min(next_arrival_s, ends[0][0] if ends else math.inf, scheduler.wake_at_s)
        if now_s == math.inf:
            break
        idle_wakes += 1
        while ends and ends[0][0] <= now_s:
            scheduler.complete(heapq.heappop(ends)[2], now_s)
            idle_wakes = 0
        while next_arrival_s <= now_s:
            refusal = scheduler.submit(requests[arrived], now_s)
            if refusal:
                refused.append(refusal)
            arrived += 1
            next_arrival_s = requests[arrived].arrival_s if arrived < count else math.inf
            idle_wakes = 0
        for batch in scheduler.tick(now_s):
            done_s, result = workers[batch.worker].run(batch, now_s)
            heapq.heappush(ends, (done_s, result.batch_id, result))
            idle_wakes = 0
        if idle_wakes > MAX_IDLE_WAKES:
            break
    refused += scheduler.take_refusals()
    if scheduler.jobs:
        raise SimulationStalledError(
            f"the simulation stalled with {scheduler.jobs} of {count} requests waiting and nothing running",
            f"policy '{scheduler.policy.name}' never batches them; check its parameters against the fitted memory",
        )
    return refused
