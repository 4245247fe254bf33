"""Other requests before the replay: they warm the server up, and show how fast the machine is today.

A machine that others share is not as fast as it was while it was profiled. The server knows how long its batches took
and how long its laws say they take; the ratio, over requests that are not replayed, corrects the prediction before
anything is measured. The server also knows when it had each token: clients see it later, by what HTTP, tokenizing and
streams take, which is in no law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from toolkit.bench.client import Load, run
from toolkit.bench.costs import counts
from toolkit.bench.predict import Conditions
from toolkit.bench.report import Front, Warmup
from toolkit.endpoints.stream import Sample
from toolkit.endpoints.target import Target
from toolkit.errors import InputError
from toolkit.sim.front import FrontDelay
from toolkit.traces.types import Trace

TOOK, PREDICTED = "llmctl_batch_seconds_total", "llmctl_predicted_batch_seconds_total"
TTFT, E2E = "llmctl_ttft_seconds", "llmctl_e2e_seconds"  # from submission to the driver's having a token


def others(trace: Trace, after_s: float, count: int) -> Trace:
    """`count` requests of `trace` from `after_s` on, as they arrive there; from its start again where it ends."""
    first = int(np.searchsorted(trace.arrival_s, after_s))
    rows = (first + np.arange(count)) % len(trace)
    gaps_s = np.diff(trace.arrival_s[rows], prepend=trace.arrival_s[rows[:1]])
    return replace(
        trace,
        arrival_s=np.cumsum(np.maximum(gaps_s, 0.0)),  # where it starts again, time goes on
        prompt_tokens=trace.prompt_tokens[rows],
        output_tokens=trace.output_tokens[rows],
        max_tokens=trace.max_tokens[rows],
        priority=trace.prioritised(rows),
    )


@dataclass(slots=True, frozen=True)
class ServerTimes:
    """What a server of llmctl's counted between two looks at its metrics, in seconds."""

    batch_s: float
    predicted_batch_s: float  # what its laws say of the same batches
    front: Front | None  # None: it counted other requests than the clients did

    @property
    def slowdown(self) -> float | None:
        """How many times as long as the laws say batches took; None where none ended that they can be held against."""
        return self.batch_s / self.predicted_batch_s if self.predicted_batch_s > 0.0 else None


def times_between(before: dict[str, float], after: dict[str, float], samples: Sequence[Sample]) -> ServerTimes | None:
    """The growth of a server's counters while `samples` were served; None where it does not count."""
    if not {TOOK, PREDICTED} <= before.keys() & after.keys():
        return None
    return ServerTimes(
        after[TOOK] - before[TOOK], after[PREDICTED] - before[PREDICTED], _front_delay(before, after, samples)
    )


def _front_delay(before: dict[str, float], after: dict[str, float], samples: Sequence[Sample]) -> Front | None:
    """Mean latencies at the clients less those at the server's driver, of the same requests.

    Requests that were refused never came to the driver; where it counted others than those that were
    served, the delay is not known.
    """
    served = [one for one in samples if not one.failure]
    clients = [(one.first_token_s - one.scheduled_s, one.last_token_s - one.scheduled_s) for one in served]
    if not clients or any(one.failure and not one.refused for one in samples):
        return None
    delays_s = []
    for name, seen_s in zip((TTFT, E2E), np.mean(clients, axis=0).tolist(), strict=True):
        grown = [after.get(key, 0.0) - before.get(key, 0.0) for key in (f"{name}_count", f"{name}_sum")]
        if grown[0] != len(clients):
            return None
        delays_s.append(max(seen_s - grown[1] / grown[0], 0.0))
    return Front(first_s=delays_s[0], last_s=delays_s[1])


def counts_of_times(target: Target) -> dict[str, float]:
    """What a server of llmctl's counts. InputError where it does not tell of its batches."""
    found = counts(target)
    missing = sorted({TOOK, PREDICTED} - found.keys())
    if missing:
        raise InputError(f"{target.url}/metrics has no {missing[0]}", "is it llmctl's server? --warmup 0 does without")
    return found


def warm_up(target: Target, trace: Trace, load: Load, on_done: Callable[[], None]) -> tuple[Warmup | None, bool]:
    """Serve `trace`, with other prompts than the replay's; what it shows, and whether it was interrupted.

    None where no batch ended that the laws can be held against.
    """
    before = counts_of_times(target)
    replay = run(target, trace, replace(load, seed=load.seed + 1), on_done)
    if replay.interrupted:
        return None, True
    times = times_between(before, counts_of_times(target), replay.samples)
    if times is None or times.slowdown is None:
        return None, False
    return (
        Warmup(
            requests=len(trace),
            batch_s=times.batch_s,
            predicted_batch_s=times.predicted_batch_s,
            slowdown=times.slowdown,
            front=times.front,
        ),
        False,
    )


def conditions(slowdown: float, front: Front | None, finished: Sequence[int]) -> Conditions:
    """What a prediction may know; without a `front`, what the fit knows of one."""
    delay = FrontDelay(front.first_s, front.last_s) if front else None
    return Conditions(slowdown, delay, tuple(finished))
