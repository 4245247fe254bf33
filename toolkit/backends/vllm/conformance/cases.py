"""Workloads: requests with flags, and the tokens that their prompts share.

A workload (`Case`) is JSON:

- `requests`: [pass before which it arrives, prompt tokens, output tokens, limit] of each. In a
  closed loop (`closed`), a turn arrives this number of passes after the turn before has ended.
- `ids` and `previous`: what prompts share.
- `kind` (`kinds.KINDS`), `seed` that it was drawn with, `ahead`: with vLLM's `AsyncScheduler`.
- settings of the scheduler, named as vLLM's flags where it has one, further `flags` of vLLM's
  `EngineArgs`, and its usable `blocks` (vLLM keeps one more for itself).
- `groups`: the caches of a model, each with its "kind" (full, window or state), the tokens of its
  "block" and its "window", of states vLLM's "mode" and the blocks for states inside the last chunk
  of a prompt ("checkpoint"). Without it there is one full cache with blocks of `block_tokens`.
  `retention`: vLLM's `prefix_cache_retention_interval`.
- `drafts`: vLLM's "method", "tokens" of a row in a pass, "rates" and "proposed" of
  `toolkit.sim.drafts.DrawnDrafts`; drawn from these, the drafts that are accepted ("accepts") and
  proposed ("offers") in each pass of each request, lists that begin again at their ends.
- `changes`: {pass: {live setting: value}}; `policy`: one of llmctl's, inside vLLM.

vLLM's Python and the simulator's read it, so this module imports nothing of either.
`benchmarks.engines.workloads` makes the workloads that ship.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

Case = Mapping[str, Any]  # a workload and flags, as JSON
Pass = dict[str, Any]  # its rows, preempted requests, free blocks, waiting requests, hits
SHIPPED_CASES = Path(__file__).with_name("cases.json.gz")
OUTPUTS = 1_000_000_000  # from here on tokens are outputs; each request has 10,000 of its own
OWN = 100_000_000  # from here on tokens belong to one prompt; each has 10,000 of its own


def shipped_cases() -> list[Case]:
    """Return the workloads that ship, by kind, scheduler and seed."""
    with gzip.open(SHIPPED_CASES, "rt", encoding="utf-8") as file:
        cases: list[Case] = json.load(file)
    return cases


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
