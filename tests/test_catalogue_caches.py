"""The cache groups that vLLM makes of a model, from its config.json alone."""

from typing import Any

import pytest

from toolkit.catalogue.caches import (
    bytes_per_block,
    groups_of_config,
    is_plain,
    logged_tokens,
    longest_blocks,
    row_bytes,
    window_of,
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
        (QWEN, [*[("state", 12)] * 3, ("full", 12)], 827),
    ],
)
def test_groups_and_blocks_are_those_of_vllm(config, groups, blocks) -> None:
    """vLLM's own grouping of these models without weights, with blocks of 32 tokens and 20 GiB."""
    found = groups_of_config(config, "bfloat16", block=32)
    assert found is not None
    assert [(group.kind, group.layers) for group in found] == groups
    assert 20 * GIB // bytes_per_block(found) == blocks
    assert {group.block for group in found} == ({1056} if config is QWEN else {32})


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
    assert not window_of(groups)


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
