"""The hot arithmetic of the policies: plain arrays in, plain arrays out. numba compiles it at its
first use, and keeps what it compiled beside this file, or in NUMBA_CACHE_DIR. Its
import takes half a second, so callers import this module where they call a kernel.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

Compiled = TypeVar("Compiled", bound=Callable[..., Any])
njit: Callable[[Compiled], Compiled] = numba.njit(cache=True, nogil=True)


@njit
def split_by_serving_time(
    input_lengths: NDArray[np.int64], max_batch: NDArray[np.int64], table: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Serving time-oriented batching (SCLS paper, Algorithm 1 and Eq. 10).

    Args:
        input_lengths: [n], ascending.
        max_batch: [n], the largest batch with the i-th input as its longest; one row is always
            allowed.
        table: [3, >= max(max_batch) + 1], T_serve(N, L) = table[0, N] + table[1, N] * L + table[2,
            N] * L^2; with two rows more, the larger of this and the same with rows 3 and 4 in place
            of 0 and 1.

    Returns:
        `starts` [n + 1]: the optimal last batch of the first i requests begins at starts[i].
        `total_s` [n + 1]: the least total serving time of the first i requests, in seconds.
    """
    n = len(input_lengths)
    has_flat = table.shape[0] > 3
    total_s = np.zeros(n + 1)
    starts = np.zeros(n + 1, dtype=np.int64)
    for i in range(1, n + 1):
        length = float(input_lengths[i - 1])
        best = np.inf
        start = i - 1
        for size in range(1, max(min(i, max_batch[i - 1]), 1) + 1):
            t = (
                total_s[i - size]
                + table[0, size]
                + length * (table[1, size] + length * table[2, size])
            )
            if has_flat:
                flat = table[3, size] + length * (table[4, size] + length * table[2, size])
                t = max(t, total_s[i - size] + flat)
            if t < best:
                best = t
                start = i - size
        total_s[i] = best
        starts[i] = start
    return starts, total_s


@njit
def future_peak(
    keys: NDArray[np.int64], n: int, padded: bool, before: int = 0, held: int = 0
) -> int:
    """M*: the most tokens that rows will ever take together (Past-Future, Eq. 2-4); 0 of no rows.

    A row leaves when it has generated its remaining tokens, so the peak is at one of these moments:
    when the i-th row from the last ends, i rows are there, and each has grown by that row's
    remaining tokens. In paged memory they take sum(used) + i * remaining. In a slab, which is
    beyond the paper, they take i * (the longest used + remaining).

    Args:
        keys: [>= n], remaining << 32 | used of each row, descending.
        n: how many rows there are.
        padded: whether the rows are one slab.
        before: how many other rows end after all of these.
        held: what they take together, or the longest of them in a slab.
    """
    peak = 0
    for i in range(n):
        used = keys[i] & 0xFFFFFFFF
        remaining = keys[i] >> 32
        rows = before + i + 1
        if padded:
            held = max(held, used)
            peak = max(peak, rows * (held + remaining))
        else:
            held += used
            peak = max(peak, held + rows * remaining)
    return peak


@njit
def insert_and_peak(keys: NDArray[np.int64], n: int, key: int, padded: bool) -> int:
    """Insert `key` into the first n of `keys`, which descend, and return the peak of all n + 1."""
    at = n
    while at > 0 and keys[at - 1] < key:
        keys[at] = keys[at - 1]
        at -= 1
    keys[at] = key
    return future_peak(keys, n + 1, padded)


@njit
def _peaks(rows: NDArray[np.int64], first: int, padded: bool) -> NDArray[np.int64]:
    n = len(rows)
    keys = np.empty(n, dtype=np.int64)
    peaks = np.empty(n, dtype=np.int64)
    for i in range(n):
        peaks[i] = insert_and_peak(keys, i, (rows[i, 1] << 32) + rows[i, 0], padded)
    return peaks[first:]


def peaks_to_come(rows: Sequence[int], running: int, padded: bool) -> list[int]:
    """`future_peak` of the running rows with the first, with the first two, ... of the others.

    Args:
        rows: for each row the tokens that it holds and will generate, in turn.
        running: how many rows run, before the others.
        padded: whether the rows are one slab.
    """
    columns = np.array(array("q", rows)).reshape(-1, 2)
    peaks: list[int] = _peaks(columns, running, padded).tolist()
    return peaks


def peak_to_come(
    used: Sequence[int],
    remaining: Sequence[int],
    padded: bool,
    before: int = 0,
    held: int = 0,
) -> int:
    """`future_peak` of rows that hold `used` tokens each and will generate `remaining` more."""
    keys = np.sort((np.array(remaining, dtype=np.int64) << 32) + np.array(used, dtype=np.int64))
    return int(future_peak(keys[::-1].copy(), len(keys), padded, before, held))


@njit
def _uniform(state: NDArray[np.uint64]) -> float:
    """The next draw in [0, 1) of a splitmix64 stream."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@njit
def _sampled_length(history: NDArray[np.int64], generated: int, limit: int, u: float) -> int:
    """Sample the final length of a request that generated so much, given that it will be longer.

    The support points are [generated] + the longer lengths of the history + [the limit, or the
    longest length if that is more]. u in [0, 1) moves from the first point to the last, with linear
    interpolation. The result is at most `limit`, and exactly `limit` if the history is empty.
    """
    count = len(history)
    if count == 0:
        return limit
    low = 0
    span = count
    while span > 0:  # binary search for the first longer length, without a branch to mispredict
        half = span >> 1
        beyond = history[low + half] <= generated
        low += (half + 1) * beyond
        span = (span - half - 1) * beyond + half * (1 - beyond)
    position = u * (count - low + 1)
    k = int(position)
    share = position - k
    left = generated if k == 0 else history[low + k - 1]
    right = max(limit, history[count - 1]) if low + k == count else history[low + k]
    length = int(np.rint(left + share * (right - left)))
    return max(min(length, limit), generated)


@njit
def admit_past_future(
    running: NDArray[np.int64],
    waiting: NDArray[np.int64],
    history: NDArray[np.int64],
    limit_tokens: float,
    samples: int,
    seed: int,
    padded: bool = False,
) -> int:
    """How many waiting requests Past-Future admits (its Algorithm 1).

    Requests are admitted in order while the predicted peak stays below the limit.

    Args:
        running: [n, 3], length, generated tokens and max_new_tokens of each running request.
        waiting: [m, 3], the same of the waiting requests, in order.
        history: [w], output lengths of requests that ended, ascending.
        limit_tokens: the peak must stay below it.
        samples: sets of sampled lengths; the highest of their peaks counts.
        seed: of the samples.
        padded: whether memory is rows x the longest row.
    """
    n = len(running)
    m = len(waiting)
    state = np.array([seed], dtype=np.uint64)
    keys = np.empty((samples, n + m), dtype=np.int64)
    for s in range(samples):
        for i in range(n):
            generated = running[i, 1]
            final = _sampled_length(history, generated, running[i, 2], _uniform(state))
            keys[s, i] = -(((final - generated) << 32) | running[i, 0])
        keys[s, :n].sort()
        for i in range(n):
            keys[s, i] = -keys[s, i]
    for k in range(m):
        for s in range(samples):
            generated = waiting[k, 1]
            limit = waiting[k, 2]
            u = _uniform(state)
            if generated or not len(history):
                final = _sampled_length(history, generated, limit, u)
            else:
                final = min(int(history[int(u * len(history))]), limit)
            key = ((final - generated) << 32) | waiting[k, 0]
            if insert_and_peak(keys[s], n + k, key, padded) >= limit_tokens:
                return k
    return m
