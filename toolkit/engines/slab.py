"""The padded batch of a slice, and its KV cache, which is allocated once per slice.

Keys and values are written in place, and attention reads a view. transformers' `DynamicCache`
instead concatenates at every step, which copies the whole cache each time. A layer holds the same
[N, kv_heads, columns, head_dim] in both, so the tokens are the same.

Where decode steps have fixed shapes, caches lie in an `Arena` instead: memory that stays, so that a
captured step finds each slice where the last one was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from toolkit.errors import EngineError

KVShape = tuple[torch.Size, torch.Size]  # of a layer's keys and values
# CUDA's attention kernels take a mask as it is if its rows are aligned to so many values; they copy
# any other in every layer.
MASK_ALIGNMENT = 8


def values_per_token(shapes: Sequence[KVShape]) -> int:
    """The numbers that a cache of layers with these `shapes` holds for one token."""
    return sum(keys[1] * keys[3] + values[1] * values[3] for keys, values in shapes)


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask [N, 1, 1, L] that attention adds to its scores, from booleans [N, L]: 0 where a row
    may attend, else -inf.

    Attention converts a boolean mask in every layer; this one is made once. Its rows are aligned.
    """
    rows, columns = visible.shape
    wide = -(-columns // MASK_ALIGNMENT) * MASK_ALIGNMENT
    mask = torch.zeros(rows, 1, 1, wide, dtype=dtype, device=visible.device)[..., :columns]
    return mask.masked_fill_(~visible[:, None, None, :], -torch.inf)


Slabs = tuple[torch.Tensor, torch.Tensor]  # [N, kv_heads, columns, head_dim]: keys and values


class SlabLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values, with room for `columns` tokens, in `slabs`; None: the first
    update allocates them.
    """

    def __init__(self, columns: int, slabs: Slabs | None = None) -> None:
        super().__init__()
        self._columns = columns
        self._length = 0
        if slabs is not None:
            self._key_slab, self._value_slab = slabs
            self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype = key_states.dtype
        self.device = key_states.device
        self._key_slab, self._value_slab = (
            states.new_empty(states.shape[0], states.shape[1], self._columns, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self._length
        end = start + key_states.shape[-2]
        if end > self._columns:
            raise IndexError(f"{end} tokens do not fit into a slab of {self._columns} columns")
        self._key_slab[:, :, start:end] = key_states
        self._value_slab[:, :, start:end] = value_states
        self._length = end
        self.keys = self._key_slab[:, :, :end]
        self.values = self._value_slab[:, :, :end]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self._length

    def keep(self, length: int) -> None:
        """Forget all but the first `length` columns; the next update overwrites the others."""
        self._length = length


class SlabCache(Cache):  # type: ignore[misc]
    """`layers` slabs of `columns` tokens: those in `slabs`, or its own."""

    def __init__(self, layers: int, columns: int, slabs: Sequence[Slabs] | None = None) -> None:
        given: Sequence[Slabs | None] = slabs or [None] * layers
        super().__init__(layers=[SlabLayer(columns, each) for each in given])

    def kv_shapes(self) -> list[KVShape]:
        return [(layer.keys.shape, layer.values.shape) for layer in self.layers]

    def keep(self, length: int) -> None:
        """Keep only the first `length` tokens, also in layers that a failed pass has written to."""
        for layer in self.layers:
            layer.keep(length)

    def fill(
        self, shapes: Sequence[KVShape], batch_size: int, length: int, like: torch.Tensor
    ) -> None:
        """Write random keys and values for `length` tokens of `batch_size` rows, in the dtype and
        on the device of `like`.

        `shapes` come from any earlier cache of this model. All rows get the same numbers: timing
        does not depend on ordinary values.
        """
        for index, (keys, values) in enumerate(shapes):
            key_states = like.new_empty(1, keys[1], length, keys[3]).normal_()
            value_states = like.new_empty(1, values[1], length, values[3]).normal_()
            self.update(
                key_states.expand(batch_size, -1, -1, -1),
                value_states.expand(batch_size, -1, -1, -1),
                index,
            )


class Arena:
    """Memory for the caches of one slice after another: per layer keys and values
    [tokens, kv_heads, head_dim], where each row of the slice is a run of tokens. Its last token is
    no row's.

    Args:
        shapes: what each layer caches.
        like: a tensor of the cache's dtype, on its device.
        tokens: that rows may take.

    Attributes:
        firsts: the place of each row's first token.
        membership: counts the changes of which rows there are and where they begin.
        end: grows by one with each step while the membership stays.
    """

    generation = 0  # the memory stays

    def __init__(self, shapes: Sequence[KVShape], like: torch.Tensor, tokens: int) -> None:
        self.tokens = tokens
        self.row_capacity = tokens  # of a shape of steps
        self.device = like.device
        self.membership = self.end = 0
        self.firsts: list[int] = []
        self._prompts: list[int] = []  # the tokens that each row had at first
        self._flat = [
            (
                like.new_empty(tokens + 1, keys[1], keys[3]),
                like.new_empty(tokens + 1, values[1], values[3]),
            )
            for keys, values in shapes
        ]

    @property
    def lengths(self) -> list[int]:
        """The tokens of each row."""
        return [length + self.end for length in self._prompts]

    @property
    def width(self) -> int:
        """The tokens of the longest row."""
        return max(self._prompts, default=0) + self.end

    def flat(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [T, kv_heads, head_dim] of each layer, on the memory itself."""
        return self._flat

    def hold(self, firsts: Sequence[int], lengths: Sequence[int]) -> None:
        """Rows that begin at the tokens `firsts` and have `lengths` tokens take the places of those
        before.
        """
        self.firsts = list(firsts)
        self._prompts = list(lengths)
        self.end = 0
        self.membership += 1

    def advance(self) -> None:
        """Count the token that a step has written behind each row."""
        self.end += 1

    def slabs(self, first: int, rows: int, columns: int) -> list[Slabs]:
        """Views [rows, kv_heads, columns, head_dim] of the tokens from `first` on, for prefills."""
        tokens = slice(first, first + rows * columns)
        return [
            (
                keys[tokens].view(rows, columns, *keys.shape[1:]).transpose(1, 2),
                values[tokens].view(rows, columns, *values.shape[1:]).transpose(1, 2),
            )
            for keys, values in self._flat
        ]


def check_caches(config: object, max_model_len: int) -> None:
    """Raise `EngineError` for a model with layers that a slab cannot hold, naming the layer.

    A sliding window that covers `max_model_len` never slides: such a layer attends to all tokens,
    like a layer with full attention.
    """
    for layer in DynamicCache(config=config).layers:
        full = type(layer) is DynamicLayer
        covers = type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= max_model_len
        if full or covers:
            continue
        kind = getattr(config, "model_type", "?")
        window = getattr(layer, "sliding_window", None)
        if window is not None:
            raise EngineError(
                f"model_type '{kind}' slides a window of {window} tokens, below "
                f"model.max_model_len {max_model_len}",
                f"set model.max_model_len to at most {window}; this engine's caches do not support "
                "more with this model",
            )
        raise EngineError(
            f"model_type '{kind}' has a {type(layer).__name__}, which does not cache keys and "
            "values per token",
            "the transformers engine serves only models with full attention in all layers",
        )


class PaddedBatch:
    """N rows of different lengths, padded on the left to `width` (None: the longest), with room up
    to `columns`: the tensors that a forward pass needs, built once per slice.

    Attributes:
        input_ids: [N, width] token ids; 0 where padded.
        mask: [N, columns] booleans; False where padded.
        positions: [N, columns] the position of each real token in its row. A row that has ended
            stays in its batch, so positions stop at `last_position`: models with learned positions
            have no more.
        cache: empty at first; in `slabs` if they are given.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[int]],
        columns: int,
        last_position: int,
        layers: int,
        device: torch.device,
        width: int | None = None,
        slabs: Sequence[Slabs] | None = None,
    ) -> None:
        lengths = torch.tensor([len(row) for row in rows])
        self.width = int(lengths.max()) if width is None else width
        self.cache = SlabCache(layers, columns, slabs)
        padded = [[0] * (self.width - len(row)) + list(row) for row in rows]
        real_column = torch.arange(columns)[None, :] - (self.width - lengths)[:, None]
        self.input_ids = torch.tensor(padded, device=device)
        self.mask = (real_column >= 0).to(device)
        self.positions = real_column.clamp(min=0, max=last_position).to(device)
        self._is_padded = bool((lengths < self.width).any())
        self._added: torch.Tensor | None = None  # the mask of decode steps

    def mask_up_to(self, column: int, added_as: torch.dtype | None) -> torch.Tensor | None:
        """The mask of a decode step that sees `column` columns; None if every row sees all of them.

        With `added_as`, it is [N, 1, 1, column] of this type, which attention adds to its scores;
        else booleans [N, column], from which the model builds its own mask in every step.
        """
        if not self._is_padded:
            return None
        if added_as is None:
            return self.mask[:, :column]
        if self._added is None:
            self._added = additive(self.mask, added_as)
        return self._added[..., :column]
