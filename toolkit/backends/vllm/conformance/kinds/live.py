"""Full attention, and all live settings drawn anew every few passes, by the code that changes them
in a running server (`toolkit.backends.vllm.knobs`).
"""

from __future__ import annotations

import random
from typing import Any

from toolkit.backends.vllm.conformance.kinds import ModelKind
from toolkit.backends.vllm.conformance.kinds.full import differs
from toolkit.backends.vllm.conformance.workloads import Case, make_case

CHANGED_UNTIL = 600  # passes


def make(seed: int, ahead: bool) -> Case:
    """A made-up workload with new settings before some passes: {pass: {name: value}}."""
    draw = random.Random(f"{seed} live")
    case = make_case(seed)
    rows = case["max_num_seqs"]
    tokens = case["max_num_batched_tokens"]
    chunked = case["chunked_prefill"]
    changes: dict[str, dict[str, Any]] = {}
    for at in range(0, CHANGED_UNTIL, draw.choice([2, 5, 12, 30])):
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
    return case | {"ahead": ahead, "changes": changes}


KIND = ModelKind("live settings", (), make, differs, since="0.31", cited=False, order=20)
