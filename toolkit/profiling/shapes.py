"""The shapes of a recipe's model, as the operators of a GPU need them."""

from __future__ import annotations

from dataclasses import replace

from toolkit.catalogue.models import (
    CACHE_BYTES,
    experts_of,
    integer_at,
    special_of,
    text_config,
)
from toolkit.catalogue.quantization import Scheme, scheme_of
from toolkit.errors import InputError
from toolkit.estimators.gpu_operators import ACTIVATION_BYTES, ModelShapes
from toolkit.files.new_recipe import EXPERT_PARALLEL
from toolkit.files.recipe import ModelSpec, Recipe

QK_NORM = ("qwen3", "qwen3_moe", "minimax_m2")  # types that normalize queries and keys
NORM_REDUCES = {"minimax_m2": 2}  # of types with norms over all heads: of queries, of keys
NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
)
ATTENTION = ("self_attn.q_proj", "self_attn.o_proj")
MLP = ("mlp.gate_up_proj", "mlp.gate_proj")
EXPERT = ("mlp.experts", "mlp.experts.0.gate_proj")


def shapes_of(recipe: Recipe) -> ModelShapes:
    """The shapes of the recipe's model.

    Raises `InputError` for sizes that `model.config` lacks, for a quantization that keeps some of
    the linear layers in 16 bits, and for layers with and without experts in turn.
    """
    model = recipe.model
    config = text_config(model.config)
    if missing := [f"model.config.{key}" for key in NEEDED if not integer_at(config, key)]:
        raise InputError(f"an analytic profile needs {', '.join(missing)}", "see its config.json")
    heads = integer_at(config, "num_attention_heads")
    hidden = integer_at(config, "hidden_size")
    intermediate = integer_at(config, "intermediate_size")
    vllm = recipe.engine.vllm
    cache = vllm.kv_cache_dtype if vllm else None
    ranks = recipe.engine.tensor_parallel_size
    weights, expert_weights = precisions(model)
    window_layers, window = special_of(model.config, model.max_model_len).windows
    shapes = ModelShapes(
        layers=integer_at(config, "num_hidden_layers"),
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=integer_at(config, "num_key_value_heads") or heads,
        head_dim=integer_at(config, "head_dim") or hidden // heads,
        vocab=integer_at(config, "vocab_size"),
        weights=weights,
        expert_weights=expert_weights,
        qk_norm=config.get("model_type") in QK_NORM,
        norm_reduces=NORM_REDUCES.get(str(config.get("model_type")), 0),
        cache_bytes=CACHE_BYTES.get(cache or "", ACTIVATION_BYTES),
        window=window,
        window_layers=window_layers,
    )
    experts, chosen = experts_of(config)
    if not experts:
        return shapes
    if config.get("mlp_only_layers") or integer_at(config, "decoder_sparse_step") > 1:
        problem = "an analytic profile knows dense layers only before those with experts"
        raise InputError(problem, "measure it: llmctl profile RECIPE")
    each = integer_at(config, "moe_intermediate_size") or intermediate
    shared = integer_at(config, "n_shared_experts") * each
    return replace(
        shapes,
        intermediate=shared or integer_at(config, "shared_expert_intermediate_size"),
        experts=experts,
        experts_per_token=chosen,
        expert_intermediate=each,
        dense_layers=integer_at(config, "first_k_dense_replace"),
        dense_intermediate=intermediate,
        whole_experts=ranks > 1 and vllm is not None and EXPERT_PARALLEL in vllm.args,
    )


def precisions(model: ModelSpec) -> tuple[str, str]:
    """The precisions of linear layers and of experts, as `ModelShapes` names them."""
    scheme = scheme_of(model.config, model.quantization or "")
    if scheme is None:
        return model.dtype, model.dtype
    name = "fp8_block" if scheme.name == "fp8" and scheme.block else scheme.name
    experts = kept(scheme, EXPERT)
    has_experts = special_of(model.config).experts > 0
    names = ATTENTION if has_experts else (*ATTENTION, *MLP)
    linear = kept(scheme, names)
    if len(linear) not in (0, len(names)):
        problem = f"an analytic profile does not know {name} weights beside {', '.join(linear)}"
        raise InputError(f"{problem} in 16 bits", "measure it: llmctl profile RECIPE")
    return model.dtype if linear else name, model.dtype if experts and has_experts else name


def kept(scheme: Scheme, names: tuple[str, ...]) -> list[str]:
    """Which of a layer's modules keep 16 bits, by the first layers of the model."""
    places = [f"model.layers.{layer}." for layer in range(2)]
    return [name for name in names if any(scheme.keeps(place + name) for place in places)]
