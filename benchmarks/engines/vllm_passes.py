"""The simulator's model of vLLM's scheduler against vLLM's own, pass by pass.

    python -m benchmarks.engines.vllm_passes --log LOG.jsonl --requests REQUESTS.jsonl
    python -m benchmarks.engines.vllm_passes --vllm-python PYTHON [--cases 400]
        [--timed] [--live]
    python -m benchmarks.engines.vllm_passes --vllm-python PYTHON --caches gpt-oss [--cases 400]
    python -m benchmarks.engines.vllm_passes --vllm-python PYTHON --trace TRACE [...]

Takes seconds with --log, minutes otherwise. Needs that log, or an environment with vLLM.

The first compares it with a log of a real vLLM (`--scheduler-cls
toolkit.backends.vllm.iterations.logged_scheduler`) and the requests that it served, one JSON object
each: id, arrival_s on the log's clock, prompt_tokens, max_tokens.

The second makes up workloads, with small caches and all flags drawn, and runs them through vLLM's
scheduler classes, also the asynchronous one, without an engine: the
arrivals before each pass are given, and so is which requests end before their limit. Two thirds of
them have prompts that share blocks, or sessions in which each turn begins with those before, in
open and closed loop. `llmctl vllm-check` does the same with fewer workloads.

With --live all settings of a running server are changed every few passes, by the code that changes
them there (`toolkit.backends.vllm.knobs`).

With --timed the requests come at times, and vLLM's loop, without its executor, hands out tokens by
a law of launches and of the GPU that is drawn too, with its queue of one or two passes; the times
of all tokens must be those of the simulated engine, to a nanosecond.

With --caches the workloads are of a model with such groups of caches, in pools that just hold its
longest request, and the blocks that each group holds for each row must be the same, too.

The last does the same with the requests of a trace that says what prompts share, their lengths
divided by --divide, with passes of --pass-s seconds, in a cache of --blocks blocks.

A pass differs if its rows, their order, their computed and new tokens, the preempted requests, the
free blocks, the number of waiting requests or the tokens that were looked up and found in the cache
differ. A log is followed to its first difference, since later ones may follow from it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.command import make_parser
from toolkit.backends.vllm.conformance import groups
from toolkit.backends.vllm.conformance.groups import make_grouped
from toolkit.backends.vllm.conformance.kinds import first_difference, live
from toolkit.backends.vllm.conformance.kinds.full import (
    ModelledScheduler,
    passes_of_case,
    rows_of,
    step_of,
)
from toolkit.backends.vllm.conformance.run import run_cases
from toolkit.backends.vllm.conformance.workloads import Case, make_case
from toolkit.estimators.pipeline import LAUNCHES, GraphSettings, PipelineLaw
from toolkit.sched.iterations import IterationLogHeader, LoggedPass, header_of, passes_of
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.blocks import PagedRequest
from toolkit.sim.flight import EMPTY_S
from toolkit.sim.groups.caches import settings_of
from toolkit.sim.groups.scheduler import GroupedScheduler
from toolkit.sim.ledger import Ledger
from toolkit.sim.paged import PagedScheduler
from toolkit.sim.paged_engine import PagedEngine, PagedRun
from toolkit.traces.read import read_trace
from toolkit.traces.types import trace_path
from toolkit.traces.windows import divide_lengths

CACHES = {
    "gpt-oss": groups.like_gpt_oss,
    "gpt-oss-128": groups.like_gpt_oss_whole,
    "gemma": groups.like_gemma,
    "windows": groups.windows_alone,
    "sizes": groups.two_sizes,
    "states": groups.states,
    "qwen3-next": groups.like_qwen3_next,
}
TIMED = "benchmarks.engines.vllm_passes_child"  # gives the times of tokens, not passes


def passes_of_log(
    header: IterationLogHeader, requests: Sequence[Mapping[str, Any]], starts_s: Sequence[float]
) -> list[Any]:
    """The passes of our model for the requests, if the engine plans them at `starts_s`."""
    flags = VllmPolicy(
        max_num_seqs=header.max_num_seqs,
        max_num_batched_tokens=header.max_num_batched_tokens,
        chunked_prefill=header.enable_chunked_prefill,
        prefix_caching=header.prefix_caching,
    )
    caches = settings_of(header.resolved, header.max_model_len, header.version, header.device)
    scheduler: ModelledScheduler = PagedScheduler(flags, header.blocks, header.block_tokens)
    if caches is not None:
        scheduler = GroupedScheduler(caches, flags, header.blocks)
    arrived = 0
    found = []
    for start_s in starts_s:
        while arrived < len(requests) and requests[arrived]["arrival_s"] <= start_s:
            one = requests[arrived]
            scheduler.add(PagedRequest(arrived, one["prompt_tokens"], one["max_tokens"]))
            arrived += 1
        step = step_of(scheduler)
        step.pop("held", None)
        found.append(step)
        scheduler.settle(scheduler.commit())
    return found


def passes_of_live_log(header: IterationLogHeader, passes: Sequence[LoggedPass]) -> list[Any]:
    """The passes of our model for a server with live settings. Its log says which requests have
    come and which settings are new with each pass. No request stops before its limit.
    """
    flags = VllmPolicy(
        max_num_seqs=header.max_num_seqs,
        max_num_batched_tokens=header.max_num_batched_tokens,
        chunked_prefill=header.enable_chunked_prefill,
        prefix_caching=header.prefix_caching,
    )
    scheduler = PagedScheduler(
        flags, header.blocks, header.block_tokens, ahead=header.async_scheduling
    )
    arrived = 0
    found: list[Any] = []
    under_way: list[PagedRequest] = []
    for one in passes:
        scheduler.change(one.changed)
        for _, _, prompt, limit in one.arrived:
            scheduler.add(PagedRequest(arrived, prompt, limit))
            arrived += 1
        step = step_of(scheduler)
        found.append(step)
        ended: list[PagedRequest] = []
        if step["rows"]:
            ended = scheduler.commit()
        scheduler.settle(under_way if header.async_scheduling else ended)
        under_way = ended if header.async_scheduling else []
    return found


def logged_live(passes: Sequence[LoggedPass]) -> list[Any]:
    """The same log's passes in the same form."""
    names = [arrival.request_id for one in passes for arrival in one.arrived]
    number = {name: k for k, name in enumerate(names)}
    return [
        {
            "rows": [[number[row.request_id], row.computed, row.new] for row in one.rows],
            "preempted": [number[name] for name in one.preempted],
            "free": one.free_blocks,
            "waiting": one.waiting,
        }
        for one in passes
    ]


def logged(passes: Sequence[LoggedPass], requests: Sequence[Mapping[str, Any]]) -> list[Any]:
    """A log's passes in the same form. vLLM appends to the ids that clients give."""
    number = {one["id"]: k for k, one in enumerate(requests)}
    return [
        {
            "rows": [
                [number[row.request_id.split("-")[0]], row.computed, row.new] for row in one.rows
            ],
            "preempted": [number[name.split("-")[0]] for name in one.preempted],
            "free": one.free_blocks,
            "waiting": one.waiting,
        }
        for one in passes
    ]


def timed_case(seed: int) -> dict[str, Any]:
    """A made-up workload with requests that come at times, and a law of its passes."""
    case = make_case(seed)
    draw = random.Random(f"{seed} timed")
    arrival_s = sorted(0.01 * at + draw.random() * 0.03 for at, *_ in case["requests"])
    sizes = draw.choice([[], [1, 2, 4], [1, 2, 4, 8, 16, 32]])
    scale_s = {
        "decode_s": 6e-3,
        "row_s": 2e-4,
        "cached_s": 2e-5,
        "floor_s": 6e-3,
        "floor_token_s": 1e-4,
        "token_s": 4e-4,
        "attended_s": 1e-6,
        "beside_s": 4e-5,
        "graph_s": 6e-3,
        "graph_row_s": 3e-4,
        "piece_s": 6e-3,
        "piece_row_s": 2e-4,
        "eager_s": 2.5e-2,
        "eager_chunk_s": 1e-3,
    }
    law: dict[str, Any] = {name: most * draw.random() for name, most in scale_s.items()}
    law["graphs"] = [draw.choice(sorted(LAUNCHES)), sizes, draw.random() < 0.3]
    law["spread"] = draw.choice([[], [0.7, 1.4, 0.9]])
    more = {"closed": False, "reserve_full_isl": True, "empty_s": EMPTY_S}
    return case | more | {"arrival_s": arrival_s, "law": law}


def times_of_case(case: Case) -> list[list[float]]:
    """First and last token of each request of a timed workload, and its largest gap, as the
    simulator has them.
    """
    names = ("max_num_seqs", "max_num_batched_tokens", "prefix_caching", "watermark")
    flags = VllmPolicy(
        **{name: case[name] for name in names}, chunked_prefill=case["chunked_prefill"]
    )
    coefficients = dict(case["law"])
    mode, sizes, apart = coefficients.pop("graphs")
    coefficients["spread"] = tuple(coefficients["spread"])
    law = PipelineLaw(GraphSettings(mode, tuple(sizes), apart), **coefficients)
    engine = PagedEngine(law, case["blocks"], case["block_tokens"], ahead=case["ahead"])
    arrival_s = case["arrival_s"]
    rows = rows_of(case)
    ledger = Ledger(arrival_s, [output for _, _, output, _ in case["requests"]], 1)
    run = PagedRun(0, engine, flags, ledger, shares=True, tells=False)
    arrived = 0
    while arrived < len(rows) or run.next_s < math.inf:
        came_s = arrival_s[arrived] if arrived < len(rows) else math.inf
        if came_s <= run.next_s:
            run.arrive(rows[arrived], came_s)
            arrived += 1
        else:
            run.work(drain=True, follow=False, until_s=came_s)
    return [[one.first_token_s, one.last_token_s, one.max_gap_s] for one in ledger.outcomes]


def summarised(tokens: Sequence[Sequence[float]]) -> list[list[float]]:
    """The same of the times of all tokens of each request."""
    return [
        [one[0], one[-1], max((after - before for before, after in pairwise(one)), default=0.0)]
        for one in tokens
    ]


def case_of_trace(
    file: str, divide: float, pass_s: float, rows: slice, flags: Mapping[str, Any]
) -> dict[str, Any]:
    """Some requests of a trace as a workload, with all lengths divided by `divide`; a pass takes
    `pass_s`.
    """
    trace = divide_lengths(read_trace(trace_path(file))[0], divide).take(rows)
    shared = trace.shared
    sessions = trace.sessions
    requests = [
        [int(arrival_s / pass_s), prompt, output, output]
        for arrival_s, prompt, output, _, _ in trace.rows()
    ]
    return {
        "max_model_len": max(prompt + limit for _, prompt, _, limit in requests),
        "chunked_prefill": True,
        "reserve_full_isl": True,
        "watermark": 0.0,
        "closed": False,
        "shared_tokens": shared.block_tokens if shared else 1,
        "ids": [shared.of(row).tolist() if shared else [] for row in range(len(trace))],
        "previous": sessions.previous.tolist() if sessions else [-1] * len(trace),
        "requests": requests,
        **flags,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--requests", type=Path)
    parser.add_argument("--vllm-python")
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--timed", action="store_true")
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--save", type=Path, help="write the workloads and vLLM's passes here")
    parser.add_argument("--caches", choices=CACHES)
    parser.add_argument("--trace")
    parser.add_argument("--divide", type=float, default=16)
    parser.add_argument("--pass-s", type=float, default=0.5)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--most", type=int, default=1_000_000)
    parser.add_argument("--blocks", type=int, default=4000)
    parser.add_argument("--block-tokens", type=int, default=32)
    given = parser.parse_args()
    if not ((given.log and given.requests) or given.vllm_python):
        parser.error("give --log and --requests, or --vllm-python")
    if given.log:
        header, *lines = given.log.read_bytes().splitlines(keepends=True)
        requests = [
            json.loads(line) for line in given.requests.read_text(encoding="utf-8").splitlines()
        ]
        passes = passes_of(lines)
        theirs = [logged(passes, requests)]
        ours = [passes_of_log(header_of(header), requests, [one.start_s for one in passes])]
    else:
        if given.timed:
            _report_times([timed_case(given.seed + k) for k in range(given.cases)], given)
            return
        cases = _cases(given)
        loaded = run_cases(given.vllm_python, cases)
        theirs = loaded.passes()
        cases = [case | {"version": loaded.version} for case in cases]
        ours = [passes_of_case(case) for case in cases]
        ahead = sum(case["ahead"] for case in cases)
        print(f"{len(cases) - ahead} workloads with vLLM's Scheduler, {ahead} with AsyncScheduler")
        if given.save:
            given.save.write_text(json.dumps(list(zip(cases, theirs, strict=True))), "utf-8")
    _report(ours, theirs)


def _cases(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The workloads that the options ask for; a trace's with both schedulers."""
    if given.caches:
        maker = CACHES[given.caches]
        return [make_grouped(maker, given.seed + k, ahead=bool(k % 2)) for k in range(given.cases)]
    if not given.trace:
        seeds = range(given.seed, given.seed + given.cases)
        if given.live:
            return [dict(live.make(seed, seed % 2 == 1)) for seed in seeds]
        return [make_case(seed) for seed in seeds]
    flags = {
        "block_tokens": given.block_tokens,
        "blocks": given.blocks,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 2048,
        "prefix_caching": True,
    }
    return [
        case_of_trace(
            given.trace,
            given.divide,
            given.pass_s,
            slice(given.first, given.first + given.most),
            flags | {"ahead": ahead},
        )
        for ahead in (False, True)
    ]


def _report_times(cases: Sequence[Case], given: argparse.Namespace) -> None:
    """Compare the times of tokens."""
    theirs = run_cases(given.vllm_python, cases, TIMED).passes()
    differ = []
    largest_s = 0.0
    for number, (case, tokens) in enumerate(zip(cases, theirs, strict=True)):
        ours = np.array(times_of_case(case))
        apart_s = float(np.abs(ours - np.array(summarised(tokens))).max())
        largest_s = max(largest_s, apart_s)
        if apart_s > 1e-9:
            differ.append(number)
            print(f"workload {number}, ahead {case['ahead']}: {apart_s:.3g} s apart")
    ahead = sum(case["ahead"] for case in cases)
    count = sum(len(one) for tokens in theirs for one in tokens)
    print(f"{len(cases) - ahead} workloads with a queue of one pass, {ahead} with a queue of two")
    print(f"{len(differ)} differ in {count:,} tokens; the largest difference is {largest_s:.2g} s")


def _report(ours: Sequence[list[Any]], theirs: Sequence[list[Any]]) -> None:
    differences = {
        k: found
        for k in range(len(ours))
        if (found := first_difference(ours[k], theirs[k])) is not None
    }
    for k, at in differences.items():
        print(
            f"workload {k}, pass {at}:\n  ours   {ours[k][at : at + 1]}\n  vLLM's"
            f" {theirs[k][at : at + 1]}"
        )
    every = [one for passes in theirs for one in passes]
    preempted = sum(len(one["preempted"]) for one in every)
    chunks = sum(len({row[2] > 1 for row in one["rows"]}) > 1 for one in every)
    queries, hits, again, again_hits = (
        sum(one.get("found", (0, 0, 0, 0))[k] for one in every) for k in range(4)
    )
    print(f"{len(differences)} of {len(ours)} workloads differ; {len(every):,} passes")
    print(f"{preempted:,} preempted, {chunks:,} passes of chunks beside decodes")
    print(
        f"found in the cache: {hits:,} of {queries:,} tokens when first admitted, {again_hits:,} "
        f"of {again:,} when admitted again"
    )


if __name__ == "__main__":
    main()
