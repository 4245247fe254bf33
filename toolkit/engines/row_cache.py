"""A KV cache in which each row has its own memory, and the attention that reads it: no padding, and
nothing moves when rows come and go.

    block of a row   [2 * layers, kv_heads, room, head_dim]: keys and values of its first `length`
                     tokens, by layer

A step writes one token at the end of every block, and attention reads each block up to there.
Blocks grow by `GROWTH` tokens. A batch takes as much memory as its rows hold, so a scheduler that
counts real tokens is right. `RebatchCache` has the padded slab of BATON, which suits GPUs:
attention row by row is cheap on a CPU, but on a GPU each row and layer is a kernel launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers.cache_utils import Cache, DynamicLayer

from toolkit.engines.attention import Views
from toolkit.engines.memory import ByteLedger
from toolkit.engines.rebatch_cache import RebatchCache, RowKV
from toolkit.engines.slab import KVShape
from toolkit.errors import EngineError

# Tokens by which a block grows: fewer copy blocks more often, more leave a larger part empty.
GROWTH = 32


class RowCache(Cache):  # type: ignore[misc]
    """The rows 0..N-1 of a running batch, with the methods that `RunningBatch` needs.

    Args:
        shapes: what each layer caches, from any earlier cache of the model; all layers must be
            equal.
        like: a tensor of the cache's dtype, on its device.
        ledger: is charged for the blocks, and raises `torch.OutOfMemoryError` if they do not fit.
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
        self._heads = first[1]
        self._dim = first[3]
        self.bytes_per_token = like.itemsize * 2 * len(shapes) * self._heads * self._dim
        self._blocks: list[torch.Tensor] = []
        self._lengths: list[int] = []
        # Views of the blocks, keys and values of each layer in turn: where the next step writes,
        # and what its attention reads. None: to be made.
        self._written: list[Views] | None = None
        self._read: list[Views] = []
        self._positions: torch.Tensor | None = None  # of the next step; None: to be made
        self._first_row = 0  # of the next pass

    @property
    def device(self) -> torch.device:
        return self._like.device

    @property
    def rows(self) -> int:
        return len(self._blocks)

    @property
    def width(self) -> int:
        return max(self._lengths, default=0)

    @property
    def tokens(self) -> int:
        return sum(self._lengths)

    @property
    def padded_tokens(self) -> int:
        """Tokens that the blocks have room for, which is what memory is charged for."""
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
        """Ensure that each row has room for `ahead` tokens more. `rows` and `width` do not matter,
        because newcomers get their own blocks.
        """
        for index, length in enumerate(self._lengths):
            if length + ahead > self._blocks[index].shape[2]:
                old = self._blocks[index]
                with self._block(_room(length + ahead)) as block:
                    block[:, :, :length] = old[:, :, :length]
                self._blocks[index] = block
                self._ledger.take(-old.nbytes)
                self._written = None

    def growth_bytes(self, newcomers: int, width: int) -> int:
        """Bytes that so many newcomers of at most `width` tokens take."""
        return newcomers * _room(width + 1) * self.bytes_per_token

    def join(self, row: RowKV) -> None:
        """Add a row after the others. Its tensors may be on another device."""
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
        """Drop rows. Returns the old indices of the remaining rows in their new order."""
        self._ledger.take(-sum(self._blocks[index].nbytes for index in indices))
        gone = set(indices)
        order = [index for index in range(self.rows) if index not in gone]
        self._blocks = [self._blocks[index] for index in order]
        self._lengths = [self._lengths[index] for index in order]
        self._refresh()
        return order

    @contextmanager
    def rows_from(self, first: int) -> Iterator[None]:
        """In this context, a pass starts at the row `first`; the pass determines how many rows."""
        self._first_row = first
        try:
            yield
        finally:
            self._first_row = 0

    def advance(self) -> None:
        """Count the token that a pass has written to each row."""
        self._lengths = [length + 1 for length in self._lengths]
        self._positions = None if self._positions is None else self._positions.add_(1)
        self._written = None

    def mask(self, added_as: torch.dtype | None) -> torch.Tensor | None:
        """The next step's mask: None, because each row attends to all its tokens."""
        return None

    def positions(self) -> torch.Tensor:
        """[N, 1]: the position of each row's next token."""
        if self._positions is None:
            lengths = torch.tensor(self._lengths, dtype=torch.long, device=self.device)
            self._positions = lengths[:, None]
        return self._positions

    def shrink(self) -> None:
        """Do nothing: the blocks of rows that left are gone."""

    def fit(self, columns: int = 0) -> None:
        """Do nothing: blocks have little spare room."""

    def clear(self) -> None:
        """Drop all rows."""
        self.leave(range(self.rows))

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[Views, Views]:
        """Write a layer's next token of each row in the pass, [N, kv_heads, 1, head_dim], and
        return the keys and values that attention reads.
        """
        if self._written is None:
            # Views of all blocks are made together once a step: they are most of a step's cost
            # outside the model.
            pairs = list(zip(self._blocks, self._lengths, strict=True))
            read = [block[:, :, : length + 1].unbind(0) for block, length in pairs]
            written = [block[:, :, length].unbind(0) for block, length in pairs]
            self._read = list(zip(*read, strict=True))
            self._written = list(zip(*written, strict=True))
        key = 2 * layer
        value = 2 * layer + 1
        rows = slice(self._first_row, self._first_row + keys.shape[0])
        torch._foreach_copy_(
            [*self._written[key][rows], *self._written[value][rows]],
            [*keys.squeeze(2).unbind(0), *values.squeeze(2).unbind(0)],
        )
        return self._read[key][rows], self._read[value][rows]

    @contextmanager
    def _block(self, room: int) -> Iterator[torch.Tensor]:
        """A new block, charged to the ledger unless the context raises."""
        with self._ledger.hold(room * self.bytes_per_token):
            yield self._like.new_empty(2 * len(self.layers), self._heads, room, self._dim)

    def _refresh(self) -> None:
        """Discard a step's tensors. The next step makes them, so leaving needs no memory."""
        self._positions = self._written = None


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
