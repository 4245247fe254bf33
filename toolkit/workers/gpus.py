"""Which GPUs a worker's process may see: its own, so that workers of one machine do not all take the first.

Asked before torch is loaded, and without it: the front never loads it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def visible_gpus(environment: Mapping[str, str] = os.environ, driver: Path = NVIDIA_GPUS) -> list[str]:
    """The GPUs that this process may use, as CUDA names them; none where nobody says how many there are."""
    named = environment.get(VARIABLE)
    if named is not None:
        return [name for name in named.split(",") if name]
    count = len(list(driver.iterdir())) if driver.is_dir() else 0
    return [str(index) for index in range(count)]


def share_gpus(sizes: Sequence[int], visible: Sequence[str]) -> list[str | None]:
    """The GPUs of each worker, for its environment, one worker after the other; `sizes` are how many each takes.

    From the first again where there are no more. None: leave the environment as it is, since the worker takes none, or
    too few are known even for it alone.
    """
    found: list[str | None] = []
    first = 0
    for size in sizes:
        if first + size > len(visible):
            first = 0
        mine = visible[first : first + size]
        found.append(",".join(mine) if size and len(mine) == size else None)
        first += len(mine)
    return found
