"""The padded KV cache of a running batch: all rows end in the same column, and each begins where
its own tokens begin.

    slab     [rows, kv_heads, columns, head_dim], per layer, for keys and for values
    window   columns start..end of the slab's first N rows: what attention reads
    row i    columns begin[i]..end; the columns before these, in the window, are masked

A step writes column `end`. A row that joins is copied so that it ends at `end`; if it is the
longest, the window grows to the left. When a row leaves, the last row takes its place. Columns that
no row needs leave the window (BATON, section 4: embedding, left growth, releasing). Keys are cached
after their rotation by position, so columns may move. While there is room on both sides of the
window, none of this copies the other rows. When a side has no room, the window slides within the
slab or moves to a larger slab, which copies it once for many steps.

Columns in the window that do not belong to a row are zero, so nothing of a row that overflowed can
reach another row.

Steps of fixed shapes (`toolkit.engines.fixed_step`) read rows by their places, not the window: the
token in column c of row i is number i * columns + c of the slab. For them the slab `stays`: it does
not shrink, since a new slab needs new graphs, and a token's heads lie together in memory.

Memory may run out at any allocation, on a device even if the ledger saw room. All rows then keep
their values. If some layers have moved already, all layers are narrowed to the columns that the old
place and the new place have in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, DynamicLayer

from toolkit.engines.memory import ByteLedger, PastBudget
from toolkit.engines.slab import KVShape, additive, values_per_token

# A row's keys and values per layer: [kv_heads, length, head_dim].
RowKV = list[tuple[torch.Tensor, torch.Tensor]]

# Spare columns of a new slab, as a share of the width plus a constant. The first that fits into
# memory is used.
SPARE_COLUMNS = ((0.5, 64), (0.125, 16), (0.0, 4), (0.0, 0))
SHRINK_FACTOR = 4  # a slab shrinks when it could be this many times smaller
# A quarter of the spare columns is to the left of the window, for newcomers; steps need the right.
LEFT_SHARE = 4


@dataclass(slots=True)
class ColumnWindow:
    """The columns that the rows use now, the same for all layers, and the next pass's first row."""

    start: int = 0
    end: int = 0
    first_row: int = 0


class WindowLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's slabs. A pass reads the window and writes after it; then the window moves."""

    def __init__(self, window: ColumnWindow) -> None:
        super().__init__()
        self._window = window
        self.is_initialized = True
        self.key_slab = self.value_slab = torch.empty(0, 0, 0, 0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self._window.start
        old = self._window.end
        first = self._window.first_row
        rows = slice(first, first + key_states.shape[0])
        end = old + key_states.shape[-2]
        if end > self.key_slab.shape[2]:
            raise IndexError(f"column {end} is outside a slab of {self.key_slab.shape[2]} columns")
        self.key_slab[rows, :, old:end] = key_states
        self.value_slab[rows, :, old:end] = value_states
        return self.key_slab[rows, :, start:end], self.value_slab[rows, :, start:end]

    def get_seq_length(self) -> int:
        return self._window.end - self._window.start


class RebatchCache(Cache):  # type: ignore[misc]
    """The rows 0..N-1 of a running batch.

    Args:
        shapes: what each layer caches, from any earlier cache of the model.
        like: a tensor of the cache's dtype, on its device.
        ledger: is charged for the slabs. If they do not fit, `torch.OutOfMemoryError` is raised and
            all rows keep their values.
        stays: the slabs are for steps of fixed shapes.

    Attributes:
        begins: the column where each row begins.
        generation: counts the changes of the slabs' memory.
        membership: counts the changes of which rows there are and where they begin.
        is_flat: whether steps of fixed shapes can read the slabs; not after a move that failed half
            way.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        like: torch.Tensor,
        ledger: ByteLedger,
        *,
        stays: bool = False,
    ) -> None:
        self._window = ColumnWindow()
        super().__init__(layers=[WindowLayer(self._window) for _ in shapes])
        self._shapes = shapes
        self._like = like
        self._ledger = ledger
        self.bytes_per_token = like.itemsize * values_per_token(shapes)
        self.row_capacity = self.columns = 0
        self.generation = self.membership = 0
        self.is_flat = True
        self._stays = stays
        self._held_bytes = 0
        self.begins: list[int] = []
        self._is_padded = False
        # `begins` as a tensor, and the columns from the window's first that each row may attend to,
        # as booleans and as numbers to add; None: to be computed.
        self._begins_tensor: torch.Tensor | None = None
        self._visible: torch.Tensor | None = None
        self._added: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self._like.device

    @property
    def rows(self) -> int:
        return len(self.begins)

    @property
    def width(self) -> int:
        """Columns of the window: the length of the longest row."""
        return self._window.end - self._window.start

    @property
    def end(self) -> int:
        """The column that the next step writes."""
        return self._window.end

    @property
    def firsts(self) -> list[int]:
        """The place of each row's first token in `flat`."""
        return [row * self.columns + begin for row, begin in enumerate(self.begins)]

    @property
    def lengths(self) -> list[int]:
        """The tokens of each row."""
        return [self._window.end - begin for begin in self.begins]

    @property
    def tokens(self) -> int:
        return self.rows * self._window.end - sum(self.begins)

    @property
    def padded_tokens(self) -> int:
        """N * width: what attention reads."""
        return self.rows * self.width

    @property
    def slab_tokens(self) -> int:
        """Tokens that the slabs have room for, which is what memory is charged for."""
        return self.row_capacity * self.columns

    @property
    def columns_ahead(self) -> int:
        """Steps until the window has to move."""
        return self.columns - self._window.end

    def flat(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [rows * columns, kv_heads, head_dim] of each layer: views of slabs that
        stay and are flat.
        """
        places = self.row_capacity * self.columns
        return [
            (
                layer.key_slab.transpose(1, 2).view(places, keys[1], keys[3]),
                layer.value_slab.transpose(1, 2).view(places, values[1], values[3]),
            )
            for layer, (keys, values) in zip(self.layers, self._shapes, strict=True)
        ]

    def make_room(self, rows: int, width: int, ahead: int) -> None:
        """Ensure room for `rows` rows, the longest of `width` tokens, and `ahead` columns more."""
        width = max(width, self.width)
        if rows <= self.row_capacity and width + ahead <= self.columns:
            if not width <= self._window.end <= self.columns - ahead:
                self._slide(self._best_end(width, ahead, self.columns))
            return
        for share, extra in SPARE_COLUMNS:
            columns = width + ahead + int(share * width) + extra
            spare_rows = rows // 4 if extra else 0
            if self._stays and share:  # grow, and give up nothing
                columns = max(columns, self.columns)
                spare_rows = max(spare_rows, self.row_capacity - rows)
            if self._try_slabs(rows + spare_rows, columns, self._best_end(width, ahead, columns)):
                return
        raise PastBudget(
            f"{rows} rows of {width + ahead} columns, {rows * (width + ahead)} tokens of KV cache, "
            f"do not fit: {self._ledger.used_bytes} of {self._ledger.budget_bytes} bytes are in use"
        )

    def growth_bytes(self, newcomers: int, width: int) -> int:
        """Bytes that `make_room` takes at least for `newcomers` rows of at most `width` tokens."""
        rows = self.rows + newcomers
        columns = max(width, self.width) + 1
        if rows <= self.row_capacity and columns <= self.columns:
            return 0
        needed = rows * columns * self.bytes_per_token
        return max(needed - self._held_bytes, 0) + min(needed, self._held_bytes) // len(self.layers)

    def join(self, row: RowKV) -> None:
        """Add a row after the others, after `make_room`. Its tensors may be on another device."""
        length = row[0][0].shape[1]
        index = self.rows
        end = self._window.end
        self._grow_left_to(end - length)
        for layer, (keys, values) in zip(self.layers, row, strict=True):
            layer.key_slab[index, :, end - length : end] = keys
            layer.value_slab[index, :, end - length : end] = values
        self.begins.append(end - length)
        self._clear_front(index)
        self._refresh()

    def read(self, index: int) -> RowKV:
        """A row's keys and values; views, valid until the cache changes."""
        columns = slice(self.begins[index], self._window.end)
        return [
            (layer.key_slab[index, :, columns], layer.value_slab[index, :, columns])
            for layer in self.layers
        ]

    def leave(self, indices: Sequence[int]) -> list[int]:
        """Drop rows; the last rows move to their places. Returns the old indices of the remaining
        rows in their new order.
        """
        order = list(range(self.rows))
        for index in sorted(indices, reverse=True):
            last = len(order) - 1
            if index != last:
                begin = self.begins[last]
                end = self._window.end
                start = self._window.start
                # Methods that need no memory; an assignment of a scalar does.
                for slab in self._slabs():
                    slab[index, :, begin:end].copy_(slab[last, :, begin:end])
                    slab[index, :, start:begin].zero_()
                order[index] = order[last]
                self.begins[index] = begin
            order.pop()
            self.begins.pop()
        self._release()
        return order

    @contextmanager
    def rows_from(self, first: int) -> Iterator[None]:
        """In this context, a pass starts at the row `first`; the pass determines how many rows."""
        self._window.first_row = first
        try:
            yield
        finally:
            self._window.first_row = 0

    def advance(self) -> None:
        """Add the column that a pass of one token per row has written to the window."""
        self._window.end += 1

    def clear_behind(self, count: int) -> None:
        """Zero the window for `count` newcomers that the next pass has after the rows."""
        for slab in self._slabs():
            slab[self.rows : self.rows + count, :, self._window.start : self._window.end].zero_()

    def take_in(self, pass_width: int, lengths: Sequence[int]) -> None:
        """Add what a left-padded pass of `pass_width` tokens over all rows and over newcomers of
        `lengths` has written.

        Each row keeps its last token, and each newcomer its own tokens. They move left so that all
        end in the next column, and no padding stays in the middle of a row. If memory runs out, the
        pass can be repeated.
        """
        old = self._window.end
        rows = self.rows
        end = old + 1
        for slab in self._slabs():
            slab[:rows, :, old] = slab[:rows, :, old + pass_width - 1]
            for index, length in enumerate(lengths, rows):
                own = slab[index, :, old + pass_width - length : old + pass_width].clone()
                slab[index, :, end - length : end] = own
        self._grow_left_to(min(end - length for length in lengths))
        self._window.end = end
        self.begins += [end - length for length in lengths]
        for index in range(rows, self.rows):
            self._clear_front(index)
        self._refresh()

    def mask(self, added_as: torch.dtype | None) -> torch.Tensor | None:
        """The next step's mask; None if all rows may attend to all columns.

        With `added_as`, it is [N, 1, 1, width + 1] of this type, which attention adds to its
        scores; else booleans [N, width + 1], True where a row may attend.
        """
        if not self._is_padded:
            return None
        start = self._window.start
        columns = slice(0, self.width + 1)
        if self._visible is None:
            self._visible = (
                torch.arange(start, self.columns, device=self.device)[None, :]
                >= self._begin_column()
            )
        if added_as is None:
            return self._visible[:, columns]
        if self._added is None:
            self._added = additive(self._visible, added_as)
        return self._added[..., columns]

    def positions(self) -> torch.Tensor:
        """[N, 1]: the position of each row's next token."""
        return self._window.end - self._begin_column()

    def shrink(self) -> None:
        """Move to smaller slabs if these are much larger than needed, or to none without rows.

        Slabs that stay do so until `fit` is called.
        """
        if self._stays:
            return
        share, extra = SPARE_COLUMNS[0]
        columns = int((1 + share) * self.width) + extra
        if self.slab_tokens >= SHRINK_FACTOR * self.rows * columns:
            self.fit(columns)

    def fit(self, columns: int = 0) -> None:
        """Move to slabs that have room for exactly these rows and `columns` columns, if that is
        less than now.

        If memory is too short for the move, the slabs stay.
        """
        rows = self.rows
        columns = max(columns, self.width + 1) if self.rows else 0
        if rows * columns * self.bytes_per_token < self._held_bytes:
            self._try_slabs(rows, columns, self._best_end(self.width, 1, columns) if rows else 0)

    def clear(self) -> None:
        """Drop all rows, and the slabs too unless they stay (`shrink`)."""
        self.begins.clear()
        self._release()
        if not (self._stays and self.is_flat):
            self.fit()

    def _slabs(self) -> Iterator[torch.Tensor]:
        for layer in self.layers:
            yield layer.key_slab
            yield layer.value_slab

    def _best_end(self, width: int, ahead: int, columns: int) -> int:
        return width + (columns - ahead - width) // LEFT_SHARE

    def _slide(self, end: int) -> None:
        """Move the window within its slabs."""
        rows = self.rows
        start = self._window.start
        old = self._window.end
        distance = end - old
        overlaps = abs(distance) < old - start
        with self._layers_moving(self.row_capacity, self.columns, end) as moved:
            for layer in self.layers:
                slabs = layer.key_slab, layer.value_slab
                sources = [slab[:rows, :, start:old] for slab in slabs]
                if overlaps:
                    sources = [source.clone() for source in sources]
                for slab, source in zip(slabs, sources, strict=True):
                    slab[:rows, :, start + distance : end] = source
                moved.append(layer)

    def _try_slabs(self, rows: int, columns: int, end: int) -> bool:
        """Move to new slabs if memory has room for them; else the window stays.

        The layers move one after another, so that only one layer exists twice.
        """
        old_bytes = self._held_bytes
        new_bytes = rows * columns * self.bytes_per_token
        layer_bytes = min(old_bytes, new_bytes) // len(self.layers)
        if max(new_bytes - old_bytes, 0) + layer_bytes > self._ledger.free_bytes:
            return False

        def move() -> bool:
            self.generation += 1
            with self._ledger.reserve(layer_bytes):
                # If the move fails half way, some of the old slabs remain.
                self._hold(max(new_bytes, old_bytes))
                with self._layers_moving(rows, columns, end) as moved:
                    for layer, (keys, values) in zip(self.layers, self._shapes, strict=True):
                        new_keys = self._moved(layer.key_slab, keys, rows, columns, end)
                        new_values = self._moved(layer.value_slab, values, rows, columns, end)
                        layer.key_slab = new_keys
                        layer.value_slab = new_values
                        moved.append(layer)
                self._hold(new_bytes)
            self.is_flat = True
            return True

        return bool(self._ledger.attempt(move))

    @contextmanager
    def _layers_moving(self, rows: int, columns: int, end: int) -> Iterator[list[WindowLayer]]:
        """In this context, layers move to slabs of these sizes and the window's end moves to `end`.
        The caller adds each moved layer to the list.

        If the move fails, the moved layers and the others are narrowed to the columns that they
        have in common.
        """
        moved: list[WindowLayer] = []
        try:
            yield moved
        except RuntimeError:
            if moved:
                self.generation += 1
                self.is_flat = False
                old = self._window.end
                left = min(old, end)
                right = min(self.columns - old, columns - end)
                for index, layer in enumerate(self.layers):
                    at = end if index < len(moved) else old
                    columns_left = slice(at - left, at + right)
                    # Views: this neither takes nor frees memory.
                    layer.key_slab = layer.key_slab[:, :, columns_left]
                    layer.value_slab = layer.value_slab[:, :, columns_left]
                self._moved_to(left, min(self.row_capacity, rows), left + right)
            raise
        self._moved_to(end, rows, columns)

    def _hold(self, size_bytes: int) -> None:
        self._ledger.take(size_bytes - self._held_bytes)
        self._held_bytes = size_bytes

    def _moved(
        self, slab: torch.Tensor, shape: torch.Size, rows: int, columns: int, end: int
    ) -> torch.Tensor:
        _, heads, _, dim = shape
        if self._stays:
            new = self._like.new_empty(rows, columns, heads, dim).transpose(1, 2)
        else:
            new = self._like.new_empty(rows, heads, columns, dim)
        if self.rows:
            window = slab[: self.rows, :, self._window.start : self._window.end]
            new[: self.rows, :, end - self.width : end] = window
        return new

    def _moved_to(self, end: int, rows: int, columns: int) -> None:
        self.row_capacity = rows
        self.columns = columns
        distance = end - self._window.end
        self._window.start += distance
        self._window.end = end
        self.begins = [begin + distance for begin in self.begins]
        self._refresh()

    def _grow_left_to(self, start: int) -> None:
        old = self._window.start
        if start >= old:
            return
        for slab in self._slabs():
            slab[: self.rows, :, start:old].zero_()
        self._window.start = start

    def _clear_front(self, index: int) -> None:
        start = self._window.start
        begin = self.begins[index]
        if start < begin:
            for slab in self._slabs():
                slab[index, :, start:begin].zero_()

    def _release(self) -> None:
        """Remove columns that no row needs from the window."""
        self._window.start = min(self.begins, default=self._window.end)
        self._refresh()

    def _refresh(self) -> None:
        """Discard the tensors that a step needs. The next step computes them, so that leaving needs
        no memory; they stay valid until rows come, go or move.
        """
        self._begins_tensor = self._visible = self._added = None
        self.membership += 1
        self._is_padded = any(begin > self._window.start for begin in self.begins)

    def _begin_column(self) -> torch.Tensor:
        """[N, 1]: the column where each row begins."""
        if self._begins_tensor is None:
            begins = torch.tensor(self.begins, dtype=torch.long, device=self.device)
            self._begins_tensor = begins[:, None]
        return self._begins_tensor
