"""The shapes of a recipe's model, as the operators of a GPU need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from toolkit.catalogue.families import FAMILIES, Family
from toolkit.catalogue.general import RULE
from toolkit.catalogue.layers import experts_of, heads_of, integer_at, layers_of, text_config
from toolkit.catalogue.models import CACHE_BYTES, special_of
from toolkit.catalogue.quantization import Config, Scheme, scheme_of
from toolkit.catalogue.weights import condition_holds, shared_inner
from toolkit.errors import InputError
from toolkit.estimators.gpu_operators import ACTIVATION_BYTES, LatentShapes, ModelShapes
from toolkit.files.new_recipe import EXPERT_PARALLEL
from toolkit.files.recipe import ModelSpec, Recipe

NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
ATTENTION = ("q_proj", "o_proj")
LATENT = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLP = "gate_proj"
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
    weights, mlp_weights, expert_weights, wanted = precisions(model, family)
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
        mlp_weights=mlp_weights,
        expert_weights=expert_weights,
        qk_norm=bool(normed),
        norm_reduces=NORM_REDUCES if normed == "all" else 0,
        cache_bytes=CACHE_BYTES.get(cache or "", ACTIVATION_BYTES),
        window=window,
        window_layers=window_layers,
        latent=latent_of(config),
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


def latent_of(config: Config) -> LatentShapes | None:
    """Return the sizes of a model's latent attention; None: it has none."""
    rank = integer_at(config, "kv_lora_rank")
    if not rank:
        return None
    return LatentShapes(
        rank=rank,
        rope=integer_at(config, "qk_rope_head_dim"),
        plain=integer_at(config, "qk_nope_head_dim"),
        value=integer_at(config, "v_head_dim"),
        query_rank=integer_at(config, "q_lora_rank"),
    )


def precisions(model: ModelSpec, family: Family = RULE) -> tuple[str, str, str, str]:
    """Return the precisions of attention, of dense MLPs and shared experts, and of experts, as
    `ModelShapes` names them, and the dtype of the KV cache that the checkpoint asks for; '': the
    model's.
    """
    config = text_config(model.config)
    scheme = scheme_of(config, model.quantization or "")
    if scheme is None:
        return model.dtype, model.dtype, model.dtype, ""
    name = "fp8_block" if scheme.name == "fp8" and scheme.block else scheme.name
    special = special_of(config)
    place = family.part("attention")
    attention = [f"{place}.{one}" for one in (LATENT if special.latent else ATTENTION)]
    experts = family.part("experts")
    mlps = []
    if any(layer.feed == "dense" for layer in layers_of(config)):
        mlps.append(f"{family.part('mlp')}.{MLP}")
    if shared_inner(config, family):
        mlps.append(f"{experts}.{family.shared_name}.{MLP}")

    def precision(modules: Sequence[str]) -> str:
        """The precision that all the modules have."""
        in_16_bits = kept(scheme, modules)
        if len(in_16_bits) not in (0, len(modules)):
            words = f"{name} weights beside {', '.join(in_16_bits)} in 16 bits"
            problem = f"an analytic profile does not know {words}"
            raise InputError(problem, "measure it: llmctl profile RECIPE")
        return model.dtype if in_16_bits else name

    if not special.experts:
        weights = precision([*attention, *mlps])
        return weights, weights, weights, scheme.cache
    weights = precision(attention)
    each = precision([f"{experts}.experts.0.{family.expert_names[0]}"])
    return weights, precision(mlps) if mlps else weights, each, scheme.cache


def kept(scheme: Scheme, names: Sequence[str]) -> list[str]:
    """Return which of a layer's modules keep 16 bits, by the first layers of the model."""
    places = [f"model.layers.{layer}." for layer in range(2)]
    return [name for name in names if any(scheme.keeps(place + name) for place in places)]
