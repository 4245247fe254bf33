"""The simulator's model of vLLM's scheduler against vLLM's own, pass by pass.

    python -m benchmarks.engines.vllm_passes --log LOG.jsonl --requests REQUESTS.jsonl
    python -m benchmarks.engines.vllm_passes --vllm-python PYTHON --model FOLDER [--cases 400]
        [--timed] [--live]
    python -m benchmarks.engines.vllm_passes --vllm-python PYTHON --model FOLDER --trace TRACE [...]

Takes seconds with --log, minutes otherwise. Needs that log, or an environment with vLLM 0.32.

The first compares it with a log of a real vLLM (`--scheduler-cls
toolkit.backends.vllm.iterations.logged_scheduler`) and the requests that it served, one JSON object
each: id, arrival_s on the log's clock, prompt_tokens, max_tokens.

The second makes up workloads, with small caches and all flags drawn, and runs them through vLLM's
scheduler classes, also the asynchronous one, without an engine (`vllm_passes_child.py`): the
arrivals before each pass are given, and so is which requests end before their limit. Two thirds of
them have prompts that share blocks, or sessions in which each turn begins with those before, in
open and closed loop. FOLDER has a model's config.json; no weights are read.

With --live all settings of a running server are changed every few passes, by the code that changes
them there (`toolkit.backends.vllm.knobs`).

With --timed the requests come at times, and vLLM's loop, without its executor, hands out tokens by
a law of launches and of the GPU that is drawn too, with its queue of one or two passes; the times
of all tokens must be those of the simulated engine, to a nanosecond.

The third does the same with the requests of a trace that says what prompts share, their lengths
divided by --divide, with passes of --pass-s seconds, in a cache of --blocks blocks.

A pass differs if its rows, their order, their computed and new tokens, the preempted requests, the
free blocks, the number of waiting requests or the tokens that were looked up and found in the cache
differ. A log is followed to its first difference, since later ones may follow from it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.command import make_parser
from benchmarks.engines.vllm_passes_child import Arrivals
from toolkit.backends.vllm.command import link_package
from toolkit.estimators.pipeline import LAUNCHES, GraphSettings, PipelineLaw
from toolkit.sched.iterations import IterationLogHeader, LoggedPass, header_of, passes_of
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.blocks import PagedRequest, contents
from toolkit.sim.flight import EMPTY_S
from toolkit.sim.ledger import Ledger
from toolkit.sim.paged import PagedScheduler
from toolkit.sim.paged_engine import PagedEngine, PagedRun
from toolkit.traces.read import read_trace
from toolkit.traces.types import SharedBlocks, trace_path
from toolkit.traces.windows import divide_lengths

Case = Mapping[str, Any]  # a workload and flags, as JSON


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
    scheduler = PagedScheduler(flags, header.blocks, header.block_tokens)
    arrived = 0
    found = []
    for start_s in starts_s:
        while arrived < len(requests) and requests[arrived]["arrival_s"] <= start_s:
            one = requests[arrived]
            scheduler.add(PagedRequest(arrived, one["prompt_tokens"], one["max_tokens"]))
            arrived += 1
        found.append(_step(scheduler))
        scheduler.settle(scheduler.commit())
    return found


def passes_of_live_log(header: IterationLogHeader, passes: Sequence[LoggedPass]) -> list[Any]:
    """The passes of our model for a server with live settings, whose log says which requests have
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
        step = _step(scheduler)
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


def make_case(seed: int) -> dict[str, Any]:
    """A made-up workload and flags; a request is [pass before which it arrives, prompt, output,
    limit]. In a closed loop, a turn arrives so many passes after the turn before has ended.
    """
    draw = random.Random(seed)
    block_tokens = draw.choice([4, 8, 16])
    blocks = draw.choice([12, 20, 40, 100])
    longest = min(blocks * block_tokens, 1024)
    seqs = draw.choice([2, 4, 8, 16])
    kind = draw.choice(["alone", "blocks", "blocks", "sessions", "closed", "both"])
    made = _Prompts(draw, block_tokens, longest, kind)
    at = 0
    requests = []
    for _ in range(draw.randint(3, 40)):
        at += draw.choice([0, 0, 0, 1, 2, 5, 30])
        prompt = made.add()
        limit = draw.randint(1, min(longest - prompt, draw.choice([3, 20, 60])))
        output = limit if draw.random() < 0.5 else draw.randint(1, limit)
        made.lengths.append((prompt, output))
        later = kind == "closed" and made.previous[-1] >= 0
        requests.append([draw.choice([0, 0, 1, 7]) if later else at, prompt, output, limit])
    chunked = draw.random() < 0.8
    tokens = max(seqs, draw.choice([8, 16, 32, 64, 256]))
    return {
        "block_tokens": block_tokens,
        "blocks": blocks,
        "max_model_len": longest,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": tokens if chunked else max(tokens, longest),
        "chunked_prefill": chunked,
        "prefix_caching": draw.random() < (0.5 if kind == "alone" else 0.9),
        "reserve_full_isl": draw.random() < 0.8,
        "watermark": draw.choice([0.0, 0.0, 0.1]),
        "ahead": draw.random() < 0.5,
        "closed": kind == "closed",
        "shared_tokens": made.size,
        "ids": made.ids,
        "previous": made.previous,
        "requests": requests,
    }


def live_case(seed: int) -> dict[str, Any]:
    """A made-up workload with new settings before some passes: {pass: {name: value}}."""
    draw = random.Random(f"{seed} live")
    case = make_case(seed)
    rows = case["max_num_seqs"]
    tokens = case["max_num_batched_tokens"]
    chunked = case["chunked_prefill"]
    changes: dict[str, dict[str, Any]] = {}
    for at in range(0, 600, draw.choice([2, 5, 12, 30])):
        drawn = {
            "max_num_seqs": draw.randint(1, rows),
            "max_num_batched_tokens": draw.randint(rows, tokens) if chunked else tokens,
            "watermark": draw.choice([0.0, 0.1, 0.3]),
            "scheduler_reserve_full_isl": draw.random() < 0.5,
            "policy": draw.choice(["fcfs", "priority"]),
        }
        if chunked:
            longest = case["max_model_len"]
            drawn["long_prefill_token_threshold"] = min(draw.choice([0, 0, 1, 7, 40]), longest)
        changes[str(at)] = {name: drawn[name] for name in drawn if draw.random() < 0.5}
    return case | {"changes": changes}


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
    rows = _rows_of(case)
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


class _Prompts:
    """Made-up prompts that share blocks of `size` tokens and continue earlier requests."""

    def __init__(self, draw: random.Random, block_tokens: int, longest: int, kind: str) -> None:
        self._draw = draw
        self._block_tokens = block_tokens
        self._longest = longest
        self._kind = kind
        self.size = draw.choice([2, 3, block_tokens, 2 * block_tokens])
        self.ids: list[list[int]] = []
        self.previous: list[int] = []
        self.lengths: list[tuple[int, int]] = []
        self._next = 0

    def add(self) -> int:
        """Make one more prompt; its length. `lengths` has the earlier requests'."""
        draw = self._draw
        before = -1
        most = self._longest // 2
        prompt = draw.randint(1, min(most, draw.choice([5, 20, 100, 400])))
        if draw.random() < 0.3:
            prompt = min(-(-prompt // self._block_tokens) * self._block_tokens, most)
        common: list[int] = []
        if self.lengths and self._kind in ("sessions", "closed", "both") and draw.random() < 0.6:
            before = draw.randrange(len(self.lengths))
            tokens = sum(self.lengths[before])
            if tokens + prompt > self._longest - 4:
                before = -1
            else:
                prompt += tokens
                common = self.ids[before][: self.lengths[before][0] // self.size]
        if before < 0 and self.lengths and self._kind in ("blocks", "both"):
            other = draw.randrange(len(self.lengths))
            if draw.random() < 0.2:
                prompt = self.lengths[other][0]
            if draw.random() < 0.8:
                common = self.ids[other][: draw.randint(0, len(self.ids[other]))]
        count = -(-prompt // self.size) if self._kind in ("blocks", "both") else 0
        common = common[:count]
        new = range(self._next, self._next + count - len(common))
        self._next += len(new)
        self.ids.append([*common, *new])
        self.previous.append(before)
        return prompt


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


def passes_of_case(case: Case) -> list[Any]:
    """The passes of our model for a made-up workload."""
    names = ("max_num_seqs", "max_num_batched_tokens", "prefix_caching", "watermark")
    flags = VllmPolicy(
        **{name: case[name] for name in names}, chunked_prefill=case.get("chunked_prefill", True)
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
    rows = _rows_of(case) if shares else _alone(case)
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
        step = _step(scheduler, counts=shares)
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
        elif not arrivals.skip(len(found)):
            return found


def _alone(case: Case) -> list[PagedRequest]:
    return [
        PagedRequest(number, prompt, output, stops=output < limit)
        for number, (_, prompt, output, limit) in enumerate(case["requests"])
    ]


def _rows_of(case: Case) -> list[PagedRequest]:
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


def _step(scheduler: PagedScheduler, *, counts: bool = False) -> dict[str, Any]:
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


def first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> int | None:
    """The first pass that differs; None: no pass differs."""
    for k, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return k
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def theirs_of_cases(cases: Sequence[Case], python: str, model: str) -> list[list[Any]]:
    """The passes that vLLM's own schedulers make of the workloads."""
    with tempfile.TemporaryDirectory() as folder:
        link_package(Path(folder))  # and what our scheduler inside vLLM needs
        environment = os.environ | {"PYTHONPATH": folder}
        given = Path(folder, "cases.json")
        found = Path(folder, "passes.json")
        given.write_text(json.dumps(cases), encoding="utf-8")
        child = [python, "-m", "benchmarks.engines.vllm_passes_child"]
        child += [str(given), str(found), model]
        subprocess.run(child, check=True, env=environment)
        return json.loads(found.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--requests", type=Path)
    parser.add_argument("--vllm-python")
    parser.add_argument("--model")
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--timed", action="store_true")
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--save", type=Path, help="write the workloads and vLLM's passes here")
    parser.add_argument("--trace")
    parser.add_argument("--divide", type=float, default=16)
    parser.add_argument("--pass-s", type=float, default=0.5)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--most", type=int, default=1_000_000)
    parser.add_argument("--blocks", type=int, default=4000)
    parser.add_argument("--block-tokens", type=int, default=32)
    given = parser.parse_args()
    if not ((given.log and given.requests) or (given.vllm_python and given.model)):
        parser.error("give --log and --requests, or --vllm-python and --model")
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
        theirs = theirs_of_cases(cases, given.vllm_python, given.model)
        ours = [passes_of_case(case) for case in cases]
        ahead = sum(case["ahead"] for case in cases)
        print(f"{len(cases) - ahead} workloads with vLLM's Scheduler, {ahead} with AsyncScheduler")
        if given.save:
            given.save.write_text(json.dumps(list(zip(cases, theirs, strict=True))), "utf-8")
    _report(ours, theirs)


def _cases(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The workloads that the options ask for; a trace's with both schedulers."""
    if not given.trace:
        make = live_case if given.live else make_case
        return [make(given.seed + k) for k in range(given.cases)]
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
    theirs = theirs_of_cases(cases, given.vllm_python, given.model)
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


def _report(ours: Sequence[Sequence[Any]], theirs: Sequence[Sequence[Any]]) -> None:
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
