"""The general rule for a model of a family that is not in the table: layers as Llama's, with
experts or without.

The rule is taken only if every key of the config is known to say nothing else, or if the weights
agree with the index of the checkpoint.
"""

from __future__ import annotations

from toolkit.catalogue.families import FAMILIES, Family
from toolkit.catalogue.layers import BY_LAYER, OUTER, text_config
from toolkit.catalogue.quantization import Config
from toolkit.errors import InputError

RULE = Family(
    "general rule",
    (),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
    qk_norm="head",
    qk_norm_if="use_qk_norm",
    shared=("n_shared_experts", "moe_intermediate_size"),
)
INDEX = "model.safetensors.index.json"
MOST_OFF = 0.005  # of the bytes in the index
BY_HAND = (
    "write its recipe by hand, with model.kv_bytes_per_token and model.weight_bytes (docs/"
    "reference/recipe.md), and measure it: llmctl profile"
)
GATED = ("silu", "swiglu", "swish")  # activations of an MLP of three matrices
# Keys of config.json that the rule reads, and those that leave sizes as they are.
READ = frozenset(
    [
        *("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
        *("attention_bias", "mlp_bias", "use_qk_norm", "num_local_experts", "num_experts"),
        *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"),
        *("first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers"),
        *("sliding_window", "use_sliding_window", "sliding_window_pattern", "max_window_layers"),
        *("layer_types", "hidden_act", *OUTER),
    ]
)
HARMLESS = frozenset(
    [
        *("architectures", "auto_map", "transformers_version", "_name_or_path", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "pretraining_tp"),
        *("rms_norm_eps", "layer_norm_eps", "layernorm_epsilon", "norm_eps", "attention_dropout"),
        *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_dim"),
        *("norm_topk_prob", "scoring_func", "routed_scaling_factor", "router_aux_loss_coef"),
        *("topk_method", "topk_group", "n_group", "output_router_logits", "hidden_dropout"),
        *("is_encoder_decoder", "torchscript", "unsloth_version", "resid_pdrop", "embd_pdrop"),
    ]
)


def general_family(config: Config, stored_bytes: int) -> Family:
    """Return the rule's layout for a config of a family that is not in the table.

    Args:
        stored_bytes: of all weights, by the checkpoint's index; 0: there is none.

    Raises `InputError` for a model with more than text, and for keys that the rule does not know
    where no index can check it.
    """
    text = text_config(config)
    kind = str(text.get("model_type"))[:80]
    problem = f"model_type '{kind}': its sizes are not known"
    known = ", ".join(sorted(FAMILIES))
    if text is not config:
        raise InputError(f"{problem}, nor those of what it sees or hears", BY_HAND)
    others = [key for key in text if key not in READ | HARMLESS and text[key] not in (None, False)]
    others = [str(key)[:40] for key in others if key not in BY_LAYER or text[key]]
    if text.get("hidden_act") not in GATED:
        others.append("hidden_act")
    if others and not stored_bytes:
        keys = f"{', '.join(others[:4])}{' and others' if len(others) > 4 else ''}"
        remedy = f"put {INDEX} beside its config.json, which checks the general rule, or {BY_HAND}"
        raise InputError(
            f"{problem}, and the general rule does not know {keys}", f"{remedy}; known are {known}"
        )
    return RULE


def refuse_other(kind: str, weight_bytes: int, stored_bytes: int) -> None:
    """Raise `InputError` where the rule's weights are not those in the checkpoint's index."""
    off = weight_bytes / stored_bytes - 1.0
    if abs(off) > MOST_OFF:
        problem = f"model_type '{kind}': the general rule counts {weight_bytes:,} bytes of weights"
        raise InputError(f"{problem}, and {INDEX} has {stored_bytes:,} ({off:+.1%})", BY_HAND)
