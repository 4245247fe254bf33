"""Sizes of a model, from the dict of its config.json alone: parameters, weights, KV cache.

The sizes are sums over the model's modules, named as in its checkpoint, so that a quantization that
keeps some modules in 16 bits is counted as it is stored. Nothing is loaded, and neither torch nor
transformers is imported. docs/results/vllm.md has the sums beside those of vLLM's own classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from toolkit.catalogue.quantization import Config, Scheme, scheme_of
from toolkit.errors import InputError, nearest

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CACHE_BYTES = DTYPE_BYTES | {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}  # without scales
FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
WINDOW_PATTERNS = {  # where the config has no pattern: the last of so many layers is full
    "cohere2": 4,
    "gemma2": 2,
    "gemma3_text": 6,
}

# How the weights of a `model_type` are laid out. A type is listed only if `_modules` counts it.
DENSE = ("llama", "mistral", "phi3", "qwen2", "qwen3")
EXPERTS = ("deepseek_v2", "deepseek_v3", "gpt_oss", "kimi_k2", "minimax_m2", "mixtral", "qwen3_moe")
KNOWN_TYPES = (*DENSE, *EXPERTS)
BY_HAND = (
    "write its recipe by hand, with model.kv_bytes_per_token and model.weight_bytes (docs/"
    f"reference/recipe.md), and measure it: llmctl profile; known are {', '.join(KNOWN_TYPES)}"
)
NEEDED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("vocab_size", "max_position_embeddings"),
)
MOST_LAYERS = 1024  # the deepest published model has some 126
MOST = {"num_hidden_layers": MOST_LAYERS}
MOST_ITEMS = 1 << 31  # of any other size
BY_LAYER = ("layer_types", "mlp_only_layers", "compress_ratios")  # lists of one value for each
SENSES = ("vision_config", "audio_config")  # parts of a model that sees or hears


@dataclass(frozen=True, slots=True)
class Module:
    """Weights that are stored together.

    Attributes:
        name: as in the checkpoint.
        parameters: how many.
        share: of them a token uses: 1, or chosen experts / all experts.
        quantizable: a linear layer; embeddings, norms, biases and routers keep their precision.
        replicated: each GPU of a group holds all of it.
    """

    name: str
    parameters: int
    share: float = 1.0
    quantizable: bool = True
    replicated: bool = False


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The sizes of a model.

    Attributes:
        model_type: transformers' name of the architecture.
        dtype: of weights that are not quantized, and of the KV cache.
        layers: of attention, hidden ones only: a head that predicts more tokens is not loaded.
        heads, kv_heads, head_dim: of attention.
        vocab_size, context: tokens.
        experts, experts_per_token: of a layer with experts; 0 where there are none.
        modules: all weights.
        scheme: how they are quantized; None: not at all.
        special: what llmctl's laws and its model of a cache do not know (`Special`).
        kv_bytes_per_token: of a whole model that caches every token in every layer.
        config: that the sizes follow from.
    """

    model_type: str
    dtype: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context: int
    experts: int
    experts_per_token: int
    modules: tuple[Module, ...]
    scheme: Scheme | None
    special: Special
    kv_bytes_per_token: int
    config: Config = field(repr=False, compare=False)

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
        """Bytes on each GPU of a group of so many: what is replicated is there whole."""
        total = 0.0
        for module in self.modules:
            total += self._bytes(module) / (1 if module.replicated else gpus)
        return round(total)

    def cache_bytes_on(self, gpus: int) -> float:
        """Bytes of a token's KV cache on each GPU of a group."""
        return self.kv_bytes_per_token / cache_parts(self.config, gpus)

    def _bytes(self, module: Module) -> float:
        scheme = self.scheme
        if scheme is None or not module.quantizable:
            return module.parameters * DTYPE_BYTES[self.dtype]
        return module.parameters * scheme.weight_bytes


@dataclass(frozen=True, slots=True)
class Special:
    """What a config has beyond dense layers with full attention.

    Attributes:
        experts: of a layer; 0: none.
        windows: layers with a sliding window, and the window; (0, 0): none.
        latent: values per token and layer of multi-head latent attention (MLA); 0: none.
        states: what holds a state per request, such as 'linear attention'; '': nothing.
    """

    experts: int = 0
    windows: tuple[int, int] = (0, 0)
    latent: int = 0
    states: str = ""


def special_of(config: Config, longest: int = 0) -> Special:
    """Return what is special about a config. Keys that are absent count as not there.

    Raises `InputError` for more layers than any model has.

    Args:
        longest: tokens of the longest request (`max_model_len`); 0: the config's context. A window
            that is no shorter never slides, and is none.
    """
    config = text_config(config)
    for key in BY_LAYER:
        listed = config.get(key)
        if isinstance(listed, list) and len(listed) > MOST_LAYERS:
            problem = f"the config's {key} has {len(listed):,} items"
            raise InputError(problem, f"llmctl reads models of at most {MOST_LAYERS:,} layers")
    latent = integer_at(config, "kv_lora_rank")
    if latent:
        latent += integer_at(config, "qk_rope_head_dim")
    return Special(experts_of(config)[0], _windows(config, longest), latent, _states(config))


def text_config(config: Config) -> Config:
    """The part about the language model, of a model that also sees or hears."""
    inner = config.get("text_config")
    return cast(Config, inner) if isinstance(inner, Mapping) else config


def cache_parts(config: Config, gpus: int) -> int:
    """Return among how many GPUs of a group a token's cache is divided. MLA's is whole on each GPU,
    and KV heads are repeated where there are fewer heads than GPUs.
    """
    if special_of(config).latent:
        return 1
    return min(gpus, heads_of(text_config(config))[1] or gpus)


def not_computed(config: Config, longest: int, scheme: str) -> list[str]:
    """Return what an analytic profile for vLLM does not know about a model, in words.

    Args:
        longest: see `special_of`.
        scheme: of its weights, such as 'fp8'; '': 16 or 32 bits.
    """
    special = special_of(config, longest)
    reasons = []
    if special.latent:
        reasons.append("MLA (multi-head latent attention)")
    if special.states:
        reasons.append(special.states)
    if scheme.startswith("int"):
        reasons.append(f"quantized weights ({scheme})")
    return reasons


def kv_bytes_per_token(config: Config, dtype: str) -> tuple[int, str] | None:
    """Bytes that every token adds to a full cache, and the formula; None: a size is missing, or
    `dtype` keeps scales, too.
    """
    if dtype not in CACHE_BYTES:
        return None
    config = text_config(config)
    layers = integer_at(config, "num_hidden_layers")
    element = CACHE_BYTES[dtype]
    latent = special_of(config).latent
    if layers and latent:
        return layers * latent * element, f"{layers} layers * {latent} of MLA * {element} bytes"
    _, kv_heads, head_dim = heads_of(config)
    if not layers or not kv_heads or not head_dim:
        return None
    formula = f"2 * {layers} layers * {kv_heads} KV heads * {head_dim} * {element} bytes"
    return 2 * layers * kv_heads * head_dim * element, formula


def facts_of(config: Config, quantization: str = "") -> ModelFacts:
    """The sizes of a model.

    Args:
        config: the content of config.json.
        quantization: what vLLM shall quantize the weights to as it loads them; '': nothing.

    Raises `InputError` for an architecture or a quantization that is not known, and for sizes that
    are missing.
    """
    whole = config
    config = text_config(whole)
    if senses := [key for key in SENSES if whole.get(key)]:
        problem = f"the model has a {senses[0]}: weights beside its text part are not counted"
        raise InputError(problem, "llmctl knows models of text")
    scheme = scheme_of({**config, **whole}, quantization)
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise InputError("the config has no model_type", "give transformers' config.json")
    kind = kind[:80]
    if kind not in KNOWN_TYPES:
        raise InputError(f"model_type '{kind}': its sizes are not known", BY_HAND)
    if states := _states(config):
        problem = f"the model has {states}: its weights and its states are not counted"
        raise InputError(problem, "measure a server that runs it")
    if integer_at(config, "index_topk"):
        problem = "the model has sparse attention: the weights of its index are not counted"
        raise InputError(problem, "measure a server that runs it")
    if missing := [key for key in NEEDED if not integer_at(config, key)]:
        raise InputError(f"the config lacks {', '.join(missing)}", "give the whole config.json")
    dtype = str(config.get("torch_dtype", config.get("dtype")) or "bfloat16").removeprefix("torch.")
    if (dtype := dtype[:80]) not in DTYPE_BYTES:
        raise InputError(f"the config's dtype '{dtype}' is not known", nearest(dtype, DTYPE_BYTES))
    found = kv_bytes_per_token(config, dtype)
    if found is None:  # the keys that it needs are there
        raise InputError("the config gives no size of a KV head", "give head_dim")
    heads, kv_heads, head_dim = heads_of(config)
    experts, chosen = experts_of(config)
    return ModelFacts(
        model_type=kind,
        dtype=dtype,
        layers=integer_at(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=integer_at(config, "vocab_size"),
        context=integer_at(config, "max_position_embeddings"),
        experts=experts,
        experts_per_token=chosen,
        modules=tuple(_kept(module, scheme) for module in _modules(config)),
        scheme=scheme,
        special=special_of(config),
        kv_bytes_per_token=found[0],
        config=config,
    )


def _kept(module: Module, scheme: Scheme | None) -> Module:
    """The module; not to be quantized where the scheme keeps its 16 bits."""
    keeps = scheme is not None and module.quantizable and scheme.keeps(module.name)
    return replace(module, quantizable=False) if keeps else module


def integer_at(config: Config, key: str) -> int:
    """A size; 0 where it is absent or another value. `InputError` for one that no model has."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    if not 0 <= value <= MOST.get(key, MOST_ITEMS):
        problem = f"the config's {key} is {str(value)[:40]}"
        raise InputError(problem, f"llmctl reads sizes from 0 to {MOST.get(key, MOST_ITEMS):,}")
    return value


def heads_of(config: Config) -> tuple[int, int, int]:
    """Attention heads, KV heads, and the size of a head; 0 where the config does not give it."""
    heads = integer_at(config, "num_attention_heads")
    head_dim = integer_at(config, "head_dim")
    if not head_dim and heads:
        head_dim = integer_at(config, "hidden_size") // heads
    return heads, integer_at(config, "num_key_value_heads") or heads, head_dim


def experts_of(config: Config) -> tuple[int, int]:
    """The experts of a layer that are chosen from, and how many a token uses; (0, 0): none."""
    keys = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    count = max(integer_at(config, key) for key in keys)
    chosen = max(integer_at(config, key) for key in ("num_experts_per_tok", "experts_per_token"))
    return (count, chosen) if count > 1 else (0, 0)


def _windows(config: Config, longest: int) -> tuple[int, int]:
    """How many layers have a sliding window that some request passes, and the window."""
    kind = str(config.get("model_type"))
    layers = integer_at(config, "num_hidden_layers")
    window = integer_at(config, "sliding_window")
    if kind == "mistral" and "sliding_window" not in config:
        window = 4096  # transformers' default for that type
    if kind.startswith("qwen") and not config.get("use_sliding_window"):
        return 0, 0
    longest = longest or integer_at(config, "max_position_embeddings")
    if not window or window >= longest > 0:
        return 0, 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        count = kinds.count(SLIDING)
        return (count, window) if count else (0, 0)
    every = integer_at(config, "sliding_window_pattern") or WINDOW_PATTERNS.get(kind, 0)
    if every:
        return layers - layers // every, window
    if kind.startswith("qwen"):  # the layers from this one on
        layers = max(layers - integer_at(config, "max_window_layers"), 0)
        return (layers, window) if layers else (0, 0)
    return layers or 1, window


STATE_KEYS = {  # a key of config.json, and what holds a state per request
    "hybrid_override_pattern": "Mamba layers",
    "mamba_num_heads": "Mamba layers",
    "mamba_d_state": "Mamba layers",
    "ssm_cfg": "Mamba layers",
    "state_size": "Mamba layers",
    "linear_num_value_heads": "linear attention",
    "linear_attn_config": "linear attention",
    "layers_block_type": "Mamba layers",
    "attn_layer_period": "Mamba layers",
}


def _states(config: Config) -> str:
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        other = [str(kind) for kind in kinds if kind not in (FULL, SLIDING, CHUNKED)]
        if other:
            return other[0][:80].replace("_", " ")
    listed = config.get("attn_type_list")  # of MiniMax: 1 is full attention, 0 a linear one
    if isinstance(listed, list) and any(one != 1 for one in listed):
        return "linear attention"
    return next((name for key, name in STATE_KEYS.items() if config.get(key)), "")


def _modules(config: Config) -> Iterator[Module]:
    """The weights of a model of a known type."""
    hidden = integer_at(config, "hidden_size")
    vocabulary = integer_at(config, "vocab_size")
    yield Module("model.embed_tokens", vocabulary * hidden, quantizable=False)
    if not config.get("tie_word_embeddings"):
        yield Module("lm_head", vocabulary * hidden, quantizable=False)
    attention = _latent_attention if special_of(config).latent else _attention
    for layer in range(integer_at(config, "num_hidden_layers")):
        place = f"model.layers.{layer}"
        yield Module(f"{place}.norms", 2 * hidden, quantizable=False, replicated=True)
        yield from attention(config, f"{place}.self_attn")
        if _has_experts(config, layer):
            yield from _expert_layer(config, f"{place}.mlp")
        else:
            inner = integer_at(config, "intermediate_size")
            yield Module(f"{place}.mlp.gate_up_proj", 2 * hidden * inner)
            yield Module(f"{place}.mlp.down_proj", hidden * inner)
    yield Module("model.norm", hidden, quantizable=False, replicated=True)


def _attention(config: Config, place: str) -> Iterator[Module]:
    hidden = integer_at(config, "hidden_size")
    kind = config.get("model_type")
    heads, kv_heads, head_dim = heads_of(config)
    width = heads * head_dim
    kv_width = kv_heads * head_dim
    yield Module(f"{place}.q_proj", hidden * width)
    yield Module(f"{place}.k_proj", hidden * kv_width)
    yield Module(f"{place}.v_proj", hidden * kv_width)
    yield Module(f"{place}.o_proj", width * hidden)
    biases = 0
    if kind == "qwen2" or config.get("attention_bias"):
        biases += width + 2 * kv_width
    if kind != "qwen2" and config.get("attention_bias"):
        biases += hidden
    if kind == "gpt_oss":
        biases += heads  # one sink per head
    if kind in ("qwen3", "qwen3_moe"):  # norms of queries and keys
        yield Module(f"{place}.norms", 2 * head_dim, quantizable=False, replicated=True)
    if kind == "minimax_m2":  # such norms over all heads
        yield Module(f"{place}.norms", width + kv_width, quantizable=False)
    if biases:
        yield Module(f"{place}.vectors", biases, quantizable=False)


def _latent_attention(config: Config, place: str) -> Iterator[Module]:
    """Multi-head latent attention, as in DeepSeek-V2 and V3. What leads to the latent values is on
    every GPU.
    """
    hidden = integer_at(config, "hidden_size")
    heads = integer_at(config, "num_attention_heads")
    rank = integer_at(config, "kv_lora_rank")
    rope = integer_at(config, "qk_rope_head_dim")
    plain = integer_at(config, "qk_nope_head_dim")
    value = integer_at(config, "v_head_dim")
    queries = heads * (plain + rope)
    if query_rank := integer_at(config, "q_lora_rank"):
        yield Module(f"{place}.q_a_proj", hidden * query_rank, replicated=True)
        yield Module(f"{place}.q_b_proj", query_rank * queries)
    else:
        yield Module(f"{place}.q_proj", hidden * queries)
    yield Module(f"{place}.kv_a_proj_with_mqa", hidden * (rank + rope), replicated=True)
    yield Module(f"{place}.kv_b_proj", rank * heads * (plain + value))
    yield Module(f"{place}.o_proj", heads * value * hidden)
    norms = query_rank + rank
    yield Module(f"{place}.norms", norms, quantizable=False, replicated=True)


def _has_experts(config: Config, layer: int) -> bool:
    if not experts_of(config)[0]:
        return False
    if layer < integer_at(config, "first_k_dense_replace"):
        return False
    dense = config.get("mlp_only_layers")
    if isinstance(dense, list) and layer in dense:
        return False
    every = integer_at(config, "decoder_sparse_step") or integer_at(config, "moe_layer_freq") or 1
    offset = 1 if integer_at(config, "decoder_sparse_step") else 0
    return (layer + offset) % every == 0


def _expert_layer(config: Config, place: str) -> Iterator[Module]:
    hidden = integer_at(config, "hidden_size")
    kind = config.get("model_type")
    inner = integer_at(config, "moe_intermediate_size") or integer_at(config, "intermediate_size")
    experts, chosen = experts_of(config)
    share = chosen / experts
    yield Module(f"{place}.experts", experts * 3 * hidden * inner, share)
    router = experts * hidden
    if kind == "gpt_oss":
        router += experts
        biases = experts * (2 * inner + hidden)
        yield Module(f"{place}.expert_biases", biases, share, quantizable=False)
    if kind in ("deepseek_v3", "kimi_k2", "minimax_m2"):
        router += experts  # a correction of each expert's score
    yield Module(f"{place}.router", router, quantizable=False, replicated=True)
    if shared := integer_at(config, "n_shared_experts"):
        yield Module(f"{place}.shared_experts", shared * 3 * hidden * inner)
