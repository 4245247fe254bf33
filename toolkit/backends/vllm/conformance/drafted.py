"""Workloads with speculative decoding."""

from __future__ import annotations

import random
from functools import partial

from toolkit.backends.vllm.conformance.kinds import ModelKind
from toolkit.backends.vllm.conformance.kinds.full import differs
from toolkit.backends.vllm.conformance.workloads import Case, make_case
from toolkit.sim.drafts import DrawnDrafts


def kind_of(method: str, order: int) -> ModelKind:
    """The kind of models with drafts by a method of vLLM."""
    made = partial(make, method)
    name = f"drafts by {method}"
    return ModelKind(name, ("drafts",), made, differs, order=order)


def make(method: str, seed: int, ahead: bool) -> Case:
    """A made-up workload with 1 to 4 drafts of a row in a pass, and as many accepted, and with
    n-grams proposed, as is drawn. A pass has room for the drafts of all rows.
    """
    case = make_case(seed) | {"ahead": ahead}
    draw = random.Random(f"{seed} drafts")
    tokens = draw.choice([1, 2, 3, 4])
    rate = draw.choice([0.0, 0.3, 0.6, 0.9, 1.0])
    rates = [rate**k for k in range(1, tokens + 1)]
    proposed = draw.choice([1.0, 0.5]) if method == "ngram" and not ahead else 1.0
    drafts = DrawnDrafts(method, tuple(rates), proposed, seed)
    thresholds = [0, 0, 7, 40] if case["chunked_prefill"] else [0]
    threshold = draw.choice(thresholds)
    turns = range(max(one[3] for one in case["requests"]) + 1)
    numbers = range(len(case["requests"]))
    return case | {
        "max_num_batched_tokens": max(
            case["max_num_batched_tokens"], case["max_num_seqs"] * (1 + tokens)
        ),
        "blocks": case["blocks"] + draw.choice([0, 2, 10]),
        "flags": {"long_prefill_token_threshold": threshold} if threshold else {},
        "drafts": {
            "method": method,
            "tokens": tokens,
            "rates": rates,
            "proposed": proposed,
            "seed": seed,
            "accepts": [[drafts.accepted(number, turn) for turn in turns] for number in numbers],
            "offers": [[drafts.offered(number, turn) for turn in turns] for number in numbers],
        },
    }
