"""The passes that the simulated vLLM plans for a workload, and where vLLM's are others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from toolkit.backends.vllm.conformance.cases import Case, CaseArrivals, Pass
from toolkit.catalogue.releases import release_of
from toolkit.catalogue.resolved import CacheGroup
from toolkit.sched.policies.vllm import ROWS, TOKENS, VllmPolicy
from toolkit.sim.cache_settings import CacheSettings
from toolkit.sim.contents import contents
from toolkit.sim.drafts import DrawnDrafts
from toolkit.sim.kv_cache import Node, PagedRow
from toolkit.sim.loop import SimulationStalledError
from toolkit.sim.vllm import VllmScheduler
from toolkit.traces.types import SharedBlocks


def passes_of_case(case: Case) -> list[Pass]:
    """Return the simulator's passes for a workload; the last one is {"stuck": ...} where it does
    not end.
    """
    scheduler = scheduler_of(case)
    arrivals = CaseArrivals(case)
    rows = rows_of(case)
    found: list[Any] = []
    under_way: list[PagedRow] = []  # the rows that end with the pass that is under way
    is_under_way = False

    def settle(ended: list[PagedRow], *, idle: bool = False) -> None:
        scheduler.settle(idle=idle)
        for row in ended:
            arrivals.ended(row.number, len(found))

    while True:
        for number in arrivals.due(len(found)):
            scheduler.add(rows[number])
        settings = case.get("changes", {}).get(str(len(found)))
        if settings:
            scheduler.change(settings)
        try:
            step = step_of(case, scheduler)
        except SimulationStalledError as stuck:
            return [*found, {"stuck": stuck.message}]
        if step["rows"]:
            found.append(step)
            ended = scheduler.commit().ended
            settle(under_way if case["ahead"] else ended)
            under_way = ended
            is_under_way = case["ahead"]
            continue
        if step["preempted"]:
            found.append(step)
        if is_under_way:
            settle(under_way, idle=True)
            is_under_way = False
        elif not arrivals.skip(len(found)) and not step["preempted"]:
            return found


def drafts_of_case(case: Case) -> dict[str, Any]:
    """Return the drafts of a workload, with the accepted and the proposed drafts of each pass."""
    drafts: dict[str, Any] = case["drafts"]
    drawn = _drawn(drafts)
    turns = range(max(one[3] for one in case["requests"]) + 1)
    numbers = range(len(case["requests"]))
    return drafts | {
        "accepts": [[drawn.accepted(number, turn) for turn in turns] for number in numbers],
        "offers": [[drawn.offered(number, turn) for turn in turns] for number in numbers],
    }


def _drawn(drafts: Mapping[str, Any]) -> DrawnDrafts:
    rates = tuple(drafts["rates"])
    return DrawnDrafts(drafts["method"], rates, drafts["proposed"], drafts["seed"])


def scheduler_of(case: Case) -> VllmScheduler:
    """Return the simulator's scheduler with the caches, drafts and flags of a workload."""
    names = (ROWS, TOKENS, "prefix_caching", "watermark")
    flags = VllmPolicy(
        **{name: case[name] for name in names},
        chunked_prefill=case.get("chunked_prefill", True),
        **case.get("flags", {}),
    )
    caches = None
    if "groups" in case:
        caches = CacheSettings(
            cache_groups(case),
            case["max_model_len"],
            case["retention"],
        )
    return VllmScheduler(
        flags,
        case["blocks"],
        case["block_tokens"],
        caches=caches,
        ahead=case["ahead"],
        reserves=case.get("reserve_full_isl", True),
        drafts=_drawn(case["drafts"]) if "drafts" in case else None,
        longest=case["max_model_len"] if "drafts" in case else 0,
        hash_lookahead=case.get("hash_lookahead", 0),
        release=release_of(case.get("version", "")),
    )


def cache_groups(case: Case) -> tuple[CacheGroup, ...]:
    """Return the cache groups of a workload."""
    return tuple(
        CacheGroup(
            group["kind"],
            "",
            group["block"],
            1,
            group["block"],
            window=group.get("window", 0),
            mode=group.get("mode", ""),
            checkpoints=group.get("checkpoint", 0),
        )
        for group in case["groups"]
    )


def rows_of(case: Case) -> list[PagedRow]:
    """Return the requests of a workload, with what they share."""
    requests = case["requests"]
    shared = _contents_of(case) if "ids" in case else [(None, False)] * len(requests)
    return [
        PagedRow(number, prompt, output, limit=limit, content=leaf, watched=watched)
        for number, ((_, prompt, output, limit), (leaf, watched)) in enumerate(
            zip(requests, shared, strict=True)
        )
    ]


def _contents_of(case: Case) -> list[tuple[Node, bool]]:
    """Return the last node of each request's content, and whether others look for its output."""
    counts = [len(ids) for ids in case["ids"]]
    shared = SharedBlocks(
        case["shared_tokens"],
        np.array([one for ids in case["ids"] for one in ids], dtype=np.int64),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
    )
    prompts = [one[1] for one in case["requests"]]
    outputs = [one[2] for one in case["requests"]]
    lookahead = case.get("hash_lookahead", 0)
    leaves, continued = contents(prompts, outputs, shared, case["previous"], lookahead)
    return [
        (leaf, is_on and not case["closed"]) for leaf, is_on in zip(leaves, continued, strict=True)
    ]


def step_of(case: Case, scheduler: VllmScheduler) -> Pass:
    """Plan one pass of the simulator, as the driven vLLM gives it for this workload."""
    pool = scheduler.pool
    before = (pool.queries, pool.hits, pool.preempted_queries, pool.preempted_hits)
    plan = scheduler.schedule()
    rows = scheduler.rows()
    step: Pass = {
        "rows": [list(row) for row in rows],
        "preempted": [row.number for row in plan.preempted],
        "free": pool.free,
        "waiting": len(scheduler.waiting),
    }
    if "ids" in case:
        after = (pool.queries, pool.hits, pool.preempted_queries, pool.preempted_hits)
        step["found"] = [now - then for now, then in zip(after, before, strict=True)]
    if "groups" in case:
        step["held"] = {str(number): scheduler.held(number) for number, *_ in rows}
    return step


def differs(case: Case, theirs: list[Pass]) -> int | None:
    """Return the first pass of vLLM's in which the simulator differs; None: none does."""
    if "policy" in case:
        return _counts_differ(case, theirs)
    return first_difference(passes_of_case(case), theirs)


def first_difference(ours: list[Pass], theirs: list[Pass]) -> int | None:
    """Return the first pass that differs; None: no pass differs."""
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return number
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _counts_differ(case: Case, theirs: list[Pass]) -> int | None:
    """Return the first pass in which a policy of ours inside vLLM counts blocks wrongly, or the
    last one where a request's tokens are not all computed; None: there is no such pass.

    Until vLLM preempts, our scheduler counts the blocks of prompts that vLLM's block manager holds.
    Where it has admitted a request that vLLM has still to place, because the cache is full, it
    counts no fewer.
    """
    ends: dict[int, int] = {}
    whole = True  # vLLM has preempted nothing itself: what it computes again is counted roughly
    for number, one in enumerate(theirs):
        if "stuck" in one:
            return number
        held, counted, uncounted, unplaced = one["blocks"]
        whole = whole and not one["preempted"]
        exact = held == counted + uncounted
        enough = unplaced > 0 and held < counted + uncounted
        if whole and not exact and not enough:
            return number
        for row, computed, new in one["rows"]:
            ends[row] = max(ends.get(row, 0), computed + new)
    for number, (_, prompt, output, _) in enumerate(case["requests"]):
        # an asynchronous scheduler computes a token more than it learns that it needed
        if not prompt + output - 1 <= ends.get(number, 0) <= prompt + output + int(case["ahead"]):
            return len(theirs)
    return None
