"""Decode steps of fixed shapes on the padded slab, captured as CUDA graphs where there is a GPU.

A step of a running batch differs from the last one in its number of columns, and often of rows, so
each is launched kernel by kernel: about 1,300 launches for 32 layers, which takes a processor
several times as long as the GPU needs to read an 8B model's weights. A step of fixed shape is the
same for many steps, and a graph of it is one launch.

    key of a shape   rows R, columns first..last of the slab's first R rows
    inputs           on the device: tokens [R], the column where each row begins [R, 1], and the
                     column that the step writes [1]
    the step         mask and positions from the inputs; the model over R x 1 tokens; its layers
                     write the column that the input names and read all columns of the shape

The shape covers the window and a little more. What it has more is masked: columns before a row
begins, columns after the one that is written, and rows above N, which write into columns that no
row has. So masked columns must hold finite numbers (`RebatchCache` with `whole_rows`).

Shapes are rounded, so that few are needed: rows up to the next of `ROWS`, columns by an eighth. A
shape is run eagerly the first `EAGER_RUNS` times, which also initialises the libraries, and then
captured. If a capture fails, that is logged once, and all steps are launched kernel by kernel from
then on.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import OrderedDict
from typing import Any

import torch

from toolkit.engines.memory import is_out_of_memory
from toolkit.engines.rebatch_cache import COLUMN_STEP, FixedShape, RebatchCache
from toolkit.engines.row_cache import Forward
from toolkit.engines.slab import additive

EAGER_RUNS = 2
GRAPHS_MAX = 64  # the shape that was used least recently is dropped first
# Rows of a shape: powers of two and the halves between them.
ROWS = tuple(sorted({1, 2} | {size for k in range(1, 12) for size in (1 << k, 3 << (k - 1))}))
COLUMN_PARTS = 8  # columns are rounded up by at most one part in so many, or `COLUMN_STEP`

_logger = logging.getLogger(__name__)


def shape_for(cache: RebatchCache, rows: int, ahead: int = 0) -> FixedShape:
    """The smallest shape for a step of the first `rows` rows, `ahead` steps after the next one."""
    start, end = cache.window
    end += ahead
    step = COLUMN_STEP
    while step * COLUMN_PARTS < end + 1 - start:
        step *= 2
    return FixedShape(
        min(ROWS[bisect_left(ROWS, rows)] if rows <= ROWS[-1] else rows, cache.row_capacity),
        start // step * step,
        min(-(-(end + 1) // step) * step, cache.columns),
    )


class FixedSteps:
    """Makes the decode steps of a cache in fixed shapes.

    Args:
        cache: with `whole_rows`.
        dtype: of the mask.
        capture: capture graphs; False: only the eager steps, as on a CPU.

    Attributes:
        captures: whether shapes are captured; False after a capture has failed.
        graphs: those that are captured, the one used least recently first.
    """

    def __init__(
        self, forward: Forward, cache: RebatchCache, dtype: torch.dtype, *, capture: bool
    ) -> None:
        self._forward = forward
        self._cache = cache
        self._dtype = dtype
        self.captures = capture
        self._generation = -1  # of the slabs that the graphs read
        self._runs: dict[FixedShape, int] = {}
        self.graphs: OrderedDict[FixedShape, torch.cuda.CUDAGraph] = OrderedDict()
        self._pool: Any = None  # the graphs share their memory
        self._membership = -1  # of the rows that the inputs describe
        self._tokens = self._begins = self._column = torch.empty(0)
        # Where all graphs write their logits, [rows, V]: outputs of their own would stay allocated.
        self._logits = torch.empty(0)

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of the tokens after `last` [N]; valid until the next step.

        The step writes the column after the window. If memory runs out, nothing has changed.
        """
        cache, rows = self._cache, len(last)
        shape = shape_for(cache, rows)
        self._set_inputs(last)
        graph = self._graph(shape) if self.captures else None
        if graph is None:
            return self._run(shape)[:rows]
        graph.replay()
        return self._logits[:rows]

    def warm_up(self, last: torch.Tensor, steps: int) -> None:
        """Capture now what the next `steps` steps need, if anything is captured, so that they take
        the time that they take in the long run. The caller has made room for them.
        """
        if not self.captures:
            return
        self._set_inputs(last)
        for shape in {shape_for(self._cache, len(last), ahead) for ahead in range(steps)}:
            while self.captures and self._graph(shape) is None:
                self._run(shape)  # writes the column that the next step writes anew

    def clear(self) -> None:
        """Drop all graphs and their memory."""
        self.graphs.clear()
        self._runs.clear()
        self._pool = None
        self._logits = torch.empty(0)

    def _set_inputs(self, last: torch.Tensor) -> None:
        cache, rows = self._cache, len(last)
        room = cache.row_capacity
        if len(self._tokens) < room:
            # Graphs read the old ones.
            self.clear()
            device = cache.device
            self._tokens = torch.zeros(room, dtype=torch.long, device=device)
            self._begins = torch.zeros(room, 1, dtype=torch.long, device=device)
            self._column = torch.zeros(1, dtype=torch.long, device=device)
            self._membership = -1
        _, end = cache.window
        if self._membership != cache.membership:
            # A row above N begins at the column that is written, so that it sees something.
            begins = [*cache.begins, *[end] * (len(self._begins) - rows)]
            self._begins.copy_(torch.tensor(begins)[:, None])
            self._membership = cache.membership
        self._tokens[:rows].copy_(last)
        self._column.fill_(end)

    def _run(self, shape: FixedShape) -> torch.Tensor:
        """Logits [R, V] of a step of this shape over the inputs. Nothing waits for the device. The
        first run of all makes the tensor for the logits of graphs.
        """
        rows, first, last = shape
        columns = torch.arange(first, last, device=self._column.device)
        begins = self._begins[:rows]
        visible = (columns >= begins) & (columns <= self._column)
        mask = additive(visible, self._dtype)
        positions = self._column - begins
        with self._cache.fixed(shape, self._column):
            logits = self._forward(self._tokens[:rows, None], mask, positions, self._cache)
        if self.captures and not len(self._logits):
            self._logits = logits.new_empty(len(self._tokens), logits.shape[1])
        return logits

    def _graph(self, shape: FixedShape) -> torch.cuda.CUDAGraph | None:
        """The graph of this shape, captured if it is due; None: run the step eagerly."""
        if self._generation != self._cache.generation:
            self.clear()
            self._generation = self._cache.generation
        graph = self.graphs.get(shape)
        if graph is not None:
            self.graphs.move_to_end(shape)
            return graph
        runs = self._runs[shape] = self._runs.get(shape, 0) + 1
        if runs <= EAGER_RUNS:
            return None
        try:
            graph = self._capture(shape)
        except RuntimeError as error:
            self.captures = False
            self.clear()
            why = "memory ran out" if is_out_of_memory(error) else str(error).splitlines()[0]
            _logger.warning(
                "decode steps are not captured as CUDA graphs, and run eagerly: %s", why
            )
            return None
        self.graphs[shape] = graph
        if len(self.graphs) > GRAPHS_MAX:
            self.graphs.popitem(last=False)
        return graph

    def _capture(self, shape: FixedShape) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process, which send signs of life, do not use the device.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._logits[: shape.rows].copy_(self._run(shape))
        if self._pool is None:
            self._pool = graph.pool()
        return graph
