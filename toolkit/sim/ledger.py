"""What happened in a simulation: the workers write it down, the metrics are computed from it.

- `TokenGaps`: every gap between two tokens of a request (ITL), for its percentiles;
- `RequestOutcome`: one request: its output length, the times of its tokens, whether it ended;
- `Ledger`: the outcomes of all requests and the counters of the workers;
- `counters`: the metrics besides the times (batches, padding, memory, utilisation);
- `Gaps`: the largest gap of each request, for a worker with rows that get their tokens together.
"""

from __future__ import annotations

import statistics
from array import array
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from mypy_extensions import mypyc_attr

from toolkit.metrics import Floats, Served
from toolkit.sim.kv_cache import BlockPool

PERCENTILES = (50, 95, 99)
HALVINGS = 60  # of the range of a percentile: it is then known to the last digits
LEAST_SPAN_S = 1e-12  # of a stretch; equal gaps are spread over as much
# Metrics where prompts are shared, and the counts of each engine's cache that they are the sums of.
REUSE = {
    "query_tokens": "queries",
    "hit_tokens": "hits",
    "preempted_query_tokens": "preempted_queries",
    "preempted_hit_tokens": "preempted_hits",
}


class TokenGaps:
    """The gaps of one simulation, in seconds, as stretches of gaps that grow linearly: a law's step
    time is linear in the cached length. Memory grows with the decisions, not with the tokens.
    """

    __slots__ = ("_counts", "_first_s", "_last_s")

    def __init__(self) -> None:
        self._counts = array("q")
        self._first_s = array("d")
        self._last_s = array("d")

    def add(self, count: int, first_s: float, last_s: float) -> None:
        """Add `count` gaps that grow linearly from `first_s` to `last_s`."""
        if count > 0:
            self._counts.append(count)
            self._first_s.append(first_s)
            self._last_s.append(last_s)

    def summary(self) -> dict[str, float]:
        """Mean and percentiles over all gaps; empty if there are none."""
        columns = (self._counts, self._first_s, self._last_s)
        counts, first, last = (np.asarray(column, dtype=float) for column in columns)
        if not len(counts):
            return {}
        mean = {"itl_mean_s": float((counts * (first + last)).sum() / 2.0 / counts.sum())}
        low = np.minimum(first, last)
        high = np.maximum(first, last)
        own = {f"itl_p{q}_s": _quantile(counts, low, high, q / 100.0) for q in PERCENTILES}
        return mean | own


def _quantile(counts: Floats, low: Floats, high: Floats, share: float) -> float:
    """Return the gap that `share` of all gaps do not exceed, of stretches of `counts` gaps from
    `low` to `high`, by halving the range in which it lies.
    """
    wanted = share * counts.sum()
    span = np.maximum(high - low, LEAST_SPAN_S)
    below = float(low.min())
    above = float(high.max())
    for _ in range(HALVINGS):
        middle = 0.5 * (below + above)
        if (counts * np.clip((middle - low) / span, 0.0, 1.0)).sum() < wanted:
            below = middle
        else:
            above = middle
    return above


# Whether a batch runs out of memory, by its id, N, L and S.
RunsOut = Callable[[int, int, int, int], bool]


@mypyc_attr(acyclic=True)
class RequestOutcome:
    """What has happened to one request; `ok`: it has ended. Times are in seconds.

    One object holds it all, so that a request of a long backlog comes from memory once per slice.
    """

    __slots__ = ("first_token_s", "last_token_s", "max_gap_s", "ok", "output_tokens")

    def __init__(self, output_tokens: int) -> None:
        self.output_tokens = output_tokens  # the true length, which no policy sees
        self.first_token_s = -1.0  # none has come
        self.last_token_s = 0.0
        self.max_gap_s = 0.0  # between two tokens
        self.ok = False

    def go_on(self, at_s: float, gaps: TokenGaps | None) -> None:
        """Its tokens begin, or go on after a wait, with one at `at_s`; `gaps` gets the wait."""
        if self.first_token_s < 0.0:
            self.first_token_s = at_s
            return
        gap_s = at_s - self.last_token_s
        if gap_s > self.max_gap_s:
            self.max_gap_s = gap_s
        if gaps is not None:
            gaps.add(1, gap_s, gap_s)


@dataclass
class Ledger:
    """What has happened to each request (lists by request number) and to the workers."""

    arrival_s: list[float]
    output_tokens: list[int]
    workers: int
    outcomes: list[RequestOutcome] = field(init=False)
    batches: int = 0
    rows: int = 0
    pad_tokens: int = 0
    invalid_tokens: int = 0
    decoding_steps: int = 0
    early_returns: int = 0
    oom_batches: int = 0
    extrapolated: int = 0  # batches or rounds outside the range that the laws were measured in
    memory_token_steps: float = 0  # tokens in the cache, padding included, summed over decode steps
    peak_tokens: float = 0  # the most tokens in one worker's cache
    # static batches, or attempts to admit for which the peak to come was computed
    attempts: int = 0
    future_token_attempts: float = 0  # that peak, by the true lengths, summed over the attempts
    token_gaps: TokenGaps | None = None  # None: not recorded
    evictions: int = 0
    reroutes: int = 0  # jobs that left their worker after a slice
    rounds: int = 0  # of continuous workers, as all fields up to `peak_host_tokens`
    row_steps: int = 0  # rows, summed over decode steps
    swaps_out: int = 0
    swaps_in: int = 0
    swapped_tokens: int = 0  # both ways
    swap_wait_s: float = 0.0  # in which workers waited for transfers and computed nothing
    peak_host_tokens: int = 0  # the most tokens in one worker's host memory
    shares: bool = False  # whether requests of paged engines share prompts
    preempts: bool = True  # False: the simulation ends with an error where a row is preempted
    pools: list[BlockPool] = field(default_factory=list)  # of paged engines, with their counts
    computed_prompt_tokens: int = 0  # in passes, also those computed anew
    drafted_tokens: int = 0  # verified; `accepted_tokens` of them became tokens
    accepted_tokens: int = 0
    busy_s: list[float] = field(init=False)
    completed_s: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.outcomes = [RequestOutcome(tokens) for tokens in self.output_tokens]
        self.busy_s = [0.0] * self.workers
        self.completed_s = [0.0] * self.workers

    def served(self, front_s: float) -> Served:
        """Return the requests as their clients see them: each token `front_s` after it exists. All
        arrivals shift alike by the front, and nothing else changes.
        """
        outcomes = self.outcomes
        return Served(
            arrival_s=np.array(self.arrival_s),
            first_token_s=np.array([outcome.first_token_s for outcome in outcomes]) + front_s,
            finish_s=np.array([outcome.last_token_s for outcome in outcomes]) + front_s,
            output_tokens=np.array(self.output_tokens, dtype=np.int64),
            max_gap_s=np.array([outcome.max_gap_s for outcome in outcomes]),
            ok=np.array([outcome.ok for outcome in outcomes], dtype=bool),
        )


def counters(ledger: Ledger, refused: int, usable_tokens: int) -> dict[str, float]:
    """The metrics besides the requests' times, by name with the unit in it. `rounds`, the swaps
    and `rerouted_percent` exist only under continuous policies.

    A batch of a continuous worker is a prefill of new rows; `batch_size_mean` is then the mean
    number of rows per decode step.
    """
    ended = sum([outcome.ok for outcome in ledger.outcomes])
    batches = max(ledger.batches, 1)
    requests = max(ended, 1)
    steps = max(ledger.decoding_steps, 1)
    metrics = {
        "refused": float(refused),
        "unfinished": float(len(ledger.outcomes) - ended - refused),
        "batches": float(ledger.batches),
        "batch_size_mean": ledger.row_steps / steps if ledger.rounds else ledger.rows / batches,
        "slices_per_request": ledger.rows / requests,
        "pad_tokens_per_request": ledger.pad_tokens / requests,
        "invalid_tokens_per_request": ledger.invalid_tokens / requests,
        "early_return_percent": 100.0 * ledger.early_returns / batches,
        "decoding_steps": float(ledger.decoding_steps),
        "oom_percent": 100.0 * ledger.oom_batches / (batches + ledger.oom_batches),
        "evicted_percent": 100.0 * ledger.evictions / requests,
        "consumed_memory_percent": 100.0 * ledger.memory_token_steps / steps / usable_tokens,
        "peak_memory_percent": 100.0 * ledger.peak_tokens / usable_tokens,
        "extrapolated_batches_percent": 100.0
        * ledger.extrapolated
        / max(ledger.rounds or ledger.batches, 1),
    }
    if ledger.rounds:
        swaps = ("swaps_out", "swaps_in", "swapped_tokens", "swap_wait_s", "peak_host_tokens")
        metrics |= {name: float(getattr(ledger, name)) for name in ("rounds", *swaps)}
        metrics["rerouted_percent"] = 100.0 * ledger.reroutes / requests
    if ledger.shares:
        for name, count in REUSE.items():
            metrics[name] = float(sum([getattr(pool, count) for pool in ledger.pools]))
        metrics["computed_prompt_tokens"] = float(ledger.computed_prompt_tokens)
        metrics["hit_percent"] = 100.0 * metrics["hit_tokens"] / max(metrics["query_tokens"], 1)
    if ledger.drafted_tokens:
        metrics["drafted_tokens"] = float(ledger.drafted_tokens)
        metrics["accepted_tokens"] = float(ledger.accepted_tokens)
        metrics["accepted_percent"] = 100.0 * ledger.accepted_tokens / ledger.drafted_tokens
    if ledger.attempts:
        future = ledger.future_token_attempts / ledger.attempts
        metrics["future_required_memory_percent"] = 100.0 * future / usable_tokens
    if ledger.token_gaps is not None:
        metrics |= ledger.token_gaps.summary()
    return metrics


def worker_shares(ledger: Ledger) -> dict[str, float]:
    """Return how evenly the workers were busy (CT STD of the SCLS paper), and how much."""
    metrics = {"completion_time_std_s": statistics.pstdev(ledger.completed_s)}
    makespan_s = max(ledger.completed_s, default=0.0)
    shares = [100.0 * busy_s / makespan_s if makespan_s else 0.0 for busy_s in ledger.busy_s]
    metrics["utilisation_percent"] = statistics.fmean(shares)
    return metrics | {f"utilisation_worker_{k}_percent": share for k, share in enumerate(shares)}


class Gaps:
    """The largest gap in seconds between two tokens of each request, for a worker with rows that
    all get their tokens together.

    A gap concerns all rows that run while it lasts, so it is kept once, not per request: on a stack
    of the gaps that no later gap exceeded. Marks count up as requests join; a gap with mark m
    concerns the requests that joined up to m. So a request's largest gap is the first with its mark
    or a later one.
    """

    __slots__ = ("_gaps", "_marks", "_since", "_waiting", "last_mark", "last_s")

    def __init__(self) -> None:
        self.last_mark = 0
        self.last_s = -1.0  # the last decode step's end
        self._marks: list[int] = []  # of the stack, ascending
        self._gaps: list[float] = []  # of the stack, descending
        # The requests up to each mark, and after the mark before it, wait for their next token
        # since a time.
        self._waiting: list[int] = []
        self._since: list[float] = []

    def mark(self, *, alone: bool) -> int:
        """The mark of requests that join now; if they are `alone`, earlier gaps are forgotten."""
        if alone:
            self._marks.clear()
            self._gaps.clear()
            self._waiting.clear()
            self._since.clear()
        self.last_mark += 1
        return self.last_mark

    @property
    def waiting_since(self) -> float:
        """Since when all rows wait for their next token; -1: not all since the same time."""
        return self._since[0] if len(self._since) == 1 else -1.0

    def since(self, mark: int) -> float:
        """Since when requests with this mark wait for their next token."""
        return self._since[bisect_left(self._waiting, mark)]

    def joined(self, at_s: float, mark: int = 0) -> None:
        """The requests that joined last, or with this mark, got a token at `at_s`."""
        self._waiting.append(mark or self.last_mark)
        self._since.append(at_s)

    def end_waits(self, at_s: float) -> None:
        """All rows got a token at `at_s`."""
        for k, since_s in enumerate(self._since):
            self.push(at_s - since_s, self._waiting[k])

    def push(self, gap_s: float, mark: int = 0) -> None:
        """All rows, or those up to this mark, had a gap of `gap_s`."""
        marks = self._marks
        gaps = self._gaps
        while gaps and gaps[-1] <= gap_s:
            gaps.pop()
            marks.pop()
        marks.append(mark or self.last_mark)
        gaps.append(gap_s)

    def wait_from(self, at_s: float) -> None:
        """All rows had a token at `at_s` and wait for the next."""
        self._waiting = [self.last_mark]
        self._since = [at_s]
        self.last_s = at_s

    def largest(self, mark: int) -> float:
        """The largest gap of requests with this mark; 0 if there is none."""
        for k, to in enumerate(self._marks):
            if to >= mark:  # soon: rows end in about the order in which they joined
                return self._gaps[k]
        return 0.0
