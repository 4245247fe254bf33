"""Predict the latency of a request that arrives now. Admission refuses requests by this forecast.

`Forecast` reads the scheduler and never changes it. The fitted laws give a first estimate:

- Slice-level policies serve all waiting requests in turn. A new request gets its first token after
  one turn: the work that the workers already hold, and the batches that the pool makes.
- Continuous policies keep a request on its worker until it ends. A new request waits until enough
  earlier requests have left.

Output lengths that are not known yet are taken as the mean of finished requests. Two corrections
follow. The pace compares recent batches with the laws, so it reacts at once to a slow machine.
`Delay` covers what happens outside batches, such as delay in the front. It learns from the
difference between predicted and measured latency, which is known only after a request got its
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np

from toolkit.routing.admission import UNLIMITED, Delay, LatencyLimits, PredictedLatency
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Pass, Worker

MEAN_DECAY = 0.98  # weight that a mean of lengths keeps with each new request
# Time constant of the pace, in seconds of predicted batch time. The laws alone have this weight at
# the start, and the weight of a batch falls by a factor of e for each such span that follows it.
PACE_TIME_CONSTANT_S = 4.0


class Forecast:
    """The forecast of one server. The driver reports what starts, arrives and ends.

    Admission compares it with `limits`. Before the first request, prompt and output are assumed to
    have `typical_tokens`.
    """

    def __init__(
        self, scheduler: Scheduler, limits: LatencyLimits = UNLIMITED, typical_tokens: int = 128
    ) -> None:
        self.limits = limits
        self._scheduler = scheduler
        self._continuous = scheduler.policy.continuous
        self._prompt_tokens = Mean(typical_tokens)
        self._output_tokens = Mean(typical_tokens)
        self._slice_steps = typical_tokens  # of the last slice
        self._ttft_delay = Delay(limits.ttft_s)
        self._e2e_delay = Delay(limits.e2e_s)
        self._took_s = self._expected_s = PACE_TIME_CONSTANT_S  # of recent batches

    def predict(self, now_s: float) -> PredictedLatency:
        """The forecast with both corrections; only few requests should take longer."""
        ttft_s, e2e_s, contention_s = self.predict_by_laws(now_s)
        e2e_delay_s = self._e2e_delay.value_s
        return PredictedLatency(
            max(ttft_s + self._ttft_delay.value_s, 0.0),
            max(e2e_s + e2e_delay_s, 0.0),
            max(contention_s + e2e_delay_s, 0.0),
        )

    def predict_by_laws(self, now_s: float) -> PredictedLatency:
        """What the laws predict, at the pace of recent batches."""
        all_workers = self._scheduler.workers
        workers = [worker for worker in all_workers if worker.alive] or all_workers
        waiting = self._scheduler.waiting_jobs
        predictor = self._predict_rounds
        if not self._continuous:
            predictor = self._predict_slices
            queued = sum(len(batch.jobs) for worker in workers for batch in worker.queue)
            waiting = max(waiting - queued, 0)
        predicted = predictor(workers, now_s, waiting)
        pace = self._took_s / self._expected_s
        return PredictedLatency(*(pace * seconds for seconds in predicted))

    def submitted(self, prompt_tokens: int) -> None:
        """A request was accepted."""
        self._prompt_tokens.add(prompt_tokens)

    def started(self, batch: Pass) -> None:
        """A batch was sent to its worker."""
        if not batch.keep_cache:
            self._slice_steps = max(batch.steps, 1)

    def ran(self, took_s: float, expected_s: float) -> None:
        """A batch took `took_s` seconds, and `expected_s` by the laws."""
        keep = math.exp(-expected_s / PACE_TIME_CONSTANT_S)
        self._took_s = keep * self._took_s + took_s
        self._expected_s = keep * self._expected_s + expected_s

    def first_token(self, predicted: PredictedLatency, after_s: float) -> None:
        """A request got its first token `after_s` seconds after it arrived."""
        self._ttft_delay.add(predicted.ttft_s, after_s)

    def ended(self, predicted: PredictedLatency, after_s: float, tokens: int) -> None:
        """A request ended well, `after_s` seconds after it arrived, with `tokens` of output."""
        self._e2e_delay.add(predicted.e2e_s, after_s)
        self._output_tokens.add(tokens)

    def _predict_slices(
        self, workers: Sequence[Worker], now_s: float, waiting: int
    ) -> PredictedLatency:
        pooled = waiting + 1
        law = workers[0].latency
        steps = self._slice_steps
        length = int(self._prompt_tokens.value + self._output_tokens.value / 2)
        fitting = max(int(workers[0].memory.max_batch(np.array([length]), steps, 0.0)[0]), 1)
        rows = min(fitting, math.ceil(pooled / len(workers)))
        prefill_s = law.prefill_s(rows, length)
        batch_s = prefill_s + law.decode_s(rows, length, steps)

        # Each pooled batch goes to the worker that is free first; the new request is in the last.
        free_after_s = [worker.left_s(now_s) for worker in workers]
        heapify(free_after_s)
        for _ in range(math.ceil(pooled / rows) - 1):
            heapreplace(free_after_s, free_after_s[0] + batch_s)
        start_s = free_after_s[0]

        slices = math.ceil(self._output_tokens.value / steps)
        e2e_s = slices * (start_s + batch_s)
        alone_s = slices * (law.prefill_s(1, length) + law.decode_s(1, length, steps))
        return PredictedLatency(start_s + prefill_s, e2e_s, e2e_s - alone_s)

    def _predict_rounds(
        self, workers: Sequence[Worker], now_s: float, waiting: int
    ) -> PredictedLatency:
        prompt = self._prompt_tokens.value
        output = self._output_tokens.value
        law = workers[0].latency
        length = int(prompt + output / 2)
        prefill_s = law.prefill_s(1, prompt)

        def stay_s(rows: int) -> float:
            """How long a row stays among `rows`, each of which is prefilled once meanwhile."""
            return output * law.decode_s(rows, length, 1) + rows * prefill_s

        resident = [len(worker.running.jobs) for worker in workers]
        places = []  # rows that each worker has at most, if each grows to mean lengths
        for worker, rows in zip(workers, resident, strict=True):
            fitting = int(worker.capacity_tokens // (prompt + output))
            places.append(max(rows, min(fitting, worker.slots), 1))
        free = sum(places) - sum(resident)
        leaving_per_s = sum(rows / stay_s(rows) for rows in places)
        entering = math.ceil((min(waiting, max(free, 0)) + 1) / len(workers))
        wait_s = max(waiting + 1 - free, 0) / leaving_per_s
        rows = min(max(resident) + entering, max(places))
        e2e_s = wait_s + stay_s(rows)
        return PredictedLatency(wait_s + entering * prefill_s, e2e_s, e2e_s - stay_s(1))


@dataclass(slots=True)
class Mean:
    """A mean in which older values lose weight. `value` is the initial estimate."""

    value: float
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.weight = MEAN_DECAY * self.weight + 1.0
        self.value += (value - self.value) / self.weight
