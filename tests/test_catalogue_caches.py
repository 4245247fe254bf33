"""The cache groups that vLLM makes of a model, from its config.json alone."""

from typing import Any

import pytest
from test_families import MODELS

from toolkit.catalogue.caches import (
    bytes_per_block,
    groups_of_config,
    is_plain,
    logged_tokens,
    longest_blocks,
    read_tokens,
    row_bytes,
)
from toolkit.catalogue.resolved import CacheGroup
from toolkit.units import GIB

GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
GEMMA: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "hidden_size": 5376,
        "sliding_window": 1024,
    },
}
QWEN: dict[str, Any] = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "full_attention_interval": 4,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


@pytest.mark.parametrize(
    ("config", "groups", "blocks"),
    [
        (GPT_OSS, [("window", 18), ("full", 18)], 18_204),
        (GEMMA, [*[("window", 9)] * 4, *[("window", 8)] * 2, ("full", 10)], 8_192),
        (QWEN, [*[("state", 12)] * 3, ("full", 12)], 1606),
    ],
)
def test_groups_and_blocks_are_those_of_vllm(config, groups, blocks) -> None:
    """vLLM's own grouping of these models without weights, with blocks of 32 tokens and 20 GiB, and
    with states in the model's dtype, as on a GPU: on a CPU vLLM takes 32 bits for them.
    """
    found = groups_of_config(config, "bfloat16", block=32)
    assert found is not None
    assert [(group.kind, group.layers) for group in found] == groups
    assert 20 * GIB // bytes_per_block(found) == blocks
    assert {group.block for group in found} == ({544} if config is QWEN else {32})


@pytest.mark.parametrize(
    ("model", "groups", "blocks"),
    [
        ("Qwen/Qwen3.5-27B", [*[("state", 16, 800)] * 3, ("full", 16, 800)], 409),
        ("Qwen/Qwen3.5-35B-A3B", [*[("state", 10, 1056)] * 3, ("full", 10, 1056)], 992),
        (
            "nvidia/Nemotron-H-56B-Base-8K",
            [*[("state", 9, 4128)] * 6, ("full", 10, 4128)],
            127,
        ),
        (
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            [*[("state", 6, 2112)] * 3, ("state", 5, 2112), ("full", 6, 2112)],
            1654,
        ),
        ("lfm2", [*[("state", 1, 32)] * 3, ("full", 1, 32)], 655_360),
        ("qwen3_next", [*[("state", 1, 96)] * 3, ("full", 1, 96)], 218_453),
        ("cohere2", [*[("window", 1, 32)] * 3, ("full", 1, 32)], 655_360),
        ("google/gemma-4-26B-A4B", [*[("window", 5, 32)] * 5, ("full", 5, 64)], 16_384),
        ("nvidia/Gemma-4-31B-IT-NVFP4", [*[("window", 10, 32)] * 5, ("full", 10, 64)], 4096),
    ],
)
def test_groups_of_families_are_those_of_vllm(model, groups, blocks) -> None:
    """vLLM 0.32's own groups of the model's layers, built without weights: 20 GiB, 32 tokens."""
    found = groups_of_config(MODELS[model]["config"], "bfloat16", block=32)
    assert found is not None
    assert [(group.kind, group.layers, group.block) for group in found] == groups
    assert 20 * GIB // bytes_per_block(found) == blocks


def test_layers_with_fewer_bytes_for_a_token_get_longer_blocks() -> None:
    """vLLM 0.32 of MiMo-V2-Flash, with blocks of 16 tokens: 29,127 blocks in 20 GiB."""
    found = groups_of_config(MODELS["XiaomiMiMo/MiMo-V2-Flash"]["config"], "bfloat16")
    assert found is not None
    groups = [("full", 9, 32), *[("window", 8, 16)] * 4, ("window", 7, 16)]
    assert [(group.kind, group.layers, group.block) for group in found] == groups
    assert 20 * GIB // bytes_per_block(found) == 29_127


@pytest.mark.parametrize(("longest", "tokens"), [(8_192, 290_696), (131_072, 547_632)])
def test_the_capacity_in_tokens_depends_on_the_longest_request(longest: int, tokens: int) -> None:
    """What vLLM logs for gpt-oss-120b's 18,204 blocks, one of which it never gives out."""
    groups = groups_of_config(GPT_OSS, "bfloat16", block=32)
    assert groups is not None
    assert logged_tokens(groups, 18_203, longest, 8_192) == tokens


def test_a_window_needs_blocks_for_the_passes_under_way() -> None:
    """16-token blocks, a window of 1,024 tokens: 1,089 blocks with two passes of 8,192 tokens, 321
    with two of 2,048.
    """
    window = [CacheGroup("window", "SlidingWindowSpec", 16, 1, 1, window=1024)]
    assert longest_blocks(window, 131_072, 16_384) == 1_089
    assert longest_blocks(window, 131_072, 4_096) == 321


def test_one_cache_is_plain() -> None:
    llama = {**GPT_OSS, "model_type": "llama", "sliding_window": None, "layer_types": None}
    groups = groups_of_config(llama, "bfloat16")
    assert groups is not None
    assert is_plain(groups)
    assert row_bytes(llama, "bfloat16", 8192) is None
    assert not read_tokens(groups)


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["sliding_attention", "mamba"] * 18},
        {"kv_lora_rank": 512},
        {"num_key_value_heads": 0, "num_attention_heads": 0},
    ],
)
def test_caches_that_are_not_known_have_no_groups(change: dict[str, Any]) -> None:
    assert groups_of_config({**GPT_OSS, **change}, "bfloat16") is None
