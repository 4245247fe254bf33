"""The devices that torch sees. Loads torch, and a CUDA context if there is a GPU, but no model.

Without torch, the driver says which GPUs there are.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import EngineError
from toolkit.extras import absent
from toolkit.units import MIB

NVIDIA_VERSION = Path("/proc/driver/nvidia/version")
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=index,name,memory.total,memory.free")
CSV = "--format=csv,noheader,nounits"
SMI_TIMEOUT_S = 30.0


@dataclass(slots=True, frozen=True)
class CudaDevice:
    """One GPU as a process sees it.

    `memory_bytes` is what the driver leaves to processes, a little less than the GPU has.
    """

    index: int
    name: str
    memory_bytes: int
    free_bytes: int


@dataclass(slots=True, frozen=True)
class Devices:
    """The versions of torch, CUDA and the driver, and the GPUs that torch can use.

    `torch` is '' where it is not installed; the driver then lists the GPUs. `cuda` is the CUDA
    release that torch was built for, '' for a CPU build. `driver` is '' without an NVIDIA driver.
    """

    torch: str
    cuda: str
    driver: str
    gpus: tuple[CudaDevice, ...]


def find_devices() -> Devices:
    """This machine's devices. Raises `EngineError` if there is a GPU that cannot be used."""
    if absent(["torch"]):
        return Devices("", "", _driver(), _gpus_of_driver())
    import torch

    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        gpus = tuple(
            CudaDevice(index, torch.cuda.get_device_name(index), total, free)
            for index in range(count)
            for free, total in (torch.cuda.mem_get_info(index),)
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise EngineError(
            f"the GPU cannot be used: {reason}", "see which processes use it: nvidia-smi"
        ) from None
    return Devices(str(torch.__version__), torch.version.cuda or "", _driver(), gpus)


def choose_attention_kernels() -> None:
    """Leave cuDNN out of the attentions that torch chooses from; call it on CUDA.

    cuDNN plans a kernel for each batch size and length, and a decode step has a length that the
    step before did not have: each would wait for a plan. On an H200 a step took 1.09 times as long
    with it (docs/results/gpu.md).
    """
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)


def _driver() -> str:
    """The version of the NVIDIA kernel module, like 570.133.20."""
    try:
        text = NVIDIA_VERSION.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    version = re.search(r"Kernel Module[^0-9]*(?:x86_64|aarch64)?[^0-9]*(\d+\.\d+(?:\.\d+)?)", text)
    return version.group(1) if version else "unknown"


def _gpus_of_driver() -> tuple[CudaDevice, ...]:
    """The GPUs that nvidia-smi lists, whatever CUDA_VISIBLE_DEVICES says; none without it."""
    try:
        done = subprocess.run(
            [*NVIDIA_SMI, CSV], capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    found = re.findall(r"^(\d+), (.+), (\d+), (\d+)$", done.stdout, re.MULTILINE)
    return tuple(
        CudaDevice(int(index), name, int(total) * MIB, int(free) * MIB)
        for index, name, total, free in found
    )
