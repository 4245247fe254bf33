"""The side of `vllm_passes` that runs in vLLM's Python: its schedulers in its loop.

    VLLM-PYTHON -m benchmarks.engines.vllm_passes_child CASES.json TIMES.json MODEL-FOLDER

Started by `vllm_passes`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.common.command import make_parser
from toolkit.backends.vllm.conformance.cases import Case
from toolkit.backends.vllm.conformance.driven import DrivenScheduler, main

if TYPE_CHECKING:
    from toolkit.laws.features import StepShape


class TimedScheduler(DrivenScheduler):
    """One of vLLM's schedulers on one workload of requests that come at times."""

    def times(self) -> list[list[float]]:
        """The times of all tokens of each request, as vLLM's loop hands them out: statement by
        statement `EngineCore.step_with_batch_queue`, with a clock that launches, plans without rows
        and waits for the GPU move on, by the law and the arrivals in the case.
        """
        from toolkit.laws.features import StepShape
        from toolkit.laws.passes import GraphSettings, PassLaw

        case = self.case
        terms = dict(case["law"])
        mode, sizes, apart = terms.pop("graphs")
        spread = tuple(terms.pop("spread"))
        law = PassLaw(terms, graphs=GraphSettings(mode, tuple(sizes), apart), spread=spread)
        arrivals: list[float] = case["arrival_s"]
        tokens: list[list[float]] = [[] for _ in arrivals]
        inputs = [prompt for _, prompt, *_ in case["requests"]]  # to compute before the next token
        generated = [0] * len(arrivals)  # also by passes that are under way
        depth = 2 if case["ahead"] else 1
        queue: deque[float | None] = deque()  # when the GPU has computed each; None: no rows
        samples: deque[dict[str, int]] = deque()  # of the passes that are under way
        now_s = gpu_s = launched_s = -math.inf
        arrived = launches = 0
        while True:
            if not queue and not self.scheduler.has_requests():
                if arrived == len(arrivals):
                    return tokens
                now_s = max(now_s, arrivals[arrived])
            while arrived < len(arrivals) and arrivals[arrived] <= now_s:
                self.add(arrived)
                arrived += 1
            if self.scheduler.has_requests():
                executed = self.schedule()
                for number in self.preempted:
                    inputs[number] = case["requests"][number][1] + generated[number]
                if executed:
                    shape = _shape(self.passes[-1]["rows"], inputs)
                    samples.append(self._sampled())
                    for name, which in samples[-1].items():
                        generated[int(name)] = which
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
                if len(queue) < depth and (executed or self.scheduler.has_requests()):
                    continue
            ready_s = queue.pop()
            if ready_s is None:
                continue
            now_s = max(now_s, ready_s)
            for name, which in samples.popleft().items():
                if which <= case["requests"][int(name)][2]:
                    tokens[int(name)].append(now_s)
            self.update()

    def _sampled(self) -> dict[str, int]:
        """The rows of the last scheduled pass that sample, and the number of the token, from 1."""
        found = {}
        for name in self.under_way[-1][1]:
            request = self.requests[name]
            found[name] = request.num_computed_tokens - request.num_prompt_tokens + 1
        return found


def _shape(rows: Sequence[Sequence[int]], inputs: Sequence[int]) -> StepShape:
    """What a pass computes, of rows of request, tokens computed before and new tokens."""
    from toolkit.laws.features import StepShape, chunk_attended

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


def times_of(model: str, case: Case) -> list[list[float]]:
    """The times of all tokens of each request."""
    return TimedScheduler(model, case).times()


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("files", nargs=3)
    parser.parse_args()
    main(times_of)
