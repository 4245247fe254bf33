"""The simulator's model of vLLM's scheduler beside vLLM: passes of a server's log, times of tokens.

    python -m benchmarks.engines.vllm_passes --log LOG.jsonl --requests REQUESTS.jsonl
    python -m benchmarks.engines.vllm_passes --vllm-python PYTHON [--cases 400] [--seed 1000]

Takes seconds with --log, minutes otherwise. Needs that log, or an environment with vLLM.
`benchmarks.engines.workloads` compares the passes of any number of made-up workloads.

The first compares with a log of a real vLLM (`--scheduler-cls
toolkit.backends.vllm.iterations.logged_scheduler`) and the requests that it served, one JSON object
each: id, arrival_s on the log's clock, prompt_tokens, max_tokens. A pass differs if its rows, their
order, their computed and new tokens, the preempted requests, the free blocks or the number of
waiting requests differ. A log is followed to its first difference, since later ones may follow from
it.

In the second the requests come at times, and vLLM's loop, without its executor, hands out tokens by
a law of launches and of the GPU that is drawn, with its queue of one or two passes; the times of
all tokens must be those of the simulated engine, to a nanosecond.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.command import make_parser
from benchmarks.engines.workloads import make_case
from toolkit.backends.vllm.conformance.cases import Case
from toolkit.backends.vllm.conformance.modelled import (
    first_difference,
    rows_of,
    step_of,
)
from toolkit.backends.vllm.conformance.run import run_cases
from toolkit.catalogue.releases import release_of
from toolkit.files.iterations import IterationLogHeader, LoggedPass, header_of, passes_of
from toolkit.laws.passes import LAUNCHES, GraphSettings, PassLaw
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.cache_settings import settings_of
from toolkit.sim.flight import EMPTY_S
from toolkit.sim.kv_cache import PagedRow
from toolkit.sim.ledger import Ledger
from toolkit.sim.paged_engine import PagedEngine, PagedRun
from toolkit.sim.vllm import VllmScheduler

CHILD = "benchmarks.engines.vllm_passes_child"  # gives the times of tokens


def passes_of_log(
    header: IterationLogHeader, requests: Sequence[Mapping[str, Any]], passes: Sequence[LoggedPass]
) -> list[Any]:
    """The passes of our model for the requests, if the engine plans them at the times of the log's
    passes, with the settings that are new with each. No request stops before its limit.
    """
    flags = VllmPolicy(
        max_num_seqs=header.max_num_seqs,
        max_num_batched_tokens=header.max_num_batched_tokens,
        chunked_prefill=header.enable_chunked_prefill,
        prefix_caching=header.prefix_caching,
    )
    ahead = header.async_scheduling
    caches = settings_of(header.resolved, header.max_model_len, header.device)
    scheduler = VllmScheduler(
        flags,
        header.blocks,
        header.block_tokens,
        caches=caches,
        ahead=ahead,
        release=release_of(header.version),
    )
    arrived = 0
    found = []
    for one in passes:
        if one.changed:
            scheduler.change(one.changed)
        while arrived < len(requests) and requests[arrived]["arrival_s"] <= one.start_s:
            asked = requests[arrived]
            scheduler.add(PagedRow(arrived, asked["prompt_tokens"], asked["max_tokens"]))
            arrived += 1
        step = step_of({}, scheduler)
        found.append(step)
        if step["rows"]:
            scheduler.commit()
        scheduler.settle(idle=not step["rows"])
    return found


def logged(passes: Sequence[LoggedPass], requests: Sequence[Mapping[str, Any]]) -> list[Any]:
    """A log's passes in the same form. vLLM appends to the ids that clients give."""
    numbers = {one["id"]: k for k, one in enumerate(requests)}

    def number_of(name: str) -> int:
        return numbers[name if name in numbers else name.split("-")[0]]

    return [
        {
            "rows": [[number_of(row.request_id), row.computed, row.new] for row in one.rows],
            "preempted": [number_of(name) for name in one.preempted],
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
        "pass_read": 6e-3,
        "token_alone": 2e-4,
        "cached_alone": 2e-5,
        "token_arithmetic": 4e-4,
        "attended": 1e-6,
        "cached_beside": 4e-5,
        "graph": 6e-3,
        "graph_row": 3e-4,
        "piece": 6e-3,
        "piece_row": 2e-4,
        "eager": 2.5e-2,
        "eager_chunk": 1e-3,
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
    terms = dict(case["law"])
    mode, sizes, apart = terms.pop("graphs")
    spread = tuple(terms.pop("spread"))
    law = PassLaw(terms, graphs=GraphSettings(mode, tuple(sizes), apart), spread=spread)
    engine = PagedEngine(law, case["blocks"], case["block_tokens"], ahead=case["ahead"])
    arrival_s = case["arrival_s"]
    rows = rows_of(case)
    ledger = Ledger(arrival_s, [output for _, _, output, _ in case["requests"]], 1)
    run = PagedRun(0, engine, flags, ledger, tells=False)
    arrived = 0
    while arrived < len(rows) or run.next_s < math.inf:
        came_s = arrival_s[arrived] if arrived < len(rows) else math.inf
        if came_s <= run.next_s:
            run.arrive(rows[arrived], came_s)
            arrived += 1
        else:
            run.work(drain=True, follow=False)
    return [[one.first_token_s, one.last_token_s, one.max_gap_s] for one in ledger.outcomes]


def summarised(tokens: Sequence[Sequence[float]]) -> list[list[float]]:
    """The same of the times of all tokens of each request."""
    return [
        [one[0], one[-1], max((after - before for before, after in pairwise(one)), default=0.0)]
        for one in tokens
    ]


def compare_log(log: Path, served: Path) -> None:
    """Print where our model leaves a server's log."""
    header, *lines = log.read_bytes().splitlines(keepends=True)
    requests = [json.loads(line) for line in served.read_text(encoding="utf-8").splitlines()]
    passes = passes_of(lines)
    theirs = logged(passes, requests)
    ours = passes_of_log(header_of(header), requests, passes)
    at = first_difference(ours, theirs)
    if at is not None:
        print(f"pass {at}:\n  ours   {ours[at : at + 1]}\n  vLLM's {theirs[at : at + 1]}")
    preempted = sum(len(one["preempted"]) for one in theirs)
    where = "none differs" if at is None else f"from pass {at} on they differ"
    print(f"{len(theirs):,} passes, {preempted:,} preempted requests; {where}")


def compare_times(python: str, cases: Sequence[Case]) -> None:
    """Compare the times of tokens."""
    theirs = run_cases(python, cases, CHILD).passes()
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


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--requests", type=Path)
    parser.add_argument("--vllm-python")
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1000)
    given = parser.parse_args()
    if given.log and given.requests:
        compare_log(given.log, given.requests)
    elif given.vllm_python:
        seeds = range(given.seed, given.seed + given.cases)
        compare_times(given.vllm_python, [timed_case(seed) for seed in seeds])
    else:
        parser.error("give --log and --requests, or --vllm-python")


if __name__ == "__main__":
    main()
