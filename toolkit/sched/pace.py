"""How fast a worker is when its memory is full, by its own laws: what work is shared out by among unequal ones.

A worker's speed hangs on how many rows decode at once. What tells unequal ones apart under load is what they do with as
many as they have room for: each row stays for its decode steps, and for the prefills of those who come meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from toolkit.sched.types import Job, Worker

LEAST_S = 1e-9  # that a row stays: a law may say that something takes no time
ROWS_MAX = 256  # that count: what engines run at most by default, and laws are asked for
TURN = 0.6180339887498949  # the golden ratio's: multiples of it fill a circle evenly, however far one counts


def requests_per_s(worker: Worker, prompt: float, output: float, most_rows: int = ROWS_MAX) -> float:
    """Requests of such lengths, in tokens, that the worker serves in a second when it is full."""
    law = worker.latency
    rows = max(min(int(worker.capacity_tokens // (prompt + output)), worker.slots, most_rows, ROWS_MAX), 1)
    stays_s = output * law.decode_s(rows, int(prompt + output / 2), 1) + rows * law.prefill_s(1, prompt)
    return rows / max(stays_s, LEAST_S)


def tokens_per_s(worker: Worker, job: Job, expected: int, most_rows: int) -> float:
    """Tokens, read and generated, of requests like `job`; `expected` is the length of an output."""
    output = _output(job, expected)
    return (job.length + output) * requests_per_s(worker, job.length, output, most_rows)


def by_pace(job: Job, kinds: Sequence[Worker], kind_of: NDArray[np.int64], expected: int, most_rows: int) -> int:
    """Which of the workers, so that each gets as many of the jobs that come one after the other as it is fast.

    By the job's ticket alone: no state, and no randomness.

    Args:
        kinds: a worker of each kind.
        kind_of: [n], the kind of each that the job may go to. The answer is a place in it.
    """
    output = _output(job, expected)
    paces = np.array([requests_per_s(worker, job.length, output, most_rows) for worker in kinds])
    bounds = np.cumsum(paces[kind_of])  # one after the other, as a loop would add them
    at = job.ticket * TURN % 1.0 * bounds[-1]
    return min(int(bounds.searchsorted(at, side="right")), len(bounds) - 1)


def _output(job: Job, expected: int) -> int:
    """Tokens that it will still generate; before anything has ended, all that it may."""
    output = min(expected, job.max_new_tokens) if expected > 1 else job.max_new_tokens
    return max(output - job.generated, 1)
