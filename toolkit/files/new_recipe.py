"""`llmctl recipe new`: a recipe from a model's sizes and a GPU, every figure with its reason.

First which tensor parallelism fits, then the text.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap
from typing import cast

import yaml

from toolkit.catalogue.caches import row_bytes
from toolkit.catalogue.classes import HINT, TEXT_ONLY, of_recipe, refuse, senses_of
from toolkit.catalogue.gpus import Gpu
from toolkit.catalogue.layers import FULL, integer_at, layers_of, text_config
from toolkit.catalogue.models import (
    DTYPE_BYTES,
    SENSES,
    ModelFacts,
    facts_of,
    kv_bytes_per_token,
    not_computed,
)
from toolkit.catalogue.quantization import ONLINE, Config
from toolkit.errors import InputError
from toolkit.files.find_model import FoundModel
from toolkit.files.recipe import Recipe
from toolkit.files.shipped import load_recipe
from toolkit.units import GIB, size

SHARE = 0.9  # of a GPU's memory; vLLM's own default is larger, 0.92 in 0.28 to 0.33
SIZES = (1, 2, 4, 8, 16, 32, 64)  # of a group of GPUs that share a model
MOST_GPUS = 8  # of one machine, where --gpus is not given
# What vLLM 0.32 kept for activations and CUDA graphs with Llama-3.1-8B on an H200: 908,185 tokens
# of cache by its flags, 887,072 in its log, of 131,072 bytes each.
WORKSPACE_BYTES = 21_113 * 131_072
# Rows of max_model_len that should fit: with fewer, most requests wait. More GPUs are taken for
# it, where there are more.
GOOD_ROWS = 4
MODEL_LEN = 8192
LENGTH_STEP = 1024  # a limit that follows from a trace is a multiple of it
OUTPUT = 1024  # the limit of outputs without a trace
TARGETS = {"ttft_p99_s": 10.0, "mtpot_p99_s": 1.5}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (32, 128, 256, 512, 1024, 2048, 4096)
SLICES = (64, 128)
COLUMNS = 100
EXPERT_PARALLEL = "--enable-expert-parallel"
HEADS_OF_STATES = ("linear_num_key_heads", "linear_num_value_heads", "mamba_num_heads")
# Keys of config.json that a recipe repeats: what the byte counts are derived from.
KEPT = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("max_position_embeddings", "tie_word_embeddings", "attention_bias"),
    *("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "n_shared_experts", "first_k_dense_replace", "moe_layer_freq"),
    *("decoder_sparse_step", "mlp_only_layers", "experts_per_token"),
    *("sliding_window_pattern", "use_sliding_window", "max_window_layers", "sliding_window_size"),
    *("attention_chunk_size", "no_rope_layers", "hybrid_layer_pattern", "attention_head_dim"),
    *("full_attention_interval", "linear_num_value_heads", "linear_num_key_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("index_topk", "index_n_heads", "index_head_dim", "indexer_types", "mlp_layer_types"),
    *("sparse_attention_config", "dense_intermediate_size", "shared_intermediate_size"),
    *("hybrid_override_pattern", "layers_block_type", "mamba_num_heads", "mamba_head_dim"),
    *("n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias", "use_bias", "mamba_ssm_dtype"),
    *("mamba_ssm_cache_dtype", "moe_latent_size", "moe_shared_expert_intermediate_size"),
    *("shared_expert_intermediate_size", "interleave_moe_layer_step", "intermediate_size_mlp"),
    *("global_head_dim", "num_global_key_value_heads", "enable_moe_block", "top_k_experts"),
    *("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"),
    *("attention_other_setting", "num_attention_groups", "moe_layers_enum", "moe_num_experts"),
    *("moe_top_k", "share_expert_dim", "use_moe_router_bias", "block_configs", "mlp_bias"),
    *("conv_L_cache", "conv_dim", "conv_bias", "block_auto_adjust_ff_dim", "num_dense_layers"),
    *("block_ffn_dim_multiplier", "block_multiple_of", "use_expert_bias", "use_qk_norm", "qk_norm"),
    *("use_qkv_bias", "num_shared_experts", "expert_hidden_dim", "use_routing_bias"),
    *("moe_router_enable_expert_bias", "num_experts_per_token", "attn_type_list"),
    "quantization_config",
)
BLOCK_KEYS = {
    "attention": ("n_heads_in_group", "no_op", "replace_with_linear", "window_length"),
    "ffn": ("ffn_mult", "intermediate_size", "no_op", "replace_with_linear"),
}
LONGEST = 1 << 16  # characters of a key's value: a recipe is a page or two of text
SHORT_TEXT = 1000  # characters of another value in quantization_config that is written
LONG = 8  # items of a list in quantization_config that is written as it is


@dataclass(frozen=True, slots=True)
class TraceLengths:
    """The lengths of a trace, in tokens.

    Attributes:
        name: its file, or its name; a recipe repeats it.
        totals: prompt and output of each request, in rising order.
        longest_output: of all requests.
    """

    name: str
    totals: Sequence[int]
    longest_output: int

    @property
    def file(self) -> str:
        """Its name without a folder."""
        return self.name.rpartition("/")[2]

    @property
    def longest(self) -> int:
        """The longest request: prompt and output."""
        return self.totals[-1]

    def longer_than(self, tokens: int) -> int:
        """How many requests are longer."""
        return len(self.totals) - bisect_right(self.totals, tokens)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What a server that exists sets, which a recipe of it repeats. Keys are the recipe's.

    Attributes:
        origin: what the server was read from, for readers.
        model, engine, vllm, policy, serve: values of the sections `model`, `engine`, `engine.vllm`,
            `policy.parameters` and `serve`, each with the flag that sets it.
        args: further flags.
        variables: of the environment.
        share: `gpu_memory_utilization`.
        cache_dtype: of the KV cache; '': the checkpoint's.
    """

    origin: str
    model: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    engine: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    vllm: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    policy: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    serve: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    args: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    share: float = SHARE
    cache_dtype: str = ""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asks for. None: llmctl chooses.

    Attributes:
        gpus: at hand, for one group or several replicas.
        tensor_parallel: GPUs per group.
        quantization: '': as the checkpoint is.
        targets: of latency, in seconds.
        traffic: what the limits of lengths follow from.
        expert_parallel: each GPU of a group holds whole experts, not a part of each.
        server: what a server that exists sets; None: the recipe is of a new one.
    """

    gpu: Gpu
    gpus: int | None = None
    tensor_parallel: int | None = None
    quantization: str = ""
    max_model_len: int | None = None
    targets: Mapping[str, float] = field(default_factory=dict)
    traffic: TraceLengths | None = None
    expert_parallel: bool = False
    server: ServerSettings | None = None

    @property
    def share(self) -> float:
        """The part of a GPU's memory that vLLM takes."""
        return self.server.share if self.server else SHARE


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """What a group of GPUs has beside the weights.

    Attributes:
        gpus: of the group.
        weight_bytes: on each.
        budget_bytes: on each, for the KV cache and vLLM's workspace; below 0: too few.
        tokens: of KV cache in the group, if vLLM needed no workspace; as `llmctl doctor` counts.
        rows: of max_model_len that fit, with `WORKSPACE_BYTES` kept free.
    """

    gpus: int
    weight_bytes: int
    budget_bytes: int
    tokens: int
    rows: int


@dataclass(frozen=True, slots=True)
class NewRecipe:
    """A recipe's text, and what was decided for it."""

    text: str
    facts: ModelFacts
    room: GroupMemory
    workers: int
    notes: list[str]

    def recipe(self) -> Recipe:
        """Return the recipe that the text is. Raises `InputError` where it is none."""
        with TemporaryDirectory() as folder:
            file = Path(folder) / "recipe.yaml"
            file.write_text(self.text, encoding="utf-8")
            return load_recipe(file)


def room_on(
    facts: ModelFacts, gpu: Gpu, gpus: int, max_model_len: int, share: float = SHARE
) -> GroupMemory:
    """What `gpus` GPUs have beside the weights of a model, where vLLM takes a `share` of each."""
    weights = facts.weight_bytes_on(gpus)
    budget = int(gpu.memory_gib * GIB * share) - weights
    per_token = _token_bytes(facts, gpus, max_model_len)
    tokens = max(int(budget / per_token), 0)
    rows = max(int((budget - WORKSPACE_BYTES) / (per_token * max_model_len)), 0)
    return GroupMemory(gpus, weights, budget, tokens, rows)


def _token_bytes(facts: ModelFacts, gpus: int, longest: int) -> float:
    """Bytes of a token's cache on each GPU of a group; with several groups of caches, of a token of
    the longest request.
    """
    whole = row_bytes(facts.config, facts.cache_dtype, longest, gpus)
    return facts.cache_bytes_on(gpus) if whole is None else whole / longest


def new_recipe(found: FoundModel, wish: Wish) -> NewRecipe:
    """A recipe for a model on a GPU.

    Raises `InputError` for a model that llmctl does not model, and for one that does not fit, with
    what would.
    """
    context = integer_at(text_config(found.config), "max_position_embeddings")
    longest = wish.max_model_len or min(context, MODEL_LEN)
    flags: Sequence[str] = [TEXT_ONLY] if senses_of(found.config) else []
    if wish.server is not None:
        flags = wish.server.args
        longest = wish.max_model_len or context
    refuse(found.name, of_recipe(found.config, flags, longest))
    facts = facts_of(found.config, wish.quantization, found.stored_bytes)
    named = wish.server.cache_dtype if wish.server is not None else ""
    facts = _with_cache(facts, named or facts.cache_dtype, wish.gpu)
    longest = wish.max_model_len or _length(facts, wish)
    refuse(found.name, of_recipe(found.config, flags, longest))
    if longest > facts.context:
        problem = f"--max-model-len {longest}: the model's limit is {facts.context:,}"
        raise InputError(problem, "give a smaller one")
    room = _choose(found, facts, wish, longest)
    workers = max((wish.gpus or room.gpus) // room.gpus, 1)
    notes = _notes(facts, wish, room, workers, longest)
    return NewRecipe(_text(found, facts, wish, room, workers, longest), facts, room, workers, notes)


def _with_cache(facts: ModelFacts, dtype: str, gpu: Gpu) -> ModelFacts:
    """Return the sizes with a KV cache of a dtype on a GPU."""
    found = kv_bytes_per_token(facts.config, dtype, packed=gpu.packs_sparse)
    if found is None:
        raise InputError(f"--kv-cache-dtype {dtype}: its bytes are not counted", HINT)
    return replace(facts, cache_dtype=dtype, kv_bytes_per_token=found[0], kv_formula=found[1])


def _length(facts: ModelFacts, wish: Wish) -> int:
    """The longest prompt + output of a recipe: what the trace needs, and `MODEL_LEN` at least; at
    most the model's limit.
    """
    traffic = wish.traffic
    if wish.server is not None:  # vLLM's own default
        return facts.context
    if traffic is None:
        return min(facts.context, MODEL_LEN)
    stepped = -(-traffic.longest // LENGTH_STEP) * LENGTH_STEP
    return min(facts.context, max(MODEL_LEN, stepped))


def parallel_problem(facts: ModelFacts, gpus: int, *, whole_experts: bool = False) -> str:
    """Return why a model cannot be divided among this number of GPUs; '': it can. KV heads are
    repeated where there are more GPUs than heads.
    """
    layers = layers_of(facts.config)
    for heads, kv_heads in dict.fromkeys((one.heads, one.kv_heads) for one in layers if one.heads):
        if heads % gpus:
            return f"{gpus} does not divide the model's {heads} attention heads"
        if kv_heads % gpus and gpus % kv_heads:
            return f"{gpus} does not divide the model's {kv_heads} KV heads"
    for key in HEADS_OF_STATES if facts.special.states else ():
        if integer_at(facts.config, key) % gpus:
            number = integer_at(facts.config, key)
            return f"{gpus} does not divide the model's {number} heads of {facts.special.states}"
    if whole_experts and facts.experts:
        uneven = facts.experts % gpus
        return f"{gpus} does not divide the model's {facts.experts} experts" if uneven else ""
    block = facts.scheme.block if facts.scheme else 0
    inner = facts.inner
    if block and gpus > 1 and inner % (block * gpus):
        return f"{gpus} does not divide the {inner // block} blocks of {block} in its inner layers"
    return ""


def _choose(found: FoundModel, facts: ModelFacts, wish: Wish, longest: int) -> GroupMemory:
    """The smallest group of GPUs that holds the weights and `GOOD_ROWS` rows of the longest; where
    no group does, the group with the most rows. `InputError` where not even one row fits.
    """
    most = wish.gpus or MOST_GPUS
    wanted = wish.tensor_parallel
    whole = wish.expert_parallel
    if whole and not facts.experts:
        problem = f"--expert-parallel: {found.name} has no experts"
        raise InputError(problem, "leave it out")
    if wanted is not None:
        if problem := parallel_problem(facts, wanted, whole_experts=whole):
            able = [
                str(one) for one in SIZES if not parallel_problem(facts, one, whole_experts=whole)
            ]
            hint = f"one of {', '.join(able)}"
            raise InputError(f"--tensor-parallel-size {wanted}: {problem}", hint)
        if wish.gpus is not None and wanted > wish.gpus:
            problem = f"--tensor-parallel-size {wanted}: there are --gpus {wish.gpus}"
            raise InputError(problem, "give a smaller one, or more GPUs")
    sizes = [wanted] if wanted else [one for one in SIZES if one <= most]
    rooms = [
        room_on(facts, wish.gpu, one, longest, wish.share)
        for one in sizes
        if not parallel_problem(facts, one, whole_experts=whole)
    ]
    for room in rooms:
        if room.rows >= GOOD_ROWS:
            return room
    most_rows = max(rooms, key=lambda room: room.rows)
    if most_rows.rows:
        return most_rows
    raise _too_large(found, facts, wish, rooms[-1], longest)


def _too_large(
    found: FoundModel, facts: ModelFacts, wish: Wish, room: GroupMemory, longest: int
) -> InputError:
    """By how much a model does not fit, and what would."""
    gpu = wish.gpu
    whole = wish.expert_parallel
    per_gpu = _token_bytes(facts, room.gpus, longest)
    need = WORKSPACE_BYTES + longest * per_gpu
    short = size(need - room.budget_bytes)
    scheme = facts.scheme.name if facts.scheme else facts.dtype
    parts = f"{size(room.weight_bytes)} of {scheme} weights"
    parts += f" and {size(need)} for a row of {longest:,} tokens and workspace"
    problem = (
        f"{found.name} does not fit {room.gpus} x {gpu.name}: {parts} on each are {short} more "
        f"than {wish.share:g} of {gpu.memory_gib:g} GiB"
    )
    remedies = []
    for gpus in SIZES:
        if parallel_problem(facts, gpus, whole_experts=whole):
            continue
        if room_on(facts, gpu, gpus, longest, wish.share).rows:
            what = "--tensor-parallel-size" if wish.tensor_parallel else "--gpus"
            remedies.append(f"{what} {gpus}")
            break
    if not facts.scheme:
        smaller = facts_of(found.config, ONLINE[0], found.stored_bytes)
        if room_on(smaller, gpu, room.gpus, longest, wish.share).rows:
            remedies.append(f"--quantization {ONLINE[0]} on {room.gpus}")
    fewer = int((room.budget_bytes - WORKSPACE_BYTES) / per_gpu)
    if fewer >= 1024:
        remedies.append(f"--max-model-len {fewer // 1024 * 1024}")
    if not remedies:
        remedies = ["a GPU with more memory (llmctl recipe gpus), or a checkpoint with 4 bits"]
    return InputError(problem, f"what would fit: {', or '.join(remedies)}")


def _notes(
    facts: ModelFacts, wish: Wish, room: GroupMemory, workers: int, longest: int
) -> list[str]:
    """What a reader should know, a line each."""
    gpu = wish.gpu
    scheme = facts.scheme
    kind = scheme.name if scheme else facts.dtype
    active = ""
    if facts.experts:
        active = f", {facts.active_parameters / 1e9:.3g} of them per token"
    parameters = f"{facts.parameters / 1e9:.3g} billion parameters{active}"
    notes = [
        f"{parameters}, {size(facts.weight_bytes)} of {kind} weights",
        f"tensor parallelism {room.gpus}: on each {gpu.name} {size(room.weight_bytes)} of weights; "
        f"{size(room.budget_bytes)} are left",
        f"KV cache: at most {room.tokens:,} tokens, {room.tokens // longest:,} rows of "
        f"{longest:,}; vLLM's workspace comes off ({size(WORKSPACE_BYTES)} per GPU in one "
        "measurement)",
    ]
    if room.rows < GOOD_ROWS:
        notes.append(f"only {room.rows} rows beside the workspace: most requests will wait")
    if wish.gpus is not None and wish.gpus > workers * room.gpus:
        notes.append(f"{wish.gpus - workers * room.gpus} of {wish.gpus} GPUs are left over")
    if scheme and scheme.name == "fp8" and "fp8" not in gpu.tflops:
        notes.append(f"{gpu.name} has no fp8 arithmetic: the weights are smaller, not the sums")
    reasons = not_computed(facts.config, longest, scheme)
    if reasons:
        notes.append(f"measure it: --analytic refuses {', '.join(reasons)}")
    elif not gpu.measured:
        notes.append(f"measure it: operators of {gpu.name} were not measured")
    if wish.traffic is not None and (longer := wish.traffic.longer_than(longest)):
        count = f"{longer:,} of {len(wish.traffic.totals):,} requests of {wish.traffic.file}"
        notes.append(f"{count} are left out: longer than max_model_len, {longest:,}")
    if gpu.note:
        notes.append(f"{gpu.name}: {gpu.note}")
    command = "tune" if gpu.measured and not reasons else "profile"
    notes.append(f"next, with this text in recipe.yaml: llmctl {command} recipe.yaml")
    return notes


def _text(
    found: FoundModel,
    facts: ModelFacts,
    wish: Wish,
    room: GroupMemory,
    workers: int,
    longest: int,
) -> str:
    gpu = wish.gpu
    scheme = facts.scheme
    kind = scheme.name if scheme else ""
    parts = [found.name, gpu.name, kind, f"tp{room.gpus}" if room.gpus > 1 else ""]
    name = re.sub(r"[^a-z0-9._-]+", "-", "-".join(filter(None, parts)).lower()).strip("-._")
    among = f"{room.gpus} x {gpu.name}" if room.gpus > 1 else f"one {gpu.name}"
    weights = f" with {kind} weights" if kind else ""
    about = f"{found.name}{weights} on {among}, engine vllm."
    server = wish.server
    made = "Made by `llmctl recipe new`." if server is None else f"Made from {server.origin}."
    lines = [
        "# yaml-language-server: $schema=recipe.schema.json",
        *_comment(f"{made} {found.origin[0].upper()}{found.origin[1:]}."),
        "schema_version: 1",
        f"name: {_quoted(name[:64])}",
        f"description: {_quoted(about)}",
        "",
        *_model_lines(found, facts, wish, longest),
        "",
        *_hardware_lines(gpu, room.gpus),
        "",
        *_engine_lines(found, facts, wish, room),
        "",
    ]
    if workers > 1:
        lines += _line(f"workers: {workers}", f"replicas of {room.gpus} GPUs each, of {wish.gpus}")
    else:
        lines.append("workers: 1")
    lines += ["", *_profile_lines(longest), "", *_target_lines(wish), ""]
    lines += _policy_lines(wish, longest)
    lines += _traffic_lines(wish, longest)
    return "\n".join(lines) + "\n"


def _line(pair: str, reason: str) -> list[str]:
    """A key and its value with the reason behind them, or above them where that is too long."""
    if reason.isprintable() and len(pair) + len(reason) + 4 <= COLUMNS:
        return [f"{pair}  # {reason}"]
    indent = len(pair) - len(pair.lstrip())
    return [*_comment(reason, indent), pair]


def _comment(text: str, indent: int = 0) -> list[str]:
    start = f"{' ' * indent}# "
    # a folder's name may hold what YAML takes for the end of a line
    shown = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
    return wrap(
        shown,
        COLUMNS,
        initial_indent=start,
        subsequent_indent=start,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _model_lines(found: FoundModel, facts: ModelFacts, wish: Wish, longest: int) -> list[str]:
    lines = ["model:", f"  source: {_quoted(found.source)}"]
    if found.gated:
        lines += _comment("Gated: accept its licence on the hub and log in first.", 2)
    if found.revision:
        lines.append(f"  revision: {_quoted(found.revision)}")
    if not found.weights:
        lines += _line("  load_format: dummy", "random weights: that folder has none")
    lines += _line("  config:", "the published sizes, from which the byte counts below follow")
    kept = _kept(found.config, facts)
    lines += [f"    {key}: {_flow(value)}" for key, value in kept.items()]
    of_what = "of the KV cache, and of weights in 16 bits"
    if facts.cache_dtype != facts.dtype:
        of_what = "of weights in 16 bits"
    lines += _line(f"  dtype: {facts.dtype}", of_what)
    if wish.server is not None:
        lines += _pairs(wish.server.model, 2)
    if wish.quantization and "quantization_config" not in found.config:
        lines += _line(f"  quantization: {wish.quantization}", "vLLM does it while it loads")
    limit = f"of the model's {facts.context:,}: raise it for longer prompts and outputs"
    if wish.traffic is not None and not wish.max_model_len:
        limit = f"of the model's {facts.context:,}: {_longest_words(wish.traffic, longest)}"
    lines += _line(f"  max_model_len: {longest}", limit)
    lines += _line(f"  kv_bytes_per_token: {facts.kv_bytes_per_token}", _cache_reason(facts))
    return lines + _line(f"  weight_bytes: {facts.weight_bytes}", _weight_reason(facts))


def _longest_words(traffic: TraceLengths, longest: int) -> str:
    """How a limit of prompt + output compares with the trace, in words."""
    words = f"the longest request of {traffic.file} has {traffic.longest:,} tokens"
    if longer := traffic.longer_than(longest):
        words += f", and {longer:,} of {len(traffic.totals):,} requests are longer than this"
    return words


def _traffic_lines(wish: Wish, longest: int) -> list[str]:
    """The limit of outputs, and the trace to tune for."""
    traffic = wish.traffic
    if wish.server is not None:
        tune = ["", "tune:", f"  trace: {_quoted(traffic.name)}"] if traffic else []
        bound = _line(f"  max_new_tokens: {longest - 1}", "vLLM bounds them by max_model_len")
        return [*tune, "", "serve:", *_pairs(wish.server.serve, 2), *bound]
    if traffic is None:
        return ["", "serve:", f"  max_new_tokens: {min(OUTPUT, max(longest // 2, 1))}"]
    output = min(traffic.longest_output, max(longest - 1, 1))
    reason = f"the longest output of {traffic.file}"
    if output < traffic.longest_output:
        reason += f" has {traffic.longest_output:,}; max_model_len leaves this"
    return [
        "",
        *_line("tune:", "the traffic that `tune` and `capacity` take without --trace"),
        f"  trace: {_quoted(traffic.name)}",
        "",
        "serve:",
        *_line(f"  max_new_tokens: {output}", reason),
    ]


def _cache_reason(facts: ModelFacts) -> str:
    formula = facts.kv_formula
    return f"{formula}, whole on every GPU" if facts.special.latent else formula


def _weight_reason(facts: ModelFacts) -> str:
    parameters = f"{facts.parameters:,} parameters"
    if facts.experts:
        active = f"{facts.active_parameters:,} per token: {facts.experts_per_token}"
        parameters += f" ({active} of {facts.experts} experts)"
    if facts.scheme is None:
        return f"{parameters}, {DTYPE_BYTES[facts.dtype]} bytes each"
    return f"{parameters}; linear layers: {facts.scheme.words}"


def _hardware_lines(gpu: Gpu, gpus: int) -> list[str]:
    lines = [
        "hardware:",
        *_line(f"  gpu: {gpu.name}", f"{gpu.link}: {gpu.link_gb_s:g} GB/s from one to another"),
        *_line(f"  memory_gib: {gpu.memory_gib:g}", gpu.memory_source),
        *_line(f"  peak_tflops: {gpu.tflops['bf16']:g}", f"bf16, dense: {gpu.source}"),
        *_line(f"  bandwidth_gb_s: {gpu.bandwidth_gb_s:g}", gpu.source),
    ]
    if gpu.usd_per_hour is not None:
        price = f"{gpus * gpu.usd_per_hour:.2f}".rstrip("0").rstrip(".")
        each = f"{gpus} x {gpu.usd_per_hour:g}" if gpus > 1 else "one GPU"
        reason = f"an example, put yours here; {each}: {gpu.price_source}"
        lines += _line(f"  usd_per_hour: {price}", reason)
    return lines


def _engine_lines(found: FoundModel, facts: ModelFacts, wish: Wish, room: GroupMemory) -> list[str]:
    lines = ["engine:", "  name: vllm"]
    if room.gpus > 1:
        reason = f"the fewest GPUs that hold the weights and {GOOD_ROWS} of the longest rows"
        if room.rows < GOOD_ROWS:
            reason = "the most GPUs that are there"
        if wish.tensor_parallel:
            reason = "as asked for"
        lines += _line(f"  tensor_parallel_size: {room.gpus}", reason)
    left = f"leaves at most {room.tokens:,} tokens of KV cache beside the weights"
    lines += _line(f"  gpu_memory_utilization: {wish.share:g}", left)
    if wish.server is not None:
        return [*lines, *_server_lines(wish.server, facts)]
    args = []
    if wish.expert_parallel:
        args.append((EXPERT_PARALLEL, "each GPU holds whole experts"))
    if senses := senses_of(found.config):
        reason = f"text alone: inputs of {' and '.join(senses)} are not modelled, and vLLM leaves "
        args.append((TEXT_ONLY, f"{reason}their weights out"))
    own = _cache_lines(facts)
    for _, reason in args:
        own += _comment(reason, 4)
    if args:
        own.append(f"    args: [{', '.join(flag for flag, _ in args)}]")
    return [*lines, "  vllm:", *own] if own else lines


def _server_lines(server: ServerSettings, facts: ModelFacts) -> list[str]:
    """The rest of the section `engine` of a server that exists."""
    lines = _pairs(server.engine, 2)
    own = _pairs(server.vllm, 4)
    if not server.cache_dtype:
        own += _cache_lines(facts)
    if server.args:
        own.append(f"    args: {_flow(list(server.args))}")
    if server.variables:
        own += [
            "    env:",
            *(f"      {json.dumps(k)}: {json.dumps(v)}" for k, v in server.variables.items()),
        ]
    return [*lines, "  vllm:", *own] if own else lines


def _cache_lines(facts: ModelFacts) -> list[str]:
    """The dtype of a KV cache, where it is not the model's, or vLLM would choose it by the GPU."""
    line = f"    kv_cache_dtype: {facts.cache_dtype}"
    if facts.cache_dtype != facts.dtype:
        return _line(line, "the checkpoint asks for it")
    why = "with sparse attention vLLM chooses by the GPU where none is named"
    return _line(line, why) if facts.special.best else []


def _pairs(values: Mapping[str, tuple[object, str]], indent: int) -> list[str]:
    """Keys of a section with the flags that set them."""
    lines = []
    for key, (value, flag) in values.items():
        pair = f"{' ' * indent}{key}: {_flow(value)}"
        lines += _line(pair, flag) if flag else [pair]
    return lines


def _profile_lines(longest: int) -> list[str]:
    lengths = [length for length in LENGTHS if length <= longest // 2]
    if len(lengths) < 2:  # a law of lengths needs two
        lengths = [max(longest // 4, 1), max(longest // 2, 1)]
    slices = [steps for steps in SLICES if steps <= longest // 2] or [max(longest // 4, 1)]
    return [
        "profile:",
        *_comment("Corners of the grid that do not fit are recorded as failed.", 2),
        f"  batch_sizes: {list(BATCHES)}",
        f"  input_lengths: {lengths}",
        f"  cached_lengths: {lengths}",
        f"  memory_lengths: {lengths[-4:]}",
        f"  slice_tokens: {slices}",
        "  repeats: 5",
        "  warmups: 2",
    ]


def _target_lines(wish: Wish) -> list[str]:
    targets = wish.targets
    why = "as asked for"
    if not targets:
        targets = TARGETS
        why = "examples, put yours here: the targets of the Past-Future paper"
    return [*_line("sla:", why), *(f"  {key}: {seconds:g}" for key, seconds in targets.items())]


def _policy_lines(wish: Wish, longest: int) -> list[str]:
    given = wish.server.policy if wish.server else {}
    limits = _limits(wish.gpu, {key: value for key, (value, _) in given.items()}, longest)
    usual = {key: (value, "") for key, value in limits.items()}
    return [
        *_line("policy:", "the defaults of vLLM 0.32's server on this GPU"),
        "  name: vllm",
        "  parameters:",
        *_pairs({**usual, **given}, 4),
    ]


def _limits(gpu: Gpu, given: Mapping[str, object], longest: int) -> dict[str, int]:
    """Return vLLM's limits of a pass where no flag sets them, as its `EngineArgs` makes them: a
    prompt that is not cut fits in a pass, no pass has more than all rows together, and no more rows
    run than a pass has tokens.
    """
    rows, tokens = gpu.usual_limits
    given_rows, given_tokens = given.get("max_num_seqs"), given.get("max_num_batched_tokens")
    if given.get("chunked_prefill") is False:
        tokens = max(tokens, longest)
    tokens = min(int(str(given_rows or rows)) * longest, tokens)
    return {
        "max_num_seqs": min(rows, int(str(given_tokens or tokens))),
        "max_num_batched_tokens": tokens,
    }


def _kept(whole: Config, facts: ModelFacts) -> dict[str, object]:
    """The keys of a config that its sizes follow from, of the text part."""
    config = text_config(whole)
    kept = {key: config[key] for key in KEPT if config.get(key) is not None}
    if "sliding_window" in config:  # without the key, transformers gives some types a window
        kept["sliding_window"] = config["sliding_window"]
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and any(kind != FULL for kind in kinds):
        kept["layer_types"] = kinds
    if isinstance(blocks := config.get("block_configs"), list):
        kept["block_configs"] = [_short_block(block) for block in blocks]
    for key in SENSES:  # the refusal without its flag needs the kind alone
        if isinstance(part := whole.get(key), Mapping):
            kept[key] = {"model_type": part.get("model_type", "")}
    if senses_of(whole) == ["media"]:
        kept["architectures"] = whole["architectures"]
    given = kept.get("quantization_config")
    if isinstance(given, Mapping):
        kept["quantization_config"] = _shortened(cast(Config, given), config, facts)
    for key, value in kept.items():
        try:
            text = json.dumps(value, allow_nan=False)
        except ValueError:
            problem = f"the config's {key} is or has NaN or an infinity"
            raise InputError(problem, "give a finite number") from None
        if len(text) > LONGEST:
            problem = f"the config's {key} has {len(text):,} characters"
            raise InputError(problem, f"a recipe takes {LONGEST:,} of it")
    return kept


def _short_block(block: object) -> dict[str, object]:
    """A layer of Nemotron-NAS with what sizes depend on."""
    short: dict[str, object] = {}
    for part, keys in BLOCK_KEYS.items():
        given = block.get(part) if isinstance(block, Mapping) else None
        if isinstance(given, Mapping):
            short[part] = {key: given[key] for key in keys if given.get(key)}
    return short


def _shortened(given: Config, config: Config, facts: ModelFacts) -> dict[str, object]:
    """A quantization_config with long lists of modules as patterns, where they keep the same
    modules; a list that patterns do not tell stays as it is. What names a module each is left out.
    """
    short: dict[str, object] = {}
    for key, value in given.items():
        if isinstance(value, list) and len(value) > LONG:
            patterns = [*dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", str(one)) for one in value)]
            with_patterns = {**config, "quantization_config": {**given, key: patterns}}
            same = facts_of(with_patterns, "", facts.stored_bytes).modules == facts.modules
            short[key] = patterns if same else value
        elif len(json.dumps(value, default=str)) <= SHORT_TEXT:
            short[key] = value
    return short


def _flow(value: object) -> str:
    """A value on one line, as YAML that is also JSON."""
    return json.dumps(value) if not isinstance(value, str) else _quoted(value)


def _quoted(text: str) -> str:
    """Text for YAML: plain where it reads back as the same text."""
    plain = re.fullmatch(r"[A-Za-z][\w./-]*", text) and yaml.safe_load(text) == text
    return text if plain else json.dumps(text)
