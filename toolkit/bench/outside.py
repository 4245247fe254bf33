"""How a server does today that tells nothing of itself: read off what clients saw of other requests.

Two numbers are found, in this order. The slowdown is that at which the simulated requests take as long from their first
to their last tokens as the measured ones did, summed over all of them: it is of steps, and of what prompts of others
put between them. The front is what is then left of the mean time to the first token: HTTP and text on a machine that
is at work, which a profile asks one request at a time for. What is left out: that either changes within a minute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from toolkit.bench.predict import Conditions, predicted
from toolkit.bench.report import served
from toolkit.endpoints.stream import Sample
from toolkit.files.bench import Front, Warmup
from toolkit.files.plan import Plan
from toolkit.metrics import Served
from toolkit.sim.front import NO_DELAY
from toolkit.traces.types import Trace

FACTOR_MAX = 16.0  # a slowdown is between this and its inverse
HALVINGS = 12  # of that range: to 0.14 %. Rows that last longer meet others, so seconds are no line in the slowdown

Chosen = NDArray[np.bool_]


def seen_by_clients(plan: Plan, trace: Trace, samples: Sequence[Sample], finished: Sequence[int]) -> Warmup | None:
    """What `samples`, the requests of `trace` as they were served, show of a server under `plan`.

    `finished` are the output lengths of requests before them. None where no request had two tokens.
    """
    measured = served(samples)
    simulated = predicted(plan, trace, Conditions(finished=tuple(finished))).served
    both = measured.ok & simulated.ok
    seconds, expected = _streamed_s(measured, both), _streamed_s(simulated, both)
    if seconds <= 0.0 or expected <= 0.0:
        return None
    low, high = 1.0 / FACTOR_MAX, FACTOR_MAX
    for _ in range(HALVINGS):
        slowdown = math.sqrt(low * high)
        simulated = predicted(plan, trace, Conditions(slowdown, NO_DELAY, tuple(finished))).served
        if _streamed_s(simulated, both) < seconds:
            low = slowdown
        else:
            high = slowdown
    left_s = max(_first_s(measured, both) - _first_s(simulated, both), 0.0)
    return Warmup(
        requests=len(samples),
        batch_s=seconds,
        predicted_batch_s=expected,
        slowdown=slowdown,
        front=Front(first_s=left_s, last_s=left_s),
    )


def _streamed_s(requests: Served, chosen: Chosen) -> float:
    return float((requests.finish_s - requests.first_token_s)[chosen].sum())


def _first_s(requests: Served, chosen: Chosen) -> float:
    return float((requests.first_token_s - requests.arrival_s)[chosen].mean())
