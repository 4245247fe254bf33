"""Rows of different lengths as one padded batch: the tensors that a forward pass needs, built once per slice."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from toolkit.engines.slab import SlabCache


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
        """The mask of a decode step that sees `column` columns; None where every row sees all of them.

        In four dimensions, [N, 1, 1, column], the model takes it as it is instead of building one per step.
        """
        if not self._is_padded:
            return None
        mask = self.mask[:, :column]
        return mask[:, None, None, :] if as_4d else mask
