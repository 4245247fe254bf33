"""Made-up workloads: requests with flags, and the tokens that their prompts share.

A workload (`Case`) is JSON. A request of it is [pass before which it arrives, prompt tokens, output
tokens, limit]; `ids` and `previous` say what prompts share. `groups` says the caches of a model:
[{"kind", "block", "window", ...}]; without it there is one full cache with blocks of
`block_tokens`. Both sides read it, so this module imports nothing of vLLM.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Any

Case = Mapping[str, Any]  # a workload and flags, as JSON
Pass = dict[str, Any]  # its rows, preempted requests, free blocks, waiting requests, hits
OUTPUTS = 1_000_000_000  # from here on tokens are outputs; each request has 10,000 of its own
OWN = 100_000_000  # from here on tokens belong to one prompt; each has 10,000 of its own


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


class CaseArrivals:
    """When the requests of a workload arrive, counted in passes. In a closed loop, a turn arrives
    a given number of passes after the turn before it has ended.
    """

    def __init__(self, case: Mapping[str, Any]) -> None:
        self._follows: dict[int, list[int]] = {}
        self._coming: list[tuple[int, int]] = []
        self._after = [at for at, *_ in case["requests"]]
        for number, at in enumerate(self._after):
            before = case["previous"][number] if case.get("closed") else -1
            if before >= 0:
                self._follows.setdefault(before, []).append(number)
            else:
                heappush(self._coming, (at, number))

    def due(self, passes: int) -> list[int]:
        """The requests that arrive before the next pass, when `passes` have been planned."""
        found = []
        while self._coming and self._coming[0][0] <= passes:
            found.append(heappop(self._coming)[1])
        return found

    def ended(self, number: int, passes: int) -> None:
        """A request has ended after `passes`: its next turn will arrive."""
        for later in self._follows.pop(number, ()):
            heappush(self._coming, (passes + self._after[later], later))

    def skip(self, passes: int) -> bool:
        """Let the next request arrive now, since nothing runs. False if none is left."""
        if not self._coming:
            return False
        at, number = heappop(self._coming)
        heappush(self._coming, (min(at, passes), number))
        return True


def tokens_of(case: Mapping[str, Any]) -> list[list[int]]:
    """The prompts of a workload as tokens. Turns of a session and shared blocks have tokens in
    common; all other tokens are unique.
    """
    size = case.get("shared_tokens", 1)
    blocks: dict[int, list[int]] = {}  # by id; the longest so far of a partial one
    prompts: list[list[int]] = []
    for number, (_, prompt, *_) in enumerate(case["requests"]):
        before = case["previous"][number] if "previous" in case else -1
        tokens: list[int] = []
        if before >= 0:
            tokens = [*prompts[before], *outputs_of(case, before)][:prompt]
        for at, one in enumerate(case["ids"][number] if "ids" in case else ()):
            start = at * size
            stop = min((at + 1) * size, prompt)
            known = blocks.get(one, [])
            for k in range(max(len(tokens), start), stop):
                there = known[k - start] if k - start < len(known) else one * size + k - start
                tokens.append(there)
            if stop - start > len(known):
                blocks[one] = tokens[start:stop]
        tokens += range(OWN + number * 10_000 + len(tokens), OWN + number * 10_000 + prompt)
        prompts.append(tokens)
    return prompts


def outputs_of(case: Mapping[str, Any], number: int) -> list[int]:
    """The tokens that a request generates, none of which any other has."""
    return [token_of(number, which) for which in range(1, case["requests"][number][2] + 1)]


def token_of(number: int, which: int) -> int:
    """The token number `which`, from 1, of a request's output."""
    return OUTPUTS + number * 10_000 + which
