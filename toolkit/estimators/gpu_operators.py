"""Times of a model's operators on a GPU, from a handful of coefficients, and their sum: a pass.

    GEMM [m, k] x [k, n]   start + (moving^p + computing^p)^(1/p)
                           moving = bytes / bandwidth, computing = 2 m n k / (FLOP/s)
    attention of decodes   start + the hypotenuse of row * rows * KV heads and cache / bandwidth
    attention of chunks    start + 4 * heads * head_dim * attended / (FLOP/s) + bytes / bandwidth
    latent decodes         start + head * heads + row * rows + row_head * rows * heads
                           + cache / bandwidth * a factor for the heads
    experts                start + expert * touched + bytes / bandwidth + FLOPs / (FLOP/s)
    all-reduce             (start + bytes / bandwidth) * a factor for its size, by number of GPUs

A GEMM is limited by what it moves or by what it computes; `p` says how well both overlap. Kernels
are made for tiles of rows, so the time is then multiplied by a factor for its m (`tiles`). The
experts of a layer read the weights of those that at least one of T tokens chose: of E experts, k
per token, E * (1 - (1 - k / E)^T) are expected, if all are chosen alike. Bandwidths and FLOP/s are
what was reached, not what the data sheet says.

    pass = layers * (4 GEMMs or 2 and the experts, attention, 2 all-reduces, the rest of a layer)
           + output head + constant

The coefficients of each GPU were fitted to kernels that others measured there (`operators.json`,
made by `benchmarks.public.operators`, which also has the errors). The rest of a layer (norms,
rotary embedding, activation, cache writes) moves the bytes of its activations and costs a constant
per kernel; this constant and the others of `EngineConstants` were set by whole engines.

In layers with sliding windows, attention reads what is inside them (`StepShape.decode_inside`).

Multi-head latent attention (MLA) caches one latent vector per token, which all heads read. A decode
multiplies its queries into the latent space and its output back (absorbed weights), and attends
there. Chunks of prompts make keys and values of each head from the latent vectors of all tokens
that they attend to, and attend as usual. vLLM runs both kernels one after the other where a pass
has both. GPUs divide the heads, and each has the whole cache.

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
from toolkit.estimators.forms import Floats
from toolkit.laws.features import StepShape

TABLE = Path(__file__).with_name("operators.json")
ACTIVATION_BYTES = 2  # of a number in bf16
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
# tensors each; the rotary embedding reads and writes queries and keys, and the cache is written;
# the activation reads two tensors and writes one.
NORM_TENSORS = 8
ROTARY_TENSORS = 3
GATE_TENSORS = 3
NORM_BYTES = 4  # of a norm's sum of squares
SHORT_HEAD = 64  # numbers of a head
QUANTIZED_APART = ("fp8_block", "nvfp4")  # activations by a kernel before each GEMM; else fused


@dataclass(frozen=True, slots=True)
class LatentShapes:
    """The sizes of multi-head latent attention.

    Attributes:
        rank: latent numbers of a token in the cache, of which keys and values are made.
        rope: numbers of a key with a position, which all heads share; cached, too.
        plain, value: of a head: numbers of a key without a position, and of a value.
        query_rank: latent numbers of the queries; 0: they are made of the hidden state.
    """

    rank: int
    rope: int
    plain: int
    value: int
    query_rank: int = 0

    @property
    def head_dim(self) -> int:
        """Numbers of a head with keys and values of one size that computes and moves as much."""
        return (self.plain + self.rope + self.value) // 2


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """The sizes of a decoder with grouped or latent attention, and gated MLPs or experts.

    Attributes:
        intermediate: of a dense layer's MLP; of a shared expert in a layer with experts, or 0.
        experts: of a layer; 0: all layers are dense.
        dense_layers: the first layers, which are dense though others have experts.
        dense_intermediate: of those.
        weights: precision of the linear layers, a key of `WEIGHT_BYTES`.
        mlp_weights: precision of dense MLPs and shared experts; "": as `weights`.
        expert_weights: precision of the experts; "": as `weights`.
        qk_norm: whether queries and keys are normalized.
        norm_reduces: all-reduces of one number per token that a layer's norms need on several GPUs,
            where they span all heads.
        cache_bytes: of a number in the KV cache.
        whole_experts: whether each of several GPUs has whole experts (expert parallelism), not a
            part of each.
        window, window_layers: tokens of sliding windows, and how many of the layers have them.
        latent: sizes of latent attention, which all layers have, and in which `kv_heads` and
            `head_dim` count for nothing; None: none has.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    dense_layers: int = 0
    dense_intermediate: int = 0
    weights: str = "bfloat16"
    mlp_weights: str = ""
    expert_weights: str = ""
    qk_norm: bool = False
    norm_reduces: int = 0
    cache_bytes: int = ACTIVATION_BYTES
    whole_experts: bool = False
    window: int = 0
    window_layers: int = 0
    latent: LatentShapes | None = None

    def kv_heads_of(self, ranks: int) -> int:
        """KV heads of each of `ranks` GPUs; heads are repeated where there are fewer than GPUs."""
        return max(self.kv_heads // ranks, 1)


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
        if not self.tiles:
            return np.asarray(seconds)
        rows, factors = zip(*self.tiles, strict=True)
        return np.asarray(seconds * np.interp(m, rows, factors))


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """Coefficients of attention in passes of decodes alone. `row_s` is per row and KV head.

    Attributes:
        beside: a cached token takes so many times as long in a pass with chunks.
        narrow: of a cache of 8 bits so many times the bytes per second are read.
    """

    start_s: float
    row_s: float
    bytes_per_s: float
    beside: float
    narrow: float = 1.0

    def seconds(
        self,
        rows: Floats,
        cached: Floats,
        kv_heads: int,
        head_dim: int,
        cache_bytes: int = ACTIVATION_BYTES,
    ) -> Floats:
        """Seconds of one layer, for rows that have `cached` tokens together."""
        reading = self.reading_s(cached, kv_heads, head_dim, cache_bytes)
        busy = np.hypot(self.row_s * rows * kv_heads, reading)
        return np.asarray(np.where(rows > 0, self.start_s + busy, 0.0))

    def reading_s(
        self, cached: Floats, kv_heads: int, head_dim: int, cache_bytes: int = ACTIVATION_BYTES
    ) -> Floats:
        """Seconds of reading keys and values of so many tokens, in one layer."""
        bytes_per_s = self.bytes_per_s
        if cache_bytes < ACTIVATION_BYTES:
            bytes_per_s *= self.narrow
        return cached * (2 * kv_heads * head_dim * cache_bytes) / bytes_per_s


@dataclass(frozen=True, slots=True)
class ChunkAttention:
    """Coefficients of attention in passes with chunks.

    Attributes:
        short: with heads of `SHORT_HEAD` numbers or less, so many times the speed is reached.
    """

    start_s: float
    flops_per_s: float
    bytes_per_s: float
    short: float = 1.0

    def seconds(
        self, tokens: Floats, attended: Floats, heads: int, kv_heads: int, head_dim: int
    ) -> Floats:
        """Seconds of one layer, for chunks of `tokens` that attend to `attended` keys."""
        speed = self.short if head_dim <= SHORT_HEAD else 1.0
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
        known, factors = zip(*self.heads, strict=True)
        slower = np.interp(heads, known, factors)
        reading = cached * (latent.rank + latent.rope) * cache_bytes / self.bytes_per_s
        busy = self.start_s + self.head_s * heads + rows * (self.row_s + self.row_head_s * heads)
        return np.asarray(np.where(rows > 0, busy + slower * reading, 0.0))


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
    """Coefficients of an all-reduce among so many GPUs.

    Attributes:
        sizes: bytes, and the factor there; linear in the logarithm of the bytes between two. Small
            tensors, larger ones and the largest have kernels of their own.
    """

    start_s: float
    bytes_per_s: float
    sizes: tuple[tuple[int, float], ...] = ()

    def seconds(self, size_bytes: Floats) -> Floats:
        """Return the seconds [n] of tensors of so many bytes [n] on each GPU."""
        seconds = self.start_s + size_bytes / self.bytes_per_s
        if not self.sizes:
            return np.asarray(seconds)
        known, factors = zip(*self.sizes, strict=True)
        return np.asarray(seconds * np.interp(np.log2(size_bytes), np.log2(known), factors))


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

    def kernels_of(self, model: ModelShapes) -> ModelShapes:
        """Return the model with the kernels that servers run on this GPU: experts in mxfp4 take
        activations of 8 bits where such kernels were measured (Blackwell; vLLM's
        VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8=1).
        """
        narrow = f"{model.expert_weights}_mxfp8"
        return replace(model, expert_weights=narrow) if narrow in self.experts else model

    def pass_seconds(
        self, model: ModelShapes, shapes: Sequence[StepShape], ranks: int = 1
    ) -> Floats:
        """Seconds [n] of each pass [n] of the model on `ranks` GPUs.

        `InputError` names a precision or a number of GPUs that has no coefficients.
        """
        tokens = np.array([shape.tokens for shape in shapes], dtype=float)
        rows = np.array([shape.rows for shape in shapes], dtype=float)
        layer = self._projections_s(model, shapes, ranks) + self._rest_s(model, tokens, ranks)
        if ranks > 1:
            layer = layer + 2 * self._reduce_s(ranks, tokens * model.hidden * ACTIVATION_BYTES)
            layer = layer + model.norm_reduces * self._reduce_s(ranks, tokens * NORM_BYTES)
        sparse_layers = model.layers - model.dense_layers if model.experts else 0
        dense = self._mlp_s(model, tokens, model.dense_intermediate or model.intermediate, ranks)
        seconds = model.layers * layer + (model.layers - sparse_layers) * dense
        full_layers = model.layers - model.window_layers
        seconds = seconds + full_layers * self._attention_s(model, shapes, ranks)
        if model.window_layers:
            inside = [inside_windows(shape, model.window) for shape in shapes]
            seconds = seconds + model.window_layers * self._attention_s(model, inside, ranks)
        if sparse_layers:
            sparse = self._experts_s(model, tokens, ranks)
            if model.intermediate:
                sparse = sparse + self._mlp_s(model, tokens, model.intermediate, ranks)
            seconds = seconds + sparse_layers * sparse
        head = self.gemm["bfloat16"].seconds(
            rows, model.vocab / ranks, model.hidden, WEIGHT_BYTES["bfloat16"]
        )
        seconds = seconds + head + self.engine.pass_s
        with_chunks = np.array([shape.prefills > 0 for shape in shapes])
        least = np.where(with_chunks, model.layers * self.engine.launch_s, 0.0)
        return np.maximum(seconds, least)

    def _latent_of(self, model: ModelShapes) -> LatentAttention:
        name = CACHES[model.cache_bytes]
        what = f"modules of MLA (multi-head latent attention) with a cache in {name} on {self.name}"
        found: LatentAttention = _known(self.latent, name, what)
        return found

    def _projections_s(self, model: ModelShapes, shapes: Sequence[StepShape], ranks: int) -> Floats:
        """GEMMs that make queries, keys and values, and the output of one layer's attention."""
        tokens = np.array([shape.tokens for shape in shapes], dtype=float)
        heads = model.heads / ranks
        latent = model.latent
        if latent is None:
            width = model.head_dim * (heads + 2 * model.kv_heads_of(ranks))
            made = self._gemm_s(model, tokens, width, model.hidden)
            return made + self._gemm_s(model, tokens, model.hidden, model.head_dim * heads)
        # One GEMM makes the latent vectors, which are whole on each GPU.
        together = latent.query_rank + latent.rank + latent.rope
        queries = heads * (latent.plain + latent.rope)
        seconds = self._gemm_s(model, tokens, together, model.hidden)
        seconds = seconds + self._gemm_s(model, tokens, queries, latent.query_rank or model.hidden)
        seconds = seconds + self._gemm_s(model, tokens, model.hidden, latent.value * heads)
        # Keys and values of each head, for chunks and what was cached before them.
        before = [shape.prefill_tokens + shape.prefill_cached for shape in shapes]
        vectors = np.array(before, dtype=float)
        wide = heads * (latent.plain + latent.value)
        keys = self._gemm_s(model, np.maximum(vectors, 1.0), wide, latent.rank)
        return np.asarray(seconds + np.where(vectors > 0, keys, 0.0))

    def _attention_s(self, model: ModelShapes, shapes: Sequence[StepShape], ranks: int) -> Floats:
        heads = model.heads // ranks
        kv_heads = model.kv_heads_of(ranks)
        decodes = np.array([shape.decodes for shape in shapes], dtype=float)
        cached = np.array([shape.decode_cached for shape in shapes], dtype=float)
        chunks = np.array([shape.prefill_tokens for shape in shapes], dtype=float)
        attended = np.array([shape.prefill_attended for shape in shapes], dtype=float)
        before = np.array([shape.prefill_cached for shape in shapes], dtype=float)
        size = model.cache_bytes
        if (latent := model.latent) is not None:
            law = self._latent_of(model)
            decoding = law.decode_s(decodes, cached, heads, latent, size)
            return decoding + law.chunk.seconds(chunks, attended, heads, heads, latent.head_dim)
        alone = self.decode.seconds(decodes, cached, kv_heads, model.head_dim, size)
        # One kernel computes chunks and decodes; it reads the caches of both.
        read = self.decode.beside * cached + before
        mixed = self.chunk.seconds(chunks, attended, heads, kv_heads, model.head_dim)
        mixed = mixed + self.decode.reading_s(read, kv_heads, model.head_dim, size)
        return np.asarray(np.where(chunks > 0, mixed, alone))

    def _gemm_s(
        self, model: ModelShapes, m: Floats, n: float, k: float, weights: str = ""
    ) -> Floats:
        """Return the seconds of [m, k] x [k, n]; `weights`: their precision; "": the model's."""
        weights = weights or model.weights
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

    def _mlp_s(self, model: ModelShapes, tokens: Floats, intermediate: int, ranks: int) -> Floats:
        wide = intermediate / ranks
        both = self._gemm_s(model, tokens, 2 * wide, model.hidden, model.mlp_weights)
        down = self._gemm_s(model, tokens, model.hidden, wide, model.mlp_weights)
        moved = GATE_TENSORS * wide * ACTIVATION_BYTES * tokens
        return both + down + moved / self.gemm["bfloat16"].bytes_per_s

    def _experts_s(self, model: ModelShapes, tokens: Floats, ranks: int) -> Floats:
        name = model.expert_weights or model.weights
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

    def _rest_s(self, model: ModelShapes, tokens: Floats, ranks: int) -> Floats:
        width = 0.0
        if model.latent is None:
            width = model.head_dim * (model.heads / ranks + 2 * model.kv_heads_of(ranks))
        moved = (NORM_TENSORS * model.hidden + ROTARY_TENSORS * width) * ACTIVATION_BYTES
        moving = tokens * moved / self.gemm["bfloat16"].bytes_per_s
        return self.engine.kernel_s * rest_kernels(model) + moving

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


def rest_kernels(model: ModelShapes) -> int:
    """Kernels of a layer besides GEMMs, attention, experts and all-reduces: two norms, the rotary
    embedding, the cache write and the activation; norms of queries and keys; in place of the
    activation the choice of the experts (softmax, top k) and the sum of their outputs; and the
    quantization of what GEMMs read, where no other kernel does it. Latent attention was measured
    with its rotary embedding and cache write, and reads one tensor more.
    """
    latent = model.latent is not None
    quantized = 0
    if model.weights in QUANTIZED_APART:
        quantized = (2 if model.experts else 4) + latent
    return 5 - 2 * latent + 2 * model.qk_norm + 2 * (model.experts > 0) + quantized


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
