"""The weights of a model, module by module, from its config and its family's layout.

Names are as in checkpoints, so that a quantization that keeps some modules in 16 bits is counted as
it is stored. Sums equal what vLLM's own classes hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.catalogue.families import ALWAYS, Family
from toolkit.catalogue.layers import MOST_LAYERS, Layer, experts_of, integer_at, layers_of
from toolkit.catalogue.quantization import Config


@dataclass(frozen=True, slots=True)
class Module:
    """Weights that are stored together.

    Attributes:
        name: as in the checkpoint.
        parameters: how many.
        share: of them a token uses: 1, or chosen experts / all experts.
        quantizable: a linear layer; embeddings, norms, biases and routers keep their precision.
        most_gpus: of a group, among which it is divided; more repeat it. 0: any number.
    """

    name: str
    parameters: int
    share: float = 1.0
    quantizable: bool = True
    most_gpus: int = 0


def modules_of(config: Config, family: Family) -> Iterator[Module]:
    """Yield the weights of a model's text part."""
    hidden = integer_at(config, "hidden_size")
    table = integer_at(config, "vocab_size") * hidden
    yield Module("model.embed_tokens", table, quantizable=False)
    if not config.get("tie_word_embeddings", family.tied):
        yield Module("lm_head", table, quantizable=False)
    mixers = {"linear": _delta, "mamba": _mamba, "conv": _convolution}
    ratios = ratios_of(config)
    for number, layer in enumerate(layers_of(config)):
        place = f"model.layers.{number}"
        parts = bool(layer.mixer) + bool(layer.feed)
        yield _whole(f"{place}.norms", family.norms * parts // 2 * hidden)
        if layer.heads:
            name = f"{place}.{family.part('attention')}"
            if integer_at(config, "kv_lora_rank"):
                yield from _latent_attention(config, name, number)
            elif ratios:
                yield from _compressed_attention(config, name, ratios[number])
                yield from _streams(config, place)
            else:
                yield from _attention(config, family, layer, name)
        elif layer.mixer:
            yield from mixers[layer.mixer](config, f"{place}.{family.part(layer.mixer)}")
        if layer.feed in ("dense", "both"):
            yield from _mlp(config, family, layer.inner, f"{place}.{family.part('mlp')}")
        if layer.feed in ("experts", "both"):
            yield from _experts(config, family, f"{place}.{family.part('experts')}")
        if layer.feed == "both":  # norms around both, and two scales in the router (Gemma 4)
            scales = 4 * hidden + experts_of(config)[0]
            yield _whole(f"{place}.expert_norms", scales)
    yield _whole("model.norm", hidden)
    if streams := integer_at(config, "hc_mult"):
        yield _whole("model.streams", streams * streams * hidden + streams + 1)


def _whole(name: str, parameters: int) -> Module:
    """Return weights in 16 bits that each GPU holds."""
    return Module(name, parameters, quantizable=False, most_gpus=1)


def condition_holds(config: Config, condition: str) -> bool:
    """Return whether a condition of `Family` holds."""
    return condition == ALWAYS or bool(config.get(condition))


def _attention(config: Config, family: Family, layer: Layer, place: str) -> Iterator[Module]:
    hidden = integer_at(config, "hidden_size")
    queries = layer.heads * layer.key_dim
    keys = layer.kv_heads * layer.key_dim
    values = layer.kv_heads * layer.value_dim
    if family.gate == "query":
        queries *= 2
    yield Module(f"{place}.q_proj", hidden * queries)
    yield Module(f"{place}.k_proj", hidden * keys, most_gpus=layer.kv_heads)
    yield Module(f"{place}.v_proj", hidden * values, most_gpus=layer.kv_heads)
    yield Module(f"{place}.o_proj", layer.heads * layer.value_dim * hidden)
    vectors = 0
    if condition_holds(config, family.qkv_bias):
        vectors += queries + keys + values
    if condition_holds(config, family.out_bias):
        vectors += hidden
    if family.sinks == "all" or family.sinks == layer.mixer:
        vectors += layer.heads
    if vectors:
        yield Module(f"{place}.vectors", vectors, quantizable=False)
    if family.gate == "head":
        yield Module(f"{place}.g_proj", hidden * layer.heads)
    if family.qk_norm and condition_holds(config, family.qk_norm_if):
        if family.qk_norm == "head":
            yield _whole(f"{place}.norms", 2 * layer.key_dim)
        else:
            width = layer.heads * layer.key_dim + keys
            yield Module(f"{place}.norms", width, quantizable=False)
    sparse = config.get("sparse_attention_config")  # MiniMax M3
    if isinstance(sparse, dict):
        yield from _block_index(config, sparse, place)


def _block_index(config: Config, sparse: Config, place: str) -> Iterator[Module]:
    """Yield the index of MiniMax M3: heads of queries and one key, in layers that have it."""
    listed = sparse.get("sparse_attention_freq")
    number = int(place.split(".")[2])
    if isinstance(listed, list) and not (number < len(listed) and listed[number]):
        return
    dim = integer_at(sparse, "sparse_index_dim")
    heads = integer_at(sparse, "sparse_num_index_heads")
    hidden = integer_at(config, "hidden_size")
    yield Module(f"{place}.index_q_proj", hidden * heads * dim)
    yield Module(f"{place}.index_k_proj", hidden * dim, most_gpus=1)
    yield _whole(f"{place}.index_norms", 2 * dim)


def _latent_attention(config: Config, place: str, number: int) -> Iterator[Module]:
    """Yield multi-head latent attention, as in DeepSeek V2 and V3. Each GPU holds what leads to the
    latent values.
    """
    hidden = integer_at(config, "hidden_size")
    heads = integer_at(config, "num_attention_heads")
    rank = integer_at(config, "kv_lora_rank")
    rope = integer_at(config, "qk_rope_head_dim")
    plain = integer_at(config, "qk_nope_head_dim")
    value = integer_at(config, "v_head_dim")
    queries = heads * (plain + rope)
    if query_rank := integer_at(config, "q_lora_rank"):
        yield Module(f"{place}.q_a_proj", hidden * query_rank, most_gpus=1)
        yield Module(f"{place}.q_b_proj", query_rank * queries)
    else:
        yield Module(f"{place}.q_proj", hidden * queries)
    yield Module(f"{place}.kv_a_proj_with_mqa", hidden * (rank + rope), most_gpus=1)
    yield Module(f"{place}.kv_b_proj", rank * heads * (plain + value))
    yield Module(f"{place}.o_proj", heads * value * hidden)
    yield _whole(f"{place}.norms", query_rank + rank)
    if integer_at(config, "index_topk") and has_index(config, number):
        yield from _index(config, f"{place}.indexer", query_rank)


def has_index(config: Config, number: int) -> bool:
    """Return whether a layer has an index of its own (DeepSeek V3.2, GLM 5); others share one."""
    listed = config.get("indexer_types")
    return not isinstance(listed, list) or (number < len(listed) and listed[number] == "full")


def _index(config: Config, place: str, query_rank: int) -> Iterator[Module]:
    """Yield the index of sparse attention, which each GPU holds."""
    hidden = integer_at(config, "hidden_size")
    heads = integer_at(config, "index_n_heads")
    dim = integer_at(config, "index_head_dim")
    yield Module(f"{place}.wq_b", query_rank * heads * dim, most_gpus=1)
    yield Module(f"{place}.wk", hidden * dim, most_gpus=1)
    yield _whole(f"{place}.weights_proj", hidden * heads)
    yield _whole(f"{place}.k_norm", 2 * dim)


def ratios_of(config: Config) -> list[int]:
    """Return by how much each layer's cache is compressed (DeepSeek V4); 0: not at all; an empty
    list: the model has no such caches.
    """
    listed = config.get("compress_ratios")
    if not isinstance(listed, list) or not listed:
        return []
    ratios = [one if isinstance(one, int) and 0 <= one <= MOST_RATIO else 0 for one in listed]
    return ratios + [0] * (MOST_LAYERS - len(ratios))


MOST_RATIO = 1 << 12  # tokens
OVERLAPS = (
    4  # the ratio at which blocks of compressed tokens overlap, and the only one with an index
)


def _compressed_attention(config: Config, place: str, ratio: int) -> Iterator[Module]:
    """Yield the attention of DeepSeek V4: latent values of a window, and of compressed tokens, with
    an index where the ratio is 4. Its compressors keep 16 bits.
    """
    hidden = integer_at(config, "hidden_size")
    heads = integer_at(config, "num_attention_heads")
    dim = integer_at(config, "head_dim")
    rank = integer_at(config, "q_lora_rank")
    out_rank = integer_at(config, "o_lora_rank")
    yield Module(f"{place}.wqa_wkv", hidden * (rank + dim), most_gpus=1)
    yield Module(f"{place}.wq_b", rank * heads * dim)
    yield Module(f"{place}.wo_a", out_rank * heads * dim)
    yield Module(f"{place}.wo_b", integer_at(config, "o_groups") * out_rank * hidden)
    yield Module(f"{place}.attn_sink", heads, quantizable=False)
    yield _whole(f"{place}.norms", rank + dim)
    if ratio:
        yield _compressor(f"{place}.compressor", hidden, dim, ratio)
    if ratio == OVERLAPS:
        index = integer_at(config, "index_head_dim")
        index_heads = integer_at(config, "index_n_heads")
        yield Module(f"{place}.indexer.wq_b", rank * index_heads * index, most_gpus=1)
        yield _whole(f"{place}.indexer.weights_proj", hidden * index_heads)
        yield _compressor(f"{place}.indexer.compressor", hidden, index, ratio)


def _compressor(place: str, hidden: int, dim: int, ratio: int) -> Module:
    wide = dim * (1 + (ratio == OVERLAPS))
    return _whole(place, 2 * hidden * wide + ratio * wide + dim)


def _streams(config: Config, place: str) -> Iterator[Module]:
    """Yield what mixes the several streams of hidden values (hyper-connections)."""
    streams = integer_at(config, "hc_mult")
    mixed = streams * (2 + streams)
    each = mixed * streams * integer_at(config, "hidden_size") + mixed + 3
    yield _whole(f"{place}.streams", 2 * each)


def _delta(config: Config, place: str) -> Iterator[Module]:
    """Yield gated delta-net attention (Qwen3-Next, Qwen3.5)."""
    hidden = integer_at(config, "hidden_size")
    value_heads = integer_at(config, "linear_num_value_heads")
    values = value_heads * integer_at(config, "linear_value_head_dim")
    keys = integer_at(config, "linear_num_key_heads") * integer_at(config, "linear_key_head_dim")
    kernel = integer_at(config, "linear_conv_kernel_dim")
    yield Module(f"{place}.in_proj_qkv", hidden * (2 * keys + values))
    yield Module(f"{place}.in_proj_z", hidden * values)
    yield Module(f"{place}.in_proj_b", hidden * value_heads)
    yield Module(f"{place}.in_proj_a", hidden * value_heads)
    yield Module(f"{place}.conv1d", (2 * keys + values) * kernel, quantizable=False)
    yield Module(f"{place}.out_proj", values * hidden)
    yield Module(f"{place}.vectors", 2 * value_heads, quantizable=False)
    yield _whole(f"{place}.norm", integer_at(config, "linear_value_head_dim"))


def _mamba(config: Config, place: str) -> Iterator[Module]:
    """Yield Mamba 2 (Nemotron-H)."""
    hidden = integer_at(config, "hidden_size")
    heads = integer_at(config, "mamba_num_heads")
    inner = heads * integer_at(config, "mamba_head_dim")
    mixed = inner + 2 * integer_at(config, "n_groups") * integer_at(config, "ssm_state_size")
    yield Module(f"{place}.in_proj", hidden * (inner + mixed + heads))
    kernel = integer_at(config, "conv_kernel") + bool(config.get("use_conv_bias"))
    yield Module(f"{place}.conv1d", mixed * kernel, quantizable=False)
    yield Module(f"{place}.out_proj", inner * hidden)
    yield Module(f"{place}.vectors", 3 * heads + inner, quantizable=False)
    if config.get("use_bias"):
        yield Module(f"{place}.biases", inner + mixed + heads + hidden, quantizable=False)


def _convolution(config: Config, place: str) -> Iterator[Module]:
    """Yield short convolutions with gates (LFM2)."""
    hidden = integer_at(config, "hidden_size")
    width = integer_at(config, "conv_dim") or hidden
    bias = bool(config.get("conv_bias"))
    kernel = integer_at(config, "conv_L_cache") + bias
    yield Module(f"{place}.conv", width * kernel, quantizable=False)
    yield Module(f"{place}.in_proj", hidden * 3 * width)
    yield Module(f"{place}.out_proj", width * hidden)
    if bias:
        yield Module(f"{place}.biases", 3 * width + hidden, quantizable=False)


def _mlp(config: Config, family: Family, inner: int, place: str) -> Iterator[Module]:
    hidden = integer_at(config, "hidden_size")
    inner = inner or integer_at(config, family.dense_inner)
    names = ("gate_proj", "up_proj", "down_proj")[-family.matrices :]
    for name in names:
        yield Module(f"{place}.{name}", hidden * inner)
    if condition_holds(config, family.mlp_bias):
        biases = (family.matrices - 1) * inner + hidden
        yield Module(f"{place}.biases", biases, quantizable=False)


def _experts(config: Config, family: Family, place: str) -> Iterator[Module]:
    hidden = integer_at(config, "hidden_size")
    latent = integer_at(config, "moe_latent_size") or hidden  # of what experts get (Nemotron 3)
    inner = integer_at(config, family.expert_inner)
    count, chosen = experts_of(config)
    share = chosen / count
    for name in family.expert_names:
        yield Module(f"{place}.experts.0.{name}", count * latent * inner, share)
    if latent != hidden:
        yield Module(f"{place}.fc1_latent_proj", hidden * latent, most_gpus=1)
        yield Module(f"{place}.fc2_latent_proj", hidden * latent, most_gpus=1)
    if condition_holds(config, family.expert_bias):
        biases = count * ((len(family.expert_names) - 1) * inner + latent)
        yield Module(f"{place}.expert_biases", biases, share, quantizable=False)
    scores = count if condition_holds(config, family.router_bias) else 0
    yield _whole(f"{place}.gate", count * hidden + scores)
    if shared := shared_inner(config, family):
        for name in ("gate_proj", "up_proj", "down_proj")[-family.matrices :]:
            yield Module(f"{place}.{family.shared_name}.{name}", hidden * shared)
        if family.shared_gate:
            yield _whole(f"{place}.{family.shared_name}_gate", hidden)


def shared_inner(config: Config, family: Family) -> int:
    """Return the inner size of all shared experts of a layer; 0: there are none."""
    number, key = family.shared
    return (integer_at(config, number) if isinstance(number, str) else number) * integer_at(
        config, key
    )
