"""Rows that do not decode but keep their caches: paused rows on the device, swapped rows in host
memory.

A row's cache is one contiguous block, so that a swap is one transfer. On CUDA, blocks in host
memory come from an arena that is pinned in few large pieces, since pinning takes longer than a
transfer and stops the thread; transfers run on their own stream in parallel with computation. On a
CPU, device and host memory are the same: a swap only changes which ledger is charged, and the only
copy is the one out of the batch.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Sequence

import torch

from toolkit.engines.memory import ByteLedger
from toolkit.engines.protocol import LiveRow
from toolkit.engines.rebatch_cache import RowKV
from toolkit.engines.slab import KVShape, values_per_token

PIECE_BYTES = 512 << 20  # unless a block needs a larger one
ALIGNMENT_BYTES = 256

_logger = logging.getLogger(__name__)


class HostArena:
    """Host memory for blocks, taken from the system in pieces that stay, of at most `bound_bytes`
    in all (None: no bound).
    """

    def __init__(self, bound_bytes: int | None) -> None:
        self._bound_bytes = bound_bytes
        self._pins = True  # False once that has failed: pieces are then ordinary memory
        self._pieces: list[torch.Tensor] = []
        self._free: list[tuple[int, int, int]] = []  # (piece, start, end) in bytes, sorted
        self._taken: dict[int, tuple[int, int, int]] = {}  # by the block's address

    @property
    def held_bytes(self) -> int:
        return sum(piece.nbytes for piece in self._pieces)

    def take(self, values: int, dtype: torch.dtype) -> torch.Tensor:
        """A block [values]. If the bound leaves no room in one piece, it is ordinary memory, which
        `give` ignores: a transfer of it is slower.
        """
        size = -(-values * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        place = next((place for place in self._free if place[2] - place[1] >= size), None)
        if place is None:
            place = self._new_piece(size)
        if place is None or not size:
            return torch.empty(values, dtype=dtype)
        piece, start, end = place
        self._free.remove(place)
        if start + size < end:
            insort(self._free, (piece, start + size, end))
        block = self._pieces[piece][start : start + values * dtype.itemsize].view(dtype)
        self._taken[block.data_ptr()] = (piece, start, start + size)
        return block

    def give(self, block: torch.Tensor) -> None:
        """Give a block back. The next one may lie there: transfers of both must be in order."""
        place = self._taken.pop(block.data_ptr(), None)
        if place is None:
            return
        insort(self._free, place)
        at = self._free.index(place)
        for left in (at, at - 1):  # with the one after it, then with the one before it
            if 0 <= left < len(self._free) - 1:
                (piece, start, middle), (other, begin, end) = self._free[left : left + 2]
                if (piece, middle) == (other, begin):
                    self._free[left : left + 2] = [(piece, start, end)]

    def _new_piece(self, size: int) -> tuple[int, int, int] | None:
        """The place of a new piece with at least this size; None if the bound leaves no room."""
        wanted = max(size, PIECE_BYTES)
        if self._bound_bytes is not None:
            wanted = min(wanted, self._bound_bytes - self.held_bytes)
        if wanted < size or not size:
            return None
        piece = None
        if self._pins:
            try:
                piece = torch.empty(wanted, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._pins = False
                why = str(error).splitlines()[0]
                _logger.warning("host memory cannot be pinned, so swaps are slower: %s", why)
        self._pieces.append(torch.empty(wanted, dtype=torch.uint8) if piece is None else piece)
        place = (len(self._pieces) - 1, 0, wanted)
        insort(self._free, place)
        return place


class SuspendedRows:
    """Suspended rows by number.

    Args:
        shapes: what each layer caches.
        like: a tensor of the cache's dtype, on its device.
        device_ledger, host_ledger: are charged for blocks on the device and in host memory; they
            raise `torch.OutOfMemoryError` beyond their budgets.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        like: torch.Tensor,
        device_ledger: ByteLedger,
        host_ledger: ByteLedger,
    ) -> None:
        self._shapes = shapes
        self._values = values_per_token(shapes)
        self._like = like
        self._ledgers = (device_ledger, host_ledger)
        self._rows: dict[int, LiveRow] = {}
        self._to_host: list[torch.cuda.Event] = []  # transfers that may not have ended
        # None: blocks in host memory stay where they are, as on a CPU.
        self._arena: HostArena | None = None
        self._stream: torch.cuda.Stream | None = None
        if like.is_cuda:
            self._arena = HostArena(host_ledger.budget_bytes)
            self._stream = torch.cuda.Stream(like.device)  # type: ignore[no-untyped-call]

    def __contains__(self, number: int) -> bool:
        return number in self._rows

    def size_bytes(self, number: int) -> int:
        """Bytes of a row's cache, wherever it is."""
        return self._rows[number].block_bytes

    @property
    def on_device(self) -> tuple[int, ...]:
        """The numbers of the paused rows."""
        return tuple(number for number, row in self._rows.items() if not row.on_host)

    @property
    def device_tokens(self) -> int:
        return sum(self._tokens(row) for row in self._rows.values() if not row.on_host)

    def keep(self, row: LiveRow, cached: RowKV) -> None:
        """Copy the cache of a row that leaves the batch to a block.

        Nothing is charged yet, so that a row can leave when memory is full: it is copied first, and
        then its place is free.
        """
        row.block = self._like.new_empty(cached[0][0].shape[1] * self._values)
        for (to_keys, to_values), (keys, values) in zip(self._views(row), cached, strict=True):
            to_keys.copy_(keys)
            to_values.copy_(values)

    def pause(self, number: int, row: LiveRow) -> None:
        """Keep the row on the device."""
        self._ledgers[0].take(row.block_bytes)
        self._rows[number] = row

    def swap_out(self, number: int, row: LiveRow) -> None:
        """Move the row to host memory. On CUDA this starts a transfer, which `wait` ends."""
        self._ledgers[1].take(row.block_bytes)
        self._rows[number] = row
        row.on_host = True
        if row.block is not None and self._arena is not None:
            host = self._arena.take(row.block.numel(), row.block.dtype)
            sent = self._transfer(row.block, host)
            if sent is not None:
                self._to_host.append(sent)
            row.block = host

    def take(self, number: int) -> tuple[LiveRow, RowKV | None]:
        """Return a paused row to the batch. Its cache is valid until the next call."""
        row = self.unpause(number)
        if row.block is None:
            return row, None
        if row.arrival is not None:
            stream = torch.cuda.current_stream(self._like.device)
            stream.wait_event(row.arrival)
            row.block.record_stream(stream)
        views = self._views(row)
        row.block = row.arrival = None
        return row, views

    def drop(self, number: int) -> None:
        row = self._rows.pop(number)
        self._ledgers[row.on_host].take(-row.block_bytes)
        if row.on_host and row.block is not None and self._arena is not None:
            self._arena.give(row.block)

    def unpause(self, number: int) -> LiveRow:
        """Remove a paused row and return it."""
        row = self._rows[number]
        if row.on_host:
            raise ValueError(f"row {number} is in host memory, not paused on the device")
        self.drop(number)
        return row

    def swap_in(self, number: int) -> None:
        """Move the row from host memory to the device, paused. On CUDA this starts the transfer."""
        row = self._rows[number]
        self._ledgers[0].take(row.block_bytes)
        self._ledgers[1].take(-row.block_bytes)
        row.on_host = False
        if row.block is not None and self._arena is not None:
            self.wait()  # its transfer to the host may not have ended
            block = self._like.new_empty(row.block.shape)
            row.arrival = self._transfer(row.block, block)
            self._arena.give(row.block)  # its next transfers come after, on the same stream
            row.block = block

    def wait(self) -> None:
        """Wait until all transfers to the host have ended."""
        for event in self._to_host:
            event.synchronize()
        self._to_host.clear()

    def _transfer(self, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event | None:
        """Copy; the event of its end, or None if it has ended."""
        stream = self._stream
        if stream is None:
            target.copy_(source)
            return None
        stream.wait_stream(torch.cuda.current_stream(self._like.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        for tensor in (source, target):
            if tensor.is_cuda:
                tensor.record_stream(stream)
        event: torch.cuda.Event = stream.record_event()
        return event

    def _tokens(self, row: LiveRow) -> int:
        """Return the tokens in a row's block."""
        return 0 if row.block is None else row.block.numel() // self._values

    def _views(self, row: LiveRow) -> RowKV:
        """The block as each layer's keys and values."""
        assert row.block is not None
        length = self._tokens(row)
        cached = []
        at = 0
        for pair in self._shapes:
            views = []
            for _, heads, _, dim in pair:
                size = heads * length * dim
                views.append(row.block[at : at + size].view(heads, length, dim))
                at += size
            cached.append((views[0], views[1]))
        return cached
