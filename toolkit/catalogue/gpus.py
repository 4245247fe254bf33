"""GPUs: memory, bandwidth, FLOP/s and links, each figure with its source.

A recipe's `hardware: h100-sxm` takes its figures from here. None of them was chosen by llmctl: each
comes from a vendor's data sheet, from another project's public table, or from what a process was
told on such a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.errors import InputError, nearest

SHEET = "the vendor's data sheet, without sparsity"
AICONFIGURATOR = "ai-dynamo/aiconfigurator, systems/*.yaml at 095f58a (Apache-2.0)"
REPORTED = "what CUDA reported to processes there, in public error messages"
RUNPOD = "docs.runpod.io/serverless/pricing in 2026, an active worker"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        name: as recipes name it.
        device: the words that the driver's name of this GPU has, such as 'NVIDIA H100 80GB HBM3',
            but for those of `PLAIN`; `llmctl doctor` compares them.
        memory_gib: what a process gets, which is less than the label says; vLLM takes its share
            (`gpu_memory_utilization`) of this.
        memory_source: where `memory_gib` is from.
        bandwidth_gb_s: of the memory.
        tflops: dense, by precision: bf16 (fp16 is the same), fp8, fp4, int8; a precision that the
            tensor cores lack is absent.
        source: where bandwidth, FLOP/s and link are from.
        link: what connects GPUs of one machine.
        link_gb_s: of that, from one GPU in one direction.
        usd_per_hour: an example; None: no public price was found.
        price_source: where `usd_per_hour` is from.
        note: what a reader should know, such as that llmctl never ran there.
    """

    name: str
    device: str
    memory_gib: float
    memory_source: str
    bandwidth_gb_s: float
    tflops: Mapping[str, float]
    source: str
    link: str
    link_gb_s: float
    usd_per_hour: float | None = None
    price_source: str = ""
    note: str = ""

    @property
    def large(self) -> bool:
        """Whether vLLM plans larger passes by default: 70 GiB and no A100 (its `arg_utils.py`)."""
        return self.memory_gib >= 70 and not self.name.startswith("a100")


_ALL = (
    Gpu(
        "a100-40gb",
        "A100-40GB",
        39.4,
        REPORTED,
        1555,
        {"bf16": 312, "int8": 624},
        SHEET,
        "NVLink 3",
        300,
        note="SXM; the PCIe card has no NVLink",
    ),
    Gpu(
        "a100-80gb",
        "A100-80GB",
        79.1,
        REPORTED,
        2039,
        {"bf16": 312, "int8": 624},
        f"{SHEET}; {AICONFIGURATOR}",
        "NVLink 3",
        300,
        2.16,
        RUNPOD,
        "SXM; the PCIe card is a100-80gb-pcie",
    ),
    Gpu(
        "a100-80gb-pcie",
        "A100-80GB-PCIe",
        79.1,
        "as the SXM module: nvidia-smi shows 81,920 MiB on both",
        1935,
        {"bf16": 312, "int8": 624},
        SHEET,
        "PCIe 4",
        32,
    ),
    Gpu(
        "h100-sxm",
        "H100-80GB-HBM3",
        79.1,
        f"{REPORTED} (79.11: vllm-project/vllm#27508)",
        3350,
        {"bf16": 989, "fp8": 1979, "int8": 1979},
        f"{SHEET}; {AICONFIGURATOR}",
        "NVLink 4",
        450,
        3.35,
        RUNPOD,
    ),
    Gpu(
        "h100-pcie",
        "H100-PCIe",
        79.1,
        "as the SXM module: nvidia-smi shows 81,559 MiB on both",
        2000,
        {"bf16": 756, "fp8": 1513, "int8": 1513},
        f"{SHEET}; {AICONFIGURATOR}",
        "PCIe 5",
        64,
        2.79,
        "spheron.network, May 2026: RunPod's secure cloud",
    ),
    Gpu(
        "h100-nvl",
        "H100-NVL",
        93.0,
        f"{REPORTED} (93.00: ali-vilab/VACE#56)",
        3938,
        {"bf16": 835, "fp8": 1671, "int8": 1671},
        SHEET,
        "NVLink bridge between two",
        300,
    ),
    Gpu(
        "h200",
        "H200",
        139.8,
        "measured by llmctl on an H200 SXM",
        4800,
        {"bf16": 989, "fp8": 1979, "int8": 1979},
        f"{SHEET}; {AICONFIGURATOR}",
        "NVLink 4",
        450,
        4.46,
        RUNPOD,
    ),
    Gpu(
        "gh200",
        "GH200-480GB",
        95.0,
        "nvidia-smi shows 97,871 MiB; less what an H100 keeps for itself",
        4000,
        {"bf16": 990, "fp8": 1979, "int8": 1979},
        SHEET,
        "NVLink 4",
        450,
        note="the superchip with 96 GB of HBM3; the one with 144 GB has other figures",
    ),
    Gpu(
        "h20",
        "H20",
        95.0,
        REPORTED,
        4000,
        {"bf16": 148, "fp8": 296, "int8": 296},
        SHEET,
        "NVLink 4",
        450,
    ),
    Gpu(
        "l4",
        "L4",
        22.0,
        REPORTED,
        300,
        {"bf16": 121, "fp8": 242, "int8": 242},
        f"{SHEET}; {AICONFIGURATOR}",
        "PCIe 4",
        32,
        0.47,
        RUNPOD,
    ),
    Gpu(
        "l40s",
        "L40S",
        44.3,
        REPORTED,
        864,
        {"bf16": 362, "fp8": 733, "int8": 733},
        f"{SHEET}; {AICONFIGURATOR}",
        "PCIe 4",
        32,
        1.33,
        RUNPOD,
    ),
    Gpu(
        "a10g",
        "A10G",
        22.0,
        REPORTED,
        600,
        {"bf16": 70, "int8": 140},
        SHEET,
        "PCIe 4",
        32,
        1.01,
        "Amazon EC2 g5.xlarge, on demand in us-east-1",
    ),
    Gpu(
        "rtx-4090",
        "RTX-4090",
        23.6,
        f"{REPORTED} (23.64: 3DTopia/Phidias-Diffusion#8)",
        1008,
        {"bf16": 165, "fp8": 330, "int8": 661},
        f"{SHEET}; sums in 32 bits",
        "PCIe 4",
        32,
        0.76,
        RUNPOD,
        "GPUs cannot read each other's memory: tensor parallelism goes through the host",
    ),
    Gpu(
        "rtx-5090",
        "RTX-5090",
        31.3,
        f"{REPORTED} (31.37: Wan-Video/Wan2.1#465)",
        1792,
        {"bf16": 210, "fp8": 419, "fp4": 1676, "int8": 838},
        f"{SHEET}; sums in 32 bits",
        "PCIe 5",
        64,
        1.22,
        "deploybase.ai, March 2026: RunPod on demand",
        "GPUs cannot read each other's memory: tensor parallelism goes through the host",
    ),
    Gpu(
        "rtx-pro-6000",
        "RTX-PRO-6000",
        94.9,
        REPORTED,
        1792,
        {"bf16": 468, "fp8": 936, "fp4": 1871, "int8": 936},
        AICONFIGURATOR,
        "PCIe 5",
        64,
        1.57,
        "deploybase.ai, March 2026: RunPod on demand",
        "Blackwell; the FLOP/s are at 2,430 MHz",
    ),
    Gpu(
        "b200",
        "B200",
        178.3,
        REPORTED,
        7700,
        {"bf16": 2250, "fp8": 4500, "fp4": 9000, "int8": 4500},
        AICONFIGURATOR,
        "NVLink 5",
        900,
        6.84,
        RUNPOD,
    ),
    Gpu(
        "b300",
        "B300",
        267.6,
        REPORTED,
        7750,
        {"bf16": 2250, "fp8": 4500, "fp4": 14000, "int8": 153.5},
        AICONFIGURATOR,
        "NVLink 5",
        900,
    ),
    Gpu(
        "gb200",
        "GB200",
        184.3,
        REPORTED,
        8000,
        {"bf16": 2500, "fp8": 5000, "fp4": 10000, "int8": 5000},
        AICONFIGURATOR,
        "NVLink 5",
        900,
        note="one GPU of the superchip",
    ),
    Gpu(
        "mi300x",
        "MI300X",
        191.6,
        "what HIP reported to processes there, in public error messages",
        5300,
        {"bf16": 1307, "fp8": 2615, "int8": 2615},
        SHEET,
        "Infinity Fabric, seven links",
        448,
        1.85,
        "gpu.blog, 2026: Vultr",
        "prediction only: llmctl never ran there",
    ),
    Gpu(
        "mi325x",
        "MI325X",
        255.6,
        "data sheet, less what an MI300X keeps for itself",
        6000,
        {"bf16": 1307, "fp8": 2615, "int8": 2615},
        SHEET,
        "Infinity Fabric, seven links",
        448,
        note="prediction only: llmctl never ran there",
    ),
)
GPUS = {gpu.name: gpu for gpu in _ALL}


# Words of a driver's name that say nothing about the figures here.
PLAIN = {
    *("nvidia", "amd", "geforce", "tesla", "instinct", "blackwell"),
    *("sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6", "oam", "ac"),
    *("server", "workstation", "edition"),
}


def gpu_words(name: str) -> frozenset[str]:
    """The words of a GPU's name that tell it from others, such as h100, 80gb and hbm3."""
    return frozenset(re.findall(r"[a-z0-9]+", name.lower())) - PLAIN


def gpu_of(name: str) -> Gpu:
    """The GPU of this name: the catalogue's, or the driver's, as nvidia-smi prints it.

    A driver's name must have the words of `Gpu.device` and no other: an 'RTX 4090 Laptop GPU' and
    an 'H200 NVL' are other cards. `InputError` names the nearest for one that is not known.
    """
    found = GPUS.get(name.lower())
    if found is None:
        words = gpu_words(name)
        found = next((gpu for gpu in _ALL if words == gpu_words(gpu.device)), None)
    if found is None:
        near = [gpu.name for gpu in _ALL if words & set(gpu.name.split("-")) - {"rtx", "pcie"}]
        if near and words != {name.lower()}:
            hint = f"llmctl recipe gpus has {', '.join(near)}; other cards have other figures"
            raise InputError(f"there is no GPU '{name}' in the catalogue", hint)
        starts = [known for known in GPUS if known.startswith(name.lower())]
        hint = f"one of: {', '.join(starts)}" if name and starts else nearest(name.lower(), GPUS)
        raise InputError(f"there is no GPU '{name}' in the catalogue", hint)
    return found
