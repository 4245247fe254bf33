"""Which devices torch sees. Loads torch, and a CUDA context where there is a GPU; no model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import EngineError

NVIDIA_VERSION = Path("/proc/driver/nvidia/version")


@dataclass(slots=True, frozen=True)
class CudaDevice:
    """One GPU as a process sees it; `memory_bytes` is what the driver leaves to it, a little less
    than the GPU has.
    """

    index: int
    name: str
    memory_bytes: int
    free_bytes: int


@dataclass(slots=True, frozen=True)
class Devices:
    """What torch was built for, and the GPUs it can use. `driver` is '' without an NVIDIA driver."""

    torch: str
    cuda: str  # the CUDA release torch was built for, '' for a CPU build
    driver: str
    gpus: tuple[CudaDevice, ...]


def find_devices() -> Devices:
    """What there is on this machine. `EngineError` where a GPU is there and cannot be used."""
    import torch

    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        gpus = tuple(_gpu(index) for index in range(count))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise EngineError(
            f"the GPU cannot be used: {reason}", "see nvidia-smi for who uses it"
        ) from None
    return Devices(str(torch.__version__), torch.version.cuda or "", _driver(), gpus)


def _gpu(index: int) -> CudaDevice:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    return CudaDevice(index, torch.cuda.get_device_name(index), total, free)


def _driver() -> str:
    """The version of the NVIDIA kernel module, like 570.133.20."""
    try:
        text = NVIDIA_VERSION.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"Kernel Module[^0-9]*(?:x86_64|aarch64)?[^0-9]*(\d+\.\d+(?:\.\d+)?)", text)
    return found.group(1) if found else "unknown"
