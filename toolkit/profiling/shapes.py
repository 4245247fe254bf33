"""The shapes of a recipe's model, as the operators of a GPU need them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.catalogue.caches import state_number_bytes
from toolkit.catalogue.families import FAMILIES, Family
from toolkit.catalogue.general import RULE
from toolkit.catalogue.layers import Layer, experts_of, integer_at, layers_of, text_config
from toolkit.catalogue.models import CACHE_BYTES, Special, special_of
from toolkit.catalogue.quantization import Config, Scheme, scheme_of
from toolkit.catalogue.weights import condition_holds, shared_inner
from toolkit.errors import InputError
from toolkit.estimators.model_shapes import (
    ACTIVATION_BYTES,
    AttentionShapes,
    DeltaShapes,
    LatentShapes,
    LayerShapes,
    Mixer,
    ModelShapes,
)
from toolkit.files.new_recipe import EXPERT_PARALLEL
from toolkit.files.recipe import Recipe

NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
# Modules of which an engine makes one GEMM, and the one that makes the output.
ATTENTION = (("q_proj", "k_proj", "v_proj"), ("o_proj",))
LATENT = (("kv_a_proj_with_mqa", "kv_b_proj"), ("o_proj",))
DELTA = (("in_proj_qkv", "in_proj_z"), ("out_proj",))
NORM_REDUCES = 2  # of norms over all heads of several GPUs: of queries, of keys
NORMS_OF_BOTH = 3  # further norms of a layer with a dense MLP and experts (Gemma 4)


def shapes_of(recipe: Recipe) -> ModelShapes:
    """Return the shapes of the recipe's model.

    Raises `InputError` for sizes that `model.config` lacks, for a quantization that keeps a part of
    what an engine multiplies at once in 16 bits, and for a KV cache that the checkpoint has
    narrower than the recipe.
    """
    model = recipe.model
    config = text_config(model.config)
    family = FAMILIES.get(str(config.get("model_type")), RULE)
    experts, chosen = experts_of(config)
    layers = layers_of(config)
    needed = [*NEEDED]
    if any(layer.feed in ("dense", "both") and not layer.inner for layer in layers):
        needed.append(family.dense_inner)
    if experts and family is not RULE:
        needed.append(family.expert_inner)
    if missing := [f"model.config.{key}" for key in needed if not integer_at(config, key)]:
        raise InputError(f"an analytic profile needs {', '.join(missing)}", "see its config.json")
    vllm = recipe.engine.vllm
    cache = vllm.kv_cache_dtype if vllm else None
    scheme = scheme_of(config, model.quantization or "")
    if scheme and scheme.cache and cache is None:
        problem = f"the checkpoint asks for a KV cache in {scheme.cache}, and the recipe names none"
        raise InputError(problem, f"set engine.vllm.kv_cache_dtype: {scheme.cache}")
    special = special_of(model.config, model.max_model_len)
    reader = _Reader(config, family, scheme, model.dtype, special)
    sorts = Counter(reader.layer(number, layer) for number, layer in enumerate(layers))
    return ModelShapes(
        hidden=integer_at(config, "hidden_size"),
        vocab=integer_at(config, "vocab_size"),
        sorts=tuple(replace(sort, count=count) for sort, count in sorts.items()),
        experts=experts,
        experts_per_token=chosen,
        expert_intermediate=integer_at(config, family.expert_inner)
        or integer_at(config, family.dense_inner),
        cache_bytes=CACHE_BYTES.get(cache or "", ACTIVATION_BYTES),
        window=special.best + 1 if special.best else special.windows[1],
        whole_experts=experts > 0
        and recipe.engine.tensor_parallel_size > 1
        and vllm is not None
        and EXPERT_PARALLEL in vllm.args,
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the shapes of a model's layers.

    Attributes:
        scheme: of its weights; None: all have `dtype`.
        special: of windows and sparse attention.
    """

    config: Config
    family: Family
    scheme: Scheme | None
    dtype: str
    special: Special

    def layer(self, number: int, layer: Layer) -> LayerShapes:
        """Return one layer's shapes."""
        config = self.config
        family = self.family
        place = f"model.layers.{number}."
        parts = bool(layer.mixer) + bool(layer.feed)
        norms = family.norms * parts // 2
        inner = 0
        weights = self.dtype
        name = family.part("mlp")
        if layer.feed in ("dense", "both"):
            inner = layer.inner or integer_at(config, family.dense_inner)
        if layer.feed == "experts":
            inner = shared_inner(config, family)
            name = f"{family.part('experts')}.{family.shared_name}"
        if inner:
            weights = self._precision(f"{place}{name}", ("gate_proj", "up_proj", "down_proj"))
        has_experts = layer.feed in ("experts", "both")
        expert_weights = self.dtype
        if has_experts:
            name = f"{place}{family.part('experts')}.experts.0"
            expert_weights = self._precision(name, family.expert_names)
        both = layer.feed == "both"
        return LayerShapes(
            count=1,
            mixer=self._mixer(place, layer),
            inner=inner,
            experts=has_experts,
            norms=norms + NORMS_OF_BOTH * both,
            reduces=parts + both,
            inner_weights=weights,
            expert_weights=expert_weights,
        )

    def _mixer(self, place: str, layer: Layer) -> Mixer | None:
        config = self.config
        family = self.family
        if layer.mixer == "linear":
            name = f"{place}{family.part('linear')}"
            return DeltaShapes(
                heads=integer_at(config, "linear_num_value_heads"),
                key_heads=integer_at(config, "linear_num_key_heads"),
                key_dim=integer_at(config, "linear_key_head_dim"),
                value_dim=integer_at(config, "linear_value_head_dim"),
                kernel=integer_at(config, "linear_conv_kernel_dim"),
                state_bytes=state_number_bytes(config, layer.mixer, self.dtype),
                weights=self._precision(name, DELTA[0]),
                out=self._precision(name, DELTA[1]),
            )
        if not layer.mixer:
            return None
        name = f"{place}{family.part('attention')}"
        if rank := integer_at(config, "kv_lora_rank"):
            index_weights = self.dtype
            if self.special.best:
                index_weights = self._precision(f"{name}.indexer", ("wq_b",))
            return LatentShapes(
                rank=rank,
                rope=integer_at(config, "qk_rope_head_dim"),
                plain=integer_at(config, "qk_nope_head_dim"),
                value=integer_at(config, "v_head_dim"),
                query_rank=integer_at(config, "q_lora_rank"),
                heads=layer.heads,
                weights=self._precision(name, LATENT[0]),
                out=self._precision(name, LATENT[1]),
                index_heads=integer_at(config, "index_n_heads") if self.special.best else 0,
                index_dim=integer_at(config, "index_head_dim"),
                index_weights=index_weights,
            )
        normed = family.qk_norm if condition_holds(config, family.qk_norm_if) else ""
        gates = {"query": 1, "head": layer.value_dim}
        return AttentionShapes(
            heads=layer.heads,
            kv_heads=layer.kv_heads,
            head_dim=layer.key_dim,
            value=layer.value_dim,
            window=self.special.windows[1] if layer.mixer == "window" else 0,
            gate=gates.get(family.gate, 0),
            qk_norm=bool(normed),
            norm_reduces=NORM_REDUCES if normed == "all" else 0,
            weights=self._precision(name, ATTENTION[0]),
            out=self._precision(name, ATTENTION[1]),
        )

    def _precision(self, place: str, names: Sequence[str]) -> str:
        """Return the precision that all these modules have, named like in `ModelShapes`."""
        if self.scheme is None:
            return self.dtype
        scheme = self.scheme
        kept = [name for name in names if scheme.keeps(f"{place}.{name}")]
        name = "fp8_block" if scheme.name == "fp8" and scheme.block else scheme.name
        if len(kept) not in (0, len(names)):
            words = f"{name} weights beside {', '.join(kept)} in 16 bits"
            problem = f"an analytic profile does not know {words}"
            raise InputError(problem, "measure it: llmctl profile RECIPE")
        return self.dtype if kept else name
