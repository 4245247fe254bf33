"""Models with one cache that keeps every token: full attention, MLA, mixtures of experts.

The simulator's passes are those of `toolkit.sim.paged.PagedScheduler`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from toolkit.backends.vllm.conformance.kinds import Kind, first_difference
from toolkit.backends.vllm.conformance.workloads import Arrivals, Case, Pass, make_case
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.blocks import PagedRequest, contents
from toolkit.sim.paged import PagedScheduler
from toolkit.traces.types import SharedBlocks


def passes_of_case(case: Case) -> list[Pass]:
    """The passes of our model for a made-up workload."""
    names = ("max_num_seqs", "max_num_batched_tokens", "prefix_caching", "watermark")
    flags = VllmPolicy(
        **{name: case[name] for name in names},
        chunked_prefill=case.get("chunked_prefill", True),
        prefill_schedule_interval=case.get("flags", {}).get("prefill_schedule_interval", 1),
    )
    shares = "ids" in case
    scheduler = PagedScheduler(
        flags,
        case["blocks"],
        case["block_tokens"],
        ahead=case["ahead"],
        shares=shares,
        reserves=case.get("reserve_full_isl", True),
    )
    arrivals = Arrivals(case)
    rows = rows_of(case) if shares else _alone(case)
    found: list[Any] = []
    under_way: list[Any] = []

    def settle(ended: list[Any]) -> None:
        scheduler.settle(ended)
        for row in ended:
            arrivals.ended(row.number, len(found))

    while True:
        for number in arrivals.due(len(found)):
            scheduler.add(rows[number])
        scheduler.change(case.get("changes", {}).get(str(len(found)), {}))
        step = step_of(scheduler, counts=shares)
        if step["rows"]:
            found.append(step)
            ended = scheduler.commit()
            settle(under_way if case["ahead"] else ended)
            under_way = ended if case["ahead"] else []
            continue
        if step["preempted"]:
            found.append(step)
        if under_way:
            settle(under_way)
            under_way = []
        elif not arrivals.skip(len(found)) and not step["preempted"]:
            return found


def _alone(case: Case) -> list[PagedRequest]:
    return [
        PagedRequest(number, prompt, output, stops=output < limit)
        for number, (_, prompt, output, limit) in enumerate(case["requests"])
    ]


def rows_of(case: Case) -> list[PagedRequest]:
    """The requests of a workload that says what they share."""
    requests = case["requests"]
    counts = [len(ids) for ids in case["ids"]]
    shared = SharedBlocks(
        case["shared_tokens"],
        np.array([one for ids in case["ids"] for one in ids], dtype=np.int64),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
    )
    prompts = [one[1] for one in requests]
    outputs = [one[2] for one in requests]
    leaves, continued = contents(prompts, outputs, shared, case["previous"])
    return [
        PagedRequest(
            number,
            prompt,
            output,
            stops=output < limit,
            content=leaves[number],
            watched=continued[number] and not case["closed"],
        )
        for number, (_, prompt, output, limit) in enumerate(requests)
    ]


def step_of(scheduler: PagedScheduler, *, counts: bool = False) -> Pass:
    """Plan one pass of our model; `counts`: with the tokens that were found in the cache."""
    pool = scheduler.pool
    before = (pool.queries, pool.hits, pool.preempted_queries, pool.preempted_hits)
    plan = scheduler.schedule()
    # vLLM does not know yet that these rows have ended
    over = sum(not row.left for row in plan.preempted)
    after = (pool.queries, pool.hits, pool.preempted_queries, pool.preempted_hits)
    return {
        "rows": [list(row) for row in scheduler.rows()],
        "preempted": [row.number for row in plan.preempted],
        "free": scheduler.pool.free,
        "waiting": len(scheduler.waiting) + over,
    } | ({"found": [now - then for now, then in zip(after, before, strict=True)]} if counts else {})


def make(seed: int, ahead: bool) -> Case:
    """A made-up workload with one of vLLM's two schedulers."""
    return make_case(seed) | {"ahead": ahead}


def differs(case: Case, theirs: list[Pass]) -> int | None:
    """The first pass in which the simulator differs."""
    return first_difference(passes_of_case(case), theirs)


KIND = Kind("full attention", (), make, differs, order=0)
