"""Other requests before the replay: they warm the server up, and show how fast the machine is today.

A machine that others share is not as fast as it was while it was profiled. The server knows how long its batches took
and how long its laws say they take; the ratio, over requests that are not replayed, corrects the prediction before
anything is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from toolkit.bench.client import Load, run
from toolkit.bench.costs import counts
from toolkit.bench.report import Warmup
from toolkit.endpoints.target import Target
from toolkit.errors import InputError
from toolkit.traces.types import Trace

TOOK, PREDICTED = "llmctl_batch_seconds_total", "llmctl_predicted_batch_seconds_total"


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
    )


class BatchTimes(NamedTuple):
    """Seconds of a server's batches so far, and what its laws say of the same."""

    took_s: float
    predicted_s: float

    def since(self, before: BatchTimes) -> BatchTimes:
        return BatchTimes(self.took_s - before.took_s, self.predicted_s - before.predicted_s)

    @property
    def slowdown(self) -> float | None:
        return self.took_s / self.predicted_s if self.predicted_s > 0.0 else None


def batch_times(target: Target) -> BatchTimes:
    """What a server of llmctl's counts. InputError where it does not tell."""
    found = counts(target)
    missing = sorted({TOOK, PREDICTED} - found.keys())
    if missing:
        raise InputError(f"{target.url}/metrics has no {missing[0]}", "is it llmctl's server? --warmup 0 does without")
    return BatchTimes(found[TOOK], found[PREDICTED])


def slowdown_since(before: BatchTimes, target: Target) -> float | None:
    """How slow the batches since `before` were; None where there were none, or the server has gone meanwhile."""
    try:
        return batch_times(target).since(before).slowdown
    except InputError:
        return None


def warm_up(target: Target, trace: Trace, load: Load, on_done: Callable[[], None]) -> tuple[Warmup | None, bool]:
    """Serve `trace`, with other prompts than the replay's; what its batches say, and whether it was interrupted.

    None where no batch ended that the laws can be held against.
    """
    before = batch_times(target)
    replay = run(target, trace, replace(load, seed=load.seed + 1), on_done)
    if replay.interrupted:
        return None, True
    times = batch_times(target).since(before)
    if times.slowdown is None:
        return None, False
    warm = Warmup(
        requests=len(trace), batch_s=times.took_s, predicted_batch_s=times.predicted_s, slowdown=times.slowdown
    )
    return warm, False
