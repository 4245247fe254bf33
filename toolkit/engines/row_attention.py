"""Attention for a batch whose rows have caches of their own: each row's query meets its own keys, and no padding.

Registered with transformers' `AttentionInterface`, its extension point for attention functions: the model is as it was.
A pass over one padded batch goes to transformers' own SDPA function as before. One call per row and layer is cheap on a
CPU; on a GPU it is a kernel launch each, which is what padded slabs are for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from toolkit.errors import EngineError

NAME = "sdpa_by_row"
OneOrMany = torch.Tensor | tuple[torch.Tensor, ...]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: OneOrMany,
    value: OneOrMany,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """[N, 1, heads, head_dim] of queries [N, heads, 1, head_dim] that meet N keys [kv_heads, length, head_dim].

    Keys and values that are tensors are a padded batch. Query heads that share a key go together, as more queries of
    one head, so that keys need not be repeated.
    """
    if isinstance(key, torch.Tensor):
        padded: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return padded
    rows, heads, _, dim = query.shape
    kv_heads = key[0].shape[0]
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, dim)
    found = [
        scaled_dot_product_attention(one[None], keys[None], values[None], scale=scaling)
        for one, keys, values in zip(grouped, key, value, strict=True)
    ]
    return torch.cat(found).view(rows, 1, heads, dim), None


def use_row_attention(model: PreTrainedModel) -> None:
    """Let `model` attend by row where its cache is by row. `EngineError` for a model that takes no such function."""
    kind, now = model.config.model_type, model.config._attn_implementation
    if now not in ("sdpa", NAME) or not getattr(model, "_supports_attention_backend", False):
        raise EngineError(
            f"model_type '{kind}' attends by '{now}' and cannot attend row by row", "set engine.kv_layout to slab"
        )
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
