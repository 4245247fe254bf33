"""The attention of a transformers model over the caches of this package.

`attend` is registered with transformers' `AttentionInterface`, its extension point for attention
functions, so the model itself is unchanged. What a cache returns for a layer's keys says how:

    [N, kv_heads, L, head_dim]    one padded batch, with a mask where rows differ
    `RowTokens`                   a decode step of fixed shape: rows are runs of tokens in one
                                  tensor [T, kv_heads, head_dim] (`fixed_step`)

Query heads that share a key become more queries of one head, so that keys are never repeated for a
decode step: some versions of transformers repeat them, several times the traffic of the step. With
SDPA's `enable_gqa` and a mask, CUDA falls back to its slowest kernel.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from toolkit.engines.slab import KVShape, additive

OUR_ATTENTION = "llmctl"
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_DIM_MAX = 256
FLASH_TOLERANCE = 0.02  # of the plain result, which rounds elsewhere

_logger = logging.getLogger(__name__)


class TokenRows(ABC):
    """The tokens that each row of a decode step attends to, the same for all layers.

    Args:
        firsts: [R + 1] int32, the place of each row's first token; the last one means nothing.
        lengths: [R] int32, how many tokens from there on.
        longest: no length is above this.
        dtype: of queries, keys and values.
    """

    @abstractmethod
    def __init__(
        self, firsts: torch.Tensor, lengths: torch.Tensor, longest: int, dtype: torch.dtype
    ) -> None: ...

    @abstractmethod
    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """[R, heads, head_dim] for queries [R, heads, head_dim]; keys and values are
        [T, kv_heads, head_dim].
        """


class GatheredRows(TokenRows):
    """Attention over a copy of each row's tokens, up to `longest`: on any device."""

    def __init__(
        self, firsts: torch.Tensor, lengths: torch.Tensor, longest: int, dtype: torch.dtype
    ) -> None:
        ahead = torch.arange(longest, device=lengths.device)[None, :]
        last = (lengths - 1)[:, None]
        # Past its end a row reads its last token again: others may hold what is no number.
        self._places = firsts[:-1, None] + torch.minimum(ahead, last)
        self._mask = additive(ahead <= last, dtype)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        own_keys = keys[self._places].transpose(1, 2)
        own_values = values[self._places].transpose(1, 2)
        return _packed(query[:, :, None], own_keys, own_values, self._mask, scale)[:, 0]


class FlashRows(TokenRows):
    """PyTorch's FlashAttention, for half precision on CUDA: it reads each row's tokens where they
    are, and no others.
    """

    def __init__(
        self, firsts: torch.Tensor, lengths: torch.Tensor, longest: int, dtype: torch.dtype
    ) -> None:
        self._firsts = firsts
        self._lengths = lengths
        self._longest = longest
        self._queries = torch.arange(len(firsts), dtype=torch.int32, device=firsts.device)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        # `torch.nn.attention.varlen` is the public name, with `seqused_k` from torch 2.12 on.
        output: torch.Tensor = torch.ops.aten._flash_attention_forward(
            query,
            keys,
            values,
            self._queries,
            self._firsts,
            1,
            self._longest,
            0.0,  # no dropout
            False,  # one query attends to all keys of its row
            False,
            scale=scale,
            seqused_k=self._lengths,
        )[0]
        return output


def choose_rows(like: torch.Tensor, heads: int, shapes: Sequence[KVShape]) -> type[TokenRows]:
    """How a model with `heads` query heads, and caches of these `shapes`, attends in steps of fixed
    shapes on the device and in the dtype of `like`.

    Flash attention is tried first, beside the plain result: its interface is not PyTorch's public
    one in all versions.
    """
    equal = len({shape[1::2] for pair in shapes for shape in pair}) == 1
    kv_heads = shapes[0][0][1]
    dim = shapes[0][0][3]
    if not (like.is_cuda and like.dtype in FLASH_DTYPES and equal):
        return GatheredRows
    if dim % 8 or dim > FLASH_DIM_MAX:
        return GatheredRows
    query = like.new_empty(2, heads, dim).normal_()
    keys = like.new_empty(40, kv_heads, dim).normal_()
    values = like.new_empty(40, kv_heads, dim).normal_()
    firsts = torch.tensor([21, 3, 0], dtype=torch.int32, device=like.device)
    lengths = torch.tensor([17, 1], dtype=torch.int32, device=like.device)

    def attended(kind: type[TokenRows]) -> torch.Tensor:
        return kind(firsts, lengths, 64, like.dtype).attend(query, keys, values, None)

    expected = attended(GatheredRows)
    try:
        off = float((attended(FlashRows) - expected).norm() / expected.norm())
        why = "" if off < FLASH_TOLERANCE else f"it is off by {100 * off:.0f} %"
    except (RuntimeError, TypeError) as error:
        why = str(error).splitlines()[0]
    if why:
        _logger.warning("FlashAttention does not work for decode steps of fixed shapes: %s", why)
        return GatheredRows
    return FlashRows


@dataclass(slots=True, frozen=True)
class RowTokens:
    """A layer's keys [T, kv_heads, head_dim], and which of them each row attends to."""

    tokens: torch.Tensor
    rows: TokenRows


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | RowTokens,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention [N, L, heads, head_dim] of queries [N, heads, L, head_dim]; L is 1 unless the keys
    are of one padded batch.
    """
    if isinstance(key, RowTokens):
        return key.rows.attend(query[:, :, 0], key.tokens, value, scaling)[:, None], None
    mask = attention_mask
    is_shared = mask is None or (mask.ndim == 4 and mask.shape[1] == mask.shape[2] == 1)
    if query.shape[2] == 1 and key.shape[1] < query.shape[1] and is_shared:
        return _packed(query, key, value, mask, scaling), None
    padded: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **others
    )
    return padded


def _packed(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """[N, 1, heads, head_dim] of queries [N, heads, 1, head_dim] over [N, kv_heads, L, head_dim],
    with a mask that all heads share.
    """
    rows, heads, _, dim = query.shape
    kv_heads = keys.shape[1]
    packed = query.reshape(rows, kv_heads, heads // kv_heads, dim)
    output = scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)
    return output.reshape(rows, 1, heads, dim)


def use_our_attention(model: PreTrainedModel) -> bool:
    """Let `model` attend through `attend`. Returns whether it can; else it stays as it is."""
    known = model.config._attn_implementation in ("sdpa", OUR_ATTENTION)
    can = bool(known and getattr(model, "_supports_attention_backend", False))
    if can:
        AttentionInterface.register(OUR_ATTENTION, attend)
        AttentionMaskInterface.register(OUR_ATTENTION, sdpa_mask)
        model.set_attn_implementation(OUR_ATTENTION)
    return can
