"""Made-up workloads of each kind for vLLM's schedulers: those that ship, and any number more.

    python -m benchmarks.engines.workloads --write
    python -m benchmarks.engines.workloads --vllm-python PYTHON [--kind KIND ...] [--count 400]
        [--seed 1000]

--write makes `toolkit/backends/vllm/conformance/cases.json.gz`, which `llmctl vllm-check` compares:
`SHIPPED` workloads of each kind with each of vLLM's two schedulers. It takes seconds. With
--vllm-python a vLLM plans --count workloads of each kind, beside the simulator's model. It takes
minutes, and needs an environment with vLLM.

The pools of blocks are small, so that requests are preempted, and windows are no multiples of a
block, too.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from benchmarks.common.command import make_parser
from toolkit.backends.vllm.conformance.cases import SHIPPED_CASES, Case
from toolkit.backends.vllm.conformance.modelled import cache_groups
from toolkit.backends.vllm.conformance.run import compare
from toolkit.catalogue.caches import longest_blocks

SEED = 1000
SHIPPED = 40  # of each kind with each scheduler
POLICY = "past-future initial_count=50 initial_length=30"
CHANGED_UNTIL = 600  # passes
Group = dict[str, Any]
GroupMaker = Callable[[random.Random, dict[str, Any]], list[Group]]
Maker = Callable[[int, bool], dict[str, Any]]


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
    made = CasePrompts(draw, block_tokens, longest, kind)
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


class CasePrompts:
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


def with_interval(seed: int, ahead: bool) -> dict[str, Any]:
    """Make a workload with `prefill_schedule_interval`, which engines without data parallelism keep
    from 0.33 on.
    """
    interval = random.Random(f"{seed} interval").choice([2, 3, 4, 8])
    flags = {"prefill_schedule_interval": interval}
    return make_case(seed) | {"ahead": ahead, "flags": flags}


def with_drafts(method: str, seed: int, ahead: bool) -> dict[str, Any]:
    """Make a workload with 1 to 4 drafts of a row in a pass, and as many accepted, and with n-grams
    proposed, as is drawn. A pass has room for the drafts of all rows.
    """
    case = make_case(seed) | {"ahead": ahead}
    draw = random.Random(f"{seed} drafts")
    tokens = draw.choice([1, 2, 3, 4])
    rate = draw.choice([0.0, 0.3, 0.6, 0.9, 1.0])
    rates = [rate**k for k in range(1, tokens + 1)]
    proposed = draw.choice([1.0, 0.5]) if method == "ngram" and not ahead else 1.0
    thresholds = [0, 0, 7, 40] if case["chunked_prefill"] else [0]
    threshold = draw.choice(thresholds)
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
        },
    }


def with_live_settings(seed: int, ahead: bool) -> dict[str, Any]:
    """Make a workload with new live settings before some passes: {pass: {name: value}}."""
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


def with_our_policy(seed: int, ahead: bool) -> dict[str, Any]:
    """Make a workload for a policy of ours inside vLLM. Its prompts are a tree, whole in a pass;
    those that came first end while others go on.
    """
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


def with_groups(makers: Sequence[GroupMaker], seed: int, ahead: bool) -> dict[str, Any]:
    """Make a workload of a model with several groups of caches, by each maker in turn. Its pool has
    what vLLM asks for when it starts, and few blocks more.
    """
    maker = makers[seed % len(makers)]
    draw = random.Random(f"{seed} {maker.__name__}")
    case = make_case(seed) | {"ahead": ahead}
    case["retention"] = draw.choice([0, 0, 0, None])
    case["groups"] = maker(draw, case)
    case["blocks"] = _blocks(draw, case)
    return case


def with_drafts_and_groups(seed: int, ahead: bool) -> dict[str, Any]:
    """Make a workload with drafts by n-grams of a model with windows: beside full attention, in
    blocks of two sizes, or in every layer.
    """
    grouped = with_groups([like_gpt_oss, two_sizes, windows_alone], seed, ahead)
    case = grouped | {"drafts": with_drafts("ngram", seed, ahead)["drafts"]}
    rows = case["max_num_seqs"] * (1 + case["drafts"]["tokens"])
    case["max_num_batched_tokens"] = max(case["max_num_batched_tokens"], rows)
    return case | {"blocks": _blocks(random.Random(f"{seed} both"), case)}


def with_threshold_and_groups(seed: int, ahead: bool) -> dict[str, Any]:
    """Make a workload with a threshold for long prefills of a model with windows or states."""
    case = with_groups([like_gemma, two_sizes, states], seed, ahead)
    threshold = random.Random(f"{seed} threshold").choice([3, 7, 20, 40])
    if case["chunked_prefill"]:
        most = min(threshold, case["max_model_len"])
        case["flags"] = {"long_prefill_token_threshold": most}
    return case


def with_live_settings_of(maker: Maker) -> Maker:
    """Return a maker of workloads like those of `maker`, with live settings that vLLM allows."""

    def made(seed: int, ahead: bool) -> dict[str, Any]:
        case = maker(seed, ahead)
        tokens = 1 + case.get("drafts", {}).get("tokens", 0)  # of a row
        most = case["max_num_batched_tokens"]
        aligned = any(group.get("mode") == "align" for group in case.get("groups", ()))
        changes: dict[str, dict[str, Any]] = {}
        for at, drawn in with_live_settings(seed, ahead)["changes"].items():
            new = dict(drawn)
            if "max_num_seqs" in new:
                new["max_num_seqs"] = min(new["max_num_seqs"], case["max_num_seqs"])
            if "max_num_batched_tokens" in new:
                least = min(case["max_num_seqs"] * tokens, most)
                new["max_num_batched_tokens"] = max(min(new["max_num_batched_tokens"], most), least)
            if aligned or not case["chunked_prefill"]:  # what llmctl cannot change there
                new.pop("max_num_batched_tokens", None)
                new.pop("long_prefill_token_threshold", None)
            elif new.get("long_prefill_token_threshold", 0) < tokens:
                new.pop("long_prefill_token_threshold", None)
            changes[at] = new
        return case | {"changes": changes}

    return made


def _blocks(draw: random.Random, case: dict[str, Any]) -> int:
    """Draw how many blocks a cache has: few more than vLLM asks for when it starts."""
    passes = 2 if case["ahead"] else 1
    in_flight = passes * case["max_num_batched_tokens"]
    needs = longest_blocks(cache_groups(case), case["max_model_len"], in_flight)
    return needs + draw.choice([0, 1, 3, 10, 40])


def _full(block: int) -> Group:
    return {"kind": "full", "block": block}


def _window(draw: random.Random, block: int) -> Group:
    sizes = [block // 2 + 1, block, block + 1, 2 * block, 3 * block + 1, 5 * block]
    return {"kind": "window", "block": block, "window": draw.choice(sizes)}


def make(kind: str, seed: int, ahead: bool) -> Case:
    """Make the workload of a kind and a seed; `ahead`: for vLLM's `AsyncScheduler`."""
    made = MAKERS[kind](seed, ahead)
    return {"kind": kind, "seed": seed, **made, "ahead": ahead}


MAKERS: dict[str, Maker] = {
    "full attention": lambda seed, ahead: make_case(seed) | {"ahead": ahead},
    "prefill interval": with_interval,
    "drafts by ngram": partial(with_drafts, "ngram"),
    "drafts by eagle": partial(with_drafts, "eagle"),
    "live settings": with_live_settings,
    "windows": partial(with_groups, [like_gpt_oss, like_gemma, like_gpt_oss_whole]),
    "window only": partial(with_groups, [windows_alone]),
    "block sizes": partial(with_groups, [two_sizes]),
    "states": partial(with_groups, [states]),
    "drafts and groups": with_drafts_and_groups,
    "thresholds and groups": with_threshold_and_groups,
    "live settings and groups": with_live_settings_of(
        partial(with_groups, [like_gpt_oss, two_sizes, states])
    ),
    "live settings and drafts": with_live_settings_of(partial(with_drafts, "ngram")),
    "live settings and eagle": with_live_settings_of(partial(with_drafts, "eagle")),
    "our policies inside": with_our_policy,
}


def cases_of(kinds: Iterable[str], count: int, seed: int = SEED) -> list[Case]:
    """Make `count` workloads of each kind with each scheduler, the first with this seed."""
    return [
        make(kind, number, ahead)
        for kind in kinds
        for number in range(seed, seed + count)
        for ahead in (False, True)
    ]


def write() -> None:
    """Write the workloads that ship."""
    text = json.dumps(cases_of(MAKERS, SHIPPED), separators=(",", ":"))
    SHIPPED_CASES.write_bytes(gzip.compress(text.encode(), mtime=0))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--vllm-python")
    parser.add_argument("--kind", choices=list(MAKERS), nargs="+", default=list(MAKERS))
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    if given.write:
        write()
    elif given.vllm_python:
        found = compare(given.vllm_python, cases_of(given.kind, given.count, given.seed))
        for row in found.rows:
            print(
                f"{row.kind}, {row.scheduler}: {row.differing} of {row.workloads} workloads differ "
                f"in {row.passes:,} passes {row.first}"
            )
        print(f"vLLM {found.vllm}: {found.passes:,} passes in {found.seconds:g} s")
    else:
        parser.error("give --write, or --vllm-python")


if __name__ == "__main__":
    main()
