"""GPUs: memory, bandwidth, FLOP/s and links, each figure with its source (data/gpus.yaml).

A recipe's `hardware: h100-sxm` takes its figures from here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.catalogue.tables import read_table
from toolkit.errors import InputError, nearest


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
        measured: the times of its operators were measured, so laws can be computed for it.
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
    measured: bool = False
    usd_per_hour: float | None = None
    price_source: str = ""
    note: str = ""

    @property
    def packs_sparse(self) -> bool:
        """Return whether kernels of sparse attention keep scales and 16 bits within a KV cache of 8
        bits: FlashMLA's do, and FlashInfer's, which vLLM takes on Blackwell, do not.
        """
        return "fp4" not in self.tflops

    @property
    def usual_limits(self) -> tuple[int, int]:
        """Return the most rows and the most tokens of a pass of vLLM's server where no flag sets
        them: by the memory, and less on an A100 (`get_batch_defaults`, vLLM 0.28 to 0.33).
        """
        if self.memory_gib >= 160:
            return 1024, 16384
        is_large = self.memory_gib >= 70 and not self.name.startswith("a100")
        return (1024, 8192) if is_large else (256, 2048)


GPUS = {one["name"]: Gpu(**one) for one in read_table("gpus")}


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
        found = next((gpu for gpu in GPUS.values() if words == gpu_words(gpu.device)), None)
    if found is None:
        near = [
            gpu.name for gpu in GPUS.values() if words & set(gpu.name.split("-")) - {"rtx", "pcie"}
        ]
        if near and words != {name.lower()}:
            hint = f"llmctl recipe gpus has {', '.join(near)}; other cards have other figures"
            raise InputError(f"there is no GPU '{name}' in the catalogue", hint)
        starts = [known for known in GPUS if known.startswith(name.lower())]
        hint = f"one of: {', '.join(starts)}" if name and starts else nearest(name.lower(), GPUS)
        raise InputError(f"there is no GPU '{name}' in the catalogue", hint)
    return found
