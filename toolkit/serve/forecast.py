"""What a newcomer would wait for, by the fitted laws: the backlog that overload is refused by.

A slice-level worker serves all who wait in turn, so a newcomer's first token comes after one turn:
what the workers were given, and the batches that the pool makes. A continuous worker serves who is
there to the end, so he waits until enough of those before him have left. Lengths to come are the
mean of those that were. How much slower than its laws the machine is, the last batches say, at
once; what is beside them (the front's delay) is learnt from what earlier requests were told and
got, which is known only when they got it. It only reads the scheduler.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np

from toolkit.sched.queues import requests_per_s
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Batch, Worker

MARGIN = 0.9  # of a target
MEMORY = 0.98  # how much the past weighs against one more request in a mean
LOOKS_BACK = 256  # requests
UNLUCKY = 0.97  # of which quantile the forecast is
MOST = 0.5  # of a limit: what is learnt stays within it
TELLING = 0.125  # of a limit: who was told less says nothing of those for whom it matters
# of batches: what weighs as much as the laws do at first, and as e times what ran so long before
PACE_S = 4.0


class PredictedLatency(NamedTuple):
    """Seconds from arrival to the first token, and to the last, for a request of mean lengths; how
    many for others.
    """

    ttft_s: float
    e2e_s: float
    others_s: float  # of `e2e_s`: what it would not take if nobody else were there


NOTHING = PredictedLatency(0.0, 0.0, 0.0)


class LatencyLimits(NamedTuple):
    """The latency targets that a server refuses by; infinity: none."""

    ttft_s: float = math.inf
    e2e_s: float = math.inf

    @classmethod
    def of(cls, sla: Mapping[str, float]) -> LatencyLimits:
        """The strictest of a recipe's targets."""

        def least(metric: str) -> float:
            return min(
                (limit for key, limit in sla.items() if key.startswith(f"{metric}_")),
                default=math.inf,
            )

        return cls(least("ttft"), least("e2e"))

    def excess_s(self, told: PredictedLatency) -> float:
        """How long until a newcomer would keep them, if nobody else came; 0: he would now, or
        nobody is in his way.
        """
        late_s = max(told.ttft_s - MARGIN * self.ttft_s, told.e2e_s - MARGIN * self.e2e_s)
        return max(min(late_s, told.others_s), 0.0)


UNLIMITED = LatencyLimits()


@dataclass(slots=True)
class Mean:
    """An average that forgets. Before anything came it is `value`."""

    value: float
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.weight = MEMORY * self.weight + 1.0
        self.value += (value - self.value) / self.weight


class Pace:
    """How long batches take for each second that the laws say."""

    def __init__(self) -> None:
        self._took_s = self._expected_s = PACE_S
        self._took_in_all_s = self._expected_in_all_s = 0.0

    @property
    def value(self) -> float:
        return self._took_s / self._expected_s

    def ran(self, took_s: float, expected_s: float) -> None:
        """What all batches so far took, and what the laws say."""
        took_s, self._took_in_all_s = took_s - self._took_in_all_s, took_s
        expected_s, self._expected_in_all_s = expected_s - self._expected_in_all_s, expected_s
        keep = math.exp(-expected_s / PACE_S)
        self._took_s = keep * self._took_s + took_s
        self._expected_s = keep * self._expected_s + expected_s


class Delay:
    """By how many seconds the unlucky among the last requests waited longer than they had been
    told.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._late_s: deque[float] = deque(maxlen=LOOKS_BACK)
        self._added = 0
        self.value_s = 0.0

    def add(self, told_s: float, came_s: float) -> None:
        if told_s < TELLING * self._limit_s:
            return
        self._late_s.append(came_s - told_s)
        self._added += 1
        if self._added % 8 == 0:
            most_s = MOST * self._limit_s
            self.value_s = min(max(float(np.quantile(self._late_s, UNLUCKY)), -most_s), most_s)


Telling = Callable[
    [Sequence[Worker], float, int], PredictedLatency
]  # by workers of one kind, for so many who wait


class Forecast:
    """One server's. The driver tells it what starts, comes and ends.

    Args:
        scheduler: whose backlog it looks at.
        limits: what it is held against.
        typical_tokens: an output's length while none has ended.
    """

    def __init__(
        self, scheduler: Scheduler, limits: LatencyLimits = UNLIMITED, typical_tokens: int = 128
    ) -> None:
        self.limits = limits
        self._scheduler = scheduler
        self._continuous = scheduler.policy.continuous
        self._alike = all(worker.is_like(scheduler.workers[0]) for worker in scheduler.workers)
        self._prompt = Mean(typical_tokens)
        self._output = Mean(typical_tokens)
        self._steps = typical_tokens  # of the last slice
        self._first, self._last = Delay(limits.ttft_s), Delay(limits.e2e_s)
        self.pace = Pace()

    def raw(self, now_s: float) -> PredictedLatency:
        """By the laws, at the pace of the last batches."""
        return PredictedLatency(*(self.pace.value * seconds for seconds in self._lawful(now_s)))

    def _lawful(self, now_s: float) -> PredictedLatency:
        workers = [
            worker for worker in self._scheduler.workers if worker.alive
        ] or self._scheduler.workers
        waiting = self._scheduler.waiting_jobs
        if not self._continuous:
            waiting = max(
                waiting - sum(batch.size for worker in workers for batch in worker.queue), 0
            )
        tell = self._rounds if self._continuous else self._slices
        return (
            tell(workers, now_s, waiting)
            if self._alike
            else self._of_kinds(tell, workers, now_s, waiting)
        )

    def now(self, now_s: float) -> PredictedLatency:
        """With what was learnt, for all but the unlucky."""
        ttft_s, e2e_s, others_s = self.raw(now_s)
        last_s = self._last.value_s
        return PredictedLatency(
            max(ttft_s + self._first.value_s, 0.0),
            max(e2e_s + last_s, 0.0),
            max(others_s + last_s, 0.0),
        )

    def submitted(self, prompt_tokens: int) -> None:
        self._prompt.add(prompt_tokens)

    def started(self, batch: Batch) -> None:
        if not batch.keep_cache:
            self._steps = max(batch.steps, 1)

    def first_token(self, told: PredictedLatency, after_s: float) -> None:
        self._first.add(told.ttft_s, after_s)

    def ended(self, told: PredictedLatency, after_s: float, tokens: int) -> None:
        """A request ended well."""
        self._last.add(told.e2e_s, after_s)
        self._output.add(tokens)

    def _of_kinds(
        self, tell: Telling, workers: Sequence[Worker], now_s: float, waiting: int
    ) -> PredictedLatency:
        """The mean over the kinds of workers, each with its share of those who wait, by how fast it
        is.
        """
        kinds: list[list[Worker]] = []
        for worker in workers:
            like = next((kind for kind in kinds if kind[0].is_like(worker)), None)
            if like is None:
                kinds.append([worker])
            else:
                like.append(worker)
        prompt, output = self._prompt.value, max(self._output.value, 1.0)
        paces = np.array([len(kind) * requests_per_s(kind[0], prompt, output) for kind in kinds])
        shares = paces / paces.sum()
        told = [
            tell(kind, now_s, round(waiting * share))
            for kind, share in zip(kinds, shares, strict=True)
        ]
        return PredictedLatency(*(shares @ np.array(told)).tolist())

    def _slices(self, workers: Sequence[Worker], now_s: float, waiting: int) -> PredictedLatency:
        pooled = waiting + 1
        law, length, steps = (
            workers[0].latency,
            int(self._prompt.value + self._output.value / 2),
            self._steps,
        )
        rows = min(_fitting(workers[0], length, steps), math.ceil(pooled / len(workers)))
        prefill_s = law.prefill_s(rows, length)
        batch_s = prefill_s + law.decode_s(rows, length, steps)
        start_s = _last_start_s(
            [worker.left_s(now_s) for worker in workers], batch_s, math.ceil(pooled / rows)
        )
        turn_s = start_s + batch_s
        slices = math.ceil(self._output.value / steps)
        alone_s = slices * (law.prefill_s(1, length) + law.decode_s(1, length, steps))
        return PredictedLatency(start_s + prefill_s, slices * turn_s, slices * turn_s - alone_s)

    def _rounds(self, workers: Sequence[Worker], now_s: float, ahead: int) -> PredictedLatency:
        prompt, output = self._prompt.value, self._output.value
        law, length = workers[0].latency, int(prompt + output / 2)
        prefill_s = law.prefill_s(1, prompt)

        def stay_s(rows: int) -> float:
            """How long a row is there that decodes beside others, of whom each is prefilled once
            meanwhile.
            """
            return output * law.decode_s(rows, length, 1) + rows * prefill_s

        places = [_places(worker, prompt + output) for worker in workers]
        free = sum(places) - sum(len(worker.residents) for worker in workers)
        rate_rps = sum(rows / stay_s(rows) for rows in places)
        entering = math.ceil((min(ahead, max(free, 0)) + 1) / len(workers))
        wait_s = max(ahead + 1 - free, 0) / rate_rps
        met = min(max(len(worker.residents) for worker in workers) + entering, max(places))
        e2e_s = wait_s + stay_s(met)
        return PredictedLatency(wait_s + entering * prefill_s, e2e_s, e2e_s - stay_s(1))


def _last_start_s(left_s: list[float], batch_s: float, batches: int) -> float:
    """When the last of so many batches starts, each going to whoever is free first."""
    heapify(left_s)
    for _ in range(batches - 1):
        heapreplace(left_s, left_s[0] + batch_s)
    return left_s[0]


def _fitting(worker: Worker, length: float, steps: int) -> int:
    return max(int(worker.memory.max_batch(np.array([int(length)]), steps, 0.0)[0]), 1)


def _places(worker: Worker, tokens: float) -> int:
    """Rows that a continuous worker has at most, if each grows to so many tokens."""
    return max(len(worker.residents), min(int(worker.capacity_tokens // tokens), worker.slots), 1)
