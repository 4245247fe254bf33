"""Made-up workloads of models with several cache groups.

The pools are small: what vLLM asks for when it starts, and few blocks more. Windows are no
multiples of a block, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from toolkit.backends.vllm.conformance.kinds import ModelKind
from toolkit.backends.vllm.conformance.kinds.full import cache_groups, differs
from toolkit.backends.vllm.conformance.workloads import Case, make_case
from toolkit.catalogue.caches import longest_blocks

Group = dict[str, Any]


def like_gpt_oss(draw: random.Random, case: dict[str, Any]) -> list[Group]:
    """One group of full attention and one of windows."""
    block = case["block_tokens"]
    return [_full(block), _window(draw, block)]


def like_gemma(draw: random.Random, case: dict[str, Any]) -> list[Group]:
    """One group of full attention, and several with the same window."""
    block = case["block_tokens"]
    window = _window(draw, block)
    groups = [_full(block), *(dict(window) for _ in range(draw.choice([2, 5])))]
    if draw.random() < 0.5:
        groups.append(groups.pop(0))
    return groups


def like_gpt_oss_whole(_draw: random.Random, case: dict[str, Any]) -> list[Group]:
    """gpt-oss with its own window of 128 tokens, in blocks of 16."""
    case["max_model_len"] = 1024
    if not case["chunked_prefill"]:
        case["max_num_batched_tokens"] = 1024
    return [_full(16), {"kind": "window", "block": 16, "window": 128}]


def windows_alone(draw: random.Random, case: dict[str, Any]) -> list[Group]:
    """Windows in every layer."""
    return [_window(draw, case["block_tokens"])]


def two_sizes(draw: random.Random, case: dict[str, Any]) -> list[Group]:
    """Full attention and windows with blocks of two sizes."""
    block = case["block_tokens"]
    larger = block * draw.choice([2, 4])
    case["retention"] = draw.choice([0, 0, None, 2 * larger])
    if draw.random() < 0.5:
        return [_full(larger), _window(draw, block)]
    return [_full(block), _window(draw, larger)]


def states(draw: random.Random, case: dict[str, Any]) -> list[Group]:
    """Full attention and one or three groups of states, with and without checkpoints."""
    block = case["block_tokens"]
    mode = "none"
    if case["prefix_caching"]:
        mode = "align"
        case["chunked_prefill"] = True
    state: Group = {"kind": "state", "block": case["max_model_len"], "mode": mode}
    if mode == "align":
        state["block"] = block
        if draw.random() < 0.5:
            state["checkpoint"] = 1
    groups = [_full(block), *(dict(state) for _ in range(draw.choice([1, 3])))]
    if draw.random() < 0.3:
        groups.append(groups.pop(0))
    return groups


Maker = Callable[[random.Random, dict[str, Any]], list[Group]]


def make_grouped(maker: Maker, seed: int, *, ahead: bool) -> dict[str, Any]:
    """A made-up workload of a model with the groups of `maker`."""
    draw = random.Random(f"{seed} {maker.__name__}")
    case = make_case(seed) | {"ahead": ahead}
    case["retention"] = draw.choice([0, 0, 0, None])
    case["groups"] = maker(draw, case)
    passes = 2 if ahead else 1
    needs = longest_blocks(
        cache_groups(case), case["max_model_len"], passes * case["max_num_batched_tokens"]
    )
    case["blocks"] = needs + draw.choice([0, 1, 3, 10, 40])
    return case


def kind_of(name: str, makers: Sequence[Maker], classes: tuple[str, ...], order: int) -> ModelKind:
    """The kind of models with the groups of each maker in turn."""

    def make(seed: int, ahead: bool) -> Case:
        return make_grouped(makers[seed % len(makers)], seed, ahead=ahead)

    return ModelKind(name, classes, make, differs, order=order)


def _full(block: int) -> Group:
    return {"kind": "full", "block": block}


def _window(draw: random.Random, block: int) -> Group:
    sizes = [block // 2 + 1, block, block + 1, 2 * block, 3 * block + 1, 5 * block]
    return {"kind": "window", "block": block, "window": draw.choice(sizes)}
