"""The simulator's model of vLLM's scheduler against vLLM's own: who computes how many tokens in
which forward pass.

    python bench/vllm_passes.py --log LOG.jsonl --requests REQUESTS.jsonl
    python bench/vllm_passes.py --vllm-python VENV/bin/python --model FOLDER [--cases 400] [--seed 1000]

The first holds it to a log that a real vLLM wrote (`--scheduler-cls
toolkit.backends.vllm.iterations.logged_scheduler`), with the requests that it served, one JSON object
each: id, arrival_s on the log's clock, prompt_tokens, max_tokens.

The second makes workloads up, small caches and all flags drawn, and runs them through vLLM's
scheduler classes, the asynchronous one as well, with nothing behind them that computes
(`vllm_passes_child.py`): who arrives before which pass is given, and who ends before his limit.
FOLDER has a model's config.json; no weights are read.

A pass differs if its rows, their order, their computed and new tokens, who was preempted, the free
blocks or the number of those who wait do. A log is followed to its first difference, since all that
comes after one may follow from it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.sched.iterations import IterationLogHeader, LoggedPass, header_of, passes_of
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.paged import PagedRequest, PagedScheduler

HERE = Path(__file__).parent
Case = Mapping[str, Any]  # a workload and flags, as JSON


def passes_of_log(
    header: IterationLogHeader, requests: Sequence[Mapping[str, Any]], starts_s: Sequence[float]
) -> list[Any]:
    """The passes that our model makes of the requests, if the engine planned them at `starts_s`."""
    flags = VllmPolicy(
        max_num_seqs=header.max_num_seqs,
        max_num_batched_tokens=header.max_num_batched_tokens,
        chunked_prefill=header.enable_chunked_prefill,
        prefix_caching=header.prefix_caching,
    )
    scheduler = PagedScheduler(flags, header.blocks, header.block_tokens)
    arrived, found = 0, []
    for start_s in starts_s:
        while arrived < len(requests) and requests[arrived]["arrival_s"] <= start_s:
            one = requests[arrived]
            scheduler.add(PagedRequest(arrived, one["prompt_tokens"], one["max_tokens"]))
            arrived += 1
        found.append(_step(scheduler))
        scheduler.settle(scheduler.commit())
    return found


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
    """A workload and flags: requests are [arrives before which pass, prompt, output, limit]."""
    draw = random.Random(seed)
    block_tokens, blocks = draw.choice([4, 8, 16]), draw.choice([12, 20, 40, 100])
    longest = min(blocks * block_tokens, 1024)
    seqs = draw.choice([2, 4, 8, 16])
    at, requests = 0, []
    for _ in range(draw.randint(3, 40)):
        at += draw.choice([0, 0, 0, 1, 2, 5, 30])
        prompt = draw.randint(1, min(longest // 2, draw.choice([5, 20, 100])))
        limit = draw.randint(1, min(longest - prompt, draw.choice([3, 20, 60])))
        requests.append(
            [at, prompt, limit if draw.random() < 0.5 else draw.randint(1, limit), limit]
        )
    return {
        "block_tokens": block_tokens,
        "blocks": blocks,
        "max_model_len": longest,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": max(seqs, draw.choice([8, 16, 32, 64, 256])),
        "prefix_caching": draw.random() < 0.5,
        "watermark": draw.choice([0.0, 0.0, 0.1]),
        "ahead": draw.random() < 0.5,
        "requests": requests,
    }


def passes_of_case(case: Case) -> list[Any]:
    """The passes that our model makes of a made-up workload."""
    names = ("max_num_seqs", "max_num_batched_tokens", "prefix_caching", "watermark")
    flags = VllmPolicy(**{name: case[name] for name in names})
    scheduler = PagedScheduler(flags, case["blocks"], case["block_tokens"], ahead=case["ahead"])
    due = [at for at, *_ in case["requests"]]
    arrived = 0
    found: list[Any] = []
    under_way: list[Any] = []
    while True:
        while arrived < len(due) and due[arrived] <= len(found):
            _, prompt, output, limit = case["requests"][arrived]
            scheduler.add(PagedRequest(arrived, prompt, output, stops=output < limit))
            arrived += 1
        step = _step(scheduler)
        if step["rows"]:
            found.append(step)
            ended = scheduler.commit()
            scheduler.settle(under_way if case["ahead"] else ended)
            under_way = ended if case["ahead"] else []
            continue
        if step["preempted"]:
            found.append(step)
        if under_way:
            scheduler.settle(under_way)
            under_way = []
        elif arrived < len(due):
            due[arrived] = len(found)
        else:
            return found


def _step(scheduler: PagedScheduler) -> dict[str, Any]:
    plan = scheduler.schedule()
    over = sum(
        not row.left for row in plan.preempted
    )  # of whom vLLM does not know yet that they have ended
    return {
        "rows": [list(row) for row in scheduler.rows()],
        "preempted": [row.number for row in plan.preempted],
        "free": scheduler.pool.free,
        "waiting": len(scheduler.waiting) + over,
    }


def first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> int | None:
    """The first pass that differs; None: there is none."""
    for k, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return k
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def theirs_of_cases(cases: Sequence[Case], python: str, model: str) -> list[list[Any]]:
    """The passes that vLLM's own schedulers make of the workloads."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder, "cases.json"), Path(folder, "passes.json")
        given.write_text(json.dumps(cases), encoding="utf-8")
        child = [python, str(HERE / "vllm_passes_child.py"), str(given), str(found), model]
        subprocess.run(child, check=True, env=environment)
        return json.loads(found.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--log", type=Path)
    parser.add_argument("--requests", type=Path)
    parser.add_argument("--vllm-python")
    parser.add_argument("--model")
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1000)
    given = parser.parse_args()
    if given.log:
        header, *lines = given.log.read_bytes().splitlines(keepends=True)
        requests = [
            json.loads(line) for line in given.requests.read_text(encoding="utf-8").splitlines()
        ]
        passes = passes_of(lines)
        theirs = [logged(passes, requests)]
        ours = [passes_of_log(header_of(header), requests, [one.start_s for one in passes])]
    else:
        cases = [make_case(given.seed + k) for k in range(given.cases)]
        theirs, ours = (
            theirs_of_cases(cases, given.vllm_python, given.model),
            [passes_of_case(case) for case in cases],
        )
    differences = {
        k: found
        for k in range(len(ours))
        if (found := first_difference(ours[k], theirs[k])) is not None
    }
    for k, at in differences.items():
        print(
            f"workload {k}, pass {at}:\n  ours   {ours[k][at : at + 1]}\n  vLLM's {theirs[k][at : at + 1]}"
        )
    preempted = sum(len(one["preempted"]) for passes in theirs for one in passes)
    chunks = sum(
        len({row[2] > 1 for row in one["rows"]}) > 1 for passes in theirs for one in passes
    )
    counted = f"{sum(map(len, theirs)):,} passes, {preempted:,} preempted, {chunks:,} passes of chunks beside decodes"
    print(f"{len(differences)} of {len(ours)} workloads differ; {counted}")


if __name__ == "__main__":
    main()
