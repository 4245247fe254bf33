"""vLLM's own schedulers on one workload, without an engine: runs in vLLM's Python.

`Driven` stands in for the model: it gives tokens, and computes nothing. What a workload has besides
`workloads.Case`: what else `messages.SchedulerSettings` has, `drafts` with "accepts" and "offers"
[of each request: drafts accepted in its passes with drafts, and drafts proposed for each next
pass], `policy` (one of ours, inside), `changes` {pass: {live setting: value}}. With `groups` each
pass has the blocks that each group holds.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from toolkit.backends.vllm.conformance.workloads import (
    Case,
    CaseArrivals,
    Pass,
    outputs_of,
    tokens_of,
)
from toolkit.backends.vllm.driven import DrivenScheduler
from toolkit.backends.vllm.messages import SchedulerSettings

MOST_PASSES = 20_000


class Driven(DrivenScheduler):
    """One of vLLM's schedulers on one workload. `model` is a folder with a config.json."""

    def __init__(self, model: str, case: Case) -> None:
        self.case = case
        super().__init__(model, msgspec.convert(case, SchedulerSettings))
        self.prompts = tokens_of(case)
        self.passes: list[Pass] = []
        self._verified: dict[int, int] = {}  # passes with drafts of each request so far
        self._asked: dict[int, int] = {}  # times that drafts were asked for
        if "changes" in case:
            from toolkit.backends.vllm.knobs import LiveSettings

            self._live = LiveSettings(self.scheduler)

    def kind(self) -> Any:
        if "policy" not in self.case:
            return super().kind()
        from toolkit.backends.vllm.scheduler import LlmctlScheduler

        os.environ["LLMCTL_VLLM_POLICY"] = self.case["policy"]
        return LlmctlScheduler

    def run(self) -> list[Pass]:
        """The passes of the workload; the last one is {"stuck": ...} where it does not end."""
        arrivals = CaseArrivals(self.case)
        while len(self.passes) < MOST_PASSES:
            for number in arrivals.due(len(self.passes)):
                self.add(number)
            settings = self.case.get("changes", {}).get(str(len(self.passes)))
            if settings:
                self._live.apply(settings)
            ended: list[int] = []
            if self.schedule():
                if not self.settings.ahead or len(self.under_way) == 2:
                    ended = self.update()
            elif self.under_way:
                ended = self.update()
            elif not arrivals.skip(len(self.passes)) and not self.preempted:
                break
            for number in ended:
                arrivals.ended(number, len(self.passes))
        if self.scheduler.requests:
            self.passes.append({"stuck": sorted(map(int, self.scheduler.requests))})
        return self.passes

    def add(self, number: int) -> None:
        """A request arrives."""
        limit = self.case["requests"][number][3]
        self.enter(number, self.prompts[number], outputs_of(self.case, number), limit)

    def schedule(self) -> bool:
        """Plan a pass; False where there is nothing to compute."""
        planned = self.plan()
        if planned.rows or planned.preempted:
            one: Pass = {
                "rows": [list(row[: 4 if "drafts" in self.case else 3]) for row in planned.rows],
                "preempted": planned.preempted,
                "free": planned.free,
                "waiting": planned.waiting,
            }
            if "ids" in self.case:
                one["found"] = list(planned.found)
            if "policy" in self.case:
                one["blocks"] = self._blocks_of_prompts()
            if "groups" in self.case:
                one["held"] = self.held() if planned.rows else {}
            self.passes.append(one)
        return bool(planned.rows)

    def update(self) -> list[int]:
        """The oldest pass ends with its tokens; the requests that end."""
        accepted: dict[int, int] = {}
        offered: dict[int, int] = {}
        drafts = self.case.get("drafts") or {}
        for name, is_verified in self.under_way[0][1].items():
            number = int(name)
            if is_verified:
                accepted[number] = _next(drafts["accepts"][number], self._verified, number)
            if "offers" in drafts:
                offered[number] = _next(drafts["offers"][number], self._asked, number)
        return self.give(accepted, offered)

    def _blocks_of_prompts(self) -> list[int]:
        """The full blocks of prompts that the running requests hold: by vLLM's block manager; as
        our scheduler inside vLLM counts them with the requests; and those that it counts with none.
        Last, how many requests it has admitted that vLLM has still to place, its cache being full.
        """
        scheduler = self.scheduler
        held = set()
        counted = 0
        unplaced = 0
        size = self.case["block_tokens"]
        for job in scheduler.steps.scheduler.workers[0].running.jobs:
            request = self.requests[job.request_id]
            (blocks,) = scheduler.kv_cache_manager.get_block_ids(job.request_id)
            unplaced += not blocks
            held.update(blocks[: request.num_prompt_tokens // size])
            counted += (job.prompt_tokens - size // 2) // size
        return [len(held), counted, scheduler._counted.uncounted, unplaced]


def _next(plan: list[int], turns: dict[int, int], number: int) -> int:
    """The entry of a request's plan that comes next; the plan begins again at its end."""
    turn = turns.get(number, 0)
    turns[number] = turn + 1
    return plan[turn % len(plan)]
