"""A policy of llmctl inside vLLM's scheduler: every request ends, and until vLLM preempts, our
scheduler counts the blocks of prompts that vLLM's block manager holds, in every pass. Where it has
admitted a request that vLLM has still to place, because the cache is full, it counts no fewer.
"""

from __future__ import annotations

import random

from toolkit.backends.vllm.conformance.kinds import ModelKind
from toolkit.backends.vllm.conformance.workloads import Case, Pass

POLICY = "past-future initial_count=50 initial_length=30"


def make(seed: int, ahead: bool) -> Case:
    """Prompts in a tree, whole in a pass; those that came first end while others go on."""
    draw = random.Random(f"{seed} inside")
    size = draw.choice([4, 8, 16])
    length = draw.choice([5, 9])  # blocks of a prompt, besides half of one
    count = draw.randint(20, 60)
    branch = draw.choice([2, 3])
    gap = draw.choice([1, 3, 5])
    requests = []
    for number in range(count):
        output = draw.randint(1, 34)
        requests.append([gap * number, size * length + size // 2, output, 34])
    ids = [
        [100 * place + number % branch ** (place // 2) for place in range(length)]
        + [10_000 + number]
        for number in range(count)
    ]
    return {
        "block_tokens": size,
        "blocks": draw.choice([100, 200]),
        "max_model_len": size * length + size // 2 + 40,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 4096,
        "prefix_caching": True,
        "watermark": 0.0,
        "shared_tokens": size,
        "ids": ids,
        "requests": requests,
        "policy": POLICY,
        "ahead": ahead,
    }


def differs(case: Case, theirs: list[Pass]) -> int | None:
    """The first pass in which blocks are counted otherwise, or the last one where a request's
    tokens are not all computed.
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


KIND = ModelKind("our policies inside", (), make, differs, needs="inside", cited=False, order=200)
