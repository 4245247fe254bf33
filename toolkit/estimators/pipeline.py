"""The law of passes that overlap: vLLM's async scheduling on a GPU.

The CPU schedules and launches pass n + 1 while the GPU runs pass n, and hands out the tokens of
pass n only when it has launched pass n + 1. With S the time at which a pass is scheduled, c its
launch on the CPU, g its work on the GPU, G its end there and E the time at which its tokens exist:

    G[n] = max(max(G[n-1], P[n]) + g[n], S[n] + c[n])
    E[n] = max(G[n], S[n+1] + c[n+1])
    S[n+1] = E[n-1], and after a pass from idle S[n] + c[n]

P is the time at which the GPU can begin the pass: S + c for a CUDA graph, which one call launches,
and S for a pass that is launched kernel by kernel. An engine that launches passes in processes of
their own (tensor parallelism) does not hold back tokens for a launch: there E[n] = G[n], and
launches follow one another.

How a pass is launched depends on the server's `cudagraph_mode` and on its tokens:

    mode                 decodes alone     with chunks      more tokens than the largest graph
    NONE                 eager             eager            eager
    PIECEWISE            piecewise         piecewise        eager
    FULL                 graph             graph            eager
    FULL_DECODE_ONLY     graph             eager            eager
    FULL_AND_PIECEWISE   graph             piecewise        eager

    g of decodes alone   decode + row * rows + cached * cached tokens + expert * touched experts
    g with chunks        max(floor + floor_token * tokens + expert * touched, token * tokens)
                         + attended * attended tokens + beside * cached tokens of decodes
    c of a graph         graph + graph_row * rows
    c in pieces          piece + piece_row * rows
    c of an eager pass   eager + eager_chunk * chunks

Layers with sliding windows or states have no terms of their own: what they read does not grow with
the cache but for rows shorter than a window, and so belongs to rows and tokens.

A graph computes its own number of rows or tokens, to which a pass is padded. Touched experts are
those of `steps.touched_experts`, by tokens that are not padding. The fit of the
coefficients is in `pipeline_fit`.

Source: vLLM 0.32, v1/engine/core.py (`step_with_batch_queue`), v1/worker/gpu/cudagraph_utils.py.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np
from mypy_extensions import mypyc_attr
from numpy.typing import NDArray

from toolkit.errors import InputError
from toolkit.estimators.laws import SegmentedLaw
from toolkit.estimators.steps import StepLaw, StepShape, touched_experts

GRAPH: Final = 0
PIECEWISE: Final = 1
EAGER: Final = 2
# of each mode: how decodes alone are launched, and passes with chunks
LAUNCHES: Final[dict[str, tuple[int, int]]] = {
    "NONE": (EAGER, EAGER),
    "PIECEWISE": (PIECEWISE, PIECEWISE),
    "FULL": (GRAPH, GRAPH),
    "FULL_DECODE_ONLY": (GRAPH, EAGER),
    "FULL_AND_PIECEWISE": (GRAPH, PIECEWISE),
}


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """What a server says of its CUDA graphs.

    Attributes:
        mode: vLLM's `cudagraph_mode`.
        sizes: the tokens of each graph, ascending; empty: there are none.
        apart: passes are launched in processes of their own (tensor parallelism).
    """

    mode: str
    sizes: tuple[int, ...]
    apart: bool = False

    def __post_init__(self) -> None:
        if self.mode not in LAUNCHES:
            modes = ", ".join(LAUNCHES)
            raise InputError(f"cudagraph_mode {self.mode!r} is not modelled", f"one of {modes} is")
        if list(self.sizes) != sorted(set(self.sizes)):
            raise InputError(f"the sizes of CUDA graphs {list(self.sizes)} must ascend")

    def launch_of(self, verified: int, chunks: int, chunk_tokens: int) -> int:
        """GRAPH, PIECEWISE or EAGER: how a pass with so many tokens of decodes, their drafts among
        these, and such chunks is launched.
        """
        tokens = verified + chunk_tokens
        if not self.sizes or tokens > self.sizes[-1]:
            return EAGER
        alone, mixed = LAUNCHES[self.mode]
        return mixed if chunks else alone

    def padded(self, tokens: int) -> int:
        """The tokens of the smallest graph for so many tokens; without one, as many."""
        place = bisect_left(self.sizes, tokens)
        return self.sizes[place] if place < len(self.sizes) else tokens


@dataclass(frozen=True, slots=True)
class PipelineLaw:
    """The law of passes that overlap. Coefficients are in seconds per unit, all >= 0.

    Attributes:
        decode_s, row_s, cached_s: GPU, decodes alone: constant, per (padded) row, per cached token.
        floor_s, floor_token_s: GPU, with chunks: the least, constant and per (padded) token.
        token_s: GPU, with chunks: per token, where arithmetic limits.
        attended_s, beside_s: GPU, with chunks: per attended token of the chunks, and per cached
            token of the decodes.
        graph_s, graph_row_s: CPU: the launch of a CUDA graph, constant and per row.
        piece_s, piece_row_s: CPU: the launch in pieces.
        eager_s, eager_chunk_s: CPU: the launch kernel by kernel, constant and per chunk.
        spread: launches other than graphs take these times as long, in turn; their mean is 1.
            Empty: all take as long.
        expert_s: GPU: per touched expert of a layer, all layers together.
        experts, experts_per_token: of a layer; 0: there are none.
    """

    graphs: GraphSettings
    decode_s: float
    row_s: float
    cached_s: float
    floor_s: float
    floor_token_s: float
    token_s: float
    attended_s: float
    beside_s: float
    graph_s: float
    graph_row_s: float
    piece_s: float
    piece_row_s: float
    eager_s: float
    eager_chunk_s: float
    spread: tuple[float, ...] = ()
    expert_s: float = 0.0
    experts: int = 0
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        for name in COEFFICIENTS:
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise InputError(f"{name} of overlapping passes is {value}; it must be >= 0")

    def gpu_s(self, shape: StepShape) -> float:
        """Seconds of the pass on the GPU."""
        verified = shape.decodes + shape.draft_tokens
        launch = self.graphs.launch_of(verified, shape.prefills, shape.prefill_tokens)
        tokens = verified + shape.prefill_tokens
        experts_s = 0.0
        if self.experts:
            touched = touched_experts(tokens, self.experts, self.experts_per_token)
            experts_s = self.expert_s * touched
        if launch != EAGER:
            tokens = self.graphs.padded(tokens)
        if not shape.prefills:
            seconds = self.decode_s + self.row_s * tokens + self.cached_s * shape.decode_cached
            return seconds + experts_s
        least_s = self.floor_s + self.floor_token_s * tokens + experts_s
        arithmetic_s = self.token_s * tokens
        seconds = least_s if least_s > arithmetic_s else arithmetic_s
        seconds += self.attended_s * shape.prefill_attended
        return seconds + self.beside_s * shape.decode_cached

    def read_s(self, shape: StepShape) -> float:
        """Seconds per cached token of a decode in such a pass."""
        return self.beside_s if shape.prefills else self.cached_s

    def growth_s(self, shape: StepShape) -> float:
        """Seconds that each following pass of the same decodes takes more than the one before."""
        return (self.beside_s if shape.prefills else self.cached_s) * shape.decodes

    def prompt_token_s(self, attended: float) -> float:
        """Seconds that a token of a long chunk adds, which attends to so many tokens."""
        return self.token_s + self.attended_s * attended

    def launch_s(self, shape: StepShape) -> float:
        """Seconds on the CPU from scheduling the pass to its last kernel launched, on average."""
        verified = shape.decodes + shape.draft_tokens
        launch = self.graphs.launch_of(verified, shape.prefills, shape.prefill_tokens)
        if launch == GRAPH:
            return self.graph_s + self.graph_row_s * shape.rows
        if launch == PIECEWISE:
            return self.piece_s + self.piece_row_s * shape.rows
        return self.eager_s + self.eager_chunk_s * shape.prefills

    def drawn_launch_s(self, shape: StepShape, number: int) -> float:
        """`launch_s` of the launch with this number; that of graphs does not vary."""
        seconds = self.launch_s(shape)
        if not self.spread or self.waits_for_launch(shape):
            return seconds
        return seconds * self.spread[number % len(self.spread)]

    def waits_for_launch(self, shape: StepShape) -> bool:
        """Whether the GPU can begin the pass only when its launch has ended."""
        verified = shape.decodes + shape.draft_tokens
        return self.graphs.launch_of(verified, shape.prefills, shape.prefill_tokens) == GRAPH

    def forward_s(self, shape: StepShape) -> float:
        """Seconds of a pass that nothing overlaps: from its scheduling to its tokens."""
        gpu_s = self.gpu_s(shape)
        launch_s = self.launch_s(shape)
        if self.waits_for_launch(shape):
            return launch_s + gpu_s
        return max(launch_s, gpu_s)

    def period_s(self, shape: StepShape) -> float:
        """Seconds from one such pass to the next, where they follow one another."""
        return max(self.gpu_s(shape), self.launch_s(shape))

    def step_s(self, shape: StepShape) -> float:
        """As `period_s`."""
        return self.period_s(shape)

    def after_s(self, rows: int) -> float:
        """Seconds from the end of a pass that nothing overlaps to the next: in its launch."""
        return 0.0

    def times(self, factor: float) -> PipelineLaw:
        """Return the law of passes that take `factor` times as long, launches and GPU alike."""
        return replace(self, **{name: factor * getattr(self, name) for name in COEFFICIENTS})


_OTHERS: Final = ("graphs", "spread", "experts", "experts_per_token")
COEFFICIENTS: Final = tuple(each.name for each in fields(PipelineLaw) if each.name not in _OTHERS)


@mypyc_attr(allow_interpreted_subclasses=True)
class PassTimes:
    """The law of an engine's passes, for a router that asks for averages."""

    def __init__(self, law: StepLaw | PipelineLaw) -> None:
        self._law = law
        self.behind_s = law.behind_s if isinstance(law, StepLaw) else 0.0
        self._window = law.window if isinstance(law, StepLaw) else 0

    def pass_s(
        self, decodes: int, decode_cached: float, chunks: float, new_tokens: float, attended: float
    ) -> float:
        shape = StepShape(decodes, round(decode_cached), round(chunks), round(new_tokens), attended)
        window = self._window
        if window:  # as if all rows were alike
            if decodes:
                shape.decode_inside = round(min(decode_cached, float(decodes * (window - 1))))
            shape.prefill_inside = min(attended, new_tokens * window)
        return self._law.step_s(shape)


@dataclass(frozen=True, slots=True)
class OverlappingRounds:
    """What a policy inside such an engine believes of its passes: a `LatencyLaw`.

    A chunk between decodes costs the decodes two gaps. With d a pass of decodes alone, e and g the
    launch and the GPU's time of the chunk, and c the next launch, both gaps together last
    max(d + g, e + c). So a chunk takes that long, less the d that a step takes anyway.

    Attributes:
        law: of the passes.
        slices: of static batches, which such an engine does not run; `serve_table` is its.
    """

    law: PipelineLaw
    slices: SegmentedLaw
    prefill_emits_token: bool = True
    padded: bool = False
    round_s: float = 0.0

    def prefill_s(self, batch_size: int, input_length: float) -> float:
        """Seconds that prompts of `input_length` tokens take, [batch_size] at once."""
        return self.pass_s(batch_size, 0.0, input_length)

    def pass_s(self, batch_size: int, start: float, end: float) -> float:
        """Seconds of chunks from `start` to `end` tokens, [batch_size] at once."""
        new = end - start
        attended = batch_size * new * (start + new / 2)
        shape = StepShape(0, 0, batch_size, round(batch_size * new), attended)
        alone = StepShape(1, 0)
        decodes_s = self.law.gpu_s(alone)
        gpu_s = decodes_s + self.law.gpu_s(shape)
        launches_s = self.law.launch_s(shape) + self.law.launch_s(alone)
        return max(gpu_s, launches_s) - decodes_s

    def decode_s(self, batch_size: int, input_length: float, steps: int) -> float:
        """Seconds of `steps` decode steps of rows that have `input_length` tokens before them."""
        if steps <= 0:
            return 0.0
        cached = batch_size * (input_length + 1)
        first = StepShape(batch_size, round(cached))
        first_s = self.law.gpu_s(first)
        growth_s = self.law.cached_s * batch_size  # of each step over the one before
        launch_s = self.law.launch_s(first)
        by_launch = 0  # steps that take as long as their launch
        if first_s < launch_s:
            by_launch = steps
            if growth_s > 0.0:
                by_launch = min(math.ceil((launch_s - first_s) / growth_s), steps)
        by_gpu = steps - by_launch
        gpu_s = first_s + growth_s * (by_launch + 0.5 * (by_gpu - 1))
        return by_launch * launch_s + by_gpu * gpu_s

    def leave_s(self, length: float) -> float:
        """0: a row that leaves costs nothing."""
        return 0.0

    def serve_table(self, max_batch_size: int, steps: int) -> NDArray[np.float64]:
        """Of static batches."""
        return self.slices.serve_table(max_batch_size, steps)
