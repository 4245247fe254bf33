"""The side of `vllm_passes` that runs in vLLM's Python: its schedulers, without an engine.

    VLLM-PYTHON -m benchmarks.engines.vllm_passes_child CASES.json PASSES.json MODEL-FOLDER

Started by `vllm_passes`. `toolkit.backends.vllm.driver_child` drives the schedulers; here they also
run on a clock, and beside our scheduler inside vLLM.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.command import read_words
from toolkit.backends.vllm.driver_child import ENVIRONMENT, DrivenScheduler, DrivenWorkload
from toolkit.backends.vllm.messages import SchedulerSettings
from toolkit.estimators.pipeline import GraphSettings, PipelineLaw
from toolkit.estimators.steps import StepShape, chunk_attended

os.environ |= ENVIRONMENT


class OursInside(DrivenScheduler):
    """Our scheduler inside vLLM."""

    def kind(self) -> Any:
        from toolkit.backends.vllm.scheduler import LlmctlScheduler

        return LlmctlScheduler


class PolicyWorkload(DrivenWorkload):
    """A workload under a policy of ours, which the case names."""

    def make(self, model: str, settings: SchedulerSettings) -> DrivenScheduler:
        os.environ["LLMCTL_VLLM_POLICY"] = self.case["policy"]
        return OursInside(model, settings)

    def plan(self) -> bool:
        count = len(self.passes)
        has_rows = super().plan()
        if len(self.passes) > count:
            self.passes[-1]["blocks"] = self._blocks_of_prompts()
        return has_rows

    def _blocks_of_prompts(self) -> list[int]:
        """The full blocks of prompts that the running requests hold: by vLLM's block manager; as
        our scheduler inside vLLM counts them with the requests; and those that it counts with none.
        """
        scheduler = self.driven.scheduler
        held = set()
        counted = 0
        size = self.case["block_tokens"]
        for job in scheduler.steps.scheduler.workers[0].running.jobs:
            request = self.driven.requests[job.request_id]
            (blocks,) = scheduler.kv_cache_manager.get_block_ids(job.request_id)
            held.update(blocks[: request.num_prompt_tokens // size])
            counted += (job.prompt_tokens - size // 2) // size
        return [len(held), counted, scheduler._counted.uncounted]


class TimedWorkload(DrivenWorkload):
    """A workload whose requests come at times, in vLLM's loop without its executor."""

    def times(self) -> list[list[float]]:
        """The times of all tokens of each request, as vLLM's loop hands them out: statement by
        statement `EngineCore.step_with_batch_queue`, with a clock that launches, plans without rows
        and waits for the GPU move on, by the law and the arrivals in the case.
        """
        case = self.case
        coefficients = dict(case["law"])
        mode, sizes, apart = coefficients.pop("graphs")
        coefficients["spread"] = tuple(coefficients["spread"])
        law = PipelineLaw(GraphSettings(mode, tuple(sizes), apart), **coefficients)
        arrivals: list[float] = case["arrival_s"]
        tokens: list[list[float]] = [[] for _ in arrivals]
        inputs = [prompt for _, prompt, *_ in case["requests"]]  # to compute before the next token
        generated = [0] * len(arrivals)  # also by passes that are under way
        given: deque[list[tuple[int, int]]] = deque()  # by each pass: a request's token, from 1
        depth = 2 if case["ahead"] else 1
        queue: deque[float | None] = deque()  # when the GPU has computed each; None: no rows
        now_s = gpu_s = launched_s = -math.inf
        arrived = launches = 0
        while True:
            if not queue and not self.driven.scheduler.has_requests():
                if arrived == len(arrivals):
                    return tokens
                now_s = max(now_s, arrivals[arrived])
            while arrived < len(arrivals) and arrivals[arrived] <= now_s:
                self.add(arrived)
                arrived += 1
            if self.driven.scheduler.has_requests():
                executed = self.plan()
                for number in self.driven.preempted:
                    inputs[number] = case["requests"][number][1] + generated[number]
                if executed:
                    rows = self.passes[-1]["rows"]
                    shape = _shape(rows, inputs)
                    given.append([])
                    for number, computed, new in rows:
                        which = computed + new - case["requests"][number][1] + 1
                        if computed + new >= inputs[number]:
                            generated[number] = which
                            given[-1].append((number, which))
                    launch_s = law.launch_s(shape)
                    if depth > 1:
                        launch_s = law.drawn_launch_s(shape, launches)
                    launches += not law.waits_for_launch(shape)
                    begins_s = max(launched_s, now_s) if apart else now_s
                    launched_s = begins_s + launch_s
                    starts_s = launched_s if law.waits_for_launch(shape) else begins_s
                    gpu_s = max(max(gpu_s, starts_s) + law.gpu_s(shape), launched_s)
                    if not apart:
                        now_s = launched_s
                    queue.appendleft(gpu_s)
                else:
                    # what a last plan costs an engine that is idle is left out
                    if any(one is not None for one in queue):
                        now_s += min(case["empty_s"], law.launch_s(StepShape(1, 1)))
                    queue.appendleft(None)
                if len(queue) < depth and (executed or self.driven.scheduler.has_requests()):
                    continue
            ready_s = queue.pop()
            if ready_s is None:
                continue
            now_s = max(now_s, ready_s)
            for number, which in given.popleft():
                if which <= case["requests"][number][2]:
                    tokens[number].append(now_s)
            self.update()


def _shape(rows: Sequence[Sequence[int]], inputs: Sequence[int]) -> StepShape:
    """What a pass computes, of rows of request, tokens computed before and new tokens."""
    chunks = [row for row in rows if row[1] < inputs[row[0]]]
    decodes = [row for row in rows if row[1] >= inputs[row[0]]]
    return StepShape(
        len(decodes),
        sum(row[1] for row in decodes),
        len(chunks),
        sum(row[2] for row in chunks),
        sum(chunk_attended(row[1], row[2]) for row in chunks),
        sum(row[1] for row in chunks),
    )


def main() -> None:
    cases, passes, model = read_words(__doc__, "CASES.json", "PASSES.json", "MODEL-FOLDER")
    found: list[Any] = []
    for case in json.loads(Path(cases).read_text(encoding="utf-8")):
        if "law" in case:
            found.append(TimedWorkload(model, case).times())
        else:
            kind = PolicyWorkload if "policy" in case else DrivenWorkload
            found.append(kind(model, case).run())
    Path(passes).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
