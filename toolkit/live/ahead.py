"""What a server would serve from now on: a simulation that begins with what it has to do.

A server that falls behind shows it by the requests that it has, not by the traffic of its last
minutes. So requests that have not ended come first, at time 0: those that run with their tokens in
the cache, then those that wait. Traffic follows them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from toolkit.interrupts import held
from toolkit.metrics import Served
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.blocks import BlockPool, PagedRequest
from toolkit.sim.ledger import Ledger
from toolkit.sim.paged_engine import PagedRun
from toolkit.sim.world import World
from toolkit.traces.types import Trace


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A request that has not ended.

    Attributes:
        tokens: its prompt and its output so far.
        cached: how many of them are in the cache; 0: it waits.
        left: tokens that it will still generate, as far as one knows.
    """

    tokens: int
    cached: int
    left: int


@held()
def ahead(
    unfinished: Sequence[Unfinished], traffic: Trace, policy: VllmPolicy, world: World
) -> Served:
    """Serve `unfinished`, and then `traffic`; the times of the traffic's requests."""
    policy = replace(policy, prefix_caching=True)
    engine = world.engine_of(policy)
    first = len(unfinished)
    outputs = [one.left for one in unfinished]
    outputs += traffic.output_tokens.tolist()
    arrival_s = [0.0] * first + traffic.arrival_s.tolist()
    ledger = Ledger(arrival_s, outputs, 1)
    run = PagedRun(0, engine, policy, ledger, shares=False, tells=False)
    for number, one in enumerate(unfinished):
        row = PagedRequest(number, one.tokens, one.left)
        pool = run.scheduler.pool
        if one.cached and isinstance(pool, BlockPool):
            count = pool.needed(one.cached)
            if count <= pool.free:
                pool.take(count)
                pool.give(row, one.cached, one.cached)
        run.arrive(row, 0.0)
    prompts = traffic.prompt_tokens.tolist()
    number = first
    last = len(arrival_s)
    while number < last or run.next_s < math.inf:
        came_s = arrival_s[number] if number < last else math.inf
        if came_s <= run.next_s:
            run.arrive(PagedRequest(number, prompts[number - first], outputs[number]), came_s)
            number += 1
        else:
            run.work(drain=True, follow=False, until_s=came_s)
    outcomes = ledger.outcomes[first:]
    served = Served(
        traffic.arrival_s,
        np.array([one.first_token_s for one in outcomes]),
        np.array([one.last_token_s for one in outcomes]),
        np.array([one.output_tokens for one in outcomes], dtype=np.int64),
        np.array([one.max_gap_s for one in outcomes]),
        np.array([one.ok for one in outcomes], dtype=np.bool_),
    )
    return world.front.seen(served)
