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


def gpus_of(worker: int, each: int, visible: Sequence[str]) -> str | None:
    """The `each` GPUs of a worker, for its environment; from the first again where there are fewer than workers.

    None: leave the environment as it is, since too few are known for even one worker.
    """
    groups = len(visible) // each
    if not groups:
        return None
    first = worker % groups * each
    return ",".join(visible[first : first + each])
