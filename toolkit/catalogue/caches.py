"""The cache groups of a model: what its layers need of them, and how vLLM makes them.

vLLM (`v1/core/kv_cache_planning.py` in 0.33, `kv_cache_utils.py` before) gives each layer a cache
of a kind. Layers with equal caches are cut into groups of about as many layers as the rarest kind
has, and the layers of a group share tables of blocks. All groups take their blocks from one pool,
and a block has the bytes of the widest group.

A model with states (Mamba, linear attention) gets blocks so long that a block of attention has the
bytes of a state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from toolkit.catalogue.layers import (
    STATES,
    Layer,
    integer_at,
    layers_of,
    text_config,
    window_of_config,
)
from toolkit.catalogue.models import CACHE_BYTES, DTYPE_BYTES, kv_bytes_per_token, special_of
from toolkit.catalogue.quantization import Config
from toolkit.catalogue.resolved import CacheGroup

FULL_KINDS = ("full", "mla")
SPECS = {
    "full": "FullAttentionSpec",
    "mla": "MLAAttentionSpec",
    "window": "SlidingWindowSpec",
    "chunk": "ChunkedLocalAttentionSpec",
    "state": "MambaSpec",
}
IN_FLIGHT = 2 * 8192  # tokens of passes that may be under way, by vLLM's defaults on a large GPU
STATE_ALIGN = 16  # tokens; vLLM rounds the long blocks of models with states up to it


def read_tokens(groups: Sequence[CacheGroup], best: int = 0) -> int:
    """Return how many tokens, its own included, a step attends to at most in most of the layers
    with a limit: of a sliding window, or the `best` of sparse attention; 0: there is no limit.
    """
    if best:
        return best + 1
    layers: Counter[int] = Counter()
    for group in groups:
        if group.kind == "window":
            layers[group.window] += group.layers
    return layers.most_common(1)[0][0] if layers else 0


def is_plain(groups: Sequence[CacheGroup]) -> bool:
    """Whether there is one cache of full attention: its blocks just follow the tokens."""
    return len(groups) == 1 and groups[0].kind in FULL_KINDS


def longest_blocks(groups: Sequence[CacheGroup], longest: int, in_flight: int) -> int:
    """Blocks that vLLM wants to be there when it starts: those of one request of `longest` tokens.

    Args:
        in_flight: tokens of all passes that may be under way. Windows keep room for them, since
            blocks are given back only when a pass is known.
    """
    total = 0
    for group in groups:
        size = group.block
        if group.kind == "window":
            total += -(-min(group.window - 1 + in_flight, longest) // size) + 1
        elif group.kind == "chunk":
            total += -(-min(group.window + in_flight, longest) // size)
        elif group.kind == "state":
            total += 2 + group.checkpoints if group.mode == "align" else 1
        else:
            total += -(-longest // size)
    return total


def logged_tokens(groups: Sequence[CacheGroup], blocks: int, longest: int, in_flight: int) -> int:
    """Return the tokens of cache that vLLM logs for `blocks` usable blocks, and one that it never
    gives out: how often the longest request fits, times its tokens. Requests of other lengths take
    more or fewer blocks for each token.
    """
    return int((blocks + 1) / longest_blocks(groups, longest, in_flight) * longest)


def bytes_per_block(groups: Sequence[CacheGroup]) -> int:
    """Bytes of a block: of the widest group's layers."""
    return max(group.layers * group.page_bytes for group in groups)


def groups_of_config(
    config: Config,
    dtype: str,
    block: int = 16,
    gpus: int = 1,
    longest: int = 0,
) -> list[CacheGroup] | None:
    """The groups that vLLM makes of a model's layers; None: its layers' caches are not all known,
    or have several sizes.

    Args:
        config: the content of config.json.
        dtype: of the cache; of a model with states, 16 or 32 bits.
        block: tokens of a block as vLLM's flags have it.
        gpus: that share the model (tensor parallelism).
        longest: see `special_of`.
    """
    config = text_config(config)
    special = special_of(config, longest)
    if special.best:  # one table of blocks; a block has the latent values and the index
        each = kv_bytes_per_token(config, dtype)
        return [CacheGroup("mla", SPECS["mla"], block, 1, block * each[0])] if each else None
    if special.sparse or config.get("compress_ratios"):
        return None
    layers = [layer for layer in layers_of(config) if layer.mixer]
    if special.latent:  # one vector, which is whole on each GPU
        if any(layer.mixer != "full" for layer in layers):
            return None
        layers = [replace(one, kv_heads=1, key_dim=special.latent, value_dim=0) for one in layers]
    states = {layer.mixer for layer in layers if layer.mixer in STATES}
    state = max((_state_bytes(config, mixer, dtype, gpus) for mixer in states), default=0)
    token_bytes = [
        _token_bytes(layer, dtype, gpus) for layer in layers if layer.mixer not in states
    ]
    if not token_bytes or not all(token_bytes) or (states and not state):
        return None
    if state:
        step = max(block, STATE_ALIGN) * token_bytes[0]
        block = max(block, STATE_ALIGN) * -(-state // step)
    window = window_of_config(config)
    slides = special.windows[0] > 0
    found = []
    for layer in layers:
        kind = "state" if layer.mixer in states else layer.mixer
        kind = "full" if kind == "window" and not slides else kind
        kind = "full" if kind == "chunk" and not special.chunk else kind
        if kind not in SPECS:
            return None
        page = block * (token_bytes[0] if kind == "state" else _token_bytes(layer, dtype, gpus))
        spans = {"window": window, "chunk": integer_at(config, "attention_chunk_size")}
        mode = "align" if kind == "state" else ""
        found.append(CacheGroup(kind, SPECS[kind], block, 1, page, spans.get(kind, 0), mode))
    if len({(group.kind, group.page_bytes) for group in found if group.kind == "full"}) > 1:
        return None
    widest = max(group.page_bytes for group in found)
    return _cut([_widened(group, widest) for group in found])


def _token_bytes(layer: Layer, dtype: str, gpus: int) -> int:
    """Return the bytes of a token in a layer's cache, on each GPU."""
    heads = max(layer.kv_heads // gpus, 1) if layer.kv_heads else 0
    return heads * (layer.key_dim + layer.value_dim) * CACHE_BYTES[dtype]


def _widened(group: CacheGroup, page: int) -> CacheGroup:
    """Return a layer's cache with the page of the widest: more tokens, or padding."""
    if page % group.page_bytes or group.kind == "state":
        return replace(group, page_bytes=page)
    return replace(group, block=group.block * (page // group.page_bytes), page_bytes=page)


def row_bytes(config: Config, dtype: str, longest: int, gpus: int = 1) -> int | None:
    """Bytes on each GPU of the cache of one request of `longest` tokens, of a model with several
    groups of caches; None: it has one cache of full attention, or is not known.
    """
    groups = groups_of_config(config, dtype, gpus=gpus, longest=longest)
    if groups is None or is_plain(groups):
        return None
    return longest_blocks(groups, longest, IN_FLIGHT) * bytes_per_block(groups)


def _cut(layers: Sequence[CacheGroup]) -> list[CacheGroup]:
    """Return the groups of layers with equal caches, in the order of their first layers."""
    counts = Counter(layers)
    size = min(counts.values())
    if max(counts.values()) < 1.5 * size:
        size = max(counts.values())
    found = []
    for one, count in counts.items():
        groups = -(-count // size)
        # each group takes every so many-th layer
        found += [replace(one, layers=-(-(count - k) // groups)) for k in range(groups)]
    return found


def _state_bytes(config: Config, mixer: str, dtype: str, gpus: int) -> int:
    """Return the bytes of one layer's state on each GPU: a convolution's last inputs, and but for
    plain convolutions a matrix for each head; 0: the sizes are not there.
    """
    element = DTYPE_BYTES.get(dtype, DTYPE_BYTES["bfloat16"])  # a narrow cache is of tokens alone
    if mixer == "conv":
        width = integer_at(config, "conv_dim") or integer_at(config, "hidden_size")
        return max(integer_at(config, "conv_L_cache") - 1, 0) * (width // gpus) * element
    if mixer == "linear":
        heads = integer_at(config, "linear_num_value_heads")
        keys = integer_at(config, "linear_num_key_heads")
        key_dim = integer_at(config, "linear_key_head_dim")
        value_dim = integer_at(config, "linear_value_head_dim")
        inputs = 2 * keys * key_dim + heads * value_dim
        kernel = integer_at(config, "linear_conv_kernel_dim")
    elif mixer == "mamba":
        heads = integer_at(config, "mamba_num_heads")
        value_dim = integer_at(config, "mamba_head_dim")
        key_dim = integer_at(config, "ssm_state_size")
        keys = integer_at(config, "n_groups")
        inputs = heads * value_dim + 2 * -(-keys // gpus) * gpus * key_dim
        kernel = integer_at(config, "conv_kernel")
    else:
        return 0
    if not (heads and keys and key_dim and value_dim and kernel):
        return 0
    wide = state_number_bytes(config, mixer, dtype)
    return (kernel - 1) * (inputs // gpus) * element + heads // gpus * key_dim * value_dim * wide


def state_number_bytes(config: Config, mixer: str, dtype: str) -> int:
    """Return the bytes of a number of a state. Where the config does not say, vLLM takes 32 bits
    for Mamba (Nemotron-H), and for linear attention the dtype of the model (Qwen3-Next).
    """
    given = config.get("mamba_ssm_dtype", config.get("mamba_ssm_cache_dtype"))
    usual = "float32" if mixer == "mamba" else dtype
    return DTYPE_BYTES.get(str(given), DTYPE_BYTES.get(usual, DTYPE_BYTES["bfloat16"]))
