"""The longest request that a worker's memory holds: what no limit of a request may pass."""

from __future__ import annotations

import numpy as np

from toolkit.sched.protocols import MemoryLaw


def longest(memory: MemoryLaw, continuous: bool) -> int:
    """Prompt + output, in tokens, of a request alone on the worker: in rounds (`continuous`), or in a static batch."""
    return memory.usable_tokens if continuous else _longest_alone(memory)


def _longest_alone(memory: MemoryLaw) -> int:
    """By bisection, the law being monotone."""

    def fits(length: int) -> bool:
        return bool(memory.max_batch(np.array([length]), 0, 0.0)[0] >= 1)

    low, high = 0, 1 << 40
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
