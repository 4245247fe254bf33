"""Servers that others measured at a fixed concurrency, predicted from the operators that ship.

    python -m benchmarks.public.silicon --data AICONFIGURATOR [--calibrate] [--write]

Takes some minutes. Needs a checkout of ai-dynamo/aiconfigurator (Apache-2.0, NVIDIA):
systems/silicon_sample.csv has TTFT and TPOT of each server.

Each row of vLLM without disaggregation is predicted: the operators of its GPU
(`toolkit/estimators/operators.json`) are summed at the passes that such a server makes, a law is
fitted to the sums, and the simulator serves as many requests at once as the row says. A row that is
not modelled is counted by reason.

Rows of InferenceX (SemiAnalysisAI/InferenceX, Apache-2.0) have the protocol of its scripts of their
day: ten requests for each place, lengths drawn evenly from 0.8 to 1 times the stated ones with the
seed 0, which gives the very lengths, and vLLM's flags as they are there. The others say nothing:
ten requests for each place, of the stated lengths, and vLLM's defaults are assumed.

What no operator tells, the constants of an engine, is set on a tenth of the rows: settings that a
seed draws (`tenth_of`). They are in no table of errors. --calibrate sets them anew, and --write
makes them those that ship. `benchmarks.public.scoreboard` prints the errors beside a peer's.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.common.command import make_parser
from benchmarks.public.operators import CORE, GPUS, flat_json
from toolkit.catalogue.gpus import gpu_of
from toolkit.catalogue.resolved import CacheGroup
from toolkit.errors import InputError
from toolkit.estimators.forms import Floats
from toolkit.estimators.gpu_operators import (
    TABLE,
    WEIGHT_BYTES,
    EngineConstants,
    ModelShapes,
    engine_constants,
    family_of,
    measured_operators,
)
from toolkit.estimators.laws import unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.estimators.operators import OperatorLaw, law_of_passes
from toolkit.estimators.steps import StepShape, chunk_attended, chunk_inside
from toolkit.metrics import latencies
from toolkit.profiling.shapes import NORM_REDUCES, QK_NORM
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import simulate
from toolkit.sim.groups.caches import CacheSettings
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.world import World
from toolkit.traces.types import Trace
from toolkit.units import GIB

MS = 1e-3
SEED = 39
ONE_IN = 10  # settings sets the constants
BLOCK_TOKENS = 16
# Memory that is neither weights nor KV cache: activations, CUDA graphs, communicators. On our own
# H200 it was 2.3 % of the tokens of the cache (docs/results/recipe-sizes.md).
RESERVED = 0.03
KNOTS = (0, 4, 16, 64, 128, 256, 512, 1024)  # new tokens, where the cost of one more may change

# ---- rows ----


@dataclass(frozen=True, slots=True)
class Row:
    """A server as it was measured.

    Attributes:
        source: InferenceX or NVIDIA, where it was measured.
        version: of vLLM; "": not said.
        precision: bf16, fp8 or fp4.
        ranks, expert_ranks, data_ranks: of tensor, expert and data parallelism.
        concurrency: requests at once; 0: not said.
        day: of the measurement, such as 2026-04-03; "": not said.
    """

    name: str
    source: str
    model: str
    gpu: str
    version: str
    precision: str
    ranks: int
    expert_ranks: int
    data_ranks: int
    prompt: int
    output: int
    concurrency: int
    day: str
    ttft_s: float
    tpot_s: float

    @property
    def group(self) -> tuple[str, str, str, str, int]:
        """The line of the table that it belongs to."""
        return (self.gpu, self.model, self.precision, self.version, self.ranks)

    @property
    def setting(self) -> tuple[object, ...]:
        """What repeats of a measurement have in common."""
        ranks = (self.ranks, 1) if self.misread else (self.expert_ranks, self.data_ranks)
        return (*self.group, *ranks, self.prompt, self.output, self.concurrency)

    @property
    def misread(self) -> bool:
        """Whether the file says data parallelism, but InferenceX's configuration expert parallelism
        alone: where it says `ep` the file has as many copies of attention, too. The same
        measurements are in the file without these.
        """
        if self.model != "MiniMax-M2.5" or self.name.rpartition("_")[2] in DP_ATTENTION:
            return False
        return self.data_ranks == self.ranks > 1 and self.expert_ranks == self.ranks**2


# Rows of configurations with `dp-attn` in InferenceX's nvidia-master.yaml at 13962fc.
DP_ATTENTION = ("cfg707", "cfg727", "cfg827")


def read_rows(data: Path) -> list[Row]:
    """All rows of vLLM without disaggregation, each once, though the file has some twice."""
    path = data / CORE / "systems" / "silicon_sample.csv"
    if not path.exists():
        raise SystemExit(f"{path}: it is missing; is it a checkout of ai-dynamo/aiconfigurator?")
    found: dict[tuple[object, ...], Row] = {}
    with path.open(encoding="utf-8") as file:
        for given in csv.DictReader(file):
            if (given["backend"], given["mode"]) != ("vllm", "agg"):
                continue
            row = read_row(given)
            times = f"{row.ttft_s:.6g}", f"{row.tpot_s:.6g}"
            found.setdefault((*row.setting, *times), row)
    return list(found.values())


def read_row(given: Mapping[str, str]) -> Row:
    """A row of the file. Where tensor parallelism of experts exceeds the ranks of attention, there
    are several copies of attention, whatever `attention_dp_size` says.
    """
    ranks = int(given["tp_size"])
    expert_ranks = max(int(given["moe_ep_size"] or 1), 1)
    together = max(int(given["moe_tp_size"] or 1), 1) * expert_ranks
    data_ranks = int(given["attention_dp_size"] or 1)
    if "A22B" in given["model_path"]:
        data_ranks = max(data_ranks, together // ranks)
    concurrency = re.search(r"silicon_concurrency=(\d+)", given["silicon_data_source"])
    day = re.search(r"measured=(\d{4}-\d\d-\d\d)", given["silicon_data_source"])
    ours = "aic-auto-gap-analysis" in given["silicon_data_source"]
    return Row(
        name=given["id"],
        source="NVIDIA" if ours else "InferenceX",
        model=given["model_path"].rpartition("/")[2],
        gpu=given["system"],
        version=given["backend_version"].partition("-")[0],
        precision=given["precision"] or "bf16",
        ranks=ranks,
        expert_ranks=expert_ranks,
        data_ranks=data_ranks,
        prompt=int(given["isl"]),
        output=int(given["osl"]),
        concurrency=int(concurrency[1]) if concurrency else 0,
        day=day[1] if day else "",
        ttft_s=MS * float(given["silicon_ttft_ms"]),
        tpot_s=MS * float(given["silicon_tpot_ms"]),
    )


def not_modelled(row: Row) -> str:
    """Why a row is not predicted; "": it is."""
    if row.gpu not in GPUS:
        return f"no operators of {row.gpu}"
    if row.model in ("Kimi-K2.5",):
        return "multi-head latent attention"
    if not row.concurrency:
        return "concurrency not said"
    if row.model in IN_MXFP4 and row.gpu == "h100_sxm" and row.day[:7] == "2025-12":
        return "concurrency not said (the script of that day has 512 for any)"
    if row.data_ranks > 1 and not row.misread:
        return "engines that wait for one another (data parallel)"
    if row.model not in MODELS:
        return f"no configuration of {row.model}"
    return ""


def tenth_of(rows: Sequence[Row]) -> set[tuple[object, ...]]:
    """The settings that the constants are set on: of each line of the table one of ten, at least
    one, drawn by a hash with the seed. All rows of a setting are of the tenth, or none.
    """
    groups: dict[tuple[object, ...], set[tuple[object, ...]]] = {}
    for row in rows:
        groups.setdefault(row.group, set()).add(row.setting)
    drawn = set()
    for settings in groups.values():
        order = sorted(settings, key=lambda one: hashlib.sha256(f"{SEED} {one}".encode()).digest())
        drawn |= set(order[: max(round(len(order) / ONE_IN), 1)])
    return drawn


# ---- models ----

MODELS = {
    "Qwen3-32B": "Qwen--Qwen3-32B",
    "Llama-3.1-70B": "meta-llama--Meta-Llama-3.1-70B",
    "Llama-3.1-8B-Instruct-FP8": "meta-llama--Meta-Llama-3.1-8B",
    "MiniMax-M2.5": "MiniMaxAI--MiniMax-M2.5",
    "Qwen3-235B-A22B-FP8": "Qwen--Qwen3-235B-A22B-FP8",
    "gpt-oss-120b": "openai--gpt-oss-120b",
}
IN_MXFP4 = ("gpt-oss-120b",)
IN_BLOCKS = ("MiniMax-M2.5", "Qwen3-235B-A22B-FP8")  # fp8 with a scale per block


@cache
def shapes_of(data: Path, model: str, precision: str) -> ModelShapes:
    """The model's shapes in that precision, with a KV cache of 16 bits."""
    path = data / CORE / "model_configs" / f"{MODELS[model]}_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("quantization_config", {}).get("quant_method") == "mxfp4":
        shapes = replace(config_shapes(config, "bfloat16"), expert_weights="mxfp4")
        layers = config["layer_types"].count("sliding_attention")
        return replace(shapes, window=config["sliding_window"], window_layers=layers)
    weights = {"bf16": "bfloat16", "fp8": "fp8", "fp4": "nvfp4"}[precision]
    if weights == "fp8" and model in IN_BLOCKS:
        weights = "fp8_block"
    shapes = config_shapes(config, weights)
    if weights == "nvfp4" and shapes.experts:  # its attention keeps 16 bits
        return replace(shapes, weights="bfloat16", expert_weights="nvfp4")
    return shapes


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


# ---- protocols ----


@dataclass(frozen=True, slots=True)
class Protocol:
    """How a server was started and loaded.

    Attributes:
        requests: of a run, for each place.
        ratio: lengths are drawn evenly from so many times the stated ones up to these.
        rows, tokens: vLLM's `max_num_seqs` and `max_num_batched_tokens`.
        share: `gpu_memory_utilization`.
        cache_bytes: of a number in the KV cache.
        ahead: `async_scheduling`.
        whole_experts: `enable_expert_parallel`.
        taken: share of the memory that something else takes.
        longest: `max_model_len`; 0: as long as a request.
        experts: precision of the experts' kernels; "": that of their weights.
        said: whether a script of the source says so; otherwise it is assumed.
    """

    requests: int = 10
    ratio: float = 1.0
    rows: int = 1024
    tokens: int = 8192
    share: float = 0.9
    cache_bytes: int = 2
    ahead: bool = False
    whole_experts: bool = False
    taken: float = RESERVED
    longest: int = 0
    experts: str = ""
    said: bool = False


# Where all lengths are alike, requests that begin together stay together, here as in a server.
# Times to the first token show that those of NVIDIA's runs did not; a spread of 2 % was set on the
# tenth.
NEARLY_ALIKE = 0.98
# Rows with times that no GPU explains set no constants; they are judged like the others.
# Qwen3-235B: 34 to 58 ms at every concurrency. Llama-3.1-8B: more prompts a second than its GEMMs
# alone allow, so that requests were fewer at once, or prompts found in the cache.
UNEXPLAINED = ("Qwen3-235B-A22B-FP8", "Llama-3.1-8B-Instruct-FP8")
APRIL = "2026-04-03"  # since then the scripts for Blackwell have other flags


def protocol_of(row: Row) -> Protocol:
    """The protocol of a row's source on its day.

    InferenceX: benchmarks/70b_*_slurm.sh and 70b_*_docker.sh at ac1998a (October 2025), and
    minimaxm2.5_{fp8,fp4}_GPU.sh at a363463, 0f78cf4, f342df1, bddbf40, 79bd988, 340d785, 22d0f12,
    gptoss_fp4_GPU*.sh at ac1998a, 25506e8, d2c2acb, cec542a.
    """
    if row.model in UNEXPLAINED:  # set on the tenth of these: longer runs, of lengths that differ
        return Protocol(requests=40, ratio=0.8)
    if row.source != "InferenceX":
        return Protocol(ratio=NEARLY_ALIKE)  # vLLM 0.12 does not plan ahead by default
    common = Protocol(ratio=0.8, ahead=True, said=True)
    hopper = row.gpu in ("h100_sxm", "h200_sxm")
    if row.model == "Llama-3.1-70B":
        rows = row.concurrency if hopper else 512
        # The script for the H100 names a cache of 8 bits too, but the rows of the tenth read and
        # hold as many bytes as one of 16 bits has.
        return replace(common, cache_bytes=2 if row.gpu == "h100_sxm" else 1, rows=rows)
    apart = row.expert_ranks > 1
    if row.model in IN_MXFP4:
        longest = max_model_len_of(row)
        if hopper:
            return replace(common, rows=row.concurrency, longest=longest)
        return replace(
            common,
            rows=512,
            cache_bytes=1 if row.day >= "2025-12" else 2,
            longest=longest,
            experts="mxfp4_mxfp8",
        )
    if row.gpu == "h100_sxm":
        return replace(common, rows=256, whole_experts=apart)
    if row.gpu == "h200_sxm":  # the script of vLLM 0.18 turns it on for every row
        return replace(common, share=0.95, whole_experts=apart or row.version == "0.18.0")
    if row.day < APRIL:
        return replace(common, share=0.95, whole_experts=True)
    return replace(common, cache_bytes=1, tokens=2 * row.prompt, whole_experts=apart)


def max_model_len_of(row: Row) -> int:
    """`max_model_len` of InferenceX's scripts for gpt-oss-120b."""
    if row.gpu == "h100_sxm":
        return 10240
    return row.prompt + row.output + (20 if row.prompt == row.output else 200)


def trace_of(row: Row, protocol: Protocol) -> Trace:
    """The requests of a run. With a ratio, the lengths are those that InferenceX's
    benchmark_serving.py draws.
    """
    count = protocol.requests * row.concurrency
    drawn = np.random.RandomState(0)
    lengths = []
    for length in (row.prompt, row.output):
        low = int(length * protocol.ratio)
        lengths.append(drawn.randint(low, length + 1, size=count).astype(np.int64))
    prompts = lengths[0]
    outputs = lengths[1]
    return Trace(np.zeros(count), prompts, outputs, outputs.copy())


# ---- laws ----


def passes_of(rows: int, tokens: int, length: int, window: int = 0) -> list[StepShape]:
    """Passes of a server with up to so many rows and new tokens, and requests that grow to
    `length`: of decodes alone, and of chunks beside decodes. `window`: of sliding windows.
    """
    counts = sorted({round(rows ** (k / 12)) for k in range(13)})
    lengths = [length // 16, length // 4, length // 2, length]
    if window:
        lengths = sorted({window // 4, window // 2, *lengths})
    shapes = []
    for count, cached in product(counts, lengths):
        inside = count * min(cached, window - 1) if window else 0
        shapes.append(StepShape(count, count * cached, decode_inside=inside))
    few = sorted({0, 1, max(rows // 16, 1), max(rows // 4, 1), rows})
    for new in (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384):
        for count, cached in product(few, lengths):
            if not count and cached > lengths[0]:
                continue
            if new + count > tokens:
                continue
            for before in (0, length // 2):
                if new + before > length and before:
                    continue
                parts = max(-(-new // length), 1)  # prompts that fit in the pass
                attended = parts * chunk_attended(before, new // parts)
                shape = StepShape(count, count * cached, parts, new, attended, before)
                if window:
                    shape.decode_inside = count * min(cached, window - 1)
                    shape.prefill_inside = parts * chunk_inside(before, new // parts, window)
                shapes.append(shape)
    return shapes


@dataclass(frozen=True)
class Server:
    """An engine as its row and its protocol describe it."""

    row: Row
    protocol: Protocol
    shapes: ModelShapes

    @property
    def layers_of_block(self) -> int:
        """Layers that a block of the KV cache has tokens of: of a model with windows those of one
        kind, since both kinds take blocks of one pool.
        """
        return self.shapes.layers - self.shapes.window_layers

    @property
    def caches(self) -> CacheSettings | None:
        """The groups of KV caches of a model with windows; None: there is one group."""
        shapes = self.shapes
        if not shapes.window:
            return None
        layers = self.layers_of_block
        if layers != shapes.window_layers:
            raise InputError(
                f"{self.row.model}: {shapes.window_layers} layers with windows and {layers} without"
            )
        page = BLOCK_TOKENS * self.token_bytes
        groups = (
            CacheGroup(
                "window", "SlidingWindowSpec", BLOCK_TOKENS, layers, page, window=shapes.window
            ),
            CacheGroup("full", "FullAttentionSpec", BLOCK_TOKENS, layers, page),
        )
        return CacheSettings(groups, self.protocol.longest or self.row.prompt + self.row.output + 1)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the KV cache of one layer."""
        shapes = self.shapes
        return 2 * shapes.kv_heads_of(self.row.ranks) * shapes.head_dim * shapes.cache_bytes

    @property
    def blocks(self) -> int:
        """Blocks of its KV cache: what weights and the reserve leave."""
        sheet = gpu_of(GPUS[self.row.gpu][0])
        ranks = self.row.ranks
        shapes = self.shapes
        budget = sheet.memory_gib * GIB * (self.protocol.share - self.protocol.taken)
        budget -= weight_bytes(shapes) / ranks
        blocks = int(budget / (self.layers_of_block * self.token_bytes * BLOCK_TOKENS))
        if blocks < 1:
            raise InputError(f"{self.row.name}: the weights leave no KV cache")
        return blocks


def weight_bytes(shapes: ModelShapes) -> float:
    """Bytes of a model's weights."""
    heads = 2 * shapes.heads + 2 * shapes.kv_heads
    linear = shapes.hidden * (shapes.head_dim * heads + 3 * shapes.intermediate)
    experts = 3 * shapes.hidden * shapes.expert_intermediate * shapes.experts
    each = linear * WEIGHT_BYTES[shapes.weights]
    each += experts * WEIGHT_BYTES[shapes.expert_weights or shapes.weights]
    return shapes.layers * each + 2 * shapes.vocab * shapes.hidden * WEIGHT_BYTES["bfloat16"]


def server_of(shapes: ModelShapes, row: Row, protocol: Protocol) -> Server:
    """The engine of a row with a model of these shapes."""
    own = replace(
        shapes,
        cache_bytes=protocol.cache_bytes,
        expert_weights=protocol.experts or shapes.expert_weights,
        whole_experts=protocol.whole_experts and row.ranks > 1,
    )
    return Server(row, protocol, own)


def modelled(data: Path, row: Row, protocol: Protocol) -> Server:
    """The engine of a row of the file."""
    return server_of(shapes_of(data, row.model, row.precision), row, protocol)


@cache
def law_of(
    gpu: str,
    shapes: ModelShapes,
    ranks: int,
    sizes: tuple[int, int, int],
    constants: EngineConstants,
) -> OperatorLaw:
    """The law of a server's passes: up to `sizes` rows, new tokens, and tokens of a request."""
    operators = replace(measured_operators(gpu), engine=constants)
    passes = passes_of(*sizes, shapes.window)
    seconds = operators.pass_seconds(shapes, passes, ranks)
    return law_of_passes(passes, seconds, KNOTS, window=shapes.window)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Means over the requests of a run, and whether its cache was full at some time."""

    ttft_s: float
    tpot_s: float
    full: bool


def predict(server: Server, constants: EngineConstants) -> Prediction:
    """Serve the row's requests."""
    row = server.row
    protocol = server.protocol
    most = row.prompt + row.output
    rows = 1 << max(row.concurrency - 1, 1).bit_length()
    sizes = (rows, protocol.tokens, most)
    law = law_of(row.gpu, server.shapes, row.ranks, sizes, constants).law
    if not protocol.ahead:
        law = replace(law, host_s=constants.host_s, host_row_s=constants.host_row_s)
    engine = PagedEngine(
        law,
        server.blocks,
        BLOCK_TOKENS,
        protocol.ahead,
        front_s=constants.front_s,
        front_row_s=constants.front_row_s,
        caches=server.caches,
    )
    flags = VllmPolicy(
        min(protocol.rows, protocol.tokens), protocol.tokens, prefix_caching=server.caches is None
    )
    memory = ZetaMemory(engine.capacity_tokens)
    trace = trace_of(row, protocol)
    world = World(unit_step(), memory, 1, most, paged=engine, concurrency=row.concurrency)
    result = simulate(trace, flags, world)
    found = latencies(result.served)
    full = result.counters["peak_memory_percent"] > 97.0
    return Prediction(float(found["ttft"].mean()), float(found["tpot"].mean()), full)


# ---- constants ----

TTFT_WEIGHT = 0.5  # of a residual: repeats of TTFT differ by several times those of TPOT
# Where the search begins. Constants that rows do not tell stay near it: one that is e times as
# large counts as much as a row that is 10 % off.
START = EngineConstants(
    kernel_s=3.4e-6,
    pass_s=1e-4,
    reduce_s=5e-6,
    sustained=0.9,
    routed=0.9,
    routed_mxfp4=0.9,
    speed_mxfp4=1.0,
    reduce_speed=1.0,
    launch_s=1.5e-4,
    host_s=5e-4,
    host_row_s=4e-5,
    front_s=0.015,
    front_row_s=1e-4,
)


def calibrate(data: Path, rows: Sequence[Row]) -> Constants:
    """The constants of each family. Only H100s ran engines that do not plan ahead, so the others
    have their host. Models in mxfp4 set the constant of their own kernels, and no other.
    """
    names = [each.name for each in fields(EngineConstants) if each.name not in MXFP4]
    others = [row for row in rows if row.model not in IN_MXFP4]
    of = {name: [row for row in others if family_of(row.gpu) == name] for name in FAMILIES}
    found = {"h100": fit_constants(data, of["h100"], START, names)}
    host = {"host_s": found["h100"].host_s, "host_row_s": found["h100"].host_row_s}
    free = [name for name in names if name not in host]
    for name in FAMILIES[1:]:
        found[name] = fit_constants(data, of[name], replace(START, **host), free)
    return calibrate_mxfp4(data, rows, found)


def calibrate_mxfp4(data: Path, rows: Sequence[Row], constants: Constants) -> Constants:
    """`constants` with those of kernels for experts in mxfp4."""
    found = {}
    for name, known in constants.items():
        own = [row for row in rows if row.model in IN_MXFP4 and family_of(row.gpu) == name]
        start = replace(known, **{one: getattr(START, one) for one in MXFP4})
        found[name] = fit_constants(data, own, start, MXFP4)
    return found


MXFP4 = ("routed_mxfp4", "speed_mxfp4")  # constants of kernels for experts in mxfp4


def fit_constants(
    data: Path, rows: Sequence[Row], start: EngineConstants, names: Sequence[str]
) -> EngineConstants:
    """The constants `names`, others as at the `start`, with the least logarithms of predicted over
    measured, TPOT and TTFT, each model on each GPU weighing alike; a residual beyond 10 % counts
    less than its square. TTFT counts where the source says its protocol.
    """
    rows = [row for row in rows if row.model not in UNEXPLAINED]
    servers = [modelled(data, row, protocol_of(row)) for row in rows]
    groups = Counter((row.gpu, row.model) for row in rows)
    weight = np.array([groups[row.gpu, row.model] ** -0.5 for row in rows])
    first = np.array([getattr(start, name) for name in names])

    said = np.array([TTFT_WEIGHT * server.protocol.said for server in servers])
    usual = float(np.median(weight))

    def constants_at(logs: Floats) -> EngineConstants:
        values = [float(f"{value:.4g}") for value in np.exp(logs) * first]
        return replace(start, **dict(zip(names, values, strict=True)))

    def residual(shifted: Floats) -> Floats:
        logs = shifted - 1.0
        constants = constants_at(logs)
        found = [predict(server, constants) for server in servers]
        law_of.cache_clear()
        tpot = np.log([one.tpot_s / row.tpot_s for one, row in zip(found, rows, strict=True)])
        ttft = np.log([one.ttft_s / row.ttft_s for one, row in zip(found, rows, strict=True)])
        return np.concatenate([weight * tpot, weight * said * ttft, ROW_OFF * usual * logs])

    found = least_squares(
        residual,
        np.ones(len(names)),  # of 0 no step is a share
        loss="soft_l1",
        f_scale=ROW_OFF * usual,
        diff_step=0.05,
        max_nfev=MOST_STEPS,
    )
    return constants_at(found.x - 1.0)


ROW_OFF = 0.1
MOST_STEPS = 15
FAMILIES = ("h100", "h200", "blackwell")
Constants = dict[str, EngineConstants]  # by family


def shipped_constants() -> Constants:
    """The constants that ship."""
    return {name: engine_constants(name) for name in FAMILIES}


# ---- comparison ----


@dataclass(frozen=True, slots=True)
class Compared:
    """A row with its predictions; `peer`: seconds of TTFT and TPOT, or why there are none."""

    row: Row
    ours: Prediction
    peer: tuple[float, float] | str

    def errors(self) -> tuple[float, float]:
        """Of TPOT and TTFT, signed, in percent."""
        row = self.row
        return percent(self.ours.tpot_s, row.tpot_s), percent(self.ours.ttft_s, row.ttft_s)

    def peer_errors(self) -> tuple[float, float] | None:
        """The same of the peer; None: it has no answer."""
        if isinstance(self.peer, str):
            return None
        ttft_s, tpot_s = self.peer
        return percent(tpot_s, self.row.tpot_s), percent(ttft_s, self.row.ttft_s)


def percent(predicted: float, measured: float) -> float:
    """The error of a prediction, in percent."""
    return 100.0 * (predicted / measured - 1.0)


def compare(
    data: Path, rows: Sequence[Row], constants: Constants, peer: Mapping[str, Any]
) -> list[Compared]:
    """Predict the rows."""
    found = []
    for row in rows:
        server = modelled(data, row, protocol_of(row))
        ours = predict(server, constants[family_of(row.gpu)])
        found.append(Compared(row, ours, answer_of(peer, row)))
    return found


def answer_of(peer: Mapping[str, Any], row: Row) -> tuple[float, float] | str:
    """What a peer says of a row: seconds of TTFT and TPOT, or why not."""
    given = peer.get(row.name, "not asked")
    return given if isinstance(given, str) else (MS * given[0], MS * given[1])


def median_error(group: Sequence[Compared], kind: int) -> float:
    """The median size of the errors of TPOT (0) or TTFT (1)."""
    return round(float(np.median([abs(one.errors()[kind]) for one in group])), 1)


@dataclass(frozen=True)
class Board:
    """All that was found: rows read, those that are not modelled by reason, those that the
    constants were set on, and the judged ones with their predictions.
    """

    rows: list[Row]
    reasons: Counter[str]
    tenth: list[Row]
    judged: list[Compared]
    peer_version: str


def read_peer(path: Path | None) -> dict[str, Any]:
    """What the peer said; None: it was not asked."""
    if path is None:
        return {}
    if not path.exists():
        raise SystemExit(f"{path}: it is missing; benchmarks.public.silicon_peer writes it")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def board_of(data: Path, constants: Constants, peer: Mapping[str, Any]) -> Board:
    """Read and predict all rows."""
    rows = read_rows(data)
    reasons = Counter(reason for row in rows if (reason := not_modelled(row)))
    known = [row for row in rows if not not_modelled(row)]
    drawn = tenth_of([row for row in known if not row.misread])
    tenth = [row for row in known if row.setting in drawn]
    rest = [row for row in known if row.setting not in drawn]
    judged = compare(data, rest, constants, peer.get("rows", {}))
    return Board(rows, reasons, tenth, judged, peer.get("version", ""))


def write_constants(constants: Constants, board: Board) -> None:
    """Replace the constants that ship, and beside them the errors of TPOT and TTFT of servers with
    a protocol that is said: of the others, more than the laws may be wrong.
    """
    content = json.loads(TABLE.read_text(encoding="utf-8"))
    content["engine"] = {
        "constants": {name: asdict(one) for name, one in constants.items()},
        "source": f"{len(board.tenth)} rows of systems/silicon_sample.csv, vLLM 0.10 to 0.19",
    }
    for kind, k in (("decode", 0), ("prompt", 1)):
        said = [one for one in board.judged if protocol_of(one.row).said]
        off = np.abs([one.errors()[k] for one in said])
        median, p95 = np.percentile(off, [50, 95])
        content["errors"][kind] = {
            "median_percent": round(float(median), 1),
            "p95_percent": round(float(p95), 1),
            "worst_percent": round(float(off.max()), 1),
            "points": len(off),
        }
    TABLE.write_text(flat_json(content), encoding="utf-8")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="aiconfigurator")
    parser.add_argument("--calibrate", action="store_true", help="set the constants anew")
    parser.add_argument("--write", action="store_true", help="replace the constants that ship")
    options = parser.parse_args()
    constants = shipped_constants()
    if options.calibrate:
        rows = [row for row in read_rows(options.data) if not not_modelled(row)]
        drawn = tenth_of([row for row in rows if not row.misread])
        constants = calibrate(options.data, [row for row in rows if row.setting in drawn])
        print(json.dumps({name: asdict(one) for name, one in constants.items()}))
    board = board_of(options.data, constants, {})
    tpot, ttft = (median_error(board.judged, kind) for kind in (0, 1))
    print(f"{len(board.judged)} judged: medians of errors {tpot} % (TPOT), {ttft} % (TTFT)")
    if options.write:
        write_constants(constants, board)


if __name__ == "__main__":
    main()
