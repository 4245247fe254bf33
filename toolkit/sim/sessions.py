"""Sessions in a closed loop: a turn arrives when the turn before has ended, its client has seen the
last token, and has thought about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush

from toolkit.sched.protocols import Policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Batch, BatchResult, Refusal, Request, RoundResult, Worker
from toolkit.sim.ledger import Ledger
from toolkit.sim.worker import FrontDelay
from toolkit.traces.types import Sessions


def following(sessions: Sessions, numbers: Sequence[int]) -> dict[int, list[tuple[int, float]]]:
    """By request: those of `numbers` that come after it, each with its think time in seconds."""
    found: dict[int, list[tuple[int, float]]] = {}
    previous, think_s = sessions.previous.tolist(), sessions.think_s.tolist()
    for number in numbers:
        if previous[number] >= 0:
            found.setdefault(previous[number], []).append((number, think_s[number]))
    return found


class ClosedLoop(Scheduler):
    """A scheduler to which later turns of sessions are submitted as they come, beside the first
    turns, which `toolkit.sim.loop` submits. It writes into the ledger when they arrived.

    A row of a static batch may end before its batch. Its next turn arrives at the end of the batch
    at the earliest, since no decision is made before.

    Args:
        requests, sessions: all turns.
        ledger: of the workers.
        front: what clients wait beyond the workers.
    """

    def __init__(
        self,
        policy: Policy,
        workers: Sequence[Worker],
        requests: Sequence[Request],
        sessions: Sessions,
        ledger: Ledger,
        front: FrontDelay,
        *,
        seed: int,
        finished: Sequence[int],
    ) -> None:
        super().__init__(policy, workers, seed=seed, finished=finished)
        self._requests, self._ledger, self._front_s = requests, ledger, front.last_s
        self._number = {request.request_id: k for k, request in enumerate(requests)}
        self._following = following(sessions, range(len(requests)))
        self._left = sum(map(len, self._following.values()))  # turns to arrive
        self._coming: list[tuple[float, int]] = []  # a heap of (arrival, number)
        self._batches: dict[int, Batch] = {}  # by worker
        self._refused: list[Refusal] = []

    @property
    def wake_at_s(self) -> float:
        own_s = super().wake_at_s
        return min(own_s, self._coming[0][0]) if self._coming else own_s

    @property
    def waiting_jobs(self) -> int:
        return super().waiting_jobs + self._left

    def submit(self, request: Request, now_s: float, number: int = -1) -> Refusal | None:
        refusal = super().submit(request, now_s, self._number[request.request_id])
        if refusal is not None:
            self._follow(request.request_id, now_s, now_s)
        return refusal

    def tick(self, now_s: float) -> list[Batch]:
        while self._coming and self._coming[0][0] <= now_s:
            arrival_s, number = heappop(self._coming)
            self._left -= 1
            refusal = self.submit(replace(self._requests[number], arrival_s=arrival_s), now_s)
            if refusal is not None:
                self._refused.append(refusal)
        batches = super().tick(now_s)
        for batch in batches:
            self._batches[batch.worker] = batch
        return batches

    def complete(self, result: BatchResult | RoundResult, now_s: float) -> None:
        super().complete(result, now_s)
        if isinstance(result, RoundResult):
            ended: Sequence[str] = result.ended
        else:
            jobs = self._batches[result.worker].jobs
            ended = [
                job.request_id for job, over in zip(jobs, result.finished, strict=True) if over
            ]
        for request_id in ended:
            outcome = self._ledger.outcomes[self._number[request_id]]
            last_s = max(outcome.last_token_s, outcome.first_token_s)
            self._follow(request_id, last_s + self._front_s, now_s)

    def take_refusals(self) -> list[Refusal]:
        refused, self._refused = self._refused, []
        return [*refused, *super().take_refusals()]

    def _follow(self, request_id: str, end_s: float, now_s: float) -> None:
        """The turns after one that its client saw end at `end_s` will come."""
        for later, think_s in self._following.get(self._number[request_id], ()):
            arrival_s = max(end_s + think_s, now_s)
            self._ledger.arrival_s[later] = arrival_s
            heappush(self._coming, (arrival_s, later))
