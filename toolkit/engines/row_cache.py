"""A KV cache in which each row has memory of its own: no padding, and nothing moves when rows come
and go.

    block of a row   [2 * layers, kv_heads, room, head_dim]: keys and values of its first `length` tokens, by layer

A step writes one token at the end of every block, and attention reads each block up to there
(`toolkit.engines.row_cache`). Blocks grow by `GROWTH` tokens. What a batch takes is what its rows
hold, so a scheduler that counts real tokens counts right; `RebatchCache` has the padded slab of
BATON, which suits GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from toolkit.engines.memory import ByteLedger
from toolkit.engines.rebatch_cache import RebatchCache, RowKV
from toolkit.engines.slab import KVShape
from toolkit.errors import EngineError

GROWTH = (
    32  # tokens: a smaller one copies blocks more often, a larger one leaves more of them empty
)
Views = tuple[torch.Tensor, ...]  # one per row


class RowCache(Cache):  # type: ignore[misc]
    """The rows 0..N-1 of a running batch, with what `RunningBatch` asks of a cache.

    Args:
        shapes: what each layer caches, from any earlier cache of the model: the same in all layers.
        like: a tensor of the cache's dtype, on its device.
        ledger: is charged for the blocks. `torch.OutOfMemoryError` where they do not fit.
    """

    def __init__(self, shapes: Sequence[KVShape], like: torch.Tensor, ledger: ByteLedger) -> None:
        first = shapes[0][0]
        if any(shape != first for pair in shapes for shape in pair):
            raise EngineError(
                "keys and values of this model differ in shape", "set engine.kv_layout to slab"
            )
        super().__init__(layers=[_RowLayer(self, index) for index in range(len(shapes))])
        self._like = like
        self._ledger = ledger
        self._heads, self._dim = first[1], first[3]
        self.bytes_per_token = like.itemsize * 2 * len(shapes) * self._heads * self._dim
        self._blocks: list[torch.Tensor] = []
        self._lengths: list[int] = []
        self._ends: list[Views] | None = (
            None  # where the next step writes, by layer: keys and values in turn
        )
        self._read: list[Views] = []  # what it reads then
        self._positions: torch.Tensor | None = None  # of the next step; None: to be made
        self._first_row = 0  # that the next pass is over

    @property
    def device(self) -> torch.device:
        return self._like.device

    @property
    def rows(self) -> int:
        """N."""
        return len(self._blocks)

    @property
    def width(self) -> int:
        """The length of the longest row."""
        return max(self._lengths, default=0)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return list(self._lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self._lengths)

    @property
    def padded_tokens(self) -> int:
        """Tokens that the blocks have room for: what memory is taken for."""
        return sum(block.shape[2] for block in self._blocks)

    @property
    def columns(self) -> int:
        """Tokens that the largest block has room for."""
        return max((block.shape[2] for block in self._blocks), default=0)

    @property
    def columns_ahead(self) -> int:
        """Steps until the longest row's block has to grow."""
        return self.columns - self.width

    def make_room(self, rows: int, width: int, ahead: int) -> None:
        """See that the rows can take `ahead` tokens more. Newcomers bring their blocks: `rows`,
        `width` say nothing.
        """
        for index, length in enumerate(self._lengths):
            if length + ahead > self._blocks[index].shape[2]:
                old = self._blocks[index]
                with self._block(_room(length + ahead)) as block:
                    block[:, :, :length] = old[:, :, :length]
                self._blocks[index] = block
                self._ledger.take(-old.nbytes)
                self._ends = None

    def growth_bytes(self, newcomers: int, width: int) -> int:
        """What so many newcomers of at most `width` tokens take."""
        return newcomers * _room(width + 1) * self.bytes_per_token

    def join(self, row: RowKV) -> None:
        """Put a row after the others. The tensors may lie on another device."""
        length = row[0][0].shape[1]
        with self._block(_room(length + 1)) as block:
            own = block[:, :, :length].unbind(0)
            for layer, (keys, values) in enumerate(row):
                own[2 * layer].copy_(keys)
                own[2 * layer + 1].copy_(values)
        self._blocks.append(block)
        self._lengths.append(length)
        self._refresh()

    def read(self, index: int) -> RowKV:
        """A row's keys and values; views, valid until the cache changes."""
        own = self._blocks[index][:, :, : self._lengths[index]].unbind(0)
        return list(zip(own[::2], own[1::2], strict=True))

    def leave(self, indices: Sequence[int]) -> list[int]:
        """Drop rows. The old indices of the others, in their new order."""
        self._ledger.take(-sum(self._blocks[index].nbytes for index in indices))
        gone = set(indices)
        order = [index for index in range(self.rows) if index not in gone]
        self._blocks = [self._blocks[index] for index in order]
        self._lengths = [self._lengths[index] for index in order]
        self._refresh()
        return order

    @contextmanager
    def rows_from(self, first: int) -> Iterator[None]:
        """Within it, a pass is over rows from this one on, as many as it has."""
        self._first_row = first
        try:
            yield
        finally:
            self._first_row = 0

    def advance(self) -> None:
        """A pass of one token per row has been written."""
        self._lengths = [length + 1 for length in self._lengths]
        self._positions = None if self._positions is None else self._positions.add_(1)
        self._ends = None

    def mask(self, *, as_4d: bool) -> torch.Tensor | None:
        """Of the next step: a row may look at all that it has."""
        return None

    def positions(self) -> torch.Tensor:
        """[N, 1]: the position of each row's next token."""
        if self._positions is None:
            self._positions = torch.tensor(self._lengths, dtype=torch.long, device=self.device)[
                :, None
            ]
        return self._positions

    def shrink(self) -> None:
        """Blocks went with their rows."""

    def fit(self, columns: int = 0) -> None:
        """Blocks have little to spare."""

    def clear(self) -> None:
        """Drop all rows."""
        self.leave(range(self.rows))

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[Views, Views]:
        """A layer's next token of each row in the pass, [N, kv_heads, 1, head_dim]; what their
        attention then reads.
        """
        if self._ends is None:
            self._ends = self._views()
        key, value = 2 * layer, 2 * layer + 1
        rows = slice(self._first_row, self._first_row + keys.shape[0])
        torch._foreach_copy_(
            [*self._ends[key][rows], *self._ends[value][rows]],
            [*keys.squeeze(2).unbind(0), *values.squeeze(2).unbind(0)],
        )
        return self._read[key][rows], self._read[value][rows]

    def _views(self) -> list[Views]:
        """Views of all blocks, made together once a step: they are most of what a step costs beside
        the model.
        """
        pairs = list(zip(self._blocks, self._lengths, strict=True))
        self._read = list(
            zip(*[block[:, :, : length + 1].unbind(0) for block, length in pairs], strict=True)
        )
        return list(zip(*[block[:, :, length].unbind(0) for block, length in pairs], strict=True))

    @contextmanager
    def _block(self, room: int) -> Iterator[torch.Tensor]:
        """A new block, charged for unless filling it raises."""
        with self._ledger.hold(room * self.bytes_per_token):
            yield self._like.new_empty(2 * len(self.layers), self._heads, room, self._dim)

    def _refresh(self) -> None:
        """What a step needs is made by the next one: leaving takes no memory."""
        self._positions = None
        self._ends = None


class _RowLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of a `RowCache`, as the model sees it."""

    def __init__(self, cache: RowCache, index: int) -> None:
        super().__init__()
        self._cache = cache
        self._index = index
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[Views, Views]:
        return self._cache.write(self._index, key_states, value_states)

    def get_seq_length(self) -> int:
        return self._cache.width


def _room(tokens: int) -> int:
    return -(-tokens // GROWTH) * GROWTH


BatchCache = RebatchCache | RowCache


# Attention for a batch whose rows have caches of their own: each row's query meets its own keys,
# and no padding.
#
# Registered with transformers' `AttentionInterface`, its extension point for attention functions:
# the model is as it was. A pass over one padded batch goes to transformers' own SDPA function as
# before. One call per row and layer is cheap on a CPU; on a GPU it is a kernel launch each, which
# is what padded slabs are for.

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
    """[N, 1, heads, head_dim] of queries [N, heads, 1, head_dim] that meet N keys [kv_heads,
    length, head_dim].

    Keys and values that are tensors are a padded batch. Query heads that share a key go together,
    as more queries of one head, so that keys need not be repeated.
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
    """Let `model` attend by row where its cache is by row. `EngineError` for a model that takes no
    such function.
    """
    kind, now = model.config.model_type, model.config._attn_implementation
    if now not in ("sdpa", NAME) or not getattr(model, "_supports_attention_backend", False):
        raise EngineError(
            f"model_type '{kind}' attends by '{now}' and cannot attend row by row",
            "set engine.kv_layout to slab",
        )
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
