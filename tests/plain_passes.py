"""A paged engine on virtual time as vLLM's own loop runs it, one pass after the other: the plain
form of `toolkit.sim.flight`, without leaps and without formulas for them.

`serve` follows `EngineCore.step_with_batch_queue` (vLLM 0.32, v1/engine/core.py) statement by
statement, with a clock that launches, passes without rows and waits for the GPU move on. Only the
passes themselves come from the simulator's scheduler, which other tests compare with vLLM's.
"""

from collections import deque
from dataclasses import dataclass, field

from toolkit.laws.features import StepShape
from toolkit.laws.passes import PassLaw
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.flight import EMPTY_S
from toolkit.sim.kv_cache import PagedRow
from toolkit.sim.vllm import VllmScheduler


@dataclass
class Running:
    """A pass in the queue: when the GPU has computed it, and which requests get a token."""

    ready_s: float
    has_rows: bool = True
    gets: list[int] = field(default_factory=list)
    ended: bool = False  # whether requests end with it


def serve(
    rows: list[tuple[float, int, int, int]],
    flags: VllmPolicy,
    law: PassLaw,
    blocks: int,
    block_tokens: int,
    depth: int,
) -> list[list[float]]:
    """The times of all tokens of each request; rows are (arrival, prompt, output, how much more
    the limit allows), in order of arrival.
    """
    scheduler = VllmScheduler(flags, blocks, block_tokens, ahead=depth > 1)
    requests = [
        PagedRow(number, prompt, output, limit=output + more)
        for number, (_, prompt, output, more) in enumerate(rows)
    ]
    times: list[list[float]] = [[] for _ in rows]
    given = [0] * len(rows)  # tokens of each that are computed or under way
    queue: deque[Running] = deque()
    now_s = gpu_s = launched_s = float("-inf")
    arrived = launches = 0
    has_finished = False
    while True:
        if not (queue or scheduler.waiting or scheduler.running or has_finished):
            if arrived == len(rows):
                return times
            now_s = max(now_s, rows[arrived][0])
        while arrived < len(rows) and rows[arrived][0] <= now_s:  # drain the input queue
            scheduler.add(requests[arrived])
            arrived += 1
        if scheduler.waiting or scheduler.running or has_finished:
            has_finished = False
            plan = scheduler.schedule()
            executed = plan.rows > 0
            if executed:
                shape = plan.shape
                launch_s = law.drawn_launch_s(shape, launches) if depth > 1 else law.launch_s(shape)
                launches += not law.waits_for_launch(shape)
                begins_s = max(launched_s, now_s) if law.apart else now_s
                launched_s = begins_s + launch_s
                starts_s = launched_s if law.waits_for_launch(shape) else begins_s
                gpu_s = max(max(gpu_s, starts_s) + law.gpu_s(shape), launched_s)
                gets = []
                for number, computed, new in scheduler.rows():
                    _, prompt, output, _ = rows[number]
                    if computed + new == prompt + given[number] and given[number] < output:
                        given[number] += 1
                        gets.append(number)
                queue.appendleft(Running(gpu_s, gets=gets, ended=bool(scheduler.commit().ended)))
                if not law.apart:
                    now_s = launched_s
            else:
                now_s += min(EMPTY_S, law.launch_s(StepShape(1, 1))) if depth > 1 else 0.0
                queue.appendleft(Running(now_s, has_rows=False))
            if len(queue) < depth and (executed or scheduler.waiting or scheduler.running):
                continue
        one = queue.pop()
        now_s = max(now_s, one.ready_s)
        for number in one.gets:
            times[number].append(now_s)
        scheduler.settle(idle=not any(other.has_rows for other in queue))
        # vLLM plans once more for requests that have finished; what that costs an engine that is
        # idle is left out
        has_finished = one.ended and any(one.has_rows for one in queue)
