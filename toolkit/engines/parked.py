"""Rows that do not decode but keep their caches: paused ones on the device, swapped ones in host
memory.

A row's cache is one block, so that a swap is one transfer. On CUDA blocks in host memory are pinned
and transfers run on a stream of their own, beside compute. On a CPU device and host memory are the
same: a swap only changes what is charged, and the copy is the one out of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from toolkit.engines.memory import ByteLedger
from toolkit.engines.protocol import LiveRow
from toolkit.engines.rebatch_cache import RowKV
from toolkit.engines.slab import KVShape


@dataclass(slots=True, eq=False)
class Parked:
    """A row and its cache, `block` [values], None where it was never prefilled."""

    live: LiveRow
    length: int = 0  # tokens in the cache
    block: torch.Tensor | None = None
    on_host: bool = False
    arrival: torch.cuda.Event | None = None  # of the block, where it is on its way

    @property
    def size_bytes(self) -> int:
        return 0 if self.block is None else self.block.nbytes


class ParkedRows:
    """Parked rows by number.

    Args:
        shapes: what each layer caches.
        like: a tensor of the cache's dtype, on its device.
        device_ledger, host_ledger: are charged for blocks here and there. `torch.OutOfMemoryError` past their budgets.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        like: torch.Tensor,
        device_ledger: ByteLedger,
        host_ledger: ByteLedger,
    ) -> None:
        self._shapes = shapes
        self._like = like
        self._values_per_token = sum(k[1] * k[3] + v[1] * v[3] for k, v in shapes)
        self._ledgers = (device_ledger, host_ledger)
        self._rows: dict[int, Parked] = {}
        self._leaving: list[torch.cuda.Event] = []  # transfers to the host
        self._came: list[
            torch.Tensor
        ] = []  # blocks in host memory whose transfers to the device may still go on
        self._stream: torch.cuda.Stream | None = None
        if like.is_cuda:
            self._stream = torch.cuda.Stream(like.device)  # type: ignore[no-untyped-call]

    def __contains__(self, number: int) -> bool:
        return number in self._rows

    def size_bytes(self, number: int) -> int:
        """What a row's cache takes, here or there."""
        return self._rows[number].size_bytes

    @property
    def on_device(self) -> tuple[int, ...]:
        """The rows that are paused."""
        return tuple(number for number, row in self._rows.items() if not row.on_host)

    @property
    def device_tokens(self) -> int:
        return sum(row.length for row in self._rows.values() if not row.on_host)

    @property
    def host_tokens(self) -> int:
        return sum(row.length for row in self._rows.values() if row.on_host)

    def copy_of(self, live: LiveRow, cached: RowKV | None) -> Parked:
        """A row that leaves the batch, or the queue before its prefill (`cached` None), and its
        cache in a block.

        Nothing is charged yet, so that a row can leave when memory is full: first it is copied,
        then its place is free.
        """
        row = Parked(live)
        if cached is not None:
            row.length = cached[0][0].shape[1]
            row.block = self._like.new_empty(row.length * self._values_per_token)
            for (to_keys, to_values), (keys, values) in zip(self._views(row), cached, strict=True):
                to_keys.copy_(keys)
                to_values.copy_(values)
        return row

    def pause(self, number: int, row: Parked) -> None:
        """The row stays on the device."""
        self._ledgers[0].take(row.size_bytes)
        self._rows[number] = row

    def swap_out(self, number: int, row: Parked) -> None:
        """The row goes to host memory; on CUDA the transfer is begun, and `wait` ends it."""
        self._ledgers[1].take(row.size_bytes)
        self._rows[number] = row
        row.on_host = True
        if row.block is not None and self._stream is not None:
            host = torch.empty(row.block.shape, dtype=row.block.dtype, pin_memory=True)
            self._leaving.append(self._transfer(row.block, host))
            row.block = host

    def take(self, number: int) -> tuple[LiveRow, RowKV | None]:
        """A paused row goes back to the batch. Its cache is valid until the next call."""
        row = self.unpause(number)
        if row.block is None:
            return row.live, None
        if row.arrival is not None:
            stream = torch.cuda.current_stream(self._like.device)
            stream.wait_event(row.arrival)
            row.block.record_stream(stream)
        return row.live, self._views(row)

    def drop(self, number: int) -> None:
        """Forget a row."""
        row = self._rows.pop(number)
        self._ledgers[row.on_host].take(-row.size_bytes)

    def settle(self) -> None:
        """A round has ended: transfers are done, and host memory forgets what came back from it."""
        self.wait()
        self._came.clear()

    def unpause(self, number: int) -> Parked:
        """A paused row, which is here no more."""
        row = self._rows[number]
        if row.on_host:
            raise ValueError(f"row {number} is in host memory, and not paused on the device")
        self.drop(number)
        return row

    def swap_in(self, number: int) -> None:
        """From host memory to the device, where the row is paused; on CUDA the transfer is begun."""
        row = self._rows[number]
        self._ledgers[0].take(row.size_bytes)
        self._ledgers[1].take(-row.size_bytes)
        row.on_host = False
        if row.block is not None and self._stream is not None:
            self.wait()  # it may still be on its way out
            self._came.append(row.block)
            block = self._like.new_empty(row.block.shape)
            row.arrival = self._transfer(row.block, block)
            row.block = block

    def wait(self) -> None:
        """Until all transfers to the host are done."""
        for event in self._leaving:
            event.synchronize()
        self._leaving.clear()

    def _transfer(self, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event:
        stream = self._stream
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream(self._like.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        for tensor in (source, target):
            if tensor.is_cuda:
                tensor.record_stream(stream)
        event: torch.cuda.Event = stream.record_event()
        return event

    def _views(self, row: Parked) -> RowKV:
        """The block as each layer's keys and values."""
        assert row.block is not None
        cached, at = [], 0
        for pair in self._shapes:
            views = []
            for _, heads, _, dim in pair:
                size = heads * row.length * dim
                views.append(row.block[at : at + size].view(heads, row.length, dim))
                at += size
            cached.append((views[0], views[1]))
        return cached
