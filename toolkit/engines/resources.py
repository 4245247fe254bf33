"""What the process of an engine may use of this machine: its GPUs, and the variables of its
environment for threads and memory. Nothing here loads torch, because a front never does.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.engine_traits import traits_of
from toolkit.errors import EngineError
from toolkit.files.recipe import Recipe

GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
DEVICES = Path("/dev")
# The device files of GPU drivers: NVIDIA's, WSL's, AMD's (torch for AMD has `cuda` devices too),
# and two of Jetson's.
DEVICE_FILES = ("nvidia[0-9]*", "dxg", "kfd", "nvhost-gpu", "nvgpu")


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA names them; none if their number is
    unknown.
    """
    named = os.environ.get(GPUS_VARIABLE)
    if named is not None:
        return [name for name in named.split(",") if name]
    return [str(index) for index in range(_gpu_count())]


def _gpu_count() -> int:
    """The NVIDIA GPUs of this machine; 0 if their number is unknown.

    Some sandboxes hide the driver's folder in /proc and show only the device files.
    """
    if NVIDIA_GPUS.is_dir() and (count := len(list(NVIDIA_GPUS.iterdir()))):
        return count
    return sum(path.name.removeprefix("nvidia").isdigit() for path in DEVICES.glob("nvidia*"))


def require_gpu(recipe: Recipe) -> None:
    """Raise `EngineError` if the recipe needs a GPU and this machine has none that a process can
    use.

    It only looks at files, which takes no time, so it comes before slow work such as fetching a
    model. If there is a GPU that cannot be used, the worker that loads reports it.
    """
    needs = recipe.hardware.device == "cuda" and traits_of(recipe.engine.name).loads_model
    if not needs or sys.platform != "linux":
        return
    hidden = os.environ.get(GPUS_VARIABLE) in ("", "-1")
    if hidden or not (_gpu_count() or any(any(DEVICES.glob(name)) for name in DEVICE_FILES)):
        why = f"{GPUS_VARIABLE} hides all GPUs" if hidden else "this machine has none"
        raise EngineError(
            f"recipe '{recipe.name}' needs a GPU, {recipe.hardware.name}: {why}",
            "profile and serve it where the GPU is; fit, tune, simulate and render run anywhere",
        )


@dataclass(slots=True, frozen=True)
class GpuShare:
    """The GPUs of one worker.

    `names` goes into its environment; None: leave the environment unchanged, because the worker
    takes no GPU or fewer GPUs are known than it takes. `workers` is how many workers the busiest of
    these GPUs has: each may use that part of its memory.
    """

    names: str | None
    workers: int = 1


def share_gpus(
    workers: int, size: int, visible: Sequence[str], *, shared: bool = False
) -> list[GpuShare]:
    """The GPUs of each worker, which takes `size` of the `visible` ones.

    Workers get different GPUs while there are enough. With `shared`, further workers begin again
    with the first GPU. Without it, `EngineError` is raised: two workers on one GPU would each claim
    its whole memory and time.
    """
    chosen: list[Sequence[str]] = []
    first = 0
    for _ in range(workers):
        if first + size > len(visible):
            first = 0
        names = visible[first : first + size]
        chosen.append(names if len(names) == size else ())
        first += len(names)
    used = Counter(name for names in chosen for name in names)
    busiest = max(used.values(), default=1)
    if busiest > 1 and not shared:
        raise EngineError(
            f"{workers} workers take {workers * size} GPUs, and this machine has {len(visible)} "
            f"({GPUS_VARIABLE}={','.join(visible)})",
            "start fewer workers, or set engine.share_gpus: true in the recipe to divide each "
            "GPU's memory between its workers",
        )
    return [
        GpuShare(",".join(names) if names else None, max((used[name] for name in names), default=1))
        for names in chosen
    ]


KEEP_MEMORY = {  # of glibc's malloc, in bytes: freed memory stays with the process
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 31),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
# The first is the name that all supported versions of torch read.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def engine_environment(threads: int | None, device: str) -> dict[str, str]:
    """This process's environment, with `engine_variables`. The user's allocator settings stay."""
    variables = engine_variables(threads, device)
    if any(name in os.environ for name in ALLOCATOR_VARIABLES):
        variables.pop(ALLOCATOR_VARIABLES[0], None)
    return os.environ | variables


def engine_variables(threads: int | None, device: str) -> dict[str, str]:
    """Variables that torch's libraries read when they are loaded: the number of threads, glibc's
    thresholds, and on CUDA the allocator's settings.

    By default glibc maps and unmaps memory for every large tensor, so that on a CPU each prefill
    faults its pages in again (60 times as many faults, 6 to 18 % of a prefill of 1,024 tokens).
    """
    variables = {"TOKENIZERS_PARALLELISM": "false"} | KEEP_MEMORY
    if threads is not None:
        variables |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    if device == "cuda":
        # A slab that grows is a little larger than any block that was freed before it. Segments
        # that can be extended reuse that memory; others leave it as holes.
        variables[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    return variables
