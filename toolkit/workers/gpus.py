"""Which GPUs this machine has, and which of them a worker's process may see: its own, so that workers of one machine do
not all take the first.

Asked before torch is loaded, and without it: the front never loads it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from toolkit.errors import EngineError
from toolkit.files.recipe import Recipe

VARIABLE = "CUDA_VISIBLE_DEVICES"
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
DEVICES = Path("/dev")
# What a GPU's driver makes in /dev: NVIDIA's, that of WSL, AMD's (whose torch has `cuda` devices too), two of Jetson's.
DEVICE_FILES = ("nvidia[0-9]*", "dxg", "kfd", "nvhost-gpu", "nvgpu")
NO_DEVICE = ("fake", "openai")  # engines that load no model here


def visible_gpus(environment: Mapping[str, str] = os.environ, driver: Path = NVIDIA_GPUS) -> list[str]:
    """The GPUs that this process may use, as CUDA names them; none where nobody says how many there are."""
    named = environment.get(VARIABLE)
    if named is not None:
        return [name for name in named.split(",") if name]
    count = len(list(driver.iterdir())) if driver.is_dir() else 0
    return [str(index) for index in range(count)]


def require_gpu(
    recipes: Iterable[Recipe],
    environment: Mapping[str, str] = os.environ,
    driver: Path = NVIDIA_GPUS,
    devices: Path = DEVICES,
) -> None:
    """`EngineError` where one of `recipes` needs a GPU and this machine has none that a process could use.

    A look at files, which takes no time: asked before anything slow, such as fetching a model, is done in vain. Where a
    GPU is there and cannot be used, the worker that loads says so.
    """
    wanted = next((one for one in recipes if one.hardware.device == "cuda" and one.engine.name not in NO_DEVICE), None)
    if wanted is None or sys.platform != "linux":
        return
    hidden = environment.get(VARIABLE) in ("", "-1")
    if hidden or not (visible_gpus({}, driver) or any(next(devices.glob(name), None) for name in DEVICE_FILES)):
        why = f"{VARIABLE} hides all GPUs" if hidden else "this machine has none"
        raise EngineError(
            f"recipe '{wanted.name}' needs a GPU, {wanted.hardware.name}: {why}",
            "profile and serve it where the GPU is; fit, tune, simulate and render run anywhere",
        )


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
