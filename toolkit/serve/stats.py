"""What the server counts while it serves: plain numbers, cheap enough to touch per progress frame.

How Prometheus reads them is in `toolkit.serve.metrics`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from toolkit.sched.protocols import LatencyLaw
from toolkit.sched.rounds import groups_alike
from toolkit.sched.types import Batch, BatchResult, RoundResult, Worker
from toolkit.workers.protocol import BatchDone, RoundDone

# vLLM's own buckets, so that its dashboards read ours.
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
COST_BUCKETS = (
    1e-5,
    2e-5,
    5e-5,
    1e-4,
    2e-4,
    5e-4,
    1e-3,
    2e-3,
    5e-3,
    1e-2,
    2e-2,
    5e-2,
    0.1,
    0.2,
    0.5,
)


FINE = 1.1  # times: between the bounds that percentiles are read from
FINE_BELOW = 100.0  # times: how far under the first bucket's bound those begin


def finer(bounds: Sequence[float]) -> tuple[float, ...]:
    """The bounds, and others between and below them, each at most `FINE` times the one before."""
    first = bounds[0] / FINE_BELOW
    steps = math.ceil(math.log(bounds[-1] / first, FINE))
    return tuple(sorted({*bounds, *(first * FINE**step for step in range(steps))}))


class Histogram:
    """Counts by bucket; bounds are upper ones, inclusive.

    It may count in `finer` buckets than it shows to Prometheus, whose bounds are among them: for
    percentiles.
    """

    def __init__(self, shown: Sequence[float], bounds: Sequence[float] = ()) -> None:
        self.bounds = tuple(bounds or shown)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        self._shown = frozenset((*shown, math.inf))

    def show(self, bound: float) -> None:
        """Count up to this bound as well, and show it to Prometheus. Only before anything was
        counted.
        """
        self.bounds = tuple(sorted({*self.bounds, bound}))
        self.counts = [0] * (len(self.bounds) + 1)
        self._shown |= {bound}

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """What Prometheus wants: each upper bound as text, and how many values are not above it."""
        running = 0
        buckets = []
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            running += count
            if bound in self._shown:
                buckets.append(("+Inf" if bound == math.inf else str(float(bound)), float(running)))
        return buckets


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value that `share` of the counted are not above, straight within its bucket; None where
    none were counted.

    Beyond the last bound nothing is known, and the bound is given.
    """
    wanted, below = share * sum(counts), 0
    if not wanted:
        return None
    for index, count in enumerate(counts):
        if below + count >= wanted:
            low = bounds[index - 1] if index else 0.0
            high = bounds[min(index, len(bounds) - 1)]
            return low + (high - low) * (wanted - below) / count
        below += count
    return bounds[-1]


@dataclass(slots=True)
class LawComparison:
    """Seconds that a worker's batches took, of those that the law can be held against, and what it
    says of them.
    """

    took_s: float = 0.0
    predicted_s: float = 0.0


@dataclass(slots=True)
class SliceSums:
    """Sums over static batches of what each took, what the law says of it, and how many requests
    arrived meanwhile.

    `due` is how many would have arrived in the law's time, at the rate at which they did: a batch
    that is late for another reason meets more arrivals, and `due` does not grow with that. Sums of
    products are enough for a reader to tell what an arrival costs. Times in seconds.
    """

    batches: int = 0
    took: float = 0.0
    expected: float = 0.0
    arrived: float = 0.0
    due: float = 0.0
    took_took: float = 0.0
    took_expected: float = 0.0
    took_arrived: float = 0.0
    expected_expected: float = 0.0
    expected_arrived: float = 0.0
    arrived_arrived: float = 0.0
    due_took: float = 0.0
    due_expected: float = 0.0
    due_arrived: float = 0.0
    due_due: float = 0.0

    def add(self, took_s: float, expected_s: float, arrived: int) -> None:
        """A batch has ended well."""
        due = arrived * expected_s / took_s if took_s > 0.0 else 0.0
        self.batches += 1
        self.took += took_s
        self.expected += expected_s
        self.arrived += arrived
        self.due += due
        self.took_took += took_s * took_s
        self.took_expected += took_s * expected_s
        self.took_arrived += took_s * arrived
        self.expected_expected += expected_s * expected_s
        self.expected_arrived += expected_s * arrived
        self.arrived_arrived += arrived * arrived
        self.due_took += due * took_s
        self.due_expected += due * expected_s
        self.due_arrived += due * arrived
        self.due_due += due * due


@dataclass(slots=True)
class Stats:
    """All counters of one server. Times in seconds.

    `max_batch_size` and `max_length` say how far the latency laws were measured, `sla` what each
    request should keep. Each target's limit is a bound of its histogram, so that the buckets say
    exactly how many requests kept it.
    """

    max_batch_size: int = 1 << 62
    max_length: int = 1 << 62
    sla: Mapping[str, float] = field(default_factory=dict)
    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS, finer(TTFT_BUCKETS)))
    itl: Histogram = field(default_factory=lambda: Histogram(TOKEN_BUCKETS, finer(TOKEN_BUCKETS)))
    tpot: Histogram = field(default_factory=lambda: Histogram(TOKEN_BUCKETS, finer(TOKEN_BUCKETS)))
    mtpot: Histogram = field(default_factory=lambda: Histogram(TOKEN_BUCKETS, finer(TOKEN_BUCKETS)))
    e2e: Histogram = field(default_factory=lambda: Histogram(E2E_BUCKETS, finer(E2E_BUCKETS)))
    queue: Histogram = field(default_factory=lambda: Histogram(E2E_BUCKETS, finer(E2E_BUCKETS)))
    batch_ratio: Histogram = field(default_factory=lambda: Histogram(RATIO_BUCKETS))
    prompt_tokens: int = 0
    generation_tokens: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    within_targets: int = 0  # of those that ended well, as `toolkit.metrics.meets_sla` has it
    arrived: int = 0  # requests that were submitted
    batches: int = 0
    slice_sums: SliceSums = field(default_factory=SliceSums)
    compared: defaultdict[int, LawComparison] = field(
        default_factory=lambda: defaultdict(LawComparison)
    )  # by worker
    extrapolated_batches: int = 0
    oom_events: int = 0
    preemptions: int = 0
    restarts: Counter[int] = field(default_factory=Counter)  # by worker
    refused: int = 0  # for overload
    share_refusals: Counter[str] = field(
        default_factory=lambda: Counter(connections=0, bytes=0)
    )  # of clients
    deciding: Histogram = field(
        default_factory=lambda: Histogram(COST_BUCKETS)
    )  # of the scheduler's calls
    hop: Histogram = field(
        default_factory=lambda: Histogram(COST_BUCKETS)
    )  # of batches that follow one at once
    engine_s: float = 0.0
    engine_steps: int = 0
    reporting_s: float = 0.0  # of `engine_s`

    def __post_init__(self) -> None:
        for key, limit in self.sla.items():
            histogram: Histogram = getattr(self, key.partition("_")[0])
            histogram.show(limit)

    @property
    def worker_restarts(self) -> int:
        return self.restarts.total()

    @property
    def batch_s(self) -> float:
        return sum(one.took_s for one in self.compared.values())

    @property
    def predicted_batch_s(self) -> float:
        return sum(one.predicted_s for one in self.compared.values())

    def count_share(self, limit: str) -> None:
        """A client that had its share of `connections` or of `bytes` asked for more."""
        self.share_refusals[limit] += 1

    def count_tokens(
        self, tokens: int, arrival_s: float, last_token_s: float, now_s: float
    ) -> None:
        """`tokens` came at once, the ones before at `last_token_s` (NaN: they are the first)."""
        self.generation_tokens += tokens
        if math.isnan(last_token_s):
            self.ttft.observe(now_s - arrival_s)
        else:
            self.itl.observe((now_s - last_token_s) / tokens, tokens)

    def count_end(
        self,
        status: str,
        arrival_s: float,
        first_token_s: float,
        last_token_s: float,
        tokens: int,
        max_gap_s: float = 0.0,
    ) -> None:
        """A request has ended. Latencies are of those that ended well."""
        self.ended[status] += 1
        if status not in ("stop", "length"):
            return
        ttft, e2e = first_token_s - arrival_s, last_token_s - arrival_s
        tpot = (e2e - ttft) / (tokens - 1) if tokens > 1 else 0.0
        self.e2e.observe(e2e)
        self.mtpot.observe(max_gap_s)
        if tokens > 1:
            self.tpot.observe(tpot)
        found = {"ttft": ttft, "e2e": e2e, "tpot": tpot, "mtpot": max_gap_s, "itl": max_gap_s}
        self.within_targets += all(
            found[key.partition("_")[0]] <= limit for key, limit in self.sla.items()
        )

    def count_start(self, batch: Batch) -> None:
        """A batch is sent."""
        moves = batch.moves
        self.preemptions += sum(not job.cancelled for job in batch.evict)
        self.preemptions += len(moves.pause) + len(moves.swap_out) if moves else 0

    def count_batch(
        self,
        batch: Batch,
        result: BatchResult,
        steps: int,
        now_s: float,
        law: LatencyLaw,
        arrived: int = 0,
    ) -> None:
        """A batch has ended. Its time is held against the law for the `steps` that it ran, which
        may be fewer.

        `arrived` is how many requests were submitted while it ran.
        """
        self._count_batch(result.failure, batch.size, batch.input_length + batch.steps)
        if not result.failure and steps:
            iterations = steps - law.prefill_emits_token
            expected_s = law.prefill_s(batch.size, batch.input_length)
            expected_s += law.decode_s(batch.size, batch.input_length, iterations)
            self._compare(batch.worker, now_s - batch.started_s, expected_s)
            self.slice_sums.add(now_s - batch.started_s, expected_s, arrived)

    def count_round(self, batch: Batch, result: RoundResult, now_s: float, worker: Worker) -> None:
        """A round has ended, of which the worker's residents do not know yet."""
        residents, law = worker.residents, worker.latency
        rows, longest = len(residents), residents.longest
        self._count_batch(result.failure, rows, longest + result.steps)
        if not (
            result.failure or residents.prefilling
        ):  # which passes a round made is the engine's to know
            length = longest if law.padded or not rows else residents.used / rows
            expected_s = (
                law.round_s + _prefills_s(batch, law) + len(result.ended) * law.leave_s(length)
            )
            expected_s += law.decode_s(rows, length, result.steps) if result.steps else 0.0
            expected_s += _transfers_s(batch, worker)
            self._compare(batch.worker, now_s - batch.started_s, expected_s)

    def count_engine(self, event: BatchDone | RoundDone, *, follows: bool) -> None:
        """What the worker says of a batch's times; `follows`: it had been sent as soon as the one
        before had ended.
        """
        if event.failure == "crashed":
            return
        if follows:
            self.hop.observe(event.times.gap_s)
        self.engine_s += event.times.engine_s
        self.reporting_s += event.times.reporting_s
        self.engine_steps += event.steps

    def _count_batch(self, failure: str, rows: int, length: int) -> None:
        self.batches += 1
        self.oom_events += failure == "oom"
        self.extrapolated_batches += rows > self.max_batch_size or length > self.max_length

    def _compare(self, worker: int, took_s: float, expected_s: float) -> None:
        if expected_s > 0:
            self.batch_ratio.observe(took_s / expected_s)
            self.compared[worker].took_s += took_s
            self.compared[worker].predicted_s += expected_s


def _transfers_s(batch: Batch, worker: Worker) -> float:
    """Those that a round waits for. Beside its compute they are taken to be done before it."""
    moves, law = batch.moves, worker.swap
    if moves is None or law is None or (moves.overlap and law.overlaps):
        return 0.0
    out_s = sum(law.out_s(job.length) for job in moves.swap_out)
    return out_s + sum(law.in_s(job.length) for job in moves.swap_in)


def _prefills_s(batch: Batch, law: LatencyLaw) -> float:
    """Those of a round's newcomers, group by group."""
    lengths = [job.length for job in batch.jobs]
    groups = groups_alike(lengths)
    return sum(
        law.prefill_s(len(group), max(lengths[index] for index in group)) for group in groups
    )
