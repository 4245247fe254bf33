"""The hot arithmetic of the policies, compiled with numba. Plain arrays in, plain arrays out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    R = TypeVar("R")

    def njit(function: Callable[P, R]) -> Callable[P, R]: ...

else:
    from numba import njit as numba_njit

    njit = numba_njit(cache=True, nogil=True)


@njit
def split_by_serving_time(
    input_lengths: NDArray[np.int64],
    max_batch: NDArray[np.int64],
    table: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Serving time-oriented batching (SCLS paper, Algorithm 1 and Eq. 10).

    Args:
        input_lengths: [n], ascending.
        max_batch: [n], the largest batch whose longest input is the i-th; a batch of one is always allowed.
        table: [3, >= max(max_batch) + 1], T_serve(N, L) = table[0, N] + table[1, N] * L + table[2, N] * L^2.

    Returns:
        `starts` [n + 1]: the optimal last batch of the first i requests begins at starts[i]; and `total_s` [n + 1], the
        least total serving time of the first i requests, in seconds.
    """
    n = len(input_lengths)
    total_s = np.zeros(n + 1)
    starts = np.zeros(n + 1, dtype=np.int64)
    for i in range(1, n + 1):
        length = float(input_lengths[i - 1])
        best = total_s[i - 1] + table[0, 1] + length * (table[1, 1] + length * table[2, 1])
        start = i - 1
        for size in range(2, min(i, max_batch[i - 1]) + 1):
            t = total_s[i - size] + table[0, size] + length * (table[1, size] + length * table[2, size])
            if t < best:
                best = t
                start = i - size
        total_s[i] = best
        starts[i] = start
    return starts, total_s
