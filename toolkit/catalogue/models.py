"""Sizes of a model, from the dict of its config.json alone: parameters, weights, KV cache.

The sizes are sums over the model's modules (`catalogue.weights`), laid out as its family has them
(`catalogue.families`). Nothing is loaded, and neither torch nor transformers is imported.
docs/results/vllm.md has the sums beside the sums of vLLM's own classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from toolkit.catalogue.families import FAMILIES, Family
from toolkit.catalogue.general import general_family, refuse_other
from toolkit.catalogue.layers import (
    STATES,
    TOKENS,
    Layer,
    experts_of,
    heads_of,
    integer_at,
    layers_of,
    text_config,
    window_of_config,
)
from toolkit.catalogue.quantization import Config, Scheme, scheme_of
from toolkit.catalogue.weights import OVERLAPS, Module, has_index, modules_of, ratios_of
from toolkit.errors import InputError, nearest

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CACHE_BYTES = DTYPE_BYTES | {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}  # without scales
SENSES = ("vision_config", "audio_config")  # parts of a model that sees or hears
NEEDED = ("hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
MEASURE = "measure a server that runs it"
# Sizes without which a part of a layer would count as nothing.
NEEDED_BY = {
    "linear": (
        *("linear_num_value_heads", "linear_value_head_dim", "linear_num_key_heads"),
        *("linear_key_head_dim", "linear_conv_kernel_dim"),
    ),
    "mamba": ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    "conv": ("conv_L_cache",),
    "latent": ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    "index": ("index_n_heads", "index_head_dim", "q_lora_rank"),
    "compressed": ("o_lora_rank", "o_groups", "hc_mult"),
}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The sizes of a model.

    Attributes:
        model_type: transformers' name of the architecture.
        family: the row of the table of families; 'general rule': no row has the type.
        dtype: of weights that are not quantized.
        cache_dtype: of the KV cache: the model's, or fp8 where the checkpoint asks for it.
        layers: hidden ones only: a head that predicts more tokens is not loaded.
        heads, kv_heads, head_dim: of attention, the most of all layers.
        inner: that tensor parallelism divides: of an expert, or of a dense part.
        vocab_size, context: tokens.
        experts, experts_per_token: of a layer with experts; 0 where there are none.
        modules: all weights of the text part; vLLM loads no other with --language-model-only.
        scheme: how they are quantized; None: not at all.
        special: what llmctl's laws and its model of a cache do not know (`Special`).
        kv_bytes_per_token: of all layers with attention, as if each cached every token.
        kv_formula: the same for readers.
        stored_bytes: of the checkpoint, by its index; 0: not known, or not needed.
        config: that the sizes follow from.
    """

    model_type: str
    family: str
    dtype: str
    cache_dtype: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab_size: int
    context: int
    experts: int
    experts_per_token: int
    modules: tuple[Module, ...]
    scheme: Scheme | None
    special: Special
    kv_bytes_per_token: int
    kv_formula: str
    stored_bytes: int = 0
    config: Config = field(default_factory=dict, repr=False, compare=False)

    @property
    def parameters(self) -> int:
        """All weights."""
        return sum(module.parameters for module in self.modules)

    @property
    def active_parameters(self) -> int:
        """The weights that one token is multiplied with, and the tables that it is looked up in."""
        return round(sum(module.parameters * module.share for module in self.modules))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole model's weights."""
        return round(sum(map(self._bytes, self.modules)))

    def weight_bytes_on(self, gpus: int) -> int:
        """Return the bytes on each GPU of a group of `gpus`: what is replicated is there whole."""
        total = 0.0
        for module in self.modules:
            total += self._bytes(module) / min(gpus, module.most_gpus or gpus)
        return round(total)

    def cache_bytes_on(self, gpus: int) -> float:
        """Bytes of a token's KV cache on each GPU of a group."""
        return self.kv_bytes_per_token / cache_parts(self.config, gpus)

    def _bytes(self, module: Module) -> float:
        scheme = self.scheme
        each = scheme.bytes_of(module.name) if scheme and module.quantizable else None
        return module.parameters * (DTYPE_BYTES[self.dtype] if each is None else each)


@dataclass(frozen=True, slots=True)
class Special:
    """What a config has beyond dense layers with full attention.

    Attributes:
        experts: of a layer; 0: none.
        windows: layers with a sliding window, and the window; (0, 0): none.
        chunk: tokens of attention in chunks; 0: none.
        latent: values per token and layer of multi-head latent attention (MLA); 0: none.
        states: what holds a state per request, such as 'linear attention'; '': nothing.
        unknown: a kind of layer that is not known; '': all are.
        sparse: what sparse attention reads, in words; '': there is none.
        best: tokens that attention reads at most, the best by an index of all (DeepSeek sparse
            attention, over MLA's cache); 0: all.
    """

    experts: int = 0
    windows: tuple[int, int] = (0, 0)
    chunk: int = 0
    latent: int = 0
    states: str = ""
    unknown: str = ""
    sparse: str = ""
    best: int = 0


def special_of(config: Config, longest: int = 0) -> Special:
    """Return what is special about a config. Keys that are absent count as not there.

    Raises `InputError` for more layers than any model has.

    Args:
        longest: tokens of the longest request (`max_model_len`); 0: the config's context. A window
            that is no shorter never slides, and is none; nor does a chunk that is no shorter end.
    """
    config = text_config(config)
    layers = layers_of(config)
    mixers = [layer.mixer for layer in layers]
    latent = integer_at(config, "kv_lora_rank")
    if latent:
        latent += integer_at(config, "qk_rope_head_dim")
    window = window_of_config(config)
    longest = longest or integer_at(config, "max_position_embeddings")
    sliding = mixers.count("window") if window < longest or not longest else 0
    chunk = integer_at(config, "attention_chunk_size")
    ends = "chunk" in mixers and (chunk < longest or not longest)
    others = [*mixers, *(layer.feed for layer in layers)]
    unknown = [one for one in others if one not in (*KNOWN_PARTS, *STATES, *TOKENS)]
    return Special(
        experts_of(config)[0],
        (sliding, window) if sliding else (0, 0),
        chunk if ends else 0,
        latent,
        next((STATES[one] for one in mixers if one in STATES), ""),
        unknown[0].replace("_", " ") if unknown else "",
        _sparse(config),
        integer_at(config, "index_topk") if latent and not config.get("compress_ratios") else 0,
    )


# Sizes of the modules of multi-head latent attention that were measured: DeepSeek V3's; of those
# with sparse attention GLM 5's, too.
LATENT = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
MEASURED_LATENT = ((512, 64, 128, 128),)
MEASURED_SPARSE = (*MEASURED_LATENT, (512, 64, 192, 256))
MEASURED_STATES = "linear"  # of `STATES`: gated delta nets
ATTENTION_OUT = "model.layers.0.self_attn.o_proj"
KNOWN_PARTS = ("", "dense", "experts", "both")


def _sparse(config: Config) -> str:
    """Return what sparse attention reads, in words; '': there is none."""
    if best := integer_at(config, "index_topk"):
        return f"sparse attention to {best:,} tokens"
    given = config.get("sparse_attention_config")  # MiniMax M3
    if isinstance(given, Mapping) and given.get("use_sparse_attention", True):
        blocks = integer_at(given, "sparse_topk_blocks")
        return f"sparse attention to {blocks:,} blocks of {integer_at(given, 'sparse_block_size')}"
    return ""


def cache_parts(config: Config, gpus: int) -> int:
    """Return among how many GPUs of a group a token's cache is divided. MLA's is whole on each GPU,
    and KV heads are repeated where there are fewer heads than GPUs.
    """
    config = text_config(config)
    if special_of(config).latent:
        return 1
    fewest = min((layer.kv_heads for layer in layers_of(config) if layer.kv_heads), default=0)
    return min(gpus, fewest or gpus)


def not_computed(config: Config, longest: int, scheme: Scheme | None) -> list[str]:
    """Return what an analytic profile for vLLM does not know about a model on any GPU, in words.

    Args:
        longest: see `special_of`.
        scheme: of its weights; None: 16 or 32 bits.
    """
    special = special_of(config, longest)
    text = text_config(config)
    reasons = []
    measured = MEASURED_SPARSE if special.best else MEASURED_LATENT
    if special.latent and tuple(integer_at(text, key) for key in LATENT) not in measured:
        sizes = ", ".join(f"{key} {integer_at(text, key)}" for key in LATENT)
        reasons.append(f"MLA (multi-head latent attention) with {sizes}")
    if special.best and _index(text, 1)[0] < len(layers_of(text)):
        reasons.append(f"{special.sparse} by an index that layers share")
    states = dict.fromkeys(one.mixer for one in layers_of(text) if one.mixer in STATES)
    others = [STATES[one] for one in states if one != MEASURED_STATES]
    sparse = "" if special.best else special.sparse
    reasons += [one for one in (sparse, *others, special.unknown) if one]
    family = FAMILIES.get(str(text.get("model_type")))
    if family and family.laws:
        reasons.append(family.laws)
    # Of integers, those of experts alone were measured (Kimi K2.5).
    of_experts = special.experts > 0 and scheme is not None and scheme.keeps(ATTENTION_OUT)
    if scheme and (scheme.name in ("int8", "mixed") or (scheme.name == "int4" and not of_experts)):
        reasons.append(f"quantized weights ({scheme.name})")
    return reasons


def kv_bytes_per_token(
    config: Config, dtype: str, *, packed: bool = True
) -> tuple[int, str] | None:
    """Return the bytes that every token adds to a full cache of all layers with attention, and the
    formula; None: a size is missing, or `dtype` keeps scales, too.

    Args:
        packed: see `Gpu.packs_sparse`.
    """
    if dtype not in CACHE_BYTES:
        return None
    config = text_config(config)
    layers = [layer for layer in layers_of(config) if layer.mixer in TOKENS]
    element = CACHE_BYTES[dtype]
    latent = special_of(config).latent
    if not layers or (not integer_at(config, "num_hidden_layers") and len(layers) == 1):
        return None
    if ratios := ratios_of(config)[: len(layers)]:
        total = -(-sum(map(_compressed_page, ratios)) // COMPRESSED_BLOCK)
        return total, f"{len(layers)} layers of compressed caches with an index, as vLLM pads them"
    if latent and packed and element == 1 and integer_at(config, "index_topk"):
        rank = integer_at(config, "kv_lora_rank")  # as FlashMLA keeps it: scales, and 16 bits
        latent += rank // 128 * 4 + integer_at(config, "qk_rope_head_dim")
    counts: dict[tuple[int, int, int], int] = {}
    for layer in layers:
        shape = (1, latent, 0) if latent else (layer.kv_heads, layer.key_dim, layer.value_dim)
        counts[shape] = counts.get(shape, 0) + 1
    if not latent and not all(all(shape) for shape in counts):
        return None
    total = sum(n * heads * (key + value) for (heads, key, value), n in counts.items()) * element
    words = " + ".join(_formula(shape, n) for shape, n in counts.items())
    words = f"{words if len(counts) == 1 else f'({words})'} * {element} bytes"
    with_index, each = _index(config, element)
    if with_index:
        words += f", and {with_index} layers of an index * {each} bytes"
    return total + with_index * each, words


COMPRESSED_BLOCK = 256  # tokens of a block of compressed caches (DeepSeek V4)
COMPRESSED_ENTRY = (584, 132)  # bytes of some tokens' latent values, and in the index
COMPRESSED_STEP = 576  # bytes; vLLM pads a block's up to a multiple


def _compressed_page(ratio: int) -> int:
    """Return the bytes of a block of a layer that has several tokens in an entry; windows, which do
    not grow with tokens, are left out.
    """
    entries = COMPRESSED_ENTRY if ratio == OVERLAPS else COMPRESSED_ENTRY[:1]
    count = COMPRESSED_BLOCK // ratio if ratio else 0
    return sum(-(-count * one // COMPRESSED_STEP) * COMPRESSED_STEP for one in entries)


def _formula(shape: tuple[int, int, int], layers: int) -> str:
    heads, key, value = shape
    if not value:
        return f"{layers} layers * {key} of MLA"
    if key == value:
        return f"2 * {layers} layers * {heads} KV heads * {key}"
    return f"{layers} layers * {heads} KV heads * ({key} + {value})"


def _index(config: Config, element: int) -> tuple[int, int]:
    """Return the layers that have an index of sparse attention, and the bytes of a token in each:
    in fp8 with a scale of 32 bits (DeepSeek V3.2), or in the cache's dtype (MiniMax M3).
    """
    layers = range(len(layers_of(config)))
    if integer_at(config, "index_topk"):
        count = sum(has_index(config, number) for number in layers)
        return count, integer_at(config, "index_head_dim") + 4
    sparse = config.get("sparse_attention_config")
    if isinstance(sparse, Mapping):
        listed = sparse.get("sparse_attention_freq")
        count = sum(map(bool, listed[: len(layers)])) if isinstance(listed, list) else len(layers)
        return count, integer_at(cast(Config, sparse), "sparse_index_dim") * element
    return 0, 0


def facts_of(config: Config, quantization: str = "", stored_bytes: int = 0) -> ModelFacts:
    """Return the sizes of a model: of its text part, where it also sees or hears.

    Args:
        config: the content of config.json.
        quantization: what vLLM shall quantize the weights to as it loads them; '': nothing.
        stored_bytes: of all weights, by the index of the checkpoint; 0: there is none.

    Raises `InputError` for an architecture or a quantization that is not known, and for sizes that
    are missing.
    """
    whole = config
    config = text_config(whole)
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise InputError("the config has no model_type", "give transformers' config.json")
    scheme = scheme_of(config, quantization)
    special = special_of(config)
    if special.unknown:
        problem = f"the model has layers of kind '{special.unknown}': their sizes are not known"
        raise InputError(problem, MEASURE)
    family = FAMILIES.get(kind) or general_family(whole, stored_bytes)
    layers = layers_of(config)
    states = [one.mixer for one in layers if one.mixer in STATES]
    if other := next((one for one in states if one not in family.states), ""):
        problem = f"the model has {STATES[other]}: its weights and its states are not counted"
        raise InputError(problem, MEASURE)
    if special.sparse and not family.sparse:
        problem = f"the model has {special.sparse}: the weights of its index are not counted"
        raise InputError(problem, MEASURE)
    needed = _needed(config, family, layers, special)
    missing = [key for key in needed if not integer_at(config, key)]
    if missing:
        raise InputError(f"the config lacks {', '.join(missing)}", "give the whole config.json")
    dtype = str(config.get("torch_dtype", config.get("dtype")) or "bfloat16").removeprefix("torch.")
    if (dtype := dtype[:80]) not in DTYPE_BYTES:
        raise InputError(f"the config's dtype '{dtype}' is not known", nearest(dtype, DTYPE_BYTES))
    cache_dtype = (scheme.cache if scheme else "") or dtype
    found = kv_bytes_per_token(config, cache_dtype)
    if found is None:  # the keys that it needs are there
        raise InputError("the config gives no size of a KV head", "give head_dim")
    experts, chosen = experts_of(config)
    facts = ModelFacts(
        model_type=kind[:80],
        family=family.name,
        dtype=dtype,
        cache_dtype=cache_dtype,
        layers=len(layers),
        heads=heads_of(config)[0],
        kv_heads=max(layer.kv_heads for layer in layers),
        head_dim=max(layer.key_dim for layer in layers),
        inner=integer_at(config, family.expert_inner if experts else family.dense_inner),
        vocab_size=integer_at(config, "vocab_size"),
        context=integer_at(config, "max_position_embeddings"),
        experts=experts,
        experts_per_token=chosen,
        modules=tuple(_stored(module, scheme) for module in modules_of(config, family)),
        scheme=scheme,
        special=special,
        kv_bytes_per_token=found[0],
        kv_formula=found[1],
        stored_bytes=stored_bytes,
        config=config,
    )
    if stored_bytes and kind not in FAMILIES:
        refuse_other(kind[:80], facts.weight_bytes, stored_bytes)
    return facts


def weight_bytes_on(config: Config, quantization: str, weight_bytes: float, gpus: int) -> float:
    """Return the bytes of a model's weights on each GPU of a group. Norms, routers, and what leads
    to the latent values of MLA are whole on each; where the config does not tell, all is divided.

    Args:
        weight_bytes: of the whole model.
    """
    try:
        facts = facts_of(config, quantization, round(weight_bytes))
    except InputError:
        return weight_bytes / gpus
    return weight_bytes * facts.weight_bytes_on(gpus) / facts.weight_bytes


def _stored(module: Module, scheme: Scheme | None) -> Module:
    """The module as stored: not quantized where the scheme keeps its 16 bits, and the table of the
    output where the scheme takes it.
    """
    if scheme is None:
        return module
    takes = module.quantizable or (scheme.head and module.name == "lm_head")
    return replace(module, quantizable=takes and scheme.bytes_of(module.name) is not None)


def _needed(config: Config, family: Family, layers: Sequence[Layer], special: Special) -> list[str]:
    """Return the keys of sizes that the model's layers need."""
    needed = [*NEEDED]
    for mixer in dict.fromkeys(layer.mixer for layer in layers):
        needed += NEEDED_BY.get(mixer, ())
    if special.latent:
        needed += NEEDED_BY["latent"]
    if integer_at(config, "index_topk"):
        needed += NEEDED_BY["index"]
    if config.get("compress_ratios"):
        needed += NEEDED_BY["compressed"]
    feeds = {layer.feed for layer in layers if not layer.inner}
    if feeds & {"dense", "both"}:
        needed.append(family.dense_inner)
    if feeds & {"experts", "both"}:
        needed.append(family.expert_inner)
    return [*dict.fromkeys(needed)]
