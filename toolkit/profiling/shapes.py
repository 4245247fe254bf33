"""The shapes of a recipe's model, as the operators of a GPU need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from toolkit.catalogue.families import FAMILIES, Family
from toolkit.catalogue.general import RULE
from toolkit.catalogue.layers import experts_of, heads_of, integer_at, layers_of, text_config
from toolkit.catalogue.models import CACHE_BYTES, special_of
from toolkit.catalogue.quantization import Scheme, scheme_of
from toolkit.catalogue.weights import condition_holds, shared_inner
from toolkit.errors import InputError
from toolkit.estimators.gpu_operators import ACTIVATION_BYTES, ModelShapes
from toolkit.files.new_recipe import EXPERT_PARALLEL
from toolkit.files.recipe import ModelSpec, Recipe

NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
ATTENTION = ("q_proj", "o_proj")
MLP = ("gate_proj",)
NORM_REDUCES = 2  # of norms over all heads of several GPUs: of queries, of keys


def shapes_of(recipe: Recipe) -> ModelShapes:
    """Return the shapes of the recipe's model.

    Raises `InputError` for sizes that `model.config` lacks, for a quantization that keeps some of
    the linear layers in 16 bits, for layers with and without experts in turn, and for a KV cache
    that the checkpoint has narrower than the recipe.
    """
    model = recipe.model
    config = text_config(model.config)
    family = FAMILIES.get(str(config.get("model_type")), RULE)
    experts, chosen = experts_of(config)
    layers = layers_of(config)
    dense = sum(layer.feed == "dense" for layer in layers)
    if experts and any(layer.feed != "experts" for layer in layers[dense:]):
        problem = "an analytic profile knows dense layers only before those with experts"
        raise InputError(problem, "measure it: llmctl profile RECIPE")
    needed = [family.dense_inner, *NEEDED] if dense else [*NEEDED]
    if experts and family is not RULE:
        needed.append(family.expert_inner)
    if missing := [f"model.config.{key}" for key in needed if not integer_at(config, key)]:
        raise InputError(f"an analytic profile needs {', '.join(missing)}", "see its config.json")
    heads, kv_heads, head_dim = heads_of(config)
    hidden = integer_at(config, "hidden_size")
    vllm = recipe.engine.vllm
    cache = vllm.kv_cache_dtype if vllm else None
    ranks = recipe.engine.tensor_parallel_size
    weights, expert_weights, wanted = precisions(model, family)
    if wanted and cache is None:
        problem = f"the checkpoint asks for a KV cache in {wanted}, and the recipe names none"
        raise InputError(problem, f"set engine.vllm.kv_cache_dtype: {wanted}")
    window_layers, window = special_of(model.config, model.max_model_len).windows
    inner = integer_at(config, family.dense_inner)
    normed = family.qk_norm if condition_holds(config, family.qk_norm_if) else ""
    shapes = ModelShapes(
        layers=len(layers),
        hidden=hidden,
        intermediate=inner,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=integer_at(config, "vocab_size"),
        weights=weights,
        expert_weights=expert_weights,
        qk_norm=bool(normed),
        norm_reduces=NORM_REDUCES if normed == "all" else 0,
        cache_bytes=CACHE_BYTES.get(cache or "", ACTIVATION_BYTES),
        window=window,
        window_layers=window_layers,
    )
    if not experts:
        return shapes
    return replace(
        shapes,
        intermediate=shared_inner(config, family),
        experts=experts,
        experts_per_token=chosen,
        expert_intermediate=integer_at(config, family.expert_inner) or inner,
        dense_layers=dense,
        dense_intermediate=inner,
        whole_experts=ranks > 1 and vllm is not None and EXPERT_PARALLEL in vllm.args,
    )


def precisions(model: ModelSpec, family: Family = RULE) -> tuple[str, str, str]:
    """Return the precisions of linear layers and of experts, as `ModelShapes` names them, and the
    dtype of the KV cache that the checkpoint asks for; '': the model's.
    """
    scheme = scheme_of(text_config(model.config), model.quantization or "")
    if scheme is None:
        return model.dtype, model.dtype, ""
    name = "fp8_block" if scheme.name == "fp8" and scheme.block else scheme.name
    has_experts = special_of(model.config).experts > 0
    experts = kept(scheme, [f"{family.part('experts')}.experts.0.{family.expert_names[0]}"])
    names = [f"{family.part('attention')}.{one}" for one in ATTENTION]
    names += [] if has_experts else [f"{family.part('mlp')}.{one}" for one in MLP]
    linear = kept(scheme, names)
    if len(linear) not in (0, len(names)):
        problem = f"an analytic profile does not know {name} weights beside {', '.join(linear)}"
        raise InputError(f"{problem} in 16 bits", "measure it: llmctl profile RECIPE")
    weights = model.dtype if linear else name
    return weights, model.dtype if experts and has_experts else name, scheme.cache


def kept(scheme: Scheme, names: Sequence[str]) -> list[str]:
    """Return which of a layer's modules keep 16 bits, by the first layers of the model."""
    places = [f"model.layers.{layer}." for layer in range(2)]
    return [name for name in names if any(scheme.keeps(place + name) for place in places)]
