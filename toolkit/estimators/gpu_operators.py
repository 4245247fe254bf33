"""Times of a model's operators on a GPU, from a handful of coefficients, and their sum: a pass.

    GEMM [m, k] x [k, n]   start + (moving^p + computing^p)^(1/p)
                           moving = bytes / bandwidth, computing = 2 m n k / (FLOP/s)
    attention of decodes   start + the hypotenuse of row * rows * KV heads and cache / bandwidth
    attention of chunks    start + 4 * heads * head_dim * attended / (FLOP/s) + bytes / bandwidth
    latent decodes         start + head * heads + row * rows + row_head * rows * heads
                           + cache / bandwidth * a factor for the heads
    linear decodes         start + states / bandwidth
    linear chunks          start + rounds of heads * (head + token * tokens of a chunk)
                           + mixed numbers / speed of the convolution
    experts                start + expert * touched + bytes / bandwidth + FLOPs / (FLOP/s)
    all-reduce             (start + bytes / bandwidth) * a factor for its size, by number of GPUs

A GEMM is limited by what it moves or by what it computes; `p` says how well both overlap. Kernels
are made for tiles of rows, so the time is then multiplied by a factor for its m (`tiles`). A layer
reads the weights of the experts that at least one of T tokens chose: of E experts, k per token, E *
(1 - (1 - k / E)^T) are expected, if all are chosen alike. Bandwidths and FLOP/s are what was
reached, not what the data sheet says.

    pass = the sum over layers of (GEMMs of attention, attention, GEMMs of the MLP or the experts,
           all-reduces, the rest of a layer) + output head + constant

The coefficients of each GPU were fitted to kernels that others measured there (`operators.json`,
made by `benchmarks.public.operators`, which also has the errors). The rest of a layer (norms,
rotary embedding, activation, cache writes) moves the bytes of its activations and costs a constant
per kernel; this constant and the others of `EngineConstants` were set by whole engines.

In layers with sliding windows, attention reads what is inside them (`StepShape.decode_inside`).

Multi-head latent attention (MLA) caches one latent vector per token, which all heads read. A decode
multiplies its queries into the latent space and its output back (absorbed weights), and attends
there. Chunks of prompts make keys and values of each head from the latent vectors of all tokens
that they attend to, and attend as usual. vLLM runs both kernels one after the other where a pass
has both. GPUs divide the heads, and each has the whole cache. With an index (DeepSeek sparse
attention) chunks attend in the latent space, too, both to the best tokens alone, and the index
reads all.

Gated delta nets (linear attention) keep a state per request, which each decode reads and writes,
however many tokens it has seen. GPUs divide the heads and their states. vLLM computes the decodes
and the chunks of a pass one after the other here, too.

Nothing here knows launches by the CPU, or adapters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from toolkit.errors import InputError
from toolkit.estimators.least_squares import Floats
from toolkit.estimators.model_shapes import (
    ACTIVATION_BYTES,
    PLAIN_NORMS,
    AttentionShapes,
    DeltaShapes,
    LatentShapes,
    LayerShapes,
    Mixer,
    ModelShapes,
)
from toolkit.laws.features import StepShape

TABLE = Path(__file__).with_name("operators.json")
# Bytes of a weight, with its scales: blocks of 16 share one of 8 bits (nvfp4), of 32 (mxfp4).
WEIGHT_BYTES = {
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0,
    "int4": 0.5625,
    "mxfp4": 0.53125,
    "mxfp4_mxfp8": 0.53125,  # activations of 8 bits
    "nvfp4": 0.5625,
}
CACHES = {2: "bfloat16", 1: "fp8"}  # of latent attention, by the bytes of a number
# Precisions with GEMMs, and with experts, that are taken to be as fast as those of another.
GEMMS_LIKE = {"float16": "bfloat16", "fp8_block": "fp8"}
EXPERTS_LIKE = {"float16": "bfloat16"}
# Of the rest of a layer, in bytes of activations: two norms with residuals read and write two
# tensors each, and further ones have none; the rotary embedding reads and writes queries and keys,
# and the cache is written; activations and gates read two tensors and write one. Before the state
# of linear attention one kernel reads and writes queries, keys and values.
NORM_TENSORS = 8
MORE_NORM_TENSORS = 2
ROTARY_TENSORS = 3
GATE_TENSORS = 3
PREPARED_TENSORS = 2
NORM_BYTES = 4  # of a norm's sum of squares
SHORT_HEAD = 64  # numbers of a head
USUAL_HEAD = 128
QUANTIZED_APART = ("fp8_block", "nvfp4")  # activations by a kernel before each GEMM; else fused


def factor_at(at: Any, factors: Sequence[tuple[float, float]]) -> Any:
    """Return the factor at a number or at each of many: linear between two that are known, and 1
    where none is.
    """
    known, values = zip(*factors or ((0.0, 1.0),), strict=True)
    return np.interp(at, known, values)


@dataclass(frozen=True, slots=True)
class Gemm:
    """Coefficients of GEMMs in one precision."""

    start_s: float
    bytes_per_s: float
    flops_per_s: float
    overlap: float
    quantize_s: float = 0.0  # per activation that a kernel of its own quantizes
    tiles: tuple[tuple[int, float], ...] = ()  # m, and the factor there; linear between two

    def seconds(self, m: Floats, n: float, k: float, weight_bytes: float) -> Floats:
        """Seconds of [m, k] x [k, n] for each m; a weight has `weight_bytes`."""
        input_bytes = min(weight_bytes, 1.0) if weight_bytes < ACTIVATION_BYTES else weight_bytes
        moved = n * k * weight_bytes + m * k * input_bytes + m * n * ACTIVATION_BYTES
        moving = moved / self.bytes_per_s
        computing = 2.0 * m * n * k / self.flops_per_s
        longest = np.maximum(moving, computing)
        shares = (moving / longest) ** self.overlap + (computing / longest) ** self.overlap
        quantizing = self.quantize_s * m * k
        seconds = self.start_s + quantizing + longest * shares ** (1.0 / self.overlap)
        return np.asarray(seconds * factor_at(m, self.tiles))


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """Coefficients of attention in passes of decodes alone. `row_s` is per row and KV head.

    Attributes:
        beside: a cached token takes so many times as long in a pass with chunks.
        narrow: of a cache of 8 bits so many times the bytes per second are read.
        longest, longest_narrow: the most numbers of a head for which all this holds, with a cache
            of 16 bits and of 8. Kernels for longer heads are others, or slower.
        uneven: whether all this holds for heads with values shorter than keys.
    """

    start_s: float
    row_s: float
    bytes_per_s: float
    beside: float
    narrow: float = 1.0
    longest: int = USUAL_HEAD
    longest_narrow: int = USUAL_HEAD
    uneven: bool = False

    def unknown(self, sizes: AttentionShapes, cache_bytes: int) -> str:
        """Return what of a layer's attention was not measured, in words; '': nothing."""
        most = self.longest if cache_bytes == ACTIVATION_BYTES else self.longest_narrow
        cache = f"a cache in {CACHES[cache_bytes]}"
        if sizes.value != sizes.head_dim and not (self.uneven and cache_bytes == ACTIVATION_BYTES):
            return f"keys of {sizes.head_dim} and values of {sizes.value} numbers with {cache}"
        return f"heads of {sizes.head_dim} numbers with {cache}" if sizes.head_dim > most else ""

    def seconds(
        self,
        rows: Floats,
        cached: Floats,
        kv_heads: int,
        head_dim: float,
        cache_bytes: int = ACTIVATION_BYTES,
    ) -> Floats:
        """Seconds of one layer, for rows that have `cached` tokens together."""
        reading = self.reading_s(cached, kv_heads, head_dim, cache_bytes)
        busy = np.hypot(self.row_s * rows * kv_heads, reading)
        return np.asarray(np.where(rows > 0, self.start_s + busy, 0.0))

    def reading_s(
        self, cached: Floats, kv_heads: int, head_dim: float, cache_bytes: int = ACTIVATION_BYTES
    ) -> Floats:
        """Return the seconds of reading keys and values of `cached` tokens, in one layer."""
        bytes_per_s = self.bytes_per_s
        if cache_bytes < ACTIVATION_BYTES:
            bytes_per_s *= self.narrow
        return cached * (2 * kv_heads * head_dim * cache_bytes) / bytes_per_s


@dataclass(frozen=True, slots=True)
class ChunkAttention:
    """Coefficients of attention in passes with chunks.

    Attributes:
        short: with heads of `SHORT_HEAD` numbers or less, so many times the speed is reached.
        long: numbers of a head, and so many times the speed; linear between two, from 1 at
            `USUAL_HEAD`.
    """

    start_s: float
    flops_per_s: float
    bytes_per_s: float
    short: float = 1.0
    long: tuple[tuple[int, float], ...] = ()

    def speed_of(self, head_dim: float) -> float:
        """Return so many times the speed with which heads of so many numbers are computed."""
        if head_dim <= SHORT_HEAD:
            return self.short
        return float(factor_at(head_dim, ((USUAL_HEAD, 1.0), *self.long)))

    def seconds(
        self, tokens: Floats, attended: Floats, heads: int, kv_heads: int, head_dim: float
    ) -> Floats:
        """Seconds of one layer, for chunks of `tokens` that attend to `attended` keys."""
        speed = self.speed_of(head_dim)
        computing = 4.0 * heads * head_dim * attended / (speed * self.flops_per_s)
        moved = 2 * (heads + kv_heads) * head_dim * ACTIVATION_BYTES * tokens
        busy = self.start_s + computing + moved / (speed * self.bytes_per_s)
        return np.asarray(np.where(tokens > 0, busy, 0.0))


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Coefficients of latent attention with one dtype of the cache: all of a layer's attention
    besides GEMMs, so norms, the rotary embedding, cache writes and absorbed weights, too.

    Attributes:
        head_s, row_s, row_head_s: per head, per row, and per head of a row, of decodes.
        bytes_per_s: of the cache, by decodes.
        heads: heads on a GPU, and the factor of reading there; linear between two. Kernels are made
            for tiles of heads, and many heads compute longer than the cache is read.
        chunk: of prompts, as of attention with a KV head for each head of `LatentShapes.head_dim`.
    """

    start_s: float
    head_s: float
    row_s: float
    row_head_s: float
    bytes_per_s: float
    heads: tuple[tuple[int, float], ...]
    chunk: ChunkAttention

    def decode_s(
        self, rows: Floats, cached: Floats, heads: float, latent: LatentShapes, cache_bytes: int
    ) -> Floats:
        """Seconds of one layer, for rows that have `cached` tokens together."""
        slower = factor_at(heads, self.heads)
        reading = cached * (latent.rank + latent.rope) * cache_bytes / self.bytes_per_s
        busy = self.start_s + self.head_s * heads + rows * (self.row_s + self.row_head_s * heads)
        return np.asarray(np.where(rows > 0, busy + slower * reading, 0.0))


@dataclass(frozen=True, slots=True)
class SparseAttention:
    """Coefficients of latent attention to the best tokens, with one dtype of the cache: all of a
    layer's attention besides GEMMs, so its index, norms and absorbed weights, too. Decodes and
    chunks attend alike, in the latent space; GPUs divide the heads, and each has the whole index.

    Attributes:
        start_s, head_s: of a pass, constant and per head.
        row_s, row_head_s: per row of decodes, and per head of a row.
        index_s: per cached token that the index of decodes reads.
        best_s, heads: per token that decodes attend to; heads on a GPU, and the factor there,
            linear between two.
        token_s, token_head_s: per token of chunks, and per head of a token.
        pair_s: per head of the index and pair of a chunk's token and one that it might attend to.
        chunk_best_s, chunk_heads: as `best_s` and `heads`, of chunks.
    """

    start_s: float
    head_s: float
    row_s: float
    row_head_s: float
    index_s: float
    best_s: float
    heads: tuple[tuple[int, float], ...]
    token_s: float
    token_head_s: float
    pair_s: float
    chunk_best_s: float
    chunk_heads: tuple[tuple[int, float], ...]

    def decode_s(self, rows: Floats, cached: Floats, inside: Floats, heads: float) -> Floats:
        """Seconds of one layer beside its start, for rows that have `cached` tokens together, and
        attend to `inside` of them.
        """
        each = self.row_s + self.row_head_s * heads
        best_s = self.best_s * factor_at(heads, self.heads)
        return np.asarray(rows * each + cached * self.index_s + inside * best_s)

    def chunk_s(
        self,
        tokens: Floats,
        attended: Floats,
        inside: Floats,
        heads: float,
        index_heads: int,
    ) -> Floats:
        """Seconds of one layer beside its start, for chunks of `tokens` that might attend to
        `attended` keys, and attend to `inside` of them.
        """
        each = self.token_s + self.token_head_s * heads
        best_s = self.chunk_best_s * factor_at(heads, self.chunk_heads)
        return np.asarray(tokens * each + attended * index_heads * self.pair_s + inside * best_s)


@dataclass(frozen=True, slots=True)
class DeltaAttention:
    """Coefficients of gated delta-net attention: its convolution and its states.

    A decode reads and writes its states. In a chunk each head goes over the tokens one after the
    other, and a GPU computes some heads at once, so a chunk of few heads leaves most of it idle.

    Attributes:
        start_s, bytes_per_s: of decodes.
        chunk_start_s: of chunks.
        head_s, token_s: of each head of a chunk, constant and per token.
        at_once: heads of all chunks that are computed at the same time.
        mixed_per_s: numbers that the convolution of chunks mixes.
    """

    start_s: float
    bytes_per_s: float
    chunk_start_s: float
    head_s: float
    token_s: float
    at_once: float
    mixed_per_s: float

    def decode_s(self, rows: Floats, sizes: DeltaShapes, ranks: int = 1) -> Floats:
        """Return the seconds of one layer, for decodes of `rows` rows."""
        busy = self.start_s + rows * (sizes.row_bytes / ranks) / self.bytes_per_s
        return np.asarray(np.where(rows > 0, busy, 0.0))

    def chunk_s(self, chunks: Floats, tokens: Floats, sizes: DeltaShapes, ranks: int = 1) -> Floats:
        """Return the seconds of one layer, for `chunks` chunks that have `tokens` together."""
        each = self.head_s + tokens / np.maximum(chunks, 1.0) * self.token_s
        rounds = np.maximum(chunks * sizes.heads / ranks / self.at_once, 1.0)
        mixing = tokens * (sizes.mixed / ranks) / self.mixed_per_s
        busy = self.chunk_start_s + rounds * each + mixing
        return np.asarray(np.where(tokens > 0, busy, 0.0))


@dataclass(frozen=True, slots=True)
class Experts:
    """Coefficients of a layer's experts, in one precision."""

    start_s: float
    expert_s: float
    bytes_per_s: float
    flops_per_s: float

    def seconds(
        self,
        tokens: Floats,
        hidden: int,
        intermediate: float,
        experts: float,
        per_token: float,
        weight_bytes: float,
    ) -> Floats:
        """Seconds of one layer's experts, each with a gated MLP of `intermediate`.

        Where several GPUs have whole experts, `experts` and `per_token` are each GPU's share.
        """
        touched = touched_experts(tokens, experts, per_token)
        chosen = tokens * per_token
        weights = 3.0 * hidden * intermediate
        moved = touched * weights * weight_bytes
        moved = moved + chosen * (2 * hidden + 3 * intermediate) * ACTIVATION_BYTES
        computing = 2.0 * weights * chosen / self.flops_per_s
        moving = moved / self.bytes_per_s
        return np.asarray(self.start_s + self.expert_s * touched + moving + computing)


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Coefficients of an all-reduce among a number of GPUs.

    Attributes:
        sizes: bytes, and the factor there; linear in the logarithm of the bytes between two. Small
            tensors, larger ones and the largest have kernels of their own.
    """

    start_s: float
    bytes_per_s: float
    sizes: tuple[tuple[int, float], ...] = ()

    def seconds(self, size_bytes: Floats) -> Floats:
        """Return the seconds [n] of tensors of these bytes [n] on each GPU."""
        seconds = self.start_s + size_bytes / self.bytes_per_s
        sizes = [(math.log2(size), factor) for size, factor in self.sizes]
        return np.asarray(seconds * factor_at(np.log2(size_bytes), sizes))


@dataclass(frozen=True, slots=True)
class EngineConstants:
    """What no kernel tells of an engine. They were set by whole engines
    (`benchmarks.public.calibrate`).

    Attributes:
        kernel_s: each kernel of the rest of a layer, beside what its activations move.
        pass_s: constant of a pass.
        reduce_s: what an all-reduce in an engine costs beyond its kernel: GPUs wait for one
            another.
        sustained: a GEMM reaches so many times the FLOP/s of its kernel measured alone: a GPU that
            computes without pause is limited by its power.
        routed: experts likewise; there, tokens are also spread less evenly.
        routed_mxfp4, speed_mxfp4: of experts in mxfp4 likewise, and how many times faster all else
            of them is: an engine may run others of its kernels for these than were measured.
        reduce_speed: an all-reduce likewise moves so many times the bytes/s.
        launch_s: a pass with chunks takes at least so long a layer, since its kernels are launched
            one by one.
        host_s, host_row_s: between two passes of an engine that does not plan ahead, constant and
            per row.
        front_s, front_row_s: what a client waits beyond the passes, constant and per running row.
    """

    kernel_s: float = 0.0
    pass_s: float = 0.0
    reduce_s: float = 0.0
    sustained: float = 1.0
    routed: float = 1.0
    routed_mxfp4: float = 1.0
    speed_mxfp4: float = 1.0
    reduce_speed: float = 1.0
    launch_s: float = 0.0
    host_s: float = 0.0
    host_row_s: float = 0.0
    front_s: float = 0.0
    front_row_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GpuOperators:
    """The operators of one GPU.

    Attributes:
        bandwidth: bytes/s of the memory, by the data sheet.
        flops: FLOP/s in bf16, by the data sheet.
        link: bytes/s to another GPU of the machine, in one direction, by the data sheet.
        gemm, experts: by precision; all_reduce: by number of GPUs.
        latent: by dtype of the cache, as `CACHES` names it by its bytes; empty: not measured.
        sparse: of latent attention to the best tokens, likewise.
        delta: of linear attention; None: not measured.
        engine: what no kernel tells.
        source: where the coefficients come from, for readers.
    """

    name: str
    bandwidth: float
    flops: float
    link: float
    gemm: Mapping[str, Gemm]
    decode: DecodeAttention
    chunk: ChunkAttention
    experts: Mapping[str, Experts]
    all_reduce: Mapping[int, AllReduce]
    engine: EngineConstants
    source: str
    latent: Mapping[str, LatentAttention] = field(default_factory=dict)
    sparse: Mapping[str, SparseAttention] = field(default_factory=dict)
    delta: DeltaAttention | None = None

    def kernels_of(self, model: ModelShapes) -> ModelShapes:
        """Return the model with the kernels that servers run on this GPU: experts in mxfp4 take
        activations of 8 bits where such kernels were measured (Blackwell; vLLM's
        VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8=1).
        """

        def served(sort: LayerShapes) -> LayerShapes:
            narrow = f"{sort.expert_weights}_mxfp8"
            return replace(sort, expert_weights=narrow) if narrow in self.experts else sort

        return replace(model, sorts=tuple(map(served, model.sorts)))

    def pass_seconds(
        self, model: ModelShapes, shapes: Sequence[StepShape], ranks: int = 1
    ) -> Floats:
        """Seconds [n] of each pass [n] of the model on `ranks` GPUs.

        `InputError` names a precision or a number of GPUs that has no coefficients.
        """
        rows = np.array([shape.rows for shape in shapes], dtype=float)
        head = self.gemm["bfloat16"].seconds(
            rows, model.vocab / ranks, model.hidden, WEIGHT_BYTES["bfloat16"]
        )
        seconds = head + self.engine.pass_s
        mixers = dict.fromkeys(sort.mixer for sort in model.sorts if sort.mixer is not None)
        mixing = {one: self._mixer_s(model, one, shapes, ranks) for one in mixers}
        for sort in model.sorts:
            layer = self._layer_s(model, sort, shapes, ranks)
            if sort.mixer is not None:
                layer = layer + mixing[sort.mixer]
            seconds = seconds + sort.count * layer
        with_chunks = np.array([shape.prefills > 0 for shape in shapes])
        least = np.where(with_chunks, model.layers * self.engine.launch_s, 0.0)
        return np.maximum(seconds, least)

    def _layer_s(
        self, model: ModelShapes, sort: LayerShapes, shapes: Sequence[StepShape], ranks: int
    ) -> Floats:
        """Seconds [n] of one layer in each pass [n], beside what mixes its tokens."""
        tokens = np.array([shape.tokens for shape in shapes], dtype=float)
        seconds = self._rest_s(model, sort, tokens, ranks)
        if ranks > 1:
            hidden = tokens * model.hidden * ACTIVATION_BYTES
            seconds = seconds + sort.reduces * self._reduce_s(ranks, hidden)
        if sort.experts:
            seconds = seconds + self._experts_s(model, sort.expert_weights, tokens, ranks)
        if sort.inner:
            seconds = seconds + self._mlp_s(model, sort, tokens, ranks)
        return np.asarray(seconds)

    def _mixer_s(
        self, model: ModelShapes, mixer: Mixer, shapes: Sequence[StepShape], ranks: int
    ) -> Floats:
        """Seconds [n] of what mixes the tokens of one layer in each pass [n]."""
        seconds = self._projections_s(model, mixer, shapes, ranks)
        seconds = seconds + self._mixing_s(model, mixer, shapes, ranks)
        if ranks > 1 and isinstance(mixer, AttentionShapes) and mixer.norm_reduces:
            tokens = np.array([shape.tokens for shape in shapes], dtype=float)
            seconds = seconds + mixer.norm_reduces * self._reduce_s(ranks, tokens * NORM_BYTES)
        return np.asarray(seconds)

    def _projections_s(
        self, model: ModelShapes, mixer: Mixer, shapes: Sequence[StepShape], ranks: int
    ) -> Floats:
        """GEMMs that make queries, keys and values, and the output of one layer's attention."""
        tokens = np.array([shape.tokens for shape in shapes], dtype=float)
        heads = mixer.heads / ranks
        weights = mixer.weights
        if isinstance(mixer, AttentionShapes):
            made = self._gemm_s(weights, tokens, mixer.made(ranks), model.hidden)
            return made + self._gemm_s(mixer.out, tokens, model.hidden, mixer.value * heads)
        if isinstance(mixer, DeltaShapes):
            values = mixer.value_dim * heads  # as many gates of the output are made with them
            made = self._gemm_s(weights, tokens, mixer.mixed / ranks + values, model.hidden)
            made = made + self._gemm_s("bfloat16", tokens, 2 * heads, model.hidden)
            return made + self._gemm_s(mixer.out, tokens, model.hidden, values)
        # One GEMM makes the latent vectors, which are whole on each GPU.
        together = mixer.query_rank + mixer.rank + mixer.rope
        queries = heads * (mixer.plain + mixer.rope)
        seconds = self._gemm_s(weights, tokens, together, model.hidden)
        seconds = seconds + self._gemm_s(weights, tokens, queries, mixer.query_rank or model.hidden)
        seconds = seconds + self._gemm_s(mixer.out, tokens, model.hidden, mixer.value * heads)
        if (index := mixer.index) is not None:  # whole on each GPU
            width = index.heads * index.dim
            seconds = seconds + self._gemm_s(index.weights, tokens, width, mixer.query_rank)
            width = index.dim + index.heads
            return seconds + self._gemm_s("bfloat16", tokens, width, model.hidden)
        # Keys and values of each head, for chunks and what was cached before them.
        before = [shape.prefill_tokens + shape.prefill_cached for shape in shapes]
        vectors = np.array(before, dtype=float)
        wide = heads * (mixer.plain + mixer.value)
        keys = self._gemm_s(weights, np.maximum(vectors, 1.0), wide, mixer.rank)
        return np.asarray(seconds + np.where(vectors > 0, keys, 0.0))

    def _mixing_s(
        self, model: ModelShapes, mixer: Mixer, shapes: Sequence[StepShape], ranks: int
    ) -> Floats:
        """What mixes the tokens of a layer, beside GEMMs."""
        if isinstance(mixer, AttentionShapes):
            if mixer.window:
                shapes = [inside_windows(shape, mixer.window) for shape in shapes]
            return self._attention_s(mixer, model.cache_bytes, shapes, ranks)
        decodes = np.array([shape.decodes for shape in shapes], dtype=float)
        chunks = np.array([shape.prefill_tokens for shape in shapes], dtype=float)
        if isinstance(mixer, DeltaShapes):
            if self.delta is None:
                raise InputError(f"linear attention on {self.name} was not measured", MEASURE)
            count = np.array([shape.prefills for shape in shapes], dtype=float)
            decoding = self.delta.decode_s(decodes, mixer, ranks)
            return decoding + self.delta.chunk_s(count, chunks, mixer, ranks)
        name = CACHES[model.cache_bytes]
        what = f"modules of MLA (multi-head latent attention) with a cache in {name} on {self.name}"
        heads = mixer.heads // ranks
        cached = np.array([shape.decode_cached for shape in shapes], dtype=float)
        attended = np.array([shape.prefill_attended for shape in shapes], dtype=float)
        if mixer.index is not None:
            best: SparseAttention = _known(self.sparse, name, f"sparse {what}")
            inside = np.array([shape.decode_inside for shape in shapes], dtype=float)
            found = best.decode_s(decodes, cached, inside, heads)
            inside = np.array([shape.prefill_inside for shape in shapes], dtype=float)
            found = found + best.chunk_s(chunks, attended, inside, heads, mixer.index.heads)
            return np.asarray(best.start_s + best.head_s * heads + found)
        law: LatentAttention = _known(self.latent, name, what)
        decoding = law.decode_s(decodes, cached, heads, mixer, model.cache_bytes)
        return decoding + law.chunk.seconds(chunks, attended, heads, heads, mixer.head_dim)

    def _attention_s(
        self, mixer: AttentionShapes, size: int, shapes: Sequence[StepShape], ranks: int
    ) -> Floats:
        """Grouped attention; `size`: bytes of a number in the cache."""
        if unknown := self.decode.unknown(mixer, size):
            raise InputError(f"{unknown} on {self.name} were not measured", MEASURE)
        heads = mixer.heads // ranks
        kv_heads = mixer.kv_heads_of(ranks)
        dim = mixer.mean_dim
        decodes = np.array([shape.decodes for shape in shapes], dtype=float)
        cached = np.array([shape.decode_cached for shape in shapes], dtype=float)
        chunks = np.array([shape.prefill_tokens for shape in shapes], dtype=float)
        attended = np.array([shape.prefill_attended for shape in shapes], dtype=float)
        before = np.array([shape.prefill_cached for shape in shapes], dtype=float)
        alone = self.decode.seconds(decodes, cached, kv_heads, dim, size)
        # One kernel computes chunks and decodes; it reads the caches of both.
        read = self.decode.beside * cached + before
        mixed = self.chunk.seconds(chunks, attended, heads, kv_heads, dim)
        mixed = mixed + self.decode.reading_s(read, kv_heads, dim, size)
        return np.asarray(np.where(chunks > 0, mixed, alone))

    def _gemm_s(self, weights: str, m: Floats, n: float, k: float) -> Floats:
        """Return the seconds of [m, k] x [k, n] with weights of a precision."""
        precision = GEMMS_LIKE.get(weights, weights)
        law = _known(self.gemm, precision, f"GEMMs in {weights} on {self.name}")
        # An engine quantizes activations in the kernels before a GEMM, where they are at hand.
        fused = replace(
            law,
            start_s=self.gemm["bfloat16"].start_s,
            flops_per_s=law.flops_per_s * self.engine.sustained,
            quantize_s=0.0,
        )
        return np.asarray(fused.seconds(m, n, k, WEIGHT_BYTES[weights]))

    def _mlp_s(self, model: ModelShapes, sort: LayerShapes, tokens: Floats, ranks: int) -> Floats:
        wide = sort.inner / ranks
        both = self._gemm_s(sort.inner_weights, tokens, 2 * wide, model.hidden)
        down = self._gemm_s(sort.inner_weights, tokens, model.hidden, wide)
        moved = GATE_TENSORS * wide * ACTIVATION_BYTES * tokens
        return both + down + moved / self.gemm["bfloat16"].bytes_per_s

    def _experts_s(self, model: ModelShapes, name: str, tokens: Floats, ranks: int) -> Floats:
        """One layer's experts, with weights of the precision `name`."""
        precision = EXPERTS_LIKE.get(name, name)
        measured = _known(self.experts, precision, f"experts in {name} on {self.name}")
        # Servers run the kernel that was measured (Marlin), so power alone limits it.
        reached = self.engine.sustained if name == "int4" else self.engine.routed
        law = replace(measured, flops_per_s=measured.flops_per_s * reached)
        if "mxfp4" in name:
            speed = self.engine.speed_mxfp4
            law = Experts(
                measured.start_s / speed,
                measured.expert_s / speed,
                measured.bytes_per_s * speed,
                measured.flops_per_s * self.engine.routed_mxfp4,
            )
        cut = 1 if model.whole_experts else ranks  # GPUs that share an expert
        apart = ranks // cut  # GPUs that share the experts of a layer
        seconds = law.seconds(
            tokens,
            model.hidden,
            model.expert_intermediate / cut,
            model.experts / apart,
            model.experts_per_token / apart,
            WEIGHT_BYTES[name],
        )
        router = self.gemm["bfloat16"].seconds(tokens, model.experts, model.hidden, 2.0)
        return np.asarray(seconds + router)

    def _rest_s(self, model: ModelShapes, sort: LayerShapes, tokens: Floats, ranks: int) -> Floats:
        mixer = sort.mixer
        numbers = NORM_TENSORS + MORE_NORM_TENSORS * (sort.norms - PLAIN_NORMS)
        moved = float(numbers * model.hidden)
        if isinstance(mixer, AttentionShapes):
            plain = mixer.heads / ranks * mixer.head_dim
            keys = mixer.kv_heads_of(ranks) * (mixer.head_dim + mixer.value)
            moved += ROTARY_TENSORS * (plain + keys)
            moved += GATE_TENSORS * plain * bool(mixer.gate)
        if isinstance(mixer, DeltaShapes):
            gated = GATE_TENSORS * mixer.heads * mixer.value_dim
            moved += (PREPARED_TENSORS * mixer.mixed + gated) / ranks
        moving = tokens * moved * ACTIVATION_BYTES / self.gemm["bfloat16"].bytes_per_s
        return self.engine.kernel_s * rest_kernels(sort) + moving

    def _reduce_s(self, ranks: int, size_bytes: Floats) -> Floats:
        measured = _known(self.all_reduce, ranks, f"all-reduces among {ranks} GPUs of {self.name}")
        law = replace(measured, bytes_per_s=measured.bytes_per_s * self.engine.reduce_speed)
        return np.asarray(self.engine.reduce_s + law.seconds(size_bytes))


def inside_windows(shape: StepShape, window: int) -> StepShape:
    """What layers with sliding windows compute of a pass, as if they had none."""
    before = min(shape.prefill_cached, window * shape.prefills)
    return StepShape(
        shape.decodes,
        shape.decode_inside,
        shape.prefills,
        shape.prefill_tokens,
        shape.prefill_inside,
        before,
    )


def rest_kernels(sort: LayerShapes) -> int:
    """Kernels of a layer besides GEMMs, attention, experts and all-reduces: norms, the rotary
    embedding, the cache write and the activation; norms of queries and keys, and their gate; in
    place of the activation the choice of the experts (softmax, top k) and the sum of their outputs;
    and the quantization of what GEMMs read, where no other kernel does it. Latent attention was
    measured with its rotary embedding and cache write, and reads one tensor more. Linear attention
    has a kernel before its state, and a norm with a gate behind it.
    """
    mixer = sort.mixer
    count = sort.norms + (3 if sort.experts else bool(sort.inner))
    if mixer is not None:
        latent = isinstance(mixer, LatentShapes)
        count += 0 if latent else 2
        count += (1 + latent) * (mixer.weights in QUANTIZED_APART)
        count += mixer.out in QUANTIZED_APART
    if isinstance(mixer, AttentionShapes):
        count += 2 * mixer.qk_norm + bool(mixer.gate)
    if sort.inner and not sort.experts:
        count += 2 * (sort.inner_weights in QUANTIZED_APART)
    return count


def _known(table: Mapping[Any, Any], key: object, what: str) -> Any:
    if key not in table:
        known = ", ".join(map(str, table)) or "none"
        raise InputError(f"{what} were not measured", f"measured there: {known}")
    return table[key]


def touched_experts(tokens: Floats, experts: float, per_token: float) -> Floats:
    """How many experts at least one of the tokens is expected to choose, all chosen alike."""
    return np.asarray(experts * (1.0 - (1.0 - per_token / experts) ** tokens))


@cache
def read_json(path: Path) -> Any:
    """Return the content of a table that ships beside the code."""
    return json.loads(path.read_text(encoding="utf-8"))


def measured_gpus() -> list[str]:
    """The GPUs with measured operators."""
    return list(read_json(TABLE)["gpus"])


def measured_operators(name: str) -> GpuOperators:
    """The operators of a GPU of `measured_gpus`."""
    one = read_json(TABLE)["gpus"][name]
    about = {
        "name": name,
        "engine": engine_constants(family_of(name)),
        "source": f"operators measured on {name}, {one['source']}",
    }
    return msgspec.convert(one | about, GpuOperators, str_keys=True)


BLACKWELL = ("b200_sxm", "b300_sxm", "gb200", "rtx_pro_6000_server")


def family_of(gpu: str) -> str:
    """Which constants of an engine a measured GPU has: those of "h200", of "blackwell", or of
    "h100", which older ones share. An engine launches other kernels on each generation; H100 and
    H200 are of one, but their kernels were measured at other clocks.
    """
    if gpu in BLACKWELL:
        return "blackwell"
    return "h200" if gpu == "h200_sxm" else "h100"


def engine_constants(family: str) -> EngineConstants:
    """The constants of an engine on GPUs of this family (`family_of`)."""
    return EngineConstants(**read_json(TABLE)["engine"]["constants"][family])


SAME = 0.05  # peaks of a data sheet differ by no more from those of the measured GPU
MEASURE = "measure it on the GPU, without --analytic: llmctl profile RECIPE"


def operators_of(
    name: str, bandwidth: float, flops: float, link: float | None = None
) -> GpuOperators:
    """Return the operators of a GPU by its name and its data sheet: bytes/s, FLOP/s in bf16, and
    the link in bytes/s in one direction.

    Raises `InputError` for a GPU that was not measured: another name, or another card of a family.
    """
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    for known, one in read_json(TABLE)["gpus"].items():
        if any(word in plain for word in one["names"]):
            found = measured_operators(known)
            own = (found.bandwidth, found.flops, found.link)
            pairs = zip((bandwidth, flops, link or found.link), own, strict=True)
            if all(abs(math.log(wanted / its)) < SAME for wanted, its in pairs):
                return found
            break
    measured = ", ".join(measured_gpus())
    problem = f"operators of {name} were not measured, so no laws can be computed for it"
    raise InputError(problem, f"measured: {measured}; else {MEASURE}")
