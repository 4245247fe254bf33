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
    BYTES,
    TABLE,
    WEIGHT_BYTES,
    EngineConstants,
    GpuOperators,
    Kernel,
    chunk_s,
    decode_s,
    delta_chunk_s,
    delta_decode_s,
    experts_s,
    gemm_s,
    latent_decode_s,
    reduce_s,
    sparse_s,
)
from toolkit.estimators.least_squares import Floats
from toolkit.estimators.model_shapes import (
    ACTIVATION_BYTES,
    DeltaShapes,
    LatentShapes,
)

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


BLACKWELL = ("b200_sxm", "b300_sxm", "gb200", "rtx_pro_6000_server")


def family_of(gpu: str) -> str:
    """Return which constants of an engine a GPU of the data has: "h200", "blackwell", or "h100",
    which older ones share. An engine launches other kernels on each generation; H100 and H200 are
    of one, but their kernels were measured at other clocks.
    """
    if gpu in BLACKWELL:
        return "blackwell"
    return "h200" if gpu == "h200_sxm" else "h100"


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
LATENT = LatentShapes(heads=128, rank=512, rope=64, plain=128, value=128, query_rank=1536)
LATENT_HEAD = 160  # numbers of a head with keys and values of one size that computes as much
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
SHORT_HEAD = 64  # numbers
USUAL_HEAD = 128
LONG_HEADS = (256, 512)
UNEVEN_HEAD = 192  # numbers of keys; values of MiMo-V2 have 128, which the data does not say
HEADS_OFF = 20.0  # percent: kernels that are further off are others
DELTA_TOKENS = 32768  # of chunks together
TILE_KERNELS = 50  # fewer tell no factor of an m


CHUNK_TERMS = "start_s flops_per_s bytes_per_s"
ROW_TERMS = "start_s head_s row_s row_head_s"  # of latent attention
DELTA_TERMS = "start_s head_s token_s at_once mixed_per_s"
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


def kernel_of(names: str, **more: Any) -> Callable[..., Kernel]:
    """Return what makes a kernel of coefficients with these names, in their order; further ones are
    factors.

    Args:
        more: further fields of the kernel; `heads`: at which factors are, the first of them 1.
    """
    own = names.split()
    heads = more.pop("heads", ())

    def make(*values: float) -> Kernel:
        terms = dict(zip(own, values[: len(own)], strict=True))
        found = Kernel(terms, **more)
        if not heads:
            return found
        factors = (1.0, *values[len(own) :])
        return replace(found, factors=tuple(zip(heads, factors, strict=True)))

    return make


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

    def make(*values: float) -> Kernel:
        start_s, bytes_per_s, flops_per_s, overlap, *quantize = values
        terms = {"start_s": start_s, "bytes_per_s": bytes_per_s, "flops_per_s": flops_per_s}
        return Kernel({**terms, "quantize_s": sum(quantize)}, overlap)

    def predict(law: Kernel) -> Floats:
        return gemm_s(law, m, n, k, WEIGHT_BYTES[precision])

    guesses = [3e-6, 0.8 * bandwidth, 0.7 * flops, 3.0]
    lowest = [1e-12, 1e9, 1e9, 1.0]
    if precision != "bfloat16":
        guesses = [*guesses[:2], 2.0 * guesses[2], 2.0, 10.0 / bandwidth]
        lowest = [*lowest, 1e-30]
    smooth = solve(f"GEMM {precision}", make, predict, seconds, guesses, lowest)
    law = replace(smooth.value, factors=tiles_of(m, seconds / predict(smooth.value)))
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


@dataclass(frozen=True)
class Decodes:
    """Attention of decodes alone, with no window.

    Attributes:
        fitted: with a cache of 16 bits.
        kernels, longest: by dtype of the cache, as in `GpuOperators`.
        uneven: see `GpuOperators`.
    """

    fitted: Fitted
    kernels: dict[str, Kernel]
    longest: dict[str, int]
    uneven: bool


def fit_decode(data: Path, gpu: str) -> Decodes:
    """Return attention of decodes alone. With a cache of 8 bits it differs in the bytes per
    second that are read.
    """
    fitted = fit_reads(data, gpu, "bfloat16")
    assert fitted is not None
    law: Kernel = fitted.value
    kernels = {"bfloat16": law}
    narrow = fit_reads(data, gpu, "fp8")
    if narrow is not None:
        rate = law.terms["bytes_per_s"]
        times = float(f"{narrow.value.terms['bytes_per_s'] / rate:.3g}")
        kernels["fp8"] = replace(law, terms={**law.terms, "bytes_per_s": times * rate})
    longest = {cache: longest_held(data, gpu, kernel, cache) for cache, kernel in kernels.items()}
    uneven = abs(decode_off(data, gpu, law, "bfloat16", UNEVEN_HEAD)) < HEADS_OFF
    return Decodes(fitted, kernels, longest, uneven)


def longest_held(data: Path, gpu: str, law: Kernel, cache: str) -> int:
    """The longest heads for which the law of usual ones holds with such a cache."""
    held = USUAL_HEAD
    for head_dim in LONG_HEADS:
        if not abs(decode_off(data, gpu, law, cache, head_dim)) < HEADS_OFF:
            break
        held = head_dim
    return held


def decode_off(data: Path, gpu: str, law: Kernel, cache: str, head_dim: int) -> float:
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
    read = batch * step * 2 * kv_heads * head_dim * BYTES[cache]
    predicted = decode_s(law, batch, kv_heads, read)
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
    read = batch * step * 2 * kv_heads * 128 * BYTES[cache]
    make = kernel_of("start_s rows_per_s bytes_per_s", overlap=2.0)

    def predict(law: Kernel) -> Floats:
        return decode_s(law, batch, kv_heads, read)

    return solve("decodes", make, predict, seconds, [8e-6, 1e8, 0.7 * peaks_of(gpu)[0]])


def fit_chunk(data: Path, gpu: str) -> Fitted:
    """Attention of prompts, and how many times its speed short heads reach, where measured."""
    guesses = [8e-6, 0.5 * peaks_of(gpu)[1], 0.5 * peaks_of(gpu)[0]]
    fitted = fit_prompts(data, gpu, USUAL_HEAD, kernel_of(CHUNK_TERMS), guesses)
    assert fitted is not None
    law: Kernel = fitted.value
    factors = []
    for head_dim in (SHORT_HEAD, *LONG_HEADS):

        def faster(factor: float, head_dim: int = head_dim) -> Kernel:
            return replace(law, factors=((head_dim, factor),))

        if (found := fit_prompts(data, gpu, head_dim, faster, [0.8])) is not None:
            factors.append((head_dim, float(f"{found.value.factors[0][1]:.3g}")))
    # Short heads are slower up to their length, longer ones from the usual one on.
    usual = [(SHORT_HEAD + 1, 1.0), (USUAL_HEAD, 1.0)] if factors else []
    return replace(fitted, value=replace(law, factors=tuple(sorted(factors + usual))))


def fit_prompts(
    data: Path,
    gpu: str,
    head_dim: int,
    make: Callable[..., Kernel],
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

    def predict(law: Kernel) -> Floats:
        attended = batch * length * length / 2
        return chunk_s(law, batch * length, attended, heads, kv_heads, head_dim)

    return solve("chunks", make, predict, seconds, guesses)


def fit_latent(data: Path, gpu: str, cache: str, gemm: Kernel) -> list[Fitted]:
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
    gemms = latent_gemms_s(gemm, batch, heads)
    if gpu != AS_SERVED:
        gemms = gemms + fit_plain(data).value.seconds(batch, heads)
    make = kernel_of(f"{ROW_TERMS} bytes_per_s", heads=LATENT_HEADS)
    read = batch * step * (LATENT.rank + LATENT.rope) * BYTES[cache]

    def modules(law: Kernel) -> Floats:
        return gemms + latent_decode_s(law, batch, heads, read)

    guesses = [2e-5, 1e-7, 5e-8, 3e-9, 0.7 * peaks_of(gpu)[0], *[1.0] * (len(LATENT_HEADS) - 1)]
    fitted = solve_unseen(f"latent decodes, {cache}", make, modules, seconds, guesses, batch)
    off = max(fitted.median, prompts.median)
    started = fitted.value.terms["start_s"] > LEAST_START_S
    return [fitted, prompts] if off < UNSEEN_OFF and started else []


def fit_latent_chunk(data: Path, gpu: str, cache: str, gemm: Kernel) -> Fitted:
    """Latent attention of prompts, by modules with the kernel that vLLM takes for them."""
    table = read_table(newest(data, gpu, "mla", "mla_context_module"))
    rows = (table["kv_cache_dtype"] == cache) & (table["gemm_type"] == "bfloat16")
    rows = rows & (table["kernel_source"] == "FLASH_ATTN") & (table["num_heads"] >= LATENT_HEADS[0])
    rows = rows & (table["isl"] >= 16) & (table["isl"] * table["batch_size"] <= 32768)
    heads, batch, length, seconds = chosen(table, rows, ("num_heads", "batch_size", "isl"))
    tokens = batch * length
    wide: Any = heads * (LATENT.plain + LATENT.value)
    gemms = latent_gemms_s(gemm, tokens, heads) + gemm_s(gemm, tokens, wide, LATENT.rank, 2.0)
    if gpu != AS_SERVED:
        gemms = gemms + fit_plain(data).value.seconds(tokens, heads)

    def predict(law: Kernel) -> Floats:
        attended = tokens * length / 2
        return gemms + chunk_s(law, tokens, attended, heads, heads, LATENT_HEAD)

    guesses = [3e-5, 0.5 * peaks_of(gpu)[1], 0.5 * peaks_of(gpu)[0]]
    name = f"latent chunks, {cache}"
    return solve_unseen(name, kernel_of(CHUNK_TERMS), predict, seconds, guesses, batch)


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


def latent_gemms_s(gemm: Kernel, tokens: Floats, heads: Floats) -> Floats:
    """Seconds of the GEMMs of DeepSeek V3's attention that all passes have, with so many heads."""
    return gemms_s(gemm, tokens, heads, LATENT, HIDDEN)


def gemms_s(
    gemm: Kernel, tokens: Floats, heads: Floats, sizes: LatentShapes, hidden: int
) -> Floats:
    """Return the seconds [n] of the GEMMs of latent attention, with so many heads [n]."""
    own: Any = heads
    found = replace(sizes, heads=own).gemms(hidden, 1)
    return np.asarray(sum(gemm_s(gemm, tokens, n, k, 2.0) for _, n, k in found))


# Of the models with sparse attention that were measured, by their names in the data.
BEST_TOKENS = 2048  # that sparse attention attends to
SPARSE = {
    "deepseek-ai/DeepSeek-V3.2": (
        7168,
        replace(LATENT, index_heads=64, index_dim=128),
    ),
    "zai-org/GLM-5": (
        6144,
        replace(
            LATENT,
            plain=192,
            value=256,
            query_rank=2048,
            index_heads=32,
            index_dim=128,
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
        return np.array([SPARSE[name][1].index_heads for name in self.model], dtype=float)

    def reads(self, indexed: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        """Return what `sparse_s` takes, given the tokens that the index reads [n]."""
        return self.tokens, indexed, self.inside, self.heads

    def some(self, rows: np.ndarray[Any, Any]) -> SparseModules:
        return SparseModules(*(getattr(self, one.name)[rows] for one in fields(self)))


def sparse_modules(data: Path, gpu: str, phase: str, cache: str, gemm: Kernel) -> SparseModules:
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
    if phase == "generation":
        attended, inside = batch * before, batch * np.minimum(before, BEST_TOKENS)
    else:
        attended = tokens * (before + length / 2)
        inside = tokens * np.minimum(before + length / 2, BEST_TOKENS + 1)
    for name, (hidden, sizes) in SPARSE.items():
        at = model == name
        m, own = tokens[at], heads[at]
        known[at] += gemms_s(gemm, m, own, sizes, hidden)
    return SparseModules(model, heads, batch, tokens, attended, inside, seconds, known)


def fit_sparse(data: Path, gpu: str, cache: str, gemm: Kernel) -> list[Fitted]:
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

    decoding = kernel_of(f"{ROW_TERMS} index_s best_s", heads=SPARSE_HEADS)

    def decodes_s(law: Kernel) -> Floats:
        started = law.seconds(start_s=1.0, head_s=decodes.heads)
        found = sparse_s(law, *decodes.reads(decodes.attended))
        return np.asarray(decodes.known + started + found)

    guesses = [6e-5, 1e-7, 2e-7, 5e-9, 1e-11, 1e-10, *[1.0] * 4]
    name = f"sparse decodes, {cache}"
    alone = solve_unseen(name, decoding, decodes_s, decodes.seconds, guesses, decodes.batch)
    chunks = sparse_modules(data, gpu, "context", cache, gemm)
    launched = np.median(chunks.seconds[chunks.tokens <= 64])
    chunks = chunks.some(chunks.seconds > LAUNCHED * launched)
    chunking = kernel_of("row_s row_head_s index_s best_s", heads=SPARSE_HEADS)
    started = alone.value.seconds(start_s=1.0, head_s=chunks.heads)
    reads = chunks.reads(chunks.attended * chunks.index_heads)

    def chunks_s(law: Kernel) -> Floats:
        return np.asarray(chunks.known + started + sparse_s(law, *reads))

    guesses = [1e-8, 1e-9, 3e-13, 1e-10, *[1.0] * 4]
    name = f"sparse chunks, {cache}"
    both = solve_unseen(name, chunking, chunks_s, chunks.seconds, guesses, chunks.batch)
    far = max(alone.median, both.median) > UNSEEN_OFF
    return [] if far else [alone, both]


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
        ("generation", kernel_of("start_s bytes_per_s"), [6e-6, 0.8 * peaks_of(gpu)[0]]),
        ("context", kernel_of(DELTA_TERMS), [5e-6, 5e-6, 4e-8, 132.0, 5e11]),
    ):
        # A convolution and a state update; a kernel that failed leaves its partner alone.
        kernels = {key: two for key, two in both.items() if key[0] == phase and len(two) == 2}
        columns = np.array([key[1:] for key in kernels], dtype=float).T
        batch, length, key_heads, heads, _hidden = columns
        seconds = np.array([sum(two) for two in kernels.values()])
        rows = (batch * length <= DELTA_TOKENS) & ((length >= 16) | (phase == "generation"))
        batch, length, key_heads, heads = (one[rows] for one in (batch, length, key_heads, heads))
        sizes: Any = DeltaShapes(heads, key_heads, 128, 128, 4)

        def predict(law: Kernel, at: Any = (phase, batch, length, sizes)) -> Floats:
            if at[0] == "generation":
                return delta_decode_s(law, at[1], at[3])
            return delta_chunk_s(law, at[1], at[1] * at[2], at[3])

        name = f"delta net, {'decodes' if phase == 'generation' else 'chunks'}"
        found.append(solve_unseen(name, make, predict, seconds[rows], guesses, batch))
    far = max(one.median for one in found) > UNSEEN_OFF
    return [] if far else found


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

    make = kernel_of("start_s expert_s bytes_per_s flops_per_s")

    def predict(law: Kernel) -> Floats:
        sizes = (hidden, inter / ranks, experts, per_token, WEIGHT_BYTES[precision])
        return experts_s(law, tokens, *sizes)

    bandwidth, flops, _link = peaks_of(gpu)
    guesses = [2e-5, 1e-7, 0.7 * bandwidth, 0.5 * flops]
    return solve(f"experts {precision}", make, predict, seconds, guesses)


def fit_all_reduce(data: Path, gpu: str) -> dict[str, Fitted]:
    """vLLM's all-reduce in a CUDA graph; sizes are in numbers of bf16."""
    found: dict[str, Fitted] = {}
    try:
        table = read_table(newest(data, gpu, "comm", "custom_allreduce"))
    except SystemExit:
        return found
    for ranks in sorted(set(table["num_gpus"].tolist())):
        rows = (table["num_gpus"] == ranks) & (table["backend"] == "vllm_graph")
        rows = rows & (table["message_size"] <= 2**27)
        sizes, seconds = chosen(table, rows, ("message_size",))

        def predict(law: Kernel, sizes: Floats = sizes) -> Floats:
            return reduce_s(law, ACTIVATION_BYTES * sizes)

        name = f"all-reduce, {ranks} GPUs"
        make = kernel_of("start_s bytes_per_s")
        smooth = solve(name, make, predict, seconds, [5e-6, 1e11])
        factors = by_size(ACTIVATION_BYTES * sizes, seconds / predict(smooth.value))
        law = replace(smooth.value, factors=factors)
        error = 100.0 * np.abs(predict(law) / seconds - 1.0)
        median, p90 = np.percentile(error, [50, 90])
        found[str(ranks)] = replace(smooth, value=law, median=float(median), p90=float(p90))
    return found


def by_size(sizes: Floats, ratio: Floats) -> tuple[tuple[float, float], ...]:
    """Return the median of measured over predicted at the logarithm of each size from `LEAST_BYTES`
    on, and at the smaller ones together.
    """
    known = [LEAST_BYTES // 2, *np.unique(sizes[sizes >= LEAST_BYTES]).astype(int).tolist()]
    nearest = np.maximum(sizes, known[0])
    nearest[sizes < LEAST_BYTES] = known[0]
    return tuple(
        (float(np.log2(size)), float(f"{np.median(ratio[nearest == size]):.3g}")) for size in known
    )


def fit_gpu(data: Path, gpu: str) -> tuple[GpuOperators, list[Fitted]]:
    """All operators of a GPU, without the constants of an engine."""
    gemm = {one: fitted for one in GEMMS if (fitted := fit_gemm(data, gpu, one))}
    experts = {one: fitted for one in EXPERTS if (fitted := fit_experts(data, gpu, one))}
    decode = fit_decode(data, gpu)
    chunk = fit_chunk(data, gpu)
    reduce = fit_all_reduce(data, gpu)
    latent = {
        one: both for one in BYTES if (both := fit_latent(data, gpu, one, gemm["bfloat16"].value))
    }
    sparse = {
        one: both for one in BYTES if (both := fit_sparse(data, gpu, one, gemm["bfloat16"].value))
    }
    delta = fit_delta(data, gpu)
    version = newest(data, gpu, "gemm", "gemm").parts[-2]
    bandwidth, flops, link = peaks_of(gpu)
    tables: dict[str, dict[str, Fitted]] = {
        "gemm": gemm,
        "chunk": {"bfloat16": chunk},
        "latent_decode": {one: both[0] for one, both in latent.items()},
        "latent_chunk": {one: both[1] for one, both in latent.items()},
        "sparse_decode": {one: both[0] for one, both in sparse.items()},
        "sparse_chunk": {one: both[1] for one, both in sparse.items()},
        "delta": dict(zip(("decodes", "chunks"), delta, strict=False)),
        "experts": experts,
        "all_reduce": reduce,
    }
    kernels = {
        sort: {key: one.value for key, one in table.items()} for sort, table in tables.items()
    }
    operators = GpuOperators(
        name=gpu,
        bandwidth=bandwidth,
        flops=flops,
        link=link,
        kernels={"decode": decode.kernels, **kernels},
        beside=BESIDE.get(gpu, BESIDE_ELSE),
        longest=decode.longest,
        uneven=decode.uneven,
        engine=EngineConstants(),
        source=f"vLLM {version}, ai-dynamo/aiconfigurator {COMMIT[:8]} (Apache-2.0)",
        names=tuple(GPUS[gpu][1]),
    )
    of_latent = [one for both in (*latent.values(), *sparse.values()) for one in both]
    attention = [decode.fitted, chunk, *of_latent, *delta]
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
                "names": list(one.names),
                "family": family_of(name),
                "source": one.source,
                "beside": one.beside,
                "longest": one.longest,
                "uneven": one.uneven,
                "kernels": {
                    sort: {key: asdict(law) for key, law in table.items()}
                    for sort, table in one.kernels.items()
                },
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
