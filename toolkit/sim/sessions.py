"""Sessions in a closed loop: a turn arrives when the turn before has ended, its client has seen the
last token, and has thought about it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from toolkit.sched.types import Batch, BatchResult, Request, RoundResult
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


class ClosedLoop:
    """All requests of a simulation under a policy of ours; see `toolkit.sim.loop.Turns`. It writes
    when they arrived into the ledger.

    A row of a static batch may end before its batch. Its next turn arrives at the end of the batch
    at the earliest, since no decision is made before.
    """

    def __init__(
        self, requests: Sequence[Request], sessions: Sessions, ledger: Ledger, front: FrontDelay
    ) -> None:
        self._requests, self._ledger, self._front_s = requests, ledger, front.last_s
        self._number = {request.request_id: k for k, request in enumerate(requests)}
        self._following = following(sessions, range(len(requests)))
        previous = sessions.previous.tolist()
        self._coming = [
            (request.arrival_s, k) for k, request in enumerate(requests) if previous[k] < 0
        ]
        heapify(self._coming)
        self._batches: dict[int, Batch] = {}  # by worker
        self.total = self.left = len(requests)

    @property
    def next_s(self) -> float:
        return self._coming[0][0] if self._coming else math.inf

    def arrive(self) -> Request:
        arrival_s, number = heappop(self._coming)
        self.left -= 1
        return replace(self._requests[number], arrival_s=arrival_s)

    def started(self, batch: Batch) -> None:
        self._batches[batch.worker] = batch

    def completed(self, result: BatchResult | RoundResult, now_s: float) -> None:
        if isinstance(result, RoundResult):
            ended: Sequence[str] = result.ended
        else:
            jobs = self._batches[result.worker].jobs
            ended = [
                job.request_id for job, over in zip(jobs, result.finished, strict=True) if over
            ]
        for request_id in ended:
            number = self._number[request_id]
            seen_s = max(self._ledger.last_token_s[number], self._ledger.first_token_s[number])
            self._follow(number, seen_s + self._front_s, now_s)

    def refused(self, request: Request, now_s: float) -> None:
        self._follow(self._number[request.request_id], now_s, now_s)

    def _follow(self, number: int, end_s: float, now_s: float) -> None:
        for later, think_s in self._following.get(number, ()):
            arrival_s = max(end_s + think_s, now_s)
            self._ledger.arrival_s[later] = arrival_s
            heappush(self._coming, (arrival_s, later))
