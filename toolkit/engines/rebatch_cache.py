"""A KV cache whose rows come and go: all rows end in the same column, and each begins where its own
tokens do.

    slab     [rows, kv_heads, columns, head_dim], per layer, for keys and for values
    window   columns start..end of the slab's first N rows, which is what attention reads
    row i    columns begin[i]..end; what lies before, in the window, is masked

A step writes column `end`. A row that joins is copied so that it ends at `end`, and the window
grows to the left if it is the longest; a row that leaves makes room for the last one; columns that
no row needs any more leave the window (BATON, section 4: embedding, left growth, releasing). Keys
are cached after their rotation by position, so columns may be moved. With room on both sides of the
window, none of this copies the other rows; where a side runs out, the window slides within the slab
or moves to a larger one, which copies it once for many steps.

In the window, what is not a row's own is zero: a row that overflowed leaves nothing behind that
could reach another.

Memory may run out at any allocation, on a device also where the ledger saw room: all rows are then
as they were. Where some layers have moved already, all are narrowed to the columns that the old
place and the new one have in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers.cache_utils import Cache, DynamicLayer

from toolkit.engines.memory import ByteLedger, PastBudget
from toolkit.engines.slab import KVShape

# The layers of a cache that attention reads through a window: the first N rows, and columns
# start..end, of a slab.


class ColumnWindow:
    """The columns that hold the rows now. One for all layers."""

    __slots__ = ("end", "first_row", "start")

    def __init__(self) -> None:
        self.start = self.end = 0
        self.first_row = 0  # that the next pass is over


class WindowLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's slabs. A pass reads the window and writes after its end; the window moves when
    the pass is over.
    """

    def __init__(self, window: ColumnWindow) -> None:
        super().__init__()
        self._window = window
        self.is_initialized = True
        self.key_slab = self.value_slab = torch.empty(0, 0, 0, 0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start, old, first = self._window.start, self._window.end, self._window.first_row
        rows = slice(first, first + key_states.shape[0])
        end = old + key_states.shape[-2]
        if end > self.key_slab.shape[2]:
            raise IndexError(f"column {end} lies outside of a slab of {self.key_slab.shape[2]}")
        self.key_slab[rows, :, old:end] = key_states
        self.value_slab[rows, :, old:end] = value_states
        return self.key_slab[rows, :, start:end], self.value_slab[rows, :, start:end]

    def get_seq_length(self) -> int:
        return self._window.end - self._window.start

    def narrow(self, start: int, end: int) -> None:
        """Keep these columns of the slabs, which costs no memory and gives none back."""
        self.key_slab, self.value_slab = (
            self.key_slab[:, :, start:end],
            self.value_slab[:, :, start:end],
        )


RowKV = list[
    tuple[torch.Tensor, torch.Tensor]
]  # per layer, a row's keys and values [kv_heads, length, head_dim]

# Columns to spare in a new slab, as a share of the width and a number beside it: as much as memory
# allows.
SPARE_COLUMNS = ((0.5, 64), (0.125, 16), (0.0, 4), (0.0, 0))
SHRINK = 4  # a slab that could be so many times smaller is left for a smaller one
LEFT_SHARE = (
    4  # a quarter of the columns to spare lies to the left: newcomers need it, steps need the right
)


class RebatchCache(Cache):  # type: ignore[misc]
    """The rows 0..N-1 of a running batch.

    Args:
        shapes: what each layer caches, from any earlier cache of the model.
        like: a tensor of the cache's dtype, on its device.
        ledger: is charged for the slabs. `torch.OutOfMemoryError` where they do not fit, with all rows as they were.
    """

    def __init__(self, shapes: Sequence[KVShape], like: torch.Tensor, ledger: ByteLedger) -> None:
        self._window = ColumnWindow()
        super().__init__(layers=[WindowLayer(self._window) for _ in shapes])
        self._shapes = shapes
        self._like = like
        self._ledger = ledger
        self.bytes_per_token = like.itemsize * sum(k[1] * k[3] + v[1] * v[3] for k, v in shapes)
        self.row_capacity = self.columns = 0
        self._held_bytes = 0
        self._begin: list[int] = []
        self._is_padded = False
        self._begins: torch.Tensor | None = (
            None  # as a tensor, and which columns a row may look at; None: to be made
        )
        self._visible: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self._like.device

    @property
    def rows(self) -> int:
        """N."""
        return len(self._begin)

    @property
    def width(self) -> int:
        """Columns of the window: the length of the longest row."""
        return self._window.end - self._window.start

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        end = self._window.end
        return [end - begin for begin in self._begin]

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return self.rows * self._window.end - sum(self._begin)

    @property
    def padded_tokens(self) -> int:
        """N * width: what attention reads."""
        return self.rows * self.width

    @property
    def slab_tokens(self) -> int:
        """Tokens that the slabs have room for: what memory is taken for."""
        return self.row_capacity * self.columns

    @property
    def columns_ahead(self) -> int:
        """Steps that the window can take before it has to move."""
        return self.columns - self._window.end

    def make_room(self, rows: int, width: int, ahead: int) -> None:
        """See that `rows` rows, the longest of `width` tokens, can take `ahead` columns more."""
        width = max(width, self.width)
        if rows <= self.row_capacity and width + ahead <= self.columns:
            if not width <= self._window.end <= self.columns - ahead:
                self._slide(self._best_end(width, ahead, self.columns))
            return
        for share, extra in SPARE_COLUMNS:
            columns = width + ahead + int(share * width) + extra
            spare_rows = rows // 4 if extra else 0
            if self._try_slabs(rows + spare_rows, columns, self._best_end(width, ahead, columns)):
                return
        raise PastBudget(
            f"{rows} rows of {width + ahead} columns, {rows * (width + ahead)} tokens of KV cache, do not fit: "
            f"{self._ledger.used_bytes} of {self._ledger.budget_bytes} bytes are in use"
        )

    def growth_bytes(self, newcomers: int, width: int) -> int:
        """What `make_room` would have to take, at least, for so many rows more of at most `width`
        tokens.
        """
        rows, columns = self.rows + newcomers, max(width, self.width) + 1
        if rows <= self.row_capacity and columns <= self.columns:
            return 0
        needed = rows * columns * self.bytes_per_token
        return max(needed - self._held_bytes, 0) + min(needed, self._held_bytes) // len(self.layers)

    def join(self, row: RowKV) -> None:
        """Put a row after the others; `make_room` has been called. The tensors may lie on another
        device.
        """
        length = row[0][0].shape[1]
        index, end = self.rows, self._window.end
        self._grow_left_to(end - length)
        for layer, (keys, values) in zip(self.layers, row, strict=True):
            layer.key_slab[index, :, end - length : end] = keys
            layer.value_slab[index, :, end - length : end] = values
        self._begin.append(end - length)
        self._clear_front(index)
        self._refresh()

    def read(self, index: int) -> RowKV:
        """A row's keys and values; views, valid until the cache changes."""
        columns = slice(self._begin[index], self._window.end)
        return [
            (layer.key_slab[index, :, columns], layer.value_slab[index, :, columns])
            for layer in self.layers
        ]

    def leave(self, indices: Sequence[int]) -> list[int]:
        """Drop rows; the last ones move into their places. The old indices of the others, in their
        new order.
        """
        order = list(range(self.rows))
        for index in sorted(indices, reverse=True):
            last = len(order) - 1
            if index != last:
                self._copy_row(last, index)
                order[index], self._begin[index] = order[last], self._begin[last]
            order.pop()
            self._begin.pop()
        self._release()
        return order

    @contextmanager
    def rows_from(self, first: int) -> Iterator[None]:
        """Within it, a pass is over rows from this one on, as many as it has."""
        self._window.first_row = first
        try:
            yield
        finally:
            self._window.first_row = 0

    def advance(self) -> None:
        """A pass of one token per row has been written: the window takes it in."""
        self._window.end += 1

    def clear_behind(self, count: int) -> None:
        """The next pass has `count` newcomers behind the rows: what it reads of the window for them
        is zero.
        """
        rows, columns = (
            slice(self.rows, self.rows + count),
            slice(self._window.start, self._window.end),
        )
        for slab in self._slabs():
            slab[rows, :, columns].zero_()

    def take_in(self, pass_width: int, lengths: Sequence[int]) -> None:
        """A pass of `pass_width` tokens, padded on the left, over all rows and newcomers of
        `lengths` has been written.

        Each row keeps its last token, each newcomer its own ones; they move left so that all end
        one column on, and no padding stays in the middle of a row. Where memory runs out, the pass
        can be written again.
        """
        old, rows = self._window.end, self.rows
        end = old + 1
        for slab in self._slabs():
            slab[:rows, :, old] = slab[:rows, :, old + pass_width - 1]
            for index, length in enumerate(lengths, rows):
                own = slab[index, :, old + pass_width - length : old + pass_width].clone()
                slab[index, :, end - length : end] = own
        self._grow_left_to(min(end - length for length in lengths))
        self._window.end = end
        self._begin += [end - length for length in lengths]
        for index in range(rows, self.rows):
            self._clear_front(index)
        self._refresh()

    def mask(self, *, as_4d: bool) -> torch.Tensor | None:
        """Of the next step: [N, width + 1], True where a row may look; None where all may look at
        everything.

        In four dimensions, [N, 1, 1, width + 1], a model takes it as it is instead of making one.
        """
        if not self._is_padded:
            return None
        if self._visible is None:
            self._visible = (
                torch.arange(self.columns, device=self.device)[None, :] >= self._begin_column()
            )
        mask = self._visible[:, self._window.start : self._window.end + 1]
        return mask[:, None, None, :] if as_4d else mask

    def positions(self) -> torch.Tensor:
        """[N, 1]: the position of each row's next token."""
        return self._window.end - self._begin_column()

    def shrink(self) -> None:
        """Go to smaller slabs where these are much larger than needed, to none without rows."""
        share, extra = SPARE_COLUMNS[0]
        columns = int((1 + share) * self.width) + extra
        if self.slab_tokens >= SHRINK * self.rows * columns:
            self.fit(columns)

    def fit(self, columns: int = 0) -> None:
        """Go to slabs with room for these rows and no more, and for `columns` columns, if these are
        fewer than now.

        Where memory is too short for the move, they stay where they are.
        """
        rows, columns = self.rows, max(columns, self.width + 1) if self.rows else 0
        if rows * columns * self.bytes_per_token < self._held_bytes:
            self._try_slabs(rows, columns, self._best_end(self.width, 1, columns) if rows else 0)

    def clear(self) -> None:
        """Drop all rows and slabs."""
        self._begin.clear()
        self._release()
        self.fit()

    def _slabs(self) -> Iterator[torch.Tensor]:
        for layer in self.layers:
            yield layer.key_slab
            yield layer.value_slab

    def _best_end(self, width: int, ahead: int, columns: int) -> int:
        return width + (columns - ahead - width) // LEFT_SHARE

    def _slide(self, end: int) -> None:
        """Move the window within its slabs."""
        rows, start, old, distance = (
            self.rows,
            self._window.start,
            self._window.end,
            end - self._window.end,
        )
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
        """Move to new slabs if memory has room for them; else the window stays."""
        old_bytes, new_bytes = self._held_bytes, rows * columns * self.bytes_per_token
        beside = min(old_bytes, new_bytes) // len(self.layers)
        if max(new_bytes - old_bytes, 0) + beside > self._ledger.free_bytes:
            return False
        return bool(self._ledger.attempt(lambda: self._change_slabs(rows, columns, end, beside)))

    def _change_slabs(self, rows: int, columns: int, end: int, beside: int) -> bool:
        """Move the window to new slabs, layer by layer, so that only one is there twice: `beside`
        bytes.
        """
        new_bytes = rows * columns * self.bytes_per_token
        with self._ledger.reserve(beside):
            self._hold(
                max(new_bytes, self._held_bytes)
            )  # if it fails half way, what was left may still be held
            with self._layers_moving(rows, columns, end) as moved:
                for layer, (keys, values) in zip(self.layers, self._shapes, strict=True):
                    new_keys = self._moved(layer.key_slab, keys, rows, columns, end)
                    new_values = self._moved(layer.value_slab, values, rows, columns, end)
                    layer.key_slab, layer.value_slab = new_keys, new_values
                    moved.append(layer)
            self._hold(new_bytes)
        return True

    @contextmanager
    def _layers_moving(self, rows: int, columns: int, end: int) -> Iterator[list[WindowLayer]]:
        """Within it, layers move to slabs of these sizes, the window's end to `end`; all in the
        list, or it raises.

        If it does, the layers that have moved and those that have not are narrowed to what they
        have in common.
        """
        moved: list[WindowLayer] = []
        try:
            yield moved
        except RuntimeError:
            if moved:
                old = self._window.end
                left, right = min(old, end), min(self.columns - old, columns - end)
                for index, layer in enumerate(self.layers):
                    at = end if index < len(moved) else old
                    layer.narrow(at - left, at + right)
                self._moved_to(left, min(self.row_capacity, rows), left + right)
            raise
        self._moved_to(end, rows, columns)

    def _hold(self, size_bytes: int) -> None:
        self._ledger.take(size_bytes - self._held_bytes)
        self._held_bytes = size_bytes

    def _moved(
        self, slab: torch.Tensor, shape: torch.Size, rows: int, columns: int, end: int
    ) -> torch.Tensor:
        new = self._like.new_empty(rows, shape[1], columns, shape[3])
        if self.rows:
            window = slab[: self.rows, :, self._window.start : self._window.end]
            new[: self.rows, :, end - self.width : end] = window
        return new

    def _moved_to(self, end: int, rows: int, columns: int) -> None:
        self.row_capacity, self.columns = rows, columns
        distance = end - self._window.end
        self._window.start += distance
        self._window.end = end
        self._begin = [begin + distance for begin in self._begin]
        self._refresh()

    def _grow_left_to(self, start: int) -> None:
        old = self._window.start
        if start >= old:
            return
        for slab in self._slabs():
            slab[: self.rows, :, start:old].zero_()
        self._window.start = start

    def _clear_front(self, index: int) -> None:
        start, begin = self._window.start, self._begin[index]
        if start < begin:
            for slab in self._slabs():
                slab[index, :, start:begin].zero_()

    def _copy_row(self, source: int, target: int) -> None:
        """By methods that take no memory, as an assignment of a scalar does."""
        begin, end, start = self._begin[source], self._window.end, self._window.start
        for slab in self._slabs():
            slab[target, :, begin:end].copy_(slab[source, :, begin:end])
            slab[target, :, start:begin].zero_()

    def _release(self) -> None:
        """Columns that no row needs leave the window."""
        self._window.start = min(self._begin, default=self._window.end)
        self._refresh()

    def _refresh(self) -> None:
        """What a step needs is made by the next one, for all until rows come, go or move: leaving
        takes no memory.
        """
        self._begins = self._visible = None
        self._is_padded = any(begin > self._window.start for begin in self._begin)

    def _begin_column(self) -> torch.Tensor:
        """[N, 1]: where each row begins."""
        if self._begins is None:
            self._begins = torch.tensor(self._begin, dtype=torch.long, device=self.device)[:, None]
        return self._begins
