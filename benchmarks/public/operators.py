"""Coefficients of GPUs' operators from kernels that others measured, and how far passes that are
computed from them are off.

    PYTHONPATH=.:DIR_OF_PYARROW python -m benchmarks.public.operators \\
        --data AICONFIGURATOR [--servingsim LLMSERVINGSIM] [--vidur VIDUR] [--write]

Takes three minutes. Needs pyarrow, which is not a dependency of llmctl (pip install --target DIR
pyarrow), and checkouts of

- ai-dynamo/aiconfigurator (Apache-2.0): the kernels, in systems/data, and measured servers, in
  systems/silicon_sample.csv;
- casys-kaist/LLMServingSim (MIT), optional: the operators of whole models;
- microsoft/vidur (MIT), optional: linear layers of whole models.

It fits the coefficients of `toolkit.estimators.gpu_operators` for each GPU to the newest kernels of
vLLM, sets the constants of an engine by measured servers, and compares:

1. each kernel with its fit;
2. decodes and prompts of our own H200 run, and of the measured servers at few requests at once,
   with passes that were computed, the constants of the engine set without that model;
3. sums of LLMServingSim's operators with passes that were computed without an engine;
4. the linear layers of Vidur's models with those computed.

Beside each is the method before: half of the peak FLOP/s, 0.7 of the bandwidth, 5 ms a pass.
With --write the coefficients of kernels replace those that ship; `benchmarks.public.silicon` sets
the constants of an engine that ship.

A server is known by its concurrency c, and the means of TTFT and TPOT. With d a pass of c decodes
and P one with a prompt beside c - 1 decodes, TPOT = d + (c - 1) * (P - d) / outputs: each other
request's prompt falls once into the time of an answer. Taken are rows in which prompts are few:
c <= 16 and (c - 1) * prompt / outputs <= 32 tokens a pass.

TTFT contains HTTP, text and waiting, 30 to 60 ms even for short prompts, which no pass explains. So
what is compared is its difference between prompts of 8,192 and of 1,024 tokens, all else equal, at
c <= 4: that of P, and of waiting for the prompts of others: half a prompt's time in as much of the
time as others compute prompts, and one after another at the start (assumed: ten requests a slot).

Rows of Qwen3-235B are shown, but set no constants and are not in the totals: their TPOT is 41 to 58
ms at every concurrency and at one GPU as at two. That is a host's limit, not a GPU's.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from scipy.optimize import least_squares, nnls

from benchmarks.common.command import make_parser
from benchmarks.public import llmservingsim
from toolkit.catalogue.gpus import gpu_of
from toolkit.estimators.forms import Floats
from toolkit.estimators.gpu_operators import (
    SHORT_HEAD,
    TABLE,
    WEIGHT_BYTES,
    AllReduce,
    ChunkAttention,
    DecodeAttention,
    EngineConstants,
    Experts,
    Gemm,
    GpuOperators,
    ModelShapes,
    rest_kernels,
)
from toolkit.estimators.operators import pass_times
from toolkit.estimators.part_fits import shape_of
from toolkit.estimators.roofline import Efficiency, ModelSizes, Peaks, Roofline
from toolkit.estimators.steps import StepShape, chunk_attended
from toolkit.files.io import read_file
from toolkit.files.profile import Profile
from toolkit.files.shipped import shipped_profiles
from toolkit.profiling.shapes import NORM_REDUCES, QK_NORM

CORE = "aic-core/src/aiconfigurator_core"
COMMIT = "095f58a51c4ca8e61b66ec108d86f223f8d559ce"
MS = 1e-3
# The name of each GPU in the data and in llmctl's catalogue, words that name it, and words of GPUs
# that were not measured and are most like it.
GPUS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "h200_sxm": ("h200", ("h200",), ("h20", "mi300", "mi325")),
    "h100_sxm": ("h100-sxm", ("h100", "h800"), ("gh200",)),
    "a100_sxm": ("a100-80gb", ("a100", "a800"), ("a30", "a40", "v100")),
    "l40s": ("l40s", ("l40s",), ("l40", "l4", "a10", "rtx6000ada")),
    "b300_sxm": ("b300", ("b300",), ("gb300",)),
    "gb200": ("gb200", ("gb200",), ()),
    "b200_sxm": ("b200", ("b200",), ()),
    "rtx_pro_6000_server": ("rtx-pro-6000", ("pro6000",), ("5090", "4090")),
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
OLD = Efficiency(compute=0.5, traffic=0.7, pass_s=0.005)
CONCURRENCY_MAX = 16
PASS_TOKENS = 8192
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
    narrow = fit_reads(data, gpu, "fp8")
    if narrow is None:
        return fitted
    times = float(f"{narrow.value.bytes_per_s / fitted.value.bytes_per_s:.3g}")
    return replace(fitted, value=replace(fitted.value, narrow=times))


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
    if found is None:
        return fitted
    return replace(fitted, value=make(float(f"{found.value.short:.3g}")))


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
        found[int(ranks)] = solve(name, AllReduce, predict, seconds, [5e-6, 1e11])
    return found


def fit_gpu(data: Path, gpu: str) -> tuple[GpuOperators, list[Fitted]]:
    """All operators of a GPU, without the constants of an engine."""
    gemm = {one: fitted for one in GEMMS if (fitted := fit_gemm(data, gpu, one))}
    experts = {one: fitted for one in EXPERTS if (fitted := fit_experts(data, gpu, one))}
    decode = fit_decode(data, gpu)
    chunk = fit_chunk(data, gpu)
    reduce = fit_all_reduce(data, gpu)
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
        engine=EngineConstants(),
        source=f"vLLM {version}, ai-dynamo/aiconfigurator {COMMIT[:8]} (Apache-2.0)",
    )
    return operators, [*gemm.values(), decode, chunk, *experts.values(), *reduce.values()]


# ---- whole engines ----


@dataclass(frozen=True)
class Measured:
    """A time of a whole engine, which is `weights` times the seconds of `shapes`."""

    model: str
    gpu: str
    what: str
    shapes_of_model: ModelShapes
    ranks: int
    shapes: tuple[StepShape, ...]
    weights: tuple[float, ...]
    seconds: float

    def operators_s(self, gpus: dict[str, GpuOperators]) -> float:
        """Seconds of the operators alone."""
        passes = gpus[self.gpu].pass_seconds(self.shapes_of_model, self.shapes, self.ranks)
        return float(np.dot(self.weights, passes))

    def constants(self) -> list[float]:
        """How often it has the constant of a kernel, of a pass, and of an all-reduce."""
        passes = sum(self.weights)
        model = self.shapes_of_model
        reduces = (2 + model.norm_reduces) * model.layers if self.ranks > 1 else 0
        return [passes * model.layers * rest_kernels(model), passes, passes * reduces]

    def before_s(self, gpus: dict[str, GpuOperators]) -> float:
        """Seconds by the method before, which knew neither ranks, fp8 nor experts."""
        line = Roofline(
            Peaks(gpus[self.gpu].flops, gpus[self.gpu].bandwidth),
            sizes_of(self.shapes_of_model),
            OLD,
        )
        return float(np.dot(self.weights, line.pass_seconds(self.shapes)))


def sizes_of(model: ModelShapes) -> ModelSizes:
    """The sizes that a recipe gives: all weights in their own precision."""
    attention = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
    mlp = 3 * model.hidden * model.intermediate
    experts = 3 * model.hidden * model.expert_intermediate * model.experts
    each = attention + mlp + experts
    weights = model.layers * each + 2 * model.vocab * model.hidden
    size = int(model.layers * each * WEIGHT_BYTES[model.weights])
    size += 2 * 2 * model.vocab * model.hidden
    kv_bytes = 4 * model.layers * model.kv_heads * model.head_dim
    return ModelSizes(size, weights, model.layers, model.heads * model.head_dim, kv_bytes)


def config_shapes(config: dict[str, Any], weights: str) -> ModelShapes:
    """The shapes of a model by its config.json."""
    heads = config["num_attention_heads"]
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    return ModelShapes(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=0 if experts else config["intermediate_size"],
        heads=heads,
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
        experts=experts,
        experts_per_token=config["num_experts_per_tok"] if experts else 0,
        expert_intermediate=inner if experts else 0,
        weights=weights,
        qk_norm=config["model_type"] in QK_NORM,
        norm_reduces=NORM_REDUCES.get(config["model_type"], 0),
    )


# The configuration and the precision of each model of silicon_sample.csv that is modelled. Those
# with latent or windowed attention are not.
CONFIGS = {
    "Qwen/Qwen3-32B": "Qwen--Qwen3-32B",
    "meta-llama/Llama-3.1-70B": "meta-llama--Meta-Llama-3.1-70B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama--Meta-Llama-3.1-8B",
    "MiniMaxAI/MiniMax-M2.5": "MiniMaxAI--MiniMax-M2.5",
    "Qwen/Qwen3-235B-A22B-FP8": "Qwen--Qwen3-235B-A22B-FP8",
}
HOST_BOUND = ("Qwen/Qwen3-235B-A22B-FP8",)
BLOCKS = ("MiniMaxAI/MiniMax-M2.5", "Qwen/Qwen3-235B-A22B-FP8")  # fp8 in blocks


def prompt_passes(prompt: int, decodes: int, cached: int) -> list[StepShape]:
    """The passes that compute a prompt beside decodes."""
    room = PASS_TOKENS - decodes
    passes = []
    for start in range(0, prompt, room):
        new = min(room, prompt - start)
        attended = chunk_attended(start, new)
        passes.append(StepShape(decodes, decodes * cached, 1, new, attended, start))
    return passes


def read_servers(data: Path, gpus: dict[str, GpuOperators]) -> Iterator[Measured]:
    """TPOT of each row of silicon_sample.csv with few requests at once and short prompts, and
    differences of TTFT by the prompt; each row once, though the file has some twice.
    """
    with (data / CORE / "systems" / "silicon_sample.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if is_modelled(row, gpus)]
    short: dict[tuple[str, ...], float] = {}
    seen = set()
    for row in sorted(rows, key=lambda row: int(row["isl"])):
        model = row["model_path"]
        gpu = row["system"]
        ttft_s = MS * float(row["silicon_ttft_ms"])
        tpot_s = MS * float(row["silicon_tpot_ms"])
        if (model, gpu, ttft_s, tpot_s) in seen:
            continue
        seen.add((model, gpu, ttft_s, tpot_s))
        path = data / CORE / "model_configs" / f"{CONFIGS[model]}_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        shapes = config_shapes(config, precision_of(row))
        ranks = int(row["tp_size"])
        count = int(row["batch_size"])
        prompt = int(row["isl"])
        output = int(row["osl"])
        cached = prompt + output // 2
        name = f"{row['precision'] or 'bf16'} TP{ranks} {prompt}+{output} x{count}"
        if (count - 1) * prompt <= 32 * output:
            prompts = prompt_passes(prompt, count - 1, cached)
            times = (count - 1) / output
            weights = 1.0 - times * len(prompts), *[times] * len(prompts)
            passes = StepShape(count, count * cached), *prompts
            yield Measured(model, gpu, f"decode {name}", shapes, ranks, passes, weights, tpot_s)
        keys = "system", "model_path", "precision", "tp_size", "osl", "batch_size"
        key = (*[row[each] for each in keys], row["backend_version"])
        if count <= 4 and prompt == SHORT:
            short.setdefault(key, ttft_s)
        if count <= 4 and prompt == 8 * SHORT and key in short:
            long, brief = (prompt_passes(each, count - 1, cached) for each in (prompt, SHORT))
            waits = 1.0 + (count - 1) / 2 * (0.1 + ttft_s / (ttft_s + output * tpot_s))
            weights = *[waits] * len(long), *[-1.0] * len(brief)
            passes = *long, *brief
            seconds = ttft_s - short[key]
            yield Measured(model, gpu, f"prompt {name}", shapes, ranks, passes, weights, seconds)


SHORT = 1024


def precision_of(row: dict[str, str]) -> str:
    """The precision of weights."""
    weights = {"fp8": "fp8", "nvfp4": "nvfp4"}.get(row["gemm_quant_mode"], "bfloat16")
    return "fp8_block" if weights == "fp8" and row["model_path"] in BLOCKS else weights


def is_modelled(row: dict[str, str], gpus: dict[str, GpuOperators]) -> bool:
    """Whether it is vLLM without experts or attention in parallel, of a model and a GPU that are
    known, with few requests at once.
    """
    return (
        (row["backend"], row["mode"]) == ("vllm", "agg")
        and row["model_path"] in CONFIGS
        and row["system"] in gpus
        and row["moe_ep_size"] in ("", "0", "1")
        and row["attention_dp_size"] in ("", "1")
        and int(row["batch_size"]) <= CONCURRENCY_MAX
    )


LLAMA_8B = ModelShapes(32, 4096, 14336, 32, 8, 128, 128256)


def read_own() -> Iterator[Measured]:
    """Our own H200 run: passes that the GPU limited, not launches: of decodes alone up to 96 rows,
    and of one prompt of 2,048 tokens.
    """
    profile = read_file(Profile, shipped_profiles() / "llama-3.1-8b-h200-measured" / "profile.json")
    law = profile.steps
    assert law is not None
    model = "meta-llama/Llama-3.1-8B, our run"
    for rows, cached in ((1, 256), (1, 1024), (8, 1024), (32, 1024), (96, 256), (96, 1024)):
        alike = [
            np.median(point.seconds)
            for point in law.points
            if not point.prefills
            and point.decodes == rows
            and abs(shape_of(point).decode_cached / rows - cached) < 40
        ]
        shape = StepShape(rows, rows * cached)
        seconds = float(np.median(alike))
        what = f"decode bf16 TP1 {rows} x {cached}"
        yield Measured(model, "h200_sxm", what, LLAMA_8B, 1, (shape,), (1.0,), seconds)
    (prompt,) = prompt_passes(2048, 0, 0)
    alike = [
        np.median(point.seconds)
        for point in law.points
        if point.idle
        and point.prefills == 1
        and not point.decodes
        and abs(point.prefill_tokens - 2048) < 20
        and not point.prefill_cached
    ]
    seconds = float(np.median(alike))
    what = "prompt bf16 TP1 2048"
    yield Measured(model, "h200_sxm", what, LLAMA_8B, 1, (prompt,), (1.0,), seconds)


def constants_of(rows: Sequence[Measured], operators: Floats) -> Floats:
    """Seconds of a kernel, a pass and an all-reduce, all >= 0: least relative squares, each model
    weighing the same. A row that would be far off counts less. Only decodes tell: a prompt hides
    them.
    """
    told = [k for k, row in enumerate(rows) if row.what.startswith("decode")]
    told = [k for k in told if rows[k].model not in HOST_BOUND]
    rows = [rows[k] for k in told]
    operators = operators[told]
    seconds = np.array([row.seconds for row in rows])
    columns = np.array([row.constants() for row in rows])
    models = [row.model for row in rows]
    weight = np.array([models.count(model) ** -0.5 for model in models])
    robust = np.ones(len(rows))
    for _ in range(8):
        scale = weight * robust / seconds
        found, _ = nnls(columns * scale[:, None], (seconds - operators) * scale)
        error = np.abs((operators + columns @ found) / seconds - 1.0)
        robust = np.sqrt(0.1 / np.maximum(error, 0.1))
    return np.asarray(found)


def compare(rows: Sequence[Measured], gpus: dict[str, GpuOperators]) -> tuple[list[float], Floats]:
    """The constants by all rows, and the seconds of each by constants set without its model."""
    operators = np.array([row.operators_s(gpus) for row in rows])
    columns = np.array([row.constants() for row in rows])
    predicted = np.zeros(len(rows))
    for model in sorted({family(row.model) for row in rows}):
        inside = np.array([family(row.model) == model for row in rows])
        others = [row for row, own in zip(rows, inside, strict=True) if not own]
        found = constants_of(others, operators[~inside])
        predicted[inside] = operators[inside] + columns[inside] @ found
    return constants_of(rows, operators).tolist(), predicted


def family(model: str) -> str:
    """The model, however it was quantized or measured: Llama-3.1-8B is left out as one."""
    return "Llama-3.1-8B" if "Llama-3.1-8B" in model else model


def spread(predicted: Floats, measured: Floats) -> str:
    """Median and p90 of the distances, and the median itself, in percent."""
    error = 100.0 * (predicted / measured - 1.0)
    median, p90 = np.percentile(np.abs(error), [50, 90])
    return f"{median:.0f} | {p90:.0f} | {np.median(error):+.0f}"


# ---- LLMServingSim's operators ----

SERVINGSIM_GPUS = {"RTX4090": "rtx4090", "RTXPRO6000": "rtx_pro_6000_server"}


def servingsim_rows(data: Path, gpus: dict[str, GpuOperators]) -> list[str]:
    """Sums of a model's operators on a GPU, beside those computed; neither has an engine."""
    sheet = gpu_of("rtx-4090")
    peaks = 1e9 * sheet.bandwidth_gb_s, 1e12 * sheet.tflops["bf16"]
    known = gpus | {"rtx4090": gpus["rtx_pro_6000_server"].like("rtx4090", *peaks)}
    rows = []
    for folder in sorted(data.glob("profiler/perf/*/*/*/bf16/tp*")):
        gpu, maker, name = folder.parts[-5:-2]
        ranks = int(folder.name[2:])
        config = json.loads((data / "configs/model" / maker / f"{name}.json").read_text("utf-8"))
        shapes = config_shapes(config, "bfloat16")
        if shapes.experts:
            continue  # their table of experts has no pass of its own
        case: Any = SimpleNamespace(
            gpu=gpu,
            model=name,
            name=f"{gpu} {name}",
            ranks=ranks,
            meta={"model": f"{maker}/{name}"},
            flags=SimpleNamespace(max_num_batched_tokens=2048, max_num_seqs=256),
            trace=SimpleNamespace(prompt_tokens=np.array([8192]), output_tokens=np.array([0])),
            cached_max=200_000,
        )
        attention = llmservingsim.read_attention(data, case, unequal=False)
        measured = pass_times(llmservingsim.read_operators(data, case), attention)
        own = replace(known[SERVINGSIM_GPUS[gpu]], all_reduce={ranks: AllReduce(0.0, 1e18)})
        computed = own.pass_seconds(shapes, attention.shapes, ranks)
        line = Roofline(Peaks(own.flops, own.bandwidth), sizes_of(shapes), OLD)
        before = line.pass_seconds(attention.shapes)
        for kind, wanted in (("decodes", False), ("with a chunk", True)):
            inside = np.array([bool(shape.prefills) == wanted for shape in attention.shapes])
            cells = [f"{gpu} {name} TP{ranks}", kind, str(int(inside.sum()))]
            cells.append(spread(computed[inside], measured[inside]))
            cells.append(spread(before[inside], measured[inside]))
            rows.append(f"| {' | '.join(cells)} |")
    return rows


# ---- Vidur's linear layers ----

VIDUR_GPUS = {"a100": "a100_sxm", "h100": "h100_sxm"}
VIDUR_PARTS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")


def vidur_rows(data: Path, gpus: dict[str, GpuOperators]) -> list[str]:
    """The four GEMMs of a layer up to 8,192 tokens, beside those computed."""
    found = []
    for path in sorted(data.glob("data/profiling/compute/*/*/*/mlp.csv")):
        gpu, _, model = path.parts[-4:-1]
        if gpu not in VIDUR_GPUS:
            continue
        with path.open(encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["use_gated_mlp"] == "True"]
        rows = [row for row in rows if int(row["num_tokens"]) <= PASS_TOKENS]
        if not rows:
            continue
        own = gpus[VIDUR_GPUS[gpu]]
        measured = []
        computed = []
        before = []
        for row in rows:
            heads, kv_heads, hidden, inner, tokens, ranks = (
                int(row[key])
                for key in (
                    "n_head",
                    "n_kv_head",
                    "n_embd",
                    "n_expanded_embd",
                    "num_tokens",
                    "num_tensor_parallel_workers",
                )
            )
            width = hidden // heads * (heads + 2 * kv_heads) // ranks
            sizes = [
                (width, hidden),
                (hidden, hidden // ranks),
                (2 * inner // ranks, hidden),
                (hidden, inner // ranks),
            ]
            m = np.array([float(tokens)])
            each = [float(own.gemm["bfloat16"].seconds(m, n, k, 2.0)[0]) for n, k in sizes]
            computed.append(sum(each))
            weights = sum(n * k for n, k in sizes)
            moving = 2.0 * weights / (OLD.traffic * own.bandwidth)
            before.append(max(moving, 2.0 * weights * tokens / (OLD.compute * own.flops)))
            parts = [float(row[f"time_stats.{part}.median"]) for part in VIDUR_PARTS]
            measured.append(MS * sum(parts))
        cells = [f"{gpu} {model}", "linear layers", f"{len(rows):,}"]
        cells.append(spread(np.array(computed), np.array(measured)))
        cells.append(spread(np.array(before), np.array(measured)))
        found.append(f"| {' | '.join(cells)} |")
    return found


# ---- output ----


def values_of(one: Any) -> dict[str, float]:
    """The coefficients of one kernel."""
    return {name: getattr(one, name) for name in one.__dataclass_fields__}


def as_json(gpus: dict[str, GpuOperators], kept: Mapping[str, Any]) -> str:
    """What ships. Of `kept`, the file so far, the constants of an engine and the errors of whole
    engines stay, which `benchmarks.public.silicon` writes.
    """
    content = {
        "about": "Coefficients of kernels, fitted to measurements of others; no table of theirs is "
        "here. Made by benchmarks.public.operators and benchmarks.public.silicon. Seconds, "
        "bytes/s, FLOP/s.",
        "source": f"ai-dynamo/aiconfigurator {COMMIT}, Apache-2.0, Copyright (c) 2025-2026 NVIDIA "
        "CORPORATION & AFFILIATES",
        "engine": kept["engine"],
        "errors": kept["errors"],
        "gpus": {
            name: {
                "bandwidth": one.bandwidth,
                "flops": one.flops,
                "link": one.link,
                "names": GPUS[name][1],
                "like": GPUS[name][2],
                "source": one.source,
                "gemm": {key: values_of(law) for key, law in one.gemm.items()},
                "decode": values_of(one.decode),
                "chunk": values_of(one.chunk),
                "experts": {key: values_of(law) for key, law in one.experts.items()},
                "all_reduce": {str(key): values_of(law) for key, law in one.all_reduce.items()},
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


HEAD = (
    "| {} | rows | median, % | p90, % | bias, % | before: median, % | p90, % | bias, % |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|"
)


PARTS_HEAD = (
    "| {} | passes | rows | median, % | p90, % | bias, % | before: median, % | p90, % | bias, % |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|---:|"
)


def print_comparison(title: str, groups: dict[str, np.ndarray[Any, Any]], *columns: Floats) -> None:
    """A table of errors by group, for what is predicted, before, and measured."""
    predicted, before, measured = columns
    print(HEAD.format(title))
    for name, inside in groups.items():
        cells = [name, str(int(inside.sum()))]
        cells.append(spread(predicted[inside], measured[inside]))
        cells.append(spread(before[inside], measured[inside]))
        print(f"| {' | '.join(cells)} |")
    print()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="aiconfigurator")
    parser.add_argument("--servingsim", type=Path, metavar="DIR", help="LLMServingSim")
    parser.add_argument("--vidur", type=Path, metavar="DIR", help="Vidur")
    parser.add_argument("--write", action="store_true", help="replace the coefficients that ship")
    parser.add_argument("--rows", action="store_true", help="print every row of a whole engine")
    options = parser.parse_args()
    gpus = {}
    print("| GPU | kernel | points | median, % | p90, % |\n|---|---|---:|---:|---:|")
    for gpu in GPUS:
        gpus[gpu], fitted = fit_gpu(options.data, gpu)
        for one in fitted:
            print(f"| {gpu} | {one.kernel} | {one.points:,} | {one.median:.1f} | {one.p90:.0f} |")
    print()
    rows = [*read_own(), *read_servers(options.data, gpus)]
    constants, predicted = compare(rows, gpus)
    measured = np.array([row.seconds for row in rows])
    before = np.array([row.before_s(gpus) for row in rows])
    kinds = np.array([row.what.split()[0] for row in rows])
    print(
        f"a kernel {1e6 * constants[0]:.2f} us, a pass {1e3 * constants[1]:.2f} ms, "
        f"an all-reduce {1e6 * constants[2]:.1f} us\n"
    )
    counted = np.array([row.model not in HOST_BOUND for row in rows])
    if options.rows:
        for row, seconds, old in zip(rows, predicted, before, strict=True):
            print(
                f"{row.model} {row.gpu} {row.what}: {1e3 * row.seconds:.2f} ms, "
                f"{1e3 * seconds:.2f}, {1e3 * old:.2f}"
            )
    groups = {}
    for kind in ("decode", "prompt"):
        groups[f"all: {kind}"] = (kinds == kind) & counted
    for name in sorted({(row.model, row.gpu) for row in rows}):
        for kind in ("decode", "prompt"):
            own = np.array([(row.model, row.gpu) == name for row in rows])
            if (own & (kinds == kind)).any():
                groups[f"{name[0]} {name[1]}: {kind}"] = own & (kinds == kind)
    print_comparison("model left out", groups, predicted, before, measured)
    if options.servingsim:
        print(PARTS_HEAD.format("operators of LLMServingSim"))
        print("\n".join(servingsim_rows(options.servingsim, gpus)) + "\n")
    if options.vidur:
        print(PARTS_HEAD.format("linear layers of Vidur"))
        print("\n".join(vidur_rows(options.vidur, gpus)) + "\n")
    if options.write:
        kept = json.loads(TABLE.read_text(encoding="utf-8"))
        TABLE.write_text(as_json(gpus, kept), encoding="utf-8")


if __name__ == "__main__":
    main()
