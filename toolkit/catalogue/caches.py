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

from toolkit.catalogue.models import (
    CACHE_BYTES,
    DTYPE_BYTES,
    FULL,
    SLIDING,
    heads_of,
    integer_at,
    special_of,
    text_config,
)
from toolkit.catalogue.quantization import Config
from toolkit.catalogue.resolved import CacheGroup

FULL_KINDS = ("full", "mla")
SPECS = {"full": "FullAttentionSpec", "window": "SlidingWindowSpec", "state": "MambaSpec"}
IN_FLIGHT = 2 * 8192  # tokens of passes that may be under way, by vLLM's defaults on a large GPU
STATE_ALIGN = 16  # tokens; vLLM rounds the long blocks of models with states up to it
LAYER_KINDS = {FULL: "full", SLIDING: "window", "linear_attention": "state"}


def window_of(groups: Sequence[CacheGroup]) -> int:
    """Tokens of the sliding windows of most layers; 0: there are none."""
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
    """The tokens of cache that vLLM logs for so many usable blocks, and one that it never gives
    out: how often the longest request fits, times its tokens. Requests of other lengths take more
    or fewer blocks for each token.
    """
    return int((blocks + 1) / longest_blocks(groups, longest, in_flight) * longest)


def bytes_per_block(groups: Sequence[CacheGroup]) -> int:
    """Bytes of a block: of the widest group's layers."""
    return max(group.layers * group.page_bytes for group in groups)


def groups_of_config(
    config: Config, dtype: str, block: int = 16, gpus: int = 1, longest: int = 0
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
    kinds = _layer_kinds(config, longest)
    _, kv_heads, head_dim = heads_of(config)
    if kinds is None or not kv_heads or not head_dim or special_of(config).latent:
        return None
    if any(integer_at(config, key) for key in ("global_head_dim", "num_global_key_value_heads")):
        return None
    token_bytes = 2 * max(kv_heads // gpus, 1) * head_dim * CACHE_BYTES[dtype]
    if "state" in kinds:
        state = _state_bytes(config, dtype, gpus)
        if not state:
            return None
        block = max(block, -(-state // (token_bytes * STATE_ALIGN)) * STATE_ALIGN)
    window = integer_at(config, "sliding_window")
    found = []
    for kind, layers in _cut(kinds):
        found.append(
            CacheGroup(
                kind,
                SPECS[kind],
                block,
                layers,
                block * token_bytes,
                window=window if kind == "window" else 0,
                mode="align" if kind == "state" else "",
            )
        )
    return found


def row_bytes(config: Config, dtype: str, longest: int, gpus: int = 1) -> int | None:
    """Bytes on each GPU of the cache of one request of `longest` tokens, of a model with several
    groups of caches; None: it has one cache of full attention, or is not known.
    """
    groups = groups_of_config(config, dtype, gpus=gpus, longest=longest)
    if groups is None or is_plain(groups):
        return None
    return longest_blocks(groups, longest, IN_FLIGHT) * bytes_per_block(groups)


def _layer_kinds(config: Config, longest: int) -> list[str] | None:
    """The kind of each layer's cache; None: some is not known."""
    count = integer_at(config, "num_hidden_layers")
    special = special_of(config, longest)
    given = config.get("layer_types")
    if isinstance(given, list):
        known = LAYER_KINDS if special.windows[0] else LAYER_KINDS | {SLIDING: "full"}
        named = [known.get(str(one), "") for one in given[:count]]
        return named if named and all(named) else None
    if every := integer_at(config, "full_attention_interval"):
        return ["full" if (k + 1) % every == 0 else "state" for k in range(count)]
    if special.states:
        return None
    windows = special.windows[0]
    if windows == count:
        return ["window"] * count
    if not windows:
        return ["full"] * count
    full = count - windows
    every = count // full if full else 0
    found = ["full" if (k + 1) % every == 0 else "window" for k in range(count)]
    return found if found.count("full") == full else None


def _cut(kinds: Sequence[str]) -> list[tuple[str, int]]:
    """Kind and layers of each group, in the order of the kinds' first layers."""
    counts = Counter(kinds)
    size = min(counts.values())
    if max(counts.values()) < 1.5 * size:
        size = max(counts.values())
    found = []
    for kind, count in counts.items():
        groups = -(-count // size)
        # each group takes every so many-th layer
        found += [(kind, -(-(count - k) // groups)) for k in range(groups)]
    return found


def _state_bytes(config: Config, dtype: str, gpus: int) -> int:
    """Bytes of one layer's state of gated linear attention (Qwen3-Next): a convolution's last
    inputs, and a matrix for each head in 32 bits; 0: the sizes are not there.
    """
    values = integer_at(config, "linear_num_value_heads")
    keys = integer_at(config, "linear_num_key_heads")
    key_dim = integer_at(config, "linear_key_head_dim")
    value_dim = integer_at(config, "linear_value_head_dim")
    kernel = integer_at(config, "linear_conv_kernel_dim")
    if not (values and keys and key_dim and value_dim and kernel):
        return 0
    inputs = (2 * keys * key_dim + values * value_dim) // gpus
    matrix = values // gpus * key_dim * value_dim
    return (kernel - 1) * inputs * DTYPE_BYTES[dtype] + matrix * DTYPE_BYTES["float32"]
