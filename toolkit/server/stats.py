"""What the server counts: plain numbers that are cheap to update at every progress report.

`toolkit.server.metrics` shows them to Prometheus.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from toolkit.laws.passes import PassRange
from toolkit.sched.prefills import groups_alike
from toolkit.sched.queues import serving_s, transfers_s
from toolkit.sched.types import Pass, PassResult, Worker
from toolkit.traces.write import TraceLine, ms_or_none

# The buckets of vLLM, in seconds: a panel shows both alike.
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5),
    *(10, 20, 40, 80, 160, 640, 2560),
)
TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5),
    *(10, 20, 40, 80),
)
E2E_BUCKETS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
RATIO_BUCKETS = (0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 1.5, 2, 4)
# How answers end that are whole; "other": for a reason of the server's own.
ENDED_WELL = ("stop", "length", "tool_calls", "function_call", "content_filter", "other")
# Why requests are refused for overload.
QUEUE_FULL = "the queue is full"
LATE = "they would miss their targets"


class Histogram:
    """Counts values by bucket. A bucket includes its upper bound."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(sorted(set(bounds)))
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """For Prometheus: each upper bound as text, and the number of values up to it."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


@dataclass(slots=True)
class RequestTimes:
    """When a request came, and its tokens, for the counters and the log of any server. Times are in
    seconds of one clock, or NaN.

    Attributes:
        max_gap_s: the longest time between two tokens.
    """

    arrival_s: float = math.nan
    first_s: float = math.nan
    last_s: float = math.nan
    max_gap_s: float = 0.0

    def line(
        self, timestamp: float, tokens: tuple[int, int, int], status: str, priority: int = 0
    ) -> TraceLine:
        """Return the line of a log. `timestamp`: when the request came, in ms; `tokens`: of its
        prompt, of its output, and the most that its client asked for.
        """
        first_ms, last_ms = (
            ms_or_none(at_s - self.arrival_s) for at_s in (self.first_s, self.last_s)
        )
        word = "ok" if status in ENDED_WELL else status
        return TraceLine(timestamp, *tokens, first_ms, last_ms, word, priority)


# Of the latencies of requests, in seconds.
BUCKETS = {
    "ttft": TTFT_BUCKETS,
    "itl": TOKEN_BUCKETS,
    "tpot": TOKEN_BUCKETS,
    "mtpot": TOKEN_BUCKETS,
    "e2e": E2E_BUCKETS,
    "queue": E2E_BUCKETS,
}


@dataclass(slots=True)
class Stats:
    """All counters of one server. Times are in seconds."""

    # The targets of each request. Each limit is a bound of its histogram: the buckets say exactly
    # how many requests met it.
    sla: Mapping[str, float] = field(default_factory=dict)
    valid: PassRange = field(default_factory=PassRange)  # where the laws of latency were measured
    latencies: dict[str, Histogram] = field(init=False)  # by name
    batch_ratio: Histogram = field(default_factory=lambda: Histogram(RATIO_BUCKETS))
    arrived: int = 0  # before replicas: requests that have come, ended or not
    arrived_tokens: int = 0  # of their prompts, as far as they are known then
    prompt_tokens: int = 0
    generation_tokens: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    ended_tokens: int = 0  # generated for requests that have ended
    within_targets: int = 0  # ended well and met every target, as in `toolkit.metrics.meets_sla`
    batches: int = 0
    # Measured and predicted time of the batches that the laws can predict, by worker.
    batch_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    predicted_batch_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    extrapolated_batches: int = 0
    oom_events: int = 0
    preemptions: int = 0
    restarts: Counter[int] = field(default_factory=Counter)  # by worker
    refusals: Counter[str] = field(default_factory=Counter)  # for overload, by the reason
    # Answers by HTTP status. Those of failures are there from the start: an alert on the growth of
    # a counter does not see its first value.
    statuses: Counter[str] = field(
        default_factory=lambda: Counter(dict.fromkeys(("500", "502", "503", "504"), 0))
    )

    def __post_init__(self) -> None:
        self.latencies = {}
        for name, buckets in BUCKETS.items():
            limits = [limit for key, limit in self.sla.items() if key.startswith(f"{name}_")]
            self.latencies[name] = Histogram((*buckets, *limits))

    @property
    def refused(self) -> int:
        """Requests that got 503 because of overload."""
        return self.refusals.total()

    @property
    def departed(self) -> int:
        """Requests that have come, and have ended or were refused by a forecast."""
        return self.ended.total() + self.refusals[LATE]

    def ratio_of(self, workers: Collection[int]) -> float | None:
        """Return actual over predicted time of the batches of `workers`; None: there are none."""
        predicted_s = sum(self.predicted_batch_s[worker] for worker in workers)
        return (
            sum(self.batch_s[worker] for worker in workers) / predicted_s if predicted_s else None
        )

    def count_tokens(self, tokens: int, times: RequestTimes, now_s: float, steps: int = 1) -> None:
        """Count `tokens` of a request that came together: they share the time since the last one.
        `steps`: of the engine, in which they were made.
        """
        self.generation_tokens += tokens
        if math.isnan(times.first_s):
            times.first_s = now_s
            self.latencies["ttft"].observe(now_s - times.arrival_s)
        else:
            gap_s = now_s - times.last_s
            times.max_gap_s = max(times.max_gap_s, gap_s / steps)
            self.latencies["itl"].observe(gap_s / tokens, tokens)
        times.last_s = now_s

    def count_end(self, status: str, times: RequestTimes, tokens: int) -> None:
        """Count a request that has ended. Latencies count only if it ended well, and of an answer
        that came in one piece (`first_s` is NaN) only the last.
        """
        self.ended[status] += 1
        self.ended_tokens += tokens
        if status not in ENDED_WELL:
            return
        ended = {"e2e": times.last_s - times.arrival_s}
        if tokens > 1 and not math.isnan(times.first_s):  # as in `toolkit.metrics`
            ended["tpot"] = (times.last_s - times.first_s) / (tokens - 1)
            ended["mtpot"] = times.max_gap_s
        for name, value in ended.items():
            self.latencies[name].observe(value)
        # The first token and the gaps were counted as they came. NaN is above no limit.
        known = ended | {"ttft": times.first_s - times.arrival_s, "itl": ended.get("mtpot", 0.0)}
        self.within_targets += not any(
            known.get(key.partition("_")[0], 0.0) > limit for key, limit in self.sla.items()
        )

    def count_pass(
        self, batch: Pass, result: PassResult, now_s: float, worker: Worker
    ) -> tuple[float, float]:
        """Count a pass that has ended, and compare its time with the law. Return its measured and
        its predicted seconds, both 0 if the law cannot predict it. Call this before the scheduler
        updates the worker's running jobs.
        """
        running = worker.running
        length = running.longest + (result.steps if batch.keep_cache else batch.steps)
        self.batches += 1
        self.oom_events += result.failure == "oom"
        self.extrapolated_batches += not self.valid.holds_batch(len(running.jobs), length)
        expected_s = _expected_s(batch, result, worker)
        if expected_s <= 0:
            return 0.0, 0.0
        took_s = now_s - batch.started_s
        self.batch_ratio.observe(took_s / expected_s)
        self.batch_s[worker.index] += took_s
        self.predicted_batch_s[worker.index] += expected_s
        return took_s, expected_s


def _expected_s(batch: Pass, result: PassResult, worker: Worker) -> float:
    """Seconds that a pass takes by the worker's laws; 0: they do not say."""
    law = worker.latency
    running = worker.running
    rows = len(running.jobs)
    steps = result.steps
    # With chunked prefills only the engine knows which forward passes it made.
    if result.failure or running.prefilling:
        return 0.0
    if not batch.keep_cache:
        return serving_s(law, rows, batch.input_length, steps) if steps else 0.0
    length = running.longest if law.padded or not rows else running.used / rows
    lengths = [job.length for job in batch.jobs]
    prefills_s = sum(
        law.prefill_s(len(group), max(lengths[index] for index in group))
        for group in groups_alike(lengths)
    )
    expected_s = law.round_s + prefills_s + len(result.ended) * law.leave_s(length)
    expected_s += law.decode_s(rows, length, steps) if steps else 0.0
    moves = batch.moves
    swap = worker.swap
    if moves and swap and not (moves.overlap and swap.overlaps):  # else transfers count as free
        back = [job.length for job in moves.swap_in]
        expected_s += transfers_s(swap, [job.length for job in moves.swap_out], back)
    return expected_s
