"""GPUs and sizes of models: published figures, quantizations, and what is refused by name."""

from typing import Any

import pytest

from toolkit.catalogue.caches import groups_of_config
from toolkit.catalogue.classes import of_config
from toolkit.catalogue.gpus import gpu_of
from toolkit.catalogue.known import KNOWN, known_model
from toolkit.catalogue.models import cache_parts, facts_of, not_computed, special_of
from toolkit.catalogue.quantization import scheme_of
from toolkit.errors import InputError

# Published: the parameters in the models' safetensors on the hub, and per token in their reports.
PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.3-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "mistral-small-24b": 23_572_403_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v3": 671_026_419_200,
}
KV_BYTES = {
    "llama-3.1-8b": 131_072,
    "llama-3.3-70b": 327_680,
    "qwen3-8b": 147_456,
    "qwen3-32b": 262_144,
    "qwen3-30b-a3b": 98_304,
    "mistral-small-24b": 163_840,
    "gpt-oss-20b": 49_152,
    "gpt-oss-120b": 73_728,
    "deepseek-v3": 70_272,
}
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
LINEAR = 2 * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 512)  # of both layers
REST = 1000 * 256 + 5 * 256  # embeddings, and the norms


def test_known_models_have_their_published_sizes() -> None:
    facts = {name: facts_of(model.config) for name, model in KNOWN.items()}
    assert {name: one.parameters for name, one in facts.items()} == PARAMETERS
    assert {name: one.kv_bytes_per_token for name, one in facts.items()} == KV_BYTES


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-30b-a3b", 3.35), ("deepseek-v3", 37.6), ("llama-3.1-8b", 8.03)],
)
def test_a_token_uses_the_chosen_experts(name: str, billions: float) -> None:
    assert facts_of(KNOWN[name].config).active_parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_a_known_model_is_found_by_its_name_and_its_hub_id() -> None:
    for name in ("deepseek-v3", "DeepSeek-V3", "deepseek-ai/DeepSeek-V3"):
        assert known_model(name) is KNOWN["deepseek-v3"]
    assert known_model("deepseek") is None


def test_sizes_of_a_small_model_by_hand() -> None:
    facts = facts_of(TINY)
    assert facts.parameters == LINEAR + REST
    assert facts.weight_bytes == 2 * (LINEAR + REST)
    assert facts.kv_bytes_per_token == 2 * 2 * 2 * 64 * 2
    assert facts.weight_bytes_on(2) == 2 * (LINEAR + 1000 * 256) // 2 + 2 * 5 * 256


@pytest.mark.parametrize(
    ("given", "name", "bytes_per_weight"),
    [
        ({"quant_method": "fp8"}, "fp8", 1 + 4 / 4096),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 1 + 4 / 128**2),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4", 0.5 + 2.5 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "int4", 0.5 + 2.5 / 64),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8", 1 + 2 / 4096),
        ({"quant_method": "mxfp4"}, "mxfp4", 0.5 + 1 / 32),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", 0.5 + 1 / 16),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", 1 + 4 / 4096),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}
                },
            },
            "int4",
            0.5 + 2.5 / 128,
        ),
    ],
)
def test_linear_layers_are_as_small_as_the_config_says(
    given: dict[str, Any], name: str, bytes_per_weight: float
) -> None:
    facts = facts_of({**TINY, "quantization_config": given})
    assert facts.scheme is not None
    assert facts.scheme.name == name
    assert facts.weight_bytes == round(LINEAR * bytes_per_weight + 2 * REST)


@pytest.mark.parametrize(
    "kept",
    [["model.layers.1.mlp.down_proj"], ["re:.*layers\\.1\\.mlp\\.down_proj"], ["*.1.mlp.down*"]],
)
def test_modules_that_the_config_excepts_stay_in_16_bits(kept: list[str]) -> None:
    given = {"quant_method": "mxfp4", "ignore": kept}
    all_small = facts_of({**TINY, "quantization_config": {"quant_method": "mxfp4"}})
    facts = facts_of({**TINY, "quantization_config": given})
    assert facts.weight_bytes - all_small.weight_bytes == round(256 * 512 * (2 - 0.53125))


def test_modules_with_a_scheme_each_are_counted_by_name() -> None:
    layers = {f"model.language_model.layers.{k}.mlp.up_proj": {"quant_algo": "FP8"} for k in (0, 1)}
    layers["model.language_model.layers.1.mlp.down_proj"] = {"quant_algo": "W4A16_NVFP4"}
    layers["lm_head"] = {"quant_algo": "NVFP4"}
    given = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    config = {**TINY, "tie_word_embeddings": False}
    mixed = {**config, "quantization_config": given | {"quantized_layers": layers}}
    saved = 2 * 256 * 512 * (1 - 4 / 4096) + (256 * 512 + 1000 * 256) * (1.5 - 1 / 16)
    assert facts_of(mixed).weight_bytes == facts_of(config).weight_bytes - round(saved)
    with pytest.raises(InputError, match="quantized_layers"):
        facts_of({**config, "quantization_config": given})


@pytest.mark.parametrize(
    ("given", "cache"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "fp8"),
        (
            {
                "quant_algo": "FP8",
                "producer": {"name": "modelopt"},
                "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
            },
            "fp8",
        ),
        ({"quant_method": "fp8"}, "bfloat16"),
    ],
)
def test_a_checkpoint_may_ask_for_a_narrow_cache(given: dict[str, Any], cache: str) -> None:
    facts = facts_of({**TINY, "quantization_config": given})
    assert facts.cache_dtype == cache
    assert facts.kv_bytes_per_token == 2 * 2 * 2 * 64 * (1 if cache == "fp8" else 2)


def test_vllm_quantizes_to_fp8_while_it_loads() -> None:
    assert facts_of(TINY, "fp8").weight_bytes == LINEAR + 2 * REST
    stored = {**TINY, "quantization_config": {"quant_method": "fp8"}}
    assert facts_of(stored, "fp8") == facts_of(stored)


@pytest.mark.parametrize(
    ("change", "quantization", "named"),
    [
        ({"model_type": "lama", "layer_scales": 2}, "", "layer_scales"),
        ({"model_type": None}, "", "model_type"),
        ({"vocab_size": None}, "", "vocab_size"),
        ({"torch_dtype": "int3"}, "", "int3"),
        ({"hybrid_override_pattern": "M-M*"}, "", "Mamba"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "", "linear attention"),
        ({"index_topk": 2048}, "", "sparse"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "", "bitsandbytes"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "", "3 bits"),
        ({"quantization_config": {"quant_method": "fp8"}}, "awq", "awq"),
        (
            {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 4}}},
            "",
            "KV cache",
        ),
        ({}, "awq", "awq"),
        ({}, "fp9", "'fp8'"),
    ],
)
def test_what_is_not_known_is_named(change: dict[str, Any], quantization: str, named: str) -> None:
    with pytest.raises(InputError) as caught:
        facts_of({**TINY, **change}, quantization)
    assert named in caught.value.whole
    assert "\n" not in caught.value.whole


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"sliding_window": 128}, (2, 128)),
        ({"sliding_window": None}, (0, 0)),
        ({"model_type": "mistral"}, (2, 4096)),  # transformers' default
        ({"model_type": "mistral", "sliding_window": None}, (0, 0)),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, (0, 0)),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 4096,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (1, 4096),
        ),
        ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}, (1, 64)),
        ({"sliding_window": 64, "layer_types": ["full_attention", "full_attention"]}, (0, 0)),
        ({"model_type": "mimo", "sliding_window": 64, "use_sliding_window": False}, (0, 0)),
        ({"sliding_window": 64, "hybrid_layer_pattern": [0, 1]}, (1, 64)),
    ],
)
def test_sliding_windows_are_seen(change: dict[str, Any], windows: tuple[int, int]) -> None:
    special = special_of({**TINY, "max_position_embeddings": 8192, **change})
    assert special.windows == windows


@pytest.mark.parametrize(
    ("change", "longest", "slides"),
    [
        ({"model_type": "phi3", "sliding_window": 262144}, 0, False),  # Phi-4-mini
        ({"model_type": "mistral", "sliding_window": 131072}, 0, False),
        ({"model_type": "mistral", "sliding_window": 32768}, 0, True),
        ({"model_type": "mistral", "sliding_window": 32768}, 32768, False),
        ({"model_type": "mistral", "sliding_window": 32768}, 32769, True),
        ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}, 64, False),
    ],
)
def test_a_window_that_no_request_passes_is_none(
    change: dict[str, Any], longest: int, slides: bool
) -> None:
    config = {**TINY, "max_position_embeddings": 131072, **change}
    assert bool(special_of(config, longest).windows[0]) == slides
    assert bool(of_config(config, longest)) == slides
    groups = groups_of_config(config, "bfloat16", longest=longest)
    assert groups is not None
    assert any(group.kind == "window" for group in groups) == slides


def test_the_cache_of_mla_is_whole_on_every_gpu() -> None:
    config = KNOWN["deepseek-v3"].config
    assert cache_parts(config, 8) == 1


@pytest.mark.parametrize(
    ("kept", "reasons"),
    [
        (["lm_head"], ["quantized weights (int4)"]),
        (["re:.*self_attn.*", "re:.*shared_experts.*"], []),  # experts alone, as in Kimi K2.5
    ],
)
def test_int4_is_known_of_experts_alone(kept: list[str], reasons: list[str]) -> None:
    weights = {"num_bits": 4, "type": "int", "group_size": 32}
    given = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": weights}}}
    config = {**KNOWN["deepseek-v3"].config, "quantization_config": {**given, "ignore": kept}}
    assert not_computed(config, 8192, scheme_of(config)) == reasons


def test_latent_attention_of_other_sizes_than_were_measured_is_named() -> None:
    config = KNOWN["deepseek-v3"].config
    assert not_computed(config, 8192, None) == []
    [reason] = not_computed({**config, "v_head_dim": 256}, 8192, None)
    assert "MLA" in reason
    assert "v_head_dim 256" in reason


def test_kv_heads_are_repeated_on_more_gpus_than_there_are_heads() -> None:
    config = {**TINY, "num_key_value_heads": 4}
    assert [cache_parts(config, gpus) for gpus in (1, 2, 4, 8)] == [1, 2, 4, 4]


MINIMAX = {
    "model_type": "minimax_m2",
    "num_hidden_layers": 62,
    "hidden_size": 3072,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 1536,
    "vocab_size": 200064,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
    "max_position_embeddings": 196608,
    "attn_type_list": [1] * 62,
}


def test_minimax_m2_has_its_published_size_and_full_attention() -> None:
    facts = facts_of(MINIMAX)
    assert facts.parameters == pytest.approx(229e9, rel=0.005)  # by its card
    assert facts.active_parameters == pytest.approx(11e9, rel=0.05)  # 10, and two tables
    assert not facts.special.states
    with pytest.raises(InputError):
        facts_of(MINIMAX | {"attn_type_list": [0, 1] * 31})


@pytest.mark.parametrize(
    ("name", "named"), [("h100", "h100-sxm"), ("rtx4090", "rtx-4090"), ("tpu", "mi300x")]
)
def test_an_unknown_gpu_names_the_nearest(name: str, named: str) -> None:
    with pytest.raises(InputError) as caught:
        gpu_of(name)
    assert named in caught.value.hint
