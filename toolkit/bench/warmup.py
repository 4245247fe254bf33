"""The warm-up: other requests before the replay, which show how fast the machine is today.

A shared machine is not as fast as it was while it was profiled. The server knows how long its
batches took and how long its laws predict; the ratio, over requests that are not replayed, corrects
the prediction before anything is measured. Where workers compute on the front's cores, an arriving
request takes time from the batches that run; the server counts the arrivals during each batch,
which separates the two effects. The server also knows when it had each token. Clients see it later,
by the time of HTTP, tokenizing and streams, which is in no law. A server that has just started is
slow at first, so the first requests are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from toolkit.bench.client import LoadSpec, run
from toolkit.bench.predict import ServerConditions, counts
from toolkit.endpoints.target import Target
from toolkit.endpoints.wire import Sample
from toolkit.errors import InputError
from toolkit.files.bench import Front, Warmup
from toolkit.sim.worker import FrontDelay
from toolkit.traces.types import Trace

TOOK, PREDICTED = "llmctl_batch_seconds_total", "llmctl_predicted_batch_seconds_total"
SUM_NAMES = (
    *("batches", "took", "expected", "arrived", "due"),
    *("took_took", "took_expected", "took_arrived"),
    *("expected_expected", "expected_arrived", "arrived_arrived"),
    *("due_took", "due_expected", "due_arrived", "due_due"),
)
SUMS = {name: f"llmctl_slice_sums_total:{name}" for name in SUM_NAMES}
MIN_BATCHES = 40  # over fewer batches the machine's own drift looks like the cost of arrivals
ROUNDING = 1e-9  # a smaller share of a sum is the rounding error of a difference of equals
SURE = 2.0  # a cost must be above 0 by so many standard errors
MAX_ARRIVAL_SHARE = 0.9  # of the batches' time; arrivals cost no more
SETTLING = 0.25  # of the requests; they meet shapes, memory and code for the first time
# from submission until the driver has the token
TTFT, E2E = "llmctl_ttft_seconds", "llmctl_e2e_seconds"


def others(trace: Trace, after_s: float, count: int) -> Trace:
    """`count` requests of `trace` from `after_s` on, with their gaps; from the start of the trace
    again after its end. They arrive by time, also those of sessions.
    """
    first = int(np.searchsorted(trace.arrival_s, after_s))
    rows = (first + np.arange(count)) % len(trace)
    gaps_s = np.diff(trace.arrival_s[rows], prepend=trace.arrival_s[rows[:1]])
    # Time continues where the trace starts again.
    alone = replace(trace, sessions=None)
    return replace(alone.take(rows), arrival_s=np.cumsum(np.maximum(gaps_s, 0.0)))


class ArrivalCost(NamedTuple):
    """What each arriving request adds to the batches that run then, and how many arrivals met a
    batch.
    """

    cost_s: float = 0.0
    arrived: float = 0.0


NO_COST = ArrivalCost()


@dataclass(slots=True, frozen=True)
class ServerTimes:
    """What a server of llmctl's counted between two readings of its metrics, in seconds."""

    batch_s: float
    predicted_batch_s: float  # what its laws say of the same batches
    front: Front | None  # None: it counted other requests than the clients did
    arrivals: ArrivalCost = NO_COST

    @property
    def slowdown(self) -> float | None:
        """How many times as long as predicted batches took, without the time of requests that
        arrived meanwhile.

        None where no comparable batch ended.
        """
        if self.predicted_batch_s <= 0.0:
            return None
        return (
            self.batch_s - self.arrivals.cost_s * self.arrivals.arrived
        ) / self.predicted_batch_s


def arrival_cost_of(sums: Mapping[str, float]) -> ArrivalCost:
    """The cost per arrival that a server's `llmctl_slice_sums` over some batches show.

    The model: a batch takes `slowdown` times the law's time, plus `cost_s` for each request that
    arrives meanwhile. The first equation is that these add up to the time of all batches. The
    second weighs each batch by the arrivals that were due in the law's time. Plain least squares
    would be biased: a batch that is late for another reason meets more arrivals, which would then
    seem to cost that. Where the cost is below `SURE` standard errors, as where requests arrive so
    evenly that the two cannot be separated, it is 0, and the slowdown covers everything.
    """
    count, took, expected, arrived = (
        sums[name] for name in ("batches", "took", "expected", "arrived")
    )
    if count < MIN_BATCHES or expected <= 0.0 or arrived <= 0.0:
        return NO_COST
    mean_due = sums["due_expected"] / expected
    covariance = sums["due_arrived"] - mean_due * arrived
    if covariance <= ROUNDING * sums["due_arrived"]:
        return NO_COST
    cost_s = (sums["due_took"] - mean_due * took) / covariance
    slowdown = (took - cost_s * arrived) / expected
    residual = (
        sums["took_took"]
        + slowdown**2 * sums["expected_expected"]
        + cost_s**2 * sums["arrived_arrived"]
    )
    residual -= 2.0 * (slowdown * sums["took_expected"] + cost_s * sums["took_arrived"])
    residual += 2.0 * slowdown * cost_s * sums["expected_arrived"]
    spread = sums["due_due"] - 2.0 * mean_due * sums["due"] + count * mean_due**2
    error_s = math.sqrt(max(residual, 0.0) / (count - 2) * max(spread, 0.0)) / covariance
    if cost_s <= 0.0 or cost_s < SURE * error_s:
        return NO_COST
    return ArrivalCost(min(cost_s, MAX_ARRIVAL_SHARE * took / arrived), arrived)


def times_between(
    before: dict[str, float], after: dict[str, float], samples: Sequence[Sample]
) -> ServerTimes | None:
    """The growth of a server's counters while it served `samples`; None if it has no counters."""
    if not {TOOK, PREDICTED} <= before.keys() & after.keys():
        return None
    sums = {name: after.get(key, 0.0) - before.get(key, 0.0) for name, key in SUMS.items()}
    return ServerTimes(
        after[TOOK] - before[TOOK],
        after[PREDICTED] - before[PREDICTED],
        _front_delay(before, after, samples),
        arrival_cost_of(sums),
    )


def _front_delay(
    before: dict[str, float], after: dict[str, float], samples: Sequence[Sample]
) -> Front | None:
    """Mean latencies at the clients minus those at the server's driver, of the same requests.

    Refused requests never reach the driver. Where it counted other requests than those that were
    served, the delay is unknown.
    """
    served = [one for one in samples if not one.failure]
    clients = [
        (one.first_token_s - one.scheduled_s, one.last_token_s - one.scheduled_s) for one in served
    ]
    if not clients or any(one.failure and not one.refused for one in samples):
        return None
    delays_s = []
    for name, seen_s in zip((TTFT, E2E), np.mean(clients, axis=0).tolist(), strict=True):
        grown = [
            after.get(key, 0.0) - before.get(key, 0.0) for key in (f"{name}_count", f"{name}_sum")
        ]
        if grown[0] != len(clients):
            return None
        delays_s.append(max(seen_s - grown[1] / grown[0], 0.0))
    return Front(first_s=delays_s[0], last_s=delays_s[1])


def counts_of_times(target: Target) -> dict[str, float]:
    """The counters of a server of llmctl's. `InputError` where it does not report its batches."""
    found = counts(target)
    missing = sorted({TOOK, PREDICTED} - found.keys())
    if missing:
        raise InputError(
            f"{target.url}/metrics has no {missing[0]}",
            "is it a server of llmctl's? --warmup 0 needs no counters",
        )
    return found


SEEDS = 3  # of prompts: of a replay's, its warm-up's, and those that settle


def settle(
    target: Target, trace: Trace, load: LoadSpec, on_done: Callable[[], None]
) -> tuple[Trace, bool]:
    """Serve the first requests of `trace`, to their end; the others, and whether it was
    interrupted.
    """
    count = int(SETTLING * len(trace))
    if not count:
        return trace, False
    first, rest = trace.take(np.arange(count)), trace.take(np.arange(count, len(trace)))
    replay = run(target, first, replace(load, seed=load.seed + 2), on_done)
    return replace(rest, arrival_s=rest.arrival_s - rest.arrival_s[0]), replay.interrupted


def warm_up(
    target: Target, trace: Trace, load: LoadSpec, on_done: Callable[[], None]
) -> tuple[Warmup | None, bool]:
    """Serve `trace`, with other prompts than the replay's; what it shows once the server has
    settled, and whether it was interrupted.

    None where no batch ended that the laws can be compared with.
    """
    requests = len(trace)
    counts_of_times(target)  # a server without counters is named before the load
    trace, interrupted = settle(target, trace, load, on_done)
    if interrupted:
        return None, True
    before = counts_of_times(target)
    replay = run(target, trace, replace(load, seed=load.seed + 1), on_done)
    if replay.interrupted:
        return None, True
    times = times_between(before, counts_of_times(target), replay.samples)
    if times is None or times.slowdown is None:
        return None, False
    return (
        Warmup(
            requests=requests,
            batch_s=times.batch_s,
            predicted_batch_s=times.predicted_batch_s,
            slowdown=times.slowdown,
            arrival_cost_s=times.arrivals.cost_s,
            front=times.front,
        ),
        False,
    )


def conditions(
    slowdown: float, front: Front | None, finished: Sequence[int], arrival_cost_s: float = 0.0
) -> ServerConditions:
    """The conditions of a prediction; without a `front` the delay is what the fit knows."""
    delay = FrontDelay(front.first_s, front.last_s) if front else None
    return ServerConditions(slowdown, delay, tuple(finished), arrival_cost_s)
