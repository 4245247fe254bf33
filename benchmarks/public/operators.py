"""Coefficients of GPUs' operators, from kernels that others measured.

    PYTHONPATH=.:PARQUET python -m benchmarks.public.operators --data AICONFIGURATOR [--write]

Takes three minutes. Needs pyarrow, which is not a dependency of llmctl (pip install --target
PARQUET pyarrow), and a checkout of ai-dynamo/aiconfigurator (Apache-2.0), which has the kernels in
systems/data.

It fits the coefficients of `toolkit.estimators.gpu_operators` for each GPU to the newest kernels of
vLLM, and prints how far each fit is off. With --write they replace those that ship;
`benchmarks.public.calibrate` sets the constants of an engine, and `benchmarks.public.scoreboard`
judges both. How far whole passes were off with other constants is in docs/results/operators.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.common.command import make_parser
from toolkit.catalogue.gpus import gpu_of
from toolkit.estimators.gpu_operators import (
    CACHES,
    SHORT_HEAD,
    TABLE,
    USUAL_HEAD,
    WEIGHT_BYTES,
    AllReduce,
    ChunkAttention,
    DecodeAttention,
    DeltaAttention,
    EngineConstants,
    Experts,
    Gemm,
    GpuOperators,
    LatentAttention,
    SparseAttention,
)
from toolkit.estimators.least_squares import Floats
from toolkit.estimators.model_shapes import DeltaShapes, IndexShapes, LatentShapes

CORE = "aic-core/src/aiconfigurator_core"
COMMIT = "095f58a51c4ca8e61b66ec108d86f223f8d559ce"
MS = 1e-3
# The name of each GPU in the data, its name in llmctl's catalogue, and words that name it.
GPUS: dict[str, tuple[str, tuple[str, ...]]] = {
    "h200_sxm": ("h200", ("h200",)),
    "h100_sxm": ("h100-sxm", ("h100", "h800")),
    "a100_sxm": ("a100-80gb", ("a100", "a800")),
    "l40s": ("l40s", ("l40s",)),
    "b300_sxm": ("b300", ("b300",)),
    "gb200": ("gb200", ("gb200",)),
    "b200_sxm": ("b200", ("b200",)),
    "rtx_pro_6000_server": ("rtx-pro-6000", ("pro6000",)),
}


def peaks_of(gpu: str) -> tuple[float, float, float]:
    """The data sheet of a GPU of the data: bytes/s, FLOP/s in bf16, bytes/s of its link."""
    found = gpu_of(GPUS[gpu][0])
    return 1e9 * found.bandwidth_gb_s, 1e12 * found.tflops["bf16"], 1e9 * found.link_gb_s


# fp8 in blocks is not among them: those kernels were measured with their launches by the CPU (65 to
# 380 us), which a CUDA graph does not have. They are taken to be as fast as plain fp8.
GEMMS = ("bfloat16", "fp8", "nvfp4")
EXPERTS = {
    "bfloat16": "bfloat16",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "int4": "int4_wo",
    "mxfp4": "w4a16_mxfp4",
    "mxfp4_mxfp8": "w4a8_mxfp4_mxfp8",
    "nvfp4": "nvfp4",
}
# A cached token of decodes beside chunks takes so many times as long as in decodes alone:
# our own H200 run, and the operators of LLMServingSim (RTX 4090) for kernels before Hopper's.
BESIDE = {"h200_sxm": 1.6, "h100_sxm": 1.6}
BESIDE_ELSE = 1.9
ROUTING = "power_law_1.01"  # the distribution of tokens over experts in the data
LEAST_BYTES = 1 << 15  # of all-reduces; smaller ones take their start
# The modules of latent attention are DeepSeek V3's, with the heads of one GPU of several.
LATENT = LatentShapes(rank=512, rope=64, plain=128, value=128, query_rank=1536)
HIDDEN = 7168
LATENT_HEADS = (4, 8, 16, 32, 64, 128)
# Modules of latent attention that were measured as an engine runs them. The others were measured
# with norms and rotary embeddings kernel by kernel, as PyTorch has them, which no engine runs
# (collection_meta.yaml of the B200 says so). The B200 was measured both ways, which tells what to
# leave out elsewhere.
AS_SERVED = "b200_sxm"
PLAIN_VERSION = "0.22.0"  # of vLLM: modules of the B200 kernel by kernel
LEAST_START_S = 1e-6
UNSEEN_OFF = 10.0  # percent: of held-out kernels in the median; a law that is further off is none
LONG_HEADS = (256, 512)  # numbers
UNEVEN_HEAD = 192  # numbers of keys; values of MiMo-V2 have 128, which the data does not say
HEADS_OFF = 20.0  # percent: kernels that are further off are others
DELTA_TOKENS = 32768  # of chunks together
TILE_KERNELS = 50  # fewer tell no factor of an m


Table = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Fitted:
    """A kernel's coefficients, and its errors in percent."""

    kernel: str
    value: Any
    median: float
    p90: float
    points: int


def newest(data: Path, gpu: str, kind: str, table: str) -> Path:
    """The newest version's table."""
    found = data.glob(f"{CORE}/systems/data/{gpu}/{kind}/vllm/*/{table}_perf.parquet")
    by_version = sorted(found, key=lambda path: [int(part) for part in path.parts[-2].split(".")])
    if not by_version:
        raise SystemExit(f"{data}: no {table}_perf.parquet of {gpu}; is it aiconfigurator?")
    return by_version[-1]


def read_table(path: Path) -> Table:
    """The columns of a parquet file."""
    from pyarrow import parquet  # type: ignore[import-not-found]

    return {name: np.array(column) for name, column in parquet.read_table(path).to_pydict().items()}


def chosen(table: Table, rows: np.ndarray[Any, Any], names: Sequence[str]) -> list[Floats]:
    """Columns as numbers, and the latency in seconds."""
    columns = [table[name][rows].astype(float) for name in names]
    return [*columns, MS * table["latency"][rows].astype(float)]


def solve(
    kernel: str,
    make: Callable[..., Any],
    predict: Callable[[Any], Floats],
    seconds: Floats,
    guesses: Sequence[float],
    lowest: Sequence[float] | None = None,
) -> Fitted:
    """The coefficients, all > 0, with the least logarithms of predicted over measured; a residual
    beyond 10 % counts less than its square.
    """

    def residual(logarithms: Floats) -> Floats:
        return np.log(predict(make(*np.exp(logarithms).tolist())) / seconds)

    least = [-60.0] * len(guesses) if lowest is None else np.log(lowest)
    start = np.log(np.array(guesses))
    bounds = (least, [60.0] * len(guesses))
    found = least_squares(residual, start, loss="soft_l1", f_scale=0.1, bounds=bounds)
    error = 100.0 * np.abs(np.exp(residual(found.x)) - 1.0)
    # Four digits; a time that small is none.
    values = [float(f"{value:.4g}") if value > 1e-16 else 0.0 for value in np.exp(found.x)]
    median, p90 = np.percentile(error, [50, 90])
    return Fitted(kernel, make(*values), float(median), float(p90), len(seconds))


def fit_gemm(data: Path, gpu: str, precision: str) -> Fitted | None:
    """GEMMs of the sizes that models have; None: not measured in that precision."""
    table = read_table(newest(data, gpu, "gemm", "gemm"))
    size = table["n"].astype(float) * table["k"]
    rows = (table["gemm_dtype"] == precision) & (table["n"] >= 1024) & (table["k"] >= 1024)
    rows = rows & (size >= 2**21) & (table["m"] <= 16384) & (size * table["m"] < 2**44)
    if not rows.any():
        return None
    m, n, k, seconds = chosen(table, rows, ("m", "n", "k"))
    bandwidth, flops, _link = peaks_of(gpu)

    def predict(law: Gemm) -> Floats:
        return law.seconds(m, n, k, WEIGHT_BYTES[precision])  # type: ignore[arg-type]

    guesses = [3e-6, 0.8 * bandwidth, 0.7 * flops, 3.0]
    lowest = [1e-12, 1e9, 1e9, 1.0]
    if precision != "bfloat16":
        guesses = [*guesses[:2], 2.0 * guesses[2], 2.0, 10.0 / bandwidth]
        lowest = [*lowest, 1e-30]
    smooth = solve(f"GEMM {precision}", Gemm, predict, seconds, guesses, lowest)
    law = replace(smooth.value, tiles=tiles_of(m, seconds / predict(smooth.value)))
    error = 100.0 * np.abs(predict(law) / seconds - 1.0)
    median, p90 = np.percentile(error, [50, 90])
    return replace(smooth, value=law, median=float(median), p90=float(p90))


def tiles_of(m: Floats, ratio: Floats) -> tuple[tuple[int, float], ...]:
    """The median of measured over predicted at each m that enough kernels have."""
    found = []
    for rows in np.unique(m):
        own = ratio[m == rows]
        if len(own) >= TILE_KERNELS:
            found.append((int(rows), float(f"{np.median(own):.3g}")))
    return tuple(found)


def fit_decode(data: Path, gpu: str) -> Fitted:
    """Attention of decodes alone, with no window: with a cache of 16 bits, and how many times the
    bytes per second are read of one of 8 bits.
    """
    fitted = fit_reads(data, gpu, "bfloat16")
    assert fitted is not None
    law: DecodeAttention = fitted.value
    narrow = fit_reads(data, gpu, "fp8")
    if narrow is not None:
        times = float(f"{narrow.value.bytes_per_s / law.bytes_per_s:.3g}")
        law = replace(law, narrow=times)
    holds = {cache: longest_held(data, gpu, law, cache) for cache in CACHES.values()}
    uneven = abs(decode_off(data, gpu, law, "bfloat16", UNEVEN_HEAD)) < HEADS_OFF
    found = replace(law, longest=holds["bfloat16"], longest_narrow=holds["fp8"], uneven=uneven)
    return replace(fitted, value=found)


def longest_held(data: Path, gpu: str, law: DecodeAttention, cache: str) -> int:
    """The longest heads for which the law of usual ones holds with such a cache."""
    held = USUAL_HEAD
    for head_dim in LONG_HEADS:
        if not abs(decode_off(data, gpu, law, cache, head_dim)) < HEADS_OFF:
            break
        held = head_dim
    return held


def decode_off(data: Path, gpu: str, law: DecodeAttention, cache: str, head_dim: int) -> float:
    """By how many percent the law is off for the longest fifth of decodes with such heads, in the
    median; infinite: not measured.
    """
    table = read_table(newest(data, gpu, "attention", "generation_attention"))
    rows = (table["kv_cache_dtype"] == cache) & (table["head_dim"] == head_dim)
    rows = rows & (table.get("window_size", np.zeros(len(rows))) == 0)
    rows = rows & (table["num_heads"] >= 4) & (table["step"] >= 60) & (table["batch_size"] <= 512)
    if not rows.any():
        return np.inf
    names = ("batch_size", "step", "num_key_value_heads")
    batch, step, kv_heads, seconds = chosen(table, rows, names)
    size = next(size for size, name in CACHES.items() if name == cache)
    predicted = law.seconds(batch, batch * step, kv_heads, head_dim, size)  # type: ignore[arg-type]
    longest = seconds >= np.percentile(seconds, 80)
    return float(100.0 * (np.median((predicted / seconds)[longest]) - 1.0))


def fit_reads(data: Path, gpu: str, cache: str) -> Fitted | None:
    """Attention of decodes alone, with such a cache; None: not measured."""
    table = read_table(newest(data, gpu, "attention", "generation_attention"))
    group = table["num_heads"] // table["num_key_value_heads"]
    rows = (table["kv_cache_dtype"] == cache) & (table["head_dim"] == 128)
    rows = rows & (table.get("window_size", np.zeros(len(rows))) == 0)
    rows = rows & (table["num_heads"] >= 4) & (group <= 8) & (table["num_heads"] <= 64)
    rows = rows & (table["step"] >= 60) & (table["batch_size"] <= 512)
    if not rows.any():
        return None
    names = ("batch_size", "step", "num_key_value_heads")
    batch, step, kv_heads, seconds = chosen(table, rows, names)

    def make(start_s: float, row_s: float, bytes_per_s: float) -> DecodeAttention:
        return DecodeAttention(start_s, row_s, bytes_per_s, 1.0)

    def predict(law: DecodeAttention) -> Floats:
        size = 2 if cache == "bfloat16" else 1
        return law.seconds(batch, batch * step, kv_heads, 128, size)  # type: ignore[arg-type]

    return solve("decodes", make, predict, seconds, [8e-6, 1e-8, 0.7 * peaks_of(gpu)[0]])


def fit_chunk(data: Path, gpu: str) -> Fitted:
    """Attention of prompts, and how many times its speed short heads reach, where measured."""
    guesses = [8e-6, 0.5 * peaks_of(gpu)[1], 0.5 * peaks_of(gpu)[0]]
    fitted = fit_prompts(data, gpu, 128, ChunkAttention, guesses)
    assert fitted is not None
    law: ChunkAttention = fitted.value

    def make(short: float) -> ChunkAttention:
        return replace(law, short=short)

    found = fit_prompts(data, gpu, SHORT_HEAD, make, [0.8])
    if found is not None:
        law = make(float(f"{found.value.short:.3g}"))
    long = []
    for head_dim in LONG_HEADS:

        def faster(factor: float, head_dim: int = head_dim) -> ChunkAttention:
            return replace(law, long=((head_dim, factor),))

        if (found := fit_prompts(data, gpu, head_dim, faster, [0.8])) is not None:
            long.append((head_dim, float(f"{found.value.long[0][1]:.3g}")))
    return replace(fitted, value=replace(law, long=tuple(long)))


def fit_prompts(
    data: Path,
    gpu: str,
    head_dim: int,
    make: Callable[..., ChunkAttention],
    guesses: Sequence[float],
) -> Fitted | None:
    """Attention of prompts with such heads, with a cache in bf16 and no window; None: not
    measured.
    """
    table = read_table(newest(data, gpu, "attention", "context_attention"))
    rows = (table["kv_cache_dtype"] == "bfloat16") & (table["head_dim"] == head_dim)
    rows = rows & (table.get("window_size", np.zeros(len(rows))) == 0)
    rows = rows & (table["num_heads"] >= 4) & (table["num_heads"] <= 64)
    rows = rows & (table["isl"] >= 16) & (table["isl"] * table["batch_size"] <= 32768)
    if not rows.any():
        return None
    names = ("batch_size", "isl", "num_heads", "num_key_value_heads")
    batch, length, heads, kv_heads, seconds = chosen(table, rows, names)

    def predict(law: ChunkAttention) -> Floats:
        attended = batch * length * length / 2
        sizes = (heads, kv_heads, head_dim)
        return law.seconds(batch * length, attended, *sizes)  # type: ignore[arg-type]

    return solve("chunks", make, predict, seconds, guesses)


def fit_latent(data: Path, gpu: str, cache: str, gemm: Gemm) -> list[Fitted]:
    """Latent attention of decodes and of prompts with such a cache: what modules take beside their
    GEMMs in bf16. Errors are of batches that a fit to every second batch did not see. Empty: not
    measured with all numbers of heads, too far off, or nothing is left of the start.
    """
    try:
        table = read_table(newest(data, gpu, "mla", "mla_generation_module"))
    except SystemExit:
        return []
    rows = (table["kv_cache_dtype"] == cache) & (table["gemm_type"] == "bfloat16")
    rows = rows & (table["num_heads"] >= LATENT_HEADS[0]) & (table["step"] >= 60)
    if set(table["num_heads"][rows].tolist()) != set(LATENT_HEADS):
        return []
    prompts = fit_latent_chunk(data, gpu, cache, gemm)
    names = ("num_heads", "batch_size", "step")
    heads, batch, step, seconds = chosen(table, rows, names)
    cache_bytes = next(size for size, name in CACHES.items() if name == cache)
    gemms = latent_gemms_s(gemm, batch, heads)
    if gpu != AS_SERVED:
        gemms = gemms + fit_plain(data).value.seconds(batch, heads)

    def make(
        start_s: float,
        head_s: float,
        row_s: float,
        row_head_s: float,
        bytes_per_s: float,
        *factors: float,
    ) -> LatentAttention:
        by_heads = tuple(zip(LATENT_HEADS, (1.0, *factors), strict=True))
        return LatentAttention(
            start_s, head_s, row_s, row_head_s, bytes_per_s, by_heads, prompts.value
        )

    def modules(law: LatentAttention) -> Floats:
        sizes: Any = (heads, LATENT, cache_bytes)
        return gemms + law.decode_s(batch, batch * step, *sizes)

    guesses = [2e-5, 1e-7, 5e-8, 3e-9, 0.7 * peaks_of(gpu)[0], *[1.0] * (len(LATENT_HEADS) - 1)]
    fitted = solve_unseen(f"latent decodes, {cache}", make, modules, seconds, guesses, batch)
    off = max(fitted.median, prompts.median)
    return [fitted, prompts] if off < UNSEEN_OFF and fitted.value.start_s > LEAST_START_S else []


def fit_latent_chunk(data: Path, gpu: str, cache: str, gemm: Gemm) -> Fitted:
    """Latent attention of prompts, by modules with the kernel that vLLM takes for them."""
    table = read_table(newest(data, gpu, "mla", "mla_context_module"))
    rows = (table["kv_cache_dtype"] == cache) & (table["gemm_type"] == "bfloat16")
    rows = rows & (table["kernel_source"] == "FLASH_ATTN") & (table["num_heads"] >= LATENT_HEADS[0])
    rows = rows & (table["isl"] >= 16) & (table["isl"] * table["batch_size"] <= 32768)
    heads, batch, length, seconds = chosen(table, rows, ("num_heads", "batch_size", "isl"))
    tokens = batch * length
    wide: Any = heads * (LATENT.plain + LATENT.value)
    gemms = latent_gemms_s(gemm, tokens, heads) + gemm.seconds(tokens, wide, LATENT.rank, 2.0)
    if gpu != AS_SERVED:
        gemms = gemms + fit_plain(data).value.seconds(tokens, heads)

    def predict(law: ChunkAttention) -> Floats:
        sizes: Any = (heads, heads, LATENT.head_dim)
        return gemms + law.seconds(tokens, tokens * length / 2, *sizes)

    guesses = [3e-5, 0.5 * peaks_of(gpu)[1], 0.5 * peaks_of(gpu)[0]]
    name = f"latent chunks, {cache}"
    return solve_unseen(name, ChunkAttention, predict, seconds, guesses, batch)


@dataclass(frozen=True)
class Plain:
    """Coefficients of what plain norms and rotary embeddings take longer than those of an engine:
    kernels that start, each a little later with more tokens, and what they move. They mostly move
    it in the caches of a GPU, so memory's bandwidth does not change it.
    """

    start_s: float
    power: float
    token_s: float
    head_s: float

    def seconds(self, tokens: Floats, heads: Floats) -> Floats:
        """Return the seconds [n] of so many tokens [n] and heads [n]."""
        starting = self.start_s * np.minimum(tokens, PLAIN_FEW) ** self.power
        return np.asarray(starting + tokens * (self.token_s + self.head_s * heads))


PLAIN_FEW = 64  # tokens, from which on only what is moved counts


@cache
def fit_plain(data: Path) -> Fitted:
    """Return the difference of the B200's modules, measured both ways. Errors are of modules that
    the other way and the difference tell.
    """
    folder = data / CORE / "systems" / "data" / AS_SERVED / "mla" / "vllm"
    found = []
    for name in ("mla_generation_module", "mla_context_module"):
        served = modules_of(newest(data, AS_SERVED, "mla", name))
        plain = modules_of(folder / PLAIN_VERSION / f"{name}_perf.parquet")
        found += [(*key, served[key], plain[key]) for key in served.keys() & plain.keys()]
    heads, batch, new, _cached, served_s, plain_s = np.array(sorted(found)).T

    def predict(law: Plain) -> Floats:
        return np.asarray(served_s + law.seconds(batch * new, heads))

    guesses = [5e-5, 0.1, 1e-8, 1e-9]
    return solve("latent modules, kernel by kernel", Plain, predict, plain_s, guesses)


def modules_of(path: Path) -> dict[tuple[float, ...], float]:
    """Return the seconds of modules in bf16, by heads, rows, new and cached tokens."""
    table = read_table(path)
    rows = (table["gemm_type"] == "bfloat16") & (table["kv_cache_dtype"] == "bfloat16")
    rows = rows & (table["num_heads"] >= LATENT_HEADS[0])
    rows = rows & np.isin(table["kernel_source"], ("default", "FLASH_ATTN", "FLASHINFER_MLA"))
    names = ("num_heads", "batch_size", "isl", "step")
    *keys, seconds = chosen(table, rows, names)
    places = zip(*(key.tolist() for key in keys), strict=True)
    return dict(zip(places, seconds.tolist(), strict=True))


def solve_unseen(
    kernel: str,
    make: Callable[..., Any],
    predict: Callable[[Any], Floats],
    seconds: Floats,
    guesses: Sequence[float],
    batch: Floats,
) -> Fitted:
    """Return the coefficients of `solve`, with the errors of others: of every second batch, by
    coefficients that the other batches set.
    """
    seen = np.log2(batch).astype(int) % 2 == 0
    half = solve(kernel, make, lambda law: predict(law)[seen], seconds[seen], guesses)
    error = 100.0 * np.abs(predict(half.value) / seconds - 1.0)[~seen]
    median, p90 = np.percentile(error, [50, 90])
    found = solve(kernel, make, predict, seconds, guesses)
    return replace(found, median=float(median), p90=float(p90))


def latent_gemms_s(gemm: Any, tokens: Floats, heads: Floats) -> Floats:
    """Seconds of the GEMMs of DeepSeek V3's attention that all passes have, with so many heads."""
    queries = heads * (LATENT.plain + LATENT.rope)
    found = gemm.seconds(tokens, LATENT.query_rank + LATENT.rank + LATENT.rope, HIDDEN, 2.0)
    found = found + gemm.seconds(tokens, queries, LATENT.query_rank, 2.0)
    return np.asarray(found + gemm.seconds(tokens, HIDDEN, heads * LATENT.value, 2.0))


# Of the models with sparse attention that were measured, by their names in the data.
SPARSE = {
    "deepseek-ai/DeepSeek-V3.2": (
        7168,
        replace(LATENT, index=IndexShapes(best=2048, heads=64, dim=128)),
    ),
    "zai-org/GLM-5": (
        6144,
        replace(
            LATENT,
            plain=192,
            value=256,
            query_rank=2048,
            index=IndexShapes(best=2048, heads=32, dim=128),
        ),
    ),
}
SPARSE_HEADS = (8, 16, 32, 64, 128)
# Chunks were measured with their launches by the CPU: of what takes so many times as long as the
# shortest, the GPU's work decides.
LAUNCHED = 2.5


@dataclass(frozen=True)
class SparseModules:
    """Modules of sparse latent attention that were measured, with projections in bf16.

    Attributes:
        known: seconds of their GEMMs, and of what plain norms take longer than an engine's.
        inside, attended: tokens that are attended to, and that the index reads, of all rows.
    """

    model: np.ndarray[Any, Any]
    heads: Floats
    batch: Floats
    tokens: Floats
    attended: Floats
    inside: Floats
    seconds: Floats
    known: Floats

    @property
    def index_heads(self) -> Floats:
        return np.array([_index_of(name).heads for name in self.model], dtype=float)

    def some(self, rows: np.ndarray[Any, Any]) -> SparseModules:
        return SparseModules(*(getattr(self, one.name)[rows] for one in fields(self)))


def _index_of(name: str) -> IndexShapes:
    index = SPARSE[name][1].index
    assert index is not None
    return index


def sparse_modules(data: Path, gpu: str, phase: str, cache: str, gemm: Gemm) -> SparseModules:
    """Return the modules of a phase: generation or context."""
    table = read_table(newest(data, gpu, "sparse_attention", f"dsa_{phase}_module"))
    rows = (table["kv_cache_dtype"] == cache) & (table["gemm_type"] == "bfloat16")
    rows = rows & (table["num_heads"] >= SPARSE_HEADS[0])
    if phase == "generation":
        rows = rows & (table["step"] >= 60)
    else:
        rows = rows & (table["isl"] >= 16) & (table["isl"] * table["batch_size"] <= 32768)
    names = ("num_heads", "batch_size", "isl", "step")
    heads, batch, length, before, seconds = chosen(table, rows, names)
    model = table["model"][rows]
    tokens = batch * length
    known = fit_plain(data).value.seconds(tokens, heads)
    best = np.array([_index_of(name).best for name in model], dtype=float)
    if phase == "generation":
        attended, inside = batch * before, batch * np.minimum(before, best)
    else:
        attended = tokens * (before + length / 2)
        inside = tokens * np.minimum(before + length / 2, best + 1)
    for name, (hidden, sizes) in SPARSE.items():
        at = model == name
        m, own = tokens[at], heads[at]
        index = _index_of(name)
        made = gemm.seconds(m, sizes.query_rank + sizes.rank + sizes.rope, hidden, 2.0)
        queries: Any = own * (sizes.plain + sizes.rope)
        made = made + gemm.seconds(m, queries, sizes.query_rank, 2.0)
        values: Any = own * sizes.value
        made = made + gemm.seconds(m, hidden, values, 2.0)
        made = made + gemm.seconds(m, index.heads * index.dim, sizes.query_rank, 2.0)
        known[at] += made + gemm.seconds(m, index.dim + index.heads, hidden, 2.0)
    return SparseModules(model, heads, batch, tokens, attended, inside, seconds, known)


def fit_sparse(data: Path, gpu: str, cache: str, gemm: Gemm) -> list[Fitted]:
    """Latent attention to the best tokens, of decodes and of chunks, by modules of DeepSeek V3.2
    and GLM 5. Errors are of batches that a fit to every second batch did not see. Empty: not
    measured with all numbers of heads, or too far off.
    """
    try:
        decodes = sparse_modules(data, gpu, "generation", cache, gemm)
    except SystemExit:
        return []
    if not set(SPARSE_HEADS) <= set(decodes.heads.tolist()):
        return []

    def by_heads(factors: Sequence[float]) -> tuple[tuple[int, float], ...]:
        return tuple(zip(SPARSE_HEADS, (1.0, *factors), strict=True))

    def decoding(*values: float) -> SparseAttention:
        start_s, head_s, row_s, row_head_s, index_s, best_s, *factors = values
        return SparseAttention(
            start_s,
            head_s,
            row_s,
            row_head_s,
            index_s,
            best_s,
            heads=by_heads(factors),
            token_s=0.0,
            token_head_s=0.0,
            pair_s=0.0,
            chunk_best_s=0.0,
            chunk_heads=by_heads([1.0] * 4),
        )

    def decodes_s(law: SparseAttention) -> Floats:
        found = decodes.known + law.start_s + law.head_s * decodes.heads
        for number in np.unique(decodes.heads):
            at = decodes.heads == number
            one = decodes.some(at)
            found[at] += law.decode_s(one.batch, one.attended, one.inside, number)
        return np.asarray(found)

    guesses = [6e-5, 1e-7, 2e-7, 5e-9, 1e-11, 1e-10, *[1.0] * 4]
    name = f"sparse decodes, {cache}"
    alone = solve_unseen(name, decoding, decodes_s, decodes.seconds, guesses, decodes.batch)
    law: SparseAttention = alone.value
    chunks = sparse_modules(data, gpu, "context", cache, gemm)
    launched = np.median(chunks.seconds[chunks.tokens <= 64])
    chunks = chunks.some(chunks.seconds > LAUNCHED * launched)
    index_heads = chunks.index_heads

    def chunking(*values: float) -> SparseAttention:
        token_s, token_head_s, pair_s, chunk_best_s, *factors = values
        return replace(
            law,
            token_s=token_s,
            token_head_s=token_head_s,
            pair_s=pair_s,
            chunk_best_s=chunk_best_s,
            chunk_heads=by_heads(factors),
        )

    def chunks_s(law: SparseAttention) -> Floats:
        found = chunks.known + law.start_s + law.head_s * chunks.heads
        for number in np.unique(chunks.heads):
            at = chunks.heads == number
            one = chunks.some(at)
            keys: Any = index_heads[at]
            found[at] += law.chunk_s(one.tokens, one.attended, one.inside, number, keys)
        return np.asarray(found)

    guesses = [1e-8, 1e-9, 3e-13, 1e-10, *[1.0] * 4]
    name = f"sparse chunks, {cache}"
    both = solve_unseen(name, chunking, chunks_s, chunks.seconds, guesses, chunks.batch)
    far = max(alone.median, both.median) > UNSEEN_OFF
    return [] if far else [replace(alone, value=both.value), both]


def fit_delta(data: Path, gpu: str) -> list[Fitted]:
    """Gated delta-net attention of decodes and of chunks. Errors are of batches that a fit to every
    second batch did not see. Empty: not measured, or too far off.
    """
    try:
        table = read_table(newest(data, gpu, "linear_attention", "gdn"))
    except SystemExit:
        return []
    names = ("batch_size", "seq_len", "num_k_heads", "num_v_heads", "d_model")
    both: dict[tuple[Any, ...], list[float]] = {}
    for row in zip(table["phase"], *(table[name] for name in names), table["latency"], strict=True):
        both.setdefault(row[:-1], []).append(MS * row[-1])
    found = []
    for phase, make, guesses in (
        ("generation", delta_decodes, [6e-6, 0.8 * peaks_of(gpu)[0]]),
        ("context", delta_chunks, [5e-6, 5e-6, 4e-8, 132.0, 5e11]),
    ):
        # A convolution and a state update; a kernel that failed leaves its partner alone.
        kernels = {key: two for key, two in both.items() if key[0] == phase and len(two) == 2}
        columns = np.array([key[1:] for key in kernels], dtype=float).T
        batch, length, key_heads, heads, _hidden = columns
        seconds = np.array([sum(two) for two in kernels.values()])
        rows = (batch * length <= DELTA_TOKENS) & ((length >= 16) | (phase == "generation"))
        batch, length, key_heads, heads = (one[rows] for one in (batch, length, key_heads, heads))
        sizes: Any = DeltaShapes(heads, key_heads, 128, 128, 4)

        def predict(law: Any, at: Any = (phase, batch, length, sizes)) -> Floats:
            if at[0] == "generation":
                return np.asarray(law.decode_s(at[1], at[3]))
            return np.asarray(law.chunk_s(at[1], at[1] * at[2], at[3]))

        name = f"delta net, {'decodes' if phase == 'generation' else 'chunks'}"
        found.append(solve_unseen(name, make, predict, seconds[rows], guesses, batch))
    decodes, chunks = found
    law = replace(
        chunks.value, start_s=decodes.value.start_s, bytes_per_s=decodes.value.bytes_per_s
    )
    far = max(decodes.median, chunks.median) > UNSEEN_OFF
    return [] if far else [replace(decodes, value=law), chunks]


def delta_decodes(start_s: float, bytes_per_s: float) -> DeltaAttention:
    return DeltaAttention(start_s, bytes_per_s, 0.0, 0.0, 0.0, 1.0, 1.0)


def delta_chunks(*coefficients: float) -> DeltaAttention:
    return DeltaAttention(0.0, 1.0, *coefficients)


def fit_experts(data: Path, gpu: str, precision: str) -> Fitted | None:
    """A layer's experts on one GPU, or cut over up to 8."""
    table = read_table(newest(data, gpu, "moe", "moe"))
    rows = (table["moe_dtype"] == EXPERTS[precision]) & (table["distribution"] == ROUTING)
    rows = rows & (table["num_tokens"] <= 16384) & (table["moe_ep_size"] == 1)
    rows = rows & (table["moe_tp_size"] <= 8)
    if rows.sum() < 60:
        return None
    names = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size")
    tokens, hidden, inter, per_token, experts, ranks, seconds = chosen(table, rows, names)

    def predict(law: Experts) -> Floats:
        sizes: Any = (hidden, inter / ranks, experts, per_token, WEIGHT_BYTES[precision])
        return law.seconds(tokens, *sizes)

    bandwidth, flops, _link = peaks_of(gpu)
    guesses = [2e-5, 1e-7, 0.7 * bandwidth, 0.5 * flops]
    return solve(f"experts {precision}", Experts, predict, seconds, guesses)


def fit_all_reduce(data: Path, gpu: str) -> dict[int, Fitted]:
    """vLLM's all-reduce in a CUDA graph; sizes are in numbers of bf16."""
    found: dict[int, Fitted] = {}
    try:
        table = read_table(newest(data, gpu, "comm", "custom_allreduce"))
    except SystemExit:
        return found
    for ranks in sorted(set(table["num_gpus"].tolist())):
        rows = (table["num_gpus"] == ranks) & (table["backend"] == "vllm_graph")
        rows = rows & (table["message_size"] <= 2**27)
        sizes, seconds = chosen(table, rows, ("message_size",))

        def predict(law: AllReduce, sizes: Floats = sizes) -> Floats:
            return law.seconds(2.0 * sizes)

        name = f"all-reduce, {ranks} GPUs"
        smooth = solve(name, AllReduce, predict, seconds, [5e-6, 1e11])
        factors = by_size(2.0 * sizes, seconds / predict(smooth.value))
        law = replace(smooth.value, sizes=factors)
        error = 100.0 * np.abs(predict(law) / seconds - 1.0)
        median, p90 = np.percentile(error, [50, 90])
        found[int(ranks)] = replace(smooth, value=law, median=float(median), p90=float(p90))
    return found


def by_size(sizes: Floats, ratio: Floats) -> tuple[tuple[int, float], ...]:
    """Return the median of measured over predicted at each size from `LEAST_BYTES` on, and at the
    smaller ones together.
    """
    known = [LEAST_BYTES // 2, *np.unique(sizes[sizes >= LEAST_BYTES]).astype(int).tolist()]
    nearest = np.maximum(sizes, known[0])
    nearest[sizes < LEAST_BYTES] = known[0]
    return tuple((size, float(f"{np.median(ratio[nearest == size]):.3g}")) for size in known)


def fit_gpu(data: Path, gpu: str) -> tuple[GpuOperators, list[Fitted]]:
    """All operators of a GPU, without the constants of an engine."""
    gemm = {one: fitted for one in GEMMS if (fitted := fit_gemm(data, gpu, one))}
    experts = {one: fitted for one in EXPERTS if (fitted := fit_experts(data, gpu, one))}
    decode = fit_decode(data, gpu)
    chunk = fit_chunk(data, gpu)
    reduce = fit_all_reduce(data, gpu)
    latent = {
        one: both
        for one in CACHES.values()
        if (both := fit_latent(data, gpu, one, gemm["bfloat16"].value))
    }
    sparse = {
        one: both
        for one in CACHES.values()
        if (both := fit_sparse(data, gpu, one, gemm["bfloat16"].value))
    }
    delta = fit_delta(data, gpu)
    version = newest(data, gpu, "gemm", "gemm").parts[-2]
    bandwidth, flops, link = peaks_of(gpu)
    operators = GpuOperators(
        name=gpu,
        bandwidth=bandwidth,
        flops=flops,
        link=link,
        gemm={one: fitted.value for one, fitted in gemm.items()},
        decode=replace(decode.value, beside=BESIDE.get(gpu, BESIDE_ELSE)),
        chunk=chunk.value,
        experts={one: fitted.value for one, fitted in experts.items()},
        all_reduce={ranks: fitted.value for ranks, fitted in reduce.items()},
        latent={one: both[0].value for one, both in latent.items()},
        sparse={one: both[0].value for one, both in sparse.items()},
        delta=delta[0].value if delta else None,
        engine=EngineConstants(),
        source=f"vLLM {version}, ai-dynamo/aiconfigurator {COMMIT[:8]} (Apache-2.0)",
    )
    of_latent = [one for both in (*latent.values(), *sparse.values()) for one in both]
    attention = [decode, chunk, *of_latent, *delta]
    return operators, [*gemm.values(), *attention, *experts.values(), *reduce.values()]


def as_json(gpus: dict[str, GpuOperators], kept: Mapping[str, Any]) -> str:
    """What ships. Of `kept`, the file so far, the constants of an engine stay, which
    `benchmarks.public.calibrate` writes.
    """
    content = {
        "about": "Coefficients of kernels, fitted to measurements of others; no table of theirs is "
        "here. Made by benchmarks.public.operators and benchmarks.public.calibrate. Seconds, "
        "bytes/s, FLOP/s.",
        "source": f"ai-dynamo/aiconfigurator {COMMIT}, Apache-2.0, Copyright (c) 2025-2026 NVIDIA "
        "CORPORATION & AFFILIATES",
        "engine": kept["engine"],
        "gpus": {
            name: {
                "bandwidth": one.bandwidth,
                "flops": one.flops,
                "link": one.link,
                "names": GPUS[name][1],
                "source": one.source,
                "gemm": {key: asdict(law) for key, law in one.gemm.items()},
                "decode": asdict(one.decode),
                "chunk": asdict(one.chunk),
                "latent": {key: asdict(law) for key, law in one.latent.items()},
                "sparse": {key: asdict(law) for key, law in one.sparse.items()},
                "delta": asdict(one.delta) if one.delta else None,
                "experts": {key: asdict(law) for key, law in one.experts.items()},
                "all_reduce": {str(key): asdict(law) for key, law in one.all_reduce.items()},
            }
            for name, one in gpus.items()
        },
    }
    return flat_json(content)


def flat_json(content: Any) -> str:
    """JSON with lists of numbers, and of such lists, on one line."""
    text = json.dumps(content, indent=1)
    flat = re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", text)
    pairs = r"\[\s+((?:\[[^][{}]*\],?\s*)+)\]"
    return re.sub(pairs, lambda row: f"[{' '.join(row[1].split())}]", flat) + "\n"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="aiconfigurator")
    parser.add_argument("--write", action="store_true", help="replace the coefficients that ship")
    options = parser.parse_args()
    gpus = {}
    print("| GPU | kernel | points | median, % | p90, % |\n|---|---|---:|---:|---:|")
    for gpu in GPUS:
        gpus[gpu], fitted = fit_gpu(options.data, gpu)
        if gpu == AS_SERVED:
            fitted.append(fit_plain(options.data))
        for one in fitted:
            print(f"| {gpu} | {one.kernel} | {one.points:,} | {one.median:.1f} | {one.p90:.0f} |")
    if options.write:
        kept = json.loads(TABLE.read_text(encoding="utf-8"))
        TABLE.write_text(as_json(gpus, kept), encoding="utf-8")


if __name__ == "__main__":
    main()
