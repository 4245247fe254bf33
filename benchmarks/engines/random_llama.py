"""A Llama of random weights, for benchmarks in which several systems load the same model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def save_llama(folder: Path, sizes: Mapping[str, Any]) -> None:
    """Write config.json and safetensors of a model with these fields of `LlamaConfig`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    # with 0.02 random weights repeat one token, and equal tokens prove little
    config = LlamaConfig(initializer_range=0.12, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
