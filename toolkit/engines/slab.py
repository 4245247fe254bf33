"""A KV cache that is allocated once per slice: keys and values are written in place, and attention
reads a view.

transformers' `DynamicCache` concatenates at every step, which copies the whole cache each time.
What a layer holds is the same [N, kv_heads, columns, head_dim] in both, so the tokens are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from toolkit.errors import EngineError

KVShape = tuple[torch.Size, torch.Size]  # of a layer's keys and values


class SlabLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values, with room for `columns` tokens. Allocated when the first ones
    come.
    """

    def __init__(self, columns: int) -> None:
        super().__init__()
        self._columns = columns
        self._length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._key_slab = _room_for(key_states, self._columns)
        self._value_slab = _room_for(value_states, self._columns)
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
        self.keys, self.values = self._key_slab[:, :, :end], self._value_slab[:, :, :end]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self._length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, as `DynamicLayer.crop` does; their columns
        are written again.
        """
        self._length += tokens_to_remove

    def keep(self, length: int) -> None:
        """Forget what lies behind the first `length` columns; it is written again."""
        self._length = length


def _room_for(states: torch.Tensor, columns: int) -> torch.Tensor:
    batch, heads, _, dim = states.shape
    return states.new_empty(batch, heads, columns, dim)


class SlabCache(Cache):  # type: ignore[misc]
    """`layers` slabs of `columns` tokens."""

    def __init__(self, layers: int, columns: int) -> None:
        super().__init__(layers=[SlabLayer(columns) for _ in range(layers)])

    def kv_shapes(self) -> list[KVShape]:
        """Per layer, the shapes of what it holds."""
        return [(layer.keys.shape, layer.values.shape) for layer in self.layers]

    def keep(self, length: int) -> None:
        """Only the first `length` tokens stay, whatever a pass that failed has added to some of the
        layers.
        """
        for layer in self.layers:
            layer.keep(length)

    def fill(
        self, shapes: Sequence[KVShape], batch_size: int, length: int, like: torch.Tensor
    ) -> None:
        """Write random keys and values for `length` tokens of `batch_size` rows, in the dtype and
        device of `like`.

        `shapes` are those of any earlier cache of this model. All rows get the same numbers: timing
        does not depend on them, as long as they are ordinary ones.
        """
        for index, (keys, values) in enumerate(shapes):
            key_states = like.new_empty(1, keys[1], length, keys[3]).normal_()
            value_states = like.new_empty(1, values[1], length, values[3]).normal_()
            self.update(
                key_states.expand(batch_size, -1, -1, -1),
                value_states.expand(batch_size, -1, -1, -1),
                index,
            )


def check_caches(config: object, max_model_len: int) -> None:
    """`EngineError`, by name, for a model with layers that a slab cannot hold.

    A sliding window that covers `max_model_len` never slides: such a layer attends to everything,
    like a full one.
    """
    for layer in DynamicCache(config=config).layers:
        full = type(layer) is DynamicLayer
        covers = type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= max_model_len
        if not (full or covers):
            raise _unsupported(config, layer, max_model_len)


def _unsupported(config: object, layer: object, max_model_len: int) -> EngineError:
    kind = getattr(config, "model_type", "?")
    window = getattr(layer, "sliding_window", None)
    if window is not None:
        return EngineError(
            f"model_type '{kind}' slides a window of {window} tokens, below model.max_model_len {max_model_len}",
            f"set model.max_model_len to at most {window}; beyond it, this engine's caches do not fit the model",
        )
    return EngineError(
        f"model_type '{kind}' has a {type(layer).__name__}, which does not cache keys and values per token",
        "the transformers engine serves models whose layers all use full attention",
    )


# Rows of different lengths as one padded batch: the tensors that a forward pass needs, built once
# per slice.


class PaddedBatch:
    """N rows, padded on the left to `width`, with room up to `columns`.

    Attributes:
        input_ids: [N, width] token ids; 0 where padded.
        mask: [N, columns] booleans; False where padded.
        positions: [N, columns] the position of each real token in its row. A row that has ended runs on with its batch,
            so positions stop at `last_position`: models with learned positions have no more.
        cache: holds nothing yet.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[int]],
        columns: int,
        last_position: int,
        cache: SlabCache,
        device: torch.device,
    ) -> None:
        lengths = torch.tensor([len(row) for row in rows])
        self.width = int(lengths.max())
        self.cache = cache
        padded = [[0] * (self.width - len(row)) + list(row) for row in rows]
        real_column = torch.arange(columns)[None, :] - (self.width - lengths)[:, None]
        self.input_ids = torch.tensor(padded, device=device)
        self.mask = (real_column >= 0).to(device)
        self.positions = real_column.clamp(min=0, max=last_position).to(device)
        self._is_padded = bool((lengths < self.width).any())

    def mask_up_to(self, column: int, *, as_4d: bool) -> torch.Tensor | None:
        """The mask of a decode step that sees `column` columns; None where every row sees all of
        them.

        In four dimensions, [N, 1, 1, column], the model takes it as it is instead of building one
        per step.
        """
        if not self._is_padded:
            return None
        mask = self.mask[:, :column]
        return mask[:, None, None, :] if as_4d else mask
