"""Times of a model's operators on a GPU, from a handful of coefficients, and their sum: a pass.

A `Kernel` is a table of coefficients: seconds of each thing that it counts, and rates of what it
moves and computes. A function below says what each sort of kernel counts:

    GEMM [m, k] x [k, n]   start + (moving^p + computing^p)^(1/p)
                           moving = bytes / bandwidth, computing = 2 m n k / (FLOP/s)
    attention of decodes   start + the hypotenuse of rows * KV heads / rate and cache / bandwidth
    attention of chunks    start + 4 * heads * head_dim * attended / (FLOP/s) + bytes / bandwidth
    latent decodes         start + head * heads + row * rows + row_head * rows * heads
                           + cache / bandwidth * a factor for the heads
    linear decodes         start + states / bandwidth
    linear chunks          start + rounds of heads * (head + token * tokens of a chunk)
                           + mixed numbers / speed of the convolution
    experts                start + expert * touched + bytes / bandwidth + FLOPs / (FLOP/s)
    all-reduce             (start + bytes / bandwidth) * a factor for its size, by number of GPUs

A GEMM is limited by what it moves or by what it computes; `p` says how well both overlap. Kernels
are made for tiles of rows, so the time is then multiplied by a factor for its m. A layer
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
however many tokens it has seen. GPUs divide the heads and their states. In a chunk each head goes
over the tokens one after the other, and a GPU computes some heads at once, so a chunk of few heads
leaves most of it idle. vLLM computes the decodes and the chunks of a pass one after the other here,
too.

Nothing here knows launches by the CPU, or adapters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
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
    ModelShapes,
)
from toolkit.laws.features import SHAPE_NUMBERS, StepShape

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
CACHES = {2: "bfloat16", 1: "fp8"}  # by the bytes of a number
BYTES = {name: size for size, name in CACHES.items()}
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
QUANTIZED_APART = ("fp8_block", "nvfp4")  # activations by a kernel before each GEMM; else fused
LEAST_S = 1e-300  # of what is divided by


@dataclass(frozen=True, slots=True)
class Kernel:
    """The law of a kernel: a coefficient for each thing that it counts.

    Attributes:
        terms: seconds of one, or where the name ends with `_per_s`, how many a second.
        overlap: p: how well what has a rate overlaps. 1: not at all.
        factors: by what the kernel is made for (tiles of rows, numbers of heads or of a head, the
            logarithm of bytes), and the factor there.
    """

    terms: Mapping[str, float]
    overlap: float = 1.0
    factors: tuple[tuple[float, float], ...] = ()

    def seconds(self, **counts: Any) -> Floats:
        """Return the seconds [n] of a kernel, from the amount [n] of each of its terms."""
        seconds: Any = 0.0
        at_rates = []
        for name, count in counts.items():
            if name.endswith("_per_s"):
                at_rates.append(count / self.terms[name])
            else:
                seconds = seconds + count * self.terms[name]
        if at_rates:
            parts = np.stack(np.broadcast_arrays(*at_rates))
            longest = np.maximum(parts.max(axis=0), LEAST_S)
            seconds = seconds + longest * np.linalg.norm(parts / longest, self.overlap, axis=0)
        return np.asarray(seconds)

    def factor(self, at: Any) -> Any:
        """Return the factor at a number or at each of many: linear between two that are known, and
        1 where none is.
        """
        known, values = zip(*self.factors or ((0.0, 1.0),), strict=True)
        return np.interp(at, known, values)


def gemm_s(law: Kernel, m: Floats, n: Any, k: Any, weight_bytes: float) -> Floats:
    """Return the seconds of [m, k] x [k, n] for each m; a weight has `weight_bytes`.

    `quantize_s` is of each activation that a kernel of its own quantizes.
    """
    input_bytes = min(weight_bytes, 1.0) if weight_bytes < ACTIVATION_BYTES else weight_bytes
    moved = n * k * weight_bytes + m * k * input_bytes + m * n * ACTIVATION_BYTES
    seconds = law.seconds(
        start_s=1.0, quantize_s=m * k, bytes_per_s=moved, flops_per_s=2.0 * m * n * k
    )
    return np.asarray(law.factor(m) * seconds)


def decode_s(law: Kernel, rows: Floats, kv_heads: Any, read_bytes: Floats) -> Floats:
    """Return the seconds of a layer's attention of decodes alone, which read `read_bytes`."""
    return law.seconds(start_s=rows > 0, rows_per_s=rows * kv_heads, bytes_per_s=read_bytes)


def chunk_s(
    law: Kernel, tokens: Floats, attended: Floats, heads: Any, kv_heads: Any, head_dim: float
) -> Floats:
    """Return the seconds of a layer's attention of chunks of `tokens`, which attend to `attended`
    keys. The factor is of the speed with heads of `head_dim` numbers.
    """
    speed = law.factor(head_dim)
    computed = 4.0 * heads * head_dim * attended
    moved = 2 * (heads + kv_heads) * head_dim * ACTIVATION_BYTES * tokens
    return law.seconds(start_s=tokens > 0, flops_per_s=computed / speed, bytes_per_s=moved / speed)


def latent_decode_s(law: Kernel, rows: Floats, heads: Any, read_bytes: Floats) -> Floats:
    """Return the seconds of a layer's latent attention of decodes besides GEMMs: norms, the rotary
    embedding, cache writes and absorbed weights, too. A factor of reading depends on the number of
    heads: kernels are made for tiles of heads, and many heads compute longer than the cache is
    read.
    """
    return law.seconds(
        start_s=rows > 0,
        head_s=(rows > 0) * heads,
        row_s=rows,
        row_head_s=rows * heads,
        bytes_per_s=law.factor(heads) * read_bytes,
    )


def sparse_s(law: Kernel, tokens: Floats, indexed: Floats, best: Floats, heads: Any) -> Floats:
    """Return the seconds of a layer's latent attention to the best tokens, besides GEMMs and the
    start of a pass. New `tokens` have an index that reads `indexed` tokens, and attend to `best` of
    them. Decodes and chunks attend alike, in the latent space. The factor depends on the number of
    heads.
    """
    return law.seconds(
        row_s=tokens,
        row_head_s=tokens * heads,
        index_s=indexed,
        best_s=law.factor(heads) * best,
    )


def delta_decode_s(law: Kernel, rows: Floats, sizes: DeltaShapes, ranks: int = 1) -> Floats:
    """Return the seconds of a layer's linear attention, for decodes of `rows` rows. A row reads and
    writes its states, and the convolution's last inputs.
    """
    states = sizes.heads * sizes.key_dim * sizes.value_dim * sizes.state_bytes
    row_bytes = 2 * (states + sizes.mixed * sizes.kernel * ACTIVATION_BYTES)
    return law.seconds(start_s=rows > 0, bytes_per_s=rows * (row_bytes / ranks))


def delta_chunk_s(
    law: Kernel, chunks: Floats, tokens: Floats, sizes: DeltaShapes, ranks: int = 1
) -> Floats:
    """Return the seconds of a layer's linear attention, for `chunks` chunks that have `tokens`
    together. `at_once` heads of all chunks are computed at the same time.
    """
    rounds = np.maximum(chunks * sizes.heads / ranks / law.terms["at_once"], chunks > 0)
    return law.seconds(
        start_s=tokens > 0,
        head_s=rounds,
        token_s=rounds * tokens / np.maximum(chunks, 1.0),
        mixed_per_s=tokens * (sizes.mixed / ranks),
    )


def experts_s(
    law: Kernel,
    tokens: Floats,
    hidden: Any,
    intermediate: Any,
    experts: Any,
    per_token: Any,
    weight_bytes: float,
) -> Floats:
    """Return the seconds of one layer's experts, each with a gated MLP of `intermediate`.

    Where several GPUs have whole experts, `experts` and `per_token` are each GPU's share.
    """
    touched = experts * (1.0 - (1.0 - per_token / experts) ** tokens)
    chosen = tokens * per_token
    weights = 3.0 * hidden * intermediate
    read = touched * weights * weight_bytes
    activations = chosen * (2 * hidden + 3 * intermediate) * ACTIVATION_BYTES
    return law.seconds(
        start_s=1.0,
        expert_s=touched,
        bytes_per_s=read + activations,
        flops_per_s=2.0 * weights * chosen,
    )


def reduce_s(law: Kernel, size_bytes: Floats) -> Floats:
    """Return the seconds [n] of all-reduces of these bytes [n] on each GPU. Small tensors, larger
    ones and the largest have kernels of their own, so the factor is of the logarithm of the bytes.
    """
    seconds = law.seconds(start_s=1.0, bytes_per_s=size_bytes)
    return np.asarray(law.factor(np.log2(size_bytes)) * seconds)


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
        kernels: by sort, and then by precision (of weights, or of the cache, as in `CACHES`), by
            number of GPUs (all-reduces), or of decodes and of chunks (linear attention).
        beside: a cached token takes so many times as long in a pass with chunks.
        longest: by dtype of the cache, the most numbers of a head for which attention of decodes
            was measured. Kernels for longer heads are others, or slower.
        uneven: whether it was measured for heads with values shorter than keys, too.
        engine: what no kernel tells.
        source: where the coefficients come from, for readers.
        names: words of which a name of this GPU has one, in small letters without signs.
    """

    name: str
    bandwidth: float
    flops: float
    link: float
    kernels: Mapping[str, Mapping[str, Kernel]]
    beside: float
    longest: Mapping[str, int]
    uneven: bool
    engine: EngineConstants
    source: str
    names: tuple[str, ...]

    def pass_seconds(
        self, model: ModelShapes, shapes: Sequence[StepShape], ranks: int = 1
    ) -> Floats:
        """Return the seconds [n] of each pass [n] of the model on `ranks` GPUs.

        Raises InputError with the name of a precision, sort of attention or number of GPUs that was
        not measured.
        """
        columns = np.array([shape.values() for shape in shapes], dtype=float).T
        passes = SimpleNamespace(**dict(zip(SHAPE_NUMBERS, columns, strict=True)))
        plain = self.kernels["gemm"]["bfloat16"]
        rows = passes.decodes + passes.prefills
        seconds = self.engine.pass_s + gemm_s(plain, rows, model.vocab / ranks, model.hidden, 2.0)
        for sort in model.sorts:
            seconds = seconds + sort.count * self._layer_s(model, sort, passes, ranks)
        least = np.where(passes.prefills > 0, model.layers * self.engine.launch_s, 0.0)
        return np.maximum(seconds, least)

    def _kernel(self, sort: str, key: str, what: str) -> Kernel:
        """Return a kernel. Raises InputError if `what` was not measured."""
        table = self.kernels[sort]
        if key not in table:
            known = ", ".join(table) or "none"
            problem = f"{what} on {self.name} were not measured"
            raise InputError(problem, f"measured there: {known}; else {MEASURE}")
        return table[key]

    def _layer_s(self, model: ModelShapes, sort: LayerShapes, passes: Any, ranks: int) -> Floats:
        """Return the seconds [n] of one layer in each pass [n]."""
        tokens = passes.decodes + passes.draft_tokens + passes.prefill_tokens
        mixer = sort.mixer
        seconds = self._rest_s(model, sort, tokens, ranks)
        for weights, n, k in sort.gemms(model.hidden, ranks):
            seconds = seconds + self._gemm_s(weights, tokens, n, k)
        if isinstance(mixer, AttentionShapes):
            seconds = seconds + self._attention_s(mixer, CACHES[model.cache_bytes], passes, ranks)
        elif isinstance(mixer, LatentShapes):
            seconds = seconds + self._latent_s(mixer, CACHES[model.cache_bytes], passes, ranks)
        elif isinstance(mixer, DeltaShapes):
            seconds = seconds + self._delta_s(mixer, passes, ranks)
        if sort.experts:
            seconds = seconds + self._experts_s(model, sort.expert_weights, tokens, ranks)
        if ranks > 1:
            hidden = tokens * model.hidden * ACTIVATION_BYTES
            seconds = seconds + sort.reduces * self._reduce_s(ranks, hidden)
            if isinstance(mixer, AttentionShapes):
                norms = self._reduce_s(ranks, tokens * NORM_BYTES)
                seconds = seconds + mixer.norm_reduces * norms
        return np.asarray(seconds)

    def _attention_s(self, mixer: AttentionShapes, dtype: str, passes: Any, ranks: int) -> Floats:
        """Return the seconds of grouped attention with a cache of `dtype`."""
        decode = self._kernel("decode", dtype, f"caches in {dtype}")
        uneven = mixer.value != mixer.head_dim
        if (uneven and not (self.uneven and dtype == CACHES[ACTIVATION_BYTES])) or (
            mixer.head_dim > self.longest[dtype]
        ):
            sizes = f"heads with keys of {mixer.head_dim} and values of {mixer.value} numbers"
            problem = f"{sizes} with a cache in {dtype} on {self.name} were not measured"
            raise InputError(problem, MEASURE)
        cached = passes.decode_cached
        attended = passes.prefill_attended
        before = passes.prefill_cached
        if mixer.window:
            cached = passes.decode_inside
            attended = passes.prefill_inside
            before = np.minimum(before, mixer.window * passes.prefills)
        heads = mixer.heads // ranks
        kv_heads = mixer.kv_heads_of(ranks)
        # Keys and values of one size that compute and move as much.
        mean_dim = (mixer.head_dim + mixer.value) / 2
        tokens = passes.prefill_tokens
        # One kernel computes chunks and decodes; it reads the caches of both.
        alone = tokens == 0
        read = np.where(alone, cached, self.beside * cached + before)
        read_bytes = read * (2 * kv_heads * mean_dim * BYTES[dtype])
        reading = decode_s(decode, alone * passes.decodes, kv_heads, read_bytes)
        chunk = self.kernels["chunk"]["bfloat16"]
        return reading + chunk_s(chunk, tokens, attended, heads, kv_heads, mean_dim)

    def _latent_s(self, mixer: LatentShapes, dtype: str, passes: Any, ranks: int) -> Floats:
        """Return the seconds of latent attention with a cache of `dtype`, besides what GEMMs make
        of all tokens.
        """
        what = f"modules of MLA (multi-head latent attention) with a cache in {dtype}"
        heads = mixer.heads // ranks
        tokens = passes.prefill_tokens
        attended = passes.prefill_attended
        if mixer.index_heads:
            law = self._kernel("sparse_decode", dtype, f"sparse {what}")
            chunks = self.kernels["sparse_chunk"][dtype]
            pairs = attended * mixer.index_heads
            seconds = law.seconds(start_s=1.0, head_s=heads)
            seconds = seconds + sparse_s(
                law, passes.decodes, passes.decode_cached, passes.decode_inside, heads
            )
            return seconds + sparse_s(chunks, tokens, pairs, passes.prefill_inside, heads)
        law = self._kernel("latent_decode", dtype, what)
        read = passes.decode_cached * (mixer.rank + mixer.rope) * BYTES[dtype]
        decoding = latent_decode_s(law, passes.decodes, heads, read)
        chunks = self.kernels["latent_chunk"][dtype]
        # Keys and values of each head, for chunks and what was cached before them.
        vectors = tokens + passes.prefill_cached
        wide = mixer.heads / ranks * (mixer.plain + mixer.value)
        keys = self._gemm_s(mixer.weights, np.maximum(vectors, 1.0), wide, mixer.rank)
        head_dim = (mixer.plain + mixer.rope + mixer.value) // 2
        attending = chunk_s(chunks, tokens, attended, heads, heads, head_dim)
        return decoding + np.where(vectors > 0, keys, 0.0) + attending

    def _delta_s(self, mixer: DeltaShapes, passes: Any, ranks: int) -> Floats:
        """Return the seconds of linear attention, besides GEMMs."""
        decodes = self._kernel("delta", "decodes", "kernels of linear attention")
        decoding = delta_decode_s(decodes, passes.decodes, mixer, ranks)
        chunks = self.kernels["delta"]["chunks"]
        tokens = passes.prefill_tokens
        return decoding + delta_chunk_s(chunks, passes.prefills, tokens, mixer, ranks)

    def _gemm_s(self, weights: str, m: Floats, n: float, k: float) -> Floats:
        """Return the seconds of [m, k] x [k, n] with weights of a precision."""
        law = self._kernel("gemm", GEMMS_LIKE.get(weights, weights), f"GEMMs in {weights}")
        # An engine quantizes activations in the kernels before a GEMM, where they are at hand.
        fused = {
            "start_s": self.kernels["gemm"]["bfloat16"].terms["start_s"],
            "quantize_s": 0.0,
            "flops_per_s": law.terms["flops_per_s"] * self.engine.sustained,
        }
        return gemm_s(replace(law, terms={**law.terms, **fused}), m, n, k, WEIGHT_BYTES[weights])

    def _experts_s(self, model: ModelShapes, name: str, tokens: Floats, ranks: int) -> Floats:
        """Return the seconds of one layer's experts, with weights of the precision `name`.

        Experts in mxfp4 take activations of 8 bits where such kernels were measured (Blackwell;
        vLLM's VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8=1).
        """
        if f"{name}_mxfp8" in self.kernels["experts"]:
            name = f"{name}_mxfp8"
        law = self._kernel("experts", EXPERTS_LIKE.get(name, name), f"experts in {name}")
        engine = self.engine
        speed = 1.0
        # Servers run the kernel that was measured (Marlin), so power alone limits it.
        reached = engine.sustained if name == "int4" else engine.routed
        if "mxfp4" in name:
            speed = engine.speed_mxfp4
            reached = engine.routed_mxfp4
        terms = {**law.terms, "flops_per_s": law.terms["flops_per_s"] * reached / speed}
        cut = 1 if model.whole_experts else ranks  # GPUs that share an expert
        apart = ranks // cut  # GPUs that share the experts of a layer
        seconds = experts_s(
            Kernel(terms),
            tokens,
            model.hidden,
            model.expert_intermediate / cut,
            model.experts / apart,
            model.experts_per_token / apart,
            WEIGHT_BYTES[name],
        )
        router = self.kernels["gemm"]["bfloat16"]
        return seconds / speed + gemm_s(router, tokens, model.experts, model.hidden, 2.0)

    def _rest_s(self, model: ModelShapes, sort: LayerShapes, tokens: Floats, ranks: int) -> Floats:
        """Return the seconds of what is left of a layer: activations that move, and kernels besides
        GEMMs, attention, experts and all-reduces.

        Kernels are norms, the rotary embedding, the cache write and the activation; norms of
        queries and keys, and their gate; in place of the activation the choice of the experts
        (softmax, top k) and the sum of their outputs; and the quantization of what GEMMs read,
        where no other kernel does it. Latent attention was measured with its rotary embedding and
        cache write, and reads one tensor more. Linear attention has a kernel before its state, and
        a norm with a gate behind it.
        """
        mixer = sort.mixer
        kernels = sort.norms + (3 if sort.experts else bool(sort.inner))
        numbers = NORM_TENSORS + MORE_NORM_TENSORS * (sort.norms - PLAIN_NORMS)
        moved = numbers * model.hidden + GATE_TENSORS * sort.inner / ranks
        if sort.inner and not sort.experts:
            kernels += 2 * (sort.inner_weights in QUANTIZED_APART)
        if mixer is not None:
            kernels += 2 + (mixer.weights in QUANTIZED_APART) + (mixer.out in QUANTIZED_APART)
        if isinstance(mixer, AttentionShapes):
            kernels += 2 * mixer.qk_norm + bool(mixer.gate)
            plain = mixer.heads / ranks * mixer.head_dim
            keys = mixer.kv_heads_of(ranks) * (mixer.head_dim + mixer.value)
            moved += ROTARY_TENSORS * (plain + keys) + GATE_TENSORS * plain * bool(mixer.gate)
        if isinstance(mixer, LatentShapes):
            kernels += (mixer.weights in QUANTIZED_APART) - 2
        if isinstance(mixer, DeltaShapes):
            gated = GATE_TENSORS * mixer.heads * mixer.value_dim
            moved += (PREPARED_TENSORS * mixer.mixed + gated) / ranks
        bandwidth = self.kernels["gemm"]["bfloat16"].terms["bytes_per_s"]
        moving = tokens * moved * ACTIVATION_BYTES / bandwidth
        return np.asarray(self.engine.kernel_s * kernels + moving)

    def _reduce_s(self, ranks: int, size_bytes: Floats) -> Floats:
        """Return the seconds of an all-reduce of an engine."""
        law = self._kernel("all_reduce", str(ranks), f"all-reduces among {ranks} GPUs")
        faster = {"bytes_per_s": law.terms["bytes_per_s"] * self.engine.reduce_speed}
        terms = {**law.terms, **faster}
        return self.engine.reduce_s + reduce_s(replace(law, terms=terms), size_bytes)


@cache
def read_json(path: Path) -> Any:
    """Return the content of a table that ships beside the code."""
    return json.loads(path.read_text(encoding="utf-8"))


@cache
def measured_operators() -> dict[str, GpuOperators]:
    """Return the operators of each GPU that was measured, with the constants of an engine on its
    family.
    """
    table = read_json(TABLE)
    constants = table["engine"]["constants"]
    return {
        name: msgspec.convert(
            one
            | {
                "name": name,
                "engine": constants[one["family"]],
                "source": f"operators measured on {name}, {one['source']}",
            },
            GpuOperators,
        )
        for name, one in table["gpus"].items()
    }


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
    for found in measured_operators().values():
        if any(word in plain for word in found.names):
            own = (found.bandwidth, found.flops, found.link)
            pairs = zip((bandwidth, flops, link or found.link), own, strict=True)
            if all(abs(math.log(wanted / its)) < SAME for wanted, its in pairs):
                return found
            break
    measured = ", ".join(measured_operators())
    problem = f"operators of {name} were not measured, so no laws can be computed for it"
    raise InputError(problem, f"measured: {measured}; else {MEASURE}")
