"""The layers of a cache that attention reads through a window: the first N rows, and columns start..end, of a slab."""

from __future__ import annotations

import torch
from transformers.cache_utils import DynamicLayer


class Window:
    """The columns that hold the rows now. One for all layers."""

    __slots__ = ("end", "first_row", "start")

    def __init__(self) -> None:
        self.start = self.end = 0
        self.first_row = 0  # that the next pass is over


class WindowLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's slabs. A pass reads the window and writes after its end; the window moves when the pass is over."""

    def __init__(self, window: Window) -> None:
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
        self.key_slab, self.value_slab = self.key_slab[:, :, start:end], self.value_slab[:, :, start:end]
