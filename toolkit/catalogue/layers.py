"""The layers of a model, by the keys of its config.json: what mixes tokens, what follows, windows.

Each key is read here and nowhere else. Keys that are absent count as not there, so that a part of a
config, such as that in a recipe, can be read too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from toolkit.catalogue.quantization import Config
from toolkit.errors import InputError

FULL = "full_attention"
MOST_LAYERS = 1024  # the deepest published model has some 126
MOST = {"num_hidden_layers": MOST_LAYERS}
MOST_ITEMS = 1 << 31  # of any other size
BY_LAYER = (  # lists of one value for each layer
    *("layer_types", "mlp_only_layers", "compress_ratios", "layers_block_type", "block_configs"),
    *("hybrid_override_pattern", "hybrid_layer_pattern", "attn_type_list", "moe_layer_freq"),
    *("mlp_layer_types", "indexer_types", "no_rope_layers"),
)
LONGEST_TEXT = 8 * MOST_LAYERS  # characters that name layers
OUTER = ("model_type", "tie_word_embeddings", "quantization_config", "torch_dtype", "dtype")
WINDOW_PATTERNS = {  # where the config has no pattern: the last of so many layers is full
    "cohere2": 4,
    "gemma2": 2,
    "gemma3_text": 6,
}
CHUNK_PATTERN = 4  # Llama 4: the last of so many layers is full
WORDS = {  # of lists and patterns of layers; another word is what it says
    **dict.fromkeys((FULL, "attention", "deepseek_sparse_attention", "*"), "full"),
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "linear",
    "M": "mamba",
    "E": "moe",
    "-": "mlp",
}
PARTS = ("moe", "mlp")  # words of layers that mix no tokens
TOKENS = ("full", "window", "chunk")  # words of layers with a cache of tokens
STATES = {  # words of layers with a state per request, and what it is
    "linear": "linear attention",
    "kda": "linear attention (KDA)",
    "lightning": "linear attention (lightning)",
    "mamba": "Mamba layers",
    "conv": "convolutions",
}
STATE_KEYS = {  # a key that has no list of layers beside it, and what holds a state per request
    "mamba_num_heads": "mamba",
    "mamba_d_state": "mamba",
    "ssm_cfg": "mamba",
    "state_size": "mamba",
    "linear_num_value_heads": "linear",
    "attn_layer_period": "mamba",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer.

    Attributes:
        mixer: full, window or chunk (attention), linear, kda, mamba or conv (a state per request),
            '' (nothing), or another word, which is not known.
        feed: dense, experts, both, or '' (nothing).
        heads, kv_heads: of attention.
        key_dim, value_dim: of a head.
        inner: of a dense part with a size of its own; 0: the model's.
    """

    mixer: str
    feed: str
    heads: int = 0
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    inner: int = 0


def text_config(config: Config) -> Config:
    """Return the part about the language model, of a model that also sees or hears."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    return {**{key: config[key] for key in OUTER if key in config}, **cast(Config, inner)}


def integer_at(config: Config, key: str) -> int:
    """Return a size; 0 where it is absent or another value.

    Raises `InputError` for one that no model has.
    """
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    if not 0 <= value <= MOST.get(key, MOST_ITEMS):
        problem = f"the config's {key} is {str(value)[:40]}"
        raise InputError(problem, f"llmctl reads sizes from 0 to {MOST.get(key, MOST_ITEMS):,}")
    return value


def heads_of(config: Config) -> tuple[int, int, int]:
    """Return attention heads, KV heads, and the size of a head; 0: the config does not say."""
    heads = integer_at(config, "num_attention_heads")
    head_dim = integer_at(config, "head_dim") or integer_at(config, "attention_head_dim")
    if not head_dim and heads:
        head_dim = integer_at(config, "hidden_size") // heads
    groups = integer_at(config, "num_key_value_heads") or integer_at(config, "num_attention_groups")
    return heads, groups or heads, head_dim


def experts_of(config: Config) -> tuple[int, int]:
    """Return the experts of a layer that are chosen from, and how many a token uses; 0: none."""
    keys = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    count = max(integer_at(config, key) for key in keys)
    chosen = (
        *("num_experts_per_tok", "experts_per_token", "num_experts_per_token"),
        *("top_k_experts", "moe_top_k"),
    )
    return (count, max(integer_at(config, key) for key in chosen)) if count > 1 else (0, 0)


def window_of_config(config: Config) -> int:
    """Return the tokens of sliding windows; 0: there are none."""
    kind = str(config.get("model_type"))
    may_be_off = "use_sliding_window" in config or kind.startswith("qwen")
    if may_be_off and not config.get("use_sliding_window"):
        return 0
    if kind == "mistral" and "sliding_window" not in config:
        return 4096  # transformers' default for that type
    window = integer_at(config, "sliding_window") or integer_at(config, "sliding_window_size")
    return window + 1 if window and kind == "cohere2" else window  # vLLM counts the token itself


def layers_of(config: Config) -> list[Layer]:
    """Return the layers, at least one; hidden ones only: a head that predicts more tokens is not
    loaded.

    Raises `InputError` for more layers than any model has.
    """
    config = text_config(config)
    for key in (*BY_LAYER, "moe_layers_enum"):
        listed = config.get(key)
        most = MOST_LAYERS if key in BY_LAYER else LONGEST_TEXT
        if isinstance(listed, list | str) and len(listed) > most:
            problem = f"the config's {key} has {len(listed):,} items"
            raise InputError(problem, f"llmctl reads models of at most {MOST_LAYERS:,} layers")
    words = _words(config)
    whole = not any(word in PARTS for word in words)  # a layer has a mixer and what follows
    return [_layer(config, number, word, whole) for number, word in enumerate(words)]


def _words(config: Config) -> list[str]:
    """Return a word per layer."""
    count = integer_at(config, "num_hidden_layers")
    window = window_of_config(config)
    for key in ("layers_block_type", "hybrid_override_pattern", "layer_types"):
        listed = config.get(key)
        if listed and isinstance(listed, list | str):
            named = [WORDS.get(str(one), str(one)[:80]) for one in listed]
            named = [one if one != "window" or window else "full" for one in named]
            return named[: count or None]
    count = count or 1
    if isinstance(linear := config.get("linear_attn_config"), Mapping):
        listed = linear.get("full_attn_layers")  # from 1
        full = listed if isinstance(listed, list) else []
        return ["full" if number in full else "kda" for number in range(1, count + 1)]
    if every := integer_at(config, "full_attention_interval"):
        return ["full" if number % every == 0 else "linear" for number in range(1, count + 1)]
    listed = config.get("attn_type_list")  # of MiniMax: 1 is full attention, 0 a linear one
    if isinstance(listed, list) and any(one != 1 for one in listed):
        return ["full" if one == 1 else "lightning" for one in listed[:count]]
    for key, word in STATE_KEYS.items():
        if config.get(key):
            return [word] * count
    listed = config.get("hybrid_layer_pattern")  # of MiMo-V2: 1 is a window
    if isinstance(listed, list) and listed:
        return ["window" if one == 1 and window else "full" for one in listed[:count]]
    if integer_at(config, "attention_chunk_size"):
        listed = config.get("no_rope_layers")
        if isinstance(listed, list) and len(listed) >= count:
            return ["chunk" if one else "full" for one in listed[:count]]
        return ["chunk" if n % CHUNK_PATTERN else "full" for n in range(1, count + 1)]
    blocks = config.get("block_configs")
    if isinstance(blocks, list) and blocks:
        return [_block_word(one) for one in blocks[:count]]
    return _windowed(config, count) if window else ["full"] * count


def _windowed(config: Config, count: int) -> list[str]:
    """Return the layers of a model with windows and without a list of them."""
    kind = str(config.get("model_type"))
    every = integer_at(config, "sliding_window_pattern") or WINDOW_PATTERNS.get(kind, 0)
    if every:
        return ["window" if number % every else "full" for number in range(1, count + 1)]
    first = integer_at(config, "max_window_layers") if kind.startswith("qwen") else 0
    return ["full" if number < first else "window" for number in range(count)]


def _block_word(block: object) -> str:
    """Return the word of a layer of Nemotron-NAS."""
    attention = _part(block, "attention")
    if attention.get("replace_with_linear"):
        return "attention as one matrix"
    if attention.get("window_length"):
        return "attention with a window of its own"
    return "none" if attention.get("no_op") else "full"


def _part(block: object, name: str) -> Mapping[str, object]:
    part = block.get(name) if isinstance(block, Mapping) else None
    return cast(Config, part) if isinstance(part, Mapping) else {}


def _layer(config: Config, number: int, word: str, whole: bool) -> Layer:
    if word in PARTS:
        feed = "experts" if word == "moe" else "dense"
        return Layer("", feed)
    feed, inner = _feed(config, number) if whole else ("", 0)
    if word not in TOKENS:
        return Layer("" if word == "none" else word, feed, inner=inner)
    return Layer(word, feed, *_geometry(config, number, word), inner)


def _geometry(config: Config, number: int, word: str) -> tuple[int, int, int, int]:
    """Return heads, KV heads, and the sizes of a key and a value of a layer's attention."""
    heads, kv_heads, key_dim = heads_of(config)
    value_dim = integer_at(config, "v_head_dim") or key_dim
    if word == "full":
        if wider := integer_at(config, "global_head_dim"):  # Gemma 4
            key_dim = value_dim = wider
        kv_heads = integer_at(config, "num_global_key_value_heads") or kv_heads
    if word == "window":
        heads = integer_at(config, "swa_num_attention_heads") or heads  # MiMo-V2
        kv_heads = integer_at(config, "swa_num_key_value_heads") or kv_heads
        key_dim = integer_at(config, "swa_head_dim") or key_dim
        value_dim = integer_at(config, "swa_v_head_dim") or value_dim
        other = config.get("attention_other_setting")  # Step 3.5
        if isinstance(other, Mapping):
            heads = integer_at(cast(Config, other), "num_attention_heads") or heads
            kv_heads = integer_at(cast(Config, other), "num_attention_groups") or kv_heads
    blocks = config.get("block_configs")
    if isinstance(blocks, list) and number < len(blocks):
        each = integer_at(_part(blocks[number], "attention"), "n_heads_in_group")
        kv_heads = heads // each if each else kv_heads
    return heads, kv_heads, key_dim, value_dim


def _feed(config: Config, number: int) -> tuple[str, int]:
    """Return what follows a layer's mixer, and the size of a dense part that is its own."""
    blocks = config.get("block_configs")
    if isinstance(blocks, list) and number < len(blocks):
        return _block_feed(config, _part(blocks[number], "ffn"))
    if not experts_of(config)[0]:
        return "dense", _adjusted(config)
    if config.get("enable_moe_block"):  # Gemma 4
        return "both", 0
    return ("experts", 0) if _has_experts(config, number) else ("dense", 0)


def _adjusted(config: Config) -> int:
    """Return the inner size of LFM2: 2/3 of the one in its config, times a factor, rounded up; 0:
    the config's own.
    """
    if not config.get("block_auto_adjust_ff_dim"):
        return 0
    inner = 2 * integer_at(config, "intermediate_size") // 3
    factor = config.get("block_ffn_dim_multiplier")
    if isinstance(factor, int | float) and 0 < factor < 1 << 10:
        inner = int(factor * inner)
    step = integer_at(config, "block_multiple_of") or 1
    return -(-inner // step) * step


def _block_feed(config: Config, block: Mapping[str, object]) -> tuple[str, int]:
    """Return what follows a mixer of Nemotron-NAS: a multiple of 256 near 2/3 of the width."""
    if block.get("no_op"):
        return "", 0
    if block.get("replace_with_linear"):
        return "a matrix", 0
    times = block.get("ffn_mult")
    if isinstance(times, int | float) and 0 < times < 1 << 10:
        return "dense", -(-int(2 * times * integer_at(config, "hidden_size") / 3) // 256) * 256
    return "dense", integer_at(block, "intermediate_size")


def _has_experts(config: Config, number: int) -> bool:
    for key, sparse in (("mlp_layer_types", "sparse"), ("moe_layer_freq", 1)):
        listed = config.get(key)
        if isinstance(listed, list):
            return number < len(listed) and listed[number] == sparse
    named = config.get("moe_layers_enum")  # Step 3.5
    if isinstance(named, str):
        return str(number) in named.split(",")
    first = integer_at(config, "first_k_dense_replace") or integer_at(config, "num_dense_layers")
    if number < first:
        return False
    dense = config.get("mlp_only_layers")
    if isinstance(dense, list) and number in dense:
        return False
    from_one = integer_at(config, "decoder_sparse_step") or integer_at(
        config, "interleave_moe_layer_step"
    )
    if from_one:
        return (number + 1) % from_one == 0
    return number % (integer_at(config, "moe_layer_freq") or 1) == 0
