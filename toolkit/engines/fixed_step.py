"""Decode steps of fixed shapes, captured as CUDA graphs where there is a GPU.

A step of a batch differs from the last one in how many tokens its rows have, and often in how many
rows there are, so each is launched kernel by kernel: about 1,300 launches for 32 layers, which
takes a processor several times as long as the GPU needs to read an 8B model's weights. A step of
fixed shape is the same for many steps, and a graph of it is one launch.

    key of a shape   rows R, and a bound of the longest row
    memory           per layer keys and values [T, kv_heads, head_dim]: a row is a run of tokens
    inputs           on the device: each row's token, the place of its first token, and how many
                     it has
    the step         the model over R x 1 tokens; a layer writes each row's token behind the row,
                     and attends to the row (`toolkit.engines.attention`)

So what a step reads and writes are numbers in its inputs, and it reads no other tokens, whatever
the shape of the cache. Rows above N are one token long, in the last place of all.

Shapes are rounded, so that few are needed: one that is new costs a capture, and FlashAttention
reads no more for a larger bound. A shape is run eagerly the first `EAGER_RUNS` times, which also
initialises the libraries, and then captured. If a capture fails, that is logged once, and all steps
are launched kernel by kernel from then on.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, DynamicLayer

from toolkit.engines.attention import RowTokens, TokenRows
from toolkit.engines.memory import is_out_of_memory
from toolkit.engines.rebatch_cache import RebatchCache
from toolkit.engines.slab import Arena

EAGER_RUNS = 1
GRAPHS_MAX = 64  # the shape that was used least recently is dropped first
# Rows of a shape: powers of two and the halves between them.
ROWS = tuple(sorted({1, 2} | {size for k in range(1, 20) for size in (1 << k, 3 << (k - 1))}))
LONGEST_MIN = 128  # the bound of the longest row is a power of two
ROOM_MIN = 32  # rows that the inputs have room for at first

_logger = logging.getLogger(__name__)
# From (input_ids [N, L], mask, position_ids [N, L], cache) to the last column's logits [N, V].
Forward = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, Cache], torch.Tensor]


class FixedShape(NamedTuple):
    """`rows` rows of at most `longest` tokens, including the token that the step writes."""

    rows: int
    longest: int


def shape_for(rows: int, width: int, row_capacity: int) -> FixedShape:
    """The smallest shape for a step of `rows` rows, the longest of `width` tokens before it."""
    most_rows = ROWS[bisect_left(ROWS, rows)]
    longest = 1 << width.bit_length()  # above the width
    return FixedShape(min(most_rows, row_capacity), max(longest, LONGEST_MIN))


class FixedSteps:
    """Makes the decode steps of the rows in a cache in fixed shapes.

    Args:
        cache: where the rows are. While it has fewer than `row_capacity` of them, the last place
            of all is no row's.
        dtype: of masks.
        last_position: positions stop here, since a row that has ended may stay in its batch.
        rows_kind: how layers attend to rows.
        capture: capture graphs; False: only the eager steps, as on a CPU.

    Attributes:
        captures: whether shapes are captured; False after a capture has failed.
        graphs: the captured ones, the least recently used first.
    """

    def __init__(
        self,
        forward: Forward,
        cache: Arena | RebatchCache,
        dtype: torch.dtype,
        last_position: int,
        rows_kind: type[TokenRows],
        *,
        capture: bool,
    ) -> None:
        self._forward = forward
        self._cache = cache
        self._dtype = dtype
        self._last_position = last_position
        self._rows_kind = rows_kind
        self.captures = capture
        self._generation = -1  # of the memory that the graphs read
        self._runs: dict[FixedShape, int] = {}
        self.graphs: OrderedDict[FixedShape, torch.cuda.CUDAGraph] = OrderedDict()
        self._pool: Any = None  # the graphs share their memory
        # A mask of four dimensions keeps models from making their own; `attend` needs none.
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=dtype, device=cache.device)
        self._membership = -1  # of the rows that the inputs describe
        self._end = 0  # of the cache when they were set
        self._tokens = self._firsts = self._cached = self._grows = self._since = torch.empty(0)
        # Where all graphs write their logits, [rows, V]: outputs of their own would stay allocated.
        self._logits = torch.empty(0)

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of the tokens after `last` [N]; valid until the next step.

        The step writes a token behind each row. If memory runs out, nothing has changed.
        """
        shape = shape_for(len(last), self._cache.width, self._cache.row_capacity)
        self._set_inputs(last)
        graph = self._graph(shape) if self.captures else None
        if graph is None:
            return self._run(shape)[: len(last)]
        graph.replay()
        return self._logits[: len(last)]

    def warm_up(self, last: torch.Tensor, steps: int) -> None:
        """Capture now what the next `steps` steps need, if anything is captured, so that they take
        the time that they take in the long run. The caller has made room for them.
        """
        if not self.captures:
            return
        self._set_inputs(last)
        width = self._cache.width
        capacity = self._cache.row_capacity
        for shape in {shape_for(len(last), width + ahead, capacity) for ahead in range(steps)}:
            while self.captures and self._graph(shape) is None:
                self._run(shape)  # writes the tokens that the next step writes anew

    def clear(self) -> None:
        """Drop all graphs and their memory."""
        self.graphs.clear()
        self._runs.clear()
        self._pool = None
        self._logits = torch.empty(0)

    def _set_inputs(self, last: torch.Tensor) -> None:
        cache = self._cache
        rows = len(last)
        if len(self._tokens) < rows:
            self.clear()  # graphs read the old inputs
            self._membership = -1
            room = max(1 << (rows - 1).bit_length(), ROOM_MIN)
            self._since = torch.zeros(1, dtype=torch.int32, device=cache.device)
            self._firsts = torch.zeros(room + 1, dtype=torch.int32, device=cache.device)
            self._cached = torch.zeros(room, dtype=torch.int32, device=cache.device)
            self._grows = torch.zeros(room, dtype=torch.int32, device=cache.device)
            self._tokens = torch.zeros(room, dtype=torch.long, device=cache.device)
        if self._membership != cache.membership:
            spare = len(self._tokens) - rows
            last_place = cache.flat()[0][0].shape[0] - 1
            firsts = [*cache.firsts, *[last_place] * (spare + 1)]
            self._firsts.copy_(torch.tensor(firsts, dtype=torch.int32))
            self._cached.copy_(torch.tensor([*cache.lengths, *[0] * spare], dtype=torch.int32))
            self._grows.copy_(torch.tensor([1] * rows + [0] * spare, dtype=torch.int32))
            self._end = cache.end
            self._membership = cache.membership
        self._tokens[:rows].copy_(last)
        self._since.fill_(cache.end - self._end)

    def _run(self, shape: FixedShape) -> torch.Tensor:
        """Logits [R, V] of a step of this shape over the inputs. Nothing waits for the device. The
        first run of all makes the tensor for the logits of graphs.
        """
        rows = shape.rows
        firsts = self._firsts[: rows + 1]
        cached = self._cached[:rows] + self._since * self._grows[:rows]
        places = (firsts[:rows] + cached).long()
        own = self._rows_kind(firsts, cached + 1, shape.longest, self._dtype)
        positions = cached.clamp(max=self._last_position).long()[:, None]
        step = Cache(
            layers=[
                _StepLayer(keys, values, places, own, shape.longest)
                for keys, values in self._cache.flat()
            ]
        )
        logits = self._forward(self._tokens[:rows, None], self._no_mask, positions, step)
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


class _StepLayer(DynamicLayer):  # type: ignore[misc]
    """A layer's cache as the model sees it in one step: it writes the rows' new tokens to `places`
    [R].
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        places: torch.Tensor,
        rows: TokenRows,
        longest: int,
    ) -> None:
        super().__init__()
        self.is_initialized = True
        self._keys = keys
        self._values = values
        self._places = places
        self._rows = rows
        self._longest = longest

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[RowTokens, torch.Tensor]:
        self._keys.index_copy_(0, self._places, key_states[:, :, 0])
        self._values.index_copy_(0, self._places, value_states[:, :, 0])
        return RowTokens(self._keys, self._rows), self._values

    def get_seq_length(self) -> int:
        return self._longest - 1
